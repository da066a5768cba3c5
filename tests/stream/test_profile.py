"""Where the time of an epoch goes: stages add up to the wall, and each gets what is its own."""

import time
from types import SimpleNamespace

import pytest

import shardkit
from shardkit.errors import UsageError
from shardkit.helpers import clock
from shardkit.helpers.clock import DATA, DECODER, IDLE, STAGES, Clock, Spent
from shardkit.stream import Loader
from shardkit.stream.profile import Profile, Times
from tests.conftest import write_images


class Hand:
    """A clock that stands still but when it is turned on, in place of those of the system."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        fake = SimpleNamespace(perf_counter=lambda: self.now, thread_time=lambda: self.now / 4)
        for module in ("shardkit.helpers.clock", "shardkit.stream.profile"):
            monkeypatch.setattr(f"{module}.time", fake)

    def turn(self, seconds, value=None):
        self.now += seconds
        return value


@pytest.fixture
def hand(monkeypatch):
    return Hand(monkeypatch)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    write_images(folder / "in", classes=2, each=20)
    shardkit.convert(folder / "in", "wds", folder / "out", workers=0)
    return folder / "out"


def loader(path, steps=(), **options):
    transforms = {"image": [shardkit.CenterCrop(16), *steps]}
    return Loader(path, batch_size=8, transforms=transforms, profile=True, **options)


def test_each_stage_gets_what_is_its_own_and_all_are_the_wall(photos, hand, monkeypatch):
    def slow(samples):
        return hand.turn(8, {"label": [sample["label"] for sample in samples]})

    made = loader(photos, [lambda pixels: hand.turn(1, pixels)], threads=0, collate=slow)
    samples, read = made.dataset.stream.samples, made.dataset.stream.samples.read_many
    monkeypatch.setattr(samples, "read_many", lambda *which: hand.turn(16, read(*which)))
    began = hand.now
    for _ in made:
        hand.turn(16)
    times = made.profile
    assert {stage: spent.wall for stage, spent in times.spent.items() if spent.wall} == {
        "read": 40 * 2, "transform": 40 * 1, "collate": 5 * 8,
    }  # fmt: skip
    assert all(spent.busy == spent.wall / 4 for spent in times.spent.values())
    assert times.step == 5 * 16
    assert times.seconds == times.step + times.making == hand.now - began
    assert times.share("read") == 0.5
    assert (times.threads, times.samples, times.batches) == (0, 40, 5)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_are_idle_where_the_loop_takes_longer(photos, threads):
    """By the clocks of the system, and so only what holds however long anything takes."""
    made = loader(photos, threads=threads, prefetch=2)
    began = time.perf_counter()
    for _ in made:
        pass
    wall, times = time.perf_counter() - began, made.profile
    assert (times.samples, times.batches) == (40, 5)
    assert 1 <= times.threads <= threads  # no more than had work
    assert times.spent[IDLE].wall > 0
    assert 0 < times.seconds <= wall
    assert 0 < times.data + times.step <= times.seconds
    assert 0 < sum(spent.wall for spent in times.spent.values()) <= threads * wall
    assert all(spent.busy >= 0 for spent in times.spent.values())


def test_an_epoch_that_is_left_early_or_fails_is_counted_so_far(photos, hand):
    made = loader(photos, threads=1)
    iteration = iter(made)
    next(iteration)
    iteration.close()
    seconds = made.profile.seconds
    hand.turn(9)
    assert made.profile.seconds == seconds
    assert made.profile.batches == 1
    for _ in made:
        break
    del iteration
    assert made.profile.batches == 1  # of the next one

    def failing(pixels):
        raise ValueError("no")

    made = loader(photos, [failing], threads=1)
    with pytest.raises(shardkit.SampleError, match="no"):
        list(made)
    assert made.profile.batches == made.profile.rate == 0
    assert "0 samples" in str(made.profile)


def test_a_loader_that_was_not_asked_has_no_clocks(photos, monkeypatch):
    def fail(*args):
        raise AssertionError("a clock was read")

    monkeypatch.setattr(Clock, "__init__", fail)
    monkeypatch.setattr(Clock, "enter", fail)
    made = Loader(photos, batch_size=8, fields=["label"], threads=2)
    assert len(list(made)) == 5
    with pytest.raises(UsageError, match="has no profile"):
        _ = made.profile


@pytest.mark.parametrize("threads", [0, 2])
def test_waiting_for_a_gpu_that_decodes_is_decoding(hand, threads):
    profile = Profile()
    profile._workers = [Clock(IDLE) for _ in range(threads)]
    profile.ask()
    for stage, seconds in ((DECODER, 2), (DATA, 1)):
        clock.enter(stage)
        hand.turn(seconds)
    profile.give({"valid": [True] * 12})
    hand.turn(3)
    profile.end()
    times, many = profile.times, max(threads, 1)
    assert (times.seconds, times.step, times.waiting) == (6, 3, 0.5)
    assert times.data == (3 if threads else 1)
    assert times.spent["decode"].wall == 2 * many
    assert times.spent[IDLE].wall == 4 * threads
    assert times.limit("decode") == times.loading == 12 / 2


def test_times_add_up_and_print():
    one = Times(2.0, 2, 100, 10, 1.5, 0.5, {"read": Spent(1.0, 0.5), IDLE: Spent(1.0, 0.0)})
    both = one + one
    assert (both.seconds, both.samples, both.threads) == (4.0, 200, 2)
    assert both.rate == one.rate == 50
    assert both.limit("read") == both.loading == both.stepping == 200
    assert both.limit("decode") is None
    assert (both.waiting, both.processors) == (0.75, 0.25)
    assert set(both.spent) == {*STAGES, IDLE}
    assert Times() + one == Times(**{**vars(one), "spent": clock.total([one.spent])})
    assert "50/s, made by 2 threads" in str(one)
    assert one.to_dict()["stages"]["read"] == {
        "seconds": 1.0, "processor_seconds": 0.5, "share": 1.0, "limit": 200.0,
    }  # fmt: skip


def test_a_clock_that_stopped_stays_so(hand):
    one = Clock("read")
    hand.turn(1)
    one.enter("decode")
    hand.turn(2)
    one.stop()
    hand.turn(4)
    one.enter("read")
    assert {stage: spent.wall for stage, spent in one.read().items()} == {"read": 1, "decode": 2}
    clock.enter("read")  # in a thread without one: nothing
