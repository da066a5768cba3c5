"""Reads Examples, independent of the file format, and guesses the fields of those of others."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.media import guess
from shardkit.errors import FormatError, ShardkitError, drop_option
from shardkit.formats.base import KEY, Columns, Ranges, ShardReader, numbered_key, unforeseen
from shardkit.formats.tfrecord.example import (
    EXACT,
    FLOATS,
    INTS,
    LISTS,
    Feature,
    decoded,
    feature,
    features,
    place,
)
from shardkit.helpers.names import is_safe
from shardkit.sample import JsonText, Sample, key_of
from shardkit.schema import (
    RESERVED,
    Array,
    Bytes,
    FieldType,
    Float,
    Image,
    Images,
    Int,
    Json,
    Scalar,
    Text,
)
from shardkit.storage import fs
from shardkit.storage.blobs import ABSENT, Blobs, Numbers
from shardkit.storage.byte_source import ByteSource

_SUFFIX = re.compile(r"\.(tfrecord|array_?record)")
_LOOKED_AT, _BYTES = 100, 8 << 20  # limits for the evenly spaced records that are examined
_LABELS = 16 << 20  # bytes that are read of a file with class names
Spans = dict[str, tuple[int, int]]  # the bytes of features, by name
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class ExampleReader(ShardReader):
    """Reads shards whose records are Examples, independent of the file format."""

    def __init__(self, path: Path, layout: dict[str, Any], source: ByteSource) -> None:
        super().__init__(path, layout, source)
        self._in_head = {n for n, k in self.schema.items() if isinstance(k, Scalar)}
        self._relaxed = self.schema.with_optional(layout.get("guessed", ()))
        self._known = set(layout["known"]) if "known" in layout else None
        self._texts = frozenset(layout.get("texts", ()))
        lists = {n for n, k in self.schema.items() if isinstance(k, (Array, Images))}
        self._lists = self._texts | lists
        self._prefix = key_of(_SUFFIX.sub("", path.name))

    @abstractmethod
    def record(self, position: int, numbers: bool) -> tuple[bytes, bool]:
        """An Example, and True; for `numbers` only it may be just its beginning, and False."""

    def key(self, position: int) -> str:
        """Return the generated key of a record without a stored one."""
        return numbered_key(self._prefix, position)

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        numbers = fields is not None and self._in_head.issuperset(fields)
        data, whole = self.record(position, numbers)
        spans = self._features(position, data, whole)
        every = [name for name in self.schema if fields is None or name in fields]
        return self._sample(position, data, spans, every, json_text)

    def _features(self, position: int, data: bytes, whole: bool) -> Spans:
        spans = features(data, whole=whole)
        if self._known is not None and (others := spans.keys() - self._known):
            error = unforeseen(min(others), "feature")
            raise error.located(offset=self.offset(position, ""))
        return spans

    def _sample(
        self,
        position: int,
        data: bytes,
        spans: Spans,
        fields: Collection[str],
        json_text: bool = False,
    ) -> Sample:
        """Return the values of an Example's features."""

        def get(name: str, ending: str = "") -> Feature | None:
            span = spans.get(name + ending)
            return None if span is None else feature(data, span)

        key = get(KEY)
        sample: Sample = {KEY: self.key(position)}
        if key is not None:
            sample[KEY] = key.one().decode()
        for name in fields:
            kind, found = (self._relaxed if json_text else self.schema)[name], get(name)
            if found is None or _is_absent(found, name in self._lists):
                if not kind.optional:
                    raise ValueError(f"the record has no value for {name!r}")
            elif name in self._texts:
                value = [str(part, "utf-8") for part in found.parts]
                sample[name] = JsonText.of(value) if json_text else value
            else:
                sample[name] = decoded(kind, found, partial(get, name), json_text=json_text)
        return sample

    @abstractmethod
    def ranges(
        self, positions: npt.NDArray[np.int64], numbers: bool
    ) -> tuple[Numbers, Numbers, bool] | None:
        """Return offsets and sizes of several records, and whether they are whole.

        None if only `record` can read them. `numbers` as there.
        """

    @abstractmethod
    def examples(self, positions: Sequence[int], records: Blobs, whole: bool) -> Blobs:
        """Return the Examples in records that were read; raises ValueError for a damaged one."""

    def plan(self, positions: npt.NDArray[np.int64], fields: Collection[str]) -> Ranges | None:
        found = self.ranges(positions, self._in_head.issuperset(fields))
        if found is None:
            return None
        offsets, sizes, whole = found
        decode = partial(self._columns, positions.tolist(), fields, whole)
        return Ranges(self.source, offsets[None], sizes[None], decode)

    def _columns(
        self, positions: list[int], fields: Collection[str], whole: bool, blobs: list[Blobs]
    ) -> Columns:
        """Return the values of several records. Those that are bytes stay in the buffer."""
        examples = self.examples(positions, blobs[0], whole)
        view, samples, places = examples.data.data, [], []
        kept = [name for name in fields if isinstance(self.schema[name], Bytes)]
        others = [name for name in fields if name not in kept]
        bounds = zip(examples.starts.tolist(), examples.sizes.tolist(), strict=True)
        for position, (start, size) in zip(positions, bounds, strict=True):
            data: Any = view[start : start + size]
            spans = self._features(position, data, whole)
            sample = self._sample(position, data, spans, others)
            if any(value is None for value in sample.values()):
                raise ValueError("a value is null, which would seem absent")
            samples.append(sample)
            places.append([self._place(name, data, spans, start) for name in kept])
        columns: Columns = {name: [s.get(name) for s in samples] for name in (KEY, *others)}
        for name, each in zip(kept, zip(*places, strict=True), strict=True):
            starts, sizes = np.array(each, np.int64).T.copy()
            columns[name] = Blobs(examples.data, starts, sizes)
        return {name: columns[name] for name in (KEY, *fields)}

    def _place(self, name: str, data: bytes, spans: Spans, start: int) -> tuple[int, int]:
        """Return start and size of the bytes of a feature, in an Example that begins at `start`."""
        if name not in spans and self.schema[name].optional:
            return 0, ABSENT
        at, stop = place(data, spans[name])
        return start + at, stop - at


# --- files of other programs ---------------------------------------------------------------------


def scan(path: Path, count: int, read: Callable[[int], bytes]) -> dict[str, Any]:
    """The layout of `count` records: schema, `known` features, and those that are lists of text."""
    samples = _some(path, count, read)
    known = dict.fromkeys(name for sample in samples for name in sample)
    exact = {name + EXACT for name in known}
    fields: dict[str, FieldType] = {}
    unusable: dict[str, ShardkitError] = {}
    texts = []
    for name in [name for name in known if name not in RESERVED | exact]:
        found = [sample[name] for sample in samples if name in sample]
        try:
            kind, many = _type(name, [each for each in found if each.list])
        except ValueError as error:
            what, fix = f"the feature {name!r} cannot be read: {error}", drop_option(name)
            unusable[name] = FormatError(what, fix=f"convert without it: {fix}")
            continue
        there = sum(not _is_absent(each, many) for each in found)
        fields[name] = replace(kind, optional=there < len(samples))
        texts += [name] if many and isinstance(kind, Json) else []
    return {
        "schema": {name: kind.to_json() for name, kind in fields.items()},
        "known": list(known),
        "texts": texts,
        "classes": _classes(path.parent, fields),
        "unusable": unusable,
        "guessed": [n for n, k in fields.items() if len(samples) < count and not k.optional],
        "ignored": {f"feature {name!r}": 1 for name in known if name in RESERVED - {KEY}},
    }


def _classes(folder: Path, fields: dict[str, FieldType]) -> dict[str, list[str]]:
    """Return the class names in TFDS's labels files."""
    found = {}
    for name, kind in fields.items():
        if isinstance(kind, Int) and is_safe(name, flat=True):
            file = folder / f"{name}.labels.txt"
            if file.is_file():
                text = fs.read(file, _LABELS)[:_LABELS].decode("utf-8", "replace")
                found[name] = text.splitlines()
    return found


def _some(path: Path, count: int, read: Callable[[int], bytes]) -> list[dict[str, Feature]]:
    """Return the features of some records."""
    step, left = max(-(-count // _LOOKED_AT), 1), _BYTES
    samples: list[dict[str, Feature]] = []
    problem = "they have no features"
    for number in range(0, count, step):
        if left < 0:
            break
        try:
            data = read(number)
            left -= len(data)
            samples.append({n: feature(data, span) for n, span in features(data).items()})
        except ValueError as error:  # raised again when the record is read
            problem = f"record {number:,}: {error}"
    if count and not any(samples):
        raise FormatError(
            f"none of the examined records can be read: {problem}",
            path=path,
            expected="features that are lists of bytes, floats or int64, and no SequenceExample",
            fix="read them with TensorFlow, and write the samples with shardkit.create",
        )
    return samples


def _is_absent(found: Feature, many: bool) -> bool:
    """Whether a feature has no value. If values are lists (`many`), an empty list is a value."""
    return not found.list or not (many or found.parts)


def _type(name: str, found: list[Feature]) -> tuple[FieldType, bool]:
    """Return the type of a feature, and whether its values are lists."""
    lists = {each.list for each in found}
    if len(lists) > 1:
        raise ValueError("it is " + " and ".join(LISTS[n] for n in sorted(lists)))
    counts = {len(each) for each in found}
    if lists & {INTS, FLOATS}:
        whole = INTS in lists
        if counts == {1}:
            return (Int() if whole else Float()), False
        return Array("<i8" if whole else "<f4", (None,)), True
    values, many = [part for each in found for part in each.parts], not counts <= {0, 1}
    kinds = {guess(value[:64]) for value in values}
    kind = kinds.pop() if len(kinds) == 1 else None
    if many:
        if kind is Image or all(map(_is_text, values)):
            return (Images() if kind is Image else Json()), True
        raise ValueError("its values are lists of bytes, which no field type supports")
    if kind is None and all(map(_is_text, values)):
        kind = Json if name.lower().endswith("json") and all(map(_is_json, values)) else Text
    return (kind or Bytes)(), False


def _is_text(value: bytes) -> bool:
    try:
        return not _CONTROL.search(value.decode())
    except UnicodeDecodeError:
        return False


def _is_json(value: bytes) -> bool:
    try:
        JsonText.checked(value.decode())
    except (ValueError, RecursionError):
        return False
    return True
