"""Blocks of tokens: nothing is lost or moved that was not asked for."""

import itertools
import weakref

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


def packed(lengths: list[int], seq_len: int, pack: str, remainder: str):
    """The blocks, and what was counted."""
    packer = PACKERS[pack](seq_len, remainder, PAD)
    blocks = [block for document in documents(lengths) for block in packer.add(document)]
    blocks += packer.finish()
    return blocks, packer.counts


def pieces(block: Block) -> list[list[int]]:
    """The documents, or pieces of them, in a block."""
    return [piece.tolist() for piece in np.split(block.tokens, block.doc_ends)[:-1]]


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("remainder", ["keep", "pad"])
@given(lengths=_documents, seq_len=st.integers(1, 20))
def test_every_token_is_in_exactly_one_block(pack, remainder, lengths, seq_len):
    blocks, counts = packed(lengths, seq_len, pack, remainder)
    found = sorted(token for block in blocks for piece in pieces(block) for token in piece)
    assert found == list(range(sum(lengths)))
    padding = sum(len(block.tokens) - int(block.doc_ends[-1]) for block in blocks)
    assert (counts["padding"], counts["dropped"]) == (padding, 0)
    for block in blocks:
        assert (block.tokens[block.doc_ends[-1] :] == PAD).all()
        assert (np.diff(block.doc_ends.astype(int), prepend=0) > 0).all()
        assert len(block.tokens) == seq_len or (remainder == "keep" and len(block.tokens) > 0)
        assert (block.tokens.dtype, block.doc_ends.dtype) == ("<u2", ends_dtype(seq_len))


@given(lengths=_documents, seq_len=st.integers(1, 20))
def test_concatenated_documents_run_on(lengths, seq_len):
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
def test_a_remainder_is_dropped_and_what_fits_stays_whole_or_alone_where_asked(lengths, seq_len):
    blocks, counts = packed(lengths, seq_len, "concat", "drop")
    assert [len(block.tokens) for block in blocks] == [seq_len] * (sum(lengths) // seq_len)
    assert (counts["dropped"], counts["padding"]) == (sum(lengths) % seq_len, 0)
    blocks, counts = packed(lengths, seq_len, "nosplit", "pad")
    found = [piece for block in blocks for piece in pieces(block)]
    for document in documents(lengths):
        if 0 < len(document) <= seq_len:
            assert document.tolist() in found
    assert counts["cut"] == sum(length > seq_len for length in lengths)
    blocks, _ = packed(lengths, seq_len, "pad", "pad")
    assert all(len(block.doc_ends) == 1 for block in blocks)
    assert len(blocks) == sum(-(-length // seq_len) for length in lengths)


def test_best_fit_fills_blocks_and_a_window_bounds_what_is_held(monkeypatch):
    blocks, counts = packed([4, 7, 6, 3, 5, 5], 10, "nosplit", "pad")
    assert [len(pieces(block)) for block in blocks] == [2, 2, 2]
    assert counts["padding"] == 0
    packer = PACKERS["nosplit"](10, "pad", PAD)
    assert sum(1 for _ in packer.add(np.ones(100_005, np.uint16))) == 10_000
    assert [(len(end), end.base) for end in packer._window] == [(5, None)]  # not all of it
    monkeypatch.setattr(packing, "_WINDOW_BLOCKS", 2)
    packer = PACKERS["nosplit"](10, "pad", PAD)
    given = 0
    for document in documents([6] * 20):
        given += sum(1 for _ in packer.add(document))
    assert given == 20  # four documents make a window; none is left
    assert not list(packer.finish())
    monkeypatch.setattr(packing, "_WINDOW_PIECES", 3)
    assert len([b for d in documents([1] * 9) for b in packer.add(d)]) == 3


@given(lengths=st.lists(st.integers(1, 12), max_size=60))
def test_at_most_one_block_is_half_empty(lengths):
    blocks, _ = packed(lengths, 12, "nosplit", "pad")
    assert sum(block.doc_ends[-1] <= 6 for block in blocks) <= 1  # two would go together


def test_a_long_document_fills_blocks_at_once_and_its_end_does_not_keep_it_in_memory():
    packer = PACKERS["nosplit"](10, "pad", PAD)
    document = np.ones(100_005, np.uint16)
    kept = weakref.ref(document)
    assert sum(1 for _ in packer.add(document)) == 10_000
    del document
    assert kept() is None
    (last,) = packer.finish()
    assert last.doc_ends.tolist() == [5]
    assert ends_dtype(65_535) == "<u2"  # the smallest type that has room
    assert ends_dtype(65_536) == "<u4"
