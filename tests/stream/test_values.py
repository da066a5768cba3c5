"""What reaches the training loop is what was asked for, whichever door it comes through."""

from __future__ import annotations

import copy
import threading
from contextlib import closing

import numpy as np
import pytest
import torch

import shardkit
import shardkit.stream
from shardkit.schema import Json
from shardkit.stream import batches
from shardkit.stream.batch_sizes import size_of
from shardkit.stream.batches import BatchMaker
from shardkit.stream.reading import Samples
from shardkit.stream.schedule import START
from shardkit.torch import Loader, StreamingDataset
from shardkit.transforms.transforms import Transforms
from tests.stream.data import same, write, write_documents, write_photos

CROP = shardkit.CenterCrop(16)
DECODED = {"image": shardkit.Decode()}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("values") / "photos", samples=8)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("values") / "d", [1 + n % 5 for n in range(80)])


# --- bfloat16 ------------------------------------------------------------------------------------


def named_pixels(samples):
    return {"pixels": np.stack([sample["image"] for sample in samples])}


def brightness(samples):
    """A field of the same name, of another type."""
    return {"image": np.stack([sample["image"].astype(np.float32) for sample in samples])}


def pixels_in_dicts(samples):
    return {"targets": [{"pixels": sample["image"]} for sample in samples]}


def in_dicts(path, **options):
    targets = first(Loader, "targets", collate=pixels_in_dicts)(path, **options)
    return [target["pixels"] for target in targets]


def first(kind, field, **more):
    return lambda path, **options: next(iter(kind(path, **options, **more)))[field]


def opened(path, batch_size, transforms, fields):
    dataset = shardkit.open(path, transforms=transforms)
    return np.stack([dataset[number][fields[0]] for number in range(batch_size)])


NAMED, SAME = {"collate": named_pixels}, {"collate": brightness}
DOORS = {
    "Loader": first(Loader, "image"),
    "Loader, own collate": first(Loader, "image", **SAME),
    "Loader, in dicts": in_dicts,
    "Loader, another name": first(Loader, "pixels", **NAMED),
    "StreamingDataset": first(StreamingDataset, "image"),
    "StreamingDataset, another name": first(StreamingDataset, "pixels", **NAMED),
    "without torch": first(shardkit.stream.Loader, "image"),
    "without torch, another name": first(shardkit.stream.Loader, "pixels", **NAMED),
    "StreamingDataset without torch": first(shardkit.stream.StreamingDataset, "image"),
    "open": opened,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("sized", [True, False])
def test_bfloat16_is_numbers_and_not_their_bits(photos, door, sized):
    first = CROP if sized else shardkit.Resize(16)  # of known size, and not
    made = {}
    for dtype in ("float32", "bfloat16"):
        normalize = shardkit.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.25), dtype=dtype)
        options = {"fields": ["image"], "transforms": {"image": [first, normalize]}}
        values = DOORS[door](photos, batch_size=4, **options)
        made[dtype] = np.stack([np.asarray(v.float() if torch.is_tensor(v) else v) for v in values])
    assert made["float32"].any()
    numbers = made["bfloat16"].astype(np.float32)
    assert np.allclose(made["float32"], numbers, rtol=2**-8, atol=0)


# --- what the user writes into a batch -----------------------------------------------------------


def spoil(value):
    """Change all arrays, tensors and lists in a batch."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            spoil(one)
    if isinstance(value, list):
        value.reverse()
    elif hasattr(value, "dtype"):
        value[...] = value == 0


WRITTEN = {
    "rows": ("photos", {"batch_size": 3}),
    "decoded": ("photos", {"batch_size": 3, "cache": "decoded", "transforms": DECODED}),
    "collate": (
        "photos",
        {"batch_size": 3, "fields": ["label"], "collate": shardkit.pad_collate()},
    ),
    "lists": ("documents", {"batch_size": 3, "cache": "memory"}),
    "Pack": ("documents", {"batching": shardkit.Pack(8, 2)}),
    "Bucket": ("documents", {"batching": shardkit.Bucket(4, 2)}),
    "Dynamic": ("documents", {"batching": shardkit.Dynamic(16)}),
}
KINDS = [shardkit.stream.Loader, shardkit.stream.StreamingDataset, Loader, StreamingDataset]


@pytest.mark.parametrize("case", WRITTEN)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_into_a_batch_does_not_come_back(request, case, kind):
    fixture, options = WRITTEN[case]
    path = request.getfixturevalue(fixture)
    expected, batches = list(kind(path, **options)), kind(path, **options)
    for _ in range(2):
        batches.set_epoch(0)
        for batch, right in zip(batches, expected, strict=True):
            assert same(batch, right)
            spoil(batch)
            assert not same(batch["valid"], right["valid"])


@pytest.mark.parametrize("case", WRITTEN)
def test_what_is_written_into_a_batch_is_not_written_into_its_step(request, case):
    """Which a schedule may keep for the next iteration."""
    fixture, options = WRITTEN[case]
    dataset = shardkit.stream.StreamingDataset(request.getfixturevalue(fixture), **options)
    step, maker = dataset.schedule().step(0, START), BatchMaker(dataset.stream)
    expected = maker.make(copy.deepcopy(step)).batch
    spoil(maker.make(step).batch)
    assert same(maker.make(step).batch, expected)


BATCHINGS = [shardkit.Pack(8, 2), shardkit.Bucket(4, 2), shardkit.Dynamic(16)]


@pytest.mark.parametrize("batching", BATCHINGS, ids=lambda batching: type(batching).__name__)
def test_loaders_and_iterations_of_one_dataset_plan_each_window_once(
    documents, monkeypatch, batching
):
    """They shared one plan, which each of them made anew at each step."""
    plans, plan = [], type(batching).plan
    monkeypatch.setattr(type(batching), "plan", lambda *at: plans.append(at) or plan(*at))
    four = {"batching": batching, "window": 20}  # of 80 documents
    dataset = shardkit.stream.StreamingDataset(documents, **four)

    def planned(one, other, at_each_step=lambda: None):
        plans.clear()
        next(other)  # so that they are at different windows
        assert sum(1 for _ in zip(one, other, strict=False) if at_each_step() is None) > 12
        return len(plans)

    one, other = (shardkit.stream.Loader(dataset, threads=0, prefetch=1) for _ in range(2))
    other.set_epoch(1)
    assert planned(iter(one), iter(other)) <= 8
    assert planned(iter(one), iter(one)) <= 8
    assert planned(dataset.iterate(0), dataset.iterate(1)) <= 8

    def looked_at():  # as by progress bars
        for loader in (one, other):
            assert len(loader) >= loader.remaining
            assert f"{loader.remaining:,} left" in repr(loader)

    assert planned(iter(one), iter(other), looked_at) <= 8 + 8

    train, validation = (
        shardkit.stream.StreamingDataset(documents, **four, rank=rank, world_size=3)
        for rank in (0, 2)
    )
    plans.clear()
    steps = 0
    for _ in train:
        steps += 1
        validation.set_epoch(0)
        assert sum(1 for _ in validation) > 3
    assert len(plans) == 4 + 4 * steps, "a step across two windows plans neither of them again"


# --- what belongs together -----------------------------------------------------------------------


MASK, BOXES = shardkit.Array("uint8", (None, None)), shardkit.Array("float32", (None, 4))
FLIP = shardkit.RandomHorizontalFlip()
LEFT = [
    ({"mask": shardkit.Image()}, {"image": [CROP, FLIP], "mask": [CROP, FLIP]}, None),
    ({"mask": MASK, "bboxes": BOXES}, {("image", "mask"): CROP}, ("image", "mask", "bboxes")),
    ({"boxes": BOXES}, {"image": [CROP, len]}, None),
    ({"boxes": BOXES}, {"image": len}, None),
    ({"mask": MASK}, {"image": [shardkit.Decode(), len]}, None),
    ({"other": shardkit.Image(), "mask": MASK}, {"image": CROP, "other": CROP}, None),
]


@pytest.mark.parametrize(("more", "transforms", "along"), LEFT)
def test_what_is_on_an_image_moves_with_it_or_the_transforms_are_refused(more, transforms, along):
    schema = shardkit.Schema({"image": shardkit.Image(), **more})
    with pytest.raises(shardkit.UsageError, match="would be moved, but not what is on it") as error:
        Transforms(transforms, schema)
    if along is not None:  # what the error says to do
        assert f"transforms={{{along}: [...]}}" in error.value.fix
        Transforms({along: CROP}, schema)
    if "len" in str(transforms):
        assert "if it takes whole samples" in error.value.fix
        Transforms(len, schema)


@pytest.mark.parametrize(
    ("more", "fields"),
    [
        ({"boxes": BOXES, "label": shardkit.Int()}, ("image", "boxes")),
        (
            {"boxes": BOXES, "iscrowd": shardkit.Array("int64", (None,))},
            ("image", "boxes", "iscrowd"),
        ),
        ({"mask": shardkit.Image(), "other": BOXES}, ("image", "mask")),
        ({}, ("image",)),
    ],
)
def test_transforms_of_an_image_alone_move_what_is_on_it(more, fields):
    schema = shardkit.Schema({"image": shardkit.Image(), **more})
    for steps in (CROP, [shardkit.Decode(), FLIP]):
        [chain] = Transforms({"image": steps}, schema).chains
        assert chain.fields == fields
    [chain, _] = Transforms(
        {"image": CROP, "label": str}, shardkit.Schema({**schema, "label": shardkit.Int()})
    ).chains
    assert chain.fields == fields


def test_what_does_not_move_or_is_not_on_the_image_may_stay(photos):
    schema = shardkit.Schema(
        {"image": shardkit.Image(), "mask": MASK, "label": shardkit.Int(), "other": BOXES}
    )
    Transforms({"image": shardkit.Decode()}, schema)
    Transforms({"image": shardkit.Resize(8), "mask": lambda mask: mask[::2]}, schema)
    Transforms({("image", "mask"): [CROP, FLIP]}, schema)


# --- how much is made ahead ----------------------------------------------------------------------


def begun_batches(monkeypatch, hear=lambda count: None):
    """The batches that loaders begin to make, as a list that grows; `hear` is told its length."""
    begun, begin = [], BatchMaker.begin

    def counted(*at):
        begun.append(at)
        hear(len(begun))
        return begin(*at)

    monkeypatch.setattr(BatchMaker, "begin", counted)
    return begun


@pytest.mark.parametrize(("field", "ahead"), [("image", 1), ("label", 3)])
def test_what_is_made_ahead_stays_within_prefetch_bytes(photos, monkeypatch, field, ahead):
    """From the first batch on, and for values that batches hold in lists, as encoded images."""
    begun = begun_batches(monkeypatch)
    options = {"fields": [field], "threads": 1, "prefetch": 3, "prefetch_bytes": 4000}
    with closing(iter(Loader(photos, batch_size=1, **options))) as batches:
        for taken in (1, 2, 3):
            value = next(batches)[field][0]
            assert field == "label" or 2000 < len(value) < 4000
            # One, and as many as are finished: the thread may have gone on meanwhile.
            assert taken + min(taken, ahead) <= len(begun) <= taken + ahead


def stored(value):
    """The bytes of a value's contents alone."""
    if isinstance(value, dict | list | tuple):
        return sum(map(stored, value.values() if isinstance(value, dict) else value))
    return getattr(value, "nbytes", 0) or len(value if isinstance(value, bytes) else str(value))


def varied(samples):
    for n in range(samples):
        few = n % 4 + 1  # so that batches of four have the same size
        yield {
            "boxes": np.full((50 * few, 4), n, np.float32),
            "text": "word " * (100 * few),
            "meta": {"ids": ["x" * 100] * (5 * few), "more": [{"n": [n] * 200}]},
        }


def own(samples):
    return {"one": {"list": [np.ones(500 + 8 * len(samples[0]["text"]))], "pair": ("a" * 300, 1)}}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    kinds = {"boxes": BOXES, "text": shardkit.Text(), "meta": shardkit.Json()}
    return write(tmp_path_factory.mktemp("values") / "mixed", "wds", kinds, varied(40))


@pytest.fixture(scope="module")
def growing(tmp_path_factory):
    values = ({"data": bytes(10_000 if n < 8 else 200_000)} for n in range(24))  # in shards of 8
    path = tmp_path_factory.mktemp("values") / "growing"
    return write(path, "wds", {"data": shardkit.Bytes()}, values)


@pytest.fixture(scope="module")
def long_documents(tmp_path_factory):
    lengths = [100 * (1 + n * 7 % 4) for n in range(80)]
    return write_documents(tmp_path_factory.mktemp("values") / "long", lengths)


AHEAD = {
    "boxes": ("mixed", {"fields": ["boxes"], "batch_size": 4}),
    "text": ("mixed", {"fields": ["text"], "batch_size": 4}),
    "JSON": ("mixed", {"fields": ["meta"], "batch_size": 4}),
    "growing": ("growing", {"batch_size": 1}),
    "collate": ("mixed", {"fields": ["text"], "batch_size": 4, "collate": own}),
    "lists": ("long_documents", {"batch_size": 4}),
    "padded": ("long_documents", {"batch_size": 4, "collate": shardkit.pad_collate()}),
    "Pack": ("long_documents", {"batching": shardkit.Pack(1000, 2)}),
    "Bucket": ("long_documents", {"batching": shardkit.Bucket(4, 4)}),
    "Dynamic": ("long_documents", {"batching": shardkit.Dynamic(4000)}),
}


@pytest.mark.parametrize("case", AHEAD)
@pytest.mark.parametrize("kind", [shardkit.stream.Loader, Loader])
def test_no_way_of_batching_takes_more_than_prefetch_bytes(request, monkeypatch, case, kind):
    """Or more than one batch, in the first epoch as in the next."""
    fixture, options = AHEAD[case]
    path = request.getfixturevalue(fixture)
    sizes = [[stored(batch) for batch in epoch] for epoch in [kind(path, **options)] * 2]
    most = 3.4 * max(map(max, sizes))
    loader = kind(path, threads=1, prefetch=16, prefetch_bytes=int(most), **options)
    begun = begun_batches(monkeypatch)
    for epoch in sizes:
        begun.clear()
        for taken, _ in enumerate(loader, 1):
            ahead = epoch[taken : len(begun)]
            assert sum(ahead) <= most or len(ahead) == 1
            known = 1 < taken < len(epoch) - 1
            assert len(ahead) > 1 or not known or case == "JSON"  # of many objects


def test_the_next_epoch_knows_the_sizes_of_the_last(photos, monkeypatch):
    """It made one batch alone, as if it were the first."""
    several, finish = threading.Event(), BatchMaker.finish
    loader = Loader(photos, batch_size=1, fields=["image"], threads=1, prefetch=3)
    assert len(list(loader)) == 8
    begun_batches(monkeypatch, hear=lambda count: count == 4 and several.set())
    monkeypatch.setattr(BatchMaker, "finish", lambda *at: several.wait(20) and finish(*at))
    with closing(iter(loader)) as batches:
        assert next(batches)["__key__"] == ["0000"]


@pytest.mark.parametrize("kind", [shardkit.stream.Loader, Loader])
def test_json_may_be_as_deeply_nested_as_python_parses(kind, tmp_path):
    deep = 0
    for level in range(900):
        deep = [deep] if level % 2 else {"a": deep}
    path = write(tmp_path / "deep", "wds", {"meta": Json()}, [{"meta": deep}] * 2)
    (batch,) = kind(path, batch_size=2, threads=0)
    assert repr(batch["meta"]) == repr([deep] * 2)


def test_what_refers_to_itself_is_counted_once():
    batch = {"meta": [["a"]]}
    size = size_of(batch)
    batch["meta"][0].append(batch["meta"])
    assert size <= size_of(batch) < 2 * size


def test_a_few_samples_are_read_one_by_one(photos, few, monkeypatch):
    monkeypatch.setattr(batches, "_FEW", few)
    counts, read_many = [], Samples.read_many
    monkeypatch.setattr(
        Samples, "read_many", lambda self, n, *most: counts.append(len(n)) or read_many(self, n)
    )
    few_at_a_time, all_at_once = (
        [one for batch in Loader(photos, batch_size=size, threads=0) for one in batch["image"]]
        for size in (few - 1, few)
    )
    assert counts == [few]
    assert few_at_a_time[:few] == all_at_once


@pytest.mark.parametrize("kind", [Loader, StreamingDataset])
def test_arrays_of_an_unknown_shape_are_one_array_if_they_are_alike(tmp_path, kind):
    schema = {"same": shardkit.Array(), "other": shardkit.Array()}
    with shardkit.create(tmp_path / "x", "wds", schema) as writer:
        for n in range(8):
            other = np.zeros(3, "<i4" if n % 4 else "<f4") if n < 4 else np.zeros(n)
            writer.write({"same": np.full((2, 3), n), "other": other})
    for number, batch in enumerate(kind(tmp_path / "x", batch_size=4)):
        assert batch["same"][:, 0, 0].tolist() == [*range(4 * number, 4 * number + 4)]
        assert [len(values) for values in batch["other"]] == ([4, 5, 6, 7] if number else [3] * 4)
        assert isinstance(batch["other"], list)
