"""`concatenate`: several datasets as one list of samples, with one schema for all."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shardkit.dataset.dataset import Dataset
from shardkit.dataset.readers import Readers
from shardkit.errors import ShardkitError, UsageError
from shardkit.formats.base import KEY, Column, Columns, Ranges, ShardReader
from shardkit.helpers.indices import array
from shardkit.metadata.shared_schema import other_numbers, renumbered, shared_schema, united_classes
from shardkit.sample import Sample
from shardkit.schema import Schema, check_label, holds_keypoints, is_vector
from shardkit.storage.blobs import Blobs

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Self

    from shardkit.helpers.indices import Numbers


def concatenate(datasets: Sequence[Dataset]) -> Dataset:
    """Concatenate several `datasets` or views into one dataset. Nothing is copied.

    The samples of each dataset follow those of the one before. A field that only some of the
    datasets have is optional. Classes with the same name become one class, so labels can differ
    from those in the separate datasets. Each sample keeps its key and the transforms of its
    dataset.

    Raises UsageError for anything but a list of datasets. Raises FormatError for a field that has
    different types, or that has class names in only some of the datasets.
    """
    every = list(datasets) if isinstance(datasets, list | tuple) else []
    if not every or not all(isinstance(dataset, Dataset) for dataset in every):
        raise UsageError(
            "concatenate needs a list of datasets",
            expected="a list of datasets from shardkit.open, or of views",
            found=f"{datasets!r:.100}",
        )
    first = every[0]
    if all(dataset.is_of(first) for dataset in every):  # views of one dataset make one view
        whole: Dataset = first.whole
        return whole.select(np.concatenate([_numbers(dataset, 0) for dataset in every]))
    joined = Concatenated([part for dataset in every for part in dataset.parts])
    if all(dataset.indices is None for dataset in every):
        return joined
    starts = accumulate((len(dataset.whole) for dataset in every), initial=0)
    return joined.select(np.concatenate([*map(_numbers, every, starts)]))


def _numbers(dataset: Dataset, start: int) -> Numbers:
    return start + dataset.stored(np.arange(len(dataset)))


class _Labelled(Protocol):
    """The interface of datasets and sources that is needed to merge their classes."""

    @property
    def schema(self) -> Schema: ...
    @property
    def class_names(self) -> Mapping[str, tuple[str, ...]]: ...
    def __len__(self) -> int: ...


def merged_classes(
    parts: Iterable[tuple[str, _Labelled]],
) -> tuple[dict[str, tuple[str, ...]], dict[str, ShardkitError]]:
    """Return the common class names of parts, by field, and the errors of fields with conflicts."""
    filled = [(name, part) for name, part in parts if len(part)]
    found: dict[str, tuple[str, ...]] = {}
    errors: dict[str, ShardkitError] = {}
    for field in dict.fromkeys(field for _, part in filled for field in part.class_names):
        with_field = [(name, part) for name, part in filled if field in part.schema]
        tables = [(name, part.class_names.get(field)) for name, part in with_field]
        kinds = [part.schema[field] for _, part in with_field]
        same = any(is_vector(kind) or holds_keypoints(kind) for kind in kinds)
        names, error = united_classes(tables, same=same)
        if names is not None:
            found[field] = names
        elif error is not None:
            errors[field] = error
    return found, errors


def renumber(
    sample: Sample, numbers: Mapping[str, Sequence[int]], class_names: Mapping[str, Sequence[str]]
) -> Sample:
    """Replace the labels of a sample, by field, with the `numbers` of the merged classes."""
    for field, new in numbers.items():
        if field in sample:
            check_label(sample, field, class_names[field])
            sample[field] = renumbered(sample[field], new)
    return sample


def _renumbered(
    columns: Mapping[str, Column],
    numbers: Mapping[str, Sequence[int]],
    class_names: Mapping[str, Sequence[str]],
) -> Columns:
    """Like `renumber`, for columns."""

    def new(field: str, label: Any) -> Any:
        return renumber({KEY: "", field: label}, {field: numbers[field]}, class_names)[field]

    found = dict(columns)
    for field in numbers.keys() & columns.keys():
        column = columns[field]
        if isinstance(column, list):
            found[field] = [None if label is None else new(field, label) for label in column]
        else:  # an array with the labels of all samples
            found[field] = new(field, column)
    return found


@dataclass(frozen=True)
class _Decode:
    """Decodes columns whose labels have other numbers in the merged classes."""

    decode: Callable[[list[Blobs]], Columns]
    numbers: Mapping[str, Sequence[int]]
    class_names: Mapping[str, Sequence[str]]

    def __call__(self, blobs: list[Blobs]) -> Columns:
        return _renumbered(self.decode(blobs), self.numbers, self.class_names)


class Concatenated(Dataset):
    """Several datasets as one. Its shards are the shards of all of its parts."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        names = [f"{part.place} (number {number})" for number, part in enumerate(parts)]
        layouts = [{"schema": part.schema.to_json()} for part in parts]
        self.schema, errors = shared_schema(layouts, [*map(len, parts)], names, "dataset")
        self._class_names, nameless = merged_classes(zip(names, parts, strict=True))
        errors = {**nameless, **errors}
        for error in errors.values():
            error.fix = "give the field the same type and class names in all of them"
            raise error
        self._parts = list(parts)
        # By part and field: the numbers here of the part's classes, where they differ.
        self._labels = [other_numbers(part.class_names, self._class_names) for part in parts]
        self.path, self.manifest, self.manifest_path = parts[0].path, None, None
        self.format = ", ".join(dict.fromkeys(part.format for part in parts))
        self.transform = next((p.transform for p in parts if p.transform is not None), None)
        self.unusable: dict[str, ShardkitError] = {}
        self._shared: dict[str, Any] = {}
        self._readers = Readers()  # stays empty: the parts have their own readers
        self.key_hashes: dict[int, npt.NDArray[np.int64] | None] = {}
        *self._firsts, _ = accumulate((part.shards for part in parts), initial=0)
        own = [(part, shard) for part in parts for shard in range(part.shards)]
        self._names = [part.shard_name(shard) for part, shard in own]
        extents = [part.extent(shard) for part, shard in own]
        self._bytes: list[int | None] = [size for _, size in extents]
        *self._starts, self._length = accumulate((n for n, _ in extents), initial=0)

    def _at(self, shard: int) -> tuple[int, int]:
        """The number of the part that a shard belongs to, and the shard's number in the part."""
        part = bisect_right(self._firsts, shard) - 1
        return part, shard - self._firsts[part]

    @property
    def place(self) -> Path:
        first = self._parts[0].place
        return first.parent / f"{first.name or first} and {len(self._parts) - 1} more"

    @property
    def parts(self) -> Sequence[Dataset]:
        return self._parts

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for part in self._parts for path in part.paths)

    def at(self, change: Callable[[Path], Path]) -> Self:
        moved = copy.copy(self)
        moved._parts = [part.at(change) for part in self._parts]
        return moved

    @property
    def guessed(self) -> frozenset[str]:
        return frozenset(name for part in self._parts for name in part.guessed)

    @property
    def ours(self) -> bool:
        return all(part.ours for part in self._parts)

    @property
    def ignored(self) -> dict[str, int]:
        return dict(sum((Counter(part.ignored) for part in self._parts), Counter()))

    @property
    def checksums(self) -> dict[str, str]:
        return {name: found for part in self._parts for name, found in part.checksums.items()}

    def tokenizer(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Like `Dataset.tokenizer`; also empty if the parts have different tokenizers."""
        found = [part.tokenizer() for part in self._parts]
        return found[0] if all(one == found[0] for one in found) else ({}, {})

    def original_paths(self) -> dict[str, str]:
        return {key: path for part in self._parts for key, path in part.original_paths().items()}

    def transform_of(self, index: int) -> Callable[[Sample], Sample] | None:
        return self._parts[self._at(self.locate(index)[0])[0]].transform

    def read(self, index: int, fields: Collection[str] | None = None) -> Sample:
        number, _ = self._at(self.locate(index)[0])
        sample = super().read(index, fields)
        return renumber(sample, self._labels[number], self._parts[number].class_names)

    def plan(
        self, shard: int, positions: Numbers, fields: Collection[str]
    ) -> Ranges | Columns | None:
        plan, (part, _) = super().plan(shard, positions, fields), self._at(shard)
        numbers = {name: new for name, new in self._labels[part].items() if name in fields}
        if plan is None or not numbers:
            return plan
        names = self._parts[part].class_names
        if isinstance(plan, Ranges):
            known = _renumbered(plan.known, numbers, names)
            return plan._replace(decode=_Decode(plan.decode, numbers, names), known=known)
        return _renumbered(plan, numbers, names)

    def _key_hashes(self, shard: int) -> Numbers:
        number, own = self._at(shard)
        return self._parts[number]._key_hashes(own)

    def lengths(self, field: str) -> Numbers:
        self._check_lengths(field)
        found = [
            part.lengths(field) if field in part.schema else np.zeros(len(part), np.int64)
            for part in self._parts
        ]
        every = np.concatenate(found)
        return every if self._chosen is None else every[array(self._chosen)]

    def shard_path(self, shard: int) -> Path:
        number, own = self._at(shard)
        return self._parts[number].shard_path(own)

    def sample_path(self, shard: int, position: int) -> Path:
        number, own = self._at(shard)
        return self._parts[number].sample_path(own, position)

    def reader(self, shard: int) -> ShardReader:
        """Return the reader of a part; its labels may be numbered differently."""
        number, own = self._at(shard)
        return self._parts[number].reader(own)

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": [*map(copy.copy, self._parts)]}
