"""The process in which `shardkit bench` measures a dataset: opened once, run many times.

A line on stdin says what to run, `{"measure": "load", "threads": 2, "batch_size": 64, ...}`, and a
line on stdout what came of it: `{"seconds": ..., "samples": ...}` or `{"error": ...}`. All runs go
through the same samples in the same order, so that whatever ran before has them in the page cache.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from shardkit.codecs.image import NotAnImageError, unusable
from shardkit.codecs.pixels import to_rgb
from shardkit.dataset import Dataset
from shardkit.errors import ShardkitError, ShardkitWarning
from shardkit.performance.defaults import image_field, open_any, usual_options
from shardkit.stream.batches import Batch
from shardkit.stream.dataset import StreamingDataset
from shardkit.stream.loader import Loader
from shardkit.stream.options import StreamOptions
from shardkit.stream.reading import Samples
from shardkit.stream.stream import Stream

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# What starts it, with the module path of whoever does, so that a user's functions are found.
START = (
    "import sys; sys.path = [p for p in sys.path if p];"  # no modules of the current folder
    "import json; sys.path[:] = json.loads(sys.argv[1]);"
    "from shardkit.performance.contender import main; main(sys.argv[2], int(sys.argv[3]))"
)


class Contender:
    """A dataset, and how to measure it: at most `limit` samples a run."""

    def __init__(self, path: str, limit: int) -> None:
        self._path, self._limit = path, limit
        self._streams: dict[str, StreamingDataset] = {}
        self._loaders: dict[str, tuple[StreamingDataset, DataLoader[Batch]]] = {}

    @cached_property
    def dataset(self) -> Dataset:
        return open_any(self._path)

    @cached_property
    def _stream(self) -> Stream:
        """The samples in the order in which a Loader has them, whatever its batches."""
        return Stream(self.dataset, StreamOptions(shuffle=True))

    @cached_property
    def _numbers(self) -> list[int]:
        """The samples of a run, in the order they come."""
        count = min(self._limit, len(self.dataset))
        numbers: list[int] = self._stream.order.draw(0, np.arange(count)).number.tolist()
        return numbers

    def run(self, request: dict[str, Any]) -> dict[str, float]:
        """What a run took. Raises whatever is wrong."""
        measure = request.pop("measure")
        if measure == "open":  # what must be read to find samples, and the order they come in
            began = time.perf_counter()
            return _result(began, len(self._numbers))
        if measure == "load":
            load = self._load_in_workers if "workers" in request else self._load_in_threads
            return load(**request)
        return self._go_through(self._hash if measure == "read" else self._decode, **request)

    def _go_through(self, work: Callable[[int], None], threads: int) -> dict[str, float]:
        """Do something with each sample, in so many threads; 0: in this one."""
        numbers = self._numbers
        if not threads:
            began = time.perf_counter()
            for number in numbers:
                work(number)
            return _result(began, len(numbers))
        with ThreadPoolExecutor(threads) as pool:
            ready = threading.Barrier(threads + 1)  # so that starting them is not measured
            shares = [
                pool.submit(_each, work, numbers[first::threads], ready) for first in range(threads)
            ]
            ready.wait()
            began = time.perf_counter()
            for share in shares:
                share.result()
            return _result(began, len(numbers))

    def _hash(self, number: int) -> None:
        """Use every byte of a sample, as `shardkit.open` gives it."""
        for value in self.dataset[number].values():
            if isinstance(value, np.ndarray):
                xxhash.xxh3_64_intdigest(np.ascontiguousarray(value).data)
            else:
                xxhash.xxh3_64_intdigest(
                    value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")
                )

    def _decode(self, number: int) -> None:
        """The whole of a sample's image as pixels."""
        samples, field = self._images
        sample = samples.read(number)
        if field not in sample:
            return
        try:
            to_rgb(sample[field])
        except NotAnImageError as error:
            place = samples.address(number)._asdict()
            raise unusable(error, sample["__key__"], field).located(**place) from error

    @cached_property
    def _images(self) -> tuple[Samples, str]:
        """The images alone, and their field."""
        field = image_field(self.dataset)
        assert field is not None  # or nobody would ask
        return Samples([self.dataset], [field]), field

    def _load_in_threads(self, threads: int, **recipe: Any) -> dict[str, float]:
        """Open shards and the order stay from run to run; threads and memory are new."""
        setting = json.dumps(recipe)
        if setting not in self._streams:
            options = usual_options(self.dataset, **recipe)
            self._streams[setting] = StreamingDataset(self.dataset, **options)
        iteration = iter(Loader(self._streams[setting], threads=threads))
        try:
            return self._count(iteration, recipe["batch_size"])
        finally:
            iteration.close()

    def _load_in_workers(self, workers: int, **recipe: Any) -> dict[str, float]:
        """Workers stay from run to run, as they do in training from epoch to epoch."""
        setting = json.dumps([workers, recipe])
        if setting not in self._loaders:
            from torch.utils.data import DataLoader

            from shardkit.torch import StreamingDataset as ForTorch

            made = ForTorch(self.dataset, **usual_options(self.dataset, **recipe))
            loader: DataLoader[Batch] = DataLoader(
                made, batch_size=None, num_workers=workers, persistent_workers=True
            )
            self._loaders[setting] = made, loader
        dataset, loader = self._loaders[setting]
        dataset.set_epoch(0)
        return self._count(iter(loader), recipe["batch_size"])

    def _count(self, batches: Iterable[Batch], batch_size: int) -> dict[str, float]:
        """Take batches as a training loop does."""
        began, samples = time.perf_counter(), 0
        for batch in islice(batches, max(self._limit // batch_size, 1)):
            samples += int(batch["valid"].sum())
        return _result(began, samples)


def _each(work: Callable[[int], None], numbers: Sequence[int], ready: threading.Barrier) -> None:
    ready.wait()
    for number in numbers:
        work(number)


def _result(began: float, samples: int) -> dict[str, float]:
    return {"seconds": time.perf_counter() - began, "samples": samples}


def _message(error: Exception) -> str:
    """What went wrong, for people."""
    text = str(error)
    if text.startswith("Caught "):  # by a worker of a DataLoader, which adds its traceback
        name = f"{type(error).__module__}.{type(error).__qualname__}: "
        return text.rpartition(name)[2].strip()
    return text if isinstance(error, ShardkitError) else f"{type(error).__name__}: {text}"


def main(path: str, limit: int) -> None:
    """Do the runs that arrive on stdin, until it ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library or a user's transform prints must not run into them
    warnings.simplefilter("ignore", ShardkitWarning)
    contender = Contender(path, limit)
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = contender.run(json.loads(line))
        except Exception as error:  # of the data, of a user's transform, of a library
            answer = {"error": _message(error)}
        print(json.dumps(answer), file=answers, flush=True)
