"""Reads shards of samples whose values follow one another, after their sizes: MDS and LitData."""

from __future__ import annotations

import json
import struct
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.errors import DamagedError
from shardkit.formats.base import KEY, ShardReader, numbered_key
from shardkit.sample import JsonText, Sample
from shardkit.storage.byte_source import ByteSource, Memory, Table

_WHOLE = 1 << 16  # bytes of a sample up to which all its values are read at once


class Packed:
    """The layout of samples: the uint32 sizes of values without a fixed size, then all values."""

    def __init__(self, sizes: Sequence[int | None], *, rest: bool = False) -> None:
        """`sizes`: fixed sizes in bytes, or None. `rest`: bytes may follow, as one more value."""
        head = struct.Struct(f"<{sum(not size for size in sizes)}I")
        self._start, self._rest = head.size, rest
        self._sizes: Callable[[bytes], Sequence[int]] = head.unpack_from
        if any(sizes):
            self._sizes = lambda data: _with_fixed(sizes, head.unpack_from(data))

    def _check(self, end: int, source: ByteSource, start: int, stop: int) -> None:
        length = stop - start
        if end > length or (end < length and not self._rest):
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

    def offset(self, source: ByteSource, start: int, stop: int, number: int) -> int:
        """Return the byte at which a value of a sample begins."""
        return start + self._start + sum(self._sizes(source.read(start, self._start))[:number])


def _with_fixed(fixed: Sequence[int | None], stored: Iterable[int]) -> list[int]:
    sizes = iter(stored)
    return [size or next(sizes) for size in fixed]


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
        for name, number, decode in wanted:
            if name not in missing:
                value = decode(values[number])
                if isinstance(value, JsonText):
                    value = JsonText.checked(value) if json_text else json.loads(value)
                sample[name] = value
        return sample

    def offset(self, position: int, field: str) -> int | None:
        numbers = {KEY: self.key, **{each.name: each.number for each in self.fields}}
        number = numbers.get(field)
        return None if number is None else self.packed.offset(*self.located(position), number)

    def spans(self) -> npt.NDArray[np.int64] | None:
        ends = self.offsets.slice(0, len(self.offsets)).astype(np.int64)
        return np.stack([ends[:-1], ends[1:]], axis=1)
