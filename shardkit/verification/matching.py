"""Finds the counterpart of a sample by its key, and describes how two values differ.

Of each key, an 8-byte hash is in memory; the keys stay in the shards.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.formats.base import ShardReader
from shardkit.formats.columns import keys_of
from shardkit.sample import JsonText

_SHOWN = 60  # characters of a value

Hashes = npt.NDArray[np.int64]


class Location(NamedTuple):
    """The location of a sample: dataset number, shard number, and position in the shard."""

    part: int
    shard: int
    position: int


def hashes_of(reader: ShardReader) -> Hashes:
    """Return the hashes of a shard's keys.

    Python's own string hash is the fastest, and its random seed prevents forged collisions.
    """
    keys = keys_of(reader)
    return np.fromiter(map(hash, keys), np.int64, len(keys))


class Keys:
    """The keys of some shards, numbered in the order of the shards.

    matched: bool of shape (samples,), set by those who match samples with others of the same keys.
    """

    def __init__(
        self, shards: Sequence[tuple[int, int, Hashes]], read: Callable[[Location], str | None]
    ) -> None:
        """`shards` has the dataset number, shard number and hashes of each shard. `read` returns
        the key at a location, or None if it cannot be read.
        """
        self._shards = [(part, shard) for part, shard, _ in shards]
        lengths = [len(hashes) for _, _, hashes in shards]
        self._starts = np.cumsum([0, *lengths]).tolist()
        empty = np.zeros(0, np.int64)
        self._hashes = np.concatenate([empty, *(hashes for _, _, hashes in shards)])
        self._read = read
        self.matched = np.zeros(len(self), bool)
        self._passed: dict[str, int] = {}  # for keys of several samples: how many are matched

    def __len__(self) -> int:
        return len(self._hashes)

    def location(self, number: int) -> Location:
        """Return the location of the sample with a number."""
        at = bisect_right(self._starts, number) - 1
        return Location(*self._shards[at], number - self._starts[at])

    def key(self, number: int) -> str | None:
        return self._read(self.location(number))

    def unmatched(self, key: str) -> int | None:
        """Return the number of the first sample with this key that is not matched."""
        order, ordered = self._ordered
        wanted = np.int64(hash(key))
        first, last = ordered.searchsorted(wanted), ordered.searchsorted(wanted, "right")
        numbers, start = order[first:last], self._passed.get(key, 0)  # usually one number
        while start < len(numbers) and self.matched[numbers[start]]:
            start += 1
        if start:
            self._passed[key] = start
        left = (int(number) for number in numbers[start:] if not self.matched[number])
        return next((number for number in left if self.key(number) == key), None)

    def repeated(self) -> Iterator[tuple[str, int, int]]:
        """For every sample whose key an earlier one has: the key, the first number, its number."""
        ordered = np.sort(self._hashes)
        twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
        if not len(twice):
            return
        first_with: dict[str, int] = {}
        for number in np.flatnonzero(np.isin(self._hashes, twice)).tolist():
            key = self.key(number)
            if key is None:
                continue
            first = first_with.setdefault(key, number)
            if first != number:
                yield key, first, number

    @cached_property
    def _ordered(self) -> tuple[Hashes, Hashes]:
        order = np.argsort(self._hashes, kind="stable")
        return order, self._hashes[order]


# --- values --------------------------------------------------------------------------------------


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
