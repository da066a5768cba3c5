"""Maps fields to Arrow columns, and handles the metadata of shards.

Images, audio and video are structs of bytes and path, as in Hugging Face's features, and several
images are a list of these structs. An array of plain numbers is a list, nested once per dimension;
any other array is stored as the bytes of a `.npy` file.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, TypedDict

import numpy as np
import pyarrow as pa

from shardkit.codecs.image import is_image
from shardkit.codecs.media import guess
from shardkit.errors import FormatError, ShardkitError, drop_option
from shardkit.formats.arrow.values import column as values_of
from shardkit.formats.arrow.values import (
    fits,
    is_element,
    is_list,
    is_text,
    plain,
    plain_type,
    tensor_shape,
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
_NUMBERS = {f"<{kind}{size}" for kind in "iuf" for size in (2, 4, 8)} | {"|i1", "|u1", "|b1"}
_LABELS = (pa.int64(), pa.list_(pa.int64()))  # types of columns that can be ClassLabel


def arrow_schema(schema: Schema, classes: Mapping[str, Sequence[str]] | None = None) -> pa.Schema:
    """Return the columns of a shard, with our schema and Hugging Face's features as metadata.

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
    """Return the type of the column that holds a field."""
    if not isinstance(kind, Array):
        return kind.entry(_SIMPLE)
    if not is_nested(kind):
        return pa.binary()
    assert kind.shape is not None
    found = leaf_type(np.dtype(kind.dtype))
    for length in reversed(kind.shape):
        found = pa.list_(found) if length is None else pa.list_(found, length)
    return found


def leaf_type(dtype: np.dtype[Any]) -> pa.DataType:
    """Return the type of the numbers in lists: booleans are bytes, 0 or 1, to be read as a range.

    Lists of the type bool are bits, which take four times as long to read.
    """
    return pa.uint8() if dtype == np.bool_ else pa.from_numpy_dtype(dtype)


def is_nested(kind: Array) -> bool:
    """Whether nested lists of numbers can hold arrays of this type without losing their shape."""
    if kind.dtype not in _NUMBERS or not kind.shape:
        return False
    first, *others = kind.shape
    return first != 0 and all(others)


def features(schema: Schema, classes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the columns as features of Hugging Face datasets, in its JSON form."""
    found = {KEY: _feature(pa.string())}
    for name, kind in schema.items():
        names, stored = classes.get(name, ()), arrow_type(kind)
        if isinstance(kind, Encoded):
            found[name] = {"_type": type(kind).__name__}
        elif isinstance(kind, Images):
            found[name] = {"feature": {"_type": "Image"}, "_type": "Sequence"}
        elif names and len({*names}) == len(names) and stored in _LABELS:
            label = {"names": [*names], "_type": "ClassLabel"}
            is_list = stored == _LABELS[1]
            found[name] = {"feature": label, "_type": "Sequence"} if is_list else label
        else:
            found[name] = _feature(stored)
    return found


def _feature(type: pa.DataType) -> dict[str, Any]:
    """Lists become `Sequence`, which all versions of datasets read: `List` is new in version 4."""
    if is_list(type):
        length = {"length": type.list_size} if pa.types.is_fixed_size_list(type) else {}
        return {"feature": _feature(type.value_type), **length, "_type": "Sequence"}
    names = {"halffloat": "float16", "float": "float32", "double": "float64"}
    return {"dtype": names.get(str(type), str(type)), "_type": "Value"}


class _About(TypedDict):
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
        if isinstance(found, dict) and found.get("version") != _VERSION:
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


# --- third-party files ---------------------------------------------------------------------------

_IMAGE_PARTS = {"bytes", "path"}  # as Hugging Face stores images
# Hugging Face's features for encoded files.
_ENCODED = {kind.__name__: kind for kind in Encoded.__subclasses__()}

Arrays: TypeAlias = Mapping[str, pa.Array]
Scan: TypeAlias = Callable[[Collection[str]], Iterator[Arrays]]  # reads columns, batch by batch


def check_names(columns: pa.Schema) -> None:
    """Raise FormatError for columns that cannot be fields of a sample."""
    for name, count in Counter(columns.names).most_common(1):
        if count > 1:
            raise _unusable(name, "two columns have the same name", "rename one of them")
    if KEY in columns.names and not is_text(plain_type(columns.field(KEY).type)):
        raise _unusable(KEY, "the column of keys does not hold text", "rename it, or cast it")


def _unusable(name: str, what: str, fix: str) -> FormatError:
    return FormatError(what, field=name, fix=f"{fix} where the file was made")


class Known(NamedTuple):
    """What is known about the columns of a file without reading them."""

    nulls: dict[str, int]  # number of rows without a value
    whole: set[str]  # columns without nulls at any level


def layout_of(columns: pa.Schema, rows: int, known: Known, scan: Scan) -> dict[str, Any]:
    """Return the layout of a file, from its columns.

    `unusable` has the columns that no field can hold, and `empty` those without a single value,
    whose type is therefore meaningless.
    """
    ours = own_metadata(columns)
    if ours is not None:
        layout: dict[str, Any] = {"schema": ours[0].to_json(), "ours": True}
        return {**layout, "classes": ours[1]} if ours[1] else layout
    features = _third_party_features(columns)
    fields, unusable = _fields(columns, features)
    nulls = _count_nulls(columns, fields, known, scan)
    fields = {name: replace(kind, optional=nulls[name] > 0) for name, kind in fields.items()}
    for name, kind in [*fields.items()]:
        listed = isinstance(kind, Images) and features[name].get("_type") != "Image"
        first = _first(name, kind, scan) if listed or type(kind) is Bytes else None
        if first is None:
            continue
        if listed and not is_image(first):
            del fields[name]
            unusable[name] = _holds_no_field(columns.field(name))
        elif not listed and (encoded := guess(first)) is not None:
            fields[name] = encoded(optional=kind.optional)
    named = {n: features[n].get("names") for n, k in fields.items() if holds_classes(k)}
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


def _third_party_features(schema: pa.Schema) -> defaultdict[str, dict[str, Any]]:
    """The feature of each column in Hugging Face's metadata; of a list, that of its items."""
    features: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        found = parse((schema.metadata or {})[_HUGGING_FACE])["info"]["features"]
        for name, feature in found.items():
            if isinstance(feature, dict):  # older versions write lists as lists
                inner = feature.get("feature")
                features[name] = inner if isinstance(inner, dict) else feature
    return features


def _fields(
    columns: pa.Schema, features: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, FieldType], dict[str, ShardkitError]]:
    """The fields according to the types of columns, and why the other columns cannot be fields."""
    fields: dict[str, FieldType] = {}
    unusable: dict[str, ShardkitError] = {}
    for column in columns:
        name = column.name
        try:
            if name in RESERVED and name != KEY:
                fix = f"convert without it: {drop_option(name)}, or rename the column"
                raise _unusable(name, "a column has a reserved name", fix)
            if name != KEY:
                fields[name] = _kind(column, features[name])
        except FormatError as error:
            unusable[name] = error.located(field=name)
    return fields, unusable


def _kind(column: pa.Field, feature: Mapping[str, Any]) -> FieldType:
    """Return the type of the field for a column, according to the type of the column."""
    stored = plain_type(column.type)
    if getattr(column.type, "extension_name", None) == "arrow.json" or pa.types.is_null(stored):
        return Json()
    is_struct = pa.types.is_struct(stored)
    children = {stored.field(n).name for n in range(stored.num_fields)}
    kinds = [
        Images() if is_list(stored) else _ENCODED.get(str(feature.get("_type")), Images)(),
        Int(),
        Float(),
        Bool(),
        Text(),
        Bytes() if not is_struct or children == _IMAGE_PARTS else None,
        _array(column, feature),
        Json(),
    ]
    for kind in kinds:
        if kind is not None and fits(kind, column.type):
            return kind
    raise _holds_no_field(column)


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
    tensor = tensor_shape(column.type)
    shape: list[int | None] = []
    stored = plain_type(column.type)
    while is_list(stored):
        shape.append(stored.list_size if pa.types.is_fixed_size_list(stored) else None)
        stored = stored.value_type
    if not is_element(stored):
        return None
    declared = feature.get("shape")  # of Array2D to Array5D, which are variable-length nested lists
    if tensor is not None:
        shape = [*tensor]
    elif isinstance(declared, list) and len(declared) == len(shape):
        lengths = [n for n in declared if n is not None]
        shape = declared if all(type(n) is int and n > 0 for n in lengths) else shape
    if None in shape[1:]:
        return None
    return Array(np.dtype(stored.to_pandas_dtype()).str, tuple(shape))


def _count_nulls(
    columns: pa.Schema, fields: dict[str, FieldType], known: Known, scan: Scan
) -> dict[str, int]:
    """The number of null rows in each column; changes the type of lists with nulls inside to JSON.

    Only reads columns whose nulls are not counted in the file itself.
    """
    counted = {n: 0 if n in known.whole else known.nulls.get(n, 0) for n in fields}
    unsure = {n: columns.field(n) for n in fields if n not in known.whole}
    unknown = {n for n, c in unsure.items() if c.nullable and n not in known.nulls}
    lists = {
        n for n, c in unsure.items() if isinstance(fields[n], Array) and not tensor_shape(c.type)
    }
    scanned = [n for n in fields if n in unknown | lists]
    for arrays in scan(scanned) if scanned else ():
        for name, array in arrays.items():
            if name in unknown:
                counted[name] += _nulls(plain(array))
            if name in lists and _nulls_inside(plain(array)):
                fields[name] = Json()
    return counted


def _nulls(array: pa.Array) -> int:
    if pa.types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0:
        return int(array.null_count or array.field("bytes").null_count)
    return int(array.null_count)


def _nulls_inside(array: pa.Array) -> bool:
    """Return whether there are nulls inside lists; lists that are null themselves do not count."""
    while is_list(array.type):
        # `flatten` crashes the process if an offset is outside the values.
        array.validate(full=True)
        array = plain(array.flatten())
        if array.null_count:
            return True
    return False


def _first(name: str, kind: FieldType, scan: Scan) -> bytes | None:
    """Return the first value in a column of bytes or of lists of bytes."""
    for arrays in scan([name]):
        array = plain(arrays[name])
        get = values_of(kind, array, 0, len(array)).get
        for value in map(get, range(len(array))):
            if value is not None and (isinstance(kind, Bytes) or value):
                return bytes(value if isinstance(kind, Bytes) else value[0])
    return None
