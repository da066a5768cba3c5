"""The encoding of Protocol Buffers: fields of a message, without a schema or its library."""

from __future__ import annotations

from collections.abc import Iterator

_FIXED = {1: 8, 5: 4}  # bytes of values of these wire types
_BYTES = [bytes([number]) for number in range(0x80)]


def fields(data: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The fields of a message: the tag, and where the value begins and ends.

    Raises ValueError for what is no message. Groups, which are out of use, are not read.
    """
    at = start
    while at < stop:
        # Most numbers are a byte, which is read here, as a call takes as long as all the rest.
        tag, at = (data[at], at + 1) if data[at] < 0x80 else varint(data, at, stop)
        if tag & 7 == 2:
            short = at < stop and data[at] < 0x80
            size, at = (data[at], at + 1) if short else varint(data, at, stop)
            end = at + size
        else:
            end = varint(data, at, stop)[1] if tag & 7 == 0 else at + _FIXED.get(tag & 7, stop + 1)
        if end > stop or tag < 8:
            raise ValueError("a message that is cut, or none")
        yield tag, at, end
        at = end


def alone(data: bytes, start: int, stop: int) -> tuple[int, int]:
    """The tag of the one field with a length that these bytes are, and where its value begins.

    The tag is 0 if they are anything else; `fields` tells what, and takes three times as long.
    """
    if stop - start < 2 or data[start] & 0x87 != 2:
        return 0, start
    size, at = data[start + 1], start + 2
    if size > 0x7F:
        size, at = varint(data, start + 1, stop)
    return (data[start] if at + size == stop else 0), at


def varint(data: bytes, at: int, stop: int) -> tuple[int, int]:
    """An unsigned number of 64 bits, and where it ends."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= stop:
            break
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & (2**64 - 1), at
    raise ValueError("a number that does not end")


def signed(number: int) -> int:
    """What it is as an int64."""
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
    """A field that has a length: bytes, text, a message."""
    return b"%c%b%b" % (number << 3 | 2, dump_varint(len(data)), data)
