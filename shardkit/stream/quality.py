"""Warns if batches contain few classes, or if a window is too large for the remote data cache."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.dataset.dataset import Dataset
from shardkit.errors import ShardkitError, warn
from shardkit.schema import Int
from shardkit.storage.page_cache import PAGE
from shardkit.stream.reading import Samples
from shardkit.stream.stream import Stream

Floats = npt.NDArray[np.float64]

_PAGES = 1.02  # bytes that pages take in a cache, per byte of data
_LOOK = 64  # samples whose labels are read: the first of an epoch, which are needed anyway


def _needed(dataset: Dataset) -> int:
    """Approximate bytes of the pages that contain the samples."""
    size = sum(dataset.extent(shard)[1] for shard in range(dataset.shards))
    if dataset.indices is None:
        return size
    each = size / max(len(dataset.whole), 1)
    pages = np.unique((dataset.stored(np.arange(len(dataset))) * each) // PAGE)
    return min(len(pages) * PAGE, size)


class SortedByClass(NamedTuple):
    """An epoch whose samples are grouped by class."""

    classes: int  # in the dataset
    seen: float  # approximate number of classes in a window
    window: int  # a sufficient window


def warn_of_sorted(stream: Stream, epoch: int = 0) -> None:
    """Warn if the samples of an epoch are grouped by class in spite of shuffling."""
    found = sorted_by_class(stream, epoch) if stream.options.shuffle else None
    if found is not None:
        warn(
            f"samples are stored sorted by class, and a window of {stream.options.window:,} samples"
            f" contains about {found.seen:,.0f} of {found.classes:,} classes, so batches are poorly"
            f" mixed: use window={found.window}, or convert the dataset again with --shuffle"
        )


def warn_of_small_cache(stream: Stream) -> None:
    """Warn if the cache is too small for a window's pages, so samples are requested one by one.

    The cache must hold up to two windows at a time: the one that is read, and the pages that it
    shares with the next one.
    """
    limit = None if stream.pages is None else stream.pages.cache.limit
    if limit is None or not stream.options.shuffle:
        return
    size = sum(map(_needed, stream.datasets))
    share = min(2 * stream.options.window / max(len(stream.samples), 1), 1)
    enough = -(-int(_PAGES * share * size) // 1_000_000)  # MB
    if limit < share * size:
        warn(
            f"the cache holds {limit / 1e6:,.0f} MB of remote data, but a window of"
            f" {stream.options.window:,} samples needs {enough:,} MB: the rest is requested sample"
            f' by sample, in each epoch; use cache_limit="{enough}MB", or a smaller window'
        )


def sorted_by_class(stream: Stream, epoch: int = 0) -> SortedByClass | None:
    """Check whether an epoch starts with far fewer classes than a full shuffle would; None if not.

    This happens if a dataset is stored sorted by class and its windows have too few blocks. The
    labels of 64 samples are read; none if the manifest does not count classes, if the dataset was
    shuffled during conversion, or if the windows of all parts together cover it.
    """
    window, samples = stream.options.window, stream.order.samples
    if window * stream.options.parts >= samples:
        return None
    shares = class_shares(stream)
    labels = None if shares is None else first_labels(stream, epoch)
    times = None if shares is None or labels is None else times_alike(labels, shares)
    if shares is None or times is None:
        return None
    classes = int(np.count_nonzero(shares))
    # With this window, there are less than 1.5 times as many pairs as in a full shuffle.
    enough = min(1 << math.ceil(math.log2(2 * times * window)), samples)
    return SortedByClass(classes, max(classes / times, 1), enough)


def times_alike(labels: npt.NDArray[Any], shares: Floats) -> float | None:
    """Return the number of pairs of samples with equal labels, relative to a full shuffle.

    None if that is less than 2 or may be due to chance. `shares` are the classes' shares of the
    dataset.
    """
    size = len(labels)
    pairs = size * (size - 1) / 2
    same, triple = (shares**2).sum(), (shares**3).sum()
    _, counts = np.unique(labels, return_counts=True)
    found, expected = (counts * (counts - 1)).sum() / 2, pairs * same
    # Pairs that share a sample are not independent if classes differ in size.
    variance = pairs * (same - same**2) + 2 * pairs * (size - 2) * (triple - same**2)
    if found <= 2 * expected + 6 * math.sqrt(max(variance, 0)) + 3:
        return None
    return float(found / expected)


def class_shares(stream: Stream) -> Floats | None:
    """Return the share of each class in the samples of an epoch; None if unknown."""
    if stream.options.sampling is not None:
        return None  # sampling may change the shares
    sizes = np.array([len(dataset) for dataset in stream.datasets], np.float64)
    weights = sizes if stream.options.weights is None else np.array(stream.options.weights)
    counted = [_label_counts(dataset) for dataset in stream.datasets]
    shares = np.zeros(max(map(len, counted)), np.float64)
    for counts, weight in zip(counted, weights / weights.sum(), strict=True):
        if not sum(counts):
            return None
        shares[: len(counts)] += weight * np.array(counts) / sum(counts)
    return shares


def _label_counts(dataset: Dataset) -> tuple[int, ...]:
    """Samples per class; empty if unknown (as for a view), or if conversion shuffled the data."""
    manifest = dataset.manifest
    if manifest is None or manifest.recipe.get("shuffle") is not None:
        return ()
    labelled = isinstance(dataset.schema.get(dataset.label), Int) and dataset.indices is None
    return (manifest.label_counts or ()) if labelled else ()


def first_labels(stream: Stream, epoch: int = 0) -> npt.NDArray[Any] | None:
    """Return the labels of the first 64 samples of an epoch; None if they cannot be read."""
    numbers = stream.order.draw(epoch, np.arange(min(_LOOK, stream.order.samples))).number
    field = stream.datasets[0].label
    try:
        samples = Samples(stream.datasets, [field])
        labels = [samples.read(number).get(field) for number in numbers.tolist()]
        samples.close()
    except ShardkitError:
        return None  # the loader raises the error, with the sample's location
    return None if None in labels else np.array(labels)
