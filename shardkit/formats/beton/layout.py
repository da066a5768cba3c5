"""The byte layout of a .beton file, version 2, for the reader and the writer.

Layout: FFCV 1.0, `types.py`, `fields/*` and `memory_managers/*`. All numbers are little-endian, all
pointers count bytes from the start of the file.

    header        24 bytes
    descriptors   1,041 bytes per field: its type, its name, arguments of the type
    table         a row per sample: the values of numbers, pointers to images, bytes and arrays
    data          the values that pointers refer to; none may cross a multiple of the page size
    section       our own, ignored by FFCV: keys, types, absent values
    allocations   {sample, pointer, size} of every value in the data, up to the end of the file

The section:

    head          size of the text, size of the keys, in bytes
    text          JSON: version, schema, classes; padded with zeros to a multiple of 8
    offsets       offset of each key in the keys, and of their end
    presence      a byte per sample for each optional field, 0 if the value is absent
    keys          concatenated, in UTF-8
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.errors import DamagedError, FormatError, drop_option, rename_option
from shardkit.schema import (
    Array,
    Bool,
    Bytes,
    FieldType,
    Float,
    Image,
    Images,
    Int,
    Json,
    Schema,
    Text,
)

VERSION = 2
PAGE = 1 << 23  # bytes of a page: FFCV's default; a file with a larger value has larger pages
MAX_VALUE = 1 << 31  # the largest power of two that is a valid page size, which is a uint32
MAX_NAME = 16
MAX_FIELDS = 0xFFFF

HEADER = np.dtype(
    [
        ("version", "<u2"),
        ("num_fields", "<u2"),
        ("page_size", "<u4"),
        ("num_samples", "<u8"),
        ("alloc_table_ptr", "<u8"),
    ]
)
DESCRIPTOR = np.dtype([("type_id", "u1"), ("name", "S16"), ("arguments", "V1024")])
ALLOCATION = np.dtype([("sample_id", "<u8"), ("ptr", "<u8"), ("size", "<u8")])
ALLOCATION_STRUCT = struct.Struct("<QQQ")

_ARRAY_ARGUMENTS = np.dtype([("shape", "<u8", 32), ("type_length", "<u8")])
# The position of our section, at the end of the first field's arguments. FFCV only reads the
# arguments of arrays, and only up to the text of the dtype.
MARK = np.dtype([("magic", "S16"), ("ptr", "<u8"), ("size", "<u8")])
MAGIC = b"shardkit section"
_MARK_AT = DESCRIPTOR["arguments"].itemsize - MARK.itemsize

RAW, JPEG = 1, 0  # modes of an image: rows of RGB pixels, or a JPEG file


class TypeId(IntEnum):
    """FFCV's numbers of the types of fields."""

    FLOAT = 0
    INT = 1
    IMAGE = 2
    BYTES = 3
    NDARRAY = 4
    JSON = 5
    TENSOR = 6  # written like NDARRAY
    CUSTOM = 255  # decoded by its author's own code


_IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("ptr", "<u8")])
_SIZED = np.dtype([("ptr", "<u8"), ("size", "<u8")])
# A field's part of a row, as a numpy dtype and as a format of `struct`.
_COLUMNS = {
    TypeId.FLOAT: (np.dtype("<f8"), "d"),
    TypeId.INT: (np.dtype("<i8"), "q"),
    TypeId.IMAGE: (_IMAGE, "BHHQ"),
    TypeId.BYTES: (_SIZED, "QQ"),
    TypeId.NDARRAY: (np.dtype("<u8"), "Q"),
    TypeId.JSON: (_SIZED, "QQ"),
    TypeId.TENSOR: (np.dtype("<u8"), "Q"),
}


class Field(NamedTuple):
    """A field from its descriptor. `dtype` and `shape` are None and () if it is not an array."""

    name: str
    type_id: TypeId
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()

    @property
    def has_data(self) -> bool:
        """Whether the values are in the data, not in the row itself."""
        return self.type_id not in (TypeId.FLOAT, TypeId.INT)

    @property
    def nbytes(self) -> int:
        """Bytes of each value of an array field."""
        assert self.dtype is not None
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


class Row:
    """The layout of a row: a struct whose columns are aligned, except images and sized values."""

    def __init__(self, fields: list[Field]) -> None:
        columns = [_COLUMNS[field.type_id] for field in fields]
        self.dtype = np.dtype([("", dtype) for dtype, _ in columns], align=True)
        assert self.dtype.names is not None
        codes, at, first = "<", 0, 0
        self.first_numbers: list[int] = []  # index of each field's first number in an unpacked row
        for name, (dtype, code) in zip(self.dtype.names, columns, strict=True):
            offset = self.dtype.fields[name][1]  # type: ignore[index] # it has names
            codes += "x" * (offset - at) + code
            at = offset + dtype.itemsize
            self.first_numbers.append(first)
            first += len(code)
        self.struct = struct.Struct(codes + "x" * (self.dtype.itemsize - at))

    def pointers(self, rows: npt.NDArray[np.void], field: int) -> npt.NDArray[np.uint64]:
        """Return the pointers of a field with data, as a view of `rows`."""
        column = rows[f"f{field}"]
        found: npt.NDArray[np.uint64] = column if column.dtype.names is None else column["ptr"]
        return found


# --- fields --------------------------------------------------------------------------------------


def fields_of(schema: Schema) -> list[Field]:
    """Return the fields that store a schema; raises FormatError if a .beton cannot hold it."""
    if not 0 < len(schema) <= MAX_FIELDS:
        what, expected = "a .beton cannot have this number of fields", f"1 to {MAX_FIELDS:,} fields"
        raise FormatError(what, expected=expected, found=f"{len(schema):,}")
    return [_field_of(name, kind) for name, kind in schema.items()]


def _field_of(name: str, kind: FieldType) -> Field:
    if not name or not name.isascii() or "\0" in name or len(name) > MAX_NAME:
        raise FormatError(
            f"a .beton cannot have a field named {name!r}",
            expected=f"1 to {MAX_NAME} ASCII characters",
            found=f"{len(name.encode(errors='replace'))} bytes",
            fix=f"rename it: {rename_option(name)}",
        )
    if isinstance(kind, Array) and is_native(kind):
        shape = tuple(n for n in kind.shape or () if n is not None)
        return Field(name, TypeId.NDARRAY, np.dtype(kind.dtype), shape)
    type_id = kind.entry(TYPE_IDS)
    if type_id is None:
        raise FormatError(
            f"a .beton cannot hold the list of images in the field {name!r}: FFCV has no such type",
            fix=f"write arrow, parquet, hf or lmdb, or convert without it: {drop_option(name)}",
        )
    return Field(name, type_id)


_KINDS = {
    TypeId.FLOAT: Float,
    TypeId.INT: Int,
    TypeId.IMAGE: Image,
    TypeId.BYTES: Bytes,
    TypeId.JSON: Json,
}
TYPE_IDS: dict[type, TypeId | None] = {
    **{kind: type_id for type_id, kind in _KINDS.items()},
    Bool: TypeId.INT,
    Array: TypeId.BYTES,
    Text: TypeId.JSON,
    Images: None,
}
# The dtypes that FFCV loads. It refuses big-endian and structured types, and hangs on float16.
_NATIVE = re.compile(r"\|b1|\|[iu]1|<[iu][248]|<f[48]|<c(8|16)")


def is_native(kind: Array) -> bool:
    """Whether FFCV can load such arrays: they have a fixed shape, and a dtype that it supports.

    No dimension may be 0, as FFCV drops trailing zeros of a shape.
    """
    return (
        kind.dtype is not None
        and _NATIVE.fullmatch(kind.dtype) is not None
        and kind.shape is not None
        and 0 < len(kind.shape) <= 32
        and all(kind.shape)
    )


def kind_of(field: Field) -> FieldType:
    """Return the type of a field in a file that FFCV wrote."""
    return (
        Array(field.dtype.str, field.shape) if field.dtype is not None else _KINDS[field.type_id]()
    )


# --- header and descriptors ----------------------------------------------------------------------


def front_size(fields: int, row_size: int, samples: int) -> int:
    """Total bytes of header, descriptors and table."""
    return HEADER.itemsize + fields * DESCRIPTOR.itemsize + samples * row_size


def pack_front(
    fields: list[Field], page_size: int, samples: int, allocations: int, section: tuple[int, int]
) -> bytes:
    """Header and descriptors. `allocations` is an offset, `section` an offset and a size."""
    header = np.array((VERSION, len(fields), page_size, samples, allocations), HEADER)
    descriptors = np.zeros(len(fields), DESCRIPTOR)
    for number, field in enumerate(fields):
        arguments = _array_arguments(field) if field.dtype is not None else b""
        if number == 0:
            mark = np.array((MAGIC, *section), MARK).tobytes()
            arguments = arguments.ljust(_MARK_AT, b"\0") + mark
        descriptors[number] = (field.type_id, field.name.encode("ascii"), arguments)
    return header.tobytes() + descriptors.tobytes()


def _array_arguments(field: Field) -> bytes:
    assert field.dtype is not None
    text = json.dumps(field.dtype.descr).encode()
    arguments = np.zeros((), _ARRAY_ARGUMENTS)
    arguments["shape"][: len(field.shape)] = field.shape
    arguments["type_length"] = len(text)
    return arguments.tobytes() + text


def unpack_field(descriptor: np.void, path: Path, offset: int) -> Field:
    """Decode the descriptor of a field, which is at `offset`."""
    where: dict[str, Any] = {"path": path, "offset": offset}
    raw, number = bytes(descriptor["name"]), int(descriptor["type_id"])
    if not raw.isascii():
        raise DamagedError("a field has a name that is not ASCII", found=repr(raw), **where)
    name = raw.split(b"\0")[0].decode("ascii")
    if number == TypeId.CUSTOM:
        raise FormatError(
            f"the field {name!r} has a custom type, which only the code of its author can read",
            fix="write the file again with that field as BytesField or NDArrayField",
            **where,
        )
    if number not in _COLUMNS:
        what, expected = f"the field {name!r} has an unknown type", "one of FFCV's types, 0 to 6"
        raise DamagedError(what, expected=expected, found=str(number), **where)
    type_id = TypeId(number)
    if type_id not in (TypeId.NDARRAY, TypeId.TENSOR):
        return Field(name, type_id)
    try:
        return Field(name, type_id, *_array_type(bytes(descriptor["arguments"])))
    except (ValueError, TypeError, RecursionError) as error:
        what = f"the type of the array field {name!r} is damaged: {error}"
        raise DamagedError(what, **where) from error


_MAX_ELEMENTS = 2**40  # most elements of an array, as in a schema
_DTYPE = re.compile(r"\|[biuSV][1-9]\d{0,5}|[<>|][iufcmMSUV][1-9]\d{0,5}(\[\d*\w+\])?")


def _array_type(arguments: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    header = np.frombuffer(arguments, _ARRAY_ARGUMENTS, 1)[0]
    start, size = _ARRAY_ARGUMENTS.itemsize, int(header["type_length"])
    ((_, code),) = json.loads(arguments[start : start + size])
    if not isinstance(code, str) or not _DTYPE.fullmatch(code):
        raise ValueError(f"invalid dtype {code!r:.60}")
    shape = header["shape"].tolist()
    while shape and shape[-1] == 0:
        shape.pop()
    if not shape or not 0 < math.prod(shape) <= _MAX_ELEMENTS:
        raise ValueError(f"invalid shape {shape}")
    return np.dtype(code), tuple(shape)


def unpack_mark(descriptor: np.void) -> tuple[int, int] | None:
    """Offset and size of our section; None for a file that FFCV wrote."""
    mark = np.frombuffer(bytes(descriptor["arguments"]), MARK, 1, _MARK_AT)[0]
    return (int(mark["ptr"]), int(mark["size"])) if mark["magic"] == MAGIC else None


# --- section -------------------------------------------------------------------------------------

SECTION_VERSION = 1
SECTION_HEAD = np.dtype([("text", "<u8"), ("keys", "<u8")])
KEY_OFFSET = np.dtype("<u8")


def optional_fields(schema: Schema) -> list[str]:
    """Return the fields that have a presence column, in the order of those columns."""
    return [name for name, kind in schema.items() if kind.optional]


def pack_text(schema: Schema, classes: Mapping[str, Sequence[str]]) -> bytes:
    """Return the section's JSON text, padded with zeros."""
    named = {name: list(names) for name, names in classes.items()}
    about = {"version": SECTION_VERSION, "schema": schema.to_json(), "classes": named}
    text = json.dumps(about, ensure_ascii=False, separators=(",", ":")).encode()
    return text + bytes(-len(text) % 8)


def section_size(text: bytes, samples: int, optional: int, keys: int) -> int:
    """Return bytes of a section with `text`, `optional` fields and `keys` bytes of keys."""
    offsets = KEY_OFFSET.itemsize * (samples + 1)
    return SECTION_HEAD.itemsize + len(text) + offsets + optional * samples + keys


# --- pages ---------------------------------------------------------------------------------------


def page_for(size: int) -> int:
    """Return the size of the smallest pages that hold a value of `size` bytes."""
    return PAGE if size <= PAGE else 1 << (size - 1).bit_length()


def value_offset(at: int, size: int) -> int:
    """Return the first offset, `at` or later, where a value does not cross a page boundary.

    The page size of a file depends on its largest value, which is only known at the end. So each
    value is placed within a page of the size that it needs itself: the boundaries of larger pages
    are also boundaries of that size, as all sizes are powers of two.
    """
    page = page_for(size)
    return at if at % page + size <= page else at + -at % page


def value_offsets(sizes: npt.NDArray[np.int64], at: int) -> tuple[npt.NDArray[np.int64], int]:
    """Return the offsets of values, the same as from `value_offset`, and the end of the last value.

    Takes one step per page, not per value.
    """
    ends = np.cumsum(sizes)
    starts = ends - sizes
    pointers = np.empty(len(sizes), np.int64)
    first = 0
    while first < len(sizes):
        at = value_offset(at, int(sizes[first]))
        left = PAGE - at % PAGE
        fitting = int(np.searchsorted(ends, starts[first] + left, "right"))
        stop = max(fitting, first + 1)  # a value larger than a page takes a step of its own
        pointers[first:stop] = starts[first:stop] + (at - starts[first])
        at += int(ends[stop - 1] - starts[first])
        first = stop
    return pointers, at


def moved_offset(start: int, stop: int, at: int, page: int) -> int:
    """The first offset, `at` or later, to which the data from `start` to `stop` may be moved.

    Data within one page may go anywhere within one page. Longer data move by a multiple of `page`,
    so that their values still do not cross pages.
    """
    if start // PAGE == max(start, stop - 1) // PAGE:
        return value_offset(at, stop - start)
    return at + (start - at) % page
