"""LitData's serializers, by their names in `data_format`: encoding and decoding of values.

See `streaming/serializers.py` and `constants.py` of LitData 0.2.76.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.array import dump_array, load_array
from shardkit.codecs.media import guessed_schema
from shardkit.codecs.packed_images import image_list, pillow_image
from shardkit.errors import FormatError, drop_option
from shardkit.formats.base import KEY
from shardkit.sample import JsonText
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

_DEPTH = 200  # nested objects
_LISTS = {2: "q", 3: "d", 4: "?"}  # lists of numbers of one type, by tag
_NUMBERS = {8: "q", 9: "d", 10: "?"}
_TEXT, _NONE = 7, 11
_CELLS = {16: _NONE, 17: _TEXT, 18: 8, 19: 9, 20: 10}  # tags of values in records


def load_json(data: bytes) -> JsonText:
    """Return a value as JSON text; raises ValueError or struct.error."""
    if not data or data[0] > 0x20:
        return JsonText(data.decode())
    return JsonText.of(_Values(data).value())


class _Values:
    """Parses the binary encoding: each value is a tag, then little-endian lengths and numbers."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def _take(self, kind: str, count: int = 1) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{count}{kind}", self._data, self._at)
        self._at += struct.calcsize(f"<{count}{kind}")
        return found

    def _count(self) -> int:
        (count,) = self._take("I")
        if count > len(self._data):  # each entry has a byte or more
            raise ValueError(f"{count:,} entries in {len(self._data):,} bytes")
        return int(count)

    def _text(self) -> str:
        return bytes(self._take("s", self._count())[0]).decode()

    def value(self, depth: int = _DEPTH) -> Any:
        (tag,) = self._take("B")
        if tag in _LISTS:
            return [*self._take(_LISTS[tag], self._count())]
        if tag == 0:
            return json.loads(self._text())
        if tag == 1:
            return [self._text() for _ in range(self._count())]
        if tag == 5 and depth:
            return {self._text(): self.value(depth - 1) for _ in range(self._count())}
        if tag == 6:  # a list of objects with the same names, which are stored once
            count, names = self._count(), range(self._count())
            every = [self._text() for _ in names]
            return [{name: self._cell() for name in every} for _ in range(count)]
        return self._scalar(tag)

    def _cell(self) -> Any:
        return self._scalar(_CELLS.get(self._take("B")[0], -1))

    def _scalar(self, tag: int) -> Any:
        if tag in _NUMBERS:
            return self._take(_NUMBERS[tag])[0]
        if tag not in (_TEXT, _NONE):
            raise ValueError(f"an invalid tag before byte {self._at}")
        return self._text() if tag == _TEXT else None


FILE = "file"  # for bytes: `bytes` gives memory views, which DataLoader workers cannot pickle
Decode = Callable[[bytes], Any]  # raises ValueError or struct.error

# The dtypes of arrays by code. Some of torch's have two codes; the empty one is bfloat16.
_NUMPY = (
    "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16",
    "|b1",
)  # fmt: skip
_TORCH = (
    "<f4", "<f4", "<f8", "<f8", "<c8", "<c8", "<c16", "<c16", "<f2", "<f2", "", "|u1", "|i1", "<i2",
    "<i2", "<i4", "<i4", "<i8", "<i8", "|b1", "<u2",
)  # fmt: skip


def _bool(data: bytes) -> bool:
    if len(data) != 1:
        raise ValueError(f"{len(data)} bytes instead of one for true or false")
    return data != b"\0"


def _number(form: str, data: bytes) -> Any:
    return struct.unpack(form, data)[0]


def _dtype(types: tuple[str, ...], code: int) -> np.dtype[Any]:
    if code >= len(types) or not types[code]:
        raise ValueError(f"{code} is not the code of a supported array type")
    return np.dtype(types[code])


def _array(types: tuple[str, ...], order: str, data: bytes) -> npt.NDArray[Any]:
    """Return an array, stored after the code of its dtype and its shape."""
    code, rank = struct.unpack_from(f"{order}2I", data)
    start, dtype = 8 + 4 * rank, _dtype(types, code)
    shape = struct.unpack_from(f"{order}{rank}I", data, 8) if start <= len(data) else (len(data),)
    if math.prod(shape) * dtype.itemsize != len(data) - start:
        raise ValueError(f"{len(data):,} bytes do not fit {rank} dimensions of {dtype}")
    return np.frombuffer(data[start:], dtype).reshape(shape).copy()


def _tensor(data: bytes) -> npt.NDArray[Any]:
    """An array of torch: the integers before it are big-endian, up to LitData 0.2.29 little-endian.

    Only one order can be right, as a small integer in the other order is at least 2^24.
    """
    code, rank = struct.unpack_from(">2I", data)
    return _array(_TORCH, "<" if max(code, rank) >= 1 << 24 else ">", data)


NUMBERS = {"int": "<q", "float": "<d", "bool": "|u1"}  # dtypes by serializer
_BYTES = ("bytes", "file", "image", "tifffile", "tiff", "video", "audio", "nifti", "mesh", "pdf")
# The type of the values, or None if it is guessed from the first value, and the decoder.
_SERIALIZERS: dict[str, tuple[FieldType | None, Decode]] = {
    "str": (Text(), bytes.decode),
    "text": (Text(), bytes.decode),
    "bool": (Bool(), _bool),
    "int": (Int(), partial(_number, "<q")),
    "float": (Float(), partial(_number, "<d")),
    "json": (Json(), load_json),
    "jpeg": (Image(), bytes),
    "jpeg_array": (Images(), partial(image_list, bytes, 0)),
    "pil": (Image(), pillow_image),
    "numpy": (None, partial(_array, _NUMPY, "<")),
    "tensor": (None, _tensor),
    **dict.fromkeys(_BYTES, (None, bytes)),
}


def serializer(name: str) -> tuple[FieldType | None, Decode]:
    """The type of the values, as above, and their decoder; FormatError if it is not supported."""
    base, _, code = name.partition(":")
    types = {"no_header_numpy": _NUMPY, "no_header_tensor": _TORCH}.get(base)
    if types and code.isdecimal() and int(code[:3]) < len(types) and types[int(code)]:
        dtype = types[int(code)]
        return Array(dtype, (None,)), lambda data: np.frombuffer(data, dtype).copy()
    if base in _SERIALIZERS:
        return _SERIALIZERS[base]
    pickled = name == "pickle" or base == "graph"
    raise FormatError(
        "the values are pickled, and reading a pickle runs the code in it"
        if pickled
        else "shardkit does not know the serializer of the values",
        found=f"{name!r:.60}",
        fix="read them with LitData, if you trust them, and write them with shardkit.create",
    )


def guessed(name: str, value: bytes | None) -> FieldType:
    """Return the type of a serializer's values, guessed from the first value if necessary."""
    kind, decode = serializer(name)
    if kind is not None:
        return kind
    if value is None:
        return Bytes() if decode is bytes else Array()
    return guessed_schema({"": decode(value)})[""]


def decoder(name: str, kind: FieldType) -> Decode:
    """Return the decoder of a field's values."""
    if not isinstance(kind, Array) or kind.dtype is None:
        return serializer(name)[1]
    if name == FILE:
        return load_array
    dtype, decode = kind.dtype, serializer(name)[1]
    # LitData has no big-endian arrays: they are stored as little-endian, and converted back.
    return (lambda data: decode(data).astype(dtype)) if dtype[0] == ">" else decode


# --- writing -------------------------------------------------------------------------------------


def leaves_of(schema: Schema) -> list[tuple[str, str]]:
    """Name and serializer of each value of the samples that shardkit writes, in order.

    Raises FormatError for types that LitData cannot store.
    """
    return [(KEY, "str"), *((name, serializer_for(name, kind)) for name, kind in schema.items())]


def serializer_for(name: str, kind: FieldType) -> str:
    """Return the name of the serializer for a field; FormatError if there is none."""
    if isinstance(kind, Images) and kind.optional:
        raise FormatError(
            "LitData cannot store optional lists of images, as it cannot read empty lists",
            field=name,
            found=str(kind),
            fix=f"convert without it: {drop_option(name)}; or write another format",
        )
    if isinstance(kind, Array):
        code = _little(kind.dtype or "<f4")
        if code not in _NUMPY:
            return FILE  # as .npy
        flat = kind.dtype and kind.shape is not None and len(kind.shape) == 1
        return f"no_header_numpy:{_NUMPY.index(code)}" if flat else "numpy"
    if isinstance(kind, Image):  # LitData decodes images, so none may be empty
        return FILE if kind.optional else "jpeg"
    known: dict[type[FieldType], str] = {
        Int: "int", Float: "float", Bool: "bool", Text: "str", Json: "json", Images: "jpeg_array",
    }  # fmt: skip
    return known.get(type(kind), FILE)


def encoder(name: str, kind: FieldType) -> Callable[[Any], bytes]:
    """Return the function that encodes a field's values; it raises TypeError or ValueError."""
    if isinstance(kind, Array):
        bare = _bare if name.startswith("no_header") else _dumped
        return dump_array if name == FILE else bare
    return _ENCODERS.get(type(kind), bytes)


def absent(name: str, kind: FieldType) -> bytes:
    """Return the placeholder for a missing value, which LitData can read."""
    if isinstance(kind, Array):
        shape = [n or 0 for n in kind.shape or (0,)]
        return encoder(name, kind)(np.zeros(shape, kind.dtype or "<f4"))
    none: dict[str, bytes] = {"int": bytes(8), "float": struct.pack("<d", math.nan), "bool": b"\0"}
    return {**none, "json": b"null"}.get(name, b"")


def _little(dtype: str) -> str:
    return np.dtype(dtype).newbyteorder("<").str


def _bare(value: npt.NDArray[Any]) -> bytes:
    return value.astype(_little(value.dtype.str), copy=False).tobytes()


def _dumped(value: npt.NDArray[Any]) -> bytes:
    dtype = _little(value.dtype.str)
    if dtype not in _NUMPY:
        raise TypeError(f"LitData has no arrays of {value.dtype}")
    head = np.array([_NUMPY.index(dtype), value.ndim, *value.shape], "<u4")
    return head.tobytes() + _bare(value)


def _list(images: list[bytes]) -> bytes:
    if not images:
        raise ValueError("LitData cannot read an empty list of images")
    return np.array([len(images), *map(len, images)], "<u4").tobytes() + b"".join(images)


_ENCODERS: dict[type[FieldType], Callable[[Any], bytes]] = {
    Int: struct.Struct("<q").pack,
    Float: struct.Struct("<d").pack,
    Bool: lambda value: b"\1" if value else b"\0",
    Text: str.encode,
    Images: _list,
    # LitData takes a value for JSON text only if its first byte is greater than a space.
    Json: lambda value: JsonText.of(value).lstrip().encode(),
}
