"""Short, interleaved runs of loaders, which compare them under the same conditions."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.dataset.dataset import Dataset
from shardkit.errors import ShardkitWarning
from shardkit.sample import Sample
from shardkit.stream.loader import Loader
from shardkit.stream.profile import Times
from shardkit.stream.stream import Stream

ROUNDS = 3
_BATCHES = 4  # minimum number per run, as fewer say little about a rate
_TIME_FACTOR = 4  # times the seconds of a run that it may take to get this number
_BATCH, _EPOCH = 64, 8  # for samples in memory: minimum samples per batch, batches per epoch


@dataclass(frozen=True)
class Run:
    """The measurements of a run of a loader.

    rate: samples per second, after the first batches.
    times: where the time was spent.
    delayed: seconds in which the calling thread was ready to run, but had no processor.
    """

    rate: float
    times: Times = field(default_factory=Times)
    delayed: float = 0.0


def compare(loaders: Mapping[str, Loader], seconds: float) -> dict[str, Run]:
    """The median of ROUNDS runs per loader, which together take about `seconds` for each loader."""
    found: dict[str, list[Run]] = {name: [] for name in loaders}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardkitWarning)  # reported as findings instead
        for _ in range(ROUNDS):
            for name, loader in loaders.items():
                found[name].append(run(loader, seconds / ROUNDS))
    medians = {name: sorted(runs, key=lambda one: one.rate) for name, runs in found.items()}
    return {name: runs[len(runs) // 2] for name, runs in medians.items()}


def run(loader: Loader, seconds: float) -> Run:
    """Load for some seconds, epoch after epoch; longer if batches are slow.

    Counting starts after as many batches as are prefetched, so that equally many are in progress at
    the start and at the end; at the latest with the second epoch, or after `seconds`.
    """
    began, delayed, times = time.perf_counter(), _delayed(), Times()
    first = last = 0.0  # times at which counting started and the last batch arrived
    samples = batches = 0

    def enough() -> bool:
        passed = last - first
        slow = batches < _BATCHES and passed < _TIME_FACTOR * seconds
        return bool(first) and passed > seconds and not slow

    while not enough():
        iteration: Any = iter(loader)
        for number, batch in enumerate(iteration, 1):
            last = time.perf_counter()
            if first:
                samples, batches = samples + len(batch["valid"]), batches + 1
                if enough():
                    break
            elif number > loader.prefetch or last - began > seconds:
                first = last
        first = first or last
        iteration.close()
        times += loader.profile
    return Run(samples / (last - first), times, _delayed() - delayed)


def _delayed() -> float:
    """Seconds for which this thread has waited for a processor; 0 if the system does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def first_numbers(stream: Stream, most: int) -> list[int]:
    """Return the numbers of the first `most` samples of an epoch, in its order."""
    count = np.arange(min(most, stream.order.samples))
    numbers: list[int] = stream.order.draw(0, count).number.tolist()
    return numbers


def in_memory(loader: Loader, samples: Sequence[Sample]) -> Loader:
    """Return the same loader with some samples in memory, to measure its speed without reading."""
    stream, options = loader.dataset.stream, loader.dataset.options
    length = max(len(samples), _EPOCH * max(options.per_rank(1), _BATCH))
    repeated = list(islice(cycle(samples), length))
    path = stream.datasets[0].place
    dataset = Dataset.from_sequence(repeated, stream.samples.schema, path=path)
    changed = {**vars(options), "weights": None, "sampling": None, "fields": None}
    return type(loader)(dataset, **loader.settings, **changed)
