"""Random numbers for samples, computed so that they do not depend on ranks, workers and threads.

A number is a hash of (seed, epoch, index, stream), where the index is that of the sample, and each
random transform has its own stream. The hash is the one in `order.py`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardkit.helpers.order import splitmix

_STEP = np.uint64(0x9E3779B97F4A7C15)  # between the states of SplitMix64
_UNUSED = np.uint64(11)  # of 64 bits, those beyond a float's 53-bit fraction
_FRACTION = 2.0**-53


class Draws:
    """Random numbers for some samples, one row per sample."""

    def __init__(
        self, seed: int, epochs: npt.NDArray[np.int64], indexes: npt.NDArray[np.int64]
    ) -> None:
        hashed = splitmix(_hash(seed) ^ epochs.astype(np.uint64))
        self._rows = splitmix(hashed ^ indexes.astype(np.uint64))

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, rows: Sequence[int]) -> Draws:
        """Return the numbers for a subset of the samples, by ascending row."""
        if len(rows) == len(self):
            return self
        some = copy.copy(self)
        some._rows = self._rows[list(rows)]
        return some

    def uniform(self, stream: int, count: int) -> npt.NDArray[np.float64]:
        """Return numbers in [0, 1), float64 of shape (samples, count)."""
        steps = np.arange(count, dtype=np.uint64) * _STEP
        states = (self._rows ^ _hash(stream))[:, None] + steps
        return (splitmix(states) >> _UNUSED).astype(np.float64) * _FRACTION

    def generator(self, row: int, stream: int) -> np.random.Generator:
        """Return a generator for one sample."""
        return np.random.Generator(np.random.PCG64(self.number(row, stream)))

    def number(self, row: int, stream: int) -> int:
        """Return a 64-bit number for one sample, to seed a generator."""
        return int(splitmix(self._rows[row : row + 1] ^ _hash(stream))[0])


@functools.lru_cache(maxsize=1024)
def _hash(number: int) -> np.uint64:
    hashed: np.uint64 = splitmix(np.array([number % 2**64], np.uint64))[0]
    return hashed
