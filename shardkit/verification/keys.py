"""Finds samples by key, with an 8-byte hash per key in memory; the keys stay in the shards."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.formats.base import ShardReader

Hashes = npt.NDArray[np.int64]


class Location(NamedTuple):
    """The location of a sample: dataset number, shard number, and position in the shard."""

    part: int
    shard: int
    position: int


def hashes_of(reader: ShardReader) -> Hashes:
    """The hashes of a shard's keys.

    Python's own string hash is the fastest, and its random seed prevents forged collisions.
    """
    keys = reader.keys()
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
        """The location of the sample with a number."""
        at = bisect_right(self._starts, number) - 1
        return Location(*self._shards[at], number - self._starts[at])

    def key(self, number: int) -> str | None:
        return self._read(self.location(number))

    def unmatched(self, key: str) -> int | None:
        """The number of the first sample with this key that is not matched."""
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
