"""The Protocol Buffers encoding: fields of a message, without a schema or the library."""

from __future__ import annotations

from collections.abc import Iterator

_FIXED = {1: 8, 5: 4}  # bytes per value, by wire type
_BYTES = [bytes([number]) for number in range(0x80)]


def fields(data: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the fields of a message: the tag, and where the value begins and ends.

    Raises ValueError for invalid messages. Groups, which are deprecated, are not supported.
    """
    at = start
    while at < stop:
        # Most numbers are one byte; reading it inline avoids a call that would double the time.
        tag, at = (data[at], at + 1) if data[at] < 0x80 else varint(data, at, stop)
        if tag & 7 == 2:
            short = at < stop and data[at] < 0x80
            size, at = (data[at], at + 1) if short else varint(data, at, stop)
            end = at + size
        else:
            end = varint(data, at, stop)[1] if tag & 7 == 0 else at + _FIXED.get(tag & 7, stop + 1)
        if end > stop or tag < 8:
            raise ValueError("a truncated or invalid message")
        yield tag, at, end
        at = end


def alone(data: bytes, start: int, stop: int) -> tuple[int, int]:
    """Parse bytes that are a single length-delimited field; return its tag and value offset.

    The tag is 0 if they are anything else, for which `fields` is needed, which is 3 times slower.
    """
    if stop - start < 2 or data[start] & 0x87 != 2:
        return 0, start
    size, at = data[start + 1], start + 2
    if size > 0x7F:
        size, at = varint(data, start + 1, stop)
    return (data[start] if at + size == stop else 0), at


def varint(data: bytes, at: int, stop: int) -> tuple[int, int]:
    """Return an unsigned 64-bit number, and the offset after it."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= stop:
            break
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & (2**64 - 1), at
    raise ValueError("a number without an end")


def signed(number: int) -> int:
    """Reinterpret an unsigned 64-bit number as an int64."""
    return number - 2**64 if number >= 2**63 else number


def dump_varint(number: int) -> bytes:
    if 0 <= number < 0x80:
        return _BYTES[number]
    number &= 2**64 - 1
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def dump_field(number: int, data: bytes) -> bytes:
    """Return a length-delimited field: bytes, text or a message."""
    return b"%c%b%b" % (number << 3 | 2, dump_varint(len(data)), data)
