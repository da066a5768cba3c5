"""Random numbers of samples: what they depend on, and that they look random."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.transforms import Draws

COUNT = 1 << 16
NUMBERS = np.arange(COUNT)
ZEROS = np.zeros(COUNT, np.int64)


def drawn(seed=0, turn=0, stream=0, count=1):
    return Draws(seed, ZEROS + turn, NUMBERS).uniform(stream, count)


def chi_square(counts):
    """In standard deviations, for many bins that are all as likely."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def dependence(one, other):
    """Of pairs of numbers, in standard deviations: how unevenly they fill a square."""
    return chi_square(np.histogram2d(one, other, bins=16, range=((0, 1), (0, 1)))[0])


def test_the_numbers_never_change():
    """States that were saved by any version must go on with the same images."""
    draws = Draws(7, np.array([0, 1, 2**40]), np.array([0, 10**9, 3]))
    first = [2228971248407130, 8713693702648478, 6128421864880754]
    rest = [3996397975813219, 5621303295204283, 5070993286467798]
    assert (draws.uniform(65537, 2) * 2**53).astype(np.int64).ravel().tolist() == first + rest
    assert draws.number(1, 3) == 6078956159681477685


@pytest.mark.parametrize("stream", [0, 1, 65536])
def test_numbers_are_uniform(stream):
    numbers = drawn(stream=stream, count=8)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    for bins in (10, 256, 4096):
        assert abs(chi_square(np.histogram(numbers, bins, (0, 1))[0])) < 4
    low_bits = (numbers * 2**53).astype(np.int64) & 0xFF
    assert abs(chi_square(np.bincount(low_bits.ravel(), minlength=256))) < 4


def test_numbers_do_not_depend_on_each_other():
    """Neither in a row, nor those of neighbours, streams, turns and seeds."""
    numbers = drawn(count=4)
    pairs = [(numbers[:, 0], numbers[:, column]) for column in (1, 2, 3)]
    pairs += [(numbers[:-step, 0], numbers[step:, 0]) for step in (1, 2, 8, 1024)]
    pairs += [(numbers[:-1, 1], numbers[1:, 0])]
    pairs += [(numbers[:, 0], drawn(stream=stream)[:, 0]) for stream in (1, 2, 65536)]
    pairs += [(numbers[:, 0], drawn(turn=turn)[:, 0]) for turn in (1, 2, 100)]
    pairs += [(numbers[:, 0], drawn(seed=seed)[:, 0]) for seed in (1, 2, -1)]
    for one, other in pairs:
        assert abs(dependence(one, other)) < 4
    numbers = np.arange(300)
    turns, indexes = np.repeat(numbers, 300), np.tile(numbers, 300)
    assert len(np.unique(Draws(0, turns, indexes).uniform(0, 1))) == 300 * 300


@given(
    st.integers(-(2**70), 2**70),
    st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 2**62)), min_size=2, max_size=9),
    st.integers(0, 2**31),
)
def test_a_sample_has_its_numbers_in_any_company(seed, samples, stream):
    turns, indexes = np.array(samples, np.int64).T
    together = Draws(seed, turns, indexes)
    numbers = together.uniform(stream, 3)
    np.testing.assert_array_equal(together.uniform(stream, 2), numbers[:, :2])
    for row in range(len(samples)):
        alone = Draws(seed, turns[row : row + 1], indexes[row : row + 1])
        some = together.of([row])
        assert len(alone) == len(some) == 1
        for one in (alone, some):
            np.testing.assert_array_equal(one.uniform(stream, 3)[0], numbers[row])
            assert one.number(0, stream) == together.number(row, stream)
        first = alone.generator(0, stream).random(3)
        np.testing.assert_array_equal(first, together.generator(row, stream).random(3))
