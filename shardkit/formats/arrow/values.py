"""Values out of arrays: per column and batch one function from a row to its value.

pyarrow's own scalars take microseconds each. Here a column's buffers are taken once per batch, and
a value is a slice of them. What the buffers say is checked where it is used, as files are damaged:
a getter raises ValueError, or an error of ours where it knows more.
"""

from __future__ import annotations

import datetime
import decimal
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import pyarrow as pa

from shardkit.codecs.array import load_array
from shardkit.errors import FormatError, SampleError
from shardkit.sample import JsonText
from shardkit.schema import Array, Bool, Bytes, FieldType, Float, Image, Images, Int, Json, Text
from shardkit.storage import check_expansion

if TYPE_CHECKING:
    import numpy.typing as npt

ABSENT: Any = object()  # what a getter gives where a sample has no such value
Getter: TypeAlias = Callable[[int], Any]


class Part(Protocol):
    """What gives bytes of a buffer by slices: a view, or a place in a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> memoryview | bytes: ...


class Buffers(NamedTuple):
    """How the bytes of buffers are had.

    `whole` is for those with a few bytes for each row, `values` for those that slices are taken of.
    """

    whole: Callable[[pa.Buffer | None], memoryview]
    values: Callable[[pa.Buffer | None], Part]


_CODES = {
    pa.int8(): "b",
    pa.int16(): "h",
    pa.int32(): "i",
    pa.int64(): "q",
    pa.uint8(): "B",
    pa.uint16(): "H",
    pa.uint32(): "I",
    pa.uint64(): "Q",
    pa.float32(): "f",
    pa.float64(): "d",
}
_OLDEST = 2**63  # whole numbers from here on do not fit a field Int


def getter(name: str, kind: FieldType, array: pa.Array, buffers: Buffers | None = None) -> Getter:
    """What gives the values of a field from its column in a batch; JSON comes as `JsonText`.

    Without `buffers` the array is in memory. With them it need not be, if `is_sliced`.
    """
    buffers = buffers or IN_MEMORY
    get = _getter(kind, array, buffers)
    array = plain(array)
    if get is None:
        raise _does_not_fit(name, kind, array.type)
    linked = isinstance(kind, Bytes) and pa.types.is_struct(array.type)
    return get if linked else _optional(get, array, buffers)


def is_sliced(kind: FieldType, stored: pa.DataType) -> bool:
    """Whether values of a field are slices of buffers, so that pyarrow need not see those."""
    while isinstance(stored, pa.BaseExtensionType):
        stored = stored.storage_type
    if pa.types.is_struct(stored) and isinstance(kind, Bytes):
        return all(is_sliced(kind, stored.field(n).type) for n in range(stored.num_fields))
    if is_list(stored) and isinstance(kind, Array | Images):
        return is_sliced(Image() if isinstance(kind, Images) else kind, stored.value_type)
    simple = pa.types.is_primitive(stored) or pa.types.is_null(stored) or _is_bytes(stored)
    return is_text(stored) or (simple and not isinstance(kind, Json))


def plain(array: pa.Array) -> pa.Array:
    """The array without what other libraries wrap around it: extension types and dictionaries.

    What is damaged there raises ValueError.
    """
    while isinstance(array, pa.ExtensionArray):
        tensor = tensor_of(array.type)
        array = array.storage if tensor is None else _nested(array.storage, tensor.stored)
    if pa.types.is_dictionary(array.type):
        array.validate(full=True)  # an index out of the dictionary must not be followed
        _check_decoded(array)
        larger = _VIEWS.get(str(array.type.value_type))
        if larger is not None:  # pyarrow cannot take values out of views
            values = array.dictionary.cast(larger)
            array = pa.DictionaryArray.from_arrays(array.indices, values)
        return plain(array.dictionary_decode())
    return array


def _check_decoded(array: pa.DictionaryArray) -> None:
    """A few long values that many rows name must not make us reserve what all would take."""
    values = array.dictionary
    if is_text(values.type) or _is_bytes(values.type):
        uses = np.bincount(array.indices.drop_null().to_numpy(), minlength=len(values))
        check_expansion(int(np.dot(uses, _lengths(values))), array.nbytes)


# By name, as an old pyarrow has no such types.
_VIEWS = {"string_view": pa.large_string(), "binary_view": pa.large_binary()}


def fits(kind: FieldType, stored: pa.DataType) -> bool:
    """Whether a column of a type can hold the values of a field."""
    # A damaged type, such as a union without children, ends the process in `pa.nulls`.
    return _is_read(stored) and _getter(kind, pa.nulls(0, stored), IN_MEMORY) is not None


def check_fits(name: str, kind: FieldType, stored: pa.DataType) -> None:
    """Raises FormatError unless a column of a type can hold the values of a field."""
    if not fits(kind, stored):
        raise _does_not_fit(name, kind, stored)


def _does_not_fit(name: str, kind: FieldType, stored: pa.DataType) -> FormatError:
    return FormatError(
        "a column is not of the type that its field has",
        field=name,
        expected=f"a column that can hold {kind}",
        found=str(stored),
        fix="convert the shards of each kind by themselves",
    )


def _getter(kind: FieldType, array: pa.Array, buffers: Buffers) -> Getter | None:
    """The getter for rows that are not null; None if the column cannot hold such values."""
    tensor = tensor_of(array.type)
    if tensor is not None and tensor.order is not None and isinstance(kind, Array):
        return _make_permuted(array, kind, tensor, buffers)
    array = plain(array)
    if pa.types.is_null(array.type):
        return _never
    return _MAKERS[type(kind)](array, kind, buffers)


def _make_bytes(array: pa.Array, kind: FieldType, buffers: Buffers) -> Getter | None:
    if pa.types.is_struct(array.type):
        return _linked_images(array, buffers)
    text = is_text(array.type) and not isinstance(kind, Image)
    return _bytes(array, buffers) if text or _is_bytes(array.type) else None


def _make_images(array: pa.Array, kind: FieldType, buffers: Buffers) -> Getter | None:
    """Lists of what holds images."""
    if not is_list(array.type):
        return None
    images = plain(array.values)
    found = None if pa.types.is_null(images.type) else _make_bytes(images, Image(), buffers)
    if found is None:
        return None
    linked = pa.types.is_struct(images.type)
    get = found if linked else _optional(found, images, buffers)
    level = _Level(array, buffers)

    def get_all(row: int) -> list[bytes]:
        start, stop, _ = level.below(row, row + 1, None)
        values = [get(position) for position in range(start, stop)]
        if any(value is ABSENT for value in values):
            raise ValueError("a list has a null among its images")
        return values

    return get_all


def _make_text(array: pa.Array, kind: FieldType, buffers: Buffers) -> Getter | None:
    return _text(array, buffers) if is_text(array.type) else None


def _make_json(array: pa.Array, kind: FieldType, buffers: Buffers) -> Getter | None:
    return _json_text(array, buffers) if is_text(array.type) else _as_json(array)


def _make_bool(array: pa.Array, kind: FieldType, buffers: Buffers) -> Getter | None:
    return _bits(array.buffers()[1], array, buffers) if pa.types.is_boolean(array.type) else None


def _make_int(array: pa.Array, kind: FieldType, buffers: Buffers) -> Getter | None:
    return _whole_numbers(array, buffers) if pa.types.is_integer(array.type) else None


def _make_float(array: pa.Array, kind: FieldType, buffers: Buffers) -> Getter | None:
    return _floats(array, buffers) if pa.types.is_floating(array.type) else None


def _make_array(array: pa.Array, kind: FieldType, buffers: Buffers) -> Getter | None:
    if is_list(array.type) and isinstance(kind, Array):
        found = lists(array, kind, buffers)
        return None if found is None else found.get
    if not _is_bytes(array.type):
        return None
    get = _bytes(array, buffers)
    return lambda row: load_array(get(row))


def _make_permuted(array: pa.Array, kind: Array, tensor: Tensor, buffers: Buffers) -> Getter | None:
    if kind.shape != tensor.shape:
        return None
    get = _make_array(plain(array), replace(kind, shape=tensor.stored), buffers)
    return get and (lambda row: np.ascontiguousarray(get(row).transpose(tensor.order)))


_MAKERS: dict[type[FieldType], Callable[[pa.Array, FieldType, Buffers], Getter | None]] = {
    Bytes: _make_bytes,
    Image: _make_bytes,
    Images: _make_images,
    Text: _make_text,
    Json: _make_json,
    Bool: _make_bool,
    Int: _make_int,
    Float: _make_float,
    Array: _make_array,
}


class Tensor(NamedTuple):
    """What a column of type `arrow.fixed_shape_tensor` holds."""

    stored: tuple[int, ...]  # the shape in which the numbers stand
    order: tuple[int, ...] | None  # how its dimensions are permuted, if they are
    shape: tuple[int, ...]  # that of the values


def tensor_of(stored: pa.DataType) -> Tensor | None:
    """Shape and order of a column of tensors; None for any other column.

    Raises FormatError where its order is no plain exchange of dimensions: there the specification
    and pyarrow, which writes such, mean different arrays.
    """
    if getattr(stored, "extension_name", None) != "arrow.fixed_shape_tensor":
        return None
    shape, order = tuple(stored.shape), tuple(stored.permutation or range(len(stored.shape)))
    if order == tuple(range(len(shape))):
        return Tensor(shape, None, shape)
    if any(order[order[n]] != n for n in order):
        raise FormatError(
            "a column holds tensors whose dimensions are rotated, which programs read differently",
            expected="an order that is its own inverse, such as [1, 0]",
            found=str(list(order)),
            fix="write it with arrays that are contiguous (numpy.ascontiguousarray)",
        )
    return Tensor(shape, order, tuple(shape[n] for n in order))


def _nested(array: pa.FixedSizeListArray, shape: tuple[int, ...]) -> pa.Array:
    """Lists of all numbers of a tensor as lists nested once per dimension."""
    if len(shape) < 2 or 0 in shape:
        return array
    values = array.values
    for length in reversed(shape[1:]):
        inner = pa.list_(values.type, length)
        count = len(values) // length
        values = pa.Array.from_buffers(inner, count, [None], 0, children=[values])
    whole, validity = pa.list_(values.type, shape[0]), array.buffers()[0]
    return pa.Array.from_buffers(
        whole, len(array), [validity], array.null_count, array.offset, children=[values]
    )


def is_list(stored: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_list(stored) or types.is_large_list(stored) or types.is_fixed_size_list(stored)
    )


def _is_bytes(stored: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_binary(stored)
        or types.is_large_binary(stored)
        or types.is_fixed_size_binary(stored)
        or str(stored) == "binary_view"
    )


def is_text(stored: pa.DataType) -> bool:
    types = pa.types
    text = types.is_string(stored) or types.is_large_string(stored)
    return bool(text or str(stored) == "string_view")


# --- nulls ---------------------------------------------------------------------------------------


def _optional(get: Getter, array: pa.Array, buffers: Buffers) -> Getter:
    """`get`, giving ABSENT for the array's nulls."""
    present = _present(array, buffers)
    if present is None:
        return get
    return lambda row: get(row) if present(row) else ABSENT


def _present(array: pa.Array, buffers: Buffers) -> Callable[[int], bool] | None:
    """What says whether a row is not null; None where all are there."""
    bitmap = None if pa.types.is_null(array.type) else array.buffers()[0]
    if bitmap is None or not array.null_count:
        return None
    return _bits(bitmap, array, buffers)


def _bits(buffer: pa.Buffer | None, array: pa.Array, buffers: Buffers) -> Callable[[int], bool]:
    bits, offset = buffers.whole(buffer), array.offset
    _check_room(bits, -(-(offset + len(array)) // 8))

    def get(row: int) -> bool:
        row += offset
        return bool(bits[row >> 3] >> (row & 7) & 1)

    return get


# --- bytes and text ------------------------------------------------------------------------------


def _view(buffer: pa.Buffer | None) -> memoryview:
    if buffer is None or not buffer.size:
        return memoryview(b"")
    return memoryview(buffer).cast("B")


IN_MEMORY = Buffers(_view, _view)


def _check_room(view: Part, needed: int) -> None:
    if len(view) < needed:
        raise ValueError(f"a buffer has {len(view)} bytes of {needed}")


def _numbers(array: pa.Array, buffers: Buffers, code: str, more: int = 0) -> memoryview:
    """The numbers of a column that belong to its rows, and `more` of them."""
    size = np.dtype(code).itemsize
    count = len(array) + more if len(array) else 0
    view, start = buffers.whole(array.buffers()[1]), array.offset * size
    _check_room(view, start + count * size if count else 0)
    return view[start : start + count * size].cast(cast(Any, code)) if count else memoryview(b"")


def _offsets(array: pa.Array, buffers: Buffers) -> memoryview:
    large = str(array.type).startswith("large_")
    return _numbers(array, buffers, "q" if large else "i", 1)


def _bytes(array: pa.Array, buffers: Buffers) -> Getter:
    if pa.types.is_fixed_size_binary(array.type):
        return _fixed_bytes(array, buffers)
    if str(array.type) in _VIEWS:
        return _viewed_bytes(array, buffers)
    offsets, data = _offsets(array, buffers), buffers.values(array.buffers()[2])
    end = len(data)

    def get(row: int) -> bytes:
        start, stop = offsets[row], offsets[row + 1]
        if not 0 <= start <= stop <= end:
            raise ValueError(f"bytes {start} to {stop} of {end}")
        return bytes(data[start:stop])

    return get


def _fixed_bytes(array: pa.Array, buffers: Buffers) -> Getter:
    size = array.type.byte_width
    data, first = buffers.values(array.buffers()[1]), array.offset
    _check_room(data, (first + len(array)) * size if len(array) else 0)
    return lambda row: bytes(data[(first + row) * size : (first + row + 1) * size])


def _viewed_bytes(array: pa.Array, buffers: Buffers) -> Callable[[int], bytes]:
    """Of a view per row: a length, then up to 12 bytes, or 4 of them, a buffer and a start."""
    _, views, *more = array.buffers()
    places, parts = buffers.whole(views), [buffers.values(part) for part in more]
    first, size_of, place_of = array.offset, struct.Struct("<i"), struct.Struct("<ii")
    _check_room(places, 16 * (first + len(array)) if len(array) else 0)

    def get(row: int) -> bytes:
        at = 16 * (first + row)
        (size,) = size_of.unpack_from(places, at)
        if 0 <= size <= 12:
            return bytes(places[at + 4 : at + 4 + size])
        number, start = place_of.unpack_from(places, at + 8)
        if not (0 <= number < len(parts) and 0 <= start <= start + size <= len(parts[number])):
            raise ValueError(f"bytes {start} to {start + size} of buffer {number} of {len(parts)}")
        return bytes(parts[number][start : start + size])

    return get


def _text(array: pa.Array, buffers: Buffers) -> Callable[[int], str]:
    if str(array.type) in _VIEWS:
        viewed = _viewed_bytes(array, buffers)
        return lambda row: str(viewed(row), "utf-8")
    offsets, data = _offsets(array, buffers), buffers.values(array.buffers()[2])
    end = len(data)

    def get(row: int) -> str:
        start, stop = offsets[row], offsets[row + 1]
        if not 0 <= start <= stop <= end:
            raise ValueError(f"bytes {start} to {stop} of {end}")
        return str(data[start:stop], "utf-8")

    return get


def _json_text(array: pa.Array, buffers: Buffers) -> Getter:
    get = _text(array, buffers)
    return lambda row: JsonText(get(row))


def _linked_images(array: pa.Array, buffers: Buffers) -> Getter | None:
    """Images as Hugging Face stores them: the bytes, or where an image lies."""
    names = [array.type.field(n).name for n in range(array.type.num_fields)]
    if "bytes" not in names:
        return None
    data = plain(array.field(names.index("bytes")))
    get: Getter = _never
    has_bytes: Getter = _always
    if _is_bytes(data.type):
        get, has_bytes = _bytes(data, buffers), _present(data, buffers) or _always
    elif pa.types.is_null(data.type):
        has_bytes = _no
    else:
        return None
    linked: Getter = _never
    if "path" in names:
        path = plain(array.field(names.index("path")))
        if is_text(path.type):
            linked = _optional(_text(path, buffers), path, buffers)
    present = _present(array, buffers) or _always

    def get_image(row: int) -> Any:
        if not present(row):
            return ABSENT
        if has_bytes(row):
            return get(row)
        place = linked(row)
        if place is ABSENT or not place:
            return ABSENT
        raise _elsewhere(place)

    return get_image if has_bytes is not _always or present is not _always else get


def _always(row: int) -> Any:
    return True


def _no(row: int) -> Any:
    return False


def _never(row: int) -> Any:
    return ABSENT


def _elsewhere(place: str) -> SampleError:
    return SampleError(
        "the shard has only the path of an image, which lies elsewhere",
        expected="the bytes of the image",
        found=repr(place),
        fix="embed the images where the dataset was made: datasets' save_to_disk does, or its"
        " table.embed_table_storage before a file is written",
    )


# --- numbers -------------------------------------------------------------------------------------


def _whole_numbers(array: pa.Array, buffers: Buffers) -> Getter:
    get: Getter = _numbers(array, buffers, _CODES[array.type]).__getitem__
    if array.type != pa.uint64():
        return get

    def get_small(row: int) -> int:
        value: int = get(row)
        if value >= _OLDEST:
            raise SampleError(
                "a whole number is too large",
                expected="at most 2**63 - 1",
                found=str(value),
                fix="store it as text",
            )
        return value

    return get_small


def _floats(array: pa.Array, buffers: Buffers) -> Getter:
    if pa.types.is_float16(array.type):
        view = _numbers(array, buffers, "h")
        halves = np.frombuffer(view, np.float16) if len(array) else np.zeros(0, np.float16)
        return lambda row: float(halves[row])
    return _numbers(array, buffers, _CODES[array.type]).__getitem__


# --- lists ---------------------------------------------------------------------------------------


def lists(array: pa.Array, kind: Array, buffers: Buffers) -> Lists | None:
    """The arrays of numbers in a column of lists; None if they are of another kind, or permuted."""
    tensor = tensor_of(array.type)
    if tensor is not None and tensor.order is not None:
        return None
    levels: list[_Level] = []
    values = plain(array)
    while is_list(values.type):
        levels.append(_Level(values, buffers))
        values = plain(values.values)
    shape = kind.shape or ()
    if kind.dtype is None or len(levels) != len(shape) or not _holds(values.type, kind.dtype):
        return None
    return Lists(levels, shape, values, np.dtype(kind.dtype), buffers)


class Lists:
    """Lists of numbers, nested once per dimension."""

    def __init__(
        self,
        levels: list[_Level],
        shape: tuple[int | None, ...],
        values: pa.Array,
        dtype: np.dtype[Any],
        buffers: Buffers,
    ) -> None:
        self._levels = levels
        self._shape = shape
        self._dtype = dtype
        self._present = _present(values, buffers)
        self._first, self._count = int(values.offset), len(values)
        self.data = buffers.values(values.buffers()[1])
        _check_room(self.data, self._at(self._count) if self._count else 0)

    def _at(self, number: int) -> int:
        """The byte of `data` at which a number begins."""
        return (self._first + number) * self._dtype.itemsize

    def get(self, row: int) -> npt.NDArray[Any]:
        """The array of a row, which the caller may write to."""
        start, stop = row, row + 1
        shape = []
        for level, length in zip(self._levels, self._shape, strict=True):
            start, stop, length = level.below(start, stop, length)  # noqa: PLW2901
            shape.append(length)
        self._check(start, stop)
        present = self._present
        if present is not None and not all(map(present, range(start, stop))):
            raise ValueError("a list has a null among its numbers")
        stored = self.data[self._at(start) : self._at(stop)]
        return np.frombuffer(stored, self._dtype).reshape(shape).copy()

    def starts(self, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """Where in `data` the arrays of all rows begin; -1 for those not of a shape, or with nulls.

        Raises ValueError where that cannot be told without reading more.
        """
        if self._present is not None or len(shape) != len(self._levels):
            raise ValueError("nulls among numbers, or another number of dimensions")
        top, *others = self._levels
        if any(level.has_nulls for level in others):
            raise ValueError("nulls among lists")
        starts = top.starts(shape[0])
        for level, length in zip(others, shape[1:], strict=True):
            starts = np.where(starts < 0, starts, level.fixed(starts, length))
        last = self._count - math.prod(shape)
        inside = (starts >= 0) & (starts <= last)
        return np.where(inside, (self._first + starts) * self._dtype.itemsize, -1)

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self._count:
            raise ValueError(f"numbers {start} to {stop} of {self._count}")


def _holds(stored: pa.DataType, dtype: str) -> bool:
    numeric = pa.types.is_integer(stored) or pa.types.is_floating(stored)
    return bool(numeric and np.dtype(stored.to_pandas_dtype()) == np.dtype(dtype))


class _Level:
    """One level of nested lists. Positions count from the array's own first row."""

    def __init__(self, array: pa.Array, buffers: Buffers) -> None:
        self._first = array.offset
        self._count = len(array)
        self._present = _present(array, buffers)
        self._length: int | None = None
        if pa.types.is_fixed_size_list(array.type):
            self._length = array.type.list_size
        else:
            self._offsets = _offsets(array, buffers)

    def below(self, start: int, stop: int, length: int | None) -> tuple[int, int, int]:
        """Where the elements of the lists from `start` to `stop` are, and how many each has.

        All lists must have `length` elements; None leaves that to a single one.
        """
        if not 0 <= start <= stop <= self._count:
            raise ValueError(f"lists {start} to {stop} of {self._count}")
        if self._present is not None and not all(map(self._present, range(start, stop))):
            raise ValueError("a list has a null among its lists")
        if self._length is not None:
            if length not in (None, self._length):
                raise ValueError(f"lists of {self._length} elements, not {length}")
            first = self._first * self._length
            return first + start * self._length, first + stop * self._length, self._length
        if start == stop:
            return 0, 0, length or 0
        ends = self._offsets[start : stop + 1].tolist()
        lengths = {after - before for before, after in pairwise(ends)}
        found = lengths.pop()
        if lengths or found < 0 or length not in (None, found):
            raise ValueError("lists of several lengths where all should have one")
        return ends[0], ends[-1], found

    def starts(self, length: int) -> npt.NDArray[np.int64]:
        """Where the elements of each list begin; -1 for nulls and lists of another length."""
        rows = np.arange(self._count)
        if self._length is not None:
            starts = self.fixed(rows, length)
        else:
            ends = np.array(self._offsets, np.int64)
            starts = np.where(ends[1:] - ends[:-1] == length, ends[:-1], -1)
        if self._present is None:
            return starts
        return np.where([self._present(row) for row in rows.tolist()], starts, -1)

    @property
    def has_nulls(self) -> bool:
        return self._present is not None

    def fixed(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Where the elements of lists begin whose type says that all have `length` elements."""
        if self._length != length:
            raise ValueError("lists that are not all of one length")
        found: npt.NDArray[np.int64] = (self._first + starts) * length
        return found


# --- anything else, as JSON ----------------------------------------------------------------------


def _is_read(stored: pa.DataType) -> bool:
    """Whether a type is one of those that any field can be read from."""
    while isinstance(stored, pa.BaseExtensionType | pa.DictionaryType):
        dictionary = isinstance(stored, pa.DictionaryType)
        stored = stored.value_type if dictionary else stored.storage_type
    if is_list(stored) or pa.types.is_struct(stored) or pa.types.is_map(stored):
        return all(_is_read(stored.field(n).type) for n in range(stored.num_fields))
    return _is_bytes(stored) or json_holds(stored)


def json_holds(stored: pa.DataType) -> bool:
    """Whether JSON can say what values of a type are, dates and times as ISO 8601."""
    types = pa.types
    while isinstance(stored, pa.BaseExtensionType | pa.DictionaryType):
        dictionary = isinstance(stored, pa.DictionaryType)
        stored = stored.value_type if dictionary else stored.storage_type
    if is_list(stored):
        return json_holds(stored.value_type)
    if types.is_struct(stored):
        fields = [stored.field(n) for n in range(stored.num_fields)]
        return len({f.name for f in fields}) == len(fields) and all(
            json_holds(field.type) for field in fields
        )
    if types.is_map(stored):
        return json_holds(stored.key_type) and json_holds(stored.item_type)
    return bool(
        types.is_null(stored)
        or types.is_boolean(stored)
        or types.is_integer(stored)
        or types.is_floating(stored)
        or types.is_decimal(stored)
        or types.is_date(stored)
        or types.is_time(stored)
        or types.is_timestamp(stored)
        or is_text(stored)
    )


def _as_json(array: pa.Array) -> Getter | None:
    """pyarrow's own Python values, for the types that are rare in large datasets."""
    if not json_holds(array.type):
        return None
    array.validate(full=True)
    return lambda row: JsonText.of(_jsonable(array[row].as_py()))


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


# --- sizes ---------------------------------------------------------------------------------------


def sizes(name: str, kind: FieldType, array: pa.Array) -> npt.NDArray[np.int64]:
    """Stored bytes of each value that is there."""
    array = plain(array)
    if isinstance(kind, Bytes) and pa.types.is_struct(array.type):
        data = plain(array.field("bytes"))
        there = _mask(array) & _mask(data)
        return _lengths(data)[there] if _is_bytes(data.type) else np.zeros(0, np.int64)
    if isinstance(kind, Int | Float | Bool) and not pa.types.is_null(array.type):
        width = 1 if isinstance(kind, Bool) else 8
        return np.full(len(array) - array.null_count, width, np.int64)
    if _is_bytes(array.type) or is_text(array.type):
        return _lengths(array)[_mask(array)]
    values = map(getter(name, kind, array), range(len(array)))
    found = [_size(value) for value in values if value is not ABSENT]
    return np.array(found, np.int64)


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(len, value))
    return value.nbytes if isinstance(value, np.ndarray) else len(value.encode())


def _mask(array: pa.Array) -> npt.NDArray[np.bool_]:
    present = _present(array, IN_MEMORY)
    if present is None:
        absent = pa.types.is_null(array.type)
        return np.full(len(array), not absent)
    return np.fromiter(map(present, range(len(array))), np.bool_, len(array))


def _lengths(array: pa.Array) -> npt.NDArray[np.int64]:
    if pa.types.is_fixed_size_binary(array.type):
        return np.full(len(array), array.type.byte_width, np.int64)
    if not len(array):
        return np.zeros(0, np.int64)
    found: npt.NDArray[np.int64]
    if str(array.type) in _VIEWS:
        views = np.frombuffer(_view(array.buffers()[1]), "<i4")
        found = views[4 * array.offset : 4 * (array.offset + len(array)) : 4].astype(np.int64)
    else:
        offsets = np.array(_offsets(array, IN_MEMORY), np.int64)
        found = offsets[1:] - offsets[:-1]
    if found.min() < 0:
        raise ValueError("values of a negative length")
    return found
