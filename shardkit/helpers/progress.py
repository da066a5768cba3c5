"""Progress of a call, for `progress=`: shown as a line of text, or passed to a user's function."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

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
    notes: what is worth knowing about the step, such as which values change.
    """

    doing: str
    done: int
    total: int
    unit: str
    seconds: float
    left: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def amount(self) -> str:
        """How much is done, as text."""
        if self.unit == "bytes":
            return f"{size(self.done)} of {size(self.total)}"
        return f"{self.done:,} of {self.total:,} {self.unit}"

    def __str__(self) -> str:
        rest = round(self.left or 0)
        left = f", {rest // 60:,}:{rest % 60:02} left" * bool(rest)
        return f"{self.doing}: {self.amount}{left}"


class Steps:
    """The monitor of a call whose steps count units; reports progress a few times a second."""

    def __init__(self, tell: Callable[[Progress], object], seconds: float = _SECONDS) -> None:
        self._tell, self._every = tell, seconds
        self._now: Progress | None = None

    def start(
        self, doing: str, total: int, unit: str, done: int = 0, notes: Sequence[str] = ()
    ) -> None:
        """A step begins, whose size is `total`, in a unit such as "bytes" or "samples"."""
        self._began, self._next, self._before = time.monotonic(), self._every, done
        self._now = Progress(doing, done, total, unit, 0.0, notes=tuple(notes))
        self._tell(self._now)

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
        doing, total = "continuing" if done else "converting", sum(map(plan.amount, plan.own))
        self._steps.start(doing, total, plan.unit, done, plan.notes())

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
            yield kind(Steps(_overwrite) if live else Steps(_line, _LINES))
        finally:
            if live:
                print(file=sys.stderr)


def _overwrite(progress: Progress) -> None:
    print(f"\r{str(progress)[:78]:<78}", end="", file=sys.stderr, flush=True)


def _line(progress: Progress) -> None:
    print(progress, file=sys.stderr, flush=True)
