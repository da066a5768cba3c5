"""What `shardkit bench` measures of a dataset: reading, decoding, and loading batches.

All runs read the same samples in the same order, so that any earlier run has put them into the page
cache.
"""

from __future__ import annotations

import io
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import xxhash

from shardkit.codecs.window import Window
from shardkit.dataset.dataset import Dataset
from shardkit.performance.defaults import FOLDER, image_field, open_any, usual_options
from shardkit.performance.on_gpu import loader_on_gpu
from shardkit.performance.runs import first_numbers
from shardkit.storage import fs
from shardkit.storage.page_cache import cache_from
from shardkit.storage.pages import Pages
from shardkit.storage.remote.path import RemotePath
from shardkit.stream.dataset import StreamingDataset
from shardkit.stream.loader import Loader
from shardkit.stream.options import StreamOptions
from shardkit.stream.stream import Stream
from shardkit.transforms.steps import RandomResizedCrop

MEASURES = ("read", "decode", "load")
_DECODED = 8  # images per batch of whole images


@dataclass(frozen=True)
class Setting:
    """The setting of a run. None: not applicable."""

    measure: str
    threads: int | None = None
    workers: int | None = None
    batch_size: int | None = None
    transform: str | None = None
    size: int | None = None
    decode: str | None = None

    @property
    def recipe(self) -> dict[str, Any]:
        """The options of batches."""
        return {name: getattr(self, name) for name in ("batch_size", "transform", "size")}


class Result(NamedTuple):
    """The result of a run."""

    seconds: float
    samples: int


class Contender:
    """A dataset to measure, with at most `limit` samples per run."""

    def __init__(self, path: str | os.PathLike[str], limit: int) -> None:
        self.path, self.limit = fs.source(path), limit
        self._loaders: dict[tuple[Any, ...], Any] = {}

    @cached_property
    def dataset(self) -> Dataset:
        path = self.path
        if isinstance(path, RemotePath):  # first runs download the data, and are not counted
            path = path.through(Pages(cache_from()))
        return open_any(path)

    @cached_property
    def _numbers(self) -> list[int]:
        """The numbers of a run's samples, in the order of a Loader with any batches."""
        return first_numbers(Stream(self.dataset, StreamOptions(shuffle=True)), self.limit)

    def open(self) -> None:
        """Read the indexes of the shards, and compute the order."""
        assert self._numbers

    def close(self) -> None:
        """End worker processes, and close the dataset."""
        self._loaders.clear()
        self.dataset.close()

    def run(self, setting: Setting) -> Result:
        """Do a run."""
        if setting.measure == "read":
            return self._read(setting.threads or 0)
        if setting.measure == "decode":
            size = min(_DECODED, self.limit, len(self.dataset))
            setting = replace(setting, batch_size=size, transform="decode", size=1)
        return self._load(setting)

    def _read(self, threads: int) -> Result:
        """Read and hash samples in `threads` threads; 0: in this thread."""
        numbers = self._numbers

        def each(first: int) -> None:
            for number in numbers[first :: threads or 1]:
                self._hash(number)

        began = time.perf_counter()
        if not threads:
            each(0)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(each, range(threads)))
        return _result(began, len(numbers))

    def _hash(self, number: int) -> None:
        """Read a sample as `shardkit.open` does, and hash every byte."""
        for value in self.dataset[number].values():
            if isinstance(value, np.ndarray):
                xxhash.xxh3_64_intdigest(np.ascontiguousarray(value).data)
            else:
                xxhash.xxh3_64_intdigest(
                    value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")
                )

    def _load(self, setting: Setting) -> Result:
        """Iterate over batches.

        Open shards, the order and a DataLoader's workers are reused by the next run, as they are by
        the next epoch in training; threads and memory are new.
        """
        options = (setting.workers, setting.decode, *setting.recipe.values())
        if setting.decode:  # a decoder is reused, too
            options += (setting.threads,)
        if options not in self._loaders:
            self._loaders[options] = self._loader(setting)
        loader = self._loaders[options]
        if isinstance(loader, StreamingDataset):
            loader = Loader(loader, threads=setting.threads)
        elif isinstance(loader, Loader):
            loader.set_epoch(0)
        elif isinstance(loader.dataset, StreamingDataset):
            loader.dataset.set_epoch(0)
        batches = iter(loader)
        try:
            began, samples = time.perf_counter(), 0
            for batch in islice(batches, max(self.limit // setting.recipe["batch_size"], 1)):
                samples += int(batch["valid"].sum())
            return _result(began, samples)
        finally:
            if setting.workers is None:
                batches.close()

    def _loader(self, setting: Setting) -> Any:
        """Return a StreamingDataset, a Loader onto the GPU, or a DataLoader with some workers."""
        recipe, workers = setting.recipe, setting.workers
        if workers is None:
            data = StreamingDataset(self.dataset, **usual_options(self.dataset, **recipe))
            if setting.decode is None:
                return data
            return loader_on_gpu(data, decode=setting.decode, threads=setting.threads)
        from torch.utils.data import DataLoader

        from shardkit.stream.torch_loader import StreamingDataset as ForTorch

        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": True}
        if self.dataset.format == FOLDER:
            files: Any = ImageFiles(self.dataset, recipe["size"])
            order = {"batch_size": recipe["batch_size"], "sampler": self._numbers}
            return DataLoader(files, **order, **options)
        made = ForTorch(self.dataset, **usual_options(self.dataset, **recipe))
        return DataLoader(made, batch_size=None, **options)


class ImageFiles:
    """Image files for torch's DataLoader, as many load them: Pillow decodes, crops and resizes."""

    def __init__(self, dataset: Dataset, size: int) -> None:
        self._dataset, self._size = dataset, size
        self._field: Any = image_field(dataset)
        self._crop = RandomResizedCrop(size)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a random crop and the label of an image."""
        sample = self._dataset[index]
        with PIL.Image.open(io.BytesIO(sample[self._field])) as opened:
            image = opened.convert("RGB")
        part = Window.whole(*image.size)
        self._crop.apply(part, [random.random() for _ in range(self._crop.numbers)])
        box = (part.x, part.y, part.x + part.width, part.y + part.height)
        pixels = image.resize((self._size,) * 2, PIL.Image.Resampling.BILINEAR, box)
        label = sample.get(self._dataset.label, 0)
        return {"image": np.array(pixels), "label": label, "valid": True}


def _result(began: float, samples: int) -> Result:
    return Result(time.perf_counter() - began, samples)
