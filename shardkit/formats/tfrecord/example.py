"""tf.train.Example: how fields become features, and the encoding, without the protobuf library.

Example {1: Features {1: map of names to Feature}}; a Feature is one of three lists, and each list
is {1: values} (tensorflow/core/example/feature.proto). The decoder accepts unknown fields, any
order, and packed or unpacked numbers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.array import dump_array, load_array
from shardkit.codecs.protobuf import alone, dump_field, dump_varint, fields, signed, varint
from shardkit.formats.base import KEY, encoded, key_bytes
from shardkit.sample import JsonText, Sample
from shardkit.schema import Array, Bool, FieldType, Float, Images, Int, Json, Scalar, Schema, Text

BYTES, FLOATS, INTS = 1, 2, 3
LISTS = ("no list", "a bytes_list", "a float_list", "an int64_list")
_FIRST, _SECOND = 0x0A, 0x12  # tags of fields 1 and 2, if length-delimited
_ALONE = {FLOATS: 0x0D, INTS: 0x08}  # tags of unpacked numbers
_CHUNK = 1 << 16  # numbers that are packed, and bytes that are unpacked, at a time
_CONTINUED = bytes(range(0x80, 0x100))  # bytes that do not end a varint

# Suffixes of feature names: the exact value of a float that a float_list rounds, and the shape of
# an array that is stored as bytes.
EXACT, SHAPE = "/float64", "/shape"
# Arrays that are stored as lists of numbers, if the schema has their shape. Others are stored as
# bytes: only the values, if tf.io.decode_raw supports the dtype, and otherwise .npy.
_LISTED = {"<f4": FLOATS, **dict.fromkeys(("<i2", "<i4", "<i8", "<u2", "<u4"), INTS)}
_RAW = ("<f2", "<f4", "<f8", "|u1", "|i1", "|b1", "<u2", "<i2", "<i4", "<i8", "<c8", "<c16")


class Feature(NamedTuple):
    """The type of the list, and its values; numbers are in packed form."""

    list: int
    parts: Sequence[bytes]

    def numbers(self) -> npt.NDArray[Any]:
        data = b"".join(self.parts)
        return np.frombuffer(data, "<f4") if self.list == FLOATS else unpacked(data)

    def __len__(self) -> int:
        return len(self.parts if self.list == BYTES else self.numbers())

    def one(self) -> bytes:
        if len(self.parts) != 1:
            raise ValueError(f"it has {len(self)} values, not one")
        return bytes(self.parts[0])


def features(data: bytes, *, whole: bool = True) -> dict[str, tuple[int, int]]:
    """The byte ranges of the features of an Example, by name. Raises ValueError if it is invalid.

    If not `whole`, `data` is the beginning of an Example, and ends at the end of a feature.
    """
    found: dict[str, tuple[int, int]] = {}
    tops = fields(data, 0, len(data)) if whole else [(_FIRST, varint(data, 1, 11)[1], len(data))]
    for top, start, stop in tops:
        if top == _SECOND:
            raise ValueError("it is a SequenceExample")
        for tag, at, end in fields(data, start, stop) if top == _FIRST else ():
            if tag == _FIRST and end > at + 1 and data[at] == _FIRST and data[at + 1] < 0x80:
                # The usual case: a short name, followed by a feature.
                middle = at + 2 + data[at + 1]
                which, first = alone(data, middle, end)
                if which == _SECOND:
                    found[str(data[at + 2 : middle], "utf-8")] = first, end
                    continue
            spans = {part: (a, b) for part, a, b in fields(data, at, end)}
            if tag == _FIRST:
                first, last = spans.get(_FIRST, (at, at))
                found[str(data[first:last], "utf-8")] = spans.get(_SECOND, (at, at))
    return found


def feature(data: bytes, span: tuple[int, int]) -> Feature:
    """Return the feature in a byte range."""
    tag, start = alone(data, *span)
    if tag >> 3 in (BYTES, FLOATS, INTS):
        inner, at = alone(data, start, span[1])
        if inner == _FIRST:
            return Feature(tag >> 3, (data[at : span[1]],))
    which = 0
    parts: list[bytes] = []
    for tag, start, stop in fields(data, *span):
        if tag & 7 == 2 and tag >> 3 in (BYTES, FLOATS, INTS):
            if tag >> 3 != which:  # the last of several lists wins
                which, parts = tag >> 3, []
            items = fields(data, start, stop)
            parts += [data[at:end] for tag, at, end in items if tag in (_FIRST, _ALONE.get(which))]
    return Feature(which, parts)


def place(data: bytes, span: tuple[int, int]) -> tuple[int, int]:
    """Return where the only value of a `bytes_list` is; raises ValueError for another feature."""
    tag, start = alone(data, *span)
    inner, at = alone(data, start, span[1])
    if tag >> 3 != BYTES or inner != _FIRST:
        raise ValueError("it is not one value of bytes in the usual form")
    return at, span[1]


def unpacked(data: bytes) -> npt.NDArray[np.int64]:
    found, at = [np.zeros(0, np.int64)], 0
    while at < len(data):  # in chunks, as unpacking takes 60 bytes of memory for each byte
        part = data[at : at + _CHUNK]
        part = part if at + _CHUNK >= len(data) else part.rstrip(_CONTINUED)
        found.append(_unpacked(part))
        at += len(part) or len(data)
    return np.concatenate(found)


def _unpacked(data: bytes) -> npt.NDArray[np.int64]:
    octets = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(octets < 0x80)
    starts = np.append(0, ends[:-1] + 1)[: len(ends)]
    lengths = ends - starts + 1
    if not len(ends) or lengths.sum() != len(octets) or lengths.max(initial=0) > 10:
        raise ValueError("it has a truncated number")
    found = np.zeros(len(ends), np.uint64)
    for n in range(lengths.max(initial=0)):
        has = lengths > n
        found[has] |= (octets[starts[has] + n] & 0x7F).astype(np.uint64) << np.uint64(7 * n)
    return found.view(np.int64)


def packed(values: npt.NDArray[Any]) -> bytes:
    if len(values) > _CHUNK:
        return b"".join(packed(values[n : n + _CHUNK]) for n in range(0, len(values), _CHUNK))
    left = values.astype(np.int64).view(np.uint64)
    width = max(-(-int(left.max(initial=0)).bit_length() // 7), 1)
    digits = left[:, None] >> np.arange(0, 7 * width, 7, dtype=np.uint64)
    there = digits != 0
    there[:, 0] = True
    octets = (digits & np.uint64(0x7F)).astype(np.uint8)
    octets[:, :-1] |= there[:, 1:].view(np.uint8) << 7
    return bytes(octets[there])


def entry(name: str, found: Feature) -> list[bytes]:
    """Encode a feature and its name as an entry of an Example, in chunks: values are not copied."""
    items = [each for part in found.parts for each in (b"\x0a" + dump_varint(len(part)), part)]
    size = sum(map(len, items))
    head = b"%c%b" % (found.list << 3 | 2, dump_varint(size))
    head = b"%b\x12%b%b" % (dump_field(1, name.encode()), dump_varint(len(head) + size), head)
    return [b"\x0a%b%b" % (dump_varint(len(head) + size), head), *items]


# --- fields --------------------------------------------------------------------------------------


def list_of(kind: FieldType) -> int:
    """Return the type of list in which values of a field are stored."""
    if isinstance(kind, Scalar):
        return FLOATS if isinstance(kind, Float) else INTS
    if not isinstance(kind, Array) or kind.shape is None or 0 in kind.shape:
        return BYTES
    return BYTES if None in kind.shape[1:] else _LISTED.get(kind.dtype or "", BYTES)


def _encoded(name: str, kind: FieldType, value: Any) -> Iterator[tuple[str, Feature]]:
    """Yield the features of a value, by name."""
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


def decoded(
    kind: FieldType,
    found: Feature,
    beside: Callable[[str], Feature | None],
    *,
    json_text: bool = False,
) -> Any:
    """Return the value of a feature; `beside` returns the feature whose name has the given suffix.

    Raises ValueError if it is not a value of the type.
    """
    if found.list != list_of(kind):
        raise ValueError(f"it is {LISTS[found.list]}, not {LISTS[list_of(kind)]}")
    if isinstance(kind, Images):
        return [bytes(part) for part in found.parts]
    if isinstance(kind, Array):
        return _array(kind, found, beside)
    data = found.one()
    if isinstance(kind, Float) and (exact := beside(EXACT)) is not None:
        return float(struct.unpack("<d", exact.one())[0])
    if isinstance(kind, Json):
        return (JsonText.checked if json_text else json.loads)(data.decode())
    decode = _DECODERS.get(type(kind))
    return data if decode is None else decode(data)


def _array(
    kind: Array, found: Feature, beside: Callable[[str], Feature | None]
) -> npt.NDArray[Any]:
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
    """Return the dtypes for tf.io.decode_raw, by name, of arrays that are stored as raw bytes."""
    arrays = {n: k for n, k in schema.items() if isinstance(k, Array) and list_of(k) == BYTES}
    return {name: np.dtype(kind.dtype).name for name, kind in arrays.items() if kind.dtype in _RAW}


def example(sample: Sample, schema: Schema) -> list[bytes]:
    """Return the Example of a sample, in chunks; the first one has the key and the numbers."""
    first = entry(KEY, Feature(BYTES, [key_bytes(sample[KEY])]))
    others: list[bytes] = []
    fields = ((name, kind, partial(_features, name, kind)) for name, kind in schema.items())
    for name, chunks in encoded(sample, fields).items():
        if isinstance(schema[name], Scalar):
            first += chunks
        else:
            others += chunks
    size = sum(map(len, first)) + sum(map(len, others))
    return [b"".join((b"\x0a", dump_varint(size), *first)), *others]


def _features(name: str, kind: FieldType, value: Any) -> list[bytes]:
    """Return the features of a value as entries of an Example, in chunks."""
    return [chunk for each in _encoded(name, kind, value) for chunk in entry(*each)]
