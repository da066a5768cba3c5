"""Worker processes: each gets one task at a time through a pipe, and is replaced if it dies.

Why not `multiprocessing`: its spawn method imports the caller's `__main__` again, which runs an
unguarded training script a second time, and its workers outlive a parent that is killed. Our
workers are plain interpreters that read tasks from stdin: when the parent dies for any reason,
stdin is closed, and they exit. When a worker dies, its stdout is closed, and the parent gives the
task to a new worker, once.

This module imports very little, so that workers start quickly: they import what they need while the
parent does the same, and makes the plan.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from shardkit.errors import (
    ShardkitError,
    ShardkitWarning,
    WorkerError,
    is_want_of_memory,
    memory_ran_out,
)
from shardkit.helpers.words import ended

if TYPE_CHECKING:
    from shardkit.conversion.work import Report, TaskProgress, Work

_START = """
import sys
sys.path = [p for p in sys.path if p]  # no modules of the current folder
import pickle
import os
# Not sys.stdin: the user's code may read it, and the interpreter closes it at exit, and aborts if a
# thread is reading from it.
tasks = open(os.dup(0), "rb", closefd=False)
nothing = os.open(os.devnull, os.O_RDONLY)
os.dup2(nothing, 0)
try:
    sys.path[:] = pickle.load(tasks)
except Exception:
    sys.exit(1)  # the parent was killed
from shardkit.conversion.pool import serve
serve(tasks)
"""

# Number of processes that are started before it is known whether there are tasks for them.
_EARLY = 4
LITTLE = 64 << 20  # bytes that this process copies in about the time that a worker needs to start
_SIGKILL = 9  # Windows has no name for it


def run_here(works: Iterator[Work], report: Report) -> None:
    """Run all tasks in this process, one after another."""
    from shardkit.conversion.work import run_task

    for work in works:
        run_task(work, report)
        _last = work  # keeps its source shards open: the next task may begin in one of them


class Pool:
    """Up to `workers` processes. With `early`, some are started while the plan is being made.

    With `here`, one of them is this process, which is ready before another one has started.
    """

    def __init__(
        self, workers: int, preload: Sequence[str] = (), *, early: bool = True, here: bool = False
    ) -> None:
        """`preload` names the modules that workers import before their first task."""
        self.workers = workers
        self._preload = preload
        self._here = here
        self._inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._started: list[_Worker] = []
        if early:
            self._start(min(workers - here, _EARLY))

    def run(self, works: Iterator[Work], tasks: int, report: Report) -> None:
        """Run all `tasks`; `report` is called in this thread.

        Raises the first error that a task raises, or WorkerError if two workers die on the same
        task; no process is left running then.
        """
        self._start(min(self.workers, tasks) - self._here)
        busy = 0

        def hear() -> None:
            nonlocal busy
            kind, content = self._events.get()
            if kind == "progress":
                report(content)
            elif kind == "failed":
                raise content
            elif (following := next(works, None)) is not None:
                self._inbox.put(following)
            else:
                busy -= 1

        def meanwhile(progress: TaskProgress) -> None:
            report(progress)
            while not self._events.empty():
                hear()

        try:
            for work in itertools.islice(works, len(self._started)):
                self._inbox.put(work)
                busy += 1
            if self._here:
                run_here(works, meanwhile)
            while busy:
                hear()
        except BaseException:
            self.kill()
            raise

    def _start(self, workers: int) -> None:
        while len(self._started) < workers:
            self._started.append(_Worker(self._inbox, self._events, self._preload))

    def kill(self) -> None:
        """Kill all processes immediately; `run` starts others.

        An interrupted task leaves nothing that looks finished.
        """
        for worker in self._started:
            worker.kill()
            self._inbox.put(None)
        for worker in self._started:
            worker.thread.join(0.5)  # do not wait for a process that is blocked in disk I/O
        self._started.clear()
        self._inbox, self._events = queue.SimpleQueue(), queue.SimpleQueue()  # the old end theirs

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


# What a worker reports: "progress" with a Progress, "begins" with the name of a sample if a worker
# has died on the task before, "failed" with an error, or "done".
_Event: TypeAlias = tuple[str, Any]


class _Worker:
    """One process, and the thread in the parent that starts it and communicates with it."""

    def __init__(
        self,
        inbox: queue.SimpleQueue[Work | None],
        events: queue.SimpleQueue[_Event],
        preload: Sequence[str],
    ) -> None:
        self._inbox = inbox
        self._events = events
        self._preload = preload
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self.thread = threading.Thread(target=self._drive, daemon=True)
        self.thread.start()

    def kill(self) -> None:
        self._killed = True
        process = self._process
        if process is not None:
            process.kill()

    def _drive(self) -> None:
        if hasattr(signal, "pthread_sigmask"):
            # The child inherits the mask: Ctrl-C reaches the whole group, but is for the parent.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with contextlib.suppress(WorkerError):  # retried, and then raised, when there is a task
            self._start()
        while (work := self._inbox.get()) is not None and not self._killed:
            try:
                self._events.put(self._do(work))
            except ShardkitError as error:
                self._events.put(("failed", error))
            except Exception as error:  # the task, with the user's own source, cannot be pickled
                self._events.put(("failed", not_picklable(error)))
        self._end()

    def _do(self, work: Work) -> _Event:
        """Run a task, in a second process if the first one dies; returns "done" or "failed"."""
        from shardkit.conversion.work import is_finished

        for again in (False, True):
            if self._process is None:
                self._start()
            reported: list[TaskProgress] = []
            begun: list[str] = []  # of the second process: the sample that it has begun
            try:
                return self._talk(replace(work, names_samples=again), reported, begun)
            except (EOFError, OSError, pickle.UnpicklingError):
                code = self._end()
            if self._killed or is_finished(work.folder):  # it died after finishing the task
                break
            if again:
                raise _died_twice(work, code, begun)
            for progress in reported:
                self._events.put(("progress", -progress))
            remove_unfinished(work)
        return "done", None

    def _talk(self, work: Work, reported: list[TaskProgress], begun: list[str]) -> _Event:
        """Send a task, pass on the progress that the process reports, and return its last event."""
        assert self._process is not None
        _send(self._process.stdin, pickle.dumps(work))
        while True:
            event: _Event = pickle.load(self._process.stdout)  # type: ignore[arg-type]
            if event[0] == "begins":
                begun[:] = [event[1]]
                continue
            if event[0] != "progress":
                return event
            reported.append(event[1])
            self._events.put(event)

    def _start(self) -> None:
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except OSError as error:
            raise _not_started(error) from error
        self._process = process
        if self._killed:
            process.kill()
        with contextlib.suppress(OSError):  # if it dies now, that is noticed with its first task
            _send(process.stdin, sys.path)
            _send(process.stdin, self._preload)

    def _end(self) -> int:
        """Close the pipes, which makes a live process exit; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # unsent data does not matter any more
                if pipe is not None:
                    pipe.close()
        return process.wait()


def remove_unfinished(work: Work) -> None:
    """Remove the files that a dead worker left of a task."""
    from shardkit.conversion.work import UNFINISHED
    from shardkit.storage import fs

    for path in work.folder.parent.glob(f"{work.folder.name}.*{UNFINISHED}"):
        fs.remove(path)


def _died_twice(work: Work, code: int, begun: list[str]) -> WorkerError:
    last = f"; the last sample that it began is {begun[0]!r}" if begun else ""
    return WorkerError(
        f"two workers died on the same task; the last {ended(code)}",
        found=f"task {work.number}: {work.input}{last}",
        fix="if memory ran out, use fewer --workers; then run the same command again: it continues"
        " where it stopped"
        if code == -_SIGKILL or not begun
        else "leave that sample out of the source, or correct the transform that fails on it",
    )


def _send(pipe: Any, message: Any) -> None:
    pickle.dump(message, pipe)
    pipe.flush()


def _not_started(error: OSError) -> WorkerError:
    return WorkerError(
        "a worker process cannot be started",
        found=f"{sys.executable}: {error.strerror}",
        fix="use fewer --workers, or --workers 0 to work in this process",
    )


def not_picklable(error: Exception) -> WorkerError:
    return WorkerError(
        "the source cannot be sent to worker processes",
        found=f"{type(error).__name__}: {error}",
        fix="use workers=0, or define your class or function in a module that can be imported",
    )


# --- in the worker -------------------------------------------------------------------------------


def serve(tasks: BinaryIO) -> None:
    """Run the tasks that arrive on stdin, until it is closed."""
    for name, value in (("TOKENIZERS_PARALLELISM", "false"), ("OPENBLAS_NUM_THREADS", "1")):
        os.environ.setdefault(name, value)  # the processes already run in parallel
    from shardkit.conversion import read_ahead
    from shardkit.conversion.work import run_task

    try:
        preload = pickle.load(tasks)
    except Exception:
        sys.exit(1)  # the parent was killed
    for module in preload:
        with contextlib.suppress(ImportError, MemoryError):  # the task that needs it reports this
            importlib.import_module(module)
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of the user's code must not end up in the channel
    warnings.simplefilter("ignore", ShardkitWarning)  # the parent has issued them while planning
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(tasks, inbox), daemon=True).start()
    while True:
        task = inbox.get()
        try:
            work = pickle.loads(task)
        except Exception as error:  # for example, the user's class cannot be imported here
            _tell(channel, ("failed", not_picklable(error)))
            continue
        try:
            named = (lambda name: _tell(channel, ("begins", name))) if work.names_samples else None
            read_ahead.begins = named
            run_task(work, lambda progress: _tell(channel, ("progress", progress)))
        except ShardkitError as error:
            _tell(channel, ("failed", error))
        except BaseException as error:  # a bug in shardkit or in the user's code: report where
            _tell(channel, ("failed", unexpected(error, work)))
        else:
            _tell(channel, ("done", None))
        _last = work  # as in `run_here`


def _tell(channel: BinaryIO, message: tuple[str, Any]) -> None:
    try:
        _send(channel, message)
    except OSError:  # the parent is gone, which `_listen` may not have noticed yet
        os._exit(0)


def _listen(tasks: BinaryIO, inbox: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            inbox.put(pickle.load(tasks))
    except (EOFError, OSError):
        os._exit(0)  # the parent has exited: stop now, as unfinished tasks do not count
    except BaseException:  # the parent was killed while sending a task, which is truncated
        os._exit(1)


def unexpected(error: BaseException, work: Work | None) -> WorkerError:
    """The WorkerError for an unexpected exception in a task, or before the task was loaded."""
    if work is not None and is_want_of_memory(error):
        return WorkerError(
            memory_ran_out(error, " in a worker"),
            found=f"task {work.number}: {work.input}",
            fix="use fewer --workers; then run the same command again: it continues where it"
            " stopped",
        )
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return WorkerError(
        f"unexpected {type(error).__name__} in a worker: {error}",
        found=f"in {frame.name}, {frame.filename}:{frame.lineno}"
        + ("" if work is None else f", task {work.number}"),
        fix="please report this, with the traceback that --workers 0 gives",
    )
