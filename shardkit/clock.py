"""Where the time of a thread goes: it is in one stage at any moment, so that stages add up.

Code says `enter(stage)` where a stage begins. That does nothing in a thread without a clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# Of making a batch: reading stored values; decoding images with their crops and sizes, which one
# call does; other transforms; putting rows and batches together; tensors, and copies to a device.
STAGES = ("read", "decode", "transform", "collate", "copy")
IDLE = "idle"  # of a thread that makes batches: enough are ready, as their user takes his time
DATA = "data"  # of the thread that uses them: it waits for the next one
STEP = "step"  # of that thread: all that it does with a batch


class Spent(NamedTuple):
    """Seconds of a stage: by the wall, and by the processor, which does nothing while it waits."""

    wall: float = 0.0
    busy: float = 0.0

    def more(self, wall: float, busy: float) -> Spent:
        """With some seconds more."""
        return Spent(self.wall + wall, self.busy + busy)


class Clock:
    """The time of one thread by stages. That thread alone calls it, but for `read`."""

    def __init__(self, stage: str, since: float | None = None) -> None:
        """`since` is when it was made ready, by `time.perf_counter`; None: now."""
        self._spent: dict[str, Spent] = {}
        began = time.perf_counter() if since is None else since
        self._now = (stage, began, time.thread_time())
        self._running = True

    def enter(self, stage: str) -> None:
        """The thread is in another stage from now on."""
        if not self._running:
            return
        now = (stage, time.perf_counter(), time.thread_time())
        before, wall, busy = self._now
        spent = self._spent.get(before, Spent())
        self._spent[before] = spent.more(now[1] - wall, now[2] - busy)
        self._now = now

    def stop(self) -> None:
        """What follows is not counted."""
        self.enter(self._now[0])
        self._running = False

    def read(self) -> dict[str, Spent]:
        """The time of each stage so far, that of the present one included; from any thread."""
        spent, (stage, since, _) = dict(self._spent), self._now
        if self._running:
            spent[stage] = spent.get(stage, Spent()).more(time.perf_counter() - since, 0)
        return spent


def total(clocks: Iterable[Mapping[str, Spent]]) -> dict[str, Spent]:
    """What threads spent in the stages of making a batch, and idle."""
    found = dict.fromkeys((*STAGES, IDLE), Spent())
    for spent in clocks:
        for stage in found:
            found[stage] = found[stage].more(*spent.get(stage, Spent()))
    return found


_own = threading.local()


def use(clock: Clock | None) -> None:
    """Have this thread's time counted by a clock, or no more."""
    _own.clock = clock


def enter(stage: str) -> None:
    """This thread is in a stage from now on."""
    clock: Clock | None = getattr(_own, "clock", None)
    if clock is not None:
        clock.enter(stage)
