"""Arrays of any length: short ones in memory, long ones in memory-mapped temporary files.

The system can evict the pages of such a file, so that a plan for 10^8 files takes about as much
memory as one for 10^6. The files have no names, so they disappear with the arrays.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardkit.helpers import os_errors

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_IN_MEMORY = 16 << 20  # size up to which an array is kept in memory, in bytes
_BUFFER = 1 << 20  # bytes per write
PIECE = 1 << 19  # values computed at a time


class Growing:
    """An array that grows by appending."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self._data = bytearray()
        self._file: IO[bytes] | None = None
        self._written = 0

    def __len__(self) -> int:
        size: int = self.dtype.itemsize
        return (self._written + len(self._data)) // size

    def extend(self, values: npt.ArrayLike) -> None:
        self._data += np.ascontiguousarray(values, self.dtype).data
        if len(self._data) > (MAX_IN_MEMORY if self._file is None else _BUFFER):
            self._write()

    def array(self) -> npt.NDArray[Any]:
        """Return all values. Nothing can be appended afterwards."""
        if self._file is None:
            return np.frombuffer(self._data, self.dtype)
        self._write()
        with self._file:
            return np.memmap(self._file, self.dtype, "r+").view(np.ndarray)

    def _write(self) -> None:
        folder = os_errors.temporary_folder()
        with os_errors.explained("write a list to a temporary file", folder / "shardkit"):
            self._file = self._file or tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
            self._written += self._file.write(self._data)
            self._file.flush()
            self._data.clear()


def pieces(count: int) -> Iterator[slice]:
    """Slices of PIECE values each that together cover `count` values."""
    for start in range(0, count, PIECE):
        yield slice(start, min(start + PIECE, count))


def listed(values: Sizes) -> Iterator[int]:
    """Yield each value as a Python int. Only one piece at a time is converted."""
    for piece in pieces(len(values)):
        yield from np.asarray(values[piece]).tolist()


def computed(count: int, dtype: Any, make: Callable[[slice], npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return an array of `count` values, computed slice by slice with `make`."""
    if count * np.dtype(dtype).itemsize <= MAX_IN_MEMORY:
        return make(slice(0, count))
    found = Growing(dtype)
    for piece in pieces(count):
        found.extend(make(piece))
    return found.array()


def selected(count: int, make: Callable[[slice], npt.NDArray[np.bool_]]) -> npt.NDArray[np.int64]:
    """The indices at which a mask is True. The mask is computed slice by slice with `make`."""
    found = Growing(np.int64)
    for piece in pieces(count):
        found.extend(piece.start + np.flatnonzero(make(piece)))
    return found.array()


def joined(parts: Sequence[Sizes]) -> Sizes:
    """Return the concatenation of all arrays."""
    runs = [part for part in parts if isinstance(part, Runs)]
    if len(runs) == len(parts):
        counts = np.concatenate([part.counts for part in runs])
        return Runs(np.concatenate([part.values for part in runs]), counts.cumsum())
    found = Growing(np.int64)
    for part in parts:
        for piece in pieces(len(part)):
            found.extend(part[piece])
    return found.array()


def mapped(values: Sizes, make: Callable[[npt.NDArray[Any]], npt.NDArray[np.int64]]) -> Sizes:
    """Apply `make`, an elementwise function of arrays, to the values."""
    if isinstance(values, Runs):
        return Runs(make(values.values), values.ends)
    return computed(len(values), np.int64, lambda piece: make(values[piece]))


def running_sum(values: Sizes) -> npt.NDArray[np.int64] | RunningSum:
    """Return the cumulative sums of the values, with a leading 0."""
    if isinstance(values, Runs):
        return RunningSum(values)
    found, total = Growing(np.int64), np.zeros(1, np.int64)
    found.extend(total)
    for piece in pieces(len(values)):
        sums = total + np.cumsum(values[piece])
        found.extend(sums)
        total = sums[-1:]
    return found.array()


class Runs:
    """A run-length encoded array, such as sizes by shard, with the needed subset of operations.

    `ends` has the index after the last value of each run.
    """

    def __init__(self, values: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        self.values, self.ends, self.dtype = values, ends, np.dtype(np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step == 1 and stop > start:
                first, last = np.searchsorted(self.ends, [start, stop - 1], side="right").tolist()
                ends = np.minimum(self.ends[first : last + 1], stop) - start
                return Runs(self.values[first : last + 1], ends)
            key = np.arange(start, stop, step)
        return self.values[np.searchsorted(self.ends, key, side="right")]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[np.int64]:
        return np.repeat(self.values, self.counts)

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)

    def sum(self) -> int:
        return int((self.values * self.counts).sum())

    def mean(self) -> float:
        return self.sum() / len(self)


class RunningSum:
    """The `running_sum` of `Runs`."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._sums = (runs.values * runs.counts).cumsum()  # at the ends of runs

    def __getitem__(self, key: Any) -> Any:
        count = np.asarray(key)
        count = np.where(count < 0, count + len(self._runs) + 1, count)
        run = np.searchsorted(self._runs.ends, count)
        return self._sums[run] - (self._runs.ends[run] - count) * self._runs.values[run]

    def searchsorted(self, aims: Any, side: str = "left", sorter: None = None) -> Any:
        """Like the method of numpy's arrays; `np.searchsorted` calls it."""
        runs, aims = self._runs, np.asarray(aims)
        run = np.searchsorted(self._sums, aims, side="right" if side == "right" else "left")
        inside = np.minimum(run, len(self._sums) - 1)
        value = np.maximum(runs.values[inside], 1)
        left = aims - (self._sums - runs.values * runs.counts)[inside]  # relative to the run
        steps = left // value + 1 if side == "right" else -(-left // value)
        found = (runs.ends - runs.counts)[inside] + np.maximum(steps, 0)
        return np.where(run < len(self._sums), found, len(runs) + 1)


# One number per sample of a source.
Sizes: TypeAlias = "npt.NDArray[np.int64] | Runs"
