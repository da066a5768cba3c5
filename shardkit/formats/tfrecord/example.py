"""Encodes and decodes tf.train.Example, the message of tensorflow/core/example/feature.proto.

Example {1: Features {1: map of names to Feature}}; a Feature is one of three lists, and each list
is {1: values}. The decoder accepts unknown fields, any order, and packed or unpacked numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.protobuf import alone, dump_field, dump_varint, fields, varint

BYTES, FLOATS, INTS = 1, 2, 3
LISTS = ("no list", "a bytes_list", "a float_list", "an int64_list")
_FIRST, _SECOND = 0x0A, 0x12  # tags of fields 1 and 2, if length-delimited
_ALONE = {FLOATS: 0x0D, INTS: 0x08}  # tags of unpacked numbers
_CHUNK = 1 << 16  # numbers that are packed, and bytes that are unpacked, at a time
_CONTINUED = bytes(range(0x80, 0x100))  # bytes that do not end a varint


class Feature(NamedTuple):
    """The type of the list, and its values; numbers are in packed form."""

    list: int
    parts: Sequence[bytes]

    def numbers(self) -> npt.NDArray[Any]:
        data = b"".join(self.parts)
        return np.frombuffer(data, "<f4") if self.list == FLOATS else unpacked(data)

    def __len__(self) -> int:
        return len(self.parts if self.list == BYTES else self.numbers())

    def one(self) -> bytes:
        if len(self.parts) != 1:
            raise ValueError(f"it has {len(self)} values, not one")
        return self.parts[0]


def features(data: bytes, *, whole: bool = True) -> dict[str, tuple[int, int]]:
    """The byte ranges of the features of an Example, by name. Raises ValueError if it is invalid.

    If not `whole`, `data` is the beginning of an Example, and ends at the end of a feature.
    """
    found: dict[str, tuple[int, int]] = {}
    tops = fields(data, 0, len(data)) if whole else [(_FIRST, varint(data, 1, 11)[1], len(data))]
    for top, start, stop in tops:
        if top == _SECOND:
            raise ValueError("it is a SequenceExample")
        for tag, at, end in fields(data, start, stop) if top == _FIRST else ():
            if tag == _FIRST and end > at + 1 and data[at] == _FIRST and data[at + 1] < 0x80:
                # The usual case: a short name, followed by a feature.
                middle = at + 2 + data[at + 1]
                which, first = alone(data, middle, end)
                if which == _SECOND:
                    found[data[at + 2 : middle].decode()] = first, end
                    continue
            spans = {part: (a, b) for part, a, b in fields(data, at, end)}
            if tag == _FIRST:
                first, last = spans.get(_FIRST, (at, at))
                found[data[first:last].decode()] = spans.get(_SECOND, (at, at))
    return found


def feature(data: bytes, span: tuple[int, int]) -> Feature:
    """The feature in a byte range."""
    tag, start = alone(data, *span)
    if tag >> 3 in (BYTES, FLOATS, INTS):
        inner, at = alone(data, start, span[1])
        if inner == _FIRST:
            return Feature(tag >> 3, (data[at : span[1]],))
    which = 0
    parts: list[bytes] = []
    for tag, start, stop in fields(data, *span):
        if tag & 7 == 2 and tag >> 3 in (BYTES, FLOATS, INTS):
            if tag >> 3 != which:  # the last of several lists wins
                which, parts = tag >> 3, []
            items = fields(data, start, stop)
            parts += [data[at:end] for tag, at, end in items if tag in (_FIRST, _ALONE.get(which))]
    return Feature(which, parts)


def unpacked(data: bytes) -> npt.NDArray[np.int64]:
    found, at = [np.zeros(0, np.int64)], 0
    while at < len(data):  # in chunks, as unpacking takes 60 bytes of memory for each byte
        part = data[at : at + _CHUNK]
        part = part if at + _CHUNK >= len(data) else part.rstrip(_CONTINUED)
        found.append(_unpacked(part))
        at += len(part) or len(data)
    return np.concatenate(found)


def _unpacked(data: bytes) -> npt.NDArray[np.int64]:
    octets = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(octets < 0x80)
    starts = np.append(0, ends[:-1] + 1)[: len(ends)]
    lengths = ends - starts + 1
    if not len(ends) or lengths.sum() != len(octets) or lengths.max(initial=0) > 10:
        raise ValueError("it has a truncated number")
    found = np.zeros(len(ends), np.uint64)
    for n in range(lengths.max(initial=0)):
        has = lengths > n
        found[has] |= (octets[starts[has] + n] & 0x7F).astype(np.uint64) << np.uint64(7 * n)
    return found.view(np.int64)


def packed(values: npt.NDArray[Any]) -> bytes:
    if len(values) > _CHUNK:
        return b"".join(packed(values[n : n + _CHUNK]) for n in range(0, len(values), _CHUNK))
    left = values.astype(np.int64).view(np.uint64)
    width = max(-(-int(left.max(initial=0)).bit_length() // 7), 1)
    digits = left[:, None] >> np.arange(0, 7 * width, 7, dtype=np.uint64)
    there = digits != 0
    there[:, 0] = True
    octets = (digits & np.uint64(0x7F)).astype(np.uint8)
    octets[:, :-1] |= there[:, 1:].view(np.uint8) << 7
    return bytes(octets[there])


def entry(name: str, found: Feature) -> list[bytes]:
    """Encode a feature and its name as an entry of an Example, in chunks: values are not copied."""
    items = [each for part in found.parts for each in (b"\x0a" + dump_varint(len(part)), part)]
    size = sum(map(len, items))
    head = b"%c%b" % (found.list << 3 | 2, dump_varint(size))
    head = b"%b\x12%b%b" % (dump_field(1, name.encode()), dump_varint(len(head) + size), head)
    return [b"\x0a%b%b" % (dump_varint(len(head) + size), head), *items]
