"""Walks a folder tree: skips hidden entries, follows symbolic links, and detects loops."""

from __future__ import annotations

import contextlib
import heapq
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeAlias

from shardkit.errors import ShardkitError, SourceError
from shardkit.helpers import os_errors
from shardkit.storage import fs
from shardkit.storage.remote.client import MANIFEST
from shardkit.storage.remote.path import RemoteEntry, RemotePath

# Folders that operating systems leave in archives and on disks.
_DEBRIS = {"__MACOSX", "lost+found", "@eaDir", "$RECYCLE.BIN", "System Volume Information"}
# Concurrent listings and stat calls. With a latency of 1 ms, that is 32,000 files per second.
_THREADS = 32
_FILES_AHEAD = 1 << 15  # files in listings that are made ahead
_WAITING, _TURN = 1e-4, 2e-5  # seconds from which a call counts as slow, and more per other thread
_FEW, _TOGETHER = 16, 64  # files on which stat is called with their listing, and then per job
NO_FILE = -1  # the size of anything but a regular file, such as a broken link or a pipe


DirEntry: TypeAlias = "os.DirEntry[str] | RemoteEntry"


@contextlib.contextmanager
def scandir(path: Path) -> Iterator[Iterable[DirEntry]]:
    """A context with the entries of a folder, local or in a store."""
    if isinstance(path, RemotePath):
        yield path.scandir()
    else:
        with os.scandir(path) as entries:
            yield entries


class Folder(NamedTuple):
    """A folder in the tree: its path relative to the root, its real path, and its parent."""

    relative: str
    real: str
    parent: Folder | None


class Listing(NamedTuple):
    """The contents of a folder: its files and its subfolders."""

    folder: Folder
    files: list[DirEntry]
    folders: list[Folder]


@dataclass
class _Found:
    """A listing, and what was found while it was made; created in any thread."""

    listing: Listing
    ignored: Counter[str] = field(default_factory=Counter)
    problems: list[ShardkitError] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)  # links that lead out of the root
    looks: list[Future[None]] = field(default_factory=list)  # pending stat calls on its files


class Walk:
    """One walk through a folder tree; records what was ignored, and what went wrong.

    Folders are sorted by the first part of their paths, and then by path as text, so that a folder
    precedes its subfolders. If listings are slow, as on a network file system, more and more of
    them are made ahead, in threads.
    """

    def __init__(
        self, root: Path, without: str | None = None, looks: Callable[[str], bool] | None = None
    ) -> None:
        """`without` is a file to skip without counting it. `looks` selects files, by name, whose
        stat is needed, so that it can be prefetched."""
        self.root = root
        self._without = without
        self._looks = looks
        self.ignored: Counter[str] = Counter()
        self.problems: list[ShardkitError] = []
        self._real = str(root) if isinstance(root, RemotePath) else os.path.realpath(root)
        self._most = 0 if isinstance(root, RemotePath) else _THREADS  # a store lists all at once
        self._ahead = 0  # listings that may be made ahead
        self._slow = 0  # consecutive slow calls
        self._outside = 0  # links that lead out of the root
        self._such_as = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on links that lead out of the root; an untrusted archive may contain such links."""
        if not self._outside:
            return ()
        links = "1 link leads" if self._outside == 1 else f"{self._outside:,} links lead"
        return (f"{links} out of {self.root}, to data that are read as well: {self._such_as}",)

    def __iter__(self) -> Iterator[Listing]:
        with ThreadPoolExecutor(_THREADS, "shardkit-list") as pool:  # starts threads on demand
            try:
                for found in self._in_order(pool):
                    for looks in found.looks:
                        looks.result()
                    self.ignored += found.ignored
                    self.problems += found.problems
                    self._outside += len(found.outside)
                    if found.outside and not self._such_as:
                        self._such_as = found.outside[0]
                    yield found.listing
            finally:
                pool.shutdown(cancel_futures=True)

    def _in_order(self, pool: ThreadPoolExecutor) -> Iterator[_Found]:
        later = [(("", ""), Folder("", self._real, None))]  # a heap, as is the next
        started: list[tuple[tuple[str, str], Future[_Found]]] = []
        files = 0  # in the last listing: the next are assumed to be as long
        while later or started:
            while later and len(started) < min(self._ahead, _FILES_AHEAD // (files + 1)):
                key, folder = heapq.heappop(later)
                heapq.heappush(started, (key, pool.submit(self._listed, folder, pool)))
            if started and (not later or started[0][0] < later[0][0]):
                found = heapq.heappop(started)[1].result()
            else:
                found = self._listed(heapq.heappop(later)[1], pool)
            files = len(found.listing.files)
            for below in found.listing.folders:
                heapq.heappush(later, ((below.relative.partition("/")[0], below.relative), below))
            yield found

    def _listed(self, folder: Folder, pool: ThreadPoolExecutor) -> _Found:
        """List a folder, and prefetch the stat of its files if that is slow."""
        began = time.perf_counter()
        found = self._list(folder)
        files, looks = found.listing.files, self._looks
        self._judge(began, 1 + len(files) / 20)
        wanted = (entry for entry in files if looks is not None and looks(entry.name))
        some = [*islice(wanted, _FEW)]
        while some:
            if self._ahead:
                found.looks.append(pool.submit(_look_at, some))
            else:
                began = time.perf_counter()
                _look_at(some)
                self._judge(began, len(some))
            some = [*islice(wanted, _TOGETHER)] if self._slow else []
        return found

    def _judge(self, began: float, calls: float) -> None:
        """Decide whether the file system is slow, from the time that so many calls took."""
        # Threads compete for the interpreter lock, so each is slower the more there are.
        slow = time.perf_counter() - began > calls * (_WAITING + _TURN * self._ahead)
        self._slow = self._slow + 1 if slow else 0
        if not slow:
            self._ahead //= 2
        elif self._slow > 2:  # a busy machine may delay one
            self._ahead = min(2 * self._ahead + 1, self._most)

    def _list(self, folder: Folder) -> _Found:
        """List the files and subfolders of a folder; hidden ones are skipped."""
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
                        if entry.is_symlink():  # follow only one link: resolving all is too slow
                            target = os.path.join(folder.real, os.readlink(entry.path))
                            self._follow(found, entry, target)
        except OSError as error:
            found.problems.append(os_errors.explain(error, "list the folder", path))
        return found

    def _below(self, found: _Found, entry: DirEntry) -> Folder | None:
        folder = found.listing.folder
        relative = f"{folder.relative}/{entry.name}" if folder.relative else entry.name
        if not entry.is_symlink():
            return Folder(relative, f"{folder.real}/{entry.name}", folder)
        real = os.path.realpath(entry.path)
        self._follow(found, entry, real)
        above: Folder | None = folder
        while above is not None and above.real != real:
            above = above.parent
        if above is not None:
            found.problems.append(
                SourceError(
                    "a symbolic link leads back to a folder above it, which makes an endless loop",
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


def _look_at(entries: Iterable[DirEntry]) -> None:
    """Call stat on files. The entries cache the results."""
    for entry in entries:
        with contextlib.suppress(OSError):  # `look` will get the same error
            entry.stat()


def passed_over(name: str) -> str | None:
    """The kind of a file or folder that is always ignored, for counts; None for all others."""
    if name[0] == ".":
        return "file that is only in iCloud" if name.endswith(".icloud") else "hidden"
    return f"{name} folder" if name == MANIFEST.split("/")[0] or name in _DEBRIS else None


def is_folder(entry: DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # such as a link to itself
        return False


def look(entry: DirEntry) -> tuple[int, int, int]:
    """Size, modification time and inode of a file. The size of other entries, which cannot be
    read, is NO_FILE. The time of an object in a store is a number for its version.
    """
    try:
        about = entry.stat()
    except OSError:
        return NO_FILE, 0, 0
    size = about.st_size if stat.S_ISREG(about.st_mode) else NO_FILE
    return size, about.st_mtime_ns, about.st_ino


def relative_to(path: Path, folder: Path) -> str | None:
    """Return the path relative to a folder that contains it; None if the folder does not."""
    own, above = str(fs.absolute(path)), str(fs.absolute(folder)).rstrip("/") + "/"
    return own.removeprefix(above) if own.startswith(above) else None


def kind_of_file(name: str) -> str:
    """Return the kind of an ignored file, for counts."""
    suffix = name.rpartition(".")[2] if "." in name else ""
    return f".{suffix} file" if suffix else "file without suffix"
