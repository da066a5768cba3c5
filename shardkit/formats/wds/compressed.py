"""Compressed TARs, unpacked to temporary files while they are open."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from weakref import WeakValueDictionary

from shardkit import storage
from shardkit.byte_source import ByteSource, LocalFile, RemoteFile, open_source
from shardkit.codecs.compression import COMPRESSED_BLOCK, compression_of, decompressed
from shardkit.errors import DamagedError, ShardkitWarning, StorageError
from shardkit.formats.wds.streamed import Streamed

_MAGIC = 6  # bytes that tell how a file is compressed
_FIX = "make space, name another folder in the variable TMPDIR, or unpack the shards"
# The unpacked TARs that are open in this process, by path, size and time of change.
_open: WeakValueDictionary[tuple[Path, int, float], ByteSource] = WeakValueDictionary()


def opened(path: Path) -> tuple[ByteSource, int]:
    """The bytes of a TAR, and how many of them are in a temporary file: all, if it is compressed.

    That file has no name: the system removes it when it is closed, or the process ends.
    """
    source = open_source(path)
    compression = compression_of(source.read(0, min(_MAGIC, source.size)))
    if not compression:
        return source, 0
    warnings.warn(
        f"compressed TARs in {path.parent} are unpacked to temporary files in"
        f" {_temporary_folder(path)} while they are open; for fast random access convert them once:"
        " shardkit convert ... --to wds",
        ShardkitWarning,
        stacklevel=4,
    )
    with storage.explained("open", path):
        which = path, source.size, path.stat().st_mtime
    source = _open.get(which) or _unpacked(source)
    _open[which] = source
    return source, source.size


def _unpacked(source: ByteSource) -> ByteSource:
    """The plain TAR in a compressed one."""
    path = source.path
    folder = _temporary_folder(path)
    compression = compression_of(source.read(0, _MAGIC))
    try:
        stored = Streamed(source) if isinstance(source, RemoteFile) else source
        with tempfile.TemporaryFile(dir=folder) as plain:
            for data in decompressed(stored.blocks(COMPRESSED_BLOCK), compression):
                plain.write(data)
            plain.flush()
            return LocalFile(path, os.dup(plain.fileno()))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise storage.explain(error, "unpack", path) from error
        raise StorageError(
            "there is no room to unpack a compressed TAR",
            path=path,
            found=f"{shutil.disk_usage(folder).free:,} bytes free in {folder}",
            fix=_FIX,
        ) from error
    except ValueError as error:
        raise DamagedError(f"the compressed TAR is damaged: {error}", path=path) from error


def _temporary_folder(path: Path) -> str:
    try:
        return tempfile.gettempdir()
    except OSError as error:  # none of those that there are can be written to
        raise StorageError(
            "no temporary folder can be written to, to unpack a compressed TAR",
            path=path,
            found=error.strerror,
            fix=_FIX,
        ) from error
