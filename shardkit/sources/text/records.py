"""One text file: its records with their offsets, or its whole content."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from shardkit.codecs.compression import compression_of
from shardkit.errors import SampleError
from shardkit.sources.files import FilePath, Planned, check_unchanged, read_file
from shardkit.sources.quotes import Quotes, dialect, quotes_of, swallowed
from shardkit.sources.text.blocks import blocks, head
from shardkit.sources.text.encodings import MARK_SIZE, Decoder, endless_hole, hole
from shardkit.sources.text.lines import MAX_LINE, Hole, Line, is_hole, lines
from shardkit.storage.pointers import refuse_html

LINE_FIELD = "text"  # the field of plain-text documents
_HEAD = 1024  # bytes that show whether a table is an HTML page
# Characters per cell: csv uses 4 bytes for each, and an unclosed quote makes the rest one cell.
_MAX_CELL = 1 << 28
_MAGIC_SIZE = 6  # bytes that show a compression
_T = TypeVar("_T")
_BZ2 = re.compile(rb"BZh[1-9]1AY&SY")


class Record(NamedTuple):
    """A line or a row: where it begins and ends in the file, and its fields or an error."""

    start: int
    end: int
    value: dict[str, Any] | SampleError


@dataclass(frozen=True)
class TextFile:
    """A file and how to read it."""

    path: FilePath
    size: int  # when the run was planned
    form: str  # "text", "json", "csv", "tsv"
    compression: str
    encoding: str
    errors: str
    field: str | None = None  # a column that a CSV table must have
    version: int = 0  # as `Planned.time`
    quoted: bool | None = True  # whether the cells of a table are; None: it contradicts itself
    header: tuple[str, ...] | None = None  # of a table without one; () numbers the columns

    def records(self, start: int = 0, end: int | None = None) -> Iterator[Record]:
        """Return the records whose first byte is between `start` and `end`.

        Raises SampleError if the rest of the file cannot be read.
        """
        decoder, found = self._lines(start, end)
        if self.form == "text":
            return _text_records(found, decoder)
        if self.form == "json":
            return _json_records(found if start else _one_by_line(found, decoder), decoder)
        if self.quoted is None:
            raise _contradiction(self.path, self.quotes())
        rows = _Rows(found, decoder, self.form, self.quoted)
        top = _Rows(self._lines(0, None)[1], decoder, self.form, self.quoted) if start else rows
        return _table_records(rows, top, self.field, self.header)

    def width(self) -> int:
        """Return how many cells the first row of a table has. Raises SampleError."""
        decoder, found = self._lines(0, None)
        for _, _, row in _Rows(found, decoder, self.form, bool(self.quoted)):
            if isinstance(row, SampleError):
                raise row
            return len(row)
        return 0

    def quotes(self) -> Quotes:
        """Read all lines of a TSV, as far as they can be read, to find out whether its cells are
        quoted. Raises SampleError if there are none, HoleError for a hole."""
        decoder, found = self._lines(0, None)
        byte = '"'.encode(decoder.encoding)
        stored = _readable(self.blocks())
        if len(byte) == 1 and not any(byte in block or is_hole(block) for block in stored):
            return Quotes(None, None, 0)

        def text_of(line: bytes | Hole | None) -> str:
            if isinstance(line, Hole) and not line.ended:
                raise endless_hole(self.path, line.at)
            return (line if isinstance(line, bytes) else b"").decode(decoder.encoding, "replace")

        return quotes_of((at, text_of(line)) for at, line in _readable(found))

    def text(self, planned: Planned) -> str:
        """Return the whole file as one document. Raises SampleError if it is not as `planned`."""
        if self.compression:
            data = b"".join(_bounded(self.path, blocks(self.path, self.size, self.compression)))
            check_unchanged(self.path, planned)
        else:
            if self.size > MAX_LINE:
                raise _too_long(self.path, 0)
            data = read_file(self.path, self.size, planned)
            _refuse_compressed(self.path, data)
        decoder = self._decoder(data[:MARK_SIZE])
        return decoder.raw_text(data[decoder.mark :], decoder.mark)

    def blocks(self) -> Iterator[bytes]:
        """Return all bytes of the file, decompressed."""
        return blocks(self.path, self.size, self.compression)

    def _decoder(self, head: bytes) -> Decoder:
        return Decoder.of(self.path, self.encoding, self.errors, head)

    def _lines(self, start: int, end: int | None) -> tuple[Decoder, Iterator[Line]]:
        if start:
            decoder = self._decoder(head(self.path, self.size, MARK_SIZE, self.version))
            # If a line ends right before `start`, the next one begins at `start`.
            before = start - len(decoder.newline)
            stored = blocks(self.path, self.size, start=before, end=end)
            return decoder, lines(stored, decoder.newline, before, end, midway=True)
        stored = blocks(self.path, self.size, self.compression, end=end)
        first = b"".join(_first(stored, MARK_SIZE))
        if self.form != "text":
            refuse_html(first[:_HEAD], self.path, SampleError)
        if not self.compression:
            _refuse_compressed(self.path, first)
        decoder = self._decoder(first[:MARK_SIZE])
        stored = itertools.chain([first[decoder.mark :]], stored)
        return decoder, lines(stored, decoder.newline, decoder.mark, end, midway=False)


def _readable(found: Iterator[_T]) -> Iterator[_T]:
    """Yield what can be read of a file; its error is reported when the documents are read."""
    with contextlib.suppress(SampleError):
        yield from found


def _first(stored: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Yield blocks until they add up to `size` bytes."""
    while size > 0 and (block := next(stored, b"")):
        size -= len(block)
        yield block


def _refuse_compressed(path: FilePath, data: bytes) -> None:
    """Raise SampleError for compressed data under a name that does not say so."""
    suffix = compression_of(data[:_MAGIC_SIZE])
    if not suffix or (suffix == "bz2" and not _BZ2.match(data)):
        return
    name = str(path).rpartition("/")[2]
    raise SampleError(
        f"the file is compressed, but its name does not end in .{suffix}",
        path=path,
        offset=0,
        expected="text, or the suffix of the compression",
        found=f"the first bytes {data[:4].hex(' ')}",
        fix=f"rename it to {name}.{suffix}",
    )


def _bounded(path: FilePath, stored: Iterator[bytes]) -> Iterator[bytes]:
    size = 0
    for block in stored:
        size += len(block)
        if size > MAX_LINE:
            raise _too_long(path, 0)
        yield block


def _unread(path: FilePath, start: int, line: Hole | None) -> SampleError:
    """Return the error for a line. Raises HoleError if what follows is not read either."""
    if line is None:
        return _too_long(path, start)
    if not line.ended:
        raise endless_hole(path, line.at)
    return hole(path, line.at)


def _too_long(path: FilePath, offset: int) -> SampleError:
    return SampleError(
        "the document is too long",
        path=path,
        offset=offset,
        expected=f"at most {MAX_LINE:,} bytes",
        fix="split it, or use --on-error skip",
    )


def _records(
    found: Iterator[Line], decoder: Decoder, parse: Callable[[bytes, int], dict[str, Any] | None]
) -> Iterator[Record]:
    """Yield a record per line, except for blank lines, for which `parse` returns None."""
    width = len(decoder.newline)
    for start, line in found:
        value: dict[str, Any] | SampleError | None
        if not isinstance(line, bytes):
            yield Record(start, start, _unread(decoder.path, start, line))
            continue
        try:
            value = parse(line, start)
        except SampleError as error:
            value = error
        if value is not None:
            yield Record(start, start + len(line) + width, value)


# --- lines of text -------------------------------------------------------------------------------


def _text_records(found: Iterator[Line], decoder: Decoder) -> Iterator[Record]:
    def parse(line: bytes, start: int) -> dict[str, Any] | None:
        text = decoder.raw_text(line, start).removesuffix("\r")
        return {LINE_FIELD: text} if text and not text.isspace() else None

    return _records(found, decoder, parse)


# --- JSON ----------------------------------------------------------------------------------------


def _json_records(found: Iterator[Line], decoder: Decoder) -> Iterator[Record]:
    def parse(line: bytes, start: int) -> dict[str, Any] | None:
        text = decoder.text(line, start)
        return _json_object(text, line, start, decoder) if text and not text.isspace() else None

    return _records(found, decoder, parse)


def _json_object(text: str, line: bytes, start: int, decoder: Decoder) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        column = getattr(error, "pos", 0)
        fix = "repair the line, or use --on-error skip"
        if "\0" in text:
            decoder.refuse_hole(line, start)
            fix = f"try --encoding {decoder.wide(line, start)}, or {fix}"
        before = text[:column].encode(decoder.encoding, "replace")
        raise SampleError(
            f"a line is not JSON: {getattr(error, 'msg', error)}",
            path=decoder.path,
            offset=start + len(before),
            expected="a JSON object on every line",
            found=repr(text[max(column - 30, 0) : column + 30]),
            fix=fix,
        ) from error
    if not isinstance(value, dict):
        raise SampleError(
            "a line is not a JSON object",
            path=decoder.path,
            offset=start,
            expected='such as {"text": "..."}',
            found=repr(text[:60]),
            fix="repair the line, or use --on-error skip",
        )
    return value


def _one_by_line(found: Iterator[Line], decoder: Decoder) -> Iterator[Line]:
    """Yield the lines of a file, unless the first one shows that the file is a single value."""
    for start, line in found:
        first = (
            (line if isinstance(line, bytes) else b"")[:64]
            .decode(decoder.encoding, "ignore")
            .strip()
        )
        if first.startswith("[") or first == "{":
            kind, jq = ("array", ".[]") if first.startswith("[") else ("object", ".")
            raise SampleError(
                f"the file is a single JSON {kind}, not JSON Lines",
                path=decoder.path,
                offset=start,
                expected="one JSON object on every line",
                found=repr(first[:30]),
                fix=f"convert it to JSON Lines: jq -c '{jq}' FILE > FILE.jsonl",
            )
        yield start, line
        if first:
            break
    yield from found


# --- CSV -----------------------------------------------------------------------------------------


class _Rows:
    """The rows of a table, parsed by Python's csv, with their offsets.

    csv requests lines one by one, so the offset of a row is that of the next line requested.
    """

    def __init__(self, found: Iterator[Line], decoder: Decoder, form: str, quoted: bool) -> None:
        csv.field_size_limit(max(csv.field_size_limit(), _MAX_CELL))  # for the whole process
        self._found = found
        self.path = decoder.path
        self._decoder = decoder
        self.at = decoder.mark  # where the next line begins
        self._problem: SampleError | None = None  # in a line of the current row
        self.form = form
        self.lines: list[str] = []  # of the current row
        self._reader = csv.reader(self._lines(), **dialect(form, quoted=quoted))

    def __iter__(self) -> Iterator[tuple[int, int, list[str] | SampleError]]:
        """Yield where each row begins and ends, and its cells; blank lines are skipped."""
        while True:
            self._start, self._problem = -1, None
            self.lines.clear()
            row: list[str] | SampleError
            try:
                row = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                row = self._broken(error)
            if row or self._problem:
                yield self._start, self.at, self._problem or row

    def header(self) -> list[str]:
        """Return the column names. Raises SampleError if the row is damaged or repeats a name."""
        for start, _, row in self:
            if isinstance(row, SampleError):
                raise row
            if len(set(row)) == len(row):
                return row
            raise SampleError(
                "two columns of the table have the same name",
                path=self.path,
                offset=start,
                expected="a first line with the names of the columns",
                found=", ".join(map(repr, row))[:200],
            )
        return []

    def _lines(self) -> Iterator[str]:
        width, text_of = len(self._decoder.newline), self._decoder.raw_text
        for start, line in self._found:
            if self._start < 0:
                self._start = start
            if not isinstance(line, bytes):
                self.at = start
                self._problem = _unread(self.path, start, line)
                yield "\n"
                continue
            self.at = start + len(line) + width
            try:
                text = text_of(line, start)
            except SampleError as error:  # the other lines still belong to this row
                self._problem = self._problem or error
                text = line.decode(self._decoder.encoding, "replace").replace("\0", "")
            self.lines.append(text)
            yield text + "\n"

    def _broken(self, error: csv.Error) -> SampleError:
        what, count = str(error), len(self.lines)
        if what == "unexpected end of data":
            what = "a quote is opened and never closed"
        several = count > 1
        return SampleError(
            f"a row is not CSV: {what}",
            path=self.path,
            offset=self._start,
            expected='cells as in RFC 4180: quoted "like this", with quotes inside doubled',
            found=f"{count:,} lines that belong to it, which may be rows" if several else None,
            fix="repair the row, or use --on-error skip" + ", which drops all of them" * several,
        )


def _table_records(
    rows: _Rows, top: _Rows, field: str | None, given: tuple[str, ...] | None
) -> Iterator[Record]:
    """Yield the rows after the header, which is the first row of `top`, or all if it is `given`."""
    path = rows.path
    header = top.header() if given is None else list(given)
    first = top.at
    if field is not None and header and field not in header:
        raise SampleError(
            f"the table has no column {field!r}",
            path=path,
            offset=0,
            found=", ".join(header)[:200],
            fix="say which column is the text: --text-field NAME",
        )
    for start, end, row in rows:
        if start < first:  # the header itself, if `rows` includes it
            continue
        if isinstance(row, SampleError):
            yield Record(start, end, row)
        elif len(rows.lines) > 2 and swallowed(rows.lines, rows.form, len(header)):
            yield Record(start, end, _swallows(rows.lines, header, path, start))
        elif len(row) == len(header):
            yield Record(start, end, dict(zip(header, row, strict=True)))
        else:
            yield Record(start, end, _other_width(row, header, path, start))


def _other_width(row: list[str], header: list[str], path: FilePath, start: int) -> SampleError:
    return SampleError(
        "a row does not have as many cells as the first line",
        path=path,
        offset=start,
        expected=f"{len(header)}: {', '.join(header)[:200]}",
        found=str(len(row)),
        fix="repair the row, or use --on-error skip",
    )


def _swallows(lines: list[str], header: list[str], path: FilePath, start: int) -> SampleError:
    return SampleError(
        f"a quoted cell holds {len(lines):,} lines that look like rows of the table",
        path=path,
        offset=start,
        expected=f"lines with other than {len(header)} cells inside a quoted cell",
        found=repr(lines[1][:60]),
        fix='if the first quote is text, double it and quote its cell, such as """Hi, he said";'
        " or use --on-error skip",
    )


def _contradiction(path: FilePath, quotes: Quotes) -> SampleError:
    return SampleError(
        "some cells of the TSV are quoted, and others begin with a quote that is not closed",
        path=path,
        offset=quotes.plain,
        expected="either no quoted cells, or all quotes inside of quoted cells doubled",
        found=f"a quoted cell in the row at byte {quotes.quoted}, but not in this one",
        fix='if the quote is text, double it and quote its cell, such as """Hi, he said"; or use'
        " --on-error skip to leave the file out",
    )
