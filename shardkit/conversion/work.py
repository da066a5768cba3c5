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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardkit import storage
from shardkit.codecs.image import NotAnImageError
from shardkit.conversion.shards import ShardSequence
from shardkit.errors import SampleError, ShardkitError
from shardkit.formats import get_format
from shardkit.manifest import ERRORS, KEYS
from shardkit.sample import Sample
from shardkit.schema import Image
from shardkit.sources.base import Source

if TYPE_CHECKING:
    import numpy.typing as npt

RESULT = "result.json"
HASHES = "keys.u64"  # xxh3-64 of every key, in the order of the samples
UNFINISHED = ".tmp"

# Threads that read ahead inside a task at most, and how much each reads at a time.
_MAX_THREADS = 8
_WAITING = 5  # times as long as it computes: such a reader waits for more than its turn
_CHUNK_SAMPLES = 64
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
    rename: dict[str, str]
    raw_pictures: bool  # whether pictures are decoded, and stored as pixels
    skip_errors: bool
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
    schema = work.source.schema.renamed(work.rename)
    label = work.source.label
    shards = ShardSequence(
        folder,
        get_format(work.format),
        schema,
        work.max_bytes,
        work.max_samples,
        label=work.rename.get(label, label),
        classes=work.source.classes,
        durable=work.durable,
    )
    reporter = _Reporter(report)
    pictures = [name for name, kind in schema.items() if isinstance(kind, Image)]
    errors: list[bytes] = []
    keys: list[bytes] = []
    try:
        for index, sample in read_in_order(work.source):
            try:
                if isinstance(sample, SampleError):
                    raise sample
                size = shards.write(_shaped(sample, work, pictures))
            except SampleError as error:
                if not work.skip_errors:
                    raise error.located(path=work.source.name(index)) from None
                errors.append(error_line(work.source.name(index), error))
                reporter.add(0, 1)
                continue
            original = work.source.original(index, sample["__key__"])
            if original is not None:
                keys.append(_line({"key": sample["__key__"], "path": original}))
            reporter.add(size, 0)
        shards.close()
    except BaseException:
        shards.abandon()
        raise
    reporter.flush()
    storage.write_file(folder / HASHES, shards.key_hashes.tobytes())
    for name, lines in ((ERRORS, errors), (KEYS, keys)):
        if lines:
            storage.write_file(folder / name, b"".join(lines))
    result = {
        "shards": [asdict(shard) for shard in shards.shards],
        "errors": len(errors),
        "stats": shards.stats.to_json(),
    }
    storage.write_file(folder / RESULT, json.dumps(result).encode())


class _Chunk(NamedTuple):
    """Samples that were read together, and how far reading them was waiting."""

    samples: list[Sample | SampleError]  # a bad sample is there as its error
    waited: bool


def _shaped(sample: Sample, work: Work, pictures: list[str]) -> Sample:
    """A sample of the source as it is to be stored."""
    if work.rename:
        sample = {work.rename.get(name, name): value for name, value in sample.items()}
    return {**sample, **_as_pixels(sample, pictures)} if work.raw_pictures else sample


def _as_pixels(sample: Sample, pictures: list[str]) -> Sample:
    """The pictures of a sample as PPM files, which are pixels behind a short header."""
    from shardkit.codecs.pixels import to_ppm, to_rgb

    pixels: Sample = {}
    for name in pictures:
        if name in sample:
            try:
                pixels[name] = to_ppm(to_rgb(sample[name]))
            except NotAnImageError as error:
                raise SampleError(
                    f"the picture cannot be decoded: {error}", key=sample["__key__"], field=name
                ) from None
    return pixels


def read_in_order(source: Source) -> Iterator[tuple[int, Sample | SampleError]]:
    """All samples in order; one that is bad comes as its error.

    Files that are in memory are read best without any thread: more would only stand in each
    other's way. Where reading waits for a disk or a network, more and more chunks are read ahead.
    """
    ahead = 0
    with ThreadPoolExecutor(_MAX_THREADS) as threads:
        pending: deque[tuple[int, Future[_Chunk]]] = deque()
        chunks = _chunks(source.sizes())
        try:
            while True:
                for first, last in itertools.islice(chunks, max(ahead - len(pending), 0)):
                    pending.append((first, threads.submit(_read, source, first, last)))
                if pending:
                    number, future = pending.popleft()
                    chunk = future.result()
                else:
                    number, last = next(chunks, (0, 0))
                    if not last:
                        return
                    chunk = _read(source, number, last)
                ahead = min(ahead + 1, _MAX_THREADS) if chunk.waited else max(ahead - 1, 0)
                yield from enumerate(chunk.samples, number)
        finally:
            threads.shutdown(cancel_futures=True)


def _read(source: Source, first: int, last: int) -> _Chunk:
    began, worked = time.perf_counter(), time.thread_time()
    samples: list[Sample | SampleError] = []
    for index in range(first, last):
        try:
            samples.append(source[index])
        except SampleError as error:
            samples.append(error)
    waited = time.perf_counter() - began > _WAITING * (time.thread_time() - worked)
    return _Chunk(samples, waited)


def _chunks(sizes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Runs of samples that one thread reads at a time, bounded in number and bytes."""
    first, gathered = 0, 0
    for index, size in enumerate(sizes.tolist()):
        if index - first == _CHUNK_SAMPLES or (index > first and gathered + size > _CHUNK_BYTES):
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
