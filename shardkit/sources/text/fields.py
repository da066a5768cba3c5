"""The fields of documents and of rows: which one is the text, and the types of the others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import SampleError, drop_option
from shardkit.options import ALL_FIELDS, Selection
from shardkit.sample import JsonText, Sample
from shardkit.schema import RESERVED, Array, Bool, FieldType, Float, Int, Json, Schema, Text
from shardkit.sources.columns import CELLS, CellType, JsonType, is_exact
from shardkit.sources.labels import Labels
from shardkit.sources.partitioned import types_of
from shardkit.sources.text_files.records import LINE_FIELD

_FIRST = 100  # rows whose cells are compared with the header
_WORDS = 4  # at most, in the name of a column that nobody takes for a sentence


@dataclass(frozen=True)
class Fields:
    """The fields to read: the text, if rows are documents, and the others with their types."""

    text: str | None
    others: Mapping[str, FieldType]
    every: bool = False  # whether any other field is an error
    selection: Selection = ALL_FIELDS  # fields outside it are dropped without being counted
    also: Collection[str] = ()  # those of `others` that are read only to filter by them
    unchecked: Collection[str] = ()  # those of `others` whose values are passed as they are
    label: Labels | None = None  # made from a field of type `label_kind`
    label_kind: FieldType = Text()  # noqa: RUF009 - it is frozen
    folders: Mapping[str, FieldType] = field(default_factory=dict)  # columns in folders' names

    @property
    def schema(self) -> Schema:
        label = {} if self.label is None else {self.label.asked.field: self.label.kind}
        text = {} if self.text is None else {self.text: Text()}
        return Schema({**text, **label, **self.others})

    def take(self, values: Mapping[str, Any], *, cells: bool) -> tuple[Sample, Sequence[str]]:
        """Return a document's fields, and the names of others that are selected and have a value.

        `cells` means values from CSV. Raises SampleError.
        """
        sample: Sample = {}
        if self.text is not None:
            sample[self.text] = _text(self.text, values)
        if self.label is not None:
            sample[self.label.asked.field] = self._label(self.label, values, cells)
        for name, kind in self.others.items():
            value = values.get(name)
            if value is not None and not (cells and value == ""):
                known = name in self.unchecked
                sample[name] = value if known else self._fitted(name, kind, value, cells)
        if len(values) == len(sample):
            return sample, ()
        return sample, self._left_out(values, sample, cells)

    def _left_out(self, values: Mapping[str, Any], taken: Sample, cells: bool) -> Sequence[str]:
        names = []
        for name, value in values.items():
            missing = value is None or (cells and value == "")
            if missing or name in taken or not self.selection.has(name):
                continue
            if self.label is not None and name in self.label.asked.columns:
                continue
            if self.every and name not in RESERVED:
                raise SampleError(
                    "a document has a field that the first documents do not have",
                    field=name,
                    expected=", ".join(self.schema),
                    found=f"{type(value).__name__} {value!r:.60}",
                    fix=f"convert without the field: {drop_option(name)}, or --on-error skip",
                )
            names.append(name)
        return names

    def _label(self, labels: Labels, values: Mapping[str, Any], cells: bool) -> Any:
        asked = labels.asked
        value = asked.value_in(values)
        if not (asked.is_vector or value in (None, "") or isinstance(self.label_kind, Json)):
            value = self._fitted(asked.column, self.label_kind, value, cells)
        return labels(value)

    def _fitted(self, name: str, kind: FieldType, value: Any, cells: bool) -> Any:
        try:
            if isinstance(kind, Json):
                text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
                _check_unicode(name, text)
                return JsonText(text)
            if isinstance(kind, Text) and isinstance(value, str):
                _check_unicode(name, value)
            if cells and type(kind) in CELLS and isinstance(value, str):
                return CELLS[type(kind)](value)
            return kind.check(_array(value, kind) if isinstance(kind, Array) else value)
        except (TypeError, ValueError, OverflowError, RecursionError):
            pass
        raise SampleError(
            "a value does not have the type of its field in the first documents",
            field=name,
            expected=kind.python,
            found=f"{type(value).__name__} {value!r:.60}",
            fix=f"repair it, convert without the field: {drop_option(name)}, or --on-error skip",
        )


def _text(name: str, values: Mapping[str, Any]) -> str:
    text = values.get(name)
    if not isinstance(text, str):
        found = f"{type(text).__name__} {text!r:.60}"
        if name not in values:
            found = "no such field, but " + (", ".join(values)[:200] or "none at all")
        raise SampleError(
            "the document has no text",
            field=name,
            expected="a string",
            found="null" if name in values and text is None else found,
            fix="repair it, or use --on-error skip",
        )
    if not text.isascii():
        _check_unicode(name, text)
    return text


def _array(value: Any, kind: Array) -> npt.NDArray[Any]:
    """Return a list as an array, without changing a number."""
    numbers = {int} if kind.dtype == "<i8" else {int, float}
    if type(value) is not list or not set(map(type, value)) <= numbers:
        raise TypeError
    if float in numbers and not all(map(is_exact, value)):
        raise TypeError
    return np.array(value, kind.dtype)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SampleError(
            "the text contains a lone surrogate, which no encoding can store",
            field=name,
            expected="Unicode text, with surrogates only in pairs",
            found=f"\\u{ord(text[error.start]):04x} after {error.start:,} characters",
            fix="repair the escape, or use --on-error skip",
        ) from error


class Sampled:
    """What documents or rows hold, from which the fields are derived."""

    def __init__(self) -> None:
        self._json: dict[str, JsonType] = {}
        self._cells: dict[str, CellType] = {}
        self._first: dict[str, Sequence[str]] = {}  # cells of some rows, by column
        self._rows = 0
        self._values: Counter[str] = Counter()  # that are not missing, by column
        self.whole = True  # whether no other document can have more fields

    def add(self, rows: Sequence[Mapping[str, Any]], *, cells: bool) -> None:
        self._rows += len(rows)
        if cells:  # all rows of a table have the same columns
            columns = zip(*(row.values() for row in rows), strict=True)
            for name, texts in zip(rows[0], columns, strict=True):
                self._cells.setdefault(name, CellType()).add(texts)
                self._first.setdefault(name, texts[:_FIRST])
                self._values[name] += len(texts) - texts.count("")
            return
        for name, values in _columns(rows).items():
            self._json.setdefault(name, JsonType()).add(values)
            self._values[name] += len(values) - values.count(None)

    def __len__(self) -> int:
        return len(self._json) + len(self._cells)

    @cached_property
    def types(self) -> dict[str, FieldType]:
        """The fields in order of appearance, with the narrowest types that fit."""
        types: dict[str, FieldType] = {name: found.kind for name, found in self._json.items()}
        for name, found in self._cells.items():
            other = types.setdefault(name, found.kind)
            if other != found.kind:
                types[name] = Float() if {found.kind, other} == {Int(), Float()} else Json()
        return types

    def add_folders(self, columns: Mapping[str, Sequence[str | None]]) -> dict[str, FieldType]:
        """Add columns in the names of folders; return the types of those that no file has."""
        added = types_of({n: texts for n, texts in columns.items() if n not in self.types})
        self.types |= added
        return added

    def of_rows(self) -> dict[str, FieldType]:
        """The types if all rows are known: optional where one of them has no value."""
        whole = {name for name, count in self._values.items() if count == self._rows}
        return {
            name: replace(kind, optional=name not in whole) if name in self._values else kind
            for name, kind in self.types.items()
        }

    def of_documents(self) -> dict[str, FieldType]:
        """The types, where further documents may have other values: lists and true stay general."""
        found: dict[str, FieldType] = {}
        for name, kind in self.types.items():
            word = isinstance(kind, Bool) and name in self._cells and name not in self._json
            found[name] = Text() if word else Json() if isinstance(kind, Array) else kind
        return found

    def surprises(self) -> Iterator[str]:
        """Describe columns whose types, and tables whose rows, may not be what was meant."""
        nested = [name for name, values in self._json.items() if values.is_nested]
        if nested and self._rows == 1:
            yield (
                f"the table is a single row, with lists or objects in {nested[0]!r}: if they hold"
                " the rows, write each row as an object, such as pandas does with"
                " to_json(FILE, orient='records', lines=True)"
            )
        for name, values in self._json.items():
            if values.is_mixed and name not in self._cells:
                yield f"the column {name!r} is JSON because it has values of several types"
        for name, found in self._cells.items():
            if found.misfit:
                yield (
                    f"the column {name!r} is text because of cells such as {found.misfit!r:.60},"
                    " although most are numbers"
                )

    def doubtful_header(self) -> str | None:
        """Return what shows that the first line of a table is a row; None if nothing does."""
        for name, cells in self._first.items():
            if _is_number(name):
                return f"a column called {name!r}, which is a number"
            if name and name in cells:
                return f"a column called {name!r}, which is also a value in it"
            words = len(name.split())
            alone = len(self._first) == 1 and words > 1
            if alone or words > _WORDS or name.rstrip()[-1:] in tuple(".!?"):
                return f"a column called {name[:60]!r}, which reads like a sentence"
        return None


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return name.strip().lower() not in ("nan", "inf", "infinity")


def _columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def choose(
    types: Mapping[str, FieldType], asked: str | None, labels: Collection[str] = ()
) -> str | None:
    """Return the field of the text: the one asked for, "text", the only one of type Text, or None.

    The fields of the `labels` are not considered.
    """
    if asked is not None:
        return asked if asked in types else None
    if LINE_FIELD in types:
        return LINE_FIELD
    texts = [name for name, kind in types.items() if isinstance(kind, Text) and name not in labels]
    return texts[0] if len(texts) == 1 and texts[0] not in RESERVED else None
