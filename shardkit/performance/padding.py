"""The finding that much of the batches is padding, and which batches would have less.

Nothing is read but lengths: batches are planned from these just as a loader does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.dataset import Dataset
from shardkit.performance.findings import LEAST, Finding
from shardkit.schema import Array
from shardkit.stream.batching import Batching, Bucket, Dynamic, Pack
from shardkit.stream.collate import PadCollate
from shardkit.stream.schedule import START, Planned, Schedule, Step
from shardkit.stream.stream import Stream
from shardkit.stream.world import World

if TYPE_CHECKING:
    from shardkit.stream.order import Numbers

_PLANNED = 100_000  # samples of an epoch that are looked at
_READ = 20_000  # samples that are read at most where no file has their lengths
_BUCKETS = (4, 8, 16)
_FILLED = 2  # batches of a bucket at least, as its last one is mostly smaller
_NEAR = 0.01  # of the tokens: more buckets that save less are not worth it


def padding(stream: Stream, world_size: int) -> Finding | None:
    """Batches padded to their longest sample, where batches of like lengths save much.

    Looks at batches of a fixed size that `pad_collate` makes, and at `Bucket` with boundaries that
    do not fit the data. Shares of padding are those of rank 0. `gain` is for a model whose step
    costs as much as its tokens, padding included.
    """
    padded = _padded(stream, world_size)
    if padded is None:
        return None
    now = padded.share(stream.schedule(World(0, world_size)), padded.collate)
    batches = len(padded.by) // (padded.size * world_size)
    buckets = [
        Bucket(padded.size, number, padded.field).with_lengths(padded.by)
        for number in [n for n in _BUCKETS if _FILLED * n <= batches] or [2]
    ]
    shares = [padded.share_with(bucket) for bucket in buckets]
    chosen = next(n for n, share in enumerate(shares) if share <= min(shares) + _NEAR)
    gain = (1 - shares[chosen]) / (1 - now)
    if gain < LEAST:
        return None
    batching, boundaries = stream.options.batching, buckets[chosen].boundaries
    assert isinstance(boundaries, tuple)
    kind = f"by {batching}" if batching else f"of {padded.size:,} samples"
    return Finding(
        "padding",
        f"{now:.1%} of the tokens are padding, in batches {kind}, whose lengths go from "
        f"{padded.by.min():,} to {padded.by.max():,}, {np.median(padded.by):,.0f} in the middle",
        "batch samples of like lengths, in buckets up to "
        + ", ".join(f"{boundary:,}" for boundary in boundaries)
        + f" tokens and one above: that leaves {shares[chosen]:.1%} padding"
        + padded.others(shares[chosen]),
        gain=gain,
        settings=padded.settings(buckets[chosen]),
    )


@dataclass(frozen=True)
class _Padded:
    """Batches that are padded, and the lengths of all samples that decide how much."""

    stream: Stream
    world_size: int
    collate: PadCollate
    field: str | None  # whose lengths a batching goes by, as far as it was said
    size: int  # samples of a batch
    by: Numbers  # those lengths
    real: Numbers  # those of the field whose tokens are counted
    longest: Numbers  # the longest of the arrays that are padded together
    alone: bool  # whether there is one field and nothing else, as Pack needs it

    def settings(self, bucket: Bucket) -> dict[str, Any]:
        """Of a loader with such batches; None is for what says their size otherwise."""
        options = self.stream.options
        settings: dict[str, Any] = {"batching": bucket}
        if options.collate is not None:
            settings["collate"] = replace(self.collate, length=None)
        if options.last == "short":  # it is for batches of a fixed size
            settings["last"] = "pad"
        sizes = ("batch_size", "global_batch_size")
        return settings | {name: None for name in sizes if getattr(options, name) is not None}

    def others(self, share: float) -> str:
        """Other ways to make batches, with less padding than this share."""
        mean, longest = float(self.by.mean()), max(int(self.by.max()), 1)
        step = self.collate.multiple_of
        most = math.ceil(max(self.size * mean, longest) / step) * step
        ways: dict[str, Batching] = {
            f"Dynamic(max_tokens={most})": Dynamic(most, multiple_of=step, field=self.field)
        }
        if self.alone:
            rows = max(round(self.size * mean / longest), 1)
            name = f"Pack(seq_len={longest}, batch_size={rows})"
            ways[name] = Pack(longest, rows, field=self.field)
        shares = {name: self.share_with(way) for name, way in ways.items()}
        words = [f"{name} {less:.1%}" for name, less in shares.items() if less < share]
        if not words:
            return ""
        return f"; with other numbers of samples in a batch, {' and '.join(words)}"

    def share_with(self, batching: Batching) -> float:
        """The share of padding with other batches, padded no further than they must be."""
        options = self.stream.options
        last = "pad" if options.last == "short" else options.last
        schedule = Planned(
            self.stream.order, batching.with_lengths(self.by), self.by, 0, self.world_size, last,
            options.seed, options.window,
        )  # fmt: skip
        if isinstance(batching, Pack):
            return _share(schedule, lambda step: _packed(step, batching.seq_len))
        return self.share(schedule, replace(self.collate, length=None))

    def share(self, schedule: Schedule, collate: PadCollate) -> float:
        """The share of padding in the first batches that a schedule and a collate make."""

        def tokens(step: Step) -> tuple[int, int]:
            length = collate.length
            if length is None:
                longest = int(self.longest[step.number].max())
                length = -(-longest // collate.multiple_of) * collate.multiple_of
            return int(self.real[step.number].sum()), len(step.number) * length

        return _share(schedule, tokens)


def _packed(step: Step, seq_len: int) -> tuple[int, int]:
    assert step.pieces is not None
    _, _, start, stop = step.pieces.T
    return int((stop - start).sum()), len(step.valid) * seq_len


def _share(schedule: Schedule, tokens: Callable[[Step], tuple[int, int]]) -> float:
    """The share of padding, by the tokens of each step without and with it."""
    place, samples, real, padded = START, 0, 0, 0
    while samples < _PLANNED and (step := schedule.step(0, place)) is not None:
        counts = tokens(step)
        real, padded = real + counts[0], padded + counts[1]
        place, samples = step.after, samples + len(step.number)
    return 1 - real / padded if padded else 0.0


def _padded(stream: Stream, world_size: int) -> _Padded | None:
    """What is padded; None where nothing is, or where stored lengths do not tell how far."""
    options, schema = stream.options, stream.samples.schema
    batching, collate = options.batching, options.collate
    if not isinstance(batching, Bucket | None) or not options.batched:
        return None
    if batching is not None and collate is None:
        collate = PadCollate(field=batching.field)
    known = stream.transforms.fields <= stream.transforms.outputs().keys()
    rows = [
        name
        for name, kind in schema.items()
        if isinstance(kind, Array) and (kind.shape is None or len(kind.shape) == 1)
    ]
    if not isinstance(collate, PadCollate) or not known or not rows:
        return None
    if not all(_has_lengths(d, name) for d in stream.datasets for name in rows):
        return None
    lengths = {name: np.concatenate([d.lengths(name) for d in stream.datasets]) for name in rows}
    usual = "tokens" if "tokens" in rows else rows[0]
    field = collate.field if batching is None else batching.field
    return _Padded(
        stream,
        world_size,
        collate,
        field,
        options.per_rank(world_size) if batching is None else batching.batch_size,
        lengths[field or usual],
        lengths[collate.field or usual],
        np.max(list(lengths.values()), axis=0),
        alone=list(schema) == rows and len(rows) == 1,
    )


def _has_lengths(dataset: Dataset, field: str) -> bool:
    """Whether lengths are known without reading many samples."""
    kind = dataset.schema[field]
    if isinstance(kind, Array) and kind.shape is not None and kind.shape[0] is not None:
        return True
    table = dataset.kept_lengths()
    return len(dataset) <= _READ or (table is not None and field in (table.dtype.names or ()))
