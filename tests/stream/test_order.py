"""The order of samples: each once, the same for ever, in bounded memory."""

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.helpers.order import seed_of
from shardkit.stream.order import ORDER_VERSION, Mixture, Order
from shardkit.stream.schedule import Fixed, StreamProgress

GOLDEN = Path(__file__).parent / "golden"

SIZES = st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any)
OPTIONS = st.fixed_dictionaries(
    {
        "shuffle": st.booleans(),
        "seed": st.integers(0, 2**63),
        "parts": st.integers(1, 9),
        "window": st.sampled_from([1, 2, 7, 64, 1 << 16]),
    }
)


def epoch_of(order, epoch):
    return order.draw(epoch, np.arange(order.samples)).number.tolist()


@given(SIZES, OPTIONS, st.integers(0, 3), st.data())
def test_any_positions_are_drawn_alone_as_in_a_whole_epoch(sizes, options, epoch, data):
    """S1: and each sample comes exactly once."""
    whole = np.array(epoch_of(Order(np.array(sizes), **options), epoch))
    assert sorted(whole.tolist()) == list(range(sum(sizes)))
    some = data.draw(st.lists(st.integers(0, sum(sizes) - 1), max_size=40))
    order = Order(np.array(sizes), **options)
    drawn = [order.draw(epoch, np.array([n], np.int64)).number[0] for n in some]
    assert drawn == whole[some].tolist()
    together = order.draw(epoch, np.array(some, np.int64))
    assert together.number.tolist() == whole[some].tolist()
    assert (together.epoch == epoch).all()


def test_epochs_and_seeds_have_orders_of_their_own():
    sizes = np.array([50, 0, 50])
    orders = [Order(sizes, shuffle=True, seed=seed) for seed in range(3)]
    assert len({tuple(epoch_of(order, epoch)) for order in orders for epoch in range(3)}) == 9
    stored = Order(sizes, shuffle=False, seed=9)
    assert epoch_of(stored, 0) == epoch_of(stored, 5) == list(range(100))


def test_a_window_of_the_whole_dataset_is_a_full_shuffle():
    """Every sample is equally likely everywhere: chi-squared over 1,000 epochs of 16 samples."""
    order = Order(np.array([16]), shuffle=True, seed=1)
    counts = np.zeros((16, 16))
    for epoch in range(1000):
        counts[np.arange(16), epoch_of(order, epoch)] += 1
    chi2 = ((counts - 62.5) ** 2 / 62.5).sum()
    assert 150 < chi2 < 310  # 225 degrees of freedom: mean 225, standard deviation 21


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_a_part_holds_whole_blocks_so_that_a_node_reads_its_share_of_shards(parts):
    """S5: of 960 shards each of `parts` nodes opens about 1/parts."""
    sizes = np.full(960, 10)
    order = Order(sizes, shuffle=True, seed=4, parts=parts)
    positions = np.arange(order.samples)
    for node in range(parts):
        index = order.draw(0, positions[positions % parts == node]).number
        assert len(np.unique(index // 10)) <= 960 / parts + 1


def test_long_shards_are_cut_into_even_blocks_that_are_shuffled():
    """One sorted shard of 100,000 samples and a window of 1,600: blocks of 100, not one run."""
    order = Order(np.array([100_000]), shuffle=True, seed=0, window=1600)
    first = np.array(epoch_of(order, 0)[:1600])
    assert len(np.unique(first // 100)) >= 16
    assert np.ptp(first) > 50_000


def _golden_cases():
    yield "one shard", Order(np.array([40]), shuffle=True, seed=7)
    yield "uneven", Order(np.array([5, 0, 17, 1, 30]), shuffle=True, seed=2**40, window=16)
    yield "parts", Order(np.array([9, 21, 10]), shuffle=True, seed=3, parts=4, window=8)
    yield "plain", Order(np.array([4, 6]), shuffle=False, seed=0, parts=3)
    orders = [Order(np.array(s), shuffle=True, seed=n) for n, s in enumerate([[12], [5, 3], [20]])]
    yield "mixture", Mixture(orders, [0.5, 0.25, 0.25], 11)


def test_the_order_is_the_one_of_its_version():
    """Golden files: a change of order must come with a new ORDER_VERSION and a new file."""
    golden = json.loads((GOLDEN / f"order-{ORDER_VERSION}.json").read_text())
    found = {name: [epoch_of(order, e) for e in range(3)] for name, order in _golden_cases()}
    assert found == golden


def test_a_billion_samples_start_and_continue_in_the_memory_of_a_window():
    """10^9 samples in 10^5 shards over 1,024 ranks."""
    tracemalloc.start()
    try:
        order = Order(np.full(100_000, 10_000), shuffle=True, seed=0, parts=128)
        schedule = Fixed(order, 64, 700, 1024, "pad")
        schedule.step(0, StreamProgress())
        step = schedule.step(0, StreamProgress(10**8))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(step.number), step.after.samples) == (64, 10**8 + 64 * 1024)
    assert peak < 50 << 20


@given(st.lists(st.tuples(SIZES, st.integers(1, 100)), min_size=1, max_size=5), st.integers(0, 99))
def test_every_dataset_of_a_mixture_goes_through_its_own_epochs(datasets, seed):
    """S1 for each of them: within one turn no sample comes twice, and turns come one by one."""
    orders = [Order(np.array(sizes), shuffle=True, seed=seed) for sizes, _ in datasets]
    mixture = Mixture(orders, [weight for _, weight in datasets], seed)
    firsts = np.cumsum([0, *(order.samples for order in orders)])
    came = [Counter() for _ in orders]
    for epoch in range(2):
        draw = mixture.draw(epoch, np.arange(mixture.samples))
        for index, turn in zip(draw.number.tolist(), draw.epoch.tolist(), strict=True):
            which = int(np.searchsorted(firsts, index, side="right")) - 1
            came[which][turn, index] += 1
    for order, counts in zip(orders, came, strict=True):
        assert set(counts.values()) <= {1}
        turns = Counter(turn for turn, _ in counts)
        # Draws are permuted in groups of 1,024, so that turns near the end may have holes.
        whole = [turn for turn in turns if (turn + 1) * order.samples <= len(counts) - 2048]
        assert all(turns[turn] == order.samples for turn in whole)


def test_a_mixture_has_its_weights_in_every_stretch():
    weights = np.array([0.6, 0.3, 0.1])
    orders = [Order(np.array([n]), shuffle=True, seed=0) for n in (5000, 70_000, 900)]
    mixture = Mixture(orders, weights.tolist(), 5)
    firsts = np.array([0, 5000, 75_000])
    for start in range(0, 70_000, 8192):
        index = mixture.draw(0, np.arange(start, start + 4096)).number
        which = np.searchsorted(firsts, index, side="right") - 1
        assert np.abs(np.bincount(which, minlength=3) - 4096 * weights).max() <= 3


def test_neither_even_nor_odd_positions_of_a_mixture_are_one_dataset():
    orders = [Order(np.array([4000]), shuffle=True, seed=n) for n in range(2)]
    index = Mixture(orders, [1, 1], 0).draw(0, np.arange(8000)).number
    for half in (index[::2], index[1::2]):
        assert 0.45 < (half < 4000).mean() < 0.55


def test_seeds_of_unlike_numbers_are_unlike():
    seeds = {seed_of(a, b, c) for a in range(20) for b in range(20) for c in range(5)}
    assert len(seeds) == 2000
    assert seed_of(1, 2) != seed_of(2, 1)
    assert seed_of(1) != seed_of(1, 0)
