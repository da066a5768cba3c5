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

    Tokens = Callable[[Step], tuple[int, int]]

_PLANNED = 100_000  # samples of an epoch that are looked at
_READ = 20_000  # samples that are read at most where their lengths are not kept
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
    found = [padded.bucket(number) for number in padded.numbers]
    shares = [padded.share_with(bucket) for bucket in found]
    chosen = next(n for n, share in enumerate(shares) if share <= min(shares) + _NEAR)
    gain = (1 - shares[chosen]) / (1 - now)
    if gain < LEAST:
        return None
    return Finding(
        "padding",
        seen=f"{now:.1%} of the tokens are padding, in {padded.words}, whose lengths go from "
        f"{padded.by.min():,} to {padded.by.max():,}, {np.median(padded.by):,.0f} in the middle",
        do=f"batch samples of like lengths, in buckets up to {_listed(found[chosen])} tokens and "
        f"one above: that leaves {shares[chosen]:.1%} padding{padded.others(shares[chosen])}",
        gain=gain,
        settings=padded.settings(found[chosen]),
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

    @property
    def words(self) -> str:
        batching = self.stream.options.batching
        return f"batches of {self.size:,} samples" if batching is None else f"batches by {batching}"

    @property
    def numbers(self) -> list[int]:
        """How many buckets could be."""
        batches = len(self.by) // (self.size * self.world_size)
        return [number for number in _BUCKETS if _FILLED * number <= batches] or [2]

    def bucket(self, number: int) -> Bucket:
        return Bucket(self.size, number, self.field).with_lengths(self.by)

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
            ways[f"Pack(seq_len={longest}, batch_size={rows})"] = Pack(
                longest, rows, field=self.field
            )
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


def _listed(bucket: Bucket) -> str:
    assert isinstance(bucket.boundaries, tuple)
    return ", ".join(f"{boundary:,}" for boundary in bucket.boundaries)


def _packed(step: Step, seq_len: int) -> tuple[int, int]:
    assert step.pieces is not None
    _, _, start, stop = step.pieces.T
    return int((stop - start).sum()), len(step.valid) * seq_len


def _share(schedule: Schedule, tokens: Tokens) -> float:
    place, samples, real, every = START, 0, 0, 0
    while samples < _PLANNED and (step := schedule.step(0, place)) is not None:
        counts = tokens(step)
        real, every = real + counts[0], every + counts[1]
        place, samples = step.after, samples + len(step.number)
    return 1 - real / every if every else 0.0


def _padded(stream: Stream, world_size: int) -> _Padded | None:
    """What is padded; None where nothing is, or where stored lengths do not tell how far."""
    options, schema = stream.options, stream.samples.schema
    batching, collate = options.batching, options.collate
    if not isinstance(batching, Bucket | None) or not options.batched:
        return None
    if batching is not None and collate is None:
        collate = PadCollate(field=batching.field)
    known = stream.transforms.fields <= stream.transforms.outputs().keys()
    rows = {
        name: kind
        for name, kind in schema.items()
        if isinstance(kind, Array) and (kind.shape is None or len(kind.shape) == 1)
    }
    if not isinstance(collate, PadCollate) or not known or not rows:
        return None
    if not all(_is_kept(d, name) for d in stream.datasets for name in rows):
        return None
    lengths = {name: np.concatenate([d.lengths(name) for d in stream.datasets]) for name in rows}
    usual = "tokens" if "tokens" in rows else next(iter(rows))
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
        alone=list(schema) == list(rows) and len(rows) == 1,
    )


def _is_kept(dataset: Dataset, field: str) -> bool:
    """Whether lengths are known without reading many samples."""
    kind = dataset.schema[field]
    if isinstance(kind, Array) and kind.shape is not None and kind.shape[0] is not None:
        return True
    kept = dataset.kept_lengths()
    return len(dataset) <= _READ or (kept is not None and field in (kept.dtype.names or ()))
