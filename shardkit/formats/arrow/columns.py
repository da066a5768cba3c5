"""Maps fields to Arrow columns, and handles the metadata of shards.

Images, audio and video are structs of bytes and path, as in Hugging Face's features, and several
images are a list of these structs. An array of plain numbers is a list, nested once per dimension;
any other array is stored as the bytes of a `.npy` file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, TypedDict

import numpy as np
import pyarrow as pa

from shardkit.codecs.image import is_image
from shardkit.codecs.media import guess
from shardkit.errors import FormatError, drop_option
from shardkit.formats.arrow.values import column as values_of
from shardkit.formats.arrow.values import (
    fits,
    is_list,
    is_number,
    is_text,
    plain,
    plain_type,
    tensor_of,
)
from shardkit.formats.base import KEY
from shardkit.helpers.checked import checked, damaged, parse
from shardkit.schema import (
    RESERVED,
    Array,
    Bool,
    Bytes,
    Encoded,
    FieldType,
    Float,
    Images,
    Int,
    Json,
    Schema,
    Text,
    holds_classes,
)

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

_OURS = b"shardkit"
_HUGGING_FACE = b"huggingface"
_VERSION = 1
_SIMPLE: dict[type, pa.DataType] = {
    Int: pa.int64(),
    Float: pa.float64(),
    Bool: pa.bool_(),
    Text: pa.string(),
    Bytes: pa.binary(),
    Json: pa.string(),
    Encoded: IMAGE,
    Images: pa.list_(IMAGE),
}
_NUMBERS = {f"<{kind}{size}" for kind in "iuf" for size in (2, 4, 8)} | {"|i1", "|u1"}
if int(pa.__version__.partition(".")[0]) < 15:
    _NUMBERS.remove("<f2")  # older versions of pyarrow cannot write float16 to Parquet


def arrow_schema(schema: Schema, classes: Mapping[str, Sequence[str]] | None = None) -> pa.Schema:
    """The columns of a shard, with our schema and Hugging Face's features as metadata.

    All columns are nullable, even if their field is not optional: otherwise Hugging Face datasets
    ignores the features in the metadata.
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
        return kind.entry(_SIMPLE)
    if not is_nested(kind):
        return pa.binary()
    assert kind.shape is not None
    found = pa.from_numpy_dtype(np.dtype(kind.dtype))
    for length in reversed(kind.shape):
        found = pa.list_(found) if length is None else pa.list_(found, length)
    return found


def is_nested(kind: Array) -> bool:
    """Whether nested lists of numbers can hold arrays of this type without losing their shape."""
    if kind.dtype not in _NUMBERS or not kind.shape:
        return False
    first, *others = kind.shape
    return first != 0 and all(others)


def features(schema: Schema, classes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The columns as features of Hugging Face datasets, in its JSON form."""
    found: dict[str, Any] = {KEY: _value(pa.string())}
    for name, kind in schema.items():
        names = classes.get(name)
        if isinstance(kind, Encoded):
            found[name] = {"_type": type(kind).__name__}
        elif isinstance(kind, Images):
            found[name] = {"feature": {"_type": "Image"}, "_type": "Sequence"}
        elif names and len(set(names)) == len(names) and _are_labels(arrow_type(kind)):
            label = {"names": list(names), "_type": "ClassLabel"}
            found[name] = (
                label if isinstance(kind, Int) else {"feature": label, "_type": "Sequence"}
            )
        else:
            found[name] = _feature(arrow_type(kind))
    return found


def _are_labels(type: pa.DataType) -> bool:
    """Whether Hugging Face can use a column as labels: int64, or lists of int64."""
    is_list = pa.types.is_list(type)
    return bool(pa.types.is_int64(type.value_type if is_list else type))


def _feature(type: pa.DataType) -> dict[str, Any]:
    """Lists become `Sequence`, which all versions of datasets read: `List` is new in version 4."""
    if pa.types.is_fixed_size_list(type):
        return {"feature": _feature(type.value_type), "length": type.list_size, "_type": "Sequence"}
    if pa.types.is_list(type):
        return {"feature": _feature(type.value_type), "_type": "Sequence"}
    return _value(type)


def _value(type: pa.DataType) -> dict[str, Any]:
    names = {"halffloat": "float16", "float": "float32", "double": "float64"}
    return {"dtype": names.get(str(type), str(type)), "_type": "Value"}


class _Version(TypedDict):
    """The part of our metadata that is the same in every version."""

    version: Any


class _About(_Version):
    """Our metadata."""

    schema: dict[str, Any]
    classes: dict[str, list[str]]


def own_metadata(schema: pa.Schema) -> tuple[Schema, dict[str, list[str]]] | None:
    """Schema and classes of a shard of ours; None if its columns do not match our schema.

    Other programs may drop or change columns, but copy the metadata.
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
    """The feature of each column in Hugging Face's metadata; empty if there is none."""
    try:
        found = parse((schema.metadata or {})[_HUGGING_FACE])["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: feature for name, feature in found.items() if isinstance(feature, dict)}


# --- foreign files -------------------------------------------------------------------------------

_IMAGE_PARTS = {"bytes", "path"}  # as Hugging Face stores images

Arrays: TypeAlias = Mapping[str, pa.Array]
Scan: TypeAlias = Callable[[Collection[str]], Iterator[Arrays]]  # reads columns, batch by batch


def check_names(columns: pa.Schema) -> None:
    """Raise FormatError for columns that cannot be fields of a sample."""
    names = Counter(columns.names)
    for name, count in names.most_common(1):
        if count > 1:
            raise _unusable(name, "two columns have the same name", "rename one of them")
    if KEY in names and not is_text(plain_type(columns.field(KEY).type)):
        raise _unusable(KEY, "the column of keys does not hold text", "rename it, or cast it")


def _unusable(name: str, what: str, fix: str) -> FormatError:
    return FormatError(what, field=name, fix=f"{fix} where the file was made")


class Known(NamedTuple):
    """What is known about the columns of a file without reading them."""

    nulls: dict[str, int]  # number of rows without a value
    whole: set[str]  # columns without nulls at any level


def layout_of(columns: pa.Schema, rows: int, known: Known, scan: Scan) -> dict[str, Any]:
    """The layout of a file, from its columns.

    `unusable` has the columns that no field can hold, and `empty` those without a single value,
    whose type is therefore meaningless.
    """
    ours = own_metadata(columns)
    if ours is not None:
        schema, classes = ours
        layout = {"schema": schema.to_json(), "ours": True, "classes": classes}
        return {name: entry for name, entry in layout.items() if entry or name == "schema"}
    features = foreign_features(columns)
    fields, unusable = _fields(columns, features)
    nulls = _count_nulls(columns, fields, known, scan)
    fields = {name: replace(kind, optional=nulls[name] > 0) for name, kind in fields.items()}
    for name, kind in [*fields.items()]:
        if not isinstance(kind, Bytes | Images) or _says_encoded(features.get(name, {})):
            continue
        first = _first(name, kind, scan)
        if first is None:
            continue
        if isinstance(kind, Bytes) and (encoded := guess(first)) is not None:
            fields[name] = encoded(optional=kind.optional)
        elif isinstance(kind, Images) and not is_image(first):
            del fields[name]
            unusable[name] = _holds_no_field(columns.field(name))
    named = {n: _names(features.get(n, {})) for n, k in fields.items() if holds_classes(k)}
    layout = {
        "schema": Schema(fields).to_json(),
        "unusable": unusable,
        "classes": {n: [*map(str, v)] for n, v in named.items() if isinstance(v, list) and v},
        # Images that are only linked have null bytes, but still count as values.
        "empty": [
            name
            for name in fields
            if nulls[name] == rows and not pa.types.is_struct(plain_type(columns.field(name).type))
        ],
    }
    return {name: entry for name, entry in layout.items() if entry or name == "schema"}


def _names(feature: Mapping[str, Any]) -> Any:
    """The class names of a ClassLabel feature of Hugging Face, or of a list of these."""
    inner = feature.get("feature")
    return (inner if isinstance(inner, dict) else feature).get("names")


def _fields(
    columns: pa.Schema, features: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, FieldType], dict[str, FormatError]]:
    """The fields according to the types of columns, and why the other columns cannot be fields."""
    fields: dict[str, FieldType] = {}
    unusable: dict[str, FormatError] = {}
    for column in columns:
        name = column.name
        if name == KEY:
            continue
        try:
            if name in RESERVED:
                fix = f"convert without it: {drop_option(name)}, or rename the column"
                raise _unusable(name, "a column has a reserved name", fix)
            fields[name] = _kind(column, features.get(name, {}))
        except FormatError as error:
            unusable[name] = error
    return fields, unusable


def _kind(column: pa.Field, feature: Mapping[str, Any]) -> FieldType:
    """The type of the field for a column, according to the type of the column."""
    if getattr(column.type, "extension_name", None) == "arrow.json":
        return Json()
    stored = plain_type(column.type)
    if pa.types.is_null(stored):
        return Json()
    children = {stored.field(n).name for n in range(stored.num_fields)}
    kinds = [
        _ENCODED.get(str(feature.get("_type")), Images)(),
        Int(),
        Float(),
        Bool(),
        Text(),
        Bytes() if not pa.types.is_struct(stored) or children == _IMAGE_PARTS else None,
        _array(column, feature),
        Json(),
    ]
    for kind in kinds:
        if kind is not None and fits(kind, column.type):
            return kind
    raise _holds_no_field(column)


# Hugging Face's features for encoded files.
_ENCODED = {kind.__name__: kind for kind in Encoded.__subclasses__()}


def _says_encoded(feature: Mapping[str, Any]) -> bool:
    """Whether a feature of Hugging Face is for encoded files, or for lists of images."""
    inner = feature.get("feature")
    listed = isinstance(inner, dict) and inner.get("_type") == "Image"
    return listed or feature.get("_type") in _ENCODED


def _holds_no_field(column: pa.Field) -> FormatError:
    return FormatError(
        "a column is of a type that no field can hold",
        field=column.name,
        expected="numbers, text, bytes, images, lists of numbers or images, or what JSON can hold",
        found=str(column.type),
        fix=f"convert without it: {drop_option(column.name)}, or cast it where the file was made",
    )


def _array(column: pa.Field, feature: Mapping[str, Any]) -> Array | None:
    """The array type for tensors or nested lists; all lengths except the first must be fixed."""
    try:
        tensor = tensor_of(column.type)
    except FormatError as error:
        raise error.located(field=column.name) from error.__cause__
    shape: list[int | None] = []
    stored = plain_type(column.type)
    while is_list(stored):
        shape.append(stored.list_size if pa.types.is_fixed_size_list(stored) else None)
        stored = stored.value_type
    if not is_number(stored):
        return None
    declared = feature.get("shape")  # of Array2D to Array5D, which are variable-length nested lists
    if tensor is not None:
        shape = [*tensor.shape]
    elif isinstance(declared, list) and len(declared) == len(shape):
        shape = declared if all(map(_is_length, declared)) else shape
    if None in shape[1:]:
        return None
    return Array(np.dtype(stored.to_pandas_dtype()).str, tuple(shape))


def _is_length(value: Any) -> bool:
    return value is None or (type(value) is int and value > 0)


def _count_nulls(
    columns: pa.Schema, fields: dict[str, FieldType], known: Known, scan: Scan
) -> dict[str, int]:
    """The number of null rows in each column; changes the type of lists with nulls inside to JSON.

    Only reads columns whose nulls are not counted in the file itself.
    """
    counted = {n: 0 if n in known.whole else known.nulls.get(n, 0) for n in fields}
    unsure = fields.keys() - known.whole
    unknown = {n for n in unsure if columns.field(n).nullable and n not in known.nulls}
    lists = {n for n in unsure if isinstance(fields[n], Array)}
    scanned = [n for n in fields if n in unknown | lists]
    for arrays in scan(scanned) if scanned else ():
        for name, array in arrays.items():
            if name in unknown:
                counted[name] += _nulls(plain(array))
            if isinstance(fields[name], Array) and _nulls_inside(plain(array)):
                fields[name] = Json()
    return counted


def _nulls(array: pa.Array) -> int:
    if pa.types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0:
        return int(array.null_count or array.field("bytes").null_count)
    return int(array.null_count)


def _nulls_inside(array: pa.Array) -> bool:
    """Whether there are nulls inside lists; lists that are null themselves do not count."""
    while is_list(array.type):
        # `flatten` crashes the process if an offset is outside the values.
        array.validate(full=True)
        array = plain(array.flatten())
        if array.null_count:
            return True
    return False


def _first(name: str, kind: FieldType, scan: Scan) -> bytes | None:
    """The first value in a column of bytes or of lists of bytes."""
    for arrays in scan([name]):
        array = plain(arrays[name])
        get = values_of(kind, None, array, 0, len(array)).get
        for row in range(len(array)):
            value = get(row)
            if isinstance(kind, Images):
                value = next(iter(value or ()), None)
            if value is not None:
                return bytes(value)
    return None
