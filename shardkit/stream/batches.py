"""Makes batches: reads samples, transforms them and writes them into the batch's arrays."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.errors import SampleError, ShardkitError, UsageError
from shardkit.formats.base import KEY, Columns
from shardkit.formats.columns import blobs_of, listed, samples_of, taken
from shardkit.helpers import os_errors
from shardkit.helpers.clock import enter
from shardkit.helpers.processors import processors
from shardkit.sample import Sample
from shardkit.schema import (
    Array,
    Audio,
    Bool,
    Bytes,
    FieldType,
    Float,
    Images,
    Int,
    Schema,
    is_vector,
)
from shardkit.storage.blobs import reading
from shardkit.stream.batching import Pack
from shardkit.stream.collate import PadCollate, packed, pad_collate
from shardkit.stream.schedule import Step
from shardkit.stream.stream import Stream
from shardkit.transforms.calls import name_of
from shardkit.transforms.draws import Draws
from shardkit.transforms.functions import stacked
from shardkit.transforms.transforms import Transforms

Arrays = dict[str, npt.NDArray[Any]]

Batch = dict[str, Any]
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], "npt.NDArray[Any]"]  # shape, type -> array

_SLOW = 2e-4  # seconds per sample beyond which storage is slow
_BY_CHUNK = 16  # number of batches that are then read in chunks, before one is read at once
_LARGE = 1 << 19  # bytes per sample above which values become bytes without a buffer in between
_FEW = 8  # samples below which reading them one by one takes less time
_PADDED = ("attention_mask", "segment_ids")  # a batch with one of these may have padding
_NUMBERS: dict[type[FieldType], Any] = {Int: np.int64, Float: np.float64, Bool: np.bool_}


class BatchInProgress:
    """A batch under construction: several threads fill its rows, in any order."""

    def __init__(self, step: Step, arrays: Arrays, lists: Collection[str]) -> None:
        rows = len(step.number)
        self.step = step
        self.arrays = arrays
        self.lists: dict[str, list[Any]] = {name: [None] * rows for name in lists}
        self.keys = [""] * rows
        self.samples: list[Sample | None] = [None] * rows  # for a collate function
        self.errors: dict[int, ShardkitError] = {}
        self.columns: Columns | None = None  # of all samples, if they were read at once


class FinishedBatch(NamedTuple):
    """A finished batch, with its errors and numbers of tokens."""

    batch: Batch
    errors: list[ShardkitError]  # of the samples that were replaced
    tokens: tuple[int, int]  # without and with padding


class BatchMaker:
    """Makes the batch of a step: `begin` and `read`, then `fill` for all rows from any thread, then
    `finish`.

    A batch has one value per field: an array with a row per sample if the field has the same shape
    in all samples, else a list; `__key__`, a list; and `valid` (rows,) bool, False for padding and
    for samples that were replaced.
    """

    def __init__(
        self,
        stream: Stream,
        allocate: Allocate = np.empty,
        dtype: Callable[[np.dtype[Any]], np.dtype[Any]] = lambda dtype: dtype,
        transforms: Transforms | None = None,
    ) -> None:
        """`allocate` makes a batch's arrays; `dtype` maps a dtype to the one that is delivered.

        `transforms` replace those of the stream. A field that these leave encoded is a list, of
        `Planned` or of pixels for each row.
        """
        options = stream.options
        self._samples, self._transforms = stream.samples, transforms or stream.transforms
        self._planned = self._transforms.planned
        self._seed, self._field = options.seed, stream.field
        self._allocate = allocate
        self._pack = stream.batching if isinstance(stream.batching, Pack) else None
        # Lengths that limit replacements; None for packed rows, which are zeroed, not replaced.
        self._lengths = None if self._pack else stream.lengths
        self._collate = options.collate
        if self._collate is None and self._lengths is not None:
            self._collate = _padding(self._field, self._samples.schema, self._transforms.fields)
        self._max_errors = options.max_errors if options.on_error == "skip" else None
        self._bad: set[tuple[int, int]] = set()  # number and epoch of known bad samples
        outputs = self._transforms.outputs().items()
        self._transformed = {name: kind for name, kind in outputs if name not in self._planned}
        schema, fields = self._samples.schema, self._transforms.fields
        self._by_sample = self._collate is not None or self._pack is not None
        kept: Mapping[str, FieldType] = schema
        if self._by_sample:  # a value for each class is not padded
            pads = isinstance(self._collate, PadCollate)
            named = {name for dataset in stream.datasets for name in dataset.class_names}
            kept = {n: schema[n] for n in schema if pads and n in named and is_vector(schema[n])}
        self._stored = _fixed(kept, fields, dtype)
        # None if samples that are read at once must become dicts.
        self._direct = None if self._by_sample else self._transforms.direct() if fields else ()
        in_buffer = {direct.fields[0] for direct in self._direct or ()}
        others = (kind for name, kind in schema.items() if name not in in_buffer)
        self._has_bytes = any(isinstance(kind, Bytes | Images) for kind in others)
        self._by_chunk = 1  # number of batches that are now read in chunks
        self._processors = processors()
        # A single array field, such as tokens: all rows are read in one call, which takes less time
        # than handing the batch to another thread.
        only_array = [type(kind) for kind in schema.values()] == [Array]
        self.single_array = only_array and len(self._stored) == 1 and not self._by_sample
        # As transforms take much time.
        self.share_between_threads = bool(fields.difference(self._planned))
        # The most rows per chunk: of what holds the interpreter lock, threads take turns.
        self.most_rows = 256 if self._direct else 64
        # Of arrays whose shape is not known, those of a batch may have the same.
        unknown = {n for n, k in schema.items() if isinstance(k, Array) and k.shape is None}
        self._stacked = (fields | unknown) - self._transforms.lists - self._planned.keys()

    def workers(self, threads: int) -> int:
        """Return how many threads should work at a time: more make it slower, unless they wait."""
        waits = self._samples.waits or self._direct is None  # functions may wait, too
        return threads if waits else min(threads, self._processors)

    def begin(self, step: Step) -> BatchInProgress:
        """Allocate the arrays of a batch."""
        rows, shapes = len(step.number), {**self._stored, **self._transformed}
        arrays = {
            name: self._allocate((rows, *shape), dtype) for name, (shape, dtype) in shapes.items()
        }
        fields = self._planned if self._by_sample else self._samples.schema
        return BatchInProgress(step, arrays, [name for name in fields if name not in arrays])

    def read(self, batch: BatchInProgress) -> None:
        """Read all samples at once. If that is not possible, or would be slow, `fill` reads them.

        If storage is slow, all threads wait for it, each for a chunk.
        """
        if self._by_chunk > 0:
            self._by_chunk -= 1
        else:
            batch.columns = self._read_many(batch.step, slice(None))

    def _read_many(self, step: Step, rows: slice) -> Columns | None:
        """Read some rows at once; None if that is not possible, or not worth it."""
        began, numbers = time.perf_counter(), step.number[rows]
        if step.ahead is not None or len(numbers) < _FEW:
            self._samples.waits = True
            return None
        enter("read")
        most = _LARGE * len(numbers) if self._has_bytes else None
        reading.waited = True
        columns = self._samples.read_many(numbers, most)
        self._samples.waits = reading.waited
        if reading.waited and time.perf_counter() - began > _SLOW * len(numbers):
            self._by_chunk = _BY_CHUNK
        return columns

    def fill(self, batch: BatchInProgress, start: int, stop: int) -> None:
        """Make the rows from `start` to `stop`. Errors of single rows are handled by `finish`."""
        rows = slice(start, stop)
        if batch.columns is not None:
            columns: Columns | None = {n: taken(c, rows) for n, c in batch.columns.items()}
        else:
            columns = self._read_many(batch.step, rows)
        if columns is not None and self._direct is not None and self._fits(columns):
            samples = self._fill_directly(batch, columns, start)
        elif columns is not None:
            samples = [*samples_of(columns, self._samples.schema)]
        else:
            samples = self._read_each(batch, start, stop)
        self._fill_rows(batch, samples, start)

    def _fits(self, columns: Columns) -> bool:
        """Make arrays of the columns that have one in batches; False if one does not fit there."""
        for name, (shape, _) in self._stored.items():
            try:
                columns[name] = column = np.asarray(columns[name])
            except ValueError:  # arrays of different shapes
                return False
            if column.shape[1:] != shape or column.dtype == object:
                return False
        return True

    def _fill_directly(
        self, batch: BatchInProgress, columns: Columns, start: int
    ) -> list[Sample | None]:
        """Make rows from columns; returns the samples of those that this is not possible for."""
        count, schema = len(columns[KEY]), self._samples.schema
        rows = slice(start, start + count)
        out = {name: array[rows] for name, array in batch.arrays.items()}
        done, values = np.ones(count, np.bool_), {**columns}
        for direct in self._direct or ():
            image, *others = direct.fields
            values[image] = blobs_of(columns[image]) if direct.size is None else columns[image]
            values.update((name, [*listed(columns[name])]) for name in others)
            draws = Draws(self._seed, batch.step.epoch[rows], batch.step.number[rows])
            done &= direct.apply(values, draws, out)
        enter("collate")
        batch.keys[rows] = columns[KEY]  # type: ignore[assignment]
        for name in self._stored:
            out[name][...] = columns[name]
        for name, list_ in batch.lists.items():
            list_[rows] = listed(values[name])
        left = np.flatnonzero(~done)
        samples: list[Sample | None] = [None] * count
        if len(left):
            whole = {name: taken(column, left) for name, column in columns.items()}
            for row, sample in zip(left.tolist(), samples_of(whole, schema), strict=True):
                samples[row] = sample
        return samples

    def _read_each(self, batch: BatchInProgress, start: int, stop: int) -> list[Sample | None]:
        """Read samples one by one; None for those that cannot be read."""
        enter("read")
        samples: list[Sample | None] = []
        ahead = batch.step.ahead or {}
        for row, number in enumerate(batch.step.number[start:stop].tolist(), start):
            try:
                read = ahead.pop(number, None)
                samples.append(self._samples.read(number) if read is None else read.result())
            except ShardkitError as error:
                batch.errors[row] = error
                samples.append(None)
        return samples

    def _fill_rows(self, batch: BatchInProgress, samples: list[Sample | None], start: int) -> None:
        """Transform samples and write them into the rows from `start` on, unless they are None."""
        if not any(samples):
            return
        step, rows = batch.step, slice(start, start + len(samples))
        out = {name: array[rows] for name, array in batch.arrays.items()}
        if self._transforms.fields:
            draws = Draws(self._seed, step.epoch[rows], step.number[rows])
            for direct in self._planned.values():
                direct.plan(samples, draws, out)
            for row, failure in self._transforms.apply(samples, draws, out).items():
                batch.errors[start + row] = self._addressed(failure, int(step.number[start + row]))
        enter("collate")
        for row, sample in enumerate(samples, start):
            if sample is None:
                continue
            batch.keys[row] = sample[KEY]
            if row not in batch.errors:
                try:
                    self._write(sample, out, row - start)
                except ShardkitError as error:
                    batch.errors[row] = self._addressed(error, int(step.number[row]))
            for name, list_ in batch.lists.items():
                list_[row] = sample.get(name)
        if self._by_sample:
            batch.samples[rows] = samples

    def _write(self, sample: Sample, out: Arrays, row: int) -> None:
        for name in self._stored:
            value = sample.get(name)
            array = out[name]
            if value is None or array.shape[1:] != np.shape(value):
                raise SampleError(
                    "a value does not fit the batch",
                    key=sample["__key__"],
                    field=name,
                    expected=f"shape {array.shape[1:]}",
                    found="no value" if value is None else f"shape {np.shape(value)}",
                )
            array[row] = value

    def _addressed(self, error: ShardkitError, number: int) -> ShardkitError:
        return error.located(**self._samples.location(number))

    def finish(self, batch: BatchInProgress) -> FinishedBatch:
        """Return the filled batch. Raises the error of the first bad sample that is not skipped."""
        enter("collate")
        bad = sorted(batch.errors)
        for row in bad:
            if self._max_errors is None or os_errors.shortage(batch.errors[row]):
                raise batch.errors[row]
        valid = batch.step.valid.copy()  # the schedule may keep the step, and users change batches
        if bad:
            if self._pack is None:  # a bad sample that is repeated as padding is counted once
                bad = [row for row in bad if valid[row]]
            valid = self._replace(batch)
            enter("collate")
        samples = [sample for sample in batch.samples if sample is not None]
        made = {**self._columns(batch, samples), "__key__": batch.keys, "valid": valid}
        return FinishedBatch(made, [batch.errors[row] for row in bad], _tokens(made))

    def _columns(self, batch: BatchInProgress, samples: list[Sample]) -> Mapping[str, Any]:
        if self._pack is not None and batch.step.segments is not None:
            fields = [self._field, *(n for n in self._samples.schema if n != self._field)]
            return packed(batch.step.segments, samples, self._pack.seq_len, 0, fields)
        if isinstance(self._collate, PadCollate):  # no need to stack what is in arrays already
            made = {**batch.arrays, **batch.lists}
            rest = [{k: v for k, v in s.items() if k not in made} for s in samples]
            return {**self._collate(rest), **made}
        if self._collate is not None:
            whole = [
                sample | {name: array[row] for name, array in batch.arrays.items()}
                for row, sample in enumerate(samples)
            ]
            collated = self._collate([*map(self._transforms.typed, whole)])
            if not isinstance(collated, Mapping):
                raise UsageError(
                    "the collate function did not return a batch, a dict of fields",
                    found=f"{type(collated).__name__}, from {name_of(self._collate)}",
                )
            return collated
        made = {}
        for name in self._samples.schema:
            made[name] = batch.arrays[name] if name in batch.arrays else batch.lists[name]
            if name in self._stacked and name not in batch.arrays:
                made[name] = stacked(batch.lists[name])
        return made

    def _replace(self, batch: BatchInProgress) -> npt.NDArray[np.bool_]:
        """Replace bad samples by good ones, so that no rows are missing; returns `valid`."""
        step, valid = batch.step, batch.step.valid.copy()
        for row in sorted(batch.errors):
            good = self._next_good(batch, row)
            sample = good.samples[0]
            if self._pack is not None and step.segments is not None and sample is not None:
                mine = step.segments[step.segments[:, 1] == row]
                length = mine[:, 3].max()  # as planned
                zeros = {n: np.zeros(length, sample[n].dtype) for n in self._samples.schema}
                batch.samples[row] = {"__key__": "", **zeros}
                valid[mine[:, 0]] = False
                continue
            batch.samples[row], batch.keys[row] = sample, good.keys[0]
            for name, array in batch.arrays.items():
                array[row] = good.arrays[name][0]
            for name, values in batch.lists.items():
                values[row] = good.lists[name][0]
            valid[row] = False
        return valid

    def _next_good(self, batch: BatchInProgress, row: int) -> BatchInProgress:
        """Return the next good sample after a bad one, in stored order.

        It depends only on the bad sample, so it is the same for any number of ranks and threads. If
        batches are planned by length, it is not longer than the longest sample of its batch.
        """
        step, tried = batch.step, 0
        first, epoch = int(step.number[row]), int(step.epoch[row])
        self._bad.add((first, epoch))
        samples, lengths = len(self._samples), self._lengths
        longest = None if lengths is None else lengths[step.number].max()
        for number in (n % samples for n in range(first + 1, first + samples)):
            if lengths is not None and lengths[number] > longest:
                continue
            if (number, epoch) not in self._bad:
                one = Step(np.array([number]), np.array([epoch]), step.valid[:1], None, step.after)
                made = self.begin(one)
                self.fill(made, 0, 1)
                if not made.errors:
                    return made
                self._bad.add((number, epoch))
            tried += 1
            if tried > (self._max_errors or 0):
                break
        raise SampleError(
            f"no good sample found to replace a bad one ({tried:,} tried): {batch.errors[row]}",
            fix="repair the dataset (`shardkit verify`), or raise max_errors",
        ) from batch.errors[row]

    def make(self, step: Step) -> FinishedBatch:
        """Make a whole batch in the calling thread."""
        batch = self.begin(step)
        self.read(batch)
        self.fill(batch, 0, len(step.number))
        return self.finish(batch)


def rows_of(batch: Batch) -> Iterator[Sample]:
    """Yield the samples of a batch, one by one."""
    scalars = {n for n, v in batch.items() if isinstance(v, np.ndarray) and v.ndim == 1}
    for row in range(len(batch["valid"])):
        yield {n: v[row].item() if n in scalars else v[row] for n, v in batch.items()}


def _tokens(batch: Batch) -> tuple[int, int]:
    if "lengths" not in batch:  # made by the user's collate
        return 0, 0
    shape = next((batch[name].shape for name in _PADDED if name in batch), (0, 0))
    return (int(batch["lengths"].sum()) if all(shape) else 0), shape[0] * shape[1]


def _fixed(
    schema: Mapping[str, FieldType],
    transformed: Collection[str],
    dtype: Callable[[np.dtype[Any]], np.dtype[Any]],
) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape and type of the fields that are the same in every sample."""
    fixed: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
    for name, kind in schema.items():
        if kind.optional or name in transformed:
            continue
        if type(kind) in _NUMBERS:
            fixed[name] = ((), np.dtype(_NUMBERS[type(kind)]))
        elif isinstance(kind, Array) and kind.dtype is not None and kind.shape is not None:
            shape = tuple(n for n in kind.shape if n is not None)
            if len(shape) == len(kind.shape):
                fixed[name] = (shape, dtype(np.dtype(kind.dtype)))
    return fixed


def _padding(field: str, schema: Schema, transformed: Collection[str]) -> PadCollate:
    """The collate for samples of different lengths. Audio that stays encoded becomes a list."""
    if isinstance(schema[field], Audio):
        return pad_collate(field=field, axis=-1) if field in transformed else pad_collate()
    return pad_collate(field=field)


class Memory:
    """Reuses the memory of batches that are no longer referenced, as page faults on new memory cost
    as much time as resizing images.

    Each array has its own base object, which all of its views refer to. NumPy arrays do not take
    part in cyclic garbage collection, so a base is freed exactly when its last view is. A weak
    reference then calls `deque.append`, at any time, in any thread: a callback in Python could
    swallow a KeyboardInterrupt.
    """

    def __init__(self, most: int) -> None:
        """`most`: maximum number of free buffers of one size."""
        self._most = most
        self._free: dict[int, deque[npt.NDArray[np.uint8]]] = {}
        self._used: dict[int, _Used] = {}  # by its id
        self._most_used = 0  # bytes at a time, as far as was looked
        self._released: deque[_Used] = deque()

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array with undefined contents."""
        with suppress(IndexError):
            while True:
                used = self._released.popleft()
                del self._used[id(used)]
                self._free_of(used.buffer.nbytes).append(used.buffer)
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return np.empty(shape, dtype)
        try:
            buffer = self._free_of(size).pop()
        except IndexError:
            self._give_back()
            buffer = np.empty(size, np.uint8)
        base = np.frombuffer(buffer.data, dtype)  # base of all views, as its own base is no array
        used = _Used(base, self._released.append)
        used.buffer = buffer
        self._used[id(used)] = used
        return base.reshape(shape)

    def _give_back(self) -> None:
        """Leave at most as much memory free as was in use at a time, as arrays may vary in size."""
        used = sum(one.buffer.nbytes for one in list(self._used.values()))
        self._most_used = max(self._most_used, used)
        every = list(self._free.items())
        free = sum(size * len(buffers) for size, buffers in every)
        for size, buffers in every:
            with suppress(IndexError):
                while free > self._most_used:
                    buffers.popleft()
                    free -= size

    def _free_of(self, size: int) -> deque[npt.NDArray[np.uint8]]:
        return self._free.setdefault(size, deque(maxlen=self._most))


class _Used(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a base array, and the buffer to release when the array is freed."""

    buffer: npt.NDArray[np.uint8]
