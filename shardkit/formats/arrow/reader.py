"""Random access to shards of columns: IPC files and streams here, Parquet files in `parquet.py`.

From an uncompressed batch, single values are read; offsets and small values are read for a page of
rows at a time and kept in memory, up to a limit. A batch that must be decoded (because it is
compressed or has dictionaries) is read as a whole, and the latest ones are kept in memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import mmap
import os
import threading
import weakref
from abc import abstractmethod
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.errors import DamagedError, FormatError, ShardkitError, StorageError
from shardkit.formats.arrow.at_once import Located, Table, from_memory, located
from shardkit.formats.arrow.columns import Arrays, Known, check_names, layout_of
from shardkit.formats.arrow.messages import Message, decompressed_size, find_messages, null_counts
from shardkit.formats.arrow.values import (
    MEMORY,
    PAGE,
    Buffers,
    Column,
    average_size,
    column,
    fetch,
    fits,
    plain,
)
from shardkit.formats.base import KEY, Columns, Ranges, ShardReader, numbered_key
from shardkit.helpers import os_errors
from shardkit.sample import JsonText, Sample, key_of
from shardkit.schema import FieldType, Json, Text
from shardkit.storage.byte_source import ByteSource, open_source
from shardkit.storage.fs import check_expansion

_IN_MEMORY = 32 << 20  # limit for offsets and small values of an open shard, in bytes
_ALL_IN_MEMORY = 256 << 20  # limit for all open shards of the process
_BATCH = 4096  # bytes of memory for a batch, without its pages
_DECODED = 64 << 20  # bytes of decoded batches, per thread
_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)
_SCAN = 16 << 20  # bytes of a column to scan at a time

Load = Callable[[Collection[str]], Arrays]


class Batch:
    """One batch of rows: its arrays, and the pages of columns that have been read."""

    def __init__(self, load: Load, buffers: Buffers = MEMORY) -> None:
        self._load = load
        self.buffers = buffers
        self.pages: defaultdict[int, dict[str, Column]] = defaultdict(dict)
        # Columns that cannot be read, with the error, so that it is not determined for each row.
        self.failed: dict[tuple[str, ...], ShardkitError] = {}
        self.size = 0  # bytes of its arrays in memory
        self._arrays: dict[str, pa.Array] = {}
        self._found: dict[str, Located] = {}

    def arrays(self, names: Collection[str]) -> Arrays:
        """These columns, as `plain` arrays."""
        missing = [name for name in names if name not in self._arrays]
        found = self._load(missing) if missing else {}
        for name in missing:
            array = self._arrays[name] = plain(found[name])
            self.size += 0 if self.buffers.in_file else array.nbytes
        return {name: self._arrays[name] for name in names}

    def found(self, kinds: Mapping[str, FieldType]) -> dict[str, Located]:
        """Return what `located` returns for all rows of these columns, which are in memory."""
        for name, array in self.arrays(kinds).items():
            if name not in self._found:
                self._found[name] = located(kinds[name], array, 0, len(array))
                self.size += 16 * len(array)
        return {name: self._found[name] for name in kinds}


class BatchReader(ShardReader):
    """One shard of a column format."""

    _noted = 0  # bytes of batches and of pages of columns
    _token: object = None  # identifies the reader in `DECODED`, once it is opened
    # `_noted` of all readers, by token. A sum would not stay exact in a free-threaded Python, where
    # two threads may change it at once.
    _sizes: ClassVar[dict[object, int]] = {}
    _starts: list[int]  # the position of the first row of each batch, and the end
    _planned: Table | None = None  # for the fields that were read at once last

    def __init__(self, path: Path, layout: dict[str, Any] | None = None) -> None:
        self.path = path
        self._token = object()
        self._batches: dict[int, Batch] = {}  # batches whose values are read from the file
        self._source: ByteSource | None = None
        with self._damage("the shard is damaged"):
            self._source = self._bytes_of(path)
            self._columns, lengths = self._open()
            self._starts = [*accumulate(lengths, initial=0)]
            check_names(self._columns)
            if layout is None:
                layout = layout_of(self._columns, self._starts[-1], self._known_nulls(), self._scan)
            super().__init__(path, layout)
            self._check_columns()
        # Third-party files may have no keys.
        self._keyed = [KEY] if KEY in self._columns.names else []
        self._all = [*self._keyed, *self.schema]
        self._stem = key_of(path.name.partition(".")[0])

    def _bytes_of(self, path: Path) -> ByteSource:
        return open_source(path)

    @abstractmethod
    def _open(self) -> tuple[pa.Schema, list[int]]:
        """Return the columns of the file and the number of rows of each batch."""

    @property
    def _opened(self) -> ByteSource:
        if self._source is None:
            raise ValueError(f"{self.path} is closed")
        return self._source

    @abstractmethod
    def _load(self, number: int, names: Collection[str]) -> Arrays:
        """Load a batch into memory: at least these columns."""

    def _located(self, number: int) -> Batch | None:
        """Return a batch whose values are read from the file; None if it must be decoded."""
        return None

    def _extents(self) -> list[tuple[int, int]] | None:
        """Return the start and end of each batch in the file; None if they are unknown."""
        return None

    def spans(self) -> npt.NDArray[np.int64] | None:
        """Return the byte ranges of the batches that contain the samples."""
        extents = self._extents()
        if extents is None:
            return None
        ranges = np.array(extents, np.int64).reshape(-1, 2)
        return np.repeat(ranges, np.diff(self._starts), axis=0)

    @abstractmethod
    def _known_nulls(self) -> Known:
        """Return the nulls in columns for which the file contains their number."""

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def in_memory(self) -> int:  # type: ignore[override] # it may grow
        table = self._planned
        return self._noted + (0 if table is None else table.size_of(table.kinds, len(self)))

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        number = bisect_right(self._starts, position) - 1
        row = position - self._starts[number]
        names = self._all
        if fields is not None:
            names = [*self._keyed, *(name for name in self.schema if name in fields)]
        columns = self._page(number, row, names)
        sample: Sample = {} if self._keyed else {KEY: numbered_key(self._stem, position)}
        row %= PAGE
        for name in names:
            value = columns[name].get(row)
            if value is not None:
                if isinstance(value, JsonText) and not json_text:
                    value = json.loads(value)
                sample[name] = value
            elif name == KEY or not self.schema[name].optional:
                raise ValueError("it is null, but the field is not optional")
        return sample

    def _batch(self, number: int) -> Batch:
        batch = self._batches.get(number) or DECODED.get((self._token, number))
        if batch is None:
            batch = self._located(number)
            if batch is not None:
                self._batches[number] = batch
                self._note(_BATCH)
            else:
                reader = weakref.proxy(self)  # so that the batch does not keep the file open
                batch = Batch(lambda names: reader._load(number, names))
                DECODED.add((self._token, number), batch)
        return batch

    def _note(self, size: int) -> None:
        """Count bytes in memory; free the memory of this shard if a limit is exceeded."""
        self._noted += size
        self._sizes[self._token] = self._noted
        if self._noted > _IN_MEMORY or sum([*self._sizes.values()]) > _ALL_IN_MEMORY:
            self._forget()

    def _forget(self) -> None:
        self._batches, self._noted = {}, 0
        self._sizes.pop(self._token, None)

    def __del__(self) -> None:
        self._forget()

    def _page(self, number: int, row: int, names: Collection[str]) -> dict[str, Column]:
        """Return the columns of the page that contains a row of a batch: at least these columns."""
        batch = self._batches.get(number) or self._batch(number)
        page = batch.pages[row // PAGE]
        if all(map(page.__contains__, names)):
            return page
        missing = tuple([name for name in names if name not in page])
        if missing in batch.failed:
            raise batch.failed[missing].located()
        try:
            with self._damage("a batch is damaged", number):
                for name, array in batch.arrays(missing).items():
                    kind = Text() if name == KEY else self.schema[name]
                    first = row - row % PAGE
                    stop = min(first + PAGE, self._rows(number))
                    found = column(kind, array, first, stop, batch.buffers)
                    page[name] = found
                    if batch.buffers.in_file:
                        self._note(found.size + 1024)
        except ShardkitError as error:
            if not isinstance(error, StorageError):
                cause = error.__cause__
                if cause is not None:  # the frames of its traceback would keep the shard open
                    cause.with_traceback(None).__context__ = None
                batch.failed[missing] = error.located()
            raise
        return page

    def plan(
        self, positions: npt.NDArray[np.int64], fields: Collection[str]
    ) -> Ranges | Columns | None:
        source, table, names = self._opened, self._planned, [*self._keyed, *fields]
        if table is None or [*table.kinds] != names:
            kinds = {name: Text() if name == KEY else self.schema[name] for name in names}
            number = bisect_right(self._starts, positions[0]) - 1
            if not self._batch(number).buffers.in_file:
                return self._from_memory(positions, kinds)
            table = self._new_table(number, kinds)
        if table is None:
            return self._others(names, positions)
        if np.count_nonzero(table.filled.take(positions)) < len(positions):
            table.fill(self._missing(table, positions))
        known = self._others(table.others, positions)
        for name, numbers in table.numbers.items():
            known[name] = numbers.column(positions, table.kinds[name])
        ranges = table.starts.take(positions, 1), table.sizes.take(positions, 1)
        return Ranges(source, *ranges, table.decode, known)

    def _new_table(self, number: int, kinds: Mapping[str, FieldType]) -> Table | None:
        """Return a table of these columns, as they are in a batch; None if it is too large."""
        if Table.size_of(kinds, len(self)) > _IN_MEMORY:
            return None
        batch = self._batch(number)
        arrays = batch.arrays(kinds)
        found = {n: located(k, arrays[n], 0, 0, batch.buffers) for n, k in kinds.items()}
        self._planned = table = Table(kinds, found, len(self))
        return table

    def _missing(
        self, table: Table, positions: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, int, dict[str, Located]]]:
        """Yield what a table lacks of the rows at these positions, page by page."""
        missing = positions[~table.filled.take(positions)]
        starts = np.array(self._starts)
        starts = starts[np.searchsorted(starts, missing, "right") - 1]
        for first in np.unique(missing - (missing - starts) % PAGE).tolist():
            number = bisect_right(self._starts, first) - 1
            batch, at = self._batch(number), first - self._starts[number]
            if not batch.buffers.in_file:
                raise ValueError("only some batches are compressed")
            stop = min(at + PAGE, self._rows(number))
            arrays, kinds = batch.arrays(table.kinds), table.kinds.items()
            found = {n: located(k, arrays[n], at, stop, batch.buffers) for n, k in kinds}
            yield first, first + stop - at, found

    def _from_memory(
        self, positions: npt.NDArray[np.int64], kinds: Mapping[str, FieldType]
    ) -> Columns | None:
        """Return columns of decoded batches."""
        numbers = np.searchsorted(self._starts, positions, "right") - 1
        order, found, rows = np.argsort(np.argsort(numbers, kind="stable")), [], []
        for number in np.unique(numbers).tolist():
            batch = self._batch(number)
            if batch.buffers.in_file:
                return None
            found.append(batch.found(kinds))
            rows.append(positions[numbers == number] - self._starts[number])
        others = [name for name, one in found[0].items() if one is None]
        return {**self._others(others, positions), **from_memory(kinds, found, rows, order)}

    def _others(self, names: Collection[str], positions: npt.NDArray[np.int64]) -> Columns:
        """Return columns of values that are read one by one, and the keys if they are not stored.

        Raises ValueError if one is null that would be taken for an absent one.
        """
        columns: Columns = {}
        if not self._keyed:
            columns[KEY] = [numbered_key(self._stem, position) for position in positions.tolist()]
        for name in names:
            kind = self.schema.get(name, Text())
            values = [found.get(row) for found, row in self._find(name, positions)]
            nulls = sum(value is None for value in values)
            if isinstance(kind, Json):
                values = [None if text is None else json.loads(text) for text in values]
            if sum(value is None for value in values) > nulls * kind.optional:
                raise ValueError("it is null, but not absent")
            columns[name] = values
        return columns

    def _rows(self, number: int) -> int:
        """Number of rows of a batch."""
        return self._starts[number + 1] - self._starts[number]

    def _find(self, name: str, positions: npt.NDArray[np.int64]) -> Iterator[tuple[Column, int]]:
        """Yield the column in the page of each sample, and the sample's row in that page."""
        starts, low, high = self._starts, 0, 0
        for position in positions.tolist():
            if not low <= position < high:
                number = bisect_right(starts, position) - 1
                row = position - starts[number]
                found = self._page(number, row, [name])[name]
                low = position - row % PAGE
                high = min(low + PAGE, starts[number + 1])
            yield found, position - low

    def _some(self, name: str, positions: npt.NDArray[np.int64]) -> list[Any] | None:
        """A column's values at these positions; None if one cannot be read or must not be null."""
        kind: FieldType = Text() if name == KEY else self.schema[name]
        with contextlib.suppress(Exception):
            values = [found.get(row) for found, row in self._find(name, positions)]
            if isinstance(kind, Json):
                values = [None if text is None else json.loads(text) for text in values]
            if not self.closed and (kind.optional or all(v is not None for v in values)):
                return values
        return None

    def close(self) -> None:
        super().close()
        self._forget()
        self._planned = None
        DECODED.forget(self._token)
        self._source = None

    def whole_batches(self) -> Iterator[pa.RecordBatch]:
        """Load all batches into memory, one by one."""
        for number in range(len(self._starts) - 1):
            arrays = self._load(number, self._columns.names)
            yield pa.record_batch([arrays[name] for name in self._columns.names], self._columns)

    def _scan(self, names: Collection[str]) -> Iterator[Arrays]:
        """Load some columns into memory, at most a batch at a time."""
        for number in range(len(self._starts) - 1):
            with self._damage("a batch is damaged", number):
                batch, rows = self._batch(number), self._rows(number)
                arrays = batch.arrays(names)
                if not batch.buffers.in_file:
                    yield arrays
                    continue
                widest = max((average_size(array) for array in arrays.values()), default=0)
                step = max(int(min(PAGE, _SCAN // max(widest, 1))), 1)
                for first in range(0, rows, step):
                    stop = min(first + step, rows)
                    yield {n: fetch(a, first, stop, batch.buffers) for n, a in arrays.items()}

    def _check_columns(self) -> None:
        """Raise FormatError unless the columns can hold the fields of the schema."""
        columns = {column.name: column.type for column in self._columns}
        for name, kind in self.schema.items():
            if name not in columns or not fits(kind, columns[name]):
                raise FormatError(
                    "the shard has no column that can hold a field",
                    field=name,
                    expected=f"a column for {kind}",
                    found=str(columns.get(name, ", ".join(columns))),
                    fix="convert shards with different columns separately",
                )

    def _where(self, number: int) -> int | None:
        """Return the byte at which a batch begins; None if it is unknown."""
        return None

    @contextlib.contextmanager
    def _damage(self, what: str, number: int | None = None) -> Iterator[None]:
        """Convert exceptions of pyarrow to a DamagedError that names the file and the batch."""
        try:
            yield
        except ShardkitError as error:
            raise error.located(path=self.path) from error.__cause__
        except Exception as error:
            if isinstance(error, MemoryError | Warning) or os_errors.shortage(error):
                raise
            if self.closed:
                raise ValueError(f"{self.path} is closed") from error
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DamagedError(
                f"{what}: {first_line}",
                path=self.path,
                offset=None if number is None else self._where(number),
                fix="copy the file again, or write it again where it was made",
            ) from error


class Decoded(threading.local):
    """A cache of the latest decoded batches of all readers, per thread and with a size limit."""

    def __init__(self) -> None:
        self._batches: OrderedDict[tuple[object, int], Batch] = OrderedDict()

    def get(self, key: tuple[object, int]) -> Batch | None:
        batch = self._batches.get(key)
        if batch is not None:
            self._batches.move_to_end(key)
        return batch

    def add(self, key: tuple[object, int], batch: Batch) -> None:
        total = sum(batch.size for batch in self._batches.values())
        while self._batches and total > _DECODED:
            total -= self._batches.popitem(last=False)[1].size
        self._batches[key] = batch

    def forget(self, owner: object) -> None:
        for key in [key for key in self._batches if key[0] is owner]:
            del self._batches[key]


DECODED = Decoded()


class Cursor:
    """A file object for pyarrow that reads a source from a current position."""

    closed = False

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._at = 0

    def read(self, size: int) -> bytes:
        data = self._source.read(self._at, max(min(size, self._source.size - self._at), 0))
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._source.size}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        """Do nothing, as the source may have other readers."""


# --- IPC files and streams -----------------------------------------------------------------------


class IpcReader(BatchReader):
    """An Arrow IPC file or stream."""

    def _open(self) -> tuple[pa.Schema, list[int]]:
        self._messages = find_messages(self._opened)
        rows = [batch.rows for batch in self._messages.batches]
        if self._messages.schema is not None:
            return pa.ipc.read_schema(pa.py_buffer(self._messages.schema)), rows
        with self._ipc_file() as file:
            return file.schema, rows

    def _ipc_file(self) -> pa.RecordBatchFileReader:
        source = pa.PythonFile(Cursor(self._opened), mode="r")
        return pa.ipc.open_file(source, options=_OPTIONS)

    def _located(self, number: int) -> Batch | None:
        message = self._messages.batches[number]
        if message.compressed or self._messages.needed[number]:
            return None
        with self._damage("a batch is damaged", number):
            batch, buffers = _located(self._opened, message, self._columns)
        return Batch(lambda names: {name: batch.column(name) for name in names}, buffers)

    def _load(self, number: int, names: Collection[str]) -> Arrays:
        batch = self._decode(number)
        return dict(zip(self._columns.names, batch.columns, strict=True))

    def _decode(self, number: int) -> pa.RecordBatch:
        """Read and decode a whole batch."""
        batch, needed = self._messages.batches[number], self._messages.needed[number]
        messages = []
        for message in (*self._messages.dictionaries[:needed], batch):
            data = self._opened.read(message.offset, message.end - message.offset)
            check_expansion(decompressed_size(memoryview(data)), len(data))
            messages.append(data)
        if self._messages.schema is None:
            with self._ipc_file() as file:
                found = file.get_batch(number)
        else:
            stream = pa.py_buffer(b"".join([self._messages.schema, *messages]))
            with pa.ipc.open_stream(stream, options=_OPTIONS) as reader:
                found = reader.read_next_batch()
        if found.num_rows != batch.rows:
            raise ValueError(f"found {found.num_rows} rows, not {batch.rows} as in the header")
        found.validate()
        return found

    def _extents(self) -> list[tuple[int, int]]:
        return [(batch.offset, batch.end) for batch in self._messages.batches]

    def _known_nulls(self) -> Known:
        """From the headers of the batches."""
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in self._columns.names}
        for batch in self._messages.batches:
            header = memoryview(self._opened.read(batch.offset, batch.body - batch.offset))
            counts = iter(null_counts(header))
            for field in self._columns:
                found[field.name].append(_nulls(field.type, counts))
        nulls = {n: sum(rows for rows, _ in counts) for n, counts in found.items()}
        whole = {n for n, counts in found.items() if not any(every for _, every in counts)}
        return Known({n: int(rows) for n, rows in nulls.items() if not math.isnan(rows)}, whole)

    def sizes(self, field: str) -> npt.NDArray[np.int64]:
        found = [np.zeros(0, np.int64)]
        for number in range(len(self._starts) - 1):
            for first in range(0, self._rows(number), PAGE):
                rows = range(min(PAGE, self._rows(number) - first))
                one = self._page(number, first, [field])[field]
                with self._damage("a column is damaged", number):
                    if one.ranges is not None:
                        found.append(one.ranges.lengths())
                    else:
                        values = [_size(v) for v in map(one.get, rows) if v is not None]
                        found.append(np.array(values, np.int64))
        return np.concatenate(found)

    def _where(self, number: int) -> int | None:
        return self._messages.batches[number].offset


def _size(value: Any) -> int:
    """Stored bytes of a value that is not a byte range."""
    if isinstance(value, list):
        return sum(map(len, value))
    if isinstance(value, bool | int | float):
        return 1 if isinstance(value, bool) else 8
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value.encode() if isinstance(value, str) else value)


def _nulls(stored: pa.DataType, counts: Iterator[int]) -> tuple[float, float]:
    """The number of rows of a column without a value, and the number of its nulls at all levels.

    `counts` yields the nulls of the column's array, then those of its children. NaN if the counts
    are not sufficient, as a dictionary may contain a null.
    """
    if isinstance(stored, pa.BaseExtensionType):
        return _nulls(stored.storage_type, counts)
    count = next(counts, None)
    if count is None:
        raise ValueError("a batch has fewer arrays than its columns need")
    fields = [stored.field(n) for n in range(stored.num_fields)]
    inside = [_nulls(field.type, counts) for field in fields]
    if pa.types.is_dictionary(stored) or pa.types.is_null(stored) or count < 0:
        return math.nan, math.nan
    rows: float = count
    if pa.types.is_struct(stored):  # an image is null if its bytes are
        rows = rows or sum(n for f, (n, _) in zip(fields, inside, strict=True) if f.name == "bytes")
    return rows, count + sum(every for _, every in inside)


# pyarrow is used to locate buffers in the file: it gets the header of a batch, and zeros as its
# body, which it does not read. The address of a buffer within the zeros is its offset in the body.


class _Header:
    """A file object for pyarrow with a message: its header, then zeros as its body."""

    closed = False

    def __init__(self, header: memoryview, zeros: memoryview) -> None:
        self._header, self._zeros = header, zeros

    def read(self, size: int) -> memoryview:
        found, self._header = self._header[:size], self._header[size:]
        return found if len(found) else self._zeros[:size]

    def tell(self) -> int:
        return 0


def _located(
    file: ByteSource, message: Message, columns: pa.Schema
) -> tuple[pa.RecordBatch, Buffers]:
    """A batch whose buffers are zeros, and the object that reads their bytes from the file."""
    zeros = _zeros(max((message.end - message.body).bit_length(), 24))
    front = memoryview(file.read(message.offset, message.body - message.offset))
    source = pa.PythonFile(_Header(front, zeros), mode="r")
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(source), columns)
    if batch.num_rows != message.rows:
        raise ValueError(f"found {batch.num_rows} rows, not {message.rows} as in the header")
    batch.validate()
    return batch, Buffers(file, message.body, zeros)


@functools.cache  # all batches share them
def _zeros(bits: int) -> memoryview:
    """2**bits zeros, which take no memory because they are never written to."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return memoryview(mmap.mmap(-1, 1 << bits, flags=flags, prot=mmap.PROT_READ))
