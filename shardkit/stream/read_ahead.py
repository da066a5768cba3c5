"""Reads remote samples ahead of the loop, and tells the cache when each page is needed next.

The order of all epochs is known, so what comes next is requested before it is needed, and what
makes room in the cache is needed last (Belady's rule; Dryden et al., "Clairvoyant Prefetching for
Distributed Machine Learning I/O", SC 2021).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from shardkit.dataset import Dataset
from shardkit.page_cache import PAGE
from shardkit.pages import Pages, file_id
from shardkit.remote.path import RemotePath
from shardkit.stream.order import Order
from shardkit.stream.reading import Samples, sizes
from shardkit.stream.schedule import Step

if TYPE_CHECKING:
    import numpy.typing as npt

_THREADS = 32  # that read ahead, each waiting for one request
_BYTES = 128 << 20  # of samples that are read ahead, at most
_SHARE = 4  # one of so many bytes of the cache, at most
_STEPS = 4  # that are added at a time, so that the first batch does not wait for all of them


class NextUse:
    """When the page of a shard is needed next: a number of windows, counted over the epochs."""

    def __init__(self, order: Order, datasets: list[Dataset], parts: frozenset[int] | None) -> None:
        """`parts` are those whose samples go through the cache; None: all."""
        self._order, self._parts = order, parts
        self._windows = order.windows
        self._now = (-1, -1)
        self._when: npt.NDArray[np.float64]
        every = np.concatenate([sizes(dataset) for dataset in datasets])
        firsts = (every.cumsum() - every).tolist()
        # By the name in the cache: the first sample, samples, and bytes of a shard.
        self._shards: dict[str, tuple[int, int, int]] = {}
        shards = ((dataset, shard) for dataset in datasets for shard in range(dataset.shards))
        for first, (dataset, shard) in zip(firsts, shards, strict=True):
            path = dataset.shard_path(shard)
            if isinstance(path, RemotePath) and (info := path.store.find(path.key)) is not None:
                samples, _ = dataset.extent(shard)
                self._shards[file_id(path, info)] = first, samples, info.size

    def at(self, epoch: int, position: int) -> None:
        """The loop has come to a position of an epoch."""
        now = epoch, position // self._order.parts // self._order.window
        if now == self._now:
            return
        self._now = now
        when = np.full(self._order.blocks, np.inf)
        for later in (0, 1):
            for window in self._order.uses(epoch + later, self._parts):
                time = window + later * self._windows
                when = np.where(time >= now[1], np.minimum(when, time), when)
        self._when = when + epoch * self._windows

    def __call__(self, file: str, number: int) -> float:
        shard = self._shards.get(file)
        if shard is None:  # an index, which is in memory once it is read
            return math.inf
        first, samples, size = shard
        if not samples:
            return math.inf
        # Samples are not of one size: half a page on either side is taken as well.
        begin, end = (max(number - 0.5, 0) * PAGE / size, (number + 1.5) * PAGE / size)
        blocks = self._order.blocks_of(
            first + min(int(begin * samples), samples - 1),
            first + min(int(end * samples), samples - 1),
        )
        return float(self._when[blocks].min())


def read_ahead(
    samples: Samples, pages: Pages, steps: Iterable[Step], mean: float, next_use: NextUse | None,
    epoch: int,
) -> Iterator[Step]:  # fmt: skip
    """The steps, whose samples are read, some steps before they are given.

    mean: bytes of a sample.
    """
    limit = pages.cache.limit
    most = max(min(_BYTES, _BYTES if limit is None else limit // _SHARE) / max(mean, 1), 1)
    left, waiting, ahead = iter(steps), deque[Step](), 0
    if next_use is not None:
        pages.next_use = next_use

    numbers: SimpleQueue[int | None] = SimpleQueue()
    stopped = threading.Event()

    def work() -> None:
        while (number := numbers.get()) is not None and not stopped.is_set():
            with suppress(Exception), pages.ahead():  # the loop will meet the error, and raise it
                samples.read(number)

    # Daemons: a program ends without what it has not asked for.
    threads = [
        threading.Thread(target=work, name="shardkit-read-ahead", daemon=True)
        for _ in range(_THREADS)
    ]
    for thread in threads:
        thread.start()
    try:
        while True:
            for _ in range(_STEPS):
                step = None if ahead > most and waiting else next(left, None)
                if step is None:
                    break
                for number in dict.fromkeys(step.number.tolist()):
                    numbers.put(number)
                ahead += len(step.number)
                waiting.append(step)
            if not waiting:
                return
            step = waiting.popleft()
            ahead -= len(step.number)
            if next_use is not None:
                next_use.at(epoch, max(step.after.samples - 1, 0))
            yield step
    finally:
        stopped.set()
        for _ in threads:  # no global: at exit these may be gone
            numbers.put(None)
