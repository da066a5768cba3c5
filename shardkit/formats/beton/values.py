"""From the bytes of a .beton to values: for each field a function that reads it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from shardkit.codecs.array import load_array
from shardkit.codecs.pixels import ppm_start
from shardkit.formats.beton.contents import Contents
from shardkit.formats.beton.layout import JPEG, RAW, Field, TypeId
from shardkit.sample import JsonText
from shardkit.schema import Array, Bool, Bytes, FieldType, Float, Int, Json, Text
from shardkit.storage import Data

# Of the file, an unpacked row of its table and the position of that: the value. Raises ValueError.
Read: TypeAlias = Callable[[Data, tuple[Any, ...], int], Any]
_Decode: TypeAlias = Callable[[bytes], Any]


def read_json(text: bytes) -> Any:
    return json.loads(text.decode())


def read_json_text(text: bytes) -> JsonText:
    """The text itself, once it is known to be JSON."""
    found = JsonText(text.decode())
    json.loads(found)
    return found


def _read_text(text: bytes) -> str:
    found = json.loads(text.decode())
    if not isinstance(found, str):
        raise ValueError("JSON that is no text")
    return found


def _same(data: bytes) -> bytes:
    return data


def reads(contents: Contents, number: int, kind: FieldType, json: _Decode) -> Read | None:
    """What reads the field with this number as `kind`, and JSON by `json`; None if nothing does.

    Every field can be read as bytes: where files of a dataset differ, that is what they share.
    """
    field, at = contents.fields[number], contents.row.places[number]
    if field.type_id in (TypeId.INT, TypeId.FLOAT):
        return _number(field, at, type(kind))
    if field.type_id == TypeId.IMAGE:
        blob = sum(earlier.has_data for earlier in contents.fields[:number])
        return _image(contents, at, blob) if isinstance(kind, Bytes) else None
    if field.dtype is not None:
        return _array(contents, field, at, kind)
    if field.type_id == TypeId.BYTES:
        decoders: dict[type[FieldType], _Decode] = {Bytes: _same, Array: load_array}
        made = _bytes
    else:
        decoders = {Json: json, Text: _read_text, Bytes: _same}
        made = _text
    decode = decoders.get(type(kind))
    return None if decode is None else made(contents, at, decode)


def _number(field: Field, at: int, kind: type[FieldType]) -> Read | None:
    packer = struct.Struct("<q" if field.type_id == TypeId.INT else "<d")
    own = Int if field.type_id == TypeId.INT else Float
    if kind is own:
        return lambda data, row, position: row[at]
    if kind is Bool and own is Int:
        return lambda data, row, position: bool(row[at])
    if kind is Bytes:
        return lambda data, row, position: packer.pack(row[at])
    return None


def _span(data: Data, first: int, ptr: int, size: int) -> bytes:
    """The bytes that a pointer leads to; `first` is where the data of the file begin."""
    if ptr < first or ptr + size > len(data):
        raise ValueError(f"the file has no {size:,} bytes of it")
    return data[ptr : ptr + size]


def _image(contents: Contents, at: int, blob: int) -> Read:
    first, size_of = contents.data_at, contents.allocations.size

    def read(data: Data, row: tuple[Any, ...], position: int) -> bytes:
        mode, width, height, ptr = row[at : at + 4]
        if mode == JPEG:
            return _span(data, first, ptr, size_of(position, blob, ptr))
        if mode == RAW:
            return ppm_start(width, height) + _span(data, first, ptr, 3 * width * height)
        raise ValueError(f"an image of mode {mode}, which is neither JPEG nor raw")

    return read


def _bytes(contents: Contents, at: int, decode: _Decode) -> Read:
    first = contents.data_at
    return lambda data, row, position: decode(_span(data, first, row[at], row[at + 1]))


def _text(contents: Contents, at: int, decode: _Decode) -> Read:
    first = contents.data_at

    def read(data: Data, row: tuple[Any, ...], position: int) -> Any:
        return decode(_span(data, first, row[at], row[at + 1]).partition(b"\0")[0])

    return read


def _array(contents: Contents, field: Field, at: int, kind: FieldType) -> Read | None:
    first, size, dtype, shape = contents.data_at, field.nbytes, field.dtype, field.shape
    if type(kind) is Bytes:
        return lambda data, row, position: _span(data, first, row[at], size)
    if not isinstance(kind, Array) or (kind.dtype, kind.shape) != (dtype and dtype.str, shape):
        return None

    def read(data: Data, row: tuple[Any, ...], position: int) -> Any:
        return np.frombuffer(bytearray(_span(data, first, row[at], size)), dtype).reshape(shape)

    return read
