"""Findings on the data: slow formats, unsuitable shards, sorted classes, padding, large images."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.codecs.header import Header, read_header
from shardkit.codecs.image import NotAnImageError, is_mask_name
from shardkit.dataset.dataset import Dataset
from shardkit.errors import ShardkitError
from shardkit.formats import FORMATS
from shardkit.helpers.order import permutation
from shardkit.performance.findings import LEAST, Finding
from shardkit.preprocess.on_image import box_fields, shape_fields
from shardkit.schema import Image, row_fields
from shardkit.stream.batching import Bucket
from shardkit.stream.collate import PadCollate
from shardkit.stream.order import Numbers
from shardkit.stream.quality import class_shares, first_labels, sorted_by_class, times_alike
from shardkit.stream.reading import extents
from shardkit.stream.stream import Stream
from shardkit.transforms.steps import (
    CenterCrop,
    Decode,
    Geometric,
    RandomResizedCrop,
    Resize,
    Transform,
)

_SLOW = {
    "folder": "samples are separate files, which are opened and closed for each read",
    "parquet": "Parquet decodes a whole row group to read one sample at random",
}
_MANY = 100  # shards
_TINY = 8_000_000  # bytes
_USUAL, _SMALLEST = 256, 8  # MB of a shard
_CHANCE = 1e-6  # probability that a full shuffle starts with samples of a single class
_READ = 20_000  # maximum samples to read if their lengths are not stored
_BUCKETS = 8
_LARGER = 1.25  # minimum ratio of stored to needed size: below it, little can be gained
_LOSSLESS, _SLOWER = ("png", "webp"), 5  # their time to decode, relative to JPEG
_LOOK, _LOOK_BYTES = 48, 64_000_000  # samples, and bytes of their images, that are examined


def convert_command(stream: Stream, *flags: str) -> str:
    """Return the command that converts each of the datasets, in its own format if that is fast."""
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
    """Batches that `pad_collate` pads, if batches of similar lengths would save much.

    `gain` is for a model whose step time is proportional to its tokens, including padding.
    """
    collate, size = stream.options.collate, stream.options.per_rank(world_size)
    if not isinstance(collate, PadCollate) or stream.options.batching is not None:
        return None
    lengths = _lengths(stream, collate)
    if lengths is None or not len(lengths) or size < 2:
        return None
    bucket = Bucket(size, _BUCKETS, collate.field).with_lengths(lengths)
    in_order = lengths[stream.order.draw(0, np.arange(stream.order.samples)).number]
    boundaries = np.asarray(bucket.boundaries)
    buckets = np.searchsorted(boundaries, in_order)
    parts = [in_order[buckets == number] for number in np.unique(buckets)]
    free = replace(collate, length=None)
    now = 1 - lengths.sum() / _padded(in_order, size, collate)
    then = 1 - lengths.sum() / sum(_padded(part, size, free) for part in parts)
    if (gain := (1 - then) / (1 - now)) < LEAST:
        return None
    settings: dict[str, Any] = {"batching": bucket, "collate": free}
    settings |= {"batch_size": None, "global_batch_size": None}
    return Finding(
        "padding",
        f"about {now:.1%} of the tokens are padding, in batches of {size:,} samples, whose lengths "
        f"range from {lengths.min():,} to {lengths.max():,}, with a median of "
        f"{np.median(lengths):,.0f}",
        "batch samples of similar lengths, in buckets up to "
        + ", ".join(f"{boundary:,}" for boundary in boundaries)
        + f" tokens and one above: this leaves about {then:.1%} padding",
        gain=gain,
        settings={**settings, "last": "pad"} if stream.options.last == "short" else settings,
    )


def _lengths(stream: Stream, collate: PadCollate) -> Numbers | None:
    """The lengths of all samples; None if transforms change them, or they would have to be read."""
    rows = row_fields(stream.samples.schema)
    name = collate.field or ("tokens" if "tokens" in rows else next(iter(rows), None))
    if name not in rows or name in stream.transforms.fields:
        return None
    if any(len(one) > _READ and one.length_table() is None for one in stream.datasets):
        return None
    return np.concatenate([one.lengths(name) for one in stream.datasets])


def _padded(lengths: Numbers, size: int, collate: PadCollate) -> int:
    """Return the tokens, with padding, of batches of samples in this order."""
    if collate.length is not None:
        return len(lengths) * collate.length
    starts = np.arange(0, len(lengths), size)
    longest = np.maximum.reduceat(lengths, starts)
    rounded = -(-longest // collate.multiple_of) * collate.multiple_of
    return max(int((rounded * np.diff(starts, append=len(lengths))).sum()), 1)


# --- images --------------------------------------------------------------------------------------


def images(stream: Stream) -> Finding | None:
    """Images that are far larger than the transforms need, or that are slow to decode."""
    if stream.options.cache == "decoded" or not (decoding := _decoding(stream)):
        return None
    headers = list(_headers(stream, list(decoding)))
    if not headers:
        return None
    return _too_large(stream, decoding, headers) or _lossless(stream, headers)


def _decoding(stream: Stream) -> dict[str, list[Transform]]:
    """The transforms that decode, crop and resize each image; {} if a conversion may harm others.

    All images must be decoded, and what moves with them must be masks and boxes.
    """
    schema = stream.samples.schema
    pictures = {name for name, kind in schema.items() if isinstance(kind, Image)}
    stored = {
        name for d in stream.datasets for name, kind in d.schema.items() if isinstance(kind, Image)
    }
    found: dict[str, list[Transform]] = {}
    companions: set[str] = set()
    for chain, steps in (stream.options.transforms or {}).items():
        name, *others = chain if isinstance(chain, tuple) else (chain,)
        every = list(steps) if isinstance(steps, list | tuple) else [steps]
        decoding = list(takewhile(lambda step: isinstance(step, Geometric | Decode), every))
        if decoding and name in pictures:
            found[name] = decoding
            companions |= {*others}
    boxes = box_fields(schema, list(found), None, None, ask=False)
    moved = {name for field, on in boxes.items() for name in (field, *on.others)}
    moved |= shape_fields(schema, list(found)).keys()
    moved |= {name for name in pictures if is_mask_name(name)}  # by `convert`, as by the loader
    harmless = stored == found.keys() | companions & pictures and companions <= moved
    return found if harmless else {}


def _headers(stream: Stream, fields: Sequence[str]) -> Iterator[Header]:
    """Yield the headers of some images, without damaged ones (the loader raises their errors)."""
    spread = np.unique(np.linspace(0, len(stream.samples) - 1, _LOOK).astype(np.int64))
    left = _LOOK_BYTES
    for number in spread[permutation(len(spread), 0)].tolist():
        try:
            sample = stream.samples.read(number)
            images = [sample[name] for name in fields if name in sample]
            yield from [read_header(image) for image in images]
        except (ShardkitError, NotAnImageError):
            continue
        left -= sum(map(len, images))
        if left < 0:
            break


def _too_large(
    stream: Stream, decoding: Mapping[str, Sequence[Transform]], headers: Sequence[Header]
) -> Finding | None:
    kinds = (RandomResizedCrop, Resize, CenterCrop)
    sizing = [next((s for s in steps if isinstance(s, kinds)), None) for steps in decoding.values()]
    sides = [_needed(step) for step in sizing]
    needed = max((side for side in sides if side is not None), default=0)
    sizes = [header.upright for header in headers]
    shorter = statistics.median(map(min, sizes))
    if None in sides or shorter < _LARGER * needed:
        return None
    width, height = (statistics.median(side) for side in zip(*sizes, strict=True))
    share = (needed / shorter) ** 2
    return Finding(
        "decode",
        f"the median size of {len(sizes)} images is {width:,.0f} x {height:,.0f} pixels; "
        f"{', '.join(map(repr, sizing))} needs only {needed:,} on the shorter side",
        f"store them with {needed:,} pixels on the shorter side, {share:.0%} of the pixels to "
        "decode; random crops are then taken from images of that size, so small crops are less "
        "sharp",
        stage="decode",
        share=share,
        command=convert_command(stream, f"--resize {needed}", "--quality 90"),
    )


def _needed(step: Transform | None) -> int | None:
    """Pixels on the shorter side: for random crops slightly more than their size, 256 for 224.

    None for a center crop without a resize, which would show another part of a smaller image.
    """
    if not isinstance(step, RandomResizedCrop | Resize):
        return None
    side = max(step.size) if isinstance(step.size, tuple) else step.size
    return side if isinstance(step, Resize) else -(-side // 7) * 8


def _lossless(stream: Stream, headers: Sequence[Header]) -> Finding | None:
    formats = [header.format for header in headers if header.lossless]
    slow = [format for format in formats if format in _LOSSLESS]
    if 2 * len(slow) < len(headers) or any(header.oddity for header in headers):
        return None
    return Finding(
        "decode",
        f"{len(slow)} of {len(headers)} images are in lossless formats, which are decoded about "
        f"{_SLOWER} times as slowly as JPEG: " + ", ".join(sorted({f.upper() for f in slow})),
        "if they are photos, not drawings, text or masks, store them as JPEG of quality 95, and "
        "compare some by eye: JPEG loses fine details",
        stage="decode",
        share=1 / _SLOWER,
        command=convert_command(stream, "--image-format jpeg", "--quality 95"),
    )
