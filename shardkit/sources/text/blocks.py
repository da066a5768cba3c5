"""The bytes of a file in blocks, decompressed where it is compressed."""

from __future__ import annotations

import bz2
import itertools
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

import zstandard

from shardkit import storage
from shardkit.errors import SampleError
from shardkit.sources.files import unreadable

BLOCK = 1 << 20  # bytes per read
# Of a compressed file. Not even zeros make a gigabyte of so little, whatever the compression.
_COMPRESSED_BLOCK = 1 << 14
_EXPANSION_BLOCKS = 32  # that tell how much a file grows


class _Decoder(Protocol):
    """What the four libraries have in common. One decoder is for one member, stream or frame."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _gzip() -> _Decoder:
    return zlib.decompressobj(wbits=31)


def _zstd() -> _Decoder:
    # Windows of 2 GB, as `zstd --ultra --long=31` makes them.
    decoder: _Decoder = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
    return decoder


_DECODERS: dict[str, Callable[[], _Decoder]] = {
    "gz": _gzip,
    "zst": _zstd,
    "bz2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
}
_DAMAGE = (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError, EOFError, ValueError)


def blocks(path: str, size: int, compression: str = "", start: int = 0) -> Iterator[bytes]:
    """The bytes from `start` on of a file that was `size` bytes long when the run was planned.

    Raises SampleError for a file that cannot be read or has changed, and where a compressed one is
    damaged, after what lies before the damage.
    """
    if not compression:
        return stored_blocks(path, size, start, BLOCK)
    stored = stored_blocks(path, size, 0, _COMPRESSED_BLOCK)
    return _decompressed(path, stored, _DECODERS[compression])


def expansion(path: str, size: int, compression: str) -> tuple[int, int]:
    """Bytes of the beginning of a compressed file, and how many they make."""
    stored = itertools.islice(stored_blocks(path, size, 0, _COMPRESSED_BLOCK), _EXPANSION_BLOCKS)
    made = 0
    try:
        for block in _decompressed(path, stored, _DECODERS[compression]):
            made += len(block)
    except SampleError:  # the end of the beginning, or damage, which is told when it is read
        pass
    return min(size, _EXPANSION_BLOCKS * _COMPRESSED_BLOCK), made


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
        raise SampleError(
            "the file changed while the conversion ran",
            path=path,
            expected=f"{planned:,} bytes, as when the run was planned",
            found=f"{found:,} bytes",
        )


def _decompressed(
    path: str, stored: Iterator[bytes], new: Callable[[], _Decoder]
) -> Iterator[bytes]:
    decoder: _Decoder | None = None
    size = 0
    for block in stored:
        rest = block
        while rest:
            if decoder is None or decoder.eof:
                rest = rest.lstrip(b"\0")  # what pads a file after its last member
                if not rest:
                    break
                decoder = new()
            try:
                data = decoder.decompress(rest)
            except _DAMAGE as error:
                raise _damaged(path, size, str(error) or type(error).__name__) from error
            rest = decoder.unused_data if decoder.eof else b""
            size += len(data)
            if data:
                yield data
    if decoder is not None and not decoder.eof:
        raise _damaged(path, size, "it ends too soon")


def _damaged(path: str, offset: int, reason: str) -> SampleError:
    return SampleError(
        "the compressed file is damaged: what follows in it cannot be read",
        path=path,
        offset=offset,
        found=f"{reason}, after {offset:,} bytes decompressed",
        fix="fetch the file again, or keep what was read by --on-error skip",
    )
