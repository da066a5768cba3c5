"""Statistics of value sizes that can be merged in any order."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shardkit.helpers.checked import Count
from shardkit.metadata.manifest import FieldStats

_PENDING = 1 << 14  # sizes collected before they are counted


@dataclass
class FieldSizes:
    """The sizes of a field's values: exact bounds, and a histogram with buckets of up to 1 %."""

    count: Count = 0
    bytes: Count = 0
    min: Count = 0
    max: Count = 0
    buckets: dict[int, Count] = field(default_factory=dict)  # lower bound -> number of values

    def __post_init__(self) -> None:
        self._pending: list[int] = []

    def append(self, size: int) -> None:
        """Add one size; it is counted by `flush` at the latest."""
        self._pending.append(size)
        if len(self._pending) >= _PENDING:
            self.flush()

    def flush(self) -> None:
        if self._pending:
            sizes, self._pending = self._pending, []
            self.add(sizes)

    def add(self, sizes: list[int]) -> None:
        values = np.array(sizes, np.int64)
        # Sizes in a bucket share their first 8 bits; frexp gives the number of bits.
        shift = np.maximum(np.frexp(values.astype(np.float64))[1] - 8, 0)
        starts, counts = np.unique(values >> shift << shift, return_counts=True)
        buckets = dict(zip(starts.tolist(), counts.tolist(), strict=True))
        self.merge(
            FieldSizes(len(sizes), int(values.sum()), int(values.min()), int(values.max()), buckets)
        )

    def merge(self, other: FieldSizes) -> None:
        if not other.count:
            return
        self.min = min(self.min, other.min) if self.count else other.min
        self.max = max(self.max, other.max)
        self.count += other.count
        self.bytes += other.bytes
        for start, count in other.buckets.items():
            self.buckets[start] = self.buckets.get(start, 0) + count

    def summary(self) -> FieldStats:
        passed, median = 0, 0
        for start in sorted(self.buckets):
            passed += self.buckets[start]
            if 2 * passed >= self.count:
                width = 1 << max(start.bit_length() - 8, 0)
                median = min(max(start + width // 2, self.min), self.max)
                break
        return FieldStats(self.count, self.bytes, self.min, median, self.max)

    def by_powers(self) -> dict[str, int]:
        """Return a histogram of the values with the bucket bounds 0, 1, 2, 4, 8, ..."""
        counts: dict[int, int] = {}
        for start, count in sorted(self.buckets.items()):
            power = 1 << start.bit_length() >> 1
            counts[power] = counts.get(power, 0) + count
        return {str(power): count for power, count in counts.items()}

    def ranges(self, most: int = 24) -> list[tuple[int, int, int]]:
        """A histogram of up to `most` ranges: first size, last size and number of values of each.

        The ranges have equal widths, or grow by equal ratios if sizes differ widely.
        """
        low, high = self.min, self.max + 1
        if not self.count:
            return []
        if self.max > 50 * max(low, most):
            starts = np.geomspace(max(low, 1), high, most + 1)[:-1].astype(np.int64)
        else:
            bucket = 1 << max(self.max.bit_length() - 8, 0)  # a range has whole ones
            step = -(-(high - low) // (most - 1) // bucket) * bucket or bucket
            starts = np.arange(low // bucket * bucket, high, step)
        starts = np.unique([low, *starts[starts > low]])
        counts = np.zeros(len(starts), np.int64)
        for start, count in self.buckets.items():
            counts[max(int(np.searchsorted(starts, start, "right")) - 1, 0)] += count
        ends = [*(starts[1:] - 1).tolist(), self.max]
        return list(zip(starts.tolist(), ends, counts.tolist(), strict=True))
