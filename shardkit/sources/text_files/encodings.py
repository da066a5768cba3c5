"""Decoding bytes: byte order marks, invalid bytes, lines, and detection of a file's encoding."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from shardkit.errors import SampleError, UsageError
from shardkit.helpers.extras import extra
from shardkit.sources.files import FilePath

_MARKS = (  # UTF-32-LE before UTF-16-LE, whose mark is a prefix of it
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF8, "utf-8"),
)
MARK_SIZE = 4  # bytes of the longest byte order mark
REPAIR = "repair it, or use --on-error skip"
MAX_LINE = (1 << 31) - (1 << 16)  # bytes; formats limit a text to less than 2 GiB
_FEW_BYTES = 16  # fewer non-ASCII bytes are not enough for detection
# Ruled out before detection: `_by_start` recognizes these by byte order marks and NUL bytes.
_SETTLED = ["utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be", "utf_32_le", "utf_8_sig"]
_TELLING_BYTES = 1 << 16  # bytes of non-ASCII lines from which an encoding is detected


@dataclass(frozen=True)
class Decoder:
    """How to decode the bytes of one file."""

    path: FilePath
    encoding: str  # Python's name of a codec without byte order mark
    errors: str  # "strict", "replace" or "ignore"
    mark: int  # length of the byte order mark of the file

    @classmethod
    def of(cls, path: FilePath, encoding: str, errors: str, head: bytes) -> Decoder:
        """Return the decoder of a file that begins with `head`; its mark decides the byte order.

        Raises SampleError for the mark of UTF-16 or UTF-32 if UTF-8 is expected.
        """
        mark, marked = next(((m, n) for m, n in _MARKS if head.startswith(m)), (b"", ""))
        if encoding in ("utf-8", "utf-8-sig"):
            if marked not in ("", "utf-8"):
                raise SampleError(
                    f"the file begins with the byte order mark of {marked.upper()}",
                    path=path,
                    offset=0,
                    expected="UTF-8",
                    found=mark.hex(" "),
                    fix=f"use --encoding {marked[:6]}, or --encoding auto for mixed encodings",
                )
            return cls(path, "utf-8", errors, len(mark))
        if encoding in ("utf-16", "utf-32"):
            known = marked.startswith(encoding)
            order = marked if known else f"{encoding}-le"  # as written by Windows
            return cls(path, order, errors, len(mark) if known else 0)
        return cls(path, encoding, errors, len(mark) if marked == encoding else 0)

    @functools.cached_property
    def newline(self) -> bytes:
        return "\n".encode(self.encoding)

    def error(
        self, what: str, offset: int, expected: str, found: str | None, fix: str = REPAIR
    ) -> SampleError:
        """Return an error at an offset in the file."""
        return SampleError(
            what, path=self.path, offset=offset, expected=expected, found=found, fix=fix
        )

    def text(self, data: bytes, offset: int) -> str:
        """Decode the bytes at `offset` in the file. Raises SampleError for invalid ones."""
        try:
            return data.decode(self.encoding, self.errors)
        except UnicodeError as error:
            start, end = getattr(error, "start", 0), getattr(error, "end", 1)
            found = data[start : max(end, start + 1)].hex()
            # Of ASCII text in UTF-16, half of the bytes are NUL; a few show a binary file.
            wide = self.other(data, offset) if 3 * data.count(0) >= len(data) else ""
            raise self.error(
                f"the bytes are not valid {self.encoding.upper()}",
                offset + start,
                self.encoding.upper(),
                f"0x{found}: {getattr(error, 'reason', error)}",
                (wide or "use --encoding latin-1 or auto, or ")
                + "use --encoding-errors replace, or --on-error skip",
            ) from error

    def plain_text(self, data: bytes, offset: int) -> str:
        """Decode text other than JSON, in which NUL characters are invalid, too."""
        text = self.text(data, offset)
        if "\0" in text:
            raise self.error(
                "the text contains a NUL character: the file is binary or damaged, or has another"
                " encoding",
                offset + max(_find(data, "\0".encode(self.encoding)), 0),
                f"text, {self.encoding.upper()}",
                "U+0000",
                self.other(data, offset) + "remove it, or use --on-error skip",
            )
        return text

    def other(self, data: bytes, offset: int) -> str:
        """Propose the encoding that the positions of NUL bytes show, if any, in words for a fix.

        For ASCII characters, every second byte is NUL in UTF-16, and three of four in UTF-32.
        """
        at = data.find(0)
        if at < 0 or len(self.newline) > 1 or bytes(8) in data:
            return ""
        bits, width = ("32", 4) if data[at : at + 3] == bytes(3) else ("16", 2)
        return f"try --encoding utf-{bits}-{'le' if (offset + at) % width else 'be'}, or "


def check_encoding(encoding: str) -> None:
    """Raise UsageError for an encoding in which line ends cannot be found."""
    try:
        wide = encoding.startswith(("utf-16", "utf-32"))
        if wide or len("\n".encode(encoding)) == 1 or encoding == "utf-8-sig":
            return
    except UnicodeError:
        pass
    raise UsageError(
        "this encoding is not supported for text files",
        found=repr(encoding),
        expected="utf-8, utf-16, latin-1, cp1252, auto",
    )


# --- lines ---------------------------------------------------------------------------------------

# The offset of a line, and its bytes without the line end; None if there are too many.
Line: TypeAlias = tuple[int, bytes | None]


def lines(
    blocks: Iterable[bytes], newline: bytes, start: int, end: int | None, *, midway: bool
) -> Iterator[Line]:
    """Yield the complete lines whose first byte is between `start` and `end`.

    `blocks` begin at `start`. With `midway`, that may be inside a line, which is skipped because it
    belongs to the previous range. At most one line of MAX_LINE bytes is held in memory.
    """
    offset = start  # of the current line
    held: list[bytes] = []
    size = 0
    for block in blocks if len(newline) == 1 else _whole_units(blocks, len(newline)):
        parts = _split(block, newline)
        head, tail = parts[0], parts[-1]
        if size + len(head) <= MAX_LINE and not midway:
            held.append(head)
        else:
            held.clear()
        size += len(head)
        if len(parts) == 1:
            if midway and end is not None and offset + size >= end:
                return
            continue
        if not midway:
            yield offset, b"".join(held) if size <= MAX_LINE else None
        midway = False
        offset += size + len(newline)
        for part in parts[1:-1]:
            if end is not None and offset >= end:
                return
            yield offset, part
            offset += len(part) + len(newline)
        if end is not None and offset >= end:
            return
        held, size = [tail], len(tail)
    if size and not midway:
        yield offset, b"".join(held) if size <= MAX_LINE else None


def _split(block: bytes, newline: bytes) -> list[bytes]:
    """Split at line ends; those of wide characters count only if aligned to their width."""
    if len(newline) == 1:
        return block.split(newline)
    parts = []
    start = 0
    while (found := _find(block, newline, start)) >= 0:
        parts.append(block[start:found])
        start = found + len(newline)
    return [*parts, block[start:]]


def _find(data: bytes, character: bytes, start: int = 0) -> int:
    """Return the position of a fixed-width character, aligned to its width, or -1."""
    found = data.find(character, start)
    while found >= 0 and found % len(character):
        found = data.find(character, found + 1)
    return found


def _whole_units(blocks: Iterable[bytes], width: int) -> Iterator[bytes]:
    """Regroup the bytes so that no block ends inside a character of this width."""
    rest = b""
    for block in blocks:
        data = rest + block
        whole = len(data) - len(data) % width
        rest = data[whole:]
        if whole:
            yield data[:whole]
    if rest:
        yield rest


# --- detection -----------------------------------------------------------------------------------


def detect(blocks: Iterable[bytes]) -> str:
    """Return UTF-8 if all of a file is valid; otherwise guess from lines that are not ASCII.

    Raises UsageError if the library for it is missing.
    """
    with extra("encodings", "detecting encodings", ", or use --encoding NAME"):
        from charset_normalizer import from_bytes
    utf8, telling = codecs.getincrementaldecoder("utf-8")(), b""
    valid = first = True
    for block in blocks:
        if first and (known := _by_start(block)) is not None:
            return known
        first = False
        if block.isascii() and valid and not utf8.getstate()[0]:
            continue
        if valid:
            try:
                utf8.decode(block)
            except UnicodeDecodeError:
                valid = False
        if len(telling) < _TELLING_BYTES:
            telling += b"\n".join(line for line in block.split(b"\n") if not line.isascii())
        elif not valid:
            break
    if valid:  # reading reports a last character that is truncated
        return "utf-8"
    telling = telling[:_TELLING_BYTES]
    matches = from_bytes(telling, cp_exclusion=_SETTLED)
    best = matches.best()
    # If several encodings fit equally well, choose the most common one.
    alike = [name for match in matches for name in match.could_be_from_charset]
    few = sum(byte > 127 for byte in telling) < _FEW_BYTES
    if few or (best and not best.multi_byte_usage and "cp1252" in alike):
        try:
            telling.decode("cp1252")
            return "cp1252"
        except UnicodeDecodeError:
            pass
    # If nothing fits, reading the file as UTF-8 reports the invalid byte.
    return "utf-8" if best is None else codecs.lookup(best.encoding).name


def _by_start(head: bytes) -> str | None:
    """Return the encoding of a file with a mark, or of UTF-16 without one; otherwise None."""
    marked = next((name for mark, name in _MARKS if head.startswith(mark)), None)
    if marked is None and head.count(0) > len(head) // 4:  # every second byte of Latin text
        odd = head[1::2].count(0) > head[::2].count(0)
        return "utf-16-le" if odd else "utf-16-be"
    return marked
