"""Measures the time of a thread by stage. A thread is in one stage at a time, so they add up.

Code calls `enter(stage)` where a stage begins. In a thread without a clock, this does nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# Stages of making a batch: reading stored values; decoding, cropping and resizing images, in one
# call; other transforms; assembling rows and batches; tensors, and copies to a device.
STAGES = ("read", "decode", "transform", "collate", "copy")
IDLE = "idle"  # a loading thread: enough batches are ready
DATA = "data"  # the training thread: it waits for the next batch
DECODER = "decoder"  # the training thread: it waits for images decoded on a GPU
STEP = "step"  # the training thread: everything it does with a batch


class Spent(NamedTuple):
    """Seconds spent in a stage: wall time and CPU time."""

    wall: float = 0.0
    busy: float = 0.0

    def more(self, wall: float, busy: float) -> Spent:
        """Return the sum with these seconds."""
        return Spent(self.wall + wall, self.busy + busy)


class Clock:
    """The time of one thread by stage. Only `read` may be called by other threads."""

    def __init__(self, stage: str, since: float | None = None) -> None:
        """`since` is the start in `time.perf_counter` seconds; None: now."""
        self._spent: dict[str, Spent] = {}
        began = time.perf_counter() if since is None else since
        self._now = (stage, began, time.thread_time())
        self._running = True

    def enter(self, stage: str) -> None:
        """Switch to another stage."""
        if not self._running:
            return
        now = (stage, time.perf_counter(), time.thread_time())
        before, wall, busy = self._now
        spent = self._spent.get(before, Spent())
        self._spent[before] = spent.more(now[1] - wall, now[2] - busy)
        self._now = now

    def stop(self) -> None:
        """Stop counting."""
        self.enter(self._now[0])
        self._running = False

    def read(self) -> dict[str, Spent]:
        """Return the time of each stage so far, including the current one. For any thread."""
        spent, (stage, since, _) = dict(self._spent), self._now
        if self._running:
            spent[stage] = spent.get(stage, Spent()).more(time.perf_counter() - since, 0)
        return spent


def total(clocks: Iterable[Mapping[str, Spent]]) -> dict[str, Spent]:
    """Return the sum over threads, for the stages of making a batch and for idle time."""
    found = dict.fromkeys((*STAGES, IDLE), Spent())
    for spent in clocks:
        for stage in found:
            found[stage] = found[stage].more(*spent.get(stage, Spent()))
    return found


_own = threading.local()


def use(clock: Clock | None) -> None:
    """Measure this thread's time with a clock; None: stop measuring."""
    _own.clock = clock


def enter(stage: str) -> None:
    """Switch this thread's clock, if it has one, to a stage."""
    clock: Clock | None = getattr(_own, "clock", None)
    if clock is not None:
        clock.enter(stage)
