"""The open shards of a process: limits their open files and memory, over all datasets."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque

from shardkit.formats.base import ShardReader

try:
    import resource
except ImportError:  # Windows, which has no limit of open files
    resource = None  # type: ignore[assignment]

_MAX_OPEN = 1024  # maximum number of open shards, as readers take memory
_MEMORY = 256 << 20  # bytes of the tables of all open shards
_FILES = 3  # maximum number of open files per shard
_SHARE = 2  # shards may use 1 / _SHARE of the files that the process may open


class Readers(dict[int, ShardReader]):
    """The open shards of a dataset by number."""


# Oldest first. There is no lock, as a fork in another thread could leave it held: each step is one
# operation on a deque or a dict. Entries of shards that have been closed since are skipped.
_opened: deque[tuple[weakref.ref[Readers], int, weakref.ref[ShardReader]]] = deque()


def limit() -> int:
    """Maximum number of open shards."""
    if resource is None:
        return _MAX_OPEN
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MAX_OPEN
    return min(max(files // _SHARE // _FILES, 1), _MAX_OPEN)


def added(readers: Readers, shard: int, reader: ShardReader) -> None:
    """Record that a shard was opened, and close the oldest of any dataset beyond the limits."""
    _opened.append((weakref.ref(readers), shard, weakref.ref(reader)))
    _close(limit())
    _close_beyond(_MEMORY)


def close_all() -> None:
    """Close all shards, except those that a thread is reading from at the moment."""
    _close(0)


def _close(count: int) -> None:
    """Close the oldest shards until `count` are left."""
    with contextlib.suppress(IndexError):  # another thread was faster
        while len(_opened) > count:
            reference, shard, reader = _opened.popleft()
            readers = reference()
            if readers is not None and _is_open(readers, shard, reader()):
                readers.pop(shard, None)


def _is_open(readers: Readers | None, shard: int, reader: ShardReader | None) -> bool:
    """Whether the dataset still uses this reader: the shard may have been opened again since."""
    return readers is not None and reader is not None and readers.get(shard) is reader


def _close_beyond(most: int) -> None:
    """Close the oldest shards until all tables take at most `most` bytes, or one shard is left."""
    latest = _opened.copy()
    latest.reverse()
    for number, (readers, shard, reference) in enumerate(latest):
        reader = reference()
        if reader is not None and _is_open(readers(), shard, reader):
            most -= reader.in_memory
        if most < 0:
            _close(max(number, 1))
            return
