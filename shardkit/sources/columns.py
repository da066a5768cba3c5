"""Columns of a table in memory: numbers as arrays, text and JSON as one UTF-8 buffer.

`Metadata` are those that describe the files of a source.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.errors import SourceError
from shardkit.schema import Array, Bool, FieldType, Float, Int, Json, Schema, Text

CHUNK = 4096  # values that are packed at a time
_DECIMAL = re.compile(r"(0|[1-9]\d*)?\.\d*(e[+-]?\d+)?|(0|[1-9]\d*)e[+-]?\d+", re.IGNORECASE)
_DIGITS = 21  # more than an Int has
_NOT_FINITE = {"nan", "NaN", "inf", "-inf", "Infinity", "-Infinity"}
TRUTH = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_OF_JSON = {str, int, float, bool, list, dict}
_NUMBERS: dict[type[FieldType], Any] = {Int: np.int64, Float: np.float64, Bool: np.bool_}


class Column:
    """Values of one type, or None for missing values.

    `values` are the numbers, or the bytes of all texts or JSON texts, where value n ends at
    `ends[n]`.
    """

    def __init__(
        self,
        kind: FieldType,
        values: npt.NDArray[Any],
        ends: npt.NDArray[np.int64] | None,
        present: npt.NDArray[np.bool_],
    ) -> None:
        self.kind = kind
        self.present = present
        self._values = values
        self._ends = ends

    @classmethod
    def of(cls, kind: FieldType, values: Sequence[Any]) -> Column:
        """Pack values of a type; raises OverflowError for a number that it cannot hold exactly."""
        present = np.array([value is not None for value in values], np.bool_)
        if isinstance(kind, Float) and not all(map(is_exact, values)):
            raise OverflowError
        if type(kind) in _NUMBERS:
            filled = [0 if value is None else value for value in values]
            return cls(kind, np.array(filled, _NUMBERS[type(kind)]), None, present)
        if isinstance(kind, Text) and present.all() and (text := "".join(values)).isascii():
            ends = np.fromiter(accumulate(map(len, values)), np.int64, len(values))
            return cls(kind, np.frombuffer(text.encode(), np.uint8), ends, present)
        return cls._joined(kind, [_packed(kind, value) for value in values], present)

    @classmethod
    def _joined(
        cls, kind: FieldType, texts: Sequence[bytes], present: npt.NDArray[np.bool_]
    ) -> Column:
        ends = np.fromiter(accumulate(map(len, texts)), np.int64, len(texts))
        return cls(kind, np.frombuffer(b"".join(texts), np.uint8), ends, present)

    def __len__(self) -> int:
        return len(self.present)

    def __getitem__(self, row: int) -> Any:
        if not self.present[row]:
            return None
        if self._ends is None:
            return self._values[row].item()
        text = self._text(row).decode("utf-8", "surrogatepass")
        value = text if isinstance(self.kind, Text) else json.loads(text)
        return np.array(value, self.kind.dtype) if isinstance(self.kind, Array) else value

    def _text(self, row: int) -> bytes:
        assert self._ends is not None
        return self._values[self._ends[row - 1] if row else 0 : self._ends[row]].tobytes()

    def __iter__(self) -> Iterator[Any]:
        for values in self.chunks():
            yield from values

    def chunks(self) -> Iterator[list[Any]]:
        """Yield the values, in lists of up to CHUNK."""
        for first in range(0, len(self), CHUNK):
            stop = min(first + CHUNK, len(self))
            if not self.present[first:stop].all() or isinstance(self.kind, Json | Array):
                yield [self[row] for row in range(first, stop)]
            elif self._ends is None:
                yield self._values[first:stop].tolist()
            else:
                yield self._texts(first, self._ends[first:stop].tolist())

    def _texts(self, first: int, ends: Sequence[int]) -> list[str]:
        """Return the texts from row `first` on, decoded together if they are ASCII."""
        assert self._ends is not None
        start = int(self._ends[first - 1]) if first else 0
        data = self._values[start : ends[-1]].tobytes()
        spans = zip([start, *ends[:-1]], ends, strict=True)
        if data.isascii():
            text = data.decode()
            return [text[a - start : b - start] for a, b in spans]
        return [data[a - start : b - start].decode("utf-8", "surrogatepass") for a, b in spans]

    def take(self, rows: npt.NDArray[np.int64]) -> Column:
        """Return the values of these rows, in this order."""
        present = self.present[rows]
        if self._ends is None:
            return Column(self.kind, self._values[rows], None, present)
        return self._joined(self.kind, [self._text(row) for row in rows.tolist()], present)

    def update(self, digest: xxhash.xxh3_128) -> None:
        """Add the values to a digest, as JSON."""
        before = "["
        for values in self.chunks():
            plain = [v.tolist() if isinstance(v, np.ndarray) else v for v in values]
            digest.update((before + json.dumps(plain)[1:-1]).encode())
            before = ", "
        digest.update(b"]" if len(self) else b"[]")

    @classmethod
    def joined(cls, parts: Sequence[Column]) -> Column:
        """Concatenate columns of one type."""
        values, present, ends = [], [], []
        size = 0
        for part in parts:
            values.append(part._values)
            present.append(part.present)
            if part._ends is not None:
                ends.append(part._ends + size)
            size += len(part._values)
        every = np.concatenate(ends) if ends else None
        return cls(parts[0].kind, np.concatenate(values), every, np.concatenate(present))


def _packed(kind: FieldType, value: Any) -> bytes:
    if value is None:
        return b""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(kind, Text):
        value = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return bytes(value.encode("utf-8", "surrogatepass"))


class Metadata:
    """Columns of values, and the row number of each file (-1 if it has no row)."""

    def __init__(
        self,
        schema: Schema,
        columns: dict[str, Column],
        rows: npt.NDArray[np.int64],
        unusable: Mapping[str, SourceError] = MappingProxyType({}),
        class_names: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        path: Path | None = None,
    ) -> None:
        self.schema = schema
        self.path = path
        self.unusable = unusable  # columns that cannot be fields
        self.class_names = class_names  # by field
        self._columns = columns
        self._rows = rows

    @property
    def lacking(self) -> int:
        """How many files have no row."""
        return int(np.count_nonzero(self._rows < 0))

    def row(self, file: int) -> dict[str, Any]:
        """Return the fields of one file, without missing values."""
        row = int(self._rows[file])
        if row < 0:
            return {}
        values = ((name, column[row]) for name, column in self._columns.items())
        return {name: value for name, value in values if value is not None}

    def select(self, files: npt.NDArray[np.int64]) -> Metadata:
        rows = self._rows[files]
        used, inverse = np.unique(rows[rows >= 0], return_inverse=True)
        renumbered = np.full(len(rows), -1, np.int64)
        renumbered[rows >= 0] = inverse
        columns = {name: column.take(used) for name, column in self._columns.items()}
        return Metadata(self.schema, columns, renumbered, {}, dict(self.class_names))

    def fingerprint(self) -> bytes:
        digest = xxhash.xxh3_128(np.ascontiguousarray(self._rows).data)
        for name, column in self._columns.items():
            digest.update((name + "\0").encode("utf-8", "surrogatepass"))
            column.update(digest)
        return digest.digest()


class Building:
    """Builds a column while it is read, with the narrowest type that fits all values.

    JSON and Parquet values keep their types. CSV `cells`, which are text, become integers only if
    these print the same again, so `007` stays text.
    """

    def __init__(self, *, cells: bool = False) -> None:
        self._cells = cells
        self._parts: list[Column] = []
        self._kinds: set[type] = set()

    def add(self, values: Sequence[Any]) -> None:
        """Append values, each of which may be None."""
        kinds = set(map(type, values)) - {type(None)}
        self._kinds |= kinds
        if kinds <= _OF_JSON:
            self._parts.append(Column.of(kind_of(kinds, values), values))

    def skip(self, count: int) -> None:
        """Append `count` missing values."""
        for first in range(0, count, CHUNK):
            self._parts.append(Column.of(Text(), [None] * min(CHUNK, count - first)))

    def column(self) -> Column:
        """The finished column. Raises TypeError for a value of a type that JSON does not have."""
        if odd := self._kinds - _OF_JSON:
            raise TypeError(min(kind.__name__ for kind in odd))
        if self._cells and self._kinds:
            for narrow, parse in ((Int(), whole_number), (Float(), number)):
                with contextlib.suppress(ValueError):
                    return self._as(narrow, parse)
        kinds = {type(part.kind): part.kind for part in self._parts if part.present.any()}
        if self._kinds == {int, float}:
            kinds = {Float: Float()}
        kind = Json() if len(kinds) > 1 else next(iter(kinds.values()), Text())
        try:
            return self._as(kind)
        except OverflowError:  # an integer that no float equals
            return self._as(Json())

    def _as(self, kind: FieldType, parse: Callable[[str], Any] = lambda value: value) -> Column:
        parts = [
            part
            if part.kind == kind
            else Column.of(kind, [v if v is None else parse(v) for v in part])
            for part in self._parts
        ]
        return Column.joined(parts or [Column.of(kind, [])])


class CellType:
    """The narrowest type that fits all cells of a column of CSV, found without holding them.

    A column of numbers may contain nan and inf.
    """

    def __init__(self) -> None:
        self._fits: list[type[FieldType]] = [*CELLS]
        self._finite = False  # whether there is any number except nan and inf
        self._count = self._numbers = 0  # of cells, and of numbers, also with spaces around them
        self._misfit = ""  # the first cell that is not a number

    def add(self, values: Sequence[str]) -> None:
        """Take into account more cells; empty ones are missing values."""
        cells = [value for value in values if value]
        lines = "\n".join([*cells, ""])
        alone = lines.count("\n") == len(cells)  # no cell contains several lines
        for kind in [*self._fits]:
            if not (alone and kind in _KNOWN and _KNOWN[kind].fullmatch(lines)):
                self._add_one_by_one(kind, cells)
            elif cells:
                self._finite = True
        before, self._count = self._count, self._count + len(cells)
        if Float in self._fits:
            self._numbers = self._count
        elif 2 * self._numbers >= before:  # most may be numbers
            self._numbers += sum(is_number(cell.strip()) for cell in cells)

    def _add_one_by_one(self, kind: type[FieldType], cells: Sequence[str]) -> None:
        for cell in cells:
            try:
                value = CELLS[kind](cell)
            except ValueError:
                self._fits.remove(kind)
                self._misfit = self._misfit if kind is not Float else cell
                return
            self._finite |= kind is Float and math.isfinite(value)

    @property
    def misfit(self) -> str:
        """A cell that makes a column text most of whose cells are numbers; empty for others."""
        return self._misfit if 2 * self._numbers > self._count else ""

    @property
    def kind(self) -> FieldType:
        """The type, which is Text if there is no cell."""
        fits = [kind for kind in self._fits if kind is not Float or self._finite]
        return fits[0]() if self._count and fits else Text()


class JsonType:
    """The narrowest type that fits all JSON values of a column, found without holding them."""

    def __init__(self, *, items: bool = False) -> None:
        self._kinds: set[type] = set()
        self._int64 = self._exact = True  # whether integers fit into an Int, and into a Float
        self._items = None if items else JsonType(items=True)  # of lists

    def add(self, values: Sequence[Any]) -> None:
        """Take into account more values, each of which may be None."""
        kinds = set(map(type, values))
        self._kinds |= kinds
        if int in kinds:
            whole = [value for value in values if type(value) is int]
            least, most = min(whole), max(whole)
            self._int64 &= least >= -(2**63) and most < 2**63
            self._exact &= max(-least, most) <= 2**53 or all(map(is_exact, whole))
        if list in kinds and self._items is not None:
            lists = (value for value in values if type(value) is list)
            self._items.add(list(chain.from_iterable(lists)))

    @property
    def is_nested(self) -> bool:
        """Whether there are lists or objects."""
        return not self._kinds.isdisjoint((list, dict))

    @property
    def is_mixed(self) -> bool:
        """Whether some values are text, numbers or truth values, and others of another type."""
        kinds = self._kinds - {type(None)}
        return len(kinds) > 1 and not kinds <= {list, dict} and self.kind == Json()

    @property
    def kind(self) -> FieldType:
        """The type, which is Json if there is no value; lists of numbers are an Array."""
        kinds = self._kinds - {type(None)}
        if kinds == {int, float} and self._exact:
            return Float()
        if kinds == {list} and self._items is not None and type(None) not in self._items._kinds:
            return _ARRAYS.get(type(self._items.kind), Json())
        large = kinds == {int} and not self._int64
        return Json() if large or not kinds else kind_of(kinds, ())


def kind_of(kinds: set[type], values: Sequence[Any]) -> FieldType:
    """Return the field type for `values`, whose Python types are `kinds`."""
    if kinds <= {str}:
        return Text()
    if kinds == {bool}:
        return Bool()
    if kinds == {float}:
        return Float()
    if kinds == {int} and all(-(2**63) <= v < 2**63 for v in values if v is not None):
        return Int()
    return Json()


def is_exact(value: Any) -> bool:
    """Return whether a number, if it is an integer, is the same as a float."""
    try:
        return type(value) is not int or float(value) == value
    except OverflowError:
        return False


def whole_number(text: str) -> int:
    number = int(text[:_DIGITS])
    if str(number) != text or abs(number) >= 2**63:
        raise ValueError
    return number


def number(text: str) -> float:
    digits = text.removeprefix("-")
    # Above 2^53, a float loses digits.
    whole = digits.isdigit() and float(digits) == whole_number(digits)
    if not whole and (not _DECIMAL.fullmatch(digits)):
        raise ValueError
    value = float(text)
    if (
        abs(value) >= 2**53
        and not set("eE") & set(digits)
        and int(digits.split(".")[0]) != abs(value)
    ):
        raise ValueError
    if math.isinf(value):
        raise ValueError
    return value


def is_number(text: str) -> bool:
    try:
        _any_number(text)
    except ValueError:
        return False
    return True


def _any_number(text: str) -> float:
    return float(text) if text in _NOT_FINITE else number(text)


def _truth(text: str) -> bool:
    if text not in TRUTH:
        raise ValueError
    return TRUTH[text]


# How cells become values, from the narrowest type on.
CELLS: dict[type[FieldType], Callable[[str], Any]] = {
    Int: whole_number,
    Float: _any_number,
    Bool: _truth,
}
# Cells of these types, one per line, recognized all at once; not all of them.
_KNOWN = {
    Int: re.compile(r"(?:(?:0|-?[1-9]\d{0,17})\n)*", re.ASCII),
    Float: re.compile(r"(?:-?(?:0|[1-9]\d{0,14})(?:\.\d*)?(?:[eE][+-]?\d\d?)?\n)*", re.ASCII),
}
_ARRAYS: dict[type[FieldType], FieldType] = {
    Int: Array("<i8", (None,)),
    Float: Array("<f8", (None,)),
}
