"""Short runs of loaders, interleaved, so that what is compared was measured at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from shardkit.stream.profile import Times

if TYPE_CHECKING:
    from shardkit.stream.loader import Loader

T = TypeVar("T")

ROUNDS = 3
_BATCHES = 4  # at least, in a run: fewer tell little of a rate
_PATIENCE = 4  # times the seconds that a run should take, where batches take that long


@dataclass(frozen=True)
class Run:
    """Samples a second from the first batch of an epoch to its last, and where the time went.

    `delayed` is for how many seconds the calling thread could have run, and others had the
    processors.
    """

    rate: float
    times: Times
    delayed: float = 0.0


class Rate(NamedTuple):
    """Samples a second of any loader, from its first batch on, and the seconds until that."""

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
    for _ in range(ROUNDS):
        for name, once in runs.items():
            found[name].append(once())
    return found


def run(loader: Loader, seconds: float) -> Run:
    """Load for some seconds, epoch after epoch; longer, if batches are slow."""
    began, delayed = time.perf_counter(), _delayed()
    times, samples, spent, batches = Times(), 0, 0.0, 0

    def enough() -> bool:
        passed = time.perf_counter() - began
        return passed > seconds and (batches >= _BATCHES or passed > _PATIENCE * seconds)

    while not enough():
        iteration = iter(loader)
        first = last = 0.0
        for batch in iteration:
            last = time.perf_counter()
            batches += 1
            if first:
                samples += len(batch["valid"])
            else:
                first = last  # until then threads had nothing ready
            if enough():
                break
        iteration.close()
        spent += last - first
        times += loader.profile
    return Run(samples / spent if spent else times.rate, times, _delayed() - delayed)


def _delayed() -> float:
    """Seconds that this thread has waited for a processor; 0 where the system does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def rate_of(batches: Iterable[Any], seconds: float) -> Rate:
    """Use the batches of any loader for some seconds, or an epoch."""
    began = time.perf_counter()
    first = last = 0.0
    samples = count = 0
    for batch in batches:
        last = time.perf_counter()
        count += 1
        if not first:
            first = last
            continue
        samples += len(batch["valid"])
        if last - began > seconds and count > _BATCHES:
            break
    rate = samples / (last - first) if samples else count / max(last - began, 1e-9)
    return Rate(rate, first - began)
