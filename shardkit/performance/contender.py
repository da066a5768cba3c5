"""A process that `shardkit bench` measures: `Process` is its client, `main` runs shardkit datasets.

A request is a line on stdin, `{"measure": "load", "threads": 2, "batch_size": 64, ...}`, and its
answer a line on stdout, `{"seconds": ..., "samples": ...}` or `{"error": ...}`. All runs read the
same samples in the same order, so that any earlier run has put them into the page cache.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shardkit.codecs.image import NotAnImageError, unusable
from shardkit.codecs.pixels import to_rgb
from shardkit.dataset.dataset import Dataset
from shardkit.errors import ShardkitError, ShardkitWarning, WorkerError
from shardkit.helpers.json_process import JsonProcess
from shardkit.performance.defaults import image_field, open_any, usual_options
from shardkit.performance.runs import first_numbers
from shardkit.storage import fs
from shardkit.storage.page_cache import cache_from
from shardkit.storage.pages import Pages
from shardkit.storage.remote.path import RemotePath
from shardkit.stream.dataset import StreamingDataset
from shardkit.stream.loader import Loader
from shardkit.stream.options import StreamOptions
from shardkit.stream.reading import Samples
from shardkit.stream.stream import Stream

MEASURES = ("read", "decode", "load")
PEER = "peer"  # the format of other libraries
_RUN = 1800  # timeout of a run in seconds
_START = (
    "import sys; sys.path = [p for p in sys.path if p];"  # no modules of the current folder
    "import json; sys.path[:] = json.loads(sys.argv[1]);"
    "from shardkit.performance.contender import main; main(sys.argv[2], int(sys.argv[3]))"
)


@dataclass(frozen=True)
class Setting:
    """The setting of a run. None: not applicable."""

    measure: str
    threads: int | None = None
    workers: int | None = None
    batch_size: int | None = None
    transform: str | None = None
    size: int | None = None


@dataclass(frozen=True)
class Contender:
    """A dataset or a peer: the process that measures it, and what it reads."""

    name: str
    format: str  # or PEER
    command: list[str]
    path: Path  # of the dataset, or of the peer's store
    about: dict[str, Any]  # for the report
    measures: Sequence[str] = MEASURES  # the supported ones
    settings: Sequence[Setting] = ()  # the settings to measure
    sample_bytes: float | None = None  # mean stored size


def command(path: str | os.PathLike[str], limit: int) -> list[str]:
    """The command that starts the process for a dataset, with the `sys.path` of this process."""
    search = json.dumps([folder for folder in sys.path if folder])
    return [sys.executable, "-c", _START, search, str(path), str(limit)]


class Process:
    """A process that answers requests. Started at the first request, and again if it has ended."""

    def __init__(
        self, command: Sequence[str], storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """`storage_options` may be secret: sent over stdin, as other users can see the command."""
        self._command = command
        self._options = dict(storage_options or {})
        self._process: JsonProcess | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer, or `{"error": ...}`."""
        try:
            if self._process is None:
                self._process = JsonProcess(self._command, _RUN)
                if self._options:
                    self._process.send({"storage_options": self._options})
            process = self._process
            process.send(request)
            answer: dict[str, Any] = process.receive()
        except WorkerError as error:
            self.close()
            printed = f"; its last output: {error.found}" if error.found else ""
            return {"error": f"{error.what}{printed}"}
        return answer

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.close()


class Runner:
    """Measures a dataset, with at most `limit` samples per run."""

    def __init__(self, path: str, limit: int) -> None:
        self._path, self._limit = path, limit
        self.storage_options: dict[str, Any] | None = None
        self._loaders: dict[tuple[Any, ...], tuple[StreamingDataset, Any]] = {}

    @cached_property
    def dataset(self) -> Dataset:
        with fs.using(self.storage_options):
            path = fs.source(self._path)
            if isinstance(path, RemotePath):  # first runs download the data, and are not counted
                path = path.through(Pages(cache_from()))
            return open_any(path)

    @cached_property
    def _numbers(self) -> list[int]:
        """The numbers of a run's samples, in the order of a Loader with any batches."""
        return first_numbers(Stream(self.dataset, StreamOptions(shuffle=True)), self._limit)

    def run(self, request: dict[str, Any]) -> dict[str, float]:
        """Do a run; returns its seconds and samples."""
        measure = request.pop("measure")
        if measure == "open":  # reads the shards' indexes, and computes the order
            began = time.perf_counter()
            return _result(began, len(self._numbers))
        if measure == "load":
            return self._load(**request)
        return self._go_through(self._hash if measure == "read" else self._decode, **request)

    def _go_through(self, work: Callable[[int], None], threads: int) -> dict[str, float]:
        """Call `work` with each sample's number in `threads` threads; 0: in this thread."""
        numbers = self._numbers
        ready = threading.Barrier(threads + 1)  # to exclude the start of threads from the time

        def each(first: int) -> None:
            ready.wait()
            for number in numbers[first :: threads or 1]:
                work(number)

        if not threads:
            began = time.perf_counter()
            each(0)
            return _result(began, len(numbers))
        with ThreadPoolExecutor(threads) as pool:
            shares = [pool.submit(each, first) for first in range(threads)]
            ready.wait()
            began = time.perf_counter()
            for share in shares:
                share.result()
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

    def _decode(self, number: int) -> None:
        """Decode the whole image of a sample."""
        samples, field = self._images
        sample = samples.read(number)
        if field not in sample:
            return
        try:
            to_rgb(sample[field])
        except NotAnImageError as error:
            address = samples.address(number)._asdict()
            raise unusable(error, sample["__key__"], field).located(**address) from error

    @cached_property
    def _images(self) -> tuple[Samples, str]:
        """A reader of the image field alone, and the field."""
        field = image_field(self.dataset)
        assert field is not None  # else bench does not measure "decode"
        return Samples([self.dataset], [field]), field

    def _load(
        self, *, threads: int | None = None, workers: int | None = None, **recipe: Any
    ) -> dict[str, float]:
        """Iterate over batches.

        Open shards, the order and a DataLoader's workers are reused by the next run, as they are by
        the next epoch in training; threads and memory are new.
        """
        setting = (workers, *recipe.values())
        if setting not in self._loaders:
            options = usual_options(self.dataset, **recipe)
            self._loaders[setting] = _dataset_and_loader(self.dataset, workers, options)
        dataset, loader = self._loaders[setting]
        if workers is None:
            loader = Loader(dataset, threads=threads)
        else:
            dataset.set_epoch(0)
        batches = iter(loader)
        try:
            began, samples = time.perf_counter(), 0
            for batch in islice(batches, max(self._limit // recipe["batch_size"], 1)):
                samples += int(batch["valid"].sum())
            return _result(began, samples)
        finally:
            if workers is None:
                batches.close()


def _dataset_and_loader(
    dataset: Dataset, workers: int | None, options: dict[str, Any]
) -> tuple[StreamingDataset, Any]:
    if workers is None:
        return StreamingDataset(dataset, **options), None
    from torch.utils.data import DataLoader

    from shardkit.stream.torch_loader import StreamingDataset as ForTorch

    made = ForTorch(dataset, **options)
    return made, DataLoader(made, batch_size=None, num_workers=workers, persistent_workers=True)


def _result(began: float, samples: int) -> dict[str, float]:
    return {"seconds": time.perf_counter() - began, "samples": samples}


def _message(error: Exception) -> str:
    """The text of an error, without a worker's traceback."""
    text = str(error)
    if text.startswith("Caught "):  # in a DataLoader's worker, with its traceback
        name = f"{type(error).__module__}.{type(error).__qualname__}: "
        return text.rpartition(name)[2].strip()
    return text if isinstance(error, ShardkitError) else f"{type(error).__name__}: {text}"


def main(path: str, limit: int) -> None:
    """Do the runs that are requested on stdin, until its end."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries and transforms must not mix with answers
    warnings.simplefilter("ignore", ShardkitWarning)
    runner = Runner(path, limit)
    for line in sys.stdin:
        request = json.loads(line)
        if "storage_options" in request:
            runner.storage_options = request["storage_options"]
            continue
        try:
            answer: dict[str, Any] = runner.run(request)
        except Exception as error:  # bad data, or an error in a user's transform or a library
            answer = {"error": _message(error)}
        print(json.dumps(answer), file=answers, flush=True)
