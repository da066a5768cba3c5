"""`Profile`: where the time of an epoch goes, in the loader's threads and in the training loop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardkit.helpers import clock
from shardkit.helpers.clock import DATA, DECODER, IDLE, STAGES, STEP, Clock, Spent
from shardkit.stream.batches import Batch


@dataclass(frozen=True)
class Times:
    """Where the time of loading was spent. Times of several epochs can be added.

    seconds: total time.
    threads: number of threads that made batches. 0: the training loop's own thread made them.
    samples: number of rows of all batches.
    batches: number of batches.
    data: seconds that the training loop waited for batches.
    step: seconds that it used batches.
    spent: time by stage (`clock.STAGES` and `clock.IDLE`), over all threads that made batches.

    With threads, `data + step` is `seconds`, and the wall times in `spent` add up to
    `threads * seconds`. Without threads, `data + step` and the wall times in `spent` together add
    up to `seconds`. If the loop's thread makes the first batches, before threads are started, it is
    a mixture of both. While the loop waits for images that are decoded on a
    GPU, idle threads count as decoding, as do busy ones, besides what they do.
    """

    seconds: float = 0.0
    threads: int = 0
    samples: int = 0
    batches: int = 0
    data: float = 0.0
    step: float = 0.0
    spent: Mapping[str, Spent] = field(default_factory=dict)

    def __add__(self, other: Times) -> Times:
        return Times(
            self.seconds + other.seconds,
            max(self.threads, other.threads),
            self.samples + other.samples,
            self.batches + other.batches,
            self.data + other.data,
            self.step + other.step,
            clock.total([self.spent, other.spent]),
        )

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def making(self) -> float:
        """Seconds of wall time that threads spent making batches."""
        return sum(map(self._wall, STAGES))

    @property
    def waiting(self) -> float:
        """Share of the time that the training loop waits for batches."""
        return 1 - self.step / self.seconds if self.seconds else 0.0

    def _wall(self, stage: str) -> float:
        return self.spent.get(stage, Spent()).wall

    def share(self, stage: str) -> float:
        """Share of a `stage` in the time of making batches."""
        return self._wall(stage) / self.making if self.making else 0.0

    def limit(self, stage: str) -> float | None:
        """Samples per second if all threads did only this `stage`. None: it takes no time."""
        return self._rate_of(self._wall(stage))

    def _rate_of(self, wall: float) -> float | None:
        return max(self.threads, 1) * self.samples / wall if wall else None

    @property
    def loading(self) -> float | None:
        """Samples per second if threads never had to wait for the training loop."""
        return self._rate_of(self.making)

    @property
    def stepping(self) -> float | None:
        """Samples per second if the training loop never had to wait for a batch."""
        return self.samples / self.step if self.step else None

    @property
    def processors(self) -> float:
        """Number of processors that the threads that make batches kept busy."""
        busy = sum(spent.busy for spent in self.spent.values())
        return busy / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values. Rates are in samples/s; the limit of a stage without time is None."""
        stages = {
            stage: {
                "seconds": spent.wall,
                "processor_seconds": spent.busy,
                "share": self.share(stage) if stage in STAGES else None,
                "limit": self.limit(stage) if stage in STAGES else None,
            }
            for stage, spent in self.spent.items()
        }
        plain = ("seconds", "threads", "samples", "batches", "rate", "data", "step", "waiting")
        rates = ("loading", "stepping", "processors")
        return {**{name: getattr(self, name) for name in (*plain, *rates)}, "stages": stages}

    def __str__(self) -> str:
        """Return a table as text."""
        by = f"{self.threads} threads" if self.threads > 1 else "1 thread"
        by = by if self.threads else "the training loop's own thread"
        lines = [
            f"{self.samples:,} samples in {self.seconds:.2f} s: {self.rate:,.0f}/s, made by {by}",
            f"  {'the training loop':<24}{'of its time':>12}{'alone, samples/s':>20}",
            f"  {'waiting for batches':<24}{self.waiting:>12.1%}{_rate(self.loading):>20}",
            f"  {'its own steps':<24}{_part(self.step, self.seconds):>12}"
            f"{_rate(self.stepping):>20}",
            f"  {'making batches':<24}{'of its time':>12}{'alone, samples/s':>20}",
        ]
        whole = self.making + self._wall(IDLE)
        for stage, spent in self.spent.items():
            if spent.wall:
                limit = _rate(self.limit(stage)) if stage in STAGES else ""
                name = "waiting for the loop" if stage == IDLE else stage
                lines.append(f"  {name:<24}{_part(spent.wall, whole):>12}{limit:>20}".rstrip())
        return "\n".join(lines)


def _part(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.0f}"


class Profile:
    """The clocks of one iteration of a loader."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._loop = Clock(DATA, self._began)
        self._workers: list[Clock] = []
        self._counts: Counter[str] = Counter()

    def work(self) -> Clock:
        """Return a clock for the calling thread, which makes batches."""
        made = Clock(IDLE, self._began)  # the time to start the thread counts as idle
        self._workers.append(made)
        clock.use(made)
        return made

    def ask(self) -> None:
        """Record that the training loop asks for a batch."""
        self._loop.enter(DATA)
        clock.use(self._loop)

    def give(self, batch: Batch) -> None:
        """Record that the training loop gets a batch."""
        self._counts["samples"] += len(batch["valid"])  # summing `valid` would wait for a GPU
        self._counts["batches"] += 1
        self._loop.enter(STEP)
        clock.use(None)

    def end(self) -> None:
        """Record that the training loop gets no more batches. May be called by any thread."""
        self._loop.stop()

    @property
    def times(self) -> Times:
        """Where time was spent so far."""
        loop = self._loop.read()
        data, step, decoder = (loop.pop(name, Spent()).wall for name in (DATA, STEP, DECODER))
        inline = sum(one.wall for one in loop.values())
        threads, made = len(self._workers), clock.total(worker.read() for worker in self._workers)
        # Threads that are idle meanwhile do not wait for the loop.
        late = min(decoder * threads, made[IDLE].wall)
        decoding = {"decode": Spent(decoder * max(threads, 1)), IDLE: Spent(-late)}
        return Times(
            data + step + decoder + inline,
            threads,
            self._counts["samples"],
            self._counts["batches"],
            data + decoder * bool(threads),
            step,
            clock.total([loop, decoding, made]),
        )
