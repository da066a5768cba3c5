"""Pack documents of tokens into blocks of equal length.

A block is a sequence of complete documents or pieces of them; the end of each is stored, too, for
attention masks. All packers are deterministic and hold a bounded number of tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.unsignedinteger[Any]]

# Limits of the window of `nosplit`; the last blocks of a window are only partly filled.
_WINDOW_BLOCKS = 512
_WINDOW_PIECES = 16_384


class Block(NamedTuple):
    """`tokens` (at most seq_len,), and `doc_ends` (documents,): the position after each document.

    Tokens after the last end are padding.
    """

    tokens: Tokens
    doc_ends: Tokens


def ends_dtype(seq_len: int) -> str:
    """Return the smallest type that can hold every position in a block."""
    return "<u2" if seq_len < 1 << 16 else "<u4"


class Packer:
    """Packs documents into blocks: here, one document per block; longer ones take several.

    `counts` has the numbers of "padding" and "dropped" tokens for the summary, and of documents
    that were "cut" into several blocks.
    """

    def __init__(self, seq_len: int, remainder: str, padding: Any) -> None:
        self._seq_len = seq_len
        self._remainder = remainder
        self._padding = padding  # a token, of the type of the documents
        self._ends = ends_dtype(seq_len)
        self.counts: Counter[str] = Counter()

    def add(self, document: Tokens) -> Iterator[Block]:
        """Yield the blocks that this document completes."""
        for piece in self._cut(document):
            yield from self._block([piece], len(piece))

    def finish(self) -> Iterator[Block]:
        """Yield the remaining blocks after the last document."""
        return iter(())

    def _block(self, pieces: list[Tokens], length: int) -> Iterator[Block]:
        """Yield a block of these pieces of `length` tokens in all, padded or dropped as asked."""
        missing = self._seq_len - length
        if missing and self._remainder == "drop":
            self.counts["dropped"] += length
            return
        ends = np.fromiter(map(len, pieces), np.int64, len(pieces)).cumsum().astype(self._ends)
        if missing and self._remainder == "pad":
            self.counts["padding"] += missing
            pieces = [*pieces, np.full(missing, self._padding, pieces[0].dtype)]
        yield Block(np.concatenate(pieces), ends)

    def _cut(self, document: Tokens) -> list[Tokens]:
        """Split a document into pieces that fit a block; all but the last one fill it."""
        if len(document) <= self._seq_len:
            return [document] if len(document) else []
        self.counts["cut"] += 1
        starts = range(0, len(document), self._seq_len)
        *full, end = [document[start : start + self._seq_len] for start in starts]
        return [*full, end.copy()]  # a view would keep the whole document in memory


class Concat(Packer):
    """Documents continue from block to block; only the last block is not full."""

    def __init__(self, seq_len: int, remainder: str, padding: Any) -> None:
        super().__init__(seq_len, remainder, padding)
        self._pieces: list[Tokens] = []
        self._length = 0

    def add(self, document: Tokens) -> Iterator[Block]:
        start, blocks = 0, 0
        while start < len(document):
            piece = document[start : start + self._seq_len - self._length]
            self._pieces.append(piece)
            self._length += len(piece)
            start += len(piece)
            blocks += 1
            if self._length == self._seq_len:
                yield from self._block(self._pieces, self._length)
                self._pieces, self._length = [], 0
        self.counts["cut"] += blocks > 1

    def finish(self) -> Iterator[Block]:
        if self._pieces:
            yield from self._block(self._pieces, self._length)


class BestFit(Packer):
    """Documents that fit a block are not split: best-fit decreasing within a window.

    The longest come first, each in the fullest block with enough room: Ding et al., "Fewer
    Truncations Improve Language Modeling" (2024). Documents longer than a block are cut, and only
    their ends are packed.
    """

    def __init__(self, seq_len: int, remainder: str, padding: Any) -> None:
        super().__init__(seq_len, remainder, padding)
        self._window: list[Tokens] = []
        self._tokens = 0

    def add(self, document: Tokens) -> Iterator[Block]:
        for piece in self._cut(document):
            if len(piece) == self._seq_len:
                yield from self._block([piece], len(piece))
                continue
            self._window.append(piece)
            self._tokens += len(piece)
        full = self._tokens >= _WINDOW_BLOCKS * self._seq_len
        if full or len(self._window) >= _WINDOW_PIECES:
            yield from self.finish()

    def finish(self) -> Iterator[Block]:
        window, self._window, self._tokens = self._window, [], 0
        for numbers in best_fit([len(piece) for piece in window], self._seq_len):
            pieces = [window[number] for number in numbers]
            yield from self._block(pieces, sum(map(len, pieces)))


def best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Return the indexes of the pieces in each block; pieces and blocks are in ascending order."""
    blocks: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, block number), sorted
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        length = lengths[number]
        at = bisect_left(rooms, (length, 0))
        if at < len(rooms):
            left, block = rooms.pop(at)
        else:
            left, block = room, len(blocks)
            blocks.append([])
        blocks[block].append(number)
        if left > length:
            insort(rooms, (left - length, block))
    return sorted(sorted(block) for block in blocks)


PACKERS: dict[str, type[Packer]] = {"concat": Concat, "nosplit": BestFit, "pad": Packer}
