"""Shards compressed as whole files: they are unpacked to temporary files while they are open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from shardkit.codecs.compression import COMPRESSED_BLOCK, compression_of
from shardkit.codecs.unpack import unpacked
from shardkit.errors import warn
from shardkit.formats.streamed import Streamed
from shardkit.helpers import os_errors
from shardkit.storage.byte_source import ByteSource, RemoteFile, open_source

_MAGIC = 12  # bytes that identify the compression of a file


class Words(NamedTuple):
    """Names of such shards in messages."""

    one: str
    many: str
    format: str  # the format to convert them to


TARS = Words("a compressed TAR", "compressed TARs", "wds")
# The unpacked shards that are open in this process, by path, size and modification time.
_open: WeakValueDictionary[tuple[Path, int, float], ByteSource] = WeakValueDictionary()


def opened(
    path: Path, words: Words = TARS, is_plain: Callable[[bytes], bool] = lambda head: False
) -> tuple[ByteSource, int]:
    """The bytes of a shard, and the size of its temporary file: 0 if it is not compressed.

    The temporary file has no name: the system removes it when it is closed or the process ends.
    `is_plain` tells from the first bytes that a file is not compressed, whatever they look like.
    """
    source = open_source(path)
    head = source.read(0, min(_MAGIC, source.size))
    compression = "" if is_plain(head) else compression_of(head)
    if not compression:
        return source, 0
    folder = os_errors.temporary_folder()
    warn(
        f"{words.many} in {path.parent} are unpacked to temporary files in {folder}"
        " while they are open; for fast random access, convert them once:"
        f" shardkit convert ... --to {words.format}"
    )
    with os_errors.explained("open", path):
        which = path, source.size, path.stat().st_mtime
    source = _open.get(which) or _unpacked(source, words.one)
    _open[which] = source
    return source, source.size


def _unpacked(source: ByteSource, what: str) -> ByteSource:
    """The decompressed bytes of a compressed shard."""
    compression = compression_of(source.read(0, _MAGIC))
    stored = Streamed(source) if isinstance(source, RemoteFile) else source
    return unpacked(source.path, stored.blocks(COMPRESSED_BLOCK), compression, what)
