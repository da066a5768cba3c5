"""Prefetches samples over a network, with concurrent requests, while they are read in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from shardkit.sample import Sample

if TYPE_CHECKING:
    from shardkit.helpers.mapped import Sizes

_Readable = TypeVar("_Readable", bound="_Source")
_AHEAD_BYTES = 64 << 20  # of samples that were requested but not read yet


class _Source(Protocol):
    requests: int  # at a time; 0 if samples are not requests

    def __getitem__(self, index: int, /) -> Sample: ...

    def name(self, index: int, /) -> str: ...

    def sizes(self) -> Sizes: ...


class Requested:
    """Wraps a source, and prefetches the next samples while one is read.

    Thread-safe. Each sample can be read only once, roughly in order.
    """

    def __init__(self, source: _Source, pool: ThreadPoolExecutor) -> None:
        self._source, self._pool = source, pool
        self._sizes = source.sizes()
        self._futures: dict[int, Future[Sample]] = {}
        self._next = 0
        self._bytes = 0  # of requested samples
        self._changing = threading.Lock()

    def __getitem__(self, index: int) -> Sample:
        with self._changing:
            while self._next <= index or self._has_room():
                self._futures[self._next] = self._pool.submit(self._source.__getitem__, self._next)
                self._bytes += int(self._sizes[self._next])
                self._next += 1
            self._bytes -= int(self._sizes[index])
            future = self._futures.pop(index)
        return future.result()

    def name(self, index: int) -> str:
        return self._source.name(index)

    def _has_room(self) -> bool:
        few = len(self._futures) < self._source.requests and self._bytes < _AHEAD_BYTES
        return few and self._next < len(self._sizes)


@contextmanager
def requested(source: _Readable) -> Iterator[_Readable | Requested]:
    """The source, to be read in order; prefetched if its samples are network requests."""
    if not source.requests:
        yield source
        return
    with ThreadPoolExecutor(source.requests, "shardkit-request") as pool:
        try:
            yield Requested(source, pool)
        finally:
            pool.shutdown(cancel_futures=True)
