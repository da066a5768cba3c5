"""Parses the msgpack maps of many samples at once: those with a schema's fields in its order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from shardkit.formats.base import KEY, Column, Columns, decoded_column
from shardkit.schema import Array, Bool, Bytes, FieldType, Float, Int, Json, Scalar, Text
from shardkit.storage.blobs import ABSENT, Blobs, Numbers

_There = npt.NDArray[np.bool_]


def _tags(small: range, first: int, widths: tuple[int, ...], *, signed: int = 256) -> Numbers:
    """Return for each tag: the bytes of the number after it, whether it is signed, one in the tag.

    small: the tags that are numbers themselves. widths: the bytes after the tags from `first` on;
    it is -1 for all others. signed: the first tag of signed numbers.
    """
    table = np.full((3, 256), -1)
    table[:, small] = [[0]] * 3
    table[2, small] = np.arange(len(small))
    stop = first + len(widths)
    table[0, first:stop], table[1, first:stop] = widths, np.arange(first, stop) >= signed
    return table


_MAP = _tags(range(0x80, 0x90), 0xDE, (2, 4))
_TEXT = _tags(range(0xA0, 0xC0), 0xD9, (1, 2, 4))
_BYTES = _tags(range(0), 0xC4, (1, 2, 4))
_INT = _tags(range(0x80), 0xCC, (1, 2, 4, 8, 1, 2, 4, 8), signed=0xD0)
_INT[:, 0xE0:] = np.zeros(32), np.zeros(32), np.arange(-32, 0)
_BOOL = _tags(range(0xC2, 0xC4), 0, ())
_FLOAT = _tags(range(0), 0xCB, (8,), signed=0)
# Tags of each type, and the dtype of numbers.
_TAGS: dict[type, Numbers] = {
    Int: _INT, Float: _FLOAT, Bool: _BOOL, Text: _TEXT, Json: _TEXT, Bytes: _BYTES, Array: _BYTES,
}  # fmt: skip


class _Cursor:
    """Parses several maps side by side: `at` is the next byte of each."""

    def __init__(self, maps: Blobs) -> None:
        self._data, self.at = maps.data, maps.starts.copy()

    def _next(self, count: int) -> npt.NDArray[np.uint8]:
        """Return the next bytes of each map; other ones if the buffer ends before."""
        at = self.at[:, None] + np.arange(count)
        found: npt.NDArray[np.uint8] = self._data.take(at, mode="clip")
        return found

    def skip(self, name: bytes) -> _There:
        """Pass the name of a field, and return which maps have it there."""
        there: _There = (self._next(len(name)) == np.frombuffer(name, np.uint8)).all(axis=1)
        self.at += there * len(name)
        return there

    def number(self, tags: Numbers, there: _There) -> Numbers:
        """Pass a tag and the number after it, in the maps where it is `there`.

        Raises ValueError for another tag, and for numbers above 2^63 - 1.
        """
        head = self._next(9)
        width, signed, small = tags[:, head[:, 0]]
        if (width[there] < 0).any():
            raise ValueError("a value has another type")
        self.at += np.where(there, width + 1, 0)
        number = head[:, 1:].copy().view(">i8")[:, 0].astype(np.int64)
        number >>= 64 - 8 * np.maximum(width, 1)
        number &= np.where(signed | (width == 8), -1, (1 << 8 * (width % 8)) - 1)
        if ((number < 0) & (signed == 0) & there).any():
            raise ValueError("a number is above 2^63 - 1")
        return np.where(width == 0, small, number)

    def value(self, kind: FieldType, there: _There) -> Column:
        """Pass a value of a type, and return numbers, or the bytes of other values."""
        number = self.number(kind.entry(_TAGS), there)
        if not isinstance(kind, Scalar):
            starts = self.at.copy()
            self.at += np.where(there, number, 0)
            return Blobs(self._data, starts, np.where(there, number, ABSENT))
        if isinstance(kind, Float):
            number = number.view(np.float64)
        found = number.astype(np.bool_) if isinstance(kind, Bool) else number
        if there.all():
            return found
        return [v if has else None for v, has in zip(found.tolist(), there.tolist(), strict=True)]


@dataclass(frozen=True)
class DecodeMaps:
    """Turns maps into columns. Raises ValueError if they have other fields or another order."""

    schema: tuple[tuple[str, FieldType], ...]
    wanted: tuple[str, ...]

    def __call__(self, blobs: list[Blobs]) -> Columns:
        (maps,) = blobs
        cursor, stored = _Cursor(maps), dict[str, Any]()
        left = cursor.number(_MAP, np.ones(len(maps), np.bool_))
        every = {KEY: Text(), **dict(self.schema)}
        for name, kind in every.items():
            there = cursor.skip(msgpack.packb(name))
            if not (kind.optional or there.all()):
                raise ValueError(f"the field {name!r} is missing, or not where it is expected")
            left -= there
            stored[name] = cursor.value(kind, there)
        if left.any() or (cursor.at != maps.starts + maps.sizes).any():
            raise ValueError("a map has other fields")
        for name in every.keys() - self.wanted:
            if isinstance(every[name], Text | Json):
                stored[name].texts()  # msgpack would refuse all of it if this is not UTF-8
        columns = ((name, every[name], stored[name]) for name in (KEY, *self.wanted))
        return {n: decoded_column(k, c) if isinstance(c, Blobs) else c for n, k, c in columns}
