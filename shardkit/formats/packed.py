"""Reads shards of samples whose values follow one another, after their sizes: MDS and LitData."""

from __future__ import annotations

import json
import struct
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.formats.base import KEY, ShardReader, numbered_key
from shardkit.sample import JsonText, Sample
from shardkit.storage.byte_source import ByteSource, Table

_WHOLE = 1 << 16  # bytes of a sample up to which all its values are read at once


class Packed:
    """The layout of samples: the uint32 sizes of values without a fixed size, then all values."""

    def __init__(self, sizes: Sequence[int | None], *, rest: bool = False) -> None:
        """`sizes`: fixed sizes in bytes, or None. `rest`: bytes may follow, as one more value."""
        self._sizes, self._any_fixed, self._rest = sizes, any(sizes), rest
        self._head = struct.Struct(f"<{sum(not size for size in sizes)}I")

    def _sizes_in(self, head: bytes) -> Sequence[int]:
        stored = self._head.unpack_from(head)
        if not self._any_fixed:
            return stored
        sizes = iter(stored)
        return [fixed or next(sizes) for fixed in self._sizes]

    def _check(self, end: int, length: int) -> None:
        if end > length or (end < length and not self._rest):
            raise ValueError(f"its values have {end:,} bytes, but the sample has {length:,}")

    def read(
        self, source: ByteSource, start: int, stop: int, numbers: Collection[int] | None = None
    ) -> list[bytes] | dict[int, bytes]:
        """The values with these numbers in a sample; all if None, or if the sample is small.

        Raises ValueError or struct.error if the sizes do not fit the sample.
        """
        at = self._head.size
        if numbers is None or stop - start <= _WHOLE:
            data, found = source.read(start, stop - start), []
            for size in self._sizes_in(data):
                found.append(data[at : at + size])
                at += size
            self._check(at, stop - start)
            found.append(data[at:])
            return found
        ends = [*accumulate(self._sizes_in(source.read(start, at)), initial=at), stop - start]
        self._check(ends[-2], stop - start)
        some = source.read_ranges((start + ends[n], ends[n + 1] - ends[n]) for n in numbers)
        return dict(zip(numbers, some, strict=True))

    def offset(self, source: ByteSource, start: int, stop: int, number: int) -> int:
        """The byte at which a value of a sample begins."""
        sizes = self._sizes_in(source.read(start, min(self._head.size, stop - start)))
        return start + self._head.size + sum(sizes[:number])


class PackedField(NamedTuple):
    """How a field is read: the number of its value, and its decoder, which gives JSON as text."""

    name: str
    number: int
    decode: Callable[[bytes], Any]


class PackedReader(ShardReader):
    """A shard of such samples, with a table of their offsets and of the end of the last."""

    packed: Packed
    offsets: Table
    fields: list[PackedField]
    key: int | None  # number of the value with the key
    absent: int | None  # number of the value with the names of missing fields
    prefix: str  # of keys, if they are not stored

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @abstractmethod
    def located(self, position: int) -> tuple[ByteSource, int, int]:
        """The bytes of a sample: their source, start and end."""

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        wanted, numbers = self.fields, None
        if fields is not None:
            wanted = [field for field in wanted if field.name in fields]
            numbers = [n for n in (self.key, self.absent) if n is not None]
            numbers += [field.number for field in wanted]
        values = self.packed.read(*self.located(position), numbers)
        at, absent = self.key, b"" if self.absent is None else values[self.absent]
        key = numbered_key(self.prefix, position) if at is None else values[at].decode()
        missing = json.loads(absent) if absent else ()
        sample: Sample = {KEY: key}
        for name, number, decode in wanted:
            if name not in missing:
                value = decode(values[number])
                if isinstance(value, JsonText):
                    value = JsonText.checked(value) if json_text else json.loads(value)
                sample[name] = value
        return sample

    def offset(self, position: int, field: str) -> int | None:
        number = next(each.number for each in self.fields if each.name == field)
        return self.packed.offset(*self.located(position), number)

    def spans(self) -> npt.NDArray[np.int64] | None:
        ends = self.offsets.slice(0, len(self.offsets)).astype(np.int64)
        return np.stack([ends[:-1], ends[1:]], axis=1)
