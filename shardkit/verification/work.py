"""Findings, threads whose results come in order, and progress for the caller's thread."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from shardkit import storage
from shardkit.errors import ShardkitError
from shardkit.processors import in_threads as pooled
from shardkit.processors import processors
from shardkit.progress import Monitor
from shardkit.remote.path import RemotePath

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")

_AHEAD = 4  # jobs per thread that are handed out before the first one's result is wanted
_REPORT_SECONDS = 0.1
SHOWN = 5  # of a list in a sentence
_REQUESTS = 16  # threads that wait for a store

LAST = sys.maxsize  # the "shard" of what belongs to the dataset as a whole


class Findings:
    """The problems of one dataset, in the order of its shards and their samples."""

    def __init__(self) -> None:
        self._problems: list[tuple[int, int, ShardkitError]] = []
        self.notes: list[str] = []

    def add(self, problem: ShardkitError, shard: int = LAST, position: int = -1) -> None:
        """Add a problem of the sample at `position`, or of the whole shard, or of the dataset.

        Raises it where too many files are open or memory ran out, which is no problem of the
        dataset. May be called in any thread.
        """
        if storage.shortage(problem):
            raise problem
        self._problems.append((shard, position, problem))

    def forget(self, shards: Collection[int]) -> None:
        """Drop notes, and the problems of samples and of these shards: all are looked for again."""
        kept = [one for one in self._problems if one[0] not in shards and one[1] < 0]
        self._problems = kept
        self.notes.clear()

    def problems(self) -> list[ShardkitError]:
        return [problem for *_, problem in sorted(self._problems, key=lambda entry: entry[:2])]


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last of those that follow one another, of numbers in order."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def numbered(noun: str, first: int, last: int) -> str:
    """The words for one, or for several that follow one another."""
    return f"{noun} {first:,}" if first == last else f"{noun}s {first:,} to {last:,}"


def in_words(parts: list[str]) -> str:
    """A list in a sentence, of which the first are shown."""
    shown = ", ".join(parts[:SHOWN])
    return shown if len(parts) <= SHOWN else f"{shown} and {len(parts) - SHOWN:,} more"


class Stopped(Exception):  # noqa: N818 - it ends a thread's work and is no error
    """The caller has stopped waiting for results."""


class Meter:
    """Passes counts from worker threads to the monitor, in the caller's thread."""

    def __init__(self, monitor: Monitor | None) -> None:
        self._monitor = monitor
        self._counts: deque[int] = deque()
        self._next = 0.0
        self.skipped: list[int] = []  # counts that were not checked
        self.stopped = False

    def start(self, doing: str, total: int, unit: str) -> None:
        if self._monitor is not None:
            self.report(now=True)
            self._monitor.start(doing, total, unit)

    def add(self, count: int) -> None:
        """Count, in any thread; raises Stopped if the caller has stopped."""
        if self.stopped:
            raise Stopped
        self._counts.append(count)

    def stop(self) -> None:
        self.stopped = True

    def skip(self, count: int) -> None:
        """Count what is not checked."""
        self.skipped.append(count)
        self.add(count)

    def report(self, *, now: bool = False) -> None:
        """Pass on the counts, a few times a second; in the caller's thread."""
        if not now and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _REPORT_SECONDS
        total = 0
        while self._counts:
            total += self._counts.popleft()
        if total and self._monitor is not None:
            self._monitor.advance(total)

    def awaited(self, future: Future[_Result]) -> _Result:
        """The result of a thread, with reports meanwhile."""
        while not future.done():
            wait([future], timeout=_REPORT_SECONDS)
            self.report()
        return future.result()


def in_threads(
    work: Callable[[_Job], _Result], jobs: Iterable[_Job], meter: Meter, path: Path | None = None
) -> Iterator[_Result]:
    """The results of all jobs, in order, from as many threads as processors; jobs begin in order.

    There are more threads if they read from a store, where `path` is.
    """
    workers = _REQUESTS if isinstance(path, RemotePath) else processors()
    return pooled(work, jobs, workers, _AHEAD, meter.awaited, meter.stop)
