"""Plans of batches: each sample once, within the bounds asked for, the same on every machine."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import SampleError, UsageError
from shardkit.preprocess.packing import PACKERS
from shardkit.stream.batching import Bucket, Dynamic, Pack

_lengths = st.lists(st.integers(0, 40), max_size=120).map(lambda values: np.array(values, np.int64))
_seeds = st.integers(0, 2**64 - 1)
# A window of documents as they are found: many short ones, a few very long ones.
NATURAL = np.random.default_rng(0).lognormal(5, 1, 8192).clip(1, 4096).astype(np.int64)


def same(one, other):
    """Whether two plans have the same batches, each of samples and maybe segments."""
    return all(
        a is b or np.array_equal(a, b)
        for pair in zip(one, other, strict=True)
        for a, b in zip(*pair, strict=True)
    )


def padding(lengths, batches):
    """The share of batches, each as long as its longest sample, that is padding."""
    held = sum(int(lengths[batch].max()) * len(batch) for batch in batches)
    return 1 - int(lengths.sum()) / held


def rows_of(batch):
    """Document of the window, start and stop of the segments in each row of a packed batch."""
    rows = [[] for _ in range(batch.segments[-1, 0] + 1)]
    for row, number, start, stop in batch.segments.tolist():
        rows[row].append((int(batch.samples[number]), start, stop))
    return rows


def segments_of_window(batches):
    return [segment for batch in batches for row in rows_of(batch) for segment in row]


@given(
    lengths=_lengths,
    size=st.integers(1, 9),
    boundaries=st.one_of(
        st.integers(1, 6), st.lists(st.integers(0, 45), unique=True).map(sorted).map(tuple)
    ),
    seed=_seeds,
)
def test_buckets_hold_each_sample_once(lengths, size, boundaries, seed):
    bucket = Bucket(size, boundaries).with_lengths(lengths)
    batches = bucket.plan(lengths, seed)
    assert sorted(n for b in batches for n in b.samples.tolist()) == list(range(len(lengths)))
    assert isinstance(bucket.boundaries, tuple)
    short = Counter()
    for samples, segments in batches:
        buckets = {sum(length > b for b in bucket.boundaries) for length in lengths[samples]}
        assert len(buckets) == 1
        assert 0 < len(samples) <= size
        assert samples.tolist() == sorted(samples.tolist())  # the order of the window
        assert segments is None
        short[buckets.pop()] += len(samples) < size
    assert all(count <= 1 for count in short.values())


def padded(lengths, boundaries):
    """Tokens, if each sample is padded to the longest of its bucket."""
    ends = np.array([*boundaries, lengths.max()])
    return int(ends[np.searchsorted(ends, lengths)].sum())


@given(st.lists(st.integers(0, 12), min_size=1, max_size=20), st.integers(1, 5))
def test_a_number_of_buckets_is_cut_where_padding_is_least(some, buckets):
    lengths = np.array(some)
    found = Bucket(2, buckets).with_lengths(lengths).boundaries
    values = np.unique(np.maximum(lengths, 1)).tolist()[:-1]
    assert isinstance(found, tuple)
    assert len(found) == min(buckets - 1, len(values))
    real = np.maximum(lengths, 1)
    best = min(padded(real, cuts) for cuts in itertools.combinations(values, len(found)))
    assert padded(real, found) == best
    bucket = Bucket(2, list(np.array(found)))  # any list of numbers
    assert bucket == Bucket(2, found)
    assert bucket.with_lengths(lengths[:1]) == bucket  # a window's own lengths do not count


@given(
    lengths=_lengths,
    tokens=st.integers(48, 200),
    most=st.none() | st.integers(1, 9),
    multiple=st.integers(1, 8),
    seed=_seeds,
)
def test_dynamic_batches_hold_each_sample_once_and_few_tokens(
    lengths, tokens, most, multiple, seed
):
    batches = Dynamic(tokens, most, multiple).plan(lengths, seed)
    assert sorted(n for b in batches for n in b.samples.tolist()) == list(range(len(lengths)))
    could_be_larger = 0
    for samples, segments in batches:
        row = -(-max(int(lengths[samples].max()), 1) // multiple) * multiple
        assert 0 < len(samples) * row <= tokens
        assert most is None or len(samples) <= most
        assert samples.tolist() == sorted(samples.tolist())
        assert segments is None
        could_be_larger += len(samples) != most and (len(samples) + 1) * row <= tokens
    assert could_be_larger <= 1
    by_length = sorted(sorted(lengths[b.samples].tolist()) for b in batches)
    assert [n for batch in by_length for n in batch] == sorted(lengths.tolist())


def test_a_sample_that_no_dynamic_batch_can_hold_is_named_before_training():
    lengths = np.array([3, 97, 8, 98])
    assert Dynamic(98).with_lengths(lengths) == Dynamic(98)
    multiple, plan = Dynamic(98, multiple_of=8).with_lengths, lambda n: Dynamic(97).plan(n, 0)
    for call, longer in ((multiple, 2), (plan, 1)):
        with pytest.raises(SampleError, match="sample 3 is too long for a batch") as error:
            call(lengths)
        assert error.value.found == f"98 tokens; {longer} of 4 samples are longer"
    assert str(error.value.expected).startswith("97 tokens at most")


def test_documents_that_must_stay_whole_are_never_cut():
    lengths = np.array([3, 98, 8, 97, 99])
    whole, cut = Pack(98, 2, "whole"), Pack(98, 2)
    assert [str(batch) for batch in whole.plan(lengths[:4], 5)] == [
        str(batch) for batch in cut.plan(lengths[:4], 5)
    ]
    for call in (whole.with_lengths, lambda n: whole.plan(n, 0)):
        with pytest.raises(SampleError, match="sample 4 is too long for a row") as error:
            call(lengths)
        assert error.value.found == "99 tokens; 1 of 5 samples are longer"


@pytest.mark.parametrize("how", ["nosplit", "concat"])
@given(lengths=_lengths, seq_len=st.integers(1, 50), size=st.integers(1, 5), seed=_seeds)
def test_packing_gives_each_token_once(how, lengths, seq_len, size, seed):
    batches = Pack(seq_len, size, how).plan(lengths, seed)
    segments = segments_of_window(batches)
    tokens = Counter((n, token) for n, start, stop in segments for token in range(start, stop))
    assert tokens == Counter((n, token) for n, m in enumerate(lengths) for token in range(m))
    assert all(start < stop for _, start, stop in segments)
    assert [len(rows_of(batch)) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    for batch in batches:
        rows = rows_of(batch)
        assert 0 < len(rows) <= size
        assert all(0 < sum(stop - start for _, start, stop in row) <= seq_len for row in rows)
        assert {n for row in rows for n, _, _ in row} == set(batch.samples.tolist())
        assert len(set(batch.samples.tolist())) == len(batch.samples)
    if how == "nosplit":
        assert {(n, 0, m) for n, m in enumerate(lengths) if 0 < m <= seq_len} <= set(segments)


@pytest.mark.parametrize("how", ["nosplit", "concat"])
@given(lengths=_lengths, seq_len=st.integers(1, 50), seed=_seeds)
def test_packing_makes_the_rows_that_a_conversion_would(how, lengths, seq_len, seed):
    ends = np.cumsum(lengths)
    documents = [np.arange(end - n, end, dtype="<u2") for end, n in zip(ends, lengths, strict=True)]
    packer = PACKERS[how](seq_len, "keep", 0)
    blocks = [block for document in documents for block in packer.add(document)]
    blocks += packer.finish()
    found = [
        np.concatenate([documents[n][start:stop] for n, start, stop in row]).tolist()
        for batch in Pack(seq_len, 3, how).plan(lengths, seed)
        for row in rows_of(batch)
    ]
    assert sorted(found) == sorted(block.tokens.tolist() for block in blocks)


@pytest.mark.parametrize(
    "batching", [Bucket(8, 4), Dynamic(8192), Pack(512, 4), Pack(512, 4, "concat")]
)
def test_a_plan_depends_on_lengths_and_seed_alone_and_is_shuffled(batching):
    plan = batching.plan(NATURAL, 7)
    np.random.seed(1)
    assert same(plan, batching.plan(NATURAL.copy(), 7))
    assert not same(plan, batching.plan(NATURAL, 8))
    if plan[0].segments is None:  # long and short batches come in no order
        longest = [NATURAL[batch.samples].max() for batch in plan]
        assert abs(np.corrcoef(longest, np.arange(len(plan)))[0, 1]) < 0.1
    else:  # nor do documents
        first = [document for batch in plan for (document, _, _), *_ in rows_of(batch)]
        assert abs(np.corrcoef(first, np.arange(len(first)))[0, 1]) < 0.1


def test_plans_stay_as_they_are():
    """A stored position means the same sample in every version."""
    lengths = np.array([5, 2, 9, 2, 0, 7, 3, 12])
    assert [b.samples.tolist() for b in Bucket(2, (2, 7)).plan(lengths, 1)] == GOLDEN["bucket"]
    assert [b.samples.tolist() for b in Dynamic(14).plan(lengths, 1)] == GOLDEN["dynamic"]
    for how in ("nosplit", "concat"):
        assert [rows_of(b) for b in Pack(10, 2, how).plan(lengths, 1)] == GOLDEN[how]


def test_less_is_padding_than_in_batches_at_random():
    fixed = padding(NATURAL, list(np.arange(len(NATURAL)).reshape(-1, 32)))
    dynamic = [batch.samples for batch in Dynamic(8192).plan(NATURAL, 0)]
    bucket = [batch.samples for batch in Bucket(32, 16).plan(NATURAL, 0)]
    assert fixed > 0.7
    assert padding(NATURAL, dynamic) < 0.03
    assert padding(NATURAL, bucket) < 0.15  # though not all ways of cutting are tried
    rows = sum(len(rows_of(batch)) for batch in Pack(4096, 4).plan(NATURAL, 0))
    assert 1 - int(NATURAL.sum()) / (rows * 4096) < 0.01


REFUSED = {
    "batch_size must be a whole number from 1 up": [(Bucket, 0, 4), (Pack, 9, True)],
    "boundaries must be a whole number from 1 up": [(Bucket, 4, 0)],
    "boundaries must be a whole number": [(Bucket, 4, "4")],
    "boundaries must be increasing lengths": [(Bucket, 4, b) for b in ((8, 8), (-1, 4), (1.5,))],
    "max_tokens must be a whole number from 1 up": [(Dynamic, 0)],
    "max_samples must be a whole number": [(Dynamic, 9, 0)],
    "multiple_of must be a whole number": [(Dynamic, 9, None, 1.0)],
    "multiple_of must be at most": [(Dynamic, 9, None, 10)],
    "seq_len must be a whole number from 1 up": [(Pack, 0, 1)],
    "how must be one of": [(Pack, 9, 1, "pad")],
}


def test_options_that_make_no_sense_are_refused():
    for message, cases in REFUSED.items():
        for kind, *arguments in cases:
            with pytest.raises(UsageError, match=message):
                kind(*arguments)


GOLDEN = {
    "bucket": [[1, 3], [4], [6], [0, 5], [2, 7]],
    "dynamic": [[7], [2], [1, 3, 4, 6], [0, 5]],
    "nosplit": [
        [[(7, 0, 10)], [(0, 0, 5), (1, 0, 2), (3, 0, 2)]],
        [[(5, 0, 7), (6, 0, 3)], [(2, 0, 9)]],
        [[(7, 10, 12)]],
    ],
    "concat": [
        [[(0, 0, 5), (1, 0, 2), (2, 0, 3)], [(2, 3, 9), (3, 0, 2), (5, 0, 2)]],
        [[(7, 2, 12)], [(5, 2, 7), (6, 0, 3), (7, 0, 2)]],
    ],
}
