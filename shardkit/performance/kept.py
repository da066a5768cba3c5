"""Some samples in memory as a dataset: how fast would loading be if storage took no time?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.dataset import Dataset
from shardkit.formats.base import ShardReader
from shardkit.open_shards import Readers
from shardkit.sample import Sample
from shardkit.schema import Schema

if TYPE_CHECKING:
    from shardkit.stream.loader import Loader

_BATCH = 64  # at least
_BATCHES = 8  # of an epoch, so that most of it has threads at work


class Kept(Dataset):
    """A dataset of samples that are in memory, repeated until there are `length` of them."""

    def __init__(
        self, like: Dataset, samples: Sequence[Sample], schema: Schema, length: int
    ) -> None:
        self.path, self.format = like.path, like.format
        self.manifest = self.manifest_path = self.transforms = None
        self.schema = schema
        self._reader = _Repeated(samples, schema, length)
        # What the methods of all datasets go by.
        self._names, self._bytes, self._layouts = ["."], [0], [self._reader.layout]
        self._starts, self._length = [0], length
        self._class_names = {}
        self._mapped = False
        self._readers = Readers()

    def reader(self, shard: int) -> ShardReader:
        return self._reader

    def close(self) -> None:
        """Does nothing: there is no other place to read them from."""


class _Repeated(ShardReader):
    def __init__(self, samples: Sequence[Sample], schema: Schema, length: int) -> None:
        self.schema = schema
        self.layout: dict[str, Any] = {"schema": schema.to_json()}
        self._samples, self._length = samples, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> Sample:
        return dict(self._samples[position % len(self._samples)])

    def close(self) -> None: ...


def first_samples(loader: Loader, most: int) -> list[Sample]:
    """Up to `most` of those that an epoch begins with."""
    stream = loader.dataset.stream
    numbers = stream.order.draw(0, np.arange(min(most, stream.order.samples))).number.tolist()
    return [stream.samples.read(number) for number in numbers]


def kept(loader: Loader, samples: Sequence[Sample]) -> Loader:
    """The same loader of some samples."""
    stream = loader.dataset.stream
    options = {**vars(loader.dataset.options), "weights": None, "fields": None}
    length = max(len(samples), _BATCHES * max(loader.dataset.options.per_rank(1), _BATCH))
    dataset = Kept(stream.datasets[0], samples, stream.samples.schema, length)
    return type(loader)(dataset, **loader.settings, **options)
