"""pylance, in a process of its own.

Its threads do not survive a fork: a forked process, such as a worker of torch's DataLoader, waits
for ever or crashes. And damaged files can make it panic, or end the process that it is in.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from shardkit.errors import DamagedError
from shardkit.pickled_process import PickledProcess

_PATIENCE = 60  # seconds for an answer


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
    """The process has ended."""


_process: PickledProcess | None = None
_starting = threading.Lock()
_of_parent: list[Any] = []  # never collected: their pipes are the parent's


def ask(path: Path, method: str, *arguments: Any) -> Any:
    """Call a method of `server.Server`; the process is started if there is none."""
    global _process  # noqa: PLW0603 - one for all readers
    with _starting:
        if _process is None:
            module = "shardkit.formats.lance.server"
            _process = PickledProcess(module, None, _EndedError, quiet=True)
        process = _process
    try:
        return process.ask(method, *arguments, timeout=_PATIENCE)
    except (_EndedError, TimeoutError) as error:
        with _starting:
            _process = None if _process is process else _process
        process.kill()
        what = "ended its process" if isinstance(error, _EndedError) else "does not answer"
        raise DamagedError(f"pylance {what} over this file", path=path) from error


def _forget() -> None:
    """In a forked process, which has no copy of its parent's threads."""
    global _process, _starting
    _of_parent.append(_process)
    _process, _starting = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
