"""Reads several rows at once: numbers are taken from memory, other values from their byte ranges.

This works for single numbers, and for values that are one byte range each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.formats.arrow.values import (
    MEMORY,
    Buffers,
    bits_of,
    fetch,
    is_list,
    plain,
    presence,
    ranges_of,
)
from shardkit.formats.base import Column, Columns, decoded_column
from shardkit.schema import Array, Bool, Bytes, FieldType, Float, Scalar
from shardkit.storage.blobs import ABSENT, Blobs, Numbers


class Single(NamedTuple):
    """The numbers of some rows."""

    values: npt.NDArray[Any]  # int64, float64 or bool
    absent: npt.NDArray[np.bool_]

    def column(self, rows: Numbers, kind: FieldType) -> Column:
        """Return the numbers of some of the rows; raises ValueError for a null if not optional."""
        values, absent = self.values.take(rows), self.absent.take(rows)
        if not np.count_nonzero(absent):
            return values
        if not kind.optional:
            raise ValueError("it is null, but the field is not optional")
        pairs = zip(values.tolist(), absent.tolist(), strict=True)
        return [None if lacks else value for value, lacks in pairs]


class Spans(NamedTuple):
    """The byte ranges of the values of some rows, in the file or in `data`."""

    starts: Numbers
    sizes: Numbers  # ABSENT for a null
    data: npt.NDArray[np.uint8]  # empty if the values are in the file
    lists: bool  # whether the values are lists of numbers

    def blobs(self, rows: Numbers) -> Blobs:
        """Return the values of some of the rows, which are in memory."""
        return Blobs(self.data, self.starts.take(rows), self.sizes.take(rows))


Located: TypeAlias = Single | Spans | None


def located(
    kind: FieldType, array: pa.Array, first: int, stop: int, buffers: Buffers = MEMORY
) -> Located:
    """Return the values of a field in the rows [first, stop) of a `plain` array, or their ranges.

    None for other values. Raises ValueError for ranges outside of the data, and for values that
    need a closer look.
    """
    if pa.types.is_null(array.type):
        return None
    if isinstance(kind, Scalar):
        return _single(kind, fetch(array, first, stop, buffers))
    present = None
    if isinstance(kind, Bytes) and pa.types.is_struct(array.type):
        present = presence(array, first, stop, buffers)
        present = np.ones(stop - first, np.uint8) if present is None else present
        array = plain(array.field("bytes"))
    ranges = ranges_of(array, kind, first, stop, buffers)
    if ranges is None:
        return None
    offsets = np.array(ranges.offsets, np.int64)
    if offsets.min() < 0 or offsets.max() > ranges.end // ranges.width:
        raise ValueError("a value is outside of the data")
    offsets *= ranges.width
    starts, sizes = offsets[:-1] + (ranges.at or 0), np.diff(offsets)
    if np.count_nonzero(sizes < 0):
        raise ValueError("a value has a negative length")
    if ranges.present is not None:
        if present is not None and np.count_nonzero(present > ranges.present):
            raise ValueError("an image without bytes, maybe with a path")
        present = ranges.present if present is None else present
    if present is not None:
        sizes[present == 0] = ABSENT
    data = np.frombuffer(b"" if buffers.in_file else ranges.cut(0, ranges.end), np.uint8)
    data.flags.writeable = False  # other samples are read from it later
    return Spans(starts, sizes, data, is_list(array.type))


def _single(kind: Scalar, array: pa.Array) -> Single:
    count, data = len(array), array.buffers()[1]
    present = presence(array, 0, count, MEMORY)
    absent = np.zeros(count, bool) if present is None else present == 0
    if isinstance(kind, Bool):
        bits = bits_of(data, array.offset, array.offset + count, MEMORY)
        return Single(bits.astype(bool), absent)
    dtype = np.dtype(array.type.to_pandas_dtype())
    stored = np.frombuffer(data or b"", dtype)[array.offset : array.offset + count]
    if len(stored) != count:
        raise ValueError("a buffer is too short")
    if dtype == np.uint64 and np.count_nonzero(stored[~absent] >> np.uint64(63)):
        raise ValueError("a number does not fit in 64 bits with a sign")
    return Single(stored.astype(np.float64 if isinstance(kind, Float) else np.int64), absent)


@dataclass(frozen=True)
class Decode:
    """Turns values that are byte ranges into columns.

    kinds: the types of the fields, in order. lists: those that are stored as lists of numbers.
    """

    kinds: Mapping[str, FieldType]
    lists: frozenset[str]

    @classmethod
    def of(cls, kinds: Mapping[str, FieldType], found: Mapping[str, Located]) -> Decode:
        """Decode the fields that `located` found ranges for."""
        spans = {name: one for name, one in found.items() if isinstance(one, Spans)}
        lists = frozenset(name for name, one in spans.items() if one.lists)
        return cls({name: kinds[name] for name in spans}, lists)

    def __call__(self, blobs: list[Blobs]) -> Columns:
        pairs = zip(self.kinds.items(), blobs, strict=True)
        return {name: self._column(name, kind, values) for (name, kind), values in pairs}

    def _column(self, name: str, kind: FieldType, values: Blobs) -> Column:
        if not kind.optional and np.count_nonzero(values.sizes < 0):
            raise ValueError("it is null, but the field is not optional")
        if isinstance(kind, Array) and name in self.lists:
            shape = tuple(-1 if n is None else n for n in kind.shape or ())
            return values.arrays(np.dtype(kind.dtype), shape)
        return decoded_column(kind, values)


class Table:
    """What is known of all rows of a file: numbers, and the ranges of other values.

    others: the fields of which neither is known.
    """

    def __init__(
        self, kinds: Mapping[str, FieldType], found: Mapping[str, Located], rows: int
    ) -> None:
        """`found`: what `located` returns for any rows; they must be added with `fill`."""
        self.kinds = kinds
        self.numbers = {
            name: Single(np.zeros(rows, one.values.dtype), np.zeros(rows, bool))
            for name, one in found.items()
            if isinstance(one, Single)
        }
        self.decode = Decode.of(kinds, found)
        self.others = [name for name, one in found.items() if one is None]
        self.starts, self.sizes = np.zeros((2, len(self.decode.kinds), rows), np.int64)
        self.filled = np.zeros(rows, bool)

    @staticmethod
    def size_of(kinds: Mapping[str, FieldType], rows: int) -> int:
        """Return the bytes of a table, at most."""
        return rows * (1 + sum(9 if isinstance(kind, Scalar) else 16 for kind in kinds.values()))

    def fill(self, pages: Iterable[tuple[int, int, Mapping[str, Any]]]) -> None:
        """Add what was found of rows: the first, the one after the last, and what is in each."""
        filled = self.filled.copy()
        for first, stop, found in pages:
            for name, number in self.numbers.items():
                number.values[first:stop], number.absent[first:stop] = found[name]
            for column, name in enumerate(self.decode.kinds):
                self.starts[column, first:stop], self.sizes[column, first:stop], *_ = found[name]
            filled[first:stop] = True
        # A new array: threads that see it also see what was stored before, without a lock.
        self.filled = filled


def from_memory(
    kinds: Mapping[str, FieldType],
    found: Sequence[Mapping[str, Any]],
    rows: Sequence[Numbers],
    order: Numbers,
) -> Columns:
    """Return columns of some rows of several batches in memory.

    `found`: what `located` returns for all rows of each batch. The n-th of the samples is the row
    `order[n]` of all chosen `rows`, one batch after the other.
    """
    columns: Columns = {}
    decode, blobs = Decode.of(kinds, found[0]), []
    for name, first in found[0].items():
        pairs = [(batch[name], some) for batch, some in zip(found, rows, strict=True)]
        if isinstance(first, Single):
            values = np.concatenate([one.values.take(some) for one, some in pairs])
            absent = np.concatenate([one.absent.take(some) for one, some in pairs])
            columns[name] = Single(values, absent).column(order, kinds[name])
        elif isinstance(first, Spans):
            parts = [one.blobs(some) for one, some in pairs]
            alone = parts[0] if len(parts) == 1 else None
            blobs.append((alone or Blobs.of([v for p in parts for v in p.values()])).take(order))
    return {**columns, **decode(blobs)}
