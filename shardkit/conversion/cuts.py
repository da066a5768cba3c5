"""Cuts a split into tasks, by sizes alone, independently of the number of workers.

If values are copied, a task makes about one shard. If images are decoded or text is tokenized,
tasks are cut by the amount of work: each is at most a small fraction of the remaining work, so that
workers do not wait long for the last task.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardkit.codecs.image import NotAnImageError
from shardkit.conversion.stats import Stats
from shardkit.errors import SampleError
from shardkit.formats.base import Format, Joins
from shardkit.helpers.mapped import RunningSum, Sizes, mapped, running_sum
from shardkit.preprocess.items import Filtered, Item, sample_of
from shardkit.preprocess.pipeline import Steps
from shardkit.sample import renamed
from shardkit.schema import Image
from shardkit.sources.base import Source, Stream, some_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.conversion.splits import Split
    from shardkit.metadata.recipe import Recipe

# Version of how tasks are cut, and of the files that they leave. A run with another version cannot
# be resumed, and its blocks of tokens cannot be reproduced.
TASKS = "2"
_TASK_BYTES = 256 * 10**6  # of a task whose shards are bounded by samples, or not at all
_FRACTION = 64  # if tasks are cut by work, each is at most 1/64 of the remaining work
_LEAST_WORK = 2 << 20  # bytes to decode or tokenize, which take about a fifth of a second
_LEAST_BLOCKS = 128  # blocks of tokens per task, as the last block of a task may not be full
_TOKEN_BYTES = 4  # of text per token, approximately
# If values are copied, one process keeps the disk busy, and joining shards copies them twice. So a
# single shard has several tasks only if it is large, to make the run resumable.
_COPIED_BYTES = 4000 * 10**6
_MARGIN = 1.1  # so that estimated sizes are not too small


class Cut(NamedTuple):
    """A task, as a slice of the order of its split."""

    start: int
    stop: int
    joined: bool  # whether its shards are to be joined with those of its neighbours


def cuts(split: Split, sizes: Sizes, format: Format, recipe: Recipe) -> list[Cut]:
    """The tasks of a split, whose samples, or ranges of a stream, have `sizes` bytes each."""
    if _joins(format, recipe.shard_size) and _encodes(split, format):
        found = list(_by_work(split, sizes, format, recipe))
    else:
        found = [
            Cut(start, stop, recipe.one_shard)
            for start, stop in _by_bytes(split, _bounds(split, sizes, format, recipe), recipe)
        ]
    return found if len(found) > 1 else [cut._replace(joined=False) for cut in found]


def _by_work(split: Split, work: Sizes, format: Format, recipe: Recipe) -> Iterator[Cut]:
    most = _TASK_BYTES
    if recipe.shard_size is not None:
        stored = int(_bounds(split, work, format, recipe).sum())
        most = max(recipe.shard_size * int(work.sum()) // max(stored, 1), 1)
    shard = recipe.shard_samples if _is_exact(split) else None
    for cut in _work_cuts(work, most, _least_work(split), shard):
        yield cut._replace(joined=cut.joined or recipe.one_shard)


def _by_bytes(split: Split, bounds: Sizes, recipe: Recipe) -> Iterator[tuple[int, int]]:
    if recipe.shard_samples is not None and _is_exact(split):
        return _whole_shards(bounds, recipe.shard_samples)
    most = _COPIED_BYTES if recipe.one_shard else recipe.shard_size or _TASK_BYTES
    return _even_cuts(bounds, most)


def _is_exact(split: Split) -> bool:
    """Return whether it is known while planning how many samples a shard will have."""
    return split.samples is not None and split.steps.text is None


def _joins(format: Format, max_bytes: int | None) -> bool:
    """Return whether shards of `max_bytes` in total can be joined into one that is not larger."""
    return isinstance(format, Joins) and (max_bytes is None or not format.join_may_grow)


def _encodes(split: Split, format: Format) -> bool:
    """Return whether values are decoded or encoded rather than copied, judging by a few samples."""
    images = {n: kind for n, kind in split.source.schema.items() if isinstance(kind, Image)}
    steps = split.steps.decode or split.steps.text is not None
    if steps or isinstance(split.source, Stream) or not format.encodes_images:
        return steps or isinstance(split.source, Stream)
    for document in some_of(split.source, split.slice.order):
        sample = {} if isinstance(document.sample, SampleError) else document.sample
        try:
            for name, kind in images.items():
                if name in sample and format.carried(kind, sample[name]) != sample[name]:
                    return True
        except NotAnImageError:  # the conversion will report it
            continue
    return False


def _bounds(split: Split, sizes: Sizes, format: Format, recipe: Recipe) -> Sizes:
    """Upper bounds in bytes of the stored samples, or of the ranges of a stream.

    If steps change the samples or their number is unknown, an estimate from a few samples, with a
    margin.
    """
    if isinstance(split.source, Source) and not split.steps:
        return mapped(sizes, lambda some: format.bound(some, len(split.schema)))
    read, stats, samples = _tried(split, recipe.rename)
    if not samples:  # all of them are bad: the conversion will report it
        return mapped(sizes, lambda some: format.bound(some, len(split.schema)))
    written = sum(field.bytes for field in stats.fields.values())
    mean = np.array([written // samples], np.int64)
    stored = int(format.bound(mean, len(split.schema))[0]) * samples
    ratio = _MARGIN * stored / max(read, 1)
    return mapped(sizes, lambda some: (some * ratio).astype(np.int64) + 1)


def _tried(split: Split, rename: dict[str, str]) -> tuple[int, Stats, int]:
    """Bytes of a few samples in the source, their statistics after the steps, and their number."""
    stats, samples, read = Stats.of(split.schema), 0, 0
    few = some_of(split.source, split.slice.order)
    steps = _without_padding(split.steps)
    shaped = (Item(d.name, steps.shaped(d.sample, stats.ignored), d.size) for d in few)
    for item in steps.in_order(shaped, "", 1, stats.text, stats.ignored):
        read += item.size
        try:
            sample = renamed(sample_of(item.read), rename)
            stats.add(sample if steps.text else split.schema.check(sample))
        except (SampleError, Filtered):
            continue
        samples += 1
    stats.flush()
    return read, stats, samples


def _without_padding(steps: Steps) -> Steps:
    """The same steps without padding of the last block, which is too large for a few documents."""
    text = steps.text
    if text is None or text.options.seq_len is None or text.options.pack == "pad":
        return steps
    return replace(steps, text=replace(text, options=replace(text.options, remainder="keep")))


def _least_work(split: Split) -> int:
    """Minimum size of a task in bytes: with blocks of tokens, that of _LEAST_BLOCKS blocks."""
    text = split.steps.text
    seq_len = 0 if text is None else text.options.seq_len or 0
    return max(_LEAST_WORK, _LEAST_BLOCKS * seq_len * _TOKEN_BYTES)


def _work_cuts(work: Sizes, most: int, least: int, shard: int | None = None) -> Iterator[Cut]:
    """Yield tasks of at most `most` bytes of work, smaller towards the end: see _FRACTION.

    With `shard` samples per shard, a task covers whole shards, or a piece of one to be joined.
    """
    ends = running_sum(work)
    start, samples, joined = 0, len(work), False
    while start < samples:
        left = int(ends[-1] - ends[start])
        whole = -(-left // most)
        shares = max(whole, min(_FRACTION, left // least), 1)
        aim = int(ends[start]) - (-left // shares)
        stop = max(int(ends.searchsorted(aim, side="right")) - 1, start + 1)
        joined = joined or shares > whole
        if shard is not None:
            first = (start // shard + 1) * shard  # end of the shard in which the task begins
            stop = min(stop, first) if start % shard else max(stop - stop % shard, min(stop, first))
            joined = bool(start % shard) or (bool(stop % shard) and stop < samples)
        yield Cut(start, stop, joined)
        start = stop


def _whole_shards(bounds: Sizes, max_samples: int) -> Iterator[tuple[int, int]]:
    """Yield tasks that contain the samples of one or more whole shards."""
    mean = int(bounds.mean()) + 1 if len(bounds) else 1
    step = max_samples * max(1, _TASK_BYTES // (mean * max_samples))
    for start in range(0, len(bounds), step):
        yield start, min(start + step, len(bounds))


def _even_cuts(bounds: Sizes, limit: int) -> Iterator[tuple[int, int]]:
    """Yield tasks of nearly equal bytes, at most `limit` unless a single sample is larger."""
    ends = running_sum(bounds)
    tasks = -(-int(ends[-1]) // limit)
    found = _evenly(ends, tasks)
    if np.diff(ends[found]).max(initial=0) > limit:  # by less than a sample: use one task more
        found = _evenly(ends, tasks + 1)
    yield from itertools.pairwise(found.tolist())


def _evenly(ends: npt.NDArray[np.int64] | RunningSum, tasks: int) -> npt.NDArray[np.int64]:
    """Return indices of samples at which `tasks` slices of nearly equal bytes begin and end."""
    each, rest = divmod(int(ends[-1]), max(tasks, 1))  # so that products fit into 63 bits
    numbers = np.arange(tasks + 1)
    aims = each * numbers + rest * numbers // max(tasks, 1)
    found = ends.searchsorted(aims, side="left")  # ascending; np.unique would import numpy.ma
    return found[np.diff(found, prepend=-1) > 0]
