"""Blocks of tokens: nothing is lost or moved that was not asked for."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.preprocess import packing
from shardkit.preprocess.packing import PACKERS, Block, ends_dtype

PAD = 65_000
_documents = st.lists(st.integers(0, 30), max_size=60)


def documents(lengths: list[int]) -> list[np.ndarray]:
    """Documents of these lengths; every token of all of them is another number."""
    starts = np.cumsum([0, *lengths])
    return [np.arange(a, b, dtype="<u2") for a, b in itertools.pairwise(starts)]


def packed(
    lengths: list[int], seq_len: int, pack: str, remainder: str
) -> tuple[list[Block], Counter[str]]:
    packer = PACKERS[pack](seq_len, remainder, PAD)
    blocks = [block for document in documents(lengths) for block in packer.add(document)]
    blocks += packer.finish()
    return blocks, packer.counts


def pieces(block: Block) -> list[list[int]]:
    """The documents, or pieces of them, in a block."""
    starts = [0, *block.doc_ends[:-1].tolist()]
    return [
        block.tokens[a:b].tolist() for a, b in zip(starts, block.doc_ends.tolist(), strict=True)
    ]


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("remainder", ["keep", "pad"])
@given(lengths=_documents, seq_len=st.integers(1, 20))
def test_every_token_is_in_exactly_one_block(
    pack: str, remainder: str, lengths: list[int], seq_len: int
) -> None:
    blocks, counts = packed(lengths, seq_len, pack, remainder)
    found = sorted(token for block in blocks for piece in pieces(block) for token in piece)
    assert found == list(range(sum(lengths)))
    padding = sum(len(block.tokens) - int(block.doc_ends[-1]) for block in blocks)
    assert counts["padding"] == padding
    assert counts["dropped"] == 0
    for block in blocks:
        assert (block.tokens[block.doc_ends[-1] :] == PAD).all()
        assert (np.diff(block.doc_ends.astype(int), prepend=0) > 0).all()
        assert len(block.tokens) == seq_len or (remainder == "keep" and len(block.tokens) > 0)
        assert block.tokens.dtype == "<u2"
        assert block.doc_ends.dtype == ends_dtype(seq_len)


@given(lengths=_documents, seq_len=st.integers(1, 20))
def test_concatenated_documents_run_on(lengths: list[int], seq_len: int) -> None:
    blocks, counts = packed(lengths, seq_len, "concat", "keep")
    run = [token for block in blocks for token in block.tokens.tolist()]
    assert run == list(range(sum(lengths)))
    assert [len(block.tokens) for block in blocks[:-1]] == [seq_len] * (len(blocks) - 1)
    ends = {0, *np.cumsum(lengths).tolist()}
    for number, block in enumerate(blocks):  # every document's end is an end in its block
        inside = {int(end) + number * seq_len for end in block.doc_ends}
        whole = {end for end in ends if number * seq_len < end <= (number + 1) * seq_len}
        assert inside - whole <= {number * seq_len + len(block.tokens)}
        assert whole <= inside
    spans = zip(np.cumsum([0, *lengths]), np.cumsum(lengths), strict=False)
    assert counts["cut"] == sum(a // seq_len != (b - 1) // seq_len for a, b in spans if b > a)


@given(lengths=_documents, seq_len=st.integers(1, 20))
def test_a_remainder_is_dropped_and_counted(lengths: list[int], seq_len: int) -> None:
    blocks, counts = packed(lengths, seq_len, "concat", "drop")
    assert [len(block.tokens) for block in blocks] == [seq_len] * (sum(lengths) // seq_len)
    assert counts["dropped"] == sum(lengths) % seq_len
    assert counts["padding"] == 0


@given(lengths=_documents, seq_len=st.integers(1, 20))
def test_documents_that_fit_stay_whole(lengths: list[int], seq_len: int) -> None:
    blocks, counts = packed(lengths, seq_len, "nosplit", "pad")
    found = [piece for block in blocks for piece in pieces(block)]
    for document in documents(lengths):
        if 0 < len(document) <= seq_len:
            assert document.tolist() in found
    assert counts["cut"] == sum(length > seq_len for length in lengths)


@given(lengths=_documents, seq_len=st.integers(1, 20))
def test_one_document_in_a_block(lengths: list[int], seq_len: int) -> None:
    blocks, _ = packed(lengths, seq_len, "pad", "pad")
    assert all(len(block.doc_ends) == 1 for block in blocks)
    assert len(blocks) == sum(-(-length // seq_len) for length in lengths)


def test_best_fit_fills_blocks_that_first_come_first_served_would_not() -> None:
    blocks, counts = packed([4, 7, 6, 3, 5, 5], 10, "nosplit", "pad")
    assert [len(pieces(block)) for block in blocks] == [2, 2, 2]
    assert counts["padding"] == 0


@given(lengths=st.lists(st.integers(1, 12), max_size=60))
def test_at_most_one_block_is_half_empty(lengths: list[int]) -> None:
    blocks, _ = packed(lengths, 12, "nosplit", "pad")
    assert sum(block.doc_ends[-1] <= 6 for block in blocks) <= 1  # two would go together


def test_a_window_bounds_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_WINDOW_BLOCKS", 2)
    packer = PACKERS["nosplit"](10, "pad", PAD)
    given = 0
    for document in documents([6] * 20):
        given += sum(1 for _ in packer.add(document))
    assert given == 20  # four documents make a window; none is left
    assert not list(packer.finish())
    monkeypatch.setattr(packing, "_WINDOW_PIECES", 3)
    assert len([b for d in documents([1] * 9) for b in packer.add(d)]) == 3


def test_a_long_document_fills_blocks_at_once() -> None:
    packer = PACKERS["nosplit"](10, "pad", PAD)
    assert len(list(packer.add(documents([35])[0]))) == 3
    (last,) = packer.finish()
    assert last.doc_ends.tolist() == [5]


def test_positions_take_the_smallest_type() -> None:
    assert ends_dtype(65_535) == "<u2"
    assert ends_dtype(65_536) == "<u4"
