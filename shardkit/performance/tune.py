"""The best settings side by side, and the line of code for the fastest."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from shardkit.errors import printable
from shardkit.performance.findings import Finding
from shardkit.performance.probes import ROUNDS, interleaved, rate_of, run
from shardkit.stream.options import StreamOptions
from shardkit.transforms.calls import name_of

if TYPE_CHECKING:
    from shardkit.stream.loader import Loader

_MOST = 3  # settings that are tried beside the present ones
# What changes how fast batches come, and not what is in them.
_SPEED = ("threads", "workers", "cache", "prefetch")


@dataclass(frozen=True)
class Tuned:
    """Samples a second by line of code; the first line is that of the present settings."""

    rates: Mapping[str, float]

    @property
    def best(self) -> str:
        """The line to use."""
        return max(self.rates, key=lambda line: self.rates[line])

    def to_dict(self) -> dict[str, Any]:
        return {"best": self.best, "rates": dict(self.rates)}

    def __str__(self) -> str:
        lines = ["Tried side by side, samples/s:"]
        lines += [f"  {rate:>10,.0f}  {line}" for line, rate in self.rates.items()]
        return "\n".join(map(printable, [*lines, "Use", f"  {self.best}"]))


def tune(loader: Loader, findings: Sequence[Finding], seconds: float) -> Tuned:
    """Run the loader as it is and with the settings that were found, in turn."""
    chosen: list[Mapping[str, Any]] = [{}]
    for finding in findings:
        if finding.settings and all(name in _SPEED for name in finding.settings):
            chosen.append(finding.settings)
    runs = {
        code_line(loader, settings): _runner(loader, settings, seconds / ROUNDS)
        for settings in chosen[: _MOST + 1]
    }
    rates = interleaved(runs)
    return Tuned({line: statistics.median(some) for line, some in rates.items()})


def _runner(loader: Loader, settings: Mapping[str, Any], seconds: float) -> Callable[[], float]:
    if "workers" in settings:
        from shardkit.performance.workers import dataloader_like

        made = dataloader_like(loader, settings["workers"])
        return lambda: rate_of(made, seconds).rate
    other = loader.with_options(profile=True, **settings)
    if settings.get("cache"):  # what counts is how fast it is once it is full
        for _ in other:
            pass
    return lambda: run(other, seconds).rate


def code_line(loader: Loader, settings: Mapping[str, Any]) -> str:
    """How to make such a loader."""
    given = {
        field.name: value
        for field in fields(StreamOptions)
        if (value := getattr(loader.dataset.options, field.name)) != field.default
    }
    own = {"threads": loader.threads} if loader.threads is not None else {}
    changes = dict(settings)
    workers = changes.pop("workers", None)
    source = _source(loader.dataset.source)
    if workers is None:
        return _call("Loader", source, {**given, **own, **changes})
    dataset = _call("StreamingDataset", source, given)
    return f"DataLoader({dataset}, batch_size=None, num_workers={workers}, persistent_workers=True)"


def _source(source: Any) -> str:
    place = getattr(source, "place", source)  # of an open dataset
    return repr([str(one) for one in place] if isinstance(place, list) else str(place))


def _call(name: str, source: str, options: Mapping[str, Any]) -> str:
    given = [f"{option}={_typed(value)}" for option, value in options.items() if value is not None]
    return f"{name}({', '.join([source, *given])})"


def _typed(value: Any) -> str:
    """A value as it is typed, as far as it has a name."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_typed(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_typed, value)) + "]"
    if type(value).__module__.startswith("shardkit."):
        return f"shardkit.{value!r}"
    return name_of(value).removeprefix("__main__.") if callable(value) else repr(value)
