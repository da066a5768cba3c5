"""What short runs of a loader tell: each function looks for one cause, and says what to change.

All go by a `Case`: the loader as it is, the same with one thread, and whatever else was tried.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardkit.clock import IDLE, Spent
from shardkit.codecs.extension import FIX, MISSING, SLOWER
from shardkit.codecs.image import format_of
from shardkit.performance.findings import LEAST, Finding
from shardkit.performance.probes import Run
from shardkit.transforms.calls import Call, name_of
from shardkit.transforms.chain import Job

if TYPE_CHECKING:
    from shardkit.stream.loader import Loader
    from shardkit.stream.profile import Times

SHARE = 0.25  # of what a batch takes: from here on a stage is looked at
_WAITS = 0.05  # of the training loop's time, for batches
_ENOUGH = 20  # batches, of which the first ones are always waited for
_SCALES = 1.25  # times as fast as one thread: with less, threads do not help


@dataclass(frozen=True)
class Case:
    """What is known of a loader.

    `now` is the loader as it is, `alone` with the calling thread for everything, so that no thread
    waits for another; `tried` has runs with other numbers of threads. `kept` is the
    loader with samples that are in memory, which holds `memory` bytes in all.
    """

    loader: Loader
    processors: int
    now: Run
    alone: Run
    tried: Mapping[int, Run] = field(default_factory=dict)
    kept: Run | None = None
    memory: int = 0

    @property
    def waits(self) -> float:
        """The share of a thread's time in which it waits for stored values."""
        read = self.alone.times.spent.get("read", Spent())
        making = self.alone.times.making
        waiting = read.wall - read.busy - self.alone.delayed
        return max(waiting, 0.0) / making if making else 0.0

    @property
    def scales(self) -> bool:
        """Whether several threads are faster than one; True where there is nothing to tell by."""
        several = {n: run for n, run in self.tried.items() if n > 1}
        several |= {self.now.times.threads: self.now} if self.now.times.threads > 1 else {}
        rates = [run.rate for run in several.values()]
        return not rates or self.processors == 1 or max(rates) > _SCALES * self.alone.rate

    def share(self, stage: str) -> float:
        return self.alone.times.share(stage)

    def without(self, *stages: str) -> float:
        """Samples a second if these stages took no time."""
        return self.now.rate / max(1 - sum(map(self.share, stages)), 1e-9)

    def found(self, finding: Finding) -> Finding | None:
        """A finding with its gain, if that is worth the change."""
        if finding.rate is not None:
            finding = replace(finding, gain=finding.rate / max(self.now.rate, 1e-9))
        return finding if finding.gain >= LEAST else None


def with_threads(loader: Loader, number: int) -> dict[str, int]:
    """Settings for so many threads: each needs a batch to be at."""
    more = {"prefetch": number} if number > loader.prefetch else {}
    return {"threads": number, **more}


def threads(case: Case) -> Finding | None:
    """Too few threads, or more than there are processors."""
    used = case.now.times.threads
    best = max(case.tried, key=lambda number: case.tried[number].rate, default=0)
    if not best or case.waits >= SHARE:
        return None
    many = "one thread makes" if used == 1 else f"{used} threads make"
    return case.found(
        Finding(
            "threads",
            f"{many} {case.now.rate:,.0f} samples/s with {case.processors} processors; "
            f"{best} made {case.tried[best].rate:,.0f}",
            f"use {best} threads",
            rate=case.tried[best].rate,
            settings=with_threads(case.loader, best),
        )
    )


def storage_threads(case: Case) -> Finding | None:
    """Storage that answers late, but many at once."""
    best = max(case.tried, key=lambda number: case.tried[number].rate, default=0)
    if not best or case.waits < SHARE:
        return None
    return case.found(
        Finding(
            "storage",
            f"{_waits(case)}; {best} threads, which wait at the same time, made "
            f"{case.tried[best].rate:,.0f} samples/s",
            f"use {best} threads: those that wait need no processor",
            rate=case.tried[best].rate,
            stage="read",
            settings=with_threads(case.loader, best),
        )
    )


def storage_memory(case: Case) -> Finding | None:
    """Storage that is slow, and a dataset that memory holds."""
    stored = stored_bytes(case.loader)
    cached = case.loader.dataset.options.cache
    if case.kept is None or cached or not 0 < stored <= case.memory // 2:
        return None
    return case.found(
        Finding(
            "storage",
            f"{_waits(case)}; all {stored / 1e6:,.1f} MB fit into memory",
            "keep them there, from the second epoch on",
            rate=case.kept.rate,
            stage="read",
            share=0.0,
            settings={"cache": "memory"},
        )
    )


def _waits(case: Case) -> str:
    return f"{case.waits:.0%} of a thread's time is waiting for the storage"


def stored_bytes(loader: Loader) -> int:
    """Of all shards."""
    datasets = loader.dataset.stream.datasets
    return sum(d.extent(shard)[1] for d in datasets for shard in range(d.shards))


def transform(case: Case) -> Finding | None:
    """Slow functions of a user; those that keep the interpreter need processes."""
    functions = [
        str(stage)
        for chain in case.loader.dataset.stream.transforms.chains
        for stage in chain.stages
        if isinstance(stage, Call)
    ]
    share = case.share("transform")
    if share < SHARE or not functions:
        return None
    cost = 1e3 * case.alone.times.spent["transform"].wall / max(case.alone.times.samples, 1)
    seen = f"{', '.join(functions)} takes {share:.0%} of a thread's time, {cost:.2g} ms a sample"
    if case.scales:
        return case.found(
            Finding(
                "transform",
                seen,
                "make it cheaper, or do it once: `shardkit convert --transform` (without it "
                "loading would be as fast as said)",
                rate=case.without("transform"),
                stage="transform",
                share=0.0,
            )
        )
    return case.found(
        Finding(
            "transform",
            f"{seen}, and threads do not share it, as it keeps the interpreter to itself",
            f"load in {case.processors} processes: shardkit.torch.StreamingDataset in a DataLoader"
            f" with batch_size=None, num_workers={case.processors}; or write it with functions of"
            " NumPy or OpenCV, which let other threads work",
            rate=case.alone.rate * case.processors,
            stage="transform",
            settings={"workers": case.processors},
        )
    )


def collating(case: Case) -> Finding | None:
    """A `collate` of a user, which copies what is in the batch already."""
    collate = case.loader.dataset.stream.own_collate
    share = case.share("collate") + case.share("copy")
    if collate is None or share < SHARE:
        return None
    return case.found(
        Finding(
            "copy",
            f"{name_of(collate)} and what follows it take {share:.0%} of a thread's time",
            "leave collate= out: rows are written where the batch is, without a copy",
            rate=case.without("collate", "copy"),
            stage="collate",
            share=0.0,
            settings={"collate": None},
        )
    )


def normalizing(case: Case) -> Finding | None:
    """Images made floats by the processor, four times as large as they need to be."""
    share = case.share("transform")
    stream = case.loader.dataset.stream
    calls = [s for chain in stream.transforms.chains for s in chain.stages if isinstance(s, Call)]
    if share < SHARE or calls:
        return None
    return case.found(
        Finding(
            "copy",
            f"Normalize takes {share:.0%} of a thread's time and makes batches four times as large",
            "leave it out, and normalize on the GPU: batch.float().sub_(mean).div_(std)",
            rate=case.without("transform"),
            stage="transform",
            share=0.0,
        )
    )


def prefetch(case: Case, trained: Times) -> Finding | None:
    """Steps of unlike length: the loop waits at times, and threads wait for it at others."""
    threads_time = max(trained.threads, 1) * trained.seconds
    idle = trained.spent[IDLE].wall / threads_time if threads_time else 0.0
    if trained.waiting < _WAITS or idle < SHARE or trained.batches < _ENOUGH:
        return None
    more = 4 * case.loader.prefetch
    return case.found(
        Finding(
            "prefetch",
            f"the training loop waits {trained.waiting:.0%} of its time for batches, and threads "
            f"wait {idle:.0%} of theirs for it",
            f"make up to {more} batches ahead, for the steps that take less time than others",
            gain=1 / (1 - trained.waiting),
            settings={"prefetch": more},
        )
    )


def pinned(case: Case) -> Finding | None:
    """A GPU, and batches in memory from which copies to it are slow."""
    torch = sys.modules.get("torch")
    given = case.loader.settings
    if torch is None or given.get("to") != "torch" or not torch.cuda.is_available():
        return None
    if given["pin_memory"] or given["device"] is not None:
        return None
    return Finding(
        "copy",
        "there is a GPU, and batches are made in memory that it cannot read by itself",
        'give device="cuda": batches are copied from page-locked memory while earlier ones are '
        "used; leave batch.to(...) out",
        settings={"device": "cuda"},
    )


def of_samples(case: Case, finding: Finding, before: Run, after: Run) -> Finding | None:
    """A finding of `checks` that was tried: runs of its samples as they are, and as they would be.

    In these nothing is read, so that what reading takes now is added.
    """
    reading = max(1 / case.now.rate - 1 / before.rate, 0.0)
    return case.found(replace(finding, rate=1 / (1 / after.rate + reading)))


def of_data(case: Case, finding: Finding) -> Finding | None:
    """A finding of `checks`, with the rate that follows for this loader."""
    if finding.stage is None:
        return finding if finding.rate is None and finding.gain == 1 else case.found(finding)
    saved = case.share(finding.stage) * (1 - finding.share)
    return case.found(replace(finding, rate=case.now.rate / max(1 - saved, 1e-9)))


def extension(case: Case) -> Finding | None:
    """Crops of JPEGs without the extension that makes them fast; whatever that gives."""
    stream = case.loader.dataset.stream
    cropped = {
        chain.fields[0]
        for chain in stream.transforms.chains
        if any(isinstance(stage, Job) and stage.steps for stage in chain.stages)
    }
    if MISSING is None or not cropped:
        return None
    values = (value for name, value in stream.samples.read(0).items() if name in cropped)
    if not any(isinstance(value, bytes) and format_of(value) == "jpeg" for value in values):
        return None
    saved = case.share("decode") * (1 - 1 / SLOWER)
    rate = case.now.rate / (1 - saved)
    return Finding(
        "extension",
        f"JPEGs are loaded without the extension that crops them about {SLOWER} times as fast: "
        f"{MISSING}",
        FIX,
        rate=rate,
        gain=rate / max(case.now.rate, 1e-9),
        stage="decode",
        share=1 / SLOWER,
    )


SETTINGS = (threads, storage_threads, storage_memory, transform, collating, normalizing, pinned)
