"""Plans batches of samples of different lengths from the lengths alone, without reading samples.

A plan covers one window of the shuffled samples. It depends only on their lengths (in order), the
options and the seed, so every rank makes the same list and takes its share of it. A plan uses all
samples of its window, so some of its batches may be smaller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import SampleError, UsageError
from shardkit.helpers.order import permutation
from shardkit.options import check_choice, check_numbers
from shardkit.preprocess.packing import best_fit

Numbers = NDArray[np.int64]


class MicroBatch(NamedTuple):
    """One batch of one rank.

    `samples` are indices into the window, in the batch's order. With packing, `samples` are the
    documents to read, and `segments` (n, 4) says where their tokens go, row by row and from left to
    right: row of the batch, document (an index into `samples`), start and stop in the document.
    """

    samples: Numbers
    segments: Numbers | None = None


@dataclass(frozen=True)
class Bucket:
    """Make batches of samples of similar lengths, which are sorted into buckets.

    Samples keep their shuffled order within a bucket, and the batches are shuffled. A window has at
    most one smaller batch per bucket.

    batch_size: samples per batch.
    boundaries: the maximum length of each bucket, rising; longer samples go into one more bucket.
        Or the number of buckets: their boundaries are chosen so that padding each sample to the
        longest of its bucket takes the least padding.
    field: the array field whose lengths count. None: "tokens", or else the first such field.
    """

    batch_size: int
    boundaries: tuple[int, ...] | int
    field: str | None = None

    def __post_init__(self) -> None:
        check_numbers(self, batch_size=1)
        if isinstance(self.boundaries, Sequence) and not isinstance(self.boundaries, str):
            object.__setattr__(self, "boundaries", _boundaries(self.boundaries))
        else:
            check_numbers(self, boundaries=1)

    def with_lengths(self, lengths: Numbers) -> Bucket:
        """Return a copy with boundaries instead of a number of buckets."""
        return dataclasses.replace(self, boundaries=self._boundaries(lengths))

    def plan(self, lengths: Numbers, seed: int) -> list[MicroBatch]:
        """Plan the batches of a window from the lengths of its samples, in shuffled order.

        If `with_lengths` has not chosen boundaries, they are chosen from the window's lengths.
        """
        buckets = np.searchsorted(self._boundaries(lengths), lengths, side="left")
        samples = np.argsort(buckets, kind="stable")
        ends = np.cumsum(np.bincount(buckets, minlength=1))
        starts = [range(a, b, self.batch_size) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        return _shuffled(_cut(samples, list(chain(*starts))), seed)

    def _boundaries(self, lengths: Numbers) -> tuple[int, ...]:
        if isinstance(self.boundaries, tuple):
            return self.boundaries
        return _least_padding(lengths, self.boundaries)


@dataclass(frozen=True)
class Dynamic:
    """Make batches with about the same number of tokens: few long samples or many short ones.

    The tokens of a batch include padding: its longest sample, rounded up to `multiple_of`, times
    its number of samples. Samples of similar lengths are batched together, in their shuffled order,
    and the batches are shuffled. In each window, the batch of the shortest samples may be smaller
    than necessary.

    max_tokens: maximum number of tokens in a batch.
    max_samples: maximum number of samples in a batch, for very short samples. None: no maximum.
    multiple_of: lengths are rounded up to a multiple of this.
    field: the array field whose lengths count. None: "tokens", or else the first such field.
    """

    max_tokens: int
    max_samples: int | None = None
    multiple_of: int = 1
    field: str | None = None

    def __post_init__(self) -> None:
        check_numbers(self, max_tokens=1, max_samples=1, multiple_of=1)
        if self.multiple_of > self.max_tokens:
            raise UsageError(
                f"multiple_of must be at most max_tokens, {self.max_tokens:,}",
                found=f"{self.multiple_of:,}",
            )

    def with_lengths(self, lengths: Numbers) -> Dynamic:
        """Check that each of these samples fits into a batch, and return `self`."""
        most = self.max_tokens // self.multiple_of * self.multiple_of
        _check_longest(lengths, most, self.field, "a batch", "max_tokens")
        return self

    def plan(self, lengths: Numbers, seed: int) -> list[MicroBatch]:
        """Plan the batches of a window. Raises SampleError for a sample that is too long.

        Samples are sorted by decreasing length, so the first one of a batch determines its size.
        """
        self.with_lengths(lengths)
        samples = np.argsort(-lengths, kind="stable")
        rounded = -(-np.maximum(lengths[samples], 1) // self.multiple_of) * self.multiple_of
        most = self.max_tokens // rounded
        if self.max_samples is not None:
            most = np.minimum(most, self.max_samples)
        counts, starts, at = most.tolist(), [], 0
        while at < len(counts):
            starts.append(at)
            at += counts[at]
        batches = np.searchsorted(starts, np.arange(len(samples)), side="right")
        return _shuffled(_cut(samples[np.lexsort((samples, batches))], starts), seed)


@dataclass(frozen=True)
class Pack:
    """Pack documents into rows of a fixed number of tokens, several of which make a batch.

    Other arrays with a value per token, such as a `loss_mask`, are packed in the same way, with 0
    for padding. Other fields are ignored, with a warning. The rows are shuffled. Empty documents
    are ignored. In each window, the last batch may have fewer rows, and with "concat" one row is
    not full.

    seq_len: tokens per row.
    batch_size: rows per batch.
    how: "nosplit" keeps documents whole if they fit into a row, and leaves little of the rows
        unused; a longer document fills whole rows, and its end is packed. "whole" is the same, but
        a longer document is an error. "concat" cuts documents at the end of a row and continues
        them in the next.
    field: the array field whose lengths count. None: "tokens", or else the first such field.
    """

    seq_len: int
    batch_size: int
    how: str = "nosplit"  # or "whole", "concat"
    field: str | None = None

    def __post_init__(self) -> None:
        check_numbers(self, seq_len=1, batch_size=1)
        check_choice(self, "how", ("nosplit", "whole", "concat"))

    def with_lengths(self, lengths: Numbers) -> Pack:
        """Return `self`. Raises SampleError if a document that must stay whole is too long."""
        if self.how == "whole":
            _check_longest(lengths, self.seq_len, self.field, "a row", "seq_len")
        return self

    def plan(self, lengths: Numbers, seed: int) -> list[MicroBatch]:
        """Plan the batches of a window."""
        self.with_lengths(lengths)
        rows = _run_on if self.how == "concat" else _keep_whole
        row, sample, start, stop = rows(lengths, self.seq_len)
        if not len(row):
            return []
        row = permutation(int(row.max()) + 1, seed)[row]
        order = np.argsort(row, kind="stable")
        row, sample, start, stop = row[order], sample[order], start[order], stop[order]
        batch = row // self.batch_size
        # The distinct pairs of a batch and a document in it, and the pair of each segment.
        pairs, pair = np.unique(batch * len(lengths) + sample, return_inverse=True)
        numbers = np.arange(batch[-1] + 1)
        documents = np.searchsorted(pairs // len(lengths), numbers)  # a batch's first pair
        firsts = np.searchsorted(batch, numbers)  # its first segment
        segments = np.stack([row % self.batch_size, pair - documents[batch], start, stop], axis=1)
        read = _cut(pairs % len(lengths), documents.tolist())
        return [
            MicroBatch(*both) for both in zip(read, _cut(segments, firsts.tolist()), strict=True)
        ]


Batching: TypeAlias = Bucket | Dynamic | Pack


def _check_longest(lengths: Numbers, most: int, field: str | None, room: str, option: str) -> None:
    """Raise SampleError if a sample is longer than `most` tokens."""
    if len(lengths) and lengths.max() > most:
        raise SampleError(
            f"sample {int(lengths.argmax())} is too long for {room}",
            field=field,
            expected=f"{most:,} tokens at most",
            found=f"{int(lengths.max()):,} tokens; {np.count_nonzero(lengths > most):,} of"
            f" {len(lengths):,} samples are longer",
            fix=f"raise {option}, cut or drop long samples while converting, or leave them out:"
            f" dataset.select(np.flatnonzero(dataset.lengths({field or 'tokens'!r}) <= {most}))",
        )


def _run_on(lengths: Numbers, seq_len: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Row, document, start and stop of each segment, for concatenated documents."""
    ends = np.cumsum(lengths)
    total = int(lengths.sum())
    stops = np.union1d(ends[lengths > 0], np.arange(seq_len, total, seq_len))
    starts = np.concatenate([[0], stops])[:-1]
    document = np.searchsorted(ends, starts, side="right")
    begin = (ends - lengths)[document]
    return starts // seq_len, document, starts - begin, stops - begin


def _keep_whole(lengths: Numbers, seq_len: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Row, document, start and stop of each segment if only documents longer than a row are cut."""
    full = lengths // seq_len  # rows that a document fills completely
    long = np.repeat(np.arange(len(lengths)), full)
    start = (np.arange(len(long)) - np.repeat(np.cumsum(full) - full, full)) * seq_len
    ends = np.flatnonzero(lengths % seq_len)  # documents of which a remainder is to be packed
    shared = best_fit((lengths[ends] % seq_len).tolist(), seq_len)
    packed = ends[np.fromiter(chain(*shared), np.int64, len(ends))]
    row = np.repeat(np.arange(len(shared)), list(map(len, shared)))
    return (
        np.concatenate([np.arange(len(long)), row + len(long)]),
        np.concatenate([long, packed]),
        np.concatenate([start, full[packed] * seq_len]),
        np.concatenate([start + seq_len, lengths[packed]]),
    )


def _cut(values: Numbers, starts: list[int]) -> list[Numbers]:
    return [values[a:b] for a, b in zip(starts, [*starts, len(values)][1:], strict=True)]


def _shuffled(batches: list[Numbers], seed: int) -> list[MicroBatch]:
    return [MicroBatch(batches[number]) for number in permutation(len(batches), seed).tolist()]


_CANDIDATES = 256  # maximum number of lengths that are tried as boundaries


def _least_padding(lengths: Numbers, buckets: int) -> tuple[int, ...]:
    """The boundaries with the least padding, if each sample is padded to its bucket's longest.

    Dynamic programming: the best division into n buckets extends the best division of a prefix of
    the lengths into n - 1 buckets.
    """
    values, counts = np.unique(np.maximum(lengths, 1), return_counts=True)
    if len(values) > _CANDIDATES:  # take quantiles of the tokens and of the samples
        half = np.linspace(0, 1, _CANDIDATES // 2)
        sums = [np.cumsum(counts), np.cumsum(counts * values)]
        cuts_at = [np.searchsorted(some, half * some[-1]) for some in sums]
        ends = np.unique([*np.concatenate(cuts_at), len(values) - 1])
        counts = np.diff(np.cumsum(counts)[ends], prepend=0)
        values = values[ends]
    if len(values) < 2:
        return ()
    below = np.concatenate([[0], np.cumsum(counts)])
    # The cost of a bucket of the lengths from `row` to `column`, both included.
    costs = (below[None, 1:] - below[:-1, None]) * values.astype(np.float64)
    costs[np.tril_indices(len(values), -1)] = np.inf
    best, cuts = costs[0], []
    for _ in range(min(buckets, len(values)) - 1):
        with_cut = best[:-1, None] + costs[1:]
        cuts.append(with_cut.argmin(axis=0))
        best = with_cut.min(axis=0)
    found, end = [], len(values) - 1
    for cut in reversed(cuts):
        end = int(cut[end])
        found.append(int(values[end]))
    return tuple(reversed(found))


def _boundaries(bounds: Sequence[int]) -> tuple[int, ...]:
    whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in bounds)
    if not whole or any(a < 0 for a in bounds) or any(np.diff([*bounds]) <= 0):
        raise UsageError(
            "boundaries must be increasing lengths",
            expected="such as (64, 128, 256), or the number of buckets",
            found=repr(bounds),
        )
    return tuple(map(int, bounds))
