"""Compares two values by value and type, and describes what differs."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from shardkit.sample import JsonText

_SHOWN = 60  # characters of a value


def difference(found: Any, expected: Any) -> tuple[str, str] | None:
    """None for equal values; otherwise what was expected and what was found, in words.

    NaN equals NaN. JSON is compared as text if both values have their text, otherwise by value.
    """
    if isinstance(found, JsonText) and isinstance(expected, JsonText):
        return None if found == expected else _unequal_text(found, expected)
    found, expected = parsed(found), parsed(expected)
    if type(found) is not type(expected):
        return _described(expected), _described(found)
    if isinstance(found, bytes):
        return None if found == expected else _unequal_bytes(found, expected)
    if isinstance(found, list) and any(isinstance(value, bytes) for value in [*found, *expected]):
        return _unequal_lists(found, expected)
    same = _equal_arrays if isinstance(found, np.ndarray) else _equal
    return None if same(found, expected) else (_described(expected), _described(found))


def parsed(value: Any) -> Any:
    """Parse JSON text; text that is not valid JSON (the manifest is damaged) is returned as is."""
    if not isinstance(value, JsonText):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return str(value)


def _unequal_lists(found: list[Any], expected: list[Any]) -> tuple[str, str] | None:
    """The difference of two lists of images: their lengths, or the first image that differs."""
    if len(found) != len(expected):
        return f"{len(expected):,} images", f"{len(found):,}"
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        words = difference(one, other)
        if words is not None:
            return f"{words[0]} as image {number}", words[1]
    return None


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(found, float):
        return bool(found == expected) or (math.isnan(found) and math.isnan(expected))
    if isinstance(found, dict | list):  # as text: 1, 1.0 and true differ, and NaN equals NaN
        return json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)
    return bool(found == expected)


def _equal_arrays(found: Any, expected: Any) -> bool:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return found.tobytes() == expected.tobytes() or np.array_equal(
        found, expected, equal_nan=found.dtype.kind in "fc"
    )


def _unequal_bytes(found: bytes, expected: bytes) -> tuple[str, str]:
    at = _first_difference(found, expected)
    return f"{len(expected):,} bytes", f"{len(found):,} bytes, first difference at byte {at:,}"


def _unequal_text(found: str, expected: str) -> tuple[str, str]:
    at = _first_difference(found.encode(), expected.encode())
    words = f"{found!r:.{_SHOWN}}, first difference at byte {at:,}"
    return f"{expected!r:.{_SHOWN}}", words


def _first_difference(found: bytes, expected: bytes) -> int:
    length = min(len(found), len(expected))
    ours, theirs = (np.frombuffer(data, np.uint8, length) for data in (found, expected))
    unequal = np.flatnonzero(ours != theirs)
    return int(unequal[0]) if len(unequal) else length


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {value.shape} {value.ravel()[:4].tolist()!r:.{_SHOWN}}"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    return f"{type(value).__name__} {value!r:.{_SHOWN}}"
