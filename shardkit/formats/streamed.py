"""A remote file that is read once from front to back, with read-ahead."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

from shardkit.helpers.prefetch import growing, prefetch
from shardkit.storage.byte_source import ByteSource, RemoteFile
from shardkit.storage.remote.path import RemotePath
from shardkit.storage.remote.store import pool

_BLOCK = 1 << 20  # bytes of a request
_AHEAD = 8  # most concurrent requests
_SMALL = 1 << 16  # bytes after a gap that get a request of their own, as another gap may follow


class Streamed(ByteSource):
    """Reads in blocks, with a growing number of requests ahead.

    Gaps longer than a block are skipped. For a single thread that reads forwards.
    """

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
            return self._alone(offset, length)
        first = offset // _BLOCK
        data = b"".join(self._block(number) for number in range(first, -(-stop // _BLOCK)))
        return data[offset - first * _BLOCK :][:length]

    def _requested(self, start: int, most: int) -> bytes:
        size = min(most, self.size - start)
        if self.path.store.pages is not None:  # read whole pages, which are cached
            return self._source.read(start, size)
        return self.path.store.read(self.path.key, start, start + size)

    def _alone(self, offset: int, length: int) -> bytes:
        """Bytes shortly after a gap, from one small request."""
        start, data = self._near
        if not start <= offset <= offset + length <= start + len(data):
            start, data = self._near = offset, self._requested(offset, max(length, _SMALL))
        return data[offset - start :][:length]

    def _block(self, number: int) -> bytes:
        if self._number < 0 or number < self._number:
            numbers = range(number, -(-self.size // _BLOCK))
            self._next = prefetch(numbers, self._submitted, growing(1, _AHEAD))
            self._number = number - 1
        if self._number < number:
            steps, self._number = number - self._number, -1  # starts again if reading fails
            for _ in range(steps):
                future = next(self._next)
            self._number, self._data = number, future.result()
        return self._data

    def _submitted(self, number: int) -> Future[bytes]:
        return pool().submit(self._requested, number * _BLOCK, _BLOCK)
