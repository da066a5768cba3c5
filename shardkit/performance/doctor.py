"""`doctor`: what holds loading back, found by short runs of it, and what each change would give."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardkit.clock import STAGES
from shardkit.dataset import Dataset
from shardkit.errors import UsageError, printable
from shardkit.performance import advice
from shardkit.performance.advice import Case
from shardkit.performance.checks import checks
from shardkit.performance.findings import LEAST, Finding
from shardkit.performance.folder import open_any
from shardkit.performance.kept import first_samples, kept
from shardkit.performance.machine import memory
from shardkit.performance.probes import ROUNDS, compare
from shardkit.performance.recipe import usual_options
from shardkit.performance.tune import Tuned
from shardkit.performance.tune import tune as tune_settings
from shardkit.performance.workers import examine, is_dataloader, loader_like
from shardkit.stream.loader import Loader
from shardkit.stream.profile import Times
from shardkit.stream.world import default_threads

if TYPE_CHECKING:
    from shardkit.stream.batches import Batch

BATCH = 64
_KEPT = 256  # samples, for a run that reads nothing
_ENOUGH = 1.2  # times what the model takes: then loading does not hold it back


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found. Printed, it is for people; `to_dict` is for programs.

    `rate` is what the loader gives, in samples a second, to a loop that does nothing else; `need`
    what the model takes, where that is known. `findings` are sorted by what they give.
    """

    source: str
    rate: float
    need: float | None
    times: Times
    findings: tuple[Finding, ...]
    tuned: Tuned | None = None

    @property
    def verdict(self) -> str:
        """In a sentence, whether loading holds training back."""
        stages = {stage: self.times.share(stage) for stage in STAGES}
        name = max(stages, key=lambda stage: stages[stage])
        most = f"{name} is {stages[name]:.0%} of making batches"
        if self.need is None:
            return f"Loading gives {self.rate:,.0f} samples/s; {most}"
        if self.rate >= _ENOUGH * self.need:
            return (
                f"Loading keeps up: it gives {self.rate:,.0f} samples/s, "
                f"{self.rate / self.need:.1f} times what the model takes ({self.need:,.0f})"
            )
        return (
            f"Loading holds the model back: it gives {self.rate:,.0f} samples/s, and the model "
            f"could take {self.need:,.0f}; {most}"
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON."""
        return {
            "source": self.source,
            "verdict": self.verdict,
            "rate": self.rate,
            "need": self.need,
            "times": self.times.to_dict(),
            "findings": [finding.to_dict() for finding in self.findings],
            "tuned": None if self.tuned is None else self.tuned.to_dict(),
        }

    def __str__(self) -> str:
        lines = [printable(self.source), str(self.times), "", f"{self.verdict}."]
        for number, finding in enumerate(self.findings, 1):
            lines.append(f"{number}. {finding}")
        if not self.findings:
            lines.append("Nothing was found that would make it a tenth faster, or batches better.")
        if self.tuned is not None:
            lines += ["", str(self.tuned)]
        return "\n".join(lines)


def doctor(
    source: Any,
    *,
    step: Callable[[Batch], Any] | None = None,
    need: float | None = None,
    ranks: int | None = None,
    seconds: float = 2.0,
    tune: bool = False,
    **options: Any,
) -> Diagnosis:
    """Find out what holds loading back, by short runs that change one thing each.

    source: a Loader as it is trained with, a torch DataLoader of a StreamingDataset, or anything
    that a Loader takes, or a folder of images, with the Loader's `options`. What was measured of
    a loader with `profile=True` while it was trained with is used; its own place stays.
    step: what the training loop does with a batch. It is called with one batch again and again, so
    that it never waits: what it could take. It must wait for a GPU itself.
    need: that number, samples a second, if it is known.
    ranks: how many processes train together; None: as many as now.
    seconds: how long each run takes, about; there are three to eight.
    tune: try the best settings side by side, and say which line of code to use.

    Raises UsageError for what cannot be measured, and what loading raises.
    """
    if seconds <= 0 or (need is not None and need <= 0):
        raise UsageError("seconds and need must be over 0", found=f"seconds={seconds}, need={need}")
    processors = default_threads()
    loader = loader_like(source) if is_dataloader(source) else _loader(source, options)
    _check_size(loader)
    loader = loader.with_options(profile=True)
    trained = _trained(source)
    need = need or _step_rate(loader, step, seconds) or (trained.stepping if trained else None)
    case = _case(loader, processors, seconds)
    stream = loader.dataset.stream
    ranks = ranks or loader.dataset.world().size
    if is_dataloader(source):
        workers = examine(source, loader, processors, seconds)
        rate, found, processes = workers.now.rate, workers.findings, source.num_workers
    else:
        rate, found, processes = case.now.rate, _of_settings(case, trained), 0
    for one in checks(stream, world_size=ranks, workers=processes):
        if one.samples is not None:
            before, after = (kept(loader, some) for some in one.samples)
            tried = compare({"before": before, "after": after}, seconds)
            finding = advice.of_samples(case, one, tried["before"], tried["after"])
        else:
            finding = advice.of_data(case, one)
        if finding is not None:
            then = None if finding.rate is None else finding.gain * rate
            found.append(replace(finding, rate=then))
    findings = ranked(found, rate, need)
    slow = advice.extension(case)
    if slow is not None:  # it is of everything that is measured: first, however little it gives
        slow = replace(slow, rate=slow.gain * rate)
        findings = (ranked([slow], rate, need) or [replace(slow, rate=None, gain=1.0)]) + findings
    tuned = tune_settings(loader, findings, seconds) if tune else None
    return Diagnosis(_name(loader), rate, need, case.now.times, tuple(findings), tuned)


def _loader(source: Any, options: dict[str, Any]) -> Loader:
    if isinstance(source, Loader):
        return source.with_options(**options)
    if isinstance(source, str | os.PathLike):
        source = open_any(source)
    if isinstance(source, Dataset):
        usual = usual_options(source, batch_size=options.get("batch_size") or _batch(source))
        if options.get("batching") or options.get("global_batch_size"):
            usual = {name: usual[name] for name in usual if name not in ("batch_size", "collate")}
        options = {**usual, **options}
    return Loader(source, **options)


def _batch(dataset: Dataset) -> int:
    return min(BATCH, max(len(dataset), 1))


def _check_size(loader: Loader) -> None:
    """Raise UsageError for a dataset that has no whole batch."""
    samples = len(loader.dataset.stream.samples)
    world = loader.dataset.world()
    if loader.dataset.options.batching is None:
        batch = loader.dataset.options.per_rank(world.size) * world.size
        if samples < batch:
            raise UsageError(
                "the dataset is smaller than one batch, so that no rate can be measured",
                path=_name(loader),
                found=f"{samples:,} samples, {batch:,} for a batch of all ranks together",
                fix="make batches smaller: --batch-size, or batch_size=",
            )


def _trained(source: Any) -> Times | None:
    """What a loader measured of itself while it was trained with."""
    if isinstance(source, Loader) and source.measured and source.profile.batches > 1:
        return source.profile
    return None


def _step_rate(loader: Loader, step: Callable[[Batch], Any] | None, seconds: float) -> float | None:
    """Samples a second of the training loop's step with a batch that is there already."""
    if step is None:
        return None
    iteration = iter(loader)
    batch = next(iteration)
    iteration.close()
    step(batch)  # the first one may compile, or choose algorithms
    taken: list[float] = []
    while sum(taken) < seconds / 2 or len(taken) < ROUNDS:
        began = time.perf_counter()
        step(batch)
        taken.append(time.perf_counter() - began)
    return len(batch["valid"]) / statistics.median(taken)


def _case(loader: Loader, processors: int, seconds: float) -> Case:
    """Run the loader as it is, with one thread, and with the numbers that may be better."""
    runs = compare({"now": loader, "alone": loader.with_options(threads=0, prefetch=1)}, seconds)
    case = Case(loader, processors, runs["now"], runs["alone"], memory=memory() or 0)
    used = case.now.times.threads
    numbers = {processors} if used else set()  # none: what is that quick needs no threads
    others = {}
    if case.waits >= advice.SHARE:
        numbers |= {4 * processors, 16 * processors}
        others["kept"] = kept(loader, first_samples(loader, _KEPT))
    numbers -= {used}
    if not numbers and not others:
        return case
    for number in numbers:
        others[str(number)] = loader.with_options(**advice.with_threads(loader, number))
    runs = compare({"now": loader, **others}, seconds)
    tried = {number: runs[str(number)] for number in numbers}
    return replace(case, now=runs["now"], tried=tried, kept=runs.get("kept"))


def _of_settings(case: Case, trained: Times | None) -> list[Finding]:
    found = [look(case) for look in advice.SETTINGS]
    if trained is not None:
        found.append(advice.prefetch(case, trained))
    return [finding for finding in found if finding is not None]


def ranked(findings: Sequence[Finding], rate: float, need: float | None) -> list[Finding]:
    """By what they give to training: no more than the model takes. Then those not about speed."""
    most = need or float("inf")
    useful = []
    for finding in findings:
        gain = finding.gain
        if finding.rate is not None:
            gain = min(finding.rate, most) / min(rate, most)
        if gain >= LEAST or (finding.rate is None and finding.gain == 1):
            useful.append(replace(finding, gain=gain))
    return sorted(useful, key=lambda finding: -finding.gain)


def _name(loader: Loader) -> str:
    return ", ".join(str(dataset.place) for dataset in loader.dataset.stream.datasets)
