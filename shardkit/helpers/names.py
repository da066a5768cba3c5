"""Names of files and folders that come from data: decides which are safe to use.

Manifests, states and lists of splits are untrusted. The files that they name are opened, copied and
moved, so they must be in the same folder, on any system that the data may be copied to.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Collection
from typing import Any

import xxhash

from shardkit.errors import DamagedError
from shardkit.sample import key_hash

_PART_BYTES, _BYTES = 255, 1024  # limits of systems: for a part between slashes, and for a path
_UNSAFE = re.compile(
    r"(^|/)(/|$)"  # an absolute path, an empty name
    r"|[. ](/|$)"  # `.`, `..`, and names that Windows treats as such, dropping dots and blanks
    r"|[\\\x00-\x1f\x7f]"
    r"|(^|/)[^/]:"  # a drive
    r"|(^|/)(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *([.:/]|$)",  # devices of Windows
    re.IGNORECASE,
)
INSIDE = "a relative path inside the folder, without '..', backslashes, drives and device names"
FLAT = "a name without slashes and backslashes, other than '..' and names of devices"


def is_safe(name: str, *, flat: bool = False) -> bool:
    """Return whether a name is a path inside the folder that it is relative to, on any system.

    `flat`: directly in that folder.
    """
    if _UNSAFE.search(name) or (flat and "/" in name):
        return False
    try:
        parts = [len(part) for part in name.encode("utf-8", "surrogateescape").split(b"/")]
    except UnicodeEncodeError:
        return False
    return max(parts) <= _PART_BYTES and sum(parts) <= _BYTES


_SHORT, _MAX = 120, 700  # bytes of a part, and of a path: leave room for suffixes and folders
_NOT_ON_WINDOWS = frozenset('<>:"/\\|?*')
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\.|$)", re.IGNORECASE)


def file_stem(key: str, endings: Collection[str] = ()) -> str:
    """Convert a key to a path without file suffix that is valid on any system.

    Invalid characters are percent-encoded, and so are dots in the last part, so that it is clear
    where the stem of `stem.ending` ends, and the last dot of a folder whose name ends like a file,
    with one of the `endings` (in lower case). Parts that are too long are truncated, and end with a
    hash of the whole part.

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
    if len(path.encode()) <= _MAX:
        return path
    return _cut(path.replace("/", "%2F").replace(".", "%2E"), key)


def why_renamed(stem: str, key: str) -> str:
    """Return why `file_stem` of a key is another name: "cut" or "encoded"; "" if it is not."""
    if stem == key:
        return ""
    return "cut" if len(stem.encode()) < len(key.encode()) else "encoded"


def folded(stem: str) -> int:
    """Return a hash that is equal for names that some file systems do not distinguish."""
    return key_hash(unicodedata.normalize("NFC", stem.casefold()))


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
    """Return the name, which was read from `field` of the file at `path`, if it is safe.

    Raises DamagedError if it is not a string, or not `is_safe`.
    """
    if isinstance(name, str) and is_safe(name, flat=flat):
        return name
    raise DamagedError(
        "a file of the dataset has an unsafe name",
        path=path,
        field=field,
        expected=FLAT if flat else INSIDE,
        found=f"{name!r:.200}",
        fix="get the dataset again from a trusted source; shardkit never writes such names",
    )
