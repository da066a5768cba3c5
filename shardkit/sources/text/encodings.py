"""Bytes into text: byte order marks, characters that are none, and which encoding a file has."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import SampleError, UsageError
from shardkit.extras import extra
from shardkit.sources.files import FilePath
from shardkit.sources.text.lines import find

if TYPE_CHECKING:
    from charset_normalizer import CharsetMatches

_MARKS = (  # UTF-32's before UTF-16's, which begins like it
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF8, "utf-8"),
)
MARK_SIZE = 4  # bytes at the start of a file that may be a mark
_FEW_BYTES = 16  # that are not ASCII: too few to tell by
# The marks and zeros of these are looked for first: what has none is not one of them.
_SETTLED = ["utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be", "utf_32_le", "utf_8_sig"]
_TELLING_BYTES = 1 << 16  # of a file that are looked at to tell its encoding


@dataclass(frozen=True)
class Decoder:
    """How the bytes of one file become text."""

    path: FilePath
    encoding: str  # Python's name, of one without a mark
    errors: str  # "strict", "replace" or "ignore"
    mark: int  # bytes of the mark at the start of the file

    @classmethod
    def of(cls, path: FilePath, encoding: str, errors: str, head: bytes) -> Decoder:
        """The decoder of a file that begins with `head`; its mark overrules the encoding's order.

        Raises SampleError for the mark of UTF-16 where UTF-8 is expected.
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
                    fix=f"use --encoding {marked[:6]}, or --encoding auto for files of many kinds",
                )
            return cls(path, "utf-8", errors, len(mark))
        if encoding in ("utf-16", "utf-32"):
            known = marked.startswith(encoding)
            order = marked if known else f"{encoding}-le"  # as Windows writes it
            return cls(path, order, errors, len(mark) if known else 0)
        return cls(path, encoding, errors, len(mark) if marked == encoding else 0)

    @functools.cached_property
    def newline(self) -> bytes:
        return "\n".encode(self.encoding)

    def text(self, data: bytes, offset: int) -> str:
        """The text of bytes that lie at `offset` in the file. Raises SampleError for bad ones."""
        try:
            return data.decode(self.encoding, self.errors)
        except UnicodeError as error:
            raise self._bad_bytes(data, offset, error) from error

    def raw_text(self, data: bytes, offset: int) -> str:
        """The same for text that is no JSON, in which NUL bytes have no business either."""
        try:
            text = data.decode(self.encoding, self.errors)
        except UnicodeError as error:
            raise self._bad_bytes(data, offset, error) from error
        if "\0" in text:
            at = offset + max(find(data, "\0".encode(self.encoding)), 0)
            raise SampleError(
                "a NUL character in the text: the file is of another encoding, or binary",
                path=self.path,
                offset=at,
                expected=f"text, {self.encoding.upper()}",
                found="U+0000",
                fix="remove it, or use --on-error skip"
                if self.encoding.startswith(("utf-16", "utf-32"))
                else f"use --encoding {self.wide(data, offset)} if it is that, or --on-error skip",
            )
        return text

    def wide(self, data: bytes, offset: int) -> str:
        """Which encoding of two or four bytes a character has NULs where these bytes have them.

        Of ASCII's characters every second byte is NUL then, or three of four.
        """
        at = data.find(0)
        if data[at : at + 3] == bytes(3):
            return "utf-32-le" if (offset + at) % 4 else "utf-32-be"
        return "utf-16-le" if (offset + at) % 2 else "utf-16-be"

    def _bad_bytes(self, data: bytes, offset: int, error: UnicodeError) -> SampleError:
        start, end = getattr(error, "start", 0), getattr(error, "end", 1)
        likely = self.wide(data, offset) if b"\0" in data else "latin-1 or auto"
        return SampleError(
            f"bytes that are not text in {self.encoding.upper()}",
            path=self.path,
            offset=offset + start,
            expected=self.encoding.upper(),
            found=f"0x{data[start : max(end, start + 1)].hex()}: {getattr(error, 'reason', error)}",
            fix=f"use --encoding {likely}, --encoding-errors replace, or --on-error skip",
        )


def check_encoding(encoding: str) -> None:
    """Raise UsageError for an encoding in which the ends of lines cannot be found."""
    try:
        wide = encoding.startswith(("utf-16", "utf-32"))
        if wide or len("\n".encode(encoding)) == 1 or encoding == "utf-8-sig":
            return
    except UnicodeError:
        pass
    raise UsageError(
        "this encoding is not one that files of text have",
        found=repr(encoding),
        expected="utf-8, utf-16, latin-1, cp1252, auto",
    )


def load_detector() -> Callable[[Iterable[bytes]], str]:
    """A function that tells the encoding of a file by all its blocks.

    Raises UsageError if the library for it is missing.
    """
    with extra("encodings", "finding out encodings", ", or say --encoding NAME"):
        from charset_normalizer import from_bytes

    return lambda blocks: _detect(blocks, from_bytes)


def _detect(blocks: Iterable[bytes], from_bytes: Callable[..., CharsetMatches]) -> str:
    """What is valid UTF-8 to its end is UTF-8; of all else, lines that are not ASCII tell."""
    utf8, telling = codecs.getincrementaldecoder("utf-8")(), b""
    valid = first = True
    for block in blocks:
        if first:
            first, known = False, _by_start(block)
            if known is not None:
                return known
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
    if valid:  # it may end inside a character, which reading will say
        return "utf-8"
    telling = telling[:_TELLING_BYTES]
    matches = from_bytes(telling, cp_exclusion=_SETTLED)
    alike = [name for match in matches for name in match.could_be_from_charset]
    best = matches.best()
    few = sum(byte > 127 for byte in telling) < _FEW_BYTES
    # Where it cannot be told from those that fit as well, the one that most files have.
    if (few or (best and not best.multi_byte_usage and "cp1252" in alike)) and _is(
        telling, "cp1252"
    ):
        return "cp1252"
    # Where nothing fits, reading as UTF-8 says which byte is wrong.
    return "utf-8" if best is None else codecs.lookup(best.encoding).name


def _is(data: bytes, encoding: str) -> bool:
    try:
        data.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _by_start(head: bytes) -> str | None:
    """The encoding of a file with a mark, or of UTF-16 without one; None for all others."""
    marked = next((name for mark, name in _MARKS if head.startswith(mark)), None)
    if marked is None and head.count(0) > len(head) // 4:  # every second byte, in Latin letters
        odd = head[1::2].count(0) > head[::2].count(0)
        return "utf-16-le" if odd else "utf-16-be"
    return marked
