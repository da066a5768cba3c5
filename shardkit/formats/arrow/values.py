"""Checks which column types can hold which fields, and decodes the values of a page of rows.

A value that is a single byte range (bytes, text, images, lists of numbers) is read from the buffer
of the column, in memory or in the file. For all other values, pyarrow makes an array of the rows
and converts it to Python values. Offsets and lengths are checked before use, as files may be
damaged.
"""

from __future__ import annotations

import datetime
import decimal
import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.codecs.array import load_array
from shardkit.errors import FormatError, SampleError
from shardkit.sample import JsonText, UnsupportedError
from shardkit.schema import (
    Array,
    Bool,
    Bytes,
    FieldType,
    Float,
    Images,
    Int,
    Json,
    Scalar,
    Text,
    int64,
)
from shardkit.storage.byte_source import ByteSource
from shardkit.storage.fs import check_expansion

PAGE = 1024  # rows whose offsets and small values are read at once
_SMALL = 64  # bytes per row up to which the values of a page are read at once
_FEW = 1024  # bytes that may be added to this limit, for pages with few rows

Getter: TypeAlias = Callable[[int], Any]  # maps a row of a page to its value; None for a null
Cut: TypeAlias = "Callable[[int, int], bytes | memoryview]"  # returns the bytes [start, stop)


# --- types ---------------------------------------------------------------------------------------


def plain_type(stored: pa.DataType) -> pa.DataType:
    """Return the type without extension types and dictionaries: their storage and value types."""
    while isinstance(stored, pa.BaseExtensionType | pa.DictionaryType):
        dictionary = isinstance(stored, pa.DictionaryType)
        stored = stored.value_type if dictionary else stored.storage_type
    return stored


def is_list(stored: pa.DataType) -> bool:
    return isinstance(stored, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


def is_number(stored: pa.DataType) -> bool:
    return bool(pa.types.is_integer(stored) or pa.types.is_floating(stored))


def is_element(stored: pa.DataType) -> bool:
    """Return whether lists of this type can be arrays."""
    return is_number(stored) or pa.types.is_boolean(stored)


# These types are checked by name, as old versions of pyarrow do not have view types.


def is_text(stored: pa.DataType) -> bool:
    return str(stored) in ("string", "large_string", "string_view")


def _is_bytes(stored: pa.DataType) -> bool:
    return str(stored).startswith(("binary", "large_binary", "fixed_size_binary"))


def _is_view(stored: pa.DataType) -> bool:
    return str(stored) in ("string_view", "binary_view")


def _children(stored: pa.DataType) -> list[pa.Field]:
    return [stored.field(n) for n in range(stored.num_fields)]


def _holds_images(stored: pa.DataType) -> bool:
    """Whether a type is bytes, or a struct of bytes and path, as in Hugging Face's images."""
    if not pa.types.is_struct(stored):
        return _is_bytes(stored)
    found = [plain_type(field.type) for field in _children(stored) if field.name == "bytes"]
    return len(found) == 1 and (_is_bytes(found[0]) or pa.types.is_null(found[0]))


def json_holds(stored: pa.DataType) -> bool:
    """Return whether JSON can represent the values of a type, with dates and times as ISO 8601."""
    types, stored = pa.types, plain_type(stored)
    if types.is_struct(stored):
        fields = _children(stored)
        unique = len({field.name for field in fields}) == len(fields)
        return unique and all(json_holds(field.type) for field in fields)
    if types.is_map(stored):
        return json_holds(stored.key_type) and json_holds(stored.item_type)
    if is_list(stored):
        return json_holds(stored.value_type)
    scalars = (types.is_null, types.is_boolean, types.is_decimal, types.is_date, types.is_time)
    text = is_text(stored) or types.is_timestamp(stored)
    return text or is_number(stored) or any(is_type(stored) for is_type in scalars)


def tensor_shape(stored: pa.DataType) -> tuple[int, ...] | None:
    """The shape of the values in a column of `arrow.fixed_shape_tensor`; None for other columns."""
    if getattr(stored, "extension_name", None) != "arrow.fixed_shape_tensor":
        return None
    if stored.permutation not in (None, [*range(len(stored.shape))]):
        raise FormatError(
            "a column has tensors with permuted dimensions",
            found=str(stored.permutation),
            fix="write it with arrays that are contiguous (numpy.ascontiguousarray)",
        )
    return tuple(stored.shape)


def fits(kind: FieldType, stored: pa.DataType) -> bool:
    """Return whether a column of the type `stored` can hold the values of a field."""
    tensor, stored = tensor_shape(stored), plain_type(stored)
    if pa.types.is_null(stored):
        return True
    if isinstance(kind, Images):
        return is_list(stored) and _holds_images(plain_type(stored.value_type))
    if isinstance(kind, Bytes):
        return _holds_images(stored) or (is_text(stored) and type(kind) is Bytes)
    if isinstance(kind, Array) and is_list(stored):
        levels = 0
        while is_list(stored):
            levels, stored = levels + 1, plain_type(stored.value_type)
        if kind.dtype is None or not is_element(stored):
            return False
        alike = len(kind.shape or ()) == levels if tensor is None else kind.shape == tensor
        dtype, expected = np.dtype(stored.to_pandas_dtype()), np.dtype(kind.dtype)
        return alike and (dtype == expected or (expected == np.bool_ and dtype == np.uint8))
    return kind.entry(_FITS)(stored) and (tensor is None or not isinstance(kind, Json))


_FITS: dict[type, Callable[[pa.DataType], bool]] = {
    Array: _is_bytes,
    Bool: pa.types.is_boolean,
    Float: pa.types.is_floating,
    Int: pa.types.is_integer,
    Json: json_holds,
    Text: is_text,
}


def plain(array: pa.Array) -> pa.Array:
    """The array converted to its `plain_type`; raises ValueError for a damaged dictionary."""
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not pa.types.is_dictionary(array.type):
        return array
    array.validate(full=True)  # an index may be outside of the dictionary
    values = array.dictionary
    if _is_view(values.type):  # pyarrow cannot decode dictionaries of views
        values = fetch(values, 0, len(values), MEMORY)
        array = pa.DictionaryArray.from_arrays(array.indices, values)
    if is_text(values.type) or _is_bytes(values.type):
        # Decoding copies each value for all rows that refer to it: limit the memory for that.
        uses = np.bincount(array.indices.drop_null().to_numpy(), minlength=len(values))
        ranges = ranges_of(values, Bytes(), 0, len(values), MEMORY)
        assert ranges is not None
        check_expansion(int(np.dot(uses, ranges._replace(present=None).lengths())), array.nbytes)
    return plain(array.dictionary_decode())


# --- buffers -------------------------------------------------------------------------------------


class Buffers:
    """Reads the buffers of arrays, from memory or from a file: `zeros` are then in their place."""

    def __init__(self, file: ByteSource | None = None, body: int = 0, zeros: Any = b"") -> None:
        """`body`: the byte of the file that the first of the zeros stands for."""
        self.in_file = file is not None
        self._file, self._zeros = file, zeros
        self._base = body - int(pa.py_buffer(zeros).address) if file else 0

    def position(self, buffer: pa.Buffer | None) -> int | None:
        """Return the byte of the file at which a buffer begins; None if empty or in memory."""
        return self._base + int(buffer.address) if self.in_file and buffer else None

    def cut(self, buffer: pa.Buffer | None, end: int | None = None) -> Cut:
        """A function that reads ranges of a buffer, or ValueError outside its first `end` bytes."""
        if buffer is None or not buffer.size:
            return _cut(b"")
        if self._file is None:
            return _cut(memoryview(buffer).cast("B")[:end])
        end = buffer.size if end is None else min(end, buffer.size)
        base, read = self._base + int(buffer.address), self._file.read

        def cut(start: int, stop: int) -> bytes:
            if not 0 <= start <= stop <= end:
                raise ValueError(f"bytes {start} to {stop} are outside of a buffer of {end}")
            return read(base + start, stop - start)

        return cut


def _cut(data: bytes | memoryview, first: int = 0) -> Cut:
    """A function that returns ranges of bytes, of which `data` are those from byte `first` on."""
    end = first + len(data)

    def cut(start: int, stop: int) -> bytes | memoryview:
        if not first <= start <= stop <= end:
            raise ValueError(f"bytes {start} to {stop} are outside of a buffer of {end}")
        return data[start - first : stop - first]

    return cut


MEMORY = Buffers()


def bits_of(buffer: pa.Buffer, start: int, stop: int, buffers: Buffers) -> npt.NDArray[np.uint8]:
    """Return the bits [start, stop) of a bitmap, each 0 or 1."""
    data = buffers.cut(buffer)(start >> 3, (stop + 7) >> 3)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    return bits[start & 7 : (start & 7) + stop - start]


def presence(
    array: pa.Array, start: int, stop: int, buffers: Buffers
) -> npt.NDArray[np.uint8] | None:
    """0 for each row that is null, else 1; None if no row of the array is null."""
    bitmap = array.buffers()[0]
    if bitmap is None or not array.null_count:
        return None
    return bits_of(bitmap, array.offset + start, array.offset + stop, buffers)


def _offsets(array: pa.Array, start: int, stop: int, buffers: Buffers) -> memoryview:
    """Return the offset at which each row begins, and that at which the last one ends."""
    size, code = (8, "q") if str(array.type).startswith("large_") else (4, "i")
    first, end = array.offset + start, array.offset + stop + 1
    data = buffers.cut(array.buffers()[1])(first * size, end * size)
    return memoryview(data).cast(code)  # type: ignore[call-overload, no-any-return]


def fetch(array: pa.Array, start: int, stop: int, buffers: Buffers) -> pa.Array:
    """Load rows of an array into memory, without extension types and views; checks offsets."""
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not 0 <= start <= stop <= len(array):
        raise ValueError(f"rows {start} to {stop} are outside of an array of {len(array)}")
    stored, count, types = array.type, stop - start, pa.types
    if types.is_null(stored):
        return pa.nulls(count)
    if _is_view(stored):
        return _fetch_views(array, start, stop, buffers)
    present = presence(array, start, stop, buffers)
    found = [None if present is None else _packed(present)]
    children: list[pa.Array] = []
    first, end = array.offset + start, array.offset + stop
    if types.is_struct(stored):
        fields = _children(stored)
        children = [fetch(array.field(n), start, stop, buffers) for n in range(len(fields))]
        fields = [f.with_type(child.type) for f, child in zip(fields, children, strict=True)]
        stored = pa.struct(fields)
    elif types.is_fixed_size_list(stored):
        size = stored.list_size
        children = [fetch(array.values, first * size, end * size, buffers)]
        stored = pa.list_(children[0].type, size)
    elif types.is_boolean(stored):
        found.append(_packed(bits_of(array.buffers()[1], first, end, buffers)))
    elif is_list(stored) or types.is_map(stored) or len(array.buffers()) == 3:
        offsets = np.array(_offsets(array, start, stop, buffers))
        if (offsets[1:] < offsets[:-1]).any():
            raise ValueError("a value has a negative length")
        first, end = int(offsets[0]), int(offsets[-1])
        found.append(pa.py_buffer(offsets - first))
        if is_list(stored) or types.is_map(stored):
            children = [fetch(array.values, first, end, buffers)]
            stored = _list_of(stored, children[0].type)
        else:
            found.append(pa.py_buffer(buffers.cut(array.buffers()[2])(first, end)))
    else:
        width = stored.bit_width // 8
        found.append(pa.py_buffer(buffers.cut(array.buffers()[1])(first * width, end * width)))
    return pa.Array.from_buffers(stored, count, found, children=children)


def _list_of(stored: pa.DataType, inner: pa.DataType) -> pa.DataType:
    """Return the type of lists or maps `stored`, with another type inside."""
    if pa.types.is_map(stored):
        return pa.map_(inner.field(0).type, inner.field(1).type)
    return pa.large_list(inner) if pa.types.is_large_list(stored) else pa.list_(inner)


def _packed(bits: npt.NDArray[np.uint8]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(bits, bitorder="little"))


def _fetch_views(array: pa.Array, start: int, stop: int, buffers: Buffers) -> pa.Array:
    """A view is a length, then up to 12 bytes, or the first 4 bytes, a buffer and an offset."""
    present = presence(array, start, stop, buffers)
    _, views, *more = array.buffers()
    data = bytes(buffers.cut(views)(16 * (array.offset + start), 16 * (array.offset + stop)))
    sizes = np.frombuffer(data, "<i4")[::4].astype(np.int64)
    check_expansion(int(sizes.sum()), sum(buffer.size for buffer in (views, *more)))
    parts = [buffers.cut(part) for part in more]
    values: list[bytes | None] = []
    for row, size in enumerate(sizes.tolist()):
        if present is not None and not present[row]:
            values.append(None)
        elif 0 <= size <= 12:
            values.append(data[16 * row + 4 : 16 * row + 4 + size])
        else:
            number, at = struct.unpack_from("<ii", data, 16 * row + 8)
            if not 0 <= number < len(parts):
                raise ValueError(f"buffer {number} does not exist: there are {len(parts)}")
            values.append(bytes(parts[number](at, at + size)))
    found = pa.array(values, pa.large_binary())
    return found.view(pa.large_string()) if is_text(array.type) else found


# --- values --------------------------------------------------------------------------------------


class Ranges(NamedTuple):
    """Values that are byte ranges: value n lies between offsets n and n + 1, times `width`."""

    offsets: Sequence[int]
    width: int
    cut: Cut
    end: int  # size of the buffer in bytes
    at: int | None  # the byte of the file at which the buffer begins; None if it is in memory
    present: npt.NDArray[np.uint8] | None  # 0 for a null, else 1; None if there are no nulls

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return bytes of each value that is not null."""
        lengths: npt.NDArray[np.int64] = np.diff(np.array(self.offsets, np.int64)) * self.width  # type: ignore[assignment]
        if len(lengths) and lengths.min() < 0:
            raise ValueError("a value has a negative length")
        return lengths if self.present is None else lengths[self.present > 0]


class Column(NamedTuple):
    """A column in a page of rows."""

    get: Getter
    size: int  # bytes of memory that it uses
    ranges: Ranges | None = None


def column(
    kind: FieldType, array: pa.Array, first: int, stop: int, buffers: Buffers = MEMORY
) -> Column:
    """The values of a field in the rows [first, stop) of a `plain` array; JSON as JsonText."""
    if pa.types.is_null(array.type):
        return Column(lambda row: None, 0)
    if isinstance(kind, Bytes) and pa.types.is_struct(array.type):
        return _images(array, first, stop, buffers)
    ranges = ranges_of(array, kind, first, stop, buffers)
    if ranges is not None:
        return _range_column(maker(kind, array.type), ranges, stop - first, buffers)
    if not buffers.in_file and not _is_view(array.type):
        part = array.slice(first, stop - first)
        part.validate(full=True)
        return Column(_getter(kind, part), part.nbytes + 32 * len(part))
    if average_size(array) <= _SMALL:
        return column(kind, fetch(array, first, stop, buffers), 0, stop - first)

    def get(row: int) -> Any:
        one = fetch(array, first + row, first + row + 1, buffers)
        return column(kind, one, 0, 1).get(0)

    return Column(get, 0)


def average_size(array: pa.Array) -> float:
    """Return bytes per row in all buffers of an array."""
    return float(sum(b.size for b in array.buffers() if b) / max(len(array), 1))


def ranges_of(
    array: pa.Array, kind: FieldType, first: int, stop: int, buffers: Buffers
) -> Ranges | None:
    """The ranges of values that are bytes, text or lists of numbers; None for other values."""
    width, fixed, end, stored = 1, None, None, array.type
    if isinstance(kind, Array) and is_list(stored):
        inner, values = [], array.values
        while pa.types.is_fixed_size_list(values.type) and not (values.null_count or values.offset):
            inner.append(values.type.list_size)
            values = values.values
        flat = not inner or inner == [*(kind.shape or ())[1:]]  # not nested: 1-D, or a tensor
        if not (flat and is_number(values.type)) or values.null_count or values.offset:
            return None
        size = values.type.bit_width // 8
        width, end, data = math.prod(inner) * size, len(values) * size, values.buffers()[1]
        if not width:
            return None
        fixed = stored.list_size if pa.types.is_fixed_size_list(stored) else None
    elif (is_text(stored) or _is_bytes(stored)) and not _is_view(stored):
        data = array.buffers()[-1]
        fixed = stored.byte_width if pa.types.is_fixed_size_binary(stored) else None
    else:
        return None
    offsets: Sequence[int]
    if fixed is None:
        offsets = _offsets(array, first, stop, buffers)
    elif fixed:
        begin = (array.offset + first) * fixed
        offsets = range(begin, begin + (stop - first) * fixed + 1, fixed)
    else:
        offsets = [0] * (stop - first + 1)
    present = presence(array, first, stop, buffers)
    held = data.size if data is not None else 0
    end = held if end is None else min(end, held)
    return Ranges(offsets, width, buffers.cut(data, end), end, buffers.position(data), present)


def _range_column(
    make: Callable[[Any], Any], ranges: Ranges, rows: int, buffers: Buffers
) -> Column:
    """A column of values that are byte ranges: the small values of a page are read at once."""
    offsets, width, cut, _, _, present = ranges
    low, high = offsets[0] * width, offsets[-1] * width
    size = 8 * rows
    if buffers.in_file and 0 <= high - low <= _SMALL * rows + _FEW:
        cut, size = _cut(cut(low, high), low), size + high - low

    def get(row: int) -> Any:
        return make(cut(offsets[row] * width, offsets[row + 1] * width))

    if present is None:
        return Column(get, size, ranges)
    there = present.tolist()
    return Column(lambda row: get(row) if there[row] else None, size, ranges)


def _images(array: pa.StructArray, first: int, stop: int, buffers: Buffers) -> Column:
    """Images as Hugging Face stores them: their bytes, or the path of a file outside the shard."""
    names = [field.name for field in _children(array.type)]
    data = plain(array.field(names.index("bytes")))
    found = column(Bytes(), data, first, stop, buffers)
    if not array.null_count and not data.null_count:
        return found
    there = presence(array, first, stop, buffers)
    path: Getter = lambda row: None  # noqa: E731
    if "path" in names and is_text(plain_type(array.type.field("path").type)):
        paths = plain(array.field(names.index("path")))
        path = column(Text(), paths, first, stop, buffers).get

    def get(row: int) -> Any:
        if there is not None and not there[row]:
            return None
        value = found.get(row)
        return _elsewhere(path(row)) if value is None else value

    ranges = found.ranges
    if ranges is not None and there is not None:
        both = there if ranges.present is None else there & ranges.present
        ranges = ranges._replace(present=both)
    return Column(get, found.size, ranges)


def _elsewhere(path: str | None) -> None:
    """Raise SampleError for the path of an image, audio or video without bytes."""
    if path:
        raise SampleError(
            "the shard contains only the path of a file, not its bytes",
            expected="the bytes of the file",
            found=repr(path),
            fix="embed the files where the dataset was made: with save_to_disk of datasets, or with"
            " its table.embed_table_storage before writing a file",
        )


_FROM_BYTES: dict[type, Callable[[Any], Any]] = {
    Bytes: bytes,
    Json: partial(JsonText, encoding="utf-8"),
    Text: partial(str, encoding="utf-8"),
}


def maker(kind: FieldType, stored: pa.DataType) -> Callable[[Any], Any]:
    """Return a function that decodes the bytes of a value: for arrays, numbers or a `.npy` file."""
    if not isinstance(kind, Array):
        return kind.entry(_FROM_BYTES)
    if not is_list(stored):
        return lambda data: load_array(bytes(data))
    dtype, shape = np.dtype(kind.dtype), tuple(-1 if n is None else n for n in kind.shape or ())
    return lambda data: np.frombuffer(data, dtype).reshape(shape).copy()


def _getter(kind: FieldType, array: pa.Array) -> Getter:
    """Return a getter for values of an array in memory that pyarrow decodes."""
    if isinstance(kind, Scalar):
        if array.null_count or isinstance(kind, Bool):
            array = array.cast(pa.float64()) if isinstance(kind, Float) else array
            number = array.to_pylist().__getitem__
        else:  # `to_numpy` would import pandas
            data = memoryview(array.buffers()[1])
            number = np.frombuffer(data, array.type.to_pandas_dtype())[array.offset :].item
        return _checked(number) if array.type == pa.uint64() else number

    def get(row: int) -> Any:
        if isinstance(kind, Array):
            one = array.slice(row, 1)
            return None if one.null_count else _numbers(one, kind)
        value = array[row].as_py()
        if value is None:
            return None
        return JsonText.of(_jsonable(value)) if isinstance(kind, Json) else _image_list(value)

    return get


def _checked(number: Getter) -> Getter:
    """Raise ValueError for numbers that do not fit in 64 bits with a sign."""

    def get(row: int) -> int | None:
        value = number(row)
        return None if value is None else int64(value)

    return get


def _image_list(values: list[Any]) -> list[bytes]:
    """Return the bytes of each image in a list."""
    found = []
    for value in values:
        data = value["bytes"] if isinstance(value, dict) else value
        if data is None and value is not None:
            path = value.get("path")
            _elsewhere(path if isinstance(path, str) else None)
        if data is None:
            raise ValueError("a list of images contains a null")
        found.append(bytes(data))
    return found


def _numbers(array: pa.Array, kind: Array) -> npt.NDArray[Any]:
    """The numbers in an array of a single list, which is nested once per dimension, or a tensor."""
    sides: tuple[int | None, ...] = kind.shape or ()
    if len(sides) > 1 and not is_list(array.type.value_type):  # a tensor, as one list
        sides = (math.prod(n or 0 for n in sides),)
    shape: list[int] = []
    for length in sides:
        if array.null_count:
            raise ValueError("a nested list contains a null")
        if pa.types.is_fixed_size_list(array.type):
            lengths = {array.type.list_size}
        else:
            lengths = {*np.diff(array.offsets.to_numpy()).tolist()} or {length or 0}
        if len(lengths) > 1 or length not in (None, *lengths):
            raise ValueError("lists in one dimension have different or unexpected lengths")
        shape.append(lengths.pop())
        array = plain(array.flatten())
    if array.null_count:
        raise ValueError("a list of numbers contains a null")
    numbers = array.to_numpy(zero_copy_only=False)
    numbers = numbers.reshape(shape if len(sides) == len(kind.shape or ()) else kind.shape)
    return np.array(numbers)


def _jsonable(value: Any) -> Any:
    """The value with dates, times and decimals as text; raises ValueError for NaN and infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UnsupportedError(f"JSON has no number {value}")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, dict):
        return {name: _jsonable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    return value
