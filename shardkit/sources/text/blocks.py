"""The bytes of a file in blocks, decompressed where it is compressed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

from shardkit import storage
from shardkit.codecs.compression import COMPRESSED_BLOCK, decompressed
from shardkit.errors import SampleError
from shardkit.sources.files import changed, unreadable

BLOCK = 1 << 20  # bytes per read
_EXPANSION_BLOCKS = 32  # that tell how much a file grows


def blocks(path: str, size: int, compression: str = "", start: int = 0) -> Iterator[bytes]:
    """The bytes from `start` on of a file that was `size` bytes long when the run was planned.

    Raises SampleError for a file that cannot be read or has changed, and where a compressed one is
    damaged, after what lies before the damage.
    """
    if not compression:
        return stored_blocks(path, size, start, BLOCK)
    stored = stored_blocks(path, size, 0, COMPRESSED_BLOCK)
    return _decompressed(path, stored, compression)


def expansion(path: str, size: int, compression: str) -> tuple[int, int]:
    """Bytes of the beginning of a compressed file, and how many they make."""
    stored = itertools.islice(stored_blocks(path, size, 0, COMPRESSED_BLOCK), _EXPANSION_BLOCKS)
    made = 0
    try:
        for block in _decompressed(path, stored, compression):
            made += len(block)
    except SampleError:  # the end of the beginning, or damage, which is told when it is read
        pass
    return min(size, _EXPANSION_BLOCKS * COMPRESSED_BLOCK), made


def stored_blocks(path: str, size: int, start: int, block: int) -> Iterator[bytes]:
    """The bytes as the file has them, so many at a time."""
    try:
        with open(path, "rb", buffering=0, opener=storage.regular) as file:
            _check_size(path, size, os.fstat(file.fileno()).st_size)
            file.seek(start)
            while start < size:
                data = file.read(min(block, size - start))
                if not data:
                    _check_size(path, size, start)
                start += len(data)
                yield data
    except OSError as error:
        raise unreadable(error, path) from error


def _check_size(path: str, planned: int, found: int) -> None:
    if found != planned:
        raise changed(path, f"{found:,} bytes", size=planned)


def _decompressed(path: str, stored: Iterator[bytes], compression: str) -> Iterator[bytes]:
    size = 0
    try:
        for data in decompressed(stored, compression):
            size += len(data)
            yield data
    except ValueError as error:
        raise _damaged(path, size, str(error)) from error


def _damaged(path: str, offset: int, reason: str) -> SampleError:
    return SampleError(
        "the compressed file is damaged: what follows in it cannot be read",
        path=path,
        offset=offset,
        found=f"{reason}, after {offset:,} bytes decompressed",
        fix="fetch the file again, or keep what was read by --on-error skip",
    )
