"""Decompression in pieces, with limits on memory (a few megabytes and the window) and output."""

from __future__ import annotations

import bz2
import errno
import lzma
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from shardkit.errors import DamagedError, StorageError
from shardkit.helpers import os_errors
from shardkit.helpers.extras import extra
from shardkit.storage.byte_source import ByteSource, LocalFile
from shardkit.storage.fs import check_expansion

# Bytes of input at a time: the only bound for zstandard, which expands this to 0.5 GB at most.
COMPRESSED_BLOCK = 1 << 14
_PIECE = 1 << 20  # bytes of output at a time
_BLOCK, _TAPE = 512, 20 * 512  # bytes of a block and a record of tape, filled up with zeros
_WINDOW = 1 << 31  # bytes of history that a decoder may keep, as `zstd --ultra --long=31` needs

_Decoder: TypeAlias = Any  # for one member, stream or frame: `eof`, `unused_data`, `decompress`


def _gzip_pieces(decoder: _Decoder, data: bytes) -> Iterator[bytes]:
    piece = b""
    while not decoder.eof and (data or len(piece) == _PIECE):
        piece = decoder.decompress(data, _PIECE)
        yield piece
        data = decoder.unconsumed_tail


def _pieces(decoder: _Decoder, data: bytes) -> Iterator[bytes]:
    yield decoder.decompress(data, _PIECE)
    while not (decoder.eof or decoder.needs_input):
        yield decoder.decompress(b"", _PIECE)


def _zstandard() -> Any:
    with extra("zstd", "reading Zstandard"):
        import zstandard

    return zstandard


def _zstd() -> _Decoder:
    return _zstandard().ZstdDecompressor(max_window_size=_WINDOW).decompressobj()


def _zstd_pieces(decoder: _Decoder, data: bytes) -> Iterator[bytes]:
    try:
        yield decoder.decompress(data)
    except _zstandard().ZstdError as error:
        raise ValueError(str(error)) from error


_DECODERS: dict[
    str, tuple[Callable[[], _Decoder], Callable[[_Decoder, bytes], Iterator[bytes]]]
] = {
    "gz": (lambda: zlib.decompressobj(wbits=31), _gzip_pieces),
    "deflate": (lambda: zlib.decompressobj(wbits=-15), _gzip_pieces),  # in archives
    "zst": (_zstd, _zstd_pieces),
    "bz2": (bz2.BZ2Decompressor, _pieces),
    # Without a format, zeros would be an empty file of the older .lzma format.
    "xz": (lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_WINDOW), _pieces),
}
_MAGIC = {b"\x1f\x8b": "gz", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zst"}
# "BZh" alone may be the start of a text, such as the first name in a TAR: a level follows, and the
# start of a block or, if nothing is compressed, the end.
_BZIP2, _BZIP2_NEXT = re.compile(rb"BZh[1-9]"), (b"1AY&SY", b"\x17rE8P\x90")


def compression_of(head: bytes) -> str:
    """Return the compression of a file that begins with `head`; "" for an uncompressed file."""
    if _BZIP2.match(head) and any(each.startswith(head[4:10]) for each in _BZIP2_NEXT):
        return "bz2"
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


def decompressed(blocks: Iterable[bytes], compression: str) -> Iterator[bytes]:
    """Yield the decompressed bytes of blocks of COMPRESSED_BLOCK bytes.

    Zeros after the data are padding if they fill up a block of tape; otherwise, they are what a
    crash leaves where more was written.

    Raises ValueError for data that are damaged, truncated, or expand too much
    (`storage.EXPANSION`).
    """
    new, pieces = _DECODERS[compression]
    decoder: _Decoder = None
    stored = made = zeros = 0
    for block in blocks:
        stored, rest = stored + len(block), block
        while rest:
            if zeros or (decoder is not None and decoder.eof and not rest[0]):
                if rest.count(0) < len(rest):
                    raise ValueError("zeros follow its data, and these are followed by others")
                zeros += len(rest)
                break
            if decoder is None or decoder.eof:
                decoder = new()
            try:
                for data in pieces(decoder, rest):
                    made += len(data)
                    check_expansion(made, stored)
                    if data:
                        yield data
            except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
                raise ValueError(str(error) or type(error).__name__) from error
            rest = decoder.unused_data if decoder.eof else b""
    if decoder is not None and not decoder.eof:
        raise ValueError("it is truncated")
    if zeros and (stored % _BLOCK or zeros >= _TAPE):
        raise ValueError(f"{zeros:,} zeros follow its data, perhaps in place of more of them")


def unpacked(path: Path, blocks: Iterable[bytes], compression: str, what: str) -> ByteSource:
    """Decompress blocks of a file, named `what` in errors, into a temporary one for random access.

    The temporary file has no name: the system deletes it when it is closed or the process ends.
    """
    folder = os_errors.temporary_folder()
    try:
        with tempfile.TemporaryFile(dir=folder) as plain:
            for data in decompressed(blocks, compression):
                plain.write(data)
            plain.flush()
            return LocalFile(path, os.dup(plain.fileno()))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise os_errors.explain(error, "unpack", path) from error
        raise StorageError(
            f"not enough space to unpack {what}",
            path=path,
            found=f"{shutil.disk_usage(folder).free:,} bytes free in {folder}",
            fix=f"free some space, set TMPDIR to another folder, or unpack {what}",
        ) from error
    except ValueError as error:
        raise DamagedError(f"{what} is damaged: {error}", path=path) from error
