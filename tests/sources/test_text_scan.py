"""Planning text corpora: which files belong to them, splits, parts, estimates, fingerprints."""

import gzip
import os
import pickle
import random
import re
import sys

import numpy as np
import pytest

from shardkit import SampleError, SourceError, TextOptions, UsageError
from shardkit.metadata.recipe import Recipe
from shardkit.sources import open_sources
from shardkit.sources.text import scan
from shardkit.sources.text.scan import open_text
from shardkit.sources.text_files import encodings, parse_name
from tests.sources.real import cases, refused
from tests.sources.test_text import (
    COMPRESS,
    errors,
    files,
    put,
    put_lines,
    samples,
    stream,
    table,
    values,
)

ONE = b'{"text": "x"}\n'


def test_a_folder_is_text_if_there_is_any_in_it(tmp_path):
    for name in ("a.txt", "a.MD", "a.text.xz", "a.b.jsonl.GZ", "a.ndjson", "c4.json.zst", "a.tsv"):
        assert parse_name(name)
    for name in ("a.txt.zip", "a.gz", "txt", ".txt", "a.parquet", "a.jpg"):
        assert parse_name(name) is None
    put(tmp_path / "a.dat", "x")
    put(tmp_path / ".git/a.txt", "x")
    refused(SourceError, "no images and no text", open_sources, tmp_path)
    put(tmp_path / "deep/er/a.csv.gz", gzip.compress(b"text\nx\n"))
    assert open_sources(tmp_path)[""].reads_text


def test_files_come_in_the_order_of_their_paths_and_what_is_passed_over_is_counted(tmp_path):
    names = [f"{name}.jsonl" for name in ("a/b/1", "a/z", "a-b/1", "b", "a/B", "a", "ü")]
    for name in names:
        put(tmp_path / name, ONE)
    assert keys(stream(tmp_path)) == [f"{name}/0" for name in sorted(names)]
    for name in ("README.md", "notes.txt", "deep/more.txt", "x.pdf", ".hidden", "LICENSE"):
        put(tmp_path / name, "x")
    for name in ("empty.csv", "deep/empty.txt"):
        put(tmp_path / name, "")
    kinds = {".md file": 1, ".txt file": 2, ".pdf file": 1, "hidden": 1, "empty file": 2}
    assert stream(tmp_path).ignored == {**kinds, "file without suffix": 1}


def keys(source):
    return [sample["__key__"] for sample in samples(source)]


def test_links_to_folders_are_followed_and_loops_are_problems(tmp_path):
    put(tmp_path / "a/one.txt", "x")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "a/loop").symlink_to("..")
    source = files(tmp_path)
    assert [source.key(n) for n in range(len(source))] == ["a/one", "b/one"]
    assert ["leads back" in problem.what for problem in source.problems] == [True, True]
    assert not any("lead out" in note or "leads out" in note for note in source.notes)
    (tmp_path / "c.txt").symlink_to("../secret")
    assert any("1 link leads out of" in note for note in files(tmp_path).notes)


def test_a_corpus_without_documents_is_refused(tmp_path):
    for name, content, found in (
        ("", "", "nothing"),
        ("a.txt", "", None),
        ("", "", "1 x empty file"),
        ("b.txt", "\n \n", None),
    ):
        path = put(tmp_path / name, content) if name else tmp_path
        assert found in (None, refused(SourceError, "no documents", opened, path).found)
    refused(SourceError, "not a text file", opened, put(tmp_path / "b.doc", "x"))


@cases(
    "names expected first",
    (
        "train/a.jsonl train/b/c.jsonl valid/a.jsonl test/a.jsonl",
        ["train", "valid", "test"],
        ["a.jsonl/0", "b/c.jsonl/0"],
    ),
    (
        "train.jsonl train-00000-of-00001.jsonl.gz validation-00000-of-00001.json test.v2.csv",
        ["train", "validation", "test"],
        ["train-00000-of-00001.jsonl.gz/0", "train.jsonl/0"],
    ),
    ("train/a.jsonl test.jsonl", ["train", "test"], ["a.jsonl/0"]),
    ("train/a.jsonl test.jsonl test/a.jsonl", "test/ beside a file test", None),
    ("train.jsonl extra.jsonl", "extra.jsonl", None),
    ("train.jsonl extra/a.jsonl", "extra/", None),
)
def test_folders_and_files_named_after_splits_are_splits(tmp_path, names, expected, first):
    for name in names.split():
        data = b"text\nx\n" if "csv" in name else ONE
        put(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
    put(tmp_path / "README.md", "x")
    if first is None:
        assert refused(UsageError, "something else", opened, tmp_path).found == expected
    else:
        sources = opened(tmp_path)
        assert (list(sources), keys(sources["train"])) == (expected, first)
        assert sources["train"].ignored == {".md file": 1}
        assert sources["test"].ignored == {}
    (whole,) = opened(tmp_path, "none").values()
    assert len(samples(whole)) == len(names.split())


def opened(root, split="auto", **options):
    recipe = Recipe("", text=TextOptions(**options), split=split)
    return open_text(root, recipe, strict=False)


def test_whole_files_split_by_folder_and_lines_by_file_with_the_same_fields(tmp_path):
    for name in ("folders/train/a.txt", "folders/test/b.txt", "files/train.txt", "files/test.txt"):
        put(tmp_path / name, "one\ntwo\n")
    sources = opened(tmp_path / "folders")
    assert [source.key(0) for source in sources.values()] == ["a", "b"]
    (tmp_path / "files/images").mkdir()
    sources = opened(tmp_path / "files")
    assert list(sources) == ["train", "test"]
    assert [values(source) for source in sources.values()] == [["one", "two"]] * 2
    sources = opened(tmp_path / "files", documents="file")
    assert [len(source) for source in sources.values()] == [1, 1]
    # An essay that is called test is no split.
    put(tmp_path / "essays/test.txt", "x")
    put(tmp_path / "essays/essay.txt", "y")
    assert [len(source) for source in opened(tmp_path / "essays").values()] == [2]
    refused(UsageError, "something else", opened, tmp_path / "essays", documents="line")
    put_lines(tmp_path / "json/train.jsonl", [{"text": "a", "n": 1, "extra": "x"}])
    put_lines(tmp_path / "json/test.jsonl", [{"text": "a", "n": 0.5}])
    sources = opened(tmp_path / "json", field="text", keep_fields=True)
    assert sources["train"].schema == sources["test"].schema
    assert samples(sources["test"])[0]["n"] == 0.5


def test_long_files_are_cut_where_a_line_can_be_found(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "RANGE", 64)
    rows = [["text", "n"], *([f"row {n}", n] for n in range(40))]
    plain = table(rows, "tsv", "\n").replace('"', "")
    put(tmp_path / "plain.tsv", plain)
    put(tmp_path / "quoted.csv", table(rows, "csv", "\n"))
    put(tmp_path / "a.jsonl", ONE * 20)
    put(tmp_path / "b.jsonl.gz", gzip.compress(ONE * 20))
    source = stream(tmp_path)
    parts = [stream(tmp_path / name) for name in ("a.jsonl", "b.jsonl.gz", "plain.tsv")]
    assert [len(part) for part in parts] == [5, 1, -(-len(plain) // 64)]
    assert len(source) == sum(map(len, parts)) + 1
    assert values(source) == ["x"] * 40 + [row[0] for row in rows[1:]] * 2


def test_a_long_table_that_cannot_be_read_is_a_bad_sample_and_all_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "RANGE", 64)
    for name in ("a.csv", "b.csv"):
        put(tmp_path / name, "text\n" + "line\n" * 40)
    real = open

    def refuse(path, *args, **more):
        if str(path).endswith("b.csv"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **more)

    monkeypatch.setattr("builtins.open", refuse)
    found = [document.sample for document in stream(tmp_path).documents()]
    assert len(found) == 41
    assert isinstance(found[-1], SampleError)


@pytest.mark.parametrize("how", sorted(COMPRESS))
def test_sizes_are_those_of_the_text_as_well_as_they_are_known(tmp_path, how):
    content = random.Random(0).randbytes(20_000).hex()
    text = "".join(f"{content[n : n + 80]}\n" for n in range(0, len(content), 80))
    for name in ("a", "b/c"):
        put(tmp_path / f"{name}.txt.{how}".rstrip("."), COMPRESS[how](text.encode()))
    for source in (files(tmp_path), stream(tmp_path, documents="line")):
        assert source.sizes() == pytest.approx([len(text)] * 2, rel=0.01)


def test_a_fingerprint_tells_files_sizes_fields_and_times_apart(tmp_path):
    path = put_lines(tmp_path / "a.jsonl", [{"text": "a", "n": 1}])
    os.utime(path, ns=(1, 1))
    first = stream(tmp_path, field="text").fingerprint()
    assert first == stream(tmp_path, field="text").fingerprint()
    assert stream(tmp_path, field="text", keep_fields=True).fingerprint()["files"] != first["files"]
    os.utime(path, ns=(2, 2))
    later = stream(tmp_path, field="text").fingerprint()
    assert (later["files"] == first["files"], later["times"] == first["times"]) == (True, False)
    put(tmp_path / "a.jsonl", ONE * 2)
    assert stream(tmp_path).fingerprint()["files"] != first["files"]
    for n in range(10):
        put(tmp_path / f"whole/{n}/a.b.txt", f"text {n}")
    source = pickle.loads(pickle.dumps(files(tmp_path / "whole")))
    few = source.select(np.array([7, 2]))
    assert [few[n]["text"] for n in range(2)] == ["text 7", "text 2"]
    assert [few.original(n, "") for n in range(2)] == ["7/a.b.txt", "2/a.b.txt"]
    assert few.fingerprint() != source.fingerprint()


def test_finding_out_encodings_needs_its_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "charset_normalizer", None)
    caught = refused(UsageError, "needs charset_normalizer", encodings.detect, [])
    assert "shardkit[encodings]" in str(caught.fix)
    assert values(stream(put(tmp_path / "a.txt", "one"))) == ["one"]


@pytest.mark.parametrize("names", ["p.jsonl p.jsonl.zst", "r.jsonl.gz r.jsonl.bz2"])
def test_a_file_beside_its_compressed_copy_is_refused(tmp_path, names):
    for name in names.split():
        put(tmp_path / "a" / name, COMPRESS[name.partition(".jsonl")[2].strip(".")](ONE))
        put(tmp_path / name / "p.jsonl", ONE)  # other folders do not matter
    error = refused(SourceError, "plain and compressed", stream, tmp_path)
    assert error.found == " and ".join(f"a/{name}" for name in sorted(names.split()))


HEADLESS = {
    "a.csv": ("".join(f'"{i % 4}","text number {i}"\n' for i in range(10)), "NAME0,text", 1),
    "b.tsv": ("".join(f"gj04\t{i % 2}\t\tSentence {i}.\n" for i in range(10)), None, 3),
    "c.csv": ("".join(f"positive,Body {i}\n" for i in range(10)), "NAME0,text", 1),
    "d.csv": ("".join(f"some words {i}\n" for i in range(10)), "text", 0),
}


@pytest.mark.parametrize("name", HEADLESS)
def test_a_table_without_header_loses_no_row(name, tmp_path):
    """The error's fix, as typed, reads every row; `--no-header` does so too."""
    content, columns, last = HEADLESS[name]
    path = tmp_path / name
    path.write_text(content)
    rows = [line.split("\t" if name.endswith("tsv") else ",") for line in content.splitlines()]
    texts = [row[-1].strip('"') for row in rows]
    with pytest.raises(SourceError, match="seems to be a row, not the header") as raised:
        opened(path, tokenizer="a")
    typed = re.search(r"--columns (\S+), or number", str(raised.value.fix))
    assert typed is not None
    assert columns in (None, typed[1])
    assert f"--no-header --text-field column{last};" in str(raised.value.fix)
    for options in ({"columns": typed[1]}, {"no_header": True, "field": f"column{last}"}):
        (source,) = opened(path, **options).values()
        assert [s["text" if "text" in s else f"column{last}"] for s in samples(source)] == texts


def test_tables_without_header_have_the_columns_of_the_first(tmp_path):
    put(tmp_path / "a.csv", "x,one\n")
    put(tmp_path / "b.csv", "y,z,two\n")
    (source,) = opened(tmp_path, no_header=True, field="column1").values()
    (error,) = errors(source)
    assert "not have as many cells" in error.what
    assert "--fields chooses columns" in str(error.fix)


def test_a_header_of_words_is_one(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("review text,stars\ngood,5\nbad,1\n")
    (source,) = opened(path, tokenizer="a").values()
    assert list(source.schema) == ["review text"]
    (source,) = opened(path).values()
    assert list(source.schema) == ["review text", "stars"]
    (tmp_path / "a.txt").write_text("words\n")
    with pytest.raises(UsageError, match="for CSV and TSV only"):
        opened(tmp_path / "a.txt", no_header=True)
