"""Reads IPC files and streams without mapping them: what is small once, values one by one.

pyarrow tells where the buffers of a batch stand. It is given the batch's header, and zeros for the
body, which it does not look at; a buffer's address among the zeros is its place in the file.
"""

from __future__ import annotations

import math
import mmap
from bisect import bisect_right
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from shardkit.errors import DamagedError, ShardkitError
from shardkit.formats.arrow.columns import KEY
from shardkit.formats.arrow.foreign import Arrays
from shardkit.formats.arrow.messages import Batch, find_messages
from shardkit.formats.arrow.reader import FAILURES, IpcReader, Rows
from shardkit.formats.arrow.values import Buffers, Part, is_sliced, lists
from shardkit.schema import Array
from shardkit.storage import SMALL, PreadFile

if TYPE_CHECKING:
    import numpy.typing as npt

_FEW = 1024  # bytes of a buffer that is small however few rows there are
_UNKNOWN = -2  # where an array begins whose batch was not looked at


class UnmappedIpcReader(IpcReader):
    """An Arrow IPC file or stream, of which a value is read when it is asked for.

    Batches that pyarrow must decode are read whole: compressed ones, and those with columns whose
    values are no slices of the file.
    """

    _sliced = True  # whether all values are slices of the file

    def __init__(self, path: Path, layout: dict[str, Any] | None = None) -> None:
        super().__init__(path, layout)
        self._sliced = all(
            is_sliced(kind, self._columns.field(name).type) for name, kind in self.schema.items()
        )
        # Where the arrays of a field begin, for those of one shape: the bytes of all samples.
        self._begins: dict[tuple[str, tuple[int, ...]], npt.NDArray[np.int64]] = {}

    def _open(self) -> tuple[pa.Schema, list[int]]:
        self._file: PreadFile | None = PreadFile(self._path)
        if not len(self._file):
            raise DamagedError("the file is empty", path=self._path)
        self._messages = find_messages(self._file, self._path)
        schema = pa.ipc.read_schema(pa.py_buffer(self._messages.schema))
        return schema, [batch.rows for batch in self._messages.batches]

    def _slice(self, place: slice) -> pa.Buffer:
        return pa.py_buffer(self._opened[place])

    @property
    def _opened(self) -> PreadFile:
        if self._file is None:
            raise ValueError(f"{self._path} is closed")
        return self._file

    def _is_encoded(self, number: int) -> bool:
        return not self._sliced or super()._is_encoded(number)

    def _new_rows(self, number: int) -> Rows:
        if self._is_encoded(number):
            return super()._new_rows(number)
        place = _Places(self._opened, self._messages.batches[number], self._columns)
        return Rows(place.arrays, self.schema, Buffers(place.whole, place.values))

    def read_rows(
        self, field: str, positions: npt.NDArray[np.int64], out: npt.NDArray[Any]
    ) -> bool:
        """Arrays of one shape that are stored as lists of numbers."""
        kind, shape = self.schema.get(field), out.shape[1:]
        if not isinstance(kind, Array) or kind.dtype is None:
            return False
        begins = self._begins.get((field, shape))
        if begins is None:
            begins = np.full(len(self), _UNKNOWN, np.int64)
            self._begins[field, shape] = begins
        dtype = np.dtype(kind.dtype)
        try:
            starts = begins[positions]
            if (starts == _UNKNOWN).any():
                unknown = positions[starts == _UNKNOWN]
                for number in np.unique(np.searchsorted(self._starts, unknown, "right") - 1):
                    self._find_begins(begins, int(number), field, kind, shape)
                starts = begins[positions]
            if (starts < 0).any():
                return False
            found = self._opened.rows(starts, math.prod(shape) * dtype.itemsize)
        except (ShardkitError, *FAILURES):
            self._check_open()
            return False
        out[...] = found.view(dtype).reshape(out.shape)
        return True

    def _find_begins(
        self,
        begins: npt.NDArray[np.int64],
        number: int,
        field: str,
        kind: Array,
        shape: tuple[int, ...],
    ) -> None:
        """Note where the arrays of a batch begin; -1 for those that are not of the shape.

        It is noted in one step, as other threads look at it.
        """
        batch, first = self._messages.batches[number], self._starts[number]
        found = None
        if not self._is_encoded(number):
            places = _Places(self._opened, batch, self._columns)
            array = places.arrays([field])[field]
            found = lists(array, kind, Buffers(places.whole, places.slices))
        starts: npt.NDArray[np.int64] | int = -1
        if found is not None and isinstance(found.data, _Slices):
            inside = found.starts(shape)
            starts = np.where(inside < 0, -1, inside + found.data.at)
        begins[first : first + batch.rows] = starts

    def read_keys(self, positions: npt.NDArray[np.int64]) -> list[str]:
        """The keys of many samples."""
        self._check_open()
        keys: list[str] = []
        for position in positions.tolist():
            number = bisect_right(self._starts, position) - 1
            rows = self._kept[number]
            getters = rows.some.get(()) if rows is not None else None
            try:
                key = getters[0][1](position - self._starts[number]) if getters else None
            except FAILURES:
                key = None
            # What is read for the first time, or is damaged, goes the long way.
            keys.append(key if type(key) is str else self.read_fields(position, ())[KEY])
        return keys

    def keys(self) -> list[str]:
        """The key of every sample."""
        keys: list[str] = []
        for first, batch in zip(self._starts, self._messages.batches, strict=True):
            if batch.rows:
                self.read_fields(first, ())  # says so where there are fewer rows than announced
            keys += self.read_keys(np.arange(first, first + batch.rows))
        return keys

    def close(self) -> None:
        super().close()
        self._file = None
        self._begins = {}


class _Places:
    """Where the buffers of a batch stand in its file."""

    def __init__(self, file: PreadFile, batch: Batch, columns: pa.Schema) -> None:
        self._file = file
        self._batch = batch
        self._columns = columns
        self._zeros = _zeros(batch.offset + batch.size - batch.body)
        self._address = pa.py_buffer(self._zeros).address

    def arrays(self, names: Collection[str]) -> Arrays:
        """Columns whose buffers have the right places and sizes, and zeros in them."""
        header = pa.PythonFile(_Header(self._file, self._batch, self._zeros), mode="r")
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(header), self._columns)
        if batch.num_rows != self._batch.rows:
            raise ValueError(f"{batch.num_rows} rows where {self._batch.rows} are announced")
        batch.validate()
        return {name: batch.column(self._columns.get_field_index(name)) for name in names}

    def slices(self, buffer: pa.Buffer | None) -> _Slices:
        if buffer is None or not buffer.size:
            return _Slices(self._file, 0, 0)
        return _Slices(self._file, self._batch.body + buffer.address - self._address, buffer.size)

    def whole(self, buffer: pa.Buffer | None) -> memoryview:
        place = self.slices(buffer)
        return memoryview(place[: place.size])

    def values(self, buffer: pa.Buffer | None) -> Part:
        """What gives values: where those are small, the bytes of all."""
        place = self.slices(buffer)
        few = place.size <= SMALL * self._batch.rows + _FEW
        return self.whole(buffer) if few else place


class _Slices:
    """A buffer in a file."""

    def __init__(self, file: PreadFile, at: int, size: int) -> None:
        self._file = file
        self.at = at
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: slice) -> bytes:
        return self._file[self.at + (place.start or 0) : self.at + place.stop]


class _Header:
    """A message as pyarrow reads a file: what stands before the body, then zeros."""

    closed = False

    def __init__(self, file: PreadFile, batch: Batch, zeros: memoryview) -> None:
        self._file = file
        self._at = batch.offset
        self._body = batch.body
        self._zeros = zeros

    def read(self, size: int) -> memoryview | bytes:
        at, self._at = self._at, self._at + size
        return self._file[at : at + size] if at < self._body else self._zeros[:size]

    def tell(self) -> int:
        return self._at


_latest_zeros = memoryview(b"")


def _zeros(size: int) -> memoryview:
    """At least so many bytes that nobody writes to, so that they take no memory."""
    global _latest_zeros  # noqa: PLW0603 - all batches share them
    zeros = _latest_zeros
    if len(zeros) < size:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        length = max(1 << size.bit_length(), 1 << 24)
        zeros = memoryview(mmap.mmap(-1, length, flags=flags, prot=mmap.PROT_READ))
        _latest_zeros = zeros
    return zeros
