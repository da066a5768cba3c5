"""Locks of OUT.partial on this machine, for one whole run, or for several parts of a run.

lock                 held exclusively by a whole run, and shared by parts
parts/2-of-4         held by that part; exists since it first began
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from shardkit.conversion.target import not_ours
from shardkit.errors import OutputError, warn
from shardkit.helpers import os_errors
from shardkit.helpers.part_of import PartOf
from shardkit.metadata.job import LOCK, PARTS
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

WHOLE_RUN = "a run without --part, or `shardkit merge`, cannot work at the same time"
OTHER_JOB = "this one has other options, or another source"
LOCK_SECONDS = 30.0  # seconds to wait for a lock that a part may hold only while it begins
_QUIET = 1.0  # seconds of waiting before a warning is issued
_PAUSE = 0.1  # seconds between two attempts: the file system may be remote
_MERGE = (
    "make sure that no run without --part writes to the same output, that no part runs twice at a"
    " time, and that all parts have ended before you run `shardkit merge`"
)

_working: set[int] = set()  # device numbers of file systems whose locks work


class PartLock:
    """The locks of one run or of one part, from `take` or `share` to `release`."""

    part: PartOf | None = None  # the part that this process carries out, if any

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts = path / PARTS
        self._lock: int | None = None
        self._own: int | None = None

    def take(self) -> None:
        """Make the folder and lock out all others; raises OutputError if another is running."""
        while self._lock is None:
            fs.make_folder(self._path)
            found = try_lock(self._path, LOCK)
            if found == HELD:
                raise self._refused(WHOLE_RUN)
            self._lock = found

    def share(
        self, part: PartOf, prepare: Callable[[bool], object], fits: Callable[[], bool]
    ) -> None:
        """Share the folder with other parts of the same job. Raises OutputError if impossible.

        `prepare` is called if no other process is running; its argument is False if that is
        unknown. `fits` tells whether the work in the folder belongs to this job.
        """
        self.part, told = part, False
        until = time.monotonic() + LOCK_SECONDS
        while (error := self._try_to_share(part, prepare, fits)) is not None:
            left = until - time.monotonic()
            if left < 0:
                raise error
            if not told and left < LOCK_SECONDS - _QUIET:
                told = True
                warn(f"{error.what}: waiting up to {left:.0f} s for it to end ({self._path})")
            time.sleep(_PAUSE)
            if not self._path.exists():
                raise OutputError(
                    "another run has just ended its work on this output",
                    path=self._path,
                    fix="run the same command again to see what it has made",
                )

    def _try_to_share(
        self, part: PartOf, prepare: Callable[[bool], object], fits: Callable[[], bool]
    ) -> OutputError | None:
        """Try once; returns what prevents it, perhaps only for a moment."""
        alone = None
        while alone is None:  # a part that did not get so far has just removed the folder
            fs.make_folder(self._path)
            alone = try_lock(self._path, LOCK, advice=_MERGE)
        if alone != HELD:
            try:
                prepare(alone != UNLOCKED)
            finally:
                unlock(alone)
        locked = alone != UNLOCKED
        shared = try_lock(self._path, LOCK, shared=True, advice="") if locked else UNLOCKED
        if shared in (None, HELD):
            return busy(self._path)
        self._lock = shared
        if not fits():
            error = self._refused(OTHER_JOB)
        else:
            fs.make_folder(self._parts)
            own = try_lock(self._parts, part.name, advice="")
            if own not in (None, HELD):
                self._own = own if locked else UNLOCKED
                return None
            error = at_work_already(part, self._path)
        self.release()
        return error

    def refuse_busy(self) -> None:
        """Raise OutputError if others are running; takes no lock itself."""
        found = try_lock(self._path, LOCK, shared=True, advice="", make=False)
        unlock(found)
        if found == HELD or self._at_work():
            raise self._refused(OTHER_JOB)

    @property
    def owned(self) -> bool:
        """Whether it is certain that no other process is running the same part."""
        return UNLOCKED not in (self._lock, self._own)

    def begun(self) -> list[PartOf]:
        """Return the parts that have ever begun."""
        return sorted(filter(None, (PartOf.named(path.name) for path in self._parts.glob("*"))))

    def check(self) -> None:
        """Do nothing: the lock is held for the lifetime of this process."""

    def _at_work(self) -> list[PartOf]:
        """Return the other parts whose processes are alive."""
        alive = []
        for part in {*self.begun()} - {self.part}:
            found = try_lock(self._parts, part.name, shared=True, advice="", make=False)
            unlock(found)
            if found == HELD:
                alive.append(part)
        return sorted(alive)

    def _refused(self, why: str) -> OutputError:
        found = self._at_work()
        return at_work(found, self._path, why) if found else busy(self._path)

    def release(self) -> None:
        lock, own, self._lock, self._own = self._lock, self._own, None, None
        unlock(own)
        unlock(lock)


def at_work(parts: list[PartOf], path: Path, why: str) -> OutputError:
    """Return the error of a run or part that is locked out by running parts."""
    return OutputError(
        f"part {parts[0]} of this output is running, and {why}",
        path=path,
        found=f"running: {', '.join(map(str, parts))}",
        fix="wait for all parts, or convert to another output, with -o",
    )


def at_work_already(part: PartOf, path: Path) -> OutputError:
    return OutputError(
        f"part {part} is already running",
        path=path,
        fix="wait for it, or give each process another number I of --part I/N",
    )


def busy(folder: Path) -> OutputError:
    return OutputError(
        "another run is working on this output",
        path=folder,
        fix="wait for it, or convert to another output, with -o",
    )


def try_lock(
    folder: Path, name: str, *, shared: bool = False, advice: str = ALONE, make: bool = True
) -> int | None:
    """Lock a file of a folder until the returned handle is closed or the process ends.

    HELD if another process has the lock; None if the last run has removed the folder meanwhile;
    UNLOCKED on operating systems without such locks and, with a warning, on file systems without
    them, as Lustre and NFS may be.

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
    """Return whether the file that was opened at a path is still there."""
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
