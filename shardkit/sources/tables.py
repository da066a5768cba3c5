"""Tables that describe files: CSV, TSV, JSON Lines or Parquet, read into columns in memory."""

from __future__ import annotations

import csv
import io
import json
import posixpath
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.compression import COMPRESSED_BLOCK, compression_of, decompressed
from shardkit.codecs.media import kind_by_name as media_by_name
from shardkit.errors import SourceError, UsageError, drop_option, near
from shardkit.formats import get_format
from shardkit.helpers.extras import extra
from shardkit.sample import JsonText
from shardkit.schema import RESERVED, Json, Text
from shardkit.sources.columns import CHUNK, Building, Column
from shardkit.sources.file_names import parse_name
from shardkit.sources.quotes import DELIMITERS, dialect, quotes_of, swallowed
from shardkit.storage import fs
from shardkit.storage.pointers import refuse_html

_MAX_CELL = 1 << 28  # characters


class _Rows(NamedTuple):
    """Some rows of a table: their line numbers, and the values of each column."""

    lines: list[int]
    values: Mapping[str, Sequence[Any]]


class Table:
    """The rows of one or more table files in memory: the file each row names, and the columns."""

    def __init__(self) -> None:
        self._names: list[Column] = []  # paths relative to the source, as text
        self._given: list[tuple[Path, int]] = []  # each table file and its row count
        self._lines: list[npt.NDArray[np.int64]] = []
        self._columns: dict[str, Building] = {}

    def __len__(self) -> int:
        return sum(count for _, count in self._given)

    def read(
        self,
        path: Path,
        column: str,
        folder: str = "",
        suffix: str = "",
        only: Collection[str] | None = None,
    ) -> None:
        """Append the rows of the table at `path`, with all its columns or `only` these.

        `column` names a file in each row, relative to `folder` and without `suffix`. Raises
        SourceError for a damaged table, and for a table without that column.
        """
        before = count = len(self)
        for lines, values in _rows_of(path):
            if column not in values:
                raise _no_column(path, column, values)
            names = _file_names(values[column], lines, column, path)
            self._names.append(Column.of(Text(), [_path(folder, name + suffix) for name in names]))
            self._lines.append(np.array(lines, np.int64))
            for name in [name for name in self._columns if name not in values]:
                self._columns[name].skip(len(lines))
            for name, column_values in values.items():
                if name == column or (only is not None and name not in only):
                    continue
                if name not in self._columns:
                    cells = (form := parse_name(path.name)) and form.suffix in DELIMITERS
                    self._columns[name] = Building(cells=bool(cells))
                    self._columns[name].skip(count)
                self._columns[name].add(column_values)
            count += len(lines)
        self._given.append((path, count - before))

    @property
    def path(self) -> Path:
        """The table file, or the first one."""
        return self._given[0][0]

    def names(self) -> Column:
        return Column.joined(self._names or [Column.of(Text(), [])])

    def where(self, row: int) -> tuple[Path, int]:
        """The table file and line number of a row."""
        self._lines = [np.concatenate(self._lines)]  # once
        ends = list(accumulate(count for _, count in self._given))
        file = int(np.searchsorted(ends, row, side="right"))
        return self._given[file][0], int(self._lines[0][row])

    def columns(self) -> tuple[dict[str, Column], dict[str, SourceError]]:
        """The columns by name, and an error for each column that cannot be a field."""
        found: dict[str, Column] = {}
        unusable: dict[str, SourceError] = {}
        for name, building in self._columns.items():
            path = self.path
            try:
                column = building.column()
                if isinstance(column.kind, Json):
                    JsonText.of(list(column))
            except (TypeError, ValueError) as error:
                unusable[name] = _not_stored(name, path, error)
                continue
            if name in RESERVED or not name:
                unusable[name] = _reserved(name, path)
            else:
                found[name] = column
        return found, unusable


def place(path: Path, line: int) -> str:
    word = "row" if path.name.lower().endswith(".parquet") else "line"
    return f"{word} {line:,} of the metadata"


# --- reading -------------------------------------------------------------------------------------


def _rows_of(path: Path) -> Iterator[_Rows]:
    name = parse_name(path.name)
    if path.name.lower().endswith(".parquet"):
        return _parquet_rows(path)
    if name is None or name.form == "text":
        raise UsageError(
            "the metadata file is not a table in a supported format",
            path=path,
            expected=".csv, .tsv or .jsonl, which may be compressed, or .parquet",
        )
    data = fs.read(path)
    suffix = compression_of(data)
    if suffix and not name.compression:
        raise SourceError(
            f"the metadata file is compressed, but its name does not end in .{suffix}",
            path=path,
            found=f"the first bytes {data[:4].hex(' ')}",
            fix=f"rename it to {path.name}.{suffix}",
        )
    if name.compression:
        try:
            data = b"".join(decompressed(_pieces(data), name.compression))
        except ValueError as error:
            raise SourceError(
                f"the compressed metadata file is damaged: {error}",
                path=path,
                fix="download it again, or rename it to convert without metadata",
            ) from error
    refuse_html(data[:1024], path, SourceError)
    text = io.TextIOWrapper(
        io.BytesIO(data), "utf-8-sig", newline="" if name.form != "json" else "\n"
    )
    rows = _json_rows(text, path) if name.form == "json" else _csv_rows(text, path, name.form)
    return _as_utf8(rows, data, path)


def _as_utf8(rows: Iterator[_Rows], data: bytes, path: Path) -> Iterator[_Rows]:
    try:
        yield from rows
    except UnicodeDecodeError:
        try:
            data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise SourceError(
                "the metadata file is not valid UTF-8",
                path=path,
                offset=error.start,
                found=error.reason,
                fix="save the file as UTF-8, or rename it to convert without metadata",
            ) from error
        raise


def _csv_rows(text: io.TextIOWrapper, path: Path, form: str) -> Iterator[_Rows]:
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_CELL))  # a process-wide setting
    held: list[str] = []  # the lines of the current row
    quoted = form == "csv" or _is_quoted(text, path)
    reader = csv.reader(_noted(text, held), **dialect(form, quoted=quoted))
    try:
        head = next(reader, [])
        if len(set(head)) != len(head):
            raise _bad_line(1, "two columns have the same name", path)
        rows: list[list[str]] = []
        lines: list[int] = []
        held.clear()
        for cells in reader:
            if len(held) > 2 and swallowed(held, form, len(head)):
                words = f"it ends a quoted cell with {len(held):,} lines that look like rows"
                raise _bad_line(reader.line_num, words, path, found=repr(held[1][:60]))
            held.clear()
            if not cells:
                continue
            if len(cells) != len(head):
                words = f"it has {len(cells):,} cells, but the header has {len(head):,}"
                raise _bad_line(reader.line_num, words, path)
            rows.append(cells)
            lines.append(reader.line_num)
            if len(rows) == CHUNK:
                yield _of_cells(head, rows, lines)
                rows, lines = [], []
        yield _of_cells(head, rows, lines)
    except csv.Error as error:
        raise _bad_line(reader.line_num, f"it is not valid CSV: {error}", path) from error


def _noted(lines: Iterable[str], held: list[str]) -> Iterator[str]:
    for line in lines:
        held.append(line)
        yield line


def _is_quoted(text: io.TextIOWrapper, path: Path) -> bool:
    """Whether the cells of a TSV are quoted."""
    found = quotes_of(enumerate(text, 1))
    text.seek(0)
    if found.quoted is not None and found.plain is not None:
        words = f"it has a quote that is not closed, but cells are quoted in line {found.quoted:,}"
        raise _bad_line(found.plain, words, path)
    return found.quoted is not None


def _of_cells(head: list[str], rows: list[list[str]], lines: list[int]) -> _Rows:
    """Turn rows into columns; empty cells become missing values."""
    columns = zip(*rows, strict=True) if rows else [()] * len(head)
    return _Rows(
        lines, {n: [cell or None for cell in cells] for n, cells in zip(head, columns, strict=True)}
    )


def _json_rows(text: io.TextIOWrapper, path: Path) -> Iterator[_Rows]:
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    for line, entry in enumerate(text, 1):
        if not entry.strip():
            continue
        try:
            row = json.loads(entry)
        except (ValueError, RecursionError) as error:
            raise _bad_line(line, f"it is not valid JSON: {error}", path) from error
        if not isinstance(row, dict):
            raise _bad_line(line, "it is not a JSON object", path, found=entry[:60])
        rows.append(row)
        lines.append(line)
        if len(rows) == CHUNK:
            yield _of_objects(rows, lines)
            rows, lines = [], []
    if rows:
        yield _of_objects(rows, lines)


def _of_objects(rows: list[dict[str, Any]], lines: list[int]) -> _Rows:
    names = dict.fromkeys(name for row in rows for name in row)
    return _Rows(lines, {name: [row.get(name) for row in rows] for name in names})


def _parquet_rows(path: Path) -> Iterator[_Rows]:
    with extra("arrow", f"reading {path.name}"):
        reader = get_format("parquet").open(path)
    names = [*reader.schema, *reader.layout.get("unusable", ())]
    try:
        for first in range(0, max(len(reader), 1), CHUNK):
            numbers = range(first, min(first + CHUNK, len(reader)))
            rows = [reader.sample(number) for number in numbers]
            values = {name: [_plain(row.get(name)) for row in rows] for name in names}
            yield _Rows([number + 1 for number in numbers], values)
    finally:
        reader.close()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _pieces(data: bytes) -> Iterator[bytes]:
    return (data[at : at + COMPRESSED_BLOCK] for at in range(0, len(data), COMPRESSED_BLOCK))


def _file_names(
    values: Sequence[Any], lines: Sequence[int], column: str, path: Path
) -> Sequence[str]:
    names = values if set(map(type, values)) == {str} else [_file_name(value) for value in values]
    if "" in names:
        line = lines[names.index("")]
        raise _bad_line(line, f"there is no {column!r}, which names its file", path)
    return names


def _file_name(value: Any) -> str:
    return value if isinstance(value, str) else str(value) if type(value) is int else ""


def _path(folder: str, name: str) -> str:
    path = f"{folder}/{name}" if folder else name
    return posixpath.normpath(path) if "./" in path or "//" in path else path


def _no_column(path: Path, column: str, values: Mapping[str, Any]) -> SourceError:
    fix = "name the column with --file-column, together with --metadata FILE"
    head = next(iter(values), "") if len(values) == 1 else ""
    other = next((mark for mark in (";", "\t", "|") if mark in head), "")
    if other:
        fix = f"columns seem to be separated by {other!r}: use commas (.csv) or tabs (.tsv)"
    if any(media_by_name(str(name)) for name in values):
        fix = f"the first line seems to be a row: add a header above it, such as {column},label"
    return SourceError(
        f"the metadata have no column {column!r} that names files",
        path=path,
        expected=near(column, map(str, values)) if values else None,
        found=", ".join(map(str, values)) or "no columns",
        fix=fix,
    )


def _not_stored(name: str, path: Path, error: Exception) -> SourceError:
    without = f"convert without it: {drop_option(name)}"
    if isinstance(error, TypeError):
        return SourceError(
            f"the column {name!r} of the metadata is of a type that no field can hold",
            path=path,
            found=str(error),
            fix=f"{without}, or cast it to another type in the table",
        )
    return SourceError(
        f"the column {name!r} of the metadata has numbers that JSON cannot represent",
        path=path,
        expected="no NaN or Infinity inside lists and objects",
        fix=f"{without}, or replace them by null",
    )


def _reserved(name: str, path: Path) -> SourceError:
    return SourceError(
        f"the metadata have a column {name!r}, which cannot be the name of a field",
        path=path,
        fix=f"convert without it: {drop_option(name)}, or rename the column",
    )


def _bad_line(line: int, what: str, path: Path, found: str | None = None) -> SourceError:
    return SourceError(
        f"{place(path, line)} is damaged: {what}",
        path=path,
        found=found,
        fix="repair it, or rename the file to convert without metadata",
    )
