"""Labels from tables, from class folders of text, and from columns of text and datasets."""

import io
import json
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import shardkit
from shardkit import (
    Array,
    Float,
    Image,
    Int,
    Json,
    SampleError,
    ShardkitError,
    SourceError,
    TextOptions,
    UsageError,
)
from shardkit.inspection.samples import in_words
from shardkit.metadata.manifest import load
from shardkit.sources import metadata, open_sources
from shardkit.sources.columns import Building
from shardkit.torch import Loader
from shardkit.verification.verify import verify
from tests.codecs import tokenizer_zoo
from tests.conversion.text_corpora import few_words
from tests.sources.real import cases, convert, keys, one, put, refused, verified

TABLE = "image_id,label,age\nd,dog,1\na,cat,2\nc,cat,\nb,dog,4\n"
KAGGLE = {"file_column": "image_id", "file_suffix": ".jpg", "label_column": "label"}


@pytest.fixture
def flat(tmp_path):
    return put(tmp_path / "in", {f"{name}.jpg": None for name in "abcd"})


def written(path: Path, text: str = TABLE) -> Path:
    """A table."""
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.jsonl", "x.parquet", "x.csv.gz"])
def test_tables_of_all_kinds_and_places_label_the_files(flat, tmp_path, name):
    frame = pandas.read_csv(io.StringIO(TABLE)).astype({"age": "Int64"})
    path = (tmp_path if name == "x.csv" else flat) / name  # among the images, of which it is none
    saved(frame, path)
    convert(flat, tmp_path / "out", metadata=path, **KAGGLE)
    found = shardkit.open(tmp_path / "out")
    assert found.classes == ("cat", "dog")
    assert found.schema == {"image": Image(), "label": Int(), "age": Int(optional=True)}
    assert load(tmp_path / "out").label_counts == (2, 2)
    assert load(tmp_path / "out").ignored == {}
    assert [sample.get("age") for sample in found] == [2, 4, None, 1]
    # pandas maps as many do it.
    number = {name: n for n, name in enumerate(sorted(set(frame["label"])))}
    assert labels(tmp_path / "out") == frame.set_index("image_id")["label"].map(number).to_dict()


def saved(frame: pandas.DataFrame, path: Path) -> Path:
    """A table as pandas writes it, of the kind that its name says."""
    if path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    elif path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return path


def labels(out: Path, field: str = "label") -> dict[str, Any]:
    return {sample["__key__"]: sample.get(field) for sample in shardkit.open(out)}


def test_metadata_parquet_beside_images_are_read_as_by_datasets(flat, tmp_path):
    import datasets

    names = ["d.jpg", "b.jpg", "c.jpg", "a.jpg"]
    frame = pandas.DataFrame({"file_name": names, "n": [1, 2, 3, 4], "word": list("wxyz")})
    frame.to_parquet(flat / "metadata.parquet")
    convert(flat, tmp_path / "out", "hf")
    where = {"data_dir": str(flat), "cache_dir": str(tmp_path / "cache"), "split": "train"}
    theirs = datasets.load_dataset("imagefolder", **where)
    theirs = theirs.cast_column("image", datasets.Image(decode=False))
    ours = datasets.load_from_disk(str(tmp_path / "out"))
    found = {Path(row["image"]["path"]).stem: (row["n"], row["word"]) for row in theirs}
    assert {row["__key__"]: (row["n"], row["word"]) for row in ours} == found


@pytest.mark.parametrize("fields", [None, ["image"]])
def test_verify_needs_the_table(flat, tmp_path, fields):
    table, out = written(tmp_path / "train.csv"), tmp_path / "out"
    convert(flat, out, metadata=table, fields=fields, **KAGGLE)
    assert load(out).recipe["metadata"] == "train.csv"
    assert verified(flat, out, metadata=table, fields=fields, **KAGGLE).already_complete
    refused(UsageError, "was made with metadata", verify, out, flat)
    written(table, TABLE.replace("d,dog", "d,cat"))
    assert verify(out, flat, metadata=table).sound == (fields is not None)
    convert(out, tmp_path / "on", "arrow")
    assert verify(tmp_path / "on", out, decode=True).sound


def test_splits_have_one_table_of_classes(tmp_path):
    put(tmp_path / "in", {f"{name}.jpg": None for name in ("train/x/a", "train/x/b", "val/x/a")})
    rows = "image_id,label\nval/x/a,dog\ntrain/x/a,cat\ntrain/x/b,emu\n"
    table = written(tmp_path / "in/all.csv", rows)
    result = convert(tmp_path / "in", tmp_path / "out", metadata=table, **KAGGLE)
    assert list(result.splits) == ["train", "val"]
    for split in ("train", "val"):
        assert shardkit.open(tmp_path / "out" / split).classes == ("cat", "dog", "emu")
    assert labels(tmp_path / "out/val") == {"x/a": 1}
    assert labels(tmp_path / "out/train") == {"x/a": 0, "x/b": 2}


SKIP, HEAD = {"on_error": "skip"}, "image_id,label\n"
MORE = HEAD + "".join(f"{name},x\n" for name in "abcdef")


@cases(
    "change options what more",
    (("image_id", "id"), {}, "have no column 'image_id' that names files", "id, label, age"),
    (("", ""), {"label_column": "breed"}, "no column 'breed' for labels", "label, age"),
    (("b,dog", "a,dog"), {}, "line 5 of the metadata names a file a second time", "a.jpg"),
    (("a,cat", ",cat"), {}, "line 3 of the metadata is damaged: there is no 'image_id'", ""),
    (
        ("", ""),
        {"file_suffix": ".png"},
        "names a file that does not exist",
        "d.png; 4 of 4 rows do so",
    ),
    (("", ""), {"classes": ["cat", "cat"]}, "the list of classes has a duplicate", "'cat'"),
    (("label,age", "breed,label"), {"label_column": "breed"}, "already exists", "label"),
    (("label,age", "age,label"), {"label_separator": "|"}, "is not text", "int"),
    (("a,cat,2\nc,cat,\nb,dog,4\n", ""), {}, "a file has no row", "3 of 4 files have none"),
    ((TABLE, f"{HEAD}a,x\nb,x\n"), SKIP, "2 files have no row in the metadata", "such as c.jpg"),
    ((TABLE, f"{HEAD}a,\nb,\nc,x\nd,x\n"), SKIP, "2 rows have no label: there is no label", ""),
    ((TABLE, MORE), SKIP, "2 rows name files that do not exist", "such as e.jpg"),
)
def test_mistakes_in_a_table_have_their_sentence(
    flat, tmp_path, change, options, what, more, monkeypatch
):
    if options == SKIP:  # very many problems are one error
        monkeypatch.setattr(metadata, "_MAX_PROBLEMS", 1)
    table = written(tmp_path / "train.csv", TABLE.replace(*change) if change[0] else TABLE)
    asked = {**KAGGLE, **options, "metadata": table}
    kinds = (SourceError, UsageError, SampleError)
    assert more in str(refused(kinds, what, convert, flat, tmp_path / "out", **asked))


@cases(
    "change options what key",
    (("a,cat,2\n", ""), {}, "a file has no row in the metadata", "a"),
    (("\nb,", "\nx,y,1\nb,"), {}, "line 5 .* names a file that does not exist", ""),
    (("a,cat", "a,"), {}, "line 3 of the metadata: there is no label", "a"),
    (("a,cat", "a,emu"), {"classes": ["cat", "dog"]}, "line 3 .* not a known class", "a"),
)
def test_what_is_wrong_with_a_file_ends_or_is_listed(flat, tmp_path, change, options, what, key):
    table, out = written(tmp_path / "train.csv", TABLE.replace(*change)), tmp_path / "out"
    asked = {**KAGGLE, "metadata": table, **options}
    error = refused(SampleError, what, convert, flat, out, **asked)
    assert error.where.get("key", "") == key
    assert verified(flat, out, on_error="skip", **asked).errors == 1
    (listed,) = (out / "__shardkit__/errors.jsonl").read_text().splitlines()
    assert json.loads(listed)["what"] == error.what
    expected = {"a": 0, "b": 1, "c": 0, "d": 1}
    expected.pop(key, None)
    assert labels(out) == expected


def test_classes_give_the_order_and_names_of_numbers(flat, tmp_path):
    table, names = written(tmp_path / "train.csv"), ["dog", "emu", "cat"]
    asked = {**KAGGLE, "metadata": table, "classes": names}
    verified(flat, tmp_path / "out", **asked)
    assert labels(tmp_path / "out") == {"a": 2, "b": 0, "c": 2, "d": 0}
    written(table, TABLE.replace("cat", "0").replace("dog", "-1"))
    convert(flat, tmp_path / "numbers", **asked)
    assert labels(tmp_path / "numbers") == {"a": 0, "b": -1, "c": 0, "d": -1}
    assert shardkit.open(tmp_path / "numbers").classes == tuple(names)
    for wrong in ("3", "-2"):
        written(table, TABLE.replace("cat", "0").replace("dog", wrong))
        with pytest.raises(SampleError, match=r"line 5 .*: the label is not a known class"):
            convert(flat, tmp_path / "wrong", **asked)
    # Numbers with fractions are targets.
    written(table, TABLE.replace("cat", "0.5").replace("dog", "7"))
    convert(flat, tmp_path / "targets", metadata=table, **KAGGLE)
    assert shardkit.open(tmp_path / "targets").schema["label"] == Float()
    assert labels(tmp_path / "targets") == {"a": 0.5, "b": 7.0, "c": 0.5, "d": 7.0}
    refused(UsageError, "are not classes", convert, flat, tmp_path / "no", **asked)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_several_labels_are_arrays_of_classes(flat, tmp_path, kind):
    import datasets

    several = {"a": ["dog", "cat"], "b": ["emu"], "c": ["cat"], "d": ["emu", "dog"]}
    frame = pandas.DataFrame({"image_id": list(several), "label": list(several.values())})
    options = dict(KAGGLE)
    if kind == "csv":
        options["label_separator"] = "|"
        frame["label"] = frame["label"].map("|".join)
    table, out = saved(frame, tmp_path / f"t.{kind}"), tmp_path / "out"
    verified(flat, out, "hf", metadata=table, **options)
    found = shardkit.open(out)
    assert found.schema["label"] == Array("<i8", (None,))
    assert found.class_names == {"label": ("cat", "dog", "emu")}
    expected = {"a": [1, 0], "b": [2], "c": [0], "d": [2, 1]}
    assert {k: v.tolist() for k, v in labels(out).items()} == expected
    theirs = datasets.load_from_disk(str(out))
    assert theirs.features["label"].feature.names == ["cat", "dog", "emu"]
    assert theirs["label"][0] == [1, 0]
    asked = {**options, "classes": ["cat", "dog"], "metadata": table}
    refused(SampleError, "the label is not a known class", convert, flat, tmp_path / "no", **asked)
    if kind == "csv":  # of numbers too
        written(table, "image_id,label\na,5|0\nb,1\nc,27|1\nd,0\n")
        convert(flat, tmp_path / "numbers", metadata=table, **options)
        assert labels(tmp_path / "numbers")["c"].tolist() == [27, 1]
        assert shardkit.open(tmp_path / "numbers").classes is None


HOT = {"a": (1, 0, 0), "b": (0, 1, 1), "c": (0, 0, 0), "d": (1, 1, 0)}
WORDS = ["cat", "dog", "emu"]


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "x.parquet"])
@pytest.mark.parametrize("kind", ["int64", "bool", "float64"])
def test_columns_of_zeros_and_ones_become_a_vector(tmp_path, name, kind):
    flat = put(tmp_path / "in", {f"f/{key}.jpg": None for key in HOT})
    frame = pandas.DataFrame(list(HOT.values()), columns=WORDS).astype(kind)
    frame = frame.assign(file_name=[f"f/{key}.jpg" for key in HOT], age=3)
    table, out = saved(frame, tmp_path / name), tmp_path / "out"
    result = verified(flat, out, metadata=table, label_columns=WORDS)
    found = shardkit.open(out)
    assert found.schema == {"image": Image(), "labels": Array("|b1", (3,)), "age": Int()}
    assert found.class_names == {"labels": tuple(WORDS)}
    assert vectors(out) == {f"f/{key}": row for key, row in HOT.items()}
    assert result.notes == ["samples without any label: 1"]
    batch = next(iter(Loader(out, batch_size=4)))
    assert batch["labels"].tolist() == [list(map(bool, row)) for row in HOT.values()]
    assert keys(found.filter('"emu" in labels')) == ["f/b"]
    convert(out, tmp_path / "marked", where="'dog' in labels and 'cat' not in labels")
    assert vectors(tmp_path / "marked") == {"f/b": HOT["b"]}
    assert in_words(found, "labels", found[1]["labels"]).endswith("False, True, True (dog, emu)")
    shardkit.export(out, "folder", tmp_path / "folder")
    verified(tmp_path / "folder", tmp_path / "again", "arrow")
    assert vectors(tmp_path / "again") == vectors(out)
    convert(flat, tmp_path / "other", metadata=table, label_columns=WORDS[::-1])
    both = [out, tmp_path / "other"]
    refused(
        ShardkitError,
        "vectors of labels, or keypoints, have different",
        convert,
        both,
        tmp_path / "no",
    )


def vectors(out: Path) -> dict[str, tuple[int, ...]]:
    return {key: tuple(map(int, row)) for key, row in labels(out, "labels").items()}


@cases(
    "cells what found",
    ("1,2", "line 3 of the metadata: the value of a label is not 0 or 1", "2"),
    ("1,", "line 3 of the metadata: the value of a label is not 0 or 1", "no value"),
    ("1,yes", "line 3 of the metadata: the value of a label is not 0 or 1", "'yes'"),
    ("1,-1", "line 3 of the metadata: the value of a label is not 0 or 1", "-1"),
)
def test_other_values_than_0_and_1_name_row_and_column(flat, tmp_path, cells, what, found):
    rows = f"file_name,x,y\na.jpg,1,0\nb.jpg,{cells}\nc.jpg,0,1\nd.jpg,0,1\n"
    asked = {"metadata": written(tmp_path / "t.csv", rows), "label_columns": ["x", "y"]}
    error = refused(SampleError, what, convert, flat, tmp_path / "out", **asked)
    assert (error.where["field"], error.where["key"], error.found) == ("y", "b", found)
    result = verified(flat, tmp_path / "out", on_error="skip", **asked)
    assert vectors(tmp_path / "out") == {"a": (1, 0), "c": (0, 1), "d": (0, 1)}
    assert result.notes == [
        "each sample has exactly one of the 2 labels: they may be classes, whose number is the"
        " position of the 1"
    ]


COMMENTS = [
    {"comment": "one", "bad": 0, "rude": 1, "n": 5},
    {"comment": "two", "bad": 0, "rude": 0, "n": 6},
    {"comment": "three", "bad": 1, "rude": 1, "n": 7},
]


@pytest.mark.parametrize("way", ["csv", "documents", "jsonl", "parquet", "dataset", "sequence"])
def test_columns_of_text_and_datasets_become_a_vector(tmp_path, way):
    source: Any = COMMENTS
    options: dict[str, Any] = {"label_columns": ["bad", "rude"]}
    if way == "documents":
        options["text"] = shardkit.TextOptions(field="comment")
    if way == "dataset":
        source = tmp_path / "in"
        convert(COMMENTS, source, "arrow")
    elif way != "sequence":
        suffix = "csv" if way == "documents" else way
        source = saved(pandas.DataFrame(COMMENTS), tmp_path / f"in.{suffix}")
    result = convert(source, tmp_path / "out", "arrow", **options)
    assert [*vectors(tmp_path / "out").values()] == [(0, 1), (0, 0), (1, 1)]
    assert shardkit.open(tmp_path / "out").classes == ("bad", "rude")
    assert "samples without any label: 1" in result.notes
    others = {"comment"} if way == "documents" else {"comment", "n"}
    assert shardkit.open(tmp_path / "out").schema.keys() == {"labels", *others}
    if way != "sequence":
        assert verify(tmp_path / "out", source).sound
        convert(source, tmp_path / "few", "arrow", fields=["labels"], **options)
        assert vectors(tmp_path / "few") == vectors(tmp_path / "out")
    wrong = [{**row, "bad": row["n"]} for row in COMMENTS]
    if way == "sequence":
        error = refused(SampleError, "not 0 or 1", convert, wrong, tmp_path / "no", **options)
        assert (error.where["field"], error.found) == ("bad", "5")


def test_vectors_are_not_padded_with_the_tokens_beside_them(tmp_path):
    rows = [{"tokens": np.arange(n, dtype=np.uint16), "x": n % 2, "y": 1} for n in (3, 1, 2, 5)]
    convert(rows, tmp_path / "out", "arrow", label_columns=["x", "y"])
    hot = {"tokens": shardkit.MultiHot(5)}
    for options in ({"batching": shardkit.Bucket(2, 1)}, {"batch_size": 2, "collate": PAD}):
        batches = list(Loader(tmp_path / "out", **options))
        assert {batch["tokens"].shape for batch in batches} == {(2, 3), (2, 5)}
        found = {k: v for b in batches for k, v in zip(b["__key__"], b["labels"], strict=True)}
        assert [found[key].tolist() for key in sorted(found)] == [
            [bool(row["x"]), True] for row in rows
        ]
    (batch,) = Loader(tmp_path / "out", batch_size=4, collate=PAD, fields=["labels"])
    assert batch["labels"].shape == (4, 2)
    (batch,) = Loader(tmp_path / "out", batch_size=4, collate=PAD, transforms=hot)
    assert batch["tokens"].sum(dim=1).tolist() == [3, 1, 2, 5]


PAD = shardkit.pad_collate()
FORMATS = ("wds", "lmdb", "arrow", "beton", "hf", "parquet", "tfrecord", "mds", "litdata")


@pytest.mark.parametrize("format", [*FORMATS, "lance", "array_record"])
def test_samples_without_labels_are_counted_and_empty_in_all_formats(flat, tmp_path, format):
    table = written(tmp_path / "t.csv", "file_name,tags\na.jpg,x|y\nb.jpg,\nc.jpg,z\nd.jpg,|\n")
    options = {"metadata": table, "label_column": "tags", "label_separator": "|"}
    out = tmp_path / ("out.beton" if format == "beton" else "out")
    result = verified(flat, out, format, **options)
    assert result.notes[0] == "samples without any label: 2"
    expected = {"a": [0, 1], "b": [], "c": [2], "d": []}
    assert {key: label.tolist() for key, label in labels(out).items()} == expected
    (batch,) = Loader(out, batch_size=4)
    assert [label.tolist() for label in batch["label"]] == [*expected.values()]
    assert {label.dtype for label in batch["label"]} == {torch.int64}
    (batch,) = Loader(out, batch_size=4, transforms={"label": shardkit.MultiHot(3, "float32")})
    assert batch["label"].tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]]
    (batch,) = Loader(out, batch_size=4, fields=["label"], collate=shardkit.pad_collate(-1))
    assert batch["label"].tolist() == [[0, 1], [-1, -1], [2, -1], [-1, -1]]


@cases(
    "options what",
    ({"file_column": "x"}, "file_column requires a metadata table"),
    ({"label_separator": "|"}, "label_separator requires label_column"),
    ({"label_columns": ["x"]}, "must be two or more different columns"),
    ({"label_columns": ["x", "x"]}, "must be two or more different columns"),
    ({"label_columns": ["x", "y"], "label_column": "z"}, "cannot be combined with label_column"),
    ({"label_columns": ["x", "y"], "classes": ["z"]}, "cannot be combined with classes"),
    ({"label_columns": ["x", "y"]}, "there is no table with the column 'x'"),
    ({"label_column": "label"}, "there is no table with the column 'label'"),
    ({"metadata": "nowhere.csv"}, "file given by --metadata does not exist"),
    ({"metadata": "in/a.jpg"}, "not a table in a supported format"),
    ({"metadata": "t.csv"}, "a metadata table is for folders"),
)
def test_options_that_do_not_fit(flat, tmp_path, options, what, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "t.csv")
    convert(flat, tmp_path / "shards")
    source = tmp_path / "shards" if "t.csv" in options.values() else flat
    refused(ShardkitError, what, convert, source, tmp_path / "out", **options)


def reviews(root: Path, *names: str) -> Path:
    return put(root, {f"{name}/{n}.txt": f"{name} {n} words" for name in names for n in range(2)})


def test_tasks_of_labelled_files_are_pickled_with_their_rows_alone(flat, tmp_path):
    lines = [f"{name},{word},{'x' * 5000}" for name, word in zip("abcd", "pqpq", strict=True)]
    table = written(tmp_path / "t.csv", "\n".join(["image_id,label,note", *lines]))
    source = one(flat, metadata=str(table), **KAGGLE)
    part = pickle.dumps(source.select(np.array([2])))
    assert len(part) < 8000
    assert pickle.loads(part)[0] == source[2]
    (texts,) = open_sources(reviews(tmp_path / "text", "pos", "neg")).values()
    assert pickle.loads(pickle.dumps(texts.select(np.array([3]))))[0] == texts[3]


def test_folders_of_texts_are_classes_as_those_of_images(tmp_path):
    root = reviews(tmp_path / "in", "train/pos", "train/neg", "train/unsup", "test/pos", "test/neg")
    names = ("train/urls_pos.txt", "test/urls_neg.txt", "imdbEr.txt", "imdb.vocab", "README")
    put(root, dict.fromkeys(names, "http://"))  # as IMDb's reviews come
    result = verified(root, tmp_path / "out", "hf")
    assert list(result.splits) == ["train", "test"]
    for split in result.splits:
        assert shardkit.open(tmp_path / "out" / split).classes == ("neg", "pos")
    numbers = {"neg": 0, "pos": 1, "unsup": -1}
    expected = {f"{name}/{n}": number for name, number in numbers.items() for n in range(2)}
    assert labels(tmp_path / "out/train") == expected
    assert "documents without a class, whose label is -1: 2" in result.notes
    assert any("taken as classes: neg/, pos/; --drop label" in note for note in result.notes)
    assert result.ignored == {".txt file": 3, ".vocab file": 1, "file without suffix": 1}
    verified(root, tmp_path / "plain", "hf", drop=["label"])
    assert "label" not in shardkit.open(tmp_path / "plain/train").schema
    root = reviews(tmp_path / "apart", "train/pos", "train/neg", "test")
    for number, options in enumerate(({}, {"classes": ["pos", "neg"]})):
        out = tmp_path / str(number)
        result = verified(root, out, **options)
        assert "no labels in test: its texts are not in folders" in result.notes
        assert list(shardkit.open(out / "test").schema) == ["text"]
        assert labels(out / "train")["pos/0"] == 1 - number


@cases(
    "names stray why",
    ("en de", {}, "de/ may be a language"),
    ("zh-CN news", {}, "zh-CN/ may be a language"),
    ("2019 2020", {}, "2019/ may be"),
    ("data pos", {}, "data/ may be"),
    ("part1 part2", {}, "part1/ may be"),
    ("volume-1 volume-2", {}, "differ only in numbers"),
    ("pos neg", {"notes.txt": "more"}, "'notes.txt' is next to them"),
    ("pos neg/deep", {}, "they contain folders, such as neg/deep/"),
    ("pos neg", {"empty/x.txt": ""}, "empty/ next to them contains no text"),
)
def test_folders_that_may_be_no_classes_are_none_and_a_note_says_why(tmp_path, names, stray, why):
    source = one(put(reviews(tmp_path / "in/corpus", *names.split()), stray))
    assert list(source.schema) == ["text"]
    assert any("no labels from the folders" in n and why in n for n in source.notes), source.notes


def test_a_list_of_classes_makes_classes_of_any_folders(tmp_path):
    root, classes = reviews(tmp_path / "in", "en/2019", "de", "unlabeled"), ["en", "de", "fr"]
    verified(root, tmp_path / "out", classes=classes)
    found = labels(tmp_path / "out")
    assert [found[key] for key in ("de/0", "en/2019/1", "unlabeled/1")] == [1, 0, -1]
    lines = shardkit.TextOptions(documents="line")
    verified(root, tmp_path / "lines", text=lines, classes=classes)
    assert Counter(labels(tmp_path / "lines").values()) == {0: 2, 1: 2, -1: 2}
    none, words = tmp_path / "no", "does not name the folder 'en'"
    refused(UsageError, words, convert, root, none, classes=["de", "fr"])
    put(root, {"stray.txt": "one"})
    error = refused(UsageError, "needs a folder per class", convert, root, none, classes=classes)
    assert error.found == "stray.txt"


def test_labels_stay_beside_tokens_but_not_in_blocks(tmp_path):
    root = put(tmp_path / "in", {f"{name}/1.txt": "w1 w2 w3" for name in ("pos", "neg")})
    words, out = tokenizer_zoo.write_json(tmp_path, few_words(8)), tmp_path / "out"
    options = shardkit.TextOptions(tokenizer=words, append_eos=False)
    verified(root, out, text=options)
    assert labels(out) == {"neg/1": 0, "pos/1": 1}
    assert shardkit.open(out).classes == ("neg", "pos")
    result = verified(root, tmp_path / "packed", text=replace(options, seq_len=3))
    assert list(shardkit.open(tmp_path / "packed").schema) == ["tokens", "doc_ends"]
    assert result.ignored == {"values of 'label'": 2}


def test_a_table_labels_texts_that_are_a_document_each(tmp_path):
    root = reviews(tmp_path / "in", "a")
    table = written(root / "labels.csv", "id,label,stars\na/0,good,5\na/1,bad,1\n")
    asked = {**KAGGLE, "file_column": "id", "file_suffix": ".txt", "metadata": table}
    verified(root, tmp_path / "out", **asked)
    assert labels(tmp_path / "out") == {"a/0": 1, "a/1": 0}
    assert shardkit.open(tmp_path / "out")[0]["stars"] == 5
    with pytest.raises(UsageError, match="if each file is a document"):
        convert(root, tmp_path / "no", text=shardkit.TextOptions(documents="line"), **asked)


ROWS = [
    {"review": "one", "mood": "happy", "n": 3, "score": 0.5, "tags": ["b", "a"]},
    {"review": "two", "mood": "sad", "n": -1, "score": 2.0, "tags": []},
    {"review": "three", "mood": "happy", "n": 0, "score": 1.0, "tags": ["a"]},
]


@cases(
    "way column expected names",
    ("jsonl", "mood", [0, 1, 0], ("happy", "sad")),
    ("parquet", "n", [3, -1, 0], None),
    ("sequence", "score", [0.5, 2.0, 1.0], None),
    ("jsonl", "tags", [[1, 0], [], [0]], ("a", "b")),
    ("parquet", "tags", [[1, 0], [], [0]], ("a", "b")),
    ("splits", "mood", [0, 1, 0], ("happy", "sad")),
)
def test_a_column_of_text_and_datasets_becomes_the_label(tmp_path, way, column, expected, names):
    source, out = tmp_path / f"in.{way}", tmp_path / "out"
    if way == "sequence":
        source = ROWS
    elif way == "splits":
        source.mkdir()
        for split, some in (("train", ROWS[:2]), ("test", ROWS[2:])):
            saved(pandas.DataFrame(some), source / f"{split}-00000-of-00001.parquet")
    else:
        saved(pandas.DataFrame(ROWS), source)
    convert(source, out, "hf", label_column=column, text=shardkit.TextOptions(field="review"))
    parts = [out / "train", out / "test"] if way == "splits" else [out]
    found = [np.asarray(label).tolist() for part in parts for label in labels(part).values()]
    assert found == expected
    for part in parts:
        assert shardkit.open(part).classes == names
        assert set(shardkit.open(part).schema) == {"review", "label"}
    if way != "sequence":
        assert verify(out, source).sound
    if way == "jsonl":
        keep = shardkit.TextOptions(field="review", keep_fields=True)
        convert(source, tmp_path / "all", "hf", label_column=column, text=keep)
        others = {"review", "label", "mood", "n", "score", "tags"} - {column}
        assert set(shardkit.open(tmp_path / "all").schema) == others


def test_labels_of_tables_of_text_are_as_datasets_reads_them(tmp_path):
    import datasets

    path = written(tmp_path / "in.csv", "review,sentiment\ngood one,positive\nbad,negative\n")
    convert(path, tmp_path / "out", "hf", label_column="sentiment")
    theirs = datasets.load_dataset("csv", data_files=str(path), cache_dir=str(tmp_path / "c"))
    encoded = theirs["train"].class_encode_column("sentiment")
    ours = datasets.load_from_disk(str(tmp_path / "out"))
    assert ours["label"][:] == encoded["sentiment"][:]
    assert ours.features["label"].names == encoded.features["sentiment"].names
    assert ours["review"][:] == encoded["review"][:]


def test_mistakes_in_columns_name_the_document(tmp_path):
    path = written(tmp_path / "in.jsonl", "\n".join(map(json.dumps, ROWS)))
    asked = {"text": shardkit.TextOptions(field="review"), "label_column": "mood"}
    with pytest.raises(SampleError, match="the label is not a known class") as error:
        convert(path, tmp_path / "o", classes=["happy"], **asked)
    at = len(json.dumps(ROWS[0])) + 1
    expected = {"path": str(path), "key": f"in.jsonl/{at}", "field": "mood", "offset": at}
    assert error.value.where == expected
    with pytest.raises(UsageError, match="no column 'nothing' for labels"):
        convert(path, tmp_path / "o", **{**asked, "label_column": "nothing"})
    written(path, path.read_text().replace('"mood": "sad"', '"mood": null'))
    refused(SampleError, "there is no label", convert, path, tmp_path / "o", **asked)
    convert(path, tmp_path / "skipped", on_error="skip", **asked)
    assert len(shardkit.open(tmp_path / "skipped")) == 2
    pandas.DataFrame(ROWS).assign(label=1).to_parquet(tmp_path / "in.parquet")
    table = tmp_path / "in.parquet"
    for name, what in (("mood", "already exists"), ("x", "no column 'x' for labels")):
        refused(UsageError, what, convert, table, tmp_path / "o", label_column=name)


KEEP = TextOptions(keep_fields=True)


def _built(values, *, cells):
    found = Building(cells=cells)
    found.add(values)
    return found.column()


BIG = 2**53 + 1  # no float equals it


def test_integers_that_no_float_equals_stay_exact_beside_fractions(tmp_path):
    for values, kind in (
        ([0.5, BIG], Json),
        ([BIG, 0.5], Json),
        ([0.5, 2**53], Float),
        ([0.5, 2**60], Float),
        ([0.5, 10**400], Json),
    ):
        column = _built(values, cells=False)
        assert (type(column.kind), list(column)) == (kind, values)
        cells = [str(value) for value in values]
        column = _built(cells, cells=True)
        found = [float(v) if kind is Float else v for v in values]
        assert list(column) == (found if kind is Float else cells)
    assert list(_built(["0.5", f"{BIG}.0"], cells=True)) == ["0.5", f"{BIG}.0"]
    with pytest.raises(TypeError):
        Float().check(BIG)
    with pytest.raises(TypeError):
        Float().check(np.int64(BIG))
    assert Float().check(2**60) == 2.0**60
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "a", "n": 0.5}}\n{{"text": "b", "n": {BIG}}}\n')
    shardkit.convert(path, to="arrow", out=tmp_path / "out", text=KEEP, workers=0)
    assert [sample["n"] for sample in shardkit.open(tmp_path / "out")] == [0.5, BIG]
