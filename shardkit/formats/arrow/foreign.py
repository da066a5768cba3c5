"""Fields for the columns of files that others made.

They follow from Arrow's types and Hugging Face's features, and from a look at the values where
those leave it open.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from shardkit.codecs.image import is_image
from shardkit.errors import FormatError
from shardkit.formats.arrow.columns import KEY, foreign_features, own_metadata
from shardkit.formats.arrow.values import ABSENT, fits, getter, is_list, is_text, plain
from shardkit.schema import (
    RESERVED,
    Array,
    Bool,
    Bytes,
    FieldType,
    Float,
    Image,
    Int,
    Json,
    Schema,
    Text,
)

_LINKED = {"bytes", "path"}  # the parts of a picture as Hugging Face stores it

Arrays: TypeAlias = Mapping[str, pa.Array]
Scan: TypeAlias = Callable[[Collection[str]], Iterator[Arrays]]  # some columns, batch by batch


def check_names(columns: pa.Schema) -> None:
    """Raises FormatError for columns that cannot be fields of a sample."""
    names = columns.names
    for name in names:
        if names.count(name) > 1:
            raise _unusable(name, "two columns have the same name", "rename one of them")
        if name in RESERVED and name != KEY:
            raise _unusable(name, "a column has a name that samples keep", "rename the column")
    if KEY in names and not _is_text(columns.field(KEY).type):
        raise _unusable(KEY, "the column of keys does not hold text", "rename it, or cast it")


def _is_text(stored: pa.DataType) -> bool:
    while isinstance(stored, pa.DictionaryType):
        stored = stored.value_type
    return is_text(stored)


def _unusable(name: str, what: str, fix: str) -> FormatError:
    return FormatError(what, field=name, fix=f"{fix} where the file was made")


def layout_of(columns: pa.Schema, nulls: Mapping[str, int], scan: Scan) -> dict[str, Any]:
    """The layout of a file that comes without one. `nulls` has what is known of them."""
    ours = own_metadata(columns)
    if ours is not None:
        schema, classes = ours
    else:
        schema, classes = _guess(columns, nulls, scan)
    layout: dict[str, Any] = {"schema": schema.to_json()}
    if classes:
        layout["classes"] = classes
    return layout


def _guess(
    columns: pa.Schema, nulls: Mapping[str, int], scan: Scan
) -> tuple[Schema, dict[str, list[str]]]:
    features = foreign_features(columns)
    fields: dict[str, FieldType] = {}
    for column in columns:
        if column.name != KEY:
            fields[column.name] = _kind(column, features.get(column.name, {}))
    _look_for_nulls(columns, fields, nulls, scan)
    for name, kind in fields.items():
        if isinstance(kind, Bytes) and features.get(name, {}).get("_type") != "Image":
            first = _first(name, scan)
            if first is not None and is_image(first):
                fields[name] = Image(optional=kind.optional)
    classes = {}
    for name, kind in fields.items():
        names = features.get(name, {}).get("names")
        if isinstance(kind, Int) and isinstance(names, list) and names:
            classes[name] = list(map(str, names))
    return Schema(fields), classes


def _kind(column: pa.Field, feature: Mapping[str, Any]) -> FieldType:
    """The type of the field for a column, as far as the column's type tells."""
    stored = column.type
    while isinstance(stored, pa.ExtensionType | pa.DictionaryType):
        dictionary = isinstance(stored, pa.DictionaryType)
        stored = stored.value_type if dictionary else stored.storage_type
    if pa.types.is_null(stored):
        return Json()
    kinds: list[FieldType | None] = [
        Int(),
        Float(),
        Bool(),
        Text(),
        _array(stored, feature),
        Json(),
    ]
    if feature.get("_type") == "Image":
        kinds.insert(0, Image())
    elif not pa.types.is_struct(stored) or {f.name for f in _children(stored)} == _LINKED:
        kinds.insert(4, Bytes())
    for kind in kinds:
        if kind is not None and fits(kind, stored):
            return kind
    raise FormatError(
        "a column is of a type that no field can hold",
        field=column.name,
        expected="numbers, text, bytes, pictures, lists of numbers, or what JSON can hold",
        found=str(column.type),
        fix="cast the column to one of these, or drop it, where the file was made",
    )


def _children(stored: pa.StructType) -> list[pa.Field]:
    return [stored.field(n) for n in range(stored.num_fields)]


def _array(stored: pa.DataType, feature: Mapping[str, Any]) -> Array | None:
    """The array in nested lists: all lengths but the first must be known."""
    shape: list[int | None] = []
    while is_list(stored):
        shape.append(stored.list_size if pa.types.is_fixed_size_list(stored) else None)
        stored = stored.value_type
    if not (pa.types.is_integer(stored) or pa.types.is_floating(stored)):
        return None
    said = feature.get("shape")  # of Array2D to Array5D, which are nested lists of any length
    if isinstance(said, list) and len(said) == len(shape) and all(map(_is_length, said)):
        shape = said
    if None in shape[1:]:
        return None
    return Array(np.dtype(stored.to_pandas_dtype()).str, tuple(shape))


def _is_length(value: Any) -> bool:
    return value is None or (type(value) is int and value > 0)


def _look_for_nulls(
    columns: pa.Schema, fields: dict[str, FieldType], nulls: Mapping[str, int], scan: Scan
) -> None:
    """Make fields optional whose columns have nulls, and JSON of lists that have some inside."""
    unknown = [
        name
        for name, kind in fields.items()
        if isinstance(kind, Array) or (columns.field(name).nullable and name not in nulls)
    ]
    found = {name for name, count in nulls.items() if count and name in fields}
    for arrays in scan(unknown) if unknown else ():
        for name, array in arrays.items():
            if _has_nulls(array):
                found.add(name)
            if isinstance(fields[name], Array) and _nulls_inside(plain(array)):
                fields[name] = Json()
    for name in found:
        fields[name] = replace(fields[name], optional=True)


def _has_nulls(array: pa.Array) -> bool:
    array = plain(array)
    if pa.types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0:
        return bool(array.null_count or array.field("bytes").null_count)
    return bool(array.null_count)


def _nulls_inside(array: pa.Array) -> bool:
    """Whether there are nulls inside of lists; lists that are null themselves do not count."""
    while is_list(array.type):
        array.validate(
            full=True
        )  # flatten ends the process where an offset leads out of the values
        array = plain(array.flatten())
        if array.null_count:
            return True
    return False


def _first(name: str, scan: Scan) -> bytes | None:
    """The first value of a column of bytes."""
    for arrays in scan([name]):
        array = arrays[name]
        get = getter(name, Bytes(), array)
        for row in range(len(array)):
            value = get(row)
            if value is not ABSENT:
                return bytes(value)
    return None
