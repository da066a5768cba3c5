"""States that were mutated: refused, or continued exactly where they say (S4, X1, X4)."""

import copy
import random
import tracemalloc
from functools import cache, partial

import pytest

import shardkit
from shardkit.errors import UsageError
from shardkit.stream import Loader
from shardkit.torch import StreamingDataset
from tests.stream.data import write_documents, write_photos

DEEP = []
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


def position(path, state=..., epoch=0, batch_size=1):
    """One worker's way through an epoch, as torchdata's StatefulDataLoader saves it."""
    dataset = StreamingDataset(path, shuffle=True, seed=3, batch_size=batch_size)
    dataset.set_epoch(epoch)
    found = iter(dataset)
    if state is not ...:
        found.load_state_dict(state)
    return found


@pytest.fixture(
    scope="module", params=["fixed", "mixture", "sampled", "planned", "packed", "worker"]
)
def door(request, tmp_path_factory):
    """What continues a state, one sample or micro-batch after the other."""
    folder = tmp_path_factory.mktemp(request.param)
    photos = write_photos(folder / "a", samples=37)
    if request.param == "worker":
        return partial(position, photos)
    if request.param in ("planned", "packed"):
        texts = write_documents(folder / "c", [1 + 7 * n % 23 for n in range(50)])
        batchings = {"planned": shardkit.Dynamic(64), "packed": shardkit.Pack(32, 2)}
        return partial(load, texts, batching=batchings[request.param])
    single = partial(load, fields=["label"], batch_size=1)
    if request.param == "mixture":
        other = write_photos(folder / "b", "arrow", samples=13)
        return partial(single, [photos, other], weights=[1, 3])
    more = {"sampling": shardkit.Weighted(range(37))} if request.param == "sampled" else {}
    return partial(single, photos, **more)


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


def test_a_mutated_state_is_refused_or_continued_exactly(door, large, request):
    """No length in one takes memory either: what is allocated before a refusal is counted."""

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

    dice = random.Random(request.node.name)
    found = door()
    states = [found.state_dict(), *(found.state_dict() for _ in iter(found))]
    seen = {"refused": 0, "continued": 0}
    tracemalloc.start()
    try:
        for _ in range(300 if large else 15):
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
                expected = places(epoch + 1)[0, 0]  # an epoch's end is the next one's beginning
            assert got == expected, state
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    print(seen)
    assert seen["continued"] > 0


@pytest.mark.parametrize("name", ["order_version", "epoch", "samples", "batches", "stream"])
def test_the_error_of_a_state_names_the_field(door, name):
    words = f"not a valid state of a Loader: invalid {name}"
    with pytest.raises(UsageError, match=words) as caught:
        door({**door().state_dict(), name: -1})
    assert caught.value.found == "-1"


def test_a_deeply_nested_value_differs_from_that_of_the_stream(door):
    nested = []
    for _ in range(100_000):
        nested = [nested]
    state = door().state_dict()
    for name in ("seed", "datasets", "extra"):
        with pytest.raises(UsageError, match="another dataset or other settings") as caught:
            door({**state, "stream": {**state["stream"], name: nested}})
        assert caught.value.expected.startswith(f"{name} [[")


def test_a_place_that_the_stream_does_not_have_is_refused(tmp_path):
    """It was continued: with samples twice, or with none."""
    texts = write_documents(tmp_path / "c", [1 + 7 * n % 23 for n in range(50)])
    loader = load(texts, batching=shardkit.Dynamic(64))
    state = loader.state_dict()
    for place in [{"samples": 7}, {"samples": 55}, {"batches": 99}, {"samples": 50, "batches": 1}]:
        with pytest.raises(UsageError, match="invalid samples, batches") as caught:
            loader.load_state_dict({**state, **place})
        assert "0 to 50 samples, a multiple of 11" in caught.value.expected


def test_a_worker_does_not_continue_with_batches_of_another_size_or_beside_others(tmp_path):
    """Workers stand at several places, between which samples would be lost."""
    photos = write_photos(tmp_path / "a", samples=37)
    found = position(photos)
    next(found), next(found)
    state = found.state_dict()
    with pytest.raises(UsageError, match="invalid number"):
        position(photos, state, batch_size=4)
    with pytest.raises(UsageError, match="workers"):
        found.load_state_dict({**state, "stream": {**state["stream"], "workers": 4}})
