"""Merges the schemas and class names of third-party shards or datasets, which may differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardkit.errors import FormatError, SampleError, ShardkitError, drop_option
from shardkit.schema import Array, Bytes, FieldType, Schema


def shared_schema(
    layouts: Sequence[Mapping[str, Any]],
    counts: Sequence[int],
    names: Sequence[str] | None,
    what: str = "shard",
) -> tuple[Schema, dict[str, ShardkitError]]:
    """Merge the schemas of shards, or of other sources of samples (`what`); also returns errors.

    A field that some samples lack is optional. A field whose type differs between shards is read as
    bytes, or is an error if `names` of the shards are given. A column without values fits any type.
    """
    errors: dict[str, ShardkitError] = {}
    fields: dict[str, FieldType] = {}
    schemas = [Schema.from_json(layout["schema"]) for layout in layouts]
    for name in dict.fromkeys(name for schema in schemas for name in schema):
        found = {
            shard: dataclasses.replace(schema[name], optional=False)
            for shard, schema in enumerate(schemas)
            if name in schema
        }
        typed = {n: kind for n, kind in found.items() if name not in layouts[n].get("empty", ())}
        kinds = set(typed.values()) or {next(iter(found.values()))}
        if len(kinds) > 1 and what != "shard":  # shards must have exactly the same type
            kinds = _common(kinds)
        alike = all(isinstance(kind, Bytes) for kind in kinds)  # also images and other media
        if len(kinds) > 1 and not alike and names is not None:
            errors[name] = _other_type(name, {names[n]: kind for n, kind in typed.items()}, what)
            continue
        kind = kinds.pop() if len(kinds) == 1 else Bytes()
        optional = any(
            count and (name not in schema or schema[name].optional)
            for schema, count in zip(schemas, counts, strict=True)
        )
        fields[name] = dataclasses.replace(kind, optional=optional)
    return Schema(fields), errors


def _common(kinds: set[FieldType]) -> set[FieldType]:
    """The common type of arrays with one dtype and different shapes; other types unchanged."""
    arrays = [kind for kind in kinds if isinstance(kind, Array)]
    if len(arrays) < len(kinds) or len({kind.dtype for kind in arrays} - {None}) > 1:
        return kinds
    dtype = None if any(kind.dtype is None for kind in arrays) else arrays[0].dtype
    shapes = [kind.shape for kind in arrays]
    if any(shape is None or len(shape) != len(shapes[0] or ()) for shape in shapes):
        return {Array(dtype)}
    sides = zip(*(shape or () for shape in shapes), strict=True)
    return {Array(dtype, tuple(n[0] if len(set(n)) == 1 else None for n in sides))}


def shared_names(
    layouts: Sequence[Mapping[str, Any]], shards: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """The class names by field, for fields that have class names in all shards with the field.

    Raises FormatError if two shards number classes differently.
    """
    found: dict[str, tuple[str, ...]] = {}
    first: dict[str, str] = {}
    for layout, shard in zip(layouts, shards, strict=True):
        for field, names in layout.get("classes", {}).items():
            if found.setdefault(field, tuple(names)) != tuple(names):
                raise FormatError(
                    f"the class names of the field {field!r} differ between shards",
                    expected=f"{list(found[field])!r:.200} as in {first[field]}",
                    found=f"{list(names)!r:.200} in {shard}",
                    fix="convert the shards with the same classes separately",
                )
            first.setdefault(field, shard)
    nameless = {
        name
        for layout in layouts
        for name in layout["schema"]
        if name not in layout.get("classes", {}) and name not in layout.get("empty", ())
    }
    return {field: names for field, names in found.items() if field not in nameless}


def own_schema(layout: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of one shard, with their types in the common schema.

    A column without values is ignored if its type differs: its samples lack the field.
    """
    empty = layout.get("empty", ())
    return {
        name: common[name]
        for name, own in layout["schema"].items()
        if name in common
        and (name not in empty or {**own, "optional": True} == {**common[name], "optional": True})
    }


def _other_type(field: str, typed: Mapping[str, FieldType], what: str) -> FormatError:
    """The error for a field with several types; `typed` has its type by name of the shard."""
    kinds = {str(kind): f"{kind} in {shard}" for shard, kind in typed.items()}
    return FormatError(
        f"the type of the field {field!r} differs between {what}s",
        found=", ".join(list(kinds.values())[:3]),
        fix=f"give it the same type everywhere, or convert without it: {drop_option(field)}",
    )


def united_classes(
    tables: Sequence[tuple[str, Sequence[str] | None]], *, same: bool = False
) -> tuple[tuple[str, ...] | None, FormatError | None]:
    """Merge the class names of a field from several datasets; or return an error.

    `tables` has the name and the class names of each dataset with the field; None: it only has
    numbers. Classes with the same name are merged. They are sorted if all datasets have them
    sorted, and otherwise in order of first occurrence. `same`: no two may differ.
    """
    named = [(dataset, table) for dataset, table in tables if table is not None]
    if not named:
        return None, None
    if len(named) < len(tables):
        plain = next(dataset for dataset, table in tables if table is None)
        return None, FormatError(
            "labels with class names cannot be mixed with labels without",
            expected="class names in all sources, or in none",
            found=f"{list(named[0][1])!r:.100} in {named[0][0]}, none in {plain}",
        )
    for dataset, table in named if same else ():
        if list(table) != list(named[0][1]):
            return None, FormatError(
                "vectors of labels, or keypoints, have different names in different sources",
                expected=f"{list(named[0][1])!r:.100}, as in {named[0][0]}",
                found=f"{list(table)!r:.100} in {dataset}",
                fix="make them with the same --label-columns or keypoints, in the same order",
            )
    found = list(dict.fromkeys(name for _, table in named for name in table))
    if all(list(table) == sorted(table) for _, table in named):
        found.sort()
    return tuple(found), None


def other_numbers(
    own: Mapping[str, Sequence[str]], classes: Mapping[str, Sequence[str]]
) -> dict[str, Sequence[int]]:
    """By field, the numbers in `classes` of a dataset's own classes, if they differ."""
    found: dict[str, Sequence[int]] = {}
    for field, names in own.items():
        if field in classes and tuple(classes[field][: len(names)]) != tuple(names):
            number = {name: n for n, name in enumerate(classes[field])}
            found[field] = [number[name] for name in names]
    return found


def renumbered(label: Any, numbers: Sequence[int]) -> Any:
    """Renumber a label, or an array of labels. Negative labels, which mean no class, are kept."""
    if not isinstance(label, np.ndarray):
        return numbers[label] if label >= 0 else label
    found = np.where(label < 0, label, np.array([*numbers, -1])[label])
    if found.size and found.max() > np.iinfo(label.dtype).max:
        raise SampleError(
            "the number of a class is too large for the array that holds it",
            expected=f"at most {np.iinfo(label.dtype).max:,}",
            found=str(found.max()),
        )
    return found.astype(label.dtype)
