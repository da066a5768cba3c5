"""Reads samples whose values follow one another, after their sizes: those of MDS and LitData."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise

from shardkit.storage.byte_source import ByteSource

_WHOLE = 1 << 16  # bytes of a sample up to which all its values are read at once


class Packed:
    """The layout of samples: the uint32 sizes of values without a fixed size, then all values."""

    def __init__(self, sizes: Sequence[int | None], *, rest: bool = False) -> None:
        """`sizes`: fixed sizes in bytes, or None. `rest`: bytes may follow, as one more value."""
        self._sizes, self._any_fixed, self._rest = sizes, any(sizes), rest
        self._head = struct.Struct(f"<{sum(not size for size in sizes)}I")

    def _bounds(self, head: bytes, length: int) -> list[int]:
        """Where each value begins in a sample of this length, and where the last two end."""
        sizes = self._head.unpack_from(head)
        if self._any_fixed:
            stored = iter(sizes)
            sizes = tuple(fixed or next(stored) for fixed in self._sizes)
        bounds = [*accumulate(sizes, initial=self._head.size), length]
        if bounds[-2] > length or (bounds[-2] < length and not self._rest):
            raise ValueError(f"its values have {bounds[-2]:,} bytes, but the sample has {length:,}")
        return bounds

    def read(
        self, source: ByteSource, start: int, stop: int, numbers: Collection[int], *, whole: bool
    ) -> list[bytes] | dict[int, bytes]:
        """The values with these numbers in a sample; all if `whole`, or if the sample is small.

        Raises ValueError or struct.error if the sizes do not fit the sample.
        """
        whole = whole or stop - start <= _WHOLE
        data = source.read(start, stop - start if whole else self._head.size)
        bounds = self._bounds(data, stop - start)
        if whole:
            return [data[begin:end] for begin, end in pairwise(bounds)]
        found = source.read_ranges((start + bounds[n], bounds[n + 1] - bounds[n]) for n in numbers)
        return dict(zip(numbers, found, strict=True))

    def offset(self, source: ByteSource, start: int, stop: int, number: int) -> int:
        """The byte at which a value of a sample begins."""
        head = source.read(start, min(self._head.size, stop - start))
        return start + self._bounds(head, stop - start)[number]
