"""One file of a source: its bytes, or why they cannot be had."""

from __future__ import annotations

import os
from pathlib import Path

from shardkit import storage
from shardkit.errors import SampleError, ShardkitError


def read_file(path: str, size: int | None = None) -> bytes:
    """All bytes of a file; of a file that was `size` bytes long when the run was planned."""
    try:
        data = storage.read_whole(path, size)
    except OSError as error:
        raise unreadable(error, path) from error
    if size is not None and len(data) != size:
        raise SampleError(
            "the file changed while the conversion ran",
            path=path,
            expected=f"{size:,} bytes, as when the run was planned",
            found=f"{len(data):,} bytes" if len(data) < size else "more",
        )
    return data


def unreadable(error: OSError, path: str) -> ShardkitError:
    """The error of a sample for a file that could not be opened or read."""
    if storage.too_many_open(error):  # no sample is at fault, so that none is skipped
        return storage.explain(error, "open the file", Path(path))
    if os.path.islink(path):
        try:
            os.stat(path)
        except OSError as reason:
            what = "the link leads nowhere" if isinstance(reason, FileNotFoundError) else None
            return SampleError(
                what or f"the link cannot be followed: {os.strerror(reason.errno or 0)}",
                path=path,
                found=f"a link to {os.readlink(path)!r}",
                fix="restore what it points to or remove it, or use --on-error skip",
            )
    return SampleError(
        f"the file cannot be read: {storage.reason(error)}",
        path=path,
        fix="check the file's permissions and its disk, or drop it with --on-error skip",
    )
