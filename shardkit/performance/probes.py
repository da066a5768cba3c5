"""Short runs of loaders, interleaved, so that what is compared was measured at the same time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from shardkit.errors import ShardkitWarning
from shardkit.stream.profile import Times

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from shardkit.stream.loader import Loader

T = TypeVar("T")

ROUNDS = 3
_BATCHES = 4  # at least, in a run: fewer tell little of a rate
_PATIENCE = 4  # times the seconds that a run should take, where batches take that long


@dataclass(frozen=True)
class Run:
    """Samples a second once loading is under way, and where the time went.

    `delayed` is for how many seconds the calling thread could have run, and others had the
    processors.
    """

    rate: float
    times: Times
    delayed: float = 0.0


class Rate(NamedTuple):
    """Samples a second once loading is under way, and the seconds until an epoch's first batch."""

    rate: float
    start: float


def compare(loaders: Mapping[str, Loader], seconds: float) -> dict[str, Run]:
    """The median run of each loader, of those that together take about `seconds` for each.

    Loaders measure themselves (`profile=True`).
    """
    runs = {name: partial(run, loader, seconds / ROUNDS) for name, loader in loaders.items()}
    found = interleaved(runs)
    return {
        name: sorted(some, key=lambda one: one.rate)[ROUNDS // 2] for name, some in found.items()
    }


def interleaved(runs: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """What ROUNDS calls of each gave, in turn: whatever else the machine does falls on all."""
    found: dict[str, list[T]] = {name: [] for name in runs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardkitWarning)  # what they are about is a finding
        for _ in range(ROUNDS):
            for name, once in runs.items():
                found[name].append(once())
    return found


def run(loader: Loader, seconds: float) -> Run:
    """Load for some seconds, epoch after epoch; longer, if batches are slow."""
    delayed, times, count = _delayed(), Times(), _Count(seconds, loader.prefetch)
    while not count.enough:
        iteration = iter(loader)
        count.take(iteration)
        iteration.close()
        times += loader.profile
    return Run(count.rate, times, _delayed() - delayed)


def rate_of(loader: DataLoader[Any] | Loader, seconds: float) -> Rate:
    """The same of any loader that does not measure itself."""
    ahead = getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", None) or 1)
    count, starts = _Count(seconds, ahead), []
    while not count.enough:
        began = time.perf_counter()
        count.take(loader)
        starts.append(count.began - began)
    return Rate(count.rate, min(starts))


class _Count:
    """Samples that come while loading is under way.

    That begins when as many batches have come as are made ahead, so that as much is in the making
    then as at the end; or with the second epoch, or when the seconds are over.
    """

    def __init__(self, seconds: float, ahead: int) -> None:
        self.began = 0.0  # when the first batch of the epoch came
        self._seconds, self._ahead = seconds, ahead
        self._made = time.perf_counter()
        self._first = self._last = 0.0
        self._samples = self._batches = 0

    def take(self, batches: Iterable[Any]) -> None:
        """An epoch, or what it takes of it."""
        for number, batch in enumerate(batches, 1):
            self._last = time.perf_counter()
            if number == 1:
                self.began = self._last
            if self._first:
                self._samples += len(batch["valid"])
                self._batches += 1
                if self.enough:
                    return
            elif number > self._ahead or self._last - self._made > self._seconds:
                self._first = self._last
        self._first = self._first or self._last

    @property
    def enough(self) -> bool:
        passed = self._last - self._first
        slow = self._batches < _BATCHES and passed < _PATIENCE * self._seconds
        return bool(self._first) and passed > self._seconds and not slow

    @property
    def rate(self) -> float:
        return self._samples / (self._last - self._first)


def _delayed() -> float:
    """Seconds that this thread has waited for a processor; 0 where the system does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
