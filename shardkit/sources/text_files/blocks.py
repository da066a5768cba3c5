"""Read the bytes of a file block by block, decompressing them if necessary."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shardkit.codecs.compression import COMPRESSED_BLOCK, decompressed
from shardkit.errors import DamagedError, SampleError, SourceError, StorageError
from shardkit.helpers.prefetch import growing, prefetch
from shardkit.sources.files import FilePath, changed, unreadable
from shardkit.storage import fs, pointers
from shardkit.storage.remote.path import RemotePath
from shardkit.storage.remote.store import pool

BLOCK = 1 << 20  # bytes per read
_SMALL = 1 << 16  # bytes of a request when the reader may need only a little
_AHEAD = 8  # concurrent requests per reader
_HOLE = 4096  # NUL bytes that are no text: a page of a file that was never written
_EXPANSION_BLOCKS = 32  # blocks from which the compression ratio is estimated


def blocks(
    path: FilePath, size: int, compression: str = "", start: int = 0, end: int | None = None
) -> Iterator[bytes]:
    """Yield the bytes from `start` on of a file that had `size` bytes when the run was planned.

    If `end` is given, little beyond it is requested from an object store.

    Raises SampleError if the file cannot be read or has changed, and SourceError for a block of
    zeros, as a sparse file has. For a damaged compressed file, the bytes before the damage are
    yielded first.
    """
    if compression:
        found = _decompressed(path, stored_blocks(path, size, 0, COMPRESSED_BLOCK), compression)
    else:
        found = stored_blocks(path, size, start, BLOCK, end)
    at, zeros = start, 0  # the zeros at the end of the previous block
    for block in found:
        if block[:1] == b"\0" and len(block) >= _HOLE and not block.strip(b"\0"):
            raise SourceError(
                "the file holds NUL bytes instead of text, as after a crash or an unfinished"
                " download",
                path=path,
                offset=at - zeros,
                fix="copy the file again from an intact copy, or move it away",
            )
        zeros = len(block) - len(block.rstrip(b"\0")) if block[-1:] == b"\0" else 0
        at += len(block)
        yield block


def expansion(path: FilePath, size: int, compression: str) -> tuple[int, int]:
    """Return how many bytes at the start of a compressed file were read, and their full size."""
    stored = itertools.islice(stored_blocks(path, size, 0, COMPRESSED_BLOCK), _EXPANSION_BLOCKS)
    made = 0
    with suppress(SampleError):  # cut off after the blocks above, or damaged: reading reports it
        for block in _decompressed(path, stored, compression):
            made += len(block)
    return min(size, _EXPANSION_BLOCKS * COMPRESSED_BLOCK), made


def stored_blocks(
    path: FilePath, size: int, start: int, block: int, end: int | None = None
) -> Iterator[bytes]:
    """Yield the bytes as stored in the file, at most `block` at a time."""
    with _explained(path, size):
        if isinstance(path, RemotePath):
            found = _requested(path, size, start, end)
        else:
            found = _read(path, size, start, block)
        for data in found:
            if size <= pointers.MAX_BYTES and not start:
                pointers.refuse_pointer(data, path, SampleError)
            for first in range(0, len(data), block):
                yield data[first : first + block]


def _read(path: str, size: int, start: int, block: int) -> Iterator[bytes]:
    with open(path, "rb", buffering=0, opener=fs.regular) as file:
        found = os.fstat(file.fileno()).st_size
        file.seek(start)
        while found == size and start < size:
            data = file.read(min(block, size - start))
            if not data:
                found = start
            start += len(data)
            yield data
    if found != size:
        raise changed(path, f"{found:,} bytes", size=size)


def head(path: FilePath, size: int, length: int, version: int) -> bytes:
    """Return the first bytes of a file; those of an object are cached per version."""
    if isinstance(path, RemotePath):
        with _explained(path, size):
            return _head(path, min(length, size), version)
    return next(stored_blocks(path, size, 0, length), b"")


@functools.lru_cache(maxsize=1024)  # each range of an object needs them, and checks the version
def _head(path: RemotePath, length: int, version: int) -> bytes:
    return path.store.read(path.key, 0, length)


def _requested(path: RemotePath, size: int, start: int, end: int | None) -> Iterator[bytes]:
    """Yield the bytes of an object, prefetching up to `end` and the rest of the line after it.

    A reader of a short range may stop early: then the first request is small, and the number of
    concurrent requests grows. Bytes further beyond `end` are requested only on demand.
    """
    long = end is not None and end - start > BLOCK
    end = size if end is None else min(end + _SMALL, size)
    starts = [start, *range(start + (BLOCK if long else _SMALL), end, BLOCK)]
    requests = prefetch(
        itertools.pairwise([*starts, end]) if start < end else (),
        lambda span: pool().submit(path.store.read, path.key, *span),
        growing(_AHEAD if long else 1, _AHEAD),
    )
    for request in requests:
        yield request.result()
    for first in range(end, size, BLOCK):
        yield path.store.read(path.key, first, min(first + BLOCK, size))


@contextmanager
def _explained(path: FilePath, size: int) -> Iterator[None]:
    """If reading a file fails because it has changed, raise an error that says so."""
    try:
        yield
    except OSError as error:
        raise unreadable(error, path) from error
    except (DamagedError, StorageError) as error:
        if isinstance(path, RemotePath) and isinstance(error, DamagedError):
            raise changed(path, "another object of that name") from error
        found = path.store.look(path.key) if isinstance(path, RemotePath) else None
        if found is None or found.size == size:
            raise
        raise changed(path, f"{found.size:,} bytes", size=size) from error


def _decompressed(path: FilePath, stored: Iterator[bytes], compression: str) -> Iterator[bytes]:
    size = 0
    try:
        for data in decompressed(stored, compression):
            size += len(data)
            yield data
    except ValueError as error:
        raise SampleError(
            "the compressed file is damaged: the rest of it cannot be read",
            path=path,
            offset=size,
            found=f"{error}, after {size:,} bytes decompressed",
            fix="download the file again, or use --on-error skip to keep what was read",
        ) from error
