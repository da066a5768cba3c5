"""Which sample comes when, as arithmetic: pure functions, no I/O, the same on every machine."""

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
    with np.errstate(over="ignore"):
        start = _splitmix(np.array([seed % 2**64], np.uint64))
        hashes = _splitmix(np.arange(length, dtype=np.uint64) + start)
    return np.argsort(hashes, kind="stable").astype(np.int64)


def _splitmix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
