"""Parses the members of any TAR: ustar, GNU, pax and old V7.

Layout: POSIX.1-1988 (ustar), POSIX.1-2001 (pax), and GNU tar's manual, "Basic Tar Format".
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from shardkit.errors import DamagedError
from shardkit.formats.wds.layout import BLOCK, END, MAGIC, NAME
from shardkit.storage.byte_source import ByteSource

# Two blocks of zeros, the second of which writers fill up to a record of tape with more zeros.
_LONGEST_END = BLOCK + 20 * BLOCK
_PIECE = 1 << 20  # bytes that are read at a time
_MAX_EXTENDED = 1 << 20  # bytes of a pax header or long name: no file system has longer names
_OCTAL = re.compile(rb" *([0-7]*)[ \0]*(?:\0.*)?", re.DOTALL)  # may have leading blanks; ends at \0
_DECIMAL = re.compile(r"[0-9]{1,20}")  # `int` is slow for, or rejects, many more digits
_RECORD = re.compile(rb"([0-9]{1,20}) ([^=]*)=")  # start of a pax record: length and name
_SPARSE = "GNU.sparse"  # prefix of the names of pax records of sparse members

_Records = dict[str, tuple[str, int]]  # pax records: name -> value and its offset in the file


class Member(NamedTuple):
    """A regular file in a TAR: offsets in bytes from the start of the TAR.

    `name_offset` is -1 if the name is not stored contiguously.
    """

    name: str
    offset: int
    size: int
    name_offset: int


def members(source: ByteSource, ignored: Counter[str], warned: list[str]) -> Iterator[Member]:
    """Yield the regular files of a TAR in order; links and devices are skipped and counted.

    Raises DamagedError with the byte where the TAR is truncated or inconsistent. The first zero
    block ends the archive: at the beginning of the file, or before anything but zeros, it is
    damage. A warning is added to `warned` if this block is missing, or if more zeros follow than
    fill up a record of tape.
    """
    at, end = 0, source.size
    of_all: _Records = {}  # records of pax and GNU headers that apply to all following members,
    of_next: _Records = {}  # or only to the next one
    if not end:
        raise DamagedError("the TAR file is empty", path=source.path)
    while at < end:
        block = _read(source, at, BLOCK, "a header")
        if block == END[:BLOCK]:
            _check_rest(source, at, warned)
            return
        payload = at + BLOCK
        try:
            kind, size = _kind_and_size(block)
            if kind in b"xXgLK":
                if size > _MAX_EXTENDED:
                    what = "an extended header of the TAR is too long"
                    raise DamagedError(what, found=f"{size:,} bytes")
                text = _read(source, payload, size, "an extended header")
                if kind == b"L":
                    of_next["path"] = _text(text), payload
                elif kind != b"K":  # the long name of a link target, which is not needed
                    (of_all if kind == b"g" else of_next).update(_pax(text, payload))
                at = payload + padded(size)
                continue
            records, of_next = {**of_all, **of_next}, {}
            if kind == b"S" or _SPARSE in records:
                raise DamagedError(
                    "the TAR holds a sparse member, which shardkit does not read",
                    fix="pack it again with GNU tar without --sparse",
                )
            if "size" in records:
                size = _decimal(records["size"][0])
        except DamagedError as error:
            raise error.located(path=source.path, offset=at) from error.__cause__
        name, name_offset = records["path"] if "path" in records else _short_name(block, at)
        if kind in b"123456":  # links, devices, folders, pipes have no payload
            size = 0
        _check_end(source, payload, padded(size), f"the member {name!r}")
        # In V7, a folder has type 0 and a name that ends with a slash.
        if kind in b"07" or (kind == b"\0" and not name.endswith("/")):
            yield Member(name, payload, size, name_offset)
        elif kind in b"12346":
            ignored["TAR member that is a link or a device"] += 1
        at = payload + padded(size)
    warned.append(
        f"{source.path} ends at byte {end} without the zero blocks that close a TAR; it may be"
        " truncated"
    )


def _kind_and_size(block: bytes) -> tuple[bytes, int]:
    """Type and size in a header block, whose checksum is verified."""
    field = block[148:156]
    stored = _octal(field)
    blanks = 8 * 0x20 - sum(field)  # the checksum field itself counts as blanks
    # The low half of adler32 is (1 + the sum) modulo 65521. It takes 0.2 us, `sum` takes 3 us.
    if stored != (zlib.adler32(block) & 0xFFFF) - 1 + blanks:
        unsigned = sum(block) + blanks
        # Some old writers compute the sum of signed bytes.
        signed = unsigned - 256 * sum(byte > 127 for byte in block[:148] + block[156:])
        if stored not in (unsigned, signed):
            found = repr(field.rstrip(b"\0 ").decode("ascii", "replace"))
            expected = f"the checksum {unsigned:o} (octal)"
            raise DamagedError("a TAR header is damaged", expected=expected, found=found)
    number = block[124:136]  # octal digits, or a number in base 256
    size = int.from_bytes(number[1:], "big") if number[0] == 0x80 else _octal(number)
    if size < 0:
        raise DamagedError("a TAR header has an invalid size", found=repr(number))
    return block[156:157], size


def _octal(field: bytes) -> int:
    """Return the number in a field of a header; -1 for anything else."""
    match = _OCTAL.fullmatch(field)
    return int(match[1] or b"0", 8) if match else -1


def _short_name(block: bytes, at: int) -> tuple[str, int]:
    name = _text(block[:NAME])
    prefix = _text(block[345:500])
    if prefix and block[257:265] == MAGIC:  # GNU and V7 headers have no prefix field
        return f"{prefix}/{name}", -1
    return name, at


def _pax(text: bytes, at: int) -> _Records:
    """Return the records of the pax header at byte `at`, without those that are not used."""
    records: _Records = {}
    start = 0
    while start < len(text) and text[start]:
        match = _RECORD.match(text, start)
        stop = start + int(match[1]) if match else 0
        if match is None or stop <= match.end() or text[stop - 1 : stop] != b"\n":
            raise DamagedError("a pax header is damaged", offset=at + start)
        name = match[2].decode("utf-8", "surrogateescape")
        name = _SPARSE if name.startswith(_SPARSE) else name
        if name in ("path", "size", _SPARSE):
            value = text[match.end() : stop - 1].decode("utf-8", "surrogateescape")
            records[name] = value, at + match.end()
        start = stop
    return records


def _decimal(text: str) -> int:
    if not _DECIMAL.fullmatch(text):
        raise DamagedError("a pax header has an invalid size", found=repr(text[:40]))
    return int(text)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _read(source: ByteSource, at: int, size: int, what: str) -> bytes:
    _check_end(source, at, size, what)
    return source.read(at, size)


def _check_end(source: ByteSource, at: int, size: int, what: str) -> None:
    if at + size > source.size:
        raise DamagedError(
            f"the TAR file is truncated inside {what}",
            path=source.path,
            offset=at,
            expected=f"{size:,} bytes from here",
            found=f"{source.size - at:,} bytes, then the end of the file",
        )


def _check_rest(source: ByteSource, at: int, warned: list[str]) -> None:
    """Check that only zeros follow the zero block at `at`, which ends the archive."""
    zeros = source.size - at
    if not at and zeros > 2 * BLOCK:  # two blocks are an empty archive
        raise DamagedError("the TAR file begins with zeros", path=source.path, offset=0)
    for start in range(at, source.size, _PIECE):
        piece = source.read(start, min(source.size - start, _PIECE))
        if piece.count(0) != len(piece):
            found = start + len(piece) - len(piece.lstrip(b"\0"))
            raise DamagedError(
                "the TAR file has zeros between its data",
                path=source.path,
                offset=at,
                expected="zeros only at the end, after the last member",
                found=f"{found - at:,} zeros, then more data",
                fix="restore the file; if TARs were joined with `cat`, unpack it with"
                " tar --ignore-zeros -xf FILE, and pack it again",
            )
    if zeros > _LONGEST_END:
        warned.append(
            f"{source.path} ends with {zeros:,} zeros from byte {at} on, perhaps in place of data:"
            f" the end of a TAR has {2 * BLOCK:,} to {_LONGEST_END:,}"
        )
