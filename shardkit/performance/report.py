"""`Report`: what a training loop did, and what of it was waiting for data."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardkit.performance.system import Usage, is_watching


@dataclass(frozen=True)
class Report:
    """A training loop's time and batches, in a window or as a whole. Windows can be added.

    `start` is seconds until the first batches of `epochs` came. Apart from those, `data` is seconds
    of waiting for batches, and `step` of using them. `samples` and `tokens` are without padding;
    `places` counts tokens with it, or is 0 where nothing tells them apart.
    """

    epochs: int = 0
    batches: int = 0
    samples: int = 0
    tokens: int = 0
    places: int = 0
    start: float = 0.0
    data: float = 0.0
    step: float = 0.0
    usage: Usage = field(default_factory=Usage)

    def __add__(self, other: Report) -> Report:
        return Report(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.start + self.data + self.step

    @property
    def waiting(self) -> float | None:
        """The share of its time, after the first batches, that the loop waited for data."""
        running = self.data + self.step
        return self.data / running if running else None

    @property
    def rate(self) -> float | None:
        """Samples a second, after the first batches."""
        return _rate(self.samples, self.data + self.step)

    @property
    def stepping(self) -> float | None:
        """Samples a second if the loop never had to wait for data."""
        return _rate(self.samples, self.step)

    @property
    def token_rate(self) -> float | None:
        """Tokens a second, after the first batches."""
        return _rate(self.tokens, self.data + self.step)

    @property
    def padding(self) -> float | None:
        """The share of padding in tokens."""
        return 1 - self.tokens / self.places if self.places else None

    @property
    def first_batch(self) -> float | None:
        """Seconds until the first batch of an epoch came."""
        return self.start / self.epochs if self.epochs else None

    def to_dict(self) -> dict[str, float | None]:
        """All of it as JSON: seconds, shares from 0 to 1, bytes; null where it is not known."""
        return {
            "epochs": self.epochs,
            "batches": self.batches,
            "samples": self.samples or None,
            "tokens": self.tokens or None,
            **{name: getattr(self, name) for name in _FOUND},
            **self.usage.to_dict(),
        }

    def __str__(self) -> str:
        """A table for people."""
        known = {
            name: shown(value) if name in _RATES else value / 1e6 if name in _BYTES else value
            for name, value in self.to_dict().items()
            if value is not None
        }
        lines = [
            f"  {label:<22}" + text.format(**known)
            for label, names, text in _LINES
            if all(name in known for name in names.split())
        ]
        if "cpu" not in known and not is_watching():
            lines.append(f"  {'processors, disk':<22}pip install 'shardkit[monitor]' to see them")
        return "\n".join([f"{self.batches:,} batches in {self.seconds:,.2f} s", *lines])


_RATES = ("rate", "stepping", "token_rate")
_BYTES = ("memory", "disk", "gpu_memory")
_FOUND = ("seconds", "first_batch", "waiting", "rate", "stepping", "token_rate", "padding")

# A line for people: its label, the values that it needs, and how they are written.
_LINES = (
    ("waiting for data", "waiting", "{waiting:.1%} of the time"),
    ("first batch", "first_batch", "{first_batch:,.2f} s after an epoch begins"),
    ("samples", "rate", "{rate}/s"),
    ("without waiting", "rate stepping", "{stepping}/s"),
    ("tokens", "token_rate", "{token_rate}/s"),
    ("padding", "padding", "{padding:.1%} of tokens"),
    ("processors", "cpu cpu_share", "{cpu:.2f} busy, {cpu_share:.0%} of all"),
    ("memory", "memory", "{memory:,.0f} MB"),
    ("disk", "disk", "{disk:,.1f} MB/s"),
    ("GPU", "gpu", "{gpu:.0%} of the time in use"),
    ("GPU memory", "gpu_memory", "{gpu_memory:,.0f} MB"),
)


def shown(rate: float) -> str:
    """A number for people, with three digits at least."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds else None
