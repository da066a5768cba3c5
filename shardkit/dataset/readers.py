"""The readers of datasets: of shards, few of which a process keeps open, and of sequences."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shardkit.errors import SampleError, ShardkitError
from shardkit.formats.base import KEY, ShardReader
from shardkit.helpers import os_errors
from shardkit.sample import JsonText, Sample
from shardkit.schema import Json, Schema
from shardkit.storage import fs

try:
    import resource
except ImportError:  # Windows, which has no limit of open files
    resource = None  # type: ignore[assignment]

_MAX_OPEN = 1024  # maximum number of open shards in a process, as readers take memory
_MEMORY = 256 << 20  # bytes of the tables of all open shards
_TEMPORARY = 10 * 10**9  # bytes of open compressed shards, unpacked
_FILES = 3  # maximum number of open files per shard
_SHARE = 2  # shards may use 1 / _SHARE of the files that the process may open


class Readers(dict[int, ShardReader]):
    """The open shards of a dataset by number."""


# Oldest first. There is no lock, as a fork in another thread could leave it held: each step is one
# operation on a list or a dict. (Not on a deque, which free-threaded Python does not copy in one.)
# Entries of shards that have been closed since are skipped.
_opened: list[tuple[weakref.ref[Readers], int, weakref.ref[ShardReader]]] = []


def limit() -> int:
    """Maximum number of open shards."""
    if resource is None:
        return _MAX_OPEN
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MAX_OPEN
    return min(max(files // _SHARE // _FILES, 1), _MAX_OPEN)


def added(readers: Readers, shard: int, reader: ShardReader) -> None:
    """Record that a shard was opened, and close the oldest of any dataset beyond the limits.

    A shard that takes more than all may is open alone.
    """
    _opened.append((weakref.ref(readers), shard, weakref.ref(reader)))
    _close(limit())
    memory, temporary = _MEMORY, _TEMPORARY
    for number, (own, opened, reference) in enumerate(_opened[::-1]):
        found = reference()
        if found is not None and _is_open(own(), opened, found):
            memory -= found.in_memory
            temporary -= found.temporary_bytes
        if min(memory, temporary) < 0:
            _close(max(number, 1))
            return


def close_all() -> None:
    """Close all shards, except those that a thread is reading from at the moment."""
    _close(0)


def _close(count: int) -> None:
    """Close the oldest shards until `count` are left."""
    with contextlib.suppress(IndexError):  # another thread was faster
        while len(_opened) > count:
            reference, shard, reader = _opened.pop(0)
            readers = reference()
            if readers is not None and _is_open(readers, shard, reader()):
                readers.pop(shard, None)


def _is_open(readers: Readers | None, shard: int, reader: ShardReader | None) -> bool:
    """Whether the dataset still uses this reader: the shard may have been opened again since."""
    return readers is not None and reader is not None and readers.get(shard) is reader


# --- sequences ----------------------------------------------------------------------------------


class SampleSequence(Protocol):
    """Any sequence of samples: dicts with `__key__` and the fields of a schema."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Sample: ...


class _RaisedError(Exception):
    """Wraps an exception that the sequence itself raised: no value is damaged."""


class SequenceReader(ShardReader):
    """Reads the samples of a sequence. Only JSON values are copied."""

    def __init__(
        self,
        sequence: SampleSequence,
        schema: Schema,
        class_names: Mapping[str, Sequence[str]],
        path: Path,
    ) -> None:
        classes = {field: list(names) for field, names in class_names.items()}
        super().__init__(path, {"schema": schema.to_json(), "classes": classes})
        self.sequence, self._class_names = sequence, class_names
        self._json = [name for name, kind in schema.items() if isinstance(kind, Json)]

    def __len__(self) -> int:
        return len(self.sequence)

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        try:
            found = self.sequence[position]
        except (MemoryError, Warning):
            raise
        except Exception as error:
            raise _RaisedError from error
        sample = dict(found)
        if fields is not None:
            sample = {n: value for n, value in sample.items() if n == KEY or n in fields}
        for name in self._json:
            if name in sample:  # unparsed text, or a value that samples may share: make a copy
                sample[name] = json.loads(JsonText.of(sample[name]))
        return sample

    def _named(
        self, error: Exception, position: int, fields: Collection[str] | None, json_text: bool
    ) -> Exception:
        """Like the base class, but errors raised by the sequence itself concern no single field."""
        cause = error.__cause__
        if self.closed or not (isinstance(error, _RaisedError) and isinstance(cause, Exception)):
            return super()._named(error, position, fields, json_text)
        if isinstance(cause, ShardkitError | OSError) or os_errors.shortage(cause):
            return fs.unreadable(cause, self.path, position)
        found = SampleError(
            f"the sequence raised {type(cause).__name__}: {cause}",
            path=self.path,
            position=position,
        )
        found.__cause__ = cause
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return SequenceReader, (self.sequence, self.schema, self._class_names, self.path)
