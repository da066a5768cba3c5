"""Reads a .beton at random: a row of its table says where a sample's values stand."""

from __future__ import annotations

import struct
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardkit import storage
from shardkit.errors import DamagedError, SampleError, ShardkitError
from shardkit.formats.base import OldReader
from shardkit.formats.beton.contents import Contents, open_contents
from shardkit.formats.beton.layout import RAW, TypeId, kind_of
from shardkit.formats.beton.section import Section
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


class BetonReader(OldReader):
    """One .beton file. Values are copies; the file is mapped or read in pieces, never whole."""

    def __init__(
        self, path: Path, layout: dict[str, Any] | None = None, mapped: bool = True
    ) -> None:
        self._path = path
        self._mapped = mapped
        contents = open_contents(path, mapped)
        self._contents: Contents | None = contents
        if layout is None:
            layout = _found_layout(contents)
        self.layout = layout
        self.schema = Schema.from_json(layout["schema"])
        self._length = contents.samples
        self._unpack = contents.row.struct.unpack_from
        self._row_size = contents.row.dtype.itemsize
        self._stem = key_of(path.stem)
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
        row = self._unpack(contents.rows, position * self._row_size)
        sample: Sample = {}
        name, pointer = "__key__", -1
        try:
            sample[name] = self._key(contents.section, position)
            for name, read, pointer, presence in columns:  # noqa: B007 - for the error
                if presence is None or presence[position]:
                    sample[name] = read(data, row, position)
        except ShardkitError as error:  # the file was cut since
            raise error.located(
                position=position, key=sample.get("__key__"), field=name
            ) from error.__cause__
        except (ValueError, RecursionError) as error:
            raise SampleError(
                f"a value is damaged: {error}",
                path=self._path,
                position=position,
                key=sample.get("__key__"),
                field=name,
                offset=row[pointer] if pointer >= 0 else None,
                expected=self.schema[name].python if name in self.schema else "a key",
            ) from error
        return sample

    def _key(self, section: Section | None, position: int) -> str:
        if section is None:
            return f"{self._stem}/{position:09d}"
        start, stop = _KEY.unpack_from(section.offsets, 8 * position)
        if not start <= stop <= section.keys_size:
            raise ValueError("the key stands outside the keys")
        at = section.keys_at
        return section.keys[at + start : at + stop].decode()

    def keys(self) -> list[str]:
        """The key of every sample, in order."""
        return [self._read(position, [])["__key__"] for position in range(self._length)]

    def read_rows(
        self, field: str, positions: npt.NDArray[np.int64], out: npt.NDArray[Any]
    ) -> bool:
        """Arrays that FFCV has a type for, which are all of one shape."""
        contents = self._open
        number = _numbers(contents)[field]
        stored, presence = contents.fields[number], self._presence(field)
        if stored.dtype is None or stored.shape != out.shape[1:]:
            return False
        if presence is not None and not presence[positions].all():
            return False
        starts = contents.table()[f"f{number}"][positions].astype(np.int64)
        try:
            if (starts < contents.data_at).any():
                raise ValueError("a value stands before the data")
            found = storage.rows(contents.data, starts, stored.nbytes)
        except (ValueError, ShardkitError):
            return False
        out[...] = found.view(stored.dtype).reshape(out.shape)
        return True

    def read_keys(self, positions: npt.NDArray[np.int64]) -> list[str]:
        """The keys of many samples."""
        return [self._read(position, [])["__key__"] for position in positions.tolist()]

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
        presence = self._presence(field)
        return sizes if presence is None else sizes[presence != 0]

    def _presence(self, field: str) -> npt.NDArray[np.uint8] | None:
        return self._columns[list(self.schema).index(field)].presence

    def close(self) -> None:
        self._contents = None
        self._columns = self._as_stored = []

    def __reduce__(self) -> tuple[Any, ...]:
        return BetonReader, (self._path, self.layout, self._mapped)


def _found_layout(contents: Contents) -> dict[str, Any]:
    """What a file says of itself: our section, or for a file that others made its descriptors."""
    own = contents.section
    if own is None:
        schema = Schema({field.name: kind_of(field) for field in contents.fields})
        return {"schema": schema.to_json()}
    named = {} if own.classes is None else {"classes": own.classes}
    return {"schema": own.schema.to_json(), **named, "ours": True}


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
