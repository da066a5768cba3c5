"""The file with the keys of a shard's samples, for which Megatron's own files have no place.

The keys in UTF-8, one after the other; then a uint64 for each that says where it begins, and one
for the end of the last; then their number as a uint64. All is little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit import storage
from shardkit.errors import DamagedError
from shardkit.formats.megatron.layout import keys_path, small_file, sums_before

if TYPE_CHECKING:
    import numpy.typing as npt

_NUMBER = struct.Struct("<Q")
_BOUNDS = struct.Struct("<QQ")


class Keys:
    """The keys of a shard, mapped or read."""

    def __init__(self, path: Path, samples: int, mapped: bool = True) -> None:
        """`path` is that of the .bin."""
        self.path = keys_path(path)
        self.samples = samples
        if not self.path.exists():
            raise DamagedError(
                "the file with the keys of the samples is missing",
                path=self.path,
                fix="copy it from where the dataset was made, or convert again",
            )
        self._data = small_file(self.path, mapped)
        # Where the numbers begin, and so how many bytes of keys there are.
        self.size = len(self._data) - (samples + 2) * _NUMBER.size
        if self.size < 0 or self._number(samples + 1) != samples:
            raise self._damaged(f"the keys of {samples:,} samples")
        if self._number(0) != 0 or self._number(samples) != self.size:
            raise self._damaged(f"0 to {self.size:,} as the bounds of all keys")

    def _number(self, place: int) -> int:
        (number,) = _NUMBER.unpack_from(self._data, self.size + place * _NUMBER.size)
        return int(number)

    def _damaged(self, expected: str) -> DamagedError:
        return DamagedError(
            "the file with the keys of the samples is damaged",
            path=self.path,
            offset=max(self.size, 0),
            expected=expected,
            found=f"{len(self._data):,} bytes that say otherwise",
            fix="copy it again, or move it away if it belongs to something else",
        )

    def __getitem__(self, position: int) -> str:
        """The key of a sample; raises ValueError for one that is damaged."""
        start, stop = _BOUNDS.unpack_from(self._data, self.size + position * _NUMBER.size)
        if not start <= stop <= self.size:
            raise ValueError("the key stands outside the keys")
        return self._data[start:stop].decode()

    def sizes(self, first: int, stop: int) -> npt.NDArray[Any]:
        """Bytes of keys."""
        at = self.size + first * _NUMBER.size
        bounds = np.frombuffer(self._data[at : at + (stop - first + 1) * 8], "<i8")
        return np.diff(bounds)


def write_bounds(
    file: storage.NewFile, sizes: Iterable[npt.NDArray[Any]], samples: int, size: int
) -> None:
    """What follows the keys, whose `sizes` come in chunks and are `size` bytes together."""
    for starts in sums_before(sizes):
        storage.write(file, [starts.astype("<u8").tobytes()])
    storage.write(file, [_BOUNDS.pack(size, samples)])
