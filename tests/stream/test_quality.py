"""How good a shuffle is, and that a poor one is warned about, and no other."""

from __future__ import annotations

import shutil
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.errors import ShardkitWarning
from shardkit.schema import Int
from shardkit.stream.options import StreamOptions
from shardkit.stream.order import Order
from shardkit.stream.quality import times_alike, warn_of_sorted
from shardkit.stream.reading import Samples
from shardkit.stream.stream import Stream
from tests.conftest import examples

CLASSES, EACH, BATCH = 100, 40, 64
NAMES = [f"class {n}" for n in range(CLASSES)]


def write(out, labels, names=NAMES, shard=100, to="arrow"):
    with shardkit.create(
        out, to=to, schema={"label": Int()}, classes=names, shard_samples=shard
    ) as writer:
        for label in labels.tolist():
            writer.write({"label": label})
    return out


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The same labels sorted, and shuffled."""
    root = tmp_path_factory.mktemp("quality")
    labels = np.repeat(np.arange(CLASSES), EACH)
    write(root / "sorted", labels)
    write(root / "shuffled", np.random.default_rng(0).permutation(labels))
    return root


def warned(source, epoch=0, **options):
    """The one warning, or nothing."""
    stream = Stream(source, StreamOptions(**{"shuffle": True, "batch_size": BATCH, **options}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_sorted(stream, epoch)
    assert all(w.category is ShardkitWarning for w in caught)
    assert len(caught) <= 1
    return str(caught[0].message) if caught else None


def labels_of(source, epoch=0, **options):
    """The labels of an epoch in the order they come."""
    stream = Stream(source, StreamOptions(shuffle=True, **options))
    order = stream.order.draw(epoch, np.arange(stream.order.samples)).number
    return np.array([stream.samples.read(number)["label"] for number in order.tolist()])


# --- measures ------------------------------------------------------------------------------------


def displacement(numbers):
    """How far samples move from their stored position: 0 for none, about 1 for a full shuffle.

    `numbers` are those of all samples of a dataset, at least two, in the order of the epoch.
    """
    size = len(numbers)
    full = (size - 1 / size) / 3  # on average over all permutations
    return float(np.abs(numbers - np.arange(size)).mean() / full)


def run_lengths(labels):
    """The length of runs of one class: about 1 for a full shuffle, more if sorted.

    `labels` are those of the samples in the order of the epoch, at least two.
    """
    size = len(labels)
    _, counts = np.unique(labels, return_counts=True)
    full = size + 1 - (counts.astype(np.float64) ** 2).sum() / size  # runs, on average
    return float(full / (1 + np.count_nonzero(labels[1:] != labels[:-1])))


def variety(labels, batch_size):
    """The average number of classes in a batch: 1 for as many as in a full shuffle, less if sorted.

    `labels` are those of the samples in the order of the epoch, at least a batch.
    """
    size = len(labels)
    _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    batches = np.sort(classes[: size // batch_size * batch_size].reshape(-1, batch_size))
    found = 1 + np.count_nonzero(np.diff(batches), axis=1).mean()
    taken = np.arange(batch_size)[:, None]  # samples of other classes that a batch has so far
    without = np.prod(np.maximum(size - counts - taken, 0) / (size - taken), axis=0)
    return float(found / (1 - without).sum())


def test_samples_as_stored_and_fully_shuffled_have_known_measures():
    labels = np.repeat(np.arange(CLASSES), EACH)
    order = np.arange(len(labels))
    assert displacement(order) == 0
    assert displacement(order[::-1]) == pytest.approx(1.5, rel=1e-3)
    assert run_lengths(labels) == pytest.approx((4000 + 1 - 100 * 40 * 40 / 4000) / 100)
    assert variety(labels, BATCH) < 0.06  # 2 or 3 of 47 classes
    full = np.random.default_rng(1).permutation(len(labels))
    assert displacement(full) == pytest.approx(1, abs=0.05)
    assert run_lengths(labels[full]) == pytest.approx(1, abs=0.02)
    assert variety(labels[full], BATCH) == pytest.approx(1, abs=0.03)


@settings(max_examples=examples(10))
@given(st.lists(st.integers(0, 4), min_size=2, max_size=12), st.integers(0, 2**32), st.data())
def test_measures_are_relative_to_the_mean_of_all_permutations(labels, seed, data):
    """By 1,000 random ones: that of the runs is a ratio of means, and so is that of classes."""
    values = np.array(labels)
    batch = data.draw(st.integers(1, len(values)))
    random = np.random.default_rng(seed)
    orders = [random.permutation(len(values)) for _ in range(1000)]
    assert np.mean([displacement(order) for order in orders]) == pytest.approx(1, abs=0.15)
    assert np.mean([1 / run_lengths(values[order]) for order in orders]) == pytest.approx(
        1, abs=0.1
    )
    assert np.mean([variety(values[order], batch) for order in orders]) == pytest.approx(1, abs=0.1)


@pytest.mark.large
def test_blocks_and_windows_of_a_sorted_dataset_against_a_full_shuffle():
    """ImageNet's size, sorted, in shards of 256 MB: what each window makes of it."""
    labels = np.repeat(np.arange(1000), 1281)
    sizes = np.diff(np.append(np.arange(0, len(labels), 9100), len(labels)))
    windows = [1 << 14, 1 << 16, 1 << 18, 1 << 20, len(labels)]
    measured = []
    for window in windows:
        order = Order(sizes, shuffle=True, seed=0, window=window)
        numbers = order.draw(0, np.arange(len(labels))).number
        came = labels[numbers]
        measured.append((displacement(numbers), run_lengths(came), variety(came, 256)))
        print(f"window {window:9,}: %.3f displaced, %.3f runs, %.3f of the classes" % measured[-1])
    moved, runs, classes = np.array(measured).T
    assert moved == pytest.approx(1, abs=0.1), "blocks are permuted, whatever the window"
    assert (np.diff(classes) > 0).all(), "the larger the window, the better"
    assert runs[-3:] == pytest.approx(1, abs=0.01)
    assert classes[-1] == pytest.approx(1, abs=0.01)
    assert classes[1] < 0.5, "the default window is too small for this, and warned about"


# --- the warning ---------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [16, 64, 256, 1024, 2048, 4000])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_sorted_dataset_is_warned_about_where_its_batches_are_poor(stored, window, parts):
    poor = warned(stored / "sorted", window=window, parts=parts) is not None
    share = variety(labels_of(stored / "sorted", window=window, parts=parts), BATCH)
    print(f"window {window}, {parts} parts: {share:.2f} of the classes, warned: {poor}")
    assert poor if share < 0.5 else not poor if share > 0.85 else True


@pytest.mark.parametrize("window", [1, 16, 256, 4000])
def test_a_shuffled_dataset_is_never_warned_about(stored, window):
    for seed in range(20):
        assert warned(stored / "shuffled", window=window, seed=seed) is None


def test_the_warning_says_how_much_a_window_sees_and_what_is_enough(stored):
    message = warned(stored / "sorted", window=128)
    assert "a window of 128 samples contains about" in message
    assert "of 100 classes" in message
    seen = int(message.split("about ")[1].split(" of")[0])
    assert 5 <= seen <= 25
    enough = int(message.split("window=")[1].split(",")[0])
    assert 128 < enough <= CLASSES * EACH
    for epoch in range(5):
        assert warned(stored / "sorted", epoch, window=enough) is None
    assert variety(labels_of(stored / "sorted", window=enough), BATCH) > 0.75


def test_converting_with_shuffle_is_the_end_of_it(stored, tmp_path):
    shardkit.convert(stored / "sorted", to="wds", out=tmp_path / "once", shuffle=True, workers=0)
    assert warned(tmp_path / "once", window=64) is None
    shardkit.convert(tmp_path / "once", to="arrow", out=tmp_path / "again", workers=0)
    assert warned(tmp_path / "again", window=64) is None
    shardkit.convert(stored / "sorted", to="wds", out=tmp_path / "as-it-was", workers=0)
    assert warned(tmp_path / "as-it-was", window=64)


def test_labels_are_read_only_where_they_can_tell_something(stored, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(Samples, "read", lambda self, number: read.append(number) or {"label": 0})
    labels = np.repeat(np.arange(CLASSES), EACH)
    plain = write(tmp_path / "no-classes", labels, names=None)
    assert warned(plain, window=64) is None
    assert warned(stored / "sorted", window=64, shuffle=False) is None
    assert warned(stored / "sorted", window=4000) is None
    assert warned(stored / "sorted", window=2000, parts=2) is None
    shardkit.convert(plain, to="arrow", out=tmp_path / "made", shuffle=True, workers=0)
    assert warned(tmp_path / "made", window=64) is None
    assert read == []
    assert warned(stored / "sorted", window=64)
    assert len(read) == 64


def test_several_datasets_are_judged_together(stored, tmp_path):
    assert warned([stored / "sorted"] * 2, window=64)
    assert warned([stored / "sorted", stored / "shuffled"], window=8000) is None
    many = write(tmp_path / "many", np.repeat(np.arange(400), 40), list(map(str, range(400))))
    assert warned([many, many], window=1024, weights=[1, 20])
    assert warned([many, stored / "shuffled"], window=1024, weights=[1, 1000]) is None


def test_few_classes_are_mixed_by_any_window_and_one_class_is_not_sorted(tmp_path):
    """A window has 16 blocks at least: a class or two cannot fill it."""
    for classes in (1, 2, 4):
        labels = np.repeat(np.arange(classes), 2000 // classes)
        path = write(tmp_path / str(classes), labels, NAMES[:classes])
        for window in (64, 1000):
            assert warned(path, window=window) is None
        if classes > 1:
            assert variety(labels_of(path, window=64), BATCH) > 0.9


def test_a_damaged_shard_is_left_to_the_loader_to_tell(stored, tmp_path):
    shutil.copytree(stored / "sorted", tmp_path / "cut")
    for file in sorted((tmp_path / "cut").glob("*.arrow")):
        file.write_bytes(b"")
    assert warned(tmp_path / "cut", window=64) is None


@given(
    classes=st.integers(1, 3000),
    steepness=st.sampled_from([0, 0.5, 1, 1.5, 2, 3]),
    seed=st.integers(0, 2**32),
)
def test_a_full_shuffle_of_any_classes_is_not_taken_for_a_sorted_dataset(classes, steepness, seed):
    """Classes of equal sizes, or few large and many small ones. By chance 1 in 5,000 is."""
    shares = np.arange(1, classes + 1) ** -float(steepness)
    shares /= shares.sum()
    random = np.random.default_rng(seed)
    draws = [random.choice(classes, 64, p=shares) for _ in range(100)]
    assert sum(times_alike(labels, shares) is not None for labels in draws) <= 1


@pytest.mark.parametrize("classes", [100, 1000, 20_000])
def test_samples_of_few_of_the_classes_are_noticed(classes):
    shares = np.full(classes, 1 / classes)
    random = np.random.default_rng(0)
    for seen in (1, 4, 16):
        labels = random.choice(classes, seen, replace=False)[random.integers(0, seen, 64)]
        assert times_alike(labels, shares) == pytest.approx(classes / seen, rel=0.4)
