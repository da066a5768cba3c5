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
from pathlib import Path
from typing import NamedTuple

from shardkit.errors import DamagedError, FormatError
from shardkit.storage import EXPANSION, PreadFile

MAGIC = b"ARROW1"
_FILE_START = 8  # the magic, padded
_FILE_END = 4 + len(MAGIC)  # length of the footer, and the magic
_MARK = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # of the union MessageHeader
_BLOCK = 24  # bytes of a block in the footer: where a message begins, its length, its body's
_FREE_ROWS = 1 << 20  # bytes that a batch may take too few for its rows: nulls take none


class Batch(NamedTuple):
    """One batch of rows: its message in bytes of the file."""

    offset: int
    body: int  # where its buffers begin
    size: int
    rows: int
    compressed: bool
    dictionaries: int  # how many of the dictionaries it needs: the first so many


class Messages(NamedTuple):
    """All messages of a file, in order."""

    schema: bytes  # a message, as it stands in a stream
    dictionaries: list[slice]
    batches: list[Batch]


def find_messages(data: memoryview | PreadFile, path: Path) -> Messages:
    """Find all messages; raises DamagedError at the byte where one is cut or damaged."""
    size = len(data)
    head = bytes(data[: len(MAGIC)])
    if head[:4] == b"FEA1":
        raise FormatError(
            "this is a Feather file of version 1, which shardkit does not read",
            path=path,
            fix="write it again: pandas.read_feather(...).to_feather(...)",
        )
    if head == MAGIC:
        return _of_file(data, path)
    if size < 8:
        raise _damaged("the file is too short", path, 0)
    return _of_stream(data, path)


def _of_stream(data: memoryview | PreadFile, path: Path) -> Messages:
    """Walk over the messages of a stream."""
    at, end = 0, len(data)
    schema: bytes | None = None
    dictionaries: list[slice] = []
    batches: list[Batch] = []
    while at < end:
        message = _message(data, at, end, path)
        if message is None:
            break
        if message.kind == _SCHEMA and schema is None:
            schema = bytes(data[at : message.end])
        elif schema is None or message.kind == _SCHEMA:
            raise _damaged("the schema does not stand first", path, at)
        elif message.kind == _DICTIONARY:
            dictionaries.append(slice(at, message.end))
        elif message.kind == _BATCH:
            batches.append(message.batch(at, len(dictionaries)))
        else:
            raise _damaged("a message is of no kind that holds rows", path, at)
        at = message.end
    if schema is None:
        raise _damaged("there is no schema", path, 0)
    return Messages(schema, dictionaries, batches)


def _of_file(data: memoryview | PreadFile, path: Path) -> Messages:
    """Look up the messages of a file in its footer."""
    start = _footer_start(data, path)
    footer = bytes(data[start : len(data) - _FILE_END])
    try:
        schema = _schema_message(footer)
        _header(schema[8:])
        table = _table(footer, 0)
        places = [_blocks(footer, table, field) for field in (2, 3)]  # dictionaries and batches
    except (struct.error, ValueError) as error:
        raise _damaged(f"the footer is damaged ({error})", path, start) from error
    found: list[list[tuple[int, _Message]]] = [[], []]
    for kind, starts, messages in zip((_DICTIONARY, _BATCH), places, found, strict=True):
        for at in starts:
            message = _message(data, at, start, path) if _FILE_START <= at < start else None
            if message is None or message.kind != kind:
                raise _damaged("the footer names a byte at which no message stands", path, at)
            messages.append((at, message))
    taken = sorted((at, message.end) for messages in found for at, message in messages)
    for (_, end), (at, _) in pairwise(taken):
        if at < end:
            raise _damaged("the footer names messages that overlap", path, at)
    dictionaries = [slice(at, message.end) for at, message in found[0]]
    batches = [message.batch(at, len(dictionaries)) for at, message in found[1]]
    return Messages(schema, dictionaries, batches)


def _footer_start(data: memoryview | PreadFile, path: Path) -> int:
    """The byte at which the footer of a file begins."""
    size = len(data)
    if size < _FILE_START + _FILE_END or bytes(data[size - len(MAGIC) : size]) != MAGIC:
        raise DamagedError(
            "the Arrow file is truncated",
            path=path,
            offset=size,
            expected=f"{MAGIC.decode()!r} as the last bytes",
            fix="copy the file again",
        )
    (footer,) = struct.unpack("<i", data[size - _FILE_END : size - len(MAGIC)])
    if not 0 < footer <= size - _FILE_END - _FILE_START:
        raise _damaged("the footer has an impossible length", path, size - _FILE_END)
    return size - _FILE_END - int(footer)


def _schema_message(footer: bytes) -> bytes:
    """The schema in a footer as the message that begins a stream.

    In front of the footer's flatbuffer goes the table of a message whose header lies in it.
    """
    table = _table(footer, 0)
    place = _place(footer, table, 1)
    if not place:
        raise ValueError("it has no schema")
    version = _value(footer, "<h", table, 0)
    # Root offset; vtable: its size, the table's, version, type, header; table: the way back to the
    # vtable, the way on to the header, version, type.
    front = struct.pack(
        "<I5H2xiIhB5x", 16, 10, 12, 8, 10, 4, 12, 32 + _table(footer, place) - 20, version, _SCHEMA
    )
    padding = bytes(-len(footer) % 8)
    size = len(front) + len(footer) + len(padding)
    return struct.pack("<II", _MARK, size) + front + footer + padding


def _blocks(footer: bytes, table: int, field: int) -> list[int]:
    """The bytes at which messages begin, from a vector of blocks."""
    place = _place(footer, table, field)
    if not place:
        return []
    at = _table(footer, place)
    count = _number(footer, "<I", at)
    if at + 4 + count * _BLOCK > len(footer):
        raise ValueError(f"{count} blocks in {len(footer)} bytes")
    return [_number(footer, "<q", at + 4 + number * _BLOCK) for number in range(count)]


class _Message(NamedTuple):
    kind: int
    rows: int
    compressed: bool
    body: int
    end: int

    def batch(self, at: int, dictionaries: int) -> Batch:
        return Batch(at, self.body, self.end - at, self.rows, self.compressed, dictionaries)


def _message(data: memoryview | PreadFile, at: int, end: int, path: Path) -> _Message | None:
    """The message at byte `at`; None at the end mark."""
    start = at
    try:
        (size,) = struct.unpack("<I", data[at : at + 4])
        at += 4
        if size == _MARK:  # before Arrow 0.15 there was no mark
            (size,) = struct.unpack("<I", data[at : at + 4])
            at += 4
        if size == 0:
            return None
        if at + size > end:
            raise _truncated(path, start, at + size, end)
        kind, rows, compressed, body = _header(bytes(data[at : at + size]))
    except (struct.error, ValueError) as error:
        raise _damaged(f"a message has a damaged header ({error})", path, start) from error
    body_at = at + size
    stop = body_at + body
    if stop > end:
        raise _truncated(path, start, stop, end)
    return _Message(kind, rows, compressed, body_at, stop)


def _header(data: bytes) -> tuple[int, int, bool, int]:
    """Kind of a message, its rows, whether its buffers are compressed, and the size of its body."""
    message = _table(data, 0)
    kind = _value(data, "<B", message, 1)
    body = _value(data, "<q", message, 3)
    rows, compressed = 0, False
    if kind == _SCHEMA and _value(data, "<h", _table(data, _place(data, message, 2)), 0):
        raise ValueError("numbers with the high byte first, which shardkit does not read")
    if kind == _BATCH:
        batch = _table(data, _place(data, message, 2))
        rows = _value(data, "<q", batch, 0)
        compressed = bool(_place(data, batch, 3))
    if body < 0 or rows < 0:
        raise ValueError("a negative length")
    if rows > 8 * (body * (EXPANSION if compressed else 1) + _FREE_ROWS):  # a bit for each at least
        raise ValueError(f"{rows:,} rows in {body:,} bytes")
    return kind, rows, compressed, body


def null_counts(data: bytes) -> list[int]:
    """The nulls in each array of a batch, from the message's header: of columns and their children.

    Columns stand in their order, each before its children. Raises ValueError or struct.error for a
    header that is damaged.
    """
    header, _ = _parts(data)
    batch = _table(header, _place(header, _table(header, 0), 2))
    return [nulls for _, nulls in _pairs(header, batch, 1)]


def decompressed_size(message: bytes | memoryview) -> int:
    """Bytes that the buffers of a batch or a dictionary say they have once they are decompressed.

    Raises ValueError or struct.error for a header that is damaged.
    """
    header, body = _parts(message)
    root = _table(header, 0)
    batch = _table(header, _place(header, root, 2))
    if _value(header, "<B", root, 1) == _DICTIONARY:
        batch = _table(header, _place(header, batch, 1))
    if not _place(header, batch, 3):
        return 0
    starts = [start for start, size in _pairs(header, batch, 2) if size >= 8]
    # A length goes before each buffer, -1 before one that is not compressed.
    return sum(max(_number(body, "<q", start), 0) for start in starts)


def _parts(message: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
    """The flatbuffer and the body of a message."""
    at = 8 if _number(message, "<I", 0) == _MARK else 4
    stop = at + _number(message, "<I", at - 4)
    return bytes(message[at:stop]), message[stop:]


def _pairs(header: bytes, batch: int, field: int) -> list[tuple[int, int]]:
    """The pairs of numbers in a field of a batch: of arrays length and nulls, of buffers place and
    size."""
    at = _table(header, _place(header, batch, field))
    count = _number(header, "<I", at)
    if at + 4 + 16 * count > len(header):
        raise ValueError(f"{count} arrays or buffers in {len(header)} bytes")
    return list(struct.iter_unpack("<qq", header[at + 4 : at + 4 + 16 * count]))


# Flatbuffers: a table begins with the distance back to its vtable, which has the place of each
# field in the table, 0 where a field is left out and so has its default.


def _table(data: bytes, at: int) -> int:
    """The table that the offset at `at` leads to."""
    return at + _number(data, "<I", at)


def _place(data: bytes, table: int, field: int) -> int:
    """Where a field of a table stands; 0, where no field can stand, if it is left out."""
    vtable = table - _number(data, "<i", table)
    at = vtable + 4 + 2 * field
    if at + 2 > vtable + _number(data, "<H", vtable):
        return 0
    place = _number(data, "<H", at)
    return table + place if place else 0


def _value(data: bytes, code: str, table: int, field: int) -> int:
    place = _place(data, table, field)
    return _number(data, code, place) if place else 0


def _number(data: bytes | memoryview, code: str, at: int) -> int:
    if at < 0:
        raise ValueError("an offset leads out of it")
    (value,) = struct.unpack_from(code, data, at)
    return int(value)


def _truncated(path: Path, at: int, needed: int, end: int) -> DamagedError:
    return DamagedError(
        "the Arrow data are truncated inside a message",
        path=path,
        offset=at,
        expected=f"{needed - at:,} bytes from here",
        found=f"{max(end - at, 0):,} bytes, then the end",
        fix="copy the file again",
    )


def _damaged(what: str, path: Path, at: int) -> DamagedError:
    return DamagedError(
        f"not an Arrow file or stream, or a damaged one: {what}",
        path=path,
        offset=at,
        fix="copy the file again, or write it again where it was made",
    )
