"""File names in one buffer, encoded as in the file system, each terminated by a zero byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import SourceError
from shardkit.helpers.mapped import Growing, pieces
from shardkit.sources.base import Indices

_DECODED = 4096  # names that are decoded at a time
FEW = 1 << 16  # up to so many files, as in a task, have names and numbers as Python objects


class Names(Sequence[str]):
    """A list of names, with 9 bytes of overhead for each."""

    def __init__(self, data: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> None:
        self.data, self._ends = data, ends
        self._decoded: list[str] | None = None

    @classmethod
    def of(cls, names: Sequence[str]) -> Names:
        growing = GrowingNames()
        growing.extend(names)
        return growing.names()

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if self._decoded is None and len(self) <= FEW:
            self._decoded = list(self)
        if self._decoded is not None:
            return self._decoded[index]
        start, end = self._start(index), self._ends[index]
        return self.data[start : end - 1].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _DECODED):
            end = self._ends[min(first + _DECODED, len(self)) - 1]
            data = self.data[self._start(first) : end - 1].tobytes()
            yield from data.decode("utf-8", "surrogateescape").split("\0")

    def __reduce__(self) -> tuple[Any, ...]:
        return Names, (self.data, self._ends)

    def take(self, indices: Indices) -> Names:
        """Only these names, in this order."""
        if not len(indices):
            return Names.of([])
        first, last = int(indices[0]), int(indices[-1])
        start = self._start(first)
        if last - first + 1 == len(indices) and (np.diff(indices) == 1).all():
            ends = self._ends[first : last + 1] - start
            return Names(self.data[start : self._ends[last]], ends)
        data, ends, total = Growing(np.uint8), Growing(np.int64), 0
        for piece in pieces(len(indices)):
            chosen = indices[piece]
            stops = self._ends[chosen]
            starts = np.where(chosen > 0, self._ends[chosen - 1], 0)
            lengths = stops - starts
            after = np.cumsum(lengths)
            at = np.repeat(starts - after + lengths, lengths) + np.arange(after[-1])
            data.extend(self.data[at])
            ends.extend(after + total)
            total += int(after[-1])
        return Names(data.array(), ends.array())

    def _start(self, index: int) -> Any:
        return self._ends[index - 1] if index else 0


class GrowingNames:
    """A list of names that can be appended to."""

    def __init__(self) -> None:
        self._data, self._ends = Growing(np.uint8), Growing(np.int64)

    def extend(self, names: Sequence[str]) -> None:
        data = "\0".join((*names, "")).encode("utf-8", "surrogateescape")
        found = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(found == 0)
        if len(ends) != len(names):
            such = next(name for name in names if "\0" in name)
            raise SourceError("the name of a file has a zero byte", found=repr(such))
        self._ends.extend(ends + (len(self._data) + 1))
        self._data.extend(found)

    def names(self) -> Names:
        return Names(self._data.array(), self._ends.array())
