"""The encodings of MDS: which field type uses which encoding, and the bytes of its values.

See `base/format/mds/encodings.py` of MosaicML Streaming. All numbers are little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.array import dump_array, load_array
from shardkit.codecs.packed_images import image_list, pillow_image
from shardkit.formats.offsets import LARGEST
from shardkit.sample import JsonText
from shardkit.schema import Array, Bytes, FieldType, Float, Image, Images, Int, Json, Text, int64

ABSENT = "__absent__"  # our column with the names of a sample's missing optional fields

SCALARS = {
    "int": "<q", "int8": "<b", "int16": "<h", "int32": "<i", "int64": "<q",
    "uint8": "<B", "uint16": "<H", "uint32": "<I", "uint64": "<Q",
    "float16": "<e", "float32": "<f", "float64": "<d",
}  # fmt: skip
# The codes of array dtypes; there are no others.
_CODES = {
    8: "|u1", 9: "|i1", 16: "<u2", 17: "<i2", 18: "<f2", 32: "<u4", 33: "<i4", 34: "<f4",
    64: "<u8", 65: "<i8", 66: "<f8",
}  # fmt: skip
_DTYPES = {np.dtype(dtype).name: dtype for dtype in _CODES.values()}


class Codec(NamedTuple):
    """An encoding: the type of its values, and how they are encoded and decoded."""

    kind: FieldType
    decode: Callable[[bytes], Any]  # may raise any error for damaged bytes
    encode: Callable[[Any], bytes] = bytes
    size: int | None = None  # bytes of a value, if it is fixed
    absent: bytes = b""  # placeholder for a missing value, which StreamingDataset can decode


def encoding_of(kind: FieldType) -> str:
    """The name of the encoding in which we store a type; for an optional type it allows b""."""
    if isinstance(kind, Array) and kind.dtype in _CODES.values():
        fixed = kind.shape and all(kind.shape) and not kind.optional
        shape = ":" + ",".join(map(str, kind.shape or ())) if fixed else ""
        return f"ndarray:{np.dtype(kind.dtype).name}{shape}"
    if isinstance(kind, Image) and not kind.optional:  # StreamingDataset decodes these
        return "jpeg"
    return _ENCODINGS.get(type(kind).__name__, "bytes")  # other arrays as .npy


_ENCODINGS = {
    "Int": "int", "Float": "float64", "Bool": "uint8", "Text": "str", "Json": "json",
    "Images": "list[jpeg]",
}  # fmt: skip


def own_codec(kind: FieldType) -> Codec:
    """Return the codec with which we store a type."""
    encoding = encoding_of(kind)
    found = codec(encoding)
    if encoding == _ENCODINGS["Bool"]:
        found = _scalar_codec(kind, "<?")
    elif found is None or (isinstance(kind, Array) and isinstance(found.kind, Bytes)):
        found = Codec(kind, load_array, dump_array)
    return found._replace(kind=kind)


def codec(encoding: str) -> Codec | None:
    """Return the codec of an encoding, by name; None if the encoding is not supported."""
    if encoding in SCALARS:
        return _scalar_codec(Float() if "float" in encoding else Int(), SCALARS[encoding])
    name, *sizes = encoding.split(":")
    return _array_codec(*sizes) if name == "ndarray" and len(sizes) < 3 else _CODECS.get(encoding)


def _scalar_codec(kind: FieldType, format: str) -> Codec:
    stored = struct.Struct(format)
    decode = partial(_scalar, stored, isinstance(kind, Int))
    return Codec(kind, decode, stored.pack, stored.size, bytes(stored.size))


def _array_codec(dtype: str = "", shape: str = "") -> Codec | None:
    """Return the codec of arrays: dtype and shape are in the encoding's name, or in each value."""
    if dtype and dtype not in _DTYPES:
        return None
    kind = Array(_DTYPES.get(dtype))
    if not shape:
        return Codec(kind, partial(_array, kind), _array_bytes, absent=_array_bytes(np.empty(0)))
    sides = tuple(int(n) for n in shape.split(",") if n.isdecimal())
    if not len(sides) == shape.count(",") + 1 <= 32 or not 0 < math.prod(sides) <= LARGEST:
        return None
    kind, size = Array(kind.dtype, sides), math.prod(sides) * np.dtype(kind.dtype).itemsize
    return Codec(kind, partial(_array, kind), np.ndarray.tobytes, size)


# --- values to bytes -----------------------------------------------------------------------------


def _array_bytes(value: npt.NDArray[Any]) -> bytes:
    """Encode an array: its shape, in the smallest integers that can hold it, then the values."""
    width = next(n for n in range(4) if max(value.shape, default=0) < 1 << (8 << n))
    shape = np.array(value.shape, f"<u{1 << width}").tobytes()
    return bytes([value.ndim << 2 | width]) + shape + value.tobytes()


def _list_bytes(values: Sequence[bytes]) -> bytes:
    """Encode a list: a zero, the number of values, their sizes, and the values."""
    return b"".join([np.array([0, len(values), *map(len, values)], "<u4").tobytes(), *values])


# --- bytes to values -----------------------------------------------------------------------------


def _scalar(stored: struct.Struct, whole: bool, data: bytes) -> Any:
    (value,) = stored.unpack(data)
    return int64(value) if whole else value


def _array(own: Array, data: bytes) -> npt.NDArray[Any]:
    """Decode an array; dtype and shape precede the values, unless the encoding's name has them."""
    at, dtype, shape = 0, own.dtype, own.shape
    if dtype is None:
        at, dtype = 1, _CODES.get(data[0])
        if dtype is None:
            raise ValueError(f"{data[0]} is not the code of an array type")
    if shape is None:
        sides, width = data[at] >> 2, 1 << (data[at] & 3)
        shape = tuple(np.frombuffer(data, f"<u{width}", sides, at + 1).tolist())
        at += 1 + sides * width
    if math.prod(shape) * np.dtype(dtype).itemsize != len(data) - at:  # type: ignore[arg-type]
        raise ValueError(f"{len(data) - at:,} bytes of values for an array of {dtype} {shape}")
    return np.frombuffer(data[at:], dtype).copy().reshape(shape)  # type: ignore[arg-type]


def _text(data: bytes) -> JsonText:
    return JsonText(data.decode())


_JPEGS = Codec(Images(), partial(image_list, bytes, 0))
_LIST = Codec(Images(), partial(image_list, bytes, 4), _list_bytes, absent=bytes(8))
_CODECS = {
    "str": Codec(Text(), bytes.decode, str.encode),
    "bytes": Codec(Bytes(), bytes),
    "json": Codec(Json(), _text, lambda value: JsonText.of(value).encode(), absent=b"null"),
    "str_int": Codec(Int(), int64),
    "str_float": Codec(Float(), float),
    "str_decimal": Codec(Text(), bytes.decode),
    "pil": Codec(Image(), pillow_image),
    **dict.fromkeys(("jpeg", "png"), Codec(Image(), bytes)),
    **dict.fromkeys(("jpeg_array", "jpegarray"), _JPEGS),
    **dict.fromkeys(("list[jpeg]", "list[png]"), _LIST),
    "list[pil]": Codec(Images(), partial(image_list, pillow_image, 4)),
}
