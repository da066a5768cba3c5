"""Decodes lists and objects from LitData's serializer `json`: JSON text, or a binary encoding."""

from __future__ import annotations

import json
import struct
from typing import Any

from shardkit.sample import JsonText

_DEPTH = 200  # nested objects
_LISTS = {2: "q", 3: "d", 4: "?"}  # lists of numbers of one type, by tag
_NUMBERS = {8: "q", 9: "d", 10: "?"}
_TEXT, _NONE = 7, 11
_CELLS = {16: _NONE, 17: _TEXT, 18: 8, 19: 9, 20: 10}  # tags of values in records


def load_json(data: bytes) -> JsonText:
    """A value as JSON text; raises ValueError or struct.error."""
    if not data or data[0] > 0x20:
        return JsonText.checked(data.decode())
    return JsonText.of(_Values(data).value())


class _Values:
    """Parses the binary encoding: each value is a tag, then little-endian lengths and numbers."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def _take(self, kind: str, count: int = 1) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{count}{kind}", self._data, self._at)
        self._at += struct.calcsize(f"<{count}{kind}")
        return found

    def _count(self) -> int:
        (count,) = self._take("I")
        if count > len(self._data):  # each entry has a byte or more
            raise ValueError(f"{count:,} entries in {len(self._data):,} bytes")
        return int(count)

    def _text(self) -> str:
        return bytes(self._take("s", self._count())[0]).decode()

    def value(self, depth: int = _DEPTH) -> Any:
        (tag,) = self._take("B")
        if tag in _LISTS:
            return [*self._take(_LISTS[tag], self._count())]
        if tag == 0:
            return json.loads(self._text())
        if tag == 1:
            return [self._text() for _ in range(self._count())]
        if tag == 5 and depth:
            return {self._text(): self.value(depth - 1) for _ in range(self._count())}
        if tag == 6:  # a list of objects with the same names, which are stored once
            count, names = self._count(), range(self._count())
            every = [self._text() for _ in names]
            return [{name: self._cell() for name in every} for _ in range(count)]
        return self._scalar(tag)

    def _cell(self) -> Any:
        return self._scalar(_CELLS.get(self._take("B")[0], -1))

    def _scalar(self, tag: int) -> Any:
        if tag in _NUMBERS:
            return self._take(_NUMBERS[tag])[0]
        if tag not in (_TEXT, _NONE):
            raise ValueError(f"an invalid tag before byte {self._at}")
        return self._text() if tag == _TEXT else None
