"""`.npy` and `.npz`: arrays of equal length are fields, optionally named after splits."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.codecs.array import npy_header
from shardkit.errors import FormatError, ShardkitError, SourceError
from shardkit.sources.arrays.rows import FileSpan, Found, Rows, damaged, kind_of, split_in, unusable
from shardkit.storage.byte_source import ByteSource

HEAD = 1 << 16  # bytes; numpy's headers have a few hundred
_LOCAL = 30  # bytes of a member's local header, before its name
_METHODS = {zipfile.ZIP_STORED: "", zipfile.ZIP_DEFLATED: "deflate"}
_MAX_ARRAYS = 4096  # arrays in a file


def find_npy(root: Path, names: Sequence[str]) -> Found:
    """Return the arrays of some files, named after them."""
    arrays = {}
    for name in names:
        part = FileSpan(root / name)
        source = part.open()
        arrays[name[:-4]] = rows(name[:-4], part, source, 0, source.size)
    return Found(arrays, names)


def find_npz(path: Path) -> Found:
    """Return the arrays of an archive."""
    source = FileSpan(path).open()
    try:
        with zipfile.ZipFile(io.BufferedReader(_File(source))) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
            others = len(archive.infolist()) - len(members)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError) as error:
        fix = "copy or create the file again"
        raise SourceError("the .npz is damaged", path=path, found=str(error), fix=fix) from error
    if len(members) > _MAX_ARRAYS:
        raise SourceError("the .npz contains too many arrays", path=path, found=f"{len(members):,}")
    arrays = {m.filename[:-4]: _member(path, source, m) for m in members}
    return Found(arrays, [path.name], ignored={"member that is no array": others} if others else {})


class _File(io.RawIOBase):
    """A file object over a `ByteSource`, for `zipfile`."""

    def __init__(self, source: ByteSource) -> None:
        self._source, self._at = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max((0, self._at, self._source.size)[whence] + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = max(min(len(buffer), self._source.size - self._at), 0)
        buffer[:length] = self._source.read(self._at, length)
        self._at += length
        return length


def _member(path: Path, source: ByteSource, member: zipfile.ZipInfo) -> Rows | ShardkitError:
    if member.compress_type not in _METHODS or member.flag_bits & 1:
        raise SourceError(
            "an array in the .npz is encrypted, or compressed by a method that numpy does not use",
            path=path,
            field=member.filename[:-4],
            fix="write it with numpy.savez",
        )
    head = source.read(member.header_offset, min(_LOCAL, source.size - member.header_offset))
    start = member.header_offset + _LOCAL
    start += int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    compression = _METHODS[member.compress_type]
    part = (
        FileSpan(path, compression, start, member.compress_size) if compression else FileSpan(path)
    )
    if compression:
        source, start = part.open(), 0
    return rows(member.filename[:-4], part, source, start, member.file_size)


def rows(
    name: str, part: FileSpan, source: ByteSource, start: int, size: int
) -> Rows | ShardkitError:
    """Return the rows of the `.npy` at `start` in `source`, or the error if it cannot be a field.

    `source` has the bytes of `part`. Raises DamagedError for a truncated file.
    """
    data = source.read(start, min(HEAD, size, source.size - start))
    header = npy_header(data)
    if header is None:
        raise damaged(part.path, f"the array {name!r} is not in .npy format", "its header",
                      data[:8].hex(" "))  # fmt: skip
    try:
        dtype = header.simple
    except TypeError:
        dtype = None
    if dtype is None:
        objects = b"'|O" in header.descr or b"'O" in header.descr
        what = "Python objects, which are pickled" if objects else "records, or an unknown type"
        return unusable(name, what)
    length = int(np.prod([dtype.itemsize, *header.shape], dtype=object))
    if header.start + length != size:
        what = f"the size of the array {name!r} does not match its header"
        raise damaged(part.path, what, f"{header.start + length:,} bytes", f"{size:,}")
    if not header.shape:
        return unusable(name, "a single value")
    if header.fortran and len(header.shape) > 1:
        return unusable(name, "an array in Fortran order: save numpy.ascontiguousarray(array)")
    try:
        kind, make = kind_of(split_in(name)[1], dtype, header.shape[1:])
    except FormatError as error:
        return error
    count = header.shape[0]
    place = (part, start + header.start, count)
    stride = length // count if count else 0
    return Rows(kind, (place,), dtype.str, header.shape[1:], stride, make)
