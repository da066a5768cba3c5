"""Encodes values of fields as the payloads of members, and decodes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from shardkit.codecs.array import dump_array, load_array, load_column
from shardkit.formats.base import Column
from shardkit.sample import JsonText
from shardkit.schema import Array, Bool, Bytes, FieldType, Float, Int, Json, Text, int64
from shardkit.storage.blobs import Blobs

Encoder = Callable[[Any], bytes]
Decoder = Callable[[bytes], Any]


def json_text(data: bytes) -> JsonText:
    return JsonText.checked(data.decode())


def _bool(data: bytes) -> bool:
    value = json.loads(data)
    if not isinstance(value, bool):
        raise ValueError("it is neither true nor false")
    return value


def _float(data: bytes) -> float:
    return float(data.strip(b'"'))


def _json_bytes(value: Any) -> bytes:
    return JsonText.of(value).encode()


def _float_bytes(value: float) -> bytes:
    """JSON has no NaN or infinities: they become strings, as in the JSON of Protocol Buffers."""
    text = json.dumps(value)
    return (text if math.isfinite(value) else f'"{text}"').encode()


def column_of(kind: FieldType, blobs: Blobs) -> Column:
    """Decode the payloads of a field of several samples. Raises ValueError for a damaged one."""
    decode = kind.entry(DECODERS)
    if decode is None:
        return blobs
    if decode is load_array:
        return load_column(blobs, kind.optional)
    found = blobs.integers() if decode is int64 and not kind.optional else None
    return blobs.decoded(decode, kind.optional) if found is None else found


# None for values that are stored unchanged.
DECODERS: dict[type, Decoder | None] = {
    Bytes: None,
    Int: int64,
    Float: _float,
    Bool: _bool,
    Text: bytes.decode,
    Json: json.loads,
    Array: load_array,
}
ENCODERS: dict[type, Encoder] = {
    Bytes: bytes,
    Int: b"%d".__mod__,
    Float: _float_bytes,
    Bool: _json_bytes,
    Text: str.encode,
    Json: _json_bytes,
    Array: dump_array,
}
