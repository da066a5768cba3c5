"""`Pages`: remote files read by pages of 1 MiB through a cache, each page requested once."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

import xxhash

from shardkit.page_cache import PAGE, PageCache
from shardkit.remote.path import RemotePath
from shardkit.remote.store import Info

_TOGETHER = 8  # pages of one request, at most

NextUse = Callable[[str, int], float]
_Found: TypeAlias = dict[int, bytes]  # pages by number
_Awaited: TypeAlias = "Future[bytes | None]"  # None: the cache has no room for the page


def file_id(path: RemotePath, info: Info) -> str:
    """The name of an object in a cache: another one where the object was replaced."""
    return xxhash.xxh3_64_hexdigest(f"{path} {info.size} {info.version}".encode())


class Pages:
    """A cache, and the pages that are being requested for it.

    Pages of one range come with one request. A page for which the cache has no room is not
    requested: the range that is asked for is read alone. Any thread may read.
    """

    def __init__(self, cache: PageCache) -> None:
        self.cache = cache
        # Set by who knows the order of reading; else the oldest pages make room.
        self.next_use: NextUse = lambda file, number: math.inf
        self._files: dict[tuple[str, str], str] = {}  # names in the cache
        self._requested: dict[tuple[str, int], _Awaited] = {}
        _every.add(self)

    def read(self, path: RemotePath, offset: int, length: int) -> bytes:
        """The bytes of a range of an object."""
        file, stop = self._file(path), offset + length
        parts: list[bytes] = []
        found: _Found = {}
        at = offset
        while at < stop:
            number, start = divmod(at, PAGE)
            end = min(stop - number * PAGE, PAGE)
            data = self.cache.get(file, number, start, end)
            if data is None:
                if number not in found:
                    found = self._found(path, file, number, (stop - 1) // PAGE)
                if number in found:
                    data = found[number][start:end]
                else:
                    data = _alone(path, at, number * PAGE + end)
            parts.append(data)
            at = number * PAGE + end
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def add(self, path: RemotePath, number: int, page: bytes) -> None:
        """Put a page into the cache that was read otherwise."""
        self.cache.put(self._file(path), number, page, self.next_use, 0)

    def _file(self, path: RemotePath) -> str:
        """The name of an object in the cache, made once."""
        which = path.store.site, path.key
        found = self._files.get(which)
        if found is None:
            found = self._files[which] = file_id(path, path.store.info(path.key))
        return found

    def _found(self, path: RemotePath, file: str, number: int, last: int) -> _Found:
        """A page that was not in the cache, maybe with others up to `last`; none without room."""
        mine: _Awaited = Future()
        requested = self._requested.setdefault((file, number), mine)
        if requested is not mine:
            page = requested.result()
            return {} if page is None else {number: page}
        claimed = {number: mine}
        found: _Found = {}
        try:
            came = self.cache.get(file, number)  # a moment ago
            if came is None:
                found = self._request(path, file, claimed, last)
            else:
                found[number] = came
        except BaseException as error:  # whoever waits for the page has it too
            for awaited in claimed.values():
                awaited.set_exception(error)
            raise
        finally:
            for each, awaited in claimed.items():
                if not awaited.done():
                    awaited.set_result(found.get(each))
                self._requested.pop((file, each), None)
        return found

    def _request(
        self, path: RemotePath, file: str, claimed: dict[int, _Awaited], last: int
    ) -> _Found:
        """The page that is claimed, and those behind it that are claimed too, by one request.

        They are put into the cache. Nothing, if it has no room for the page.
        """
        (first,) = claimed
        keep = self.next_use(file, first)
        late = 0 if keep == math.inf else keep  # of an index: the oldest pages make room
        size = path.store.info(path.key).size
        lengths: list[int] = []
        try:
            for number in range(first, min(first + _TOGETHER, last + 1)):
                if number > first and not self._claim(file, number, claimed):
                    break
                length = min(size - number * PAGE, PAGE)
                if not self.cache.reserve(length, self.next_use, late):
                    break
                lengths.append(length)
            if not lengths:
                return {}
            data = path.store.read_pieces(path.key, first, first + len(lengths))
            found = {first + n: data[n * PAGE : (n + 1) * PAGE] for n in range(len(lengths))}
            for number, page in found.items():
                self.cache.put(file, number, page, self.next_use, late)
            return found
        finally:
            for length in lengths:
                self.cache.release(length)

    def _claim(self, file: str, number: int, claimed: dict[int, _Awaited]) -> bool:
        """Whether a page is not in the cache, and this thread is the one that requests it."""
        mine: _Awaited = Future()
        if self._requested.setdefault((file, number), mine) is not mine:
            return False
        claimed[number] = mine
        return not self.cache.resident(file, number)

    def _forked(self) -> None:
        """Called in a new process, without the threads that were making requests."""
        self._requested.clear()


def _alone(path: RemotePath, start: int, stop: int) -> bytes:
    """A range of a page, which can be compared with a digest only if it is the whole page."""
    number, size = start // PAGE, path.store.info(path.key).size
    if (start, stop) == (number * PAGE, min((number + 1) * PAGE, size)):
        return path.store.read_pieces(path.key, number, number + 1)
    return path.store.read(path.key, start, stop)


_every: weakref.WeakSet[Pages] = weakref.WeakSet()


def _after_fork() -> None:
    for pages in list(_every):
        pages._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
