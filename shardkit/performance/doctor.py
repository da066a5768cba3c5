"""`doctor`: finds what slows loading down with short runs, and what each change would gain."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardkit.dataset.dataset import Dataset
from shardkit.errors import UsageError, printable
from shardkit.helpers.clock import STAGES
from shardkit.helpers.keywords import takes
from shardkit.performance import findings as looks
from shardkit.performance import on_gpu
from shardkit.performance.checks import images, other_format, padding, shards, sorted_order
from shardkit.performance.defaults import open_any, usual_options
from shardkit.performance.findings import LEAST, SHARE, Case, Finding
from shardkit.performance.machine import memory
from shardkit.performance.runs import ROUNDS, Run, compare, first_numbers, in_memory
from shardkit.stream.loader import Loader
from shardkit.stream.options import LoaderKeywords
from shardkit.stream.profile import Times
from shardkit.stream.ranks import default_threads
from shardkit.stream.stream import Stream

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from shardkit.stream.batches import Batch

BATCH = 64
_IN_MEMORY = 256  # samples for a run that reads nothing
_ENOUGH = 1.2  # times the model's rate, above which loading does not limit training


@dataclass(frozen=True)
class Diagnosis:
    """The result of `doctor`: print it, or convert it to JSON values with `to_dict`.

    source: paths of the datasets.
    rate: samples per second that the loader delivers to a loop that does nothing else.
    need: samples per second that the model takes, if known.
    times: where the time of loading is spent.
    findings: possible improvements, the largest gain first.
    """

    source: str
    rate: float
    need: float | None
    times: Times
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> str:
        """One sentence that says whether loading limits training."""
        name = max(STAGES, key=self.times.share)
        most = f"{name} is {self.times.share(name):.0%} of making batches"
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
        """Return everything as JSON values."""
        return {
            "source": self.source,
            "verdict": self.verdict,
            "rate": self.rate,
            "need": self.need,
            "times": self.times.to_dict(),
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def __str__(self) -> str:
        lines = [printable(self.source), str(self.times), "", f"{self.verdict}."]
        lines += [f"{number}. {finding}" for number, finding in enumerate(self.findings, 1)]
        if not self.findings:
            lines.append("No change was found that makes loading 10% faster, or batches better.")
        return "\n".join(lines)


@takes(Loader.__init__)
def doctor(
    source: Any,
    *,
    step: Callable[[Batch], Any] | None = None,
    need: float | None = None,
    ranks: int | None = None,
    seconds: float = 2.0,
    **options: Unpack[LoaderKeywords],
) -> Diagnosis:
    """Find what slows down loading, with short runs that change one setting each.

    source: a Loader as used in training, or a folder of images or anything else that a Loader
        takes, with the `options` of a Loader. If a Loader with `profile=True` was used in training,
        its profile is used. The position of a Loader does not change.
    step: a function that does what the training loop does with a batch. It is called with the same
        batch repeatedly, to measure how many samples per second the model takes. It must wait for a
        GPU itself.
    need: samples per second that the model takes, if known.
    ranks: number of processes that train together. None: the current number.
    seconds: approximate duration of each run; there are three to ten runs.

    Raises UsageError for anything that cannot be measured, and the errors of loading.
    """
    if seconds <= 0 or (need is not None and need <= 0):
        raise UsageError("seconds and need must be over 0", found=f"seconds={seconds}, need={need}")
    loader = _loader(source, {**options})
    loader = loader.with_options(profile=True)
    trained = _trained(source)
    need = need or _step_rate(loader, step, seconds) or (trained.stepping if trained else None)
    case = _case(loader, default_threads(), seconds)
    of_runs = [look(case) for look in looks.OF_RUNS]
    if need is None or case.now.rate < _ENOUGH * need:
        of_runs.append(on_gpu.decoding(case, seconds))
    of_data = checks(loader.dataset.stream, world_size=ranks or loader.dataset.world().size)
    found = [*of_runs, *map(case.rated, of_data)]
    findings = ranked([one for one in found if one is not None], case.now.rate, need)
    # Extensions first, whatever their gain, as they affect all measurements.
    findings = looks.extensions(case) + findings
    return Diagnosis(_name(loader), case.now.rate, need, case.now.times, tuple(findings))


def ranked(findings: Sequence[Finding], rate: float, need: float | None) -> list[Finding]:
    """Findings sorted by their gain for training, which is limited by the model's rate `need`.

    Findings that are not about speed come last.
    """
    most = need or float("inf")
    useful = []
    for finding in findings:
        if finding.rate is None:
            useful.append(finding)
        elif (gain := min(finding.rate, most) / min(rate, most)) >= LEAST:
            useful.append(replace(finding, gain=gain))
    return sorted(useful, key=lambda finding: -finding.gain)


# --- the measurements ----------------------------------------------------------------------------


def _loader(source: Any, options: dict[str, Any]) -> Loader:
    if isinstance(source, Loader):
        return source.with_options(**options)
    if isinstance(source, str | os.PathLike):
        source = open_any(source)
    if isinstance(source, Dataset):
        own = options.get("batching") or options.get("global_batch_size")
        batch = 1 if own else options.pop("batch_size", None) or BATCH
        usual = usual_options(source, batch_size=batch)
        if own:
            usual = {name: usual[name] for name in usual if name not in ("batch_size", "collate")}
        options = {**usual, **options}
    return Loader(source, **options)


def _name(loader: Loader) -> str:
    return ", ".join(str(dataset.place) for dataset in loader.dataset.stream.datasets)


def _trained(source: Any) -> Times | None:
    """Return the profile of a loader that was used in training."""
    if isinstance(source, Loader) and source.measured and source.profile.batches > 1:
        return source.profile
    return None


def _step_rate(loader: Loader, step: Callable[[Batch], Any] | None, seconds: float) -> float | None:
    """Return samples per second of the training loop's step, without loading."""
    if step is None:
        return None
    iteration = iter(loader)
    batch = next(iteration)
    iteration.close()
    step(batch)  # warm-up: the first step may compile, or select algorithms
    taken: list[float] = []
    while sum(taken) < seconds / 2 or len(taken) < ROUNDS:
        began = time.perf_counter()
        step(batch)
        taken.append(time.perf_counter() - began)
    return len(batch["valid"]) / statistics.median(taken)


def _case(loader: Loader, processors: int, seconds: float) -> Case:
    """Run the loader unchanged, without threads, and with numbers of threads that may be better."""
    runs = compare({"now": loader, "alone": loader.with_options(threads=0, prefetch=1)}, seconds)
    case = Case(loader, processors, runs["now"], runs["alone"], memory=memory())
    used = case.now.times.threads
    numbers = {processors} if used else set()  # no threads: the loader is too fast to need any
    others = {}
    if case.waits >= SHARE:
        numbers |= {4 * processors, 16 * processors}
        stream = loader.dataset.stream
        samples = [stream.samples.read(n) for n in first_numbers(stream, _IN_MEMORY)]
        others["in memory"] = in_memory(loader, samples)
    numbers -= {used}
    others |= {str(n): loader.with_options(threads=n) for n in numbers}
    if not others:
        return case
    runs = compare({"now": loader, **others}, seconds)
    tried = {number: runs[str(number)] for number in numbers}
    case = replace(case, now=runs["now"], tried=tried, in_memory=runs.get("in memory"))
    return replace(case, ahead=_ahead(case, seconds))


def _ahead(case: Case, seconds: float) -> Run | None:
    """Run the best number of threads with as many prefetched batches; None if not much faster."""
    best, loader = case.best, case.loader
    if best <= loader.prefetch or case.tried[best].rate < LEAST * case.now.rate:
        return None
    less = loader.with_options(threads=best)
    runs = compare({"less": less, "ahead": less.with_options(prefetch=best)}, seconds)
    return runs["ahead"] if runs["ahead"].rate >= LEAST * runs["less"].rate else None


def checks(stream: Stream, *, world_size: int) -> list[Finding]:
    """Return all findings on the data, for `world_size` ranks."""
    found = [
        images(stream),
        other_format(stream),
        shards(stream, world_size),
        sorted_order(stream),
        padding(stream, world_size),
    ]
    return [finding for finding in found if finding is not None]
