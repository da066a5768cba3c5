"""TFRecord files: records of length, its masked CRC-32C, payload, its masked CRC-32C.

See tensorflow/core/lib/io/record_writer.h. Shards written by shardkit have an index beside them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from shardkit.codecs.array import dump_array, load_table
from shardkit.errors import DamagedError, FormatError
from shardkit.formats.base import ShardSpec, ShardWriter
from shardkit.formats.compressed import opened, read_ahead
from shardkit.formats.tfrecord.example import example
from shardkit.formats.tfrecord.reader import ExampleReader, scan
from shardkit.metadata.manifest import FOLDER
from shardkit.sample import Sample
from shardkit.storage import fs
from shardkit.storage.blobs import Blobs, Numbers
from shardkit.storage.byte_source import ByteSource, Memory, Table, open_source

HEAD, TAIL = 12, 4  # bytes before and after a payload
# For each record: its offset, its size with header and checksum, and the size of the leading part
# with key and numbers, which can be read alone; the whole size if this is unknown.
INDEX = np.dtype([("offset", "<u8"), ("size", "<u8"), ("head", "<u8")])
ROW = struct.Struct("<3Q")
_BLOCK = 1 << 12  # bytes that are read at once to find headers


def checksum(*chunks: Any) -> bytes:
    """Return the masked CRC-32C of all chunks together, which are bytes or uint8."""
    crc: int = reduce(google_crc32c.extend, chunks, 0)
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


def header(size: int) -> bytes:
    """Return the header of a record with a payload of `size` bytes."""
    length = size.to_bytes(8, "little")
    return length + checksum(length)


def is_header(head: bytes) -> bool:
    return len(head) == HEAD and checksum(head[:8]) == head[8:]


def _scanned(source: ByteSource) -> bytes:
    """Create the index of a file that has none, from the headers of its records."""
    source = read_ahead(source)
    rows, at, start, block = bytearray(), 0, 0, b""
    while at < source.size:
        if at + HEAD > start + len(block):
            start, block = at, source.read(at, min(_BLOCK, source.size - at))
        head = block[at - start : at - start + HEAD]
        size = int.from_bytes(head[:8], "little") + HEAD + TAIL
        left = source.size - at
        if not is_header(head) and not at:
            raise FormatError(
                "this is not a TFRecord file: the CRC-32C of the first length does not match",
                path=source.path,
                offset=at,
                expected="records as written by TensorFlow, or a gzip file of such records",
            )
        if not is_header(head) and len(head) == HEAD:
            what = "the CRC-32C of a record's length does not match"
            raise DamagedError(what, path=source.path, offset=at)
        if len(head) < HEAD or size > left:
            found = f"{left:,} bytes, then the end of the file"
            what = "the file ends inside a record"
            raise DamagedError(what, path=source.path, offset=at, found=found)
        rows += ROW.pack(at, size, size)
        at += size
    return bytes(rows)


def index_path(shard: Path) -> Path:
    """Return the path of a shard's index: `__shardkit__/data.records.npy` for `data.tfrecord`."""
    return shard.parent / FOLDER / (shard.name.removesuffix(".tfrecord") + ".records.npy")


def _check(record: Any) -> None:
    """Raise ValueError if a checksum of a record, of bytes or uint8, does not match."""
    data = record[HEAD:-TAIL]
    if bytes(record[:HEAD]) != header(len(data)) or bytes(record[-TAIL:]) != checksum(data):
        raise ValueError("the CRC-32C of the record, or of its length, does not match")


class TFRecordReader(ExampleReader):
    def __init__(self, path: Path, layout: dict[str, Any] | None = None) -> None:
        index = index_path(path)
        if layout is not None and "index" not in layout and index.exists():
            source = open_source(path)
            self._index = load_table(index, INDEX, "the index of a shard")
            self.in_memory = self._index.in_memory
        else:
            source, self.temporary_bytes = opened(path, "TFRecord file", "tfrecord", is_header)
            rows: bytes = (layout or {}).get("index") or _scanned(source)
            self._index = Table(Memory(rows, path), 0, len(rows) // ROW.size, INDEX)
            if layout is None:
                layout = scan(path, len(self), lambda number: self._whole(source, number))
            layout = {**layout, "index": rows}
        super().__init__(path, layout, source)

    def __len__(self) -> int:
        return len(self._index)

    def record(self, position: int, numbers: bool) -> tuple[bytes, bool]:
        if numbers:
            offset, size, head = ROW.unpack(self._index.record(position))
            if HEAD < head < size:
                return self.source.read(offset + HEAD, head - HEAD), False
        return self._whole(self.source, position), True

    def _whole(self, source: ByteSource, position: int) -> bytes:
        """Return the payload of a record; raises ValueError if a checksum does not match."""
        offset, size, _ = ROW.unpack(self._index.record(position))
        record = source.read(offset, size)
        _check(record)
        return record[HEAD:-TAIL]

    def ranges(
        self, positions: npt.NDArray[np.int64], numbers: bool
    ) -> tuple[Numbers, Numbers, bool]:
        rows = self._index.take(positions)
        offsets, sizes, heads = (rows[name].astype(np.int64) for name in INDEX.names or ())
        if numbers and (heads > HEAD).all() and (heads < sizes).all():
            return offsets + HEAD, heads - HEAD, False
        return offsets, sizes, True

    def examples(self, positions: Sequence[int], records: Blobs, whole: bool) -> Blobs:
        if not whole:
            return records
        for start, size in zip(records.starts.tolist(), records.sizes.tolist(), strict=True):
            _check(records.data[start : start + size])
        return Blobs(records.data, records.starts + HEAD, records.sizes - (HEAD + TAIL))

    def offset(self, position: int, field: str) -> int:
        return int(ROW.unpack(self._index.record(position))[0])

    def spans(self) -> npt.NDArray[np.int64]:
        rows = np.concatenate([np.zeros(0, INDEX), *self._index.chunks()])
        return np.stack([rows["offset"], rows["offset"] + rows["size"]], axis=1).astype(np.int64)


class TFRecordWriter(ShardWriter):
    """Stores key and numbers first in a record, so that they can be read without the rest."""

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, spec)
        self._rows = bytearray()
        self._file = fs.BufferedFile(path)

    def write(self, sample: Sample) -> bool:
        first, *others = chunks = example(sample, self.spec.schema)
        length = sum(map(len, chunks))
        size = HEAD + length + TAIL
        if self.spec.is_full(len(self._rows), self._file.size + size):
            return False
        self._rows += ROW.pack(self._file.size, size, HEAD + len(first) if others else size)
        self._file.write(header(length), *chunks, checksum(*chunks))
        return True

    def finish(self) -> None:
        with self._file:
            pass
        _write_index(self.path, bytes(self._rows))


def join(path: Path, parts: Sequence[Path], spec: ShardSpec) -> None:
    """Join several files into one, by concatenating their records and indexes."""
    rows, start = bytearray(), 0
    with fs.create(path) as file:
        for part in parts:
            index = np.load(index_path(part))
            index["offset"] += start
            rows += index.tobytes()
            start += fs.append(file, part, part.stat().st_size)
    _write_index(path, bytes(rows))


def _write_index(path: Path, rows: bytes) -> None:
    fs.make_folder(index_path(path).parent)
    with fs.create(index_path(path)) as file:
        fs.write(file, [dump_array(np.frombuffer(rows, INDEX))])
