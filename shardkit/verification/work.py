"""Findings, threads with results in order, and progress reported in the caller's thread."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from shardkit.errors import ShardkitError
from shardkit.helpers import os_errors
from shardkit.helpers.prefetch import in_threads as pooled
from shardkit.helpers.processors import processors
from shardkit.helpers.progress import Steps
from shardkit.storage.remote.path import RemotePath

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")

_AHEAD = 4  # jobs per thread that are submitted ahead of the result that is waited for
_REPORT_SECONDS = 0.1
SHOWN = 5  # items of a list shown in a sentence
_REQUESTS = 16  # threads for a store, which mostly wait for requests

LAST = sys.maxsize  # the shard number for problems of the dataset as a whole


class Findings:
    """The problems of one dataset, ordered by shard and sample."""

    def __init__(self) -> None:
        self._problems: list[tuple[int, int, ShardkitError]] = []
        self.notes: list[str] = []

    def add(self, problem: ShardkitError, shard: int = LAST, position: int = -1) -> None:
        """Add a problem of the sample at `position`, or of the whole shard, or of the dataset.

        Raises the problem if it is a shortage of file handles or memory, which the dataset is not
        to blame for. May be called in any thread.
        """
        if os_errors.shortage(problem):
            raise problem
        self._problems.append((shard, position, problem))

    def forget(self, shards: Collection[int]) -> None:
        """Drop notes, and the problems of samples and of these shards, before a second check."""
        kept = [one for one in self._problems if one[0] not in shards and one[1] < 0]
        self._problems = kept
        self.notes.clear()

    def problems(self) -> list[ShardkitError]:
        return [problem for *_, problem in sorted(self._problems, key=lambda entry: entry[:2])]


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers in a sorted sequence, each as its first and last number."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def numbered(noun: str, first: int, last: int) -> str:
    """Return a noun with its number, or with the first and last number of a run."""
    return f"{noun} {first:,}" if first == last else f"{noun}s {first:,} to {last:,}"


def in_words(parts: list[str]) -> str:
    """Return a list for use in a sentence, shortened to its first items."""
    shown = ", ".join(parts[:SHOWN])
    return shown if len(parts) <= SHOWN else f"{shown} and {len(parts) - SHOWN:,} more"


class Stopped(Exception):  # noqa: N818 - ends a thread's work, but is not an error
    """The caller has stopped waiting for results."""


class Meter:
    """Collects counts from worker threads and passes them to the monitor in the caller's thread."""

    def __init__(self, monitor: Steps | None) -> None:
        self._monitor = monitor
        self._counts: deque[int] = deque()
        self._next = 0.0
        self.skipped: list[int] = []  # counts of what was not checked
        self.stopped = False

    def start(self, doing: str, total: int, unit: str) -> None:
        if self._monitor is not None:
            self.report(now=True)
            self._monitor.start(doing, total, unit)

    def add(self, count: int) -> None:
        """Add to the count. May be called in any thread; raises Stopped if the caller stopped."""
        if self.stopped:
            raise Stopped
        self._counts.append(count)

    def stop(self) -> None:
        self.stopped = True

    def skip(self, count: int) -> None:
        """Count something that is not checked."""
        self.skipped.append(count)
        self.add(count)

    def report(self, *, now: bool = False) -> None:
        """Pass on the counts, a few times a second. Call it in the caller's thread."""
        if not now and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _REPORT_SECONDS
        total = 0
        while self._counts:
            total += self._counts.popleft()
        if total and self._monitor is not None:
            self._monitor.advance(total)

    def awaited(self, future: Future[_Result]) -> _Result:
        """Wait for the result of a thread, and report progress meanwhile."""
        while not future.done():
            wait([future], timeout=_REPORT_SECONDS)
            self.report()
        return future.result()


def in_threads(
    work: Callable[[_Job], _Result], jobs: Iterable[_Job], meter: Meter, path: Path | None = None
) -> Iterator[_Result]:
    """The results of all jobs, in order, from as many threads as processors; jobs start in order.

    More threads are used if `path` is in a store.
    """
    workers = _REQUESTS if isinstance(path, RemotePath) else processors()
    return pooled(work, jobs, workers, _AHEAD, meter.awaited, meter.stop)
