"""Estimates a conversion's bytes and time by converting some samples, and its disk space."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardkit.conversion.folder import REPLACED
from shardkit.conversion.plan import Plan, Task
from shardkit.conversion.shards import ShardSequence
from shardkit.conversion.splits import Split
from shardkit.conversion.target import Target
from shardkit.errors import (
    OutputError,
    SampleError,
    ShardkitError,
    SourceError,
    warn,
)
from shardkit.helpers import os_errors
from shardkit.helpers.indices import array, pick
from shardkit.helpers.order import permutation
from shardkit.helpers.processors import processors
from shardkit.preprocess.items import Filtered, sample_of
from shardkit.sample import renamed
from shardkit.schema import Audio, Image, Images, Video
from shardkit.sources.base import Source
from shardkit.storage import fs
from shardkit.storage.remote.path import RemotePath

_SECONDS = 1.0  # approximate duration of a trial, for all splits together
_TRIED_BYTES = 64 << 20  # of the source, at most, in one trial
_PROBES = 16  # places in the source from which consecutive samples are taken
# If this many times the source's size, plus bytes per sample, are free, a run starts without trial.
_GROWTH, _GROWTH_STEPS, _OVERHEAD = 3, 32, 4096
_MEDIA = (Image, Images, Audio, Video)
_CAUTION = 0.9  # share of an estimate from a few samples that counts as certain


class _TooLargeError(SourceError):
    """The samples of a split are too large to try their conversion."""


@dataclass
class Estimate:
    """The estimated result for a source, or for the samples that were tried."""

    samples: int = 0  # tried samples that can be stored
    bad: int = 0  # tried samples that are bad
    documents: int = 0  # tried samples, or the documents that became blocks of tokens
    read: int = 0  # bytes of the source that were tried
    written: int = 0  # bytes of the dataset
    certain: int = 0  # of these, unchanged media, which need as much space in any format
    joined: int = 0  # of these, shards that temporarily exist both joined and not yet joined
    seconds: float = 0.0  # of work for one processor

    @property
    def needed(self) -> int:
        """Maximum bytes on the disk during the run, without a dataset that is replaced."""
        return self.written + self.joined


class Room(NamedTuple):
    """Free bytes at the output, and bytes that an unfinished run occupies."""

    folder: Path
    free: int
    unfinished: int


def describe(plan: Plan, workers: int, planned: float) -> dict[str, Any]:
    """For `--plan`: bytes and disk space of the whole run, and the time of this process's tasks.

    `planned` is the number of seconds that planning took.
    """
    room = room_for(plan.target)
    disk = None if room is None else {**room._asdict(), "folder": str(room.folder)}
    try:
        found = estimate(plan)
    except (ShardkitError, OSError) as error:
        return {"disk": disk, "problem": f"could not try a sample: {' '.join(str(error).split())}"}
    if not found.samples:
        return {"disk": disk, "problem": "none of the tried samples can be stored"}
    share = plan.own_bytes / max(plan.bytes, 1)  # of a part
    working = max(1, min(workers, processors(), len(plan.own)))
    if disk is not None:
        disk["needed"] = found.needed
    return {
        "written": found.written,
        "seconds": round(planned + found.seconds * share / working, 1),
        "processes": working,
        "tried": {"samples": found.documents, "bad": found.bad, "bytes": found.read},
        "disk": disk,
    }


def refuse_full(plan: Plan) -> None:
    """Raise OutputError if the output cannot fit on the disk; warn if it may not fit."""
    room = room_for(plan.target)
    growth = _GROWTH_STEPS if any(split.steps for split in plan.splits) else _GROWTH
    most = plan.bytes * growth + (plan.samples or 0) * _OVERHEAD
    if room is None or most <= room.free + room.unfinished:
        return
    spare = f", plus {room.unfinished:,} used by an unfinished run" if room.unfinished else ""
    free = f"{room.free:,} bytes free in {room.folder}{spare}"
    try:
        found = estimate(plan)
        certain, needed = found.certain, found.needed
    except _TooLargeError:
        certain = needed = sum(task.size for task in plan.tasks if _copies_media(task.split))
    except (ShardkitError, OSError):  # the conversion will report it
        return
    if certain * _CAUTION > room.free + room.unfinished:
        raise OutputError(
            "the output does not fit on its disk",
            path=plan.target.path,
            expected=f"about {needed:,} bytes",
            found=free,
            fix="free some space, or give an output on another disk with -o; --plan shows more",
        )
    if needed > room.free + room.unfinished:
        words = f"the disk may become full: about {needed:,} bytes are needed, of {free}"
        warn(f"{words}; if the run stops, it can be resumed")


def _copies_media(split: Split) -> bool:
    """Return whether a split has media, which are stored unchanged as far as planning can tell."""
    media = any(isinstance(kind, _MEDIA) for kind in split.schema.values())
    return media and not (split.steps or split.source.encodes_images)


def room_for(target: Target) -> Room | None:
    """Disk space at the target; None for a store, which does not report it."""
    if isinstance(target.path, RemotePath):
        return None
    folder = target.absolute.parent
    with os_errors.explained("look at", folder):
        return Room(folder, shutil.disk_usage(folder).free, _stored(target.working_folder))


def _stored(folder: Path) -> int:
    """Return bytes of all files in a folder; for a working folder, without the old dataset."""
    total = 0
    for at, folders, files in os.walk(folder):
        if Path(at) == folder and REPLACED in folders:
            folders.remove(REPLACED)
        for name in files:
            with contextlib.suppress(OSError):  # another process may be working there
                total += Path(at, name).lstat().st_size
    return total


def estimate(plan: Plan) -> Estimate:
    """Convert some samples of each split. Raises ShardkitError if a source cannot be read."""
    found = Estimate()
    for split in plan.splits:
        tried = _tried(plan, split, _SECONDS / len(plan.splits))
        tasks = [task for task in plan.tasks if task.split is split]
        size = sum(task.size for task in tasks)
        times = size / max(tried.read, 1)
        if split.slice.counts is not None or not tried.read:  # with a limit, or unknown sizes
            times = (split.samples or 0) / max(tried.documents, 1)
        joined = sum(task.size for task in tasks if task.joined) / max(size, 1)
        found.written += int(tried.written * times)
        found.certain += int(tried.certain * times)
        found.written += sum(map(len, split.tokenizer()[1].values()))
        found.joined += int(tried.written * times * joined)
        found.seconds += tried.seconds * times
        found.samples += tried.samples
        found.bad += tried.bad
        found.documents += tried.documents
        found.read += tried.read
    return found


def _tried(plan: Plan, split: Split, seconds: float) -> Estimate:
    """Try more and more samples, until they take about `seconds`; the first trials load modules."""
    total = len(split.slice.order)
    number = min(_PROBES if isinstance(split.source, Source) else 1, total)
    while True:
        task = _some(split, number)
        if number and not task.stop:
            raise _TooLargeError(
                "the samples are too large to try their conversion",
                expected=f"at most {_TRIED_BYTES:,} bytes",
            )
        with fs.temporary("shardkit-plan-") as trial:
            tried = _try(plan, task, trial, seconds)
        if tried.seconds >= seconds / 2 or tried.read >= _TRIED_BYTES or number == total:
            return tried
        number = min(number * 4, total)


def _some(split: Split, number: int) -> Task:
    """A task of samples from several places of the split, in random order, consecutive at each.

    Samples that are too large to try are ignored.
    """
    chosen, places = split.slice, max(min(number, _PROBES), 1)
    starts = permutation(places, 0) * len(chosen.order) // places
    at = (starts[:, None] + np.arange(number // places)).ravel()
    if isinstance(split.source, Source):
        sizes = np.asarray(split.source.select(array(pick(chosen.order, at))).sizes())
        at = at[sizes <= _TRIED_BYTES]
    counts = None if chosen.counts is None else chosen.counts[at]
    some = replace(split, slice=replace(chosen, order=pick(chosen.order, at), counts=counts))
    return Task(0, some, 0, len(at), 0)


def _try(plan: Plan, task: Task, folder: Path, seconds: float) -> Estimate:
    """Do what a worker would do, for about `seconds` at most."""
    reading, began, kinds = task.reading(), time.perf_counter(), task.split.schema
    limit, unique = plan.recipe.shard_samples, reading.unique_keys
    content, tried = task.split.content, Estimate()
    shards = ShardSequence(folder, content, limit, durable=False, unique_keys=unique)
    try:
        for item in reading.items(1, shards.stats):
            late = time.perf_counter() - began > 2 * seconds or tried.read > _TRIED_BYTES
            if late and tried.read and item.size:  # size 0: more blocks of the same document
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
    tried.written = min(_stored(folder), bound)  # excludes the fixed overhead of small files
    if not (task.split.steps or task.split.source.encodes_images or shards.stats.encoded):
        media = [name for name in sizes if isinstance(kinds[name], _MEDIA)]
        tried.certain = sum(sizes[name] for name in media)
    return tried
