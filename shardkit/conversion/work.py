"""One task: read its samples, check them, write shards, and leave a folder that says it is done.

A task works in a folder of its own name with an ending; when every file in it is on the disk, one
rename takes the ending off. The journal of a run is the set of folders without an ending.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from shardkit import storage
from shardkit.conversion.shards import ShardSequence, Stats
from shardkit.errors import SampleError, ShardkitError
from shardkit.formats import get_format
from shardkit.manifest import ERRORS, FILTERED, KEYS
from shardkit.preprocess.filtered import Filtered
from shardkit.sample import Sample, renamed
from shardkit.schema import Schema
from shardkit.sources.base import Source

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.preprocess.images import ImageSteps, Shaped

RESULT = "result.json"
HASHES = "keys.u64"  # xxh3-64 of every key, in the order of the samples
UNFINISHED = ".tmp"

# Threads that read ahead inside a task at most, and how much each reads at a time.
_MAX_THREADS = 8
_WAITING = 5  # times as long as it computes: such a reader waits for more than its turn
_CHUNK_SAMPLES = 64
_CHUNK_STEPS = 8  # of those that take a thousand times as long as reading
_CHUNK_BYTES = 4 << 20
_REPORT_SECONDS = 0.1


@dataclass(frozen=True)
class Work:
    """A task as a worker gets it. `folder` is where its result must be in the end."""

    number: int
    folder: Path
    source: Source
    format: str
    max_bytes: int | None
    max_samples: int | None
    steps: ImageSteps | None  # what is done to every sample first
    schema: Schema  # of the samples after their steps, and with their new names
    rename: dict[str, str]
    skip_errors: bool
    threads: int  # that do the steps
    durable: bool  # whether the shards are final, or will be joined to one


@dataclass(frozen=True)
class Progress:
    """What was done since the last report: samples written or dropped, payload bytes, dropped."""

    samples: int
    bytes: int
    errors: int


Report = Callable[[Progress], None]


def run_task(work: Work, report: Report) -> None:
    """Do the task and publish its folder. Raises ShardkitError and leaves nothing, if it fails."""
    unfinished = work.folder.with_name(f"{work.folder.name}.{uuid.uuid4().hex[:8]}{UNFINISHED}")
    storage.make_folder(unfinished)
    storage.write_back = work.durable
    try:
        _write(work, unfinished, report)
        storage.sync(unfinished)
        storage.rename(unfinished, work.folder)
        storage.sync(work.folder.parent)
    except BaseException:
        # Best effort: what is left is removed when the run goes on.
        try:
            storage.remove(unfinished)
        except ShardkitError:
            pass
        raise
    finally:
        storage.write_back = True


def _write(work: Work, folder: Path, report: Report) -> None:
    label = work.source.label
    shards = ShardSequence(
        folder,
        get_format(work.format),
        work.schema,
        work.max_bytes,
        work.max_samples,
        label=work.rename.get(label, label),
        classes=work.source.classes,
        durable=work.durable,
    )
    reporter = _Reporter(report)
    lists: dict[str, list[bytes]] = {ERRORS: [], FILTERED: [], KEYS: []}
    try:
        for index, read in read_in_order(work.source, work.steps, work.threads):
            name = work.source.name(index)
            try:
                sample = _sample(read)
                size = shards.write(_checked(sample, work))
            except Filtered as dropped:
                lists[FILTERED].append(_line({"source": name, **dropped.to_json()}))
                shards.stats.filtered[dropped.reason] += 1
                reporter.add(0, 0)
                continue
            except SampleError as error:
                if not work.skip_errors:
                    raise error.located(path=name) from None
                lists[ERRORS].append(error_line(name, error))
                reporter.add(0, 1)
                continue
            _count(read, shards.stats)
            original = work.source.original(index, sample["__key__"])
            if original is not None:
                lists[KEYS].append(_line({"key": sample["__key__"], "path": original}))
            reporter.add(size, 0)
        shards.close()
    except BaseException:
        shards.abandon()
        raise
    reporter.flush()
    storage.write_file(folder / HASHES, shards.key_hashes.tobytes())
    for name, lines in lists.items():
        if lines:
            storage.write_file(folder / name, b"".join(lines))
    result = {
        "shards": [asdict(shard) for shard in shards.shards],
        "errors": len(lists[ERRORS]),
        "stats": shards.stats.to_json(),
    }
    storage.write_file(folder / RESULT, json.dumps(result).encode())


# What reading a sample gives: the sample, or with steps what they made of it; or why there is none.
Read: TypeAlias = "Sample | Shaped | SampleError | Filtered"


class _Chunk(NamedTuple):
    """Samples that were read together, and how far reading them was waiting."""

    samples: list[Read]
    waited: bool


def _sample(read: Read) -> Sample:
    """The sample that was read; raises why there is none."""
    if isinstance(read, SampleError | Filtered):
        raise read
    return read if isinstance(read, dict) else read.sample


def _count(read: Read, stats: Stats) -> None:
    """Count what the steps did to a sample that is stored now."""
    if not isinstance(read, dict | SampleError | Filtered):
        stats.pictures.update(read.pictures)
        stats.reasons.update(read.reasons)


def _checked(sample: Sample, work: Work) -> Sample:
    """A sample with its new names; checked, if it is what a user's function made."""
    sample = renamed(sample, work.rename)
    transformed = work.steps is not None and work.steps.transform is not None
    return work.schema.check(sample) if transformed else sample


def read_in_order(
    source: Source, steps: ImageSteps | None = None, threads: int = 0
) -> Iterator[tuple[int, Read]]:
    """All samples in order, after their `steps`; one that is bad comes as its error.

    Files that are in memory are read best without any thread: more would only stand in each
    other's way. Where reading waits for a disk or a network, more and more chunks are read ahead.
    With steps there is work for `threads` of them, as codecs let others run meanwhile.
    """
    ahead = busy = 2 * threads if threads > 1 else 0
    with ThreadPoolExecutor(max(threads, _MAX_THREADS)) as pool:
        pending: deque[tuple[int, Future[_Chunk]]] = deque()
        chunks = _chunks(source.sizes(), _chunk_samples(steps))
        try:
            while True:
                for first, last in itertools.islice(chunks, max(ahead - len(pending), 0)):
                    pending.append((first, pool.submit(_read, source, steps, first, last)))
                if pending:
                    number, future = pending.popleft()
                    chunk = future.result()
                else:
                    number, last = next(chunks, (0, 0))
                    if not last:
                        return
                    chunk = _read(source, steps, number, last)
                ahead = min(ahead + 1, _MAX_THREADS) if chunk.waited else max(ahead - 1, busy)
                yield from enumerate(chunk.samples, number)
        finally:
            pool.shutdown(cancel_futures=True)


def _chunk_samples(steps: ImageSteps | None) -> int:
    """How many samples are read together: few, where each is a lot of work or of memory."""
    if steps is None:
        return _CHUNK_SAMPLES
    return 1 if steps.options.format == "raw" else _CHUNK_STEPS


def _read(source: Source, steps: ImageSteps | None, first: int, last: int) -> _Chunk:
    began, worked = time.perf_counter(), time.thread_time()
    samples: list[Read] = []
    for index in range(first, last):
        try:
            sample = source[index]
            samples.append(sample if steps is None else steps(sample))
        except (SampleError, Filtered) as error:
            samples.append(error)
    waited = time.perf_counter() - began > _WAITING * (time.thread_time() - worked)
    return _Chunk(samples, waited)


def _chunks(sizes: npt.NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Runs of samples that one thread reads at a time, bounded in number and bytes."""
    first, gathered = 0, 0
    for index, size in enumerate(sizes.tolist()):
        if index - first == most or (index > first and gathered + size > _CHUNK_BYTES):
            yield first, index
            first, gathered = index, 0
        gathered += size
    if len(sizes):
        yield first, len(sizes)


class _Reporter:
    """Gathers progress and passes it on a few times a second."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._samples = self._bytes = self._errors = 0
        self._next = time.monotonic() + _REPORT_SECONDS

    def add(self, size: int, errors: int) -> None:
        self._samples += 1
        self._bytes += size
        self._errors += errors
        if errors or time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        self._report(Progress(self._samples, self._bytes, self._errors))
        self._samples = self._bytes = self._errors = 0
        self._next = time.monotonic() + _REPORT_SECONDS


def error_line(source: str | None, error: ShardkitError) -> bytes:
    """A line of errors.jsonl: no absolute path, so that it is the same wherever the source lies."""
    parts = error.to_dict()
    path = parts.pop("path", None)
    return _line({"source": source or Path(str(path)).name, **parts})


def _line(entry: dict[str, Any]) -> bytes:
    # A file name that is not Unicode becomes an escape that JSON reads back.
    return json.dumps(entry, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def read_result(folder: Path) -> dict[str, Any]:
    """What a finished task says of itself: shards, errors, stats."""
    result: dict[str, Any] = json.loads(storage.read(folder / RESULT))
    return result


def is_finished(folder: Path) -> bool:
    return (folder / RESULT).is_file()
