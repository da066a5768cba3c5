"""Where the time of an epoch goes: stages add up to the wall, and each gets what is its own."""

from __future__ import annotations

import time

import pytest

import shardkit
from shardkit import clock
from shardkit.clock import IDLE, STAGES, Clock, Spent
from shardkit.errors import UsageError
from shardkit.stream import Loader
from shardkit.stream.profile import Times
from tests.conftest import write_images

NAP = 0.01

pytestmark = pytest.mark.xdist_group("timed")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    write_images(folder / "in", classes=2, each=20, kilobytes=3)
    shardkit.convert(folder / "in", "wds", folder / "out", workers=0)
    return folder / "out"


def loader(path, **options):
    steps = {"image": [shardkit.CenterCrop(16), *options.pop("steps", [])]}
    return Loader(path, batch_size=8, transforms=steps, profile=True, **options)


def napping(pixels):
    time.sleep(NAP)
    return pixels


@pytest.mark.large
@pytest.mark.parametrize("threads", [0, 1, 3])
def test_all_stages_add_up_to_the_wall(photos, threads):
    made = loader(photos, threads=threads, steps=[napping], prefetch=2)
    # Between two readings of clocks the machine may do something else: that is in neither sum.
    assert min(missed(made, threads) for _ in range(3)) < 0.05
    times = made.profile
    assert (times.threads, times.samples, times.batches) == (threads, 40, 5)


def missed(made, threads):
    """The largest part of the wall that stages and it differ by, in an epoch."""
    began = time.perf_counter()
    for _ in made:
        time.sleep(2 * NAP)
    wall = time.perf_counter() - began
    times = made.profile
    loop, making = times.data + times.step, sum(spent.wall for spent in times.spent.values())
    sums = [loop, making / threads] if threads else [loop + making]
    return max(abs(1 - seconds / wall) for seconds in (times.seconds, *sums))


def test_each_stage_gets_what_is_its_own(photos, monkeypatch):
    made = loader(photos, threads=1, steps=[napping])
    list(made)
    assert made.profile.share("transform") > 0.5

    def slow(samples):
        time.sleep(8 * NAP)
        return {"label": [sample["label"] for sample in samples]}

    made = loader(photos, threads=1, collate=slow)
    list(made)
    assert made.profile.share("collate") > 0.5

    made = loader(photos, threads=1)
    for _ in made:
        time.sleep(8 * NAP)
    times = made.profile
    assert times.step >= 5 * 8 * NAP
    assert times.spent[IDLE].wall > times.making

    read = made.dataset.stream.samples.read
    monkeypatch.setattr(
        made.dataset.stream.samples, "read", lambda number: (time.sleep(NAP), read(number))[1]
    )
    list(made)
    assert made.profile.share("read") > 0.5
    assert made.profile.spent["read"].busy < made.profile.spent["read"].wall / 2


def test_an_epoch_that_is_left_early_is_counted_so_far(photos):
    made = loader(photos, threads=1)
    iteration = iter(made)
    next(iteration)
    iteration.close()
    seconds = made.profile.seconds
    time.sleep(NAP)
    assert made.profile.seconds == seconds
    assert made.profile.batches == 1
    for _ in made:
        break
    del iteration
    assert made.profile.batches == 1  # of the next one


def test_what_fails_is_counted_until_then(photos):
    def failing(pixels):
        raise ValueError("no")

    made = loader(photos, threads=1, steps=[failing])
    with pytest.raises(shardkit.SampleError, match="no"):
        list(made)
    assert made.profile.batches == 0
    assert made.profile.rate == 0
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


def test_times_add_up_and_print():
    one = Times(2.0, 2, 100, 10, 1.5, 0.5, {"read": Spent(1.0, 0.5), IDLE: Spent(1.0, 0.0)})
    both = one + one
    assert (both.seconds, both.samples, both.threads) == (4.0, 200, 2)
    assert both.rate == one.rate == 50
    assert both.limit("read") == 200
    assert both.limit("decode") is None
    assert both.loading == 200
    assert both.stepping == 200
    assert both.waiting == 0.75
    assert both.processors == 0.25
    assert set(both.spent) == {*STAGES, IDLE}
    assert Times() + one == Times(**{**vars(one), "spent": clock.total([one.spent])})
    assert "50/s, made by 2 threads" in str(one)
    assert one.to_dict()["stages"]["read"] == {
        "seconds": 1.0, "processor_seconds": 0.5, "share": 1.0, "limit": 200.0,
    }  # fmt: skip


def test_a_clock_that_stopped_stays_so():
    one = Clock("read")
    one.enter("decode")
    one.stop()
    seen = one.read()
    time.sleep(NAP)
    one.enter("read")
    assert one.read() == seen
    assert set(seen) == {"read", "decode"}
    clock.enter("read")  # in a thread without one: nothing
