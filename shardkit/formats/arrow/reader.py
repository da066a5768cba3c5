"""Reads shards of columns at random: IPC files and streams here, Parquet files in `parquet.py`.

A file is mapped, and a batch is looked at when a sample of it is first asked for. A batch that is
stored as it is stays a set of views into the file; one that must be decoded is kept for a while.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import threading
import weakref
from abc import abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from shardkit import storage
from shardkit.errors import DamagedError, FormatError, SampleError, ShardkitError
from shardkit.formats.arrow.columns import KEY
from shardkit.formats.arrow.foreign import Arrays, Known, check_names, layout_of
from shardkit.formats.arrow.messages import decompressed_size, find_messages, null_counts
from shardkit.formats.arrow.values import ABSENT, Buffers, Getter, check_fits, getter, sizes
from shardkit.formats.base import OldReader
from shardkit.sample import Sample, key_of
from shardkit.schema import Json, Schema, Text
from shardkit.storage import check_expansion

if TYPE_CHECKING:
    import numpy.typing as npt

_KEPT_BYTES = 64 << 20  # of decoded batches, per thread
# What pyarrow and numpy raise for damaged files; JSON may nest too deeply.
FAILURES = (
    pa.ArrowException, ValueError, LookupError, TypeError, OSError, ArithmeticError, RecursionError,
    struct.error,
)  # fmt: skip

_Getters = list[tuple[str, Getter]]


class Rows:
    """The rows of one batch: a getter per column, made when the column is first read."""

    def __init__(
        self,
        load: Callable[[Collection[str]], Arrays],
        schema: Schema,
        buffers: Buffers | None = None,
    ) -> None:
        """`buffers` says how to get at what stands in the arrays; None where they are in memory."""
        self._load = load
        self._schema = schema
        self._buffers = buffers
        self._stored: dict[str, Getter] = {}  # with JSON as text
        # Columns that cannot be read, and why: each row of a damaged batch is asked for.
        self._failed: dict[tuple[str, ...], Exception] = {}
        self.whole: _Getters | None = None  # key and all fields, once they were read
        self.whole_stored: _Getters | None = None  # the same with JSON as text
        self.some: dict[tuple[str, ...], _Getters] = {}  # key and some fields, by their names
        self.size = 0  # bytes of the columns that are loaded

    def stored(self, names: Collection[str]) -> _Getters:
        """Getters of some columns, with JSON as the text that is stored."""
        missing = tuple([name for name in names if name not in self._stored])
        if missing:
            if missing in self._failed:
                raise self._failed[missing].with_traceback(None)  # it would grow each time
            try:
                self._add(missing)
            except ShardkitError as error:
                self._failed[missing] = error.located()
                raise
            except FAILURES as error:
                self._failed[missing] = ValueError(_first_line(error))
                raise
        return [(name, self._stored[name]) for name in names]

    def _add(self, names: Collection[str]) -> None:
        for name, array in self._load(names).items():
            kind = Text() if name == KEY else self._schema[name]
            self._stored[name] = getter(name, kind, array, self._buffers)
            self.size += array.nbytes

    def parsed(self, names: Collection[str]) -> _Getters:
        """Getters of some columns."""
        return [
            (name, _parsing(get) if isinstance(self._schema.get(name), Json) else get)
            for name, get in self.stored(names)
        ]


def _parsing(get: Getter) -> Getter:
    def parse(row: int) -> Any:
        text = get(row)
        return text if text is ABSENT else json.loads(text)

    return parse


class BatchReader(OldReader):
    """One shard of any of the formats that hold columns. Values are copies."""

    _starts: list[int]  # the number of each batch's first row

    def __init__(self, path: Path, layout: dict[str, Any] | None) -> None:
        self._path = path
        self._closed = False
        with self._damage("the shard is damaged"):
            self._columns, lengths = self._open()
            *self._starts, self._length = accumulate(lengths, initial=0)
            check_names(self._columns)
            if layout is None:
                layout = layout_of(self._columns, self._length, self._known_nulls(), self._scan)
            self.layout = layout
            self.schema = Schema.from_json(layout["schema"])
            self._check_columns()
        # What is read of a sample: a file of others may be without a column of keys.
        self._keyed = [KEY] if KEY in self._columns.names else []
        self._stem = key_of(path.name.partition(".")[0])

    @abstractmethod
    def _open(self) -> tuple[pa.Schema, list[int]]:
        """Open the file; gives its columns and the rows of each batch."""

    @abstractmethod
    def _load(self, number: int, names: Collection[str]) -> Arrays:
        """Some columns of one batch."""

    @abstractmethod
    def _rows(self, number: int) -> Rows:
        """One batch, kept or new."""

    @abstractmethod
    def _known_nulls(self) -> Known:
        """How many nulls columns have, of those where the file says it."""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> Sample:
        number, row = self._locate(position)
        rows = self._rows(number)
        getters = rows.whole
        if getters is None:
            with self._damage("a batch is damaged", number, position):
                getters = rows.whole = rows.parsed([*self._keyed, *self.schema])
        return self._take(position, row, getters)

    def stored(self, position: int) -> Sample:
        """The sample with JSON values as the text that is stored."""
        number, row = self._locate(position)
        rows = self._rows(number)
        getters = rows.whole_stored
        if getters is None:
            with self._damage("a batch is damaged", number, position):
                getters = rows.whole_stored = rows.stored([*self._keyed, *self.schema])
        return self._take(position, row, getters)

    def read_fields(self, position: int, fields: Collection[str]) -> Sample:
        """The sample with these fields alone; the columns of the others are not touched."""
        number, row = self._locate(position)
        names = tuple([name for name in self.schema if name in fields])
        rows = self._rows(number)
        getters = rows.some.get(names)
        if getters is None:
            with self._damage("a batch is damaged", number, position):
                getters = rows.some[names] = rows.parsed([*self._keyed, *names])
        return self._take(position, row, getters)

    def keys(self) -> list[str]:
        """The key of every sample."""
        self._check_open()
        if not self._keyed:
            return [self._made_key(position) for position in range(self._length)]
        keys: list[str] = []
        for number in range(len(self._starts)):
            with self._damage("a batch is damaged", number):
                array = self._load(number, [KEY])[KEY]
                getters = [(KEY, getter(KEY, Text(), array))]
            try:
                array.validate(full=True)
                found = array.to_pylist()
            except (pa.ArrowException, UnicodeDecodeError):
                found = [None]
            if None in found:  # one by one, the damaged one is named
                start = len(keys)
                found = [self._take(start + n, n, getters)[KEY] for n in range(len(array))]
            keys += found
        return keys

    def batches(self) -> Iterator[Arrays]:
        """All columns as they are stored, batch by batch."""
        return self._scan(self._columns.names)

    def close(self) -> None:
        self._closed = True

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._path, self.layout)

    def _locate(self, position: int) -> tuple[int, int]:
        """Number of the batch, and the row in it."""
        if self._closed:
            self._check_open()
        if not 0 <= position < self._length:
            raise IndexError(f"{self._path} has {self._length} samples, not a position {position}")
        number = bisect_right(self._starts, position) - 1
        return number, position - self._starts[number]

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self._path} is closed")

    def _take(self, position: int, row: int, getters: _Getters) -> Sample:
        """One row of the columns."""
        sample: Sample = {} if self._keyed else {KEY: self._made_key(position)}
        name = KEY
        try:
            for name, get in getters:
                value = get(row)
                if value is not ABSENT:
                    sample[name] = value
                elif name == KEY or not self.schema[name].optional:
                    raise ValueError("it is null, which its column cannot be")
        except ShardkitError as error:
            raise error.located(
                path=self._path, position=position, key=sample.get(KEY), field=name
            ) from error.__cause__
        except FAILURES as error:
            raise SampleError(
                f"a value is damaged: {error}",
                path=self._path,
                position=position,
                key=sample.get(KEY),
                field=name,
                expected=self.schema[name].python if name in self.schema else "a key",
            ) from error
        return sample

    def _made_key(self, position: int) -> str:
        return f"{self._stem}/{position:09d}"

    def _scan(self, names: Collection[str]) -> Iterator[Arrays]:
        """Some columns, batch by batch."""
        for number in range(len(self._starts)):
            with self._damage("a batch is damaged", number):
                arrays = self._load(number, names)
            yield arrays

    def _check_columns(self) -> None:
        """Raises FormatError unless the columns can hold the fields of the schema."""
        columns = set(self._columns.names)
        missing = [name for name in self.schema if name not in columns]
        if missing:
            raise FormatError(
                "the shard has no column for a field",
                field=missing[0],
                expected=", ".join(self.schema),
                found=", ".join(self._columns.names),
            )
        for name, kind in self.schema.items():
            check_fits(name, kind, self._columns.field(name).type)

    def _where(self, number: int) -> int | None:
        """The byte at which a batch begins, where that is known."""
        return None

    @contextlib.contextmanager
    def _damage(
        self, what: str, number: int | None = None, position: int | None = None
    ) -> Iterator[None]:
        """Turn what pyarrow raises into an error of ours, and name the place in both."""
        offset = None if number is None else self._where(number)
        try:
            yield
        except ShardkitError as error:
            raise error.located(path=self._path, position=position) from error.__cause__
        except FAILURES as error:
            raise DamagedError(
                f"{what}: {_first_line(error)}",
                path=self._path,
                position=position,
                offset=offset,
                fix="copy the file again, or write it again where it was made",
            ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Decoded(threading.local):
    """Batches that had to be decoded, of all readers: the last ones, within a bound, per thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[object, int], Rows] = OrderedDict()

    def get(self, owner: object, number: int, make: Callable[[], Rows]) -> Rows:
        rows = self._kept.get((owner, number))
        if rows is not None:
            self._kept.move_to_end((owner, number))
            return rows
        total = sum(kept.size for kept in self._kept.values())
        while self._kept and total > _KEPT_BYTES:
            total -= self._kept.popitem(last=False)[1].size
        rows = self._kept[owner, number] = make()
        return rows

    def forget(self, owner: object) -> None:
        for place in [place for place in self._kept if place[0] is owner]:
            del self._kept[place]


DECODED = Decoded()


def _arrays(stored: pa.DataType) -> int:
    """How many arrays a column of a type consists of: itself and its children."""
    if isinstance(stored, pa.BaseExtensionType):
        return _arrays(stored.storage_type)
    return 1 + sum(_arrays(stored.field(n).type) for n in range(stored.num_fields))


def _has_hidden_nulls(stored: pa.DataType) -> bool:
    """Whether the counts of a column's arrays do not tell which rows have no value.

    A dictionary may hold a null; images are null where their bytes are.
    """
    if isinstance(stored, pa.BaseExtensionType):
        return _has_hidden_nulls(stored.storage_type)
    if pa.types.is_dictionary(stored) or pa.types.is_struct(stored) or pa.types.is_null(stored):
        return True
    return any(_has_hidden_nulls(stored.field(n).type) for n in range(stored.num_fields))


class IpcReader(BatchReader):
    """An Arrow IPC file or stream, mapped."""

    def __init__(self, path: Path, layout: dict[str, Any] | None = None) -> None:
        self._token = object()
        self._last: tuple[int, pa.RecordBatch | None] = -1, None  # the batch that was read last
        super().__init__(path, layout)
        self._kept: list[Rows | None] = [None] * len(self._starts)

    def _open(self) -> tuple[pa.Schema, list[int]]:
        with (
            storage.explained("open", self._path),
            open(self._path, "rb", opener=storage.regular) as file,
        ):
            if not os.fstat(file.fileno()).st_size:
                raise DamagedError("the file is empty", path=self._path)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._data: pa.Buffer | None = pa.py_buffer(mapped)
        self._messages = find_messages(memoryview(mapped), self._path)
        schema = pa.ipc.read_schema(pa.py_buffer(self._messages.schema))
        return schema, [batch.rows for batch in self._messages.batches]

    def _slice(self, place: slice) -> pa.Buffer:
        data = self._data
        if data is None:
            raise ValueError(f"{self._path} is closed")
        return data.slice(place.start, place.stop - place.start)

    def _rows(self, number: int) -> Rows:
        if self._is_encoded(number):
            return DECODED.get(self._token, number, lambda: self._new_rows(number))
        rows = self._kept[number]
        if rows is None:
            rows = self._kept[number] = self._new_rows(number)
        return rows

    def _new_rows(self, number: int) -> Rows:
        # Rows do not keep their reader alive: else only the garbage collector would close its file.
        reader = weakref.proxy(self)
        return Rows(lambda names: reader._load(number, names), self.schema)

    def _is_encoded(self, number: int) -> bool:
        batch = self._messages.batches[number]
        return batch.compressed or batch.dictionaries > 0

    def _load(self, number: int, names: Collection[str]) -> Arrays:
        last, batch = self._last
        if batch is None or last != number:
            batch = self._batch(number)
            if not self._is_encoded(number):  # it is but a view of the file
                self._last = number, batch
        return {name: batch.column(self._columns.get_field_index(name)) for name in names}

    def _batch(self, number: int) -> pa.RecordBatch:
        place = self._messages.batches[number]
        whole = slice(place.offset, place.offset + place.size)
        if self._is_encoded(number):
            batch = self._decode(whole, place.dictionaries)
        else:
            batch = pa.ipc.read_record_batch(self._slice(whole), self._columns)
        if batch.num_rows != place.rows:
            raise ValueError(f"{batch.num_rows} rows where {place.rows} are announced")
        batch.validate()
        return batch

    def _decode(self, batch: slice, dictionaries: int) -> pa.RecordBatch:
        """A batch that its message alone does not give: a stream of what it takes, read at once."""
        needed = [*self._messages.dictionaries[:dictionaries], batch]
        messages = [memoryview(self._slice(place)) for place in needed]
        for message in messages:
            check_expansion(decompressed_size(message), len(message))
        stream = pa.py_buffer(b"".join([self._messages.schema, *messages]))
        options = pa.ipc.IpcReadOptions(use_threads=False)
        with pa.ipc.open_stream(stream, options=options) as reader:
            return reader.read_next_batch()

    def _known_nulls(self) -> Known:
        """From the headers of the batches."""
        batches = [
            null_counts(self._slice(slice(b.offset, b.body)).to_pybytes())
            for b in self._messages.batches
        ]
        known, first = Known({}, set()), 0
        for column in self._columns:
            stop = first + _arrays(column.type)
            counts = [b[first:stop] for b in batches]
            first = stop
            if any(n < 0 for nulls in counts for n in nulls) or _has_hidden_nulls(column.type):
                continue
            if not any(map(any, counts)):
                known.whole.add(column.name)
            known.nulls[column.name] = sum(nulls[0] for nulls in counts)
        if any(len(nulls) < first for nulls in batches):
            raise ValueError("a batch has fewer arrays than its columns take")
        return known

    def sizes(self, field: str) -> npt.NDArray[np.int64]:
        """Stored bytes of the field in each sample that has it, in order."""
        self._check_open()
        found = [np.zeros(0, np.int64)]
        for arrays in self._scan([field]):
            with self._damage("a column is damaged"):
                found.append(sizes(field, self.schema[field], arrays[field]))
        return np.concatenate(found)

    def _where(self, number: int) -> int | None:
        return self._messages.batches[number].offset

    def close(self) -> None:
        super().close()
        self._data = None
        self._last = -1, None
        self._kept = [None] * len(self._starts)
        DECODED.forget(self._token)
