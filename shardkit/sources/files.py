"""One file of a source: its bytes, or why they cannot be had."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, TypeAlias

from shardkit import storage
from shardkit.codecs.image import NotAnImageError, probe
from shardkit.errors import NotFoundError, SampleError, ShardkitError
from shardkit.remote.path import RemotePath, status
from shardkit.remote.store import UNKNOWN, Info
from shardkit.where import Head

FilePath: TypeAlias = "str | RemotePath"  # of a file or a folder: no Path, which takes longer


_HEAD = 1 << 14  # bytes with the headers of nearly all images


# Whether this is the machine that planned: on some mounts others have other inodes for the files.
compare_inodes = True
NEVER = 2**63 - 1  # as `Planned.began`: inodes are another machine's, and tell nothing


class Planned(NamedTuple):
    """A file as it was when the run was planned. Times are in nanoseconds."""

    time: int  # of its last change; of an object, the number of its version
    inode: int
    began: int  # when planning began


def file_path(path: Path) -> FilePath:
    """The location of a folder that was looked into: without what was remembered of a store."""
    if isinstance(path, RemotePath):
        return RemotePath(path.store.anew(), path.key)
    return os.fspath(path)


def below(root: FilePath, relative: str) -> FilePath:
    """The location of a file by its path relative to a folder."""
    if isinstance(root, RemotePath):
        return root.child(relative)
    return f"{root}/{relative}" if root else relative


def read_file(path: FilePath, size: int | None = None, planned: Planned | None = None) -> bytes:
    """All bytes of a file; of a file that was `size` bytes long when the run was planned."""
    data, about = read_with_status(path, size, UNKNOWN if planned is None else planned.time)
    if planned is not None:
        refuse_changed(path, about, planned)
    return data


def read_head(path: FilePath, size: int) -> Head:
    """As much of an image file of `size` bytes as tells its format, width and height."""
    if isinstance(path, RemotePath):
        path.store.expect(path.key, Info(size))
    try:
        data = _first(path, min(_HEAD, max(size, 0)))
        try:
            probe(data)
        except NotAnImageError:  # or its header is longer
            data = _first(path, size) if size > _HEAD else data
        head = Head(data)
    except OSError as error:
        raise unreadable(error, path) from error
    head.size = size
    return head


def _first(path: FilePath, stop: int) -> bytes:
    if isinstance(path, RemotePath):
        return path.store.read(path.key, 0, stop) if stop else b""
    with open(path, "rb", buffering=0, opener=storage.regular) as file:
        return file.read(stop)


def read_with_status(
    path: FilePath, size: int | None = None, version: int = UNKNOWN
) -> tuple[bytes, os.stat_result]:
    """As `read_file`, with what the file was after it was read; an object is of that `version`."""
    try:
        if isinstance(path, RemotePath):
            data, info = path.store.read_object(path.key, size, version)
            about = status(info)
        else:
            data, about = storage.read_whole(path, size)
    except OSError as error:
        raise unreadable(error, path) from error
    if size is not None and len(data) != size:
        raise changed(path, f"{len(data):,} bytes" if len(data) < size else "more", size=size)
    return data, about


def refuse_changed(
    path: FilePath,
    about: os.stat_result,
    planned: Planned,
    kind: type[ShardkitError] = SampleError,
) -> None:
    """Raise an error of a kind for a file that was written or replaced since, to the same size.

    An inode counts only together with a later change: some file systems renumber files. Objects
    have none, and not all stores tell a version.
    """
    another = compare_inodes and about.st_ino != planned.inode
    replaced = another and about.st_ctime_ns >= planned.began
    if replaced or (
        about.st_mtime_ns != planned.time and UNKNOWN not in (about.st_mtime_ns, planned.time)
    ):
        raise changed(path, "another file of that name" if replaced else "a later change", kind)


def check_unchanged(path: FilePath, planned: Planned) -> None:
    """Raise SampleError where a file that was read block by block is not what it was."""
    try:
        if isinstance(path, RemotePath):
            about = status(path.store.after_reading(path.key))
        else:
            about = os.stat(path)
        refuse_changed(path, about, planned)
    except OSError as error:
        raise unreadable(error, path) from error


def changed(
    path: FilePath, found: str, kind: type[ShardkitError] = SampleError, *, size: int | None = None
) -> ShardkitError:
    """The error for a file that is not what it was; `size` is what it had, if it tells."""
    what = "the file as it was" if size is None else f"{size:,} bytes, as"
    return kind(
        "the file changed while the conversion ran",
        path=path,
        expected=f"{what} when the run was planned",
        found=found,
        fix="run the same command again when nothing writes to the source any more",
    )


def unreadable(error: OSError, path: FilePath) -> ShardkitError:
    """The error of a sample for a file that could not be opened or read."""
    if isinstance(path, RemotePath):
        if isinstance(error, NotFoundError) and error.found is None:  # else the bucket is gone
            return changed(path, "no such object any more")
        return storage.explain(error, "read", path)
    if storage.shortage(error):  # no sample is at fault, so that none is skipped
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
