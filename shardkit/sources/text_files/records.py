"""One text file: its records with their offsets, or its whole content."""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardkit.codecs.compression import compression_of
from shardkit.errors import SampleError, ShardkitError
from shardkit.sources.files import FilePath, Planned, check_unchanged, read_file
from shardkit.sources.text_files.blocks import BLOCK, blocks, head
from shardkit.sources.text_files.encodings import MARK_SIZE, MAX_LINE, REPAIR, Decoder, Line, lines
from shardkit.storage.pointers import refuse_html

DELIMITERS = {"csv": ",", "tsv": "\t"}
_OTHER_DELIMITERS = (";", "\t", "|")  # of CSV
_FIRST_LINES = 10  # which show the delimiter
_LONG_LINE = 1 << 16  # bytes of each of them
LINE_FIELD = "text"  # the field of plain-text documents
_HEAD = 1024  # bytes that show whether a table is an HTML page
# Characters per cell: csv uses 4 bytes for each, and an unclosed quote makes the rest one cell.
_MAX_CELL = 1 << 28
_MAGIC_SIZE = 10  # bytes that show a compression
_MANY = 10  # lines of one CSV cell, each with as many commas as the header: they were rows
_LONGEST = 10_000  # lines of one TSV cell
_SPACE = re.compile(r"[ \t\r\n]+")
_CUT = 16  # characters at the end of a text in which a value may only seem to be wrong
_QUOTED = re.compile(r'"(?:[^"]|"")*"')


class Record(NamedTuple):
    """A line or a row: where it begins and ends in the file, and its fields or an error."""

    start: int
    end: int
    value: dict[str, Any] | SampleError


class Quotes(NamedTuple):
    """Whether the cells of a TSV are quoted."""

    quoted: bool
    unclear: int = 0  # cells in quotation marks, which belong to the text if none are quoted


@dataclass(frozen=True)
class TextFile:
    """A file and how to read it."""

    path: FilePath
    size: int  # when the run was planned
    form: str  # "text", "json", "csv", "tsv"
    compression: str
    encoding: str = "utf-8"
    errors: str = "strict"
    field: str | None = None  # a column that a CSV table must have
    version: int = 0  # as `Planned.time`
    quoted: bool = True  # whether the cells of a table are
    delimiter: str = ""  # between the cells of a table, unless it is that of its form
    header: tuple[str, ...] | None = None  # of a table without one

    def records(self, start: int = 0, end: int | None = None) -> Iterator[Record]:
        """Return the records whose first byte is between `start` and `end`.

        Raises SampleError if the rest of the file cannot be read.
        """
        if self.form == "json" and not start and self.is_array():
            return _elements(*self._beginning())
        decoder, found = self._lines(start, end)
        if self.form == "text":
            return _records(found, decoder, _line_of_text)
        if self.form == "json":
            return _records(found if start else _one_by_line(found, decoder), decoder, _json_object)
        rows = self._table(decoder, found)
        return self._rows(rows, self._top() if start else rows)

    def _top(self) -> _Rows:
        return self._table(*self._lines(0, None))

    def _table(self, decoder: Decoder, found: Iterator[Line]) -> _Rows:
        return _Rows(found, decoder, self.delimiter or DELIMITERS[self.form], self.quoted)

    def is_array(self) -> bool:
        """Whether a file of JSON is an array. Raises SampleError if it cannot be read."""
        decoder, found = self._beginning()
        text = next(found, b"")[:_HEAD].decode(decoder.encoding, "ignore")
        return text.lstrip().startswith("[")

    def delimiter_found(self) -> str:
        """Return what separates the cells of a CSV: another character only if there is no comma.

        It is one that divides the first lines into equally many cells.
        """
        with contextlib.suppress(SampleError):  # which is reported when the file is read
            decoder, found = self._lines(0, None)
            starts = ((line or b"")[:_LONG_LINE] for _, line in found)
            texts = (line.decode(decoder.encoding, "replace") for line in starts)
            some = list(itertools.islice(filter(str.strip, texts), _FIRST_LINES))
            for delimiter in (",", *_OTHER_DELIMITERS) if some else ():
                widths = [len(_row_of([line], delimiter)) for line in some]
                if widths[0] > 1 and (delimiter == "," or len(set(widths)) == 1):
                    return delimiter
        return ","

    def line_of(self, offset: int) -> int | None:
        """Return the number of the line at an offset, from 1; None if finding it takes long."""
        wide = len("\n".encode(self.encoding)) > 1
        if wide or self.compression or not isinstance(self.path, str):
            return None
        known = _counted(self.path, self.version)
        start, line = known if known[0] <= offset else (0, 1)
        with contextlib.suppress(ShardkitError):
            for block in blocks(self.path, self.size, start=start):
                line += block[: offset - start].count(b"\n")
                start += len(block)
                if start >= offset:
                    known[:] = offset, line
                    return line
        return None

    def numbered_columns(self) -> tuple[str, ...]:
        """Name the columns of a table without a header by numbers. Raises SampleError."""
        return tuple(f"column{number}" for number in range(len(self._top().first())))

    def _rows(self, rows: _Rows, top: _Rows) -> Iterator[Record]:
        """Yield the rows after the header, the first row of `top`; all of them if it has none."""
        header, first = list(self.header or ()), 0
        if self.header is None:
            header = top.first()
            top.check_header(header, self.field)
            first = top.at
        for start, end, row in rows:
            if start < first:  # the header itself, if `rows` includes it
                continue
            if isinstance(row, SampleError):
                yield Record(start, end, row)
            elif len(rows.lines) > 1 and _swallowed(rows.lines, rows.delimiter, len(header)):
                yield Record(start, end, rows.error_of_lines(start, len(header)))
            elif len(row) == len(header):
                yield Record(start, end, dict(zip(header, row, strict=True)))
            else:
                columns = f"{len(header)}: {', '.join(header)[:200]}"
                what = "a row does not have as many cells as the table has columns"
                asked = (
                    ""
                    if self.header is None
                    else (
                        "name all columns of a table without a header (--columns); --fields chooses"
                        " columns; or else "
                    )
                )
                error = rows.decoder.error(what, start, columns, str(len(row)), asked + REPAIR)
                yield Record(start, end, error)

    def has_quotes(self) -> bool:
        """Whether there is a quotation mark. Raises SampleError if the file cannot be read."""
        return any(b'"' in block for block in self.blocks())

    def quotes(self) -> Quotes:
        """Find out whether the cells of a TSV are quoted, as far as it can be read."""
        with contextlib.suppress(SampleError):  # which is reported when the file is read
            decoder, found = self._lines(0, None)
            if len(decoder.newline) > 1 or self.has_quotes():
                texts = ((line or b"").decode(decoder.encoding, "replace") for _, line in found)
                return _quotes_of(texts)
        return Quotes(quoted=False)

    def text(self, planned: Planned) -> str:
        """Return the whole file as one document. Raises SampleError if it is not as `planned`."""
        if self.compression:
            parts, size = list[bytes](), 0
            for block in self.blocks():
                parts.append(block)
                size += len(block)
                if size > MAX_LINE:
                    raise _too_long(self.path, 0)
            data = b"".join(parts)
            check_unchanged(self.path, planned)
        else:
            if self.size > MAX_LINE:
                raise _too_long(self.path, 0)
            data = read_file(self.path, self.size, planned)
            _refuse_compressed(self.path, data)
        decoder = self._decoder(data[:MARK_SIZE])
        return decoder.plain_text(data[decoder.mark :], decoder.mark)

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
        decoder, stored = self._beginning(end)
        return decoder, lines(stored, decoder.newline, decoder.mark, end, midway=False)

    def _beginning(self, end: int | None = None) -> tuple[Decoder, Iterator[bytes]]:
        """Return the bytes from the beginning on, without a byte order mark."""
        stored = blocks(self.path, self.size, self.compression, end=end)
        first = b""
        while len(first) < MARK_SIZE and (block := next(stored, b"")):
            first += block
        if self.form != "text":
            refuse_html(first[:_HEAD], self.path, SampleError)
        if not self.compression:
            _refuse_compressed(self.path, first)
        decoder = self._decoder(first[:MARK_SIZE])
        return decoder, itertools.chain([first[decoder.mark :]], stored)


@functools.lru_cache(1)
def _counted(path: str, version: int) -> list[int]:
    """An offset in a file and the number of its line, from which further lines are counted."""
    return [0, 1]


def _refuse_compressed(path: FilePath, data: bytes) -> None:
    """Raise SampleError for compressed data under a name that does not say so."""
    if suffix := compression_of(data[:_MAGIC_SIZE]):
        raise SampleError(
            f"the file is compressed, but its name does not end in .{suffix}",
            path=path,
            offset=0,
            expected="text, or the suffix of the compression",
            found=f"the first bytes {data[:4].hex(' ')}",
            fix=f"rename it to {str(path).rpartition('/')[2]}.{suffix}",
        )


def _too_long(path: FilePath, offset: int) -> SampleError:
    return SampleError(
        "the document is too long",
        path=path,
        offset=offset,
        expected=f"at most {MAX_LINE:,} bytes",
        fix="split it, or use --on-error skip",
    )


def _records(
    found: Iterator[Line],
    decoder: Decoder,
    parse: Callable[[bytes, int, Decoder], dict[str, Any] | None],
) -> Iterator[Record]:
    """Yield a record per line, except for blank lines, for which `parse` returns None."""
    width = len(decoder.newline)
    for start, line in found:
        if line is None:
            yield Record(start, start, _too_long(decoder.path, start))
            continue
        value: dict[str, Any] | SampleError | None
        try:
            value = parse(line, start, decoder)
        except SampleError as error:
            value = error
        if value is not None:
            yield Record(start, start + len(line) + width, value)


def _line_of_text(line: bytes, start: int, decoder: Decoder) -> dict[str, Any] | None:
    text = decoder.plain_text(line, start).removesuffix("\r")
    return {LINE_FIELD: text} if text and not text.isspace() else None


# --- JSON ----------------------------------------------------------------------------------------


def _json_object(line: bytes, start: int, decoder: Decoder) -> dict[str, Any] | None:
    text = decoder.text(line, start)
    if not text or text.isspace():
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        column = getattr(error, "pos", 0)
        raise decoder.error(
            f"a line is not JSON: {getattr(error, 'msg', error)}",
            start + len(text[:column].encode(decoder.encoding, "replace")),
            "a JSON object on every line",
            repr(text[max(column - 30, 0) : column + 30]),
            decoder.other(line, start) + REPAIR,
        ) from error
    if not isinstance(value, dict):
        expected = 'such as {"text": "..."}'
        raise decoder.error("a line is not a JSON object", start, expected, repr(text[:60]))
    return value


def _one_by_line(found: Iterator[Line], decoder: Decoder) -> Iterator[Line]:
    """Yield the lines of a file, unless the first one shows that the file is a single value."""
    for start, line in found:
        first = (line or b"")[:64].decode(decoder.encoding, "ignore").strip()
        if first == "{":
            raise decoder.error(
                "the file is a single JSON object, not JSON Lines",
                start,
                "one JSON object on every line, or an array of objects",
                repr(first),
                "convert it to JSON Lines: jq -c . FILE > FILE.jsonl; or, if it holds an array"
                " called rows: jq -c '.rows[]' FILE > FILE.jsonl",
            )
        yield start, line
        if first:
            break
    yield from found


def _elements(decoder: Decoder, stored: Iterator[bytes]) -> Iterator[Record]:
    """Yield the elements of a JSON array. Raises SampleError if the rest of it cannot be read."""
    text = _Text(decoder, stored)
    text.skip("[")
    while text.skip() != "]":
        start, value = text.at, text.value()
        if not isinstance(value, dict):
            expected, found = 'such as {"text": "..."}', repr(value)[:60]
            what = "an element of the array is not a JSON object"
            value = decoder.error(what, start, expected, found)
        yield Record(start, text.at, value)
        if text.skip() != "]":
            text.skip(",")
    text.skip("]")
    if text.skip():
        raise text.broken("there is more after the array")


class _Text:
    """JSON that is read block by block, with the offset in the file."""

    def __init__(self, decoder: Decoder, stored: Iterator[bytes]) -> None:
        self._decoder, self._stored = decoder, stored
        self._decode = codecs.getincrementaldecoder(decoder.encoding)(decoder.errors).decode
        self._held, self._next = "", 0  # some text, and the position in it
        self.at = decoder.mark
        self._scan = json.JSONDecoder().raw_decode

    def skip(self, expected: str = "") -> str:
        """Skip white space, and the character that is `expected`; return the one that follows."""
        while True:
            space = _SPACE.match(self._held, self._next)
            self.at += (space.end() - self._next) * len(self._decoder.newline) if space else 0
            self._next = space.end() if space else self._next
            if self._next < len(self._held) or not self._read_on():
                break
        found = self._held[self._next : self._next + 1]
        if expected and found != expected:
            raise self.broken(f"{expected!r} is missing")
        self._forward(self._next + len(expected))
        return found

    def value(self) -> Any:
        while True:
            try:
                value, end = self._scan(self._held, self._next)
            except (ValueError, RecursionError) as error:
                cut = getattr(error, "pos", 0) + _CUT >= len(self._held)
                cut |= "Unterminated" in str(error)
                if cut and len(self._held) - self._next < _MAX_CELL and self._read_on():
                    continue
                raise self.broken(getattr(error, "msg", str(error))) from error
            self._forward(end)
            return value

    def _forward(self, end: int) -> None:
        self.at += len(self._held[self._next : end].encode(self._decoder.encoding, "surrogatepass"))
        self._next = end

    def _read_on(self) -> bool:
        """Read as many bytes as are held, at least; returns whether there were any."""
        held = len(self._held) - self._next
        more = list(itertools.islice(self._stored, 1 + held // BLOCK))
        try:
            read = self._decode(b"".join(more), not more)
        except UnicodeError as error:
            raise self.broken(f"the bytes are not valid {self._decoder.encoding}") from error
        self._held, self._next = self._held[self._next :] + read, 0
        return bool(more)

    def broken(self, what: str) -> SampleError:
        found = self._held[self._next : self._next + 30]
        return self._decoder.error(
            f"the rest of a JSON array cannot be read: {what}",
            self.at,
            "an array of objects, separated by commas",
            repr(found) if found else "the end of the file",
        )


# --- CSV -----------------------------------------------------------------------------------------


class _Rows:
    """The rows of a table, parsed by Python's csv, with their offsets.

    csv requests lines one by one, so the offset of a row is that of the next line requested.
    """

    def __init__(
        self, found: Iterator[Line], decoder: Decoder, delimiter: str, quoted: bool
    ) -> None:
        csv.field_size_limit(max(csv.field_size_limit(), _MAX_CELL))  # for the whole process
        self._found, self.decoder = found, decoder
        self.start = -1  # where the current row begins
        self.at = decoder.mark  # where the next line begins
        self._problem: SampleError | None = None  # in a line of the current row
        self.delimiter = delimiter
        self.lines: list[str] = []  # of the current row
        self._reader = csv.reader(
            self._lines(),
            delimiter=delimiter,
            quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
            strict=True,
        )

    def __iter__(self) -> Iterator[tuple[int, int, list[str] | SampleError]]:
        """Yield where each row begins and ends, and its cells; blank lines are skipped."""
        while True:
            self.start, self._problem = -1, None
            self.lines.clear()
            row: list[str] | SampleError
            try:
                row = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                row = self._broken(error)
            if row or self._problem:
                yield self.start, self.at, self._problem or row

    def first(self) -> list[str]:
        """Return the first row; [] if there is none. Raises SampleError if it is damaged."""
        for _, _, row in self:
            if isinstance(row, SampleError):
                raise row
            return row
        return []

    def _lines(self) -> Iterator[str]:
        width, text_of = len(self.decoder.newline), self.decoder.plain_text
        for start, line in self._found:
            if self.start < 0:
                self.start = start
            if line is None:
                self.at = start
                self._problem = _too_long(self.decoder.path, start)
                yield "\n"
                continue
            self.at = start + len(line) + width
            try:
                text = text_of(line, start)
            except SampleError as error:  # the other lines still belong to this row
                self._problem = self._problem or error
                text = line.decode(self.decoder.encoding, "replace").replace("\0", "")
            self.lines.append(text)
            yield text + "\n"

    def _broken(self, error: csv.Error) -> SampleError:
        what, count = str(error), len(self.lines)
        if what == "unexpected end of data":
            what = "a quote is opened and never closed"
        elif what.startswith("new-line character"):  # advice for programs
            what = "a carriage return without a line feed is in a cell that is not quoted"
        several = count > 1
        return self.decoder.error(
            f"a row is not CSV: {what}",
            self.start,
            'cells as in RFC 4180: quoted "like this", with quotes inside doubled',
            f"{count:,} lines that belong to it, which may be rows" if several else None,
            f"{REPAIR}{', which drops all of them' * several}; if quotation marks are text in this"
            " file, use --quoting none",
        )

    def check_header(self, header: list[str], field: str | None) -> None:
        """Raise SampleError if two columns have the same name, or none that of the `field`."""
        found = ", ".join(header)[:200]
        if len(set(header)) < len(header):
            expected = "a first line with the names of the columns"
            what = "two columns of the table have the same name"
            fix = "rename one; if the first line is a row, name the columns: --columns NAME,NAME"
            raise self.decoder.error(what, self.start, expected, found, fix)
        if field is not None and header and field not in header:
            fix = "say which column is the text: --text-field NAME"
            raise self.decoder.error(f"the table has no column {field!r}", 0, field, found, fix)

    def error_of_lines(self, start: int, width: int) -> SampleError:
        """Return the error for a row over several lines that look like rows themselves."""
        return self.decoder.error(
            f"a quoted cell holds {len(self.lines):,} lines that look like rows of the table",
            start,
            f"lines with other than {width} cells inside a quoted cell",
            repr(self.lines[1][:60]),
            'if the first quote is text, double it and quote its cell, such as """Hi, he said";'
            " or use --on-error skip",
        )


# --- quotation marks -----------------------------------------------------------------------------
#
# RFC 4180 defines quotes for CSV. In most TSV files, a quotation mark is like any other character.


def _quotes_of(lines: Iterable[str]) -> Quotes:
    """Find out whether the lines of a TSV show that its cells are quoted.

    The header is, or a quoted cell has doubled quotes, a tab, or line ends. Nothing is unclear if a
    quote that is not closed in its cell shows that they are not.
    """
    width = unclear = 0
    plain = False
    row: list[str] = []  # the lines of a row in which a quote is open
    for text in lines:
        line = text.rstrip("\r\n")
        if not width:
            if any(cell[:1] == '"' for cell in line.split("\t")) and _row_of([line], "\t"):
                return Quotes(quoted=True)
            width = len(line.split("\t")) if line else 0
            continue
        closes = line.count('"') % 2 == 1
        alone = width > 1 and line.count("\t") == width - 1  # with one column, nothing tells
        if row and not closes and (alone or len(row) == _LONGEST):
            row = []  # the line is a row by itself: the quote was none
        if not row:
            marked = [cell for cell in line.split("\t") if cell[:1] == '"'] if '"' in line else []
            if all(map(_QUOTED.fullmatch, marked)):
                if any('""' in cell[1:-1] for cell in marked):
                    return Quotes(quoted=True)
                unclear += len(marked)
                continue
            if alone:
                plain = True
                continue
        row.append(line)
        if closes == (len(row) > 1):  # no quote is open at the end of this line
            if len(_row_of(row, "\t")) == width:
                return Quotes(quoted=True)
            row = []
    return Quotes(quoted=False, unclear=0 if plain else unclear)


def _row_of(lines: Sequence[str], delimiter: str) -> list[str]:
    """Return the cells of lines that are one row with quoted cells; [] if they are not."""
    given = [f"{line}\n" for line in lines]
    try:
        rows = list(csv.reader(given, delimiter=delimiter, strict=True))
    except csv.Error:
        return []
    return rows[0] if len(rows) == 1 else []


def _swallowed(lines: Sequence[str], delimiter: str, width: int) -> bool:
    """Return whether a row of a table, over several lines, has a cell that holds what were rows.

    In a TSV, a line inside the cell with as many tabs as the header shows it, or both the first and
    the last line. Commas are frequent in text: in a CSV, all of many lines must have as many as the
    header.
    """
    tabs = delimiter == "\t"
    if width < 2 or (not tabs and len(lines) < _MANY):
        return False
    first, *inside, last = (line.count(delimiter) == width - 1 for line in lines)
    return any(inside) or (first and last) if tabs else all(inside)
