"""Shares of samples by hashes of their keys: the same in every run, whatever else is converted."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash


@dataclass(frozen=True)
class Share:
    """The samples of a split: those whose key fractions are in the interval [start, stop)."""

    start: float
    stop: float

    def has(self, key: str) -> bool:
        return self.start <= key_fraction(key) < self.stop


def key_fraction(key: str) -> float:
    """A number from 0 to 1 that depends on the key alone."""
    return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogateescape")) / 2**64
