"""Metadata tables that describe files: `metadata.csv` beside images, or that of `--metadata`.

One column names the file of each row, relative to the table or to the source; the others become
fields. A CSV column has the narrowest type that fits all its values: integers, floats or text.
JSON and Parquet values keep their types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardkit.errors import SampleError, ShardkitError, SourceError, UsageError
from shardkit.helpers.mistyped import meant
from shardkit.sample import KeyTable, key_hash
from shardkit.schema import FieldType, Schema
from shardkit.sources.columns import Column, Metadata
from shardkit.sources.labels import LabelColumn, Labels, find_labels
from shardkit.sources.tables import Table
from shardkit.storage import fs

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.metadata.recipe import Recipe
    from shardkit.sources.annotations import Annotations
    from shardkit.sources.file_table import FileTable

FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_NAME = "file_name"
_MAX_PROBLEMS = 100_000  # maximum number that is reported one by one


def add_columns(fields: dict[str, FieldType], metadata: Metadata | Annotations) -> None:
    """Add the columns to the fields of a source. Raises SourceError for a name that is taken."""
    for name, kind in metadata.schema.items():
        if name in fields:
            raise SourceError(
                f"the metadata column {name!r} has the name of another field",
                path=metadata.path,
                found=", ".join(fields),
                fix="rename the column",
            )
        fields[name] = kind


@dataclass(frozen=True)
class GivenTable:
    """The table given by `--metadata`, and how it names files."""

    path: Path
    column: str = _NAME
    suffix: str = ""  # of the files, which the names in the table lack
    labels: LabelColumn | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> GivenTable | None:
        if recipe.metadata is None:
            return None
        path = fs.source(recipe.metadata)
        if not path.is_file():
            what = "the file given by --metadata does not exist"
            raise UsageError(what, path=path, fix=meant(path))
        labels = LabelColumn.of(recipe)
        return cls(path, recipe.file_column or _NAME, recipe.file_suffix or "", labels)

    def read(self) -> Table:
        table = Table()
        table.read(self.path, self.column, "", self.suffix)
        return table


# --- joining -------------------------------------------------------------------------------------


class Joined(NamedTuple):
    """The metadata of the files that are kept, and the errors of the others."""

    labelled: bool  # whether labels come from a column
    metadata: Metadata
    files: npt.NDArray[np.int64]
    problems: list[ShardkitError]
    notes: list[str]


def join(
    table: Table,
    files: Sequence[tuple[str, FileTable]],
    labels: LabelColumn | None = None,
    *,
    every: bool = False,
) -> list[Joined]:
    """Join a table with the files of each split, given with the split's folder in the source.

    Problems are rows without a file, files without a valid label, and, if `every` file needs a
    row, files without one. Raises SourceError for two rows of the same file.
    """
    numbers, total = _files_of(table.names(), files), sum(len(part) for _, part in files)
    used = np.flatnonzero(numbers >= 0)
    _refuse_twice(table, numbers, used)
    row_of = np.full(total, -1, np.int64)
    row_of[numbers[used]] = np.arange(len(used))
    columns, unusable = table.columns()
    if len(used) < len(table):
        columns = {name: column.take(used) for name, column in columns.items()}
    class_names, notes = dict[str, tuple[str, ...]](), list[str]()
    wrong: dict[int, SampleError] = {}
    if labels is not None:
        labels.refuse_unknown((*columns, *unusable))
        for column in unusable.keys() & {*labels.columns}:
            raise unusable[column]
        columns, made, wrong = _with_labels(table, columns, labels, used)
        class_names, notes = made.class_names, made.notes
    problems = _without_file(table, numbers)
    found = []
    start = 0
    for _, part in files:
        rows = row_of[start : start + len(part)]
        start += len(part)
        kept = np.ones(len(rows), np.bool_)
        if every:
            kept = rows >= 0
            problems += _without_row(table, part, np.flatnonzero(~kept), total)
        if wrong:
            bad = np.flatnonzero(np.isin(rows, list(wrong)))
            kept[bad] = False
            for file in bad.tolist():
                path, words = table.where(int(used[rows[file]]))
                problems.append(_of_row(wrong[int(rows[file])], path, words, part.key(file)))
        rows = rows[kept]
        gaps = {n: (rows < 0).any() or not c.present[rows].all() for n, c in columns.items()}
        schema = Schema({n: replace(c.kind, optional=bool(gaps[n])) for n, c in columns.items()})
        metadata = Metadata(schema, columns, rows, unusable, class_names, table.path)
        found.append(Joined(labels is not None, metadata, np.flatnonzero(kept), problems, notes))
        problems, notes = [], []
    return found


def _files_of(names: Column, files: Sequence[tuple[str, FileTable]]) -> npt.NDArray[np.int64]:
    """The number of the file that each name means, counted over all tables; -1 if there is none.

    Paths are found by hashes. One in about 10^7 tables of a million paths has two with the same
    hash: then one of the two counts as missing, which is reported as an error.
    """

    def path(split: int, file: int) -> str:
        folder, table = files[split]
        return f"{folder}/{table.relative(file)}" if folder else table.relative(file)

    starts = np.cumsum([0, *(len(table) for _, table in files)])
    paths = (path(n, f) for n, (_, table) in enumerate(files) for f in range(len(table)))
    table = KeyTable(np.fromiter(map(key_hash, paths), np.uint64, starts[-1]))
    found = table.find_first(np.fromiter(map(key_hash, names), np.uint64, len(names)))
    splits = np.searchsorted(starts[1:], found, side="right")
    numbers = zip(splits.tolist(), (found - starts[splits]).tolist(), strict=True)
    for row, (name, (split, file)) in enumerate(zip(names, numbers, strict=True)):
        if found[row] >= 0 and path(split, file) != name:
            found[row] = -1
    return found


def _with_labels(
    table: Table, columns: dict[str, Column], asked: LabelColumn, used: npt.NDArray[np.int64]
) -> tuple[dict[str, Column], Labels, dict[int, SampleError]]:
    """Return the columns with labels in place of those asked for, the labels, errors by row."""

    def name(row: int) -> str:
        path, words = table.where(int(used[row]))
        return f"{words} ({path})"

    def chunks() -> Iterator[list[Any]]:
        every = (columns[name].chunks() for name in asked.columns)
        for lists in zip(*every, strict=True):
            yield list(zip(*lists, strict=True)) if asked.is_vector else lists[0]

    kind = columns[asked.column].kind
    labels = find_labels(asked, kind, lambda: chain.from_iterable(chunks()), name)
    wrong: dict[int, SampleError] = {}
    parts, row = [Column.of(labels.kind, [])], 0
    for values in chunks():
        made: list[Any] = labels.of_words(values) or []
        for value in () if made else values:
            try:
                made.append(labels(value))
            except SampleError as error:
                made.append(None)
                wrong[row + len(made) - 1] = error
        row += len(made)
        parts.append(Column.of(labels.kind, made))
    if wrong:
        first = next(iter(wrong.values()))
        _refuse_many(table, wrong, f"rows have no label: {first.what}, such as {first.found}")
    return asked.replaced(columns, Column.joined(parts)), labels, wrong


def _refuse_twice(
    table: Table, numbers: npt.NDArray[np.int64], used: npt.NDArray[np.int64]
) -> None:
    _, first = np.unique(numbers[used], return_index=True)
    again = np.setdiff1d(used, used[first])
    if len(again):
        row = int(again[0])
        before = int(np.flatnonzero(numbers == numbers[row])[0])
        (path, words), (other, others) = table.where(row), table.where(before)
        raise SourceError(
            f"{words} names a file a second time",
            path=path,
            found=f"{table.names()[row]}, also in {others} ({other}); {len(again):,} such rows",
            fix="keep one row per file; write several labels of a file as a list in its row",
        )


def _without_file(table: Table, numbers: npt.NDArray[np.int64]) -> list[ShardkitError]:
    rows, names = np.flatnonzero(numbers < 0).tolist(), table.names()
    if rows:
        _refuse_many(table, rows, f"rows name files that do not exist, such as {names[rows[0]]}")
    count = f"; {len(rows):,} of {len(table):,} rows do so" if len(rows) > 1 else ""
    found: list[ShardkitError] = []
    for row in rows:
        path, words = table.where(row)
        found.append(
            SampleError(
                f"{words} names a file that does not exist",
                path=path,
                found=names[row] + count,
                expected="a path relative to the metadata file, or, with --metadata, to the source",
                fix="name the column with --file-column, add a missing suffix with --file-suffix"
                " .jpg, restore the file or remove the row, or use --on-error skip",
            )
        )
    return found


def _without_row(
    table: Table, files: FileTable, lacking: npt.NDArray[np.int64], total: int
) -> list[ShardkitError]:
    if len(lacking):
        such = files.relative(int(lacking[0]))
        _refuse_many(table, lacking, f"files have no row in the metadata, such as {such}")
    return [
        SampleError(
            "a file has no row in the metadata",
            path=table.path,
            key=files.key(file),
            found=f"{files.relative(file)}; {len(lacking):,} of {total:,} files have none",
            fix="add rows, give a folder of the files that have rows, or use --on-error skip",
        )
        for file in lacking.tolist()
    ]


def _refuse_many(table: Table, found: Sized, what: str) -> None:
    """Raise SourceError for more problems than can be listed one by one."""
    if len(found) > _MAX_PROBLEMS:
        raise SourceError(
            f"{len(found):,} {what}",
            path=table.path,
            expected=f"at most {_MAX_PROBLEMS:,}, with --on-error skip",
            fix="check --file-column and --file-suffix, or give the folder that the table"
            " describes",
        )


def _of_row(error: SampleError, path: Path, words: str, key: str) -> SampleError:
    return SampleError(
        f"{words}: {error.what}",
        path=path,
        key=key,
        expected=error.expected,
        found=error.found,
        fix=error.fix,
        **error.where,
    )
