"""Files in place of data that are elsewhere: pointers of git-lfs and git-annex, and HTML pages."""

from __future__ import annotations

import re
from collections.abc import Callable

from shardkit.errors import ShardkitError

MAX_BYTES = 1024  # of a pointer
_LFS = re.compile(rb"version https://git-lfs\.github\.com/spec/v\d+\n(.*\n)*oid \S+\nsize \d+\n?")
# A key: BACKEND-sSIZE--NAME, as in git-annex's "key format".
_ANNEX = re.compile(rb"/annex/objects/[A-Z0-9_]+(-[a-zA-Z]\d+)*--\S+\n?")
_HTML = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html)\b", re.IGNORECASE)


def is_html(head: bytes) -> bool:
    """Return whether a file begins like an HTML page."""
    return _HTML.match(head) is not None


def refuse_pointer(data: bytes, path: object, kind: Callable[..., ShardkitError]) -> None:
    """Raise an error of this `kind` if the bytes of a whole file are a pointer to its data."""
    if len(data) > MAX_BYTES or data[:1] not in (b"v", b"/"):
        return
    if _LFS.fullmatch(data):
        tool, command = "git-lfs", "git lfs pull"
    elif _ANNEX.fullmatch(data):
        tool, command = "git-annex", "git annex get ."
    else:
        return
    raise kind(
        f"the file is a pointer of {tool}: its data were not downloaded",
        path=path,
        expected="the data",
        found=repr(data[:40].decode("utf-8", "replace")),
        fix=f"run `{command}` in the repository, and then this command again",
    )


def refuse_html(head: bytes, path: object, kind: Callable[..., ShardkitError]) -> None:
    """Raise an error of this `kind` if a file, by its first bytes, is an HTML page."""
    if is_html(head):
        raise kind(
            "the file is an HTML page, perhaps of an error or a login during the download",
            path=path,
            expected="the data",
            found=repr(head[:40].decode("utf-8", "replace")),
            fix="look at the page, and download the file again",
        )
