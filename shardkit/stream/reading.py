"""Reads samples of one or several datasets by number, from their shards or from a cache."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import xxhash

from shardkit.codecs.image import NotAnImageError, unusable
from shardkit.codecs.pixels import to_rgb
from shardkit.dataset.dataset import Dataset
from shardkit.errors import FormatError, UsageError, near
from shardkit.formats.base import Columns, Ranges
from shardkit.formats.columns import read_together
from shardkit.helpers.clock import enter
from shardkit.helpers.indices import digest
from shardkit.sample import Sample
from shardkit.schema import Schema
from shardkit.stream.order import Numbers


class Samples:
    """Reads samples by their number over all datasets, which are concatenated. Thread-safe."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        fields: Collection[str] | None = None,
        *,
        cached: bool = False,
    ) -> None:
        """`fields`: the fields to read, None for all; `cached`: keep samples in memory."""
        self._datasets = [copy.copy(dataset) for dataset in datasets]  # with their own open shards
        *self._starts, self._length = accumulate(map(len, datasets), initial=0)
        every, stored = np.array([d.extent(n) for d in datasets for n in range(d.shards)]).T
        self._firsts = every.cumsum() - every  # the first sample of each shard of all datasets
        self._mean_bytes = stored / np.maximum(every, 1)  # of the samples of each shard
        self.mean_bytes = float(stored.sum()) / max(int(every.sum()), 1)  # of all samples
        self._views = any(dataset.indices is not None for dataset in datasets)
        *self._first_shards, _ = accumulate((dataset.shards for dataset in datasets), initial=0)
        self.schema = common_schema(datasets, fields)
        self._fields = None if fields is None else frozenset(self.schema)
        self._names = tuple(self.schema)
        self._cache: dict[int, Sample] | None = {} if cached else None
        self.waits = True  # whether reading may wait for storage; set by those who read
        self.decoded: Collection[str] = ()  # image fields whose decoded pixels are cached

    def __len__(self) -> int:
        return self._length

    def read(self, number: int) -> Sample:
        """Read one sample; the caller owns it."""
        if self._cache is None:
            return self._read(number)
        sample = self._cache.get(number)
        if sample is None:
            sample = self._read(number)
            for name in self.decoded:
                if name in sample:
                    sample[name] = self._pixels(sample, name, number)
            enter("read")
            self._cache[number] = sample
        # Copies, as the caller may change values; transforms only read pixels.
        return {n: v if n in self.decoded else copy.deepcopy(v) for n, v in sample.items()}

    def _read(self, number: int) -> Sample:
        dataset, index = self._locate(number)
        return dataset.read(index, self._fields)

    def _pixels(self, sample: Sample, field: str, number: int) -> Any:
        enter("decode")
        try:
            return to_rgb(sample[field])
        except NotAnImageError as error:
            where = self.location(number)
            raise unusable(error, sample["__key__"], field).located(**where) from error

    def read_many(self, numbers: Numbers, most: int | None = None) -> Columns | None:
        """Read samples by their numbers at once; the caller owns the columns.

        None if they have more than `most` bytes, or one of them must be read by `read`, which also
        finds the error of a bad one.
        """
        if self._cache is not None:
            return None
        return read_together(self._stored(numbers), self._firsts, self._plan, most)

    def _plan(self, shard: int, positions: Numbers) -> Ranges | Columns | None:
        """Call `Dataset.plan`; `shard` counts the shards of all datasets."""
        which = bisect_right(self._first_shards, shard) - 1
        own = shard - self._first_shards[which]
        return self._datasets[which].plan(own, positions, self._names)

    def stored_bytes(self, numbers: Numbers) -> float:
        """Estimate the stored bytes of samples from the sizes of their shards."""
        shards = np.searchsorted(self._firsts, self._stored(numbers), side="right") - 1
        return float(self._mean_bytes[shards].sum())

    def _stored(self, numbers: Numbers) -> Numbers:
        """Convert numbers of samples to numbers over all stored samples, as views skip some."""
        if not self._views:
            return numbers
        found = np.empty_like(numbers)
        which = np.searchsorted(self._starts, numbers, side="right") - 1
        for each in np.unique(which).tolist():
            first, here = self._firsts[self._first_shards[each]], which == each
            found[here] = first + self._datasets[each].stored(numbers[here] - self._starts[each])
        return found

    def location(self, number: int) -> dict[str, Any]:
        """The location of a sample, for errors: a file, usually a shard, and the position in it."""
        dataset, index = self._locate(number)
        shard, position = dataset.locate(index)
        return {"path": dataset.sample_path(shard, position), "position": position}

    def close(self) -> None:
        """Close all open shards."""
        for dataset in self._datasets:
            dataset.close()

    def _locate(self, number: int) -> tuple[Dataset, int]:
        """Return the dataset that has a sample, and the sample's index in it."""
        which = bisect_right(self._starts, number) - 1 if len(self._starts) > 1 else 0
        return self._datasets[which], number - self._starts[which]


def extents(dataset: Dataset) -> Numbers:
    """Number of stored samples of each shard, whether or not they are in the view."""
    return np.array([dataset.extent(shard)[0] for shard in range(dataset.shards)], np.int64)


def sizes(dataset: Dataset) -> Numbers:
    """Number of samples of each shard, without those outside the view.

    A view in another order than the stored one counts as a single shard.
    """
    if not dataset.is_in_order:
        return np.array([len(dataset)], np.int64)
    ends = extents(dataset).cumsum()
    return np.diff(dataset.before(ends), prepend=0)


def fingerprint(dataset: Dataset) -> str:
    """Return a digest that identifies a dataset: names, sizes and known checksums of its shards.

    For a view, the digest includes the indices of its samples.
    """
    found = xxhash.xxh3_64()
    sums = dataset.checksums
    for shard in range(dataset.shards):
        name = dataset.shard_name(shard)
        found.update(f"{name} {dataset.extent(shard)} {sums.get(name)}\n".encode())
    if dataset.indices is not None:
        found.update(f"view {digest(dataset.indices)}\n".encode())
    return found.hexdigest()


def common_schema(datasets: Sequence[Dataset], fields: Collection[str] | None) -> Schema:
    """The schema of the fields to read. Raises an error if the datasets' schemas differ in them."""
    first = datasets[0]
    names = list(first.schema) if fields is None else list(dict.fromkeys(fields))
    for dataset in datasets:
        missing = [name for name in names if name not in dataset.schema]
        if missing:
            raise UsageError(
                f"the dataset has no field {missing[0]!r}",
                path=dataset.place,
                expected=near(missing[0], dataset.schema),
                fix="use fields=[...] to select fields that all datasets have",
            )
        other = [name for name in names if dataset.schema[name] != first.schema[name]]
        if other:
            raise FormatError(
                f"the field {other[0]!r} has another type than in {first.place}",
                path=dataset.place,
                expected=str(first.schema[other[0]]),
                found=str(dataset.schema[other[0]]),
            )
    return Schema({name: first.schema[name] for name in names})
