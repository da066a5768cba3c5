"""Findings on how samples are stored: a slow format, shards that fit no cluster, sorted classes."""

from __future__ import annotations

import shlex
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.conversion.create import DatasetWriter
from shardkit.dataset import Dataset, open_dataset
from shardkit.errors import ShardkitError
from shardkit.formats import FORMATS
from shardkit.performance.findings import Finding
from shardkit.sample import Sample
from shardkit.stream.quality import class_shares, first_labels, sorted_by_class, times_alike
from shardkit.stream.reading import Samples, sizes
from shardkit.stream.stream import Stream

if TYPE_CHECKING:
    import numpy.typing as npt

_SLOW = {
    "folder": "samples are loose files, each of which is opened and closed for every read",
    "parquet": "Parquet decodes a whole row group for a sample that is read at random",
}
_TRIED = 256  # samples that are stored in another format
_TRIED_BYTES = 64_000_000  # of them at most
_TRIED_SECONDS = 2.0  # for one pass over them
_ROUNDS = 5
_WORTH = 0.7  # of the time: what is above is not worth a conversion
_MANY = 100  # shards
_TINY = 8_000_000  # bytes
_UNLIKE = 4  # times as large as the median
_SHARD_SIZES = (256, 128, 64, 32, 16, 8)  # MB
_CHANCE = 1e-6  # that a full shuffle begins with samples of one class alone


def convert_command(stream: Stream, *flags: str) -> str:
    """What to type to convert each of the datasets, in its own format where that is fast."""
    commands = []
    for dataset in stream.datasets:
        path = shlex.quote(str(_source(dataset)))
        to = "wds" if dataset.format in _SLOW else dataset.format
        commands.append(" ".join(["shardkit convert", path, "--to", to, *flags]))
    return " && ".join(commands)


def _source(dataset: Dataset) -> Path:
    """Where a dataset is; a single foreign shard itself, as anything may be beside it."""
    alone = dataset.manifest is None and dataset.shards == 1
    is_file = alone and dataset.format not in ("folder", "hf")
    return dataset.shard_path(0) if is_file else dataset.place


# --- the format ----------------------------------------------------------------------------------


def other_format(stream: Stream) -> Finding | None:
    """Loose files or Parquet, where TAR shards are read much faster: tried with 256 samples.

    They are the ones that an epoch begins with, as the order decides how much a format is at a
    disadvantage. Both are read from the page cache.
    """
    slow = [dataset.format for dataset in stream.datasets if dataset.format in _SLOW]
    if not slow or stream.options.cache is not None:
        return None
    numbers = stream.order.draw(0, np.arange(min(_TRIED, stream.order.samples))).number.tolist()
    with tempfile.TemporaryDirectory() as folder:
        try:
            numbers = numbers[: _write(stream.samples, numbers, Path(folder) / "tried")]
        except ShardkitError:
            return None  # whoever makes the batches will tell
        tried = Samples([open_dataset(Path(folder) / "tried")])
        rounds = [
            (_seconds(stream.samples, numbers), _seconds(tried, range(len(numbers))))
            for _ in range(_ROUNDS)
        ]
        tried.close()
    now, then = (statistics.median(column) for column in zip(*rounds, strict=True))
    if then >= _WORTH * now:
        return None
    return Finding(
        "format",
        f"{_SLOW[slow[0]]}: {len(numbers):,} samples take {1e6 * now / len(numbers):,.0f} us "
        f"each, and {1e6 * then / len(numbers):,.0f} us from TAR shards",
        "store them in TAR shards, with all values as they are",
        stage="read",
        share=then / now,
        command=convert_command(stream),
    )


def _write(samples: Samples, numbers: list[int], out: Path) -> int:
    """Store samples in TAR; returns how many were stored before there was enough of them."""
    began, stored, count = time.perf_counter(), 0, 0
    with DatasetWriter(out, "wds", samples.schema) as writer:
        for count, number in enumerate(numbers, 1):
            sample = samples.read(number)
            writer.write({**sample, "__key__": f"{count:06d}"})
            stored += _bytes(sample)
            if stored > _TRIED_BYTES or time.perf_counter() - began > _TRIED_SECONDS:
                break
    return count


def _bytes(sample: Sample) -> int:
    return sum(getattr(v, "nbytes", len(v) if isinstance(v, bytes) else 0) for v in sample.values())


def _seconds(samples: Samples, numbers: Sequence[int]) -> float:
    began = time.perf_counter()
    for number in numbers:
        samples.read(number)
    return time.perf_counter() - began


# --- the shards ----------------------------------------------------------------------------------


def shards(stream: Stream, world_size: int, workers: int) -> Finding | None:
    """Shards that are many and tiny, too few for those who read them, or of very unlike sizes.

    Formats that people expect as one file are left alone: their readers split samples.
    """
    datasets = [
        d for d in stream.datasets if d.format in FORMATS and not FORMATS[d.format].one_shard
    ]
    if not datasets:
        return None
    counted = np.concatenate([sizes(dataset) for dataset in datasets])
    stored = np.array([d.extent(n)[1] for d in datasets for n in range(d.shards)])[counted > 0]
    readers = world_size * max(workers, 1)
    if len(stored) > _MANY and stored.mean() < _TINY:
        seen = (
            f"{len(stored):,} shards have {stored.mean() / 1e6:.2g} MB on average, and shuffled "
            "reading opens a file anew for almost every sample, as few can stay open"
        )
        return _reshard(stream, seen, 256, "make shards of 256 MB")
    return _few(stream, stored, readers, world_size) or _unlike(stream, stored, readers)


def _few(
    stream: Stream, stored: npt.NDArray[np.int64], readers: int, world_size: int
) -> Finding | None:
    """Where no size of shards gives everyone one, the dataset is too small for it to matter."""
    fits = [size for size in _SHARD_SIZES if stored.sum() >= readers * size * 1_000_000]
    if len(stored) >= readers or not fits:
        return None
    ours = "; here samples are split, not shards, and none of them is idle"
    if len(stored) < world_size:
        ours += ", but several ranks read each file, whatever `parts` is"
    seen = (
        f"there are {len(stored):,} shards for {readers:,} readers ({world_size:,} ranks x "
        f"{readers // world_size:,} workers): loaders that deal out whole shards, as webdataset "
        f"does, leave {readers - len(stored):,} of them with nothing{ours}"
    )
    do = f"make shards of {fits[0]} MB, which are at least as many as the readers"
    return _reshard(stream, seen, fits[0], do)


def _unlike(stream: Stream, stored: npt.NDArray[np.int64], readers: int) -> Finding | None:
    median = float(np.median(stored))
    if readers == 1 or len(stored) < 3 or stored.max() <= _UNLIKE * max(median, _TINY):
        return None
    seen = (
        f"the largest shard has {stored.max() / 1e6:,.0f} MB and the median one "
        f"{median / 1e6:,.0f}: with loaders that deal out whole shards, as webdataset does, all "
        "wait for who gets the largest; here samples are split, not shards"
    )
    return _reshard(stream, seen, 256, "make shards of like sizes")


def _reshard(stream: Stream, seen: str, megabytes: int, do: str) -> Finding:
    return Finding(
        "shards", seen, do, command=convert_command(stream, f"--shard-size {megabytes}MB")
    )


# --- the order -----------------------------------------------------------------------------------


def sorted_order(stream: Stream) -> Finding | None:
    """A dataset that lies sorted by class, in a window that is too small, or not shuffled."""
    if not stream.options.shuffle:
        return _unshuffled(stream)
    found = sorted_by_class(stream)
    if found is None:
        return None
    return Finding(
        "order",
        f"samples lie sorted by class, and a window of {stream.options.window:,} of them sees "
        f"about {found.seen:,.0f} of {found.classes:,} classes",
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
        f"samples come as they are stored, sorted by class: the first {len(labels):,} are of "
        f"{seen:,} of {np.count_nonzero(shares):,} classes",
        "shuffle them, unless this is not for training",
        command=convert_command(stream, "--shuffle"),
        settings=settings,
    )
