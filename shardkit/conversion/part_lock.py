"""Locks of OUT.partial, for one whole run, or for several parts of a run; here on this machine.

lock                 held exclusively by a whole run, and shared by parts
parts/2-of-4         held by that part; exists since it first began
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from shardkit.conversion.lock import HELD, UNLOCKED, busy, try_lock, unlock
from shardkit.errors import OutputError, warn
from shardkit.helpers.part_of import PartOf
from shardkit.metadata.job import LOCK, PARTS
from shardkit.storage import fs

WHOLE_RUN = "a run without --part, or `shardkit merge`, cannot work at the same time"
OTHER_JOB = "this one has other options, or another source"
LOCK_SECONDS = 30.0  # seconds to wait for a lock that a part may hold only while it begins
_QUIET = 1.0  # seconds of waiting before a warning is issued
_PAUSE = 0.1  # seconds between two attempts: the file system may be remote
_MERGE = (
    "make sure that no run without --part writes to the same output, that no part runs twice at a"
    " time, and that all parts have ended before you run `shardkit merge`"
)


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
        """The parts that have ever begun."""
        return sorted(filter(None, (PartOf.named(path.name) for path in self._parts.glob("*"))))

    def check(self) -> None:
        """Do nothing: the lock is held for the lifetime of this process."""

    def _at_work(self) -> list[PartOf]:
        """The other parts whose processes are alive."""
        return [part for part in self.begun() if part != self.part and self._is_held(part)]

    def _is_held(self, part: PartOf) -> bool:
        found = try_lock(self._parts, part.name, shared=True, advice="", make=False)
        unlock(found)
        return found == HELD

    def _refused(self, why: str) -> OutputError:
        found = self._at_work()
        return at_work(found, self._path, why) if found else busy(self._path)

    def release(self) -> None:
        lock, own, self._lock, self._own = self._lock, self._own, None, None
        unlock(own)
        unlock(lock)


def at_work(parts: list[PartOf], path: Path, why: str) -> OutputError:
    """The error of a run or part that is locked out by running parts."""
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
