"""Labels from a column or field: words become named classes, lists of labels become arrays.

The field is called `label`, whatever the name of the column. Integers are used as labels unchanged,
and floats are regression targets.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from shardkit.errors import SampleError, SourceError, UsageError, near
from shardkit.metadata.recipe import Recipe
from shardkit.options import Selection
from shardkit.sample import JsonText, Sample
from shardkit.schema import Array, Bool, FieldType, Float, Int, Json, Schema, Text
from shardkit.sources.base import Source, SourceWrapper
from shardkit.sources.columns import whole_number

LABEL = "label"
_LISTS = Array("<i8", (None,))
_MAX_CLASSES = 100_000


@dataclass(frozen=True)
class LabelColumn:
    """The column to take labels from, and how they are written in it."""

    column: str
    separator: str | None = None  # between the labels in a cell of text
    classes: tuple[str, ...] | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> LabelColumn | None:
        if recipe.label_column is None:
            return None
        classes = recipe.classes
        if isinstance(classes, Mapping):
            raise UsageError("class names by field are for sequences whose labels are integers")
        if classes is not None:
            check_names(classes)
        return cls(recipe.label_column, recipe.label_separator, classes)

    def refuse_unknown(self, columns: Iterable[str]) -> None:
        """Raise UsageError if there is no such column, or if another column is called `label`."""
        columns = list(columns)
        if self.column not in columns:
            raise UsageError(
                f"there is no column {self.column!r} for labels",
                expected=near(self.column, columns),
            )
        if self.column != LABEL and LABEL in columns:
            raise UsageError(
                f"labels of the column {self.column!r} become the field {LABEL!r}, which already"
                " exists",
                found=", ".join(columns),
                fix=f"use --label-column {LABEL}, or rename that column",
            )


class Labels:
    """Converts a value of the column to a label; raises SampleError for an invalid value."""

    def __init__(self, asked: LabelColumn, kind: FieldType, names: Sequence[str] | None) -> None:
        self.column = asked.column
        self.names = None if names is None else tuple(names)
        self._separator = asked.separator
        lists = asked.separator is not None or not isinstance(kind, Int | Float | Bool | Text)
        # A sample without a label is an error, so the field is not optional.
        self.kind: FieldType = (
            _LISTS if lists else Int() if isinstance(kind, Text) else type(kind)()
        )
        self._number = {name: number for number, name in enumerate(self.names or ())}

    @property
    def class_names(self) -> dict[str, tuple[str, ...]]:
        return {} if self.names is None else {LABEL: self.names}

    def __call__(self, value: Any) -> Any:
        if value is None or value == "":
            raise SampleError(
                "there is no label",
                field=self.column,
                fix="fill it in"
                + (f", write {self._separator!r} for no labels" if self._separator else "")
                + ", or skip such samples with --on-error skip",
            )
        if self.kind == _LISTS:
            if self._separator is None and not isinstance(value, list | np.ndarray):
                raise self._unknown(value)
            return np.array([self._label(word) for word in words(value, self._separator)], np.int64)
        if isinstance(self.kind, Int):
            return self._label(value)
        try:
            return self.kind.check(value)
        except TypeError:
            raise self._unknown(value) from None

    def of_words(self, values: Sequence[Any]) -> list[int] | None:
        """Convert many words; None unless all of them are class names."""
        if self.kind == _LISTS:
            return None
        found = [number for value in values if (number := self._number.get(value)) is not None]
        return found if len(found) == len(values) else None

    def _label(self, value: Any) -> int:
        found = self._number.get(value) if isinstance(value, str) else value
        if found is None and self._separator is not None:
            found = _whole(value)
        if type(found) is not int:
            raise self._unknown(value)
        least = -1 if isinstance(self.kind, Int) else 0  # -1: no class
        if self.names is not None and not least <= found < len(self.names):
            raise self._unknown(value)
        return found

    def _unknown(self, value: Any) -> SampleError:
        names = None
        if self.names is not None:
            some = ", ".join(map(repr, self.names[:5])) + ", ..." * (len(self.names) > 5)
            names = f"one of {len(self.names):,} classes: {some}, or the number of a class"
        return SampleError(
            "the label is not a known class",
            field=self.column,
            expected=names or self.kind.python,
            found=f"{value!r:.60}",
            fix="correct it, add it to the list of --classes, or use --on-error skip",
        )


def words(value: Any, separator: str | None) -> list[Any]:
    """Split a value with several labels: a list, or text with a separator."""
    if isinstance(value, str) and separator is not None:
        return [word for part in value.split(separator) if (word := part.strip())]
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    return value if isinstance(value, list) else [None]  # None: an invalid label


def find_labels(
    asked: LabelColumn,
    kind: FieldType,
    values: Callable[[], Iterable[Any]],
    name: Callable[[int], str] = lambda row: f"document {row + 1:,}",
) -> Labels:
    """The conversion of a column of type `kind` to labels; `values` are scanned for class names.

    `name` names a row in messages, by its number. Raises UsageError for a column that cannot hold
    labels, and SourceError for one with values of several types.
    """
    if asked.separator is not None and not isinstance(kind, Text):
        raise UsageError(
            f"the column {asked.column!r} is not text, so it cannot be split by a separator",
            found=kind.python,
            fix="omit --label-separator",
        )
    arrays = isinstance(kind, Array) and (kind.dtype or "")[1:2] in ("i", "u")
    if isinstance(kind, Float | Bool) and asked.classes is not None:
        raise UsageError(
            f"the labels of {asked.column!r} are not classes",
            found=f"{kind.python} in every row",
            fix="omit --classes: the values are stored unchanged",
        )
    if not (arrays or isinstance(kind, Int | Float | Bool | Text | Json)):
        raise UsageError(
            f"the column {asked.column!r} cannot hold labels",
            expected="words, numbers, or lists of words or integers",
            found=kind.python,
        )
    names = asked.classes
    if isinstance(kind, Json):
        _refuse_mixed(asked, values(), name)
    if isinstance(kind, Text | Json) and names is None:
        names = _found(asked, values(), lists=asked.separator is not None or isinstance(kind, Json))
    return Labels(asked, kind, names)


def _refuse_mixed(asked: LabelColumn, values: Iterable[Any], name: Callable[[int], str]) -> None:
    """Raise SourceError if a column has values of several types, none of which are lists."""
    first: dict[str, tuple[int, Any]] = {}
    counts: Counter[str] = Counter()
    for row, value in enumerate(values):
        if value is not None:
            word = type(value).__name__
            first.setdefault(word, (row, value))
            counts[word] += 1
    if len(counts) < 2 or "list" in counts:
        return
    (most, many), *_, (rare, few) = counts.most_common()
    row, value = first[rare]
    raise SourceError(
        f"the labels in the column {asked.column!r} are of several types",
        expected=f"{most} in every row, as in {many:,} of them, such as {first[most][1]!r:.60}",
        found=f"{rare} in {few:,}, first in {name(row)}: {value!r:.60}",
        fix='write all of them alike, such as all as words: "7" instead of 7',
    )


def _found(asked: LabelColumn, values: Iterable[Any], *, lists: bool) -> tuple[str, ...] | None:
    """Return the words of all values, sorted, as class names; None if the values are integers."""
    found: dict[str, None] = {}
    numbers = False
    for value in values:
        if not lists and value in found:
            continue
        for word in words(value, asked.separator) if lists else (value,):
            if isinstance(word, str) and word:
                found[word] = None
            numbers |= type(word) is int
        if len(found) > _MAX_CLASSES:
            raise UsageError(
                f"the column {asked.column!r} has over {_MAX_CLASSES:,} different values, too many"
                " for classes",
                found=f"such as {next(iter(found))!r:.60}",
                fix="name the column that holds the labels with --label-column",
            )
    if numbers and found:
        raise SourceError(
            f"the column {asked.column!r} has both words and numbers in its lists",
            found=f"such as {next(iter(found))!r:.60}",
            fix="write all of them as words",
        )
    whole = asked.separator is not None and all(_whole(word) is not None for word in found)
    return None if numbers or whole else tuple(sorted(found))


def _whole(word: Any) -> int | None:
    try:
        return whole_number(word)
    except (TypeError, ValueError):
        return None


def check_names(classes: Sequence[str]) -> None:
    """Raise UsageError for a list of classes with a duplicate."""
    if len(set(classes)) != len(classes):
        twice = next(name for name, count in Counter(classes).items() if count > 1)
        raise UsageError("the list of classes has a duplicate", found=repr(twice))


# --- datasets and sequences ----------------------------------------------------------------------


class Labelled(SourceWrapper):
    """The samples of a source, with a label made from one of its fields."""

    def __init__(self, whole: Source, labels: Labels) -> None:
        super().__init__(whole)
        self._labels, own = labels, labels.column
        kinds = {**whole.schema, own: labels.kind}
        self.schema = Schema({LABEL if n == own else n: kinds[n] for n in whole.schema})
        names = {n: v for n, v in whole.class_names.items() if n != own}
        self.class_names = {**names, **labels.class_names}

    def __getitem__(self, index: int) -> Sample:
        sample = self._whole[index]
        if LABEL not in self.schema:
            return sample
        value = sample.get(self._labels.column)
        try:
            label = self._labels(json.loads(value) if isinstance(value, JsonText) else value)
        except SampleError as error:
            raise error.located(key=sample["__key__"]) from error.__cause__
        own = self._labels.column
        return {LABEL if n == own else n: label if n == own else v for n, v in sample.items()}

    def narrow(self, selection: Selection) -> None:
        self._whole = copy.copy(self._whole)
        own = {LABEL: self._labels.column}
        fields = selection.fields
        theirs = None if fields is None else tuple(own.get(name, name) for name in fields)
        drop = tuple(own.get(name, name) for name in selection.drop)
        self._whole.narrow(replace(selection, fields=theirs, drop=drop))
        Source.narrow(self, selection)

    def all_keys(self) -> Sequence[str]:
        return self._whole.all_keys()

    def fingerprint(self) -> dict[str, str] | None:
        found = super().fingerprint()
        if found is None:
            return None
        made = json.dumps([found.get("files"), self._labels.column, self._labels.names])
        return {**found, "files": xxhash.xxh3_128_hexdigest(made.encode())}


def labelled(sources: Mapping[str, Source], asked: LabelColumn) -> dict[str, Source]:
    """Return the splits of a source, with labels that share one list of classes.

    Raises UsageError if the field does not exist or cannot hold labels.
    """
    first = next(iter(sources.values()))
    for source in sources.values():
        if error := source.others.get(asked.column):
            raise error
        asked.refuse_unknown(source.schema)
    names = first.class_names.get(asked.column)
    kind = first.schema[asked.column]
    if names is not None:
        if asked.classes not in (None, names):
            raise UsageError(
                f"the classes of {asked.column!r} already have names",
                found=", ".join(names[:5]),
                fix="omit --classes",
            )
        asked = replace(asked, classes=names)
    labels = find_labels(asked, kind, lambda: _values(sources, asked.column))
    for name, source in sources.items():
        if type(source.schema[asked.column]) is not type(kind):
            raise UsageError(
                f"the column {asked.column!r} has different types in different splits",
                found=f"{source.schema[asked.column]} in {name}, {kind} in {next(iter(sources))}",
            )
    return {name: Labelled(source, labels) for name, source in sources.items()}


def _values(sources: Mapping[str, Source], column: str) -> Iterator[Any]:
    """Yield the values of a field in all readable samples."""
    for source in sources.values():
        part = source.select(np.arange(len(source))).skimmed()
        part.narrow(Selection((column,)))
        for document in part.documents():
            if isinstance(document.sample, dict):
                value = document.sample.get(column)
                yield json.loads(value) if isinstance(value, JsonText) else value
