"""`.npy` and `.npz`: arrays of equal length are fields, optionally named after splits."""

from __future__ import annotations

import io
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.codecs.array import npy_header
from shardkit.errors import FormatError, ShardkitError, SourceError, UsageError
from shardkit.helpers import os_errors
from shardkit.metadata.splits import KINDS
from shardkit.sources.arrays.rows import (
    LABELS,
    Column,
    Found,
    Part,
    Rows,
    damaged,
    kind_of,
    unusable,
)
from shardkit.storage.byte_source import ByteSource

_HEAD = 1 << 16  # bytes; numpy's headers have a few hundred
_LOCAL = 30  # bytes of a member's local header, before its name
_METHODS = {zipfile.ZIP_STORED: "", zipfile.ZIP_DEFLATED: "deflate"}
_NEAR = 10  # values from which on an array of nearly the length of the others is one of them
_MAX_ARRAYS = 4096  # arrays in a file


def find_npy(path: Path) -> Found:
    """Return the rows of one array, as the field `array`."""
    source = Part(path).open()
    return arranged(path, {"array": rows("array", Part(path), source, 0, source.size)}, [path.name])


def find_columns(root: Path, names: Sequence[str]) -> Found:
    """Return the arrays of several files as fields of the same samples."""
    columns: dict[str, Column | ShardkitError] = {}
    for name in names:
        source = Part(root / name).open()
        columns[name[:-4]] = rows(name[:-4], Part(root / name), source, 0, source.size)
    return arranged(root, columns, names)


def find_npz(path: Path) -> Found:
    """Return the arrays of an archive."""
    source = Part(path).open()
    try:
        with zipfile.ZipFile(io.BufferedReader(_File(source))) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
            others = len(archive.infolist()) - len(members)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError) as error:
        fix = "copy or create the file again"
        raise SourceError("the .npz is damaged", path=path, found=str(error), fix=fix) from error
    if len(members) > _MAX_ARRAYS:
        raise SourceError("the .npz contains too many arrays", path=path, found=f"{len(members):,}")
    columns = {m.filename[:-4]: _member(path, source, m) for m in members}
    found = arranged(path, columns, [path.name])
    ignored = {**found.ignored, **({"member that is no array": others} if others else {})}
    return found._replace(ignored=ignored)


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
    part = Part(path, compression, start, member.compress_size) if compression else Part(path)
    if compression:
        source, start = part.open(), 0
    return rows(member.filename[:-4], part, source, start, member.file_size)


def rows(name: str, part: Part, source: ByteSource, start: int, size: int) -> Rows | ShardkitError:
    """Return the rows of the `.npy` at `start` in `source`, or the error if it cannot be a field.

    `source` has the bytes of `part`. Raises DamagedError for a truncated file.
    """
    data = source.read(start, min(_HEAD, size, source.size - start))
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


_WORDS = re.compile(r"[_.\-]")


def split_in(name: str) -> tuple[str, str]:
    """Return the split that an array is named after, "" if none, and the rest of its name.

    >>> split_in("train_images"), split_in("x_test"), split_in("features")
    (('train', 'images'), ('test', 'x'), ('', 'features'))
    """
    words = _WORDS.split(name)
    for at, rest in ((0, words[1:]), (-1, words[:-1])):
        if words[at].lower() in KINDS:
            return words[at].lower(), "_".join(rest) or "array"
    return "", name


def arranged(
    path: Path, arrays: Mapping[str, Column | ShardkitError], files: Sequence[str]
) -> Found:
    """Return the arrays of each split as fields: the longest ones, which have one common length.

    Shorter arrays are ignored. Raises UsageError if it is not clear which arrays belong together.
    """
    groups: dict[str, dict[str, Column]] = defaultdict(dict)
    others: dict[str, dict[str, ShardkitError]] = defaultdict(dict)
    split = any(split_in(name)[0] for name in arrays)
    for name, array in arrays.items():
        group, field = split_in(name) if split else ("", name)
        if isinstance(array, ShardkitError):
            others[group][field] = array
        else:
            groups[group][field] = array
    alone = groups.pop("", {}) if split and groups.keys() - {""} else {}
    ignored = Counter({f"array {name!r}, which belongs to no split": 1 for name in alone})
    splits: dict[str, dict[str, Column]] = {}
    for group, columns in groups.items():
        splits[group], short = _of_one_length(path, columns)
        ignored.update(f"array {name!r} of another length" for name in short)
    if not splits:
        every = [error for errors in others.values() for error in errors.values()]
        if every:
            raise every[0].located(path=path)
        raise SourceError("there are no arrays", path=path)
    return Found(splits, files, ignored=dict(ignored), others=others)


def _of_one_length(
    path: Path, columns: Mapping[str, Column]
) -> tuple[dict[str, Column], list[str]]:
    """Return the longest arrays, and the names of the others, no two of which are equally long."""
    lengths = Counter(len(column) for column in columns.values())
    longest = max(lengths)
    if any(count > 1 for length, count in lengths.items() if length != longest):
        found = ", ".join(f"{name!r} of {len(column):,}" for name, column in columns.items())
        raise UsageError(
            "the arrays have several lengths, so it is not clear what a sample is",
            path=path,
            expected="one length for all samples; or names such as train_images, test_images",
            found=found,
            fix="save the arrays that belong together in separate files",
        )
    chosen = {name: column for name, column in columns.items() if len(column) == longest}
    for name, column in columns.items():
        # A few values may be names of classes or means of channels.
        near = len(column) >= _NEAR and 2 * len(column) > longest
        if name not in chosen and (near or name.lower() in LABELS):
            raise UsageError(
                f"the array {name!r} is not as long as the others",
                path=path,
                expected=f"{longest:,} values, as {next(iter(chosen))!r} has",
                found=f"{len(column):,}",
                fix="save it with one value per sample, or in a file of its own if it is not part"
                " of the samples",
            )
    return chosen, [name for name in columns if name not in chosen]


def are_columns(root: Path, names: Sequence[str]) -> bool:
    """Whether a few files are fields of the same samples, rather than one sample each.

    They are if they have one length and different shapes or types, or are named after splits.
    """
    if not 2 <= len(names) <= 16:
        return False
    headers = []
    for name in names:
        with os_errors.explained("open", root / name):
            source = Part(root / name).open()
            headers.append(npy_header(source.read(0, min(_HEAD, source.size))))
    if not all(header is not None and header.shape for header in headers):
        return False
    by_split: dict[str, set[int]] = defaultdict(set)
    kinds = set()
    for name, header in zip(names, headers, strict=True):
        assert header is not None
        by_split[split_in(name[:-4])[0]].add(header.shape[0])
        kinds.add((header.shape[1:], header.descr))
    alike = all(len(lengths) == 1 for lengths in by_split.values())
    return alike and (len(kinds) > 1 or "" not in by_split)
