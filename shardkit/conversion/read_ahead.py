"""Reads a slice of a source in order and applies the steps: the input of a task."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import xxhash

from shardkit.conversion.stats import Stats
from shardkit.errors import SampleError
from shardkit.helpers.mapped import Sizes, listed
from shardkit.helpers.prefetch import prefetch
from shardkit.preprocess.items import Filtered, Item, Read, count_values, sample_of
from shardkit.preprocess.pipeline import Steps
from shardkit.sources.base import Document, Prefetched, Source, Stream, prefetched

# Maximum number of read-ahead threads in a task, and how much each reads at a time.
_MAX_THREADS = 8
_WAITING = 5  # ratio of wall to CPU time above which a reader waits for I/O, not just for its turn
_CHUNK_SAMPLES = 64
# For small samples scattered over a dataset: enough that each page that is read contains several of
# them. Shuffling 2.4 million rows of Arrow takes one minute instead of more than 8.
_CHUNK_SCATTERED = 1 << 16
_SCATTERED_BYTES = 16 << 20  # of their values in memory
_SMALL = 1 << 12  # maximum bytes of such a sample, on average
_CHUNK_STEPS = 8  # samples per chunk if the steps take a thousand times as long as reading
_CHUNK_BYTES = 4 << 20

# Called with the name of each sample before it is read and prepared, one at a time, in a process
# that repeats a task whose worker died.
begins: Callable[[str], None] | None = None


@dataclass(frozen=True)
class Share:
    """The samples of a split: those whose key fractions are in the interval [start, stop)."""

    start: float
    stop: float

    def has(self, key: str) -> bool:
        return self.start <= key_fraction(key) < self.stop


def key_fraction(key: str) -> float:
    """Return a number from 0 to 1 that depends on the key alone."""
    return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogateescape")) / 2**64


@dataclass(frozen=True)
class Reading:
    """What a task reads, and the steps applied to it. `name` is the prefix of the keys of samples
    that the steps create."""

    source: Source | Stream
    name: str
    steps: Steps
    share: Share | None = None  # of a stream: read only these documents
    limit: int | None = None  # of a stream: read at most this many of them

    @property
    def unique_keys(self) -> bool:
        text = self.steps.text
        blocks = text is not None and text.options.seq_len is not None
        return self.source.unique_keys or blocks

    def items(self, threads: int, stats: Stats | None = None) -> Iterator[Item]:
        """Return all samples after the steps, in order; a bad sample is represented by its error.

        Statistics of texts, and counts of what is ignored, are added to `stats`.
        """
        stats = stats or Stats()
        if isinstance(self.source, Stream):
            items = self._streamed(self.source, stats.ignored)
        else:
            items = _at_random(self.source, self.steps, threads, stats.ignored)
        return self.steps.in_order(items, self.name, threads, stats.text, stats.ignored)

    def __str__(self) -> str:
        """A description for errors."""
        if isinstance(self.source, Stream):
            return f"{len(self.source)} byte ranges of {self.source.sizes().sum():,} bytes"
        return f"{len(self.source)} samples from {self.source.name(0)!r} on"

    def _streamed(self, stream: Stream, ignored: Counter[str]) -> Iterator[Item]:
        size = number = 0
        for document in stream.documents():
            if begins is not None:
                begins(document.name)
            size += document.size
            if self.share is not None and not self.share.has(_key(document)):
                continue
            if document.left_out:
                ignored[document.left_out] += 1
                continue
            count_values(document.ignored, ignored)
            read = self.steps.shaped(document.sample, ignored)
            yield Item(document.name, read, size, document.original)
            number, size = number + 1, 0
            if number == self.limit:
                break
        ignored.update(stream.left_out())


def _key(document: Document) -> str:
    """Return the key of a document, or its name if it has no key."""
    sample = document.sample
    if isinstance(sample, SampleError):
        return str(sample.where.get("key", document.name))
    return str(sample["__key__"])


def _at_random(source: Source, steps: Steps, threads: int, ignored: Counter[str]) -> Iterator[Item]:
    if _is_scattered(source, steps):
        every = _nearby(source, steps, ignored)
    else:
        every = _in_order(source, steps, threads, ignored)
    for (index, read), size in zip(every, listed(source.sizes()), strict=True):
        original = None
        if not isinstance(read, SampleError | Filtered):
            original = source.original(index, sample_of(read)["__key__"])
        yield Item(source.name(index), read, size, original)
    ignored.update(source.left_out())
    source.check_unchanged()


def _in_order(
    source: Source, steps: Steps, threads: int, ignored: Counter[str]
) -> Iterator[tuple[int, Read]]:
    """Yield all samples in order, after their `steps`; a bad sample is represented by its error.

    Files in the page cache are read fastest without threads, which would only contend with each
    other. If reading waits for a disk or a network, more and more chunks are read ahead. Steps for
    images and audio run in `threads` threads, as codecs release the GIL.
    """
    ahead = busy = 2 * threads if threads > 1 and steps.decode else 0
    with ThreadPoolExecutor(max(threads, _MAX_THREADS)) as pool, prefetched(source) as samples:

        def start(chunk: range) -> tuple[int, Callable[[], _Chunk]]:
            if not ahead:  # read by this thread
                return chunk.start, partial(_read, samples, steps, chunk)
            return chunk.start, pool.submit(_read, samples, steps, chunk).result

        most = iter(lambda: ahead, None)
        chunks = _chunks(source.sizes(), _chunk_samples(steps))
        try:
            for number, read in prefetch(chunks, start, most):
                chunk = read()
                ahead = min(ahead + 1, _MAX_THREADS) if chunk.waited else max(ahead - 1, busy)
                ahead = 0 if begins else ahead
                ignored.update(chunk.ignored)
                yield from enumerate(chunk.samples, number)
        finally:
            pool.shutdown(cancel_futures=True)


class _Chunk(NamedTuple):
    """Samples that were read together, what was ignored, and whether reading waited for I/O."""

    samples: list[Read]
    ignored: Counter[str]
    waited: bool


def _is_scattered(source: Source, steps: Steps) -> bool:
    """Return whether samples are small, and consecutive ones are far apart on the disk."""
    if source.requests or steps.decode or not source.is_scattered:
        return False
    return int(source.sizes().sum()) <= _SMALL * len(source)


def _nearby(source: Source, steps: Steps, ignored: Counter[str]) -> Iterator[tuple[int, Read]]:
    """Like `_in_order`, but reads many samples at a time, in the order in which they are stored.

    The number adapts to the bytes read, as sizes in a dataset may be those of compressed samples.
    """
    first, most = 0, _CHUNK_SCATTERED
    while first < len(source):
        last = min(first + most, len(source))
        limit = _SCATTERED_BYTES if most > _CHUNK_SAMPLES else None
        try:
            chunk = _read(source, steps, source.nearby(first, last), limit)
        except _TooLargeError:
            most = max(most // 4, _CHUNK_SAMPLES)
            continue
        ignored.update(chunk.ignored)
        yield from enumerate(chunk.samples, first)
        first = last


class _TooLargeError(Exception):
    """The samples of a chunk together take too much memory."""


def _chunk_samples(steps: Steps) -> int:
    """Return how many samples are read together: few if each takes a lot of work or memory."""
    if not steps.decode:
        return _CHUNK_SAMPLES
    raw = steps.images is not None and steps.images.options.format == "raw"
    return 1 if raw else _CHUNK_STEPS


def _read(
    source: Source | Prefetched, steps: Steps, indices: Sequence[int], limit: int | None = None
) -> _Chunk:
    """Return the samples at `indices`, read in that order and returned in ascending order.

    Raises _TooLargeError if they have more than `limit` bytes.
    """
    began, worked = time.perf_counter(), time.thread_time()
    samples: dict[int, Read] = {}
    ignored: Counter[str] = Counter()
    size = 0
    for index in indices:
        if begins is not None:
            begins(source.name(index))
        try:
            sample = source[index]
            if limit is not None:
                size += sum(map(_bytes, sample.values()))
                if size > limit:
                    raise _TooLargeError
            samples[index] = steps.shaped(sample, ignored)
        except SampleError as error:
            samples[index] = error
    waited = time.perf_counter() - began > _WAITING * (time.thread_time() - worked)
    return _Chunk([samples[index] for index in sorted(samples)], ignored, waited)


def _bytes(value: Any) -> int:
    """Approximate size of a value in memory, without Python's object overhead."""
    return len(value) if isinstance(value, bytes | str) else getattr(value, "nbytes", 8)


def _chunks(sizes: Sizes, most: int) -> Iterator[range]:
    """Consecutive samples that one thread reads at a time, limited in number and bytes."""
    first, chunk_bytes = 0, 0
    for index, size in enumerate(listed(sizes)):
        if index - first == most or (index > first and chunk_bytes + size > _CHUNK_BYTES):
            yield range(first, index)
            first, chunk_bytes = index, 0
        chunk_bytes += size
    if len(sizes):
        yield range(first, len(sizes))
