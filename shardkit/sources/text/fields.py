"""The fields of documents: which one is the text, and the types of the others."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardkit.errors import SampleError, drop_option
from shardkit.options import ALL_FIELDS, Selection
from shardkit.sample import JsonText, Sample
from shardkit.schema import RESERVED, FieldType, Float, Int, Json, Schema, Text
from shardkit.sources.columns import is_exact, kind_of, number, typed_column, whole_number
from shardkit.sources.labels import LABEL, Labels
from shardkit.sources.text_files.records import LINE_FIELD

_WORDS = 4  # at most, in the name of a column that nobody takes for a sentence


@dataclass(frozen=True)
class Fields:
    """The fields to read: the text, and the others with their types."""

    text: str
    others: Mapping[str, FieldType]
    every: bool = False  # whether any other field is an error
    selection: Selection = ALL_FIELDS  # fields outside it are dropped without being counted
    also: Collection[str] = ()  # those of `others` that are read only to filter by them
    label: Labels | None = None  # made from a field of type `label_kind`
    label_kind: FieldType = Text()  # noqa: RUF009 - it is frozen

    @property
    def schema(self) -> Schema:
        label = {} if self.label is None else {LABEL: self.label.kind}
        return Schema({self.text: Text(), **label, **self.others})

    def take(self, values: Mapping[str, Any], *, cells: bool) -> tuple[Sample, Sequence[str]]:
        """Return a document's fields, and the names of others that are selected and have a value.

        `cells` means values from CSV. Raises SampleError.
        """
        text = values.get(self.text)
        if not isinstance(text, str):
            found = f"{type(text).__name__} {text!r:.60}"
            if self.text not in values:
                found = "no such field, but " + (", ".join(values)[:200] or "none at all")
            raise SampleError(
                "the document has no text",
                field=self.text,
                expected="a string",
                found="null" if self.text in values and text is None else found,
                fix="repair it, or use --on-error skip",
            )
        sample: Sample = {self.text: text}
        if not text.isascii():
            _check_unicode(self.text, text)
        if self.label is not None:
            sample[LABEL] = self._label(self.label, values, cells)
        for name, kind in self.others.items():
            value = values.get(name)
            if value is not None and not (cells and not value):
                sample[name] = self._fitted(name, kind, value, cells)
        if len(values) == len(sample):
            return sample, ()
        return sample, self._left_out(values, sample, cells)

    def _left_out(self, values: Mapping[str, Any], taken: Sample, cells: bool) -> Sequence[str]:
        names = []
        for name, value in values.items():
            missing = value is None or (cells and not value)
            if missing or name in taken or not self.selection.has(name):
                continue
            if self.label is not None and name == self.label.column:
                continue
            if self.every and name not in RESERVED:
                raise SampleError(
                    "a document has a field that the first documents do not have",
                    field=name,
                    expected=", ".join((self.text, *self.others)),
                    found=f"{type(value).__name__} {value!r:.60}",
                    fix=f"convert without the field: {drop_option(name)}, or --on-error skip",
                )
            names.append(name)
        return names

    def _label(self, labels: Labels, values: Mapping[str, Any], cells: bool) -> Any:
        value = values.get(labels.column)
        if value not in (None, "") and not isinstance(self.label_kind, Json):
            value = self._fitted(labels.column, self.label_kind, value, cells)
        return labels(value)

    def _fitted(self, name: str, kind: FieldType, value: Any, cells: bool) -> Any:
        try:
            if isinstance(kind, Json):
                text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
                _check_unicode(name, text)
                return JsonText(text)
            if isinstance(kind, Text) and isinstance(value, str):
                _check_unicode(name, value)
            if cells and isinstance(kind, Int | Float):
                return whole_number(value) if isinstance(kind, Int) else number(value)
            return kind.check(value)
        except (TypeError, ValueError, RecursionError):
            pass
        raise SampleError(
            "a value does not have the type of its field in the first documents",
            field=name,
            expected=kind.python,
            found=f"{type(value).__name__} {value!r:.60}",
            fix=f"repair it, convert without the field: {drop_option(name)}, or --on-error skip",
        )


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
    """The values of the first documents, from which the fields are derived."""

    def __init__(self) -> None:
        self._json: list[Mapping[str, Any]] = []
        self._cells: list[Mapping[str, Any]] = []
        self.whole = True  # whether no other document can have more fields

    def add(self, values: Mapping[str, Any], *, cells: bool) -> None:
        (self._cells if cells else self._json).append(values)

    def __len__(self) -> int:
        return len(self._json) + len(self._cells)

    @cached_property
    def types(self) -> dict[str, FieldType]:
        """The fields in order of appearance, with the narrowest types that fit."""
        types: dict[str, FieldType] = {}
        for name, values in _columns(self._json).items():
            kinds = {type(value) for value in values} - {type(None)}
            if kinds == {int, float}:
                types[name] = Float() if all(map(is_exact, values)) else Json()
            else:
                types[name] = kind_of(kinds, values) if kinds else Json()
        for name, values in _columns(self._cells).items():
            kind = typed_column([value or None for value in values], cells=True).kind
            other = types.setdefault(name, kind)
            if other != kind:
                types[name] = Float() if {kind, other} == {Int(), Float()} else Json()
        return types

    def doubtful_header(self) -> str | None:
        """Return what shows that the first line of a table is a row; None if nothing does."""
        columns = _columns(self._cells)
        for name, cells in columns.items():
            if _is_number(name):
                return f"a column called {name!r}, which is a number"
            if name and name in cells:
                return f"a column called {name!r}, which is also a value in it"
            words = len(name.split())
            alone = len(columns) == 1 and words > 1
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


def choose(sampled: Sampled, asked: str | None, label: str | None = None) -> str | None:
    """Return the field of the text: the one asked for, "text", the only one of type Text, or None.

    The field of the `label` is not considered.
    """
    types = sampled.types
    if asked is not None:
        return asked if asked in types else None
    if LINE_FIELD in types:
        return LINE_FIELD
    texts = [name for name, kind in types.items() if isinstance(kind, Text) and name != label]
    return texts[0] if len(texts) == 1 and texts[0] not in RESERVED else None
