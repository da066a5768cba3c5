"""Walking through a folder tree: hidden entries passed over, links followed, loops noticed."""

from __future__ import annotations

import contextlib
import heapq
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeAlias

from shardkit import storage
from shardkit.errors import ShardkitError, SourceError
from shardkit.manifest import FOLDER
from shardkit.remote.path import RemoteEntry, RemotePath

# What systems leave in archives and on disks.
_DEBRIS = {"__MACOSX", "lost+found", "@eaDir", "$RECYCLE.BIN", "System Volume Information"}
# Listings and looks at files that wait at a time. At 1 ms each that is 32,000 files a second.
_THREADS = 32
_WAITING, _TURN = 1e-4, 2e-5  # seconds for a look that waits; more, for each other thread
_SURE = 3  # listings in a row that wait: a busy machine lets one wait now and then
_EXPECTED = 1000  # files in a folder that is not listed yet
_FEW, _TOGETHER = 16, 64  # files that are looked at with their listing, and by one thread then
NO_FILE = -1  # the size of what is no regular file: a broken link, a pipe


DirEntry: TypeAlias = "os.DirEntry[str] | RemoteEntry"


@contextlib.contextmanager
def scandir(path: Path) -> Iterator[Iterable[DirEntry]]:
    """What a folder holds, on this machine or in a store."""
    if isinstance(path, RemotePath):
        yield path.scandir()
    else:
        with os.scandir(path) as entries:
            yield entries


class Folder(NamedTuple):
    """A folder on the way: path relative to the root, its real path, and the one above it."""

    relative: str
    real: str
    parent: Folder | None

    def ancestors(self) -> Iterator[Folder]:
        folder: Folder | None = self
        while folder is not None:
            yield folder
            folder = folder.parent


class Listing(NamedTuple):
    """What a folder holds: files, and the folders below it."""

    folder: Folder
    files: list[DirEntry]
    folders: list[Folder]


@dataclass
class _Found:
    """A listing with what was met while it was made, in whatever thread."""

    listing: Listing
    ignored: Counter[str] = field(default_factory=Counter)
    problems: list[ShardkitError] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)  # links that lead out of the root
    looks: list[Future[None]] = field(default_factory=list)  # at its files, in other threads


class Walk:
    """One walk through a folder tree; what was passed over, and what went wrong.

    Folders come by the first name in their paths, and then by path as text: one before those in it.
    """

    def __init__(
        self, root: Path, without: str | None = None, looks: Callable[[str], bool] | None = None
    ) -> None:
        """`without` is a file to pass over uncounted; `looks` tells which files to `look` at."""
        self.root = root
        self._without = without
        self._looks = looks
        self.ignored: Counter[str] = Counter()
        self.problems: list[ShardkitError] = []
        self._real = str(root) if isinstance(root, RemotePath) else os.path.realpath(root)
        self._outside = 0  # links that lead out of the root
        self._such_as = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was read from elsewhere: an archive of a stranger may bring such links."""
        if not self._outside:
            return ()
        links = "1 link leads" if self._outside == 1 else f"{self._outside:,} links lead"
        return (f"{links} out of {self.root}, to what is read as well: {self._such_as}",)

    def __iter__(self) -> Iterator[Listing]:
        with ThreadPoolExecutor(_THREADS, "shardkit-list") as pool:  # which start as they are used
            most = 0 if isinstance(self.root, RemotePath) else _THREADS  # a store is listed at once
            pending = _Pending(self._list, self._looks, pool, most)
            pending.add([Folder("", self._real, None)])
            try:
                while (found := pending.next()) is not None:
                    self.ignored += found.ignored
                    self.problems += found.problems
                    self._outside += len(found.outside)
                    if found.outside and not self._such_as:
                        self._such_as = found.outside[0]
                    pending.add(found.listing.folders)
                    yield found.listing
            finally:
                pool.shutdown(cancel_futures=True)

    def _list(self, folder: Folder) -> _Found:
        """The files and the folders in a folder; hidden ones are passed over."""
        found = _Found(Listing(folder, [], []))
        _, files, folders = found.listing
        path = self.root / folder.relative if folder.relative else self.root
        try:
            with scandir(path) as entries:
                for entry in entries:
                    if (words := passed_over(entry.name)) is not None:
                        found.ignored[words] += 1
                    elif self._without and self._without == os.path.join(
                        folder.relative, entry.name
                    ):
                        continue
                    elif is_folder(entry):
                        below = self._below(found, entry)
                        folders += [below] if below else []
                    else:
                        files.append(entry)
                        if entry.is_symlink():  # where it leads first: what that is costs too much
                            target = os.path.join(folder.real, os.readlink(entry.path))
                            self._follow(found, entry, target)
        except OSError as error:
            found.problems.append(storage.explain(error, "list the folder", path))
        return found

    def _below(self, found: _Found, entry: DirEntry) -> Folder | None:
        folder = found.listing.folder
        relative = f"{folder.relative}/{entry.name}" if folder.relative else entry.name
        if not entry.is_symlink():
            return Folder(relative, f"{folder.real}/{entry.name}", folder)
        real = os.path.realpath(entry.path)
        self._follow(found, entry, real)
        if any(real == above.real for above in folder.ancestors()):
            found.problems.append(
                SourceError(
                    "a link leads back to a folder above it: the folders have no end",
                    path=entry.path,
                    found=f"a link to {os.readlink(entry.path)!r}",
                    fix="remove the link",
                )
            )
            return None
        return Folder(relative, real, folder)

    def _follow(self, found: _Found, entry: DirEntry, target: str) -> None:
        if not f"{os.path.normpath(target)}/".startswith(self._real.rstrip("/") + "/"):
            found.outside.append(f"{entry.path} -> {target}")


class _Pending:
    """Folders to be listed, in order, and listings of some that were asked for ahead.

    Where the system makes a listing wait, as a network does, more and more are made in threads.
    """

    def __init__(
        self,
        list_folder: Callable[[Folder], _Found],
        looks: Callable[[str], bool] | None,
        pool: ThreadPoolExecutor,
        most: int,
    ) -> None:
        self._list, self._looks, self._pool, self._most = list_folder, looks, pool, most
        self._later: list[tuple[tuple[str, str], Folder]] = []  # two heaps
        self._asked: list[tuple[tuple[str, str], Future[_Found]]] = []
        self._ahead = 0  # listings that may be asked for
        self._waits = 0  # listings in a row that were waited for
        self._load = 0  # files of those, as far as they are known
        self._changing = threading.Lock()

    def add(self, folders: Iterable[Folder]) -> None:
        for folder in folders:
            key = (folder.relative.partition("/")[0], folder.relative)
            heapq.heappush(self._later, (key, folder))

    def next(self) -> _Found | None:
        """The listing that is next in order; None after the last one."""
        while self._later and self._load < self._ahead * _EXPECTED:
            key, folder = heapq.heappop(self._later)
            self._weigh(_EXPECTED)
            heapq.heappush(self._asked, (key, self._pool.submit(self._listed, folder)))
        if self._asked and (not self._later or self._asked[0][0] < self._later[0][0]):
            found = heapq.heappop(self._asked)[1].result()
        elif self._later:
            self._weigh(_EXPECTED)
            found = self._listed(heapq.heappop(self._later)[1])
        else:
            return None
        self._weigh(-1 - len(found.listing.files))
        for looks in found.looks:
            looks.result()
        return found

    def _weigh(self, more: int) -> None:
        with self._changing:
            self._load += more

    def _listed(self, folder: Folder) -> _Found:
        """A listing, whose files are looked at where that waits, too."""
        began = time.perf_counter()
        found = self._list(folder)
        files = found.listing.files if self._looks else []
        wanted = (entry for entry in files if self._looks and self._looks(entry.name))
        some, asked = [*islice(wanted, _FEW)], 1 + len(found.listing.files) / 20
        if some:
            began, asked = time.perf_counter(), len(some)
            _look_at(some)
        self._judge(began, asked)
        while self._waits and (some := [*islice(wanted, _TOGETHER)]):
            if self._ahead:
                found.looks.append(self._pool.submit(_look_at, some))
                continue
            began = time.perf_counter()
            _look_at(some)
            self._judge(began, len(some))
        self._weigh(1 + len(found.listing.files) - _EXPECTED)
        return found

    def _judge(self, began: float, asked: float) -> None:
        """Find out whether the system makes us wait, from the time for what it was `asked`."""
        # Threads that compute wait for each other, so that of more of them each takes longer.
        waits = time.perf_counter() - began > asked * (_WAITING + _TURN * self._ahead)
        self._waits = self._waits + 1 if waits else 0
        if not waits:
            self._ahead //= 2
        elif self._waits >= _SURE:
            self._ahead = min(2 * self._ahead + 1, self._most)


def _look_at(entries: Iterable[DirEntry]) -> None:
    """Ask the system about files, which their entries remember."""
    for entry in entries:
        with contextlib.suppress(OSError):  # which `look` meets again
            entry.stat()


def passed_over(name: str) -> str | None:
    """What to call a file or folder that is never looked at; None for all others."""
    if name[0] == ".":
        return "hidden"
    return f"{name} folder" if name == FOLDER or name in _DEBRIS else None


def is_folder(entry: DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def look(entry: DirEntry) -> tuple[int, int, int]:
    """Size, time, inode of a file; other entries have NO_FILE, and fail when they are read.

    The time of an object is the number of its version.
    """
    try:
        about = entry.stat()
    except OSError:
        return NO_FILE, 0, 0
    size = about.st_size if stat.S_ISREG(about.st_mode) else NO_FILE
    return size, about.st_mtime_ns, about.st_ino


def relative_to(path: Path, folder: Path) -> str | None:
    """The path relative to a folder that it lies in; None if it lies elsewhere."""
    own, above = str(storage.absolute(path)), str(storage.absolute(folder)).rstrip("/") + "/"
    return own.removeprefix(above) if own.startswith(above) else None


def kind_of_file(name: str) -> str:
    """What to call a file that is passed over, in a list of counts."""
    suffix = name.rpartition(".")[2] if "." in name else ""
    return f".{suffix} file" if suffix else "file without suffix"
