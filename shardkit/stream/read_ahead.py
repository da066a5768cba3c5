"""Reads remote samples ahead of the loop, and tells the cache when each page is needed next.

The order of all epochs is known, so samples are requested before they are needed, and the cache
evicts the page whose next use is furthest away (Belady's rule; Dryden et al., "Clairvoyant
Prefetching for Distributed Machine Learning I/O", SC 2021).
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from shardkit.dataset.dataset import Dataset
from shardkit.formats.wds.remote_index_cache import index_id
from shardkit.helpers.prefetch import prefetch
from shardkit.sample import Sample
from shardkit.storage.page_cache import PAGE
from shardkit.storage.pages import Pages, file_id
from shardkit.storage.remote.path import RemotePath
from shardkit.stream.order import Order
from shardkit.stream.reading import Samples
from shardkit.stream.sampling import AnyOrder
from shardkit.stream.schedule import Step

_THREADS = 64  # threads that read ahead, each of which waits for one request
_BYTES = 128 << 20  # maximum bytes of samples that are read ahead
_FIRST = 1024  # samples queued at a time, so that the first batch does not wait for all of them


class NextUse:
    """When the page of a shard is needed next: a window number, counted across epochs."""

    def __init__(self, order: Order, datasets: list[Dataset]) -> None:
        self._order = order
        self._windows = order.windows
        self._now: tuple[int, int, frozenset[int] | None] | None = None
        self._when: npt.NDArray[np.float64] = np.zeros(order.blocks)  # of each block
        # File id in the cache -> uses of the shard: the number of its dataset's first sample, the
        # dataset, the number of the shard in it, and the shard's size in bytes.
        self._shards: defaultdict[str, list[tuple[int, Dataset, int, int]]] = defaultdict(list)
        self._kept: set[str] = set()  # ids of cached shard indexes, which the next opening reads
        firsts = itertools.accumulate(map(len, datasets), initial=0)
        shards = (
            (f, d, n) for f, d in zip(firsts, datasets, strict=False) for n in range(d.shards)
        )
        for first, dataset, shard in shards:
            path = dataset.shard_path(shard)
            if isinstance(path, RemotePath) and (info := path.store.find(path.key)) is not None:
                self._shards[file_id(path, info)].append((first, dataset, shard, info.size))
                self._kept.add(index_id(path, info))

    def at(self, epoch: int, position: int, parts: frozenset[int] | None) -> None:
        """Update the next uses: the loop has reached this position of an epoch.

        `parts` are the parts whose samples go through the cache; None: all.
        """
        now = epoch, position // self._order.parts // self._order.window, parts
        if now == self._now:
            return
        self._now = now
        when = np.full(self._order.blocks, np.inf)
        for later in (0, 1):
            for window in self._order.uses(epoch + later, parts):
                time = window + later * self._windows
                when = np.where(time >= now[1], np.minimum(when, time), when)
        self._when = when + epoch * self._windows

    def __call__(self, file: str, number: int) -> float:
        if file not in self._shards:  # an index, which stays in memory once it is read
            return 0 if file in self._kept else math.inf
        return min(self._next(number, *where) for where in self._shards[file])

    def _next(self, number: int, first: int, dataset: Dataset, shard: int, size: int) -> float:
        samples, _ = dataset.extent(shard)
        # Samples differ in size, so include half a page on either side.
        begin, end = (max(number - 0.5, 0) * PAGE / size, (number + 1.5) * PAGE / size)
        within = np.minimum([int(begin * samples), int(end * samples) + 1], samples)
        start, stop = dataset.before(dataset.start(shard) + within).tolist()
        if start == stop:  # a view without any of these samples
            return math.inf
        blocks = self._order.blocks_of(first + start, first + stop - 1)
        return float(self._when[blocks].min())


class ReadAhead:
    """Reads the samples of the next steps in threads, and tells the cache when pages are needed.

    Each sample is read once and passed on with its step, so samples that were read ahead take no
    space in the cache, and a small cache cannot evict them.
    """

    def __init__(
        self, samples: Samples, pages: Pages, order: AnyOrder, datasets: list[Dataset]
    ) -> None:
        self._samples = samples
        self._next_use = None
        if isinstance(order, Order) and all(dataset.is_in_order for dataset in datasets):
            self._next_use = NextUse(order, datasets)
        if self._next_use is not None:
            pages.next_use = self._next_use
        stored = np.array([d.extent(n) for d in datasets for n in range(d.shards)]).sum(axis=0)
        self._most = max(_BYTES * int(stored[0]) // max(int(stored[1]), 1), 1)  # samples

    def steps(
        self, steps: Iterable[Step], epoch: int, parts: frozenset[int] | None
    ) -> Iterator[Step]:
        """Yield the steps, while samples of later steps are read ahead.

        `parts` are the parts whose samples go through the cache; None: all.
        """
        steps = iter(steps)
        first = next(steps, None)
        if first is None:
            return
        self._come_to(first, epoch, parts)  # so that reads do not see the last epoch's next uses
        reads: SimpleQueue[tuple[int, Future[Sample]] | None] = SimpleQueue()
        closed = threading.Event()
        threads = [
            # Daemon threads, so that a program can exit without waiting for unneeded samples.
            threading.Thread(
                target=_read, args=(self._samples, reads, closed), name="shardkit-read-ahead",
                daemon=True,
            )
            for _ in range(_THREADS)
        ]  # fmt: skip
        for thread in threads:
            thread.start()

        def start(step: Step) -> Step:
            futures = {number: Future[Sample]() for number in step.number.tolist()}
            for read in futures.items():
                reads.put(read)
            return step._replace(ahead=futures)

        try:
            ahead = (min(some, self._most) for some in itertools.count(_FIRST, _FIRST))
            every = itertools.chain([first], steps)
            for step in prefetch(every, start, ahead, lambda step: len(step.number)):
                self._come_to(step, epoch, parts)
                yield step
        except GeneratorExit:  # the other samples are not needed
            closed.set()
            raise
        finally:
            for _ in threads:  # not over a global, which may be gone at interpreter exit
                reads.put(None)

    def _come_to(self, step: Step, epoch: int, parts: frozenset[int] | None) -> None:
        if self._next_use is not None:
            self._next_use.at(epoch, max(step.after.samples - 1, 0), parts)


def _read(
    samples: Samples, reads: SimpleQueue[tuple[int, Future[Sample]] | None], closed: threading.Event
) -> None:
    """Read samples until the queue ends."""
    while (read := reads.get()) is not None:
        number, future = read
        if closed.is_set():
            future.cancel()
            continue
        try:
            future.set_result(samples.read(number))
        except BaseException as error:  # raised when the sample is used
            future.set_exception(error)
        del read, future  # else the sample would stay in memory until the next one
