"""Conversion of field values to features and back, and TensorFlow's arguments to parse them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.array import dump_array, load_array
from shardkit.codecs.protobuf import dump_varint, signed, varint
from shardkit.formats.tfrecord.example import BYTES, FLOATS, INTS, LISTS, Feature, packed
from shardkit.sample import JsonText
from shardkit.schema import Array, Bool, FieldType, Float, Images, Int, Json, Scalar, Schema, Text

Get = Callable[[str], Feature | None]

# Suffixes of feature names: the exact value of a float that a float_list rounds, and the shape of
# an array that is stored as bytes.
EXACT, SHAPE = "/float64", "/shape"
# Arrays that are stored as lists of numbers, if the schema has their shape. Others are stored as
# bytes: only the values, if tf.io.decode_raw supports the dtype, and otherwise .npy.
_LISTED = {"<f4": FLOATS, **dict.fromkeys(("<i2", "<i4", "<i8", "<u2", "<u4"), INTS)}
_RAW = ("<f2", "<f4", "<f8", "|u1", "|i1", "|b1", "<u2", "<i2", "<i4", "<i8", "<c8", "<c16")


def list_of(kind: FieldType) -> int:
    """The type of list in which values of a field are stored."""
    if isinstance(kind, Scalar):
        return FLOATS if isinstance(kind, Float) else INTS
    if not isinstance(kind, Array) or kind.shape is None or 0 in kind.shape:
        return BYTES
    return BYTES if None in kind.shape[1:] else _LISTED.get(kind.dtype or "", BYTES)


def encoded(name: str, kind: FieldType, value: Any) -> Iterator[tuple[str, Feature]]:
    """The features of a value, by name."""
    which = list_of(kind)
    if isinstance(kind, Array) and which == BYTES:
        raw = kind.dtype in _RAW
        yield name, Feature(BYTES, [value.tobytes() if raw else dump_array(value)])
        if raw:
            yield name + SHAPE, Feature(INTS, [packed(np.array(value.shape, np.int64))])
    elif isinstance(kind, Array):
        data = packed(value.ravel()) if which == INTS else value.tobytes()
        yield name, Feature(which, [data] if data else [])
    elif which == INTS:
        yield name, Feature(INTS, [dump_varint(value)])
    elif which == FLOATS:
        with np.errstate(over="ignore"):
            single = np.float32(value)
        yield name, Feature(FLOATS, [single.tobytes()])
        if struct.pack("<d", single) != (exact := struct.pack("<d", value)):
            yield name + EXACT, Feature(BYTES, [exact])
    elif isinstance(kind, Images):
        yield name, Feature(BYTES, value)
    else:
        value = JsonText.of(value) if isinstance(kind, Json) else value
        yield name, Feature(BYTES, [value.encode() if isinstance(kind, Text | Json) else value])


def decoded(kind: FieldType, found: Feature, beside: Get, *, json_text: bool = False) -> Any:
    """The value of a feature; `beside` returns the feature whose name has the given suffix.

    Raises ValueError if it is not a value of the type.
    """
    if found.list != list_of(kind):
        raise ValueError(f"it is {LISTS[found.list]}, not {LISTS[list_of(kind)]}")
    if isinstance(kind, Images):
        return list(found.parts)
    if isinstance(kind, Array):
        return _array(kind, found, beside)
    data = found.one()
    if isinstance(kind, Float) and (exact := beside(EXACT)) is not None:
        return float(struct.unpack("<d", exact.one())[0])
    if isinstance(kind, Json):
        return (JsonText.checked if json_text else json.loads)(data.decode())
    decode = _DECODERS.get(type(kind))
    return data if decode is None else decode(data)


def _array(kind: Array, found: Feature, beside: Get) -> npt.NDArray[Any]:
    if kind.dtype is None or (found.list == BYTES and kind.dtype not in _RAW):
        return load_array(found.one())
    dtype = np.dtype(kind.dtype)
    if found.list == BYTES:
        shape = beside(SHAPE) or Feature(INTS, [])
        return np.frombuffer(found.one(), dtype).reshape(shape.numbers().tolist()).copy()
    numbers = found.numbers()
    values = numbers.astype(dtype)
    if dtype != numbers.dtype and not np.array_equal(values, numbers):
        raise ValueError(f"it has numbers that {dtype} cannot hold")
    return values.reshape([-1 if side is None else side for side in kind.shape or (None,)])


def _int(data: bytes) -> int:
    value, end = varint(data, 0, len(data))
    if end < len(data):
        raise ValueError("it has several values, not one")
    return signed(value)


def _bool(data: bytes) -> bool:
    if data not in (b"\0", b"\1"):
        raise ValueError("it is neither 0 nor 1")
    return data == b"\1"


def _float(data: bytes) -> float:
    if len(data) != 4:
        raise ValueError(f"it has {len(data) // 4} values, not one")
    return float(struct.unpack("<f", data)[0])


_DECODERS: dict[type[FieldType], Callable[[bytes], Any]] = {
    Int: _int,
    Bool: _bool,
    Float: _float,
    Text: bytes.decode,
}


def features_table(schema: Schema) -> dict[str, dict[str, Any]]:
    """For tf.io.parse_single_example, by name: the class in tf.io, as `type`, and its arguments."""
    table: dict[str, dict[str, Any]] = {}
    for name, kind in {"__key__": Text(), **schema}.items():
        which = list_of(kind)
        shape = list(kind.shape or ()) if isinstance(kind, Array) and which != BYTES else []
        about: dict[str, Any] = {"type": "FixedLenFeature", "shape": shape}
        if kind.optional or isinstance(kind, Images) or shape == [None]:
            about = {"type": "RaggedFeature"}
        elif None in shape:
            about = {"type": "FixedLenSequenceFeature", "shape": shape[1:], "allow_missing": True}
        table[name] = {**about, "dtype": {INTS: "int64", FLOATS: "float32"}.get(which, "string")}
        if name in raw_table(schema):
            table[name + SHAPE] = {"type": "RaggedFeature", "dtype": "int64"}
    return table


def raw_table(schema: Schema) -> dict[str, str]:
    """The dtypes for tf.io.decode_raw, by name, of arrays that are stored as raw bytes."""
    arrays = {n: k for n, k in schema.items() if isinstance(k, Array) and list_of(k) == BYTES}
    return {name: np.dtype(kind.dtype).name for name, kind in arrays.items() if kind.dtype in _RAW}
