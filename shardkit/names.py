"""Names of files and folders that come from data: one function decides which of them are used.

Manifests, states and lists of splits are made by strangers. What they name is opened, copied and
moved, so it must lie in the folder that they are in, on every system that the data may get to.
"""

from __future__ import annotations

import os
import re
from typing import Any

from shardkit.errors import DamagedError

_PART_BYTES, _BYTES = 255, 1024  # of a name between slashes, and of all; systems take no more
_UNSAFE = re.compile(
    r"(^|/)(/|$)"  # an absolute path, an empty name
    r"|[. ](/|$)"  # `.`, `..`, and what Windows takes for them, as it drops dots and blanks there
    r"|[\\\x00-\x1f\x7f]"
    r"|(^|/)[^/]:"  # a drive
    r"|(^|/)(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *([.:/]|$)",  # devices of Windows
    re.IGNORECASE,
)
INSIDE = "a relative path inside the folder, without '..', backslashes, drives and device names"
FLAT = "a name without slashes and backslashes, other than '..' and names of devices"


def is_safe(name: str, *, flat: bool = False) -> bool:
    """Whether a name leads to a path inside the folder it is relative to, on any system.

    `flat`: to one in that folder itself.
    """
    if _UNSAFE.search(name) or (flat and "/" in name):
        return False
    try:
        parts = [len(part) for part in name.encode("utf-8", "surrogateescape").split(b"/")]
    except UnicodeEncodeError:
        return False
    return max(parts) <= _PART_BYTES and sum(parts) <= _BYTES


def checked_name(name: Any, path: str | os.PathLike[str], field: str, *, flat: bool = False) -> str:
    """The name in `field` of the file at `path`, as it is.

    Raises DamagedError for one that is not text, or not `is_safe`.
    """
    if isinstance(name, str) and is_safe(name, flat=flat):
        return name
    raise DamagedError(
        "a file of the dataset has a name that must not be followed",
        path=path,
        field=field,
        expected=FLAT if flat else INSIDE,
        found=f"{name!r:.200}",
        fix="get the dataset again from somebody you trust; shardkit writes no such names",
    )
