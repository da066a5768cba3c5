"""Labels from tables, from class folders of text, and from columns of text and datasets."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import shardkit
from shardkit.errors import SampleError, ShardkitError, SourceError, UsageError
from shardkit.manifest import load
from shardkit.recipe import Recipe
from shardkit.schema import Array, Float, Image, Int, Text
from shardkit.sources import metadata, open_sources
from shardkit.sources.base import Source
from shardkit.sources.columns import Building, typed_column
from shardkit.testing import make_image
from shardkit.verification.verify import verify
from tests.codecs import tokenizer_zoo
from tests.conversion.text_corpora import few_words

KAGGLE: dict[str, Any] = {
    "file_column": "image_id",
    "file_suffix": ".jpg",
    "label_column": "label",
    "workers": 0,
}


def put(path: Path, data: bytes | str = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data or make_image())
    return path


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    for name in "abcd":
        put(tmp_path / "in" / f"{name}.jpg")
    return tmp_path / "in"


def samples(out: Path) -> list[dict[str, Any]]:
    found = shardkit.open(out)
    return [found[number] for number in range(len(found))]


def labels(out: Path) -> dict[str, Any]:
    return {sample["__key__"]: sample.get("label") for sample in samples(out)}


TABLE = "image_id,label,age\nd,dog,1\na,cat,2\nc,cat,\nb,dog,4\n"


def rows(text: str) -> list[dict[str, Any]]:
    head, *lines = [line.split(",") for line in text.splitlines()]
    return [{n: v or None for n, v in zip(head, line, strict=True)} for line in lines]


def test_a_table_apart_labels_the_files(flat: Path, tmp_path: Path) -> None:
    table = put(tmp_path / "train.csv", TABLE)
    shardkit.convert(flat, "wds", tmp_path / "out", metadata=table, **KAGGLE)
    found = shardkit.open(tmp_path / "out")
    assert found.classes == ("cat", "dog")
    assert labels(tmp_path / "out") == {"a": 0, "b": 1, "c": 0, "d": 1}
    assert found.schema == {"image": Image(), "label": Int(), "age": Int(optional=True)}
    assert load(tmp_path / "out").label_counts == (2, 2)
    # pandas maps as many do it.
    frame = pandas.read_csv(table, dtype=str).set_index("image_id")["label"]
    number = {name: n for n, name in enumerate(sorted(set(frame)))}
    assert labels(tmp_path / "out") == frame.map(number).to_dict()


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.jsonl", "x.parquet", "x.csv.gz"])
def test_tables_of_all_kinds_and_places_give_the_same(
    flat: Path, tmp_path: Path, name: str
) -> None:
    shardkit.convert(
        flat, "wds", tmp_path / "first", metadata=put(tmp_path / "a.csv", TABLE), **KAGGLE
    )
    frame = pandas.DataFrame(
        [{**row, "age": row["age"] and int(row["age"])} for row in rows(TABLE)]
    ).astype({"age": "Int64"})
    path = flat / name  # among the images, of which it is none
    if name.endswith(".jsonl"):
        frame.to_json(path, orient="records", lines=True)
    elif name.endswith(".parquet"):
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if name.endswith(".tsv") else ",")
    shardkit.convert(flat, "wds", tmp_path / "out", metadata=path, **KAGGLE)
    assert samples(tmp_path / "out") == samples(tmp_path / "first")
    assert load(tmp_path / "out").ignored == {}


def test_metadata_parquet_beside_images_are_read_as_by_datasets(flat: Path, tmp_path: Path) -> None:
    names = ["d.jpg", "b.jpg", "c.jpg", "a.jpg"]
    frame = pandas.DataFrame({"file_name": names, "n": [1, 2, 3, 4], "word": list("wxyz")})
    frame.to_parquet(flat / "metadata.parquet")
    shardkit.convert(flat, "hf", tmp_path / "out", workers=0)
    import datasets

    theirs = datasets.load_dataset(
        "imagefolder", data_dir=str(flat), cache_dir=str(tmp_path / "cache"), split="train"
    ).cast_column("image", datasets.Image(decode=False))
    ours = datasets.load_from_disk(str(tmp_path / "out"))
    found = {Path(row["image"]["path"]).stem: (row["n"], row["word"]) for row in theirs}
    assert {row["__key__"]: (row["n"], row["word"]) for row in ours} == found


def test_very_many_problems_are_one_error(
    flat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "_MOST_PROBLEMS", 1)
    asked: dict[str, Any] = {**KAGGLE, "on_error": "skip", "metadata": tmp_path / "t.csv"}
    for rows, what in (
        ("a,x\nb,x\n", "2 files have no row in the metadata, such as c.jpg"),
        ("a,x\nb,x\nc,x\nd,x\ne,x\nf,x\n", "2 rows name files that do not exist, such as e.jpg"),
        ("a,\nb,\nc,x\nd,x\n", "2 rows have no label: there is no label"),
    ):
        put(tmp_path / "t.csv", "image_id,label\n" + rows)
        with pytest.raises(SourceError, match=what):
            shardkit.convert(flat, "wds", tmp_path / "out", **asked)


@pytest.mark.parametrize("fields", [None, ["image"]])
def test_verify_needs_the_table(flat: Path, tmp_path: Path, fields: list[str] | None) -> None:
    table = put(tmp_path / "train.csv", TABLE)
    out = tmp_path / "out"
    shardkit.convert(flat, "wds", out, metadata=table, fields=fields, **KAGGLE)
    assert load(out).recipe["metadata"] == "train.csv"
    again = shardkit.convert(flat, "wds", out, metadata=table, fields=fields, **KAGGLE)
    assert again.already_complete
    assert verify(out, flat, metadata=table).sound
    with pytest.raises(UsageError, match="was made with metadata"):
        verify(out, flat)
    put(table, TABLE.replace("d,dog", "d,cat"))
    assert verify(out, flat, metadata=table).sound == (fields is not None)
    shardkit.convert(out, "arrow", tmp_path / "on", workers=0)
    assert verify(tmp_path / "on", out).sound
    assert verify(tmp_path / "on", out, decode=True).sound


def test_splits_have_one_table_of_classes(tmp_path: Path) -> None:
    for name in ("train/x/a", "train/x/b", "val/x/a"):
        put(tmp_path / f"in/{name}.jpg")
    table = put(tmp_path / "in/all.csv", "image_id,label\nval/x/a,dog\ntrain/x/a,cat\n")
    put(table, table.read_text() + "train/x/b,emu\n")
    result = shardkit.convert(tmp_path / "in", "wds", tmp_path / "out", metadata=table, **KAGGLE)
    assert list(result.splits) == ["train", "val"]
    for split in ("train", "val"):
        assert shardkit.open(tmp_path / "out" / split).classes == ("cat", "dog", "emu")
    assert labels(tmp_path / "out/val") == {"x/a": 1}
    assert labels(tmp_path / "out/train") == {"x/a": 0, "x/b": 2}


@pytest.mark.parametrize(
    ("change", "options", "what", "more"),
    [
        (("image_id", "id"), {}, "have no column 'image_id' that names files", "id, label, age"),
        (("", ""), {"label_column": "breed"}, "no column 'breed' for labels", "label, age"),
        (("b,dog", "a,dog"), {}, "line 5 of the metadata names a file a second time", "a.jpg"),
        (("a,cat", ",cat"), {}, "line 3 of the metadata is damaged: there is no 'image_id'", ""),
        (("", ""), {"file_suffix": ".png"}, "no row of the metadata names a file", "d.png"),
        (("", ""), {"classes": ["cat", "cat"]}, "the list of classes has a duplicate", "'cat'"),
        (("label,age", "breed,label"), {"label_column": "breed"}, "already exists", "label"),
        (("label,age", "age,label"), {"label_separator": "|"}, "is not text", "int"),
    ],
)
def test_mistakes_in_a_table_have_their_sentence(
    flat: Path,
    tmp_path: Path,
    change: tuple[str, str],
    options: dict[str, Any],
    what: str,
    more: str,
) -> None:
    table = put(tmp_path / "train.csv", TABLE.replace(*change) if change[0] else TABLE)
    asked = {**KAGGLE, "metadata": table, **options}
    with pytest.raises((SourceError, UsageError), match=what) as error:
        shardkit.convert(flat, "wds", tmp_path / "out", **asked)
    assert more in str(error.value)


@pytest.mark.parametrize(
    ("change", "options", "what", "key"),
    [
        (("a,cat,2\n", ""), {}, "a file has no row in the metadata", "a"),
        (("\nb,", "\nx,y,1\nb,"), {}, "line 5 .* names a file that does not exist", ""),
        (("a,cat", "a,"), {}, "line 3 of the metadata: there is no label", "a"),
        (
            ("a,cat", "a,emu"),
            {"classes": ["cat", "dog"]},
            "line 3 .* the label is not a known class",
            "a",
        ),
    ],
)
def test_what_is_wrong_with_a_file_ends_or_is_listed(
    flat: Path,
    tmp_path: Path,
    change: tuple[str, str],
    options: dict[str, Any],
    what: str,
    key: str,
) -> None:
    table = put(tmp_path / "train.csv", TABLE.replace(*change))
    asked = {**KAGGLE, "metadata": table, **options}
    with pytest.raises(SampleError, match=what) as error:
        shardkit.convert(flat, "wds", tmp_path / "out", **asked)
    assert error.value.where.get("key", "") == key
    result = shardkit.convert(flat, "wds", tmp_path / "out", on_error="skip", **asked)
    assert result.errors == 1
    (listed,) = (tmp_path / "out/__shardkit__/errors.jsonl").read_text().splitlines()
    assert json.loads(listed)["what"] == error.value.what
    expected = {"a": 0, "b": 1, "c": 0, "d": 1}
    expected.pop(key, None)
    assert labels(tmp_path / "out") == expected
    assert verify(tmp_path / "out", flat, metadata=table).sound


def test_the_count_of_files_without_rows_is_said(flat: Path, tmp_path: Path) -> None:
    table = put(tmp_path / "train.csv", "image_id,label\nd,dog\n")
    with pytest.raises(SampleError, match="3 of 4 files have none"):
        shardkit.convert(flat, "wds", tmp_path / "out", metadata=table, **KAGGLE)


def test_classes_give_the_order_and_names_of_numbers(flat: Path, tmp_path: Path) -> None:
    table = put(tmp_path / "train.csv", TABLE)
    asked = {**KAGGLE, "metadata": table, "classes": ["dog", "emu", "cat"]}
    shardkit.convert(flat, "wds", tmp_path / "out", **asked)
    assert labels(tmp_path / "out") == {"a": 2, "b": 0, "c": 2, "d": 0}
    assert verify(tmp_path / "out", flat, metadata=table).sound
    put(table, TABLE.replace("cat", "0").replace("dog", "-1"))
    shardkit.convert(flat, "wds", tmp_path / "numbers", **asked)
    assert labels(tmp_path / "numbers") == {"a": 0, "b": -1, "c": 0, "d": -1}
    assert shardkit.open(tmp_path / "numbers").classes == ("dog", "emu", "cat")
    put(table, TABLE.replace("cat", "0").replace("dog", "3"))
    for wrong in ("3", "-2"):
        put(table, TABLE.replace("cat", "0").replace("dog", wrong))
        with pytest.raises(SampleError, match=r"line 5 .*: the label is not a known class"):
            shardkit.convert(flat, "wds", tmp_path / "wrong", **asked)


def test_numbers_with_fractions_are_targets(flat: Path, tmp_path: Path) -> None:
    table = put(tmp_path / "train.csv", TABLE.replace("cat", "0.5").replace("dog", "7"))
    shardkit.convert(flat, "wds", tmp_path / "out", metadata=table, **KAGGLE)
    assert shardkit.open(tmp_path / "out").schema["label"] == Float()
    assert labels(tmp_path / "out") == {"a": 0.5, "b": 7.0, "c": 0.5, "d": 7.0}
    with pytest.raises(UsageError, match="are not classes"):
        shardkit.convert(flat, "wds", tmp_path / "no", metadata=table, classes=["x"], **KAGGLE)


@pytest.mark.parametrize("way", ["cells", "jsonl", "parquet"])
def test_several_labels_are_arrays_of_classes(flat: Path, tmp_path: Path, way: str) -> None:
    several = {"a": ["dog", "cat"], "b": ["emu"], "c": ["cat"], "d": ["emu", "dog"]}
    options: dict[str, Any] = {}
    frame = pandas.DataFrame({"image_id": list(several), "label": list(several.values())})
    table = tmp_path / "t.parquet"
    if way == "cells":
        options["label_separator"] = "|"
        lines = [f"{name},{'|'.join(words)}" for name, words in several.items()]
        table = put(tmp_path / "t.csv", "\n".join(["image_id,label", *lines]))
    elif way == "jsonl":
        frame.to_json(table := tmp_path / "t.jsonl", orient="records", lines=True)
    else:
        frame.to_parquet(table)
    out = tmp_path / "out"
    shardkit.convert(flat, "hf", out, metadata=table, **KAGGLE, **options)
    found = shardkit.open(out)
    assert found.schema["label"] == Array("<i8", (None,))
    assert found.class_names == {"label": ("cat", "dog", "emu")}
    assert {k: v.tolist() for k, v in labels(out).items()} == {
        "a": [1, 0],
        "b": [2],
        "c": [0],
        "d": [2, 1],
    }
    import datasets

    theirs = datasets.load_from_disk(str(out))
    assert theirs.features["label"].feature.names == ["cat", "dog", "emu"]
    assert theirs["label"][0] == [1, 0]
    assert verify(out, flat, metadata=table).sound
    asked = {**KAGGLE, **options, "classes": ["cat", "dog"]}
    with pytest.raises(SampleError, match="the label is not a known class"):
        shardkit.convert(flat, "hf", tmp_path / "no", metadata=table, **asked)


def test_numbers_in_cells_with_a_separator_are_labels(flat: Path, tmp_path: Path) -> None:
    table = put(tmp_path / "t.csv", "image_id,label\na,5 0\nb,1\nc,27 1\nd,0\n")
    asked = {**KAGGLE, "metadata": table, "label_separator": " "}
    shardkit.convert(flat, "wds", tmp_path / "out", **asked)
    assert labels(tmp_path / "out")["c"].tolist() == [27, 1]
    assert shardkit.open(tmp_path / "out").classes is None


def test_the_table_is_packed_and_typed_as_a_whole() -> None:
    building = Building(cells=True)
    for chunk in (["1", None, "2"], [], ["x", "007"]):
        building.add(chunk)
    assert building.column().kind == Text()
    assert list(building.column()) == ["1", None, "2", "x", "007"]
    # Types are pandas' where nothing is guessed but numbers; `007` and `NA` stay text.
    for cells, kind in ((["1", "-2"], Int()), (["1", ".5"], Float()), (["007"], Text())):
        assert typed_column(cells, cells=True).kind == kind
    mixed = [1, 2.5, None, 2**70]
    assert list(typed_column(mixed, cells=False)) == [1.0, 2.5, None, float(2**70)]
    words = typed_column(["é", None, "", "\ud800"], cells=False)
    assert list(words.take(np.array([3, 1, 0, 0]))) == ["\ud800", None, "é", "é"]


@pytest.mark.parametrize(
    ("source", "options", "what"),
    [
        ("in", {"file_column": "x"}, "file_column requires a metadata table"),
        ("in", {"label_separator": "|"}, "label_separator requires label_column"),
        ("in", {"label_column": "label"}, "there is no table with the column 'label'"),
        ("in", {"metadata": "nowhere.csv"}, "file given by --metadata does not exist"),
        ("in", {"metadata": "in/a.jpg"}, "not a table in a supported format"),
        ("shards", {"metadata": "t.csv"}, "a metadata table is for folders"),
    ],
)
def test_options_that_do_not_fit(
    flat: Path, tmp_path: Path, source: str, options: dict[str, Any], what: str
) -> None:
    put(tmp_path / "t.csv", TABLE)
    shardkit.convert(flat, "wds", tmp_path / "shards", workers=0)
    if "metadata" in options:
        options = {"metadata": tmp_path / options["metadata"]}
    with pytest.raises(ShardkitError, match=what):
        shardkit.convert(tmp_path / source, "wds", tmp_path / "out", workers=0, **options)


# --- text in class folders -----------------------------------------------------------------------


def reviews(root: Path, *names: str) -> Path:
    for name in names:
        for number in range(2):
            put(root / name / f"{number}.txt", f"{name} {number} words")
    return root


def test_tasks_of_labelled_files_are_pickled_with_their_rows_alone(
    flat: Path, tmp_path: Path
) -> None:
    lines = [f"{name},{word},{'x' * 5000}" for name, word in zip("abcd", "pqpq", strict=True)]
    table = put(tmp_path / "t.csv", "\n".join(["image_id,label,note", *lines]))
    recipe = Recipe("wds", metadata=str(table), file_column="image_id", file_suffix=".jpg")
    (source,) = open_sources(flat, replace(recipe, label_column="label")).values()
    assert isinstance(source, Source)
    part = pickle.dumps(source.select(np.array([2])))
    assert len(part) < 8000
    assert pickle.loads(part)[0] == source[2]
    folder = reviews(tmp_path / "text", "pos", "neg")
    (texts,) = open_sources(folder).values()
    assert isinstance(texts, Source)
    assert pickle.loads(pickle.dumps(texts.select(np.array([3]))))[0] == texts[3]


def test_folders_of_texts_are_classes_as_those_of_images(tmp_path: Path) -> None:
    root = reviews(tmp_path / "in", "train/pos", "train/neg", "train/unsup", "test/pos", "test/neg")
    for name in ("train/urls_pos.txt", "test/urls_neg.txt", "imdbEr.txt", "imdb.vocab", "README"):
        put(root / name, "http://")  # as IMDb's reviews come
    result = shardkit.convert(root, "hf", tmp_path / "out", workers=0)
    assert list(result.splits) == ["train", "test"]
    for split in result.splits:
        found = shardkit.open(tmp_path / "out" / split)
        assert found.classes == ("neg", "pos")
    assert labels(tmp_path / "out/train") == {
        "neg/0": 0,
        "neg/1": 0,
        "pos/0": 1,
        "pos/1": 1,
        "unsup/0": -1,
        "unsup/1": -1,
    }
    assert "documents without a class, whose label is -1: 2" in result.notes
    assert any("taken as classes: neg/, pos/; --drop label" in note for note in result.notes)
    assert result.ignored == {".txt file": 3, ".vocab file": 1, "file without suffix": 1}
    assert verify(tmp_path / "out", root).sound
    shardkit.convert(root, "hf", tmp_path / "plain", drop=["label"], workers=0)
    assert "label" not in shardkit.open(tmp_path / "plain/train").schema
    assert verify(tmp_path / "plain", root).sound


@pytest.mark.parametrize(
    ("names", "stray", "why"),
    [
        (["en", "de"], "", "de/ may be a language"),
        (["zh-CN", "news"], "", "zh-CN/ may be a language"),
        (["2019", "2020"], "", "2019/ may be"),
        (["data", "pos"], "", "data/ may be"),
        (["part1", "part2"], "", "part1/ may be"),
        (["volume 1", "volume 2"], "", "differ only in numbers"),
        (["pos", "neg"], "notes.txt", "'notes.txt' is next to them"),
        (["pos", "neg/deep"], "", "they contain folders, such as neg/deep/"),
        (["pos", "neg"], "empty/x.txt", "empty/ next to them contains no text"),
    ],
)
def test_folders_that_may_be_no_classes_are_none_and_a_note_says_why(
    tmp_path: Path, names: list[str], stray: str, why: str
) -> None:
    root = reviews(tmp_path / "in", *names)
    if stray:
        put(root / stray, "more").write_text("" if stray.startswith("empty") else "more")
    result = shardkit.convert(root, "wds", tmp_path / "out", workers=0)
    assert list(shardkit.open(tmp_path / "out").schema) == ["text"]
    assert any("no labels from the folders" in n and why in n for n in result.notes), result.notes
    assert verify(tmp_path / "out", root).sound


def test_class_folders_of_texts_one_folder_below_are_said(tmp_path: Path) -> None:
    root = reviews(tmp_path / "corpus/reviews", "pos", "neg")
    for _ in range(2):
        (source,) = open_sources(tmp_path).values()
        (note,) = source.notes
        assert note.endswith(f"neg/, pos/ are in corpus/reviews/; for labels, give {root}")
        assert list(source.schema) == ["text"]
        put(root.parent / "reviews/.hidden", "x")
    assert len(open_sources(root)[""].classes or ()) == 2
    (root / "neg").rename(root / "de")
    (source,) = open_sources(tmp_path).values()
    assert not source.notes


def test_a_split_whose_texts_lie_in_no_folders_has_no_labels(tmp_path: Path) -> None:
    root = reviews(tmp_path / "in", "train/pos", "train/neg", "test")
    for number, options in enumerate(({}, {"classes": ["pos", "neg"]})):
        out = tmp_path / str(number)
        result = shardkit.convert(root, "wds", out, workers=0, **options)
        assert "no labels in test: its texts are not in folders" in result.notes
        assert list(shardkit.open(out / "test").schema) == ["text"]
        assert labels(out / "train")["pos/0"] == 1 - number
        assert verify(out, root).sound


def test_a_list_of_classes_makes_classes_of_any_folders(tmp_path: Path) -> None:
    root = reviews(tmp_path / "in", "en/2019", "de", "unlabeled")
    asked: dict[str, Any] = {"classes": ["en", "de", "fr"], "workers": 0}
    shardkit.convert(root, "wds", tmp_path / "out", **asked)
    assert labels(tmp_path / "out")["de/0"] == 1
    assert labels(tmp_path / "out")["en/2019/1"] == 0
    assert labels(tmp_path / "out")["unlabeled/1"] == -1
    assert verify(tmp_path / "out", root).sound
    shardkit.convert(
        root, "wds", tmp_path / "lines", text=shardkit.TextOptions(documents="line"), **asked
    )
    assert Counter(labels(tmp_path / "lines").values()) == {0: 2, 1: 2, -1: 2}
    assert verify(tmp_path / "lines", root).sound
    with pytest.raises(UsageError, match="does not name the folder 'en'"):
        shardkit.convert(root, "wds", tmp_path / "no", classes=["de", "fr"], workers=0)
    put(root / "stray.txt", "one")
    with pytest.raises(UsageError, match="needs a folder per class") as error:
        shardkit.convert(root, "wds", tmp_path / "no", **asked)
    assert error.value.found == "stray.txt"


def test_labels_stay_beside_tokens_but_not_in_blocks(tmp_path: Path) -> None:
    root, words = tmp_path / "in", tokenizer_zoo.write_json(tmp_path, few_words(8))
    for name in ("pos", "neg"):
        put(root / name / "1.txt", "w1 w2 w3")
    options = shardkit.TextOptions(tokenizer=words, append_eos=False)
    shardkit.convert(root, "wds", tmp_path / "out", text=options, workers=0)
    assert labels(tmp_path / "out") == {"neg/1": 0, "pos/1": 1}
    assert shardkit.open(tmp_path / "out").classes == ("neg", "pos")
    assert verify(tmp_path / "out", root).sound
    packed = replace(options, seq_len=3)
    result = shardkit.convert(root, "wds", tmp_path / "packed", text=packed, workers=0)
    assert list(shardkit.open(tmp_path / "packed").schema) == ["tokens", "doc_ends"]
    assert result.ignored == {"values of 'label'": 2}
    assert verify(tmp_path / "packed", root).sound


def test_a_table_labels_texts_that_are_a_document_each(tmp_path: Path) -> None:
    root = reviews(tmp_path / "in", "a")
    put(root / "labels.csv", "id,label,stars\na/0,good,5\na/1,bad,1\n")
    asked = {**KAGGLE, "file_column": "id", "file_suffix": ".txt", "metadata": root / "labels.csv"}
    shardkit.convert(root, "wds", tmp_path / "out", **asked)
    assert labels(tmp_path / "out") == {"a/0": 1, "a/1": 0}
    assert samples(tmp_path / "out")[0]["stars"] == 5
    assert verify(tmp_path / "out", root, metadata=root / "labels.csv").sound
    text = shardkit.TextOptions(documents="line")
    with pytest.raises(UsageError, match="if each file is a document"):
        shardkit.convert(root, "wds", tmp_path / "no", text=text, **asked)


# --- columns of text and datasets ----------------------------------------------------------------

ROWS = [
    {"review": "one", "mood": "happy", "n": 3, "score": 0.5, "tags": ["b", "a"]},
    {"review": "two", "mood": "sad", "n": -1, "score": 2.0, "tags": []},
    {"review": "three", "mood": "happy", "n": 0, "score": 1.0, "tags": ["a"]},
]


@pytest.mark.parametrize(
    "way",
    [
        "jsonl",
        "parquet",
        *(pytest.param(w, marks=pytest.mark.large) for w in ("sequence", "splits")),
    ],
)
@pytest.mark.parametrize(
    ("column", "expected", "names"),
    [
        ("mood", [0, 1, 0], ("happy", "sad")),
        ("n", [3, -1, 0], None),
        ("score", [0.5, 2.0, 1.0], None),
        ("tags", [[1, 0], [], [0]], ("a", "b")),
    ],
)
def test_a_column_of_documents_and_datasets_becomes_the_label(
    tmp_path: Path, way: str, column: str, expected: list[Any], names: tuple[str, ...] | None
) -> None:
    source: Any = tmp_path / f"in.{way}"
    if way == "jsonl":
        put(source, "\n".join(map(json.dumps, ROWS)))
    elif way == "sequence":
        source = ROWS
    elif way == "parquet":
        pandas.DataFrame(ROWS).to_parquet(source)
    else:
        for number, split in enumerate(("train", "test")):
            part = pandas.DataFrame(ROWS[2 * number : 2 * number + 2])
            (tmp_path / "in.splits").mkdir(exist_ok=True)
            part.to_parquet(source / f"{split}-00000-of-00001.parquet")
    text = shardkit.TextOptions(field="review")
    out = tmp_path / "out"
    shardkit.convert(source, "hf", out, label_column=column, text=text, workers=0)
    parts = [out / "train", out / "test"] if way == "splits" else [out]
    found = [np.asarray(label).tolist() for part in parts for label in labels(part).values()]
    assert found == expected
    for part in parts:
        assert shardkit.open(part).classes == names
        assert set(shardkit.open(part).schema) == {"review", "label"}
    if way != "sequence":
        assert verify(out, source).sound
    if way == "jsonl":
        options = shardkit.TextOptions(field="review", keep_fields=True)
        shardkit.convert(source, "hf", tmp_path / "all", label_column=column, text=options)
        others = {"review", "label", "mood", "n", "score", "tags"} - {column}
        assert set(shardkit.open(tmp_path / "all").schema) == others


def test_labels_of_tables_of_text_are_as_datasets_reads_them(tmp_path: Path) -> None:
    path = put(tmp_path / "in.csv", "review,sentiment\ngood one,positive\nbad,negative\n")
    shardkit.convert(path, "hf", tmp_path / "out", label_column="sentiment", workers=0)
    import datasets

    theirs = datasets.load_dataset("csv", data_files=str(path), cache_dir=str(tmp_path / "c"))
    encoded = theirs["train"].class_encode_column("sentiment")
    ours = datasets.load_from_disk(str(tmp_path / "out"))
    assert ours["label"][:] == encoded["sentiment"][:]
    assert ours.features["label"].names == encoded.features["sentiment"].names
    assert ours["review"][:] == encoded["review"][:]


def test_mistakes_in_columns_name_the_document(tmp_path: Path) -> None:
    path = put(tmp_path / "in.jsonl", "\n".join(map(json.dumps, ROWS)))
    text = shardkit.TextOptions(field="review")
    asked: dict[str, Any] = {"text": text, "workers": 0}
    with pytest.raises(SampleError, match="the label is not a known class") as error:
        shardkit.convert(
            path, "wds", tmp_path / "o", label_column="mood", classes=["happy"], **asked
        )
    second = len(json.dumps(ROWS[0])) + 1
    assert error.value.where == {
        "path": str(path),
        "key": f"in.jsonl/{second}",
        "field": "mood",
        "offset": second,
    }
    with pytest.raises(UsageError, match="no column 'nothing' for labels"):
        shardkit.convert(path, "wds", tmp_path / "o", label_column="nothing", **asked)
    put(path, path.read_text().replace('"mood": "sad"', '"mood": null'))
    with pytest.raises(SampleError, match="there is no label"):
        shardkit.convert(path, "wds", tmp_path / "o", label_column="mood", **asked)
    shardkit.convert(
        path, "wds", tmp_path / "skipped", label_column="mood", on_error="skip", **asked
    )
    assert len(shardkit.open(tmp_path / "skipped")) == 2
    pandas.DataFrame(ROWS).assign(label=1).to_parquet(tmp_path / "in.parquet")
    for name, what in (("mood", "already exists"), ("x", "no column 'x' for labels")):
        with pytest.raises(UsageError, match=what):
            shardkit.convert(
                tmp_path / "in.parquet", "wds", tmp_path / "o", label_column=name, workers=0
            )
