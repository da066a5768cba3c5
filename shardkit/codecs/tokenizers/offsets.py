"""Where the tokens of a byte-level tokenizer are in a text: tiktoken's engine does not tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint32]
Numbers = npt.NDArray[np.int64]


class Encoded(NamedTuple):
    """The ids of a text, and where each token begins and ends in it, in characters."""

    ids: Ids
    starts: Numbers
    ends: Numbers


class Offsets:
    """The positions that `tokenizers` gives for tokens with these bytes.

    A token with a part of a character has the position of the whole. If the post-processor of a
    tokenizer.json trims offsets, spaces around a token do not belong to it; but a single one at the
    beginning of a text does if the post-processor takes it for a space that was added.
    """

    def __init__(
        self, tokens: Mapping[bytes, int], added: Mapping[str, int], post_processor: Any = None
    ) -> None:
        texts: dict[int, bytes | str] = {number: token for token, number in tokens.items()}
        texts |= {number: token for token, number in added.items()}
        self._sizes = _table({number: len(_bytes(text)) for number, text in texts.items()})
        trims = [step for step in _steps(post_processor) if step.get("trim_offsets")]
        self._trims = bool(trims)
        self._keeps_first = any(step.get("add_prefix_space") for step in trims)
        if trims:
            self._before = _table({n: len(t) - len(_stripped(t, "l")) for n, t in texts.items()})
            self._after = _table({n: len(t) - len(_stripped(t, "r")) for n, t in texts.items()})

    def of(self, text: str, ids: Ids) -> Encoded | None:
        """Return the positions of ids in their text; None if they do not have all of its bytes."""
        sizes = self._sizes[ids]
        ends = np.cumsum(sizes)
        data = text.encode()
        if (int(ends[-1]) if len(ids) else 0) != len(data):
            return None
        starts = ends - sizes
        if len(data) != len(text):
            first = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80  # bytes of characters
            character = np.cumsum(first) - 1
            starts, ends = character[starts], character[ends - 1] + 1
        if self._trims:
            starts, ends = self._trimmed(ids, starts, ends)
        return Encoded(ids, starts, ends)

    def _trimmed(self, ids: Ids, starts: Numbers, ends: Numbers) -> tuple[Numbers, Numbers]:
        before = self._before[ids]
        if self._keeps_first:
            before[(starts == 0) & (before == 1)] = 0
        starts = np.minimum(starts + before, ends)
        return starts, np.maximum(ends - self._after[ids], starts)


def _bytes(token: bytes | str) -> bytes:
    return token if isinstance(token, bytes) else token.encode()


def _stripped(token: bytes | str, side: str) -> bytes | str:
    """Return a token without spaces on a side; all white space counts in added tokens."""
    if isinstance(token, str):
        return token.lstrip() if side == "l" else token.rstrip()
    return token.lstrip(b" ") if side == "l" else token.rstrip(b" ")


def _steps(post_processor: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a post-processor, as they stand in a tokenizer.json."""
    if isinstance(post_processor, dict):
        yield post_processor
        for step in post_processor.get("processors", ()):
            yield from _steps(step)


def _table(sizes: Mapping[int, int]) -> Numbers:
    table = np.zeros(max(sizes, default=-1) + 1, np.int64)
    table[list(sizes)] = list(sizes.values())
    return table
