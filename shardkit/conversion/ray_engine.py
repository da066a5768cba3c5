"""`--engine ray`: run the tasks of a conversion on the nodes of a Ray cluster.

Plan, tasks and journal are the same as for the local engine, and so are the bytes. Progress is that
of the tasks that have ended. Ray's own retries are disabled: a task whose worker or node died is
submitted once more here.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from shardkit.conversion import pool
from shardkit.conversion.ray_node import appears, serve, terms_for, versions_of
from shardkit.conversion.work import (
    PACKED,
    RESULT,
    UNFINISHED,
    Report,
    Work,
    is_finished,
    read_result,
    unpack,
)
from shardkit.errors import OutputError, ShardkitError, UsageError, WorkerError, warn
from shardkit.helpers.extras import extra
from shardkit.helpers.words import parse_size
from shardkit.options import ConvertOptions
from shardkit.storage import fs

_AHEAD = 2  # submitted tasks per task that can run at a time
_LOOK = 5.0  # seconds without an event until the nodes of the cluster are checked
# To wait for a node with room for a task: a new machine takes minutes.
_NODE_SECONDS = 600.0
_CANCEL = 10.0  # seconds for workers to exit
_VISIBLE = 90.0  # seconds until a shared folder shows what a node has renamed: NFS takes 60
_STORE = 128 << 20  # bytes of the object store of our own cluster, whose objects are small
_AGAIN = "then run the same command again: it continues where it stopped"


class RayEngine:
    """Runs tasks on a cluster: at the given address, one that is running, or one of our own."""

    def __init__(self, options: ConvertOptions, workers: int, source: object) -> None:
        """Check the options; `connect`, which takes longer, is called once there is a plan."""
        self._ray = _ray()
        self._asked, self._source = _asked(options.ray_options), source
        self._options, self._workers, self._ours = options, workers, False
        self._running: dict[Any, tuple[Work, bool]] = {}  # by Ray's reference; whether it died once
        self._terms: dict[str, Any] = {}
        self._looked, self._slots = -_LOOK, 0

    def connect(self) -> None:
        """Find the cluster, or start one. Raises UsageError for resources that it does not have."""
        self._ours = not self._ray.is_initialized()
        with _same_sigterm():
            local = _connect(self._ray, self._options.ray_address, self._workers)
        self._most = None if local else self._options.workers
        self._remote = self._function()

    def run(self, works: Iterator[Work], tasks: int, report: Report) -> None:
        """See `Pool.run`."""
        if (first := next(works, None)) is None:
            return
        works = itertools.chain([first], works)
        try:
            self._prepare(first)
            while True:
                for work in itertools.islice(works, max(self._limit() - len(self._running), 0)):
                    self._start(work)
                if not self._running:
                    return
                for task in self._ready():
                    self._end(task, report)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Cancel all tasks immediately, and wait a moment for their processes to exit."""
        tasks, self._running = [*self._running], {}
        with contextlib.suppress(Exception):  # the cluster may be gone
            for task in tasks:
                self._ray.cancel(task, force=True)
            if tasks:
                self._ray.wait(tasks, num_returns=len(tasks), timeout=_CANCEL)

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        if self._ours:
            self._ray.shutdown()

    def _prepare(self, first: Work) -> None:
        """Set the terms that nodes check, with a probe file that shows whether they share the
        output folder."""
        token = uuid.uuid4().hex
        probe = first.folder.parent / f"{token}{UNFINISHED}"  # removed like an unfinished task
        if first.upload is None:
            fs.write_file(probe, b"")
        given = None if first.upload is not None else str(probe)
        self._terms = terms_for(token, given, self._source)

    def _function(self) -> Any:
        """The remote function, with the resources that it needs on a node."""
        custom: dict[str, float] = dict(self._asked)
        known = self._ray.cluster_resources()
        own: dict[str, Any] = {n: custom.pop(n) for n in ("num_cpus", "memory") if n in custom}
        names = {n for n in known if not n.startswith("node:")}
        names -= {"CPU", "GPU", "memory", "object_store_memory"}
        for name in custom.keys() - names:
            raise UsageError(
                f"--ray-option asks for {name!r}, a resource that the cluster does not have",
                expected=", ".join(["num_cpus", "memory", *sorted(names)]),
                fix="custom resources are those that the cluster's nodes were started with",
            )
        own |= {"name": "shardkit", "resources": custom}
        return self._ray.remote(serve).options(max_retries=0, **own)

    def _start(self, work: Work, *, again: bool = False) -> None:
        try:
            packed = pickle.dumps(work)
        except Exception as error:  # for example, the user's own source
            raise pool.not_picklable(error) from error
        task = self._remote.remote(self._terms, versions_of(work), packed)
        self._running[task] = work, again

    def _limit(self) -> int:
        """How many tasks may be submitted at a time; grows with the cluster."""
        if self._most is not None:
            return self._most
        if time.monotonic() > self._looked + _LOOK:
            self._looked = time.monotonic()
            self._slots = int(self._room(self._ray.cluster_resources()))
        return max(self._slots, 1) * _AHEAD

    def _room(self, has: Mapping[str, float]) -> float:
        """How many tasks the given resources are enough for."""
        asked = {"CPU" if name == "num_cpus" else name: n for name, n in self._asked.items()}
        return min(has.get(name, 0) / amount for name, amount in asked.items())

    def _ready(self) -> list[Any]:
        """Wait for tasks that have ended."""
        every = [*self._running]
        waited, words = 0.0, "no node of the Ray cluster has room for a task"
        need = ", ".join(f"{name}={amount:g}" for name, amount in self._asked.items())
        while not self._ray.wait(every, num_returns=1, timeout=_LOOK)[0]:
            nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            if any(self._room(node) >= 1 for node in nodes):
                waited = 0.0
                continue
            if not waited:
                text = f"{words} ({need}): waiting up to {_NODE_SECONDS / 60:.0f} minutes for one"
                warn(text)
            waited += _LOOK
            if waited > _NODE_SECONDS:
                fix = f"ask for less with --ray-option, or add nodes; {_AGAIN}"
                raise WorkerError(words, expected=need, found=f"{len(nodes)} nodes", fix=fix)
        ready: list[Any] = self._ray.wait(every, num_returns=len(every), timeout=0)[0]
        return ready

    def _end(self, task: Any, report: Report) -> None:
        """Handle the result of a task; if its worker died, start it again, but only once."""
        work, again = self._running.pop(task)
        try:
            result = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            if work.upload is not None or not is_finished(work.folder):
                self._check_death(work, error, again)
                pool.remove_unfinished(work)
                self._start(work, again=True)
                return
        else:
            _finish(work, result)
        report(read_result(work.folder).progress)

    def _check_death(self, work: Work, error: Exception, again: bool) -> None:
        """Raise WorkerError unless a worker, or its node, died for the first time on a task."""
        ray, lines = self._ray.exceptions, str(error).strip().split("\n")
        refused = (ray.RayTaskError, ray.TaskCancelledError, ray.TaskUnschedulableError)
        if isinstance(error, (*refused, ray.RuntimeEnvSetupError, ray.LocalRayletDiedError)):
            raise WorkerError(
                "Ray failed to run a task",
                found=f"{type(error).__name__}: {lines[-1]:.500}",
                fix="check that the cluster is up, and that all nodes have the same versions of"
                f" shardkit and its extras; {_AGAIN}",
            ) from error
        if again:
            raise WorkerError(
                "two workers or their nodes died on the same task",
                found=f"task {work.number}: {work.input}; the last: {lines[0]:.200}",
                fix="if memory ran out, run fewer tasks per node, with --ray-option memory=4GB or"
                f" num_cpus=2; {_AGAIN}",
            ) from error


def _finish(work: Work, result: bytes | ShardkitError | None) -> None:
    """Handle what a node has returned: raise its error, or make the task's folder appear here."""
    if isinstance(result, ShardkitError):
        raise result
    if result is not None:
        assert work.upload is not None
        unpack(result, work.folder, work.upload / PACKED)
    elif not appears(work.folder / RESULT, _VISIBLE):
        raise OutputError(
            "a node has finished a task, but its files are not visible on this machine",
            path=work.folder,
            fix="give an output in a folder that all nodes share, or a URL: s3://bucket/name",
        )


def _ray() -> Any:
    """Import Ray, and keep it from printing anything."""
    quiet = "RAY_DEDUP_LOGS_SKIP_REGEX"  # matches the log lines of workers, which go to stdout
    fresh = "ray" not in sys.modules and quiet not in os.environ
    if fresh:
        os.environ[quiet] = "."
    try:
        with extra("ray", "--engine ray"):
            import ray
            import ray.exceptions
    finally:
        if fresh:
            del os.environ[quiet]
    return ray


@contextlib.contextmanager
def _same_sigterm() -> Iterator[None]:
    """Keep Ray from handling SIGTERM for this program: its handler dumps addresses of code."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not the main thread, in which Ray sets it
            if before is not None:
                signal.signal(signal.SIGTERM, before)


def _asked(options: Mapping[str, Any]) -> dict[str, float]:
    """The resources that a task needs on a node."""
    asked = {"num_cpus": 1.0}
    for name, value in options.items():
        try:
            asked[name] = parse_size(value) if name == "memory" else float(value)
        except (TypeError, ValueError):
            asked[name] = 0
        if not 0 < asked[name] < 1 << 60:
            raise UsageError(f"--ray-option {name} must be a number above 0", found=repr(value))
    return asked


def _connect(ray: Any, address: str | None, workers: int) -> bool:
    """Connect to a cluster, or start a local one with a warning. Returns whether it is local."""
    if ray.is_initialized():
        here = str(ray.get_runtime_context().gcs_address)
        if address in (None, "auto", here):
            return False
        raise UsageError(
            "this process is connected to another Ray cluster already",
            expected=address,
            found=here,
            fix="leave out ray_address, or call ray.shutdown() first",
        )
    address = address or os.environ.get("RAY_ADDRESS") or None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    try:
        if address not in (None, "auto", "local"):  # Ray itself would wait forever
            host, _, port = address.rpartition(":")
            if "/" in host or not port.isdecimal():
                raise ValueError("it is not HOST:PORT")
            socket.create_connection((host.strip("[]"), int(port)), _LOOK).close()
        if address != "local":
            with contextlib.suppress(*([ConnectionError] if address is None else [])):
                ray.init(address=address or "auto", **quiet)
                return False
        if address is None:
            text = "no Ray cluster was found: starting one on this machine only"
            warn(f"{text}; use --ray-address to connect to another")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet |= {"num_cpus": workers, "object_store_memory": _STORE, "include_dashboard": False}
        ray.init(address="local", **quiet)
    except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise WorkerError(
            "cannot connect to a Ray cluster",
            expected="the address HOST:PORT of a running cluster, or auto on one of its machines",
            found=f"{address or 'this machine'}: {' '.join(str(error).split())[:300]}",
            fix="check --ray-address and RAY_ADDRESS; from outside, use `ray job submit`",
        ) from error
    return True
