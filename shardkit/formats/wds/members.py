"""The members of any TAR: ustar, GNU, pax and old V7.

Layout: POSIX.1-1988 (ustar), POSIX.1-2001 (pax), and GNU tar's manual, "Basic Tar Format".
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from shardkit.byte_source import ByteSource
from shardkit.errors import DamagedError
from shardkit.formats.wds.layout import BLOCK, END, MAGIC, NAME

_MAX_EXTENDED = 1 << 20  # bytes of a pax header or a long name: no file system has such names
_OCTAL = re.compile(rb" *([0-7]*)[ \0]*(?:\0.*)?", re.DOTALL)  # blanks before, a zero byte ends it
_DECIMAL = re.compile(r"[0-9]{1,20}")  # of more digits, `int` takes long or refuses
_RECORD = re.compile(rb"([0-9]{1,20}) ([^=]*)=")  # what a pax record begins with: length, name

_SPARSE = "GNU.sparse"  # what the names of records of sparse members begin with

_Records = dict[str, tuple[str, int]]  # of a pax header: name -> value, and its offset in the file


class Member(NamedTuple):
    """A regular file in a TAR: offsets in bytes from the start of the file.

    `name_offset` is -1 where the name is not stored contiguously.
    """

    name: str
    offset: int
    size: int
    name_offset: int


def members(source: ByteSource, ignored: Counter[str], warned: list[str]) -> Iterator[Member]:
    """The regular files of a TAR in order; links and devices are passed over, and counted.

    Raises DamagedError at the byte where the file is cut or contradicts itself. As in all readers,
    the first zero block ends the archive; `warned` gets words about anything else than zeros behind
    it, and about a TAR without it.
    """
    path, at, end = source.path, 0, source.size
    of_all: _Records = {}  # what pax and GNU headers say of all members that follow,
    of_next: _Records = {}  # and of the next
    if not end:
        raise DamagedError("the TAR file is empty", path=path, expected="at least 1,024 bytes")
    while at < end:
        _check_end(source, at, BLOCK, "a header")
        block = source.read(at, BLOCK)
        if block == END[:BLOCK]:
            _look_behind(source, at, warned)
            return
        try:
            kind, size = _kind_and_size(block)
            payload = at + BLOCK
            if kind in b"xXgLK":
                _check_end(source, payload, size, "an extended header")
                if size > _MAX_EXTENDED:
                    raise DamagedError(
                        "a TAR has an extended header that is too long",
                        expected=f"at most {_MAX_EXTENDED:,} bytes",
                        found=f"{size:,}",
                        fix="pack it again with shorter names",
                    )
                text = source.read(payload, size)
                if kind == b"L":
                    of_next["path"] = _text(text), payload
                elif kind != b"K":  # the long name of a link's target does not matter here
                    (of_all if kind == b"g" else of_next).update(_pax(text, payload))
                at = payload + _padded(size)
                continue
            said, of_next = {**of_all, **of_next}, {}
            if kind == b"S" or _SPARSE in said:
                raise DamagedError(
                    "the TAR holds a sparse member, which shardkit does not read",
                    fix="pack it again with GNU tar without --sparse",
                )
            if "size" in said:
                size = _decimal(said["size"][0])
        except DamagedError as error:
            raise error.located(path=path, offset=at) from error.__cause__
        name, name_offset = said["path"] if "path" in said else _short_name(block, at)
        if kind in b"123456":  # links, devices, folders, pipes have no payload
            size = 0
        _check_end(source, payload, _padded(size), f"the member {name!r}")
        # Type 0 with a slash at the end of the name is V7's way to say folder.
        if kind in b"07" or (kind == b"\0" and not name.endswith("/")):
            yield Member(name, payload, size, name_offset)
        elif kind in b"12346":
            ignored["TAR member that is a link or a device"] += 1
        at = payload + _padded(size)
    warned.append(
        f"{path} ends at byte {end} without the zero blocks that close a TAR; it may be cut short"
    )


def _kind_and_size(block: bytes) -> tuple[bytes, int]:
    """Type and size of a header block, once its checksum holds."""
    field = block[148:156]
    stored = _octal(field)
    blanks = 8 * 0x20 - sum(field)  # the sum counts the checksum as blanks
    # The low half of adler32 is 1 + the sum, modulo 65521, in 0.2 us; `sum` takes 3.
    if stored != (zlib.adler32(block) & 0xFFFF) - 1 + blanks:
        unsigned = sum(block) + blanks
        # Some old writers summed signed bytes.
        signed = unsigned - 256 * sum(byte > 127 for byte in block[:148] + block[156:])
        if stored not in (unsigned, signed):
            raise DamagedError(
                "a TAR header is damaged",
                expected=f"checksum {unsigned:o} (octal)",
                found=repr(field.rstrip(b"\0 ").decode("ascii", "replace")),
            )
    number = block[124:136]
    size = int.from_bytes(number[1:], "big") if number[0] == 0x80 else _octal(number)
    if size < 0:
        raise DamagedError(
            "a TAR header has an invalid size",
            expected="octal digits, or a number in base 256 that is not negative",
            found=repr(number),
        )
    return block[156:157], size


def _octal(field: bytes) -> int:
    """The number in a field of a header; -1 for anything else."""
    match = _OCTAL.fullmatch(field)
    return int(match[1] or b"0", 8) if match else -1


def _short_name(block: bytes, at: int) -> tuple[str, int]:
    name = _text(block[:NAME])
    prefix = _text(block[345:500])
    if prefix and block[257:265] == MAGIC:  # GNU and V7 headers have other things there
        return f"{prefix}/{name}", -1
    return name, at


def _pax(text: bytes, at: int) -> _Records:
    """Records of the pax header at byte `at`: those that matter, as each member copies them."""
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


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _check_end(source: ByteSource, at: int, size: int, where: str) -> None:
    if at + size > source.size:
        raise DamagedError(
            f"the TAR file is truncated inside {where}",
            path=source.path,
            offset=at,
            expected=f"{size:,} bytes from here",
            found=f"{source.size - at:,} bytes, then the end of the file",
        )


def _look_behind(source: ByteSource, at: int, warned: list[str]) -> None:
    """Whether something follows the zero block that ends the archive at `at`."""
    rest = source.read(at, min(source.size - at, 1 << 20))
    if rest.count(0) != len(rest):
        warned.append(
            f"{source.path} goes on behind its end mark at byte {at}; what follows is not read"
            " (archives joined with `cat` are not one archive)"
        )
