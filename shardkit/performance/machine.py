"""The machine that is measured on: processor, memory, file systems, libraries, the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.metadata
import mmap
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardkit import storage
from shardkit.manifest import FOLDER
from shardkit.stream.world import default_threads
from shardkit.version import __version__

_LIBRARIES = (
    "numpy",
    "simplejpeg",
    "Pillow",
    "pyarrow",
    "xxhash",
    "torch",
)


def about_machine() -> dict[str, Any]:
    """The machine; None for what it does not tell."""
    named = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return {
        "system": platform.platform(),
        "processor": named[1] if named else platform.processor() or platform.machine(),
        "processors": default_threads(),  # that may be used
        "memory": memory(),
    }


def memory() -> int | None:
    """Bytes of memory; None where the system does not tell."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def versions() -> dict[str, str]:
    """shardkit, Python, and the libraries that are installed."""
    found = {"shardkit": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def file_system(path: Path) -> str | None:
    """The type of file system that a path is on; None where the system does not tell."""
    types: dict[str, str] = {}
    for line in _text("/proc/self/mounts").splitlines():
        _, folder, kind, *_ = line.split(" ")
        types[re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), folder)] = kind
    path = path.resolve()
    return next((types[str(p)] for p in (path, *path.parents) if str(p) in types), None)


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""


def drop_from_cache(paths: Iterable[Path]) -> float:
    """Drop files, and all files in folders, from the page cache, so that reading waits for storage.

    Returns the share of their bytes that stayed, 0 to 1: those in memory (tmpfs), and those that
    others have mapped. It is 1 where the system cannot do this, or cannot tell.
    """
    if not hasattr(os, "posix_fadvise"):
        return 1.0
    stayed = total = 0
    for file in _files(paths):
        with (
            storage.explained("read", file),
            open(file, "rb", buffering=0, opener=storage.regular) as opened,
        ):
            size = os.fstat(opened.fileno()).st_size
            if size:
                stayed += _dropped(opened.fileno(), size)
                total += size
    return stayed / total if total else 0.0


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


def _dropped(handle: int, size: int) -> int:
    """Drop an open file; returns how many of its bytes stayed."""
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    if not _cached(handle, size):
        return 0
    with contextlib.suppress(OSError):  # then it stays, and that is said
        os.fsync(handle)  # what is not yet on the disk cannot be dropped
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    return _cached(handle, size)


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
