"""The Loader: what comes, in which order, from where on; and that it stops cleanly."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import PIL.Image
import pytest
import simplejpeg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.errors import (
    NotFoundError,
    SampleError,
    ShardkitError,
    ShardkitWarning,
    UsageError,
)
from shardkit.stream import Loader, StreamingDataset
from tests.codecs.sample_images import encoded, photo_like
from tests.conftest import IMAGE_FORMATS, examples
from tests.stream.data import (
    keys,
    real_keys,
    same,
    through_json,
    write_documents,
    write_photos,
    write_tokens,
)

CROP = {"image": [shardkit.RandomResizedCrop(16), shardkit.RandomHorizontalFlip()]}


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """The same samples in the same shards, in every format."""
    root = tmp_path_factory.mktemp("every")
    return {format: write_photos(root / format, format) for format in IMAGE_FORMATS}


@pytest.fixture(scope="module")
def photos(every):
    return every["wds"]


# --- what comes ----------------------------------------------------------------------------------


def test_a_batch_has_arrays_by_sample_keys_and_what_is_valid(photos):
    batch = next(iter(Loader(photos, batch_size=5, transforms=CROP)))
    assert list(batch) == ["image", "label", "caption", "__key__", "valid"]
    assert batch["image"].shape == (5, 16, 16, 3)
    assert batch["image"].dtype == np.uint8
    assert batch["label"].tolist() == [0, 1, 2, 3, 4]
    assert batch["label"].dtype == np.int64
    assert batch["caption"] == [None, "image 1", "image 2", None, "image 4"]
    assert batch["__key__"] == ["0000", "0001", "0002", "0003", "0004"]
    assert batch["valid"].tolist() == [True] * 5


def test_images_stay_encoded_without_transforms_and_fields_can_be_left_out(photos):
    batch = next(iter(Loader(photos, batch_size=2, fields=["image"])))
    assert list(batch) == ["image", "__key__", "valid"]
    assert batch["image"] == [sample["image"] for sample in itertools.islice(_open(photos), 2)]


def _open(path):
    dataset = shardkit.open(path)
    return (dataset[n] for n in range(len(dataset)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(10))
@given(
    format=st.sampled_from(IMAGE_FORMATS),
    world=st.integers(1, 8),
    threads=st.integers(0, 3),
    window=st.sampled_from([1, 7, 1 << 16]),
    parts=st.integers(1, 5),
    last=st.sampled_from(["pad", "drop", "short"]),
    epoch=st.integers(0, 2),
)
def test_every_sample_comes_once_whatever_the_format_ranks_and_threads(
    every, format, world, threads, window, parts, last, epoch
):
    """S1, S2 and S3, by real loaders."""
    options = {"shuffle": True, "window": window, "parts": parts, "last": last}

    def load(format, world, threads):
        ranks = []
        for rank in range(world):
            loader = Loader(
                every[format], batch_size=4, rank=rank, world_size=world, threads=threads,
                **options,
            )  # fmt: skip
            loader.set_epoch(epoch)
            ranks.append(list(loader))
            assert len(loader) == len(ranks[-1])
        return ranks

    ranks = load(format, world, threads)
    assert len({len(batches) for batches in ranks}) == 1
    came = sum((real_keys(batches) for batches in ranks), Counter())
    assert set(came.values()) == {1}
    if last != "drop":
        assert len(came) == 37
    assert same(ranks, load("wds", world, 0))


def test_a_global_batch_is_the_same_for_any_number_of_ranks(photos):
    """S3: crops included."""

    def batches(world):
        ranks = [
            list(
                Loader(
                    photos,
                    global_batch_size=12,
                    shuffle=True,
                    rank=rank,
                    world_size=world,
                    transforms=CROP,
                    threads=1,
                )
            )
            for rank in range(world)
        ]
        return [
            sorted(
                (key, image.tobytes(), bool(valid))
                for batch in step
                for key, image, valid in zip(
                    batch["__key__"], batch["image"], batch["valid"], strict=True
                )
            )
            for step in zip(*ranks, strict=True)
        ]

    assert batches(1) == batches(2) == batches(3) == batches(4) == batches(12)


def test_epochs_differ_and_are_the_same_again_for_another_loader(photos):
    loader = Loader(photos, batch_size=8, shuffle=True, seed=5, transforms=CROP)
    epochs = [list(loader) for _ in range(3)]
    assert len({str(keys(epoch)) for epoch in epochs}) == 3
    again = Loader(photos, batch_size=8, shuffle=True, seed=5, transforms=CROP)
    again.set_epoch(2)
    assert same(list(again), epochs[2])
    by_sample = [
        {k: i.tobytes() for b in e for k, i in zip(b["__key__"], b["image"], strict=True)}
        for e in epochs
    ]
    assert by_sample[0]["0003"] != by_sample[1]["0003"], "crops must be new in each epoch"


def test_several_datasets_are_one_or_are_mixed_by_weight(tmp_path):
    a = write_photos(tmp_path / "a", samples=30)
    b = write_photos(tmp_path / "b", "arrow", samples=10)
    both = Loader([a, b], batch_size=8, shuffle=True)
    assert Counter(real_keys(both).values()) == {1: 20, 2: 10}
    mixed = Loader([a, b], batch_size=8, shuffle=True, weights=[1, 3])
    came = [key for _ in range(128) for batch in mixed for key in batch["__key__"]]
    assert len(came) == 128 * 40
    counts = Counter(came)
    # Of 5,120 draws 1,280 go to the 30 samples of the first, 3,840 to the 10 of the second.
    assert all(counts[f"{n:04d}"] in (42, 43) for n in range(10, 30))
    assert all(counts[f"{n:04d}"] - 384 in (42, 43) for n in range(10))


def test_cached_samples_are_the_same_and_survive_the_files(tmp_path):
    for cache in ("memory", "decoded"):
        path = write_photos(tmp_path / cache)
        plain = Loader(path, batch_size=8, shuffle=True, transforms=CROP)
        cached = Loader(path, batch_size=8, shuffle=True, transforms=CROP, cache=cache)
        assert same([list(plain), list(plain)], [list(cached), list(cached)])
        expected = list(plain)
        shutil.rmtree(path)
        assert same(list(cached), expected)


# --- batches by length ---------------------------------------------------------------------------

LENGTHS = np.random.default_rng(0).integers(1, 60, 300).tolist()


@pytest.mark.parametrize(
    "batching",
    [
        shardkit.Bucket(8, 4),
        shardkit.Dynamic(256, multiple_of=8),
        shardkit.Pack(64, 4),
        shardkit.Pack(64, 4, how="concat"),
    ],
    ids=str,
)
def test_batches_by_length_hold_every_token_once_on_equal_ranks(tmp_path, batching):
    path = write_documents(tmp_path / "docs", LENGTHS)
    expected = Counter(n * 1000 + m for n, length in enumerate(LENGTHS) for m in range(length))
    for world in (1, 3):
        ranks = []
        for rank in range(world):
            loader = Loader(
                path, batching=batching, shuffle=True, window=100, rank=rank, world_size=world
            )
            expected_batches = len(loader)
            batches = list(loader)
            assert len(batches) == expected_batches
            assert 0 <= loader.padding < 0.5
            ranks.append(batches)
        assert len({len(batches) for batches in ranks}) == 1
        came: Counter = Counter()
        for batch in itertools.chain(*ranks):
            if batch["valid"].all():
                mask = (
                    batch["attention_mask"] if "attention_mask" in batch else batch["segment_ids"]
                )
                came.update(batch["tokens"][mask > 0].tolist())
        assert came == expected


def test_a_collate_of_others_need_not_have_lengths(tmp_path):
    path = write_tokens(tmp_path / "t")

    def collate(samples):
        return {"attention_mask": np.ones((len(samples), 16))}

    loader = Loader(path, batch_size=3, collate=collate)
    assert next(iter(loader))["attention_mask"].shape == (3, 16)
    assert loader.padding == 0


@pytest.mark.parametrize("mean", [None, (0.5, 0.5, 0.5)])
def test_a_collate_gets_samples_as_transforms_have_made_them(photos, mean):
    crop = [*CROP["image"], *([shardkit.Normalize(mean, mean)] if mean else [])]
    plain = list(Loader(photos, batch_size=4, transforms={"image": crop}))

    def collate(samples):
        images = np.stack([sample["image"] for sample in samples])
        return {"x": images, "y": [sample["label"] for sample in samples]}

    own = list(Loader(photos, batch_size=4, transforms={"image": crop}, collate=collate))
    padded = list(
        Loader(photos, batch_size=4, transforms={"image": crop}, collate=shardkit.pad_collate(),
               fields=["image", "label"])
    )  # fmt: skip
    for one, two, three in zip(plain, own, padded, strict=True):
        assert list(two) == ["x", "y", "__key__", "valid"]
        assert (two["x"] == one["image"]).all()
        assert two["y"] == one["label"].tolist()
        assert (three["image"] == one["image"]).all()


def test_bucketing_saves_padding_and_says_so(tmp_path):
    path = write_documents(tmp_path / "docs", LENGTHS)
    fixed = Loader(path, batch_size=8, shuffle=True, collate=shardkit.pad_collate())
    bucketed = Loader(path, batching=shardkit.Bucket(8, 6), shuffle=True)
    list(fixed), list(bucketed)
    assert bucketed.padding < fixed.padding / 2


# --- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [pytest.param(0, marks=pytest.mark.large), 2])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 5},
        {"batch_size": 5, "last": "drop"},
        {"batch_size": 5, "last": "short", "parts": 3, "window": 6},
        {"batching": shardkit.Dynamic(100), "fields": ["tokens"], "window": 11},
        {"batching": shardkit.Pack(32, 2), "fields": ["tokens"], "window": 11},
    ],
    ids=str,
)
def test_a_state_of_any_step_continues_with_the_next_sample(tmp_path, photos, options, threads):
    """S4: saved before each batch of two epochs, and loaded by a new loader."""
    path = write_documents(tmp_path / "d", LENGTHS[:50]) if "batching" in options else photos

    def make():
        return Loader(path, shuffle=True, threads=threads, **options)

    loader = make()
    states, batches, epochs = [loader.state_dict()], [], []
    for _ in range(2):
        for left, batch in enumerate(loader):
            assert len(loader) - loader.remaining == left + 1 or loader.remaining == len(loader)
            batches.append(batch)
            states.append(loader.state_dict())
        epochs.append(left + 1)
    epochs.append(len(loader))
    for number in range(len(states)):
        again = make()
        again.load_state_dict(through_json(states[number]))
        rest, whole = again.remaining, len(again)
        assert whole == epochs[again.epoch]
        got = list(again)
        assert len(got) == rest <= whole
        while again.epoch < 1:
            got += list(again)
        assert same(got[: len(batches) - number], batches[number:]), f"continued at {number}"


def test_a_state_of_an_epochs_end_is_the_beginning_of_the_next(photos):
    loader = Loader(photos, batch_size=13, shuffle=True)
    list(loader)
    again = Loader(photos, batch_size=13, shuffle=True)
    again.load_state_dict(loader.state_dict())
    assert again.epoch == 1
    assert same(list(again), list(loader))
    assert again.epoch == loader.epoch == 1


def test_set_epoch_continues_a_state_of_that_epoch_and_begins_any_other(photos):
    loader = Loader(photos, batch_size=5, shuffle=True)
    epochs, states = [], []
    for _ in range(3):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch["__key__"])
            states.append(loader.state_dict())

    def continued(step, epoch):
        again = Loader(photos, batch_size=5, shuffle=True)
        again.load_state_dict(through_json(states[step]))
        again.set_epoch(epoch)
        return again

    steps = len(epochs[0])
    assert keys(continued(2, 0)) == epochs[0][3:]
    assert keys(continued(steps + 2, 1)) == epochs[1][3:]
    assert keys(continued(steps - 1, 1)) == epochs[1], "the state of an epoch's end"
    assert keys(continued(steps + 2, 2)) == epochs[2]
    assert keys(continued(steps + 2, 0)) == epochs[0]
    again = continued(2, 0)
    iterator = iter(again)  # Lightning says the epoch when it has the iterator
    again.set_epoch(2)
    assert keys(iterator) == epochs[2]
    again.set_epoch(2)
    assert keys(again) == epochs[2], "what was iterated begins anew"
    for _ in again:
        again.set_epoch(1)
        break
    assert keys(again) == epochs[1]


@pytest.mark.parametrize("kind", [Loader, StreamingDataset])
def test_what_is_no_epoch_is_refused(photos, kind):
    made = kind(photos, batch_size=5)
    made.set_epoch(np.int64(3))
    assert type(made.epoch) is int
    for epoch in (-1, 2.5, "3", None):
        with pytest.raises(UsageError, match="epoch must be a whole number"):
            made.set_epoch(epoch)


def test_the_state_is_that_of_the_last_batch_whatever_epoch_was_set_meanwhile(photos):
    loader = Loader(photos, batch_size=5, shuffle=True)
    iterator = iter(loader)
    next(iterator)
    loader.set_epoch(7)
    next(iterator)
    assert (loader.epoch, loader.state_dict()["samples"]) == (0, 10)


def test_an_iteration_that_gives_nothing_is_no_epoch(photos):
    loader = Loader(photos, batch_size=13, shuffle=True)
    iter(loader).close()
    assert len(list(loader)) == 3
    assert loader.epoch == 0


def test_a_state_is_small_and_the_same_on_all_ranks(photos):
    states = []
    for rank in range(3):
        loader = Loader(photos, batch_size=4, shuffle=True, rank=rank, world_size=3)
        next(iter(loader))
        states.append(loader.state_dict())
    assert states[0] == states[1] == states[2]
    assert len(str(states[0])) < 1000


def test_a_run_continues_with_another_number_of_ranks(photos):
    """S4: 2 ranks, killed after 3 steps, then 3 ranks: each sample exactly once."""
    came: Counter = Counter()
    for rank in range(2):
        loader = Loader(photos, batch_size=4, shuffle=True, rank=rank, world_size=2)
        for batch in itertools.islice(loader, 3):
            came += real_keys([batch])
        state = loader.state_dict()
    for rank in range(3):
        loader = Loader(photos, batch_size=2, shuffle=True, rank=rank, world_size=3)
        loader.load_state_dict(state)
        came += real_keys(loader)
    assert came == Counter({f"{n:04d}": 1 for n in range(37)})


def test_continuing_reads_nothing_before_the_next_batch(tmp_path, monkeypatch):
    path = write_tokens(tmp_path / "t", samples=200, shard=10)
    loader = Loader(path, batch_size=4, shuffle=True, threads=0, prefetch=1, window=20)
    iterator = iter(loader)
    [next(iterator) for _ in range(30)]
    state = loader.state_dict()
    again = Loader(path, batch_size=4, shuffle=True, threads=0, prefetch=1, window=20)
    read = []
    original = type(again.dataset.stream.samples).read
    monkeypatch.setattr(
        type(again.dataset.stream.samples),
        "read",
        lambda self, n: read.append(n) or original(self, n),
    )
    again.load_state_dict(state)
    batch = next(iter(again))
    assert set(read) <= {int(key) for key in batch["__key__"]} | set(read[4:8])
    assert len(read) <= 8


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": 1}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"window": 8}, "window"),
        ({"parts": 2}, "parts"),
    ],
)
def test_a_state_of_other_settings_is_refused_with_what_differs(photos, changed, named):
    state = Loader(photos, batch_size=4, shuffle=True).state_dict()
    other = Loader(photos, batch_size=4, **{"shuffle": True, **changed})
    with pytest.raises(UsageError, match="another dataset or other settings") as caught:
        other.load_state_dict(state)
    assert named in caught.value.expected
    assert named in caught.value.found


def test_a_state_of_another_dataset_or_version_and_no_state_are_refused(tmp_path, photos):
    loader = Loader(photos, batch_size=4)
    state = loader.state_dict()
    other = Loader(write_photos(tmp_path / "other", samples=36), batch_size=4)
    with pytest.raises(UsageError, match="another dataset"):
        other.load_state_dict(state)
    with pytest.raises(UsageError, match="another version"):
        loader.load_state_dict({**state, "order_version": 99})
    for bad in ({}, {"epoch": 3}, {**state, "samples": None}):
        with pytest.raises(UsageError, match="not a valid state of a Loader"):
            loader.load_state_dict(bad)


# --- bad input -----------------------------------------------------------------------------------


def test_what_cannot_be_is_said_at_once(tmp_path, photos):
    for options, message in [
        ({}, "no batch size is given"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"batch_size": 4, "global_batch_size": 8}, "in several ways"),
        ({"global_batch_size": 7, "world_size": 2, "rank": 0}, "split evenly"),
        ({"batch_size": 4, "rank": 2, "world_size": 2}, "does not fit the world"),
        ({"batch_size": 38, "last": "drop"}, "smaller than one batch"),
        ({"batch_size": 4, "fields": ["photo"]}, "no field 'photo'"),
        ({"batch_size": 4, "weights": [1, 2]}, "one number for each dataset"),
        ({"batch_size": 4, "cache": "disk"}, "a cache folder can be used only for remote data"),
        ({"batch_size": 4, "cache": 5}, "cache must be"),
        ({"batch_size": 4, "lasst": "pad"}, "no option 'lasst'"),
        ({"batching": shardkit.Bucket(4, 2)}, "field of one-dimensional arrays"),
        ({"batch_size": 4, "prefetch": 0}, "prefetch must be a whole number from 1"),
        ({"batch_size": 4, "threads": "2"}, "threads must be a whole number from 0"),
        ({"batching": shardkit.Pack(8, 2), "collate": dict}, "Pack does not support collate"),
        *[({"batch_size": n}, "batch_size must be") for n in (True, 4.0, "4", 10**9, 10**18)],
        *[({"batch_size": 4, "seed": n}, "seed must be") for n in (None, -1, 1.5, True, 2**64)],
        *[({"batch_size": 4, "window": n}, "window must be") for n in (None, 2**63, 10**400)],
        *[({"batch_size": 4, "threads": n}, "threads must be") for n in (1.5, -1, True, 10**30)],
        *[({"batch_size": 4, "rank": n}, "rank must be") for n in (0.5, -1, False)],
        *[({"batch_size": 4, n: None}, f"{n} must be") for n in ("prefetch", "parts", "shuffle")],
        ({"batch_size": 4, "max_errors": float("nan")}, "max_errors must be"),
        ({"batch_size": 4, "collate": 5}, "collate must be a function"),
        ({"batch_size": 4, "fields": 5}, "fields must be a list"),
        *[
            ({"batch_size": 4, "weights": n}, "weights must be positive numbers")
            for n in (
                [1, float("inf")],
                [float("nan")],
                [0],
                [-1],
                ["a"],
                [True],
                [10**400],
                5,
                [1e308, 1e308],
                [None],
            )
        ],
    ]:
        with pytest.raises(UsageError, match=message):
            Loader(photos, **options)
    with pytest.raises(NotFoundError):
        Loader(tmp_path / "nothing", batch_size=2)
    for source in ((path for path in [photos]), None, 3, [photos, b"photos"], {"train": photos}):
        with pytest.raises(UsageError, match="the source cannot be streamed"):
            Loader(source, batch_size=2)


def test_a_dataset_smaller_than_a_batch_is_repeated_with_a_warning(tmp_path):
    path = write_photos(tmp_path / "few", samples=3)
    with pytest.warns(ShardkitWarning, match="smaller than one batch"):
        ranks = [list(Loader(path, batch_size=2, rank=rank, world_size=4)) for rank in range(4)]
    assert [len(batches) for batches in ranks] == [1] * 4
    assert sum((real_keys(batches) for batches in ranks), Counter()) == Counter(
        {f"{n:04d}": 1 for n in range(3)}
    )


def _damage(path, number):
    """Make the image of one sample of a TAR undecodable, and nothing else."""
    dataset = shardkit.open(path)
    shard, position = dataset.locate(number)
    data = dataset[number]["image"]
    file = dataset.shard_path(shard)
    del dataset
    content = file.read_bytes()
    at = content.index(data)
    middle = at + len(data) // 2
    file.write_bytes(content[:middle] + b"\xff\xc4" * 8 + content[middle + 16 :])
    return file, position


@pytest.mark.parametrize("threads", [0, 2])
def test_an_image_that_cannot_be_decoded_is_named_with_its_address(tmp_path, threads):
    path = write_photos(tmp_path / "p")
    file, position = _damage(path, 13)
    loader = Loader(path, batch_size=4, transforms=CROP, threads=threads)
    with pytest.raises(SampleError) as caught:
        list(loader)
    assert caught.value.where["path"] == file
    assert caught.value.where["position"] == position
    assert caught.value.where["key"] == "0013"
    assert caught.value.where["field"] == "image"
    assert loader.state_dict()["samples"] == 12, "what came before has been delivered"


@pytest.mark.parametrize("lacks", ["huffman", "quantization"])
def test_tables_of_an_image_do_not_serve_the_next_one_of_a_thread(tmp_path, lacks):
    """S3. Without Huffman tables it has the standard ones, as frames of Motion JPEG."""
    marker = {"huffman": b"\xff\xc4", "quantization": b"\xff\xdb"}[lacks]
    complete = simplejpeg.encode_jpeg(photo_like(1, 48, 36), quality=90)
    lacking = complete.replace(marker, b"\xff\xeb")  # a segment that decoders pass over
    # By such tables, it decodes without a warning.
    coarse = PIL.Image.fromarray(photo_like(3, 256, 256))
    others = encoded(coarse, "JPEG", optimize=True, quality=5)
    with shardkit.create(tmp_path / "d", to="wds", schema={"image": shardkit.Image()}) as writer:
        for number in range(6):
            writer.write({"__key__": str(number), "image": lacking if number == 4 else others})
    crop = {"image": [shardkit.CenterCrop(32)]}
    for threads, size in [(0, 2), (0, 6), (1, 3), (2, 6)]:
        loader = Loader(
            tmp_path / "d", batch_size=size, threads=threads, transforms=crop, on_error="skip"
        )
        images, valid = zip(*((b["image"], b["valid"]) for b in loader), strict=True)
        assert np.concatenate(valid).tolist() == [True] * 4 + [lacks == "huffman", True]
        if lacks == "huffman":
            right = simplejpeg.decode_jpeg(complete)[2:34, 8:40]
            assert (np.concatenate(images)[4] == right).all()


def test_bad_samples_can_be_replaced_marked_counted_and_bounded(tmp_path):
    path = write_photos(tmp_path / "p")
    _damage(path, 13)
    _damage(path, 14)
    whole = list(Loader(write_photos(tmp_path / "good"), batch_size=4, transforms=CROP))
    loader = Loader(path, batch_size=4, transforms=CROP, on_error="skip")
    batches = list(loader)
    assert len(batches) == len(whole)
    assert real_keys(batches) == real_keys(whole) - Counter(["0013", "0014"])
    bad = batches[3]
    assert bad["valid"].tolist() == [True, False, False, True]
    assert bad["__key__"] == ["0012", "0015", "0015", "0015"]
    assert (bad["image"][1] == bad["image"][3]).all()
    assert bad["label"].tolist() == [12, 15, 15, 15]
    assert [error["key"] for error in loader.errors] == ["0013", "0014"]
    padded = Loader(path, batch_size=20, transforms=CROP, on_error="skip")
    assert len(list(padded)) == 2
    assert len(padded.errors) == 2
    first = Loader(path, batch_size=30, transforms=CROP, on_error="skip")  # 13, 14 pad its end
    assert [batch["valid"].sum() for batch in first] == [28, 7]
    assert len(first.errors) == 2, "those that come again as padding are counted once"
    with pytest.raises(SampleError, match="more than 1 samples are bad"):
        list(Loader(path, batch_size=4, transforms=CROP, on_error="skip", max_errors=1))


def refuse(*bad):
    """A transform that raises for some labels, or some documents by number."""

    def check(value):
        number = int(value[0]) // 1000 if np.ndim(value) else value
        if number in bad:
            raise ValueError(number)
        return value

    return check


def test_a_bad_sample_is_replaced_by_the_next_good_one_on_any_rank(photos):
    """S2 and S3: also where it is the whole batch of its rank, and where the next is bad too."""

    def batches(world, threads):
        ranks = [
            list(
                Loader(
                    photos, global_batch_size=4, shuffle=True, rank=rank, world_size=world,
                    threads=threads, on_error="skip",
                    transforms={"label": refuse(7, 8, 9, 20, 36), **CROP},
                )
            )
            for rank in range(world)
        ]  # fmt: skip
        return [
            [
                (key, label, image.tobytes(), bool(valid))
                for batch in step
                for key, label, image, valid in zip(
                    *(batch[name] for name in ("__key__", "label", "image", "valid")), strict=True
                )
            ]
            for step in zip(*ranks, strict=True)
        ]

    alone = batches(1, 0)
    assert batches(2, 2) == batches(4, 1) == alone
    replaced = Counter(key for step in alone for key, _, _, valid in step if not valid)
    assert replaced >= Counter({"0010": 3, "0021": 1, "0000": 1})
    plain = Loader(photos, batch_size=1, fields=["label"], transforms={"label": refuse(7, 8)})
    ones = list(plain.with_options(on_error="skip"))
    assert [batch["label"].item() for batch in ones[6:10]] == [6, 9, 9, 9]
    assert [batch["valid"].item() for batch in ones[6:10]] == [True, False, False, True]
    single = StreamingDataset(
        photos, fields=["label"], transforms={"label": refuse(*range(4, 30))}, on_error="skip"
    )
    assert [sample["label"] for sample in single] == [*range(4), *[30] * 26, *range(30, 37)]


def test_where_no_good_sample_follows_the_bad_ones_are_not_passed_over_for_ever(photos):
    def load(bad, **options):
        transforms = {"label": refuse(*bad)}
        return list(Loader(photos, batch_size=4, transforms=transforms, on_error="skip", **options))

    with pytest.raises(SampleError, match=r"\(36 tried\)") as caught:
        load(range(37))
    assert caught.value.__cause__.where["key"] == "0000"
    with pytest.raises(SampleError, match=r"\(6 tried\)"):
        load(range(8, 20), max_errors=5)
    assert len(load(range(8, 20), max_errors=12)) == 10


@pytest.mark.parametrize(
    "batching",
    [shardkit.Dynamic(8), shardkit.Bucket(1, [5, 9]), shardkit.Pack(8, 1), shardkit.Pack(16, 2)],
    ids=str,
)
def test_bad_documents_are_replaced_in_batches_by_length_too(tmp_path, batching):
    """By ones that are no longer than planned, or by as many zeros in packed rows."""
    path = write_documents(tmp_path / "docs", [5, 2, 8, 3, 7, 4, 6] * 4)
    options = {"batching": batching, "window": 7}
    whole = list(Loader(path, **options))
    loader = Loader(path, transforms={"tokens": refuse(3, 4)}, on_error="skip", **options)
    batches = list(loader)
    assert sorted(error["key"] for error in loader.errors) == ["0003", "0004"]
    assert len(batches) == len(whole)
    for batch, planned in zip(batches, whole, strict=True):
        assert batch["tokens"].dtype == planned["tokens"].dtype
        assert batch["tokens"].shape[1] <= planned["tokens"].shape[1]
        good = batch["tokens"][batch["valid"]]
        assert not np.isin(good // 1000, [3, 4])[good > 0].any()
    assert sum(int((~batch["valid"]).sum()) for batch in batches) >= 2


def test_damaged_blocks_of_tokens_are_replaced_one_by_one(tmp_path):
    path = write_tokens(tmp_path / "t", samples=40, shard=10)
    os.truncate(shardkit.open(path).shard_path(1), 100)
    loader = Loader(path, batch_size=4, on_error="skip")
    batches = list(loader)
    assert len(loader.errors) == 10
    assert batches[4]["__key__"] == ["0020"] * 4
    assert real_keys(batches).total() == 30
    with pytest.raises(ShardkitError, match="shard-000001") as caught:
        list(Loader(path, batch_size=4))
    assert caught.value.where["position"] == 0


def test_a_transform_that_raises_is_named_with_the_sample(photos):
    def odd(label):
        if label == 9:
            raise ZeroDivisionError("no nine")
        return label

    with pytest.raises(SampleError, match="odd") as caught:
        list(Loader(photos, batch_size=4, transforms={"label": odd}))
    assert caught.value.where["key"] == "0009"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("format", IMAGE_FORMATS)
def test_a_shard_that_is_cut_deleted_or_changed_while_training_is_named(tmp_path, format):
    for change in ("cut", "delete", "replace"):
        path = write_photos(tmp_path / change, format, samples=40, shard=10)
        shards = [shardkit.open(path).shard_path(n) for n in range(4)]
        loader = Loader(path, batch_size=5, threads=1, prefetch=1)
        iterator = iter(loader)
        next(iterator)
        victim = shards[2]
        victim = next(victim.glob("data.mdb"), victim) if victim.is_dir() else victim
        if change == "cut":
            os.truncate(victim, victim.stat().st_size // 2)
        elif change == "delete":
            victim.unlink()
        else:
            victim.write_bytes(b"something else")
        with pytest.raises(ShardkitError) as caught:
            list(iterator)
        assert str(victim) in str(caught.value)


# --- threads, memory and the end -----------------------------------------------------------------


def _new(before):
    """How many threads there are that were not there before; others' may end at any time."""
    return len(set(threading.enumerate()) - before)


def test_threads_end_with_the_iteration_however_it_ends(photos):
    before = set(threading.enumerate())
    loader = Loader(photos, batch_size=4, threads=3, shuffle=True)
    for _ in loader:
        assert _new(before) == 3
        break
    gc.collect()
    assert _new(before) == 0, "left by break"
    iterator = iter(loader)
    next(iterator)
    iterator.close()
    assert _new(before) == 0, "closed"
    assert list(iterator) == []
    list(loader)
    assert _new(before) == 0, "exhausted"
    with pytest.raises(SampleError):
        list(Loader(photos, batch_size=4, threads=3, transforms={"label": _raise}))
    assert _new(before) == 0, "failed"


def _raise(value):
    raise ValueError(value)


def test_a_transform_that_hangs_does_not_hold_up_the_end(photos, monkeypatch):
    """As at Ctrl-C. Its thread ends by itself when it can."""
    monkeypatch.setattr("shardkit.stream.loader._PATIENCE", 0.01)
    before, go_on = set(threading.enumerate()), threading.Event()

    def hang(label):
        assert label < 4 or go_on.wait(60)
        return label

    iterator = iter(Loader(photos, batch_size=4, threads=2, transforms={"label": hang}))
    next(iterator)
    iterator.close()
    assert not go_on.is_set()
    assert _new(before) > 0
    go_on.set()
    deadline = time.monotonic() + 60
    while _new(before) > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _new(before) == 0


ENDS = """
import sys, threading
import shardkit.stream
if __name__ == "__main__":
    loader = shardkit.stream.Loader(sys.argv[1], batch_size=2, threads=4, shuffle=True)
    iterator = iter(loader)
    next(iterator)
    {end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("1 / 0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2),
    ],
)
def test_the_interpreter_exits_at_once_in_the_middle_of_an_epoch(photos, tmp_path, end, code):
    script = tmp_path / "script.py"
    script.write_text(ENDS.format(end=end))
    run = subprocess.run(
        [sys.executable, script, photos], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == code
    assert "Fatal" not in run.stderr
    assert "Exception ignored" not in run.stderr


FORKS = """
import multiprocessing, sys
import shardkit.stream
from shardkit.errors import UsageError

def keys(batches):
    return [batch["__key__"] for batch in batches]

def refused(iterator):
    try:
        next(iterator)
    except UsageError as error:
        return "forked" in str(error) and "iterate over the Loader" in error.fix

def make():
    return shardkit.stream.Loader(sys.argv[1], batch_size=4, threads=2, shuffle=True)

def child(iterator, used, unused, expected):
    assert refused(iterator)
    iterator.close()
    assert keys(unused) == expected[0]
    assert keys(used) == expected[1]
    sys.exit(7)

whole = make()
expected = keys(whole), keys(whole)
used, unused = make(), make()
iterator = iter(used)
first = next(iterator)["__key__"]
process = multiprocessing.get_context("fork").Process(
    target=child, args=(iterator, used, unused, expected)
)
process.start()
process.join()
assert process.exitcode == 7
assert [first, *keys(iterator)] == expected[0]
"""


def test_an_iteration_that_goes_on_after_a_fork_is_refused_and_a_loader_is_not(photos):
    """As DataLoader's workers get it; the process that forked goes on. It waited for ever."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, photos],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")


def test_of_threads_that_take_from_one_iteration_at_once_all_but_one_are_refused(photos):
    """One waited for ever. Threads that take turns are fine."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(label):
        begun.set()
        assert go_on.wait(60)
        return label

    iterator = iter(Loader(photos, batch_size=4, threads=2, transforms={"label": slow}))
    got = []
    threads = [threading.Thread(target=lambda: got.append(next(iterator))) for _ in range(2)]
    threads[0].start()
    assert begun.wait(60)
    while not iterator._taking.locked():
        time.sleep(0.01)
    with pytest.raises(UsageError, match="another thread"):
        next(iterator)
    go_on.set()
    threads[0].join(60)
    threads[1].start()
    threads[1].join(60)
    assert len(got) == 2
    assert len(list(iterator)) == 10 - 2


def test_a_thread_that_waits_for_a_batch_hears_that_the_iteration_was_closed(tmp_path):
    path = write_tokens(tmp_path / "t", samples=80)
    begun, go_on, said = threading.Event(), threading.Event(), []

    def slow(tokens):
        begun.set()
        assert go_on.wait(60)
        return tokens

    def take():
        try:
            next(iterator)
        except UsageError as error:
            said.append(error.what)

    # The thread is at the first 64 rows when it hears of it, and does not begin the others.
    iterator = iter(Loader(path, batch_size=80, threads=1, transforms={"tokens": slow}))
    thread = threading.Thread(target=take)
    thread.start()
    assert begun.wait(60)
    closing = threading.Thread(target=iterator.close)
    closing.start()
    while not iterator._closed:
        time.sleep(0.01)
    go_on.set()
    thread.join(60)
    closing.join(60)
    assert not thread.is_alive()
    assert said == ["the iteration was closed while a thread was taking a batch from it"]


def test_ctrl_c_without_threads_is_raised_at_once(photos):
    """It came with the batch that it hit, some batches later, or never if the loop ended."""
    hit = []

    def interrupt(label):
        if len(hit) == 9:
            raise KeyboardInterrupt
        hit.append(label)
        return label

    loader = Loader(photos, batch_size=4, threads=0, transforms={"label": interrupt})
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert len(hit) == 9
    assert loader.state_dict()["samples"] == 4, "what was delivered"


def test_prefetching_is_bounded_in_batches_and_in_bytes(photos):
    made = []
    transforms = {"label": lambda label: made.append(label) or label}

    def ahead(**options):
        made.clear()
        iterator = iter(Loader(photos, batch_size=2, threads=2, transforms=transforms, **options))
        next(iterator)
        deadline = time.monotonic() + 10
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # for what must not be made
        iterator.close()
        return len(made)

    assert ahead(prefetch=3) <= 2 * (3 + 1)
    assert ahead(prefetch=16, prefetch_bytes=1) <= 2 * (16 + 1)


def test_memory_of_batches_is_used_again_only_when_nobody_refers_to_it(photos):
    loader = Loader(photos, batch_size=4, transforms=CROP, threads=2, shuffle=True)
    held = list(loader)
    copies = [batch["image"].copy() for batch in held]
    some = held[2]["image"][1:3, ::2]
    expected = some.copy()
    del held[2]
    for _ in range(3):
        list(loader)
    assert (some == expected).all()
    del held[2:], some
    addresses = set()
    for batch in loader:
        addresses.add(batch["image"].ctypes.data)
    assert len(addresses) < len(copies)


def test_fifty_epochs_leave_nothing_behind(tmp_path):
    """No growth in memory, threads or open files, in a process that does nothing else."""
    path = write_photos(tmp_path / "p", samples=64)
    code = f"""
import gc, os, resource, threading
from shardkit import RandomResizedCrop
from shardkit.stream import Loader

loader = Loader({str(path)!r}, batch_size=8, transforms={{"image": [RandomResizedCrop(32)]}},
                shuffle=True, threads=2)

def used():
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), resident

for _ in range(10):
    list(loader)
before = used()
for _ in range(50):
    list(loader)
after = used()
print(*before, *after)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    files, threads, resident, *after = map(int, done.stdout.split())
    assert after[:2] == [files, threads]
    assert after[2] - resident < 8 << 20


def test_a_loader_and_its_dataset_survive_a_fork_and_a_pickle(photos):
    dataset = StreamingDataset(photos, shuffle=True, batch_size=4)
    expected = keys(dataset)
    again = pickle.loads(pickle.dumps(StreamingDataset(photos, shuffle=True, batch_size=4)))
    assert keys(again) == expected
    read, write = os.pipe()
    child = os.fork()
    if not child:
        dataset.set_epoch(0)
        os.write(write, b"y" if keys(Loader(dataset, threads=2)) == expected else b"n")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"y"
