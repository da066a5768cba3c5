"""Progress of a call, for `progress=`: shown as a line of text, or passed to a user's function."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shardkit.errors import UsageError
from shardkit.helpers.words import size

_SECONDS, _LINES = 0.1, 5.0  # interval between calls, and between lines of a log


@dataclass(frozen=True)
class Progress:
    """The progress of one step of a call.

    doing: what the step does, in a word or two: "converting".
    done: number of units that are done, up to `total`.
    total: total number of units.
    unit: what is counted: "bytes", "samples", "runs".
    seconds: time since the step began.
    left: estimated remaining time in seconds. None: nothing is done yet.
    """

    doing: str
    done: int
    total: int
    unit: str
    seconds: float
    left: float | None = None

    def __str__(self) -> str:
        amount = f"{self.done:,} of {self.total:,} {self.unit}"
        if self.unit == "bytes":
            amount = f"{size(self.done)} of {size(self.total)}"
        rest = round(self.left or 0)
        left = f", {rest // 60:,}:{rest % 60:02} left" * bool(rest)
        return f"{self.doing}: {amount}{left}"


class Monitor(Protocol):
    """An object that shows progress. It is called in the caller's thread."""

    def start(self, doing: str, total: int, unit: str) -> None:
        """A step begins.

        doing: what the step does.
        total: its size in `unit`, such as "bytes" or "samples".
        """

    def advance(self, count: int) -> None:
        """`count` more units are done."""


class Steps:
    """The monitor of a call whose steps count units; reports progress a few times a second."""

    def __init__(self, tell: Callable[[Progress], object], seconds: float = _SECONDS) -> None:
        self._tell, self._every = tell, seconds
        self._now: Progress | None = None

    def start(self, doing: str, total: int, unit: str, done: int = 0) -> None:
        """A step begins."""
        self._began, self._next, self._before = time.monotonic(), 0.0, done
        self._now = Progress(doing, done, total, unit, 0.0)
        self.advance(0)

    def advance(self, count: int) -> None:
        """`count` more units are done."""
        now = self._now
        if now is None:
            return
        seconds, done = time.monotonic() - self._began, now.done + count
        new = done - self._before
        left = seconds * max(now.total - done, 0) / new if new > 0 else None
        self._now = now = replace(now, done=done, seconds=seconds, left=left)
        if seconds >= self._next or (count and done >= now.total):
            self._next = seconds + self._every
            self._tell(now)


class OfConversion:
    """The monitor of a conversion: passes its progress on to `Steps`."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def start(self, plan: Any, done: int) -> None:
        self._bytes = plan.unit == "bytes"
        self._steps.start("converting", sum(map(plan.amount, plan.own)), plan.unit, done)

    def advance(self, progress: Any) -> None:
        self._steps.advance(progress.bytes if self._bytes else progress.samples)

    def copied(self, more: int, total: int) -> None:
        if not more:
            self._steps.start("publishing", total, "bytes")
        self._steps.advance(more)


@contextmanager
def watched(progress: Any, kind: Callable[[Steps], Any] = lambda steps: steps) -> Iterator[Any]:
    """A context with the monitor that `progress` requests, made by `kind`; None if it is False.

    True: show a line on stderr, which is overwritten in a terminal or a notebook. A function is
    called with a `Progress`; if it raises, the call ends. A monitor is used as it is. Raises
    UsageError for other values.
    """
    if progress is None or progress is False or hasattr(progress, "advance"):
        yield progress or None
    elif progress is not True:
        if not callable(progress):
            raise UsageError("progress must be True or a function", found=f"{progress!r:.200}")
        yield kind(Steps(progress))
    else:
        live = sys.stderr.isatty() or "ipykernel" in sys.modules
        try:
            yield kind(Steps(_overwrite, _SECONDS) if live else Steps(_line, _LINES))
        finally:
            if live:
                print(file=sys.stderr)


def _overwrite(progress: Progress) -> None:
    print(f"\r{str(progress)[:78]:<78}", end="", file=sys.stderr, flush=True)


def _line(progress: Progress) -> None:
    print(progress, file=sys.stderr, flush=True)
