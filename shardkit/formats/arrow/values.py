"""Which types of columns hold which fields, and what gets the values of a page of rows.

Where a value is one range of bytes (bytes, text, images, lists of numbers), it is cut out of the
column's buffer, in memory or in the file. For all else pyarrow makes an array of the rows and
Python values of that. What buffers say is checked before it is used, as files are damaged.
"""

from __future__ import annotations

import datetime
import decimal
import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from shardkit.codecs.array import load_array
from shardkit.errors import FormatError, SampleError
from shardkit.sample import JsonText
from shardkit.schema import Array, Bool, Bytes, FieldType, Float, Image, Images, Int, Json, Text
from shardkit.storage import check_expansion

if TYPE_CHECKING:
    import numpy.typing as npt

PAGE = 1024  # rows whose offsets and small values are read at once
_SMALL = 64  # bytes of a row up to which the values of a page are read at once
_FEW = 1024  # bytes that are read at once, however few rows there are
_LARGEST_INT = 2**63 - 1

Getter: TypeAlias = Callable[[int], Any]  # from a row of a page to its value; None for a null
Cut: TypeAlias = "Callable[[int, int], bytes | memoryview]"


# --- types ---------------------------------------------------------------------------------------


def plain_type(stored: pa.DataType) -> pa.DataType:
    """The type without what extensions and dictionaries wrap around it."""
    while isinstance(stored, pa.BaseExtensionType | pa.DictionaryType):
        dictionary = isinstance(stored, pa.DictionaryType)
        stored = stored.value_type if dictionary else stored.storage_type
    return stored


def is_list(stored: pa.DataType) -> bool:
    return isinstance(stored, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


def is_number(stored: pa.DataType) -> bool:
    return bool(pa.types.is_integer(stored) or pa.types.is_floating(stored))


# By name, as an old pyarrow has no views.


def is_text(stored: pa.DataType) -> bool:
    return str(stored) in ("string", "large_string", "string_view")


def _is_bytes(stored: pa.DataType) -> bool:
    return str(stored).startswith(("binary", "large_binary", "fixed_size_binary"))


def _is_view(stored: pa.DataType) -> bool:
    return str(stored) in ("string_view", "binary_view")


def _children(stored: pa.DataType) -> list[pa.Field]:
    return [stored.field(n) for n in range(stored.num_fields)]


def _holds_images(stored: pa.DataType) -> bool:
    """Bytes, or as Hugging Face stores images a struct of bytes and path."""
    if not pa.types.is_struct(stored):
        return _is_bytes(stored)
    found = [plain_type(field.type) for field in _children(stored) if field.name == "bytes"]
    return len(found) == 1 and (_is_bytes(found[0]) or pa.types.is_null(found[0]))


def json_holds(stored: pa.DataType) -> bool:
    """Whether JSON can say what values of a type are, dates and times as ISO 8601."""
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


class Tensor(NamedTuple):
    """What a column of type `arrow.fixed_shape_tensor` holds."""

    stored: tuple[int, ...]  # the shape in which the numbers stand
    order: tuple[int, ...]  # how its dimensions are permuted
    shape: tuple[int, ...]  # that of the values

    def arranged(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The value that is stored as these numbers."""
        return numbers.reshape(self.stored).transpose(self.order).copy("C")


def tensor_of(stored: pa.DataType) -> Tensor | None:
    """Shape and order of a column of tensors; None for any other column.

    Raises FormatError where its order is no plain exchange of dimensions: there the specification
    and pyarrow, which writes such, mean different arrays.
    """
    if getattr(stored, "extension_name", None) != "arrow.fixed_shape_tensor":
        return None
    shape, order = tuple(stored.shape), tuple(stored.permutation or range(len(stored.shape)))
    if any(order[order[n]] != n for n in order):
        raise FormatError(
            "a column holds tensors whose dimensions are rotated, which programs read differently",
            expected="an order that is its own inverse, such as [1, 0]",
            found=str(list(order)),
            fix="write it with arrays that are contiguous (numpy.ascontiguousarray)",
        )
    return Tensor(shape, order, tuple(shape[n] for n in order))


def fits(kind: FieldType, stored: pa.DataType) -> bool:
    """Whether a column of a type can hold the values of a field."""
    tensor, stored = tensor_of(stored), plain_type(stored)
    if pa.types.is_null(stored):
        return True
    if isinstance(kind, Images):
        return is_list(stored) and _holds_images(plain_type(stored.value_type))
    if isinstance(kind, Bytes):
        return _holds_images(stored) or (is_text(stored) and not isinstance(kind, Image))
    if isinstance(kind, Array) and is_list(stored):
        levels = 0
        while is_list(stored):
            levels, stored = levels + 1, plain_type(stored.value_type)
        if kind.dtype is None or not is_number(stored):
            return False
        alike = len(kind.shape or ()) == levels if tensor is None else kind.shape == tensor.shape
        return alike and bool(np.dtype(stored.to_pandas_dtype()) == np.dtype(kind.dtype))
    return _FITS[type(kind)](stored)


_FITS: dict[type[FieldType], Callable[[pa.DataType], bool]] = {
    Array: _is_bytes,
    Bool: pa.types.is_boolean,
    Float: pa.types.is_floating,
    Int: pa.types.is_integer,
    Json: json_holds,
    Text: is_text,
}


def check_fits(name: str, kind: FieldType, stored: pa.DataType) -> None:
    """Raises FormatError unless a column of a type can hold the values of a field."""
    if not fits(kind, stored):
        raise FormatError(
            "a column is not of the type that its field has",
            field=name,
            expected=f"a column that can hold {kind}",
            found=str(stored),
            fix="convert the shards of each kind by themselves",
        )


def plain(array: pa.Array) -> pa.Array:
    """The array without what extension types and dictionaries wrap around it.

    What is damaged there raises ValueError.
    """
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not pa.types.is_dictionary(array.type):
        return array
    array.validate(full=True)  # an index out of the dictionary must not be followed
    values = array.dictionary
    if _is_view(values.type):  # which pyarrow cannot take values out of
        text = is_text(values.type)
        values = values.cast(pa.large_string() if text else pa.large_binary())
        array = pa.DictionaryArray.from_arrays(array.indices, values)
    if is_text(values.type) or _is_bytes(values.type):
        # A few long values that many rows name must not make us reserve what all would take.
        uses = np.bincount(array.indices.drop_null().to_numpy(), minlength=len(values))
        ranges = _ranges(values, Bytes(), None, 0, len(values), MEMORY)
        sizes = ranges._replace(present=None).lengths() if ranges else np.zeros(len(values))
        check_expansion(int(np.dot(uses, sizes)), array.nbytes)
    return plain(array.dictionary_decode())


# --- buffers -------------------------------------------------------------------------------------


class Buffers:
    """How the bytes of arrays are read: these are in memory."""

    in_file = False

    def cut(self, buffer: pa.Buffer | None, size: int | None = None) -> Cut:
        """What gives bytes of a buffer, or of its first `size`; it raises ValueError beyond."""
        view = (
            memoryview(buffer).cast("B") if buffer is not None and buffer.size else memoryview(b"")
        )
        end = len(view) if size is None else min(size, len(view))

        def cut(start: int, stop: int) -> memoryview:
            if not 0 <= start <= stop <= end:
                raise _outside(start, stop, end)
            return view[start:stop]

        return cut

    def position(self, buffer: pa.Buffer) -> int | None:
        """The byte of the file at which a buffer begins; None where it is in no file."""
        return None


MEMORY = Buffers()


def _outside(start: int, stop: int, end: int) -> ValueError:
    return ValueError(f"bytes {start} to {stop} of {end}")


def _bits(buffer: pa.Buffer, start: int, stop: int, buffers: Buffers) -> npt.NDArray[np.uint8]:
    """The bits from `start` to before `stop`, each 0 or 1."""
    data = buffers.cut(buffer)(start >> 3, (stop + 7) >> 3)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    return bits[start & 7 : (start & 7) + stop - start]


def _present(
    array: pa.Array, start: int, stop: int, buffers: Buffers
) -> npt.NDArray[np.uint8] | None:
    """For each of the rows 1 if it is there and 0 if it is null; None where all are there."""
    bitmap = array.buffers()[0]
    if bitmap is None or not array.null_count:
        return None
    return _bits(bitmap, start, stop, buffers)


def _offsets(array: pa.Array, start: int, stop: int, buffers: Buffers) -> memoryview:
    """Where the elements of each of the rows begin, and where those of the last end."""
    size, code = (8, "q") if str(array.type).startswith("large_") else (4, "i")
    data = buffers.cut(array.buffers()[1])(start * size, (stop + 1) * size)
    return memoryview(data).cast(code)  # type: ignore[call-overload, no-any-return]


def fetch(array: pa.Array, start: int, stop: int, buffers: Buffers) -> pa.Array:
    """Rows of an array in a file, in memory, with their offsets checked."""
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not 0 <= start <= stop <= len(array):
        raise ValueError(f"rows {start} to {stop} of {len(array)}")
    stored, count, types = array.type, stop - start, pa.types
    if types.is_null(stored):
        return pa.nulls(count)
    present, children, found = _present(array, start, stop, buffers), [], []
    if _is_view(stored):
        return _fetch_views(array, start, stop, present, buffers)
    if types.is_struct(stored):
        children = [fetch(array.field(n), start, stop, buffers) for n in range(stored.num_fields)]
        names = (stored.field(n).name for n in range(stored.num_fields))
        stored = pa.struct([(n, c.type) for n, c in zip(names, children, strict=True)])
    elif types.is_fixed_size_list(stored):
        size = stored.list_size
        children = [fetch(array.values, start * size, stop * size, buffers)]
        stored = pa.list_(children[0].type, size)
    elif types.is_boolean(stored):
        found = [_packed(_bits(array.buffers()[1], start, stop, buffers))]
    elif is_list(stored) or types.is_map(stored) or len(array.buffers()) == 3:
        offsets = np.array(_offsets(array, start, stop, buffers))
        if (offsets[1:] < offsets[:-1]).any():
            raise ValueError("values of a negative length")
        first, last = int(offsets[0]), int(offsets[-1])
        found = [pa.py_buffer(offsets - offsets[0])]
        if is_list(stored):
            children = [fetch(array.values, first, last, buffers)]
            make = pa.large_list if types.is_large_list(stored) else pa.list_
            stored = make(children[0].type)
        elif types.is_map(stored):
            pair = [fetch(part, first, last, buffers) for part in (array.keys, array.items)]
            stored = pa.map_(pair[0].type, pair[1].type)
            fields = [stored.key_field, stored.item_field]
            children = [pa.StructArray.from_arrays(pair, fields=fields)]
        else:
            found.append(pa.py_buffer(buffers.cut(array.buffers()[2])(first, last)))
    else:
        width = stored.bit_width // 8
        found = [pa.py_buffer(buffers.cut(array.buffers()[1])(start * width, stop * width))]
    bitmap = None if present is None else _packed(present)
    return pa.Array.from_buffers(stored, count, [bitmap, *found], children=children)


def _packed(bits: npt.NDArray[np.uint8]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(bits, bitorder="little"))


def _fetch_views(
    array: pa.Array,
    start: int,
    stop: int,
    present: npt.NDArray[np.uint8] | None,
    buffers: Buffers,
) -> pa.Array:
    """Of a view per row: a length, then up to 12 bytes, or 4 of them, a buffer and a start."""
    _, views, *more = array.buffers()
    data = bytes(buffers.cut(views)(16 * start, 16 * stop))
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
                raise ValueError(f"buffer {number} of {len(parts)}")
            values.append(bytes(parts[number](at, at + size)))
    found = pa.array(values, pa.large_binary())
    return found.view(pa.large_string()) if is_text(array.type) else found


# --- values --------------------------------------------------------------------------------------


class Ranges(NamedTuple):
    """Values that are ranges of bytes: number n lies between offsets n and n + 1, times `width`."""

    offsets: Sequence[int]
    width: int
    cut: Cut
    end: int  # how many bytes there are
    at: int | None  # the byte of the file from which on the ranges are counted
    present: npt.NDArray[np.uint8] | None  # 1 for each value that is there; None where all are

    def lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each value that is there."""
        lengths: npt.NDArray[np.int64] = np.diff(np.array(self.offsets, np.int64)) * self.width  # type: ignore[assignment]
        if len(lengths) and lengths.min() < 0:
            raise ValueError("values of a negative length")
        return lengths if self.present is None else lengths[self.present > 0]


class Column(NamedTuple):
    """A column in a page of rows."""

    get: Getter
    size: int  # bytes that it takes in memory
    ranges: Ranges | None = None


def column(
    kind: FieldType,
    tensor: Tensor | None,
    array: pa.Array,
    first: int,
    stop: int,
    buffers: Buffers = MEMORY,
) -> Column:
    """The values of a field in the rows from `first`, a multiple of 8, to before `stop`.

    `array` is what `plain` gives of its column. JSON comes as JsonText.
    """
    if pa.types.is_null(array.type):
        return Column(lambda row: None, 0)
    if isinstance(kind, Bytes) and pa.types.is_struct(array.type):
        return _images(array, first, stop, buffers)
    ranges = _ranges(array, kind, tensor, first, stop, buffers)
    if ranges is not None:
        make = _DIRECT.get(type(kind)) or _maker(kind, tensor, array.type)
        return _cut_column(make, ranges, stop - first, buffers)
    code = _CODES.get(str(array.type))
    if code and isinstance(kind, Int | Float) and not (array.null_count or array.offset):
        width = np.dtype(code).itemsize
        data = buffers.cut(array.buffers()[1])(first * width, stop * width)
        numbers = memoryview(data).cast(code)  # type: ignore[call-overload]
        return Column(numbers.__getitem__, len(data))
    return _array_column(kind, tensor, array, first, stop, buffers)


_CODES = {
    "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B", "uint16": "H",
    "uint32": "I", "float": "f", "double": "d",
}  # fmt: skip


def _ranges(
    array: pa.Array, kind: FieldType, tensor: Tensor | None, first: int, stop: int, buffers: Buffers
) -> Ranges | None:
    """The ranges of bytes, text or lists of numbers; None where values are no such."""
    width, size = 1, None
    offsets: Sequence[int]
    if isinstance(kind, Array) and is_list(array.type):
        inner, values = [], array.values
        while pa.types.is_fixed_size_list(values.type) and not (values.null_count or values.offset):
            inner.append(values.type.list_size)
            values = values.values
        shape = [] if tensor is not None else [*(kind.shape or ())[1:]]
        if not is_number(values.type) or values.null_count or values.offset or shape != inner:
            return None
        width = math.prod(inner) * (values.type.bit_width // 8)
        data, size = values.buffers()[1], len(values) * (values.type.bit_width // 8)
        each = array.type.list_size if pa.types.is_fixed_size_list(array.type) else None
    elif (is_text(array.type) or _is_bytes(array.type)) and not _is_view(array.type):
        data = array.buffers()[-1]
        each = array.type.byte_width if pa.types.is_fixed_size_binary(array.type) else None
    else:
        return None
    if array.offset or not width or data is None or each == 0:
        return None
    if each:
        offsets = range(first * each, stop * each + 1, each)
    else:
        offsets = _offsets(array, first, stop, buffers)
    present = _present(array, first, stop, buffers)
    end = data.size if size is None else min(size, data.size)
    return Ranges(offsets, width, buffers.cut(data, end), end, buffers.position(data), present)


def _cut_column(make: Callable[[Any], Any], ranges: Ranges, rows: int, buffers: Buffers) -> Column:
    """A column whose values are made of ranges of bytes: small ones are in memory."""
    offsets, width, cut, end, _, present = ranges
    low, high = (offsets[0] * width, offsets[-1] * width) if buffers.in_file else (0, end)
    if not buffers.in_file or 0 <= high - low <= _SMALL * rows + _FEW:
        data = cut(low, high)

        def get(row: int) -> Any:
            start, stop = offsets[row] * width, offsets[row + 1] * width
            if not low <= start <= stop <= high:
                raise _outside(start, stop, high)
            return make(data[start - low : stop - low])
    else:
        high = low

        def get(row: int) -> Any:
            return make(cut(offsets[row] * width, offsets[row + 1] * width))

    size = 8 * rows + high - low
    if present is None:
        return Column(get, size, ranges)
    there = present.tolist()
    return Column(lambda row: get(row) if there[row] else None, size, ranges)


def _images(array: pa.StructArray, first: int, stop: int, buffers: Buffers) -> Column:
    """Images as Hugging Face stores them: the bytes, or the path of an image that is elsewhere."""
    names = [field.name for field in _children(array.type)]
    data = plain(array.field(names.index("bytes")))
    found = column(Bytes(), None, data, first, stop, buffers)
    if not array.null_count and not data.null_count:
        return found
    there = _present(array, first, stop, buffers)
    path: Getter = lambda row: None  # noqa: E731
    if "path" in names and is_text(plain_type(array.type.field("path").type)):
        paths = plain(array.field(names.index("path")))
        path = column(Text(), None, paths, first, stop, buffers).get

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
    """Raises SampleError for the path of an image of which there are no bytes."""
    if path:
        raise SampleError(
            "the shard has only the path of an image, which lies elsewhere",
            expected="the bytes of the image",
            found=repr(path),
            fix="embed the images where the dataset was made: datasets' save_to_disk does, or its"
            " table.embed_table_storage before a file is written",
        )


def _array_column(
    kind: FieldType,
    tensor: Tensor | None,
    array: pa.Array,
    first: int,
    stop: int,
    buffers: Buffers,
) -> Column:
    """A column whose values pyarrow makes: of all rows at once where they are small."""
    part = None
    if not buffers.in_file:
        part = array.slice(first, stop - first)
        part.validate(full=True)
    elif average_size(array) <= _SMALL:
        part = fetch(array, first, stop, buffers)

    def get(row: int) -> Any:
        if part is None:
            one = fetch(array, first + row, first + row + 1, buffers)
        else:
            one = part.slice(row, 1)
        if numbers is not None:
            return None if one.null_count else numbers(one)
        value = one[0].as_py()
        return None if value is None else make(value)

    numbers: Callable[[pa.Array], Any] | None = None
    if isinstance(kind, Array) and is_list(array.type):
        numbers = partial(_numbers, kind=kind, tensor=tensor)
    make = _maker(kind, tensor, array.type)
    size = 0 if part is None else part.nbytes
    if part is None or part.type.num_fields or not isinstance(kind, Int | Float | Bool):
        return Column(get, size)
    values = (part.cast(pa.float64()) if isinstance(kind, Float) else part).to_pylist()
    if part.type == pa.uint64():
        return Column(lambda row: _checked(values[row]), size)
    return Column(values.__getitem__, 32 * len(values))


def average_size(array: pa.Array) -> float:
    """Bytes of a row in all buffers of an array."""
    return float(sum(b.size for b in array.buffers() if b) / max(len(array), 1))


_DIRECT: dict[type[FieldType], Callable[[Any], Any]] = {
    Bytes: bytes,
    Image: bytes,
    Json: partial(JsonText, encoding="utf-8"),
    Text: partial(str, encoding="utf-8"),
}


def _maker(kind: FieldType, tensor: Tensor | None, stored: pa.DataType) -> Callable[[Any], Any]:
    """What makes a value of what pyarrow makes of it, or of the bytes of an array."""
    make: Callable[[Any], Any] = _MAKERS.get(type(kind), bool)
    if isinstance(kind, Json):
        make = JsonText if is_text(stored) else partial(_json, tensor=tensor)
    elif isinstance(kind, Array) and is_list(stored):
        dtype, shape = np.dtype(kind.dtype), tuple(-1 if n is None else n for n in kind.shape or ())
        if tensor is None:
            return lambda data: np.frombuffer(data, dtype).reshape(shape).copy()
        return lambda data: tensor.arranged(np.frombuffer(data, dtype))
    return make


def _checked(value: int | None) -> int | None:
    if value is not None and value > _LARGEST_INT:
        raise SampleError(
            "a whole number is too large",
            expected="at most 2**63 - 1",
            found=str(value),
            fix="store it as text",
        )
    return value


def _image(value: Any) -> bytes:
    """The bytes of an image in a list."""
    data = value["bytes"] if isinstance(value, dict) else value
    if data is None and value is not None:
        path = value.get("path")
        _elsewhere(path if isinstance(path, str) else None)
    if data is None:
        raise ValueError("a list has a null among its images")
    return bytes(data)


def _json(value: Any, tensor: Tensor | None) -> JsonText:
    if tensor is not None:
        value = tensor.arranged(np.array(value, object)).tolist()
    return JsonText.of(_jsonable(value))


_MAKERS: dict[type[FieldType], Callable[[Any], Any]] = {
    Array: lambda value: load_array(bytes(value)),
    Bytes: lambda value: value.encode() if isinstance(value, str) else value,
    Float: float,
    Image: bytes,
    Images: lambda values: [*map(_image, values)],
    Int: _checked,
    Text: str,
}


def _numbers(array: pa.Array, kind: Array, tensor: Tensor | None) -> npt.NDArray[Any]:
    """The numbers in an array of one list, nested once per dimension."""
    shape: list[int] = []
    for length in (kind.shape or ()) if tensor is None else (math.prod(tensor.stored),):
        if array.null_count:
            raise ValueError("a list has a null among its lists")
        if pa.types.is_fixed_size_list(array.type):
            lengths = {array.type.list_size}
        else:
            lengths = {*np.diff(array.offsets.to_numpy()).tolist()} or {length or 0}
        if len(lengths) > 1 or length not in (None, *lengths):
            raise ValueError("lists of several lengths where all should have one")
        shape.append(lengths.pop())
        array = plain(array.flatten())
    if array.null_count:
        raise ValueError("a list has a null among its numbers")
    numbers = array.to_numpy(zero_copy_only=False)
    return numbers.reshape(shape).copy() if tensor is None else tensor.arranged(numbers)


def _jsonable(value: Any) -> Any:
    """The value with what JSON does not know as text; raises ValueError where text would not do."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"JSON has no number {value}")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, dict):
        return {name: _jsonable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    return value
