"""Walking through a folder tree: hidden entries passed over, links followed, loops noticed."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from shardkit import storage
from shardkit.errors import ShardkitError, SourceError
from shardkit.manifest import FOLDER
from shardkit.remote.path import RemoteEntry, RemotePath

# What systems leave in archives and on disks.
_DEBRIS = {"__MACOSX", "lost+found", "@eaDir", "$RECYCLE.BIN", "System Volume Information"}
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


class Walk:
    """One walk through a folder tree, in no order; what was passed over, and what went wrong."""

    def __init__(self, root: Path, without: str | None = None) -> None:
        """`without` is a file to pass over uncounted."""
        self.root = root
        self._without = without
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
        pending = [Folder("", self._real, None)]
        while pending:
            listing = self._list(pending.pop())
            pending += listing.folders
            yield listing

    def _list(self, folder: Folder) -> Listing:
        """The files and the folders in a folder; hidden ones are passed over."""
        files, folders = [], []
        path = self.root / folder.relative if folder.relative else self.root
        try:
            with scandir(path) as entries:
                for entry in entries:
                    if (words := passed_over(entry.name)) is not None:
                        self.ignored[words] += 1
                    elif self._without and self._without == os.path.join(
                        folder.relative, entry.name
                    ):
                        continue
                    elif is_folder(entry):
                        below = self._below(folder, entry)
                        folders += [below] if below else []
                    else:
                        files.append(entry)
                        if entry.is_symlink():  # where it leads first: what that is costs too much
                            self._follow(entry, os.path.join(folder.real, os.readlink(entry.path)))
        except OSError as error:
            self.problems.append(storage.explain(error, "list the folder", path))
        return Listing(folder, files, folders)

    def _below(self, folder: Folder, entry: DirEntry) -> Folder | None:
        relative = f"{folder.relative}/{entry.name}" if folder.relative else entry.name
        if not entry.is_symlink():
            return Folder(relative, f"{folder.real}/{entry.name}", folder)
        real = os.path.realpath(entry.path)
        self._follow(entry, real)
        if any(real == above.real for above in folder.ancestors()):
            self.problems.append(
                SourceError(
                    "a link leads back to a folder above it: the folders have no end",
                    path=entry.path,
                    found=f"a link to {os.readlink(entry.path)!r}",
                    fix="remove the link",
                )
            )
            return None
        return Folder(relative, real, folder)

    def _follow(self, entry: DirEntry, target: str) -> None:
        if not f"{os.path.normpath(target)}/".startswith(self._real.rstrip("/") + "/"):
            self._outside += 1
            self._such_as = self._such_as or f"{entry.path} -> {target}"


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
