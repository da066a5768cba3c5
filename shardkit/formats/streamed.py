"""A remote file that is read once from front to back, with requests ahead."""

from __future__ import annotations

from concurrent.futures import Future

from shardkit.byte_source import ByteSource, RemoteFile
from shardkit.remote.path import RemotePath
from shardkit.remote.store import pool

_BLOCK = 1 << 20  # bytes of a request
_AHEAD = 8  # requests at a time
_SMALL = 1 << 16  # bytes behind a gap that are read alone: there may be another gap behind them


class Streamed(ByteSource):
    """Reads in blocks, more and more of them ahead. What lies in gaps of a block or more is not
    requested. For one thread, which reads forwards.
    """

    def __init__(self, source: RemoteFile) -> None:
        self.path: RemotePath = source.path
        self.size = source.size
        self._source = source
        self._start = 0  # of what is read without a gap
        self._stop = 0  # of what was read last
        self._ahead = 1
        self._near = (0, b"")  # where what was read alone begins, and its bytes
        self._number, self._data = -1, b""  # the block that is being read
        self._pending: dict[int, Future[bytes]] = {}

    def _read(self, offset: int, length: int) -> bytes:
        if offset > self._stop + _BLOCK:
            self._start, self._ahead = offset, 1
        self._stop = stop = offset + length
        if stop <= self._start + _SMALL:
            return self._alone(offset, length)
        first = offset // _BLOCK
        data = b"".join(self._block(number) for number in range(first, -(-stop // _BLOCK)))
        return data[offset - first * _BLOCK :][:length]

    def _requested(self, start: int, most: int) -> bytes:
        size = min(most, self.size - start)
        if self.path.store.pages is not None:  # by whole pages, for whoever reads them next
            return self._source.read(start, size)
        return self.path.store.read(self.path.key, start, start + size)

    def _alone(self, offset: int, length: int) -> bytes:
        """What lies shortly behind a gap, by a small request for it all."""
        start, data = self._near
        if not start <= offset <= offset + length <= start + len(data):
            start, data = self._near = offset, self._requested(offset, max(length, _SMALL))
        return data[offset - start :][:length]

    def _block(self, number: int) -> bytes:
        if number == self._number:
            return self._data
        for wanted in range(number, min(number + self._ahead, -(-self.size // _BLOCK))):
            if wanted not in self._pending:
                self._pending[wanted] = pool().submit(self._requested, wanted * _BLOCK, _BLOCK)
        for passed in [n for n in self._pending if n < number]:
            del self._pending[passed]
        self._number, self._data = number, self._pending[number].result()
        self._ahead = min(2 * self._ahead, _AHEAD)
        return self._data
