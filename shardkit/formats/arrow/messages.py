"""Finds the record batches of an Arrow file or stream by reading only the message headers.

pyarrow would load every batch to count its rows. A message is a marker, a length, a flatbuffer and
a body. In a stream, messages follow one another; in a file, the footer lists their positions
(Polars writes dictionaries behind the batches that use them). Layout: the Arrow columnar format,
"Serialization and Interprocess Communication"; File.fbs, Message.fbs, Schema.fbs.
"""

from __future__ import annotations

import contextlib
import struct
from itertools import pairwise
from typing import Any, NamedTuple

from shardkit.errors import DamagedError, FormatError
from shardkit.storage.byte_source import ByteSource
from shardkit.storage.fs import EXPANSION

MAGIC = b"ARROW1"
_FILE_START = 8  # the magic, padded
_FILE_END = 4 + len(MAGIC)  # length of the footer, and the magic
_MARKER = b"\xff" * 4
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # values of the union MessageHeader
_FREE_ROWS = 1 << 20  # allowance in bytes when rows are checked, as rows of type null take no bytes


class Message(NamedTuple):
    """A record batch or a dictionary: byte positions of its message in the file."""

    offset: int
    body: int  # start of its buffers
    end: int
    kind: int
    rows: int
    compressed: bool


class Messages(NamedTuple):
    """All messages of a file or stream, in order."""

    schema: bytes | None  # the first message; None for a file that does not begin with it
    dictionaries: list[Message]
    batches: list[Message]
    needed: list[int]  # for each batch, the number of dictionaries that must be read before it


def find_messages(source: ByteSource) -> Messages:
    """Find all messages; raises DamagedError at the byte where one is truncated or damaged."""
    head = source.read(0, min(len(MAGIC), source.size))
    if head[:4] == b"FEA1":
        raise FormatError(
            "this is a Feather file of version 1, which shardkit does not read",
            path=source.path,
            fix="write it again: pandas.read_feather(...).to_feather(...)",
        )
    if not head:
        raise DamagedError("the file is empty", path=source.path)
    return _of_file(source) if head == MAGIC else _of_stream(source)


def _of_stream(source: ByteSource) -> Messages:
    """Walk over the messages of a stream."""
    at, schema = 0, b""
    dictionaries: list[Message] = []
    batches: list[Message] = []
    needed = []
    while at < source.size:
        message = _message(source, at, source.size)
        if message is None:
            break
        if (message.kind == _SCHEMA) is bool(schema):
            raise _damaged("the schema is not the first message, or not the only one", source, at)
        if message.kind == _SCHEMA:
            schema = source.read(at, message.end - at)
        elif message.kind == _DICTIONARY:
            dictionaries.append(message)
        elif message.kind == _BATCH:
            batches.append(message)
            needed.append(len(dictionaries))
        else:
            raise _damaged("a message has an unexpected type", source, at)
        at = message.end
    if not schema:
        raise _damaged("there is no schema", source, 0)
    return Messages(schema, dictionaries, batches, needed)


def _of_file(source: ByteSource) -> Messages:
    """Look up the messages of a file in its footer."""
    end = source.size - _FILE_END
    tail = source.read(end, _FILE_END) if end >= _FILE_START else b""
    if tail[4:] != MAGIC:
        raise DamagedError(
            "the Arrow file is truncated",
            path=source.path,
            offset=source.size,
            expected=f"{MAGIC.decode()!r} as the last bytes",
            fix="copy the file again",
        )
    start = end - int.from_bytes(tail[:4], "little", signed=True)
    if not _FILE_START <= start < end:
        raise _damaged("the footer has an invalid length", source, end)
    try:
        footer = _Table.root(source.read(start, end - start))
        _check_byte_order(footer.table(1))
        listed = [
            (kind, at)
            for field, kind in ((2, _DICTIONARY), (3, _BATCH))
            for at, _, _ in footer.records(field, "<qi4xq")
        ]
    except (struct.error, ValueError) as error:
        raise _damaged(f"the footer is damaged ({error})", source, start) from error
    found: list[Message] = []
    for kind, at in listed:
        message = _message(source, at, start) if _FILE_START <= at < start else None
        if message is None or message.kind != kind:
            raise _damaged("the footer refers to a byte where no message begins", source, at)
        found.append(message)
    for before, after in pairwise(sorted(found)):
        if after.offset < before.end:
            raise _damaged("the footer refers to overlapping messages", source, after.offset)
    dictionaries = [message for message in found if message.kind == _DICTIONARY]
    batches = found[len(dictionaries) :]
    schema = _schema(source, start)
    return Messages(schema, dictionaries, batches, [len(dictionaries)] * len(batches))


def _schema(source: ByteSource, end: int) -> bytes | None:
    """Return the first message of a file, if it is a schema: Polars only writes that of the footer.

    With it, a file is decoded like a stream. Otherwise pyarrow must open the file, which starts
    threads, and a short process that exits meanwhile is aborted (0.4 % of runs with pyarrow 26).
    """
    with contextlib.suppress(DamagedError):
        message = _message(source, _FILE_START, end)
        if message is not None and message.kind == _SCHEMA:
            return source.read(message.offset, message.end - message.offset)
    return None


def _message(source: ByteSource, at: int, end: int) -> Message | None:
    """The message at byte `at`, which must end by `end`; None for the end-of-stream marker."""
    front = source.read(at, min(8, end - at))
    try:
        marked = front[:4] == _MARKER  # there is no marker before Arrow 0.15
        (size,) = struct.unpack("<I", front[4:] if marked else front[:4])
        body = at + (8 if marked else 4) + size
        if size == 0:
            return None
        kind, rows, compressed, stop = 0, 0, False, body
        if body <= end:
            header = _Table.root(source.read(body - size, size))
            kind, rows, compressed, length = _header(header)
            stop += length
    except (struct.error, ValueError) as error:
        raise _damaged(f"a message has a damaged header ({error})", source, at) from error
    if stop > end:
        raise DamagedError(
            "the Arrow data is truncated inside a message",
            path=source.path,
            offset=at,
            expected=f"{stop - at:,} bytes from here",
            found=f"{max(end - at, 0):,} bytes, then the end",
            fix="copy the file again",
        )
    return Message(at, body, stop, kind, rows, compressed)


def _header(message: _Table) -> tuple[int, int, bool, int]:
    """Kind of a message, number of rows, whether buffers are compressed, bytes of the body."""
    kind, body = message.number("<B", 1), message.number("<q", 3)
    rows, compressed = 0, False
    if kind == _SCHEMA:
        _check_byte_order(message.table(2))
    if kind == _BATCH:
        batch = message.table(2)
        rows, compressed = batch.number("<q", 0), batch.position(3) > 0
    if body < 0 or rows < 0:
        raise ValueError("a negative length")
    if rows > 8 * (body * (EXPANSION if compressed else 1) + _FREE_ROWS):  # at least a bit per row
        raise ValueError(f"{rows:,} rows in {body:,} bytes")
    return kind, rows, compressed, body


def _check_byte_order(schema: _Table) -> None:
    if schema.number("<h", 0):
        raise ValueError("big-endian numbers, which shardkit does not read")


def null_counts(message: memoryview) -> list[int]:
    """The number of nulls in each array of a batch: columns in order, each before its children.

    `message` need not include its body. Raises ValueError or struct.error for a damaged header.
    """
    header, _ = _parts(message)
    return [nulls for _, nulls in header.table(2).records(1, "<qq")]


def decompressed_size(message: memoryview) -> int:
    """Bytes of the buffers of a batch or a dictionary after decompression, as stated in them.

    Raises ValueError or struct.error for a damaged header.
    """
    header, body = _parts(message)
    batch = header.table(2)
    if header.number("<B", 1) == _DICTIONARY:
        batch = batch.table(1)
    if not batch.position(3):
        return 0
    starts = [start for start, size in batch.records(2, "<qq") if size >= 8]
    # Each buffer begins with its decompressed length, or with -1 if it is not compressed.
    return sum(max(_number(body, "<q", start), 0) for start in starts)


def _parts(message: memoryview) -> tuple[_Table, memoryview]:
    """Return the flatbuffer and the body of a message."""
    at = 8 if bytes(message[:4]) == _MARKER else 4
    stop = at + _number(message, "<I", at - 4)
    return _Table.root(bytes(message[at:stop])), message[stop:]


class _Table(NamedTuple):
    """A table of a flatbuffer.

    It begins with the distance back to its vtable, which has the offset of each field in the table:
    0 for a field that is omitted and therefore has its default value.
    """

    data: bytes
    at: int

    @classmethod
    def root(cls, data: bytes) -> _Table:
        return cls(data, _number(data, "<I", 0))

    def position(self, field: int) -> int:
        """The byte at which a field begins; 0, which is not a valid position, if it is omitted."""
        vtable = self.at - _number(self.data, "<i", self.at)
        at = vtable + 4 + 2 * field
        if at + 2 > vtable + _number(self.data, "<H", vtable):
            return 0
        distance = _number(self.data, "<H", at)
        return self.at + distance if distance else 0

    def number(self, code: str, field: int) -> int:
        at = self.position(field)
        return _number(self.data, code, at) if at else 0

    def table(self, field: int) -> _Table:
        """Return the table that a field refers to; raises ValueError if the field is omitted."""
        at = self.position(field)
        if not at:
            raise ValueError(f"field {field} is missing")
        return _Table(self.data, at + _number(self.data, "<I", at))

    def records(self, field: int, code: str) -> list[tuple[Any, ...]]:
        """Return the structs in a vector; empty if the field is omitted."""
        if not self.position(field):
            return []
        at = self.table(field).at
        stop = at + 4 + _number(self.data, "<I", at) * struct.calcsize(code)
        if stop > len(self.data):
            raise ValueError(f"a list is longer than the {len(self.data)} bytes of the header")
        return list(struct.iter_unpack(code, self.data[at + 4 : stop]))


def _number(data: bytes | memoryview, code: str, at: int) -> int:
    if at < 0:
        raise ValueError("an offset is out of range")
    (value,) = struct.unpack_from(code, data, at)
    return int(value)


def _damaged(what: str, source: ByteSource, at: int) -> DamagedError:
    return DamagedError(
        f"this is a damaged Arrow file or stream, or not one at all: {what}",
        path=source.path,
        offset=at,
        fix="copy the file again, or write it again where it was made",
    )
