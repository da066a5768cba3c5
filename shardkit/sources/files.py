"""Reading single files of a source, and checking that they did not change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, TypeAlias

from shardkit.codecs.image import NotAnImageError, probe
from shardkit.dataset.conditions import Head
from shardkit.errors import NotFoundError, SampleError, ShardkitError
from shardkit.helpers import os_errors
from shardkit.storage import fs, pointers
from shardkit.storage.remote.client import UNKNOWN, Info
from shardkit.storage.remote.path import RemotePath, status

FilePath: TypeAlias = "str | RemotePath"  # of a file or a folder; `Path` would be slower


_HEAD = 1 << 14  # bytes that contain the headers of nearly all images


# Whether this machine planned the run: on some network mounts, inodes differ between machines.
compare_inodes = True


class Planned(NamedTuple):
    """The state of a file when the run was planned. Times are in nanoseconds."""

    time: int  # of the last modification; for an object, its version number
    inode: int
    began: int  # when planning began


def file_path(path: Path) -> FilePath:
    """Return the location of a scanned folder, without the cached listing of an object store."""
    if isinstance(path, RemotePath):
        return RemotePath(path.store.anew(), path.key)
    return os.fspath(path)


def below(root: FilePath, relative: str) -> FilePath:
    """Return the location of a file by its path relative to a folder."""
    if isinstance(root, RemotePath):
        return root.child(relative)
    return f"{root}/{relative}" if root else relative


def read_file(path: FilePath, size: int | None = None, planned: Planned | None = None) -> bytes:
    """Read a whole file; checks it against its `size` and state when the run was planned."""
    data, about = read_with_status(path, size, UNKNOWN if planned is None else planned.time)
    if planned is not None:
        refuse_changed(path, about, planned)
    return data


def read_head(path: FilePath, size: int) -> Head:
    """Read the start of an image file of `size` bytes: enough for format, width and height."""
    if isinstance(path, RemotePath):
        path.store.expect(path.key, Info(size))
    try:
        data = _first(path, min(_HEAD, max(size, 0)))
        try:
            probe(data)
        except NotAnImageError:  # not an image, or its header is longer
            data = _first(path, size) if size > _HEAD else data
        head = Head(data)
    except OSError as error:
        raise unreadable(error, path) from error
    head.size = size
    return head


def _first(path: FilePath, stop: int) -> bytes:
    if isinstance(path, RemotePath):
        return path.store.read(path.key, 0, stop) if stop else b""
    with open(path, "rb", buffering=0, opener=fs.regular) as file:
        return file.read(stop)


def read_with_status(
    path: FilePath, size: int | None = None, version: int = UNKNOWN
) -> tuple[bytes, os.stat_result]:
    """As `read_file`, with the status after reading; an object must have that `version`."""
    try:
        if isinstance(path, RemotePath):
            data, info = path.store.read_object(path.key, size, version)
            about = status(info)
        else:
            data, about = fs.read_whole(path, size)
    except OSError as error:
        raise unreadable(error, path) from error
    pointers.refuse_pointer(data, path, SampleError)
    if size is not None and len(data) != size:
        raise changed(path, f"{len(data):,} bytes" if len(data) < size else "more", size=size)
    return data, about


def refuse_changed(
    path: FilePath,
    about: os.stat_result,
    planned: Planned,
    kind: type[ShardkitError] = SampleError,
) -> None:
    """Raise an error of type `kind` if a file of the same size was modified or replaced.

    A different inode only counts if the file's ctime is later as well: some file systems renumber
    files. Objects have no inodes, and not all stores have versions.
    """
    another = compare_inodes and about.st_ino != planned.inode
    replaced = another and about.st_ctime_ns >= planned.began
    if replaced or (
        about.st_mtime_ns != planned.time and UNKNOWN not in (about.st_mtime_ns, planned.time)
    ):
        raise changed(path, "another file of that name" if replaced else "a later change", kind)


def check_unchanged(path: FilePath, planned: Planned) -> None:
    """Raise SampleError if a file that was read block by block changed since planning."""
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
    """Return the error for a file that changed; `size` is the planned one, if the size differs."""
    what = "the file as it was" if size is None else f"{size:,} bytes, as"
    return kind(
        "the file changed while the conversion ran",
        path=path,
        expected=f"{what} when the run was planned",
        found=found,
        fix="run the same command again once nothing writes to the source any more",
    )


def unreadable(error: OSError, path: FilePath) -> ShardkitError:
    """Return the error for a file of a sample that could not be opened or read."""
    if isinstance(path, RemotePath):
        if isinstance(error, NotFoundError) and error.found is None:  # else the bucket is missing
            return changed(path, "no such object any more")
        return os_errors.explain(error, "read", path)
    if os_errors.shortage(error):  # not the fault of this sample, which must not be skipped
        return os_errors.explain(error, "open the file", Path(path))
    if os.path.islink(path):
        try:
            os.stat(path)
        except OSError as reason:
            what = "the symbolic link is broken" if isinstance(reason, FileNotFoundError) else None
            return SampleError(
                what or f"the symbolic link cannot be followed: {os.strerror(reason.errno or 0)}",
                path=path,
                found=f"a link to {os.readlink(path)!r}",
                fix="restore its target, remove the link, or use --on-error skip",
            )
    return SampleError(
        f"the file cannot be read: {os_errors.reason(error)}",
        path=path,
        fix="check the file's permissions and its disk, or skip it with --on-error skip",
    )
