"""What a Ray node does with a task: check the terms, and run the task."""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import socket
import stat
import time
from contextlib import closing
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardkit.conversion import pool
from shardkit.conversion.bucket import Scratch
from shardkit.conversion.claim import machine
from shardkit.conversion.read_ahead import Reading
from shardkit.conversion.work import Work, pack, run_task
from shardkit.errors import OutputError, SampleError, ShardkitError, SourceError, WorkerError
from shardkit.formats import FORMATS
from shardkit.helpers import os_errors
from shardkit.sources import files
from shardkit.storage.patterns import expanded
from shardkit.storage.remote.path import parsed
from shardkit.version import __version__

_SEEN = 5.0  # seconds that a shared folder may take to show a new file
_WITNESSES = 100  # maximum number of sources that nodes look for
# By the extra of a format, the libraries that determine the bytes of its shards.
_WRITERS = {
    "arrow": ["pyarrow"],
    "lance": ["pylance", "pyarrow"],
    "array-record": ["array_record"],
}


class _Here:
    """The state of this process."""

    agreed = ""  # the token of the run whose terms were checked
    last: Work | None = None  # as in `pool.serve`


def terms_for(token: str, probe: str | None, source: object) -> dict[str, Any]:
    """What must be the same on a node as on this machine."""
    own = {"token": token, "machine": machine(), "folder": os.getcwd()}
    return {**own, "probe": probe, "witnesses": _witnesses(source)}


def versions_of(work: Work | None = None) -> dict[str, str]:
    """Local versions of what determines a task's bytes; a tokenizer compares its own."""
    found = {"shardkit": __version__, "python": ".".join(platform.python_version_tuple()[:2])}
    if work is None or not isinstance(work.input, Reading):
        return found
    if work.pixels or work.input.source.encodes_images:
        from shardkit.preprocess.single_image import codec_versions

        found |= codec_versions()
    declared = FORMATS.get(work.recipe.format)
    for name in _WRITERS.get(declared.extra if declared else "", ()):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found | replace(work.input.steps, text=None).versions()


def _witnesses(source: object) -> list[tuple[str, int]]:
    """A file of each local source, and its size: a node that has these files sees the source."""
    given = source if isinstance(source, list | tuple) else [source]
    local = [Path(p) for p in given if isinstance(p, str | os.PathLike) and parsed(p) is None]
    found = []
    for path in expanded(local)[:_WITNESSES]:
        files = (Path(parent, name) for parent, _, names in os.walk(path) for name in names)
        file = path if path.is_file() else next(files, path)
        with contextlib.suppress(OSError):
            found.append((os.path.abspath(file), _size(file)))
    return found


def _size(path: str | Path) -> int:
    about = os.stat(path)
    return 0 if stat.S_ISDIR(about.st_mode) else about.st_size


def appears(path: Path, seconds: float) -> bool:
    """Whether a file exists, or appears within `seconds`: NFS clients cache missing files."""
    until = time.monotonic() + seconds
    while not path.is_file():
        if time.monotonic() > until:
            return False
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes NFS clients look again
        time.sleep(0.2)
    return True


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
            _check_versions(versions, versions_of())
            _check(terms)
            _Here.agreed = terms["token"]
        work = _loaded(task)
        _check_versions(versions, versions_of(work))
        return _done(work)
    except ShardkitError as error:
        return _named(error)
    except Exception as error:
        return _named(pool.unexpected(error, work))
    finally:
        _Here.last = work or _Here.last
        os.chdir(before)


def _done(work: Work) -> bytes | None:
    """Run a task; if its shards were uploaded, returns its other files as an archive."""
    if work.upload is None:
        run_task(work, lambda progress: None)
        return None
    with closing(Scratch()) as scratch:
        work = replace(work, folder=scratch.path / "tasks" / work.folder.name)
        run_task(work, lambda progress: None)
        return pack(work.folder)


def _check(terms: dict[str, Any]) -> None:
    """Raise an error if this node does not see what it needs; once per process and run."""
    for name, value in (("TOKENIZERS_PARALLELISM", "false"), ("OPENBLAS_NUM_THREADS", "1")):
        os.environ.setdefault(name, value)
    files.compare_inodes = bool(terms["machine"]) and machine() == terms["machine"]
    if terms["probe"] is not None and not appears(Path(terms["probe"]), _SEEN):
        raise OutputError(
            "a node does not see the output",
            path=Path(terms["probe"]).parent.parent,
            fix="give an output in a folder that all nodes share, or a URL: s3://bucket/name",
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
                fix="give a source in a folder that all nodes share, or a URL: s3://bucket/name",
            )


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
