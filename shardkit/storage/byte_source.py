"""`ByteSource`: reads byte ranges of local and remote files on demand.

All format readers read through a `ByteSource`, and small records that are needed repeatedly through
a `Table` in it. Nothing is memory-mapped: if a file is truncated while it is open, reading raises a
ShardkitError, whereas accessing a mapped page would kill the process.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import DamagedError
from shardkit.helpers.extras import not_built
from shardkit.helpers.os_errors import explain, explained
from shardkit.storage import pointers
from shardkit.storage.checksums import PIECE
from shardkit.storage.fs import regular
from shardkit.storage.remote.path import RemotePath
from shardkit.storage.remote.store import pool

reads: ModuleType | None  # the extension `_reads.c`; None if it was not built
MISSING: str | None  # why it is missing
try:
    from shardkit.storage import _reads

    reads, MISSING = _reads, None
except ImportError as error:
    reads, MISSING = None, not_built(error)


class ByteSource(ABC):
    """The bytes of one local or remote file.

    Any thread may read, also in a forked process. There is no `close`, as another thread may be
    reading: a source is closed when the last reference to it is gone.
    """

    path: Path  # for messages
    size: int  # in bytes, when the file was opened

    @property
    def table_bytes(self) -> int:
        """Size up to which a table is read into memory at once; larger ones stay in the file."""
        return IN_MEMORY

    @abstractmethod
    def _read(self, offset: int, length: int) -> bytes:
        """Read a range that lies within `size`."""

    def read(self, offset: int, length: int) -> bytes:
        """Read `length` bytes from `offset` on. Raises DamagedError if the file is too short."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise self.ends(offset, length)
        return self._read(offset, length) if length else b""

    def read_ranges(self, ranges: Iterable[tuple[int, int]]) -> list[bytes]:
        """Read several ranges, given as offset and length, and return their bytes in order."""
        return [self.read(offset, length) for offset, length in ranges]

    def blocks(self, length: int) -> Iterator[bytes]:
        """Read the whole file sequentially, in blocks of this length."""
        for offset in range(0, self.size, length):
            yield self.read(offset, min(length, self.size - offset))

    def read_rows(self, offsets: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.uint8]:
        """Read `length` bytes at each offset, as uint8 of shape (offsets, length)."""
        ranges = self.read_ranges((offset, length) for offset in offsets.tolist())
        return np.frombuffer(b"".join(ranges), np.uint8).reshape(len(offsets), length)

    def ends(self, offset: int, length: int) -> DamagedError:
        """Return the error for a range beyond the end of the file."""
        return DamagedError(
            "the file ends before the requested bytes",
            path=self.path,
            offset=max(offset, 0),
            expected=f"{length:,} bytes from there",
            found=f"{self.size:,} bytes in all",
        )


class Memory(ByteSource):
    """Bytes that are already in memory."""

    def __init__(self, data: bytes, path: Path) -> None:
        self.path = path
        self.size = len(data)
        self._data = data

    def _read(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]


class Subrange(ByteSource):
    """A byte range of another source, such as a file inside an archive."""

    def __init__(self, whole: ByteSource, offset: int, size: int) -> None:
        """Raises DamagedError if the range is not within the other source."""
        if offset < 0 or offset + size > whole.size:
            raise whole.ends(offset, size)
        self.path, self.size = whole.path, size
        self._whole, self._offset = whole, offset

    def _read(self, offset: int, length: int) -> bytes:
        return self._whole.read(self._offset + offset, length)


_PAGE = 1 << 20  # bytes of the largest file that may be an HTML page in place of data


def open_source(path: Path) -> ByteSource:
    """Open a local file or an object in a store."""
    source = RemoteFile(path) if isinstance(path, RemotePath) else LocalFile(path)
    if 0 < source.size <= (_PAGE if isinstance(source, LocalFile) else pointers.MAX_BYTES):
        head = source.read(0, min(source.size, pointers.MAX_BYTES + 1))
        pointers.refuse_pointer(head, path, DamagedError)
        pointers.refuse_html(head, path, DamagedError)
    return source


class RemoteFile(ByteSource):
    """An object in a store, read in whole pieces, which are compared with their digests.

    Without a page cache, the latest pieces of all objects of the store are kept in memory.
    """

    table_bytes = 64 << 20  # the latency of a request is worth about a megabyte

    def __init__(self, path: RemotePath) -> None:
        self.path: RemotePath = path
        with explained("open", path):
            info = path.store.info(path.key)
        self.size = info.size
        if info.pieces is not None:
            info.pieces.ask()
        pages = path.store.pages or path.store.latest
        if pages is None:
            from shardkit.storage.page_cache import MemoryCache  # not needed to read local files
            from shardkit.storage.pages import Pages

            pages = path.store.latest = Pages(MemoryCache(LATEST * PIECE))
        self._pages = pages

    def _read(self, offset: int, length: int) -> bytes:
        return self._pages.read(self.path, offset, length)

    def read_ranges(self, ranges: Iterable[tuple[int, int]]) -> list[bytes]:
        def read(group: list[tuple[int, int]]) -> list[bytes]:
            return [self.read(offset, length) for offset, length in group]

        # Ranges that begin in the same piece are read by one thread, which requests it once.
        groups = [list(group) for _, group in groupby(ranges, lambda pair: pair[0] // PIECE)]
        return [data for found in pool().map(read, groups) for data in found]


class LocalFile(ByteSource):
    """A local regular file, read with pread, so that threads share no file position.

    Reads compare size and time of the file with those at opening, so that bytes of a file that is
    overwritten in place are not mixed with older ones. As this takes a quarter of the time of a
    read, it is done after a read only if the last comparison is `_AGE` ago.
    """

    _handle = -1
    _due = 0.0  # when to compare again

    def __init__(self, path: Path, handle: int = -1) -> None:
        """`handle`: an open file descriptor to read from. The source takes ownership of it."""
        self.path = path
        with explained("open", path):
            self._handle = regular(path, os.O_RDONLY) if handle < 0 else handle
            self._version = version_of(os.fstat(self._handle))
        self.size = self._version[0]

    def read(self, offset: int, length: int) -> bytes:
        data: bytes | None = None
        if reads is not None:
            data = reads.read(self._handle, self.size, offset, length)
        if data is None:
            return super().read(offset, length)
        self.compare_if_due(offset)
        return data

    def _read(self, offset: int, length: int) -> bytes:
        """Read without the extension, or find out why it could not read."""
        data = b""
        try:
            while len(data) < length:  # a signal, or more than one call can read
                more = os.pread(self._handle, length - len(data), offset + len(data))
                if not more:
                    raise self._cut(offset, length, len(data))
                data += more
        except OSError as error:
            raise explain(error, "read", self.path).located(offset=offset) from error
        self.compare_if_due(offset)
        return data

    def read_rows(self, offsets: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.uint8]:
        count, offsets = len(offsets), np.array(offsets, np.int64)
        inside = (offsets >= 0) & (offsets <= self.size - length)
        if reads is None or not count or not inside.all():
            return super().read_rows(offsets, length)
        handles, sizes = np.full(count, self._handle, np.int32), np.full(count, length)
        rows = np.empty((count, length), np.uint8)
        if reads.read_ranges(handles, offsets, sizes, np.arange(count) * length, rows) >= 0:
            return super().read_rows(offsets, length)  # reading them one by one says why
        self.compare_if_due(int(offsets[0]))
        return rows

    @property
    def handle(self) -> int:
        """The file descriptor, valid as long as the source."""
        return self._handle

    def compare_if_due(self, offset: int = 0) -> None:
        """Call `compare`, unless the last comparison was a moment ago."""
        if monotonic() >= self._due:
            self.compare(offset)

    def compare(self, offset: int) -> None:
        """Raise DamagedError if the file was changed since it was opened."""
        with explained("read", self.path):
            now = os.fstat(self._handle)
        if version_of(now) != self._version:
            raise changed(self.path, self._version, now).located(offset=offset)
        self._due = monotonic() + _AGE

    def _cut(self, offset: int, length: int, found: int) -> DamagedError:
        return DamagedError(
            "the file was truncated while it was open",
            path=self.path,
            offset=offset,
            expected=f"{length:,} bytes from here",
            found=f"{found:,} bytes, then the end of the file",
            fix="copy or create the file again; do not change files while they are read",
        )

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._handle >= 0:
            close(self._handle)


def version_of(found: os.stat_result) -> tuple[int, int]:
    """Return what tells versions of a file apart: its size, and its time of change in ns.

    Not its `st_ctime`, which also changes if the file is renamed or linked.
    """
    return found.st_size, found.st_mtime_ns


def changed(path: Path, before: tuple[int, int], now: os.stat_result) -> DamagedError:
    """The error for a file whose size and time were `before` (bytes, ns) when it was opened."""
    size, time = before
    other = now.st_size != size
    return DamagedError(
        "the file was changed while it was open",
        path=path,
        expected=f"{size:,} bytes" if other else f"the time of change {_shown(time)}",
        found=f"{now.st_size:,} bytes" if other else _shown(now.st_mtime_ns),
        fix="open it again; write each new version to a new file, and rename it if it must have"
        " the old name",
    )


def _shown(time: int) -> str:
    """Return a time in ns since 1970, in UTC."""
    return str(np.datetime64(time, "ns"))


_AGE = 0.001  # seconds

_CHUNK = 1 << 14  # records: few enough to stay in the CPU cache
IN_MEMORY = 4 << 20  # size up to which a table is read into memory; larger ones stay in the file
LATEST = 32  # pieces of remote files kept in memory, per store


class Table:
    """Contiguous records of a fixed size in a source, such as an index, offsets or lengths.

    A small table is read into memory at once. From a larger one, only the requested records are
    read, so that many open shards with long tables take little memory in each process.
    """

    def __init__(self, source: ByteSource, offset: int, count: int, dtype: Any) -> None:
        """Raises DamagedError if the source is too short for `count` records of `dtype`."""
        self.dtype = np.dtype(dtype)
        self._offset, self._count, self._record = offset, count, self.dtype.itemsize
        size = count * self._record
        if offset < 0 or count < 0 or offset + size > source.size:
            raise source.ends(offset, size)
        self._data = source.read(offset, size) if size <= source.table_bytes else None
        self._records = np.frombuffer(self._data or b"", self.dtype)
        self._source = None if self._data is not None else source  # kept open only if needed

    def __len__(self) -> int:
        return self._count

    @property
    def in_memory(self) -> int:
        """Number of bytes kept in memory."""
        return 0 if self._data is None else len(self._data)

    def close(self) -> None:
        """Drop the source. Of a table that is not in memory, no records can be read then."""
        self._source = None

    def record(self, number: int, count: int = 1) -> bytes:
        """Return the bytes of a record, or of `count` consecutive ones."""
        at, length = number * self._record, count * self._record
        if self._data is not None:
            return self._data[at : at + length]
        assert self._source is not None
        return self._source.read(self._offset + at, length)

    def slice(self, first: int, stop: int) -> npt.NDArray[Any]:
        """Return the records from `first` to before `stop`."""
        return np.frombuffer(self.record(first, max(stop - first, 0)), self.dtype)

    def chunks(self) -> Iterator[npt.NDArray[Any]]:
        """Yield all records in order, in chunks."""
        for first in range(0, self._count, _CHUNK):
            yield self.slice(first, min(first + _CHUNK, self._count))

    def take(self, numbers: npt.NDArray[np.int64], count: int = 1) -> npt.NDArray[Any]:
        """The records with these numbers, or `count` from each on. They must be in the table."""
        if self._data is not None:
            wanted = numbers if count == 1 else numbers[:, None] + np.arange(count)
            return self._records.take(wanted)
        assert self._source is not None
        rows = self._source.read_rows(self._offset + numbers * self._record, count * self._record)
        found = np.frombuffer(rows, self.dtype)
        return found if count == 1 else found.reshape(-1, count)
