"""Some of the samples: by class, key, condition or at random; and how they are divided."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.conversion.run import prepare
from shardkit.conversion.splits import by_group, by_stratum
from shardkit.errors import OutputError, SampleError, SourceError, UsageError
from shardkit.metadata.manifest import load
from shardkit.options import ConvertOptions
from shardkit.schema import Array, Bool, Float, Int, Json, Text
from shardkit.sources import files as source_files
from shardkit.sources import image_folder
from shardkit.testing import make_image
from tests.conftest import few, files_of, write_images
from tests.conversion.test_fields import command
from tests.sources.test_text import put, put_lines


def convert(source, out, to="wds", **options):
    """Convert, and compare what was made with its source: splits by themselves too."""
    result = shardkit.convert(source, to, out, **{"workers": 0, **options})
    folders = sorted(path.parent.parent for path in out.glob("*/__shardkit__/manifest.json"))
    for folder in [*folders, out] if isinstance(source, Path) else []:
        found = shardkit.verify(folder, against=source)
        assert found.problems == []
        assert "limit" in options or not any("not in the dataset" in n for n in found.notes)
    return result, folders


def made(source, out, *args, **options):
    """The samples of the dataset that was made."""
    convert(source, out, *args, **options)
    with shardkit.open(out) as ds:
        return [ds[n] for n in range(len(ds))]


def keys_of(samples):
    return [sample["__key__"] for sample in samples]


def splits(source, out, *args, **options):
    """The keys of each split that was made."""
    _, folders = convert(source, out, *args, **options)
    return {folder.name: keys_of(shardkit.open(folder)) for folder in folders}


def refused(error, message, *args, **options):
    """The error of a conversion that is not done."""
    with pytest.raises(error, match=message) as caught:
        made(*args, **options)
    return caught.value


def test_classes_that_are_left_are_numbered_from_zero(images, tmp_path):
    samples = made(images, tmp_path / "in", include_class=["class2", "class1"])
    expected = [("class1", 0)] * 4 + [("class2", 1)] * 4
    assert [(s["__key__"][:6], s["label"]) for s in samples] == expected
    manifest = load(tmp_path / "in")
    assert manifest.class_names == {"label": ("class1", "class2")}
    assert manifest.label_counts == (4, 4)
    assert manifest.ignored == {"samples of other classes": 4}
    left = made(images, tmp_path / "out", exclude_class=["class0"])
    assert [s["label"] for s in left] == [s["label"] for s in samples]
    assert load(tmp_path / "out").class_names == manifest.class_names
    without = made(images, tmp_path / "without", include_class=["class1"], drop=["label"])
    assert [sorted(sample) for sample in without] == [["__key__", "image"]] * 4


def test_classes_of_datasets_sequences_and_names_in_an_order(images, tmp_path):
    shardkit.convert(images, "parquet", tmp_path / "all", workers=0)
    names = ["class2", "class1", "class0"]
    for source, options in (
        (tmp_path / "all", {}),
        (images, {"classes": names}),
        ([{"x": n, "label": n % 3} for n in range(12)], {"classes": names}),
    ):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        samples = made(source, out, "lmdb", include_class=["class2", "class0"], **options)
        order = ("class2", "class0") if options else ("class0", "class2")
        assert load(out).class_names == {"label": order}
        assert Counter(s["label"] for s in samples) == {0: 4, 1: 4}
        for sample in samples if isinstance(source, Path) else ():
            assert sample["__key__"].startswith(order[sample["label"]])


def test_a_split_without_any_of_the_classes_has_none(tmp_path):
    schema = shardkit.Schema({"label": Int()})
    for split, names in (("train", ("a", "b", "c")), ("test", ("a", "b"))):
        rows = [{"__key__": name, "label": number} for number, name in enumerate(names)]
        data = shardkit.Dataset.from_sequence(rows, schema=schema, class_names={"label": names})
        (tmp_path / "in").mkdir(exist_ok=True)
        shardkit.convert(data, "wds", tmp_path / "in" / split)
    result, _ = convert(str(tmp_path / "in"), tmp_path / "out", exclude_class=["a", "b"])
    assert [(found.samples, found.classes) for found in result.splits.values()] == [(1, 1), (0, 0)]


def test_samples_without_a_class_are_of_no_class(tmp_path):
    source = [*({"x": n, "label": n - 1} for n in range(3)), {"x": 3}]
    options = {"classes": ["a", "b"], "schema": {"x": Int(), "label": Int(optional=True)}}
    found = made(source, tmp_path / "in", include_class=["b"], **options)
    assert [(s["x"], s["label"]) for s in found] == [(2, 0)]
    found = made(source, tmp_path / "out", exclude_class=["a"], **options)
    assert [(s["x"], s.get("label")) for s in found] == [(0, -1), (2, 0), (3, None)]


def test_classes_of_texts_and_of_tables(tmp_path):
    for n in range(12):
        put(tmp_path / f"in/{('neg', 'pos')[n % 2]}/{n}.txt", f"text {n}")
    found = made(tmp_path / "in", tmp_path / "a", include_class=["pos"], where="length == 6")
    assert [(s["text"], s["label"]) for s in found] == [(f"text {n}", 0) for n in (1, 3, 5, 7, 9)]
    found = made(tmp_path / "in", tmp_path / "b", where="label == 'pos'", drop=["label"])
    assert [sorted(s) for s in found] == [["__key__", "text"]] * 6
    found = splits(tmp_path / "in", tmp_path / "c", folds=3, stratify="label")
    assert all(Counter(key[:3] for key in keys) == {"pos": 2, "neg": 2} for keys in found.values())
    rows = [{"text": f"text {n}", "kind": "xyz"[n % 3], "n": n} for n in range(30)]
    options = {"label_column": "kind", "exclude_class": ["y"], "where": "n >= 20"}
    found = made(put_lines(tmp_path / "a.jsonl", rows), tmp_path / "d", **options)
    expected = [(f"text {n}", {0: 0, 2: 1}[n % 3]) for n in range(20, 30) if n % 3 != 1]
    assert [(s["text"], s["label"]) for s in found] == expected
    assert load(tmp_path / "d").class_names == {"label": ("x", "z")}


def test_several_sources_are_chosen_from_as_one(images, tmp_path, out):
    shardkit.convert(images, "parquet", tmp_path / "more", workers=0)
    both = [images, tmp_path / "more"]
    options = {"include_class": ["class2"], "where": "width == 8 and '/00' in key"}
    plan = prepare(both, "wds", out, ConvertOptions(**options, group="key", folds=4))
    assert [split.samples for split in plan.splits] == [2, 2, 2, 2]
    keys = ["images/class0/001", "more/class0/001"]
    assert keys_of(made(both, tmp_path / "keys", keys=keys)) == keys
    texts = [lines(tmp_path / f"{name}.jsonl") for name in "ab"]
    for source, name, more in (
        (both, "out", options),
        (texts, "text", {"where": "score >= 0.9", "sample": 0.5}),
    ):
        found = made(source, tmp_path / name, **more)
        assert shardkit.verify(tmp_path / name, against=source).problems == []
    assert 5 < len(found) < 35


def test_mistakes_with_classes(images, out):
    with pytest.raises(UsageError, match="no class 'clas1'") as caught:
        command(images, "--to", "wds", "-o", out, "--include-class", "class0,clas1")
    assert "did you mean class1" in str(caught.value.expected)
    both = {"include_class": ["class0"], "exclude_class": ["class1"]}
    refused(UsageError, "cannot be combined", images, out, **both)
    none = {"exclude_class": ["class0", "class1", "class2"]}
    error = refused(SourceError, "no sample of the source is left", images, out, **none)
    assert error.found == "12 samples of other classes"
    refused(UsageError, "no class names", [{"x": 1}], out, include_class=["a"])
    several = {"schema": {"label": Array("<i8", (None,))}, "classes": ["a", "b"]}
    several |= {"include_class": ["a"]}
    refused(UsageError, "have several classes", [{"label": np.array([0, 1])}], out, **several)
    assert not out.exists()


def with_metadata(root, count=20):
    """Images of several sizes with metadata; every fifth has no row."""
    for n in range(count):
        put(root / f"{n:02}.jpg", make_image(n, size=(20 + n, 30)))
    rows = "".join(f"{n:02}.jpg,{n / 10},p{n % 4}\n" for n in range(count) if n % 5)
    put(root / "metadata.csv", "file_name,score,patient\n" + rows)
    return root


def test_where_over_metadata_and_image_headers(tmp_path):
    source = with_metadata(tmp_path / "in")
    found = made(source, tmp_path / "a", where="score >= 0.5 and width < 36")
    assert keys_of(found) == [f"{n:02}" for n in range(5, 16) if n % 5]
    assert load(tmp_path / "a").ignored == {
        "images without a row of metadata": 4,
        "samples that --where leaves out": 8,
        "samples without a value that --where asks for": 4,
    }
    found = made(source, tmp_path / "b", where="score is null", fields=["image"])
    assert keys_of(found) == ["00", "05", "10", "15"]
    found = made(source, tmp_path / "c", where="not (width > 21 or key == '00')", to="parquet")
    assert keys_of(found) == ["01"]


def test_planning_reads_no_more_than_headers(tmp_path, monkeypatch):
    source = with_metadata(tmp_path / "in")
    put(source / "30.jpg", make_image(1, size=(99, 9)) + bytes(10**6))

    def refused(*_):
        raise AssertionError

    monkeypatch.setattr(image_folder, "read_file", refused)
    read = Counter()
    first = source_files._first

    def counted(path, stop):
        data = first(path, stop)
        read[path] += len(data)
        return data

    monkeypatch.setattr(source_files, "_first", counted)
    options = ConvertOptions(where="width == 99 and score is null", split="a=0.5,b=0.5")
    assert prepare(source, "parquet", tmp_path / "out", options).samples == 1
    assert len(read) == 5  # images of those without a score
    assert max(read.values()) == 1 << 14


def test_long_headers_are_read_to_their_end(tmp_path):
    image = make_image(1, size=(40, 30))
    comment = b"\xff\xfe" + (60_000).to_bytes(2, "big") + bytes(59_998)
    put(tmp_path / "in/a.jpg", image[:2] + comment + image[2:])
    put(tmp_path / "in/b.jpg", make_image(2))
    assert keys_of(made(tmp_path / "in", tmp_path / "out", where="width == 40")) == ["a"]


def test_images_that_the_condition_cannot_read(tmp_path):
    source, out = write_images(tmp_path / "in", classes=1), tmp_path / "out"
    put(source / "class0/000.jpg", b"no image")
    for where in ("width == 8", "width == 9"):
        error = refused(SampleError, "not an image", source, out, where=where)
        assert error.where["path"] == "class0/000.jpg"
    skip = {"on_error": "skip", "overwrite": True}
    refused(SourceError, "no sample of the source is left", source, out, where=where, **skip)
    found = made(source, out, where="width == 8", **skip)
    assert keys_of(found) == ["class0/001", "class0/002", "class0/003"]
    (line,) = (out / "__shardkit__/errors.jsonl").read_text().splitlines()
    assert json.loads(line)["key"] == "class0/000"


def lines(path, count=200):
    languages = [("de" if n % 3 else "en") for n in range(count)]
    rows = [(f"text {n}", n / count, languages[n]) for n in range(count)]
    return put_lines(path, [dict(zip(("text", "score", "lang"), row, strict=True)) for row in rows])


def test_where_over_documents_while_they_are_read(tmp_path, gpt2):
    source = lines(tmp_path / "in/a.jsonl")
    where = "score < 0.5 and lang == 'en' and length > 6"
    only = {"where": where, "text": shardkit.TextOptions(field="text")}
    found = made(source, tmp_path / "out", **only)
    assert [s["text"] for s in found] == [f"text {n}" for n in range(12, 100, 3)]
    assert all(s.keys() == {"__key__", "text"} for s in found)
    left_out = {"samples that --where leaves out": 200 - len(found)}
    values = {f"values of '{name}'": len(found) for name in ("lang", "score")}
    assert load(tmp_path / "out").ignored == {**left_out, **values}
    kept = made(source, tmp_path / "kept", where=where, fields=["text", "score"])
    assert [s["score"] for s in kept] == [n / 200 for n in range(12, 100, 3)]
    fields = {"fields dropped as asked: 'lang'": 1}
    assert load(tmp_path / "kept").ignored == {**left_out, **fields}
    assert len(made(source, tmp_path / "first", where=where, limit=7)) == 7
    text = shardkit.TextOptions(tokenizer=gpt2, seq_len=32)
    made(source, tmp_path / "blocks", where="lang == 'en'", text=text)
    assert load(tmp_path / "blocks").text["documents"] == 67


def test_documents_are_the_same_for_any_number_of_workers(tmp_path):
    rows = [{"text": f"{n}" * 100, "lang": "de" if n % 3 else "en"} for n in range(1500)]
    source = put_lines(tmp_path / "in/a.jsonl", rows)  # of several byte ranges
    options = {"where": "lang == 'en'", "sample": 0.5, "split": "a=0.8,b=0.2"}
    options["shard_size"] = "100kB"
    for workers in (0, 2):
        shardkit.convert(source, "wds", tmp_path / f"{workers}", workers=workers, **options)
    assert files_of(tmp_path / "0") == files_of(tmp_path / "2")
    counts = [load(tmp_path / "0" / name) for name in ("a", "b")]
    left_out = sum((Counter(m.ignored) for m in counts), Counter())
    assert sum(manifest.samples for manifest in counts) + sum(
        left_out[f"samples that --{option} leaves out"] for option in ("where", "sample")
    ) == len(rows)
    for folder in ("0", "0/b"):
        assert shardkit.verify(tmp_path / folder, against=source).problems == []


def test_a_condition_that_leaves_nothing(tmp_path):
    source, out, nothing = lines(tmp_path / "a.jsonl"), tmp_path / "out", "no sample of the source"
    error = refused(SourceError, nothing, source, out, where="score > 7")
    assert "200 samples that --where leaves out" in str(error)
    images = write_images(tmp_path / "in")
    refused(SourceError, nothing, images, out, where="width > 7000", sample=0.5)
    refused(UsageError, "no field 'scor'", source, out, where="scor > 7")
    assert not out.exists()


def test_keys_of_a_file(images, tmp_path):
    keys = put(tmp_path / "keys.txt", "\ufeffclass2/001\r\nclass0/003\r\n\n")
    out, again = tmp_path / "out", tmp_path / "again"
    assert keys_of(made(images, out, keys=keys)) == ["class0/003", "class2/001"]
    assert load(out).ignored == {"samples that are not among the keys": 10}
    assert keys_of(made(out, again, "lmdb", keys=["class2/001"])) == ["class2/001"]
    short = put(tmp_path / "short.txt", "class2/001")
    assert "already complete" in command(images, "--to", "wds", "-o", out, "--keys", keys)
    error = refused(OutputError, "holds another dataset", images, out, keys=short)
    assert error.found == "count was 2, is 1; the list of keys has changed"
    (images / "class2/001.jpg").unlink()  # which verify misses, as it knows the list
    assert len(shardkit.verify(out, against=images).problems) == 1


def test_verify_misses_samples_of_the_list(images, tmp_path):
    keys, out = ["class0/001", "class1/001", "class2/001"], tmp_path / "out"
    put(images / "class1/001.jpg", b"no image")
    refused(SampleError, "not an image", images, out, keys=keys)
    made(images, out, keys=keys, on_error="skip", overwrite=True)
    put(images / "class1/001.jpg", make_image(5))
    notes = shardkit.verify(out, against=images).notes
    assert any("dropped when the dataset was made" in note for note in notes)


def test_mistakes_in_lists_of_keys(images, tmp_path):
    missing = "2 of 3 keys, such as 'a.jpg'"
    for text, message, found in (
        ("class0/001\nclass9/1\na.jpg", "keys that no sample has", missing),
        ("class0/001\nclass0/002\nclass0/001\n", "has duplicates", "1 duplicate keys"),
        ("\n\n", "the list of keys is empty", None),
        (b"\xff\xfe", "not UTF-8", None),
    ):
        keys = put(tmp_path / "keys.txt", text)
        assert refused(SourceError, message, images, tmp_path / "out", keys=keys).found == found
    assert not (tmp_path / "out").exists()


def test_splits_by_lists(images, tmp_path, out):
    train = put(tmp_path / "train.txt", "class0/000\nclass0/001\nclass1/002\n")
    val = put(tmp_path / "val.txt", "class2/000\n")
    how = f"train={train},val={val}"
    keys = {"train": ["class0/000", "class0/001", "class1/002"], "val": ["class2/000"]}
    assert splits(images, out, split=how) == keys
    assert load(out / "train").recipe["split"] == "lists"
    assert str(tmp_path) not in (out / "__shardkit__/manifest.json").read_text()
    found = splits(images, tmp_path / "one", split=how, include_class=["class0", "class2"])
    assert found == {"train": ["class0/000", "class0/001"], "val": ["class2/000"]}
    put(val, "class2/000\nclass0/001\n")
    message, other = "splits train and val have samples in common", tmp_path / "other"
    assert refused(UsageError, message, images, other, split=how).where["key"] == "class0/001"
    refused(UsageError, "cannot be combined", images, other, split=how, keys=["a"])
    refused(UsageError, "nothing", images, other, split="train=nothing.txt")


def test_keys_and_strata_of_documents_are_refused(tmp_path):
    source, out = lines(tmp_path / "a.jsonl"), tmp_path / "out"
    shares = {"split": "a=0.5,b=0.5"}
    text = shardkit.TextOptions(field="text")
    for options in ({"keys": ["a"]}, {"stratify": "lang", **shares}, {"group": "lang", **shares}):
        refused(UsageError, "known only once read", source, out, text=text, **options)
    found = splits(source, out, folds=3)
    assert sum(map(len, found.values())) == 200
    assert min(map(len, found.values())) > 40


def test_a_share_at_random_stays_when_samples_are_added(tmp_path):
    source = write_images(tmp_path / "in", classes=4, each=30)

    def share(share, seed, name):
        return {s["__key__"] for s in made(source, tmp_path / name, sample=share, seed=seed)}

    half = share(0.5, 0, "half")
    assert 40 <= len(half) <= 80
    assert share(0.1, 0, "tenth") < half
    assert len(half & share(0.5, 1, "other")) < 50
    assert len(share(1, 0, "all")) == 120
    put(source / "class0/more.jpg", make_image())
    more = share(0.5, 0, "more")
    assert more - {"class0/more"} == half
    divided = splits(source, tmp_path / "split", sample=0.5, split="a=0.5,b=0.5")
    assert set(divided["a"]) | set(divided["b"]) == more
    assert 15 <= len(divided["a"]) <= 45  # other numbers at random


SHARES = st.lists(st.integers(1, 9), min_size=2, max_size=5).map(lambda n: np.array(n) / sum(n))


def ranked(values):
    """Numbers from 0 up, one for each that there is."""
    return np.unique(values, return_inverse=True)[1]


VALUES = st.lists(st.integers(0, 6), min_size=5, max_size=200).map(ranked)
GROUPS = st.lists(st.integers(0, 30), min_size=5, max_size=200).map(ranked)


@given(VALUES, SHARES, st.integers(0, 99))
def test_strata_have_their_shares_to_a_sample(values, shares, seed):
    """As folds of scikit-learn's StratifiedKFold do, among other shares."""
    chances = np.random.default_rng(seed).random(len(values))
    order = np.random.default_rng(seed).permutation(len(values))
    for parts in (shares, np.full(len(shares), 1 / len(shares))):
        number = by_stratum(values, parts, chances)
        assert number.min() >= 0
        for stratum in range(values.max() + 1):
            mine = number[values == stratum]
            exact = parts * len(mine)
            counts = np.bincount(mine, minlength=len(parts))
            assert (counts >= np.floor(exact + 1e-9)).all()
            assert (counts <= np.ceil(exact - 1e-9)).all()
        counts = np.bincount(number, minlength=len(parts))
        assert np.abs(counts - parts * len(values)).max() < 2
        assert len(set(parts)) > 1 or counts.max() - counts.min() <= 1
        assert (by_stratum(values[order], parts, chances[order]) == number[order]).all()


@given(GROUPS, SHARES, st.integers(0, 99))
def test_groups_are_never_cut(groups, shares, seed):
    rng = np.random.default_rng(seed)
    strata = ranked(rng.integers(0, 3, len(groups)))
    ranks = rng.random(groups.max() + 1)
    for own in (strata, np.zeros(len(groups), np.int64)):
        number = by_group(groups, own, shares, ranks)
        assert all(len(set(number[groups == g])) == 1 for g in range(groups.max() + 1))
        order = rng.permutation(len(groups))
        assert (by_group(groups[order], own[order], shares, ranks) == number[order]).all()


@given(GROUPS, st.integers(2, 5))
def test_groups_are_divided_as_by_scikit_learn(groups, folds):
    """GroupKFold: the largest groups first, each to the smallest fold."""
    own, ranks = np.zeros_like(groups), np.zeros(groups.max() + 1)
    number = by_group(groups, own, np.full(folds, 1 / folds), ranks)
    sizes = [0] * folds
    for size in sorted(np.bincount(groups).tolist(), reverse=True):
        sizes[sizes.index(min(sizes))] += size
    assert sorted(np.bincount(number, minlength=folds).tolist()) == sorted(sizes)


def test_groups_come_to_their_shares():
    groups, ranks = np.repeat(np.arange(100), 7), np.random.default_rng(0).random(100)
    number = by_group(groups, np.zeros_like(groups), np.array([0.8, 0.1, 0.1]), ranks)
    assert np.bincount(number).tolist() == [560, 70, 70]
    sizes = np.repeat(np.arange(300), np.random.default_rng(0).integers(1, 30, 300))
    strata = sizes % 5
    number = by_group(sizes, strata, np.array([0.8, 0.2]), np.zeros(300))
    for stratum in range(5):
        assert abs(np.mean(number[strata == stratum]) - 0.2) < 0.03
    small, large = (np.bincount(sizes)[np.unique(sizes[number == n])].mean() for n in (0, 1))
    assert 0.7 < small / large < 1.4  # the largest groups are not all on one side


def samples_of(patients, each):
    numbers = itertools.product(range(patients), range(each))
    return [
        {"__key__": f"{p:02}-{n}", "label": (p + n) % 3, "patient": f"p{p}", "x": n}
        for p, n in numbers
    ]


def divided(source, out, **options):
    found = splits([*source], out, "parquet", **options)
    keys = [key for own in found.values() for key in own]
    assert len(keys) == len(set(keys))
    return {key: name for name, own in found.items() for key in own}


@pytest.mark.parametrize(
    "options",
    [
        {"split": "train=0.7,val=0.2,test=0.1", "stratify": "label"},
        {"split": "train=0.7,val=0.3", "group": "patient"},
        {"split": "train=0.7,val=0.3", "group": "patient", "stratify": "label"},
        {"folds": 4},
        {"folds": 4, "stratify": "label"},
        {"folds": 4, "group": "patient"},
    ],
    ids=" ".join,
)
def test_strata_groups_and_folds_of_datasets(tmp_path, options):
    source = samples_of(20, 10)
    found = divided(source, tmp_path / "a", **options)
    assert found.keys() == {sample["__key__"] for sample in source}
    assert divided(source[::-1], tmp_path / "b", **options) == found
    assert divided(source, tmp_path / "c", seed=1, **options) != found
    counts = Counter(found.values())
    if "folds" in options:
        assert counts == {f"fold{n}": 50 for n in range(4)}
    elif "group" in options:
        assert counts == {"train": 140, "val": 60}
    else:
        every = Counter(s["label"] for s in source)
        for share, name in zip((0.7, 0.2, 0.1), ("train", "val", "test"), strict=True):
            mine = Counter(s["label"] for s in source if found[s["__key__"]] == name)
            assert all(abs(mine[n] - share * every[n]) < 1 for n in every)
    if "group" in options:
        assert len({(s["patient"], found[s["__key__"]]) for s in source}) == 20


def test_strata_and_groups_of_files(tmp_path):
    source = with_metadata(tmp_path / "in", 40)
    options = {"where": "patient is not null", "group": "patient", "fields": ["image"]}
    found = splits(source, tmp_path / "out", split="a=0.5,b=0.5", **options)
    patients = [{int(key) % 4 for key in keys} for keys in found.values()]
    assert sorted(map(sorted, patients)) in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]])
    plan = prepare(source, "wds", tmp_path / "x", ConvertOptions(split="a=0.5,b=0.5", **options))
    assert "groups of 'patient' stay whole: the shares are a 0.500, b 0.500" in plan.notes()
    found = splits(source, tmp_path / "by", split="a=0.5,b=0.5", stratify="patient")
    assert [len(keys) for keys in found.values()] == [20, 20]
    options = {"folds": 2, "stratify": "label", "shuffle": True, "limit": 5}
    images = splits(write_images(tmp_path / "im"), tmp_path / "f", **options)
    assert [len(keys) for keys in images.values()] == [5, 5]


def test_json_and_headers_divide_too(tmp_path):
    source = [{"json": {"site": {"name": f"s{n % 4}"}}, "x": n} for n in range(40)]
    assert len(divided(source, tmp_path / "out", folds=2, group="json.site.name")) == 40
    images = [{"image": make_image(n, "PNG" if n % 2 else "JPEG")} for n in range(8)]
    found = divided(images, tmp_path / "images", split="a=0.5,b=0.5", stratify="format")
    counts = Counter((name, int(key) % 2) for key, name in found.items())
    assert counts == {(name, odd): 2 for name in "ab" for odd in (0, 1)}


def test_a_split_that_is_left_without_samples_is_told_of(tmp_path):
    for name in ("train/a/1", "train/a/2", "train/b/3", "val/a/4"):
        put(tmp_path / "in" / f"{name}.png", make_image(int(name[-1]), "PNG"))
    found = shardkit.convert(tmp_path / "in", "wds", tmp_path / "out", include_class=["b"])
    assert "the split 'val' has no samples" in found.notes


def test_mistakes_with_splits(tmp_path, out):
    source, shares = samples_of(3, 4), {"split": "a=0.5,b=0.5"}
    for options, message in (
        *(({"sample": share}, "share of samples") for share in (0, -0.1, 1.1, math.nan, "0.1")),
        ({"stratify": "label"}, "stratify needs a split"),
        ({"group": "label"}, "group needs a split"),
        ({"folds": 2, **shares}, "cannot be combined"),
        ({"folds": 1}, "folds must be a whole number from 2 up"),
        ({"folds": 13}, "fewer samples than splits"),
        ({"folds": 4, "group": "patient"}, "fewer groups than splits"),
        ({"group": "patint", **shares}, "no field 'patint'"),
        ({"stratify": "x > 3", **shares}, "expected a field"),
        ({"group": "'x'", **shares}, "expected a field"),
    ):
        refused(UsageError, message, source, out, **options)
    lacking = [{"x": 0}, {"x": 1, "patient": "p"}]
    grouped = {"schema": {"patient": Text(optional=True), "x": Int()}, "group": "patient", **shares}
    error = refused(UsageError, "samples without a value of 'patient'", lacking, out, **grouped)
    assert error.found == "1 of 2 samples"
    scores, by_score = [{"score": 0.5}, {"score": 1.5}], {"stratify": "score", **shares}
    refused(UsageError, "samples cannot be split by 'score'", scores, out, **by_score)
    for split in ("train", "val"):
        write_images(tmp_path / "in" / split, classes=2)
    refused(UsageError, "already has splits", tmp_path / "in", out, folds=2)
    assert not out.exists()


def test_all_of_it_together_and_in_the_plan(tmp_path, out):
    source = write_images(tmp_path / "in", classes=5, each=40)
    names = [f"class{c}/{n:03}" for c in (0, 1, 2, 4) for n in range(30)]
    keys = put(tmp_path / "keys.txt", "\n".join(names))
    words = [
        *(source, "--to", "wds", "-o", out, "--include-class", "class0,class1"),
        *("--include-class", "class4", "--keys", keys, "--sample", 0.5, "--seed", 3),
        *("--where", "label != 'class1' and width == 8", "--limit", 10, "--shuffle"),
        *("--split", "train=0.5,val=0.5", "--stratify", "label"),
    ]
    plan = json.loads(command(*words, "--plan", "--json"))
    part, ignored = plan["parts"][0], plan["ignored"]
    assert ignored.pop("samples that --sample leaves out") + 2 * part["samples"] >= 20
    left_out = {"of other classes": 80, "that are not among the keys": 30}
    left_out["that --where leaves out"] = 30
    assert ignored == {f"samples {what}": count for what, count in left_out.items()}
    assert part["classes"] == 3
    assert "ignored" in command(*words)
    assert "already complete" in command(*words)
    for name in ("train", "val"):
        assert shardkit.verify(out / name, against=source).problems == []
        with shardkit.open(out / name) as ds:
            assert ds.classes == ("class0", "class1", "class4")
            assert {ds[n]["label"] for n in range(len(ds))} == {0, 2}
    with pytest.raises(OutputError):
        command(*words[:11])


def test_a_dataset_of_a_subset_is_compared_with_either_source(tmp_path):
    source = write_images(tmp_path / "in", classes=3, each=10)
    options = {"include_class": ["class0", "class2"], "where": "width == 8", "sample": 0.7}
    samples = made(source, tmp_path / "a", **options)
    made(tmp_path / "a", tmp_path / "b", "parquet", **options)
    put(source / "class1/002.jpg", make_image(50))  # which is no part of it
    put(source / f"{samples[0]['__key__']}.jpg", make_image(50))
    assert len(shardkit.verify(tmp_path / "a", against=source).problems) == 1
    put(source / "class0/new.jpg", make_image(9))
    found = shardkit.verify(tmp_path / "a", against=source).problems
    grown = shardkit.convert(source, "wds", tmp_path / "grown", workers=0, **options)
    assert len(found) == 1 + grown.samples - len(samples)


@pytest.mark.parametrize("to", few(["parquet", "wds", "lmdb", "arrow"], "parquet", "wds"))
def test_numbers_and_text_of_datasets_are_read_in_columns(to, tmp_path):
    schema = {"x": Int(), "score": Float(optional=True), "good": Bool(), "about": Json()}
    schema["name"] = Text()
    source = [
        {"x": n, "good": n % 3 == 0, "about": {"n": n}, "name": f"é{n}"}
        | ({"score": n / 50} if n % 4 else {})
        for n in range(50)
    ]
    shardkit.convert(source, to, tmp_path / "in", schema=schema, shard_samples=20, workers=0)
    for number, (where, test) in enumerate(
        (
            ("score > 0.3 and good", lambda s: s.get("score", 0) > 0.3 and s["good"]),
            ("score is null and x >= 18", lambda s: "score" not in s and s["x"] >= 18),
            ("'4' in name and x != 40", lambda s: "4" in s["name"] and s["x"] != 40),
            ("about.n in (3, 19, 20, 49) or x == 7", lambda s: s["x"] in (3, 7, 19, 20, 49)),
        )
    ):
        found = made(tmp_path / "in", tmp_path / f"{number}", "lmdb", where=where)
        assert [s["x"] for s in found] == [s["x"] for s in source if test(s)]
    with shardkit.open(tmp_path / "in") as ds:
        keys = [ds[n]["__key__"] for n in (12, 13, 30)]
        view = made(ds[10:40], tmp_path / "view", where="good", keys=keys)
        assert [s["x"] for s in view] == [12, 30]


def test_classes_that_are_asked_for_leave_out_splits_without_labels(tmp_path):
    for name in ("train/cat/1", "train/dog/2", "train/dog/3", "test/4", "test/5"):
        path = tmp_path / f"in/{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_image(1))
    made = shardkit.convert(
        tmp_path / "in", to="wds", out=tmp_path / "out", workers=0, include_class=["dog"]
    )
    assert made.samples == 2
    assert made.ignored == {"samples of other classes": 1, "samples without a label": 2}
    made = shardkit.convert(
        tmp_path / "in", to="wds", out=tmp_path / "all", workers=0, exclude_class=["dog"]
    )
    assert made.samples == 3
