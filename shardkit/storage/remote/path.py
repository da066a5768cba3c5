"""`RemotePath`: a URL that can be used in place of a path."""

from __future__ import annotations

import fnmatch
import os
import posixpath
import re
import stat
import sys
from collections.abc import Generator, Mapping
from pathlib import PosixPath, PurePath, PurePosixPath
from typing import Any, NoReturn

from shardkit.errors import UsageError
from shardkit.storage.remote.client import Cached, Entry, Info, no_object
from shardkit.storage.remote.store import Store

# pathlib merges slashes: a URL that was converted to a Path has only one after the scheme, or none.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?:/+(.*))?", re.DOTALL)
_HUB = re.compile(r"hf://datasets/[^/]*|https?://huggingface\.co/datasets(?:/[^/]+){,2}")


def parsed(path: str | os.PathLike[str]) -> tuple[str, str] | None:
    """Return the scheme of a URL, and what follows the slashes; None for a local path."""
    if isinstance(path, RemotePath):
        return path.store.site.partition("://")[0], str(path).partition("://")[2]
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        several = isinstance(path, list | tuple)
        raise UsageError(
            "a path must be text or a pathlib.Path",
            found=f"{path!r:.100}",
            fix="open each path, and join the datasets with shardkit.concatenate"
            if several
            else "for an open file, or bytes, give its path",
        )
    match = _URL.fullmatch(os.fspath(path))
    return None if match is None else (match[1].lower(), match[2] or "")


def remote_path(scheme: str, rest: str, options: Mapping[str, Any] | None = None) -> RemotePath:
    """The path for a URL. Raises UsageError if the URL does not name an object or a folder."""
    host, _, key = rest.partition("/")
    if "?" in rest or ("#" in rest and scheme in ("http", "https")):
        raise UsageError(
            "a URL with a query or a fragment is not supported",
            found=f"{scheme}://{rest.partition('?')[0].partition('#')[0]}?...",
            fix="give the URL without it, and credentials as storage options",
        )
    if not host:
        raise UsageError(
            "the URL does not name a bucket or server",
            found=f"{scheme}://",
            expected=f"{scheme}://, the name of a bucket or a server, and a path in it",
        )
    if _HUB.fullmatch(f"{scheme}://{rest}".rstrip("/")):
        raise UsageError(
            "the URL does not name a dataset on the Hugging Face Hub",
            found=f"{scheme}://{rest}",
            fix=f"give hf://{key if key.count('/') == 2 else 'datasets/OWNER/NAME'}",
        )
    user, at, bare = host.rpartition("@")
    names_repository = scheme == "github"  # github://owner:name@branch
    if at and (scheme in ("http", "https") or (":" in user and not names_repository)):
        raise UsageError(
            "a URL with a password is not supported, as it would appear in messages and logs",
            found=f"{scheme}://...@{bare}/{key}",
            fix="give credentials as storage options",
        )
    return RemotePath(Store(f"{scheme}://{host}", options), "") / key


class RemoteEntry:
    """One name in a listing: the subset of `os.DirEntry` that is used."""

    def __init__(self, folder: RemotePath, entry: Entry) -> None:
        self.name = entry.name
        self._folder, self._entry = folder, entry

    @property
    def path(self) -> str:
        return str(self._folder / self.name)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._entry.info is None

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._entry.info is not None

    def is_symlink(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return status(self._entry.info)


def status(info: Info | None) -> os.stat_result:
    """Return the metadata of an object as an `os.stat_result`; of a folder, if None.

    `st_mtime_ns`, which is used to detect changes, is the number of the version.
    """
    if info is None:
        return os.stat_result((stat.S_IFDIR, 0, 0, 1, 0, 0, 0, 0, 0, 0))
    numbers = (stat.S_IFREG, 0, 0, 1, 0, 0, info.size, 0, info.modified, 0)
    return os.stat_result(numbers, {"st_mtime_ns": info.number})


class RemotePath(PosixPath):
    """An object or a folder in a store: the subset of `pathlib.Path` that readers need.

    Functions that expect a local file, such as `open`, raise UsageError for it.
    """

    store: Store
    key: str  # of the object in the store

    def __new__(cls, store: Store, key: str) -> RemotePath:
        self = super().__new__(cls, f"{store.site}/{key}")
        self.store, self.key = store, key
        return self

    def __init__(self, store: Store, key: str) -> None:
        if sys.version_info >= (3, 12):
            super().__init__(f"{store.site}/{key}")

    def _at(self, key: str) -> RemotePath:
        return RemotePath(self.store, key.strip("/"))

    def child(self, relative: str) -> RemotePath:
        """The object with this relative name below this folder; the name is not normalized."""
        return RemotePath(self.store, f"{self.key}/{relative}".lstrip("/"))

    def listed(self) -> RemotePath:
        """The same folder as a snapshot: everything in it is listed once, at the first access."""
        from shardkit.storage.remote.listing import ListedStore

        return RemotePath(ListedStore(self.store, self.key), self.key)

    def through(self, pages: Cached) -> RemotePath:
        """Return the same path, with reads through a cache."""
        return RemotePath(self.store.through(pages), self.key)

    # --- names

    def __str__(self) -> str:
        return f"{self.store.site}/{self.key}".rstrip("/")

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __fspath__(self) -> NoReturn:
        raise UsageError(
            "this operation needs a local path",
            found=str(self),
            fix="copy the data to this machine first",
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return RemotePath, (self.store, self.key)

    def __truediv__(self, name: str | os.PathLike[str]) -> RemotePath:
        added = name if isinstance(name, str) else PurePath(name).as_posix()
        return self._at(posixpath.normpath(f"/{self.key}/{added}"))

    def __rtruediv__(self, folder: str | os.PathLike[str]) -> RemotePath:
        return self  # like any absolute path

    @property
    def parent(self) -> RemotePath:
        return self._at(posixpath.dirname(self.key))

    @property
    def parents(self) -> tuple[RemotePath, ...]:
        found = [self]
        while found[-1].key:
            found.append(found[-1].parent)
        return tuple(found[1:])

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def with_suffix(self, suffix: str) -> RemotePath:
        return self.parent / PurePosixPath(self.name).with_suffix(suffix).name

    def relative_to(self, *other: Any, **options: Any) -> PurePosixPath:  # type: ignore[override]
        return PurePosixPath(str(self)).relative_to(str(other[0]))

    def is_relative_to(self, *other: Any) -> bool:
        return other[0] == self or other[0] in self.parents

    def absolute(self) -> RemotePath:
        return self

    def resolve(self, strict: bool = False) -> RemotePath:
        return self

    # --- queries

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Size, time and kind. Raises FileNotFoundError if there is no such object or folder."""
        found = self.store.find(self.key)
        if found is None and not self.store.is_folder(self.key):
            if self.store.lists:
                raise FileNotFoundError(2, os.strerror(2))
            raise no_object(str(self))
        return status(found)

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self.store.find(self.key) is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self.store.is_folder(self.key)

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Generator[RemotePath, None, None]:
        for entry in self.store.entries(self.key):
            yield self / entry.name

    def glob(self, pattern: str, **options: Any) -> Generator[RemotePath, None, None]:
        """Return the entries of this folder whose names match."""
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def scandir(self) -> list[RemoteEntry]:
        """Like `os.scandir`."""
        return [RemoteEntry(self, entry) for entry in self.store.entries(self.key)]

    def read_bytes(self) -> bytes:
        return self.store.read_all(self.key)
