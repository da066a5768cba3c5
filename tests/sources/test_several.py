"""Several sources in one conversion: lists, patterns, and what unites."""

import glob
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import braceexpand
import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

import shardkit
from shardkit import NotFoundError, ShardkitError, UsageError, verify
from shardkit.metadata.manifest import load
from shardkit.sources import open_sources
from shardkit.storage.patterns import expand
from shardkit.testing import make_image
from tests.codecs import tokenizer_zoo
from tests.conftest import examples, files_of
from tests.sources.real import cases, convert, keys, opened, put, refused, verified
from tests.test_cli import run


def folder(root: Path, **classes: int) -> Path:
    """A folder of images: so many in the folder of each class, none like another."""
    names = [f"{name}/{number}.jpg" for name, count in classes.items() for number in range(count)]
    return put(root, {n: make_image(zlib.crc32(f"{root.name}/{n}".encode())) for n in names})


def put_lines(path: Path, rows: Iterable[Any]) -> None:
    put(path.parent, {path.name: "".join(json.dumps(row) + "\n" for row in rows)})


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
def three(tmp_path):
    """A folder of images, TAR shards and an Arrow file of ours, with other classes each."""
    first = folder(tmp_path / "photos", cat=2, dog=1)
    convert(folder(tmp_path / "in/tars", ant=1, dog=2), tmp_path / "tars")
    convert(folder(tmp_path / "in/table", cow=2), tmp_path / "table", "arrow")
    return [first, tmp_path / "tars", tmp_path / "table"]


def test_three_kinds_unite(three, tmp_path):
    out = tmp_path / "out"
    result = verified(three, out)
    assert result.samples == 8
    names = "photos/cat/0 photos/cat/1 photos/dog/0 tars/ant/0 tars/dog/0 tars/dog/1"
    expected = [*names.split(), "table/cow/0", "table/cow/1"]
    assert labels(out) == {key: key.split("/")[1] for key in expected}
    assert load(out).classes == ("ant", "cat", "cow", "dog")
    assert "keys begin with the name of their source: photos, tars, table" in result.notes
    images = {s["__key__"]: s["image"] for s in shardkit.open(out)}
    assert images["tars/dog/1"] == (tmp_path / "in/tars/dog/1.jpg").read_bytes()
    assert convert(three, out).already_complete
    convert(three[::-1], tmp_path / "backwards")  # in the order of the sources
    assert [key[:2] for key in keys(tmp_path / "backwards")] == ["ta"] * 5 + ["ph"] * 3
    verified(three, tmp_path / "shares", split="train=0.5,val=0.5")
    (three[0] / "cat/0.jpg").unlink()
    problems = verify(out, against=three).problems
    assert [problem.where["key"] for problem in problems] == ["photos/cat/0"]


@pytest.mark.large
def test_c1_the_same_bytes_of_three_kinds_for_any_number_of_workers(three, tmp_path):
    for workers in (0, 2):
        options = {"shuffle": True, "shard_samples": 3, "workers": workers}
        convert(three, tmp_path / f"out{workers}", **options)
    assert files_of(tmp_path / "out0") == files_of(tmp_path / "out2")


def test_folders_of_one_tree_have_the_labels_of_the_tree(tmp_path):
    whole = folder(tmp_path / "whole", ape=2, bee=2, cat=2)
    for number, part in enumerate("ab"):
        some = {f"{p.parent.name}/{p.name}": p.read_bytes() for p in whole.rglob(f"{number}.jpg")}
        put(tmp_path / part, some)
    convert(whole, tmp_path / "one")
    convert([tmp_path / "a", tmp_path / "b"], tmp_path / "two")
    one = {s["__key__"]: (s["image"], s["label"]) for s in shardkit.open(tmp_path / "one")}
    two = {s["__key__"][2:]: (s["image"], s["label"]) for s in shardkit.open(tmp_path / "two")}
    assert one == two
    note = f"there are no labels: if the folders are classes, convert {whole} instead"
    found = open_sources(f"{whole}/*")[""]
    assert note in found.notes
    assert list(found.schema) == ["image"]
    apart = [whole / "cat", folder(tmp_path / "more", dog=1) / "dog"]
    assert not any("labels" in note for note in open_sources(apart)[""].notes)


def test_patterns_quoted_or_expanded_by_the_shell_are_the_same(tmp_path):
    samples = [{"__key__": f"{n % 3}", "n": n} for n in range(12)]
    for n, name in enumerate(("a/train-000", "a/train-001", "b/train-000", "b/train-001")):
        shard(tmp_path / f"{name}.tar", samples[3 * n :][:3])  # each numbers them from zero
    patterns = ("{a,b}/train-*.tar", "{a,b}/train-{000..001}.tar", "*/*.tar")
    ways = [sorted(glob.glob(str(tmp_path / "?/train-*.tar"))), *(tmp_path / p for p in patterns)]
    ways += [[tmp_path / "a/train-*.tar", tmp_path / "b/train-*.tar"]]
    for number, given in enumerate(ways):
        verified(given, tmp_path / f"out{number}", "arrow")
        assert files_of(tmp_path / f"out{number}") == files_of(tmp_path / "out0")
    found = shardkit.open(tmp_path / "out0")
    assert [sample["n.json"] for sample in found] == list(range(12))
    assert found[0]["__key__"] == "a/train-000/0"
    assert len(shardkit.open(str(tmp_path / "{a,b}/train-*.tar"))) == 12


def test_class_names_of_shards_are_kept_and_those_in_another_order_numbered_anew(three, tmp_path):
    tars = tmp_path / "in2"
    convert(three[1], tars, shard_samples=1)
    listed = sorted(tars.glob("*.tar"))
    convert(str(tars / "shard-*.tar"), tmp_path / "quoted", "arrow")
    convert(listed, tmp_path / "listed", "arrow")
    assert files_of(tmp_path / "quoted") == files_of(tmp_path / "listed")
    assert load(tmp_path / "quoted").classes == ("ant", "dog")
    convert([*listed, *sorted(three[2].glob("*.arrow"))], tmp_path / "both", "arrow")
    assert set(labels(tmp_path / "both").values()) == {"ant", "dog", "cow"}
    for name, classes in (("one", ["dog", "cat"]), ("two", ["cat", "dog", "ape"])):
        samples = [{"label": n} for n in range(len(classes))] + [{"label": -1}]
        convert(samples, tmp_path / name, "arrow", classes=classes)
    given = [tmp_path / "one", shardkit.open(tmp_path / "two")]
    verified(given, tmp_path / "out", "arrow")
    found = shardkit.open(tmp_path / "out")
    assert found.classes == ("dog", "cat", "ape")  # not sorted everywhere: as they come up
    assert [sample["label"] for sample in found] == [0, 1, -1, 1, 0, 2, -1]


def test_files_of_text_are_one_corpus_and_unite_with_datasets(tmp_path):
    root = tmp_path / "in"
    for name in ("x/a", "x/b", "y/a"):
        put_lines(root / f"{name}.jsonl", [{"text": f"{name} {n}", "n": n} for n in range(3)])
    expanded = sorted(glob.glob(str(root / "*/*.jsonl")))
    for number, given in enumerate((expanded, root / "{x,y}/*.jsonl", root)):
        out = tmp_path / str(number)
        verified(given, out, "arrow", text=shardkit.TextOptions(keep_fields=True))
        assert files_of(out) == files_of(tmp_path / "0")
    found = shardkit.open(out)
    assert [sample["text"] for sample in found][::3] == ["x/a 0", "x/b 0", "y/a 0"]
    assert found[3]["__key__"] == "x/b.jsonl/0"
    assert convert(expanded[::-1], tmp_path / "out", "arrow").samples == 9
    assert shardkit.open(tmp_path / "out")[0]["text"] == "y/a 0"
    put(tmp_path / "notes", {f"{n}.v1.txt": f"note {n}" for n in range(3)})
    put_lines(tmp_path / "lines.jsonl", [{"text": f"line {n}"} for n in range(4)])
    convert([{"text": "sample"}], tmp_path / "base.lmdb", "lmdb")
    given = [tmp_path / "notes", tmp_path / "lines.jsonl", tmp_path / "base.lmdb"]
    verified(given, tmp_path / "united")
    found = shardkit.open(tmp_path / "united")
    assert {sample["__key__"]: sample["text"] for sample in found} == {
        **{f"notes/{n}_v1": f"note {n}" for n in range(3)},
        **{f"lines/lines.jsonl/{at}": f"line {n}" for n, at in enumerate((0, 19, 38, 57))},
        "base/000000000": "sample",
    }
    assert found.original_paths() == {f"notes/{n}_v1": f"notes/{n}.v1.txt" for n in range(3)}


@cases(
    "options",
    {"split": "train=0.5,val=0.5"},
    pytest.param({"limit": 5}, marks=pytest.mark.large),
    pytest.param({"text": {"seq_len": 4}}, marks=pytest.mark.large),
    pytest.param({"where": "text != 'line 2'"}, marks=pytest.mark.large),
    ids=["shares", "limit", "blocks", "where"],
)
def test_c1_options_for_streams_of_several(options, tmp_path):
    few = "limit" in options
    put(tmp_path / "notes", {f"{n}.txt": f"note {n}" for n in range(3)})
    put(tmp_path / "notes", {"bad.txt": b"x" if few else b"\xff"})
    for name in ("a", "b"):
        put_lines(tmp_path / name / "rows.jsonl", [{"text": f"line {n}"} for n in range(8)])
    given = [tmp_path / name for name in ("a", "notes", "b")]
    if "text" in options:
        zoo = tokenizer_zoo.write_json(tmp_path / "zoo", "gpt2")
        options = {"text": shardkit.TextOptions(tokenizer=zoo, **options["text"])}
    for workers in (0, 2):
        out = tmp_path / f"out{workers}"
        result = verified(given, out, workers=workers, on_error="skip", **options)
        assert result.errors == (0 if few else 1)
        assert result.samples == (5 if few else result.samples)
    assert files_of(tmp_path / "out0") == files_of(out)


def test_fields_of_other_shapes_and_kinds_unite_and_those_that_one_lacks_are_optional(tmp_path):
    rows = (
        {"a": np.zeros((2, 3), "f4"), "b": np.zeros(2, "f4"), "c": np.zeros(2, "f4")},
        {"a": np.ones((4, 3), "f4"), "b": np.ones((1, 1), "f4"), "c": np.ones(2, "f8")},
    )
    kinds = ({"x": shardkit.Image(), "more": shardkit.Text()}, {"x": shardkit.Bytes()})
    for n, (row, others) in enumerate(zip(rows, kinds, strict=True)):
        schema = {name: shardkit.Array(v.dtype, v.shape) for name, v in row.items()}
        sample = {**row, "x": make_image(), **({"more": "x"} if "more" in others else {})}
        convert([sample], tmp_path / f"{n}", schema=schema | others)
    both = [tmp_path / "0", tmp_path / "1"]
    refused(ShardkitError, "'c' differs between sources", open_sources, both)
    result = verified(both, tmp_path / "out", "arrow", drop=["c"])
    found = shardkit.open(tmp_path / "out")
    arrays = {"a": shardkit.Array("<f4", (None, 3)), "b": shardkit.Array("<f4")}
    more = {"x": shardkit.Bytes(), "more": shardkit.Text(optional=True)}
    assert dict(found.schema) == {**arrays, **more}
    assert [found[n]["a"].shape for n in range(2)] == [(2, 3), (4, 3)]
    assert ["more" in found[n] for n in range(2)] == [True, False]
    assert "the field 'x' is Bytes(), from Image(), Bytes()" in result.notes


def test_splits_unite_split_by_split(tmp_path):
    for name, count in {"a/train": 2, "a/val": 1}.items():
        folder(tmp_path / name, cat=count)
    for name in ("b/train", "b/validation"):
        folder(tmp_path / name, dog=1)
    folder(tmp_path / "b/test", ant=1)
    given, out = [tmp_path / "a", tmp_path / "b"], tmp_path / "out"
    result = verified(given, out)
    assert {n: s.samples for n, s in result.splits.items()} == {"train": 3, "val": 2, "test": 1}
    assert shardkit.open(out / "val").classes == ("ant", "cat", "dog")
    assert labels(out / "val") == {"a/cat/0": "cat", "b/dog/0": "dog"}
    assert verify(out / "val", against=given).sound
    refused(UsageError, "the source already has splits", opened, given, split="train=0.5,val=0.5")
    with pytest.raises(UsageError, match="sources with splits cannot be united") as error:
        open_sources([tmp_path / "a", folder(tmp_path / "c", cat=1)])
    assert error.value.found == "train, val in a, none in c"
    assert len(opened([*given, tmp_path / "c"], split="none")[""]) == 7
    for name in ("train-0", "train-1", "test-0"):  # files named after splits are splits
        put_lines(tmp_path / f"{name}.jsonl", [{"text": name}])
        shard(tmp_path / f"p/{name}.parquet", [{"n": 1}])
    ways = [tmp_path / "p/*.parquet", sorted(tmp_path.glob("p/*")), tmp_path / "p"]
    for given in (*ways, tmp_path / "*.jsonl", sorted(tmp_path.glob("*.jsonl"))):
        assert {n: len(s) for n, s in open_sources(given).items()} == {"train": 2, "test": 1}


def test_safe_keys_are_made_once_and_have_more_of_paths_where_names_repeat(tmp_path):
    folder(tmp_path / "my photos", **{"a b": 1})
    convert(folder(tmp_path / "in", **{"c d": 1}), tmp_path / "safe", safe_keys=True)
    given = [tmp_path / "my photos", tmp_path / "safe"]
    verified(given, tmp_path / "out", safe_keys=True)
    assert keys(tmp_path / "out") == ["my%20photos/a%20b/0", "safe/c%20d/0"]
    plain = open_sources(given)[""]
    assert [plain[n]["__key__"] for n in range(2)] == ["my photos/a b/0", "safe/c%20d/0"]
    found = open_sources([folder(tmp_path / f"{name}/train2", cat=1) for name in ("x", "y")])[""]
    assert [found[n]["__key__"] for n in range(2)] == ["x/train2/cat/0", "y/train2/cat/0"]
    convert([{"n": 1}], tmp_path / "one.tar")
    convert([{"n": 1}], tmp_path / "one.arrow", "arrow")
    found = open_sources([tmp_path / "one.tar", tmp_path / "one.arrow"])[""]
    assert found.notes == ["keys begin with the name of their source: one, one~2"]


def test_c2_a_bad_sample_is_named_with_its_source_and_a_run_that_failed_goes_on(tmp_path, three):
    given, out = [folder(tmp_path / "a", cat=1), folder(tmp_path / "b", cat=2)], tmp_path / "out"
    (tmp_path / "b/cat/1.jpg").write_bytes(b"no image")
    assert refused(ShardkitError, None, convert, given, out).where["key"] == "b/cat/1"
    verified(given, out, on_error="skip")
    line = json.loads((out / "__shardkit__/errors.jsonl").read_text())
    assert (line["source"], line["key"]) == ("b/cat/1.jpg", "b/cat/1")
    small, out = {"shard_size": 4096}, tmp_path / "failed"
    convert(three, tmp_path / "whole", **small)
    broken = three[0] / "dog/0.jpg"
    data, about = broken.read_bytes(), broken.stat()

    def written(content):
        broken.write_bytes(content)
        os.utime(broken, ns=(about.st_atime_ns, about.st_mtime_ns))

    written(b"x" * len(data))
    refused(ShardkitError, None, convert, three, out, **small)
    assert (tmp_path / "failed.partial").exists()
    written(data)
    refused(ShardkitError, "unfinished conversion", convert, three[::-1], out, **small)
    convert(three, out, **small)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_tokens_keep_the_tokenizer_that_made_all(tmp_path):
    zoo = {name: tokenizer_zoo.write_json(tmp_path / name, name) for name in ("gpt2", "llama3")}
    for n, name in enumerate(("gpt2", "gpt2", "llama3")):
        text = shardkit.TextOptions(tokenizer=zoo[name])
        convert([{"text": "some words"}], tmp_path / f"{n}", text=text)
    convert([tmp_path / "0", tmp_path / "1"], tmp_path / "out")
    convert([tmp_path / "0", folder(tmp_path / "photos", cat=1)], tmp_path / "mixed")
    for name in ("out", "mixed"):
        assert load(tmp_path / name).tokenizer == load(tmp_path / "0").tokenizer != {}
    with pytest.raises(UsageError, match="made by different tokenizers"):
        open_sources([tmp_path / "0", tmp_path / "2"])


def test_the_command_takes_several(three, tmp_path):
    out = tmp_path / "out"
    plan = json.loads(run("convert", *three, "--to", "wds", "-o", out, "--plan", "--json").stdout)
    assert (plan["samples"], plan["parts"][0]["classes"]) == (8, 4)
    run("convert", *three, "--to", "wds", "-o", out, "--workers", 0)
    each = [word for source in three for word in ("--against", source)]
    for words in ((out, "--quiet", "--against", *three, "--decode"), (*each, out)):
        assert run("verify", *words, check=None).returncode == 0
    assert run("verify", out, "--against", *three[:2], check=None).returncode == 1
    report = run("convert", *three, "--to", "wds", check=None)
    assert (report.returncode, "several sources need an output" in report.stderr) == (2, True)


def test_fields_and_labels_that_differ_are_refused_with_who_has_which(tmp_path):
    convert([{"a": 1, "b": 1}], tmp_path / "one")
    convert([{"a": "x", "b": 1}], tmp_path / "two")
    convert([{"image": make_image(), "label": 0}], tmp_path / "c")
    pair, images = [tmp_path / "one", tmp_path / "two"], folder(tmp_path / "b", cat=1)
    labelled = ("cannot be mixed with labels", "['cat'] in b, none in c")
    for given, (message, found), field, left in (
        (pair, ("'a' differs", "Int() in one, Text() in two"), "a", "b"),
        ([images, tmp_path / "c"], labelled, "label", "image"),
    ):
        assert refused(ShardkitError, message, open_sources, given).found == found
        assert list(opened(given, drop=(field,))[""].schema) == [left]
    given = [tmp_path / "one", tmp_path / "c"]
    refused(UsageError, "no field of one of the sources", opened, given, fields=("image",))


def test_what_is_given_twice_or_is_no_source_is_refused(tmp_path):
    a = folder(tmp_path / "a", cat=1)
    (tmp_path / "link").symlink_to(a)
    convert([{"n": 1}, {"n": 2}], tmp_path / "ours")
    ours, again = shardkit.open(tmp_path / "ours"), shardkit.open(tmp_path / "ours")
    schema = shardkit.Schema({"n": shardkit.Int()})
    rows = shardkit.Dataset.from_sequence([{"__key__": "a", "n": 1}], schema)
    links = ([a, a], [a, f"{a}/"], [a, tmp_path / "link"], [tmp_path / "{a,a}"])
    for given in (*links, [rows, rows], [ours, again]):
        refused(UsageError, "given twice", open_sources, given)
    put_lines(tmp_path / "text/a.jsonl", [{"text": "x"}])
    text = [tmp_path / "text/a.jsonl", tmp_path / "text"]
    for given in ([a, a / "cat"], text, [tmp_path / "ours", again]):
        refused(UsageError, "one source lies inside another", open_sources, given)
    views = open_sources([ours[:1], ours[1:]])[""]
    assert [views[n]["__key__"] for n in range(2)] == ["ours/000000000", "ours~2/000000001"]
    a, b = folder(tmp_path / "x/a", cat=1), folder(tmp_path / "x/b", cat=1)
    error = refused(UsageError, "neither a path nor a dataset", open_sources, [a, {"n": 1}])
    assert error.found == "dict as item 1"
    with pytest.raises(UsageError, match="a schema is for Python sequences"):
        open_sources([a], schema={"n": shardkit.Int()})
    with pytest.raises(UsageError, match="several sources need an output"):
        shardkit.convert([a, b], "wds", workers=0)
    refused(UsageError, "must not contain each other", convert, tmp_path / "x/?", b / "out")
    assert len(open_sources([{"n": np.int64(n)} for n in range(2)])[""]) == 2


def test_patterns_that_mean_nothing(tmp_path):
    folder(tmp_path, a=1)
    for given in ("no-*.tar", "{a,no}/*.jpg", "[no]/x.tar"):
        refused(NotFoundError, "nothing matches the pattern", open_sources, tmp_path / given)
    for given in ("{003..001}.tar", "{0..99999999}.tar", "{a,{b,c}}.tar"):
        refused(UsageError, "the braces in a pattern", open_sources, tmp_path / given)
    put_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    put(tmp_path, {"b.txt": "x"})
    convert([{"n": 1}], tmp_path / "c.tar")
    error = refused(UsageError, "of several kinds", open_sources, tmp_path / "[a-c]*.*")
    assert error.found == "tables (a.jsonl), text (b.txt), wds (c.tar)"
    assert len(open_sources([tmp_path / "a.jsonl", tmp_path / "b.txt"])[""]) == 2
    refused(UsageError, "does not match shards of one format", shardkit.open, tmp_path / "[a-c]*.*")


_NAMES = ["a", "b", "ab", "x-{0..3}", "{08..11}", "{8..012}", "*", "?", "[ab]", "{a,b}", "x{a,,b}-"]


@settings(max_examples=examples(40))
@drawn(parts=st.lists(st.sampled_from(_NAMES), min_size=1, max_size=3))
def test_patterns_are_what_shells_make_of_them(parts, tmp_path_factory):
    """As `braceexpand`, which WebDataset uses, and `glob` do it."""
    root = tmp_path_factory.getbasetemp() / "patterns"
    for name in ("a", "b", "ab", ".a", "x-1", "8", "a/b", "b/b", "ab/.b", "ab/x-3"):
        (root / name / "end").mkdir(parents=True, exist_ok=True)
    for between in ("", "/"):
        pattern = root / (between.join(parts) + "/end")
        expected = []
        for text in braceexpand.braceexpand(str(pattern)):
            special = any(sign in text for sign in "*?[")
            expected += sorted(glob.glob(text)) if special else [text]
            if special and not glob.glob(text):
                refused(NotFoundError, "nothing matches", expand, pattern)
                break
        else:
            assert [str(path) for path in expand(pattern)] == expected


@pytest.mark.parametrize(
    ("braces", "names"),
    [
        ("{0..10}", "0 1 2 3 4 5 6 7 8 9 10"),
        ("{8..10}", "8 9 10"),
        ("{00..1}", "00 01"),
        ("{9..010}", "009 010"),
    ],
)
def test_numbers_in_braces_are_padded_as_in_bash(braces, names):
    assert [str(path) for path in expand(Path(f"x{braces}.tar"))] == [
        f"x{name}.tar" for name in names.split()
    ]


def test_a_table_of_metadata_is_refused_for_shards_and_datasets(tmp_path):
    paths = [shard(tmp_path / f"{name}.tar", [{"__key__": name, "y": 1}]) for name in "ab"]
    table = tmp_path / "table.csv"
    table.write_text("file_name,x\na,1\n")
    for source in (paths, [shardkit.open(paths[0])]):
        refused(UsageError, "a metadata table is for folders", opened, source, metadata=table)
