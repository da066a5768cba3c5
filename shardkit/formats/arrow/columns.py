"""Which Arrow column holds which field, what stands beside the columns, and values into arrays.

An image is a struct of bytes and path, as Hugging Face's Image feature stores it, and several are
a list of such; an array of
plain numbers is a list, nested once per dimension; any other array is the bytes of a `.npy` file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np
import pyarrow as pa

from shardkit.checked import checked, damaged, parse
from shardkit.codecs.array import dump_array
from shardkit.formats.arrow.values import fits
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

if TYPE_CHECKING:
    import numpy.typing as npt

KEY = "__key__"
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

_OURS = b"shardkit"
_HUGGING_FACE = b"huggingface"
_VERSION = 1
_SIMPLE: dict[type[FieldType], pa.DataType] = {
    Int: pa.int64(),
    Float: pa.float64(),
    Bool: pa.bool_(),
    Text: pa.string(),
    Bytes: pa.binary(),
    Json: pa.string(),
    Image: IMAGE,
    Images: pa.list_(IMAGE),
}
_NUMBERS = {f"<{kind}{size}" for kind in "iuf" for size in (2, 4, 8)} | {"|i1", "|u1"}
if int(pa.__version__.partition(".")[0]) < 15:
    _NUMBERS.remove("<f2")  # which that pyarrow cannot write to Parquet


def arrow_schema(schema: Schema, classes: Mapping[str, Sequence[str]] | None = None) -> pa.Schema:
    """The columns of a shard, with our schema and that of Hugging Face as metadata.

    All may hold nulls, also those of fields that are not optional: datasets takes its features
    from the metadata of such columns only.
    """
    fields = [pa.field(KEY, pa.string())]
    fields += [pa.field(name, arrow_type(kind)) for name, kind in schema.items()]
    named = {name: list(values) for name, values in (classes or {}).items()}
    ours = {"version": _VERSION, "schema": schema.to_json(), "classes": named}
    theirs = {"info": {"features": features(schema, named)}}
    return pa.schema(
        fields, {_OURS: json.dumps(ours).encode(), _HUGGING_FACE: json.dumps(theirs).encode()}
    )


def arrow_type(kind: FieldType) -> pa.DataType:
    """The type of the column that holds a field."""
    if not isinstance(kind, Array):
        return _SIMPLE[type(kind)]
    if not is_nested(kind):
        return pa.binary()
    assert kind.shape is not None
    found = pa.from_numpy_dtype(np.dtype(kind.dtype))
    for length in reversed(kind.shape):
        found = pa.list_(found) if length is None else pa.list_(found, length)
    return found


def is_nested(kind: Array) -> bool:
    """Whether lists of numbers can hold arrays of this type, with nothing of their shape lost."""
    if kind.dtype not in _NUMBERS or not kind.shape:
        return False
    first, *others = kind.shape
    return first != 0 and all(others)


def features(schema: Schema, classes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The features of Hugging Face datasets that fit the columns, as it writes them in JSON."""
    found: dict[str, Any] = {KEY: _value(pa.string())}
    for name, kind in schema.items():
        names = classes.get(name)
        if isinstance(kind, Image):
            found[name] = {"_type": "Image"}
        elif isinstance(kind, Images):
            found[name] = {"feature": {"_type": "Image"}, "_type": "Sequence"}
        elif isinstance(kind, Int) and names and len(set(names)) == len(names):
            found[name] = {"names": list(names), "_type": "ClassLabel"}
        else:
            found[name] = _feature(arrow_type(kind))
    return found


def _feature(type: pa.DataType) -> dict[str, Any]:
    """Lists are `Sequence`, which every version of datasets reads: `List` is new in version 4."""
    if pa.types.is_fixed_size_list(type):
        return {"feature": _feature(type.value_type), "length": type.list_size, "_type": "Sequence"}
    if pa.types.is_list(type):
        return {"feature": _feature(type.value_type), "_type": "Sequence"}
    return _value(type)


def _value(type: pa.DataType) -> dict[str, Any]:
    names = {"halffloat": "float16", "float": "float32", "double": "float64"}
    return {"dtype": names.get(str(type), str(type)), "_type": "Value"}


class _Version(TypedDict):
    """Of our metadata: others are not looked at."""

    version: Any


class _About(_Version):
    """Our metadata."""

    schema: dict[str, Any]
    classes: dict[str, list[str]]


def own_metadata(schema: pa.Schema) -> tuple[Schema, dict[str, list[str]]] | None:
    """Schema and classes of a shard of ours; None where its columns are not those of our schema.

    Other programs copy metadata along while they drop or change columns: the columns count.
    """
    text = (schema.metadata or {}).get(_OURS)
    if text is None:
        return None
    try:
        found = parse(text)
        if checked(_Version, found)["version"] != _VERSION:
            return None
        about = checked(_About, found)
        ours, classes = Schema.from_json(about["schema"]), about["classes"]
    except ValueError as error:
        raise damaged("the metadata of the shard", error) from error
    if schema.names != [KEY, *ours]:
        return None
    if not all(fits(kind, schema.field(name).type) for name, kind in ours.items()):
        return None
    return ours, classes


def foreign_features(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """What Hugging Face's metadata say of each column; nothing where there are none."""
    try:
        found = parse((schema.metadata or {})[_HUGGING_FACE])["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: feature for name, feature in found.items() if isinstance(feature, dict)}


# --- values into arrays --------------------------------------------------------------------------


class Column(NamedTuple):
    """How the values of one field become an array.

    `encode` gives what is kept of a value until its batch is full; `build` makes the array of such.
    `fixed` is what a row takes beside the value's own bytes, which `weigh` counts.
    """

    name: str
    encode: Callable[[Any], Any] | None
    weigh: Callable[[Any], int] | None
    fixed: int
    build: Callable[[Sequence[Any]], pa.Array]


def columns(schema: Schema, weigh_list: Callable[[npt.NDArray[Any]], int]) -> list[Column]:
    """The columns of a shard, the keys first; `weigh_list` says what a nested list takes."""
    text = pa.string()
    found = [Column(KEY, str.encode, len, 9, lambda values: _binary(values, text))]
    return found + [_column(name, kind, weigh_list) for name, kind in schema.items()]


def _column(name: str, kind: FieldType, weigh_list: Callable[[npt.NDArray[Any]], int]) -> Column:
    stored = arrow_type(kind)
    if isinstance(kind, Image):
        return Column(name, None, len, 18, _images)
    if isinstance(kind, Images):
        return Column(name, None, lambda v: sum(map(len, v)) + 18 * len(v), 18, _image_lists)
    if isinstance(kind, Array) and is_nested(kind):
        return Column(name, np.ascontiguousarray, weigh_list, 18, lambda v: _lists(v, kind))
    if isinstance(kind, Int | Float | Bool):
        return Column(name, None, None, 10, lambda values: pa.array(values, stored))
    return Column(name, _ENCODERS[type(kind)], len, 9, lambda values: _binary(values, stored))


_ENCODERS: dict[type[FieldType], Callable[[Any], bytes] | None] = {
    Bytes: None,
    Text: str.encode,
    Json: lambda value: JsonText.of(value).encode(),
    Array: dump_array,
}


def _binary(values: Sequence[bytes | None], type: pa.DataType) -> pa.Array:
    """One copy of all bytes: pyarrow's own conversion would grow its memory step by step."""
    validity, missing = _validity(values)
    present = [value or b"" for value in values] if missing else values
    offsets = _offsets(map(len, present), len(values))  # type: ignore[arg-type]
    buffers = [validity, offsets, pa.py_buffer(b"".join(present))]  # type: ignore[arg-type]
    return pa.Array.from_buffers(type, len(values), buffers, missing)


def _images(values: Sequence[bytes | None]) -> pa.Array:
    validity, missing = _validity(values)
    children = [_binary(values, pa.binary()), pa.nulls(len(values), pa.string())]
    return pa.Array.from_buffers(IMAGE, len(values), [validity], missing, children=children)


def _image_lists(values: Sequence[Sequence[bytes] | None]) -> pa.Array:
    validity, missing = _validity(values)
    lists = [value or () for value in values]
    buffers = [validity, _offsets(map(len, lists), len(lists))]
    images = _images([image for value in lists for image in value])
    stored = _SIMPLE[Images]
    return pa.Array.from_buffers(stored, len(lists), buffers, missing, children=[images])


def _lists(values: Sequence[npt.NDArray[Any] | None], kind: Array) -> pa.Array:
    assert kind.shape is not None
    first, *others = kind.shape
    inner = math.prod(n or 1 for n in others)
    # A null in a column of fixed lengths takes the room of a value all the same.
    absent = np.zeros((first or 0) * inner, kind.dtype)
    flat = [absent if value is None else value.reshape(-1) for value in values]
    data = np.concatenate([np.zeros(0, kind.dtype), *flat])
    types = [arrow_type(kind)]
    while pa.types.is_list(types[-1]) or pa.types.is_fixed_size_list(types[-1]):
        types.append(types[-1].value_type)
    found = pa.Array.from_buffers(types.pop(), len(data), [None, pa.py_buffer(data)], 0)
    for type in reversed(types[1:]):
        length = len(found) // type.list_size
        found = pa.Array.from_buffers(type, length, [None], 0, children=[found])
    validity, missing = _validity(values)
    buffers = [validity]
    if first is None:
        buffers.append(_offsets((array.size // inner for array in flat), len(flat)))
    return pa.Array.from_buffers(types[0], len(values), buffers, missing, children=[found])


def _offsets(lengths: Any, count: int) -> pa.Buffer:
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.fromiter(lengths, np.int32, count), out=offsets[1:])
    return pa.py_buffer(offsets)


def _validity(values: Sequence[Any]) -> tuple[pa.Buffer | None, int]:
    """The bitmap of the values that are there, and how many are not."""
    missing = sum(value is None for value in values)
    if not missing:
        return None, 0
    present = np.fromiter((value is not None for value in values), np.bool_, len(values))
    return pa.py_buffer(np.packbits(present, bitorder="little").tobytes()), missing
