"""Reproducible random numbers: pure functions without I/O, the same on every machine forever."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from shardkit.helpers.mapped import computed, pieces

_SORTED = 1 << 22  # numbers sorted at a time


def permutation(length: int, seed: int) -> npt.NDArray[np.int64]:
    """Return all numbers below `length`, in an order that depends only on `length` and `seed`.

    Sorts the numbers by a hash, so that the order does not depend on the random generator of a
    library, and never changes. The hash is SplitMix64 (Steele, Lea and Flood, 2014), a bijection:
    no two numbers have equal hashes. A long permutation is stored in a temporary file, partitioned
    by hash, and then sorted part by part: time grows linearly with length, and memory does not.
    """
    start = splitmix(np.array([seed % 2**64], np.uint64))

    def hashes(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        with np.errstate(over="ignore"):
            return splitmix(numbers.astype(np.uint64) + start)

    def by_hash(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return numbers[np.argsort(hashes(numbers))]

    parts = length // _SORTED + 1
    if parts == 1:
        return by_hash(np.arange(length))

    def part_of(piece: slice) -> npt.NDArray[np.int64]:
        upper = hashes(np.arange(piece.start, piece.stop)) >> np.uint64(32)
        return (upper * np.uint64(parts) >> np.uint64(32)).astype(np.int64)

    counts = sum(np.bincount(part_of(piece), minlength=parts) for piece in pieces(length))
    free = np.cumsum(counts) - counts  # where the next number of each part goes
    found = computed(length, np.int64, lambda piece: np.arange(piece.start, piece.stop))
    for piece in pieces(length):
        part = part_of(piece)
        order = np.argsort(part, kind="stable")
        count = np.bincount(part, minlength=parts)
        shift = np.repeat(free - (np.cumsum(count) - count), count)
        found[shift + np.arange(len(part))] = piece.start + order
        free += count
    for begin, end in itertools.pairwise([0, *free.tolist()]):
        found[begin:end] = by_hash(found[begin:end])
    return found


def seed_of(*numbers: int) -> int:
    """Return a 64-bit seed derived from several numbers, such as seed, epoch and window."""
    mixed = np.zeros(1, np.uint64)
    for number in numbers:
        mixed = splitmix(mixed ^ np.uint64(number % 2**64))
    return int(mixed[0])


def splitmix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64 of each number."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
