"""A cache of remote data: pages of 1 MiB, in a folder that processes share, or in memory.

The order of all epochs is known in advance, so the cache evicts the page that is needed latest
(Belady's algorithm), not the one that was used least recently.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
import stat
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from shardkit.errors import StorageError, UsageError
from shardkit.helpers import os_errors
from shardkit.helpers.words import parse_size
from shardkit.storage import fs
from shardkit.storage.checksums import PIECE
from shardkit.storage.remote.path import RemotePath

PAGE = PIECE  # bytes: a page is a piece, which has a digest to compare it with
MEMORY_LIMIT = 1 << 30  # default limit of a cache in memory, in bytes

# When a page is needed next: larger is later, infinity is never or unknown. The function must not
# use the cache itself.
NextUse: TypeAlias = Callable[[str, int], float]
_Page: TypeAlias = tuple[str, int]  # a file and the number of a page in it


class PageCache(ABC):
    """Pages of remote files, up to a limit in bytes.

    A page is identified by its file, a name of letters and digits, and its number in it, from 0. An
    object that was replaced is a different file: the name is derived from URL, size and ETag. Any
    thread may use a cache, also in a forked process. An unpickled cache uses the same folder, or
    starts with empty memory.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._used = 0  # bytes; valid while the cache is locked
        self._reserved = 0  # bytes of pages that are being requested by this process
        self._last: list[_Page] = []  # candidates for eviction, the latest-needed at the end
        self._until_ranking = 0  # pages that may be evicted before the next ranking
        _caches.add(self)

    @abstractmethod
    def get(self, file: str, number: int, start: int = 0, stop: int | None = None) -> bytes | None:
        """The bytes of a page, or `[start:stop]` of them (not negative); None if the page is not
        in the cache."""

    @abstractmethod
    def resident(self, file: str, number: int) -> bool:
        """Return whether a page is in the cache. Does not read it."""

    def put(
        self, file: str, number: int, data: bytes, next_use: NextUse, keep: float | None = None
    ) -> bool:
        """Add a page that is needed at `keep` (None: according to `next_use`). Return whether it is
        in the cache now.

        Pages that are needed later are evicted, latest first, and the oldest first among equals.
        Returns False if that frees too little space, the disk is full, or another process holds the
        lock for too long; the data are then used without the cache. If the order of reads is not
        known, let `next_use` return infinity and pass `keep=0`, which evicts the oldest pages.
        Raises StorageError for other failures of the folder, NotFoundError if it was removed.
        """
        if keep is None:
            keep = next_use(file, number)
        size = self._occupied(len(data))
        with self._locked() as locked:
            if locked and self.resident(file, number):
                return True
            room = locked and self._make_room(size, next_use, keep)
            return room and self._store(file, number, data)

    def reserve(self, length: int, next_use: NextUse, keep: float) -> bool:
        """Make room for a page that is about to be requested, and is needed at `keep`.

        Returns False if there is no room. Call `release` after `put`; until then, the room is
        reserved for this process.
        """
        size = self._occupied(length)
        with self._locked() as locked:
            room = locked and self._make_room(size, next_use, keep, self._reserved)
            self._reserved += size if room else 0
            return room

    def _make_room(self, size: int, next_use: NextUse, keep: float, reserved: int = 0) -> bool:
        """Evict pages until `size` bytes have room; False if the rest is needed before `keep`."""
        room = self._room() - reserved  # only once: some systems free the space of files later
        while self._used + size > room:
            page = self._needed_last(next_use, keep) if size <= room else None
            if page is None:
                return False
            self._remove(*page)
        return True

    def release(self, length: int) -> None:
        """Give up the room that was reserved for a page of this length."""
        with self._locked():
            self._reserved -= self._occupied(length)

    def claim(self, file: str, number: int) -> bool:
        """Announce that this process requests a page. Return False if another process does.

        The claim lasts until `unclaim`, or until the process dies.
        """
        return True

    def unclaim(self, file: str, number: int) -> None:
        """Give up a claim, after the page was put into the cache or the request failed."""
        return

    def _needed_last(self, next_use: NextUse, keep: float) -> _Page | None:
        """Return the page to evict next; None if all pages are needed at `keep` or before.

        Ranking all pages is slow, so the end of one ranking is used for several evictions, up to
        1/16 of the number of pages. A page that was used meanwhile is needed later than the ranking
        says; the next ranking takes this into account.
        """
        if self._until_ranking <= 0 or not self._last:
            pages = self._newest_first()
            pages.sort(key=lambda page: next_use(*page))  # stable: the oldest of equals come last
            self._last = pages[-max(len(pages) // 8, 64) :]
            self._until_ranking = len(pages) // 16
        self._until_ranking -= 1
        if not self._last or next_use(*self._last[-1]) <= keep:
            return None
        return self._last.pop()

    @abstractmethod
    def _locked(self) -> contextlib.AbstractContextManager[bool]:
        """Lock the cache against changes by others; False if the lock is held for too long."""

    @abstractmethod
    def _room(self) -> int:
        """Maximum number of bytes that all pages together may take now."""

    @abstractmethod
    def _occupied(self, length: int) -> int:
        """Number of bytes that a page of this length takes."""

    @abstractmethod
    def _newest_first(self) -> list[_Page]:
        """Return all pages, the most recently added first."""

    @abstractmethod
    def _store(self, file: str, number: int, data: bytes) -> bool:
        """Add a page for which there should be room; False if there is none after all."""

    @abstractmethod
    def _remove(self, file: str, number: int) -> None:
        """Remove a page, unless another process has already removed it."""

    @abstractmethod
    def _forked(self) -> None:
        """Called in a forked process, whose only thread this is: reset locks of other threads."""


_caches: weakref.WeakSet[PageCache] = weakref.WeakSet()


def _after_fork() -> None:
    for cache in list(_caches):
        cache._reserved = 0  # the threads that made the requests do not exist here
        cache._forked()


os.register_at_fork(after_in_child=_after_fork)


class MemoryCache(PageCache):
    """Pages in the memory of this process."""

    limit: int

    def __init__(self, limit: int = MEMORY_LIMIT) -> None:
        _check_limit(limit, PAGE)
        super().__init__(limit)
        self._pages: dict[_Page, bytes] = {}  # oldest first
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryCache, (self.limit,)

    def get(self, file: str, number: int, start: int = 0, stop: int | None = None) -> bytes | None:
        data = self._pages.get((file, number))
        return None if data is None else data[start:stop]

    def resident(self, file: str, number: int) -> bool:
        return (file, number) in self._pages

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        with self._lock:
            yield True

    def _room(self) -> int:
        return self.limit

    def _occupied(self, length: int) -> int:
        return length

    def _newest_first(self) -> list[_Page]:
        return list(reversed(self._pages))

    def _store(self, file: str, number: int, data: bytes) -> bool:
        self._used += len(data)
        self._pages[file, number] = bytes(data)
        return True

    def _remove(self, file: str, number: int) -> None:
        self._used -= len(self._pages.pop((file, number)))

    def _forked(self) -> None:
        self._lock = threading.Lock()
        self._used = sum(map(len, self._pages.values()))


# The files of a cache folder. Only the holder of the lock writes, so one temporary name is enough.
_MARK = "shardkit-cache.json"  # marks the folder as a cache
_LOCK = "shardkit-cache.lock"  # locked while the folder is changed; holds the bytes in use
_TEMPORARY = "shardkit-cache.tmp"  # a page that is being written
_CLAIMS = "shardkit-cache.claims"  # empty: one byte is locked for each page being requested
_claims: dict[tuple[int, str], int] = {}  # handles of these files, by process and folder
_PAGE_NAME = re.compile(r"([^\W_]+)-(\d+)\.page", re.ASCII)
_VERSION = {"version": 1}
_CHECKSUM = 8  # bytes of the checksum at the start of a page's file: xxh3-64 of name and data
_BLOCK = 4096  # bytes: file systems allocate space in blocks of this size
_CHANGING = -1  # stored instead of the bytes in use during a change: if found, count again
_SPARE = 1_000_000_000  # bytes of the disk that are left free, or 1/20 of a small disk
_LOCK_SECONDS = 10.0  # seconds to wait for the lock
_MAX_CHECKED = 1 << 16  # maximum number of pages remembered as verified
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FolderCache(PageCache):
    """Pages in a folder, one file each, for all processes of a machine.

    Reading takes no lock, as complete pages are renamed into place and stay readable while they are
    removed. One process at a time writes. The lock file contains the number of bytes in use, or a
    marker while it changes: if a process dies, the system releases its lock, and the next process
    finds the marker, removes what was left and counts again.

    The limit is in bytes on the disk: a page takes whole blocks of 4 KiB. Regardless of the limit,
    1 GB of the disk is left free (5 % of a small disk).
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int | None = None) -> None:
        """Raises UsageError for a non-empty folder that is not a cache, or is not writable."""
        _check_limit(limit, self._occupied(PAGE))
        self._set(os.path.realpath(folder), limit)
        try:
            self._prepare()
        except (StorageError, OSError) as error:
            raise UsageError(
                "the cache folder cannot be used",
                path=folder,
                found=getattr(error, "what", str(error)),
                fix="give a writable folder on this machine",
            ) from error

    def _set(self, folder: str, limit: int | None) -> None:
        super().__init__(limit)
        self.folder = Path(folder)
        self._prefix = os.path.join(folder, "")
        self._temporary = self.folder / _TEMPORARY
        # The files of pages whose checksums this process has compared: inode, size and time.
        self._checked: dict[str, tuple[int, int, int]] = {}
        self._handles: set[int] = set()  # handles of the lock file, one per thread that opened it
        self._patience = _LOCK_SECONDS
        self._turn = threading.Lock()  # only one thread at a time waits for other processes

    def __getstate__(self) -> tuple[str, int | None]:
        return str(self.folder), self.limit

    def __setstate__(self, state: tuple[str, int | None]) -> None:
        self._set(*state)

    def _prepare(self) -> None:
        """Turn the folder into a cache, or check that it is one; clean up after a crash."""
        fs.make_folder(self.folder)
        mark = self.folder / _MARK
        if os.path.lexists(mark):
            version = None
            with contextlib.suppress(ValueError):
                version = None if mark.is_symlink() else json.loads(fs.read(mark, 1000))
            if version != _VERSION:
                raise UsageError(
                    "the cache folder was made by another version of shardkit, or is damaged",
                    path=mark,
                    fix="remove the folder, or give another one",
                )
        else:
            third_party = set(os.listdir(self.folder)) - {_MARK, _LOCK, _TEMPORARY, _CLAIMS}
            if third_party and not mark.exists():  # another process may have made it meanwhile
                raise UsageError(
                    "the cache folder is not empty, and is not a shardkit cache",
                    path=self.folder,
                    found=sorted(third_party)[0],
                    fix="give an empty or new folder",
                )
        with self._locked() as locked:
            if locked:
                if not mark.exists():
                    fs.write_file(self._temporary, json.dumps(_VERSION).encode())
                    fs.rename(self._temporary, mark)
                self._count()  # after a power loss, the number in the file may be wrong
            elif not mark.exists():
                raise StorageError("another process has locked it, or its disk is full")

    def get(self, file: str, number: int, start: int = 0, stop: int | None = None) -> bytes | None:
        path = self._path(file, number)
        try:
            handle, status = fs.regular_with_status(path, os.O_RDONLY | _NO_LINK)
        except OSError as error:
            if os_errors.shortage(error):
                raise os_errors.explain(error, "open", Path(path)) from error
            return None
        found = _identity(status)
        try:
            if stop is not None and 0 <= start <= stop and self._checked.get(path) == found:
                data = os.pread(handle, stop - start, _CHECKSUM + start)
                if len(data) == stop - start:
                    return data
            checksum = os.pread(handle, _CHECKSUM, 0)
            data = os.pread(handle, status.st_size, _CHECKSUM)
        except OSError:  # a disk error
            checksum, data = b"", b""
        finally:
            os.close(handle)
        if checksum_of(file, number, data) != checksum:
            with self._locked() as locked:
                if locked:  # remove a damaged page
                    self._remove(file, number)
            return None
        self._remember(path, found)
        return data if start == 0 and stop is None else data[start:stop]

    def resident(self, file: str, number: int) -> bool:
        return self._size(file, number) > 0

    def claim(self, file: str, number: int) -> bool:
        try:
            fcntl.lockf(self._claims_file(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _byte(file, number))
        except BlockingIOError:
            return False
        except OSError:  # not supported by the file system: pages may be requested twice
            pass
        return True

    def unclaim(self, file: str, number: int) -> None:
        with contextlib.suppress(OSError):
            fcntl.lockf(self._claims_file(), fcntl.LOCK_UN, 1, _byte(file, number))

    def _claims_file(self) -> int:
        """The handle of the file of claims. Never closed, as that would release all claims."""
        which = os.getpid(), self._prefix
        if which not in _claims:
            path = self.folder / _CLAIMS
            with os_errors.explained("lock", path):
                handle = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666)
            if _claims.setdefault(which, handle) != handle:
                os.close(handle)
        return _claims[which]

    def _path(self, file: str, number: int) -> str:
        if not (file.isascii() and file.isalnum()):
            raise ValueError(f"the name of a file in a cache is letters and digits, not {file!r}")
        return f"{self._prefix}{file}-{number:d}.page"

    def _size(self, file: str, number: int) -> int:
        """Number of bytes that a page takes on the disk; 0 if it is missing, or no regular file."""
        try:
            found = os.lstat(self._path(file, number))
        except FileNotFoundError:
            return 0
        return _blocks(found.st_size) if stat.S_ISREG(found.st_mode) else 0

    def _remember(self, path: str, found: tuple[int, int, int]) -> None:
        if len(self._checked) >= _MAX_CHECKED:
            self._checked.clear()
        self._checked[path] = found

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        path = self.folder / _LOCK
        with self._turn:
            # A separate handle for each change, so that the lock also works between threads.
            with os_errors.explained("lock", path):
                handle = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666)
            self._handles.add(handle)
            try:
                locked = self._acquire(handle)
                count = int.from_bytes(os.pread(handle, 8, 0), "little", signed=True)
                if not locked or not self._write_count(handle, _CHANGING):
                    yield False
                    return
                if count > 0:
                    self._used = count
                else:  # a new file, or a process died during a change
                    self._count()
                yield True
                self._write_count(handle, self._used)
            finally:
                self._handles.discard(handle)
                with contextlib.suppress(OSError):  # closing is not enough if a fork has the handle
                    fcntl.flock(handle, fcntl.LOCK_UN)
                os.close(handle)

    def _write_count(self, handle: int, count: int) -> bool:
        """Write the number of bytes in use to the lock file; False if the disk is full."""
        try:
            with os_errors.explained("write", self.folder / _LOCK):
                os.pwrite(handle, count.to_bytes(8, "little", signed=True), 0)
        except StorageError as error:
            if not _full(error):
                raise
            return False
        return True

    def _acquire(self, handle: int) -> bool:
        """Wait for the lock, but only for a limited time: its holder may be suspended."""
        until, delay = time.monotonic() + self._patience, 0.0005
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    self._patience = 0.0
                    return False
            except OSError as error:  # not all file systems have locks
                raise os_errors.explain(error, "lock", self.folder / _LOCK) from error
            else:
                self._patience = _LOCK_SECONDS
                return True
            time.sleep(delay)
            delay = min(2 * delay, 0.01)

    def _forked(self) -> None:
        self._turn = threading.Lock()
        for handle in self._handles:
            os.close(handle)
        self._handles.clear()

    def _count(self) -> None:
        """Count the bytes in use, and remove the temporary file of a process that died."""
        fs.remove(self._temporary)
        self._used = sum(_blocks(found.st_size) for _, found in self._files())

    def _files(self) -> Iterator[tuple[_Page, os.stat_result]]:
        """Yield the pages in the folder. Other files, and symbolic links, are skipped."""
        with os_errors.explained("read", self.folder), os.scandir(self.folder) as entries:
            for entry in entries:
                name = _PAGE_NAME.fullmatch(entry.name)
                if name is not None and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        yield (name[1], int(name[2])), entry.stat(follow_symlinks=False)

    def _newest_first(self) -> list[_Page]:
        ages = sorted(((found.st_mtime_ns, page) for page, found in self._files()), reverse=True)
        return [page for _, page in ages]

    def _room(self) -> int:
        disk = shutil.disk_usage(self.folder)
        most = self._used + disk.free - min(_SPARE, disk.total // 20)
        return most if self.limit is None else min(self.limit, most)

    def _occupied(self, length: int) -> int:
        return _blocks(_CHECKSUM + length)

    def _store(self, file: str, number: int, data: bytes) -> bool:
        path = self._path(file, number)
        if os.path.lexists(path):  # not a regular file, or it would be resident
            return False
        try:
            with fs.create(self._temporary) as new:
                fs.write(new, [checksum_of(file, number, data), data])
                found = _identity(os.fstat(new.fileno()))
        except StorageError as error:
            fs.remove(self._temporary)
            if not _full(error):
                raise
            return False
        fs.rename(self._temporary, Path(path))
        self._used += self._occupied(len(data))
        self._remember(path, found)
        return True

    def _remove(self, file: str, number: int) -> None:
        if size := self._size(file, number):
            fs.remove(Path(self._path(file, number)))
            self._used -= size


def _hash(file: str, number: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{file}-{number}".encode())


def _byte(file: str, number: int) -> int:
    """The byte that is locked for a page. If two pages share a byte, one waits for the other."""
    return _hash(file, number) >> 2


def checksum_of(file: str, number: int, data: bytes) -> bytes:
    """Return the checksum of a page. Another page that takes its place has another one."""
    return xxhash.xxh3_64_digest(data, _hash(file, number))


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _blocks(size: int) -> int:
    return max(math.ceil(size / _BLOCK), 1) * _BLOCK


def _full(error: StorageError) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL


def _check_limit(limit: int | None, least: int) -> None:
    if limit is not None and limit < least:
        raise UsageError(
            "the limit of the cache is too small for a page",
            found=f"{limit:,} bytes",
            expected=f"{least:,} bytes or more",
            fix="give a larger cache_limit, such as 1GB",
        )


def cache_from(
    cache: str | os.PathLike[str] | None = None, cache_limit: int | str | None = None
) -> PageCache:
    """Create a cache in a folder, or in memory. The limit is in bytes, or text such as "200GB".

    Arguments that are None are taken from SHARDKIT_CACHE and SHARDKIT_CACHE_LIMIT. Raises
    UsageError for an invalid folder or limit.
    """
    folder = cache if cache is not None else os.environ.get("SHARDKIT_CACHE") or None
    text = cache_limit if cache_limit is not None else os.environ.get("SHARDKIT_CACHE_LIMIT")
    try:
        limit = None if text is None or text == "" else parse_size(text)
    except UsageError as error:
        what = "invalid size as the limit of the cache (cache_limit, or SHARDKIT_CACHE_LIMIT)"
        raise UsageError(what, found=error.found, expected=error.expected) from error
    if folder is None:
        return MemoryCache(MEMORY_LIMIT if limit is None else limit)
    path = fs.output(folder)
    if isinstance(path, RemotePath):
        raise UsageError("the folder of a cache must be on this machine", found=str(path))
    return FolderCache(path, limit)
