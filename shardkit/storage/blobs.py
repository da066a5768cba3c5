"""Many byte ranges, read at once: into one buffer, by one call of the extension `_reads.c`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.storage.byte_source import ByteSource, LocalFile, reads

Numbers = npt.NDArray[np.int64]

ABSENT = -1  # the size of a value that does not exist
_MOST = 1 << 30  # bytes that are read at once: of larger values, a read takes longer than a call
_LATE = -2  # what the extension returns after it waited for the disk
_ALIGNED = 64  # bytes of which the start of a column in a buffer is a multiple


class Reading(threading.local):
    """What is known of the last reading of a thread."""

    waited = True  # for storage, perhaps


reading = Reading()


@dataclass(frozen=True)
class Blobs:
    """Values of different lengths in one buffer, such as encoded images.

    data: uint8, (bytes,). starts, sizes: int64, (values,): the bytes of each value; a size of
    ABSENT means that there is none.
    """

    data: npt.NDArray[np.uint8]
    starts: Numbers
    sizes: Numbers

    @classmethod
    def of(cls, values: Sequence[bytes | None]) -> Blobs:
        """Copy values into one buffer; None stands for one that does not exist."""
        sizes = np.array([ABSENT if value is None else len(value) for value in values], np.int64)
        lengths = np.maximum(sizes, 0)
        data = np.frombuffer(b"".join(value for value in values if value is not None), np.uint8)
        return cls(data, lengths.cumsum() - lengths, sizes)

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, numbers: Numbers | slice) -> Blobs:
        """Return the values with these numbers."""
        return Blobs(self.data, self.starts[numbers], self.sizes[numbers])

    def values(self) -> list[Any]:
        """Return the values as bytes; None where there is none."""
        return self._slices(text=False)

    def texts(self) -> list[Any]:
        """Return the values as text in UTF-8; raises UnicodeDecodeError."""
        return self._slices(text=True)

    def _slices(self, text: bool) -> list[Any]:
        if reads is not None:
            found: list[Any] = reads.slices(self.data, self.starts, self.sizes, text)
            return found
        data, make = self.data.data, partial(str, encoding="utf-8") if text else bytes
        bounds = zip(self.starts.tolist(), self.sizes.tolist(), strict=True)
        return [None if size < 0 else make(data[start : start + size]) for start, size in bounds]

    def decoded(self, decode: Callable[[bytes], Any], optional: bool) -> list[Any]:
        """Return what `decode` makes of the values; None where there is none.

        Raises ValueError if the values are `optional` and one is None, which would seem absent.
        """
        found = [None if value is None else decode(value) for value in self.values()]
        if optional and sum(value is None for value in found) != (self.sizes < 0).sum():
            raise ValueError("a value is null")
        return found

    def integers(self) -> Numbers | None:
        """Return decimal numbers as int64; None if one of the values is not such a number."""
        out = np.empty(len(self), np.int64)
        if reads is None or not reads.integers(self.data, self.starts, self.sizes, out):
            return None
        return out

    def rows(self) -> npt.NDArray[np.uint8] | None:
        """Return the values as uint8 of shape (values, size); None if they differ in size."""
        size = int(self.sizes[0]) if len(self) else 0
        if size < 0 or (self.sizes != size).any():
            return None
        first = int(self.starts[0]) if len(self) else 0
        if (np.diff(self.starts) == size).all():
            return self.data[first : first + size * len(self)].reshape(len(self), size)
        rows: npt.NDArray[np.uint8] = self.data[self.starts[:, None] + np.arange(size)]
        return rows

    def arrays(
        self,
        dtype: np.dtype[Any],
        shape: tuple[int, ...] = (-1,),
        convert: Callable[[Any], npt.NDArray[Any]] | None = None,
    ) -> npt.NDArray[Any] | list[Any]:
        """Return values of numbers as arrays of a shape, in which one length may be -1.

        (values, *shape) if all have one size and a dimension, else a list of arrays, with None for
        one that does not exist. `convert` is called once, with the numbers of all values. Raises
        ValueError if a size does not fit.
        """
        first, sizes = int(self.starts[0]), np.maximum(self.sizes, 0)
        ends = sizes.cumsum()
        if np.count_nonzero(sizes % dtype.itemsize):
            raise ValueError("a value is not of whole numbers")
        if np.count_nonzero((self.starts - first - ends + sizes)[self.sizes > 0]):
            return Blobs.of(self.values()).arrays(dtype, shape, convert)
        data = self.data[first : first + int(ends[-1])]
        if 2 * len(data) < len(self.data):
            data = data.copy()  # an array that is kept must not keep all that was read with it
        numbers = np.require(data.view(dtype), requirements=["A", "W"])
        numbers = numbers if convert is None else convert(numbers)
        if shape and self.sizes[0] >= 0 and not np.count_nonzero(self.sizes != self.sizes[0]):
            return numbers.reshape(len(self), *shape)
        pairs = zip(
            pairwise([0, *(ends // dtype.itemsize).tolist()]), self.sizes.tolist(), strict=True
        )
        return [None if n < 0 else numbers[a:b].reshape(shape) for (a, b), n in pairs]


def read_blobs(
    sources: Sequence[ByteSource], which: Numbers, offsets: Numbers, sizes: Numbers
) -> list[Blobs]:
    """Read several columns of values, one after the other, into one buffer.

    which: int64, (values,): the source of each value. offsets, sizes: int64, (columns, values): its
    bytes there; a size of ABSENT stays one. Raises what reading a range from its source raises, and
    ValueError for more than a GiB, which damaged sizes may claim.
    """
    lengths = np.maximum(sizes, 0)
    limits = np.array([source.size for source in sources], np.int64)[which]
    outside = (offsets < 0) | (offsets > limits - lengths)
    bad = np.argwhere((sizes < ABSENT) | ((sizes >= 0) & outside))
    if len(bad):
        column, value = bad[0]
        raise sources[which[value]].ends(int(offsets[column, value]), int(sizes[column, value]))
    if lengths.sum(dtype=np.float64) > _MOST:
        raise ValueError("the values take too much memory together")
    spaces = -(-lengths.sum(axis=1) // _ALIGNED) * _ALIGNED  # so that numbers are aligned
    starts = lengths.cumsum(axis=1) - lengths + (spaces.cumsum() - spaces)[:, None]
    data = np.empty(spaces.sum(), np.uint8)
    reading.waited = True
    if not _all_local(sources, which, offsets, lengths, starts, data):
        for number, source in enumerate(sources):
            of = (which == number) & (lengths > 0)
            parts = np.array([part[of] for part in (offsets, lengths, starts)])
            # In the order of the file, as a remote one is read piece by piece.
            at, size, to = parts[:, parts[0].argsort()].tolist()
            found = source.read_ranges([*zip(at, size, strict=True)])
            for start, value in zip(to, found, strict=True):
                data[start : start + len(value)] = np.frombuffer(value, np.uint8)
    return [Blobs(data, start, size) for start, size in zip(starts, sizes, strict=True)]


def _all_local(
    sources: Sequence[ByteSource],
    which: Numbers,
    offsets: Numbers,
    lengths: Numbers,
    starts: Numbers,
    data: npt.NDArray[np.uint8],
) -> bool:
    """Read all ranges in one call, if all sources are local files. False if one is not whole."""
    files = [source for source in sources if isinstance(source, LocalFile)]
    if reads is None or len(files) < len(sources):
        return False
    handles = np.tile(np.array([file.handle for file in files], np.int32)[which], len(offsets))
    ranges = [np.ascontiguousarray(part).ravel() for part in (offsets, lengths, starts)]
    found = reads.read_ranges(handles, *ranges, data)
    if found >= 0:
        return False
    reading.waited = found == _LATE
    for file in files:
        file.compare_if_due()
    return True
