"""Locates the samples of a chunk, which may be compressed one by one, in frames or as a whole."""

from __future__ import annotations

import struct

import numpy as np

from shardkit.codecs.compression import COMPRESSED_BLOCK, compression_of, decompressed, unpacked
from shardkit.errors import DamagedError, FormatError
from shardkit.storage.byte_source import ByteSource, Memory, Part, Table

_FRAMED = b"LDFZ01\0\0"
_PREFIX = struct.Struct("<8sHHIII")  # magic, version, flags, samples, samples per frame, frames
_FRAME = struct.Struct("<IIQII")  # first sample, samples, offset, size, decompressed size
_ROWS, _TAIL = b"LDARW01\0", struct.Struct("<I8s")
_PAIR = struct.Struct("<2I")


Item = tuple[ByteSource, int, int]  # start and end of the bytes of a sample


class Items:
    """An uncompressed chunk: the number of samples, their offsets and the end, the samples."""

    count: int

    def __init__(self, source: ByteSource) -> None:
        (self.count,) = struct.unpack("<I", source.read(0, 4))
        self.source, self.offsets = source, Table(source, 4, self.count + 1, "<u4")
        end = int(self.offsets.slice(self.count, self.count + 1)[0])
        if end > source.size:
            raise source.ends(source.size, end - source.size)

    def bounds(self, position: int) -> tuple[int, int]:
        start, stop = _PAIR.unpack(self.offsets.record(position, 2))
        if start > stop:
            raise ValueError(f"it starts at byte {start:,} and ends at byte {stop:,}")
        return start, stop

    def item(self, position: int) -> Item:
        return self.source, *self.bounds(position)


class Compressed(Items):
    """A chunk whose samples are compressed one by one (`compression_level="sample"`)."""

    def item(self, position: int) -> Item:
        start, stop = self.bounds(position)
        data = _inflated(self.source.read(start, stop - start))
        return Memory(data, self.source.path), 0, len(data)


class Framed(Items):
    """A chunk of compressed frames of several samples each (`compression_level="batch"`)."""

    def __init__(self, source: ByteSource) -> None:
        head = _PREFIX.unpack(source.read(0, _PREFIX.size))
        _, version, _, self.count, self._each, frames = head
        if version != 1:
            raise FormatError("unsupported version of the chunk", path=source.path, offset=8)
        if not self._each or frames != -(-self.count // self._each):
            raise DamagedError("the header of the chunk is damaged", path=source.path, offset=12)
        start = _PREFIX.size
        self.source, self.offsets = source, Table(source, start, self.count + 1, "<u4")
        start += 4 * (self.count + 1)
        self._frames = Table(source, start, frames, np.dtype((np.void, _FRAME.size)))
        self._latest = (-1, b"")  # one tuple, so that threads replace both values at once

    def item(self, position: int) -> Item:
        number = position // self._each
        latest, data = self._latest
        if latest != number:
            _, _, at, stored, size = _FRAME.unpack(self._frames.record(number))
            data = _inflated(self.source.read(at, stored), size)
            self._latest = (number, data)
        base, _ = self.bounds(number * self._each)
        start, stop = self.bounds(position)
        return Memory(data, self.source.path), start - base, stop - base


def rows_of(source: ByteSource) -> ByteSource | None:
    """The Arrow file at the end of a chunk; None if there is none."""
    start = source.size - _TAIL.size
    size, magic = _TAIL.unpack(source.read(start, _TAIL.size)) if start > 0 else (0, b"")
    return Part(source, start - size, size) if magic == _ROWS else None


def items_of(source: ByteSource, each: bool) -> tuple[Items, int]:
    """The samples of a chunk, and the size of its temporary file. `each`: compressed one by one."""
    head = source.read(0, min(len(_FRAMED), source.size))
    if head == _FRAMED:
        return Framed(source), 0
    if compression_of(head) == "zst":  # the whole file (`compression_level="chunk"`)
        blocks = source.blocks(COMPRESSED_BLOCK)
        source = unpacked(source.path, blocks, "zst", "a compressed chunk")
        return Items(source), source.size
    return (Compressed if each else Items)(source), 0


def _inflated(data: bytes, size: int | None = None) -> bytes:
    """A decompressed frame. Raises ValueError if it is damaged, or has not `size` bytes."""
    found = bytearray()
    starts = range(0, len(data), COMPRESSED_BLOCK)
    for piece in decompressed((data[at : at + COMPRESSED_BLOCK] for at in starts), "zst"):
        found += piece
        if size is not None and len(found) > size:
            break
    if size is not None and len(found) != size:
        raise ValueError(f"a frame does not decompress to {size:,} bytes")
    return bytes(found)
