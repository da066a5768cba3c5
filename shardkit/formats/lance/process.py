"""Calls to pylance, which runs in a separate process.

Its threads do not survive a fork: a forked process, such as a worker of torch's DataLoader, hangs
or crashes. Also, damaged files can make it panic, or abort the process that it runs in.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # TimeoutError since Python 3.11
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from shardkit.errors import AGAIN, DamagedError
from shardkit.helpers.pickled_process import PickledProcess

_ANSWER_SECONDS = 60  # seconds to wait for a response
# Memory limits of the process, in bytes, as damaged files can make pylance allocate any amount:
# four times the largest value; less for small files, where filling 4 GiB would also take long.
MEMORY, SMALL, _TIMES = 8 << 30, 2 << 30, 100
_SIGKILL = 9
_MEMORY = re.compile(
    r"(?i)memory allocation of (\d+) bytes failed|cannot allocate memory|can't start new thread"
    r"|failed to map segment from shared object|\bMemoryError\b"
)


class Page(NamedTuple):
    """Values of a column that are stored uncompressed, one after the other.

    If `ends` is not 0, it is the offset of an array of little-endian numbers of `width` bytes: the
    ends of the values, relative to `start`. Each value is preceded by `before` bytes; if `nulls`,
    the first of these says whether the value is null.
    """

    first: int  # row
    rows: int
    start: int
    ends: int
    width: int  # if `ends` is 0: bytes of each value
    before: int
    nulls: bool


class FileRows(NamedTuple):
    """A data file of a third-party dataset, with its size, and its time of change in ns."""

    first: int  # row
    stop: int
    path: str
    version: tuple[int, int]


class About(NamedTuple):
    """The contents of a file or dataset."""

    columns: pa.Schema  # blobs as bytes
    rows: int
    average: dict[str, float]  # approximate bytes of a value, by column
    pages: dict[str, list[Page]]  # for columns that can be read without pylance
    deleted: int = 0  # rows
    parts: tuple[FileRows, ...] = ()  # in the order of their rows


class _EndedError(Exception):
    """The process has exited, with a code."""


_process: PickledProcess | None = None
_starting = threading.Lock()
_asking_again = threading.Lock()  # held by the only call that is made in a process of its own
# Files that made the process exit or hang, with inode, size and time: the text of the error and
# what to do. Nothing more of them is read, as each sample would take as long.
_deaths: dict[Any, tuple[str, str]] = {}
_of_parent: list[Any] = []  # kept alive: collecting them would close the pipes of the parent


def ask(path: Path, method: str, *arguments: Any) -> Any:
    """Call a method of `server._Server`, and return its result or raise its error."""
    return call(path, method, *arguments)()


def call(path: Path, method: str, *arguments: Any) -> Callable[[], Any]:
    """Start a call, and the process if needed; the returned function waits for the result."""
    global _process  # noqa: PLW0603 - one for all readers
    which = arguments[0] if method in ("about", "rows") else None  # the file that is read
    _refuse_again(path, which)
    with _starting:
        process = _process = _process or _start()
    answer = process.call(method, *arguments)

    def result() -> Any:
        try:
            return _answer(process, answer, path, which)
        except _EndedError:
            pass
        with _asking_again:  # in a process of its own: any other call may have ended that one
            _refuse_again(path, which)
            own = _start()
            try:
                return _answer(own, own.call(method, *arguments), path, which, alone=True)
            finally:
                own.kill()

    return result


def _start() -> PickledProcess:
    return PickledProcess("shardkit.formats.lance.server", None, _EndedError, quiet=True)


def _refuse_again(path: Path, which: Any) -> None:
    """Raise the error again that reading a file has caused."""
    if which in _deaths:
        what, fix = _deaths[which]
        raise DamagedError(what, path=path, fix=fix)


def _answer(
    process: PickledProcess, answer: Future[Any], path: Path, which: Any, *, alone: bool = False
) -> Any:
    """The result of a call; raises _EndedError if it can be asked again in a process `alone`."""
    global _process  # noqa: PLW0603 - as above
    try:
        return answer.result(_ANSWER_SECONDS)
    except (_EndedError, FutureTimeoutError) as error:
        with _starting:
            _process = None if _process is process else _process
        words = _want_of_memory(process.kill(), MEMORY if which is None else bound(path))
        if error.args == (-_SIGKILL,):
            words = "it was killed, as operating systems do when memory runs out"
        if words is not None:
            raise MemoryError(f"in the process of pylance, at {path}: {words}") from error
        what, fix = "this file made the process of pylance exit", AGAIN
        if isinstance(error, FutureTimeoutError):
            what = f"pylance did not respond for this file within {_ANSWER_SECONDS} s"
            fix = (
                "try again with more free memory; if it still does not respond, the file is "
                "damaged: copy it again from an intact copy, or create it again"
            )
        elif which is not None and not alone:
            raise
        if which is not None:
            _deaths[which] = what, fix
        raise DamagedError(what, path=path, fix=fix) from error


def bound(path: Path) -> int:
    """The memory limit of the process, in bytes, for a data file or the dataset of a manifest."""
    files = path.parent.parent.rglob("*") if path.suffix == ".manifest" else [path]
    size = sum(file.stat().st_size for file in files)
    return min(SMALL + _TIMES * size, MEMORY)


def _want_of_memory(output: str, bound: int) -> str | None:
    """The process's message, if memory ran out for what may be a valid value, not due to damage."""
    found = _MEMORY.search(output)
    return None if found is None or int(found[1] or 0) > bound // 4 else found[0]


def _forget() -> None:
    """After a fork: the child does not have the parent's threads, so it starts its own process."""
    global _process, _starting, _asking_again
    _of_parent.append(_process)
    _process, _starting, _asking_again = None, threading.Lock(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
