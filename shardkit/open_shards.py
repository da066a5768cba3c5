"""The shards that a process has open: bounds for all datasets, of open files and of memory."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque

from shardkit.formats.base import ShardReader

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

_MOST = 1024  # shards: readers take memory, too
_MEMORY = 256 << 20  # bytes of the tables of all open shards
_FILES = 3  # that an open shard has open at most
_SHARE = 2  # shards get 1 / _SHARE of the files that the process may open


class Readers(dict[int, ShardReader]):
    """The open shards of a dataset by number."""


# Oldest first. There is no lock, which a fork in another thread could leave held: each step is one
# operation on a deque or a dict. Entries of shards that were closed since are skipped.
_opened: deque[tuple[weakref.ref[Readers], int, weakref.ref[ShardReader]]] = deque()


def limit() -> int:
    """How many shards may be open at a time."""
    if resource is None:
        return _MOST
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MOST
    return min(max(files // _SHARE // _FILES, 1), _MOST)


def added(readers: Readers, shard: int, reader: ShardReader) -> None:
    """A shard was opened: close the oldest of any dataset where there are too many."""
    _opened.append((weakref.ref(readers), shard, weakref.ref(reader)))
    _close(limit())
    _close_beyond(_MEMORY)


def close_all() -> None:
    """Close all shards, but those that a thread is reading from at the moment."""
    _close(0)


def _close(count: int) -> None:
    """Close the oldest until so many are left."""
    with contextlib.suppress(IndexError):  # another thread was faster
        while len(_opened) > count:
            reference, shard, reader = _opened.popleft()
            readers = reference()
            if readers is not None and _is_open(readers, shard, reader()):
                readers.pop(shard, None)


def _is_open(readers: Readers | None, shard: int, reader: ShardReader | None) -> bool:
    """Whether the dataset has this reader open: a closed one may have a successor."""
    return readers is not None and reader is not None and readers.get(shard) is reader


def _close_beyond(most: int) -> None:
    """Close the oldest until the tables of all take at most so many bytes, or one is left."""
    latest = _opened.copy()
    latest.reverse()
    for number, (readers, shard, reference) in enumerate(latest):
        reader = reference()
        if reader is not None and _is_open(readers(), shard, reader):
            most -= reader.in_memory
        if most < 0:
            _close(max(number, 1))
            return
