"""One schema, and one list of class names, for foreign shards, which may differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from shardkit.errors import FormatError, ShardkitError, drop_option
from shardkit.schema import Bytes, FieldType, Schema


def shared_schema(
    layouts: Sequence[Mapping[str, Any]], counts: Sequence[int], names: list[str] | None
) -> tuple[Schema, dict[str, ShardkitError]]:
    """One schema for shards that may differ.

    A field that some samples lack is optional. One whose type differs between shards is bytes, or,
    if `names` are given, those of the shards, an error. A column without values has any type.
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
        alike = all(isinstance(kind, Bytes) for kind in kinds)  # images are bytes, too
        if len(kinds) > 1 and not alike and names is not None:
            errors[name] = _other_type(name, {names[shard]: kind for shard, kind in typed.items()})
            continue
        kind = kinds.pop() if len(kinds) == 1 else Bytes()
        optional = any(
            count and (name not in schema or schema[name].optional)
            for schema, count in zip(schemas, counts, strict=True)
        )
        fields[name] = dataclasses.replace(kind, optional=optional)
    return Schema(fields), errors


def shared_names(
    layouts: Sequence[Mapping[str, Any]], shards: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """The class names by field, for fields that have names in all shards that have the field.

    Raises FormatError where two shards number classes differently.
    """
    found: dict[str, tuple[str, ...]] = {}
    first: dict[str, str] = {}
    for layout, shard in zip(layouts, shards, strict=True):
        for field, names in layout.get("classes", {}).items():
            if found.setdefault(field, tuple(names)) != tuple(names):
                raise FormatError(
                    f"the classes of the field {field!r} are others in another shard",
                    expected=f"{list(found[field])!r:.200} as in {first[field]}",
                    found=f"{list(names)!r:.200} in {shard}",
                    fix="convert the shards of each kind by themselves",
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
    """The fields of one shard, as all shards have them.

    A column without values is left out where its type differs: its samples lack the field.
    """
    empty = layout.get("empty", ())
    return {
        name: common[name]
        for name, own in layout["schema"].items()
        if name in common
        and (name not in empty or {**own, "optional": True} == {**common[name], "optional": True})
    }


def _other_type(field: str, typed: Mapping[str, FieldType]) -> FormatError:
    """The error for a field with two types, by the shards that have it."""
    kinds = {str(kind): f"{kind} in {shard}" for shard, kind in typed.items()}
    return FormatError(
        f"the field {field!r} is of another type in another shard",
        found=", ".join(list(kinds.values())[:3]),
        fix=f"make their types alike, or convert without it: {drop_option(field)}",
    )
