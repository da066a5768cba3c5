"""The bytes of a file in blocks, decompressed where it is compressed."""

from __future__ import annotations

import functools
import itertools
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import pairwise

from shardkit import storage
from shardkit.codecs.compression import COMPRESSED_BLOCK, decompressed
from shardkit.errors import DamagedError, SampleError, ShardkitError, StorageError
from shardkit.remote.path import RemotePath
from shardkit.remote.store import pool
from shardkit.sources.files import FilePath, changed, unreadable

BLOCK = 1 << 20  # bytes per read
_SMALL = 1 << 16  # bytes of a request for what may be more than is wanted
_AHEAD = 8  # requests of a reader at a time
_EXPANSION_BLOCKS = 32  # that tell how much a file grows


def blocks(
    path: FilePath, size: int, compression: str = "", start: int = 0, end: int | None = None
) -> Iterator[bytes]:
    """The bytes from `start` on of a file that was `size` bytes long when the run was planned.

    Not much behind `end`, if it is given, is requested of an object.

    Raises SampleError for a file that cannot be read or has changed, and where a compressed one is
    damaged, after what lies before the damage.
    """
    if not compression:
        return stored_blocks(path, size, start, BLOCK, end)
    stored = stored_blocks(path, size, 0, COMPRESSED_BLOCK)
    return _decompressed(path, stored, compression)


def expansion(path: FilePath, size: int, compression: str) -> tuple[int, int]:
    """Bytes of the beginning of a compressed file, and how many they make."""
    stored = itertools.islice(stored_blocks(path, size, 0, COMPRESSED_BLOCK), _EXPANSION_BLOCKS)
    made = 0
    try:
        for block in _decompressed(path, stored, compression):
            made += len(block)
    except SampleError:  # the end of the beginning, or damage, which is told when it is read
        pass
    return min(size, _EXPANSION_BLOCKS * COMPRESSED_BLOCK), made


def stored_blocks(
    path: FilePath, size: int, start: int, block: int, end: int | None = None
) -> Iterator[bytes]:
    """The bytes as the file has them, so many at a time."""
    if isinstance(path, RemotePath):
        with _explained(path, size):
            for data in _requested(path, size, start, end):
                for first in range(0, len(data), block):
                    yield data[first : first + block]
        return
    try:
        with open(path, "rb", buffering=0, opener=storage.regular) as file:
            _check_size(path, size, os.fstat(file.fileno()).st_size)
            file.seek(start)
            while start < size:
                data = file.read(min(block, size - start))
                if not data:
                    _check_size(path, size, start)
                start += len(data)
                yield data
    except OSError as error:
        raise unreadable(error, path) from error


def head(path: FilePath, size: int, length: int, version: int) -> bytes:
    """The first bytes of a file; of an object, of this version."""
    if isinstance(path, RemotePath):
        with _explained(path, size):
            return _head(path, min(length, size), version)
    return next(stored_blocks(path, size, 0, length), b"")


@functools.lru_cache(maxsize=1024)
def _head(path: RemotePath, length: int, version: int) -> bytes:
    """Those of an object, which are needed for each of its ranges.

    That they are of the `version` is known once a range was read.
    """
    return path.store.read(path.key, 0, length)


def _requested(path: RemotePath, size: int, start: int, end: int | None) -> Iterator[bytes]:
    """The same of an object, with requests ahead, up to `end` and the rest of a line behind it.

    Whoever asks for little may want no more than the beginning: there the first request is small,
    and there are more and more ahead. More that lies behind `end` is asked for when it is wanted.
    """
    long = end is not None and end - start > BLOCK
    ahead = _AHEAD if long else 1
    end = size if end is None else min(end + _SMALL, size)
    starts = [start, *range(start + (BLOCK if long else _SMALL), end, BLOCK)]
    spans = iter(pairwise([*starts, end]) if start < end else ())
    pending: deque[Future[bytes]] = deque()
    try:
        while True:
            for span in itertools.islice(spans, ahead - len(pending)):
                pending.append(pool().submit(path.store.read, path.key, *span))
            if not pending:
                break
            yield pending.popleft().result()
            ahead = min(2 * ahead, _AHEAD)
        most = _SMALL
        while end < size:
            first, end, most = end, min(end + most, size), min(2 * most, BLOCK)
            yield path.store.read(path.key, first, end)
    finally:
        for future in pending:
            future.cancel()


@contextmanager
def _explained(path: RemotePath, size: int) -> Iterator[None]:
    """Say of an object that it has changed, where that is why it cannot be read."""
    try:
        yield
    except (DamagedError, StorageError, OSError) as error:
        found = _changed(error, path, size)
        if found is None:
            raise
        raise found from error


def _changed(error: Exception, path: RemotePath, size: int) -> ShardkitError | None:
    """The error for an object that is not what it was, if that is why it cannot be read."""
    if isinstance(error, OSError):
        return unreadable(error, path)
    if isinstance(error, DamagedError):
        return changed(path, "another object of that name")
    found = path.store.look(path.key)
    if found is not None and found.size != size:
        return changed(path, f"{found.size:,} bytes", size=size)
    return None


def _check_size(path: FilePath, planned: int, found: int) -> None:
    if found != planned:
        raise changed(path, f"{found:,} bytes", size=planned)


def _decompressed(path: FilePath, stored: Iterator[bytes], compression: str) -> Iterator[bytes]:
    size = 0
    try:
        for data in decompressed(stored, compression):
            size += len(data)
            yield data
    except ValueError as error:
        raise _damaged(path, size, str(error)) from error


def _damaged(path: FilePath, offset: int, reason: str) -> SampleError:
    return SampleError(
        "the compressed file is damaged: what follows in it cannot be read",
        path=path,
        offset=offset,
        found=f"{reason}, after {offset:,} bytes decompressed",
        fix="fetch the file again, or keep what was read by --on-error skip",
    )
