"""Columns that the names of folders hold, `label=cat/part-0.parquet`, as fields of the samples."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardkit.dataset.dataset import Dataset
from shardkit.formats.table_folders import partition_values
from shardkit.sample import Sample
from shardkit.schema import FieldType, Schema
from shardkit.sources.base import Source, SourceWrapper
from shardkit.sources.columns import CELLS, CellType


def types_of(columns: Mapping[str, Sequence[str | None]]) -> dict[str, FieldType]:
    """Return the narrowest type of each column, whose values are given as text."""
    found = {}
    for name, texts in columns.items():
        kind = CellType()
        kind.add([text or "" for text in texts])
        found[name] = replace(kind.kind, optional=None in texts or "" in texts)
    return found


def values_of(folder: str, kinds: Mapping[str, FieldType]) -> dict[str, Any]:
    """Return the values of a relative path, without missing ones."""
    texts = {name: text for name, text in partition_values(folder).items() if text}
    return {n: CELLS.get(type(kinds[n]), str)(text) for n, text in texts.items() if n in kinds}


class Partitioned(SourceWrapper):
    """The samples of a table, with the columns that the folders of its files name."""

    def __init__(self, whole: Source, kinds: Mapping[str, FieldType]) -> None:
        super().__init__(whole)
        self._kinds = kinds
        self.schema = Schema({**whole.schema, **kinds})
        self.others = {name: error for name, error in whole.others.items() if name not in kinds}

    def __getitem__(self, index: int) -> Sample:
        sample = self._whole[index]
        folder = posixpath.dirname(self._whole.name(index))
        return {**sample, **self.selected(values_of(folder, self._kinds))}


def with_partitions(
    sources: Mapping[str, Source], datasets: Mapping[str, Dataset]
) -> dict[str, Source]:
    """Return the sources of these datasets, by split, with the columns that their folders name."""
    columns: dict[str, list[str | None]] = {}
    for dataset in datasets.values():
        for name, texts in dataset.partitions.items():
            columns.setdefault(name, []).extend(texts)
    kinds = types_of(columns)
    found = {}
    for split, source in sources.items():
        own = {name: kinds[name] for name in datasets[split].partitions}
        found[split] = Partitioned(source, own) if own else source
        datasets[split].partitions = {}  # not to be sent to the workers
    if kinds:
        words = ", ".join(f"{name} ({type(kind).__name__})" for name, kind in kinds.items())
        first = next(iter(found.values()))
        first.notes = (*first.notes, f"fields from the names of folders: {words}")
    return found
