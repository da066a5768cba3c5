"""Several sources in one conversion: lists, patterns, and what unites."""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import braceexpand
import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

import shardkit
from shardkit.errors import NotFoundError, ShardkitError, UsageError
from shardkit.manifest import load
from shardkit.patterns import expand
from shardkit.recipe import Recipe
from shardkit.sources import open_sources
from shardkit.testing import make_image
from shardkit.verification.verify import verify
from tests.codecs import tokenizer_zoo
from tests.conftest import examples, files_of
from tests.sources.test_text import put, put_lines
from tests.test_cli import run


def folder(root: Path, **classes: int) -> Path:
    """A folder of images: so many in the folder of each class."""
    for name, count in classes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            seed = hash((root.name, name, number)) % 10**6
            (root / name / f"{number}.jpg").write_bytes(make_image(seed))
    return root


def shard(path: Path, samples: Sequence[dict[str, Any]]) -> Path:
    """A shard without what only shardkit knows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shardkit.convert(samples, path.suffix[1:].replace("tar", "wds"), path, workers=0)
    shutil.rmtree(path.parent / "__shardkit__")
    return path


def labels(dataset: Path) -> dict[str, str]:
    """The name of each sample's class, by key."""
    found = shardkit.open(dataset)
    names = found.classes
    assert names is not None
    return {sample["__key__"]: names[sample["label"]] for sample in found}


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """A folder of images, TAR shards and an Arrow file of ours, with other classes each."""
    first = folder(tmp_path / "photos", cat=2, dog=1)
    for name, classes, to in (
        ("tars", {"ant": 1, "dog": 2}, "wds"),
        ("table", {"cow": 2}, "arrow"),
    ):
        source = folder(tmp_path / "in" / name, **classes)
        shardkit.convert(source, to, tmp_path / name, workers=0)
    return [first, tmp_path / "tars", tmp_path / "table"]


def test_three_kinds_unite(three: list[Path], tmp_path: Path) -> None:
    result = shardkit.convert(three, "wds", tmp_path / "out", workers=0)
    assert result.samples == 8
    assert labels(tmp_path / "out") == {
        "photos/cat/0": "cat",
        "photos/cat/1": "cat",
        "photos/dog/0": "dog",
        "tars/ant/0": "ant",
        "tars/dog/0": "dog",
        "tars/dog/1": "dog",
        "table/cow/0": "cow",
        "table/cow/1": "cow",
    }
    assert load(tmp_path / "out").classes == ("ant", "cat", "cow", "dog")
    assert "keys begin with the name of their source: photos, tars, table" in result.notes
    images = {s["__key__"]: s["image"] for s in shardkit.open(tmp_path / "out")}
    assert images["tars/dog/1"] == (tmp_path / "in/tars/dog/1.jpg").read_bytes()
    assert verify(tmp_path / "out", against=three).sound
    again = shardkit.convert(three, "wds", tmp_path / "out", workers=0)
    assert again.already_complete
    (three[0] / "cat/0.jpg").unlink()
    problems = verify(tmp_path / "out", against=three).problems
    assert [problem.where["key"] for problem in problems] == ["photos/cat/0"]


def test_c1_the_same_bytes_for_any_number_of_workers(three: list[Path], tmp_path: Path) -> None:
    for workers in (0, 2):
        options: dict[str, Any] = {"shuffle": True, "shard_samples": 3, "workers": workers}
        shardkit.convert(three, "wds", tmp_path / f"out{workers}", **options)
    assert files_of(tmp_path / "out0") == files_of(tmp_path / "out2")


def test_the_order_is_that_of_the_sources(three: list[Path], tmp_path: Path) -> None:
    shardkit.convert(three[::-1], "wds", tmp_path / "out", workers=0)
    keys = [sample["__key__"] for sample in shardkit.open(tmp_path / "out")]
    assert [key.partition("/")[0] for key in keys] == ["table"] * 2 + ["tars"] * 3 + ["photos"] * 3


def test_folders_of_one_tree_have_the_labels_of_the_tree(tmp_path: Path) -> None:
    whole = folder(tmp_path / "whole", ape=2, bee=2, cat=2)
    parts = [tmp_path / "a", tmp_path / "b"]
    for number, part in enumerate(parts):
        for image in whole.rglob(f"{number}.jpg"):
            (part / image.parent.name).mkdir(parents=True)
            (part / image.parent.name / image.name).write_bytes(image.read_bytes())
    shardkit.convert(whole, "wds", tmp_path / "one", workers=0)
    shardkit.convert(parts, "wds", tmp_path / "two", workers=0)
    one = {s["__key__"]: (s["image"], s["label"]) for s in shardkit.open(tmp_path / "one")}
    two = {s["__key__"][2:]: (s["image"], s["label"]) for s in shardkit.open(tmp_path / "two")}
    assert one == two


def test_folders_that_may_be_meant_for_classes_are_told_of(tmp_path: Path) -> None:
    photos = folder(tmp_path / "photos", cat=2, dog=1)
    note = f"there are no labels: if the folders are classes, convert {photos} instead"
    found = shardkit.convert(f"{photos}/*", "wds", tmp_path / "out", workers=0)
    assert note in found.notes
    assert list(shardkit.open(tmp_path / "out").schema) == ["image"]
    apart = [photos / "cat", folder(tmp_path / "more", dog=1) / "dog"]
    assert not any("labels" in n for n in shardkit.convert(apart, "wds", tmp_path / "two").notes)


def test_patterns_quoted_or_expanded_by_the_shell_are_the_same(tmp_path: Path) -> None:
    samples = [{"__key__": f"{n % 3}", "n": n} for n in range(12)]
    for n, name in enumerate(("a/train-000", "a/train-001", "b/train-000", "b/train-001")):
        shard(tmp_path / f"{name}.tar", samples[3 * n :][:3])  # each numbers them from zero
    expanded = sorted(glob.glob(str(tmp_path / "?/train-*.tar")))
    for number, given in enumerate(
        (
            expanded,
            tmp_path / "{a,b}/train-*.tar",
            str(tmp_path / "{a,b}/train-{000..001}.tar"),
            tmp_path / "*/*.tar",
            [tmp_path / "a/train-*.tar", tmp_path / "b/train-*.tar"],
        )
    ):
        shardkit.convert(given, "arrow", tmp_path / f"out{number}", workers=0)
        assert files_of(tmp_path / f"out{number}") == files_of(tmp_path / "out0")
        assert verify(tmp_path / f"out{number}", against=given).sound
    found = shardkit.open(tmp_path / "out0")
    assert [sample["n.json"] for sample in found] == list(range(12))
    assert found[0]["__key__"] == "a/train-000/0"
    assert len(shardkit.open(str(tmp_path / "{a,b}/train-*.tar"))) == 12


def test_shards_of_ours_keep_their_class_names(three: list[Path], tmp_path: Path) -> None:
    tars = tmp_path / "in2"
    shardkit.convert(three[1], "wds", tars, workers=0, shard_samples=1)
    shardkit.convert(str(tars / "shard-*.tar"), "arrow", tmp_path / "quoted", workers=0)
    shardkit.convert(sorted(tars.glob("*.tar")), "arrow", tmp_path / "listed", workers=0)
    assert files_of(tmp_path / "quoted") == files_of(tmp_path / "listed")
    assert load(tmp_path / "quoted").classes == ("ant", "dog")
    both = [*sorted(tars.glob("*.tar")), *sorted(three[2].glob("*.arrow"))]
    shardkit.convert(both, "arrow", tmp_path / "both", workers=0)
    assert set(labels(tmp_path / "both").values()) == {"ant", "dog", "cow"}


def test_files_of_text_are_one_corpus(tmp_path: Path) -> None:
    for name in ("x/a", "x/b", "y/a"):
        put_lines(tmp_path / f"{name}.jsonl", [{"text": f"{name} {n}", "n": n} for n in range(3)])
    keep = {"text": shardkit.TextOptions(keep_fields=True)}
    expanded = sorted(glob.glob(str(tmp_path / "*/*.jsonl")))
    for number, given in enumerate((expanded, tmp_path / "{x,y}/*.jsonl", tmp_path)):
        out = tmp_path.parent / f"{tmp_path.name}-{number}"
        shardkit.convert(given, "arrow", out, workers=0, **keep)
        assert files_of(out) == files_of(tmp_path.parent / f"{tmp_path.name}-0")
        assert verify(out, against=given).sound
    found = shardkit.open(out)
    assert [sample["text"] for sample in found][::3] == ["x/a 0", "x/b 0", "y/a 0"]
    assert found[3]["__key__"] == "x/b.jsonl/0"
    backwards = shardkit.convert(expanded[::-1], "arrow", tmp_path / "out", workers=0)
    assert backwards.samples == 9
    assert shardkit.open(tmp_path / "out")[0]["text"] == "y/a 0"


def test_text_in_folders_and_tables_unites_with_datasets(tmp_path: Path) -> None:
    for n in range(3):
        put(tmp_path / f"notes/{n}.v1.txt", f"note {n}")
    put_lines(tmp_path / "lines.jsonl", [{"text": f"line {n}"} for n in range(4)])
    shardkit.convert([{"text": "sample"}], "lmdb", tmp_path / "base.lmdb", workers=0)
    given = [tmp_path / "notes", tmp_path / "lines.jsonl", tmp_path / "base.lmdb"]
    for workers in (0, 2):
        shardkit.convert(given, "wds", tmp_path / f"out{workers}", workers=workers)
    assert files_of(tmp_path / "out0") == files_of(tmp_path / "out2")
    found = shardkit.open(tmp_path / "out0")
    assert {sample["__key__"]: sample["text"] for sample in found} == {
        **{f"notes/{n}_v1": f"note {n}" for n in range(3)},
        **{f"lines/lines.jsonl/{at}": f"line {n}" for n, at in enumerate((0, 19, 38, 57))},
        "base/000000000": "sample",
    }
    assert found.original_paths() == {f"notes/{n}_v1": f"notes/{n}.v1.txt" for n in range(3)}
    assert verify(tmp_path / "out0", against=given).sound


@pytest.mark.parametrize(
    "options",
    [
        {"split": "train=0.5,val=0.5"},
        {"limit": 5},
        {"text": {"seq_len": 4}},
        pytest.param({"where": "text != 'line 2'"}, marks=pytest.mark.large),
    ],
    ids=["shares", "limit", "blocks", "where"],
)
def test_options_for_streams_of_several(options: dict[str, Any], tmp_path: Path) -> None:
    for n in range(3):
        put(tmp_path / f"notes/{n}.txt", f"note {n}")
    put(tmp_path / "notes/bad.txt", b"x" if "limit" in options else b"\xff")
    for name in ("a", "b"):
        rows = [{"text": f"line {n}", "n": n} for n in range(8)]
        put_lines(tmp_path / f"{name}/rows.jsonl", rows)
    given = [tmp_path / name for name in ("a", "notes", "b")]
    options = {"on_error": "skip", **options}
    if "text" in options:
        zoo = tokenizer_zoo.write_json(tmp_path / "zoo", "gpt2")
        options["text"] = shardkit.TextOptions(tokenizer=zoo, **options["text"])
    results = [
        shardkit.convert(given, "wds", tmp_path / f"out{n}", workers=n, **options) for n in (0, 2)
    ]
    assert files_of(tmp_path / "out0") == files_of(tmp_path / "out2")
    assert results[0].errors == (0 if "limit" in options else 1)
    assert results[0].samples == (5 if "limit" in options else results[0].samples)
    assert verify(tmp_path / "out0", against=given).sound


def test_a_field_that_one_source_lacks_is_optional(tmp_path: Path) -> None:
    first = [{"a": n, "b": "x"} for n in range(2)]
    second = [{"a": n + 2} for n in range(2)]
    for name, samples in (("one", first), ("two", second)):
        shardkit.convert(samples, "wds", tmp_path / name, workers=0)
    shardkit.convert([tmp_path / "one", tmp_path / "two"], "arrow", tmp_path / "out", workers=0)
    found = shardkit.open(tmp_path / "out")
    assert found.schema.to_json() == {
        "a": {"type": "Int"},
        "b": {"type": "Text", "optional": True},
    }
    assert [sample["a"] for sample in found] == [0, 1, 2, 3]
    assert "b" not in found[3]


def test_arrays_of_other_sizes_and_bytes_of_other_kinds_unite(tmp_path: Path) -> None:
    rows = (
        {"a": np.zeros((2, 3), "f4"), "b": np.zeros(2, "f4"), "c": np.zeros(2, "f4"), "x": b"x"},
        {"a": np.ones((4, 3), "f4"), "b": np.ones((1, 1), "f4"), "c": np.ones(2, "f8"), "x": b"y"},
    )
    kinds = {"x": [shardkit.Image(), shardkit.Bytes()]}
    for n, row in enumerate(rows):
        schema = {name: shardkit.Array(v.dtype, v.shape) for name, v in row.items() if name != "x"}
        row["x"] = make_image()
        schema |= {"x": kinds["x"][n]}
        shardkit.convert([row], "arrow", tmp_path / f"{n}", schema=schema, workers=0)
    both = [tmp_path / "0", tmp_path / "1"]
    with pytest.raises(ShardkitError, match="'c' differs between sources"):
        open_sources(both)
    result = shardkit.convert(both, "arrow", tmp_path / "out", workers=0, drop=["c"])
    found = shardkit.open(tmp_path / "out")
    assert found.schema["a"] == shardkit.Array("<f4", (None, 3))
    assert found.schema["b"] == shardkit.Array("<f4")
    assert found.schema["x"] == shardkit.Bytes()
    assert [found[n]["a"].shape for n in range(2)] == [(2, 3), (4, 3)]
    assert "the field 'x' is Bytes(), from Image(), Bytes()" in result.notes
    assert verify(tmp_path / "out", against=both).sound


def test_classes_of_datasets_in_another_order_are_numbered_anew(tmp_path: Path) -> None:
    for name, classes in (("one", ["dog", "cat"]), ("two", ["cat", "dog", "ape"])):
        samples = [{"label": n} for n in range(len(classes))] + [{"label": -1}]
        shardkit.convert(samples, "arrow", tmp_path / name, workers=0, classes=classes)
    given = [tmp_path / "one", shardkit.open(tmp_path / "two")]
    shardkit.convert(given, "arrow", tmp_path / "out", workers=0)
    found = shardkit.open(tmp_path / "out")
    assert found.classes == ("dog", "cat", "ape")  # not sorted everywhere: as they come up
    assert [sample["label"] for sample in found] == [0, 1, -1, 1, 0, 2, -1]
    assert verify(tmp_path / "out", against=given).sound


def test_splits_unite_split_by_split(tmp_path: Path) -> None:
    folder(tmp_path / "a/train", cat=2), folder(tmp_path / "a/val", cat=1)
    folder(tmp_path / "b/train", dog=1), folder(tmp_path / "b/validation", dog=1)
    folder(tmp_path / "b/test", ant=1)
    given = [tmp_path / "a", tmp_path / "b"]
    result = shardkit.convert(given, "wds", tmp_path / "out", workers=0)
    assert {n: s.samples for n, s in result.splits.items()} == {"train": 3, "val": 2, "test": 1}
    assert shardkit.open(tmp_path / "out/val").classes == ("ant", "cat", "dog")
    assert labels(tmp_path / "out/val") == {"a/cat/0": "cat", "b/dog/0": "dog"}
    assert verify(tmp_path / "out", against=given).sound
    assert verify(tmp_path / "out/val", against=given).sound
    with pytest.raises(UsageError, match="the source already has splits"):
        open_sources(given, Recipe("wds", split="train=0.5,val=0.5"))
    with pytest.raises(UsageError, match="sources with splits cannot be united") as error:
        open_sources([tmp_path / "a", folder(tmp_path / "c", cat=1)])
    assert error.value.found == "train, val in a, none in c"
    assert len(open_sources([*given, tmp_path / "c"], Recipe("wds", split="none"))[""]) == 7


def test_files_named_after_splits_are_splits(tmp_path: Path) -> None:
    for name in ("train-0", "train-1", "test-0"):
        put_lines(tmp_path / f"{name}.jsonl", [{"text": name}])
        shard(tmp_path / f"p/{name}.parquet", [{"n": 1}])
    ways: list[Any] = [tmp_path / "p/*.parquet", sorted(tmp_path.glob("p/*")), tmp_path / "p"]
    for given in (*ways, tmp_path / "*.jsonl", sorted(tmp_path.glob("*.jsonl"))):
        assert {n: len(s) for n, s in open_sources(given).items()} == {"train": 2, "test": 1}


def test_shares_split_the_united(three: list[Path], tmp_path: Path) -> None:
    options = {"split": "train=0.5,val=0.5", "workers": 0}
    result = shardkit.convert(three, "wds", tmp_path / "out", **options)
    assert result.samples == 8
    assert verify(tmp_path / "out", against=three).sound


def test_safe_keys_are_made_once(tmp_path: Path) -> None:
    folder(tmp_path / "my photos", **{"a b": 1})
    source = folder(tmp_path / "in", **{"c d": 1})
    shardkit.convert(source, "wds", tmp_path / "safe", workers=0, safe_keys=True)
    given = [tmp_path / "my photos", tmp_path / "safe"]
    shardkit.convert(given, "wds", tmp_path / "out", workers=0, safe_keys=True)
    keys = [sample["__key__"] for sample in shardkit.open(tmp_path / "out")]
    assert keys == ["my%20photos/a%20b/0", "safe/c%20d/0"]
    assert verify(tmp_path / "out", against=given).sound
    shardkit.convert(given, "arrow", tmp_path / "plain", workers=0)
    keys = [sample["__key__"] for sample in shardkit.open(tmp_path / "plain")]
    assert keys == ["my photos/a b/0", "safe/c%20d/0"]


def test_a_bad_sample_is_named_with_its_source(tmp_path: Path) -> None:
    folder(tmp_path / "a", cat=1), folder(tmp_path / "b", cat=2)
    (tmp_path / "b/cat/1.jpg").write_bytes(b"no image")
    given = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(ShardkitError) as error:
        shardkit.convert(given, "wds", tmp_path / "out", workers=0)
    assert error.value.where["key"] == "b/cat/1"
    shardkit.convert(given, "wds", tmp_path / "out", workers=0, on_error="skip")
    line = json.loads((tmp_path / "out/__shardkit__/errors.jsonl").read_text())
    assert (line["source"], line["key"]) == ("b/cat/1.jpg", "b/cat/1")
    assert verify(tmp_path / "out", against=given).sound


def test_tokens_keep_the_tokenizer_that_made_all(tmp_path: Path) -> None:
    zoo = {name: tokenizer_zoo.write_json(tmp_path / name, name) for name in ("gpt2", "llama3")}
    for n, name in ((0, "gpt2"), (1, "gpt2"), (2, "llama3")):
        text = shardkit.TextOptions(tokenizer=zoo[name])
        shardkit.convert([{"text": "some words"}], "wds", tmp_path / f"{n}", workers=0, text=text)
    shardkit.convert([tmp_path / "0", tmp_path / "1"], "wds", tmp_path / "out", workers=0)
    assert load(tmp_path / "out").tokenizer == load(tmp_path / "0").tokenizer != {}
    photos = folder(tmp_path / "photos", cat=1)
    shardkit.convert([tmp_path / "0", photos], "wds", tmp_path / "mixed", workers=0)
    assert load(tmp_path / "mixed").tokenizer == load(tmp_path / "0").tokenizer
    with pytest.raises(UsageError, match="made by different tokenizers"):
        open_sources([tmp_path / "0", tmp_path / "2"])


def test_the_command_takes_several(three: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = json.loads(run("convert", *three, "--to", "wds", "-o", out, "--plan", "--json").stdout)
    assert (plan["samples"], plan["parts"][0]["classes"]) == (8, 4)
    run("convert", *three, "--to", "wds", "-o", out, "--workers", 0)
    for words in (
        (out, "--against", *three),
        (out, "--quiet", "--against", *three, "--decode"),
        ("--against", three[0], "--against", three[1], "--against", three[2], out),
    ):
        assert run("verify", *words, check=None).returncode == 0
    assert run("verify", out, "--against", *three[:2], check=None).returncode == 1
    assert run("convert", "--to", "wds", check=None).returncode == 2
    report = run("convert", *three, "--to", "wds", check=None)
    assert (report.returncode, "several sources need an output" in report.stderr) == (2, True)


def test_c2_a_run_that_failed_goes_on(three: list[Path], tmp_path: Path) -> None:
    small: dict[str, Any] = {"shard_size": 4096}
    shardkit.convert(three, "wds", tmp_path / "whole", workers=0, **small)
    broken = three[0] / "dog/0.jpg"
    data, about = broken.read_bytes(), broken.stat()
    for damaged in (b"x" * len(data), data):
        broken.write_bytes(damaged)
        os.utime(broken, ns=(about.st_atime_ns, about.st_mtime_ns))
        if damaged != data:
            with pytest.raises(ShardkitError):
                shardkit.convert(three, "wds", tmp_path / "out", workers=0, **small)
            assert (tmp_path / "out.partial").exists()
    with pytest.raises(ShardkitError, match="unfinished conversion"):
        shardkit.convert(three[::-1], "wds", tmp_path / "out", workers=0, **small)
    shardkit.convert(three, "wds", tmp_path / "out", workers=0, **small)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


# --- mistakes -------------------------------------------------------------------------------------


def test_types_that_differ_are_refused_with_who_has_which(tmp_path: Path) -> None:
    for name, value in (("one", 1), ("two", "x")):
        shardkit.convert([{"a": value, "b": 1}], "wds", tmp_path / name, workers=0)
    given = [tmp_path / "one", tmp_path / "two"]
    with pytest.raises(ShardkitError, match="'a' differs between sources") as error:
        open_sources(given)
    assert error.value.found == "Int() in one, Text() in two"
    assert "--drop a" in str(error.value.fix)
    assert list(open_sources(given, Recipe("wds", drop=("a",)))[""].schema) == ["b"]
    shardkit.convert([{"c": 1}], "wds", tmp_path / "three", workers=0)
    with pytest.raises(UsageError, match="no field of one of the sources"):
        open_sources([tmp_path / "one", tmp_path / "three"], Recipe("wds", fields=("c",)))


def test_labels_with_names_beside_numbers_are_refused(tmp_path: Path) -> None:
    folder(tmp_path / "a", cat=1)
    samples = [{"image": make_image(), "label": 0}]
    shardkit.convert(samples, "wds", tmp_path / "b", workers=0)
    with pytest.raises(ShardkitError, match="cannot be mixed with labels without") as error:
        open_sources([tmp_path / "a", tmp_path / "b"])
    assert error.value.found == "['cat'] in a, none in b"
    found = open_sources([tmp_path / "a", tmp_path / "b"], Recipe("wds", drop=("label",)))[""]
    assert list(found.schema) == ["image"]


def test_what_is_given_twice_is_refused(tmp_path: Path) -> None:
    a = folder(tmp_path / "a", cat=1)
    (tmp_path / "link").symlink_to(a)
    for given in ([a, a], [a, f"{a}/"], [a, tmp_path / "link"], [tmp_path / "{a,a}"]):
        with pytest.raises(UsageError, match="given twice"):
            open_sources(given)
    put_lines(tmp_path / "text/a.jsonl", [{"text": "x"}])
    for given in ([a, a / "cat"], [tmp_path / "text/a.jsonl", tmp_path / "text"]):
        with pytest.raises(UsageError, match="one source lies inside another"):
            open_sources(given)
    dataset = shardkit.Dataset.from_sequence(
        [{"__key__": "a", "n": 1}], shardkit.Schema({"n": shardkit.Int()})
    )
    with pytest.raises(UsageError, match="given twice"):
        open_sources([dataset, dataset])
    shardkit.convert([{"n": 1}, {"n": 2}], "wds", tmp_path / "ours", workers=0)
    ours, again = shardkit.open(tmp_path / "ours"), shardkit.open(tmp_path / "ours")
    with pytest.raises(UsageError, match="given twice"):
        open_sources([ours, again])
    with pytest.raises(UsageError, match="one source lies inside another"):
        open_sources([tmp_path / "ours", again])
    views = open_sources([ours[:1], ours[1:]])[""]
    assert [views[n]["__key__"] for n in range(2)] == ["ours/000000000", "ours~2/000000001"]


def test_sources_of_one_name_have_more_of_their_paths_in_keys(tmp_path: Path) -> None:
    given = [folder(tmp_path / f"{name}/train2", cat=1) for name in ("x", "y")]
    shardkit.convert(given, "wds", tmp_path / "out", workers=0)
    keys = [sample["__key__"] for sample in shardkit.open(tmp_path / "out")]
    assert keys == ["x/train2/cat/0", "y/train2/cat/0"]
    shardkit.convert([{"n": 1}], "wds", tmp_path / "one.tar", workers=0)
    shardkit.convert([{"n": 1}], "arrow", tmp_path / "one.arrow", workers=0)
    found = open_sources([tmp_path / "one.tar", tmp_path / "one.arrow"])[""]
    assert found.notes == ["keys begin with the name of their source: one, one~2"]


@pytest.mark.parametrize("given", ["no-*.tar", "{a,no}/*.jpg", "[no]/x.tar"])
def test_a_pattern_that_fits_nothing(tmp_path: Path, given: str) -> None:
    folder(tmp_path, a=1)
    with pytest.raises(NotFoundError, match="nothing matches the pattern"):
        open_sources(tmp_path / given)


def test_a_pattern_that_names_several_kinds(tmp_path: Path) -> None:
    folder(tmp_path / "photos", cat=1)
    put_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    put(tmp_path / "b.txt", "x")
    shardkit.convert([{"n": 1}], "wds", tmp_path / "c.tar", workers=0)
    with pytest.raises(UsageError, match="of several kinds") as error:
        open_sources(tmp_path / "[a-c]*")
    assert error.value.found == "tables (a.jsonl), text (b.txt), wds (c.tar)"
    assert len(open_sources([tmp_path / "a.jsonl", tmp_path / "b.txt"])[""]) == 2
    with pytest.raises(UsageError, match="does not match shards of one format"):
        shardkit.open(tmp_path / "[a-c]*")


_NAMES = ["a", "b", "ab", "x-{0..3}", "{08..11}", "{8..012}", "*", "?", "[ab]", "{a,b}", "x{a,,b}-"]


@settings(max_examples=examples(40))
@drawn(parts=st.lists(st.sampled_from(_NAMES), min_size=1, max_size=3))
def test_patterns_are_what_shells_make_of_them(
    parts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As `braceexpand`, which WebDataset uses, and `glob` do it."""
    root = tmp_path_factory.getbasetemp() / "patterns"
    for name in ("a", "b", "ab", ".a", "x-1", "8", "a/b", "b/b", "ab/.b", "ab/x-3"):
        (root / name / "end").mkdir(parents=True, exist_ok=True)
    for between in ("", "/"):
        pattern = root / (between.join(parts) + "/end")
        expected: list[str] = []
        for text in braceexpand.braceexpand(str(pattern)):
            special = any(sign in text for sign in "*?[")
            expected += sorted(glob.glob(text)) if special else [text]
            if special and not glob.glob(text):
                with pytest.raises(NotFoundError, match="nothing matches"):
                    expand(pattern)
                break
        else:
            assert [str(path) for path in expand(pattern)] == expected


@pytest.mark.parametrize("given", ["{003..001}.tar", "{0..99999999}.tar", "{a,{b,c}}.tar"])
def test_braces_that_mean_nothing(tmp_path: Path, given: str) -> None:
    with pytest.raises(UsageError, match="the braces in a pattern"):
        open_sources(tmp_path / given)


def test_lists_of_other_things(tmp_path: Path) -> None:
    folder(tmp_path / "a", cat=1)
    with pytest.raises(UsageError, match="neither a path nor a dataset") as error:
        open_sources([tmp_path / "a", {"n": 1}])
    assert error.value.found == "dict as item 1"
    with pytest.raises(UsageError, match="a schema is for Python sequences"):
        open_sources([tmp_path / "a"], schema={"n": shardkit.Int()})
    with pytest.raises(UsageError, match="several sources need an output"):
        shardkit.convert([tmp_path / "a", folder(tmp_path / "b", cat=1)], "wds", workers=0)
    with pytest.raises(UsageError, match="must not contain each other"):
        shardkit.convert(tmp_path / "?", "wds", tmp_path / "b/out", workers=0)
    samples = ({"n": np.int64(n)} for n in range(2))
    assert len(open_sources([*samples])[""]) == 2
