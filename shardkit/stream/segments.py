"""Finds the documents in batches whose rows hold several documents, or one and padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import UsageError

Numbers = NDArray[np.integer[Any]]


def documents(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return where the documents of a batch are, for attention that does not cross their borders.

    `batch` is made with `Pack`, holds blocks of tokens as `shardkit convert --seq-len` stores them
    (`tokens` and `doc_ends`), or is padded (`attention_mask`, as from `Bucket`, `Dynamic` and
    `pad_collate`). The result:

    segment_ids: (rows, seq_len) int32: 1 for a row's first document, 2 for its second, 0 for
        padding.
    position_ids: (rows, seq_len) int32: from 0 on in each document; 0 for padding.
    cu_seqlens: (documents + 1,) int32, for attention of variable length: where each document begins
        in `batch["tokens"][segment_ids > 0]`, which are all tokens without padding, and their end.
    max_seqlen: int, the length of the longest document.

    A piece of a document that was cut counts as a document. Raises UsageError for other batches.
    """
    segments, positions = map(_array, _found(batch))
    starts = np.flatnonzero(positions[segments > 0] == 0)
    ends = np.append(starts, np.count_nonzero(segments)).astype(np.int32)
    longest = int(np.diff(ends).max(initial=0))
    both = {"segment_ids": segments, "position_ids": positions}
    return {**both, "cu_seqlens": ends, "max_seqlen": longest}


def _found(batch: Mapping[str, Any]) -> tuple[Numbers, Numbers]:
    if "segment_ids" in batch:
        return batch["segment_ids"], batch["position_ids"]
    if "doc_ends" in batch:
        lengths = {len(row) for row in batch.get("tokens", batch.get("input_ids", ()))}
        if len(lengths) == 1:
            return _of_blocks(batch["doc_ends"], lengths.pop())
    elif "attention_mask" in batch:
        segments = _array(batch["attention_mask"]).astype(np.int32)
        return segments, (segments.cumsum(axis=1, dtype=np.int32) - 1) * segments
    raise UsageError(
        "the batch does not say where its documents are",
        expected="segment_ids and position_ids, as from Pack; or doc_ends, and tokens in rows of"
        " equal length; or attention_mask",
        found=", ".join(map(repr, batch)),
    )


def _of_blocks(doc_ends: Sequence[Numbers], length: int) -> tuple[Numbers, Numbers]:
    """Segments and positions of blocks, from the position after each document of a block."""
    ends = [_array(stored).astype(np.int64) for stored in doc_ends]
    ends = [each[each > 0] for each in ends]  # a collate function may have padded them
    sizes = np.concatenate([np.zeros(0, np.int64), *(np.diff(each, prepend=0) for each in ends)])
    rows = np.repeat(np.arange(len(ends)), [len(each) for each in ends])
    return laid_out(rows, sizes, (len(ends), length))


def laid_out(
    rows: NDArray[np.int64], sizes: NDArray[np.int64], shape: tuple[int, int]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return `segment_ids` and `position_ids`, int32 of a shape (rows, seq_len), see `documents`.

    rows, sizes: int64 (segments,): the row of each segment, ascending, and its number of tokens.
    Segments of a row follow one another from its beginning on; the rest of it is padding.
    """
    numbers = np.arange(len(rows)) - np.searchsorted(rows, rows) + 1  # of a segment in its row
    used = np.bincount(rows, sizes, shape[0]).astype(np.int64)
    filled = np.arange(shape[1]) < used[:, None]
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    segments[filled] = np.repeat(numbers, sizes)
    positions[filled] = np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)
    return segments, positions


def _array(value: Any) -> NDArray[Any]:
    return np.asarray(value.cpu() if hasattr(value, "cpu") else value)  # a tensor on a GPU
