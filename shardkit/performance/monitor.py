"""`Monitor`: measures a training loop, between the loop and its loader."""

from __future__ import annotations

import csv
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from shardkit.errors import OutputError, UsageError, warn
from shardkit.options import check_numbers
from shardkit.performance.machine import System, Usage
from shardkit.performance.report import Counted, Report, counted, shown
from shardkit.stream.ranks import find_world

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
Row = Mapping[str, float | None]

# Loading limits training if the loop waits for more than this share of its time,
_HELD_BACK = 0.1
_ENOUGH = 20  # in at least this number of batches,
_WARM_UP = 10  # after these batches, in which caches, threads and compilers warm up,
_BUSY = 0.9  # unless the GPU is in use for this share of the time, as it has work queued.


class Log(Protocol):
    """Destination of the values of windows."""

    def write(self, row: Row) -> None:
        """Write values by name, with the same names each time; None for an unknown value.

        Readers see them soon, also if the training is killed.
        """

    def close(self) -> None:
        """Close the log."""


class Monitor(Generic[T]):
    """Measure a training loop: iterate over the monitor instead of the loader, of any kind.

    Batches are passed on unchanged. `report()` says what the loop has done so far, over all epochs,
    and how long it waited for data. If it waits for a large share of its time, a ShardkitWarning
    says so once. A batch counts when the loop asks for the next one. If several ranks train
    together, only rank 0 logs, warns and measures its machine.

    loader: the loader to wrap, or any other iterable of batches. It is also an attribute.
    log: a .csv file, to which each window adds a line. With torch, also a folder for TensorBoard.
    every: number of batches in a window. The last window of an epoch may have fewer.

    Raises UsageError for invalid options, and OutputError for a log that cannot be written.
    """

    def __init__(
        self, loader: Iterable[T], *, log: str | os.PathLike[str] | None = None, every: int = 50
    ) -> None:
        """Measure the loop over a `loader`; `every` and `log` are as above."""
        self.loader = loader
        self.every = every
        check_numbers(self, every=1)
        self._clock = time.perf_counter
        self._is_first = find_world(None, None).rank == 0
        self._log = self._open(Path(log)) if self._is_first and log is not None else None
        self._system: System | None = None
        self._window = _Window()
        self._whole = Report()  # of all earlier windows
        self._judged = Report()  # of all earlier windows, without the warm-up
        self._warned = False

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        clock = self._clock
        if self._system is None and self._is_first:
            self._system = System(self._gpu, clock)
        if self._system is not None:
            self._system.begin()
        self._window = window = _Window()
        first, asked = True, clock()
        try:
            with self._waiting():
                batches = iter(self.loader)
            while True:
                with self._waiting():
                    batch = [next(batches)]
                got = clock()
                made = counted(batch[0])
                yield batch.pop()  # the loop has the only reference
                over = clock()
                window.add(made, got - asked, over - got, first=first)
                first = False
                if window.batches == self.every:
                    window.settle()  # may wait for the GPU, which counts as time of the step
                    window.step += clock() - over
                    self._finish(window)
                    window = self._window
                asked = clock()
        except StopIteration:
            window.data += clock() - asked  # ending the loader's iteration takes time, too
        finally:
            self._finish(window, last=True)

    def report(self) -> Report:
        """Return a report of what the loop has done so far. It prints as a table."""
        report = self._whole + self._window.report()
        where = getattr(self.loader, "decode", None)
        return replace(report, decode="gpu" if where == "gpu" else None)

    def close(self) -> None:
        """Close the log. The loop can continue without it."""
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Overridden by shardkit.torch.Monitor.

    def _open(self, path: Path) -> Log:
        if path.suffix.lower() != ".csv":
            raise UsageError(
                "the log must be a .csv file",
                found=str(path),
                fix="give a .csv file, or use shardkit.torch.Monitor to log to TensorBoard",
            )
        return _Csv(path)

    def _gpu(self) -> Usage:
        """Return the usage of the GPU, if there is one."""
        return Usage()

    def _waiting(self) -> AbstractContextManager[object]:
        """Return a context manager to use around each wait for data."""
        return nullcontext()

    def _finish(self, window: _Window, *, last: bool = False) -> None:
        """Add a window to the report, log it, and warn if loading limits training."""
        usage = self._system.used(last=last) if self._system else Usage()
        report = window.report() + Report(usage=usage)
        self._window = _Window()
        if self._whole.batches >= _WARM_UP:
            self._judged += report
        self._whole += report
        try:
            if self._log is not None and report.batches:
                self._log.write(_row(report, self._whole))
        except OSError as error:  # a full disk must not end the training
            self._log = None
            warn(f"the monitor stopped logging, as it cannot write: {error}")
        if self._is_first and not self._warned:
            self._judge()

    def _judge(self) -> None:
        """Warn if loading limits training."""
        judged = self._judged
        waiting, in_use = judged.waiting or 0, judged.to_dict()["gpu"]
        if judged.batches < _ENOUGH or waiting <= _HELD_BACK or (in_use or 0) >= _BUSY:
            return
        self._warned = True
        count, noun = (judged.samples, "samples") if judged.samples else (judged.batches, "batches")
        now = shown(count / (judged.data + judged.step))
        alone = shown(count / judged.step) if judged.step else "any number"
        warn(
            f"the training loop waits for data {waiting:.0%} of its time: "
            f"{now} {noun}/s, while its steps alone would allow {alone}"
            + ("" if in_use is None else f"; the GPU is in use {in_use:.0%} of the time")
            + _advice(self.loader)
        )


class _Window:
    """Batches that are not part of a report yet."""

    def __init__(self) -> None:
        self.batches = self.epochs = 0
        self.start = self.data = self.step = 0.0
        self._sums = Counted(0, 0, 0)
        self._counts: list[Counted] = []  # may be on a GPU; reading them waits for it

    def add(self, made: Counted, waited: float, step: float, *, first: bool) -> None:
        """Add a batch, which may be the first of an epoch."""
        self._counts.append(made)
        self.batches += 1
        self.step += step
        self.epochs += first
        if first:
            self.start += waited
        else:
            self.data += waited

    def settle(self) -> None:
        """Sum up the counts; may wait for a GPU."""
        columns = zip(self._sums, *self._counts, strict=True)
        self._sums = Counted(*(sum(map(int, column)) for column in columns))
        self._counts = []

    def report(self) -> Report:
        self.settle()
        times = (self.start, self.data, self.step)
        return Report(self.epochs, self.batches, *self._sums, *times)


class _Csv:
    """A log that appends lines to a file, which it opens for each line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        names = list(_row(Report(), Report()))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+", newline="", encoding="utf-8") as file:
                file.seek(0)
                there = next(csv.reader(file), None)
                if there is None:
                    csv.writer(file).writerow(names)
        except OSError as error:
            raise OutputError(
                "cannot write the log", path=path, found=str(error), fix="choose another file"
            ) from error
        if there not in (None, names):
            raise OutputError(
                "the file is not a monitor's log, or of another version",
                path=path,
                expected="columns " + ", ".join(names),
                found=", ".join(there or []),
                fix="choose another file",
            )

    def write(self, row: Row) -> None:
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(row.values())

    def close(self) -> None: ...


def _row(window: Report, whole: Report) -> Row:
    """Return the logged values of a window, including the step and epoch of the loop."""
    at = {"step": whole.batches, "epoch": max(whole.epochs - 1, 0)}
    return at | {n: v for n, v in window.to_dict().items() if n != "epochs"}


def _advice(loader: object) -> str:
    """Return the command that finds the cause, if the path of the dataset is known."""
    source = getattr(getattr(loader, "dataset", None), "source", None)
    path = getattr(source, "path", source)  # an open dataset has a path
    if not isinstance(path, str | os.PathLike):
        return ""
    return f"; `shardkit doctor {shlex.quote(str(path))}` finds the cause"
