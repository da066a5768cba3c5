"""`Pages`: reads remote files in pages of 1 MiB through a cache, requesting each page once."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeAlias

import xxhash

from shardkit.storage.checksums import count
from shardkit.storage.page_cache import PAGE, PageCache
from shardkit.storage.remote.client import Info
from shardkit.storage.remote.path import RemotePath

_TOGETHER = 16  # maximum number of pages per request
_PAGE_SECONDS = 10.0  # seconds to wait for a page that another process is requesting
_PAUSE = 0.002  # seconds between checks for it

NextUse = Callable[[str, int], float]
_Awaited: TypeAlias = "Future[bytes | None]"  # None: the cache had no room for the page


def file_id(path: RemotePath, info: Info) -> str:
    """Return the name of an object in a cache. It changes if the object is replaced."""
    return xxhash.xxh3_64_hexdigest(f"{path} {info.size} {info.version}".encode())


class Pages:
    """A cache, and the pages that are being requested for it.

    Consecutive pages are requested together. If the cache has no room for a page, only the range
    itself is requested instead. Any thread may read.
    """

    def __init__(self, cache: PageCache, *, scattered: bool = False) -> None:
        """`scattered`: reads are far apart, so that only ranges are requested that are less than
        half of their pages; tables and large samples are still read in pages."""
        self.cache = cache
        self._scattered = scattered
        # Set by a caller that knows the order of reads; by default, the oldest pages are evicted.
        self.next_use: NextUse = lambda file, number: math.inf
        self._files: dict[tuple[str, str], str] = {}  # names in the cache
        self._requested: dict[tuple[str, int], _Awaited] = {}
        _every.add(self)

    def read(self, path: RemotePath, offset: int, length: int) -> bytes:
        """Return the bytes of a range of an object."""
        stop, numbers = offset + length, range(offset // PAGE, count(offset + length))
        if self._scattered:
            end = min(numbers.stop * PAGE, path.store.info(path.key).size)
            if end - numbers.start * PAGE > 2 * length:
                return path.store.read(path.key, offset, stop)
        file = self._file(path)
        spans = {n: (max(offset - n * PAGE, 0), min(stop - n * PAGE, PAGE)) for n in numbers}
        parts = {number: self.cache.get(file, number, *span) for number, span in spans.items()}
        if missing := [number for number, part in parts.items() if part is None]:
            found = self._fetch(path, file, missing)
            left = [number for number in missing if found[number] is None]
            wanted = sum(end - start for start, end in map(spans.__getitem__, left))
            if len(left) > 1 and left[-1] - left[0] < len(left) and 2 * wanted >= len(left) * PAGE:
                found |= _pages_of(path, left)
            for number in missing:
                start, end = spans[number]
                page, at = found[number], number * PAGE
                if page is None:
                    parts[number] = _alone(path, at + start, at + end)
                else:
                    parts[number] = page[start:end]
        return b"".join(part for part in parts.values() if part is not None)

    def add(self, path: RemotePath, number: int, page: bytes) -> None:
        """Put a page into the cache that was read in another way."""
        self.cache.put(self._file(path), number, page, self.next_use, 0)

    def _file(self, path: RemotePath) -> str:
        """Return the name of an object in the cache, computed once."""
        which = path.store.site, path.key
        found = self._files.get(which)
        if found is None:
            found = self._files[which] = file_id(path, path.store.info(path.key))
        return found

    def _fetch(self, path: RemotePath, file: str, numbers: list[int]) -> dict[int, bytes | None]:
        """Request pages that are missing in the cache, and cache them; None: no room in the cache.

        Pages that other threads are requesting are waited for last.
        """
        new: dict[int, _Awaited] = {number: Future() for number in numbers}
        requested = {n: self._requested.setdefault((file, n), future) for n, future in new.items()}
        mine = [number for number in numbers if requested[number] is new[number]]
        found: dict[int, bytes] = {}
        try:
            found = self._request(path, file, mine)
        except BaseException as error:  # threads that wait for these pages raise it as well
            for number in mine:
                new[number].set_exception(error)
            raise
        finally:
            for number in mine:
                if not new[number].done():
                    new[number].set_result(found.get(number))
                self._requested.pop((file, number), None)
        return {number: future.result() for number, future in requested.items()}

    def _request(self, path: RemotePath, file: str, numbers: list[int]) -> dict[int, bytes]:
        """Request pages that no other thread is requesting; other processes may be."""
        found: dict[int, bytes] = {}
        mine = [number for number in numbers if self.cache.claim(file, number)]
        try:
            found = self._came(file, mine)
            run: list[int] = []
            for number in (*(n for n in mine if n not in found), -1):
                if run and (number != run[-1] + 1 or len(run) == _TOGETHER):
                    found |= self._get(path, file, run)
                    run = []
                run.append(number)
        finally:
            for number in mine:
                self.cache.unclaim(file, number)
        for number in set(numbers) - set(mine):
            until = time.monotonic() + _PAGE_SECONDS
            while not self.cache.claim(file, number) and time.monotonic() < until:
                time.sleep(_PAUSE)
            try:
                found |= self._came(file, [number]) or self._get(path, file, [number])
            finally:
                self.cache.unclaim(file, number)
        return found

    def _came(self, file: str, numbers: list[int]) -> dict[int, bytes]:
        """Return those of the pages that have meanwhile been added to the cache."""
        pages = {number: self.cache.get(file, number) for number in numbers}
        return {number: page for number, page in pages.items() if page is not None}

    def _get(self, path: RemotePath, file: str, run: list[int]) -> dict[int, bytes]:
        """Request consecutive pages with one request, as far as the cache has room for them."""
        size = path.store.info(path.key).size
        keep = self.next_use(file, run[0])
        keep = 0 if keep == math.inf else keep  # next use unknown, such as an index: evict oldest
        lengths: list[int] = []
        try:
            for number in run:
                length = min(size - number * PAGE, PAGE)
                if not self.cache.reserve(length, self.next_use, keep):
                    break
                lengths.append(length)
            if not lengths:
                return {}
            pages = _pages_of(path, run[: len(lengths)])
            for number, page in pages.items():
                self.cache.put(file, number, page, self.next_use, keep)
            return pages
        finally:
            for length in lengths:
                self.cache.release(length)


def through(path: Path, pages: Pages | None) -> Path:
    """Return the path, which is read through a cache if it is remote."""
    return path.through(pages) if pages is not None and isinstance(path, RemotePath) else path


def _pages_of(path: RemotePath, numbers: list[int]) -> dict[int, bytes]:
    """Request consecutive pages, with one request."""
    data = path.store.read_pieces(path.key, numbers[0], numbers[-1] + 1)
    return {number: data[n * PAGE : (n + 1) * PAGE] for n, number in enumerate(numbers)}


def _alone(path: RemotePath, start: int, stop: int) -> bytes:
    """Request a range of a page. It can be compared with a digest only if it is the whole page."""
    number, size = start // PAGE, path.store.info(path.key).size
    if (start, stop) == (number * PAGE, min((number + 1) * PAGE, size)):
        return path.store.read_pieces(path.key, number, number + 1)
    return path.store.read(path.key, start, stop)


_every: weakref.WeakSet[Pages] = weakref.WeakSet()


def _after_fork() -> None:
    for pages in list(_every):
        pages._requested.clear()  # the threads that made the requests do not exist here


os.register_at_fork(after_in_child=_after_fork)
