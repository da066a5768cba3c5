"""Where tasks begin and end, from sizes alone, whatever the number of workers.

Where values are copied, a task makes about one shard. Where images are decoded or text is
tokenized, tasks are cut by that work: each is at most a small share of what is left, so that no
worker waits long for the last.
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
from shardkit.mapped import RunningSum, Sizes, mapped, running_sum
from shardkit.preprocess.filtered import Filtered
from shardkit.preprocess.items import Item, Steps, sample_of
from shardkit.sample import renamed
from shardkit.schema import Image
from shardkit.sources.base import Source, Stream, some_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.conversion.plan import Split
    from shardkit.recipe import Recipe

# How tasks are cut, and what they leave behind: changes with that. A run goes on only with its own,
# and the blocks of tokens of another cannot be made again.
TASKS = "2"
_TASK_BYTES = 256 * 10**6  # of a task whose shards are bounded by samples, or not at all
_FRACTION = 64  # where tasks are cut by work, each is at most 1/64 of what is left
_LEAST_WORK = 2 << 20  # bytes to decode or tokenize, in a fifth of a second or so
_LEAST_BLOCKS = 128  # of a task's own: the last one may not be full
_TOKEN_BYTES = 4  # of text that becomes one, about
# Where values are copied, one process keeps the disk busy, and joining copies them twice: tasks
# of less than an only shard are there for a run to continue at, and only a large one has any.
_COPIED_BYTES = 4000 * 10**6
_MARGIN = 1.1  # so that a guess of sizes does not fall short


class Cut(NamedTuple):
    """A task, as a slice of the order of its split."""

    start: int
    stop: int
    joined: bool  # its shards are to be joined with those of its neighbours


def cuts(split: Split, sizes: Sizes, format: Format, recipe: Recipe) -> list[Cut]:
    """The tasks of one; its samples, or ranges of a stream, have `sizes` bytes in the source."""
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
    """Whether the samples of shards can be counted while planning."""
    return split.samples is not None and split.steps.text is None


def _joins(format: Format, max_bytes: int | None) -> bool:
    """Whether shards that are as large as `max_bytes` together join to one that is no larger."""
    return isinstance(format, Joins) and (max_bytes is None or not format.join_pads)


def _encodes(split: Split, format: Format) -> bool:
    """Whether values are decoded or encoded, and not copied, as far as a few samples tell."""
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
        except NotAnImageError:  # the conversion will meet it again, and say so
            continue
    return False


def _bounds(split: Split, sizes: Sizes, format: Format, recipe: Recipe) -> Sizes:
    """Bounds in bytes of what the source's samples, or a stream's ranges, become.

    Where steps change them or their number is not known, about what a few tell, and some more.
    """
    if isinstance(split.source, Source) and not split.steps:
        return mapped(sizes, lambda some: format.bound(some, len(split.schema)))
    read, stats, samples = _tried(split, recipe.rename)
    if not samples:  # all are bad, or a few: the conversion will meet them again
        return mapped(sizes, lambda some: format.bound(some, len(split.schema)))
    written = sum(field.bytes for field in stats.fields.values())
    mean = np.array([written // samples], np.int64)
    stored = int(format.bound(mean, len(split.schema))[0]) * samples
    ratio = _MARGIN * stored / max(read, 1)
    return mapped(sizes, lambda some: (some * ratio).astype(np.int64) + 1)


def _tried(split: Split, rename: dict[str, str]) -> tuple[int, Stats, int]:
    """Bytes of a few samples in the source, and what they are after their steps."""
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
    """The same, less the padding of a last block, which of few documents would be a lot."""
    text = steps.text
    if text is None or text.options.seq_len is None or text.options.pack == "pad":
        return steps
    return replace(steps, text=replace(text, options=replace(text.options, remainder="keep")))


def _least_work(split: Split) -> int:
    """Bytes of the smallest task: with blocks of tokens, those of so many."""
    text = split.steps.text
    seq_len = 0 if text is None else text.options.seq_len or 0
    return max(_LEAST_WORK, _LEAST_BLOCKS * seq_len * _TOKEN_BYTES)


def _work_cuts(work: Sizes, most: int, least: int, shard: int | None = None) -> Iterator[Cut]:
    """Tasks of at most `most` bytes of work, and less towards the end: see _FRACTION.

    With a `shard` of so many samples, each of its multiples is a cut between shards.
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
            first = (start // shard + 1) * shard  # end of the shard that the task begins in
            stop = min(stop, first) if start % shard else max(stop - stop % shard, min(stop, first))
            joined = bool(start % shard) or (bool(stop % shard) and stop < samples)
        yield Cut(start, stop, joined)
        start = stop


def _whole_shards(bounds: Sizes, max_samples: int) -> Iterator[tuple[int, int]]:
    """Tasks of as many samples as one or more shards have."""
    mean = int(bounds.mean()) + 1 if len(bounds) else 1
    step = max_samples * max(1, _TASK_BYTES // (mean * max_samples))
    for start in range(0, len(bounds), step):
        yield start, min(start + step, len(bounds))


def _even_cuts(bounds: Sizes, limit: int) -> Iterator[tuple[int, int]]:
    """Tasks of nearly equal bytes, at most `limit` where samples allow it."""
    ends = running_sum(bounds)
    tasks = -(-int(ends[-1]) // limit)
    found = _evenly(ends, tasks)
    if np.diff(ends[found]).max(initial=0) > limit:  # by the size of a sample: one more has room
        found = _evenly(ends, tasks + 1)
    yield from itertools.pairwise(found.tolist())


def _evenly(ends: npt.NDArray[np.int64] | RunningSum, tasks: int) -> npt.NDArray[np.int64]:
    """Numbers of samples at which `tasks` slices of nearly equal bytes begin and end."""
    each, rest = divmod(int(ends[-1]), max(tasks, 1))  # whose products have no more than 63 bits
    numbers = np.arange(tasks + 1)
    aims = each * numbers + rest * numbers // max(tasks, 1)
    return np.unique(ends.searchsorted(aims, side="left"))
