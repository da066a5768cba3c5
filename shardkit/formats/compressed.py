"""Shards that are read once from front to back: compressed ones, and remote ones without an index.

Compressed shards are unpacked to temporary files while they are open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from weakref import WeakValueDictionary

from shardkit.codecs.compression import COMPRESSED_BLOCK, compression_of, unpacked
from shardkit.errors import warn
from shardkit.helpers import os_errors
from shardkit.helpers.prefetch import growing, prefetch
from shardkit.storage.byte_source import ByteSource, RemoteFile, open_source
from shardkit.storage.remote.path import RemotePath
from shardkit.storage.remote.store import pool

_MAGIC = 12  # bytes that identify the compression of a file
_BLOCK = 1 << 20  # bytes of a request
_AHEAD = 8  # most concurrent requests
_SMALL = 1 << 16  # bytes after a gap that get a request of their own, as another gap may follow


# The unpacked shards that are open in this process, by path, size and modification time.
_open: WeakValueDictionary[tuple[Path, int, float], ByteSource] = WeakValueDictionary()


def opened(
    path: Path, kind: str, to: str, is_plain: Callable[[bytes], bool] = lambda head: False
) -> tuple[ByteSource, int]:
    """Return the bytes of a shard, and the size of its temporary file: 0 if it is not compressed.

    The temporary file has no name: the system removes it when it is closed or the process ends.
    `kind`: what the shard is called in messages; `to`: the format to convert it to.
    `is_plain` tells from the first bytes that a file is not compressed, whatever they look like.
    """
    source = open_source(path)
    head = source.read(0, min(_MAGIC, source.size))
    if is_plain(head) or not compression_of(head):
        return source, 0
    warn(
        f"compressed {kind}s in {path.parent} are unpacked to temporary files in"
        f" {os_errors.temporary_folder()} while they are open; for fast random access, convert"
        f" them once: shardkit convert ... --to {to}"
    )
    with os_errors.explained("open", path):
        which = path, source.size, path.stat().st_mtime
    source = _open.get(which) or _unpacked(source, f"a compressed {kind}")
    _open[which] = source
    return source, source.size


def _unpacked(source: ByteSource, what: str) -> ByteSource:
    """Return the decompressed bytes of a compressed shard."""
    compression = compression_of(source.read(0, _MAGIC))
    blocks = read_ahead(source).blocks(COMPRESSED_BLOCK)
    return unpacked(source.path, blocks, compression, what)


def read_ahead(source: ByteSource) -> ByteSource:
    """Return the same bytes, for a single thread that reads them forwards."""
    return _ReadAhead(source) if isinstance(source, RemoteFile) else source


class _ReadAhead(ByteSource):
    """Reads in blocks, with a growing number of requests ahead; skips gaps longer than a block."""

    def __init__(self, source: RemoteFile) -> None:
        self.path: RemotePath = source.path
        self.size = source.size
        self._source = source
        self._start = 0  # where the current run of reads without a gap began
        self._stop = 0  # end of the last read
        self._near = (0, b"")  # offset and bytes of the small request after a gap
        self._number, self._data = -1, b""  # the current block
        self._next: Iterator[Future[bytes]] = iter(())  # the blocks after it

    def _read(self, offset: int, length: int) -> bytes:
        if offset > self._stop + _BLOCK:
            self._start, self._number = offset, -1
        self._stop = stop = offset + length
        if stop <= self._start + _SMALL:
            start, data = self._near
            if not start <= offset <= stop <= start + len(data):
                start, data = self._near = offset, self._requested(offset, max(length, _SMALL))
            return data[offset - start :][:length]
        first = offset // _BLOCK
        data = b"".join(self._block(number) for number in range(first, -(-stop // _BLOCK)))
        return data[offset - first * _BLOCK :][:length]

    def _requested(self, start: int, most: int) -> bytes:
        size = min(most, self.size - start)
        if self.path.store.pages is not None:  # read whole pages, which are cached
            return self._source.read(start, size)
        return self.path.store.read(self.path.key, start, start + size)

    def _block(self, number: int) -> bytes:
        if self._number < 0 or number < self._number:
            self._next = prefetch(
                range(number, -(-self.size // _BLOCK)),
                lambda n: pool().submit(self._requested, n * _BLOCK, _BLOCK),
                growing(1, _AHEAD),
            )
            self._number = number - 1
        if self._number < number:
            steps, self._number = number - self._number, -1  # starts again if reading fails
            for _ in range(steps):
                future = next(self._next)
            self._number, self._data = number, future.result()
        return self._data
