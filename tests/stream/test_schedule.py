"""Steps of ranks: S1, S2 and S3 as properties, over world sizes, parts, windows and policies."""

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardkit.errors import UsageError
from shardkit.stream.batching import Bucket, Dynamic, Pack
from shardkit.stream.order import Mixture, Order
from shardkit.stream.ranks import World, default_threads, find_world
from shardkit.stream.sampling import Balanced, Sampled
from shardkit.stream.schedule import START, Fixed, Planned

SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any)
ORDERS = st.builds(
    lambda sizes, **options: Order(np.array(sizes), **options),
    SIZES,
    shuffle=st.booleans(),
    seed=st.integers(0, 99),
    parts=st.integers(1, 9),
    window=st.sampled_from([1, 5, 64, 1 << 16]),
)
WORLDS = st.integers(1, 8)


def steps_of(schedule, epoch=0, progress=START):
    steps = []
    while (step := schedule.step(epoch, progress)) is not None:
        steps.append(step)
        progress = step.after
    return steps


def by_rank(make, world, epoch=0, progress=START):
    """The steps of every rank; all ranks must have the same number, and stand at one progress."""
    ranks = [steps_of(make(rank, world), epoch, progress) for rank in range(world)]
    assert len({len(steps) for steps in ranks}) == 1, "S2"
    assert all(len({step.after for step in steps}) == 1 for steps in zip(*ranks, strict=True))
    assert {make(rank, world).steps(epoch, progress) for rank in range(world)} == {len(ranks[0])}
    return ranks


def real(steps):
    return [n for step in steps for n in step.number[step.valid].tolist()]


def global_batches(ranks):
    """Of each step the samples of all ranks together."""
    return [
        Counter(n for step in steps for n in step.number.tolist())
        for steps in zip(*ranks, strict=True)
    ]


@given(ORDERS, st.integers(1, 40), WORLDS, st.sampled_from(["pad", "drop", "short"]))
@example(Order(np.array([9]), shuffle=False, seed=0), 2, 4, "short")  # one is left for four ranks
def test_each_sample_comes_once_and_padding_is_declared(order, size, world, last):
    """S1 and S2."""
    ranks = by_rank(lambda r, w: Fixed(order, size, r, w, last), world)
    came = Counter(n for steps in ranks for n in real(steps))
    assert set(came.values()) <= {1}
    padding = sum(int((~step.valid).sum()) for steps in ranks for step in steps)
    whole, rest = divmod(order.samples, size * world)
    if last == "drop":
        assert len(came) == whole * size * world
        assert padding == 0
        return
    assert sorted(came) == list(range(order.samples))
    if last == "pad":
        assert all(len(step.number) == size for steps in ranks for step in steps)
        assert padding == (size * world - rest) % (size * world)
    else:
        assert padding == (max(world - rest, 0) if rest else 0)
        lengths = [len(steps[-1].number) for steps in ranks]
        assert max(lengths) - min(lengths) <= 1
        assert min(lengths) >= 1


MIXTURE = Mixture([Order(np.array([n]), shuffle=True, seed=n) for n in (30, 50)], [1, 2], 0)


@given(ORDERS, st.sampled_from([1, 2, 3]), st.sampled_from(["pad", "drop"]), st.integers(0, 3))
@example(MIXTURE, 1, "pad", 2)
def test_a_global_batch_is_the_same_for_any_number_of_ranks(order, each, last, epoch):
    """S3: a global batch of 24, 48 or 72 over 1, 2, 3 and 8 ranks."""
    size = 24 * each
    batches = [
        global_batches(by_rank(lambda r, w: Fixed(order, size // w, r, w, last), world, epoch))
        for world in (1, 2, 3, 8)
    ]
    assert all(one == batches[0] for one in batches)


@given(ORDERS, st.integers(1, 9), WORLDS, WORLDS, st.data())
def test_an_epoch_continues_anywhere_with_other_ranks_and_other_sizes(
    order, size, world, other, data
):
    """S4: what came before and what comes after make the epoch, without a sample twice."""
    before = by_rank(lambda r, w: Fixed(order, size, r, w, "pad"), world)
    stop = data.draw(st.integers(0, len(before[0])))
    progress = before[0][stop - 1].after if stop else START
    assert Fixed(order, size, 0, world, "pad").progress(0, stop) == progress
    new = data.draw(st.integers(1, 9))
    after = by_rank(lambda r, w: Fixed(order, new, r, w, "pad"), other, progress=progress)
    seen = [n for steps in before for n in real(steps[:stop])]
    seen += [n for steps in after for n in real(steps)]
    assert sorted(seen) == list(range(order.samples))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_rank_keeps_to_its_own_parts(world):
    """S5: with 4 parts and batches that they divide, a rank reads its parts and no other."""
    order = Order(np.array([100] * 8), shuffle=True, seed=0, parts=4)
    for rank in range(world):
        positions = {
            int(n)
            for step in steps_of(Fixed(order, 16 // world, rank, world, "drop"))
            for n in step.number
        }
        every = order.draw(0, np.arange(800)).number
        parts = {int(np.flatnonzero(every == n)[0]) % 4 for n in positions}
        assert parts == set(range(rank * 4 // world, (rank + 1) * 4 // world))


LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=120)
BATCHINGS = st.one_of(
    st.builds(Bucket, st.integers(1, 9), st.sampled_from([(10, 20), (), 3])),
    st.builds(Dynamic, st.integers(50, 300), max_samples=st.sampled_from([None, 1, 7])),
    st.builds(Pack, st.integers(5, 70), st.integers(1, 5), st.sampled_from(["nosplit", "concat"])),
)


def planned(batching, lengths, window, seed, last):
    lengths = np.array(lengths)
    order = Order(np.array([len(lengths)]), shuffle=True, seed=seed, window=window)
    ready = batching.with_lengths(lengths)
    return lambda r, w: Planned(order, ready, lengths, r, w, last, seed, window)


def halves(number):
    return Order(np.array([20, 20]), shuffle=True, seed=number, parts=2)


SHARED = {
    "fixed": lambda: Fixed(halves(0), 2, 0, 1, "pad"),
    "planned": lambda: planned(Bucket(3, (10, 20)), [*range(40)], 8, 0, "pad")(0, 1),
    "sampled": lambda: Fixed(
        Sampled(np.array([20, 20]), Balanced().sampler(np.arange(40) % 3, 40, 1), seed=0),
        2, 0, 1, "pad",
    ),
    "mixture": lambda: Fixed(Mixture([halves(0), halves(1)], [1, 2], 0), 2, 0, 1, "pad"),
}  # fmt: skip


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_threads_share_a_schedule(make):
    """Each at an epoch of its own: what one draws ahead is not what another gets."""
    shared, alone = make(), make()
    expected = [[real(steps_of(alone, epoch))] * 4 for epoch in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as threads:
            found = threads.map(lambda e: [real(steps_of(shared, e)) for _ in range(4)], range(3))
            assert list(found) == expected
    finally:
        sys.setswitchinterval(interval)


def contents(step):
    """What a micro-batch holds, as something that can be counted."""
    pieces = None if step.segments is None else step.segments.tobytes()
    return step.number.tobytes(), pieces


def tokens_of(step):
    if step.segments is None:
        return Counter(step.number.tolist())
    return Counter(
        (int(step.number[number]), n)
        for _, number, start, stop in step.segments.tolist()
        for n in range(start, stop)
    )


@given(BATCHINGS, LENGTHS, st.sampled_from([3, 16, 1000]), WORLDS, st.integers(0, 9))
def test_planned_batches_hold_every_sample_or_token_once(batching, lengths, window, world, seed):
    """S1 and S2."""
    ranks = by_rank(planned(batching, lengths, window, seed, "pad"), world)
    came = sum((tokens_of(s) for steps in ranks for s in steps if s.valid.all()), Counter())
    if isinstance(batching, Pack):
        expected = Counter((i, n) for i, length in enumerate(lengths) for n in range(length))
    else:
        expected = Counter(range(len(lengths)))
    assert came == expected
    assert all(step.valid.all() or not step.valid.any() for steps in ranks for step in steps)


@given(BATCHINGS, LENGTHS, st.sampled_from([3, 16, 1000]), st.integers(0, 9))
def test_any_number_of_ranks_shares_one_list_of_planned_batches(batching, lengths, window, seed):
    """S3."""

    def listed(world):
        ranks = by_rank(planned(batching, lengths, window, seed, "pad"), world)
        steps = [step for steps in zip(*ranks, strict=True) for step in steps]
        return [contents(step) for step in steps if step.valid.all()]

    lists = [listed(world) for world in (1, 3, 8)]
    assert all(one == lists[0] for one in lists)


@given(BATCHINGS, LENGTHS, st.sampled_from([3, 16]), WORLDS, WORLDS, st.data())
def test_planned_batches_continue_anywhere_with_other_ranks(
    batching, lengths, window, world, other, data
):
    """S4."""
    make = planned(batching, lengths, window, 5, "pad")
    whole = Counter(contents(s) for s in steps_of(make(0, 1)))
    before = by_rank(make, world)
    stop = data.draw(st.integers(0, len(before[0])))
    progress = before[0][stop - 1].after if stop else START
    after = by_rank(make, other, progress=progress)
    jumped = steps_of(make(0, other), progress=make(0, world).progress(0, stop))
    assert [step.number.tolist() for step in jumped] == [s.number.tolist() for s in after[0]]
    seen = [s for steps in before for s in steps[:stop]] + [s for steps in after for s in steps]
    assert Counter(contents(s) for s in seen if s.valid.all()) == whole


@given(BATCHINGS, LENGTHS, WORLDS)
def test_planned_batches_that_do_not_fill_a_step_can_be_dropped(batching, lengths, world):
    with pytest.raises(UsageError, match="fixed size"):
        planned(batching, lengths, 16, 0, "short")(0, 1)
    make = planned(batching, lengths, 16, 1, "drop")
    every = len(steps_of(make(0, 1)))
    ranks = by_rank(make, world)
    assert len(ranks[0]) == every // world
    assert all(step.valid.all() for steps in ranks for step in steps)


def test_rank_and_world_size_come_from_the_environment_unless_they_are_given(monkeypatch):
    assert find_world(None, None) == World(0, 1)
    for rank, size in ((2, 2), (-1, 3), (0, 0), (5, None)):
        with pytest.raises(UsageError, match="does not fit the world size"):
            find_world(rank, size)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert find_world(None, None) == World(3, 4)
    assert find_world(0, 1) == World(0, 1)
    assert find_world(1, None) == World(1, 4)
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(UsageError, match="RANK is not a number"):
        find_world(None, None)


def test_one_of_several_ranks_must_know_which(monkeypatch):
    """Else each of them would read what rank 0 is to read."""
    with pytest.raises(UsageError, match=r"one of 3 ranks[\s\S]*found: world_size=3"):
        find_world(None, 3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"one of 2 ranks[\s\S]*found: WORLD_SIZE=2, but no RANK"):
        find_world(None, None)
    assert find_world(1, None) == World(1, 2)
    assert find_world(0, 1) == World(0, 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert find_world(None, None) == World(0, 1)


def test_ranks_of_one_machine_share_its_processors(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    alone = default_threads()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(10 * alone))
    assert default_threads() == 1
