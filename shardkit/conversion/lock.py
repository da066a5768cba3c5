"""File locks that keep other runs out of a folder, exclusive or shared."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from pathlib import Path

from shardkit.conversion.target import not_ours
from shardkit.errors import OutputError, warn
from shardkit.helpers import os_errors
from shardkit.metadata.job import LOCK
from shardkit.storage import fs

UNLOCKED = -1
HELD = -2
ALONE = "make sure that no other run writes to the same output"
# Lustre without -o flock returns ENOSYS; NFS without lockd, and CIFS before Linux 5.5, ENOLCK.
_NO_LOCKS = (
    errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EBADF,
    errno.EPERM,
)  # fmt: skip
_HELD = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)  # the last if flock is emulated: CIFS

_working: set[int] = set()  # device numbers of file systems whose locks work


def lock(folder: Path) -> int | None:
    """Keep other runs out until the returned handle is closed or the process ends.

    None if its last run has removed the folder meanwhile; UNLOCKED on operating systems without
    such locks and, with a warning, on file systems without them, as Lustre and NFS may be.
    """
    handle = try_lock(folder, LOCK)
    if handle == HELD:
        raise busy(folder)
    return handle


def busy(folder: Path) -> OutputError:
    return OutputError(
        "another run is working on this output",
        path=folder,
        fix="wait for it, or convert to another output, with -o",
    )


def try_lock(
    folder: Path, name: str, *, shared: bool = False, advice: str = ALONE, make: bool = True
) -> int | None:
    """Like `lock`, for any file of the folder; HELD if another process has the lock.

    `advice` is what to do without locks; if it is empty, there is no warning. Without `make`, a
    missing file is not created, and the result is None.
    """
    try:
        import fcntl
    except ImportError:
        return UNLOCKED
    path = folder / name
    handle = _opened(path, make)
    if handle is None:
        return None
    how = fcntl.LOCK_SH | fcntl.LOCK_NB if shared else fcntl.LOCK_EX | fcntl.LOCK_NB
    with contextlib.ExitStack() as closing:
        closing.callback(os.close, handle)
        number = _flock(handle, how)
        if number in _HELD and _locks_work(folder):
            return HELD
        if number == 0:
            if not is_at(handle, path):
                return None
            if shared or _flock_of(path):  # a few file systems grant every lock
                closing.pop_all()
                return handle
    if number and number not in (*_NO_LOCKS, *_HELD):
        error = OSError(number, os.strerror(number))
        raise os_errors.explain(error, "lock", path) from error
    if advice:
        why = os.strerror(number) if number else "every lock is granted"
        warn(f"the file system of {folder} has no locks ({why}): {advice}")
    return UNLOCKED


def _flock(handle: int, how: int) -> int:
    """Try to lock; returns the errno of the failure, or 0."""
    import fcntl

    try:
        fcntl.flock(handle, how)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def is_at(handle: int, path: Path) -> bool:
    """Whether the file that was opened at a path is still there."""
    with contextlib.suppress(FileNotFoundError):
        return os.fstat(handle).st_ino == os.stat(path).st_ino
    return False


def _locks_work(folder: Path) -> bool:
    """Whether a new file, which no other process uses, can be locked: some file systems refuse
    every lock as if another process held it."""
    with contextlib.suppress(FileNotFoundError):  # the run that held the lock has ended too
        device = os.stat(folder).st_dev
        if device not in _working:
            path = folder / f"{LOCK}.{uuid.uuid4().hex}"
            number = _flock_of(path)
            fs.remove(path)
            if number not in (0, errno.ENOENT):
                return False
            _working.add(device)
    return True


def _flock_of(path: Path) -> int:
    """Try to lock a file, opened a second time or created; returns the result of `_flock`."""
    import fcntl

    if (handle := _opened(path)) is None:
        return errno.ENOENT
    try:
        return _flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(handle)


def _opened(path: Path, make: bool = True) -> int | None:
    """Open a lock file, creating it with `make`; None if it, or its folder, does not exist."""
    try:
        # For reading and writing: file systems that emulate flock by byte ranges require both.
        return os.open(path, os.O_RDWR | make * os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise not_ours(path, "a link") from error
        raise os_errors.explain(error, "create", path) from error


def unlock(handle: int | None) -> None:
    if handle is not None and handle >= 0:
        os.close(handle)
