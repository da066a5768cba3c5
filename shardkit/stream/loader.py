"""`Loader`: threads prefetch the batches of an epoch, which are delivered in order."""

from __future__ import annotations

import atexit
import copy
import functools
import heapq
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from shardkit.errors import UsageError
from shardkit.helpers.clock import IDLE, enter
from shardkit.helpers.familiar import Familiar
from shardkit.helpers.keywords import takes
from shardkit.helpers.words import parse_size
from shardkit.options import check_numbers
from shardkit.stream.batch_sizes import BatchSizes
from shardkit.stream.batches import Allocate, Batch, BatchMaker, FinishedBatch, Memory
from shardkit.stream.dataset import BadSampleBudget, StreamingDataset, checked_epoch, not_indexed
from shardkit.stream.options import StreamKeywords, StreamOptions
from shardkit.stream.profile import Profile, Times
from shardkit.stream.quality import warn_of_small_cache, warn_of_sorted
from shardkit.stream.ranks import Comparison, Ranks, default_threads
from shardkit.stream.schedule import (
    START,
    Schedule,
    Step,
    StreamProgress,
    load_state,
    save_state,
    walk,
)
from shardkit.stream.stream import Source
from shardkit.transforms.transforms import Transforms

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Minimum rows per chunk if samples are transformed. A thread waits for the GIL once per chunk, for
# 5 ms if another thread runs a Python loop, so small chunks would leave it idle.
_LEAST_ROWS = 8
_SLOW = 0.005  # seconds per batch above which waking threads pays off
_END_SECONDS = 5.0  # seconds to wait for threads to end: a hanging one must not delay Ctrl-C


class Loader(Familiar):
    """Load the batches of this rank. Each iteration yields the batches of one epoch, as dicts.

    Values are NumPy arrays with one row per sample (images: (batch, height, width, 3), numbers:
    (batch,)) or lists. `__key__` is a list of keys. `valid`, bool of shape (batch,), is False for
    padding and for samples that replace bad ones.

    Each iteration is the next epoch. After a state was loaded, the next iteration continues from
    that state. The batches do not depend on `threads` or `prefetch`.
    """

    threads: int | None
    prefetch: int

    @takes(StreamOptions)
    def __init__(
        self,
        source: StreamingDataset | Source,
        *,
        threads: int | None = None,
        prefetch: int = 4,
        prefetch_bytes: int | str = "1GiB",
        profile: bool = False,
        **options: Unpack[StreamKeywords],
    ) -> None:
        """`source` is a StreamingDataset, a path, an open dataset, or a list of paths and datasets.

        threads: number of threads that make batches. 0: the calling thread makes them. None: one
            per processor of this rank, or the calling thread if that is faster (for a single array
            field that is read from memory). More than there are processors work at a time only
            while they wait for storage or run functions of yours.
        prefetch: maximum number of batches that are made ahead.
        prefetch_bytes: maximum size of these batches in bytes, such as "1GiB". Those that are not
            made yet are estimated from the largest so far. At least one batch is made ahead.
        profile: measure where the time of an iteration is spent; see the property `profile`.

        Raises UsageError for invalid options, and for a dataset that is smaller than a batch.
        """
        if not isinstance(source, StreamingDataset):
            source = StreamingDataset(source, **options)
        elif options:
            source = source.with_options(**options)
        if not source.options.batched:
            raise UsageError(
                "no batch size is given", expected="batch_size=, global_batch_size= or batching="
            )
        self.dataset = source
        self.threads = threads
        self.prefetch = prefetch
        check_numbers(self, threads=0, prefetch=1)
        self.prefetch_bytes = parse_size(prefetch_bytes)
        self.epoch = source.epoch  # of the last iteration that was started, else of the next one
        self.errors: list[dict[str, Any]] = []  # the samples that were replaced in this epoch
        self._profile = Profile() if profile else None  # of the last iteration
        self._progress = START
        self._used = False  # whether `epoch` has been iterated from `_progress`
        self._loaded = False  # whether the next iteration continues from a loaded state
        self._tokens = [0, 0]  # of this epoch: real tokens, and all tokens with padding
        self._ranks = Ranks()
        self._sizes = BatchSizes()  # of all epochs
        self._identity = source.stream.identity
        self.dataset.schedule()  # raises for invalid options

    def __repr__(self) -> str:
        left = f"{len(self):,} batches, {self.remaining:,} left, of epoch {self._position()[0]:,}"
        return f"<{type(self).__name__} {self.dataset.about}; {left}>"

    def __len__(self) -> int:
        """Number of batches in the whole current epoch, or in the next if none is being iterated.

        It stays the same after a state was loaded: `remaining` is the number of batches left.
        """
        return self.dataset.schedule().steps(self._position()[0])

    @property
    def remaining(self) -> int:
        """Number of batches left in the current epoch, or in the next if none is being iterated."""
        return self.dataset.schedule().steps(*self._position())

    def __getitem__(self, index: object) -> NoReturn:
        """Raises UsageError: a DataLoader would ask for samples by index."""
        raise not_indexed("Loader", index)

    def __iter__(self) -> Iteration:
        if self._next() == (0, START) and self.dataset.world().rank == 0:
            warn_of_sorted(self.dataset.stream)
            warn_of_small_cache(self.dataset.stream)
        if self._profile is not None:
            self._profile = Profile()
        # A schedule of its own, as each keeps the plan of one window, and others are elsewhere.
        iteration = Iteration(self, copy.copy(self.dataset.schedule()), self._profile)
        self.errors = iteration.bad.errors
        return iteration

    @property
    def settings(self) -> dict[str, Any]:
        """The options of the loader itself, without those of its dataset."""
        return {
            "threads": self.threads,
            "prefetch": self.prefetch,
            "prefetch_bytes": self.prefetch_bytes,
            "profile": self.measured,
        }

    def with_options(self, **options: Any) -> Loader:
        """Return the same loader, at its beginning, with other options of any kind."""
        own = {name: options.pop(name, value) for name, value in self.settings.items()}
        return type(self)(self.dataset, **own, **options)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last delivered batch, as JSON values, equal on all ranks."""
        return save_state(self._identity, self.epoch, self._progress)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state`, with any number of ranks. Reads no data.

        Raises UsageError for an invalid state, and for a state of another dataset or other
        settings.
        """
        self.epoch, self._progress = load_state(state, self._identity, self.dataset.schedule())
        self._used, self._loaded = False, True
        self.epoch, self._progress = self._next()

    def _skip_to(self, number: int) -> None:
        """Start the next iteration at batch `number` of its epoch. Reads no data."""
        self.epoch, _ = self._next()
        self._progress, self._used = self.dataset.schedule().progress(self.epoch, number), False

    def set_epoch(self, epoch: int) -> None:
        """Set the `epoch` of the next iteration.

        The iteration starts at the beginning of the epoch. If a state inside this epoch has just
        been loaded, it continues from that state instead. An iteration that has already begun, but
        has not delivered a batch yet, changes to this epoch, too. Raises UsageError for an invalid
        number.
        """
        epoch = checked_epoch(epoch)
        if self._used or epoch != self.epoch:
            self.epoch, self._progress, self._used, self._loaded = epoch, START, False, False

    @property
    def padding(self) -> float:
        """Share of padding in the tokens of this epoch's batches so far."""
        real, every = self._tokens
        return 1 - real / every if every else 0.0

    @property
    def measured(self) -> bool:
        """Whether the loader was made with `profile=True`."""
        return self._profile is not None

    @property
    def profile(self) -> Times:
        """Where the time of the last iteration was spent so far. It prints as a table.

        Raises UsageError if the loader was created without `profile=True`.
        """
        if self._profile is None:
            raise UsageError("the loader has no profile", fix="create it with profile=True")
        return self._profile.times

    def _next(self) -> tuple[int, StreamProgress]:
        """Epoch and progress at which the next iteration starts."""
        return (self.epoch + 1, START) if self._used else self._position()

    def _position(self) -> tuple[int, StreamProgress]:
        """The current epoch and progress; at the end of an epoch, the beginning of the next."""
        if self._progress != START and self.dataset.schedule().is_over(self.epoch, self._progress):
            return self.epoch + 1, START
        return self.epoch, self._progress

    def _begin(self) -> tuple[int, StreamProgress]:
        """Epoch and progress at which an iteration starts. Called for its first batch."""
        self.epoch, self._progress = self._next()
        self._used = self._loaded = False
        self._tokens = [0, 0]
        return self.epoch, self._progress

    def _delivered(self, epoch: int, progress: StreamProgress, tokens: tuple[int, int]) -> None:
        self.epoch, self._progress, self._used = epoch, progress, True
        self._tokens = [done + more for done, more in zip(self._tokens, tokens, strict=True)]

    # Overridden by `shardkit.torch.Loader`.

    def _transforms(self) -> Transforms:
        """Return the transforms of an iteration's batches."""
        return self.dataset.stream.transforms

    def _memory(self) -> Allocate:
        """Return the function that allocates the arrays of an iteration's batches."""
        return Memory(self.prefetch + 2).take

    def _dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype in which arrays of this dtype are delivered."""
        return dtype

    def _convert(self, batch: Batch) -> Batch:
        """Convert a finished batch, in the thread that finished it."""
        stream = self.dataset.stream
        return batch if stream.own_collate else stream.transforms.in_numpy(batch)

    def _decoded(self, made: FinishedBatch, step: Step) -> FinishedBatch:
        """Wait for what is left to do for a batch, in the thread that iterates."""
        return made

    def _deliver(self, batch: Batch) -> Batch:
        """Return the last step before a batch is delivered, in the thread that iterates."""
        return batch


class Iteration:
    """Iterator over the batches of one epoch. `close`, or its deletion, stops its threads."""

    def __init__(self, loader: Loader, schedule: Schedule, profile: Profile | None) -> None:
        self.bad = BadSampleBudget(loader.dataset.options)
        self._loader, self._schedule, self._profile = loader, schedule, profile
        self._maker = BatchMaker(
            loader.dataset.stream, loader._memory(), loader._dtype, loader._transforms()
        )
        self._epoch = 0
        # Steps that are not in the queue yet, with their weights; the first, if it was taken.
        self._steps: Iterator[tuple[Step, float]] | None = None
        self._upcoming: tuple[Step, float] | None = None
        self._comparison: Comparison | None = None
        self._queue: deque[_PendingBatch] = deque()
        self._made = 0  # number of batches that were queued
        self._closed = False
        self._process = os.getpid()
        self._taking = threading.Lock()  # held while a thread is in `__next__`, or below
        self._inline = loader.threads is None and self._maker.single_array
        self._threads = _Threads(profile)
        with self._taking:
            _iterations[id(self)] = self
            _end_if_exiting()
            if not self._inline:
                self._threads.start(loader.threads)
            # Also called at interpreter exit.
            self._end = weakref.finalize(self, self._threads.stop)
            _watch_exit()

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Batch:
        """Return the next batch. Raises UsageError in a forked process or for concurrent calls."""
        if self._process != os.getpid():
            raise UsageError(
                "an iteration cannot continue in a forked process, as its threads do not run there",
                fix="iterate over the Loader in that process, or send it batches",
            )
        if not self._taking.acquire(blocking=False):
            _end_if_exiting()
            raise UsageError(
                "another thread is taking a batch from this iteration",
                fix="take batches in one thread and pass them on, or use a lock",
            )
        try:
            _end_if_exiting()
            if self._profile is None:
                return self._take()
            self._profile.ask()
            batch = self._take()
            self._profile.give(batch)
            return batch
        finally:
            self._taking.release()

    def _take(self) -> Batch:
        try:
            self._prefetch(1)
            if self._comparison is not None:
                self._comparison.check()
            try:
                pending = self._queue.popleft()
            except IndexError:
                raise StopIteration from None
            self._prefetch()
            if self._closed:  # by another thread: no thread is left to make the batch
                raise _closed()
            made = self._loader._decoded(pending.made.result(), pending.step)
            batch = self.bad.counted(made)
            self._prefetch()  # more, if this was one of the first batches
            batch = self._loader._deliver(batch)  # may call functions of the user
        except BaseException:
            self.close()
            raise
        self._loader._delivered(*pending.after, made.tokens)
        return batch

    def close(self) -> None:
        """Stop the threads, after the rows that they are working on."""
        self._queue.clear()
        self._closed = True
        self._steps, self._upcoming = iter(()), None
        self._end()

    def _prefetch(self, least: int = 0) -> None:
        """Fill the prefetch queue. Without threads, only `least` batches are made."""
        loader, threads = self._loader, self._threads.size
        while len(self._queue) < (loader.prefetch if threads else least) and not self._closed:
            if self._steps is None:
                self._epoch, progress = loader._begin()  # not earlier: see `set_epoch`
                stream, world = loader.dataset.stream, loader.dataset.world()
                self._comparison = loader._ranks.begin(
                    loader._identity, stream.options, world, self._epoch, progress
                )
                steps = walk(self._schedule, self._epoch, progress)
                ahead = stream.ahead(steps, self._epoch, world)
                self._steps = ((step, stream.weight(step)) for step in ahead)
            self._upcoming = self._upcoming or next(self._steps, None)
            if self._upcoming is None or not self._fits(self._upcoming[1]):
                return
            (step, weight), self._upcoming = self._upcoming, None
            after = self._epoch, step.after
            pending = _PendingBatch(self._maker, step, weight, loader, after, threads)
            self._queue.append(pending)
            began = time.perf_counter()
            self._threads.make(pending, self._made)
            self._made += 1
            if self._inline and time.perf_counter() - began > _SLOW:  # probably disk reads
                self._inline = False
                self._threads.start(None)

    def _fits(self, weight: float) -> bool:
        """Return whether a batch of this weight may be in the queue with those that are."""
        sizes, queue = self._loader._sizes, [*self._queue]
        unknown = [one.weight for one in queue if not one.size]
        ahead = sum(one.size for one in queue) + sum(map(sizes.estimate, unknown))
        # An estimate from few batches may be far too small, so it must not be relied on for many.
        return not queue or (
            len(unknown) < sizes.known
            and ahead + sizes.estimate(weight) <= self._loader.prefetch_bytes
        )


# Python aborts if it exits while a daemon thread of the user's is in a library's code. So at exit,
# the main thread waits for each `__next__` in such a thread, and further ones end their thread.
_iterations: weakref.WeakValueDictionary[int, Iteration] = weakref.WeakValueDictionary()
_exiting = False


@functools.cache
def _watch_exit() -> None:
    """Register `end_at_exit` after the first `weakref.finalize`, to be called before those."""
    atexit.register(end_at_exit)


def end_at_exit() -> None:
    global _exiting  # noqa: PLW0603 - the interpreter exits once
    _exiting = True
    deadline = time.monotonic() + _END_SECONDS
    for reference in _iterations.valuerefs():
        iteration = reference()
        if iteration is not None and iteration._process == os.getpid():
            left = max(deadline - time.monotonic(), 0)
            if iteration._taking.acquire(timeout=left):
                iteration._taking.release()


def _end_if_exiting() -> None:
    """End a daemon thread without a message if the interpreter exits."""
    if _exiting and threading.current_thread().daemon:
        raise SystemExit


class _PendingBatch:
    """A batch in the prefetch queue. Its rows are made in chunks; the last chunk finishes it."""

    def __init__(
        self,
        maker: BatchMaker,
        step: Step,
        weight: float,
        loader: Loader,
        after: tuple[int, StreamProgress],
        threads: int,
    ) -> None:
        self.step = step
        self.after = after  # epoch and progress after this batch
        self.weight = weight  # see `Stream.weight`
        self.size = 0  # bytes, once it is made
        self.made: Future[FinishedBatch] = Future()
        self._maker, self._making = maker, maker.begin(step)
        self.workers = maker.workers
        self._convert, self._sizes = loader._convert, loader._sizes
        rows = len(step.number)
        if maker.share_between_threads:  # each thread should have two chunks, and must have one
            share = math.ceil(rows * loader.prefetch / max(maker.workers(threads), 1))
            size = min(max(math.ceil(share / 2), _LEAST_ROWS), share, maker.most_rows)
        else:
            size = rows
        self.chunks = [(start, min(start + size, rows)) for start in range(0, rows, size)]
        self._left = len(self.chunks)
        self._lock = threading.Lock()

    def read(self) -> None:
        """Read the samples, before `work` is called. `made` raises an error."""
        try:
            self._maker.read(self._making)
        except BaseException as error:
            self.fail(error)

    def work(self, start: int, stop: int) -> None:
        """Make rows `start` to `stop`. `made` raises the first error."""
        try:
            if not self.made.done():
                self._maker.fill(self._making, start, stop)
        except BaseException as error:
            self.fail(error)
        with self._lock:
            self._left -= 1
            if self._left:
                return
        try:
            if not self.made.done():
                made = self._maker.finish(self._making)
                enter("copy")
                made = made._replace(batch=self._convert(made.batch))
                self.size = self._sizes.add(made.batch, self.weight)
                self.made.set_result(made)
        except BaseException as error:
            self.fail(error)
        del self._making

    def fail(self, error: BaseException) -> None:
        """Abandon the batch, maybe while a thread waits for it."""
        with suppress(InvalidStateError):  # it was made, or has failed
            self.made.set_exception(error)


def _closed() -> UsageError:
    return UsageError(
        "the iteration was closed while a thread was taking a batch from it",
        fix="close it only when no thread takes batches from it",
    )


class _Threads:
    """Threads that read batches, and then make their chunks: those of the oldest batch first.

    They are started when there is work for them: at most as many work at a time as make it faster.
    """

    def __init__(self, profile: Profile | None) -> None:
        self._profile = profile
        self.size = 0  # the most threads
        # Batch number, start and stop of the rows (0 and 0: read it), batch. A heap.
        self._tasks: list[tuple[int, int, int, _PendingBatch]] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._threads: list[tuple[threading.Thread, SimpleQueue[None]]] = []
        # Queues to wake the threads that wait for tasks. The last comes first, as its memory is in
        # the processor's caches.
        self._idle: list[SimpleQueue[None]] = []

    def start(self, threads: int | None) -> None:
        """Allow this number of threads; None: one per processor of this rank."""
        self.size = default_threads() if threads is None else threads

    def make(self, pending: _PendingBatch, number: int) -> None:
        """Queue a batch, by its number, for the threads; or make it now if there are none."""
        if self.size:
            self._put((number, 0, 0, pending))
        else:
            pending.read()
            for start, stop in pending.chunks:
                pending.work(start, stop)

    def stop(self) -> None:
        """End all threads, after the rows they work on. Takes no lock, as a finalizer calls it."""
        if self._profile is not None:
            self._profile.end()
        self._stopped.set()
        threads = [*self._threads]
        for _, signal in threads:
            signal.put(None)
        deadline = time.monotonic() + _END_SECONDS
        for thread, _ in threads:
            if thread is not threading.current_thread():  # the finalizer may run in any thread
                thread.join(max(deadline - time.monotonic(), 0))

    def _put(self, *tasks: tuple[int, int, int, _PendingBatch]) -> None:
        """Queue tasks of one batch, and wake or start threads for them."""
        with self._lock:
            for task in tasks:
                heapq.heappush(self._tasks, task)
            working = len(self._threads) - len(self._idle)
            most = min(working + len(self._tasks), task[-1].workers(self.size))
            for _ in range(working, most):
                if self._idle:
                    self._idle.pop().put(None)
                    continue
                # A daemon: at exit, the interpreter joins all others before it calls `stop`.
                signal: SimpleQueue[None] = SimpleQueue()
                thread = threading.Thread(target=self._work, args=(signal,), daemon=True)
                thread.start()
                self._threads.append((thread, signal))

    def _next(self, signal: SimpleQueue[None]) -> tuple[int, int, int, _PendingBatch] | None:
        """Return the next task, or None: the thread with this signal is idle."""
        with self._lock:
            if self._tasks:
                return heapq.heappop(self._tasks)
            self._idle.append(signal)
            return None

    def _work(self, signal: SimpleQueue[None]) -> None:
        clock = None if self._profile is None else self._profile.work()
        while True:
            while (task := self._next(signal)) is not None:
                self._do(*task)
                enter(IDLE)
                del task  # else the batch would stay in memory until the next task
            if self._stopped.is_set():  # now, as the tasks that are left have failed
                break
            signal.get()
        if clock is not None:
            clock.stop()

    def _do(self, number: int, start: int, stop: int, pending: _PendingBatch) -> None:
        if self._stopped.is_set():
            pending.fail(_closed())
        elif stop:
            pending.work(start, stop)
        else:
            pending.read()
            (_, stop), *others = pending.chunks
            try:
                if others:
                    self._put(*((number, *chunk, pending) for chunk in others))
            except BaseException as error:  # no thread could be started, or memory ran out
                pending.fail(error)
            pending.work(0, stop)
