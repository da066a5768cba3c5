"""`Pages`: remote files read by pages of 1 MiB through a cache, each page requested once."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import xxhash

from shardkit.page_cache import PAGE, PageCache
from shardkit.remote.path import RemotePath
from shardkit.remote.store import Info

_MOST, _FEWEST = 1 << 28, 64  # bytes of ranges that are read ahead; and ranges, if those are long

NextUse = Callable[[str, int], float]


def file_id(path: RemotePath, info: Info) -> str:
    """The name of an object in a cache: another one where the object was replaced."""
    return xxhash.xxh3_64_hexdigest(f"{path} {info.size} {info.version}".encode())


class Pages:
    """A cache, and the pages that are being requested for it.

    A page for which the cache has no room is not requested: the range that is asked for is read
    alone. Any thread may read.
    """

    def __init__(self, cache: PageCache) -> None:
        self.cache = cache
        # Set by who knows the order of reading; else the oldest pages make room.
        self.next_use: NextUse = lambda file, number: math.inf
        self._requested: dict[tuple[str, int], Future[bytes]] = {}
        # Ranges that are read ahead, the oldest first.
        self._alone: dict[tuple[str, int, int], Future[bytes]] = {}
        self._ahead = threading.local()
        _every.add(self)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """What this thread reads inside of it is read again soon, by another."""
        self._ahead.on = True
        try:
            yield
        finally:
            self._ahead.on = False

    def read(self, path: RemotePath, offset: int, length: int) -> bytes:
        """The bytes of a range of an object."""
        file, stop = file_id(path, path.store.info(path.key)), offset + length
        parts = [
            self._part(path, file, at // PAGE, max(offset, at), min(stop, at + PAGE))
            for at in range(offset - offset % PAGE, stop, PAGE)
        ]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _part(self, path: RemotePath, file: str, number: int, start: int, stop: int) -> bytes:
        """The bytes from `start` to before `stop`, which lie in one page."""
        at = number * PAGE
        data = self.cache.get(file, number, start - at, stop - at)
        if data is not None:
            return data
        mine: Future[bytes] = Future()
        requested = self._requested.setdefault((file, number), mine)
        if requested is not mine:
            page = requested.result()
            # Empty: there was no room for the page.
            return page[start - at : stop - at] if page else self._range(path, file, start, stop)
        page = b""
        try:
            page = self._whole(path, file, number)
        finally:
            mine.set_result(page)
            del self._requested[file, number]
        return page[start - at : stop - at] if page else self._range(path, file, start, stop)

    def _whole(self, path: RemotePath, file: str, number: int) -> bytes:
        """A page, which is put into the cache; b"" where there is no room for it."""
        at = number * PAGE
        keep = self.next_use(file, number)
        keep = 0 if keep == math.inf else keep
        size = min(path.store.info(path.key).size - at, PAGE)
        if not self.cache.reserve(size, self.next_use, keep):
            return b""
        try:
            page = path.store.read(path.key, at, at + size)
            self.cache.put(file, number, page, self.next_use, keep)
        finally:
            self.cache.release(size)
        return page

    def _forked(self) -> None:
        """Called in a new process, without the threads that were making requests."""
        self._requested.clear()
        self._alone.clear()

    def _range(self, path: RemotePath, file: str, start: int, stop: int) -> bytes:
        """A range that is read alone; what was read ahead is used once."""
        which = file, start, stop
        if not getattr(self._ahead, "on", False):
            found = self._alone.pop(which, None)
            data = b"" if found is None else found.result()
            return data or path.store.read(path.key, start, stop)
        mine = self._alone[which] = Future()
        data = b""
        try:
            data = path.store.read(path.key, start, stop)
        finally:
            mine.set_result(data)  # empty: who needs it tries again, and meets the error
            with suppress(RuntimeError, StopIteration):  # another thread does the same
                while len(self._alone) > max(_MOST // (stop - start), _FEWEST):  # left unread
                    self._alone.pop(next(iter(self._alone)), None)
        return data


_every: weakref.WeakSet[Pages] = weakref.WeakSet()


def _after_fork() -> None:
    for pages in list(_every):
        pages._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
