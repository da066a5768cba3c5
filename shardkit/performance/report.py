"""`Report`: what a training loop did, and how long it waited for data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from shardkit.performance.machine import Usage, has_psutil


@dataclass(frozen=True)
class Report:
    """Time and batches of a training loop, in a window or in total. Reports can be added.

    epochs: number of epochs that began.
    batches: number of batches.
    samples: number of samples, without padding.
    tokens: number of tokens, without padding.
    padded_tokens: number of tokens including padding, or 0 if padding cannot be identified.
    start: seconds of waiting for the first batch of each epoch.
    data: seconds of waiting for all other batches.
    step: seconds of using batches.
    usage: processors, memory, disk and GPU in use.
    decode: "gpu" if a Loader decodes images there.
    """

    epochs: int = 0
    batches: int = 0
    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    start: float = 0.0
    data: float = 0.0
    step: float = 0.0
    usage: Usage = field(default_factory=Usage)
    decode: str | None = None

    def __add__(self, other: Report) -> Report:
        names = vars(self).keys() - {"decode"}
        added = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Report(**added, decode=other.decode or self.decode)

    @property
    def seconds(self) -> float:
        """Total seconds."""
        return self.start + self.data + self.step

    @property
    def waiting(self) -> float | None:
        """Share of the time that the loop waited for data, without the first batches of epochs."""
        running = self.data + self.step
        return self.data / running if running else None

    @property
    def rate(self) -> float | None:
        """Samples per second, without waiting for the first batches of epochs."""
        return _rate(self.samples, self.data + self.step)

    @property
    def stepping(self) -> float | None:
        """Samples per second if the loop never had to wait for data."""
        return _rate(self.samples, self.step)

    @property
    def token_rate(self) -> float | None:
        """Tokens per second, without waiting for the first batches of epochs."""
        return _rate(self.tokens, self.data + self.step)

    @property
    def padding(self) -> float | None:
        """Share of padding in the tokens."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else None

    @property
    def first_batch(self) -> float | None:
        """Mean seconds until the first batch of an epoch."""
        return self.start / self.epochs if self.epochs else None

    def to_dict(self) -> dict[str, float | None]:
        """Return JSON values: seconds, shares from 0 to 1, and bytes; None if unknown."""
        values = {name: getattr(self, name) for name in _VALUES}
        counts = {name: values[name] or None for name in ("samples", "tokens")}
        return values | counts | self.usage.to_dict()

    def __str__(self) -> str:
        """Return a table as text."""
        known = {
            name: shown(value) if name in _RATES else value / 1e6 if name in _BYTES else value
            for name, value in self.to_dict().items()
            if value is not None
        }
        lines = [f"{self.batches:,} batches in {self.seconds:,.2f} s"]
        for label, names, text in _LINES:
            if known.keys() >= set(names.split()):
                lines.append(f"  {label:<22}" + text.format(**known))
        if self.decode == "gpu":
            lines.append(f"  {'images':<22}decoded on the GPU")
        if "cpu" not in known and not has_psutil():
            lines.append(f"  {'processors, disk':<22}pip install 'shardkit[monitor]' to see them")
        return "\n".join(lines)


_VALUES = (
    *("epochs", "batches", "samples", "tokens", "seconds", "first_batch", "waiting"),
    *("rate", "stepping", "token_rate", "padding"),
)
_RATES = ("rate", "stepping", "token_rate")
_BYTES = ("memory", "disk", "gpu_memory")

# Lines of the table: label, required values, format.
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
    """Return a rate as text, with at least three digits."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds else None


# --- the contents of a batch ---------------------------------------------------------------------


class Counted(NamedTuple):
    """Numbers of samples, of tokens without padding, and of tokens with padding; 0 if unknown.

    Numbers, or arrays of one element, which may be on a GPU and are then slow to read.
    """

    samples: Any
    tokens: Any
    padded_tokens: Any


def counted(batch: object) -> Counted:
    """Count samples and tokens of a batch of any kind, if possible, without waiting for a GPU."""
    if not isinstance(batch, Mapping):
        return Counted(_samples(batch), 0, 0)
    valid = batch.get("valid")
    samples = valid.sum() if _is_array(valid, 1, "bool") else _samples(batch)
    return Counted(samples, *_tokens(batch))


def _samples(batch: object) -> int:
    """Return the number of rows of the first array, or else the length of the first list."""
    columns: Iterable[Any] = [batch]
    if isinstance(batch, Mapping):
        columns = batch.values()
    elif isinstance(batch, list | tuple):
        if batch and all(isinstance(sample, Mapping) for sample in batch):
            return len(batch)  # uncollated samples
        columns = batch
    columns = list(columns)
    arrays = (_samples(c) if isinstance(c, Mapping) else _rows(c) for c in columns)
    lists = (len(column) for column in columns if isinstance(column, list | tuple))
    return next((rows for rows in (*arrays, *lists) if rows), 0)


def _rows(value: Any) -> int:
    shape = getattr(value, "shape", ())
    return int(shape[0]) if shape else 0


def _tokens(batch: Mapping[str, Any]) -> tuple[Any, int]:
    """Return numbers of tokens without and with padding."""
    ids = batch.get("tokens", batch.get("input_ids"))
    mask, segments, lengths = (batch.get(n) for n in ("attention_mask", "segment_ids", "lengths"))
    rows = [array for array in (mask, segments, ids) if _is_array(array, 2, "bool", "int")]
    if rows and _is_array(lengths, 1, "int"):
        return lengths.sum(), math.prod(rows[0].shape)
    if rows and rows[0] is mask:
        return mask.sum(), math.prod(mask.shape)
    arrays = ids if isinstance(ids, list | tuple) else [ids]
    return sum(math.prod(array.shape) for array in arrays if hasattr(array, "shape")), 0


def _is_array(value: Any, dimensions: int, *kinds: str) -> TypeGuard[Any]:
    """Return whether `value` is an array (of any library) with a dtype of one of these kinds."""
    dtype = str(getattr(value, "dtype", ""))
    return len(getattr(value, "shape", ())) == dimensions and any(kind in dtype for kind in kinds)
