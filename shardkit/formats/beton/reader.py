"""Reads a .beton at random: a row of its table says where a sample's values stand."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardkit.errors import DamagedError, SampleError
from shardkit.formats.base import ShardReader
from shardkit.formats.beton.contents import Contents, open_contents
from shardkit.formats.beton.layout import RAW, TypeId, kind_of
from shardkit.formats.beton.values import Read, read_json, read_json_text, reads
from shardkit.sample import Sample, key_of
from shardkit.schema import Schema

if TYPE_CHECKING:
    import numpy.typing as npt

_KEY = struct.Struct("<QQ")  # where a key begins, and where the next one does
_NUMBER_BYTES = 8


class _Column(NamedTuple):
    """A field as it is read."""

    name: str
    read: Read
    pointer: int  # which of the row's numbers says where the value stands; -1 if none does
    presence: npt.NDArray[np.uint8] | None


class BetonReader(ShardReader):
    """One .beton file. Values are copies; the file itself is mapped, never read whole."""

    def __init__(self, path: Path, layout: dict[str, Any] | None = None) -> None:
        self._path = path
        contents = open_contents(path)
        self._contents: Contents | None = contents
        own = contents.section
        if layout is None:
            layout = _found_layout(contents)
        self.layout = layout
        self.schema = Schema.from_json(layout["schema"])
        self._length = contents.samples
        self._unpack = contents.row.struct.unpack_from
        self._row_size = contents.row.dtype.itemsize
        self._table_at = contents.table_at
        self._prefix = "" if own else key_of(path.stem) + "/"
        self._keys_at = (own.offsets_at, own.keys_at, own.keys_size) if own else (0, 0, 0)
        self._columns = _columns(contents, self.schema)
        self._as_stored = _columns(contents, self.schema, json_text=True)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> Sample:
        return self._read(position, self._columns)

    @property
    def _open(self) -> Contents:
        if self._contents is None:
            raise ValueError(f"{self._path} is closed")
        return self._contents

    def _read(self, position: int, columns: list[_Column]) -> Sample:
        contents = self._open
        if not 0 <= position < self._length:
            raise IndexError(f"{self._path} has {self._length} samples, not a position {position}")
        data = contents.data
        row = self._unpack(data, self._table_at + position * self._row_size)
        sample: Sample = {}
        name, pointer = "__key__", -1
        try:
            sample[name] = self._key(data, position)
            for name, read, pointer, presence in columns:  # noqa: B007 - for the error
                if presence is None or presence[position]:
                    sample[name] = read(data, row, position)
        except (ValueError, RecursionError) as error:
            raise SampleError(
                f"a value is damaged: {error}",
                path=self._path,
                position=position,
                key=sample.get("__key__"),
                field=name,
                offset=row[pointer] if pointer >= 0 else None,
                expected=self.schema[name].python if name in self.schema else "a key",
            ) from None
        return sample

    def _key(self, data: mmap.mmap, position: int) -> str:
        if self._prefix:
            return f"{self._prefix}{position:09d}"
        offsets_at, keys_at, size = self._keys_at
        start, stop = _KEY.unpack_from(data, offsets_at + 8 * position)
        if not start <= stop <= size:
            raise ValueError("the key stands outside the keys")
        return data[keys_at + start : keys_at + stop].decode()

    def keys(self) -> list[str]:
        """The key of every sample, in order."""
        return [self._read(position, [])["__key__"] for position in range(self._length)]

    def stored(self, position: int) -> Sample:
        """The sample with JSON values as the text that is stored."""
        return self._read(position, self._as_stored)

    def read_fields(self, position: int, fields: Collection[str]) -> Sample:
        """The sample with these fields alone; the bytes of the others are not touched."""
        return self._read(position, [column for column in self._columns if column.name in fields])

    def sizes(self, field: str) -> npt.NDArray[np.int64]:
        """Stored bytes of the field in each sample that has it, in order."""
        contents = self._open
        sizes = _sizes(contents, _numbers(contents)[field])
        presence = self._columns[list(self.schema).index(field)].presence
        return sizes if presence is None else sizes[presence != 0]

    def close(self) -> None:
        self._contents = None
        self._columns = self._as_stored = []

    def __reduce__(self) -> tuple[Any, ...]:
        return BetonReader, (self._path, self.layout)


def _found_layout(contents: Contents) -> dict[str, Any]:
    """What a file says of itself: our section, or for a file that others made its descriptors."""
    own = contents.section
    if own is None:
        schema = Schema({field.name: kind_of(field) for field in contents.fields})
        return {"schema": schema.to_json()}
    named = {} if own.classes is None else {"classes": own.classes}
    return {"schema": own.schema.to_json(), **named}


def _numbers(contents: Contents) -> dict[str, int]:
    return {field.name: number for number, field in enumerate(contents.fields)}


def _sizes(contents: Contents, number: int) -> npt.NDArray[np.int64]:
    """Stored bytes of a field's value in every sample, without the absent ones' place-holders."""
    field, table = contents.fields[number], contents.table()
    column = table[f"f{number}"]
    if not field.has_data:
        return np.full(len(table), _NUMBER_BYTES, np.int64)
    if field.dtype is not None:
        return np.full(len(table), field.nbytes, np.int64)
    if field.type_id != TypeId.IMAGE:
        sizes: npt.NDArray[np.int64] = column["size"].astype(np.int64)
        return sizes - 1 if field.type_id == TypeId.JSON else sizes
    raw = 3 * column["width"].astype(np.int64) * column["height"]
    return np.where(column["mode"] == RAW, raw, contents.allocations.sizes(column["ptr"]))


def _columns(contents: Contents, schema: Schema, *, json_text: bool = False) -> list[_Column]:
    """How each field of `schema` is read, which is common to the files of a dataset."""
    numbers = _numbers(contents)
    presence = {} if contents.section is None else contents.section.presence
    json = read_json_text if json_text else read_json
    columns = []
    for name, kind in schema.items():
        if name not in numbers:
            raise DamagedError(
                f"the .beton has no field {name!r}, which its manifest names",
                path=contents.path,
                expected=", ".join(schema),
                found=", ".join(numbers),
            )
        field, at = contents.fields[numbers[name]], contents.row.places[numbers[name]]
        read = reads(contents, numbers[name], kind, json)
        if read is None:
            raise DamagedError(
                "a field is of another type than its manifest says",
                path=contents.path,
                field=name,
                expected=str(kind),
                found=f"FFCV's type {field.type_id.value} ({field.type_id.name.lower()})",
            )
        pointer = -1 if not field.has_data else at + (3 if field.type_id == TypeId.IMAGE else 0)
        columns.append(_Column(name, read, pointer, presence.get(name)))
    return columns
