"""Guess the schema of a sample from its values."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from shardkit.codecs.image import is_image
from shardkit.codecs.media import guess
from shardkit.errors import SampleError
from shardkit.sample import Sample
from shardkit.schema import TYPES, Array, Bytes, FieldType, Images, Schema


def guessed_schema(sample: Sample) -> Schema:
    """Return a schema guessed from one sample's values; images are recognized by their first bytes.

    Raises SampleError for a value of a type that no field can hold.
    """
    return Schema({n: _guess(n, value) for n, value in sample.items() if n != "__key__"})


def _is_image(value: Any) -> bool:
    return isinstance(value, bytes) and is_image(value[:64])


def _guess(name: str, value: Any) -> FieldType:
    if isinstance(value, bytes | bytearray | memoryview):
        return (guess(bytes(value[:64])) or Bytes)()
    if isinstance(value, np.ndarray):
        return Array(value.dtype.str)
    if isinstance(value, list) and value and all(map(_is_image, value)):
        return Images()
    for kind in ("Bool", "Int", "Float", "Text", "Json"):
        with contextlib.suppress(TypeError):
            TYPES[kind]().check(value)
            return TYPES[kind]()
    raise SampleError(
        "a value is of a type that no field can hold",
        field=name,
        expected=", ".join(kind.python for kind in TYPES.values()),
        found=type(value).__name__
        + (" with values not valid in JSON, such as NaN" if isinstance(value, dict | list) else ""),
    )
