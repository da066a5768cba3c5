"""The Loader: what comes, in which order, from where on; and that it stops cleanly."""

import gc
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import PIL.Image
import pytest
import simplejpeg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.errors import NotFoundError, SampleError, ShardkitError, ShardkitWarning, UsageError
from shardkit.formats.testing_samples import in_fork
from shardkit.storage import blobs
from shardkit.stream import Loader, StreamingDataset, batches
from shardkit.transforms import direct
from tests.codecs.sample_images import encoded, photo_like
from tests.conftest import IMAGE_FORMATS, examples
from tests.stream.data import (
    keys,
    real_keys,
    same,
    through_json,
    with_states,
    write_documents,
    write_photos,
    write_tokens,
)

reads = blobs.reads
CROP = {"image": [shardkit.RandomResizedCrop(16), shardkit.RandomHorizontalFlip()]}
SHUFFLED = {"shuffle": True, "batch_size": 5}
BALANCED = shardkit.Balanced([n % 5 for n in range(37)], samples=45)
WEIGHTED = shardkit.Weighted([n % 4 / 2 for n in range(37)])
QUICK_FORMATS = [format for format in IMAGE_FORMATS if format != "lance"]  # which has a process


def first(path, **options):
    return next(iter(Loader(path, **{"batch_size": 4, **options})))


def ranks_of(path, world, **options):
    """The batches of each rank."""
    return [list(Loader(path, rank=n, world_size=world, **options)) for n in range(world)]


def rows_of(ranks):
    """Of each step the rows of all ranks."""
    names = ("__key__", "label", "image", "valid")
    return [
        sorted(
            (key, label, bytes(image), bool(valid))
            for batch in step
            for key, label, image, valid in zip(*(batch[name] for name in names), strict=True)
        )
        for step in zip(*ranks, strict=True)
    ]


# --- what comes ----------------------------------------------------------------------------------


def test_a_batch_has_arrays_by_sample_keys_and_what_is_valid(photos):
    batch = first(photos, batch_size=5, transforms=CROP)
    assert list(batch) == ["image", "label", "caption", "__key__", "valid"]
    assert (batch["image"].shape, batch["image"].dtype) == ((5, 16, 16, 3), np.uint8)
    assert (batch["label"].tolist(), batch["label"].dtype) == ([0, 1, 2, 3, 4], np.int64)
    assert batch["caption"] == [None, "image 1", "image 2", None, "image 4"]
    assert batch["__key__"] == ["0000", "0001", "0002", "0003", "0004"]
    assert batch["valid"].tolist() == [True] * 5
    stored = first(photos, batch_size=1, fields=["image"])  # without transforms, and other fields
    assert list(stored) == ["image", "__key__", "valid"]
    assert stored["image"] == [shardkit.open(photos)[0]["image"]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(10))
@given(
    format=st.sampled_from(QUICK_FORMATS),
    world=st.integers(1, 8),
    threads=st.integers(0, 3),
    window=st.sampled_from([1, 7, 1 << 16]),
    parts=st.integers(1, 5),
    last=st.sampled_from(["pad", "drop", "short"]),
    epoch=st.integers(0, 2),
)
def test_every_sample_comes_once_whatever_the_format_ranks_and_threads(
    every, format, world, threads, epoch, **options
):
    """S1, S2 and S3, by real loaders."""

    def load(format, threads):
        ranks = []
        for rank in range(world):
            place = {"rank": rank, "world_size": world, "threads": threads}
            loader = Loader(every(format), batch_size=4, shuffle=True, **place, **options)
            loader.set_epoch(epoch)
            ranks.append(list(loader))
            assert len(loader) == len(ranks[-1])
        return ranks

    ranks = load(format, threads)
    assert len({len(batches) for batches in ranks}) == 1
    came = sum((real_keys(batches) for batches in ranks), Counter())
    assert set(came.values()) == {1}
    assert len(came) == 37 or options["last"] == "drop"
    assert same(ranks, load("wds", 0))


@pytest.mark.parametrize(
    ("format", "more"),
    [
        ("wds", {"transforms": CROP}),
        ("wds", {"sampling": BALANCED, "transforms": CROP, "parts": 6}),
        ("wds", {"sampling": WEIGHTED, "transforms": CROP}),
        ("lance", {"parts": 2, "window": 7}),  # whose process takes long to start
    ],
    ids=str,
)
def test_a_global_batch_is_the_same_for_any_number_of_ranks(every, photos, format, more):
    """S2 and S3: crops included."""
    options = {"global_batch_size": 24, "shuffle": True, "threads": 1, **more}
    alone = ranks_of(photos, 1, **options)
    for world in (2, 3, 8):
        assert rows_of(ranks_of(every(format), world, **options)) == rows_of(alone)


def test_epochs_differ_and_are_the_same_again_for_another_loader(photos):
    def make():
        return Loader(photos, batch_size=8, shuffle=True, seed=5, transforms=CROP)

    loader, again = make(), make()
    epochs = [list(loader) for _ in range(3)]
    assert len({str(keys(epoch)) for epoch in epochs}) == 3
    again.set_epoch(2)
    assert same(list(again), epochs[2])
    crops = [row[2] for e in epochs for step in rows_of([e]) for row in step if row[0] == "0003"]
    assert len(set(crops)) == 3, "crops must be new in each epoch"


def test_several_datasets_are_one_or_are_mixed_by_weight(tmp_path):
    a = write_photos(tmp_path / "a", samples=24)
    b = write_photos(tmp_path / "b", "arrow", samples=8)
    options = {"batch_size": 8, "shuffle": True, "fields": ["label"], "threads": 0}
    both = Loader([a, b], **options)
    assert Counter(real_keys(both).values()) == {1: 16, 2: 8}
    mixed = Loader([a, b], weights=[1, 3], **options)
    came = Counter(key for _ in range(32) for batch in mixed for key in batch["__key__"])
    # Of 1,024 draws 256 go to the 24 samples of the first, 768 to the 8 of the second.
    assert came.total() == 1024
    assert {came[f"{n:04d}"] for n in range(8, 24)} == {10, 11}
    assert {came[f"{n:04d}"] - 96 for n in range(8)} <= {10, 11}


@pytest.mark.parametrize("cache", ["memory", "decoded"])
def test_cached_samples_are_the_same_and_survive_the_files(tmp_path, cache):
    path = write_photos(tmp_path / "photos")
    options = {"batch_size": 8, "shuffle": True, "transforms": CROP}
    plain, cached = Loader(path, **options), Loader(path, cache=cache, **options)
    assert same([list(plain), list(plain)], [list(cached), list(cached)])
    expected = list(plain)
    shutil.rmtree(path)
    assert same(list(cached), expected)


# --- batches by length ---------------------------------------------------------------------------

LENGTHS = np.random.default_rng(0).integers(1, 60, 150).tolist()


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
    came, counts = Counter(), set()
    for rank in range(3):
        place = {"rank": rank, "world_size": 3}
        loader = Loader(path, batching=batching, shuffle=True, window=60, **place)
        counts.add(len(loader))
        batches = list(loader)
        counts.add(len(batches))
        real = every = 0
        for batch in batches:
            mask = batch["attention_mask" if "attention_mask" in batch else "segment_ids"] > 0
            real, every = real + int(mask.sum()), every + mask.size
            came.update(batch["tokens"][mask].tolist() if batch["valid"].all() else ())
        assert loader.padding == pytest.approx(1 - real / every)
        assert 0 <= loader.padding < 0.5
    assert len(counts) == 1
    assert came == Counter(n * 1000 + m for n, length in enumerate(LENGTHS) for m in range(length))


@pytest.mark.parametrize("more", [[], [shardkit.Normalize((0.5,) * 3, (0.5,) * 3)]])
def test_a_collate_gets_samples_as_transforms_have_made_them(photos, more):
    def collate(samples):
        images = np.stack([sample["image"] for sample in samples])
        mask = np.ones(len(samples))  # need not come with lengths
        return {"x": images, "y": [s["label"] for s in samples], "attention_mask": mask}

    options = {"transforms": {"image": [*CROP["image"], *more]}, "fields": ["image", "label"]}
    plain, own = first(photos, **options), first(photos, collate=collate, **options)
    padded = first(photos, collate=shardkit.pad_collate(), **options)
    assert list(own) == ["x", "y", "attention_mask", "__key__", "valid"]
    assert same([own["x"], padded["image"]], [plain["image"]] * 2)
    assert own["y"] == plain["label"].tolist()


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
        {"batch_size": 6, "sampling": BALANCED},
        {"batch_size": 6, "sampling": WEIGHTED},
    ],
    ids=str,
)
def test_a_state_of_any_step_continues_with_the_next_sample(tmp_path, photos, options, threads):
    """S4: saved before each batch of two epochs, and loaded by a new loader."""
    path = write_documents(tmp_path / "d", LENGTHS[:25]) if "batching" in options else photos

    def make():
        return Loader(path, shuffle=True, threads=threads, **options)

    (batches, states), epoch, step = with_states(make(), 2), 0, 0
    for number, state in enumerate([make().state_dict(), *states]):
        again = make()
        again.load_state_dict(through_json(state))
        rest, whole = again.remaining, len(again)
        assert (again.epoch, whole - rest) == (epoch, step)
        got = list(again)
        assert len(got) == rest
        if number < 2:  # the next epoch is that of any loader
            got += list(again)
        assert same(got[: len(batches) - number], batches[number:][: len(got)]), number
        epoch, step = (epoch, step + 1) if step + 1 < whole else (epoch + 1, 0)


def test_set_epoch_continues_a_state_of_that_epoch_and_begins_any_other(photos):
    batches, states = with_states(Loader(photos, **SHUFFLED), 3)
    steps = len(batches) // 3
    epochs = [keys(batches[first : first + steps]) for first in range(0, 3 * steps, steps)]

    def continued(step, epoch=None):
        again = Loader(photos, **SHUFFLED)
        again.load_state_dict(through_json(states[step]))
        if epoch is not None:
            again.set_epoch(epoch)
        return again

    assert continued(steps - 1).epoch == 1, "an epoch's end is the beginning of the next"
    assert keys(continued(steps - 1)) == keys(continued(steps - 1, 1)) == epochs[1]
    assert keys(continued(2, 0)) == epochs[0][3:]
    assert keys(continued(steps + 2, 1)) == epochs[1][3:]
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


def test_a_state_is_that_of_the_last_batch_whatever_was_set_or_begun_meanwhile(photos):
    loader = Loader(photos, **SHUFFLED)
    iterator = iter(loader)
    next(iterator)
    loader.set_epoch(7)
    next(iterator)
    assert (loader.epoch, loader.state_dict()["samples"]) == (0, 10)
    assert loader.remaining == len(loader) - 2
    nothing = Loader(photos, **SHUFFLED)
    iter(nothing).close()  # is no epoch
    assert len(list(nothing)) == 8
    assert nothing.epoch == 0


@pytest.mark.parametrize("sampling", [None, BALANCED, WEIGHTED], ids=str)
def test_a_run_continues_with_another_number_of_ranks(photos, sampling):
    """S4: 2 ranks, killed after 3 steps, then 3 ranks: each sample as often as in an epoch."""
    came, states, options = Counter(), [], {"shuffle": True, "sampling": sampling}
    for rank in range(2):
        loader = Loader(photos, batch_size=4, rank=rank, world_size=2, **options)
        came += real_keys(itertools.islice(loader, 3))
        states.append(loader.state_dict())
    assert states[0] == states[1]
    assert len(str(states[0])) < 1000
    for rank in range(3):
        loader = Loader(photos, batch_size=2, rank=rank, world_size=3, **options)
        loader.load_state_dict(states[0])
        came += real_keys(loader)
    whole = real_keys(Loader(photos, batch_size=4, **options))
    assert came == whole
    assert whole == {f"{n:04d}": 1 for n in range(37)} or sampling


def test_continuing_reads_nothing_before_the_next_batch(tmp_path, monkeypatch):
    path = write_tokens(tmp_path / "t", samples=200, shard=10)
    options = {"batch_size": 4, "shuffle": True, "threads": 0, "prefetch": 1, "window": 20}
    loader, again, read = Loader(path, **options), Loader(path, **options), []
    list(zip(range(30), loader, strict=False))
    samples, original = again.dataset.stream.samples, again.dataset.stream.samples.read_many
    monkeypatch.setattr(
        samples, "read_many", lambda rows, *most: read.append(rows) or original(rows, *most)
    )
    again.load_state_dict(loader.state_dict())
    batch = next(iter(again))
    assert np.concatenate(read)[:4].tolist() == [int(key) for key in batch["__key__"]]
    assert len(np.concatenate(read)) <= 8  # of this batch and of the next


def test_a_state_of_anything_else_is_refused_with_what_differs(tmp_path, photos):
    state = Loader(photos, batch_size=4, shuffle=True).state_dict()
    for changed in ({"seed": 1}, {"shuffle": False}, {"window": 8}, {"parts": 2}):
        other = Loader(photos, batch_size=4, **{"shuffle": True, **changed})
        with pytest.raises(UsageError, match="another dataset or other settings") as caught:
            other.load_state_dict(state)
        for said in (caught.value.expected, caught.value.found):
            assert next(iter(changed)) in said
    other = Loader(write_photos(tmp_path / "o", samples=36), batch_size=4, shuffle=True)
    with pytest.raises(UsageError, match="another dataset"):
        other.load_state_dict(state)
    with pytest.raises(UsageError, match="another version"):
        other.load_state_dict({**state, "order_version": 99})
    for bad in ({}, [1], {"epoch": 3}, {**state, "samples": None}):
        with pytest.raises(UsageError, match="not a valid state of a Loader"):
            other.load_state_dict(bad)


# --- bad input -----------------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")
# By what the message says: options beside a batch size of 4.
REFUSED = {
    "no batch size is given": [{"batch_size": None}],
    "batch_size must be": [{"batch_size": n} for n in (0, True, 4.0, "4", 10**9, 10**18)],
    "in several ways": [{"global_batch_size": 8}],
    "split evenly": [{"batch_size": None, "global_batch_size": 7, "world_size": 2, "rank": 0}],
    "does not fit the world": [{"rank": 2, "world_size": 2}],
    "smaller than one batch": [{"batch_size": 38, "last": "drop"}],
    "no field 'photo'": [{"fields": ["photo"]}],
    "one number for each dataset": [{"weights": [1, 2]}],
    "a cache folder can be used only for remote data": [{"cache": "disk"}],
    "cache must be": [{"cache": 5}],
    "no option 'lasst'": [{"lasst": "pad"}],
    "field of one-dimensional": [{"batch_size": None, "batching": shardkit.Bucket(4, 2)}],
    "Pack does not": [{"batch_size": None, "batching": shardkit.Pack(8, 2), "collate": dict}],
    "prefetch must be a whole number from 1": [{"prefetch": 0}, {"prefetch": None}],
    "threads must be": [{"threads": n} for n in ("2", 1.5, -1, True, 10**30)],
    "seed must be": [{"seed": n} for n in (None, -1, 1.5, True, 2**64)],
    "window must be": [{"window": n} for n in (None, 2**63, 10**400)],
    "rank must be": [{"rank": n} for n in (0.5, -1, False)],
    "parts must be": [{"parts": None}],
    "shuffle must be": [{"shuffle": None}],
    "max_errors must be": [{"max_errors": NAN}],
    "collate must be a function": [{"collate": 5}],
    "fields must be a list": [{"fields": 5}],
    "weights must be positive numbers": [
        *({"weights": [n]} for n in (NAN, 0, -1, "a", True, None, 10**400)),
        *({"weights": n} for n in (5, [1, INF], [1e308, 1e308])),
    ],
}


def test_what_cannot_be_is_said_at_once(tmp_path, photos):
    for message, cases in REFUSED.items():
        for options in cases:
            with pytest.raises(UsageError, match=message):
                Loader(photos, **{"batch_size": 4, **options})
    with pytest.raises(NotFoundError):
        Loader(tmp_path / "nothing", batch_size=2)
    for source in ((path for path in [photos]), None, 3, [photos, b"photos"], {"train": photos}):
        with pytest.raises(UsageError, match="the source cannot be streamed"):
            Loader(source, batch_size=2)


def test_a_dataset_smaller_than_a_batch_is_repeated_with_a_warning(tmp_path):
    path = write_photos(tmp_path / "few", samples=3)
    with pytest.warns(ShardkitWarning, match="smaller than one batch"):
        ranks = ranks_of(path, 4, batch_size=2)
    assert [len(batches) for batches in ranks] == [1] * 4
    came = sum((real_keys(batches) for batches in ranks), Counter())
    assert came == Counter({f"{n:04d}": 1 for n in range(3)})


def _damage(path, number):
    """Make the image of one sample of a TAR undecodable, and nothing else."""
    dataset = shardkit.open(path)
    shard, position = dataset.locate(number)
    data, file = dataset[number]["image"], dataset.shard_path(shard)
    del dataset
    content = file.read_bytes()
    middle = content.index(data) + len(data) // 2
    file.write_bytes(content[:middle] + b"\xff\xc4" * 8 + content[middle + 16 :])
    return file, position


@pytest.mark.parametrize("lacks", ["huffman", "quantization"])
def test_tables_of_an_image_do_not_serve_the_next_one_of_a_thread(tmp_path, lacks):
    """S3. Without Huffman tables it has the standard ones, as frames of Motion JPEG."""
    marker = {"huffman": b"\xff\xc4", "quantization": b"\xff\xdb"}[lacks]
    complete = simplejpeg.encode_jpeg(photo_like(1, 48, 36), quality=90)
    lacking = complete.replace(marker, b"\xff\xeb")  # a segment that decoders pass over
    # By such tables, it decodes without a warning.
    coarse = PIL.Image.fromarray(photo_like(3, 256, 256))
    others = encoded(coarse, "JPEG", optimize=True, quality=5)
    samples = [{"image": lacking if number == 4 else others} for number in range(6)]
    shardkit.convert(samples, "wds", tmp_path / "d", workers=0)
    options = {"transforms": {"image": [shardkit.CenterCrop(32)]}, "on_error": "skip"}
    for threads, size in [(0, 2), (0, 6), (1, 3), (2, 6)]:
        loader = Loader(tmp_path / "d", batch_size=size, threads=threads, **options)
        images, valid = zip(*((b["image"], b["valid"]) for b in loader), strict=True)
        assert np.concatenate(valid).tolist() == [True] * 4 + [lacks == "huffman", True]
        if lacks == "huffman":
            right = simplejpeg.decode_jpeg(complete)[2:34, 8:40]
            assert (np.concatenate(images)[4] == right).all()


def test_bad_samples_are_named_or_replaced_marked_counted_and_bounded(tmp_path):
    path = write_photos(tmp_path / "p")
    file, position = _damage(path, 13)
    for threads in (0, 2):
        loader = Loader(path, batch_size=4, transforms=CROP, threads=threads)
        with pytest.raises(SampleError) as caught:
            list(loader)
        where = {"path": file, "position": position, "key": "0013", "field": "image"}
        assert where.items() <= caught.value.where.items()
        assert loader.state_dict()["samples"] == 12, "what came before has been delivered"
    _damage(path, 14)

    def load(size, **options):
        options = {"transforms": CROP, "on_error": "skip", **options}
        loader = Loader(path, batch_size=size, **options)
        return loader, list(loader)

    loader, batches = load(4)
    assert len(batches) == 10
    assert real_keys(batches) == Counter(f"{n:04d}" for n in range(37) if n not in (13, 14))
    bad = batches[3]
    assert bad["valid"].tolist() == [True, False, False, True]
    assert bad["__key__"] == ["0012", "0015", "0015", "0015"]
    assert (bad["image"][1] == bad["image"][3]).all()
    assert bad["label"].tolist() == [12, 15, 15, 15]
    assert [error["key"] for error in loader.errors] == ["0013", "0014"]
    loader, batches = load(30)  # 13 and 14 come again as padding of its end
    assert [batch["valid"].sum() for batch in batches] == [28, 7]
    assert len(loader.errors) == 2, "those that come again as padding are counted once"
    with pytest.raises(SampleError, match="more than 1 samples are bad"):
        load(4, max_errors=1)


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
    options = {
        "transforms": {"label": refuse(7, 8, 9, 20, 36), **CROP},
        "global_batch_size": 4, "shuffle": True, "on_error": "skip",
    }  # fmt: skip
    alone = rows_of(ranks_of(photos, 1, threads=0, **options))
    assert rows_of(ranks_of(photos, 2, threads=2, **options)) == alone
    assert rows_of(ranks_of(photos, 4, threads=1, **options)) == alone
    replaced = Counter(key for step in alone for key, _, _, valid in step if not valid)
    assert replaced >= Counter({"0010": 3, "0021": 1, "0000": 1})
    options = {"fields": ["label"], "on_error": "skip"}
    ones = list(Loader(photos, batch_size=1, transforms={"label": refuse(7, 8)}, **options))
    assert [batch["label"].item() for batch in ones[6:10]] == [6, 9, 9, 9]
    assert [batch["valid"].item() for batch in ones[6:10]] == [True, False, False, True]
    single = StreamingDataset(photos, transforms={"label": refuse(*range(4, 30))}, **options)
    assert [sample["label"] for sample in single] == [*range(4), *[30] * 26, *range(30, 37)]


def test_where_no_good_sample_follows_the_bad_ones_are_not_passed_over_for_ever(photos):
    def load(bad, **options):
        transforms = {"label": refuse(*bad)}
        return list(Loader(photos, batch_size=4, transforms=transforms, on_error="skip", **options))

    with pytest.raises(SampleError, match=r"\(36 tried\)") as caught:
        load(range(37))
    assert caught.value.__cause__.where["key"] == "0000"
    assert isinstance(caught.value.__cause__.__cause__, ValueError)
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
    loader = Loader(path, transforms={"tokens": refuse(3, 4)}, on_error="skip", **options)
    batches = list(loader)
    assert sorted(error["key"] for error in loader.errors) == ["0003", "0004"]
    for batch, planned in zip(batches, Loader(path, **options), strict=True):
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


@pytest.mark.parametrize("format", IMAGE_FORMATS)
def test_a_shard_that_is_cut_deleted_or_changed_while_training_is_named(tmp_path, format):
    changes = {
        "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
        "delete": os.unlink,
        "replace": lambda path: path.write_bytes(b"something else"),
    }
    for name, change in changes.items():
        path = write_photos(tmp_path / name, format, samples=20, shard=5)
        shard = shardkit.open(path).shard_path(2)
        victim = next(shard.glob("data.mdb"), shard) if shard.is_dir() else shard
        iterator = iter(Loader(path, batch_size=2, threads=1, prefetch=1))
        next(iterator)
        change(victim)
        with pytest.raises(ShardkitError) as caught:
            list(iterator)
        assert str(victim) in str(caught.value)


# --- threads, memory and the end -----------------------------------------------------------------


@pytest.mark.parametrize("waits", ["", "storage", "function"])
def test_more_threads_than_processors_work_only_if_they_may_wait(photos, monkeypatch, waits):
    crop_many, all_at_once, seen = direct.crop_many, None, set()

    def noted(*given, **more):
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            if all_at_once is not None:
                all_at_once.wait(120)
        return crop_many(*given, **more) if more else given[0]

    class Reads:
        """Storage that has to be waited for, or not."""

        def __getattr__(self, name):
            return getattr(reads, name)

        def read_ranges(self, *given):
            found = reads.read_ranges(*given)
            return found if found >= 0 else -2 if waits == "storage" else -1

    monkeypatch.setattr(batches, "processors", lambda: 2)
    monkeypatch.setattr(blobs, "reads", Reads())
    monkeypatch.setattr(direct, "crop_many", noted)
    more = {"label": noted} if waits == "function" else {}
    loader = Loader(photos, batch_size=16, threads=4, transforms={**CROP, **more})
    list(loader)  # which finds what waits, and how large batches are
    seen.clear()
    all_at_once = threading.Barrier(4) if waits else None
    list(loader)
    assert len(seen) == 4 if waits else 1 <= len(seen) <= 2


@pytest.mark.usefixtures("few_objects")
def test_threads_end_with_the_iteration_however_it_ends(photos, monkeypatch):
    monkeypatch.setattr("shardkit.stream.loader._END_SECONDS", 60)  # that no load decides
    threads = set()

    def noted(label):
        threads.add(threading.current_thread())
        if label == 36:
            raise ValueError
        return label

    def ended():
        """Whether threads made batches, and no longer run."""
        gc.collect()
        seen = list(threads)
        threads.clear()
        return bool(seen) and not any(thread.is_alive() for thread in seen)

    loader = Loader(photos, batch_size=4, threads=3, transforms={"label": noted})
    for _ in loader:
        assert any(thread.is_alive() for thread in threads)
        break
    assert ended(), "left by break"
    iterator = iter(loader)
    next(iterator)
    iterator.close()
    assert ended(), "closed"
    assert list(iterator) == []
    with pytest.raises(SampleError):
        list(loader)
    assert ended(), "failed"
    list(loader.with_options(on_error="skip"))
    assert ended(), "exhausted"


def test_a_transform_that_hangs_does_not_hold_up_the_end(photos, monkeypatch):
    """As at Ctrl-C. Its thread ends by itself when it can."""
    monkeypatch.setattr("shardkit.stream.loader._END_SECONDS", 0.01)
    hanging, hangs, go_on = [], threading.Event(), threading.Event()

    def hang(label):
        if label == 4:
            hanging.append(threading.current_thread())
            hangs.set()
            assert go_on.wait(60)
        return label

    iterator = iter(Loader(photos, batch_size=4, threads=2, transforms={"label": hang}))
    next(iterator)
    assert hangs.wait(60)
    iterator.close()
    assert hanging[0].is_alive()
    go_on.set()
    hanging[0].join(60)
    assert not hanging[0].is_alive()


def run_python(code, path):
    command = [sys.executable, "-W", "ignore", "-c", code, path]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


ENDS = """
import os, signal, sys
import shardkit.stream

ends = [
    lambda: None, lambda: sys.exit(3), lambda: 1 / 0, lambda: os.kill(os.getpid(), signal.SIGINT)
]
for end in ends:  # each of an interpreter of its own
    if not (child := os.fork()):
        loader = shardkit.stream.Loader(sys.argv[1], batch_size=2, threads=4, shuffle=True)
        iterator = iter(loader)
        next(iterator)
        end()
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_the_interpreter_exits_at_once_in_the_middle_of_an_epoch(photos):
    """At its end, by SystemExit, by an error, and by Ctrl-C."""
    run = run_python(ENDS, photos)
    assert run.stdout.split() == ["0", "3", "1", "-2"], run.stderr
    assert "Fatal" not in run.stderr
    assert "Exception ignored" not in run.stderr


DAEMON = """
import sys, threading, time
import shardkit.stream

def slow(label):
    inside.set()
    time.sleep(0.01)  # so that the thread nearly always waits for a batch
    return label

def iterate():
    while True:
        for _ in loader:
            pass

inside = threading.Event()
loader = shardkit.stream.Loader(
    sys.argv[1], batch_size=2, threads=THREADS, transforms={"label": slow}
)
threading.Thread(target=iterate, daemon=True).start()
inside.wait()
"""


@pytest.mark.parametrize("threads", [0, 2])
def test_a_daemon_thread_that_iterates_ends_without_a_word_at_exit(photos, threads):
    run = run_python(DAEMON.replace("THREADS", str(threads)), photos)
    assert (run.returncode, run.stderr) == (0, "")


WAITS = """
import itertools, os, signal, sys
import shardkit.stream

made = itertools.count(1)
def transform(label):
    if next(made) == 9:
        os.kill(os.getpid(), signal.SIGINT)
    return label
options = {"batch_size": 4, "transforms": {"label": transform}}
try:
    for _ in range(10_000):
        list(shardkit.stream.Loader(sys.argv[1], threads=THREADS, **options))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("threads", [0, 2])
def test_ctrl_c_while_a_batch_is_made_is_an_interrupt_and_no_more(photos, threads):
    run = run_python(WAITS.replace("THREADS", str(threads)), photos)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


def test_an_iteration_that_goes_on_after_a_fork_is_refused_and_a_loader_is_not(photos):
    """As DataLoader's workers get it; the process that forked goes on. It waited for ever."""
    whole, used, unused = (Loader(photos, batch_size=4, threads=2, shuffle=True) for _ in range(3))
    expected, iterator = [keys(whole), keys(whole)], iter(used)
    first = next(iterator)["__key__"]

    def goes_on():
        with pytest.raises(UsageError, match="forked") as error:
            next(iterator)
        assert "iterate over the Loader" in error.value.fix
        iterator.close()
        return [keys(unused), keys(used)]

    assert in_fork(goes_on) == expected
    assert [first, *keys(iterator)] == expected[0]


@pytest.mark.parametrize("failure", [RuntimeError, MemoryError])
def test_a_thread_that_cannot_be_started_by_another_is_an_error(photos, failure, monkeypatch):
    """Without memory, an iteration waited for ever."""
    start = threading.Thread.start

    def start_first(thread):
        if threading.current_thread() is not threading.main_thread():
            raise failure("no thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_first)
    calm = {"label": lambda label: label}  # functions may wait, so all threads are started
    with pytest.raises(failure, match="no thread"):
        next(iter(Loader(photos, batch_size=37, threads=4, prefetch=1, transforms=calm)))


def test_of_threads_that_take_from_one_iteration_at_once_all_but_one_are_refused(photos):
    """One waited for ever. Threads that take turns are fine."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(label):
        begun.set()
        assert go_on.wait(60)
        return label

    # Without threads of its own it makes a batch where it is asked for one.
    iterator = iter(Loader(photos, batch_size=4, threads=0, transforms={"label": slow}))
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(next, iterator)
        assert begun.wait(60)
        with pytest.raises(UsageError, match="another thread"):
            next(iterator)
        go_on.set()
        assert taken.result(60)["label"].tolist() == [0, 1, 2, 3]
    assert len(list(iterator)) == 10 - 1


def count_steps(monkeypatch, loader, hear=lambda count: None):
    """The steps that a loader has begun; `hear` is called with their number at each one."""
    stream, steps = loader.dataset.stream, []

    def counted(*arguments, ahead=stream.ahead):
        for step in ahead(*arguments):
            steps.append(step)
            hear(len(steps))
            yield step

    monkeypatch.setattr(stream, "ahead", counted)
    return steps


def test_a_thread_that_waits_for_a_batch_hears_that_the_iteration_was_closed(tmp_path, monkeypatch):
    monkeypatch.setattr("shardkit.stream.loader._END_SECONDS", 0)
    waits, go_on, made = threading.Event(), threading.Event(), []

    def slow(tokens):
        made.append(tokens)
        assert len(made) <= 80 or go_on.wait(60)
        return tokens

    path = write_tokens(tmp_path / "t", samples=240, length=2)
    transforms = {"tokens": slow}
    loader = Loader(path, batch_size=80, threads=1, prefetch=1, transforms=transforms)
    # When it begins the third batch, it has taken the second from the queue.
    count_steps(monkeypatch, loader, lambda count: count == 3 and waits.set())
    iterator = iter(loader)
    next(iterator)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(next, iterator)
        assert waits.wait(60)
        iterator.close()
        go_on.set()
        with pytest.raises(UsageError, match="the iteration was closed while a thread was taking"):
            taken.result(60)
    # A thread at the first 64 rows of a batch does not begin the others.
    assert len(made) <= 80 + 64


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
    next(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert len(hit) == 9
    assert loader.state_dict()["samples"] == 8, "what was delivered"


def test_memory_of_batches_is_used_again_only_when_nobody_refers_to_it(photos):
    loader = Loader(photos, batch_size=4, transforms=CROP, threads=2, shuffle=True)
    held = list(loader)
    some = held[2]["image"][1:3, ::2]
    expected = some.copy()
    del held[2]
    for _ in range(3):
        list(loader)
    assert (some == expected).all()
    del held, some
    addresses = {batch["image"].ctypes.data for batch in loader}
    assert len(addresses) < len(loader)


GROWTH = """
import gc, os, resource, sys, threading
from shardkit import RandomResizedCrop
from shardkit.stream import Loader

crop = {"image": [RandomResizedCrop(32)]}
loader = Loader(sys.argv[1], batch_size=8, transforms=crop, shuffle=True, threads=2)

def used():
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), resident

for epochs in (10, 40):
    for _ in range(epochs):
        list(loader)
    print(*used())
"""


def test_forty_epochs_leave_nothing_behind(photos):
    """No growth in memory, threads or open files, in a process that does nothing else."""
    done = run_python(GROWTH, photos)
    assert done.returncode == 0, done.stderr
    before, after = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 8 << 20
