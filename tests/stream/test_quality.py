"""How good a shuffle is, and that a poor one is warned about, and no other."""

import itertools
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.errors import ShardkitWarning
from shardkit.schema import Int
from shardkit.stream.options import StreamOptions
from shardkit.stream.order import Order
from shardkit.stream.quality import times_alike, warn_of_sorted
from shardkit.stream.reading import Samples
from shardkit.stream.stream import Stream
from tests.stream.data import write

CLASSES, EACH, BATCH = 100, 40, 64
NAMES = [f"class {n}" for n in range(CLASSES)]
SORTED = np.repeat(np.arange(CLASSES), EACH)


def labelled(out, labels, names=NAMES):
    samples = ({"label": label} for label in labels.tolist())
    return write(out, "arrow", {"label": Int()}, samples, 100, classes=names)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The same labels sorted, and shuffled."""
    root = tmp_path_factory.mktemp("quality")
    labelled(root / "sorted", SORTED)
    labelled(root / "shuffled", np.random.default_rng(0).permutation(SORTED))
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


def labels_of(source, labels=SORTED, **options):
    """The labels of an epoch in the order they come."""
    order = Stream(source, StreamOptions(shuffle=True, **options)).order
    return labels[order.draw(0, np.arange(order.samples)).number]


def variety(labels, batch_size=BATCH):
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


@pytest.mark.large
def test_windows_of_a_sorted_dataset_give_the_classes_that_the_page_says():
    """ImageNet's size, in shards of 256 MB."""
    text = Path(__file__).parents[2].joinpath("docs/shuffling.md").read_text("utf-8")
    rows = re.findall(r"^\| ([\d,]+|whole dataset)(?: \(default\))? \| (\d+) % \|$", text, re.M)
    labels = np.repeat(np.arange(1000), 1281)
    sizes = np.diff([*range(0, len(labels), 9100), len(labels)])
    assert len(rows) == 5
    for size, percent in rows:
        window = int(size.replace(",", "")) if size[0].isdigit() else len(labels)
        order = Order(sizes, shuffle=True, seed=0, window=window)
        share = variety(labels[order.draw(0, np.arange(len(labels))).number], 256)
        assert round(100 * share) == int(percent), size


@pytest.mark.parametrize(
    ("window", "parts"), [(16, 1), (64, 2), (256, 1), (1024, 2), (2048, 1), (2048, 2), (4000, 1)]
)
def test_a_sorted_dataset_is_warned_about_where_its_batches_are_poor(stored, window, parts):
    poor = warned(stored / "sorted", window=window, parts=parts) is not None
    share = variety(labels_of(stored / "sorted", window=window, parts=parts))
    print(f"window {window}, {parts} parts: {share:.2f} of the classes, warned: {poor}")
    assert poor if share < 0.5 else not poor if share > 0.85 else True


def test_a_shuffled_dataset_is_never_warned_about(stored):
    for window, seed in itertools.product([1, 16, 256], range(5)):
        assert warned(stored / "shuffled", window=window, seed=seed) is None


def test_the_warning_says_how_much_a_window_sees_and_what_is_enough(stored):
    message = warned(stored / "sorted", window=128)
    assert "a window of 128 samples contains about" in message
    assert "of 100 classes" in message
    assert 5 <= int(message.split("about ")[1].split(" of")[0]) <= 25
    enough = int(message.split("window=")[1].split(",")[0])
    assert 128 < enough <= CLASSES * EACH
    for epoch in range(2):
        assert warned(stored / "sorted", epoch, window=enough) is None
    assert variety(labels_of(stored / "sorted", window=enough)) > 0.75


def test_converting_with_shuffle_is_the_end_of_it(stored, tmp_path):
    def converted(name, source, **options):
        shardkit.convert(source, "arrow", tmp_path / name, workers=0, **options)
        return warned(tmp_path / name, window=64)

    assert converted("once", stored / "sorted", shuffle=True) is None
    assert converted("again", tmp_path / "once") is None
    assert converted("as it was", stored / "sorted")


def test_labels_are_read_only_where_they_can_tell_something(stored, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(Samples, "read", lambda self, number: read.append(number) or {"label": 0})
    plain = labelled(tmp_path / "no-classes", SORTED, names=None)
    assert warned(plain, window=64) is None
    assert warned(stored / "sorted", window=64, shuffle=False) is None
    assert warned(stored / "sorted", window=4000) is None
    assert warned(stored / "sorted", window=2000, parts=2) is None
    assert read == []
    assert warned(stored / "sorted", window=64)
    assert len(read) == 64


def test_several_datasets_are_judged_together(stored, tmp_path):
    assert warned([stored / "sorted"] * 2, window=64)
    assert warned([stored / "sorted", stored / "shuffled"], window=8000) is None
    many = labelled(tmp_path / "many", np.repeat(np.arange(400), 40), list(map(str, range(400))))
    assert warned([many, many], window=1024, weights=[1, 20])
    assert warned([many, stored / "shuffled"], window=1024, weights=[1, 1000]) is None


@pytest.mark.parametrize("classes", [1, 2, 4])
def test_few_classes_are_mixed_by_any_window_and_one_class_is_not_sorted(tmp_path, classes):
    """A window has 16 blocks at least: a class or two cannot fill it."""
    labels = np.repeat(np.arange(classes), 1000 // classes)
    path = labelled(tmp_path / "few", labels, NAMES[:classes])
    assert warned(path, window=64) is warned(path, window=500) is None
    assert variety(labels_of(path, labels, window=64)) > 0.9


def test_a_damaged_shard_is_left_to_the_loader_to_tell(tmp_path):
    path = labelled(tmp_path / "cut", SORTED)
    for file in path.glob("*.arrow"):
        file.write_bytes(b"")
    assert warned(path, window=64) is None


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
    draws = [random.choice(classes, 64, p=shares) for _ in range(60)]
    assert sum(times_alike(labels, shares) is not None for labels in draws) <= 2


@pytest.mark.parametrize("classes", [100, 1000, 20_000])
def test_samples_of_few_of_the_classes_are_noticed(classes):
    shares = np.full(classes, 1 / classes)
    random = np.random.default_rng(0)
    for seen in (1, 4, 16):
        labels = random.choice(classes, seen, replace=False)[random.integers(0, seen, 64)]
        assert times_alike(labels, shares) == pytest.approx(classes / seen, rel=0.4)
