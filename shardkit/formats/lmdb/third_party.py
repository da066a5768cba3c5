"""Foreign LMDBs: finds out from the file which entries are samples.

A sample is one entry, or several entries such as `image-000000001` and `label-000000001`, as in
text recognition datasets. `third_party_values.py` determines how the values are stored. Lists and
counts of the samples are used as well: `__keys__`, `num-samples`, and BasicSR's `meta_info.txt`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from sys import getsizeof
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from shardkit.codecs.image import SUFFIXES
from shardkit.errors import DamagedError, FormatError, SampleError
from shardkit.formats.base import KEY, unforeseen
from shardkit.formats.lmdb import third_party_values
from shardkit.formats.lmdb.layout import DUPDATA, SUBDATA, Entry, Tree
from shardkit.formats.lmdb.third_party_values import DATUM, IMAGE, Kind, kind_of, schema_of
from shardkit.helpers.checked import MOST_BYTES
from shardkit.sample import Sample, key_of, unique_key
from shardkit.schema import Schema
from shardkit.storage import fs

_LOOKED_AT = 100  # number of evenly spaced values from which the fields are inferred
_CAFFE_KEY = re.compile(r"\d{8,10}_(?=.)")  # convert_imageset numbers its file names
_PART_KEY = re.compile(rb"([a-z]+)-(\d{9})")  # image-000000001
_LSUN_KEY = re.compile(rb"[0-9a-f]{40}")
_META_LINE = re.compile(rb"([^.]+)\.\S+ \(\d+,\d+,\d+\) \d+")  # baboon.png (480,500,3) 1
# Entries with metadata, as in torchvision-style and text recognition datasets.
ABOUT_OTHERS = re.compile(rb"__.*|num-samples|length|size|len", re.DOTALL)
_MOST_PARTS = 8  # of a sample
_COUNTS = (b"num-samples", b"__len__")
_COUNT_BYTES = 20  # longest count, as text or in msgpack


class _Samples(NamedTuple):
    """The entries of all samples: a row per sample, a column per part; None for a missing part.

    If `parts` is ("",), each sample is a single entry.
    """

    keys: list[bytes]
    rows: Sequence[Sequence[Entry | None]]
    parts: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Entries:
    """The positions of the samples, and how the values of each part are stored."""

    keys: list[str]
    places: npt.NDArray[np.int64]  # (samples, parts, 2): offset and size; 0 for a missing part
    kinds: Mapping[str, Kind]  # by part; a part with a name is a field

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def in_memory(self) -> int:
        """The approximate size in memory, in bytes."""
        return self.places.nbytes + sum(map(getsizeof, self.keys))

    def location(self, position: int) -> tuple[int, int]:
        """Offset and size of a sample's first value."""
        offset, size = next(place for place in self.places[position].tolist() if place[0])
        return offset, size

    def sample(self, position: int, tree: Tree, schema: Schema) -> Sample:
        """A sample, checked against the schema; JSON values as their text."""
        sample: Sample = {KEY: self.keys[position]}
        places = self.places[position].tolist()
        for (part, kind), (offset, size) in zip(self.kinds.items(), places, strict=True):
            if offset:
                sample |= _fields(part, kind, tree.read(offset, size), offset)
        if others := sample.keys() - schema.keys() - {KEY}:
            raise unforeseen(min(others))
        for name in schema.keys() - sample.keys():
            if not schema[name].optional:
                raise SampleError(
                    f"the sample has no field {name!r}, unlike all samples examined on opening",
                    field=name,
                    fix="convert the LMDB: `shardkit convert` reads all values to find out which"
                    " fields every sample has",
                )
        return schema.check(sample)


def _fields(part: str, kind: Kind, value: bytes, offset: int) -> Sample:
    """The fields in a value; a named part of a sample is a single field with that name."""
    try:
        found = kind.read(value)
    except (ValueError, RecursionError) as error:
        raise SampleError(
            f"a value is not {kind.name} like the others: {error}", offset=offset
        ) from error
    return {part: next(iter(found.values()))} if part else found


def scan(tree: Tree) -> dict[str, Any]:
    """The layout of a foreign LMDB: all keys, and a schema inferred from some of the values."""
    every = _entries(tree)
    about = [entry for entry in every if ABOUT_OTHERS.fullmatch(entry.key)]
    entries = [entry for entry in every if not ABOUT_OTHERS.fullmatch(entry.key)]
    samples = _samples(entries)
    _check_counts(tree, about, len(samples.keys))
    found = {part: _values(tree, samples, number) for number, part in enumerate(samples.parts)}
    kinds = {part: kind for part, (kind, _) in found.items()}
    fields = Schema({name: each for _, schema in found.values() for name, each in schema.items()})
    guessed = []
    if "" in kinds and kinds[""].schema is None and len(entries) > _LOOKED_AT:
        guessed = [name for name, each in fields.items() if not each.optional]
    samples, convention = _listed(tree, samples, kinds.get(""), about)
    places = ((e.offset, e.size) if e else (0, 0) for row in samples.rows for e in row)
    table = np.fromiter(itertools.chain.from_iterable(places), np.int64)
    table = table.reshape(-1, len(samples.parts), 2)
    return {
        "schema": fields.to_json(),
        "entries": Entries(_keys(samples.keys), table, kinds),
        "convention": convention,
        **passed_over([entry.key for entry in about]),
        **({"guessed": guessed} if guessed else {}),
    }


def _values(tree: Tree, samples: _Samples, number: int) -> tuple[Kind, Schema]:
    """The kind of the values of a part and their fields, inferred from some of the values."""
    part = samples.parts[number]
    there = [entry for row in samples.rows if (entry := row[number])]
    values = _some(there, tree)
    kind = kind_of(values, part=bool(part))
    try:
        schema = schema_of(kind, values)
    except SampleError as error:  # a value that no field can hold
        raise error.located(path=tree.path) from error.__cause__
    if part:
        optional = len(there) < len(samples.keys)
        schema = Schema({part: replace(next(iter(schema.values())), optional=optional)})
    return kind, schema


def passed_over(keys: list[bytes]) -> dict[str, Any]:
    """The entry `ignored` of a layout: the LMDB's entries with metadata, if there are any."""
    return {"ignored": {f"entry {_text(key)!r}": 1 for key in keys}} if keys else {}


def _some(entries: list[Entry], tree: Tree) -> list[bytes]:
    """The values of some entries; raises FormatError if one is of a kind that is refused."""
    count = min(len(entries), _LOOKED_AT)
    values = []
    for number in range(count):
        entry = entries[number * (len(entries) - 1) // max(count - 1, 1)]
        values.append(tree.read(entry.offset, entry.size))
        try:
            third_party_values.refuse(values[-1])
        except FormatError as error:
            where = {"path": tree.path, "key": _text(entry.key), "offset": entry.offset}
            raise error.located(**where) from error.__cause__
    return values


def _samples(entries: list[Entry]) -> _Samples:
    """The samples: entries with the same number form one sample, if one of the parts is `image`."""
    parts: tuple[str, ...] = ()
    if all(_PART_KEY.fullmatch(entry.key) for entry in entries):
        parts = tuple(dict.fromkeys(entry.key.partition(b"-")[0].decode() for entry in entries))
    if "image" not in parts or not 1 < len(parts) <= _MOST_PARTS:
        return _Samples([entry.key for entry in entries], [(entry,) for entry in entries])
    rows: dict[bytes, dict[str, Entry]] = {}
    for entry in entries:
        part, _, number = entry.key.partition(b"-")
        rows.setdefault(number, {})[part.decode()] = entry
    keys = sorted(rows)
    return _Samples(keys, [[rows[key].get(part) for part in parts] for key in keys], parts)


def _check_counts(tree: Tree, about: list[Entry], samples: int) -> None:
    """Raise DamagedError if an entry states more samples than there are."""
    for entry in about:
        if entry.key not in _COUNTS or entry.size > _COUNT_BYTES:
            continue
        value = tree.read(entry.offset, entry.size)
        promised = int(value) if value.isdigit() else _unpacked(value)
        if type(promised) is int and promised > samples:
            raise DamagedError(
                "samples are missing from the LMDB",
                path=tree.path,
                offset=entry.offset,
                expected=f"{promised:,}, as its entry {entry.key.decode()} says",
                found=f"{samples:,}",
            )


def _listed(
    tree: Tree, samples: _Samples, kind: Kind | None, about: list[Entry]
) -> tuple[_Samples, str]:
    """The samples, in the order of their list if there is one, and their storage convention."""
    if kind is None:
        parts = ", ".join(f"{part}-000000001" for part in samples.parts)
        return samples, f"text recognition's {parts}, ..."
    what = "Caffe's Datum messages" if kind is DATUM else f"{kind.name} each"
    for entry in about:
        listed = _unpacked(tree.read(entry.offset, entry.size)) if entry.key == b"__keys__" else 0
        if isinstance(listed, list) and all(isinstance(name, bytes | str) for name in listed):
            names = [name.encode() if isinstance(name, str) else name for name in listed]
            where = {"path": tree.path, "offset": entry.offset}
            samples = _ordered(samples, names, "the entry __keys__", where)
            return samples, f"{what}, listed in __keys__"
    meta = tree.path.with_name("meta_info.txt")
    if kind is IMAGE and tree.path.name == "data.mdb" and meta.is_file():
        lines = fs.read(meta, MOST_BYTES).splitlines()
        matches = [_META_LINE.fullmatch(line) for line in lines if line.strip()]
        names = [match[1] for match in matches if match]
        if names and len(names) == len(matches):
            samples = _ordered(samples, names, meta.name, {"path": meta})
            return samples, "BasicSR's images, with meta_info.txt"
    if kind is IMAGE and samples.keys and all(map(_LSUN_KEY.fullmatch, samples.keys)):
        return samples, "LSUN's images"
    return samples, what


def _ordered(
    samples: _Samples, names: list[bytes], what: str, where: Mapping[str, Any]
) -> _Samples:
    """The samples in the order of a list, if it names all. All samples that it names must exist."""
    rows = dict(zip(samples.keys, samples.rows, strict=True))
    lost = next((name for name in names if name not in rows), None)
    if lost is not None:
        raise DamagedError(
            f"{what} names a sample that the LMDB does not have", found=_text(lost), **where
        )
    if len({*names}) != len(rows) or len(names) != len(rows):
        return samples
    return _Samples(names, [rows[name] for name in names])


def _unpacked(value: bytes) -> Any:
    """The value that msgpack decodes; None if it is not msgpack."""
    try:
        return msgpack.unpackb(value)
    except (ValueError, TypeError, RecursionError):
        return None


def _entries(tree: Tree) -> list[Entry]:
    entries = [entry for leaf in tree.leaves() for entry in tree.entries(leaf)]
    named = [entry for entry in entries if entry.flags & SUBDATA]
    if len(named) == 1 and len(entries) == 1:
        root = tree.root_of(named[0])
        entries = [entry for leaf in tree.leaves(root) for entry in tree.entries(leaf)]
        named = [entry for entry in entries if entry.flags & SUBDATA]
    if named:
        raise FormatError(
            "the LMDB holds several named databases",
            path=tree.path,
            found=", ".join(repr(e.key.decode("utf-8", "replace")) for e in named[:5]),
            fix="copy one of them to an environment of its own, as its main database",
        )
    if any(entry.flags & DUPDATA for entry in entries):
        raise FormatError(
            "the LMDB holds several values under one key (DUPSORT), but a sample has one value",
            path=tree.path,
        )
    return entries


def _keys(stored: list[bytes]) -> list[str]:
    """Keys as text, without Caffe's number, the suffix of an image, and dots in the base name."""
    keys: dict[str, None] = {}
    raw = [_text(key) for key in stored]
    caffe = bool(raw) and all(_CAFFE_KEY.match(key) for key in raw)
    for key in raw:
        stem, dot, suffix = (_CAFFE_KEY.sub("", key, count=1) if caffe else key).rpartition(".")
        if not dot or suffix.lower() not in SUFFIXES or not stem:
            stem, suffix = stem + dot + suffix, "key"
        keys[unique_key(key_of(stem), suffix, keys)] = None
    return list(keys)


def _text(key: bytes) -> str:
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return key.hex()
    return text if text.isprintable() else key.hex()
