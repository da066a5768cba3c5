"""The one way in which bytes of data are read: ranges of a file, when they are asked for.

Readers of all formats read through a `ByteSource`, and what is small and needed again and again
through a `Table` in it. Nothing is mapped: a file that is cut while it is read gives an error of
ours, where a mapped page would end the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import DamagedError
from shardkit.pieces import PIECE, count
from shardkit.remote.path import RemotePath
from shardkit.remote.store import forget_oldest, pool
from shardkit.storage import explain, explained, regular


class ByteSource(ABC):
    """The bytes of one file, wherever it lies.

    Any thread may read, and a process after a fork. There is no `close`: another thread may be
    reading, so a source is closed when nobody refers to it.
    """

    path: Path  # for people and errors
    size: int  # in bytes, when it was opened

    @property
    def table_bytes(self) -> int:
        """Of a table at most that is read once; a larger one stays in its file."""
        return IN_MEMORY

    @abstractmethod
    def _read(self, offset: int, length: int) -> bytes:
        """The bytes of a range that lies within `size`."""

    def read(self, offset: int, length: int) -> bytes:
        """The `length` bytes from `offset` on; DamagedError where the file ends before them."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise self.ends(offset, length)
        return self._read(offset, length) if length else b""

    def read_ranges(self, ranges: Iterable[tuple[int, int]]) -> list[bytes]:
        """The bytes of several ranges, each an offset and a length, in their order."""
        return [self.read(offset, length) for offset, length in ranges]

    def blocks(self, length: int) -> Iterator[bytes]:
        """All bytes, from front to back, so many at a time."""
        for offset in range(0, self.size, length):
            yield self.read(offset, min(length, self.size - offset))

    def read_rows(self, offsets: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.uint8]:
        """The `length` bytes at each offset: uint8 of shape (offsets, length)."""
        ranges = self.read_ranges((offset, length) for offset in offsets.tolist())
        return np.frombuffer(b"".join(ranges), np.uint8).reshape(len(offsets), length)

    def ends(self, offset: int, length: int) -> DamagedError:
        """The error for a range that the file does not have."""
        return DamagedError(
            "the file ends before the bytes that are to be read",
            path=self.path,
            offset=max(offset, 0),
            expected=f"{length:,} bytes from there",
            found=f"{self.size:,} bytes in all",
        )


class Memory(ByteSource):
    """Bytes that are in memory already."""

    def __init__(self, data: bytes, path: Path) -> None:
        self.path = path
        self.size = len(data)
        self._data = data

    def _read(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]


class Part(ByteSource):
    """Some bytes of another source, such as a file inside a file."""

    def __init__(self, whole: ByteSource, offset: int, size: int) -> None:
        """Raises DamagedError where the other source does not have them."""
        if offset < 0 or offset + size > whole.size:
            raise whole.ends(offset, size)
        self.path, self.size = whole.path, size
        self._whole, self._offset = whole, offset

    def _read(self, offset: int, length: int) -> bytes:
        return self._whole.read(self._offset + offset, length)


def open_source(path: Path) -> ByteSource:
    """The bytes of a file of this machine or of an object in a store."""
    return RemoteFile(path) if isinstance(path, RemotePath) else LocalFile(path)


class RemoteFile(ByteSource):
    """An object in a store, read by whole pieces, which are compared with their digests.

    Without a cache of pages, the latest pieces of all objects of the store are in memory.
    """

    table_bytes = 64 << 20  # a request takes as long as reading a megabyte does

    def __init__(self, path: RemotePath) -> None:
        self.path: RemotePath = path
        with explained("open", path):
            info = path.store.info(path.key)
        self.size = info.size
        if info.pieces is not None:
            info.pieces.ask()

    def _read(self, offset: int, length: int) -> bytes:
        path, stop = self.path, offset + length
        if path.store.pages is not None:
            return path.store.pages.read(path, offset, length)
        latest = path.store.latest
        found = {n: latest.get((path.key, n)) for n in range(offset // PIECE, count(stop))}
        if missing := [number for number, piece in found.items() if piece is None]:
            first, last = missing[0], missing[-1]
            data = path.store.read_pieces(path.key, first, last + 1)
            for number in range(first, last + 1):
                at = (number - first) * PIECE
                found[number] = latest[path.key, number] = data[at : at + PIECE]
            forget_oldest(latest, LATEST)
        pieces = [piece for piece in found.values() if piece is not None]
        start = offset % PIECE
        if len(pieces) == 1:
            return pieces[0][start : start + length]
        pieces[0] = pieces[0][start:]
        pieces[-1] = pieces[-1][: (stop - 1) % PIECE + 1]
        return b"".join(pieces)

    def read_ranges(self, ranges: Iterable[tuple[int, int]]) -> list[bytes]:
        def read(group: list[tuple[int, int]]) -> list[bytes]:
            return [self.read(offset, length) for offset, length in group]

        # Those that begin in one piece are read by one thread, which requests it once.
        groups = [list(group) for _, group in groupby(ranges, lambda pair: pair[0] // PIECE)]
        return [data for found in pool().map(read, groups) for data in found]


class LocalFile(ByteSource):
    """A regular file of this machine, read by pread, which has no position to share."""

    _handle = -1

    def __init__(self, path: Path, handle: int = -1) -> None:
        """`handle`, if given, is an open file to read from, which becomes the source's own."""
        self.path = path
        with explained("open", path):
            self._handle = regular(path, os.O_RDONLY) if handle < 0 else handle
            self.size = os.fstat(self._handle).st_size
        self._number = ctypes.c_int(self._handle)
        self._cached = _preadv2 is not None

    def _read(self, offset: int, length: int) -> bytes:
        if self._cached and length <= _SCRATCH:
            try:
                scratch = _scratches.pop()
            except IndexError:
                scratch = _Scratch()
            there = self._take(scratch, offset, length)
            data: Any = scratch.buffer[:length] if there else None
            _scratches.append(scratch)
            if there:
                return bytes(data)
        return self._wait(offset, length)

    def read_rows(self, offsets: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.uint8]:
        if not length or not len(offsets):
            return np.empty((len(offsets), length), np.uint8)
        if not 0 <= offsets.min() <= offsets.max() <= self.size - length:
            bad = (offsets < 0) | (offsets > self.size - length)
            raise self.ends(int(offsets[bad][0]), length)
        found = np.empty((len(offsets), length), np.uint8)
        target, short = _Target(found.ctypes.data), length <= _SCRATCH
        vector, address = target.vector, found.ctypes.data
        for number, offset in enumerate(offsets.tolist()):
            vector.address = address + number * length
            if not (short and self._cached and self._take(target, offset, length)):
                found[number] = np.frombuffer(self._wait(offset, length), np.uint8)
        return found

    def _take(self, target: _Target, offset: int, length: int) -> bool:
        """Read what the system has in memory; False where the disk would be waited for."""
        target.vector.size = length
        target.offset.value = offset
        found = _preadv2(self._number, target.reference, 1, target.offset, _NO_WAIT)
        if found == length:
            return True
        if found < 0 and ctypes.get_errno() in _CANNOT:
            self._cached = False  # the file system, or the system, cannot do this
        return False

    def _wait(self, offset: int, length: int) -> bytes:
        """Read without the interpreter lock."""
        try:
            data = os.pread(self._handle, length, offset)
            while len(data) < length:  # a signal, or more than the system reads at once
                more = os.pread(self._handle, length - len(data), offset + len(data))
                if not more:
                    raise self._cut(offset, length, len(data))
                data += more
        except OSError as error:
            raise explain(error, "read", self.path).located(offset=offset) from error
        return data

    def _cut(self, offset: int, length: int, found: int) -> DamagedError:
        return DamagedError(
            "the file was cut while it was open",
            path=self.path,
            offset=offset,
            expected=f"{length:,} bytes from here",
            found=f"{found:,} bytes, then the end of the file",
            fix="copy or make the file again; leave files alone while they are read",
        )

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._handle >= 0:
            close(self._handle)


def _cached_reads() -> Any:
    """Linux's preadv2, called without giving the interpreter lock away; None elsewhere.

    To get the lock back can take 5 ms, the time for which another thread may keep it; to copy what
    the system has in memory takes 5 us. Where the disk is to be waited for, preadv2 refuses, and
    os.pread waits without the lock.
    """
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.PyDLL(None, use_errno=True), "preadv2", None)


_preadv2 = _cached_reads()
if _preadv2 is not None:
    _preadv2.restype = ctypes.c_ssize_t
_NO_WAIT = 8  # RWF_NOWAIT, which a Python built with an old libc has no name for
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM)
_SCRATCH = 1 << 17  # bytes of a read at most that may keep the interpreter lock


class _Vector(ctypes.Structure):
    """Memory to read into, as the system takes it (struct iovec)."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Target:
    """What a read of cached bytes is told: made once, as that takes longer than the read."""

    def __init__(self, address: int) -> None:
        self.vector = _Vector(address, 0)
        self.reference = ctypes.byref(self.vector)
        self.offset = ctypes.c_int64()


class _Scratch(_Target):
    """Memory that a range is read into, and copied out of."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_SCRATCH)
        super().__init__(ctypes.addressof(self.buffer))


_scratches: list[_Scratch] = []  # not in use; there are as many as threads ever read at once

_CHUNK = 1 << 14  # records: few enough to stay in the processor's cache
IN_MEMORY = 1 << 20  # bytes up to which a table is read once; larger ones stay in their file
LATEST = 32  # pieces of remote files in memory, of each store


class Table:
    """Records of one size that stand side by side in a source: an index, offsets, lengths.

    A small table is read once. Of a larger one what is asked for is read, so that many open shards
    with long tables take little memory in each process.
    """

    def __init__(self, source: ByteSource, offset: int, count: int, dtype: Any) -> None:
        """Raises DamagedError where the source ends before `count` records of `dtype`."""
        self.dtype = np.dtype(dtype)
        self._offset, self._count, self._record = offset, count, self.dtype.itemsize
        size = count * self._record
        if offset < 0 or count < 0 or offset + size > source.size:
            raise source.ends(offset, size)
        self._data = source.read(offset, size) if size <= source.table_bytes else None
        self._source = None if self._data is not None else source  # else it stays open

    def __len__(self) -> int:
        return self._count

    @property
    def in_memory(self) -> int:
        """Bytes that it takes in memory."""
        return 0 if self._data is None else len(self._data)

    def record(self, number: int, count: int = 1) -> bytes:
        """The bytes of a record, or of `count` that follow one another."""
        at, length = number * self._record, count * self._record
        if self._data is not None:
            return self._data[at : at + length]
        assert self._source is not None
        return self._source.read(self._offset + at, length)

    def slice(self, first: int, stop: int) -> npt.NDArray[Any]:
        """The records from `first` to before `stop`."""
        return np.frombuffer(self.record(first, max(stop - first, 0)), self.dtype)

    def chunks(self) -> Iterator[npt.NDArray[Any]]:
        """All records in order, some at a time."""
        for first in range(0, self._count, _CHUNK):
            yield self.slice(first, min(first + _CHUNK, self._count))

    def take(self, numbers: npt.NDArray[np.int64], count: int = 1) -> npt.NDArray[Any]:
        """The records with these numbers, or `count` from each on: all lie within the table."""
        if self._data is not None:
            wanted = numbers if count == 1 else numbers[:, None] + np.arange(count)
            return np.frombuffer(self._data, self.dtype).take(wanted)
        assert self._source is not None
        rows = self._source.read_rows(self._offset + numbers * self._record, count * self._record)
        found = np.frombuffer(rows, self.dtype)
        return found if count == 1 else found.reshape(-1, count)
