"""A lock that keeps other runs out of a folder."""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from pathlib import Path

from shardkit import storage
from shardkit.conversion.target import not_ours
from shardkit.errors import OutputError, ShardkitWarning

LOCK = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
UNLOCKED = -1


def lock(folder: Path) -> int | None:
    """Keep other runs out until the handle is closed or the process ends.

    None if the folder was removed by its last run meanwhile; -1 on systems without such locks, and
    with a warning on file systems without them, as Lustre and NFS may be.
    """
    try:
        import fcntl
    except ImportError:
        return UNLOCKED
    handle = _opened(folder / LOCK)
    if handle is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(handle).st_ino == os.stat(folder / LOCK).st_ino:
                return handle
        os.close(handle)
        return None
    except BlockingIOError:
        os.close(handle)
        raise OutputError(
            "another run is working on this output",
            path=folder,
            fix="wait for it, or give another output with -o",
        ) from None
    except OSError as error:
        os.close(handle)
        if error.errno not in _NO_LOCKS:
            raise storage.explain(error, "lock", folder / LOCK) from error
        warnings.warn(
            f"the file system of {folder} has no locks ({os.strerror(error.errno)}): make sure that"
            " no other run writes to the same output",
            ShardkitWarning,
            stacklevel=2,
        )
        return UNLOCKED


def _opened(path: Path) -> int | None:
    """The file of the lock, made if need be; None where its folder is gone."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise not_ours(path, "a link") from error
        raise storage.explain(error, "create", path) from error


def unlock(handle: int | None) -> None:
    if handle is not None and handle != UNLOCKED:
        os.close(handle)
