"""Fields for the columns of files that others made.

They follow from Arrow's types and Hugging Face's features, and from a look at the values where
those leave it open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from shardkit.codecs.image import is_image
from shardkit.errors import FormatError, drop_option
from shardkit.formats.arrow.columns import KEY, foreign_features, own_metadata
from shardkit.formats.arrow.values import ABSENT, fits, getter, is_list, is_text, plain, tensor_of
from shardkit.schema import (
    RESERVED,
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

_LINKED = {"bytes", "path"}  # the parts of an image as Hugging Face stores it

Arrays: TypeAlias = Mapping[str, pa.Array]
Scan: TypeAlias = Callable[[Collection[str]], Iterator[Arrays]]  # some columns, batch by batch


def check_names(columns: pa.Schema) -> None:
    """Raises FormatError for columns that cannot be fields of a sample."""
    names = Counter(columns.names)
    for name, count in names.most_common(1):
        if count > 1:
            raise _unusable(name, "two columns have the same name", "rename one of them")
    if KEY in names and not _is_text(columns.field(KEY).type):
        raise _unusable(KEY, "the column of keys does not hold text", "rename it, or cast it")


def _is_text(stored: pa.DataType) -> bool:
    while isinstance(stored, pa.DictionaryType):
        stored = stored.value_type
    return is_text(stored)


def _unusable(name: str, what: str, fix: str) -> FormatError:
    return FormatError(what, field=name, fix=f"{fix} where the file was made")


class Known(NamedTuple):
    """What a file tells of its columns without them being read."""

    nulls: dict[str, int]  # how many rows have no value
    whole: set[str]  # those without a null in them, at any level


def layout_of(columns: pa.Schema, rows: int, known: Known, scan: Scan) -> dict[str, Any]:
    """The layout of a file that comes without one.

    In `empty` are the columns without a single value, whose type therefore says nothing.
    """
    ours = own_metadata(columns)
    empty: list[str] = []
    unusable: dict[str, FormatError] = {}
    if ours is not None:
        schema, classes = ours
    else:
        schema, classes, empty = _guess(columns, rows, known, scan, unusable)
    layout: dict[str, Any] = {"schema": schema.to_json()}
    if ours is not None:
        layout["ours"] = True
    if unusable:
        layout["unusable"] = unusable
    if classes:
        layout["classes"] = classes
    if empty:
        layout["empty"] = empty
    return layout


def _guess(
    columns: pa.Schema,
    rows: int,
    known: Known,
    scan: Scan,
    unusable: dict[str, FormatError],
) -> tuple[Schema, dict[str, list[str]], list[str]]:
    """Fields, names of their classes, and columns without values.

    Columns that no field can hold go to `unusable`.
    """
    features = foreign_features(columns)
    fields: dict[str, FieldType] = {}
    for column in columns:
        name = column.name
        if name == KEY:
            continue
        if name in RESERVED:
            unusable[name] = _unusable(
                name,
                "a column has a name that samples keep",
                f"convert without it: {drop_option(name)}, or rename the column",
            )
            continue
        try:
            fields[name] = _kind(column, features.get(name, {}))
        except FormatError as error:
            unusable[name] = error
    counted = _count_nulls(columns, fields, known, scan)
    fields = {name: replace(kind, optional=counted[name] > 0) for name, kind in fields.items()}
    for name, kind in [*fields.items()]:
        if isinstance(kind, Bytes | Images) and not _says_image(features.get(name, {})):
            first = _first(name, kind, scan)
            if isinstance(kind, Images) and first is not None and not is_image(first):
                unusable[name] = _holds_no_field(columns.field(name))
                del fields[name]
            if isinstance(kind, Bytes) and first is not None and is_image(first):
                fields[name] = Image(optional=kind.optional)
    classes = {}
    for name, kind in fields.items():
        names = features.get(name, {}).get("names")
        if isinstance(kind, Int) and isinstance(names, list) and names:
            classes[name] = list(map(str, names))
    # Of images that are only linked, the bytes are null: those are values all the same.
    empty = [n for n in fields if counted[n] == rows and not _is_struct(columns.field(n).type)]
    return Schema(fields), classes, empty


def _is_struct(stored: pa.DataType) -> bool:
    while isinstance(stored, pa.BaseExtensionType):
        stored = stored.storage_type
    return bool(pa.types.is_struct(stored))


def _kind(column: pa.Field, feature: Mapping[str, Any]) -> FieldType:
    """The type of the field for a column, as far as the column's type tells."""
    stored = column.type
    tensor = _tensor(column)
    if tensor is not None and fits(tensor, stored):
        return tensor
    if getattr(stored, "extension_name", None) == "arrow.json":
        return Json()
    while isinstance(stored, pa.BaseExtensionType | pa.DictionaryType):
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
    elif is_list(stored):
        kinds.insert(0, Images())
    elif not pa.types.is_struct(stored) or {f.name for f in _children(stored)} == _LINKED:
        kinds.insert(4, Bytes())
    for kind in kinds:
        if kind is not None and fits(kind, stored):
            return kind
    raise _holds_no_field(column)


def _says_image(feature: Mapping[str, Any]) -> bool:
    """Whether a feature of Hugging Face is that of images, or of lists of them."""
    inner = feature.get("feature")
    return "Image" in (feature.get("_type"), inner.get("_type") if isinstance(inner, dict) else "")


def _holds_no_field(column: pa.Field) -> FormatError:
    return FormatError(
        "a column is of a type that no field can hold",
        field=column.name,
        expected="numbers, text, bytes, images, lists of numbers or images, or what JSON can hold",
        found=str(column.type),
        fix=f"convert without it: {drop_option(column.name)}, or cast it where the file was made",
    )


def _tensor(column: pa.Field) -> Array | None:
    """The array in a column of type `arrow.fixed_shape_tensor`."""
    try:
        tensor = tensor_of(column.type)
    except FormatError as error:
        raise error.located(field=column.name) from error.__cause__
    if tensor is None:
        return None
    return Array(np.dtype(column.type.value_type.to_pandas_dtype()).str, tensor.shape)


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


def _count_nulls(
    columns: pa.Schema, fields: dict[str, FieldType], known: Known, scan: Scan
) -> dict[str, int]:
    """How many rows of each column are null; makes JSON of lists that have nulls inside.

    A column is read for it only where the file itself does not say how many there are.
    """
    counted = {n: 0 if n in known.whole else known.nulls.get(n, 0) for n in fields}
    unsaid = fields.keys() - known.whole
    unknown = {n for n in unsaid if columns.field(n).nullable and n not in known.nulls}
    lists = {n for n in unsaid if isinstance(fields[n], Array)}
    looked_at = [n for n in fields if n in unknown | lists]
    for arrays in scan(looked_at) if looked_at else ():
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
    """Whether there are nulls inside of lists; lists that are null themselves do not count."""
    while is_list(array.type):
        array.validate(
            full=True
        )  # flatten ends the process where an offset leads out of the values
        array = plain(array.flatten())
        if array.null_count:
            return True
    return False


def _first(name: str, kind: FieldType, scan: Scan) -> bytes | None:
    """The first value of a column of bytes, or of lists of such."""
    for arrays in scan([name]):
        array = arrays[name]
        get = getter(name, kind, array)
        for row in range(len(array)):
            value = get(row)
            if value is not ABSENT and isinstance(kind, Images):
                value = value[0] if value else ABSENT
            if value is not ABSENT:
                return bytes(value)
    return None
