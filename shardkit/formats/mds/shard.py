"""Reads and writes shards: offsets, a JSON header that describes the columns, and the samples."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from shardkit.errors import DamagedError, FormatError, ShardkitError, drop_option
from shardkit.formats.base import KEY, ShardSpec, encoded, key_bytes
from shardkit.formats.compressed import opened
from shardkit.formats.mds.layout import ABSENT, SCALARS, codec, encoding_of, own_codec
from shardkit.formats.offsets import OffsetsWriter
from shardkit.formats.packed import Packed, PackedField, PackedReader
from shardkit.helpers.checked import Count, damaged, from_json
from shardkit.sample import Sample, key_of
from shardkit.schema import RESERVED, Bytes, FieldType, Schema
from shardkit.storage.byte_source import ByteSource, Table, open_source


class _About(TypedDict):
    """Our entry in the header, which StreamingDataset ignores."""

    schema: dict[str, Any]
    classes: dict[str, list[str]]


class _Columns(TypedDict):
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[Count | None]


class _Header(_Columns, total=False):
    """The JSON header after the offsets."""

    shardkit: _About


class MdsReader(PackedReader):
    """One self-describing shard; a compressed one is unpacked to a temporary file while open."""

    def __init__(self, path: Path, layout: dict[str, Any] | None = None) -> None:
        plain = path.name.lower().endswith(".mds")
        source, self.temporary_bytes = (
            (open_source(path), 0) if plain else opened(path, "MDS shard", "mds")
        )
        self.offsets, self.first = _offsets(source)
        self.in_memory = self.offsets.in_memory
        header = _header(source, 4 * (len(self.offsets) + 1), self.first)
        names, about = header["column_names"], header.get("shardkit")
        encodings = dict(zip(names, header["column_encodings"], strict=True))
        ours = None if about is None else _schema(about, path)
        if layout is None:
            layout = _third_party(encodings, path) if about is None else {**about, "ours": True}
        super().__init__(path, layout, source)
        self.packed = Packed(header["column_sizes"])
        self.key = names.index(KEY) if encodings.get(KEY) == "str" else None
        self.absent = names.index(ABSENT) if ours is not None and ABSENT in names else None
        folder = f"{path.parent.name}/" if path.parent.name.isdigit() else ""  # a merged dataset
        self.prefix = folder + key_of(path.name.partition(".mds")[0])
        self.fields = []
        for name, kind in self.schema.items():
            encoding = encodings.get(name, "none")
            known = codec(encoding) if ours is None else None
            if ours is not None and name in ours and encoding == encoding_of(ours[name]):
                known = own_codec(ours[name])
            if known is None or not _fits(known.kind, kind):
                what, found = "a column of the shard is missing or wrong", f"{encoding!r:.60}"
                raise DamagedError(what, path=path, field=name, expected=str(kind), found=found)
            stored = encoding, known.decode, SCALARS.get(encoding)
            self.fields.append(PackedField(name, names.index(name), kind, *stored))

    def located(self, position: int) -> tuple[ByteSource, int, int]:
        begin, end = struct.unpack("<2I", self.offsets.record(position, 2))
        if not self.first <= begin <= end <= self.source.size:
            about = {"expected": f"a range from {self.first:,} to {self.source.size:,}"}
            about["found"] = f"{begin:,} to {end:,}"
            what, offset = "the offset of a sample is damaged", 4 * (1 + position)
            raise DamagedError(what, path=self.path, offset=offset, **about)
        return self.source, begin, end


def _offsets(source: ByteSource) -> tuple[Table, int]:
    """Return the offsets of all samples and of the end, and the first offset."""
    count = int.from_bytes(source.read(0, 4), "little")
    ends = Table(source, 4, count + 1, "<u4")
    first, last = int(ends.slice(0, 1)[0]), int(ends.slice(count, count + 1)[0])
    if not 4 * (count + 2) <= first <= last == source.size:
        expected = f"offsets of {count:,} samples that end at byte {source.size:,}"
        about = {"expected": expected, "found": f"{first:,} to {last:,}"}
        raise DamagedError(
            "an MDS shard is damaged or truncated", path=source.path, offset=4, **about
        )
    return ends, first


def _header(source: ByteSource, start: int, stop: int) -> _Header:
    what, where = "the header of the shard", {"path": source.path, "offset": start}
    text = source.read(start, stop - start).rstrip()  # our writer pads the header with spaces
    header = from_json(_Header, text, what, **where)
    names = header["column_names"]
    lists = (set(names), names, header["column_encodings"], header["column_sizes"])
    if min(map(len, lists)) < max(map(len, lists)):
        raise damaged(what, ValueError("a column lacks its name, encoding or size"), **where)
    return header


def _schema(about: _About, path: Path) -> Schema:
    """Return the schema of a shard that we wrote."""
    try:
        return Schema.from_json(about["schema"])
    except ShardkitError as error:  # a type that this version does not know
        raise error.located(path=path) from error.__cause__
    except ValueError as error:
        raise damaged("the header of the shard", error, path=path) from error


def _fits(own: FieldType, kind: FieldType) -> bool:
    """Return whether values have the requested type; images can also be read as bytes."""
    same = replace(own, optional=kind.optional) == kind
    return same or (type(kind) is Bytes and isinstance(own, Bytes))


def _third_party(encodings: dict[str, str], path: Path) -> dict[str, Any]:
    """The layout of a third-party shard: types from encodings; unsupported and ignored columns."""
    fields, unusable, ignored = {}, {}, {}
    for name, encoding in encodings.items():
        known = codec(encoding)
        if name in RESERVED:
            ignored.update({f"column {name!r}": 1} if (name, encoding) != (KEY, "str") else {})
        elif known is not None:
            fields[name] = known.kind
        else:
            pickled = "is pickled, and reading a pickle runs the code in it"
            unusable[name] = FormatError(
                f"the column {name!r} "
                + (pickled if encoding == "pkl" else "has an unknown encoding"),
                path=path,
                field=name,
                found=f"the encoding {encoding!r:.60}",
                fix=f"convert without it: {drop_option(name)}; or write it as json, for example",
            )
    return {"schema": Schema(fields).to_json(), "unusable": unusable, "ignored": ignored}


def columns_of(schema: Schema) -> dict[str, Any]:
    """The description of a shard in its header and in index.json, with columns sorted by name."""
    encodings = {KEY: "str", **{name: encoding_of(kind) for name, kind in schema.items()}}
    sizes = {name: own_codec(kind).size for name, kind in schema.items()}
    if any(kind.optional for kind in schema.values()):
        encodings[ABSENT] = "json"
    return {
        "column_encodings": [encodings[name] for name in sorted(encodings)],
        "column_names": sorted(encodings),
        "column_sizes": [sizes.get(name) for name in sorted(encodings)],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": None,
        "version": 2,
    }


class MdsWriter(OffsetsWriter):
    called, room, fill = "MDS", 1 << 17, b" "

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, spec)
        columns, fields = columns_of(spec.schema), spec.schema.items()
        self._sizes = dict(zip(columns["column_names"], columns["column_sizes"], strict=True))
        codecs = {name: own_codec(kind) for name, kind in fields}
        self._fields = [(name, kind, codecs[name].encode) for name, kind in fields]
        self._absent = {name: codecs[name].absent for name, kind in fields if kind.optional}
        classes = {name: list(names) for name, names in spec.classes.items()}
        about = {"schema": spec.schema.to_json(), "classes": classes}
        self.header = json.dumps({**columns, "shardkit": about}).encode()

    def stored(self, sample: Sample) -> list[bytes]:
        """Return the sizes of a sample's values, and the values."""
        values = {KEY: key_bytes(sample[KEY]), **self._absent}
        values[ABSENT] = json.dumps([name for name in self._absent if name not in sample]).encode()
        values.update(encoded(sample, self._fields))
        stored = [values[name] for name in self._sizes]
        lengths = [len(values[name]) for name, size in self._sizes.items() if size is None]
        return [np.array(lengths, np.int64).astype("<u4").tobytes(), *stored]
