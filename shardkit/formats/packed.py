"""Reads shards of samples whose values follow one another, after their sizes: MDS and LitData."""

from __future__ import annotations

import json
import struct
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise
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

    def _bounds(self, head: bytes, length: int) -> list[int]:
        """Where each value begins in a sample of this length, and where the last two end."""
        sizes = self._head.unpack_from(head)
        if self._any_fixed:
            stored = iter(sizes)
            sizes = tuple(fixed or next(stored) for fixed in self._sizes)
        bounds = [*accumulate(sizes, initial=self._head.size), length]
        if bounds[-2] > length or (bounds[-2] < length and not self._rest):
            raise ValueError(f"its values have {bounds[-2]:,} bytes, but the sample has {length:,}")
        return bounds

    def read(
        self, source: ByteSource, start: int, stop: int, numbers: Collection[int] | None = None
    ) -> list[bytes] | dict[int, bytes]:
        """The values with these numbers in a sample; all if None, or if the sample is small.

        Raises ValueError or struct.error if the sizes do not fit the sample.
        """
        whole = numbers is None or stop - start <= _WHOLE
        data = source.read(start, stop - start if whole else self._head.size)
        bounds = self._bounds(data, stop - start)
        if numbers is None or whole:
            return [data[begin:end] for begin, end in pairwise(bounds)]
        found = source.read_ranges((start + bounds[n], bounds[n + 1] - bounds[n]) for n in numbers)
        return dict(zip(numbers, found, strict=True))

    def offset(self, source: ByteSource, start: int, stop: int, number: int) -> int:
        """The byte at which a value of a sample begins."""
        head = source.read(start, min(self._head.size, stop - start))
        return start + self._bounds(head, stop - start)[number]


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
        key = numbered_key(self.prefix, position) if self.key is None else values[self.key].decode()
        absent = b"" if self.absent is None else values[self.absent]
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
