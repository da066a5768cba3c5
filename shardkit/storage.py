"""Every touch of a file system goes through here: create, sync, rename, remove, read.

Paths are local today; URLs can come behind the same functions. Callers write `storage.rename(...)`,
never a name imported from here, so that a test can put a recording or a dying layer underneath.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

from shardkit.errors import NotFoundError, StorageError

# What changes a disk, in the words of the crash tests, which interrupt before and after each.
CHANGES = ("make_folder", "create", "write", "sync", "rename", "remove")

CHECKSUM = "xxh3-128"
_BLOCK = 1 << 20  # bytes per read while hashing


def make_folder(path: Path) -> None:
    """Make a folder and its parents; one that exists is left as it is."""
    with explained("make the folder", path):
        path.mkdir(parents=True, exist_ok=True)


def create(path: Path) -> BinaryIO:
    """A new, empty file, open for unbuffered writing."""
    with explained("create", path):
        return open(path, "wb", buffering=0)


def write(file: BinaryIO, data: bytes | memoryview) -> None:
    """Append all of `data` to a file made by `create`."""
    with explained("write", Path(file.name)):
        view = memoryview(data)
        while view:  # a raw write may take less than it was given
            view = view[file.write(view) :]


def write_file(path: Path, data: bytes) -> None:
    """A whole small file, synced."""
    with create(path) as file:
        write(file, data)
    sync(path)


def sync(path: Path) -> None:
    """Return once a file's bytes, or a folder's entries (creations, renames), are on the disk."""
    with explained("sync", path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def rename(old: Path, new: Path) -> None:
    """Rename at once and wholly: whoever looks sees the old name or the new one."""
    with explained("rename", old):
        os.rename(old, new)


def remove(path: Path) -> None:
    """Remove a file or a whole folder; one that is not there is fine."""
    with explained("remove", path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def read(path: Path) -> bytes:
    """All bytes of a file."""
    with explained("read", path):
        return path.read_bytes()


def read_whole(path: str, size: int | None = None) -> bytes:
    """All bytes of a file, in one system call where its `size` is known; at most one byte more.

    Raises OSError as it comes: this is the inner loop of a conversion, and its caller knows more.
    """
    if size is None:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    handle = os.open(path, os.O_RDONLY)
    try:
        data = os.read(handle, size + 1)
        while 0 < len(data) < size:  # a signal, or more than the system reads at once
            more = os.read(handle, size + 1 - len(data))
            if not more:
                break
            data += more
        return data
    finally:
        os.close(handle)


def checksum(path: Path) -> str:
    """xxh3-128 of a file's bytes, as 32 hex digits."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    with explained("read", path), open(path, "rb", buffering=0) as file:
        while count := file.readinto(view):
            digest.update(view[:count])
    return digest.hexdigest()


@contextlib.contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError into one of our errors that says what was done to which path."""
    try:
        yield
    except OSError as error:
        raise explain(error, doing, path) from error


def explain(error: OSError, doing: str, path: Path) -> StorageError | NotFoundError:
    """The error of ours for an OSError met while `doing` something to `path`."""
    if error.errno == errno.ENOENT:
        return NotFoundError(f"cannot {doing}: there is no such file or folder", path=path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "make space, then run the same command again: it continues where it was"
        try:
            found = f"{shutil.disk_usage(path.parent).free:,} bytes free"
        except OSError:
            found = None
        return StorageError(f"cannot {doing}: the disk is full", path=path, found=found, fix=fix)
    reason = os.strerror(error.errno) if error.errno else str(error)
    return StorageError(f"cannot {doing}: {reason}", path=path)
