"""`--engine ray`: run the tasks of a conversion on the nodes of a Ray cluster.

Plan, tasks and results are the same as for the local engine, and so are the bytes. Progress is that
of the tasks that have ended. Ray's own retries are disabled: a task whose worker or node died is
submitted once more here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import platform
import signal
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardkit.conversion import pool
from shardkit.conversion.bucket import Scratch
from shardkit.conversion.claim import machine
from shardkit.conversion.read_ahead import Reading
from shardkit.conversion.work import (
    PACKED,
    RESULT,
    UNFINISHED,
    Report,
    Work,
    is_finished,
    pack,
    read_result,
    run_task,
    unpack,
)
from shardkit.errors import (
    OutputError,
    SampleError,
    ShardkitError,
    SourceError,
    UsageError,
    WorkerError,
    warn,
)
from shardkit.formats import FORMATS
from shardkit.helpers import os_errors
from shardkit.helpers.extras import extra
from shardkit.helpers.words import parse_size
from shardkit.options import ConvertOptions
from shardkit.sources import files
from shardkit.storage import fs
from shardkit.storage.patterns import expanded
from shardkit.storage.remote.path import parsed
from shardkit.version import __version__

_AHEAD = 2  # submitted tasks per task that can run at a time
_LOOK = 5.0  # seconds without an event until the nodes of the cluster are checked
_NODE_SECONDS = 600.0  # to wait for a node with room for a task: a new machine takes minutes
_CANCEL = 10.0  # seconds for workers to exit
_VISIBLE = 90.0  # seconds until a shared folder shows what a node has renamed: NFS takes 60
_SEEN = 5.0  # seconds until a shared folder shows a node a new file
_STORE = 128 << 20  # bytes of the object store of our own cluster, whose objects are small
_WITNESSES = 100  # maximum number of sources that nodes look for
_AGAIN = "then run the same command again: it continues where it stopped"
_SHARED = "in a folder that all nodes share, or a URL: s3://bucket/name"
# By the extra of a format, the libraries that determine the bytes of its shards.
_WRITERS = {
    "arrow": ["pyarrow"],
    "lance": ["pylance", "pyarrow"],
    "array-record": ["array_record"],
}


class RayEngine:
    """Runs tasks on a cluster: at the given address, one that is running, or one of our own."""

    def __init__(self, options: ConvertOptions, workers: int, source: object) -> None:
        """Check the options; `connect`, which takes longer, is called once there is a plan."""
        with extra("ray", "--engine ray"):
            import ray
            import ray.exceptions
        self._ray: Any = ray
        self._asked = _asked(options)
        self._options, self._workers, self._source = options, workers, source
        self._running: dict[Any, tuple[Work, bool]] = {}  # by Ray's reference; whether it died once
        self._terms: dict[str, Any] = {}
        self._ours = False

    def connect(self) -> None:
        """Find the cluster, or start one. Raises UsageError for resources that it does not have."""
        self._ours = not self._ray.is_initialized()
        before = signal.getsignal(signal.SIGTERM)
        try:
            local = _connect(self._ray, self._options.ray_address, self._workers)
        finally:
            # Ray handles SIGTERM in the main thread only; what C code has set cannot be restored.
            with contextlib.suppress(ValueError, TypeError):
                signal.signal(signal.SIGTERM, before)
        self._most = None if local else self._options.workers
        self._remote = self._function()

    def _function(self) -> Any:
        """Return the remote function, with the resources that it needs on a node."""
        own: dict[str, Any] = {
            name: self._asked[name] for name in ("num_cpus", "memory") if name in self._asked
        }
        custom = {name: amount for name, amount in self._asked.items() if name not in own}
        names = {name for name in self._ray.cluster_resources() if not name.startswith("node:")}
        names -= {"CPU", "GPU", "memory", "object_store_memory"}
        for name in custom.keys() - names:
            raise UsageError(
                f"--ray-option asks for {name!r}, a resource that the cluster does not have",
                expected=", ".join(["num_cpus", "memory", *sorted(names)]),
                fix="custom resources are those that the cluster's nodes were started with",
            )
        own |= {"name": "shardkit", "resources": custom}
        return self._ray.remote(serve).options(max_retries=0, **own)

    def run(self, works: Iterator[Work], tasks: int, report: Report) -> None:
        """See `Pool.run`."""
        try:
            while True:
                while len(self._running) < self._limit() and (work := next(works, None)):
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

    def _start(self, work: Work, *, again: bool = False) -> None:
        if not self._terms:  # with a file that shows whether nodes share the output folder
            token = uuid.uuid4().hex
            probe = work.folder.parent / f"{token}{UNFINISHED}"  # removed like an unfinished task
            if work.upload is None:
                fs.write_file(probe, b"")
            shown = None if work.upload is not None else str(probe)
            self._terms = terms_for(token, shown, self._source)
        try:
            packed = pickle.dumps(work)
        except Exception as error:  # for example, the user's own source
            raise pool.not_picklable(error) from error
        task = self._remote.remote(self._terms, versions_of(work), packed)
        self._running[task] = work, again

    def _limit(self) -> int:
        """Return how many tasks may be submitted at a time; grows with the cluster."""
        return self._most or max(int(self._room(self._ray.cluster_resources())), 1) * _AHEAD

    def _room(self, has: dict[str, float]) -> float:
        """Return how many tasks the given resources are enough for."""
        asked = {"CPU" if name == "num_cpus" else name: n for name, n in self._asked.items()}
        return min(has.get(name, 0) / amount for name, amount in asked.items())

    def _ready(self) -> list[Any]:
        """Wait for tasks that have ended."""
        every, waited = [*self._running], 0.0
        words = "no node of the Ray cluster has room for a task"
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
            result = None
        if isinstance(result, ShardkitError):
            raise result
        if work.upload is not None:
            unpack(result, work.folder, work.upload / PACKED)
        elif not _appears(work.folder / RESULT, _VISIBLE):
            raise OutputError(
                "a node has finished a task, but its files are not visible on this machine",
                path=work.folder,
                fix=f"give an output {_SHARED}",
            )
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


def _asked(options: ConvertOptions) -> dict[str, float]:
    """Return the resources that a task needs on a node."""
    asked = {"num_cpus": 1.0}
    for name, value in options.ray_options.items():
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


# --- what must be the same on a node as on this machine


def terms_for(token: str, probe: str | None, source: object) -> dict[str, Any]:
    """Return what each process of a node checks once: see `_check`."""
    inputs = source if isinstance(source, list | tuple) else [source]
    local = [Path(p) for p in inputs if isinstance(p, str | os.PathLike) and parsed(p) is None]
    witnesses = []  # a file of each source, and its size: a node that has it sees the source
    for path in expanded(local)[:_WITNESSES]:
        inside = (Path(at, name) for at, _, names in os.walk(path) for name in names)
        with contextlib.suppress(OSError):
            file = path if path.is_file() else next(inside, path)
            witnesses.append((os.path.abspath(file), _size(file)))
    own = {"token": token, "machine": machine(), "folder": os.getcwd()}
    return {**own, "probe": probe, "witnesses": witnesses}


def _size(path: str | Path) -> int:
    about = os.stat(path)
    return 0 if stat.S_ISDIR(about.st_mode) else about.st_size


def versions_of(work: Work | None = None) -> dict[str, str]:
    """Local versions of what determines a task's bytes; a tokenizer compares its own."""
    found = {"shardkit": __version__, "python": ".".join(platform.python_version_tuple()[:2])}
    if work is None:
        return found
    declared = FORMATS.get(work.recipe.format)
    for name in _WRITERS.get(declared.extra if declared else "", ()):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    if not isinstance(work.input, Reading):
        return found
    if work.pixels or work.input.source.encodes_images:
        from shardkit.preprocess.single_image import codec_versions

        found |= codec_versions()
    return found | replace(work.input.steps, text=None).versions()


# --- on a node


class _Here:
    """The state of this process."""

    agreed = ""  # the token of the run whose terms were checked
    last: Work | None = None  # as in `pool.serve`


def serve(
    terms: dict[str, Any], versions: dict[str, str], task: bytes
) -> bytes | ShardkitError | None:
    """Run a task. Returns its error or, if its shards were uploaded, its other files."""
    work = None
    before = os.getcwd()
    try:
        with contextlib.suppress(OSError):
            os.chdir(terms["folder"])  # for paths that were given relative to it
        if _Here.agreed != terms["token"]:
            _check_versions(versions, versions_of())  # others may not load the task
            _check(terms)
            _Here.agreed = terms["token"]
        work = _loaded(task)
        _check_versions(versions, versions_of(work))
        if work.upload is None:
            run_task(work, lambda progress: None)
            return None
        with contextlib.closing(Scratch()) as scratch:
            local = replace(work, folder=scratch.path / "tasks" / work.folder.name)
            run_task(local, lambda progress: None)
            return pack(local.folder)
    except ShardkitError as error:
        return _named(error)
    except Exception as error:
        return _named(pool.unexpected(error, work))
    finally:
        _Here.last = work or _Here.last
        os.chdir(before)


def _check(terms: dict[str, Any]) -> None:
    """Raise an error if this node does not see what it needs."""
    for name, value in (("TOKENIZERS_PARALLELISM", "false"), ("OPENBLAS_NUM_THREADS", "1")):
        os.environ.setdefault(name, value)
    files.compare_inodes = bool(terms["machine"]) and machine() == terms["machine"]
    if terms["probe"] is not None and not _appears(Path(terms["probe"]), _SEEN):
        raise OutputError(
            "a node does not see the output",
            path=Path(terms["probe"]).parent.parent,
            fix=f"give an output {_SHARED}",
        )
    for path, size in terms["witnesses"]:
        try:
            found = f"{_size(path):,} bytes"
        except OSError as error:
            found = os_errors.reason(error)
        if found != f"{size:,} bytes":
            raise SourceError(
                "a node does not see the source that the run was planned for",
                path=path,
                expected=f"{size:,} bytes",
                found=found,
                fix=f"give a source {_SHARED}",
            )


def _appears(path: Path, seconds: float) -> bool:
    """Whether a file exists, or appears within `seconds`: NFS clients cache missing files."""
    until = time.monotonic() + seconds
    while not path.is_file():
        if time.monotonic() > until:
            return False
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes NFS clients look again
        time.sleep(0.2)
    return True


def _loaded(task: bytes) -> Work:
    try:
        work: Work = pickle.loads(task)
    except Exception as error:
        raise WorkerError(
            "a node cannot load the source or the transform",
            found=f"{type(error).__name__}: {error}",
            fix="install its module on all nodes, or send it with the job:"
            " `ray job submit --working-dir`, or a runtime_env",
        ) from error
    return work


def _check_versions(expected: dict[str, str], found: dict[str, str]) -> None:
    """Raise WorkerError if a library on this node may produce different bytes."""
    wrong = [name for name, number in found.items() if expected.get(name) != number]
    if wrong:
        raise WorkerError(
            "a node has other versions of libraries that determine the output's bytes",
            expected=", ".join(f"{name} {expected.get(name, 'missing')}" for name in wrong),
            found=", ".join(f"{name} {found[name]}" for name in wrong),
            fix="install the same versions on all nodes",
        )


def _named(error: ShardkitError) -> ShardkitError:
    """The error with the node's name, except that of a sample, which is the same on every node."""
    if not isinstance(error, SampleError):
        node = socket.gethostname()
        error.found = f"on node {node}" + (f": {error.found}" if error.found else "")
    return error
