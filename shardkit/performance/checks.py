"""Findings on the data: slow formats, unsuitable shards, sorted classes, excessive padding."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.dataset.dataset import Dataset
from shardkit.formats import FORMATS
from shardkit.performance.findings import LEAST, Finding
from shardkit.schema import Array, row_fields
from shardkit.stream.batching import Batching, Bucket, Dynamic, Pack
from shardkit.stream.collate import PadCollate
from shardkit.stream.order import Numbers
from shardkit.stream.quality import class_shares, first_labels, sorted_by_class, times_alike
from shardkit.stream.reading import extents
from shardkit.stream.schedule import START, Planned, Schedule, Step
from shardkit.stream.stream import Stream
from shardkit.stream.world import World

_SLOW = {
    "folder": "samples are separate files, which are opened and closed for each read",
    "parquet": "Parquet decodes a whole row group to read one sample at random",
}
_MANY = 100  # shards
_TINY = 8_000_000  # bytes
_USUAL, _SMALLEST = 256, 8  # MB of a shard
_CHANCE = 1e-6  # probability that a full shuffle starts with samples of a single class

_PLANNED = 100_000  # samples of an epoch whose padding is computed
_READ = 20_000  # maximum samples to read if their lengths are not stored
_BUCKETS = (4, 8, 16)
_FILLED = 2  # minimum batches per bucket, as the last one is usually smaller
_NEAR = 0.01  # minimum share of tokens saved for which more buckets are worthwhile


def convert_command(stream: Stream, *flags: str) -> str:
    """The command that converts each of the datasets, in its own format if that is fast."""
    commands = []
    for dataset in (part for one in stream.datasets for part in one.parts):
        path = shlex.quote(str(_source(dataset)))
        to = "wds" if dataset.format in _SLOW else dataset.format
        commands.append(" ".join(["shardkit convert", path, "--to", to, *flags]))
    return " && ".join(commands)


def _source(dataset: Dataset) -> Path:
    """The path to convert. For a single shard without a manifest, the file, not its folder."""
    alone = dataset.manifest is None and dataset.shards == 1
    is_file = alone and dataset.format not in ("folder", "hf")
    return dataset.shard_path(0) if is_file else dataset.place


# --- the format ----------------------------------------------------------------------------------


def other_format(stream: Stream) -> Finding | None:
    """Separate files or Parquet, whose reading may be most of the time of loading."""
    slow = [dataset.format for dataset in stream.datasets if dataset.format in _SLOW]
    if not slow or stream.options.cache is not None:
        return None
    return Finding(
        "format",
        _SLOW[slow[0]],
        "store them in TAR shards, with all values unchanged (the rate is that of loading if "
        "reading took no time)",
        stage="read",
        share=0.0,
        command=convert_command(stream),
    )


# --- the shards ----------------------------------------------------------------------------------


def shards(stream: Stream, world_size: int) -> Finding | None:
    """Shards that are many and tiny, or fewer than the ranks.

    Formats that usually have a single file are skipped: their readers split samples, not shards.
    """
    datasets = [
        d for d in stream.datasets if d.format in FORMATS and not FORMATS[d.format].one_shard
    ]
    if not datasets:
        return None
    counted = np.concatenate([extents(dataset) for dataset in datasets])
    stored = np.array([d.extent(n)[1] for d in datasets for n in range(d.shards)])[counted > 0]
    if len(stored) > _MANY and stored.mean() < _TINY:
        seen = (
            f"{len(stored):,} shards have {stored.mean() / 1e6:.2g} MB on average, and shuffled "
            "reading reopens a file for almost every sample, as only few can stay open"
        )
        return _reshard(stream, seen, _USUAL, f"make shards of {_USUAL} MB")
    megabytes = min(int(stored.sum() // world_size // 1_000_000), _USUAL)
    if len(stored) >= world_size or megabytes < _SMALLEST:
        return None
    seen = (
        f"there are {len(stored):,} shards for {world_size:,} ranks, so that several ranks read "
        "each file, whatever `parts` is"
    )
    do = f"make shards of {megabytes} MB, so that there are at least as many as ranks"
    return _reshard(stream, seen, megabytes, do)


def _reshard(stream: Stream, seen: str, megabytes: int, do: str) -> Finding:
    return Finding(
        "shards", seen, do, command=convert_command(stream, f"--shard-size {megabytes}MB")
    )


# --- the order -----------------------------------------------------------------------------------


def sorted_order(stream: Stream) -> Finding | None:
    """A dataset that is sorted by class, and not shuffled, or shuffled in too small a window."""
    if not stream.options.shuffle:
        return _unshuffled(stream)
    found = sorted_by_class(stream)
    if found is None:
        return None
    return Finding(
        "order",
        f"samples are stored sorted by class, and a window of {stream.options.window:,} samples "
        f"contains about {found.seen:,.0f} of {found.classes:,} classes",
        f"shuffle in a window of {found.window:,}, or store the samples shuffled",
        command=convert_command(stream, "--shuffle"),
        settings={"window": found.window},
    )


def _unshuffled(stream: Stream) -> Finding | None:
    shares = class_shares(stream)
    labels = None if shares is None else first_labels(stream)
    if shares is None or labels is None:
        return None
    seen = len(np.unique(labels))
    alone = seen == 1 and shares.max() ** len(labels) < _CHANCE
    if not alone and times_alike(labels, shares) is None:
        return None
    settings: dict[str, Any] = {"shuffle": True}
    shuffled = sorted_by_class(Stream(stream.datasets, replace(stream.options, shuffle=True)))
    if shuffled is not None:
        settings["window"] = shuffled.window
    return Finding(
        "order",
        f"samples are read in stored order, sorted by class: the first {len(labels):,} belong to "
        f"{seen:,} of {np.count_nonzero(shares):,} classes",
        "shuffle them, unless this loader is not for training",
        command=convert_command(stream, "--shuffle"),
        settings=settings,
    )


# --- padding -------------------------------------------------------------------------------------


def padding(stream: Stream, world_size: int) -> Finding | None:
    """Batches padded to their longest sample, if batches of similar lengths would save much.

    Applies to batches of a fixed size made by `pad_collate`, and to `Bucket` with boundaries that
    do not fit the data. Shares of padding are those of rank 0. `gain` is for a model whose step
    time is proportional to its tokens, including padding.
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
        f"{now:.1%} of the tokens are padding, in batches {kind}, whose lengths range from "
        f"{padded.by.min():,} to {padded.by.max():,}, with a median of {np.median(padded.by):,.0f}",
        "batch samples of similar lengths, in buckets up to "
        + ", ".join(f"{boundary:,}" for boundary in boundaries)
        + f" tokens and one above: this leaves {shares[chosen]:.1%} padding"
        + padded.others(shares[chosen]),
        gain=gain,
        settings=padded.settings(buckets[chosen]),
    )


@dataclass(frozen=True)
class _Padded:
    """Batches that are padded, and the lengths of all samples."""

    stream: Stream
    world_size: int
    collate: PadCollate
    field: str | None  # the field whose lengths the batching uses, if it was given
    size: int  # samples per batch
    by: Numbers  # the lengths that the batching uses
    real: Numbers  # the lengths of the field whose tokens are counted
    longest: Numbers  # the longest of the arrays of a sample that are padded together
    alone: bool  # whether there is only one field, as Pack requires

    def settings(self, bucket: Bucket) -> dict[str, Any]:
        """Settings of a loader with these batches; None unsets other options of the batch size."""
        options = self.stream.options
        settings: dict[str, Any] = {"batching": bucket}
        if options.collate is not None:
            settings["collate"] = replace(self.collate, length=None)
        if options.last == "short":  # only for batches of a fixed size
            settings["last"] = "pad"
        sizes = ("batch_size", "global_batch_size")
        return settings | {name: None for name in sizes if getattr(options, name) is not None}

    def others(self, share: float) -> str:
        """Other ways to make batches that have a smaller share of padding."""
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
        """The share of padding with another batching, and minimal padding of each batch."""
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
        """The share of padding in the first batches of a schedule and a collate."""

        def tokens(step: Step) -> tuple[int, int]:
            length = collate.length
            if length is None:
                longest = int(self.longest[step.number].max())
                length = -(-longest // collate.multiple_of) * collate.multiple_of
            return int(self.real[step.number].sum()), len(step.number) * length

        return _share(schedule, tokens)


def _packed(step: Step, seq_len: int) -> tuple[int, int]:
    assert step.segments is not None
    _, _, start, stop = step.segments.T
    return int((stop - start).sum()), len(step.valid) * seq_len


def _share(schedule: Schedule, tokens: Callable[[Step], tuple[int, int]]) -> float:
    """The share of padding. `tokens` returns the tokens of a step, without and with padding."""
    at, samples, real, padded = START, 0, 0, 0
    while samples < _PLANNED and (step := schedule.step(0, at)) is not None:
        counts = tokens(step)
        real, padded = real + counts[0], padded + counts[1]
        at, samples = step.after, samples + len(step.number)
    return 1 - real / padded if padded else 0.0


def _padded(stream: Stream, world_size: int) -> _Padded | None:
    """The padded batches of a stream; None if nothing is padded, or if lengths are unknown."""
    options, schema = stream.options, stream.samples.schema
    batching, collate = options.batching, options.collate
    if not isinstance(batching, Bucket | None) or not options.batched:
        return None
    if batching is not None and collate is None:
        collate = PadCollate(field=batching.field)
    known = stream.transforms.fields <= stream.transforms.outputs().keys()
    rows = row_fields(schema)
    if not isinstance(collate, PadCollate) or not known or not rows:
        return None
    if batching is not None and batching.field not in (None, *rows):  # a field of audio
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
    """Whether lengths can be found without reading many samples."""
    kind = dataset.schema[field]
    if isinstance(kind, Array) and kind.shape is not None and kind.shape[0] is not None:
        return True
    table = dataset.length_table()
    return len(dataset) <= _READ or (table is not None and field in (table.dtype.names or ()))
