"""Guesses the fields of a foreign TFRecord file from some of its records."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardkit.codecs.media import guess
from shardkit.errors import FormatError, ShardkitError, drop_option
from shardkit.formats.base import KEY
from shardkit.formats.tfrecord.example import FLOATS, INTS, LISTS, Feature, feature, features
from shardkit.formats.tfrecord.values import EXACT
from shardkit.helpers.names import is_safe
from shardkit.sample import JsonText
from shardkit.schema import RESERVED, Array, Bytes, FieldType, Float, Image, Images, Int, Json, Text
from shardkit.storage import fs

_LOOKED_AT, _BYTES = 100, 8 << 20  # limits for the evenly spaced records that are examined
_LABELS = 16 << 20  # bytes that are read of a file with class names
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def scan(path: Path, count: int, read: Callable[[int], bytes]) -> dict[str, Any]:
    """The layout of `count` records: schema, `known` features, and those that are lists of text."""
    samples = _some(path, count, read)
    fields: dict[str, FieldType] = {}
    unusable: dict[str, ShardkitError] = {}
    known = dict.fromkeys(name for sample in samples for name in sample)
    texts = []
    ours = {name + EXACT for name in known}
    for name in [name for name in known if name not in RESERVED | ours]:
        found = [sample[name] for sample in samples if name in sample]
        try:
            kind, many = _type(name, [each for each in found if each.list])
        except ValueError as error:
            unusable[name] = FormatError(
                f"the feature {name!r} cannot be read: {error}",
                fix=f"convert without it: {drop_option(name)}",
            )
            continue
        there = sum(not is_absent(each, many) for each in found)
        fields[name] = replace(kind, optional=there < len(samples))
        texts += [name] if many and isinstance(kind, Json) else []
    labels = {n: path.parent / f"{n}.labels.txt" for n in fields if is_safe(n, flat=True)}
    named = [n for n, file in labels.items() if isinstance(fields[n], Int) and file.is_file()]
    some = len(samples) < count
    return {
        "schema": {name: fields[name].to_json() for name in known if name in fields},
        "known": list(known),
        "texts": texts,
        "classes": {n: _lines(labels[n]) for n in named},  # in TFDS's labels files
        "unusable": unusable,
        "guessed": [n for n, kind in fields.items() if some and not kind.optional],
        "ignored": {f"feature {name!r}": 1 for name in known if name in RESERVED - {KEY}},
    }


def _some(path: Path, count: int, read: Callable[[int], bytes]) -> list[dict[str, Feature]]:
    """The features of some records."""
    step, left = max(-(-count // _LOOKED_AT), 1), _BYTES
    samples: list[dict[str, Feature]] = []
    problem = "they have no features"
    for number in range(0, count, step):
        if left < 0:
            break
        try:
            data = read(number)
            left -= len(data)
            samples.append({n: feature(data, span) for n, span in features(data).items()})
        except ValueError as error:  # raised again when the record is read
            problem = f"record {number:,}: {error}"
    if count and not any(samples):
        raise FormatError(
            f"none of the examined records can be read: {problem}",
            path=path,
            expected="features that are lists of bytes, floats or int64, and no SequenceExample",
            fix="read them with TensorFlow, and write the samples with shardkit.create",
        )
    return samples


def _lines(path: Path) -> list[str]:
    return fs.read(path, _LABELS)[:_LABELS].decode("utf-8", "replace").splitlines()


def is_absent(found: Feature, many: bool) -> bool:
    """Whether a feature has no value. If values are lists (`many`), an empty list is a value."""
    return not found.list or not (many or found.parts)


def _type(name: str, found: list[Feature]) -> tuple[FieldType, bool]:
    """The type of a feature, and whether its values are lists."""
    lists = {each.list for each in found}
    if len(lists) > 1:
        raise ValueError("it is " + " and ".join(LISTS[n] for n in sorted(lists)))
    counts = {len(each) for each in found}
    if lists & {INTS, FLOATS}:
        whole = INTS in lists
        if counts == {1}:
            return (Int() if whole else Float()), False
        return Array("<i8" if whole else "<f4", (None,)), True
    values, many = [part for each in found for part in each.parts], not counts <= {0, 1}
    kinds = {guess(value[:64]) for value in values}
    kind = kinds.pop() if len(kinds) == 1 else None
    if many:
        if kind is Image or all(map(_is_text, values)):
            return (Images() if kind is Image else Json()), True
        raise ValueError("its values are lists of bytes, which no field type supports")
    if kind is not None or not all(map(_is_text, values)):
        return (kind or Bytes)(), False
    return (
        Json() if name.lower().endswith("json") and all(map(_is_json, values)) else Text()
    ), False


def _is_text(value: bytes) -> bool:
    try:
        return not _CONTROL.search(value.decode())
    except UnicodeDecodeError:
        return False


def _is_json(value: bytes) -> bool:
    try:
        JsonText.checked(value.decode())
    except (ValueError, RecursionError):
        return False
    return True
