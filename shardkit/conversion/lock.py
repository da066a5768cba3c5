"""Locks that keep other runs out of a folder, or some of them."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from pathlib import Path

from shardkit import storage
from shardkit.conversion.target import not_ours
from shardkit.errors import OutputError, warn

LOCK = "lock"
UNLOCKED = -1
HELD = -2
ALONE = "make sure that no other run writes to the same output"
# Lustre without -o flock gives ENOSYS, NFS without lockd and CIFS before Linux 5.5 ENOLCK.
_NO_LOCKS = (
    errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EBADF,
    errno.EPERM,
)  # fmt: skip
_HELD = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)  # the last where flock is emulated: CIFS

_working: set[int] = set()  # numbers of devices whose locks work


def lock(folder: Path) -> int | None:
    """Keep other runs out until the handle is closed or the process ends.

    None if the folder was removed by its last run meanwhile; -1 on systems without such locks, and
    with a warning on file systems without them, as Lustre and NFS may be.
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
    """As `lock`, for any file of the folder; HELD where another process has the lock.

    `advice` is what to do without locks; there is no warning without it. Unless it is to `make` the
    file, None where there is none.
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
            if shared or _flock_of(path):  # to a few file systems locks are only words
                closing.pop_all()
                return handle
    if number and number not in (*_NO_LOCKS, *_HELD):
        error = OSError(number, os.strerror(number))
        raise storage.explain(error, "lock", path) from error
    if advice:
        why = os.strerror(number) if number else "they keep nobody out"
        warn(f"the file system of {folder} has no locks ({why}): {advice}")
    return UNLOCKED


def _flock(handle: int, how: int) -> int:
    """The number of the error, or 0."""
    import fcntl

    try:
        fcntl.flock(handle, how)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def is_at(handle: int, path: Path) -> bool:
    """Whether a file that was opened at a path is there still."""
    with contextlib.suppress(FileNotFoundError):
        return os.fstat(handle).st_ino == os.stat(path).st_ino
    return False


def _locks_work(folder: Path) -> bool:
    """Whether a file that nobody else knows can be locked: some file systems refuse any lock as
    if another process had it."""
    with contextlib.suppress(FileNotFoundError):  # then who had the lock is gone too
        device = os.stat(folder).st_dev
        if device not in _working:
            path = folder / f"{LOCK}.{uuid.uuid4().hex}"
            number = _flock_of(path)
            storage.remove(path)
            if number not in (0, errno.ENOENT):
                return False
            _working.add(device)
    return True


def _flock_of(path: Path) -> int:
    """What locking a file once more, or a new one, says: see `_flock`."""
    import fcntl

    if (handle := _opened(path)) is None:
        return errno.ENOENT
    try:
        return _flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(handle)


def _opened(path: Path, make: bool = True) -> int | None:
    """The file of a lock, made if need be and allowed; None where it, or its folder, is gone."""
    try:
        # To read and to write: file systems that lock ranges of bytes instead ask for both.
        return os.open(path, os.O_RDWR | make * os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise not_ours(path, "a link") from error
        raise storage.explain(error, "create", path) from error


def unlock(handle: int | None) -> None:
    if handle is not None and handle >= 0:
        os.close(handle)
