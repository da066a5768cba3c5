"""Tables that describe files: CSV, TSV, JSON Lines or Parquet, read into columns in memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
import posixpath
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.media import kind_by_name as media_by_name
from shardkit.errors import SampleError, SourceError, UsageError, drop_option, near
from shardkit.formats import get_format
from shardkit.helpers.extras import extra
from shardkit.sample import JsonText
from shardkit.schema import RESERVED, Json, Text
from shardkit.sources.columns import CHUNK, Building, Column
from shardkit.sources.files import file_path
from shardkit.sources.text_files import TABLES, parse_name
from shardkit.sources.text_files.records import Record, TextFile
from shardkit.storage import fs

_REPAIR = "repair it, or rename the file to convert without metadata"


class _Rows(NamedTuple):
    """Some rows of a table: their offsets (numbers, in Parquet), and the values of each column."""

    at: list[int]
    values: Mapping[str, Sequence[Any]]


class Table:
    """The rows of one or more table files in memory: the file each row names, and the columns."""

    def __init__(self) -> None:
        self._names: list[Column] = []  # paths relative to the source, as text
        self._given: list[tuple[Path, int]] = []  # each table file and its row count
        self._rows: list[npt.NDArray[np.int64]] = []
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
        for at, values in _rows_of(path):
            if column not in values:
                raise _no_column(path, column, values)
            names = _file_names(values[column], at, column, path)
            self._names.append(Column.of(Text(), [_path(folder, name + suffix) for name in names]))
            self._rows.append(np.array(at, np.int64))
            for name in [name for name in self._columns if name not in values]:
                self._columns[name].skip(len(at))
            for name, column_values in values.items():
                if name == column or (only is not None and name not in only):
                    continue
                if name not in self._columns:
                    form = parse_name(path.name)
                    self._columns[name] = Building(cells=form is not None and form.form in TABLES)
                    self._columns[name].skip(count)
                self._columns[name].add(column_values)
            count += len(at)
        self._given.append((path, count - before))

    @property
    def path(self) -> Path:
        """The table file, or the first one."""
        return self._given[0][0]

    def names(self) -> Column:
        return Column.joined(self._names or [Column.of(Text(), [])])

    def where(self, row: int) -> tuple[Path, str]:
        """Return the table file of a row, and words for the row: "line 3 of the metadata"."""
        self._rows = [np.concatenate(self._rows)]  # once
        ends = list(accumulate(count for _, count in self._given))
        file = int(np.searchsorted(ends, row, side="right"))
        path = self._given[file][0]
        return path, _place(path, int(self._rows[0][row]))

    def columns(self) -> tuple[dict[str, Column], dict[str, SourceError]]:
        """Return the columns by name, and an error for each column that cannot be a field."""
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
                unusable[name] = _not_stored(name, path, None)
            else:
                found[name] = column
        return found, unusable


# --- reading -------------------------------------------------------------------------------------


def _rows_of(path: Path) -> Iterator[_Rows]:
    if _is_parquet(path):
        yield from _parquet_rows(path)
        return
    with _explained(path):
        file = _text_file(path)
        records = file.records()
        while chunk := list(itertools.islice(records, CHUNK)):
            rows = [_checked(record, path) for record in chunk]
            if file.form in TABLES:  # whose rows all have the same cells, and "" for none
                values = {name: [row[name] or None for row in rows] for name in rows[0]}
            else:
                names = dict.fromkeys(name for row in rows for name in row)
                values = {name: [row.get(name) for row in rows] for name in names}
            yield _Rows([record.start for record in chunk], values)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn the error of a whole text file into that of a source."""
    try:
        yield
    except SampleError as error:
        raise SourceError(
            f"the metadata cannot be read: {error.what}",
            path=path,
            found=error.found,
            fix=_REPAIR if "--" in str(error.fix or "--") else error.fix,
        ) from error


def _checked(record: Record, path: Path) -> dict[str, Any]:
    error = record.value
    if isinstance(error, SampleError):
        raise _bad_row(record.start, error.what, path, error.found, error.expected)
    return error


def _text_file(path: Path) -> TextFile:
    name = parse_name(path.name)
    if name is None or name.form == "text":
        raise UsageError(
            "the metadata file is not a table in a supported format",
            path=path,
            expected=".csv, .tsv or .jsonl, which may be compressed, or .parquet",
        )
    location = file_path(path)
    file = TextFile(location, fs.status(path).st_size, name.form, name.compression)
    return replace(file, quoted=file.quotes().quoted) if name.form == "tsv" else file


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


def _file_names(
    values: Sequence[Any], rows: Sequence[int], column: str, path: Path
) -> Sequence[str]:
    names = values
    if set(map(type, values)) != {str}:
        names = [str(v) if isinstance(v, str) or type(v) is int else "" for v in values]
    if "" in names:
        row = rows[names.index("")]
        raise _bad_row(row, f"there is no {column!r}, which names its file", path)
    return names


def _path(folder: str, name: str) -> str:
    path = f"{folder}/{name}" if folder else name
    return posixpath.normpath(path) if "./" in path or "//" in path else path


def _no_column(path: Path, column: str, values: Mapping[str, Any]) -> SourceError:
    fix = "name the column with --file-column, together with --metadata FILE"
    if any(media_by_name(str(name)) for name in values):
        fix = f"the first line seems to be a row: add a header above it, such as {column},label"
    return SourceError(
        f"the metadata have no column {column!r} that names files",
        path=path,
        expected=near(column, map(str, values)) if values else None,
        found=", ".join(map(str, values)) or "no columns",
        fix=fix,
    )


def _not_stored(name: str, path: Path, error: Exception | None) -> SourceError:
    """Return the error for a column that cannot be a field because of its values or its name."""
    if error is None:
        what, found = "a name that a field cannot have", None
    elif isinstance(error, TypeError):
        what, found = "values of a type that no field can hold", str(error)
    else:
        what, found = "numbers that JSON cannot represent: NaN or Infinity", None
    return SourceError(
        f"the column {name!r} of the metadata has {what}",
        path=path,
        found=found,
        fix=f"convert without it: {drop_option(name)}, or change the table",
    )


def _bad_row(
    row: int, what: str, path: Path, found: str | None = None, expected: str | None = None
) -> SourceError:
    return SourceError(
        f"{_place(path, row)} is damaged: {what}",
        path=path,
        expected=expected,
        found=found,
        fix=_REPAIR,
    )


def _place(path: Path, row: int) -> str:
    """Words for a row of a table, which is given by its offset, or its number in Parquet."""
    if _is_parquet(path):
        return f"row {row:,} of the metadata"
    ends = _line_ends(path, fs.status(path).st_mtime_ns)
    return f"line {int(np.searchsorted(ends, row)) + 1:,} of the metadata"


@functools.lru_cache(4)
def _line_ends(path: Path, time: int) -> npt.NDArray[np.int64]:
    """Return the offsets of the line ends of a table, once an error needs them."""
    found, start = [np.zeros(0, np.int64)], 0
    with contextlib.suppress(SampleError):  # lines after damage are not named
        for block in _text_file(path).blocks():
            found.append(np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + start)
            start += len(block)
    return np.concatenate(found)


def _is_parquet(path: Path) -> bool:
    return path.name.lower().endswith(".parquet")
