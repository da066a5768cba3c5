"""How many shards a process has open: one bound for all datasets, from its limit of open files."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque

from shardkit.formats.base import ShardReader

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

_MOST = 1024  # shards: what readers keep takes memory too
_FILES = 3  # that an open shard holds at most
_SHARE = 2  # one of so many files that the process may open is for shards


class Readers(dict[int, ShardReader]):
    """The open shards of a dataset by number."""


# Oldest first. There is no lock that a fork in another thread could leave held: each step is one
# operation on a deque or a dict. What is closed by then is passed over.
_opened: deque[tuple[weakref.ref[Readers], int]] = deque()


def limit() -> int:
    """How many shards may be open at a time."""
    if resource is None:
        return _MOST
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MOST
    return min(max(files // _SHARE // _FILES, 1), _MOST)


def added(readers: Readers, shard: int) -> None:
    """A shard was opened: close the oldest of any dataset where there are too many."""
    _opened.append((weakref.ref(readers), shard))
    _close(limit())


def close_all() -> None:
    """Let go of every shard that nobody reads from at the moment."""
    _close(0)


def _close(kept: int) -> None:
    with contextlib.suppress(IndexError):  # another thread was faster
        while len(_opened) > kept:
            reference, shard = _opened.popleft()
            readers = reference()
            if readers is not None:
                readers.pop(shard, None)
