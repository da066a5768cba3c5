"""`--engine ray`: the tasks of a conversion on the nodes of a Ray cluster.

Plan, tasks and journal are those of the local engine, and so are the bytes. Each task is a
streaming generator (`ray_node.serve`), which tells how far it is. Ray tries nothing again by
itself: a task whose worker or node died is given out once more, here.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardkit import storage
from shardkit.conversion import pool
from shardkit.conversion.ray_node import appears, serve, terms_for, versions_of
from shardkit.conversion.work import (
    PACKED,
    RESULT,
    UNFINISHED,
    Progress,
    Report,
    Work,
    is_finished,
    unpack,
)
from shardkit.errors import OutputError, UsageError, WorkerError, warn
from shardkit.extras import extra
from shardkit.options import ConvertOptions, parse_size

_AHEAD = 2  # tasks in Ray's hands for each that can run at a time
_LOOK = 5.0  # seconds without a word until we look what nodes there are
_PATIENCE = 600.0  # seconds to wait for one that has room for a task: a new machine takes minutes
_CANCEL = 10.0  # seconds that workers have to end
_VISIBLE = 90.0  # seconds until a shared folder shows what a node has renamed: NFS takes 60
_STORE = 128 << 20  # bytes for the objects of a cluster of our own, which are small
_AGAIN = "then run the same command again: it continues where it was"


@dataclass(eq=False)
class _Given:
    """A task that is in Ray's hands."""

    work: Work
    events: Any  # ray.ObjectRefGenerator
    reported: list[Progress] = field(default_factory=list)
    died: bool = False  # once


class RayEngine:
    """The nodes of a cluster: of the given address, one that is there, or one of our own."""

    def __init__(self, options: ConvertOptions, workers: int, source: object) -> None:
        """What is asked for; `connect` comes once there is a plan, as a cluster takes its time."""
        self._ray = _ray()
        self._asked, self._source = _asked(options.ray_options), source
        self._options, self._workers, self._ours = options, workers, False
        self._given: list[_Given] = []
        self._terms: dict[str, Any] = {}
        self._looked, self._slots = -_LOOK, 0

    def connect(self) -> None:
        """Find the cluster, or start one. Raises UsageError for what it does not have."""
        self._ours = not self._ray.is_initialized()
        local = _connect(self._ray, self._options.ray_address, self._workers)
        self._most = None if local else self._options.workers
        self._remote = self._function()

    def run(self, works: Iterator[Work], tasks: int, report: Report) -> None:
        """As `Pool.run`."""
        if (first := next(works, None)) is None:
            return
        works = itertools.chain([first], works)
        try:
            self._prepare(first)
            while True:
                for work in itertools.islice(works, max(self._limit() - len(self._given), 0)):
                    self._given.append(_Given(work, self._start(work)))
                if not self._given:
                    return
                for given in self._ready():
                    self._hear(given, report)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End all tasks at once, and wait a moment until their processes are gone."""
        given, self._given = self._given, []
        with contextlib.suppress(Exception):  # the cluster may be gone
            for one in given:
                self._ray.cancel(one.events, force=True)
            ends = [one.events.completed() for one in given]
            if ends:
                self._ray.wait(ends, num_returns=len(ends), timeout=_CANCEL)

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        if self._ours:
            self._ray.shutdown()

    def _prepare(self, first: Work) -> None:
        """Say what nodes have to agree to: to find a file, too, which they do if they see ours."""
        token = uuid.uuid4().hex
        probe = first.folder.parent / f"{token}{UNFINISHED}"  # swept away like a task
        if first.upload is None:
            storage.write_file(probe, b"")
        given = None if first.upload is not None else str(probe)
        self._terms = terms_for(token, given, self._source)

    def _function(self) -> Any:
        """What runs on nodes, with what it needs there."""
        custom: dict[str, float] = dict(self._asked)
        known = self._ray.cluster_resources()
        own: dict[str, Any] = {n: custom.pop(n) for n in ("num_cpus", "memory") if n in custom}
        names = {n for n in known if not n.startswith("node:")}
        names -= {"CPU", "GPU", "memory", "object_store_memory"}
        for name in custom.keys() - names:
            raise UsageError(
                f"there is no resource {name!r} to ask for by --ray-option",
                expected=", ".join(["num_cpus", "memory", *sorted(names)]),
                fix="custom resources are those that the cluster's nodes were started with",
            )
        own |= {"name": "shardkit", "resources": custom}
        return self._ray.remote(serve).options(max_retries=0, num_returns="streaming", **own)

    def _start(self, work: Work) -> Any:
        try:
            task = pickle.dumps(work)
        except Exception as error:  # the user's own source
            raise pool.not_picklable(error) from error
        return self._remote.remote(self._terms, versions_of(work), task)

    def _limit(self) -> int:
        """How many tasks to give out: never all at once, and more as the cluster grows."""
        if self._most is not None:
            return self._most
        if time.monotonic() > self._looked + _LOOK:
            self._looked = time.monotonic()
            self._slots = int(self._room(self._ray.cluster_resources()))
        return max(self._slots, 1) * _AHEAD

    def _room(self, has: Mapping[str, float]) -> float:
        """How many tasks such resources are enough for."""
        asked = {"CPU" if name == "num_cpus" else name: n for name, n in self._asked.items()}
        return min(has.get(name, 0) / amount for name, amount in asked.items())

    def _ready(self) -> list[_Given]:
        """The tasks that have something to say, once there are any."""
        every = {one.events: one for one in self._given}
        waited, words = 0.0, "no node of the Ray cluster has room for a task"
        need = ", ".join(f"{name}={amount:g}" for name, amount in self._asked.items())
        while not self._ray.wait([*every], num_returns=1, timeout=_LOOK)[0]:
            nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            if any(self._room(node) >= 1 for node in nodes):
                waited = 0.0
                continue
            if not waited:
                text = f"{words} ({need}): waiting for one, {_PATIENCE / 60:.0f} minutes at most"
                warn(text)
            waited += _LOOK
            if waited > _PATIENCE:
                fix = f"ask for less with --ray-option, or add nodes; {_AGAIN}"
                raise WorkerError(words, expected=need, found=f"{len(nodes)} nodes", fix=fix)
        ready, _ = self._ray.wait([*every], num_returns=len(every), timeout=0)
        return [every[events] for events in ready]

    def _hear(self, given: _Given, report: Report) -> None:
        """Pass on what a task says."""
        try:
            kind, content = self._ray.get(next(given.events))
        except (self._ray.exceptions.RayError, StopIteration) as error:
            self._died(given, error, report)
            return
        if kind == "progress":
            given.reported.append(content)
            report(content)
        elif kind == "failed":
            raise content
        else:
            self._done(given, content)

    def _done(self, given: _Given, packed: bytes | None) -> None:
        work = given.work
        if packed is not None:
            assert work.upload is not None
            unpack(packed, work.folder, work.upload / PACKED)
        elif not appears(work.folder / RESULT, _VISIBLE):
            raise OutputError(
                "a node has done a task whose files are not seen here",
                path=work.folder,
                fix="give an output in a folder that all nodes share, or a URL: s3://bucket/name",
            )
        self._given.remove(given)

    def _died(self, given: _Given, error: BaseException, report: Report) -> None:
        """Give a task out again, if its worker died, and not twice."""
        ray, work, lines = self._ray.exceptions, given.work, str(error).strip().split("\n")
        refused = (ray.RayTaskError, ray.TaskCancelledError, ray.TaskUnschedulableError)
        if isinstance(error, (*refused, ray.RuntimeEnvSetupError, ray.LocalRayletDiedError)):
            raise WorkerError(
                "Ray has not carried out a task",
                found=f"{type(error).__name__}: {lines[-1]:.500}",
                fix="see that the cluster is up, and that all nodes have the same versions of"
                f" shardkit and its extras; {_AGAIN}",
            ) from error
        if work.upload is None and is_finished(work.folder):  # it died with its work done
            self._given.remove(given)
            return
        if given.died:
            raise WorkerError(
                "two workers or their nodes died on the same task",
                found=f"task {work.number}: {work.reading}; the last: {lines[0]:.200}",
                fix="if memory ran out, let fewer run on a node, by --ray-option memory=4GB or"
                f" num_cpus=2; {_AGAIN}",
            ) from error
        for one in given.reported:
            report(-one)
        given.reported.clear()
        pool.remove_unfinished(work)
        given.died, given.events = True, self._start(work)


def _ray() -> Any:
    """The library, which prints nothing of its own."""
    quiet = "RAY_DEDUP_LOGS_SKIP_REGEX"  # what nodes report of workers, which goes to stdout
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


def _asked(options: Mapping[str, Any]) -> dict[str, float]:
    """What a task needs of a node."""
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
    """Connect with a cluster; else start one of this machine alone, and tell so."""
    if ray.is_initialized():
        here = str(ray.get_runtime_context().gcs_address)
        if address in (None, "auto", here):
            return False
        raise UsageError(
            "this process is connected with another Ray cluster already",
            expected=address,
            found=here,
            fix="leave ray_address away, or call ray.shutdown() before",
        )
    address = address or os.environ.get("RAY_ADDRESS") or None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    try:
        if address not in (None, "auto", "local"):  # Ray itself would wait there for ever
            host, _, port = address.rpartition(":")
            if "/" in host or not port.isdecimal():
                raise ValueError("it is not HOST:PORT")
            socket.create_connection((host.strip("[]"), int(port)), _LOOK).close()
        if address != "local":
            with contextlib.suppress(*([ConnectionError] if address is None else [])):
                ray.init(address=address or "auto", **quiet)
                return False
        if address is None:
            text = "no Ray cluster was found: one of this machine alone is started"
            warn(f"{text}; --ray-address names another")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet |= {"num_cpus": workers, "object_store_memory": _STORE, "include_dashboard": False}
        ray.init(address="local", **quiet)
    except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise WorkerError(
            "there is no connection with a Ray cluster",
            expected="an address HOST:PORT of one that runs, or auto on one of its machines",
            found=f"{address or 'this machine'}: {' '.join(str(error).split())[:300]}",
            fix="check --ray-address and RAY_ADDRESS; from outside, use `ray job submit`",
        ) from error
    return True
