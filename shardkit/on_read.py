"""`shardkit.open`: a dataset whose samples go through transforms as they are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardkit import storage
from shardkit.dataset import Dataset
from shardkit.keywords import takes
from shardkit.opening import open_dataset
from shardkit.sample import Sample


@takes()
def open(
    path: str | os.PathLike[str],
    *,
    transforms: Mapping[Any, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Open a dataset folder, a folder of shards without a manifest, or a single shard.

    `transforms`, by field, are those of `shardkit.torch.Loader`; random ones are drawn whenever a
    sample is read. `storage_options` are credentials, endpoints and more for a URL, as obstore or
    fsspec name them.

    Raises NotFoundError, FormatError for a path that is no dataset, DamagedError for a damaged one,
    and UsageError for transforms that do not fit it.
    """
    with storage.using(storage_options, path):
        dataset = open_dataset(path)
    if transforms is not None:
        dataset.transform = _OnRead(transforms, dataset)
    return dataset


class _OnRead:
    """Transforms of one sample at a time."""

    def __init__(self, transforms: Mapping[Any, Any], dataset: Dataset) -> None:
        from shardkit.transforms.transforms import Transforms

        self._transforms = Transforms(transforms, dataset.schema)

    def __call__(self, sample: Sample) -> Sample:
        from shardkit.transforms.draws import Draws

        seed, zero = int.from_bytes(os.urandom(8), "little"), np.zeros(1, np.int64)
        for error in self._transforms.apply([sample], Draws(seed, zero, zero), {}).values():
            raise error
        return sample
