"""Values as programs have them, as values of fields: Pillow's images, tensors, scalars, dates."""

from __future__ import annotations

import datetime
import decimal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from shardkit.codecs.masks import encode_mask
from shardkit.codecs.media import guessed_schema
from shardkit.errors import SampleError, ShardkitError
from shardkit.sample import JsonText, Sample
from shardkit.schema import FieldType, Float, Int, Json, Schema

_UNCHANGED = frozenset({str, int, float, bool, type(None), bytes, JsonText})
_WITHOUT_TYPE = Json(optional=True)  # of a field that has no value


def as_fields(sample: Mapping[str, Any]) -> Sample:
    """Return a sample with its values as fields hold them, see `as_field`.

    Raises SampleError for a value that cannot be converted.
    """
    found: Sample = {}
    for name, value in sample.items():
        try:
            found[name] = as_field(value)
        except SampleError as error:
            raise error.located(key=sample.get("__key__"), field=name) from error
    return found


def as_field(value: Any) -> Any:
    """Return a value as a field holds it; values of other types stay as they are.

    An image of Pillow becomes a PNG, and a tensor (or anything else that NumPy can read) an array,
    or a number if it has no dimensions. bfloat16, which NumPy lacks, becomes float32. Dates and
    times become text in ISO 8601, decimal numbers text, and missing values of pandas None. This
    also holds inside lists and dicts, where arrays become lists.

    Raises SampleError for an image or a tensor that cannot be converted.
    """
    if type(value) in _UNCHANGED:
        return value
    for kind, convert in _BY_TYPE.items():
        if isinstance(value, kind):
            return convert(value)
    return _of_library(value)


def _inner(value: Any) -> Any:
    found = _converted(value) if isinstance(value, list | dict) else as_field(value)
    return found.tolist() if isinstance(found, np.ndarray | np.generic) else found


def _container(value: Any) -> Any:
    """Return a list or dict: itself, however deep, if no value in it must be converted."""
    rest, seen = [value], {id(value)}
    while rest:
        one = rest.pop()
        for each in one.values() if isinstance(one, dict) else one:
            if type(each) in (list, dict):
                if id(each) not in seen:
                    seen.add(id(each))
                    rest.append(each)
            elif type(each) not in _UNCHANGED:
                return _converted(value)
    return value


def _converted(value: Any) -> Any:
    try:
        if isinstance(value, dict):
            return {name: _inner(each) for name, each in value.items()}
        return [_inner(each) for each in value]
    except RecursionError:
        raise SampleError("a list or dict is nested too deeply, or contains itself") from None


def _array(value: Any) -> Any:
    return value.astype(np.float32) if value.dtype.name == "bfloat16" else value


def _time(value: Any) -> str | None:
    return value.isoformat() if value == value else None  # noqa: PLR0124 - pandas.NaT is not


_BY_TYPE: dict[type, Callable[[Any], Any]] = {
    list: _container,
    dict: _container,
    np.ndarray: _array,
    datetime.date: _time,
    datetime.time: _time,
    np.datetime64: lambda value: None if np.isnat(value) else str(value),
    decimal.Decimal: str,
}


def _of_library(value: Any) -> Any:
    """Convert a value of a library, which is loaded if there is one of its values."""
    kind = type(value).__name__
    if value is getattr(sys.modules.get("pandas"), "NA", sys):
        return None
    try:
        if _is(value, "PIL.Image", "Image"):
            return encode_mask(value)
        if _is(value, "torch", "Tensor"):
            wide = value.float() if str(value.dtype) == "torch.bfloat16" else value
            array = wide.numpy(force=True)
        elif isinstance(value, np.generic) or not hasattr(value, "__array__"):
            return value
        else:
            array = _array(np.asarray(value))
    except Exception as error:
        raise SampleError(
            f"a value of type {kind} cannot be stored: {error}",
            fix="convert it first: image.convert('RGB'), or numpy.asarray(image) for what PNG lacks"
            if _is(value, "PIL.Image", "Image")
            else "convert it to a NumPy array first",
        ) from error
    return array if array.ndim else array.item()


def _is(value: Any, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def schema_of(
    samples: Iterable[Mapping[str, Any]],
) -> tuple[Schema, dict[str, ShardkitError]]:
    """Return the schema of samples, and errors for fields whose values no field can hold.

    It has the fields of the first sample, with the types of their first values. A field is optional
    if one of the samples has None there, and whole numbers are floats if others are.
    """
    first: dict[str, dict[type, Any]] = {}  # by field, the first value of each type
    for sample in samples:
        names = first if first else sample
        for name in names:
            if name in sample:
                first.setdefault(name, {}).setdefault(type(sample[name]), sample[name])
    fields: dict[str, FieldType] = {}
    others: dict[str, ShardkitError] = {}
    for name in first.keys() - {"__key__"}:
        try:
            fields[name] = _kind(name, [*first[name].values()])
        except SampleError as error:
            other = "use one of these types" if error.expected else error.fix
            error.fix = f"leave it out (in convert, drop=[{name!r}]), or {other}"
            others[name] = error
    return Schema({name: fields[name] for name in first if name in fields}), others


def _kind(name: str, values: list[Any]) -> FieldType:
    every = [as_fields({name: value})[name] for value in values]
    kinds = [guessed_schema({name: value})[name] for value in every if value is not None]
    kind = kinds[0] if kinds else _WITHOUT_TYPE
    if isinstance(kind, Int) and any(isinstance(each, Float) for each in kinds):
        kind = Float()
    return replace(kind, optional=len(kinds) < len(every))
