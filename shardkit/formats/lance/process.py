"""pylance, in a process of its own.

Its threads do not survive a fork: a forked process, such as a worker of torch's DataLoader, waits
for ever or crashes. And damaged files can make it panic, or end the process that it is in.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # TimeoutError since Python 3.11
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from shardkit.errors import DamagedError
from shardkit.pickled_process import PickledProcess

_PATIENCE = 60  # seconds for an answer
# Bytes that the process may take, as damaged files make pylance take any: four times the largest
# value; less for small files, where 4 GiB of nonsense would take their time, too.
MEMORY, SMALL, _TIMES = 8 << 30, 2 << 30, 100
_SIGKILL = 9
_MEMORY = re.compile(
    r"(?i)memory allocation of (\d+) bytes failed|cannot allocate memory|can't start new thread"
    r"|failed to map segment from shared object|\bMemoryError\b"
)


class Page(NamedTuple):
    """Values of a column that stand in the file as they are.

    Their ends are little-endian numbers of `width` bytes in the file at `ends`, where there is one,
    and count from `start`. Before each value are `before` bytes, of which the first says whether
    the value is null if `nulls`.
    """

    first: int  # row
    rows: int
    start: int
    ends: int
    width: int  # without `ends`, bytes of a value
    before: int
    nulls: bool


class About(NamedTuple):
    """What a file or dataset holds."""

    columns: pa.Schema  # blobs as bytes
    rows: int
    average: dict[str, float]  # bytes of a value in each column, about
    pages: dict[str, list[Page]]  # of columns that can be read without pylance
    deleted: int = 0  # rows


class _EndedError(Exception):
    """The process has ended, with a code."""


_process: PickledProcess | None = None
_starting = threading.Lock()
_of_parent: list[Any] = []  # never collected: their pipes are the parent's


def ask(path: Path, method: str, *arguments: Any) -> Any:
    """What a method of `server.Server` answers, or raises."""
    return call(path, method, *arguments)()


def call(path: Path, method: str, *arguments: Any) -> Callable[[], Any]:
    """Begin a call, of which the result waits for the end; the process is started if need be."""
    global _process  # noqa: PLW0603 - one for all readers
    with _starting:
        if _process is None:
            module = "shardkit.formats.lance.server"
            _process = PickledProcess(module, None, _EndedError, quiet=True)
        process = _process
    answer = process.call(method, *arguments)
    reads = method in ("about", "rows")
    return partial(_answer, process, answer, path, reads)


def _answer(process: PickledProcess, answer: Future[Any], path: Path, reads: bool) -> Any:
    global _process  # noqa: PLW0603 - as above
    try:
        return answer.result(_PATIENCE)
    except (_EndedError, FutureTimeoutError) as error:
        with _starting:
            _process = None if _process is process else _process
        words = _want_of_memory(process.kill(), bound(path) if reads else MEMORY)
        if error.args == (-_SIGKILL,):
            words = "it was killed, as systems do where memory runs out"
        if words is not None:
            raise MemoryError(f"in the process of pylance, at {path}: {words}") from error
        if isinstance(error, _EndedError):
            raise DamagedError("pylance ended its process over this file", path=path) from error
        raise DamagedError(
            f"pylance does not answer over this file within {_PATIENCE} s",
            path=path,
            fix="try again where more memory is free; if it does not answer there either, the file "
            "is damaged: copy it again from where it is whole, or make it again",
        ) from error


def bound(path: Path) -> int:
    """Bytes of memory that a data file, or the dataset of a manifest, may make the process take."""
    files = path.parent.parent.rglob("*") if path.suffix == ".manifest" else [path]
    size = sum(file.stat().st_size for file in files)
    return min(SMALL + _TIMES * size, MEMORY)


def _want_of_memory(said: str, bound: int) -> str | None:
    """What the process said of it, if memory ran out for what may be a value, not for damage."""
    found = _MEMORY.search(said)
    return None if found is None or int(found[1] or 0) > bound // 4 else found[0]


def _forget() -> None:
    """In a forked process, which has no copy of its parent's threads."""
    global _process, _starting
    _of_parent.append(_process)
    _process, _starting = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
