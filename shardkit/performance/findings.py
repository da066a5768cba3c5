"""`Finding`: what slows loading down, and what to do about it; and the findings from short runs.

Each function looks for one cause in a `Case`: runs of an unchanged loader, and with one change.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from shardkit.codecs.extension import FIX, MISSING, SLOWER
from shardkit.codecs.image import format_of
from shardkit.errors import printable
from shardkit.helpers.clock import Spent
from shardkit.performance.defaults import stored_bytes
from shardkit.performance.runs import Run
from shardkit.storage import byte_source
from shardkit.storage.remote.path import RemotePath
from shardkit.stream.loader import Loader
from shardkit.transforms.calls import Call, name_of
from shardkit.transforms.chain import Job

LEAST = 1.1  # minimum speedup: a smaller one is not worth a change, and may be noise
SHARE = 0.25  # minimum share of a batch's time: smaller stages are ignored
_SCALES = 1.25  # minimum speedup over one thread, below which threads do not help


@dataclass(frozen=True)
class Finding:
    """What slows down loading: what was measured, what to do about it, and the gain.

    `cause` is one word: "extension", "storage", "decode", "transform", "copy", "threads",
    "padding", "format", "shards" or "order". `stage` is the stage of loading
    (one of `STAGES` in `shardkit.helpers.clock`) that becomes faster; it then takes the `share` of
    its present time, from 0 to 1. If `stage` is None, only `rate` says what to expect.
    """

    cause: str
    seen: str  # what was measured, as a sentence without a full stop
    do: str  # what to do about it, likewise
    rate: float | None = None  # samples/s after the change; None: not about the speed of loading
    gain: float = 1.0  # speedup; for padding, in tokens/s
    stage: str | None = None
    share: float = 1.0
    command: str | None = None  # a shell command
    # Options of a Loader; "workers" is an option of a DataLoader.
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        """Return text: what was measured, what to do, and the gain."""
        lines = [f"{self.cause}: {self.seen}.", f"   Do: {self.do}."]
        if self.command is not None:
            lines.append(f"   Type: {self.command}")
        if self.rate is not None:
            lines.append(f"   Gives: {self.rate:,.0f} samples/s, {self.gain:.2f} times as many.")
        elif self.gain > 1:
            lines.append(f"   Gives: {self.gain:.2f} times the speed.")
        return "\n".join(map(printable, lines))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, with settings as Python code."""
        settings = {name: repr(value) for name, value in self.settings.items()}
        return {**vars(self), "settings": settings}


@dataclass(frozen=True)
class Case:
    """The runs of a loader.

    `now` is the unchanged loader, `alone` is without threads, so none waits for another. `tried`
    has runs by number of threads; `ahead` is the best of these with as many prefetched batches, if
    that is faster. `in_memory` is the loader with samples in memory; `memory` is the
    size of the machine's memory, in bytes; None if psutil is not installed.
    """

    loader: Loader
    processors: int
    now: Run
    alone: Run
    tried: Mapping[int, Run] = field(default_factory=dict)
    in_memory: Run | None = None
    ahead: Run | None = None
    memory: int | None = None

    @property
    def best(self) -> int:
        """The number of threads whose run was fastest; 0 if none was tried."""
        return max(self.tried, key=lambda number: self.tried[number].rate, default=0)

    @property
    def waits(self) -> float:
        """The share of a thread's time that it waits for storage."""
        read, making = self.alone.times.spent.get("read", Spent()), self.alone.times.making
        return max(read.wall - read.busy - self.alone.delayed, 0.0) / making if making else 0.0

    @property
    def scales(self) -> bool:
        """Whether several threads are faster than one; True if no run tells."""
        several = {**self.tried, self.now.times.threads: self.now}
        rates = [run.rate for number, run in several.items() if number > 1]
        return not rates or self.processors == 1 or max(rates) > _SCALES * self.alone.rate

    def share(self, *stages: str) -> float:
        """Return the share of these stages in the time to make a batch."""
        return sum(map(self.alone.times.share, stages))

    @property
    def cropped(self) -> set[str]:
        """The fields of images that are cropped or resized."""
        return {
            chain.fields[0]
            for chain in self.loader.dataset.stream.transforms.chains
            if any(isinstance(stage, Job) and stage.steps for stage in chain.stages)
        }

    def calls(self) -> list[str]:
        """Return the user-defined functions among the transforms."""
        chains = self.loader.dataset.stream.transforms.chains
        return [str(stage) for chain in chains for stage in chain.stages if isinstance(stage, Call)]

    def finding(self, cause: str, seen: str, do: str, **more: Any) -> Finding | None:
        """Return a finding with its rate and gain, if it is worth the change."""
        return self.rated(Finding(cause, seen, do, **more))

    def rated(self, finding: Finding) -> Finding | None:
        """Return the finding with its rate and gain for this loader; None for a gain below `LEAST`.

        A missing rate is computed from the stage and the remaining share of its time.
        """
        if finding.rate is None and finding.stage is None and finding.gain == 1:
            return finding  # not about speed
        if finding.rate is None and finding.stage is not None:
            saved = self.share(finding.stage) * (1 - finding.share)
            finding = replace(finding, rate=self.now.rate / max(1 - saved, 1e-9))
        if finding.rate is not None:
            finding = replace(finding, gain=finding.rate / max(self.now.rate, 1e-9))
        return finding if finding.gain >= LEAST else None


def threads(case: Case) -> Finding | None:
    """Too few threads for the processors or for slow storage; or too many."""
    used, best = case.now.times.threads, case.best
    if not best:
        return None
    rate, settings, do = case.tried[best].rate, {"threads": best}, f"use {best} threads"
    if case.ahead is not None:
        rate, settings["prefetch"] = case.ahead.rate, best
        do += f" and prefetch={best}, which was faster than without"
    gains: dict[str, Any] = {"rate": rate, "settings": settings}
    if case.waits >= SHARE:
        return case.finding(
            "storage",
            f"{_waits(case)}; {best} threads, which wait concurrently, made {rate:,.0f} samples/s",
            f"{do}: waiting threads need no processor",
            stage="read",
            **gains,
        )
    many = "one thread makes" if used == 1 else f"{used} threads make"
    seen = f"{many} {case.now.rate:,.0f} samples/s with {case.processors} processors"
    return case.finding("threads", f"{seen}; {best} made {rate:,.0f}", do, **gains)


def storage(case: Case) -> Finding | None:
    """Slow storage, if the dataset fits into memory."""
    stored = sum(map(stored_bytes, case.loader.dataset.stream.datasets))
    cached = case.loader.dataset.options.cache
    too_large = case.memory is not None and stored > case.memory // 2
    if case.in_memory is None or cached or not stored or too_large:
        return None
    fits = "" if case.memory else " if it fits"
    return case.finding(
        "storage",
        f"{_waits(case)}; the dataset has {stored / 1e6:,.1f} MB",
        f"cache it in memory{fits}, which helps from the second epoch on",
        rate=case.in_memory.rate,
        stage="read",
        share=0.0,
        settings={"cache": "memory"},
    )


def _waits(case: Case) -> str:
    return f"a thread waits for storage {case.waits:.0%} of its time"


def transform(case: Case) -> Finding | None:
    """Slow user-defined functions, or else `Normalize`, which converts images to floats.

    Functions that hold the GIL need processes.
    """
    share, functions, processors = case.share("transform"), case.calls(), case.processors
    if share < SHARE:
        return None
    if not functions:
        return case.finding(
            "copy",
            f"Normalize takes {share:.0%} of a thread's time and makes batches four times as large",
            "remove it, and normalize on the GPU: batch.float().sub_(mean).div_(std)",
            stage="transform",
            share=0.0,
        )
    cost = 1e3 * case.alone.times.spent["transform"].wall / max(case.alone.times.samples, 1)
    seen = f"{', '.join(functions)} takes {share:.0%} of a thread's time, {cost:.2g} ms per sample"
    gains: dict[str, Any] = {"share": 0.0}
    do = (
        "make it faster, or apply it once with `shardkit convert --transform` (the rate is that of "
        "loading without it)"
    )
    if not case.scales:
        seen += ", and threads cannot run it in parallel, as it holds the GIL"
        do = (
            f"load in {processors} processes: shardkit.torch.StreamingDataset in a DataLoader with "
            f"batch_size=None, num_workers={processors}; or write it with functions of NumPy or "
            "OpenCV, which release the GIL"
        )
        gains = {"rate": case.alone.rate * processors, "settings": {"workers": processors}}
    return case.finding("transform", seen, do, stage="transform", **gains)


def collating(case: Case) -> Finding | None:
    """Return a user-defined `collate`, which copies data that is already in the batch."""
    collate, share = case.loader.dataset.stream.own_collate, case.share("collate", "copy")
    if collate is None or share < SHARE:
        return None
    return case.finding(
        "copy",
        f"{name_of(collate)} and the steps after it take {share:.0%} of a thread's time",
        "leave collate= out: rows are then written directly into the batch, without a copy",
        rate=case.now.rate / max(1 - share, 1e-9),
        stage="collate",
        share=0.0,
        settings={"collate": None},
    )


def pinned(case: Case) -> Finding | None:
    """Return a GPU to which batches are copied from pageable memory, which is slow."""
    torch, gains = sys.modules.get("torch"), case.loader.settings
    if torch is None or "pin_memory" not in gains or not torch.cuda.is_available():
        return None
    if gains["pin_memory"] or gains["device"] is not None:
        return None
    return Finding(
        "copy",
        "there is a GPU, but batches are made in pageable memory, which is slow to copy",
        'use device="cuda": batches are copied from page-locked memory while earlier ones are '
        "used; remove batch.to(...)",
        settings={"device": "cuda"},
    )


OF_RUNS = (threads, storage, transform, collating, pinned)


def extensions(case: Case) -> list[Finding]:
    """The extensions that were not built, but would be used, whatever the gain."""
    return [finding for finding in (_crop(case), _reads(case)) if finding is not None]


def _reads(case: Case) -> Finding | None:
    """Reading of local files without the extension that reads many values in a call."""
    local = any(
        not isinstance(one.place, RemotePath) for one in case.loader.dataset.stream.datasets
    )
    if byte_source.MISSING is None or not local:
        return None
    seen = "values are read one by one, without the extension that reads many in one call: "
    return Finding("extension", seen + byte_source.MISSING, FIX)


def _crop(case: Case) -> Finding | None:
    """Crops of JPEGs without the extension that speeds them up."""
    stream, cropped = case.loader.dataset.stream, case.cropped
    if MISSING is None or not cropped:
        return None
    values = (value for name, value in stream.samples.read(0).items() if name in cropped)
    if not any(isinstance(value, bytes) and format_of(value) == "jpeg" for value in values):
        return None
    gain = 1 / (1 - case.share("decode") * (1 - 1 / SLOWER))
    return Finding(
        "extension",
        f"JPEGs are loaded without the extension that crops them about {SLOWER} times as fast: "
        f"{MISSING}",
        FIX,
        rate=case.now.rate * gain,
        gain=gain,
        stage="decode",
        share=1 / SLOWER,
    )
