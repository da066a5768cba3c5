"""The bytes of a TAR file: headers out, members in, and the index that stands beside a shard.

Layout: POSIX.1-1988 (ustar), POSIX.1-2001 (pax), and GNU tar's manual, "Basic Tar Format". We write
ustar, with GNU's long-name member where a name is over 100 bytes, which GNU tar, Python's tarfile,
webdataset and DALI's index tool all read. We read ustar, GNU, pax and old V7.
"""

from __future__ import annotations

import re
import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardkit.errors import DamagedError, ShardkitWarning
from shardkit.manifest import FOLDER
from shardkit.schema import Image, Schema
from shardkit.storage import Data

BLOCK = 512
END = bytes(2 * BLOCK)
# At most, for a name of up to 100 bytes; a longer one has two blocks and more beside.
MEMBER_OVERHEAD = BLOCK + (BLOCK - 1)

_NAME = 100  # bytes of a ustar name
_LONG_NAME = b"././@LongLink"
_BETWEEN = b"0000644\0" + b"0000000\0" * 2  # mode, uid, gid
_TIME = b"%011o\0" % 315532800  # 1980-01-01: GNU tar calls an older time stamp implausible
_MAGIC = b"ustar\00000"
_AFTER = (bytes(100) + _MAGIC).ljust(BLOCK - 157, b"\0")  # what follows the type flag
_SUM_AFTER = sum(_AFTER)
_MAX_EXTENDED = 1 << 20  # bytes of a pax header or a long name: no file system has such names
_OCTAL = re.compile(rb" *([0-7]*)[ \0]*(?:\0.*)?", re.DOTALL)  # blanks before, a zero byte ends it
_DECIMAL = re.compile(r"[0-9]{1,20}")  # of more digits, `int` takes long or refuses
_RECORD = re.compile(rb"([0-9]{1,20}) ([^=]*)=")  # what a pax record begins with: length, name
_ADLER = 65521  # adler32's low half is 1 + the sum of the bytes, modulo this


def header(name: bytes, size: int) -> bytes:
    """All header blocks of a regular file: one, or for a name over 100 bytes those of GNU tar."""
    if len(name) <= _NAME:
        return _header(name, size, b"0")
    long = name + b"\0"
    return b"".join(
        (
            _header(_LONG_NAME, len(long), b"L"),
            long,
            padding(len(long)),
            _header(name[:_NAME], size, b"0"),
        )
    )


def _header(name: bytes, size: int, kind: bytes) -> bytes:
    middle, total = _after_name(size, kind)
    total += (zlib.adler32(name) & 0xFFFF) - 1  # 100 bytes sum to less than _ADLER: exact
    return b"%b%b%06o\0 %b%b" % (name.ljust(_NAME, b"\0"), middle, total, kind, _AFTER)


@lru_cache(1 << 12)  # labels and the like have few sizes
def _after_name(size: int, kind: bytes) -> tuple[bytes, int]:
    """The bytes between name and checksum, and the sum of all bytes but the name's."""
    # 11 octal digits hold 8 GiB; beyond that GNU's base-256 form.
    number = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    middle = _BETWEEN + number + _TIME
    # The checksum counts its own eight bytes as blanks.
    return middle, sum(middle) + 8 * 0x20 + sum(kind) + _SUM_AFTER


def padding(size: int) -> bytes:
    """The zeros that fill a payload's last block."""
    return END[: -size % BLOCK]


class Member(NamedTuple):
    """A regular file in a TAR: offsets in bytes from the start of the file.

    `name_offset` is where the name stands in one piece, -1 where it does not.
    """

    name: str
    offset: int
    size: int
    name_offset: int


def members(data: Data, path: Path, ignored: Counter[str]) -> Iterator[Member]:
    """The regular files of a TAR in order; links and devices are passed over, and counted.

    Raises DamagedError at the byte where the file is cut or contradicts itself. As in all readers,
    the first zero block ends the archive; anything else than zeros behind it brings a warning.
    """
    at, end = 0, len(data)
    if not end:
        raise DamagedError("the TAR file is empty", path=path, expected="at least 1,024 bytes")
    extensions = _Extensions(path)
    while at < end:
        block = data[at : at + BLOCK]
        if len(block) < BLOCK:
            raise _cut("inside a header", path, at, BLOCK, end)
        if block == END[:BLOCK]:
            _look_behind(data, path, at)
            return
        kind, size = _check_header(block, path, at)
        payload = at + BLOCK
        if kind in b"xXgLK":
            if payload + size > end:
                raise _cut("inside an extended header", path, payload, size, end)
            if size > _MAX_EXTENDED:
                raise DamagedError(
                    "a TAR has an extended header that is too long",
                    path=path,
                    offset=at,
                    expected=f"at most {_MAX_EXTENDED:,} bytes",
                    found=f"{size:,}",
                    fix="pack it again with shorter names",
                )
            extensions.add(kind, data[payload : payload + size], payload)
            at = payload + _blocks(size)
            continue
        name, name_offset, size = extensions.apply(block, kind, size, at)
        if kind in b"123456":  # links, devices, folders, pipes have no payload
            size = 0
        if payload + size > end:
            raise _cut(f"inside the member {name!r}", path, payload, size, end)
        # Type 0 with a slash at the end of the name is V7's way to say folder.
        if kind in b"07" or (kind == b"\0" and not name.endswith("/")):
            yield Member(name, payload, size, name_offset)
        elif kind in b"12346":
            ignored["TAR member that is a link or a device"] += 1
        at = payload + _blocks(size)
        if at > end:
            padded = payload + size
            raise _cut("inside the padding of a member", path, padded, at - padded, end)
    warnings.warn(
        f"{path} ends at byte {end} without the zero blocks that close a TAR; it may be cut short",
        ShardkitWarning,
        stacklevel=2,
    )


class _Extensions:
    """What pax and GNU headers say of the member that follows them, or of all that do."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._everywhere: dict[str, str] = {}
        self._next: dict[str, str] = {}
        self._name_offset = -1

    def add(self, kind: bytes, text: bytes, at: int) -> None:
        """Take in an extended header, whose text stands at byte `at`."""
        if kind == b"L":
            self._next["path"] = _text(text)
            self._name_offset = at
        elif kind != b"K":  # the long name of a link's target does not matter here
            records = _pax(text, self._path, at)
            said = self._everywhere if kind == b"g" else self._next
            said.update({key: value for key, (value, _) in records.items()})
            if "path" in records:
                self._name_offset = -1 if kind == b"g" else at + records["path"][1]

    def apply(self, block: bytes, kind: bytes, size: int, at: int) -> tuple[str, int, int]:
        """Name, where it stands in one piece or -1, and size of the member at byte `at`."""
        said, name_offset = {**self._everywhere, **self._next}, self._name_offset
        self._next, self._name_offset = {}, -1
        if kind == b"S" or any(key.startswith("GNU.sparse") for key in said):
            raise DamagedError(
                "the TAR holds a sparse member, which shardkit does not read",
                path=self._path,
                offset=at,
                fix="pack it again with GNU tar without --sparse",
            )
        if "size" in said:
            size = _decimal(said["size"], self._path, at)
        if "path" in said:
            return said["path"], name_offset, size
        return *_short_name(block, at), size


def _check_header(block: bytes, path: Path, at: int) -> tuple[bytes, int]:
    """Type and size of a header block, once its checksum holds."""
    field = block[148:156]
    stored = _octal(field)
    # The sum counts the checksum field as blanks. Some old writers summed signed bytes.
    unsigned = ((zlib.adler32(block) & 0xFFFF) - 1 - sum(field) + 8 * 0x20) % _ADLER
    if stored % _ADLER != unsigned and stored != _signed_sum(block):
        raise DamagedError(
            "a TAR header is damaged",
            path=path,
            offset=at,
            expected=f"checksum {unsigned:o} (octal)",
            found=repr(field.rstrip(b"\0 ").decode("ascii", "replace")),
            fix="copy the file again, or repair it where it was made",
        )
    number = block[124:136]
    size = int.from_bytes(number[1:], "big") if number[0] == 0x80 else _octal(number)
    if size < 0:
        raise DamagedError(
            "a TAR header has an invalid size",
            path=path,
            offset=at,
            expected="octal digits, or a number in base 256 that is not negative",
            found=repr(number),
            fix="copy the file again, or pack it again",
        )
    return block[156:157], size


def _octal(field: bytes) -> int:
    """The number in a field of a header; -1 for anything else."""
    match = _OCTAL.fullmatch(field)
    return int(match[1] or b"0", 8) if match else -1


def _signed_sum(block: bytes) -> int:
    signed = np.frombuffer(block, np.int8).astype(np.int64)
    return int(signed[:148].sum() + signed[156:].sum()) + 8 * 0x20


def _short_name(block: bytes, at: int) -> tuple[str, int]:
    name = _text(block[:_NAME])
    prefix = _text(block[345:500])
    if prefix and block[257:265] == _MAGIC:  # GNU and V7 headers have other things there
        return f"{prefix}/{name}", -1
    return name, at


def _pax(text: bytes, path: Path, at: int) -> dict[str, tuple[str, int]]:
    """The records of a pax header: name -> (value, where the value begins in `text`)."""
    records: dict[str, tuple[str, int]] = {}
    start = 0
    while start < len(text) and text[start]:
        match = _RECORD.match(text, start)
        stop = start + int(match[1]) if match else 0
        if match is None or stop <= match.end() or text[stop - 1 : stop] != b"\n":
            raise DamagedError("a pax header is damaged", path=path, offset=at + start)
        name = match[2].decode("utf-8", "surrogateescape")
        value = text[match.end() : stop - 1].decode("utf-8", "surrogateescape")
        records[name] = (value, match.end())
        start = stop
    return records


def _decimal(text: str, path: Path, at: int) -> int:
    if not _DECIMAL.fullmatch(text):
        raise DamagedError(
            "a pax header has an invalid size", path=path, offset=at, found=repr(text[:40])
        )
    return int(text)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _cut(where: str, path: Path, at: int, size: int, end: int) -> DamagedError:
    return DamagedError(
        f"the TAR file is truncated {where}",
        path=path,
        offset=at,
        expected=f"{size:,} bytes from here",
        found=f"{max(end - at, 0):,} bytes, then the end of the file",
        fix="copy or make the file again",
    )


def _look_behind(data: Data, path: Path, at: int) -> None:
    """Warn if something follows the zero block that ends the archive at `at`."""
    rest = data[at : at + (1 << 20)]
    if rest.count(0) != len(rest):
        warnings.warn(
            f"{path} goes on behind its end mark at byte {at}; what follows is not read"
            " (archives joined with `cat` are not one archive)",
            ShardkitWarning,
            stacklevel=3,
        )


def index_path(shard: Path) -> Path:
    """Where the index of `shard-000000.tar` belongs: `__shardkit__/shard-000000.index.npy`."""
    return shard.parent / FOLDER / (shard.name.removesuffix(".tar") + ".index.npy")


def find_index(shard: Path) -> Path | None:
    """The index of a shard: where it belongs, or beside the shard, where it once did; or None."""
    place = index_path(shard)
    return next((path for path in (place, shard.parent / place.name) if path.exists()), None)


def column(field: str) -> str:
    """The name of a field's column in the index: a TAR may have a field without a name (`x.`)."""
    return field or "(no name)"


def index_dtype(schema: Schema) -> np.dtype[np.void]:
    """A row of the index: where the key and each field's payload stand, in bytes of the file.

    `offset` 0 says that the sample has no such field. Images have their width and height in pixels.
    """
    place = [("offset", "<u8"), ("size", "<u8")]
    image = [*place, ("width", "<u4"), ("height", "<u4")]
    fields = [
        (column(name), image if isinstance(t, Image) else place) for name, t in schema.items()
    ]
    return np.dtype([("__key__", place), *fields])


def row_struct(schema: Schema) -> struct.Struct:
    """A row of the index as `struct` has it: all numbers little-endian and side by side."""
    images = "".join("QQII" if isinstance(t, Image) else "QQ" for t in schema.values())
    return struct.Struct("<QQ" + images)
