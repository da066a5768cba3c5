"""Planning text corpora: which files belong to them, splits, parts, estimates, fingerprints."""

from __future__ import annotations

import gzip
import os
import pickle
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from shardkit.errors import SampleError, SourceError, UsageError
from shardkit.options import TextOptions
from shardkit.sources import open_sources
from shardkit.sources.base import Source, Stream
from shardkit.sources.text import encodings, scan
from shardkit.sources.text.names import parse_name
from shardkit.sources.text.scan import open_text
from tests.sources.test_text import (
    COMPRESS,
    files,
    open_one,
    put,
    put_lines,
    samples,
    stream,
    table,
    values,
)

ONE = b'{"text": "x"}\n'


def test_what_is_text_is_known_by_its_name() -> None:
    for name in ("a.txt", "a.MD", "a.text.xz", "a.b.jsonl.GZ", "a.ndjson", "c4.json.zst", "a.tsv"):
        assert parse_name(name)
    for name in ("a.txt.zip", "a.gz", "txt", ".txt", "a.parquet", "a.jpg"):
        assert parse_name(name) is None


def test_a_folder_is_text_if_there_is_any_in_it(tmp_path: Path) -> None:
    put(tmp_path / "a.dat", "x")
    put(tmp_path / ".git/a.txt", "x")
    with pytest.raises(SourceError, match="no images and no text"):
        open_sources(tmp_path)
    put(tmp_path / "deep/er/a.csv.gz", gzip.compress(b"text\nx\n"))
    assert open_sources(tmp_path)[""].reads_text


def test_files_come_in_the_order_of_their_paths(tmp_path: Path) -> None:
    names = [
        "a/b/1.jsonl",
        "a/z.jsonl",
        "a-b/1.jsonl",
        "b.jsonl",
        "a/B.jsonl",
        "a.jsonl",
        "ü.jsonl",
    ]
    for name in names:
        put(tmp_path / name, ONE)
    found = [sample["__key__"] for sample in samples(stream(tmp_path))]
    assert found == [f"{name}/0" for name in sorted(names)]


def test_what_is_passed_over_is_counted(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", ONE)
    for name in ("README.md", "notes.txt", "deep/more.txt", "x.pdf", ".hidden", "LICENSE"):
        put(tmp_path / name, "x")
    for name in ("empty.csv", "deep/empty.txt"):
        put(tmp_path / name, "")
    assert stream(tmp_path).ignored == {
        ".md file": 1,
        ".txt file": 2,
        ".pdf file": 1,
        "hidden": 1,
        "file without suffix": 1,
        "empty file": 2,
    }


def test_links_to_folders_are_followed_and_loops_are_problems(tmp_path: Path) -> None:
    put(tmp_path / "a/one.txt", "x")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "a/loop").symlink_to("..")
    source = files(tmp_path)
    assert [source.key(n) for n in range(len(source))] == ["a/one", "b/one"]
    assert ["leads back" in problem.what for problem in source.problems] == [True, True]
    assert not any("lead out" in note or "leads out" in note for note in source.notes)
    (tmp_path / "c.txt").symlink_to("../secret")
    assert any("1 link leads out of" in note for note in files(tmp_path).notes)


def test_a_corpus_without_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no documents") as caught:
        open_one(tmp_path)
    assert caught.value.found == "nothing"
    put(tmp_path / "a.txt", "")
    with pytest.raises(SourceError, match="no documents") as caught:
        open_one(tmp_path)
    assert caught.value.found == "1 x empty file"
    with pytest.raises(SourceError, match="no documents"):
        open_one(tmp_path / "a.txt")
    with pytest.raises(SourceError, match="no documents"):
        open_one(put(tmp_path / "b.txt", "\n \n"))
    with pytest.raises(SourceError, match="not a text file"):
        open_one(put(tmp_path / "b.doc", "x"))


# --- splits --------------------------------------------------------------------------------------


def opened(root: Path, split: str = "auto", **options: str) -> dict[str, Source | Stream]:
    return open_text(root, TextOptions(**options), split=split)  # type: ignore[arg-type]


def test_folders_named_after_splits_are_splits(tmp_path: Path) -> None:
    for name in ("train/a.jsonl", "train/b/c.jsonl", "valid/a.jsonl", "test/a.jsonl"):
        put(tmp_path / name, ONE)
    sources = opened(tmp_path)
    assert list(sources) == ["train", "valid", "test"]
    train = sources["train"]
    assert isinstance(train, Stream)
    assert [s["__key__"] for s in samples(train)] == ["a.jsonl/0", "b/c.jsonl/0"]
    (whole,) = opened(tmp_path, "none").values()
    assert isinstance(whole, Stream)
    assert samples(whole)[-1]["__key__"] == "valid/a.jsonl/0"


def test_files_named_after_splits_are_splits(tmp_path: Path) -> None:
    names = [
        "train.jsonl",
        "train-00001-of-00002.jsonl.gz",
        "validation-00000-of-00002.json",
        "test.v2.csv",
    ]
    for name in names:
        data = b"text\nx\n" if "csv" in name else ONE
        put(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
    put(tmp_path / "README.md", "x")
    sources = opened(tmp_path)
    assert list(sources) == ["train", "validation", "test"]
    train = sources["train"]
    assert isinstance(train, Stream)
    assert [s["__key__"] for s in samples(train)] == [
        "train-00001-of-00002.jsonl.gz/0",
        "train.jsonl/0",
    ]
    assert train.ignored == {".md file": 1}
    assert sources["test"].ignored == {}


def test_splits_may_be_files_and_folders(tmp_path: Path) -> None:
    put(tmp_path / "train/a.jsonl", ONE)
    put(tmp_path / "test.jsonl", ONE)
    assert list(opened(tmp_path)) == ["train", "test"]
    put(tmp_path / "test/a.jsonl", ONE)
    with pytest.raises(UsageError, match="something else") as caught:
        opened(tmp_path)
    assert caught.value.found == "test/ beside a file test"


@pytest.mark.parametrize("other", ["extra.jsonl", "extra/a.jsonl"])
def test_splits_beside_others_are_a_question(tmp_path: Path, other: str) -> None:
    put(tmp_path / "train.jsonl", ONE)
    put(tmp_path / other, ONE)
    with pytest.raises(UsageError, match=r"holds splits \(train\) and something else") as caught:
        opened(tmp_path)
    assert str(caught.value.found) in ("extra.jsonl", "extra/")
    assert list(opened(tmp_path, "none")) == [""]


def test_all_splits_have_the_same_fields(tmp_path: Path) -> None:
    put(tmp_path / "train.jsonl", b'{"text": "a", "n": 1, "extra": "x"}\n')
    put(tmp_path / "test.jsonl", b'{"text": "a", "n": 0.5}\n')
    sources = open_text(tmp_path, TextOptions(keep_fields=True), split="auto")
    assert sources["train"].schema == sources["test"].schema
    test = sources["test"]
    assert isinstance(test, Stream)
    assert samples(test)[0]["n"] == 0.5


def test_whole_files_split_by_folder_and_lines_by_file(tmp_path: Path) -> None:
    for name in ("train/a.txt", "test/b.txt"):
        put(tmp_path / "folders" / name, "one\ntwo\n")
    sources = opened(tmp_path / "folders")
    assert [type(source).__name__ for source in sources.values()] == ["TextFiles", "TextFiles"]
    assert [source.key(0) for source in sources.values() if isinstance(source, Source)] == [
        "a",
        "b",
    ]
    for name in ("train.txt", "test.txt"):
        put(tmp_path / "files" / name, "one\ntwo\n")
    (tmp_path / "files/images").mkdir()
    sources = opened(tmp_path / "files")
    assert list(sources) == ["train", "test"]
    assert [values(s) for s in sources.values() if isinstance(s, Stream)] == [["one", "two"]] * 2
    sources = opened(tmp_path / "files", documents="file")
    assert [len(source) for source in sources.values()] == [1, 1]


def test_an_essay_that_is_called_test_is_no_split(tmp_path: Path) -> None:
    put(tmp_path / "test.txt", "x")
    put(tmp_path / "essay.txt", "y")
    assert list(opened(tmp_path)) == [""]
    assert len(opened(tmp_path)[""]) == 2
    with pytest.raises(UsageError, match="something else"):
        opened(tmp_path, documents="line")


# --- parts ---------------------------------------------------------------------------------------


def test_long_files_are_cut_where_a_line_can_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_long_table_that_cannot_be_read_is_a_bad_sample_and_planning_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "RANGE", 64)
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("text\n" + "line\n" * 40)
    real = open

    def refuse(path: object, *args: object, **more: object) -> object:
        if str(path).endswith("b.csv"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **more)  # type: ignore[call-overload]

    monkeypatch.setattr("builtins.open", refuse)
    found = [document.sample for document in stream(tmp_path).documents()]
    assert len(found) == 41
    assert isinstance(found[-1], SampleError)


@pytest.mark.parametrize("how", sorted(COMPRESS))
def test_sizes_are_those_of_the_text_as_well_as_they_are_known(tmp_path: Path, how: str) -> None:
    content = os.urandom(20_000).hex()
    text = "".join(f"{content[n : n + 80]}\n" for n in range(0, len(content), 80))
    for name in ("a", "b/c"):
        put(tmp_path / f"{name}.txt.{how}".rstrip("."), COMPRESS[how](text.encode()))
    for source in (files(tmp_path), stream(tmp_path, documents="line")):
        assert source.sizes() == pytest.approx([len(text)] * 2, rel=0.01)


def test_the_plan_of_many_files_is_small(tmp_path: Path) -> None:
    found = [
        scan._Found(n % 100, f"document-{n:07d}.txt", n + 1, 10**18 + n) for n in range(50_000)
    ]
    folders = [f"folder-{n}" for n in range(100)]
    tracemalloc.start()
    table = scan._table(folders, [scan._Found(*file) for file in found])
    names = sum(sys.getsizeof(name) for name in table.names)
    parts = scan._ranges(str(tmp_path), table)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(parts.file) == 50_000
    assert (held + names) / 50_000 < 200


# --- fingerprints --------------------------------------------------------------------------------


def test_a_fingerprint_tells_files_sizes_fields_and_times_apart(tmp_path: Path) -> None:
    path = put_lines(tmp_path / "a.jsonl", [{"text": "a", "n": 1}])
    os.utime(path, ns=(1, 1))
    first = stream(tmp_path).fingerprint()
    assert first == stream(tmp_path).fingerprint()
    assert first is not None
    kept = stream(tmp_path, keep_fields=True).fingerprint()
    assert kept is not None
    assert kept["files"] != first["files"]
    os.utime(path, ns=(2, 2))
    later = stream(tmp_path).fingerprint()
    assert later is not None
    assert (later["files"] == first["files"], later["times"] == first["times"]) == (True, False)
    put(tmp_path / "a.jsonl", ONE * 2)
    longer = stream(tmp_path).fingerprint()
    assert longer is not None
    assert longer["files"] != first["files"]


def test_every_source_can_be_pickled_and_picked_from(tmp_path: Path) -> None:
    for n in range(10):
        put(tmp_path / f"{n}/a.b.txt", f"text {n}")
    source = pickle.loads(pickle.dumps(files(tmp_path)))
    few = source.select(np.array([7, 2]))
    assert [few[0]["text"], few[1]["text"]] == ["text 7", "text 2"]
    assert [few.original(n, "") for n in range(2)] == ["7/a.b.txt", "2/a.b.txt"]
    assert few.fingerprint() != source.fingerprint()


def test_finding_out_encodings_needs_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "charset_normalizer", None)
    with pytest.raises(UsageError, match="needs charset_normalizer") as caught:
        encodings.load_detector()
    assert "shardkit[encodings]" in str(caught.value.fix)
    assert values(stream(put(tmp_path / "a.txt", "one"))) == ["one"]
