"""What a conversion takes: bytes and time, by trying some samples, and space on the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit import storage
from shardkit.conversion.commit import REPLACED
from shardkit.conversion.plan import Plan, Split, Task
from shardkit.conversion.shards import ShardSequence
from shardkit.conversion.target import Target
from shardkit.errors import (
    OutputError,
    SampleError,
    ShardkitError,
    SourceError,
    warn,
)
from shardkit.indices import array, pick
from shardkit.order import permutation
from shardkit.preprocess.filtered import Filtered
from shardkit.preprocess.items import sample_of
from shardkit.processors import processors
from shardkit.remote.path import RemotePath
from shardkit.sample import renamed
from shardkit.schema import Audio, Image, Images, Video
from shardkit.sources.base import Source

_SECONDS = 1.0  # of trying, about, for all splits together
_TRIED_BYTES = 64 << 20  # of the source, at most, at a time
_PLACES = 16  # of the source that samples are taken from, several at each
_DISK_BYTES, _BLOCK = 32 << 20, 16 << 10  # written to see how fast the disk is
_SYNCS, _SYNCS_OF_TASK = 8, 4  # tried; of a task: two files and two folders
# Where so many times the source, and so many bytes a sample, are free, a run begins untried.
_GROWTH, _GROWTH_STEPS, _OVERHEAD = 3, 32, 4096
_MEDIA = (Image, Images, Audio, Video)
_CAUTION = 0.9  # of what a few samples tell is taken for certain


@dataclass
class Estimate:
    """What becomes of a source, about, or of the samples that were tried."""

    samples: int = 0  # that were tried, and can be stored
    bad: int = 0  # that were tried, too
    untried: int = 0  # that are too large: their sizes are taken
    documents: int = 0  # the same, or what became blocks of tokens
    read: int = 0  # bytes of the source that were tried
    written: int = 0  # bytes of the dataset
    certain: int = 0  # of these, media as they were: no file system needs less for them
    joined: int = 0  # of these, shards that lie beside those they are joined to before the end
    seconds: float = 0.0  # of work, of one processor

    @property
    def needed(self) -> int:
        """Bytes on the disk before the end, besides a dataset that is replaced."""
        return self.written + self.joined


class Room(NamedTuple):
    """Free bytes at the output, and those that an unfinished run holds."""

    folder: Path
    free: int
    unfinished: int


def describe(plan: Plan, workers: int, planned: float) -> dict[str, Any]:
    """For `--plan`: bytes and space of all, and the time of what this process would do.

    `planned` are the seconds that planning took.
    """
    room = room_for(plan.target)
    disk = None if room is None else {**room._asdict(), "folder": str(room.folder)}
    try:
        found = estimate(plan)
    except (ShardkitError, OSError) as error:
        return {"disk": disk, "problem": f"nothing could be tried: {' '.join(str(error).split())}"}
    if not (found.samples or found.untried):
        return {"disk": disk, "problem": "no sample that was tried can be stored"}
    share = plan.own_bytes / max(plan.bytes, 1)  # of a part
    working = max(1, min(workers, processors(), len(plan.own)))
    seconds = found.seconds * share / working
    if room is not None and disk is not None:
        speed, latency = _tried_disk(room.folder) or (None, 0.0)
        disk |= {"needed": found.needed, "speed": speed and int(speed)}
        seconds = max(seconds, found.needed * share / speed if speed else 0.0)
        seconds += len(plan.own) * _SYNCS_OF_TASK * latency / working
    return {
        "written": found.written,
        "seconds": round(planned + seconds, 1),
        "processes": working,
        "tried": {
            "samples": found.documents,
            "bad": found.bad,
            "bytes": found.read,
            "too_large": found.untried,
        },
        "disk": disk,
    }


def refuse_full(plan: Plan) -> None:
    """Raise OutputError where what is written cannot fit on the disk; warn where it may not."""
    room = room_for(plan.target)
    growth = _GROWTH_STEPS if any(split.steps for split in plan.splits) else _GROWTH
    most = plan.bytes * growth + (plan.samples or 0) * _OVERHEAD
    if room is None or most <= room.free + room.unfinished:
        return
    try:
        found = estimate(plan)
    except (ShardkitError, OSError):  # the conversion will meet it, and say so
        return
    spare = f", besides {room.unfinished:,} of an unfinished run" if room.unfinished else ""
    free = f"{room.free:,} bytes free in {room.folder}{spare}"
    if found.certain * _CAUTION > room.free + room.unfinished:
        raise OutputError(
            "what would be written does not fit on the disk of the output",
            path=plan.target.path,
            expected=f"about {found.needed:,} bytes",
            found=free,
            fix="make space, or give an output on another disk with -o; --plan tells more",
        )
    if found.needed > room.free + room.unfinished:
        words = f"the disk may become full: about {found.needed:,} bytes are needed, of {free}"
        warn(f"{words}; a run that stops can go on")


def room_for(target: Target) -> Room | None:
    """Space where the target goes; None in a store, which does not tell."""
    if isinstance(target.path, RemotePath):
        return None
    folder = target.absolute.parent
    with storage.explained("look at", folder):
        return Room(folder, shutil.disk_usage(folder).free, _stored(target.working_folder))


def _stored(folder: Path) -> int:
    """Bytes of all files in a folder; of one for unfinished work, without the old dataset."""
    total = 0
    for at, folders, files in os.walk(folder):
        if Path(at) == folder and REPLACED in folders:
            folders.remove(REPLACED)
        for name in files:
            with contextlib.suppress(OSError):  # another process is at work there
                total += Path(at, name).lstat().st_size
    return total


def estimate(plan: Plan) -> Estimate:
    """Try some samples of each split. Raises ShardkitError where a source cannot be read."""
    found = Estimate()
    with tempfile.TemporaryDirectory(prefix="shardkit-plan-") as folder:
        for split in plan.splits:
            tried = _tried(plan, split, Path(folder), _SECONDS / len(plan.splits))
            tasks = [task for task in plan.tasks if task.split is split]
            size = sum(task.size for task in tasks)
            times = size / max(tried.read, 1)
            if split.slice.counts is not None or not tried.read:  # of a limit, or of unknown sizes
                times = (split.samples or 0) / max(tried.documents, 1)
            joined = sum(task.size for task in tasks if task.joined) / max(size, 1)
            found.written += int(tried.written * times)
            found.written += sum(map(len, split.tokenizer()[1].values()))
            found.certain += int(tried.certain * times)
            found.joined += int(tried.written * times * joined)
            found.seconds += tried.seconds * times
            found.samples += tried.samples
            found.bad += tried.bad
            found.untried += tried.untried
            if not tried.untried:
                found.documents += tried.documents
                found.read += tried.read
    return found


def _tried(plan: Plan, split: Split, folder: Path, seconds: float) -> Estimate:
    """More and more samples, until they take about so long; the first load what is needed."""
    total = len(split.slice.order)
    number = min(_PLACES if isinstance(split.source, Source) else 1, total)
    while True:
        task = _some(split, number)
        if number and not task.stop:
            return _by_size(split)
        with tempfile.TemporaryDirectory(dir=folder) as trial:
            tried = _try(plan, task, Path(trial), seconds)
        if tried.seconds >= seconds / 2 or tried.read >= _TRIED_BYTES or number == total:
            return tried
        number = min(number * 4, total)


def _some(split: Split, number: int) -> Task:
    """A task of samples from several places, in no order; some follow one another at each.

    It has none that are too large to be tried.
    """
    chosen, places = split.slice, max(min(number, _PLACES), 1)
    starts = permutation(places, 0) * len(chosen.order) // places
    at = (starts[:, None] + np.arange(number // places)).ravel()
    if isinstance(split.source, Source):
        at = at[_sizes(split, at) <= _TRIED_BYTES]
    counts = None if chosen.counts is None else chosen.counts[at]
    some = replace(split, slice=replace(chosen, order=pick(chosen.order, at), counts=counts))
    return Task(0, some, 0, len(at), 0)


def _sizes(split: Split, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.asarray(split.source.select(array(pick(split.slice.order, at))).sizes())


def _by_size(split: Split) -> Estimate:
    """Of a sample each of several places, which are too large to be tried."""
    if split.steps or split.source.encodes_images:
        raise SourceError(
            "the samples are too large to try what becomes of them",
            expected=f"at most {_TRIED_BYTES:,} bytes",
        )
    sizes = _sizes(split, np.unique(np.arange(_PLACES) * len(split.slice.order) // _PLACES))
    kinds, size, count = split.schema, int(sizes.sum()), len(sizes)
    written = int(split.content.format.bound(sizes, len(kinds)).sum())
    certain = size if any(isinstance(kind, _MEDIA) for kind in kinds.values()) else 0
    return Estimate(0, 0, count, count, size, written, certain)


def _try(plan: Plan, task: Task, folder: Path, seconds: float) -> Estimate:
    """What a worker would do, for so long at most."""
    reading, began, kinds = task.reading(), time.perf_counter(), task.split.schema
    limit, unique = plan.recipe.shard_samples, reading.unique_keys
    content, tried = task.split.content, Estimate()
    shards = ShardSequence(folder, content, limit, durable=False, unique_keys=unique)
    try:
        for item in reading.items(1, shards.stats):
            late = time.perf_counter() - began > 2 * seconds or tried.read > _TRIED_BYTES
            if late and tried.read and item.size:  # else a block of tokens of the document before
                break
            tried.read += item.size
            try:
                sample = renamed(sample_of(item.read), plan.recipe.rename)
                shards.write(kinds.check(sample) if plan.recipe.transform is not None else sample)
                tried.samples += 1
            except Filtered:
                pass
            except SampleError:
                tried.bad += 1
        shards.close()
    except BaseException:
        shards.abandon()
        raise
    tried.seconds = time.perf_counter() - began
    tried.documents = shards.stats.text.lengths.count or tried.samples
    sizes = {name: field.bytes for name, field in shards.stats.fields.items()}
    mean = np.array([sum(sizes.values()) // max(tried.samples, 1)], np.int64)
    bound = int(content.format.bound(mean, len(kinds))[0]) * tried.samples
    tried.written = min(_stored(folder), bound)  # less what a file of few samples has besides
    if not (task.split.steps or task.split.source.encodes_images or shards.stats.encoded):
        media = [n for n in sizes if isinstance(kinds[n], _MEDIA)]
        tried.certain = sum(sizes[name] for name in media)
    return tried


def _tried_disk(folder: Path) -> tuple[float, float] | None:
    """Bytes a second, and seconds of a sync, of a file that has no name: nobody sees it.

    None where there are no such files, or no space.
    """
    try:
        handle = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
    except (AttributeError, OSError):
        return None
    try:
        block, ends = os.urandom(_BLOCK), [time.perf_counter()]
        for blocks in (_DISK_BYTES // _BLOCK, *[1] * _SYNCS):
            for _ in range(blocks):
                os.write(handle, block)
            os.fsync(handle)
            ends.append(time.perf_counter())
    except OSError:
        return None
    finally:
        os.close(handle)
    return _DISK_BYTES / (ends[1] - ends[0]), (ends[-1] - ends[1]) / _SYNCS
