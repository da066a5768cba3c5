"""The columns of MDS: which encoding a type of ours has, and the bytes of its values.

Facts: `base/format/mds/encodings.py` of MosaicML Streaming. All numbers are little-endian.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.codecs.array import dump_array, load_array
from shardkit.codecs.pixels import ppm_start
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
    Text,
    int64,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    _Decode = Callable[[bytes], Any]

LARGEST = 2**32 - 1  # bytes of a shard: offsets in it are uint32
ABSENT = "__absent__"  # our column with the names of the optional fields that a sample lacks

_SCALARS = {
    "int": "<q", "int8": "<b", "int16": "<h", "int32": "<i", "int64": "<q",
    "uint8": "<B", "uint16": "<H", "uint32": "<I", "uint64": "<Q",
    "float16": "<e", "float32": "<f", "float64": "<d",
}  # fmt: skip
# The codes of arrays' types: there are no others.
_CODES = {
    8: "|u1", 9: "|i1", 16: "<u2", 17: "<i2", 18: "<f2", 32: "<u4", 33: "<i4", 34: "<f4",
    64: "<u8", 65: "<i8", 66: "<f8",
}  # fmt: skip
_DTYPES = {np.dtype(dtype).name: dtype for dtype in _CODES.values()}


def encoding_of(kind: FieldType) -> str:
    """The encoding in which we store a type; that of an optional one takes empty values."""
    if isinstance(kind, Array) and kind.dtype in _CODES.values():
        fixed = kind.shape and all(kind.shape) and not kind.optional
        shape = ":" + ",".join(map(str, kind.shape or ())) if fixed else ""
        return f"ndarray:{np.dtype(kind.dtype).name}{shape}"
    if isinstance(kind, Image) and not kind.optional:  # StreamingDataset decodes these
        return "jpeg"
    known = {Int: "int", Float: "float64", Bool: "uint8", Text: "str", Json: "json"}
    return {**known, Images: "list[jpeg]"}.get(type(kind), "bytes")  # other arrays as .npy


def kind_of(encoding: str) -> FieldType | None:
    """The type of the values in an encoding of others; None for one that is not read."""
    name, *given = encoding.split(":")
    if name == "ndarray" and len(given) < 3 and not set(given[:1]) - set(_DTYPES):
        dtype = _DTYPES[given[0]] if given else None
        shape = [int(n) for n in given[1].split(",") if n.isdecimal()] if given[1:] else None
        if shape is None:
            return Array(dtype)
        sound = len(shape) == given[1].count(",") + 1 <= 32 and 0 < math.prod(shape) <= LARGEST
        return Array(dtype, tuple(shape)) if sound else None
    if encoding in _SCALARS:
        return Float() if encoding.startswith("float") else Int()
    return _DECODERS[encoding][0]() if encoding in _DECODERS else None


def size_of(encoding: str) -> int | None:
    """The bytes of each value; None where they differ."""
    if encoding in _SCALARS:
        return struct.calcsize(_SCALARS[encoding])
    kind = kind_of(encoding)
    if not isinstance(kind, Array) or kind.shape is None:
        return None
    return math.prod(kind.shape) * np.dtype(kind.dtype).itemsize  # type: ignore[arg-type]


# --- values to bytes -----------------------------------------------------------------------------


def encoder(kind: FieldType, encoding: str) -> Callable[[Any], bytes]:
    """The function that makes the bytes that are stored of a value of ours."""
    if encoding in _SCALARS:
        return struct.Struct(_SCALARS[encoding]).pack
    if isinstance(kind, Array):
        ways = (dump_array, _array_bytes, np.ndarray.tobytes)
        return ways[encoding.count(":")]
    others: dict[str, Callable[[Any], bytes]] = {"str": str.encode, "list[jpeg]": _list_bytes}
    others["json"] = lambda value: JsonText.of(value).encode()
    return others.get(encoding, bytes)


def absent(encoding: str) -> bytes:
    """What stands for a value that a sample lacks, and others can decode."""
    if encoding.startswith("ndarray"):
        return _array_bytes(np.empty(0))
    return {"json": b"null", "list[jpeg]": bytes(8)}.get(encoding, bytes(size_of(encoding) or 0))


def _array_bytes(value: npt.NDArray[Any]) -> bytes:
    """An array behind its shape, in the smallest numbers that hold it."""
    width = next(n for n in range(4) if max(value.shape, default=0) < 1 << (8 << n))
    shape = np.array(value.shape, f"<u{1 << width}").tobytes()
    return bytes([value.ndim << 2 | width]) + shape + value.tobytes()


def _list_bytes(values: Sequence[bytes]) -> bytes:
    """A zero, how many there are, their sizes, and the values."""
    return b"".join([np.array([0, len(values), *map(len, values)], "<u4").tobytes(), *values])


# --- bytes to values -----------------------------------------------------------------------------


def decoder(kind: FieldType, encoding: str) -> _Decode:
    """The function that makes a value of stored bytes; raises any error for damaged ones."""
    if isinstance(kind, Array):
        own = kind_of(encoding)
        return partial(_array, own) if isinstance(own, Array) else load_array
    if isinstance(kind, Bool):
        return _bool
    if encoding in _SCALARS:
        return partial(_scalar, struct.Struct(_SCALARS[encoding]), isinstance(kind, Int))
    return _DECODERS[encoding][1]


def _scalar(stored: struct.Struct, whole: bool, data: bytes) -> Any:
    (value,) = stored.unpack(data)
    return int64(value) if whole else value


def _bool(data: bytes) -> bool:
    if data not in (b"\0", b"\1"):
        raise ValueError("neither true nor false")
    return data == b"\1"


def _array(own: Array, data: bytes) -> npt.NDArray[Any]:
    """An array; its type and its shape stand before the values, unless the encoding has them."""
    at, dtype, shape = 0, own.dtype, own.shape
    if dtype is None:
        at, dtype = 1, _CODES.get(data[0])
        if dtype is None:
            raise ValueError(f"{data[0]} stands for no type of arrays")
    if shape is None:
        sides, width = data[at] >> 2, 1 << (data[at] & 3)
        shape = tuple(np.frombuffer(data, f"<u{width}", sides, at + 1).tolist())
        at += 1 + sides * width
    if math.prod(shape) * np.dtype(dtype).itemsize != len(data) - at:  # type: ignore[arg-type]
        raise ValueError(f"{len(data) - at:,} bytes of values for an array of {dtype} {shape}")
    return np.frombuffer(data[at:], dtype).copy().reshape(shape)  # type: ignore[arg-type]


def _images(decode: _Decode, at: int, data: bytes) -> list[bytes]:
    """Images behind their number, which stands at byte `at`, and their sizes."""
    (count,) = struct.unpack_from("<I", data, at)
    sizes = np.frombuffer(data, "<u4", count, at + 4).tolist() if count else []
    at += 4 + 4 * count
    if at + sum(sizes) != len(data):
        raise ValueError("the sizes of the images in a list do not add up")
    ends = np.cumsum([at, *sizes]).tolist()
    return [decode(data[end - size : end]) for size, end in zip(sizes, ends[1:], strict=True)]


# Bytes of a pixel in Pillow's modes, and a format that holds it without loss.
_MODES = {
    "L": (1, "PPM"), "RGB": (3, "PPM"), "1": (1 / 8, "PNG"), "LA": (2, "PNG"), "RGBA": (4, "PNG"),
    "P": (1, "PPM"), "I;16": (2, "TIFF"), "CMYK": (4, "TIFF"), "I": (4, "TIFF"), "F": (4, "TIFF"),
}  # fmt: skip


def _pil(data: bytes) -> bytes:
    """The pixels of a Pillow image as a file: RGB as PPM and grey as PGM, else PNG or TIFF."""
    width, height, length = struct.unpack_from("<3I", data)
    mode, pixels = data[12 : 12 + length].decode(), data[12 + length :]
    each, format = _MODES.get(mode, (0, ""))
    if not each or math.ceil(width * each) * height != len(pixels):
        raise ValueError(f"{len(pixels):,} bytes for {width} x {height} pixels of mode {mode!r}")
    if mode == "RGB":
        return ppm_start(width, height) + pixels
    import PIL.Image

    file = io.BytesIO()
    mode = "L" if mode == "P" else mode  # MDS has lost the palette
    PIL.Image.frombytes(mode, (width, height), pixels).save(file, format)
    return file.getvalue()


_DECODERS: dict[str, tuple[type[FieldType], _Decode]] = {
    "str": (Text, bytes.decode),
    "bytes": (Bytes, bytes),
    "json": (Json, json.loads),
    "str_int": (Int, int64),
    "str_float": (Float, float),
    "str_decimal": (Text, bytes.decode),
    "pil": (Image, _pil),
    **dict.fromkeys(("jpeg", "png"), (Image, bytes)),
    **dict.fromkeys(("jpeg_array", "jpegarray"), (Images, partial(_images, bytes, 0))),
    **dict.fromkeys(("list[jpeg]", "list[png]"), (Images, partial(_images, bytes, 4))),
    "list[pil]": (Images, partial(_images, _pil, 4)),
}
