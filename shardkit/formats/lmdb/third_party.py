"""LMDBs of other programs: finds out from the file which entries are samples, and reads them.

A sample is one entry, or several entries such as `image-000000001` and `label-000000001`, as in
text recognition datasets. `values.py` determines how the values are stored. Lists and counts of the
samples are used as well: `__keys__`, `num-samples`, and BasicSR's `meta_info.txt`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from sys import getsizeof
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from shardkit.codecs.image import SUFFIXES
from shardkit.errors import DamagedError, FormatError, SampleError
from shardkit.formats.base import KEY, Columns, Ranges, unforeseen
from shardkit.formats.lmdb.layout import DUPDATA, SUBDATA, Entry, Tree
from shardkit.formats.lmdb.reader import (
    ABOUT_OTHERS,
    TreeReader,
    ignored_entries,
    key_text,
    too_few,
)
from shardkit.formats.lmdb.values import DATUM, IMAGE, Kind, kind_of, refuse, schema_of
from shardkit.helpers.checked import MAX_BYTES
from shardkit.sample import JsonText, Sample, key_of, unique_key
from shardkit.schema import FieldType, Schema
from shardkit.storage import fs
from shardkit.storage.blobs import ABSENT, Blobs

_LOOKED_AT = 100  # number of evenly spaced values from which the fields are inferred
_CAFFE_KEY = re.compile(r"\d{8,10}_(?=.)")  # convert_imageset numbers its file names
_PART_KEY = re.compile(rb"([a-z]+)-(\d{9})")  # image-000000001
_LSUN_KEY = re.compile(rb"[0-9a-f]{40}")
_META_LINE = re.compile(rb"([^.]+)\.\S+ \(\d+,\d+,\d+\) \d+")  # baboon.png (480,500,3) 1
_MAX_PARTS = 8  # of a sample
_COUNTS = (b"num-samples", b"__len__")
_COUNT_BYTES = 20  # longest count, as text or in msgpack

_Rows = dict[bytes, list[Entry | None]]  # samples by key: an entry per part, None if it is missing


class Entries(NamedTuple):
    """The positions of the samples, and how the values of each part are stored."""

    keys: list[str]
    places: npt.NDArray[np.int64]  # (samples, parts, 2): offset and size; 0 for a missing part
    kinds: Mapping[str, Kind]  # by part; a part with a name is a field


class ThirdPartyReader(TreeReader):
    """An environment of another program. Its `Entries` are in memory, and in the layout."""

    def __init__(
        self, path: Path, layout: dict[str, Any] | None = None, tree: Tree | None = None
    ) -> None:
        tree = tree or Tree(path)
        layout = layout if layout and "entries" in layout else _scan(tree)
        super().__init__(path, layout, tree)
        self._keys, self._places, self._kinds = layout["entries"]
        self.in_memory = self._places.nbytes + sum(map(getsizeof, self._keys))
        self._relaxed = self.schema.with_optional(layout.get("guessed", ()))

    def __len__(self) -> int:
        return len(self._keys)

    def location(self, position: int) -> tuple[int, int]:
        offset, size = next(place for place in self._places[position].tolist() if place[0])
        return offset, size

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        """With `json_text`, the sample may lack fields that are only guessed not to be optional."""
        if fields is not None and not fields:
            return {KEY: self._keys[position]}
        try:
            sample = self._checked(position, self._relaxed if json_text else self.schema)
        except SampleError as error:
            raise error.located(offset=self.offset(position, "")) from error.__cause__
        for name in [*sample]:
            if name != KEY and fields is not None and name not in fields:
                del sample[name]
            elif not json_text and type(sample[name]) is JsonText:
                sample[name] = json.loads(sample[name])
        return sample

    def plan(self, positions: npt.NDArray[np.int64], fields: Collection[str]) -> Ranges | None:
        """Supports values that are one field each, or one part."""
        if any(kind.many is None for kind in self._kinds.values()) or not fields:
            return None
        offsets, sizes = self._places[positions].transpose(2, 1, 0).copy()
        sizes[offsets == 0] = ABSENT
        for name, missing in zip(self._whole(), (sizes < 0).any(axis=1).tolist(), strict=True):
            if missing and not self.schema[name].optional:
                return None
        return Ranges(self._tree.source, offsets, sizes, partial(self._columns, positions, fields))

    def _columns(
        self, positions: npt.NDArray[np.int64], fields: Collection[str], blobs: list[Blobs]
    ) -> Columns:
        stored = zip(self._whole().items(), blobs, strict=True)
        found = {name: kind.many(values) for (name, kind), values in stored if kind.many}
        keys = [self._keys[position] for position in positions.tolist()]
        return {KEY: keys, **{name: found[name] for name in fields}}

    def _whole(self) -> dict[str, Kind]:
        """Return the kind of each field, if each value is a field."""
        return {part or min(kind.schema or ()): kind for part, kind in self._kinds.items()}

    def _checked(self, position: int, schema: Schema) -> Sample:
        """Return all fields of a sample; JSON values as their text."""
        sample: Sample = {KEY: self._keys[position]}
        places = self._places[position].tolist()
        for (part, kind), (offset, size) in zip(self._kinds.items(), places, strict=True):
            if not offset:
                continue
            try:
                found = kind.read(self._tree.read(offset, size))
            except (ValueError, RecursionError) as error:
                what = f"a value is not {kind.name} like the others: {error}"
                raise SampleError(what, offset=offset) from error
            sample |= {part: next(iter(found.values()))} if part else found
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


def _scan(tree: Tree) -> dict[str, Any]:
    """Return the layout of an LMDB: all keys, and a schema inferred from some of the values."""
    entries = _all_entries(tree)
    about = [entry for entry in entries if ABOUT_OTHERS.fullmatch(entry.key)]
    parts, rows = _grouped([entry for entry in entries if not ABOUT_OTHERS.fullmatch(entry.key)])
    _check_counts(tree, about, len(rows))
    kinds: dict[str, Kind] = {}
    fields: dict[str, FieldType] = {}
    for number, part in enumerate(parts):
        kinds[part], schema = _values(tree, part, [row[number] for row in rows.values()])
        fields |= schema
    guessed = []
    if "" in kinds and kinds[""].schema is None and len(rows) > _LOOKED_AT:
        guessed = [name for name, kind in fields.items() if not kind.optional]
    rows, convention = _listed(tree, rows, kinds, about)
    places = np.zeros((len(rows), len(parts), 2), np.int64)
    for number, row in enumerate(rows.values()):
        places[number] = [(e.offset, e.size) if e else (0, 0) for e in row]
    return {
        "schema": Schema(fields).to_json(),
        "entries": Entries(_keys([*rows]), places, kinds),
        "convention": convention,
        "guessed": guessed,
        **ignored_entries([entry.key for entry in about]),
    }


def _all_entries(tree: Tree) -> list[Entry]:
    """Return the entries of the main database, or of the only named one."""
    entries = [*tree.all_entries()]
    if len(entries) == 1 and entries[0].flags & SUBDATA:
        entries = [*tree.all_entries(tree.root_of(entries[0]))]
    if named := [entry for entry in entries if entry.flags & SUBDATA]:
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


def _grouped(entries: list[Entry]) -> tuple[tuple[str, ...], _Rows]:
    """Return the names of the parts of samples, and their entries: those with the same number.

    If no part is called `image`, each entry is a sample, whose only part has the name "".
    """
    parts: tuple[str, ...] = ()
    if all(_PART_KEY.fullmatch(entry.key) for entry in entries):
        parts = tuple(dict.fromkeys(entry.key.partition(b"-")[0].decode() for entry in entries))
    if "image" not in parts or not 1 < len(parts) <= _MAX_PARTS:
        return ("",), {entry.key: [entry] for entry in entries}
    rows: _Rows = {}
    for entry in entries:
        part, _, number = entry.key.partition(b"-")
        row = rows.setdefault(number, [None] * len(parts))
        row[parts.index(part.decode())] = entry
    return parts, dict(sorted(rows.items()))


def _check_counts(tree: Tree, about: list[Entry], samples: int) -> None:
    """Raise DamagedError if an entry states more samples than there are."""
    for entry in about:
        if entry.key in _COUNTS and entry.size <= _COUNT_BYTES:
            value = tree.read(entry.offset, entry.size)
            stated = int(value) if value.isdigit() else _unpacked(value)
            if type(stated) is int and stated > samples:
                raise too_few(tree, stated, entry.key, samples, offset=entry.offset)


def _values(tree: Tree, part: str, entries: list[Entry | None]) -> tuple[Kind, Schema]:
    """Return the kind of the values of a part and their fields, inferred from some of the values.

    Raises FormatError if one of them is of a kind that is refused.
    """
    there = [entry for entry in entries if entry]
    count = min(len(there), _LOOKED_AT)
    values = []
    for step in range(count):
        entry = there[step * (len(there) - 1) // max(count - 1, 1)]
        values.append(tree.read(entry.offset, entry.size))
        refuse(values[-1], path=tree.path, key=key_text(entry.key), offset=entry.offset)
    kind = kind_of(values, part=bool(part))
    try:
        schema = schema_of(kind, values)
    except SampleError as error:  # a value that no field can hold
        raise error.located(path=tree.path) from error.__cause__
    if part:
        optional = len(there) < len(entries)
        schema = Schema({part: replace(next(iter(schema.values())), optional=optional)})
    return kind, schema


def _listed(
    tree: Tree, rows: _Rows, kinds: Mapping[str, Kind], about: list[Entry]
) -> tuple[_Rows, str]:
    """The samples, in the order of their list if there is one, and their storage convention."""
    if "" not in kinds:
        return rows, f"text recognition's {', '.join(f'{part}-000000001' for part in kinds)}, ..."
    kind = kinds[""]
    what = "Caffe's Datum messages" if kind is DATUM else f"{kind.name} each"
    for entry in about:
        listed = _unpacked(tree.read(entry.offset, entry.size)) if entry.key == b"__keys__" else 0
        if isinstance(listed, list) and all(isinstance(name, bytes | str) for name in listed):
            names = [name.encode() if isinstance(name, str) else name for name in listed]
            where = {"path": tree.path, "offset": entry.offset}
            return _ordered(rows, names, "the entry __keys__", where), f"{what}, listed in __keys__"
    meta = tree.path.with_name("meta_info.txt")
    if kind is IMAGE and tree.path.name == "data.mdb" and meta.is_file():
        lines = fs.read(meta, MAX_BYTES).splitlines()
        matches = [_META_LINE.fullmatch(line) for line in lines if line.strip()]
        names = [match[1] for match in matches if match]
        if names and len(names) == len(matches):
            rows = _ordered(rows, names, meta.name, {"path": meta})
            return rows, "BasicSR's images, with meta_info.txt"
    if kind is IMAGE and rows and all(map(_LSUN_KEY.fullmatch, rows)):
        return rows, "LSUN's images"
    return rows, what


def _ordered(rows: _Rows, names: list[bytes], what: str, where: Mapping[str, Any]) -> _Rows:
    """The samples in the order of a list, if it names all. All samples that it names must exist."""
    for name in names:
        if name not in rows:
            what = f"{what} names a sample that the LMDB does not have"
            raise DamagedError(what, found=key_text(name), **where)
    return {name: rows[name] for name in names} if len({*names}) == len(rows) else rows


def _unpacked(value: bytes) -> Any:
    """Return the value that msgpack decodes; None if it is not msgpack."""
    try:
        return msgpack.unpackb(value)
    except (ValueError, TypeError, RecursionError):
        return None


def _keys(stored: list[bytes]) -> list[str]:
    """Keys as text, without Caffe's number, the suffix of an image, and dots in the base name."""
    keys: dict[str, None] = {}
    raw = [key_text(key) for key in stored]
    caffe = bool(raw) and all(_CAFFE_KEY.match(key) for key in raw)
    for key in raw:
        stem, dot, suffix = (_CAFFE_KEY.sub("", key, count=1) if caffe else key).rpartition(".")
        if not dot or suffix.lower() not in SUFFIXES or not stem:
            stem, suffix = stem + dot + suffix, "key"
        keys[unique_key(key_of(stem), suffix, keys)] = None
    return list(keys)
