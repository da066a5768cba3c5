"""`shardkit.open`: a dataset whose samples go through transforms as they are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardkit.dataset.dataset import Dataset
from shardkit.dataset.find import open_dataset
from shardkit.helpers.keywords import takes
from shardkit.sample import Sample
from shardkit.storage import fs


@takes()
def open(
    path: str | os.PathLike[str],
    *,
    transforms: Mapping[Any, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Open a dataset folder, a folder of shards without a manifest, or a single shard.

    path: a path, or a URL.
    transforms: transforms by field, as in `shardkit.torch.Loader`. Random transforms draw new
        numbers each time a sample is read.
    storage_options: for a URL: credentials, endpoints and more, by the names of obstore or fsspec.

    Raises NotFoundError if the path does not exist, FormatError if it is not a dataset,
    DamagedError if the dataset is damaged, and UsageError if the transforms do not fit the dataset.
    """
    with fs.using(storage_options, path):
        dataset = open_dataset(path)
    if transforms is not None:
        dataset.transform = _OnRead(transforms, dataset)
    return dataset


class _OnRead:
    """Applies transforms to one sample at a time."""

    def __init__(self, transforms: Mapping[Any, Any], dataset: Dataset) -> None:
        from shardkit.transforms.transforms import Transforms

        self._transforms = Transforms(transforms, dataset.schema)

    def __call__(self, sample: Sample) -> Sample:
        from shardkit.transforms.draws import Draws

        seed, zero = int.from_bytes(os.urandom(8), "little"), np.zeros(1, np.int64)
        for error in self._transforms.apply([sample], Draws(seed, zero, zero), {}).values():
            raise error
        return self._transforms.typed(sample)
