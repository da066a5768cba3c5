"""Labels from columns or fields: words become named classes, lists of labels become arrays.

The field is called `label`, whatever the name of the column. Integers are used as labels unchanged,
and floats are regression targets. Several columns of 0 and 1 become one vector, `labels`.
"""

from __future__ import annotations

import copy
import json
from collections import Counter, deque
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
from shardkit.sources.columns import TRUTH, whole_number

LABEL, LABELS = "label", "labels"
_LISTS = Array("<i8", (None,))
_BITS: dict[Any, bool] = {0: False, 1: True, "0": False, "1": True, "0.0": False, "1.0": True}
_BITS |= TRUTH
_MAX_CLASSES = 100_000


@dataclass(frozen=True)
class LabelColumn:
    """The column to take labels from, and how they are written in it; or those of a vector."""

    columns: tuple[str, ...]
    separator: str | None = None  # between the labels in a cell of text
    classes: tuple[str, ...] | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> LabelColumn | None:
        if recipe.label_columns:
            return cls(recipe.label_columns)
        if recipe.label_column is None:
            return None
        classes = recipe.classes
        if isinstance(classes, Mapping):
            raise UsageError("class names by field are for sequences whose labels are integers")
        if classes is not None:
            check_names(classes)
        return cls((recipe.label_column,), recipe.label_separator, classes)

    @property
    def column(self) -> str:
        """The only column, or the first one."""
        return self.columns[0]

    @property
    def is_vector(self) -> bool:
        return len(self.columns) > 1

    @property
    def field(self) -> str:
        """The field that the labels become."""
        return LABELS if self.is_vector else LABEL

    def value_in(self, fields: Mapping[str, Any]) -> Any:
        """Return the value of the column in a sample or row; None if absent; of a vector, all."""
        return tuple(map(fields.get, self.columns)) if self.is_vector else fields.get(self.column)

    def replaced(self, fields: Mapping[str, Any], made: Any) -> dict[str, Any]:
        """Return a sample, or another mapping by field, with labels in place of the columns."""
        named = {self.field if n == self.column else n: v for n, v in fields.items()}
        left = {n: v for n, v in named.items() if n == self.field or n not in self.columns}
        return left | {self.field: made}

    def refuse_unknown(self, columns: Iterable[str]) -> None:
        """Raise UsageError for an unknown column, and for another with the name of the field."""
        columns, own = list(columns), self.field
        for column in self.columns:
            if column not in columns:
                raise UsageError(
                    f"there is no column {column!r} for labels", expected=near(column, columns)
                )
        if own in columns and own not in self.columns:
            raise UsageError(
                f"labels of the column {self.column!r} become the field {own!r}, which already"
                " exists",
                found=", ".join(columns),
                fix=f"use --label-column {LABEL}, or rename that column",
            )


class Labels:
    """Converts a value of the column to a label; raises SampleError for an invalid value."""

    def __init__(self, asked: LabelColumn, kind: FieldType, names: Sequence[str] | None) -> None:
        self.asked, self.notes = asked, list[str]()
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
        return {} if self.names is None else {self.asked.field: self.names}

    def __call__(self, value: Any) -> Any:
        absent = value is None or (isinstance(value, str) and not value)
        if absent and self._separator is None:
            raise SampleError(
                "there is no label",
                field=self.asked.column,
                fix="fill it in, or skip such samples with --on-error skip",
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
        if isinstance(self.kind, Array):
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
            field=self.asked.column,
            expected=names or self.kind.python,
            found=f"{value!r:.60}",
            fix="correct it, add it to the list of --classes, or use --on-error skip",
        )


class _Vectors(Labels):
    """Converts the values of several columns of a row to a vector of truth values."""

    def __init__(self, asked: LabelColumn) -> None:
        super().__init__(asked, Int(), asked.columns)
        self.kind = Array("|b1", (len(asked.columns),))

    def __call__(self, value: Any) -> Any:
        bits = list(map(_bit, value))
        if None not in bits:
            return np.array(bits, np.bool_)
        wrong = value[bits.index(None)]
        raise SampleError(
            "the value of a label is not 0 or 1",
            field=self.asked.columns[bits.index(None)],
            expected="0 or 1, or true or false, in each of the columns of --label-columns",
            found="no value" if wrong is None or str(wrong) == "" else f"{wrong!r:.60}",
            fix="correct it, leave the column out, or use --on-error skip",
        )


def _bit(value: Any) -> bool | None:
    """Return whether a value is 1; None if it is neither 0 nor 1."""
    return _BITS.get(value) if isinstance(value, str | int | float | np.generic) else None


def words(value: Any, separator: str | None) -> list[Any]:
    """Split a value with several labels: a list, or text with a separator, which may be absent."""
    if separator is not None and isinstance(value, str | None):
        return [word for part in (value or "").split(separator) if (word := part.strip())]
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
    counts = Counter[int]()  # of samples, by their number of labels
    if asked.is_vector:
        vectors = _Vectors(asked)
        deque(_counted(values(), counts, _ones), 0)
        vectors.notes = _notes(asked, counts)
        return vectors
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
    lists = asked.separator is not None or arrays or isinstance(kind, Json)
    every = _counted(values(), counts, lambda value: len(words(value, asked.separator)))
    if isinstance(kind, Text | Json) and names is None:
        names = _found(asked, every if lists else values(), lists=lists)
    elif lists:
        deque(every, 0)
    labels = Labels(asked, kind, names)
    labels.notes = _notes(asked, counts)
    return labels


def _ones(row: Sequence[Any]) -> int:
    """Count the labels of a row; -1 if it has another value than 0 or 1."""
    bits = list(map(_bit, row))
    return -1 if None in bits else bits.count(True)


def _counted(
    values: Iterable[Any], counts: Counter[int], count: Callable[[Any], int]
) -> Iterator[Any]:
    """Yield the values, and count how many have how many labels."""
    for value in values:
        counts[count(value)] += 1
        yield value


def _notes(asked: LabelColumn, counts: Mapping[int, int]) -> list[str]:
    """Describe how many labels samples have, given their counts."""
    notes = [f"samples without any label: {none:,}"] if (none := counts.get(0)) else []
    if asked.is_vector and counts.keys() - {-1} == {1}:
        notes.append(
            f"each sample has exactly one of the {len(asked.columns):,} labels: they may be"
            " classes, whose number is the position of the 1"
        )
    return notes


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
        self._labels, asked = labels, labels.asked
        self.schema = Schema(asked.replaced(whole.schema, labels.kind))
        names = {n: v for n, v in whole.class_names.items() if n not in asked.columns}
        self.class_names = {**names, **labels.class_names}

    def __getitem__(self, index: int) -> Sample:
        sample = self._whole[index]
        asked = self._labels.asked
        if asked.field not in self.schema:
            return sample
        value = asked.value_in(sample)
        try:
            label = self._labels(json.loads(value) if isinstance(value, JsonText) else value)
        except SampleError as error:
            raise error.located(key=sample["__key__"]) from error.__cause__
        return asked.replaced(sample, label)

    def narrow(self, selection: Selection) -> None:
        self._whole = copy.copy(self._whole)
        own, fields = {self._labels.asked.field: self._labels.asked.columns}, selection.fields
        theirs = None if fields is None else tuple(c for n in fields for c in own.get(n, (n,)))
        drop = tuple(column for name in selection.drop for column in own.get(name, (name,)))
        self._whole.narrow(replace(selection, fields=theirs, drop=drop))
        Source.narrow(self, selection)

    def all_keys(self) -> Sequence[str]:
        return self._whole.all_keys()

    def fingerprint(self) -> dict[str, str] | None:
        found = super().fingerprint()
        if found is None:
            return None
        made = json.dumps([found.get("files"), self._labels.asked.column, self._labels.names])
        return {**found, "files": xxhash.xxh3_128_hexdigest(made.encode())}


def labelled(sources: Mapping[str, Source], asked: LabelColumn) -> dict[str, Source]:
    """Return the splits of a source, with labels that share one list of classes.

    Raises UsageError if the field does not exist or cannot hold labels.
    """
    first = next(iter(sources.values()))
    for source in sources.values():
        for column in asked.columns:
            if error := source.others.get(column):
                raise error
        asked.refuse_unknown(source.schema)
    names = None if asked.is_vector else first.class_names.get(asked.column)
    kind = first.schema[asked.column]
    if names is not None:
        if asked.classes not in (None, names):
            raise UsageError(
                f"the classes of {asked.column!r} already have names",
                found=", ".join(names[:5]),
                fix="omit --classes",
            )
        asked = replace(asked, classes=names)
    labels = find_labels(asked, kind, lambda: _values(sources, asked))
    for name, source in sources.items():
        if not asked.is_vector and type(source.schema[asked.column]) is not type(kind):
            raise UsageError(
                f"the column {asked.column!r} has different types in different splits",
                found=f"{source.schema[asked.column]} in {name}, {kind} in {next(iter(sources))}",
            )
    found: dict[str, Source] = {name: Labelled(source, labels) for name, source in sources.items()}
    next(iter(found.values())).notes = (*first.notes, *labels.notes)
    return found


def _values(sources: Mapping[str, Source], asked: LabelColumn) -> Iterator[Any]:
    """Yield the values of the columns in all readable samples."""
    for source in sources.values():
        part = source.select(np.arange(len(source))).skimmed()
        part.narrow(Selection(asked.columns))
        for document in part.documents():
            if isinstance(document.sample, dict):
                value = asked.value_in(document.sample)
                yield json.loads(value) if isinstance(value, JsonText) else value
