"""Names of files and folders that come from data: one function decides which of them are used.

Manifests, states and lists of splits are made by strangers. What they name is opened, copied and
moved, so it must lie in the folder that they are in, on every system that the data may get to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from typing import Any

import xxhash

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


_SHORT, _MOST = 120, 700  # bytes of a part, and of all, that leave room for endings and folders
_NOT_ON_WINDOWS = frozenset('<>:"/\\|?*')
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\.|$)", re.IGNORECASE)


def file_stem(key: str, endings: Collection[str] = ()) -> str:
    """A key as the path of files, without their endings, that any system takes.

    What it must not have is percent-encoded, and dots in the last part, so that `stem.ending` says
    where the stem ends; so is the dot of a folder that ends like a file, with one of the `endings`
    (in lower case). Parts that are too long are cut, and end with a hash of all of them.

    >>> file_stem("../a:b/con/c.d")
    '%2E%2E/a%3Ab/%63on/c%2Ed'
    """
    *folders, base = key.split("/")
    parts = []
    for folder in folders:
        stem, dot, ending = folder.rpartition(".")
        as_file = dot and ending.lower() in endings
        parts.append(_file_name(f"{stem}%2E{ending}" if as_file else folder, folder))
    path = "/".join([*parts, _file_name(base.replace(".", "%2E"), base)])
    if len(path.encode()) <= _MOST:
        return path
    return _cut(path.replace("/", "%2F").replace(".", "%2E"), key)


def _file_name(text: str, original: str) -> str:
    name = "".join(c if c.isprintable() and c not in _NOT_ON_WINDOWS else _percent(c) for c in text)
    if name[:1] in (".", " ") or name[:2] == "__" or _DEVICE.match(name):
        name = _percent(name[0]) + name[1:]
    if name[-1:] in (".", " ", ""):
        name = name[:-1] + (_percent(name[-1]) if name else "%")
    return name if len(name.encode()) <= _SHORT else _cut(name, original)


def _cut(name: str, original: str) -> str:
    start = name.encode()[: _SHORT - 17].decode(errors="ignore")
    digest = xxhash.xxh3_64_hexdigest(original.encode("utf-8", "surrogatepass"))
    return f"{re.sub('%.?$', '', start)}~{digest}"


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


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
