"""Columns of several samples: read at once from the shards' files, and joined in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from shardkit.formats.base import KEY, Column, Columns, Ranges, ShardReader
from shardkit.sample import Sample
from shardkit.schema import Schema
from shardkit.storage.blobs import Blobs, Numbers, read_blobs

_KEYS = 1 << 16  # keys that are read at once
_FIRST = np.zeros(1, np.int64)  # the number of the first sample of a single shard


def read_together(
    numbers: Numbers,
    starts: Numbers,
    plan: Callable[[int, Numbers], Ranges | Columns | None],
    most: int | None = None,
) -> Columns | None:
    """Read samples by their numbers over several shards; the caller owns the columns.

    starts: int64 (shards,), the number of the first sample of each shard. plan: `ShardReader.plan`
    of the shard with a number. None if the samples must be read one by one, which also finds the
    error of a bad one, or if they have more than `most` bytes.
    """
    shards = np.searchsorted(starts, numbers, side="right") - 1
    order = shards.argsort(kind="stable")
    shards = shards[order]
    positions = numbers[order] - starts[shards]
    bounds = [*np.flatnonzero(shards[1:] != shards[:-1]).tolist(), len(shards) - 1]
    plans: list[Ranges | Columns] = []
    start = 0
    try:
        for last in bounds if len(shards) else ():
            found = plan(int(shards[last]), positions[start : last + 1])
            if found is None:
                return None
            plans.append(found)
            start = last + 1
        if not plans or (most is not None and _bytes(plans) > most):
            return None
        columns = carried_out(plans)
    except (MemoryError, Warning):
        raise
    except Exception:  # reading them one by one finds the reason
        return None
    if len(plans) == 1:
        return columns
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return {name: taken(column, back) for name, column in columns.items()}


def keys_of(reader: ShardReader) -> list[str]:
    """Return the key of every sample of a shard, in order."""
    found: list[str] = []
    for first in range(0, len(reader), _KEYS):
        positions = np.arange(first, min(first + _KEYS, len(reader)))
        columns = read_together(positions, _FIRST, lambda _, some: reader.plan(some, ()))
        if columns is None:
            found += [reader.sample(position, ())[KEY] for position in positions.tolist()]
        else:
            found += listed(columns[KEY])
    return found


def _bytes(plans: Sequence[Ranges | Columns]) -> int:
    """Return how many bytes are read from files."""
    ranges = [plan.sizes for plan in plans if isinstance(plan, Ranges)]
    return sum(int(np.maximum(sizes, 0).sum()) for sizes in ranges)


def carried_out(plans: Sequence[Ranges | Columns]) -> Columns:
    """Return the columns of all samples that `ShardReader.plan` was called for, in order."""
    found: list[Columns] = []
    for _, group in groupby(
        plans, lambda plan: len(plan.offsets) if isinstance(plan, Ranges) else -1
    ):
        alike = [*group]
        ranges = [plan for plan in alike if isinstance(plan, Ranges)]
        found += [_decoded(ranges)] if ranges else [p for p in alike if not isinstance(p, Ranges)]
    return joined(found)


def _decoded(ranges: Sequence[Ranges]) -> Columns:
    """Read the ranges of several shards at once, and decode those that are alike together."""
    counts = [each.offsets.shape[1] for each in ranges]
    which = np.repeat(np.arange(len(ranges)), counts)
    offsets = np.concatenate([each.offsets for each in ranges], axis=1)
    sizes = np.concatenate([each.sizes for each in ranges], axis=1)
    blobs = read_blobs([each.source for each in ranges], which, offsets, sizes)
    found, start = [], 0
    for decode, group in groupby(ranges, lambda each: each.decode):
        alike = [*group]
        stop = start + sum(each.offsets.shape[1] for each in alike)
        known = joined([each.known for each in alike])
        found.append({**known, **decode([column.take(slice(start, stop)) for column in blobs])})
        start = stop
    return joined(found)


def joined(every: Sequence[Mapping[str, Column]]) -> Columns:
    """Concatenate the columns of each field. Raises ValueError if they do not fit together."""
    if len(every) == 1:
        return {**every[0]}
    return {name: _concatenated([columns[name] for columns in every]) for name in every[0]}


def _concatenated(columns: list[Any]) -> Column:
    first, arrays = columns[0], [one for one in columns if isinstance(one, np.ndarray)]
    alike = len({(one.dtype, one.shape[1:]) for one in arrays}) == 1
    if alike and len(arrays) == len(columns):
        return np.concatenate(columns)
    if all(isinstance(one, Blobs) and one.data is first.data for one in columns):
        starts = np.concatenate([one.starts for one in columns])
        return Blobs(first.data, starts, np.concatenate([one.sizes for one in columns]))
    return [value for one in columns for value in listed(one)]


def taken(column: Column, numbers: Numbers | slice) -> Column:
    """Return the values with these numbers."""
    if isinstance(column, Blobs):
        return column.take(numbers)
    if isinstance(column, np.ndarray) or isinstance(numbers, slice):
        return column[numbers]
    return [column[number] for number in numbers.tolist()]


def listed(column: Column) -> list[Any]:
    """Return a column as the values of its samples, of the types that `ShardReader.read` gives."""
    if isinstance(column, Blobs):
        return column.values()
    if not isinstance(column, np.ndarray):
        return column
    return [*column] if column.ndim > 1 else column.tolist()


def blobs_of(column: Column) -> Blobs:
    """Return a column of bytes as values in one buffer."""
    return column if isinstance(column, Blobs) else Blobs.of([*column])


def samples_of(columns: Columns, schema: Schema) -> list[Sample]:
    """Return the samples of which these are the columns."""
    names = [KEY, *(name for name in schema if name in columns)]
    values = [listed(columns[name]) for name in names]
    every = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
    optional = {name for name, kind in schema.items() if kind.optional}
    if not optional:
        return every
    return [{n: v for n, v in s.items() if v is not None or n not in optional} for s in every]
