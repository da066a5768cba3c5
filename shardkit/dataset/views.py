"""`Views`: samples by number, slice, condition and key; keys and columns of all samples.

A view is its dataset with the numbers of some of its samples: it is cheap to create, and reads the
same shards.
"""

from __future__ import annotations

import copy
import functools
import operator
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from shardkit.dataset.conditions import Condition, condition
from shardkit.errors import (
    MissingKeyError,
    SampleError,
    ShardkitError,
    UsageError,
    near,
    warn,
)
from shardkit.formats.base import KEY, Columns, Ranges
from shardkit.formats.columns import listed, read_together, samples_of
from shardkit.helpers.familiar import Familiar
from shardkit.helpers.indices import array, ascending, below, chosen, compact, in_order, pick
from shardkit.helpers.prefetch import growing, in_threads, split
from shardkit.helpers.processors import processors
from shardkit.sample import KeyTable, Sample, key_of
from shardkit.schema import Array, Bool, FieldType, Float, Int, Json, Schema, Text
from shardkit.storage.blobs import Blobs
from shardkit.storage.page_cache import cache_from
from shardkit.storage.pages import Pages, through
from shardkit.storage.remote.path import RemotePath

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Self

    from shardkit.helpers.indices import Indices, Numbers

_CHUNK, _CHUNK_BYTES = 1 << 14, 64 << 20  # samples and bytes up to which a column is read at once
_MOST_AT_ONCE = 4 * _CHUNK_BYTES  # of samples whose size is estimated from that of their shards
_TURN = 256  # samples that are read at once to be used one by one
_COPIED = 1 << 13  # bytes of a sample up to which this is faster
_MAX_BYTES = 4 << 30  # maximum bytes of a column's values
_SMALL = (Int, Float, Bool, Text, Json)  # types small enough to read for many samples at once
_AMONG = {"wds", "lmdb"}  # formats that store values by sample, not by field
REQUESTS = 32  # samples at a URL that are read at a time: threads mostly wait
_LARGE = 10**9  # bytes of a download above which to warn
_DTYPES: dict[type[FieldType], Any] = {Int: np.int64, Float: np.float64, Bool: np.bool_}


class Views(Familiar, ABC):
    """All samples of some shards, or a view of them: the base class of `Dataset`."""

    path: Path  # the folder of the shards
    format: str
    schema: Schema
    transform: Callable[[Sample], Sample] | None = None  # applied by `ds[i]`
    _names: list[str]  # of the shards, relative to `path`
    _bytes: list[int | None]  # of the shards; None: not known yet
    _starts: list[int]  # the number of each shard's first sample
    _length: int  # number of samples in all shards
    _chosen: Indices | None = None  # the numbers of a view's samples
    _shared: dict[str, Any]  # state shared by all views of a dataset

    @property
    @abstractmethod
    def place(self) -> Path:
        """The path of the dataset for messages: its folder, or its only file."""

    @property
    @abstractmethod
    def class_names(self) -> dict[str, tuple[str, ...]]:
        """Class names by field, for all fields whose class names are known."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The field whose values `classes` names."""

    @property
    @abstractmethod
    def guessed(self) -> Collection[str]:
        """Fields of third-party shards that all samples seem to have, judging from only a few."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names in the order of their labels, or None if unknown."""
        return self.class_names.get(self.label)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The folders of all shards."""
        return (self.path,)

    def at(self, change: Callable[[Path], Path]) -> Self:
        """Return the same dataset with its shards in other folders."""
        moved = copy.copy(self)  # without open shards
        moved.path = change(self.path)
        return moved

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self._names)

    def extent(self, shard: int) -> tuple[int, int]:
        """Return samples and bytes of one shard."""
        stop = self._length if shard + 1 == len(self._starts) else self._starts[shard + 1]
        return stop - self._starts[shard], self._bytes[shard] or 0

    def shard_name(self, shard: int) -> str:
        """Return the name of a shard's file, relative to `path`."""
        return self._names[shard]

    def shard_path(self, shard: int) -> Path:
        return self.path / self._names[shard]

    def sample_path(self, shard: int, position: int) -> Path:
        """Return the file that contains the sample at a `position` in a `shard`, for messages."""
        return self.shard_path(shard)

    @abstractmethod
    def read(self, index: int, fields: Collection[str] | None = None) -> Sample:
        """The sample as stored, without the transform: its key and these fields (None: all)."""

    @abstractmethod
    def plan(
        self, shard: int, positions: Numbers, fields: Collection[str]
    ) -> Ranges | Columns | None:
        """Call `ShardReader.plan` of a shard; fields that it lacks are absent in all samples."""

    def read_many(self, numbers: Numbers, fields: Collection[str]) -> Columns | None:
        """Read the keys and these fields of several samples at once, as stored.

        None if the samples must be read one by one, which also finds the error of a bad one. So
        must those that are much larger than is usual in their shards.
        """
        stored, starts = self.stored(numbers), np.array(self._starts, np.int64)
        plan = functools.partial(self.plan, fields=fields)
        return read_together(stored, starts, plan, _MOST_AT_ONCE)

    def read_columns(self, numbers: Numbers, fields: Collection[str]) -> Columns:
        """Like `read_many`, but raises the error of a bad sample. None stands for absent values."""
        columns = self.read_many(numbers, fields)
        if columns is None:
            samples = [self.read(number, fields) for number in numbers.tolist()]
            columns = {name: [s.get(name) for s in samples] for name in (KEY, *fields)}
        return columns

    @abstractmethod
    def _key_hashes(self, shard: int) -> Numbers:
        """Return the `key_hash` of each sample in a shard."""

    def __len__(self) -> int:
        return self._length if self._chosen is None else len(self._chosen)

    @overload
    def __getitem__(self, index: int | str) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | str | slice) -> Sample | Self:
        """Return the sample with this index or key, or a view of the samples in a slice.

        Negative indices count from the end. The first lookup of a key reads all keys. Raises
        IndexError for an index out of range, and MissingKeyError (a KeyError) for an unknown key.
        """
        if isinstance(index, slice):
            try:
                return self._view(range(len(self))[index])
            except (TypeError, ValueError) as error:
                what = f"invalid slice of samples: {error}"
                raise UsageError(what, path=self.place, found=f"[{index!r:.100}]") from error
        if isinstance(index, str):
            index = self.number_of(index)
        return self._transformed(self.read(index), index)

    def __iter__(self) -> Iterator[Sample]:
        """Yield `ds[0]`, `ds[1]` and so on. Small samples are read several at a time."""
        samples = self.stored_samples()
        if self.transform is None:
            return samples
        return map(self._transformed, samples, count())

    def _transformed(self, sample: Sample, index: int) -> Sample:
        transform = self.transform and self.transform_of(index)
        if transform is None:
            return sample
        try:
            return transform(sample)
        except ShardkitError as error:
            shard, position = self.locate(index)
            where = {"path": self.shard_path(shard), "position": position}
            raise error.located(**where) from error.__cause__

    def transform_of(self, index: int) -> Callable[[Sample], Sample] | None:
        """Return the transform of one sample."""
        return self.transform

    def __contains__(self, key: object) -> bool:
        """Whether a sample has this key."""
        return isinstance(key, str) and bool(self.numbers_of(key))

    def locate(self, index: int) -> tuple[int, int]:
        """Return the shard number of the sample at `index`, and its position in this shard.

        Raises IndexError for an index out of range, and UsageError for anything but a whole number.
        """
        try:
            index = operator.index(index)
        except TypeError:
            raise UsageError(
                "samples are read by a whole number, a slice or a key",
                path=self.place,
                found=f"[{index!r:.100}]",
                fix="for several numbers, or a mask, dataset.select(...)",
            ) from None
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"{self.place} has {len(self)} samples")
        if self._chosen is not None:
            index = int(self._chosen[index])
        shard = bisect_right(self._starts, index) - 1
        return shard, index - self._starts[shard]

    # --- views ------------------------------------------------------------------------------------

    def select(self, indices: Iterable[int] | npt.NDArray[Any]) -> Self:
        """Return a view of the samples at these indices, in this order. Indices can repeat.

        indices: a list, range or array of whole numbers (negative ones count from the end), or of
            one bool per sample.

        A view takes 8 bytes of memory per sample, or none if the indices are equally spaced. Raises
        IndexError for an index out of range, and UsageError for other values.
        """
        return self._view(chosen(indices, len(self)))

    def filter(
        self, where: str | Callable[[Sample], object], *, fields: Collection[str] | None = None
    ) -> Self:
        """Return a view of the samples that meet a condition.

        where: a condition as in `shardkit convert --where`, such as `'label == "dog"'`, or a
            function of a sample. For a condition, only the fields that it names are read. A
            function gets samples as they are stored, without the dataset's transforms.
        fields: the fields that the function gets, besides the key. None: all.

        Raises UsageError for an invalid condition and for an unknown field, and the errors of
        reading a damaged sample.
        """
        test: Callable[[Sample], object]
        if isinstance(where, str):
            found = condition(where, self.schema, self.class_names)
            if fields is not None:
                raise UsageError(
                    "a condition names its fields itself", found=f"fields={fields!r:.100}"
                )
            if all(isinstance(self.schema[name], _SMALL) for name in found.fields):
                return self._view(self._passing(found))
            test, fields = found, found.fields
        elif callable(where):
            test = where
        else:
            raise UsageError(
                "samples are filtered by a condition or a function",
                expected="text such as 'label == 3', or a function of a sample",
                found=f"{where!r:.100}",
                fix="for a mask or numbers, dataset.select(...)",
            )
        for name in fields or ():
            self.kind_of(name)
        passed = (n for n, sample in enumerate(self._samples(fields)) if test(sample))
        return self._view(np.fromiter(passed, np.int64))

    def side_by_side(self) -> tuple[Self, int]:
        """The dataset for reading in threads, and their number. Requests each remote page once."""
        if not any(isinstance(path, RemotePath) for path in self.paths):
            return self, processors()
        pages = Pages(cache_from(None, None))
        return self.at(lambda path: through(path, pages)), REQUESTS

    def _samples(self, fields: Collection[str] | None) -> Iterator[Sample]:
        """All samples with these fields, in order; those at a URL are requested in parallel."""
        there, threads = self.side_by_side()
        if there is self:
            return self.stored_samples(fields)
        read = functools.partial(there.read, fields=fields)
        return in_threads(read, range(len(self)), threads, 2)

    def stored_samples(
        self, fields: Collection[str] | None = None, skip: bool = False
    ) -> Iterator[Sample]:
        """Yield all samples as stored, with these fields (None: all), in order.

        skip: leave out those that cannot be read. Small samples are read at once, first one, then
        more at a time; the caller owns each alone.
        """
        most = self._at_once(self.schema if fields is None else fields)
        if most == 1:
            return self._one_by_one(range(len(self)), fields, skip)
        turns = split(range(len(self)), growing(1, most))
        return chain.from_iterable(self._together(turn, fields, skip) for turn in turns)

    def _together(
        self, numbers: range, fields: Collection[str] | None, skip: bool
    ) -> Iterable[Sample]:
        names = self.schema if fields is None else fields
        columns = self.read_many(np.arange(numbers.start, numbers.stop), names)
        if columns is None:
            return self._one_by_one(numbers, fields, skip)
        samples = samples_of(columns, self.schema)
        arrays = [name for name in names if isinstance(self.schema[name], Array)]
        for sample in samples if arrays else ():  # a row would keep all others in memory
            sample.update({name: np.array(sample[name]) for name in arrays if name in sample})
        return samples

    def _one_by_one(
        self, numbers: range, fields: Collection[str] | None, skip: bool
    ) -> Iterator[Sample]:
        for number in numbers:
            try:
                yield self.read(number, fields)
            except SampleError:
                if not skip:
                    raise

    def _at_once(self, fields: Collection[str]) -> int:
        """Return how many samples to read at once, to be used one by one.

        Only one if they are large: then to copy their bytes takes longer than to find them.
        """
        size = sum(self.extent(shard)[1] for shard in range(self.shards)) // max(self._length, 1)
        small = all(isinstance(self.schema[name], _SMALL) for name in fields)
        return max(min(_TURN, _CHUNK_BYTES // max(size, 1)), 1) if small or size <= _COPIED else 1

    def _passing(self, test: Condition) -> Numbers:
        """Return the numbers of the samples that pass a test of small fields, read in chunks."""
        self._warn_of_download(f"values of {', '.join(map(repr, test.fields))}")
        passed = [np.zeros(0, np.int64)]
        for numbers in self.runs():
            samples = samples_of(self.read_columns(numbers, test.fields), self.schema)
            passed.append(numbers[[bool(test(sample)) for sample in samples]])
        return np.sort(np.concatenate(passed))

    @property
    def indices(self) -> Indices | None:
        """The indices of a view's samples in `whole`: a range or int64 (samples,). None: all."""
        return self._chosen

    @property
    def whole(self) -> Self:
        """The dataset with all samples of the shards, of which this may be a view."""
        return self if self._chosen is None else self._with(None)

    def is_of(self, other: Views) -> bool:
        """Return whether both are the same opened dataset, or views of it."""
        return self._shared is other._shared

    @property
    def is_in_order(self) -> bool:
        """Whether the samples are in storage order."""
        return self._chosen is None or ascending(self._chosen)

    def in_order(self) -> Self:
        """Return the same samples in storage order."""
        return self if self._chosen is None else self._with(in_order(self._chosen))

    def stored(self, numbers: Numbers) -> Numbers:
        """Map numbers of samples, which must not be negative, to their numbers in `whole`."""
        return numbers if self._chosen is None else array(pick(self._chosen, numbers))

    def before(self, bounds: Numbers) -> Numbers:
        """How many samples precede each of these numbers in `whole`. Requires storage order."""
        return bounds if self._chosen is None else below(self._chosen, bounds)

    def positions(self, shard: int) -> Numbers:
        """Return the positions in a shard of the samples that are in it. Requires storage order."""
        first = self._starts[shard]
        begin, end = self.before(np.array([first, first + self.extent(shard)[0]])).tolist()
        return self.stored(np.arange(begin, end)) - first

    def start(self, shard: int) -> int:
        """Return the number of a shard's first sample in `whole`."""
        return self._starts[shard]

    def _view(self, indices: Indices) -> Self:
        """Return a view of the samples with these numbers of this view."""
        return self._with(indices if self._chosen is None else pick(self._chosen, indices))

    def _with(self, indices: Indices | None) -> Self:
        """Return the samples of all shards, or those with these numbers; shares what is open."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._chosen = None if indices is None else compact(indices)
        if isinstance(view._chosen, range) and view._chosen == range(self._length):
            view._chosen = None
        return view

    # --- keys and fields --------------------------------------------------------------------------

    def keys(self) -> list[str]:
        """Return the keys of all samples, in order, without reading values."""
        self._warn_of_download("keys")
        found = np.empty(len(self), object)
        for numbers in self.runs():
            found[numbers] = self.read_columns(numbers, ())[KEY]
        keys: list[str] = found.tolist()
        return keys

    @property
    def columns(self) -> list[str]:
        """Names of the fields."""
        return list(self.schema)

    def column(self, field: str) -> npt.NDArray[Any]:
        """Return the values of one `field` in all samples, as stored. Other fields are not read.

        Numbers become an int64, float64 or bool array of shape (samples,). Arrays that all have the
        same shape become one array of shape (samples, *shape). All other values become an object
        array of shape (samples,): text, bytes, arrays, and None for samples without the field.

        Raises UsageError for an unknown field, and for more than 4 GiB of values.
        """
        if field == KEY:
            return np.fromiter(self.keys(), object, len(self))
        kind, size, seen = self.kind_of(field), 0, 0
        shape, dtype = _row(kind, field in self.guessed)
        out = np.empty((len(self), *shape), dtype)
        self._warn_of_download(f"values of {field!r}")
        for numbers in self.runs():
            values: Any = self.read_columns(numbers, (field,))[field]
            if shape and getattr(values, "shape", ())[1:] != shape:
                self._check_shapes(shape, values, numbers, field)
            elif out.dtype != object and isinstance(values, list) and None in values:
                out = out.astype(object)
            seen += len(values)
            if out.dtype == object:
                size += size_of(values)
                values = np.fromiter(listed(values), object, len(values))
            if size > _MAX_BYTES:
                raise UsageError(
                    "the values of the field take more memory than a column may",
                    path=self.place,
                    field=field,
                    expected=f"{_MAX_BYTES >> 30} GiB at most",
                    found=f"more in the first {seen:,} of {len(self):,} samples",
                    fix="take a part, such as dataset[:1000].column(...), or sample by sample",
                )
            out[numbers] = values
        return out

    def _check_shapes(
        self, shape: tuple[int, ...], values: Iterable[Any], numbers: Numbers, field: str
    ) -> None:
        for number, value in zip(numbers.tolist(), values, strict=True):
            if np.shape(value) != shape:
                shard, position = self.locate(number)
                raise SampleError(
                    "an array does not have the shape of its field",
                    path=self.shard_path(shard),
                    position=position,
                    field=field,
                    expected=str(shape),
                    found=str(np.shape(value)),
                )

    def kind_of(self, name: str) -> FieldType:
        """Return the type of a field. Raises UsageError for an unknown field."""
        kind = self.schema.get(name)
        if kind is None:
            raise UsageError(
                f"the dataset has no field {name!r}",
                path=self.place,
                expected=near(name, self.columns) if self.schema else "no field",
            )
        return kind

    def runs(self) -> Iterator[Numbers]:
        """Yield the numbers of all samples in storage order, those of some of a shard at a time."""
        order: Numbers | None = None
        if not self.is_in_order and self._chosen is not None:
            order = np.argsort(array(self._chosen), kind="stable")
        stored = self.in_order()
        for shard, first in enumerate(self._starts):
            samples, size = self.extent(shard)
            begin, end = stored.before(np.array([first, first + samples])).tolist()
            step = max(min(_CHUNK_BYTES * samples // max(size, 1), _CHUNK), 1)
            for at in range(begin, end, step):
                numbers = np.arange(at, min(at + step, end))
                yield numbers if order is None else order[numbers]

    def _warn_of_download(self, what: str) -> None:
        """Warn if the data are at a URL and stored by sample, so that all must be downloaded."""
        among = not _AMONG.isdisjoint(self.format.split(", "))
        if not (among and any(isinstance(path, RemotePath) for path in self.paths)):
            return
        size = sum(self.extent(shard)[1] for shard in range(self.shards))
        size = size * len(self) // max(self._length, 1)
        if size > _LARGE:
            warn(
                f"the {what} of {len(self):,} samples are stored among all other values, of which"
                f" about {size / 1e9:,.1f} GB are downloaded"
            )

    # --- keys to samples --------------------------------------------------------------------------

    def number_of(self, key: str) -> int:
        """Return the index of the sample with this key.

        Raises MissingKeyError if no sample has the key, and UsageError if several samples have it.
        """
        numbers = self.numbers_of(key)
        if len(set(self.stored(np.array(numbers, np.int64)).tolist())) > 1:
            raise UsageError(
                "several samples have this key",
                path=self.place,
                key=key,
                found="numbers " + ", ".join(map(str, numbers[:5])),
                fix=f"read one by its number, such as {numbers[0]}",
            )
        if numbers:
            return numbers[0]
        # Suggest a key if a path was given, and show examples.
        stems = [key, key.rpartition(".")[0]]
        meant = [s for stem in stems for s in (stem, key_of(stem), stem.partition("/")[2])]
        known = next((name for name in meant if name and name in self), None)
        fix = None if known is None else f"use the key {known!r}"
        if key in self.schema:
            fix = f"dataset.column({key!r}) has the values of this field"
        some = sorted({0, len(self) // 2, len(self) - 1}) if len(self) else []
        examples = [self.read(number, ())[KEY] for number in some]
        raise MissingKeyError(
            "no sample has this key",
            path=self.place,
            key=key,
            expected="keys such as " + ", ".join(map(repr, examples)) if examples else "no key",
            fix=fix,
        )

    def numbers_of(self, key: str) -> list[int]:
        """Return the indices of all samples with this key.

        The first lookup of a key reads all keys.
        """
        table, whole = self._shared.get("keys"), self.whole
        if table is None:
            whole._warn_of_download("keys")
            hashes = [np.zeros(0, np.int64), *map(self._key_hashes, range(self.shards))]
            table = self._shared["keys"] = KeyTable(np.concatenate(hashes).view(np.uint64))
        found: list[int] = []
        for number in table.find(key):
            if whole.read(number, ())[KEY] != key:
                continue
            if isinstance(self._chosen, range):
                found += [self._chosen.index(number)] if number in self._chosen else []
            elif self._chosen is not None:
                found += np.flatnonzero(self._chosen == number).tolist()
            else:
                found.append(number)
        return sorted(found)


def _row(kind: FieldType, guessed: bool) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of a value in the column of a field."""
    if kind.optional or not isinstance(kind, Array):
        return (), object if kind.optional else _DTYPES.get(type(kind), object)
    shape = kind.shape or (None,)
    if guessed or kind.dtype is None or None in shape:
        return (), object
    return tuple(n or 0 for n in shape), np.dtype(kind.dtype)


def size_of(value: Any) -> int:
    """Return the bytes of a value, or of a column, as stored, about."""
    if isinstance(value, Blobs):
        return int(np.maximum(value.sizes, 0).sum())
    if isinstance(value, list | dict):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return sum(map(size_of, parts))
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) if isinstance(value, str | bytes) else 8
