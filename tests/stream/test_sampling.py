"""Balanced and weighted sampling: exact counts, on any number of ranks, resumed at any step."""

import functools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.errors import UsageError
from shardkit.stream import Loader
from shardkit.stream.sampling import Balanced, Sampled, Weighted
from tests.stream.data import photo, real_keys, write, write_documents

GOLDEN = Path(__file__).parent / "golden/sampling-1.json"
LABELS = [0] * 20 + [1] * 9 + [2] * 5 + [3] + [5] * 2  # class 4 has no sample
CLASSES = 5

CLASS_LISTS = st.lists(st.integers(0, 6), min_size=1, max_size=60)
SEEDS = st.integers(0, 2**63)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Images sorted by class, with weights, whose text is their key."""
    out = tmp_path_factory.mktemp("sampled") / "photos"
    schema = {
        "image": shardkit.Image(),
        "label": shardkit.Int(),
        "weight": shardkit.Float(),
        "species": shardkit.Text(optional=True),
    }
    species = ({"species": f"s{label}"} if number else {} for number, label in enumerate(LABELS))
    samples = (
        {"image": photo(number), "label": LABELS[number], "weight": number % 4 / 2, **more}
        for number, more in enumerate(species)
    )
    return write(out, "wds", schema, samples)


def loader_of(source, sampling, **options):
    options = {"shuffle": True, "seed": 3, "fields": ["label"], "threads": 0, **options}
    return Loader(source, sampling=sampling, **options)


@given(CLASS_LISTS, SEEDS, st.integers(1, 90), st.integers(0, 2**31 - 8))
def test_classes_come_equally_often_and_samples_once_in_a_pass(classes, seed, samples, first):
    """S1's counterpart for Balanced, over some epochs in a row, early or late ones."""
    of = np.array(classes)
    sampler = Balanced(of).sampler(of, samples, seed)
    drawn = []
    for epoch in range(first, first + 5):
        number, turn = sampler.drawn(epoch)
        counts = Counter(of[number].tolist())
        assert len(number) == samples
        every = [counts[name] for name in set(classes)]
        assert max(every) - min(every) <= 1
        drawn += zip(number.tolist(), turn.tolist(), strict=True)
    assert len(set(drawn)) == len(drawn), "a sample's turns differ, so that its crops do"
    for name in set(classes):
        members = np.flatnonzero(of == name)
        counts = Counter(number for number, _ in drawn if of[number] == name)
        times = [counts[n] for n in members.tolist()]
        # Two passes are cut by the beginning and the end of these epochs.
        assert max(times) - min(times) <= (1 if first == 0 else 2)


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=60).filter(lambda w: sum(w) > 1e-3),
    SEEDS,
    st.integers(1, 500),
    st.integers(0, 2**31 - 2),
)
def test_weighted_samples_come_as_often_as_expected_rounded_up_or_down(
    weights, seed, samples, epoch
):
    sampler = Weighted(weights).sampler(np.array(weights), samples, seed)
    number, turn = sampler.drawn(epoch)
    expected = np.array(weights) / sum(weights) * samples
    counts = np.bincount(number, minlength=len(weights))
    assert counts.sum() == samples
    assert (counts >= np.floor(expected - 1e-6)).all()
    assert (counts <= np.ceil(expected + 1e-6)).all()
    assert not counts[np.array(weights) == 0].any()
    assert len(set(zip(number.tolist(), turn.tolist(), strict=True))) == samples


def test_over_epochs_weights_are_shares():
    """With less variance than torch's WeightedRandomSampler has: chi-squared is 49 on average."""
    weights = np.random.default_rng(0).random(50)
    sampler = Weighted(weights).sampler(weights, 30, 1)
    drawn = np.concatenate([sampler.drawn(epoch).number for epoch in range(1000)])
    expected = weights / weights.sum() * 30_000
    assert ((np.bincount(drawn, minlength=50) - expected) ** 2 / expected).sum() < 40


def test_the_draws_are_those_of_their_version():
    """Golden: states hold positions in this order."""
    sizes, classes = np.array([5, 0, 17, 1, 14]), np.array(LABELS)
    weights = np.arange(37) % 4 / 2
    found = {}
    for name, sampler in {
        "balanced": Balanced().sampler(classes, 37, 5),
        "more": Balanced().sampler(classes, 80, 6),
        "weighted": Weighted(weights).sampler(weights, 37, 7),
    }.items():
        order = Sampled(sizes, sampler, seed=7, parts=3, window=16)
        draws = [order.draw(epoch, np.arange(order.samples)) for epoch in range(3)]
        found[name] = [[draw.number.tolist(), draw.epoch.tolist()] for draw in draws]
    assert found == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize(
    "sampling",
    [Balanced("label"), Balanced(), Balanced(LABELS), Balanced("label", samples=61)],
    ids=["field", "label", "values", "samples"],
)
def test_a_balanced_epoch_has_exact_counts(photos, sampling):
    loader = loader_of(photos, sampling, batch_size=4)
    samples = sampling.samples or len(LABELS)
    assert len(loader) == -(-samples // 4)
    for _ in range(3):
        labels = Counter(LABELS[int(key)] for key in real_keys(loader).elements())
        assert labels.total() == samples
        assert set(labels) == set(LABELS)
        assert set(labels.values()) <= {samples // CLASSES, -(-samples // CLASSES)}


def test_a_state_of_another_sampling_is_refused(photos):
    state = loader_of(photos, Balanced("label"), batch_size=4).state_dict()
    for sampling in (None, Balanced("label", samples=50), Weighted("weight"), Balanced(LABELS)):
        with pytest.raises(UsageError, match="another dataset or other settings"):
            loader_of(photos, sampling, batch_size=4).load_state_dict(state)
    loader_of(photos, Balanced("label"), batch_size=4).load_state_dict(state)


def test_copies_of_a_sample_have_crops_of_their_own(photos):
    options = {"fields": ["image"], "transforms": {"image": shardkit.RandomResizedCrop(16)}}
    batch = next(iter(loader_of(photos, Balanced("label"), batch_size=37, **options)))
    rows = zip(batch["__key__"], batch["image"], strict=True)
    crops = [pixels.tobytes() for key, pixels in rows if key == "0034"]  # alone in its class
    assert len(crops) == len(set(crops)) >= 7


def test_shards_are_read_one_after_the_other(tmp_path):
    """S5: a part of a balanced epoch opens about its share of the shards."""
    classes = np.repeat([0, 1], [900, 60])
    order = Sampled(np.full(96, 10), Balanced().sampler(classes, 960, 2), seed=4, parts=4)
    positions = np.arange(960)
    for part in range(4):
        shards = np.unique(order.draw(0, positions[positions % 4 == part]).number // 10)
        assert len(shards) <= 96 / 4 + 12


def test_batches_by_length_are_sampled(tmp_path):
    documents = write_documents(tmp_path / "documents", [1 + 7 * n % 23 for n in range(50)])
    sampling = Weighted([float(n < 10) for n in range(50)])
    loader = Loader(documents, batching=shardkit.Dynamic(64), shuffle=True, sampling=sampling)
    counts = Counter(key for batch in loader for key in batch["__key__"])
    assert counts == {f"{n:04d}": 5 for n in range(10)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampling": "label"}, "sampling must be shardkit.Balanced"),
        ({"sampling": Balanced("label"), "shuffle": False}, "requires shuffle=True"),
        ({"sampling": Balanced("label"), "weights": [1]}, "cannot be used together"),
        ({"sampling": Balanced("colour")}, "no field 'colour'"),
        ({"sampling": Balanced("weight")}, "a class for each sample"),
        ({"sampling": Balanced("species")}, r"found: 1 of 37"),
        ({"sampling": Balanced([1, 2])}, "for each sample: 37 values"),
        ({"sampling": Balanced(np.zeros((37, 2)))}, "one-dimensional array"),
        ({"sampling": Weighted("species")}, r"1 of 37|must be numbers"),
        ({"sampling": Weighted([1.0] * 36 + [-1.0])}, "not negative.*sample 36"),
        ({"sampling": Weighted([float("nan")] * 37)}, "finite"),
        ({"sampling": Weighted([0] * 37)}, "all weights are 0"),
        ({"sampling": Weighted([1e308] * 37)}, "0 to 1e.200"),
        ({"sampling": Weighted(None)}, "one value for each sample"),
        ({"sampling": Balanced([None] * 20 + [1] * 17)}, "values of type NoneType, int"),
        ({"sampling": Balanced([[1]] * 20 + [[1, 2]] * 17)}, "one value for each sample"),
        ({"sampling": Balanced("image")}, "needs a single value.*found: Image"),
    ],
)
def test_mistakes_are_told(photos, options, words):
    with pytest.raises(UsageError, match=f"(?s){words}"):
        Loader(photos, batch_size=4, **{"shuffle": True, **options})


@pytest.mark.parametrize("samples", [0, 1.5, True, 1 << 31])
def test_the_number_of_draws_is_checked(samples):
    for make in (Balanced, functools.partial(Weighted, "weight")):
        with pytest.raises(UsageError, match="samples must be a whole number from 1 up"):
            make(samples=samples)


def write_classes(path, names, labels):
    samples = ({"label": label} for label in labels)
    return write(path, "wds", {"label": shardkit.Int()}, samples, classes=names)


def test_samples_without_a_class_are_no_class_of_their_own(tmp_path):
    path = write_classes(tmp_path / "some", ["cat", "dog"], [0, 0, 1, -1])
    options = {"batch_size": 1, "shuffle": True}
    with pytest.raises(UsageError, match=r"(?s)value of 'label' for each.*found: 1 of 4"):
        Loader(path, sampling=Balanced("label"), **options)
    labelled = shardkit.open(path).filter("label >= 0")
    assert len(Loader(labelled, sampling=Balanced("label", samples=6), **options)) == 6
    assert [entry["weight"] for entry in shardkit.open(path).stats()["classes"]] == [0.75, 1.5]


def test_class_names_that_differ_are_no_common_classes(tmp_path):
    names = (["cat", "dog"], ["dog", "emu"])
    paths = [write_classes(tmp_path / name[1], name, [0, 1]) for name in names]
    options = {"batch_size": 1, "shuffle": True}
    with pytest.raises(UsageError, match="different class names for 'label'"):
        Loader(paths, sampling=Balanced("label"), **options)
    assert len(Loader(paths, sampling=Balanced([*names[0], *names[1]], samples=6), **options)) == 6
