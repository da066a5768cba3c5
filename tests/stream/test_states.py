"""States that were mutated: refused, or continued exactly where they say (S4, X1, X4)."""

from __future__ import annotations

import copy
import random
import sys
from functools import cache

import pytest

import shardkit
from shardkit.errors import UsageError
from shardkit.stream import Loader
from shardkit.torch import StreamingDataset
from tests.stream.data import write_documents, write_photos

DEEP: list = []
for _ in range(20_000):
    DEEP = [DEEP]
VALUES = [
    *(-(2**63), -5, -1, 0, 1, 2, 7, 11, 22, 37, 50, 10**6, 2**31 - 1, 2**31, 2**63, 10**30),
    *(1.0, 1.5, float("nan"), float("inf"), "3", "", "x" * 10**6, b"7", None, True, False),
    *([], [1], [["samples", 7]], {}, {"samples": 7}, DEEP),
]


def load(paths, state=..., epoch=None, **options):
    loader = Loader(paths, shuffle=True, seed=3, threads=0, window=11, **options)
    if epoch is not None:
        loader.set_epoch(epoch)
    if state is not ...:
        loader.load_state_dict(state)
    return loader


def position(path, state=..., epoch=0):
    """One worker's way through an epoch, as torchdata's StatefulDataLoader saves it."""
    dataset = StreamingDataset(path, shuffle=True, seed=3, batch_size=1)
    dataset.set_epoch(epoch)
    found = iter(dataset)
    if state is not ...:
        found.load_state_dict(state)
    return found


WAYS = ["fixed", "mixture", "sampled", "planned", "packed", "worker"]


@pytest.fixture(scope="module", params=WAYS)
def door(request, tmp_path_factory):
    """What continues a state, one sample or micro-batch after the other."""
    folder = tmp_path_factory.mktemp(request.param)
    photos = write_photos(folder / "a", samples=37)
    other = write_photos(folder / "b", "arrow", samples=13)
    texts = write_documents(folder / "c", [1 + 7 * n % 23 for n in range(50)])
    return {
        "fixed": lambda *a, **k: load(photos, *a, **k, fields=["label"], batch_size=1),
        "mixture": lambda *a, **k: load(
            [photos, other], *a, **k, fields=["label"], batch_size=1, weights=[1, 3]
        ),
        "sampled": lambda *a, **k: load(
            photos, *a, **k, fields=["label"], batch_size=1, sampling=shardkit.Weighted(range(37))
        ),
        "planned": lambda *a, **k: load(texts, *a, **k, batching=shardkit.Dynamic(64)),
        "packed": lambda *a, **k: load(texts, *a, **k, batching=shardkit.Pack(32, 2)),
        "worker": lambda *a, **k: position(photos, *a, **k),
    }[request.param]


def content(batch):
    """A batch, to be compared: packed rows have no keys."""
    return batch.get("__key__") or batch["tokens"].tolist()


def mutated(state, dice):
    state = copy.deepcopy(state)
    for _ in range(dice.choice([1, 1, 1, 2])):
        inner = state["stream"] if isinstance(state.get("stream"), dict) else state
        fields = dice.choice([state, state, inner])
        name = dice.choice([*fields, "extra"])
        how = dice.random()
        if how < 0.1:
            fields.pop(name, None)
        elif how < 0.3 and type(fields.get(name)) is int:
            fields[name] += dice.choice([-11, -1, 1, 4, 11])
        else:
            fields[name] = dice.choice(VALUES)
    return state if dice.random() < 0.97 else dice.choice(VALUES)


def peak():
    """The most memory that this process has held, in kB; 0 where it is counted otherwise."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_a_mutated_state_is_refused_or_continued_exactly(door, large):
    before = peak()

    @cache
    def places(epoch):
        """By place, what is left of an epoch; a window's end is the beginning of the next."""
        found, whole = door(epoch=epoch), []
        marks = [found.state_dict()]
        batches = iter(found)
        for batch in batches:
            whole.append(content(batch))
            marks.append(found.state_dict())
        rest = {}
        for at, mark in enumerate(marks):
            rest[mark["samples"], mark["batches"]] = whole[at:]
            if mark["batches"]:
                rest[min(mark["samples"] + 11, 50), 0] = whole[at:]
        rest[0, 0] = whole
        return rest

    seed = random.randrange(10**9)
    print(f"seed {seed}")
    dice = random.Random(seed)
    found, states = door(), []
    batches = iter(found)
    states.append(found.state_dict())
    for _ in batches:
        states.append(found.state_dict())
    seen = {"refused": 0, "continued": 0}
    for _ in range(400 if large else 20):
        state = mutated(dice.choice(states), dice)
        try:
            got = [content(batch) for batch in door(state)]
        except UsageError:
            seen["refused"] += 1
            continue
        seen["continued"] += 1
        epoch, place = int(state["epoch"]), (int(state["samples"]), int(state["batches"]))
        expected = places(epoch)[place]
        if not expected and "number" not in state:
            expected = places(epoch + 1)[0, 0]  # the end of an epoch is the beginning of the next
        assert got == expected, state
    print(seen)
    assert peak() - before < 1 << 20
    assert seen["continued"] > 0 or not large


FIELDS = ["order_version", "epoch", "samples", "batches", "stream"]


@pytest.mark.parametrize("name", FIELDS)
def test_the_error_of_a_state_names_the_field(door, name):
    state = door().state_dict()
    with pytest.raises(
        UsageError, match=f"not a valid state of a Loader: invalid {name}"
    ) as caught:
        door({**state, name: -1})
    assert caught.value.found == "-1"


def test_a_place_that_the_stream_does_not_have_is_refused(tmp_path):
    """It was continued: with samples twice, or with none."""
    texts = write_documents(tmp_path / "c", [1 + 7 * n % 23 for n in range(50)])
    loader = load(texts, batching=shardkit.Dynamic(64))
    state = loader.state_dict()
    for place in [{"samples": 7}, {"samples": 55}, {"batches": 99}, {"samples": 50, "batches": 1}]:
        with pytest.raises(UsageError, match="invalid samples, batches") as caught:
            loader.load_state_dict({**state, **place})
        assert "0 to 50 samples, a multiple of 11" in caught.value.expected


def test_a_worker_does_not_continue_with_batches_of_another_size(tmp_path):
    """Workers stand at several places, between which samples would be lost."""
    photos = write_photos(tmp_path / "a", samples=37)
    found = position(photos)
    next(found), next(found)
    state = found.state_dict()
    other = iter(StreamingDataset(photos, shuffle=True, seed=3, batch_size=4))
    with pytest.raises(UsageError, match="invalid number"):
        other.load_state_dict(state)
