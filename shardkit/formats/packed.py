"""Reads shards of samples whose values follow one another, after their sizes: MDS and LitData."""

from __future__ import annotations

import dataclasses
import json
import struct
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.array import load_column
from shardkit.errors import DamagedError
from shardkit.formats.base import KEY, Column, Columns, Ranges, ShardReader, numbered_key
from shardkit.sample import JsonText, Sample
from shardkit.schema import Array, Bool, FieldType, Float, Int
from shardkit.storage.blobs import ABSENT, Blobs, Numbers, read_blobs
from shardkit.storage.byte_source import ByteSource, Memory, Table

_WHOLE = 1 << 16  # bytes of a sample up to which all its values are read at once


@dataclass
class Packed:
    """The layout of samples: the uint32 sizes of values without a fixed size, then all values.

    sizes: fixed sizes in bytes, or None. rest: bytes may follow, as one more value.
    """

    sizes: Sequence[int | None]
    rest: bool = False

    def __post_init__(self) -> None:
        sizes, stored = self.sizes, [n for n, size in enumerate(self.sizes, 1) if not size]
        head = struct.Struct(f"<{len(stored)}I")
        self._start, self._stored = head.size, stored
        self._fixed = np.array([head.size, *(size or 0 for size in sizes), 0], np.int64)
        self._sizes: Callable[[bytes], Sequence[int]] = head.unpack_from
        if any(sizes):
            self._sizes = lambda data: _with_fixed(sizes, head.unpack_from(data))

    def _check(self, end: int, source: ByteSource, start: int, stop: int) -> None:
        length = stop - start
        if end > length or (end < length and not self.rest):
            raise DamagedError(
                "the sizes of a sample's values do not add up",
                path=source.path,
                offset=None if isinstance(source, Memory) else start,
                expected=f"{length:,} bytes",
                found=f"{end:,}",
            )

    def read(
        self, source: ByteSource, start: int, stop: int, numbers: Collection[int] | None = None
    ) -> list[bytes] | dict[int, bytes]:
        """Return the values with these numbers in a sample; all if None, or if the sample is small.

        Raises DamagedError if the sizes do not fit the sample.
        """
        at, length = self._start, stop - start
        if numbers is None or length <= _WHOLE:
            data, found = source.read(start, length), []
            for size in self._sizes(data) if length >= at else ():
                found.append(data[at : at + size])
                at += size
            if at != length:
                self._check(at, source, start, stop)
            found.append(data[at:])
            return found
        ends = [*accumulate(self._sizes(source.read(start, at)), initial=at), length]
        self._check(ends[-2], source, start, stop)
        some = source.read_ranges((start + ends[n], ends[n + 1] - ends[n]) for n in numbers)
        return dict(zip(numbers, some, strict=True))

    def split(self, samples: Blobs, heads: Blobs, numbers: Sequence[int]) -> list[Blobs]:
        """Return the values with these numbers, for each of them those of all samples.

        heads: the beginning of each sample. Raises ValueError if the sizes do not fit the samples.
        """
        if (samples.sizes < self._start).any():
            raise ValueError("a sample ends before its sizes")
        ends = np.repeat(self._fixed[:, None], len(samples), axis=1)
        at = heads.starts[:, None] + np.arange(self._start)
        ends[self._stored] = heads.data[at].view("<u4").T
        ends.cumsum(axis=0, out=ends)
        if (ends[-1] > samples.sizes if self.rest else ends[-1] != samples.sizes).any():
            raise ValueError("the sizes of a sample's values do not add up")
        ends[-1] = samples.sizes
        starts, sizes = samples.starts + ends[:-1], np.diff(ends, axis=0)
        return [Blobs(samples.data, starts[n], sizes[n]) for n in numbers]

    def heads(self, source: ByteSource, starts: Numbers) -> Blobs:
        """Read the sizes before the values of several samples."""
        sizes = np.full((1, len(starts)), self._start)
        return read_blobs([source], np.zeros_like(starts), starts[None], sizes)[0]

    def offset(self, source: ByteSource, start: int, stop: int, number: int) -> int:
        """Return the byte at which a value of a sample begins."""
        return start + self._start + sum(self._sizes(source.read(start, self._start))[:number])


def _with_fixed(fixed: Sequence[int | None], stored: Iterable[int]) -> list[int]:
    sizes = iter(stored)
    return [size or next(sizes) for size in fixed]


_NUMBERS: dict[type, Any] = {Int: np.int64, Float: np.float64, Bool: np.bool_}


@dataclass(frozen=True)
class PackedField:
    """How a field is read.

    number: that of its value. stored: the name of its encoding, which determines with the type how
    values are decoded. decode: decodes a value, JSON as text. dtype: that of stored numbers.
    """

    name: str
    number: int
    kind: FieldType
    stored: str
    decode: Callable[[bytes], Any] = dataclasses.field(compare=False)
    dtype: str | None = None

    def value(self, data: bytes, json_text: bool = False) -> Any:
        """Return the value that is stored as these bytes."""
        value = self.decode(data)
        if isinstance(value, JsonText):
            return JsonText.checked(value) if json_text else json.loads(value)
        return value

    def column(self, values: Blobs) -> Column:
        """Return the values of several samples."""
        if self.decode is bytes:
            return values
        if self.decode is bytes.decode:
            return values.texts()
        if isinstance(self.kind, Array):
            return load_column(values, self.kind.optional, self.decode)
        found = None if self.dtype is None else self._numbers(values.rows(), np.dtype(self.dtype))
        return values.decoded(self.value, self.kind.optional) if found is None else found

    def _numbers(
        self, rows: npt.NDArray[np.uint8] | None, dtype: np.dtype[Any]
    ) -> npt.NDArray[Any] | None:
        if rows is None or rows.shape[1] != dtype.itemsize:
            return None
        found = rows.view(dtype)[:, 0].astype(_NUMBERS[type(self.kind)])
        return None if dtype.char == "Q" and (found < 0).any() else found  # above 2^63 - 1


@dataclass(frozen=True)
class _Decode:
    """Turns whole samples, or only the values with some numbers, into columns."""

    packed: Packed
    numbers: Sequence[int]  # of the key and the names of missing fields, if stored, and of fields
    fields: Sequence[PackedField]
    absent: bool  # whether the names of missing fields are stored
    whole: bool

    def __call__(self, blobs: list[Blobs], keys: list[str] | None = None) -> Columns:
        (*others, last) = blobs
        values = self.packed.split(last, last, self.numbers) if self.whole else [*others, last]
        columns: Columns = {KEY: values.pop(0).texts() if keys is None else keys}
        if self.absent:
            values = [*self._there(values.pop(0).values(), values)]
        for field, stored in zip(self.fields, values, strict=True):
            columns[field.name] = field.column(stored)
        return columns

    def _there(self, texts: Sequence[bytes], values: list[Blobs]) -> Iterator[Blobs]:
        """Yield the values of each field, without those of samples that lack it, as `texts` say."""
        missing = {text: json.loads(text) if text else [] for text in {*texts}}
        for field, stored in zip(self.fields, values, strict=True):
            there = [field.name not in missing[text] for text in texts]
            if all(there):
                yield stored
            elif field.kind.optional:
                yield Blobs(stored.data, stored.starts, np.where(there, stored.sizes, ABSENT))
            else:
                raise ValueError(f"a sample has no value for {field.name!r}")


class PackedReader(ShardReader):
    """A shard of such samples, with a table of their offsets and of the end of the last."""

    packed: Packed
    offsets: Table
    fields: list[PackedField]
    first: int = 0  # least offset of a sample
    key: int | None  # number of the value with the key
    absent: int | None  # number of the value with the names of missing fields
    prefix: str  # of keys, if they are not stored

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def close(self) -> None:
        super().close()
        self.offsets.close()

    @abstractmethod
    def located(self, position: int) -> tuple[ByteSource, int, int]:
        """Return the bytes of a sample: their source, start and end."""

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        wanted, numbers = self.fields, None
        if fields is not None:
            wanted = [field for field in wanted if field.name in fields]
            numbers = [n for n in (self.key, self.absent) if n is not None]
            numbers += [field.number for field in wanted]
        source, start, stop = self.located(position)
        values = self.packed.read(source, start, stop, numbers)
        at, absent = self.key, self.absent
        key = numbered_key(self.prefix, position) if at is None else values[at].decode()
        missing = json.loads(values[absent]) if absent is not None and values[absent] else ()
        sample: Sample = {KEY: key}
        for field in wanted:
            if field.name not in missing:
                sample[field.name] = field.value(values[field.number], json_text)
        return sample

    def stored(self) -> ByteSource | None:
        """Return the bytes that have the samples at `offsets`; None if they are compressed."""
        return self.source

    def plan(self, positions: npt.NDArray[np.int64], fields: Collection[str]) -> Ranges | None:
        source, pairs = self.stored(), self.offsets.take(positions, 2).T.astype(np.int64)
        starts, sizes = pairs[:1], pairs[1:] - pairs[:1]
        if source is None or starts.min() < self.first or sizes.min() < 0:
            return None
        if pairs.max() > source.size:
            return None
        named = {field.name: field for field in self.fields}
        wanted = tuple([named[name] for name in fields])
        numbers = [n for n in (self.key, self.absent) if n is not None]
        numbers += [field.number for field in wanted]
        every = set(range(len(self.packed.sizes)))
        whole = sizes.max() <= _WHOLE or every.issubset(numbers)
        decode = _Decode(self.packed, numbers, wanted, self.absent is not None, whole)
        if not whole:
            heads = self.packed.heads(source, starts[0])
            parts = self.packed.split(Blobs(heads.data, starts[0], sizes[0]), heads, numbers)
            starts, sizes = np.array([p.starts for p in parts]), np.array([p.sizes for p in parts])
        if self.key is not None:
            return Ranges(source, starts, sizes, decode)
        keys = [numbered_key(self.prefix, position) for position in positions.tolist()]
        return Ranges(source, starts, sizes, partial(decode, keys=keys))

    def offset(self, position: int, field: str) -> int | None:
        numbers = {KEY: self.key, **{each.name: each.number for each in self.fields}}
        number = numbers.get(field)
        return None if number is None else self.packed.offset(*self.located(position), number)

    def spans(self) -> npt.NDArray[np.int64] | None:
        ends = self.offsets.slice(0, len(self.offsets)).astype(np.int64)
        return np.stack([ends[:-1], ends[1:]], axis=1)
