"""Where the batches of an Arrow file or stream stand, read from their headers alone.

Opening a shard takes the number of rows of each batch, for which pyarrow would load them all. Each
message is a mark, a length, a flatbuffer, and a body. In a stream they follow one another; in a
file the footer has the schema and says where the others stand (Polars writes dictionaries behind
the batches that use them, and a schema at the front that is no message). Layout: the Arrow columnar
format, "Serialization and Interprocess Communication"; File.fbs, Message.fbs, Schema.fbs;
FlatBuffers' internals.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import NamedTuple

from shardkit.byte_source import ByteSource
from shardkit.errors import DamagedError, FormatError
from shardkit.storage import EXPANSION

MAGIC = b"ARROW1"
_FILE_START = 8  # the magic, padded
_FILE_END = 4 + len(MAGIC)  # length of the footer, and the magic
_MARK = b"\xff" * 4
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # of the union MessageHeader
_BLOCK = 24  # bytes of a block in the footer: where a message begins, its length, its body's
_FREE_ROWS = 1 << 20  # bytes that a batch may take too few for its rows: nulls take none


class Message(NamedTuple):
    """A batch of rows or a dictionary: where its message stands in the file, in bytes."""

    offset: int
    body: int  # where its buffers begin
    end: int
    kind: int
    rows: int
    compressed: bool


class Messages(NamedTuple):
    """All messages of a file, in order."""

    schema: bytes  # a message, as it stands in a stream
    dictionaries: list[Message]
    batches: list[Message]
    needed: list[int]  # how many dictionaries each batch needs: the first so many


def find_messages(source: ByteSource) -> Messages:
    """Find all messages; raises DamagedError at the byte where one is cut or damaged."""
    head = source.read(0, min(len(MAGIC), source.size))
    if head[:4] == b"FEA1":
        raise FormatError(
            "this is a Feather file of version 1, which shardkit does not read",
            path=source.path,
            fix="write it again: pandas.read_feather(...).to_feather(...)",
        )
    if not head:
        raise DamagedError("the file is empty", path=source.path)
    if head == MAGIC:
        return _of_file(source)
    if source.size < 8:
        raise _damaged("the file is too short", source, 0)
    return _of_stream(source)


def _of_stream(source: ByteSource) -> Messages:
    """Walk over the messages of a stream."""
    at = 0
    found = Messages(b"", [], [], [])
    while at < source.size:
        message = _message(source, at, source.size)
        if message is None:
            break
        if message.kind == _SCHEMA and not found.schema:
            found = found._replace(schema=source.read(at, message.end - at))
        elif not found.schema or message.kind == _SCHEMA:
            raise _damaged("the schema does not stand first", source, at)
        elif message.kind == _DICTIONARY:
            found.dictionaries.append(message)
        elif message.kind == _BATCH:
            found.batches.append(message)
            found.needed.append(len(found.dictionaries))
        else:
            raise _damaged("a message is of no kind that holds rows", source, at)
        at = message.end
    if not found.schema:
        raise _damaged("there is no schema", source, 0)
    return found


def _of_file(source: ByteSource) -> Messages:
    """Look up the messages of a file in its footer."""
    start = _footer_start(source)
    footer = source.read(start, source.size - _FILE_END - start)
    try:
        schema = _schema_message(footer)
        _header(schema[8:])
        table = _table(footer, 0)
        blocks = [_blocks(footer, table, field) for field in (2, 3)]  # dictionaries and batches
    except (struct.error, ValueError) as error:
        raise _damaged(f"the footer is damaged ({error})", source, start) from error
    found: list[list[Message]] = [[], []]
    for kind, offsets, messages in zip((_DICTIONARY, _BATCH), blocks, found, strict=True):
        for at in offsets:
            message = _message(source, at, start) if _FILE_START <= at < start else None
            if message is None or message.kind != kind:
                raise _damaged("the footer names a byte at which no message stands", source, at)
            messages.append(message)
    dictionaries, batches = found
    for before, after in pairwise(sorted(dictionaries + batches)):
        if after.offset < before.end:
            raise _damaged("the footer names messages that overlap", source, after.offset)
    return Messages(schema, dictionaries, batches, [len(dictionaries)] * len(batches))


def _footer_start(source: ByteSource) -> int:
    """The byte at which the footer of a file begins."""
    size, end = source.size, source.size - _FILE_END
    tail = source.read(end, _FILE_END) if end >= _FILE_START else b""
    if tail[4:] != MAGIC:
        raise DamagedError(
            "the Arrow file is truncated",
            path=source.path,
            offset=size,
            expected=f"{MAGIC.decode()!r} as the last bytes",
            fix="copy the file again",
        )
    footer = int.from_bytes(tail[:4], "little", signed=True)
    if not 0 < footer <= end - _FILE_START:
        raise _damaged("the footer has an impossible length", source, end)
    return end - footer


def _schema_message(footer: bytes) -> bytes:
    """The schema in a footer as the message that begins a stream.

    In front of the footer's flatbuffer goes the table of a message whose header lies in it.
    """
    table = _table(footer, 0)
    at = _position(footer, table, 1)
    if not at:
        raise ValueError("it has no schema")
    version = _value(footer, "<h", table, 0)
    # Root offset; vtable: its size, the table's, version, type, header; table: the way back to the
    # vtable, the way on to the header, version, type.
    front = struct.pack(
        "<I5H2xiIhB5x", 16, 10, 12, 8, 10, 4, 12, 32 + _table(footer, at) - 20, version, _SCHEMA
    )
    padding = bytes(-len(footer) % 8)
    size = len(front) + len(footer) + len(padding)
    return _MARK + struct.pack("<I", size) + front + footer + padding


def _blocks(footer: bytes, table: int, field: int) -> list[int]:
    """The bytes at which messages begin, from a vector of blocks."""
    position = _position(footer, table, field)
    if not position:
        return []
    at = _table(footer, position)
    count = _number(footer, "<I", at)
    if at + 4 + count * _BLOCK > len(footer):
        raise ValueError(f"{count} blocks in {len(footer)} bytes")
    return [_number(footer, "<q", at + 4 + number * _BLOCK) for number in range(count)]


def _message(source: ByteSource, at: int, end: int) -> Message | None:
    """The message at byte `at`, which lies before `end`; None at the end mark."""
    front = source.read(at, min(8, end - at))
    try:
        marked = front[:4] == _MARK  # before Arrow 0.15 there was no mark
        (size,) = struct.unpack("<I", front[4:] if marked else front[:4])
        body = at + (8 if marked else 4) + size
        if size == 0:
            return None
        if body > end:
            raise _truncated(source, at, body, end)
        kind, rows, compressed, length = _header(source.read(body - size, size))
    except (struct.error, ValueError) as error:
        raise _damaged(f"a message has a damaged header ({error})", source, at) from error
    if body + length > end:
        raise _truncated(source, at, body + length, end)
    return Message(at, body, body + length, kind, rows, compressed)


def _header(data: bytes) -> tuple[int, int, bool, int]:
    """Kind of a message, its rows, whether its buffers are compressed, and the size of its body."""
    message = _table(data, 0)
    kind = _value(data, "<B", message, 1)
    body = _value(data, "<q", message, 3)
    rows, compressed = 0, False
    if kind == _SCHEMA and _value(data, "<h", _table(data, _position(data, message, 2)), 0):
        raise ValueError("numbers with the high byte first, which shardkit does not read")
    if kind == _BATCH:
        batch = _table(data, _position(data, message, 2))
        rows = _value(data, "<q", batch, 0)
        compressed = bool(_position(data, batch, 3))
    if body < 0 or rows < 0:
        raise ValueError("a negative length")
    if rows > 8 * (body * (EXPANSION if compressed else 1) + _FREE_ROWS):  # a bit for each at least
        raise ValueError(f"{rows:,} rows in {body:,} bytes")
    return kind, rows, compressed, body


def null_counts(data: memoryview) -> list[int]:
    """The nulls in each array of a batch, from the message's header: of columns and their children.

    Columns stand in their order, each before its children. Raises ValueError or struct.error for a
    header that is damaged.
    """
    header, _ = _parts(data)
    batch = _table(header, _position(header, _table(header, 0), 2))
    return [nulls for _, nulls in _pairs(header, batch, 1)]


def decompressed_size(message: memoryview) -> int:
    """Bytes that the buffers of a batch or a dictionary say they have once they are decompressed.

    Raises ValueError or struct.error for a header that is damaged.
    """
    header, body = _parts(message)
    root = _table(header, 0)
    batch = _table(header, _position(header, root, 2))
    if _value(header, "<B", root, 1) == _DICTIONARY:
        batch = _table(header, _position(header, batch, 1))
    if not _position(header, batch, 3):
        return 0
    starts = [start for start, size in _pairs(header, batch, 2) if size >= 8]
    # A length goes before each buffer, -1 before one that is not compressed.
    return sum(max(_number(body, "<q", start), 0) for start in starts)


def _parts(message: memoryview) -> tuple[bytes, memoryview]:
    """The flatbuffer and the body of a message."""
    at = 8 if bytes(message[:4]) == _MARK else 4
    stop = at + _number(message, "<I", at - 4)
    return bytes(message[at:stop]), message[stop:]


def _pairs(header: bytes, batch: int, field: int) -> list[tuple[int, int]]:
    """The pairs of numbers in a field of a batch: of arrays length and nulls, of buffers offset
    and size."""
    at = _table(header, _position(header, batch, field))
    count = _number(header, "<I", at)
    if at + 4 + 16 * count > len(header):
        raise ValueError(f"{count} arrays or buffers in {len(header)} bytes")
    return list(struct.iter_unpack("<qq", header[at + 4 : at + 4 + 16 * count]))


# Flatbuffers: a table begins with the distance back to its vtable, which has the offset of each
# field in the table, 0 where a field is left out and so has its default.


def _table(data: bytes, at: int) -> int:
    """The table that the offset at `at` leads to."""
    return at + _number(data, "<I", at)


def _position(data: bytes, table: int, field: int) -> int:
    """Where a field of a table stands; 0, where no field can stand, if it is left out."""
    vtable = table - _number(data, "<i", table)
    at = vtable + 4 + 2 * field
    if at + 2 > vtable + _number(data, "<H", vtable):
        return 0
    distance = _number(data, "<H", at)
    return table + distance if distance else 0


def _value(data: bytes, code: str, table: int, field: int) -> int:
    at = _position(data, table, field)
    return _number(data, code, at) if at else 0


def _number(data: bytes | memoryview, code: str, at: int) -> int:
    if at < 0:
        raise ValueError("an offset leads out of it")
    (value,) = struct.unpack_from(code, data, at)
    return int(value)


def _truncated(source: ByteSource, at: int, needed: int, end: int) -> DamagedError:
    return DamagedError(
        "the Arrow data are truncated inside a message",
        path=source.path,
        offset=at,
        expected=f"{needed - at:,} bytes from here",
        found=f"{max(end - at, 0):,} bytes, then the end",
        fix="copy the file again",
    )


def _damaged(what: str, source: ByteSource, at: int) -> DamagedError:
    return DamagedError(
        f"not an Arrow file or stream, or a damaged one: {what}",
        path=source.path,
        offset=at,
        fix="copy the file again, or write it again where it was made",
    )
