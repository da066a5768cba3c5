"""Temporary folders on this machine for work on an output in a store."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from shardkit.conversion.lock import UNLOCKED, lock, unlock
from shardkit.errors import OutputError, ShardkitError
from shardkit.helpers import os_errors
from shardkit.storage import fs

_PREFIX = "shardkit-scratch-"


class Scratch:
    """A private folder in the system's temporary folder, until `close`.

    Creating one removes the folders of runs that were killed.
    """

    def __init__(self) -> None:
        _clean()
        self._lock: int | None = None
        while self._lock is None:
            folder = os_errors.temporary_folder()
            with os_errors.explained("make a temporary folder", folder / _PREFIX):
                self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
            with contextlib.suppress(OutputError):  # locked by the cleanup of another run: retry
                self._lock = lock(self.path)

    def close(self) -> None:
        handle, self._lock = self._lock, None
        if handle is not None:
            with contextlib.suppress(ShardkitError):  # the next run removes leftovers
                fs.remove(self.path)
            unlock(handle)


def _clean() -> None:
    """Remove the folders of this user whose runs have ended."""
    for path in os_errors.temporary_folder().glob(f"{_PREFIX}*"):
        with contextlib.suppress(ShardkitError, OSError):
            about = path.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
                continue
            handle = lock(path)
            if handle not in (None, UNLOCKED):
                try:
                    fs.remove(path)
                finally:
                    unlock(handle)
