"""Random access to a .beton: a row of its table has the numbers and pointers of a sample.

Opening reads the header, the descriptors and the text of our section. Offsets and sizes in the file
are compared with the size of the file before they are used.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from shardkit.codecs.array import load_array, load_column
from shardkit.codecs.pixels import ppm_start
from shardkit.errors import DamagedError, FormatError
from shardkit.formats.base import KEY, Column, Columns, Ranges, ShardReader, numbered_key
from shardkit.formats.beton import layout as bytes_of
from shardkit.formats.beton.layout import JPEG, RAW, Field, Row, TypeId, front_size
from shardkit.helpers.checked import checked, damaged, of_version
from shardkit.sample import JsonText, Sample, key_of
from shardkit.schema import Array, Bool, Bytes, FieldType, Json, Schema, Text
from shardkit.storage.blobs import ABSENT, Blobs, Numbers, read_blobs
from shardkit.storage.byte_source import ByteSource, Table, open_source

_NUMBER_BYTES = 8

# Converts a number or stored bytes to a value; the flag requests JSON as its text.
_Decode: TypeAlias = Callable[[Any, bool], Any]


class _Column(NamedTuple):
    """How a field is read."""

    name: str
    presence: int  # start of its presence column; -1 for a field that is never absent
    at: int  # index of its first number in an unpacked row
    blob: int  # index among the fields that have data; -1 for a field without data
    is_image: bool
    size: int  # bytes of each value if they have the same size, else -1
    decode: _Decode | None


class BetonReader(ShardReader):
    """One .beton file."""

    def __init__(self, path: Path, layout: dict[str, Any] | None = None) -> None:
        source = open_source(path)
        head, self.fields, mark = _read_front(source)
        samples, self.page_size = int(head["num_samples"]), int(head["page_size"])
        self.row = Row(self.fields)
        self._numbers = {field.name: number for number, field in enumerate(self.fields)}
        self.rows = Table(source, front_size(len(self.fields), 0, 0), samples, self.row.dtype)
        self._data_at = front_size(len(self.fields), self.row.dtype.itemsize, samples)
        with_data = sum(field.has_data for field in self.fields)
        allocations_at = int(head["alloc_table_ptr"])
        self.allocations = Allocations(source, allocations_at, self._data_at, with_data)
        self.section = None if mark is None else Section(source, *mark, samples, self.fields)
        self._presence_at = {} if self.section is None else self.section.presence_at
        super().__init__(path, self._found_layout() if layout is None else layout, source)
        self._length, self._unpack = samples, self.row.struct.unpack
        self._stem = key_of(path.stem)
        self._columns = [self._column(name, kind) for name, kind in self.schema.items()]

    def __len__(self) -> int:
        return self._length

    @property
    def in_memory(self) -> int:  # type: ignore[override] # it may grow
        if self.closed:
            return 0
        section = 0 if self.section is None else self.section.in_memory
        return self.rows.in_memory + self.allocations.in_memory + section

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        section = self.section
        key = numbered_key(self._stem, position) if section is None else section.key(position)
        sample: Sample = {KEY: key}
        if fields is not None and not fields:
            return sample
        row = self._unpack(self.rows.record(position))
        for name, presence, at, blob, is_image, size, decode in self._columns:
            if fields is not None and name not in fields:
                continue
            if presence < 0 or section.presence.record(presence + position) != b"\0":  # type: ignore[union-attr] # it has presence
                value = row[at]
                if is_image:
                    value = self._image(row[at : at + 4], blob, position)
                elif blob >= 0:
                    value = self._value(value, row[at + 1] if size < 0 else size)
                sample[name] = value if decode is None else decode(value, json_text)
        return sample

    def plan(
        self, positions: npt.NDArray[np.int64], fields: Collection[str]
    ) -> Ranges | Columns | None:
        source, rows = self.source, self.rows.take(positions)
        known: Columns = {}
        spans: list[tuple[Numbers, Numbers]] = []
        kinds: dict[str, tuple[FieldType, Field]] = {}
        heads: dict[str, list[bytes]] = {}
        if self.section is None:
            known[KEY] = [numbered_key(self._stem, position) for position in positions.tolist()]
        else:
            spans.append(self.section.key_spans(positions))
        for name in fields:
            number, kind = self._numbers[name], self.schema[name]
            field, part = self.fields[number], rows[f"f{number}"]
            present = self._present(name, positions) if name in self._presence_at else None
            if not field.has_data:
                known[name] = _number_column(kind, part, present)
                continue
            kinds[name] = kind, field
            if field.type_id == TypeId.IMAGE and np.count_nonzero(part["mode"]):
                heads[name] = [
                    _head(*image) for image in part[["mode", "width", "height"]].tolist()
                ]
            spans.append(self._spans(number, part, positions, present))
        offsets, sizes = np.array(spans, np.int64).reshape(-1, 2, len(positions)).swapaxes(0, 1)
        plan = Ranges(source, offsets, sizes, _DecodeAll(self.section is not None, kinds), known)
        return _with_heads(plan, heads) if heads else plan

    def _spans(
        self, number: int, part: Any, positions: Numbers, present: npt.NDArray[np.bool_] | None
    ) -> tuple[Numbers, Numbers]:
        """Return where values of a field are, given its part of their rows.

        Raises ValueError if one is not in the data.
        """
        field = self.fields[number]
        pointers = part if field.dtype is not None else part["ptr"]
        starts = pointers.astype(np.int64)
        if field.dtype is not None:
            sizes = np.full(len(starts), field.nbytes)
        elif field.type_id != TypeId.IMAGE:
            sizes = part["size"].astype(np.int64)
        else:
            sizes = self.allocations.some_sizes(self._blob(number), positions, pointers)
            raw = part["mode"] == RAW
            if np.count_nonzero(raw):
                sizes[raw] = (3 * part["width"].astype(np.int64) * part["height"])[raw]
        bad = (starts < self._data_at) | (sizes < 0)
        if np.count_nonzero(bad if present is None else bad & present):
            raise ValueError("a value is not in the data")
        if present is not None:
            sizes[~present] = ABSENT
        return starts, sizes

    def _image(self, numbers: tuple[Any, ...], blob: int, position: int) -> bytes:
        """Return the stored JPEG, or raw pixels as a PPM."""
        mode, width, height, ptr = numbers
        if mode == JPEG:
            return self._value(ptr, self.allocations.size(blob, position, ptr))
        if mode == RAW:
            return ppm_start(width, height) + self._value(ptr, 3 * width * height)
        raise ValueError(f"an image of mode {mode}, which is neither JPEG nor raw")

    def _value(self, ptr: int, size: int) -> bytes:
        """Return the `size` bytes at a pointer."""
        if ptr < self._data_at or ptr + size > self.source.size:
            raise ValueError(f"the file does not contain its {size:,} bytes")
        return self.source.read(ptr, size)

    def offset(self, position: int, field: str) -> int | None:
        number = self._numbers[field]
        if not self.fields[number].has_data:
            return None
        return int(self.row.pointers(self.rows.slice(position, position + 1), number)[0])

    def sizes(self, field: str) -> npt.NDArray[np.int64]:
        number = self._numbers[field]
        kind, samples = self.fields[number], len(self)
        column = self.rows.slice(0, samples)[f"f{number}"]
        if not kind.has_data or kind.dtype is not None:
            sizes = np.full(samples, kind.nbytes if kind.has_data else _NUMBER_BYTES, np.int64)
        elif kind.type_id == TypeId.IMAGE:
            jpegs = self.allocations.sizes(self._blob(number), column["ptr"])
            raw = 3 * column["width"].astype(np.int64) * column["height"]
            sizes = np.where(column["mode"] == RAW, raw, jpegs)
        else:
            sizes = column["size"].astype(np.int64) - (kind.type_id == TypeId.JSON)
        return self._inside(field, sizes[self._present(field, np.arange(samples))])

    def spans(self) -> npt.NDArray[np.int64]:
        rows = self.allocations.rows.slice(0, len(self.allocations.rows))
        rows = rows[rows["sample_id"] < len(self)]
        numbers, starts = rows["sample_id"].astype(np.int64), rows["ptr"].astype(np.int64)
        found = np.zeros((len(self), 2), np.int64)
        found[numbers, 0] = np.iinfo(np.int64).max
        np.minimum.at(found[:, 0], numbers, starts)
        np.maximum.at(found[:, 1], numbers, starts + rows["size"].astype(np.int64))
        return found

    def close(self) -> None:
        if not self.closed:
            super().close()
            del self.rows, self.allocations, self.section, self._columns

    def _found_layout(self) -> dict[str, Any]:
        """Return the layout from our section, or from the descriptors of a file that FFCV wrote."""
        if self.section is None:
            schema = Schema({field.name: bytes_of.kind_of(field) for field in self.fields})
            return {"schema": schema.to_json()}
        classes = self.section.classes
        named = {} if classes is None else {"classes": classes}
        return {"schema": self.section.schema.to_json(), **named, "ours": True}

    def _present(self, field: str, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return whether the samples at these positions have the field."""
        if self.section is None or field not in self._presence_at:
            return np.ones(len(positions), bool)
        present = self.section.presence.take(positions + self._presence_at[field])
        return present.astype(bool)

    def _blob(self, number: int) -> int:
        """Return the index of a field among those that have data."""
        return sum(field.has_data for field in self.fields[:number])

    def _column(self, name: str, kind: FieldType) -> _Column:
        """How to read a field of the schema, which is that of the whole dataset, from this file."""
        number = self._numbers.get(name)
        if number is None:
            what = f"the .beton has no field {name!r}, which is in its manifest"
            raise DamagedError(what, path=self.path, found=", ".join(self._numbers))
        field = self.fields[number]
        found, decode = _decoder(field, kind)
        if not found:
            raise DamagedError(
                "the type of a field differs from its type in the manifest",
                path=self.path,
                field=name,
                expected=str(kind),
                found=f"FFCV's type {field.type_id.value} ({field.type_id.name.lower()})",
            )
        return _Column(
            name,
            presence=self._presence_at.get(name, -1),
            at=self.row.first_numbers[number],
            blob=self._blob(number) if field.has_data else -1,
            is_image=field.type_id == TypeId.IMAGE,
            size=-1 if field.dtype is None else field.nbytes,
            decode=decode,
        )


# --- the parts of a file --------------------------------------------------------------------------


def _read_front(source: ByteSource) -> tuple[np.void, list[Field], tuple[int, int] | None]:
    """Return the header, the fields, and offset and size of our section, if there is one."""
    path, header, descriptor = source.path, bytes_of.HEADER, bytes_of.DESCRIPTOR
    head = np.frombuffer(source.read(0, header.itemsize), header)[0]
    if head["version"] != bytes_of.VERSION:
        raise FormatError(
            "this is not a .beton that shardkit can read",
            path=path,
            expected=f"version {bytes_of.VERSION}",
            found=f"version {head['version']}",
            fix="write it again with FFCV 1.0",
        )
    count = int(head["num_fields"])
    if not count:
        raise FormatError("the .beton has no fields", path=path)
    stored = source.read(header.itemsize, count * descriptor.itemsize)
    descriptors = np.frombuffer(stored, descriptor)
    fields: dict[str, Field] = {}
    for number, each in enumerate(descriptors):
        offset = header.itemsize + number * descriptor.itemsize
        field = bytes_of.unpack_field(each, path, offset)
        if field.name in fields:
            what = f"the .beton has two fields named {field.name!r}"
            raise DamagedError(what, path=path, offset=offset)
        fields[field.name] = field
    return head, list(fields.values()), bytes_of.unpack_mark(descriptors[0])


class Allocations:
    """The table of the sizes of all values in the data, up to the end of the file.

    Rows may be in any order. In most files, and in all of ours, they are in the order of samples
    and fields, so the row at that index is tried first. If it belongs to another value, all
    pointers are sorted once for a search.
    """

    def __init__(self, source: ByteSource, at: int, data_at: int, fields: int) -> None:
        """`fields` is the number of fields with data; a truncated last row is ignored."""
        if not data_at <= at <= source.size:
            what = "the .beton is incomplete or truncated: it lacks its allocation table"
            raise DamagedError(what, path=source.path, found=f"byte {at:,} as its offset")
        count = (source.size - at) // bytes_of.ALLOCATION.itemsize
        self.rows = Table(source, at, count, bytes_of.ALLOCATION)
        self._fields = fields
        self._sorted: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]] | None = None

    @property
    def in_memory(self) -> int:
        return self.rows.in_memory + sum(column.nbytes for column in self._sorted or ())

    def size(self, field: int, position: int, ptr: int) -> int:
        """Bytes of the value at `ptr`, of the `field`-th field with data; ValueError if unknown."""
        row = position * self._fields + field
        if row < len(self.rows):
            _, found, size = bytes_of.ALLOCATION_STRUCT.unpack(self.rows.record(row))
            if found == ptr and size:
                return int(size)
        size = self._search(np.array([ptr], np.uint64))[0]
        if size < 0:
            raise ValueError("its size is not in the allocation table")
        return int(size)

    def some_sizes(
        self, field: int, positions: npt.NDArray[np.int64], pointers: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int64]:
        """Return bytes of the field's values in these samples; -1 if unknown."""
        numbers = positions * self._fields + field
        if numbers.max() < len(self.rows):
            rows = self.rows.take(numbers)
            if not np.count_nonzero((rows["ptr"] != pointers) | (rows["size"] == 0)):
                sizes: npt.NDArray[np.int64] = rows["size"].astype(np.int64)
                return sizes
        return self._search(pointers)

    def sizes(self, field: int, pointers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return bytes of the field's value in all samples; -1 if unknown."""
        rows = self.rows.slice(0, len(self.rows))[field :: self._fields]
        if len(rows) == len(pointers) and (rows["ptr"] == pointers).all() and rows["size"].all():
            sizes: npt.NDArray[np.int64] = rows["size"].astype(np.int64)
            return sizes
        return self._search(pointers)

    def _search(self, pointers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        if not len(self.rows):
            return np.full(len(pointers), -1, np.int64)
        if self._sorted is None:
            # In FFCV, an empty value has the pointer of the next one: the largest size counts.
            rows = self.rows.slice(0, len(self.rows))
            order = np.lexsort((rows["size"], rows["ptr"]))
            self._sorted = (rows["ptr"][order], rows["size"][order])
        known, sizes = self._sorted
        found = np.searchsorted(known, pointers, "right") - 1
        there = (found >= 0) & (known[found] == pointers)
        return np.where(there, sizes[found].astype(np.int64), -1)


class _About(TypedDict):
    """The JSON text of a section."""

    schema: dict[str, Any]
    classes: dict[str, list[str]] | None


_KEY_SPAN = struct.Struct("<QQ")  # the start of a key, and that of the next one


class Section:
    """Our section: keys, types and absent values, which FFCV's layout has no place for."""

    def __init__(
        self, source: ByteSource, at: int, size: int, samples: int, fields: list[Field]
    ) -> None:
        """Raises DamagedError if the section of `size` bytes at `at` does not match the file."""
        what, head = "the section with keys and types", bytes_of.SECTION_HEAD
        where: dict[str, Any] = {"path": source.path, "offset": at}
        text_size = keys_size = 0
        if head.itemsize <= size <= source.size - at:
            text_size, keys_size = np.frombuffer(source.read(at, head.itemsize), head)[0].tolist()
        if not 0 < text_size <= size - head.itemsize:
            shown = f"text of {text_size:,} bytes in a section of {size:,}"
            raise DamagedError(f"{what} is damaged", found=shown, **where)
        text = source.read(at + head.itemsize, text_size).rstrip(b"\0")
        found = of_version(bytes_of.SECTION_VERSION, "version", text, what, **where)
        try:
            about = checked(_About, found)
            self.schema, self.classes = Schema.from_json(about["schema"]), about["classes"]
        except FormatError as error:  # a type that this version does not know
            raise error.located(**where) from error.__cause__
        except ValueError as error:
            raise damaged(what, error, **where) from error
        stored: list[Field] = []
        with contextlib.suppress(FormatError):  # no file can store such a schema
            stored = bytes_of.fields_of(self.schema)
        if stored != fields:
            what = "the fields of the .beton differ from those in its section"
            raise DamagedError(what, path=source.path, expected=", ".join(self.schema))
        optional = bytes_of.optional_fields(self.schema)
        offsets_at = at + head.itemsize + text_size
        presence_at = offsets_at + bytes_of.KEY_OFFSET.itemsize * (samples + 1)
        keys_at = presence_at + len(optional) * samples
        if keys_at + keys_size != at + size:
            shown = f"parts of {keys_at + keys_size - at:,} bytes in a section of {size:,}"
            raise DamagedError(f"{what} is damaged", found=shown, **where)
        self.offsets = Table(source, offsets_at, samples + 1, bytes_of.KEY_OFFSET)
        self.presence = Table(source, presence_at, len(optional) * samples, "u1")
        self.presence_at = {name: number * samples for number, name in enumerate(optional)}
        self._keys_at, self.keys = keys_at, Table(source, keys_at, keys_size, "u1")
        self.in_memory = sum(t.in_memory for t in (self.offsets, self.presence, self.keys))

    def key(self, position: int) -> str:
        start, stop = _KEY_SPAN.unpack(self.offsets.record(position, 2))
        if not start <= stop <= len(self.keys):
            raise ValueError("the key is outside the keys")
        return self.keys.record(start, stop - start).decode()

    def key_spans(self, positions: npt.NDArray[np.int64]) -> tuple[Numbers, Numbers]:
        """Return offsets and sizes of keys in the file; raises ValueError if one is damaged."""
        starts, stops = self.offsets.take(positions, 2).T
        if np.count_nonzero((starts > stops) | (stops > len(self.keys))):
            raise ValueError("a key is outside the keys")
        return starts.astype(np.int64) + self._keys_at, (stops - starts).astype(np.int64)


# --- values --------------------------------------------------------------------------------------


def _decoder(field: Field, kind: FieldType) -> tuple[bool, _Decode | None]:
    """Return whether values of a field can be read as `kind`, and what converts them, if anything.

    Images can be read as bytes: the common type if the files of a dataset differ.
    """
    if field.type_id == TypeId.IMAGE and type(kind) is Bytes:
        return True, None
    if field.dtype is None:
        return kind.entry(bytes_of.TYPE_IDS) == field.type_id, _DECODERS.get(type(kind))
    known = isinstance(kind, Array) and (kind.dtype, kind.shape) == (field.dtype.str, field.shape)
    return known, partial(_array, field.dtype, field.shape)


def _array(dtype: np.dtype[Any], shape: tuple[int, ...], data: bytes, json_text: bool) -> Any:
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


def _json(data: bytes, json_text: bool) -> Any:
    text = data.partition(b"\0")[0].decode()
    value = json.loads(text)
    return JsonText(text) if json_text else value


def _text(data: bytes, json_text: bool) -> str:
    found = _json(data, False)
    if not isinstance(found, str):
        raise ValueError("its JSON is not a string")
    return found


_DECODERS: dict[type, _Decode] = {
    Bool: lambda number, json_text: bool(number),
    Array: lambda data, json_text: load_array(data),
    Json: _json,
    Text: _text,
}


# --- several values -------------------------------------------------------------------------------


def _number_column(kind: FieldType, numbers: Any, present: npt.NDArray[np.bool_] | None) -> Column:
    """Return numbers as int64, float64 or bool; as a list if some are absent."""
    dtype = bool if isinstance(kind, Bool) else numbers.dtype
    found: npt.NDArray[Any] = numbers.astype(dtype)
    if present is None:
        return found
    pairs = zip(found.tolist(), present.tolist(), strict=True)
    return [number if there else None for number, there in pairs]


@dataclass(frozen=True)
class _DecodeAll:
    """Turns keys, if they are stored, and values into columns."""

    keyed: bool
    kinds: dict[str, tuple[FieldType, Field]]

    def __call__(self, blobs: list[Blobs]) -> Columns:
        columns: Columns = {KEY: blobs[0].texts()} if self.keyed else {}
        for (name, (kind, field)), values in zip(
            self.kinds.items(), blobs[self.keyed :], strict=True
        ):
            columns[name] = _column_of(kind, field, values)
        return columns


def _column_of(kind: FieldType, field: Field, values: Blobs) -> Column:
    if isinstance(kind, Bytes):
        return values
    if field.dtype is not None:
        return values.arrays(field.dtype, field.shape)
    if isinstance(kind, Array):
        return load_column(values, kind.optional)
    decode = _DECODERS[type(kind)]
    return values.decoded(lambda data: decode(data, False), kind.optional)


def _head(mode: int, width: int, height: int) -> bytes:
    """Return what precedes the stored bytes of an image in its value."""
    if mode not in (JPEG, RAW):
        raise ValueError(f"an image of mode {mode}")
    return ppm_start(width, height) if mode == RAW else b""


def _with_heads(plan: Ranges, heads: dict[str, list[bytes]]) -> Columns:
    """Return the columns of a plan, with bytes before the stored bytes of some fields."""
    which = np.zeros(plan.offsets.shape[1], np.int64)
    blobs = read_blobs([plan.source], which, plan.offsets, plan.sizes)
    columns: Any = {**plan.known, **plan.decode(blobs)}
    for name, starts in heads.items():
        pairs = zip(starts, columns[name].values(), strict=True)
        columns[name] = Blobs.of([None if v is None else start + v for start, v in pairs])
    return {**columns}
