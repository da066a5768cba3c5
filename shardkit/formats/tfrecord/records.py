"""Records of a TFRecord file: length, its masked CRC-32C, payload, its masked CRC-32C.

See tensorflow/core/lib/io/record_writer.h. Shards written by shardkit have an index beside them.
"""

from __future__ import annotations

import struct
from functools import reduce
from pathlib import Path

import google_crc32c
import numpy as np

from shardkit.errors import DamagedError, FormatError
from shardkit.formats.compressed import read_ahead
from shardkit.metadata.manifest import FOLDER
from shardkit.storage.byte_source import ByteSource

HEAD, TAIL = 12, 4  # bytes before and after a payload
# For each record: its offset, its size with header and checksum, and the size of the leading part
# with key and numbers, which can be read alone; the whole size if this is unknown.
INDEX = np.dtype([("offset", "<u8"), ("size", "<u8"), ("head", "<u8")])
ROW = struct.Struct("<3Q")
_BLOCK = 1 << 12  # bytes that are read at once to find headers


def checksum(*chunks: bytes) -> bytes:
    """The masked CRC-32C of all chunks together."""
    crc: int = reduce(google_crc32c.extend, chunks, 0)
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


def header(size: int) -> bytes:
    """The header of a record with a payload of `size` bytes."""
    length = size.to_bytes(8, "little")
    return length + checksum(length)


def is_header(head: bytes) -> bool:
    return len(head) == HEAD and checksum(head[:8]) == head[8:]


def payload(source: ByteSource, offset: int, size: int) -> bytes:
    """The payload of a record; raises ValueError if a checksum does not match."""
    record = source.read(offset, size)
    data = record[HEAD:-TAIL]
    if record[:HEAD] != header(len(data)) or record[-TAIL:] != checksum(data):
        raise ValueError("the CRC-32C of the record, or of its length, does not match")
    return data


def scanned(source: ByteSource) -> bytes:
    """Create the index of a file that has none, from the headers of its records."""
    source = read_ahead(source)
    rows, at, start, block = bytearray(), 0, 0, b""
    while at < source.size:
        if at + HEAD > start + len(block):
            start, block = at, source.read(at, min(_BLOCK, source.size - at))
        head = block[at - start : at - start + HEAD]
        size = int.from_bytes(head[:8], "little") + HEAD + TAIL
        left = source.size - at
        if not at and not is_header(head):
            raise FormatError(
                "this is not a TFRecord file: the CRC-32C of the first length does not match",
                path=source.path,
                offset=at,
                expected="records as written by TensorFlow, or a gzip file of such records",
            )
        if len(head) < HEAD or (is_header(head) and size > left):
            found = f"{left:,} bytes, then the end of the file"
            words = "the file ends inside a record"
            raise DamagedError(words, path=source.path, offset=at, found=found)
        if not is_header(head):
            words = "the CRC-32C of a record's length does not match"
            raise DamagedError(words, path=source.path, offset=at)
        rows += ROW.pack(at, size, size)
        at += size
    return bytes(rows)


def index_path(shard: Path) -> Path:
    """The path of a shard's index: `__shardkit__/data.records.npy` for `data.tfrecord`."""
    return shard.parent / FOLDER / (shard.name.removesuffix(".tfrecord") + ".records.npy")
