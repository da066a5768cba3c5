"""LMDBs that others made: what their keys and values are, found out from the file.

Known are values that are images, msgpack maps, JSON, Caffe's Datum messages, or bytes.
Pickles are refused by name: reading one runs the code in it.
"""

from __future__ import annotations

import json
import math
import pickletools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from sys import getsizeof
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np

from shardkit.codecs.guess import guessed_schema
from shardkit.codecs.image import SUFFIXES, is_image
from shardkit.errors import FormatError, SampleError
from shardkit.formats.lmdb.layout import DUPDATA, SUBDATA, Entry, Tree
from shardkit.sample import JsonText, Sample, key_of, unique_key
from shardkit.schema import Array, Bytes, FieldType, Image, Json, Schema

if TYPE_CHECKING:
    import numpy.typing as npt

_LOOKED_AT = 100  # values, spread evenly, that are looked at to find the fields of all
_CAFFE_KEY = re.compile(r"\d{8,10}_(?=.)")  # convert_imageset numbers its file names
# Entries about the others, as torchvision-style and text-recognition datasets have them.
ABOUT_OTHERS = re.compile(rb"__.*|num-samples|length|size|len", re.DOTALL)


class Kind(NamedTuple):
    """How all values of an LMDB are stored."""

    name: str
    read: Callable[[bytes], Sample]  # raises ValueError for a value of another kind
    schema: Schema | None  # None where fields differ from value to value


@dataclass(frozen=True)
class Entries:
    """Where the samples are, and how their values are stored."""

    keys: list[str]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    kind: Kind

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def in_memory(self) -> int:
        """About the bytes that these take."""
        return self.offsets.nbytes + self.sizes.nbytes + sum(map(getsizeof, self.keys))

    def location(self, position: int) -> tuple[int, int]:
        """Offset and size of a value."""
        return int(self.offsets[position]), int(self.sizes[position])

    def sample(self, position: int, value: bytes, schema: Schema) -> Sample:
        """The sample in a stored value, checked against what the others hold; JSON as its text."""
        try:
            fields = self.kind.read(value)
        except (ValueError, RecursionError) as error:
            raise SampleError(
                f"a value is not {self.kind.name} like the others: {error}"
            ) from error
        for name in schema.keys() - fields.keys():
            if not schema[name].optional:
                raise SampleError(
                    f"the sample has no field {name!r}, as all have that were looked at on opening",
                    field=name,
                    fix="convert the LMDB: `shardkit convert` reads all values before it says which"
                    " fields every sample has",
                )
        return schema.check({"__key__": self.keys[position], **fields})


def scan(tree: Tree) -> dict[str, Any]:
    """The layout of a foreign LMDB: every key, and a schema from the first values."""
    every = _entries(tree)
    entries = [entry for entry in every if not ABOUT_OTHERS.fullmatch(entry.key)]
    about = [entry.key for entry in every if ABOUT_OTHERS.fullmatch(entry.key)]
    count = min(len(entries), _LOOKED_AT)
    some = [entries[n * (len(entries) - 1) // max(count - 1, 1)] for n in range(count)]
    values = [tree.read(entry.offset, entry.size) for entry in some]
    for entry, value in zip(some, values, strict=True):
        _refuse_pickle(value, entry, tree.path)
    kind = _kind(values)
    schema = _schema(kind, values)
    guessed = [n for n, k in schema.items() if count < len(entries) and not k.optional]
    offsets, sizes = (np.array([e[n] for e in entries], np.int64) for n in (1, 2))
    found = Entries(_keys(entries), offsets, sizes, kind)
    layout = {"schema": schema.to_json(), "entries": found, **passed_over(about)}
    return {**layout, "guessed": guessed} if kind.schema is None and guessed else layout


def passed_over(keys: list[bytes]) -> dict[str, Any]:
    """The `ignored` of a layout: entries about the samples, if there are any."""
    return {"ignored": {f"entry {_text(key)!r}": 1 for key in keys}} if keys else {}


def _entries(tree: Tree) -> list[Entry]:
    entries = [entry for leaf in tree.leaves() for entry in tree.entries(leaf)]
    named = [entry for entry in entries if entry.flags & SUBDATA]
    if len(named) == 1 and len(entries) == 1:
        root = tree.root_of(named[0])
        entries = [entry for leaf in tree.leaves(root) for entry in tree.entries(leaf)]
        named = [entry for entry in entries if entry.flags & SUBDATA]
    if named:
        raise FormatError(
            "the LMDB holds several named databases",
            path=tree.path,
            found=", ".join(repr(e.key.decode("utf-8", "replace")) for e in named[:5]),
            fix="copy one of them to an environment of its own, as its main database",
        )
    if any(entry.flags & DUPDATA for entry in entries):
        raise FormatError(
            "the LMDB holds several values under one key (DUPSORT), and a sample has one",
            path=tree.path,
        )
    return entries


def _keys(entries: list[Entry]) -> list[str]:
    """Keys as text: without Caffe's number and an image's suffix, and with no dots in the name."""
    keys: dict[str, None] = {}
    raw = [_text(entry.key) for entry in entries]
    caffe = bool(raw) and all(_CAFFE_KEY.match(key) for key in raw)
    for key in raw:
        stem, dot, suffix = (_CAFFE_KEY.sub("", key, count=1) if caffe else key).rpartition(".")
        if not dot or suffix.lower() not in SUFFIXES or not stem:
            stem, suffix = stem + dot + suffix, "key"
        keys[unique_key(key_of(stem), suffix, keys)] = None
    return list(keys)


def _text(key: bytes) -> str:
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return key.hex()
    return text if text.isprintable() else key.hex()


def _refuse_pickle(value: bytes, entry: Entry, path: Path) -> None:
    if _is_pickle(value):
        raise FormatError(
            "the values of the LMDB are Python pickles, which shardkit never loads: they run code",
            path=path,
            key=_text(entry.key),
            offset=entry.offset,
            fix="load them where you trust them, and write them with shardkit.create",
        )


def _is_pickle(value: bytes) -> bool:
    """Whether the value is a pickle from beginning to end. Its code is looked at, never run."""
    if len(value) < 4 or value[-1:] != b"." or is_image(value[:64]):
        return False
    if value[0] == 0x80:  # protocol 2 and up say so; in msgpack this is an empty map
        return 2 <= value[1] <= 5
    try:
        *_, (last, _, at) = pickletools.genops(value)
    except (ValueError, UnicodeDecodeError):
        return False
    return last.name == "STOP" and at == len(value) - 1


# --- values --------------------------------------------------------------------------------------


def _image(value: bytes) -> Sample:
    if not is_image(value[:64]):
        raise ValueError("not an image")
    return {"image": value}


def _msgpack_map(value: bytes) -> Sample:
    try:
        fields = msgpack.unpackb(value, strict_map_key=False)
    except TypeError as error:  # a key that is a list or a map
        raise ValueError(f"not a map of names: {error}") from error
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise ValueError("not a map of names")
    return {n: _plain(v) for n, v in fields.items() if n != "__key__"}


def _plain(value: Any) -> Any:
    """What a field may hold: arrays as msgpack-numpy packs them, bytes and JSON as they are."""
    if isinstance(value, msgpack.ExtType | msgpack.Timestamp):
        raise ValueError("a msgpack extension")
    if isinstance(value, dict) and value.get(b"nd", value.get("nd")) is True:
        return _packed_array({_name(name): v for name, v in value.items()})
    return value


def _name(name: Any) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def _packed_array(value: dict[str, Any]) -> Any:
    try:
        dtype = np.dtype(_name(value["type"]))
        if dtype.hasobject:
            raise ValueError("an array of objects")
        return np.frombuffer(value["data"], dtype).reshape(value["shape"]).copy()
    except (KeyError, TypeError, SyntaxError) as error:  # NumPy reads some types as Python
        raise ValueError(f"an invalid array: {error!r}") from error


def _json(value: bytes) -> Sample:
    text = value.decode()
    if not isinstance(json.loads(text), dict | list):
        raise ValueError("not a JSON object")
    return {"json": JsonText(text)}


def _bytes(value: bytes) -> Sample:
    return {"value": value}


def _datum(value: bytes) -> Sample:
    """Caffe's Datum: 1 channels, 2 height, 3 width, 4 data, 5 label, 6 float_data, 7 encoded.

    As in Caffe, floats are the pixels where there are no bytes. All other fields of the message
    are one field, `other`, as they are stored.
    """
    numbers: dict[int, int] = {}
    data, floats, other = b"", b"", b""
    for number, content, stored in _protobuf(value):
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
        sample["label"] = _signed(numbers[5])
    if data and floats:
        sample["float_data"] = np.frombuffer(floats, "<f4").copy()
    return {**sample, "other": other} if other else sample


def _pixels(data: bytes, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if len(data) != math.prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError(f"{len(data)} bytes of pixels for {shape}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


_FIXED = {1: 8, 5: 4}  # bytes of values of these types


def _protobuf(data: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """The fields of a message: number, value, and the bytes that both are stored in."""
    at = 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        content: int | bytes
        if tag & 7 == 0:
            content, at = _varint(data, at)
        elif tag & 7 == 2 or tag & 7 in _FIXED:
            size = _FIXED.get(tag & 7, 0)
            if not size:
                size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError("a message that is cut")
            content = data[at : at + size]
            at += size
        else:
            raise ValueError("not a Datum")
        yield tag >> 3, content, data[start:at]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise ValueError("a number that does not end")


_BYTES = Kind("bytes", _bytes, Schema({"value": Bytes()}))
_KINDS = (
    Kind("an image", _image, Schema({"image": Image()})),
    Kind("JSON", _json, Schema({"json": Json()})),
    Kind("a msgpack map", _msgpack_map, None),
    Kind("a Caffe Datum", _datum, None),
)


def _kind(values: list[bytes]) -> Kind:
    """The first kind that all values are of."""
    for kind in _KINDS:
        try:
            if all(kind.read(value) for value in values):
                return kind
        except (ValueError, RecursionError):
            continue
    return _BYTES


def _schema(kind: Kind, values: list[bytes]) -> Schema:
    """The fields of all values: optional where some lack them, JSON where types differ."""
    if kind.schema is not None:
        return kind.schema
    samples = [kind.read(value) for value in values]
    fields: dict[str, FieldType] = {}
    everywhere = set(samples[0]).intersection(*samples) if samples else set()
    for sample in samples:
        for name, found in guessed_schema({"__key__": "", **sample}).items():
            kind_before = fields.get(name)
            fields[name] = found if kind_before is None else _both(kind_before, found)
    return Schema({n: replace(kind, optional=n not in everywhere) for n, kind in fields.items()})


def _both(one: FieldType, other: FieldType) -> FieldType:
    """A type for values of both."""
    if one == other:
        return one
    if isinstance(one, Array) and isinstance(other, Array):
        return Array()
    if isinstance(one, Bytes) and isinstance(other, Bytes):  # images and others
        return Bytes()
    return Json()
