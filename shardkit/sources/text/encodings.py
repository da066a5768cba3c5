"""Decoding bytes: byte order marks, invalid bytes, and detection of a file's encoding."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from shardkit.errors import HoleError, SampleError, UsageError
from shardkit.helpers.extras import extra
from shardkit.sources.files import FilePath
from shardkit.sources.text.lines import find, is_hole

if TYPE_CHECKING:
    from charset_normalizer import CharsetMatches

_MARKS = (  # UTF-32-LE before UTF-16-LE, whose mark is a prefix of it
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF8, "utf-8"),
)
MARK_SIZE = 4  # bytes of the longest byte order mark
_RUN = bytes(8)  # NUL bytes that are no text: in UTF-32, at most 5 follow each other
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

    def text(self, data: bytes, offset: int) -> str:
        """Decode the bytes at `offset` in the file. Raises SampleError for invalid ones."""
        try:
            return data.decode(self.encoding, self.errors)
        except UnicodeError as error:
            raise self._bad_bytes(data, offset, error) from error

    def raw_text(self, data: bytes, offset: int) -> str:
        """Decode text other than JSON, in which NUL characters are invalid, too."""
        try:
            text = data.decode(self.encoding, self.errors)
        except UnicodeError as error:
            raise self._bad_bytes(data, offset, error) from error
        if "\0" in text:
            self.refuse_hole(data, offset)
            at = offset + max(find(data, "\0".encode(self.encoding)), 0)
            raise SampleError(
                "the text contains a NUL character: the file is binary or has another encoding",
                path=self.path,
                offset=at,
                expected=f"text, {self.encoding.upper()}",
                found="U+0000",
                fix="remove it, or use --on-error skip"
                if self.encoding.startswith(("utf-16", "utf-32"))
                else f"try --encoding {self.wide(data, offset)}, or use --on-error skip",
            )
        return text

    def refuse_hole(self, data: bytes, offset: int) -> None:
        """Raise SampleError if the bytes at `offset` in the file have a run of NUL bytes."""
        if (found := data.find(_RUN)) >= 0:
            raise hole(self.path, offset + found + -found % len(self.newline))

    def wide(self, data: bytes, offset: int) -> str:
        """Return the two- or four-byte encoding that explains the positions of the NUL bytes.

        For ASCII characters, every second byte is NUL in UTF-16, and three of four in UTF-32.
        """
        at = data.find(0)
        if data[at : at + 3] == bytes(3):
            return "utf-32-le" if (offset + at) % 4 else "utf-32-be"
        return "utf-16-le" if (offset + at) % 2 else "utf-16-be"

    def _bad_bytes(self, data: bytes, offset: int, error: UnicodeError) -> SampleError:
        start, end = getattr(error, "start", 0), getattr(error, "end", 1)
        # Of ASCII text in UTF-16, half of the bytes are NUL; a few show a binary file.
        wide = 3 * data.count(0) >= len(data)
        likely = self.wide(data, offset) if wide else "latin-1 or auto"
        return SampleError(
            f"the bytes are not valid {self.encoding.upper()}",
            path=self.path,
            offset=offset + start,
            expected=self.encoding.upper(),
            found=f"0x{data[start : max(end, start + 1)].hex()}: {getattr(error, 'reason', error)}",
            fix=f"use --encoding {likely}, --encoding-errors replace, or --on-error skip",
        )


_Hole = TypeVar("_Hole", SampleError, HoleError)


def hole(path: FilePath, offset: int) -> SampleError:
    """Return the error for NUL bytes from `offset` on, which are text in no encoding."""
    return _hole(SampleError, path, offset, "use --on-error skip")


def endless_hole(path: FilePath, offset: int) -> HoleError:
    """Return the error for NUL bytes from `offset` on, after which the file is not read."""
    return _hole(HoleError, path, offset, "move it away: what follows is not read")


def _hole(kind: type[_Hole], path: FilePath, offset: int, instead: str) -> _Hole:
    return kind(
        "the file holds NUL bytes instead of text, as after a crash or an unfinished download",
        path=path,
        offset=offset,
        expected="text",
        found="a run of NUL bytes",
        fix=f"copy the file again from an intact copy, or {instead}",
    )


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


def load_detector() -> Callable[[Iterable[bytes]], str]:
    """Return a function that detects the encoding of a file from all its blocks.

    Raises UsageError if the library for it is missing.
    """
    with extra("encodings", "detecting encodings", ", or use --encoding NAME"):
        from charset_normalizer import from_bytes

    return lambda blocks: _detect(blocks, from_bytes)


def _detect(blocks: Iterable[bytes], from_bytes: Callable[..., CharsetMatches]) -> str:
    """Return UTF-8 if all of the file is valid; otherwise guess from lines that are not ASCII."""
    utf8, telling = codecs.getincrementaldecoder("utf-8")(), b""
    valid = first = True
    for block in blocks:
        if first:
            first, known = False, _by_start(block)
            if known is not None:
                return known
        if is_hole(block):  # reading reports it
            break
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
    alike = [name for match in matches for name in match.could_be_from_charset]
    best = matches.best()
    few = sum(byte > 127 for byte in telling) < _FEW_BYTES
    # If several encodings fit equally well, choose the most common one.
    if (few or (best and not best.multi_byte_usage and "cp1252" in alike)) and _is(
        telling, "cp1252"
    ):
        return "cp1252"
    # If nothing fits, reading the file as UTF-8 reports the invalid byte.
    return "utf-8" if best is None else codecs.lookup(best.encoding).name


def _is(data: bytes, encoding: str) -> bool:
    try:
        data.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _by_start(head: bytes) -> str | None:
    """Return the encoding of a file with a mark, or of UTF-16 without one; otherwise None."""
    marked = next((name for mark, name in _MARKS if head.startswith(mark)), None)
    if marked is None and head.count(0) > len(head) // 4:  # every second byte of Latin text
        odd = head[1::2].count(0) > head[::2].count(0)
        return "utf-16-le" if odd else "utf-16-be"
    return marked
