"""Datasets and sequences with a label made from one of their fields."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from shardkit.errors import SampleError, UsageError
from shardkit.options import Selection
from shardkit.sample import JsonText, Sample
from shardkit.schema import Schema
from shardkit.sources.base import Indices, Source, SourceWrapper
from shardkit.sources.labels import LABEL, LabelColumn, Labels, find_labels


class Labelled(SourceWrapper):
    """The samples of a source, with a label made from one of its fields."""

    def __init__(self, whole: Source, labels: Labels) -> None:
        super().__init__()
        self.describe_as(whole)
        self.requests = whole.requests
        self._whole, self._labels = whole, labels
        own = labels.column
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
        super().narrow(selection)

    def select(self, indices: Indices) -> Labelled:
        part = copy.copy(self)
        part._whole = self._whole.select(indices)
        part.requests = part._whole.requests
        return part

    def skimmed(self) -> Labelled:
        found = copy.copy(self)
        found._whole = self._whole.skimmed()
        return found

    def all_keys(self) -> Sequence[str]:
        return self._whole.all_keys()

    def fingerprint(self) -> dict[str, str] | None:
        found = super().fingerprint()
        if found is None:
            return None
        made = json.dumps([found.get("files"), self._labels.column, self._labels.names])
        return {**found, "files": xxhash.xxh3_128_hexdigest(made.encode())}


def labelled(sources: Mapping[str, Source], asked: LabelColumn) -> dict[str, Source]:
    """The splits of a source, with labels that share one list of classes.

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
    """The values of a field in all readable samples."""
    for source in sources.values():
        part = source.select(np.arange(len(source))).skimmed()
        part.narrow(Selection((column,)))
        for document in part.documents():
            if isinstance(document.sample, dict):
                value = document.sample.get(column)
                yield json.loads(value) if isinstance(value, JsonText) else value
