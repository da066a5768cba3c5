"""Split blocks of bytes into lines, each with its offset in the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

MAX_LINE = (1 << 31) - (1 << 16)  # bytes; formats limit a text to less than 2 GiB
_HOLE = 4096  # NUL bytes that are no text: a page of a file that was never written
_LONG = 64 << 20  # bytes after which a line with such a hole is given up


class Hole(NamedTuple):
    """In place of a line of which a whole block is NUL bytes."""

    at: int  # offset of the first NUL byte
    ended: bool  # False: what follows is not read


# The offset of a line, and its bytes without the line end; None if there are too many.
Line: TypeAlias = tuple[int, bytes | Hole | None]


def lines(
    blocks: Iterable[bytes], newline: bytes, start: int, end: int | None, *, midway: bool
) -> Iterator[Line]:
    """Yield the complete lines whose first byte is between `start` and `end`.

    `blocks` begin at `start`. With `midway`, that may be inside a line, which is skipped because it
    belongs to the previous range. At most one line of MAX_LINE bytes is held in memory.
    """
    offset = start  # of the current line
    held: list[bytes] = []
    size = 0
    hole: int | None = None
    for block in blocks if len(newline) == 1 else _whole_units(blocks, len(newline)):
        if hole is None and not midway and is_hole(block):
            nuls = len(held[-1]) - len(held[-1].rstrip(b"\0")) if held else 0
            hole = offset + size - nuls // len(newline) * len(newline)
        parts = split(block, newline)
        head, tail = parts[0], parts[-1]
        if size + len(head) <= MAX_LINE and not midway and hole is None:
            held.append(head)
        else:
            held.clear()
        size += len(head)
        if len(parts) == 1:
            over = end is not None and offset + size >= end
            if midway and over:
                return
            if hole is not None and (over or offset + size - hole > _LONG):
                yield offset, Hole(hole, over)
                return
            continue
        if not midway:
            yield offset, _line(held, size, hole)
        midway, hole = False, None
        offset += size + len(newline)
        for part in parts[1:-1]:
            if end is not None and offset >= end:
                return
            yield offset, part
            offset += len(part) + len(newline)
        if end is not None and offset >= end:
            return
        held, size = [tail], len(tail)
    if size and not midway:
        yield offset, _line(held, size, hole)


def _line(held: list[bytes], size: int, hole: int | None) -> bytes | Hole | None:
    if hole is not None:
        return Hole(hole, True)
    return b"".join(held) if size <= MAX_LINE else None


def is_hole(block: bytes) -> bool:
    """Whether a block is nothing but NUL bytes, as in a sparse file or after a crash."""
    return block[:1] == b"\0" and len(block) >= _HOLE and not block.strip(b"\0")


def split(block: bytes, newline: bytes) -> list[bytes]:
    """Split at line ends; those of wide characters count only if aligned to their width."""
    if len(newline) == 1:
        return block.split(newline)
    parts = []
    start = 0
    while (found := find(block, newline, start)) >= 0:
        parts.append(block[start:found])
        start = found + len(newline)
    return [*parts, block[start:]]


def find(data: bytes, character: bytes, start: int = 0) -> int:
    """Return the position of a fixed-width character, aligned to its width, or -1."""
    found = data.find(character, start)
    while found >= 0 and found % len(character):
        found = data.find(character, found + 1)
    return found


def _whole_units(blocks: Iterable[bytes], width: int) -> Iterator[bytes]:
    """Regroup the bytes so that no block ends inside a character of this width."""
    rest = b""
    for block in blocks:
        data = rest + block
        whole = len(data) - len(data) % width
        rest = data[whole:]
        if whole:
            yield data[:whole]
    if rest:
        yield rest
