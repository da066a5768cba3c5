"""Converts errors of the operating system to errors that say what failed, where, and what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shardkit.errors import NotFoundError, StorageError

_TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)
_SHORTAGES = (*_TOO_MANY_OPEN, errno.ENOMEM)


@contextlib.contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """A context that converts an OSError to a ShardkitError that says what failed, and where."""
    try:
        yield
    except OSError as error:
        raise explain(error, doing, path) from error


def explain(error: OSError, doing: str, path: Path) -> StorageError | NotFoundError:
    """Return the ShardkitError for an OSError that occurred while `doing` something to `path`."""
    if isinstance(error, NotFoundError):
        again = error.located()  # a store's own, more specific error; a copy, as it gets a cause
        assert isinstance(again, NotFoundError)
        return again
    if error.errno == errno.ENOENT:
        return NotFoundError(f"cannot {doing}: there is no such file or folder", path=path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_room(error, doing, path)
    if error.errno in _TOO_MANY_OPEN:
        fix = "raise the process's limit with `ulimit -n 65536`, or close what keeps files open"
        if error.errno == errno.ENFILE:
            fix = "close other programs, or raise the system's limit, fs.file-max"
        return StorageError(f"cannot {doing}: {reason(error)}", path=path, fix=fix)
    if error.errno == errno.ENOMEM:
        fix = "use fewer --workers or --threads, or raise the memory limit with `ulimit -v`"
        return StorageError(f"cannot {doing}: memory ran out", path=path, fix=fix)
    return StorageError(f"cannot {doing}: {reason(error)}", path=path)


def _no_room(error: OSError, doing: str, path: Path) -> StorageError:
    """Return the error for a full disk, one without inodes for further files, or a quota."""
    full, fix, found = "the disk is full", "free some space", None
    with contextlib.suppress(OSError, AttributeError):  # Windows has no statvfs
        folder = next((above for above in path.parents if above.exists()), Path.cwd())
        found = f"{shutil.disk_usage(folder).free:,} bytes free"
        about = os.statvfs(folder)
        if about.f_files and not about.f_favail:
            full, found = "the disk has no inodes for more files", f"{found}, 0 inodes free"
            fix = "remove files, of which `df -i` shows the number"
    if error.errno == errno.EDQUOT:
        full, fix, found = "a quota is used up", "remove files, or raise the quota", None
    again = "then run the same command again: it continues where it stopped"
    return StorageError(f"cannot {doing}: {full}", path=path, found=found, fix=f"{fix}, {again}")


def shortage(error: BaseException | None) -> OSError | None:
    """The OSError in an error's chain of causes that means too many open files or no memory."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _SHORTAGES:
            return error
        error = error.__cause__
    return None


def reason(error: OSError) -> str:
    """Return the system's message for an error, or the message from `regular`."""
    return os.strerror(error.errno) if error.errno else str(error)


def temporary_folder() -> Path:
    """Return the folder for temporary files. Raises StorageError if none is writable."""
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise StorageError(
            "no folder for temporary files is writable",
            found=error.strerror,
            fix="free some space, or set TMPDIR to another folder",
        ) from error
