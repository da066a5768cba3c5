"""Values of LMDBs of other programs: images, JSON, msgpack maps and lists, Caffe's Datum, bytes.

Pickles are refused with an error that says so, as loading one runs the code in it, and so is the
output of pyarrow.serialize.
"""

from __future__ import annotations

import json
import math
import pickletools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from shardkit.codecs.image import is_image
from shardkit.codecs.media import guessed_schema
from shardkit.codecs.protobuf import fields, signed, varint
from shardkit.errors import FormatError
from shardkit.formats.base import Column
from shardkit.sample import JsonText, Sample
from shardkit.schema import Array, Bytes, FieldType, Image, Json, Schema, Text, is_unicode
from shardkit.storage.blobs import Blobs

# Numbers of tensors and buffers, then the schema of an Arrow stream with a single field, `list`.
_PYARROW = re.compile(rb"(..\0\0){2,6}(\xff{4})?..\0\0.\0\0\0.{0,240}\0list\0", re.DOTALL)


class Kind(NamedTuple):
    """The way in which all values of an LMDB are stored."""

    name: str
    read: Callable[[bytes], Sample]  # raises ValueError for a value of another kind
    schema: Schema | None  # None if the fields vary between values
    # Returns the only field of many values at once, or raises ValueError; None if there is no way.
    many: Callable[[Blobs], Column] | None = None


def refuse(value: bytes, **where: Any) -> None:
    """Raise FormatError for a value that may run code when it is loaded, or cannot be read."""
    again = "if you trust them, and write the results with shardkit.create, as docs/lmdb.md shows"
    if _is_pickle(value):
        raise FormatError(
            "the values of the LMDB are Python pickles, which shardkit never loads: they run code",
            fix=f"load them with pickle, {again}",
            **where,
        )
    if _PYARROW.match(value[:400]):
        raise FormatError(
            "the values of the LMDB were written by pyarrow.serialize, which was removed from"
            " pyarrow, and may contain pickles",
            fix=f"load them with pyarrow.deserialize of pyarrow 11, {again}",
            **where,
        )


def _is_pickle(value: bytes) -> bool:
    """Return whether the whole value is a pickle. Its opcodes are parsed, but never executed."""
    if len(value) < 4 or value[-1:] != b"." or is_image(value[:64]):
        return False
    if value[0] == 0x80:  # the PROTO opcode of protocol 2 and above; an empty map in msgpack
        return 2 <= value[1] <= 5
    try:
        *_, (last, _, at) = pickletools.genops(value)
    except (ValueError, UnicodeDecodeError):
        return False
    return last.name == "STOP" and at == len(value) - 1


def kind_of(values: list[bytes], *, part: bool = False) -> Kind:
    """Return the first kind that fits all values; for a named `part`, an image, text or bytes."""
    for kind in (IMAGE, _TEXT) if part else _KINDS:
        try:
            if all(kind.read(value) for value in values):
                return kind
        except (ValueError, RecursionError):
            continue
    return _BYTES


def schema_of(kind: Kind, values: list[bytes]) -> Schema:
    """The fields of all values: optional if some values lack them, JSON if their types differ."""
    if kind.schema is not None:
        return kind.schema
    samples = [kind.read(value) for value in values]
    kinds: dict[str, FieldType] = {}
    everywhere = set(samples[0]).intersection(*samples) if samples else set()
    for sample in samples:
        for name, found in guessed_schema({"__key__": "", **sample}).items():
            kinds[name] = _common(kinds.get(name, found), found)
    return Schema({n: replace(kind, optional=n not in everywhere) for n, kind in kinds.items()})


def _common(one: FieldType, other: FieldType) -> FieldType:
    """Return a type that can hold values of both types."""
    if one == other:
        return one
    for kind in (Array, Bytes):  # Bytes has subclasses, such as Image
        if isinstance(one, kind) and isinstance(other, kind):
            return kind()
    return Json()


# --- kinds ---------------------------------------------------------------------------------------


def _image(value: bytes) -> Sample:
    if not is_image(value[:64]):
        raise ValueError("not an image")
    return {"image": value}


def _json(value: bytes) -> Sample:
    text = value.decode()
    if not isinstance(json.loads(text), dict | list):
        raise ValueError("not a JSON object or array")
    return {"json": JsonText(text)}


def _text(value: bytes) -> Sample:
    return {"text": value.decode()}


def _bytes(value: bytes) -> Sample:
    return {"value": value}


def _unpacked(value: bytes) -> Any:
    """Return the msgpack value. Old versions of msgpack have a single type for bytes and text."""
    try:
        return msgpack.unpackb(value, strict_map_key=False, unicode_errors="surrogateescape")
    except TypeError as error:  # a key that is a list or a map
        raise ValueError(f"not a map with names as keys: {error}") from error


def _msgpack_map(value: bytes) -> Sample:
    found = _unpacked(value)
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError("not a map with names as keys")
    return {n: _plain(v) for n, v in found.items() if n != "__key__"}


def _msgpack_list(value: bytes) -> Sample:
    """Return a list of unnamed fields, usually an image and its label."""
    items = _unpacked(value)
    if not isinstance(items, list):
        raise ValueError("not a list")
    found = [_plain(item) for item in items]
    if not any(isinstance(field, bytes | str | np.ndarray) for field in found):
        raise ValueError("not a list with bytes, text or arrays")
    names = [f"value{number}" for number in range(len(found))]
    if [type(field) for field in found] == [bytes, int] and is_image(found[0][:64]):
        names = ["image", "label"]
    return dict(zip(names, found, strict=True))


def _plain(value: Any) -> Any:
    """Return the value of a field: decodes the arrays of msgpack-numpy, keeps bytes and JSON."""
    if isinstance(value, msgpack.ExtType | msgpack.Timestamp):
        raise ValueError("a msgpack extension")
    if isinstance(value, dict) and value.get(b"nd", value.get("nd")) is True:
        return _packed_array({_name(name): v for name, v in value.items()})
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if not isinstance(value, str) or is_unicode(value) else _stored(value)


def _packed_array(value: dict[str, Any]) -> Any:
    try:
        dtype = np.dtype(_name(value["type"]))
        if dtype.hasobject:
            raise ValueError("an array of objects")
        return np.frombuffer(_stored(value["data"]), dtype).reshape(value["shape"]).copy()
    except (KeyError, TypeError, SyntaxError) as error:  # NumPy parses some dtypes as Python code
        raise ValueError(f"an invalid array: {error!r}") from error


def _stored(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value


def _name(name: Any) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def _datum(value: bytes) -> Sample:
    """Caffe's Datum: 1 channels, 2 height, 3 width, 4 data, 5 label, 6 float_data, 7 encoded.

    As in Caffe, float_data contains the pixels if there is no data. All other fields of the message
    are put unchanged into one field, `other`.
    """
    numbers: dict[int, int] = {}
    data = b""
    floats, other = bytearray(), bytearray()
    for number, content, stored in _datum_fields(value):
        if number in (1, 2, 3, 5, 7) and isinstance(content, int):
            if number == 5 and number in numbers:
                raise ValueError("several labels")
            numbers[number] = content
        elif number == 4 and isinstance(content, bytes):
            data = content
        elif number == 6 and isinstance(content, bytes):  # packed, or one by one
            floats += content
        else:
            other += stored
    shape = tuple(numbers.get(n, 0) for n in (1, 2, 3))
    sample: Sample = {}
    if data and (numbers.get(7) or is_image(data[:64])):
        sample |= _image(data)
    elif data or floats:
        sample["pixels"] = _pixels(data or floats, "|u1" if data else "<f4", shape)
    else:
        raise ValueError("not a Datum")
    if 5 in numbers:
        sample["label"] = signed(numbers[5])
    if data and floats:
        sample["float_data"] = np.frombuffer(floats, "<f4").copy()
    return {**sample, "other": bytes(other)} if other else sample


def _pixels(data: bytes | bytearray, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if len(data) != math.prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError(f"{len(data)} bytes of pixels for {shape}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


_FLOAT = 0x35  # the tag of a single float in float_data
_MAX_FLOATS = 4096  # to be read at once


def _datum_fields(data: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """Yield the fields of a message: number, value, and the encoded field.

    Consecutive single floats are given together.
    """
    at = 0
    while at < len(data):
        start = at
        if data[at] == _FLOAT and at + 5 <= len(data):
            count = min((len(data) - at) // 5, _MAX_FLOATS)
            rows = np.frombuffer(data, np.uint8, 5 * count, at).reshape(-1, 5)
            ends = np.flatnonzero(rows[:, 0] != _FLOAT)
            rows = rows[: ends[0] if len(ends) else None]
            at += rows.size
            yield 6, rows[:, 1:].tobytes(), data[start:at]
            continue
        tag, begin, at = next(fields(data, at, len(data)))
        number = varint(data, begin, at)[0] if not tag & 7 else None
        yield tag >> 3, data[begin:at] if number is None else number, data[start:at]


def _kept(values: Blobs) -> Blobs:
    return values


def _texts(values: Blobs) -> list[str | None]:
    return values.texts()


def _jsons(values: Blobs) -> list[Any]:
    return values.decoded(lambda value: json.loads(_json(value)["json"]), optional=False)


def _images(values: Blobs) -> Blobs:
    heads = Blobs(values.data, values.starts, np.minimum(values.sizes, 64)).values()
    if not all(head is None or is_image(head) for head in heads):
        raise ValueError("not an image")
    return values


IMAGE = Kind("an image", _image, Schema({"image": Image()}), _images)
DATUM = Kind("a Caffe Datum", _datum, None)
_TEXT = Kind("text", _text, Schema({"text": Text()}), _texts)
_BYTES = Kind("bytes", _bytes, Schema({"value": Bytes()}), _kept)
_KINDS = (
    IMAGE,
    Kind("JSON", _json, Schema({"json": Json()}), _jsons),
    Kind("a msgpack map", _msgpack_map, None),
    Kind("a msgpack list", _msgpack_list, None),
    DATUM,
)
