"""What was meant by a path that does not exist: it was mistyped, or the shell changed it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from itertools import islice
from pathlib import Path

from shardkit.errors import similar

_LISTED = 10_000  # names of a folder that are compared


def meant(path: Path) -> str | None:
    """Return a fix for a path that does not exist, if one is known: a similar path, or a URL."""
    return None if "://" in str(path) else tilde(path) or _similar(path) or _url(path)


def tilde(path: Path) -> str | None:
    """Return the fix for a path with a `~` that no shell has replaced, as it was in quotes."""
    if path.parts[:1] != ("~",):
        return None
    return f"a shell replaces ~ only outside quotes: give {os.path.expanduser(path)}"


def _similar(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        missing = next((p for p in (*reversed(path.parents), path) if not p.exists()), None)
        if missing is None:
            return None
        names = [each.name for each in islice(os.scandir(missing.parent), _LISTED)]
        if cut := [name for name in names if name.startswith(f"{missing.name} ")]:
            return f"put a path with blanks in quotes: {_quoted(missing.with_name(cut[0]))}"
        if found := [missing.with_name(name) for name in similar(missing.name, names)]:
            return f"did you mean {' or '.join(map(_quoted, found))}?"
    return None


def _url(path: Path) -> str | None:
    if url := re.match(r"(s3|gs|az|hf|https?)[:/]", str(path)):
        return f"if this is a URL, write {url[1]}://{str(path)[url.end() :]}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        return f"if this is a dataset on the Hugging Face Hub, write hf://datasets/{path}"
    return None


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
