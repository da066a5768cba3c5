"""Random access to a TFRecord file, by an index of its records."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.array import load_table
from shardkit.formats.base import KEY, ShardReader, numbered_key, unforeseen
from shardkit.formats.compressed import Words, opened
from shardkit.formats.tfrecord import records
from shardkit.formats.tfrecord.example import Feature, feature, features
from shardkit.formats.tfrecord.records import HEAD, INDEX, ROW, is_header, payload, scanned
from shardkit.formats.tfrecord.third_party import is_absent, scan
from shardkit.formats.tfrecord.values import decoded
from shardkit.sample import JsonText, Sample, key_of
from shardkit.schema import Array, Images, Scalar
from shardkit.storage.byte_source import ByteSource, Memory, Table, open_source

_COMPRESSED = Words("a compressed TFRecord file", "compressed TFRecord files", "tfrecord")
_SUFFIX = re.compile(r"\.(tfrecord|array_?record)")


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
        """The generated key of a record without a stored one."""
        return numbered_key(self._prefix, position)

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        numbers = fields is not None and self._in_head.issuperset(fields)
        data, whole = self.record(position, numbers)
        spans = features(data, whole=whole)
        if self._known is not None and (others := spans.keys() - self._known):
            error = unforeseen(min(others), "feature")
            raise error.located(offset=self.offset(position, ""))

        def get(name: str, ending: str = "") -> Feature | None:
            span = spans.get(name + ending)
            return None if span is None else feature(data, span)

        key = get(KEY)
        sample: Sample = {KEY: self.key(position)}
        if key is not None:
            sample[KEY] = key.one().decode()
        for name, kind in (self._relaxed if json_text else self.schema).items():
            if fields is not None and name not in fields:
                continue
            found = get(name)
            if found is None or is_absent(found, name in self._lists):
                if not kind.optional:
                    raise ValueError(f"the record has no value for {name!r}")
            elif name in self._texts:
                value = [part.decode() for part in found.parts]
                sample[name] = JsonText.of(value) if json_text else value
            else:
                sample[name] = decoded(kind, found, partial(get, name), json_text=json_text)
        return sample


class TFRecordReader(ExampleReader):
    def __init__(self, path: Path, layout: dict[str, Any] | None = None) -> None:
        index = records.index_path(path)
        if layout is None or "index" in layout or not index.exists():
            source, self.temporary_bytes = opened(path, _COMPRESSED, is_header)
            if layout is None:
                index_of = scanned(source)
                read = partial(_payload, source, index_of)
                found = scan(path, len(index_of) // ROW.size, read)
                layout = {**found, "index": index_of}
            elif "index" not in layout:
                layout = {**layout, "index": scanned(source)}
            rows: bytes = layout["index"]
            self._index = Table(Memory(rows, path), 0, len(rows) // ROW.size, INDEX)
        else:
            source = open_source(path)
            self._index = load_table(index, INDEX, "the index of a shard")
            self.in_memory = self._index.in_memory
        super().__init__(path, layout, source)

    def __len__(self) -> int:
        return len(self._index)

    def record(self, position: int, numbers: bool) -> tuple[bytes, bool]:
        offset, size, head = ROW.unpack(self._index.record(position))
        if numbers and HEAD < head < size:
            return self.source.read(offset + HEAD, head - HEAD), False
        return payload(self.source, offset, size), True

    def offset(self, position: int, field: str) -> int:
        return int(ROW.unpack(self._index.record(position))[0])

    def spans(self) -> npt.NDArray[np.int64]:
        rows = np.concatenate([np.zeros(0, INDEX), *self._index.chunks()])
        return np.stack([rows["offset"], rows["offset"] + rows["size"]], axis=1).astype(np.int64)


def _payload(source: ByteSource, index: bytes, number: int) -> bytes:
    offset, size, _ = ROW.unpack_from(index, number * ROW.size)
    return payload(source, offset, size)
