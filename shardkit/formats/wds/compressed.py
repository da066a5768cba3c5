"""Compressed TARs, unpacked to temporary files while they are open."""

from __future__ import annotations

import warnings
from pathlib import Path
from weakref import WeakValueDictionary

from shardkit import storage
from shardkit.byte_source import ByteSource, RemoteFile, open_source
from shardkit.codecs.compression import COMPRESSED_BLOCK, compression_of
from shardkit.codecs.unpack import temporary_folder, unpacked
from shardkit.errors import ShardkitWarning
from shardkit.formats.wds.streamed import Streamed

_MAGIC = 6  # bytes that tell how a file is compressed
_WHAT = "a compressed TAR"
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
    folder = temporary_folder(path, _WHAT)
    warnings.warn(
        f"compressed TARs in {path.parent} are unpacked to temporary files in {folder}"
        " while they are open; for fast random access convert them once:"
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
    compression = compression_of(source.read(0, _MAGIC))
    stored = Streamed(source) if isinstance(source, RemoteFile) else source
    return unpacked(source.path, stored.blocks(COMPRESSED_BLOCK), compression, _WHAT)
