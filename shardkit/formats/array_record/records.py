"""Random access to the records of an ArrayRecord file: the subset of Riegeli that such files use.

A file is a sequence of chunks (a 40-byte header, then data), with a 24-byte block header at every
multiple of 64 KiB. The last block has a chunk with the offset of the footer. The footer is a chunk
too: its first record describes the file, and the others have the offset and the number of records
of each data chunk.

Riegeli's hashes are not verified: in Python this takes a thousand times as long as reading.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.codecs.protobuf import fields, varint
from shardkit.errors import DamagedError, FormatError
from shardkit.formats.tfrecord.example import unpacked
from shardkit.helpers.extras import extra
from shardkit.storage import fs
from shardkit.storage.byte_source import ByteSource

_Numbers = npt.NDArray[np.int64]
_Chunk = tuple[bytes, list[int]]  # records, and the end of each

BLOCK = 1 << 16
BLOCK_HEADER = 24
# Chunk header: size of the data; type and number of records; decoded size of the records.
_CHUNK = struct.Struct("<8xQ8xQQ")
_SIGNATURE = bytes.fromhex("83af70d10d884a3f")  # start of the first block header
_MAGIC = 0x71930E704FDAE05E
_ZSTD = ord("z")
_CODECS = {ord("b"): "brotli", ord("s"): "snappy"}


class TransposedError(FormatError):
    """Records in Riegeli's transposed encoding, whose fields are stored in columns."""


class Records:
    """The records of a file, by position."""

    def __init__(self, source: ByteSource) -> None:
        if source.read(0, min(source.size, 8)) != _SIGNATURE:
            raise FormatError("this is not an ArrayRecord file", path=source.path, offset=0)
        at = last = source.size - BLOCK
        try:
            if last < BLOCK or last % BLOCK:
                raise ValueError("the file is truncated, or was never closed")
            records, ends = _chunk(source, last, source.size)
            facts = dict(_facts(records, 0, ends[0]))
            at = facts.get(1, 0)
            if facts.get(2) != _MAGIC or not 0 < at < last:
                raise ValueError("the file is truncated, or its last block is damaged")
            self._starts, self._group, self._count = _footer(source, at, last)
        except (ValueError, IndexError) as error:
            raise DamagedError(
                f"cannot read the footer: {error}",
                path=source.path,
                offset=max(at, 0),
                expected="the footer of an ArrayRecord file",
                fix="copy it again, or write it again: ArrayRecordWriter.close() writes the footer",
            ) from error
        self.in_memory = self._starts.nbytes
        self._latest: tuple[int, _Chunk] = -1, (b"", [])

    def __len__(self) -> int:
        return self._count

    def read(self, source: ByteSource, position: int) -> bytes:
        """Return a record; raises ValueError if it is damaged."""
        number, row = divmod(position, self._group)
        latest, chunk = self._latest
        if latest != number:
            chunk = _chunk(source, *self._starts[number : number + 2].tolist())
            if self._group > 1:
                self._latest = number, chunk
        records, ends = chunk
        if len(ends) <= row:
            raise ValueError(f"there are only {len(ends)} records in its chunk")
        return records[ends[row - 1] if row else 0 : ends[row]]

    def ranges(self, positions: _Numbers) -> tuple[_Numbers, _Numbers] | None:
        """Return offsets and sizes of the chunks of several records, if each has one."""
        if self._group > 1:
            return None
        starts = self._starts[positions]
        return starts, self._starts[positions + 1] - starts

    def parsed(self, data: bytes, path: Path, position: int) -> bytes:
        """Return the record in the bytes of its chunk, which has no other."""
        records, ends = _parsed(data, path, self.offset(position))
        return records[: ends[0]]

    def spans(self) -> _Numbers:
        """Return the start and the end of the chunk of each record."""
        chunks = np.arange(self._count) // self._group
        return np.stack([self._starts[chunks], self._starts[chunks + 1]], axis=1)

    def offset(self, position: int) -> int:
        """Return the start of the chunk of a record."""
        return int(self._starts[position // self._group])


def _footer(source: ByteSource, at: int, stop: int) -> tuple[_Numbers, int, int]:
    """The starts of all chunks and the end of the last, records per chunk, and records in total."""
    records, ends = _chunk(source, at, stop)
    facts: dict[int, int] = {}
    for _, start, end in fields(records, 0, ends[0]):
        facts |= _facts(records, start, end)
    if facts.get(1) != 1:
        raise ValueError(f"it has version {facts.get(1)}, not 1")
    rows = unpacked(records[ends[0] :]).reshape(-1, 6)  # tag and value of three fields
    if (rows[:, ::2] != (0x08, 0x10, 0x18)).any():
        raise ValueError("it has unexpected fields")
    starts, counts = np.append(rows[:, 1], at), rows[:, 5]
    group = int(counts[0]) if len(counts) else 1
    full = counts[:-1] == group
    if not (full.all() and (counts > 0).all() and (counts <= group).all()):
        raise ValueError("its chunks have different numbers of records")
    if len(rows) != facts.get(2, 0) or counts.sum() != facts.get(3, 0):
        raise ValueError(f"it has {len(rows):,} chunks, not {facts.get(2, 0):,}")
    if (np.diff(starts) <= 0).any() or starts[0] <= 0:
        raise ValueError("its chunks overlap")
    return starts, group, int(counts.sum())


def _chunk(source: ByteSource, at: int, stop: int) -> _Chunk:
    """Return the records of the chunk that occupies the bytes from `at` to `stop`."""
    return _parsed(source.read(at, stop - at), source.path, at)


def _parsed(data: bytes, path: Path, at: int) -> _Chunk:
    """Return the records of a chunk, whose bytes are `data` and begin at `at`."""
    data, stop = _without_headers(data, at), at + len(data)
    size, kind, total = _CHUNK.unpack(data[: _CHUNK.size].ljust(_CHUNK.size, b"\0"))
    if size > len(data) - _CHUNK.size:
        raise ValueError(f"a chunk of {size:,} bytes overlaps the next, at {stop:,}")
    if kind & 0xFF == ord("t"):
        raise TransposedError(
            "the records are in transposed encoding, which shardkit does not support",
            path=path,
            offset=at,
            fix="write them again with the array_record library, without transpose:true",
        )
    if kind & 0xFF != ord("r"):
        raise ValueError("it is not a chunk of records")
    end = _CHUNK.size + size
    length, start = varint(data, _CHUNK.size + 1, end)
    codec, middle = data[_CHUNK.size], start + length
    records = _decompressed(codec, data, middle, end)
    if len(records) != total:
        raise ValueError(f"its records have {len(records):,} bytes, not {total:,}")
    if kind >> 8 == 1:
        return records, [total]
    sizes = unpacked(_decompressed(codec, data, start, middle))
    ends = np.cumsum(sizes).tolist()
    if len(ends) != kind >> 8 or not ends or sizes.min() < 0 or ends[-1] != total:
        raise ValueError("its header and the sizes of its records contradict each other")
    return records, ends


def _without_headers(data: bytes, at: int) -> bytes:
    """Return bytes that begin at `at` without the block headers in them."""
    first = -at % BLOCK
    if first >= len(data):
        return data
    view, rests = memoryview(data), range(first + BLOCK_HEADER, len(data), BLOCK)
    return b"".join([view[:first], *(view[n : n + BLOCK - BLOCK_HEADER] for n in rests)])


def _facts(data: bytes, at: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the number and the value of each varint field of a message."""
    for tag, start, end in fields(data, at, stop):
        if not tag & 7:
            yield tag >> 3, varint(data, start, end)[0]


class _Zstandard(threading.local):
    """One decompressor per thread: creating it takes as long as the rest of reading 28 kB."""

    def __init__(self) -> None:
        with extra("zstd", "reading Zstandard"):
            import zstandard
        self.size_of, self.error = zstandard.frame_content_size, zstandard.ZstdError
        self.decompress = zstandard.ZstdDecompressor().decompress


_zstandard = cache(_Zstandard)


def _decompressed(codec: int, every: bytes, start: int, stop: int) -> bytes:
    if not codec:
        return every[start:stop]
    size, at = varint(every, start, stop)
    fs.check_expansion(size, stop - start)
    data = memoryview(every)[at:stop]
    if codec == _ZSTD:
        zstandard = _zstandard()
        try:
            if zstandard.size_of(data) not in (-1, size):
                raise ValueError("the two stored sizes of its decompressed bytes differ")
            found: bytes = zstandard.decompress(data, max_output_size=size)
        except zstandard.error as error:
            raise ValueError(str(error)) from error
        return found
    if codec not in _CODECS:
        raise ValueError(f"{codec} is not a known compression type")
    with extra("arrow", f"reading {_CODECS[codec]}"):
        import pyarrow
    try:
        found = pyarrow.decompress(data, size, codec=_CODECS[codec], asbytes=True)
    except OSError as error:
        raise ValueError(str(error)) from error
    return found
