"""Files out of the page cache, so that the next read waits for storage; and whether that worked.

Nothing tells beforehand: files in memory (tmpfs) stay, as do those that others have mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from shardkit import storage
from shardkit.manifest import FOLDER


def drop(paths: Iterable[Path]) -> float:
    """Drop files, and all files in folders; returns the share of their bytes that stayed, 0 to 1.

    It is 1 where the system cannot do this, or cannot tell.
    """
    if not hasattr(os, "posix_fadvise"):
        return 1.0
    stayed = every = 0
    for file in _files(paths):
        with (
            storage.explained("read", file),
            open(file, "rb", buffering=0, opener=storage.regular) as opened,
        ):
            handle = opened.fileno()
            size = os.fstat(handle).st_size
            if not size:
                continue
            stayed += _dropped(handle, size)
            every += size
    return stayed / every if every else 0.0


def _dropped(handle: int, size: int) -> int:
    """Drop an open file; returns how many of its bytes stayed."""
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    stayed = _cached(handle, size)
    if stayed:
        with contextlib.suppress(OSError):  # then it stays, and that is said
            os.fsync(handle)  # what is not yet on the disk cannot be dropped
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        stayed = _cached(handle, size)
    return stayed


def _files(paths: Iterable[Path]) -> Iterable[Path]:
    for path in paths:
        if path.is_dir():
            for folder, _, names in os.walk(path, followlinks=True):
                yield from (file for name in names if (file := Path(folder, name)).is_file())
        else:
            # A dataset that is one file has others beside it: x.idx, and its manifest.
            name = f"{glob.escape(path.stem)}.*"
            beside = (*path.parent.glob(name), *path.parent.glob(f"{FOLDER}/{name}"))
            yield from sorted({path, *(file for file in beside if file.is_file())})


def _cached(handle: int, size: int) -> int:
    """How many bytes of an open file are in memory; all of them where that cannot be found out."""
    pages = -(-size // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * pages)()
    # A copy on write, as only what may be written has an address that ctypes tells.
    with mmap.mmap(handle, size, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
        failed = mincore is None or mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), resident
        )
        del first  # the mapping cannot be closed while somebody refers to it
    if failed:
        return size
    return min(sum(page & 1 for page in bytes(resident)) * mmap.PAGESIZE, size)
