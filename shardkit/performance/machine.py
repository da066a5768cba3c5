"""On what was measured: processor, memory, file systems, versions of what does the work."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

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
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "processors": default_threads(),  # that may be used
        "memory": memory(),
    }


def versions() -> dict[str, str]:
    """shardkit, Python, and the libraries that are installed."""
    found = {"shardkit": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def file_system(path: Path) -> str | None:
    """The type of file system that a path is on; None where the system does not tell."""
    try:
        lines = Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    types: dict[str, str] = {}
    for line in lines:
        _, folder, kind, *_ = line.split(" ")
        types[re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), folder)] = kind
    place = path.resolve()
    return next((types[str(p)] for p in (place, *place.parents) if str(p) in types), None)


def _processor() -> str:
    try:
        about = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        about = ""
    named = re.search(r"^model name\s*:\s*(.+)$", about, re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def memory() -> int | None:
    """Bytes of memory; None where the system does not tell."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
