"""Random numbers as arithmetic: pure functions, no I/O, the same on every machine for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


def permutation(length: int, seed: int) -> npt.NDArray[np.int64]:
    """All numbers below `length` in an order that depends on `length` and `seed` alone.

    Sorts the numbers by a hash, so the order rests on no library's random generator and stays the
    same for ever. The hash is SplitMix64 (Steele, Lea and Flood, 2014), which is a bijection: no
    two numbers have equal hashes.
    """
    start = splitmix(np.array([seed % 2**64], np.uint64))
    with np.errstate(over="ignore"):
        hashes = splitmix(np.arange(length, dtype=np.uint64) + start)
    return np.argsort(hashes).astype(np.int64, copy=False)


def seed_of(*numbers: int) -> int:
    """One seed from several numbers, such as seed, epoch and window, in 64 bits."""
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
