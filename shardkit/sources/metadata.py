"""`metadata.csv` and `metadata.jsonl` beside images: the Hugging Face ImageFolder convention.

Each row names an image in its column `file_name`, relative to the metadata file; the other columns
become fields. A column is whole numbers, numbers or text, whichever is the narrowest that fits all.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from shardkit import storage
from shardkit.errors import SampleError, ShardkitError, SourceError, drop_option
from shardkit.sample import JsonText
from shardkit.schema import RESERVED, Bool, FieldType, Float, Int, Json, Schema, Text

if TYPE_CHECKING:
    import numpy.typing as npt

FILES = ("metadata.csv", "metadata.jsonl")
_NAME = "file_name"
_DECIMAL = re.compile(r"(0|[1-9]\d*)?\.\d*(e[+-]?\d+)?|(0|[1-9]\d*)e[+-]?\d+", re.IGNORECASE)
_MISSING = None  # a cell that is empty, null, or not there


class Metadata:
    """Columns of values, and for each image the number of its row (-1 for none)."""

    def __init__(
        self,
        schema: Schema,
        columns: dict[str, list[Any]],
        rows: npt.NDArray[np.int64],
        unusable: Mapping[str, SourceError] = MappingProxyType({}),
    ) -> None:
        self.schema = schema
        self.unusable = unusable  # columns that cannot be fields
        self._columns = columns
        self._rows = rows

    @property
    def lacking(self) -> int:
        """How many images have no row."""
        return int(np.count_nonzero(self._rows < 0))

    def row(self, image: int) -> dict[str, Any]:
        """The fields of one image; those without a value are left out."""
        row = int(self._rows[image])
        if row < 0:
            return {}
        return {
            name: column[row]
            for name, column in self._columns.items()
            if column[row] is not _MISSING
        }

    def select(self, images: npt.NDArray[np.int64]) -> Metadata:
        rows = self._rows[images]
        used, inverse = np.unique(rows[rows >= 0], return_inverse=True)
        renumbered = np.full(len(rows), -1, np.int64)
        renumbered[rows >= 0] = inverse
        columns = {name: [column[r] for r in used] for name, column in self._columns.items()}
        return Metadata(self.schema, columns, renumbered)

    def fingerprint(self) -> bytes:
        digest = xxhash.xxh3_128(self._rows.data)
        for name, column in self._columns.items():
            digest.update((name + "\0" + json.dumps(column)).encode())
        return digest.digest()


def read_metadata(
    root: Path, files: list[str], index: dict[str, int], problems: list[ShardkitError]
) -> Metadata:
    """Join the metadata files under `root` with the images; `index` has the images' numbers.

    Rows that name no image are added to `problems`. Raises SourceError for a damaged file.
    """
    rows: list[dict[str, Any]] = []
    row_of = np.full(len(index), -1, np.int64)
    for file in sorted(files):
        path = root / file
        folder = posixpath.dirname(file)
        parse = _csv_rows if file.endswith(".csv") else _json_rows
        for line, row in parse(path):
            name = row.pop(_NAME, None)
            if not isinstance(name, str):
                raise _bad_line(line, f"there is no {_NAME!r}", path)
            image = index.get(posixpath.normpath(posixpath.join(folder, name)))
            if image is None:
                problems.append(_no_such_image(path, line, name))
            elif row_of[image] >= 0:
                raise _bad_line(line, "it names an image a second time", path, found=name)
            else:
                row_of[image] = len(rows)
                rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    columns, kinds = {}, {}
    unusable = {}
    complete = len(rows) == len(index)
    for name in names:
        kind, values = typed_column([row.get(name, _MISSING) for row in rows])
        error = _why_unusable(name, kind, values, root / files[0])
        if error is None:
            columns[name] = values
            kinds[name] = type(kind)(optional=not complete or _MISSING in values)
        else:
            unusable[name] = error
    return Metadata(Schema(kinds), columns, row_of, unusable)


def _why_unusable(name: str, kind: FieldType, values: list[Any], path: Path) -> SourceError | None:
    """The error of a column that cannot be a field."""
    without = f"convert without it: {drop_option(name)}"
    if name in RESERVED or not name:
        return SourceError(
            f"the metadata have a column {name!r}, which cannot be the name of a field",
            path=path,
            fix=f"{without}, or rename the column",
        )
    try:
        if isinstance(kind, Json):
            JsonText.of(values)
    except ValueError:
        return SourceError(
            f"the column {name!r} of the metadata has numbers that JSON does not have",
            path=path,
            expected="no NaN or Infinity inside of lists and objects",
            fix=f"{without}, or write null for them",
        )
    return None


def _no_such_image(path: Path, line: int, name: str) -> SampleError:
    return SampleError(
        f"line {line} of the metadata names an image that is not there",
        path=path,
        found=name,
        expected="a path relative to the metadata file",
        fix="restore the image or remove the line, or use --on-error skip",
    )


def _bad_line(line: int, what: str, path: Path, found: str | None = None) -> SourceError:
    return SourceError(
        f"line {line} of the metadata is damaged: {what}",
        path=path,
        found=found,
        fix="repair it, or convert without metadata: give the file another name",
    )


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader(io.StringIO(_decoded(path), newline=""), strict=True)
    try:
        head = next(reader, [])
        if len(set(head)) != len(head):
            raise _bad_line(1, "two columns have one name", path)
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(head):
                words = f"it has {len(cells):,} cells, and the first line {len(head):,}"
                raise _bad_line(reader.line_num, words, path)
            yield reader.line_num, dict(zip(head, (c or _MISSING for c in cells), strict=True))
    except csv.Error as error:
        raise _bad_line(reader.line_num, f"it is not CSV: {error}", path) from error


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(_decoded(path).split("\n"), 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _bad_line(line, f"it is not JSON: {error}", path) from error
        if not isinstance(row, dict):
            raise _bad_line(line, "it is not a JSON object", path, found=text[:60])
        yield line, row


def _decoded(path: Path) -> str:
    try:
        return storage.read(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(
            "the metadata are not UTF-8",
            path=path,
            offset=error.start,
            found=error.reason,
            fix="save the file as UTF-8, or convert without metadata: give it another name",
        ) from error


def typed_column(column: list[Any]) -> tuple[FieldType, list[Any]]:
    """The type of a column and its values of that type.

    JSON values have their types. Of CSV's text, whole numbers are only what prints the same again,
    so that `007` stays text.
    """
    present = [value for value in column if value is not _MISSING]
    if all(isinstance(value, str) for value in present):
        for kind, parse in ((Int(), whole_number), (Float(), number)):
            values = _parsed(column, parse)
            if present and values is not None:
                return kind, values
        return Text(), column
    if all(isinstance(value, bool) for value in present):
        return Bool(), column
    if all(isinstance(v, int) and not isinstance(v, bool) and abs(v) < 2**63 for v in present):
        return Int(), column
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in present):
        with contextlib.suppress(OverflowError):  # a whole number beyond all floats
            return Float(), [value if value is _MISSING else float(value) for value in column]
    return Json(), column


def _parsed(column: list[Any], parse: Callable[[str], Any]) -> list[Any] | None:
    try:
        return [value if value is _MISSING else parse(value) for value in column]
    except ValueError:
        return None


def whole_number(text: str) -> int:
    number = int(text)
    if str(number) != text or abs(number) >= 2**63:
        raise ValueError
    return number


def number(text: str) -> float:
    digits = text.removeprefix("-")
    # Beyond 2^53 a float loses digits.
    whole = digits.isdigit() and float(text) == whole_number(text)
    if not whole and (not _DECIMAL.fullmatch(digits)):
        raise ValueError
    return float(text)
