"""The benchmarks run, on little data and with nothing timed: numbers are for docs/benchmarks.md."""

from __future__ import annotations

import json
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import simplejpeg
from PIL import Image

from shardkit.testing import make_image
from tests import clients
from tests.benchmarks import (
    bench,
    copies,
    cores,
    corpus,
    ecosystems,
    ids,
    joined,
    loading,
    photos,
    planning,
    planted,
    quality,
    remote,
    remote_clients,
    remote_convert,
    shards,
    tokens,
    versions,
)  # fmt: skip
from tests.codecs.sample_images import photo_like
from tests.conftest import IMAGE_FORMATS

pytestmark = pytest.mark.large


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "originals").mkdir()
    for n in range(3):
        name = f"{n}.png"
        (tmp_path / "originals" / name).write_bytes(make_image(n, "PNG", (400, 300 + n)))
    assert photos.make_photos(tmp_path / "originals", tmp_path / "photos", 40) > 0
    return tmp_path / "photos"


@pytest.mark.parametrize(
    ("what", "runs"),
    # Of each format; and wds as a command too, and the peers that are there: webdataset, lmdb, tar.
    [("write", (1, 4)), ("convert", (2, 0)), ("verify", (2, 0)), ("start", (0, 2))],
)
def test_it_runs(data: Path, tmp_path: Path, what: str, runs: tuple[int, int], large: bool) -> None:
    formats = IMAGE_FORMATS if large else ["lmdb", "wds"]
    words = ["--data", str(data), "--work", str(tmp_path / "work"), "--rounds", "1"]
    report = bench.main([what, *words, "--formats", ",".join(formats)])
    assert report["samples"] == 40
    assert all(len(seconds) == 1 for seconds in report["seconds"].values())
    assert len(report["seconds"]) == runs[0] * len(formats) + runs[1]


def test_tokenizing_is_measured(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(3):
        parts = [f"Paragraph {n} of text {number}, with words enough." for n in range(20)]
        (tmp_path / f"texts/{number}.txt").write_text("\n\n".join(parts))
    paragraphs = corpus.paragraphs_of(tmp_path / "texts")
    assert len(paragraphs) == 60
    data = tmp_path / "data"
    data.mkdir()
    corpus.make_tokenizer(paragraphs, data / "tokenizer.json", 400)
    documents = corpus.make_corpus(paragraphs, data / "corpus.jsonl", 50_000)
    lines = (data / "corpus.jsonl").read_text().splitlines()
    assert len(set(lines)) == documents > 20
    report = tokens.main(["--data", str(data), "--work", str(tmp_path / "work"), "--rounds", "1"])
    assert report["tokens"] > 5_000  # of each: it ends with an error where they differ
    assert list(report["seconds"]) == ["shardkit", *tokens.PEERS]


def test_planning_is_measured(tmp_path: Path) -> None:
    for options in ({}, {"shuffle": 1, "split": "train=0.9,val=0.1"}):
        report = planning.measured(12_345, **options)
        assert report["entries"] == 12_345
        assert 0 < report["anonymous"] <= report["with_files"]
    assert planning.measured(10_001, delay=1e-6)["tasks"] > 1
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b.jpg").touch()
    assert planning.walked(tmp_path)["files"] == 1


def test_ids_are_compared(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Some words, and numbers: 1 22 333.\n\n  A second paragraph.\n")
    (tmp_path / "b.txt").write_bytes("Größe und Länge".encode("latin-1"))
    report = ids.main(["--data", str(tmp_path)])
    assert {row["engine"] for row in report.values()} == {"tiktoken", "tokenizers"}
    for row in report.values():
        assert row["documents"] == 2
        assert row["tokens"] > 10
        assert row["different"] == 0


@pytest.mark.parametrize(
    ("what", "options", "runs"),
    [
        ("start", [], ["first batch"]),
        ("profile", [], ["profile=False", "profile=True"]),
        (
            "free",
            ["--count", "1000"],
            ["beside 1 threads", "beside 2 threads", "beside another process", "alone"],
        ),
    ],
)
def test_loading_is_measured(
    data: Path, tmp_path: Path, what: str, options: list[str], runs: list[str]
) -> None:
    work = ["--data", str(data), "--work", str(tmp_path / "work"), "--rounds", "1"]
    report = loading.main([what, *work, *options])
    assert list(report["seconds"]) == runs


@pytest.mark.parametrize("name", ecosystems.LIBRARIES)
def test_libraries_are_compared(data: Path, tmp_path: Path, name: str) -> None:
    library = ecosystems.LIBRARIES[name]
    if PathFinder.find_spec(library.module, [str(clients.FOLDER), *sys.path]) is None:
        pytest.skip(f"{library.module} is not installed")
    words = ["--data", str(data), "--work", str(tmp_path / "work"), "--rounds", "1"]
    results = ecosystems.main([*words, name])
    assert [result["action"] for result in results] == ["write", "read", "random"]
    assert all(min(r["samples_per_second"].values()) > 0 for r in results)


def test_bottlenecks_are_planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted, "LATE", 0.001)
    report = planted.main(["--work", str(tmp_path), "--seconds", "0.05"])
    assert list(report) == list(planted.PLANTS)
    assert report["padding"]["named"] == "padding"
    for row in report.values():
        assert min(row["before"], row["predicted"], row["after"]) > 0


def test_repeats_differ(data: Path) -> None:
    files = [path.read_bytes() for path in sorted(data.rglob("*.jpg"))]
    assert len(set(files)) == len(files) == 40


@pytest.mark.parametrize("as_json", [False, True])
def test_quality_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    for seed in range(2):
        data = simplejpeg.encode_jpeg(photo_like(seed, 240, 160), colorsubsampling="420")
        (tmp_path / f"{seed}.jpg").write_bytes(data)
    (tmp_path / "notes.txt").write_text("no photo")
    report = quality.main(["--data", str(tmp_path), *["--json"] * as_json])
    assert report["photos"] == 2
    assert tuple(report["scales"]) == quality.SCALES
    for row in report["scales"].values():
        assert 40 < row["minimum"] <= row["mean"]
        assert abs(row["ours to LANCZOS"] - row["BILINEAR to LANCZOS"]) < 1
    printed = capsys.readouterr().out
    if as_json:
        assert json.loads(printed)["scales"]["1.2"] == report["scales"][1.2]
    else:
        assert len(printed.splitlines()) == 2 + len(quality.SCALES)


def test_conversions_with_more_processes_run(data: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("\n\n".join(f"One {n}, two and three." for n in range(99)))
    words = ["--data", str(tmp_path), "--work", str(tmp_path / "work"), "--rounds", "1"]
    report = cores.main([*words, "--megabytes", "1"])
    assert len(report["seconds"]) == 7


def test_remote_epochs_are_measured(data: Path, tmp_path: Path) -> None:
    words = ["--work", str(tmp_path / "work"), "--rounds", "1"]
    assert remote.main(["prepare", "--data", str(data), *words])["shardkit"] > 40_000
    names = ["link 4x1", "shardkit", "shardkit folder", "shardkit crops", "webdataset 1"]
    report = remote.main(["epoch", "--only", ",".join(names), *words])
    assert list(report["median"]) == names
    assert report["samples"] == 40
    report = remote.main(["bytes", *words])
    assert set(report) >= {"shardkit, limit None", "shardkit, limit 0.5", "two machines"}
    assert 1 < remote.main(["start", *words])["round trips"] < 10


@pytest.mark.parametrize("store", ["s3", "web"])
def test_clients_are_measured(store: str) -> None:
    words = ["--rounds", "1", "--latency", "0", "--rate", "0"]
    report = remote_clients.main(["--store", store, *words])
    assert len(report["rows"]) == 6 * len(remote_clients.CONTENDERS)


def test_copies_are_counted(tmp_path: Path) -> None:
    for n in range(3):
        Image.fromarray(photo_like(n)).save(tmp_path / f"{n}.png")
    report = copies.main(["--data", str(tmp_path)])
    assert report["photos"] == 3
    assert report["copies"] == report["left_out"] == 27


def test_conversions_in_a_bucket_are_measured(data: Path, tmp_path: Path) -> None:
    words = ["--data", str(data), "--work", str(tmp_path / "work"), "--rounds", "1"]
    report = remote_convert.main(words)
    assert report["samples"] == 40
    assert set(report["of_local_and_transfer"]) == {"from", "there"}


def test_versions_are_compared(data: Path, tmp_path: Path) -> None:
    words = ["--before", sys.executable, "--data", str(data), "--work", str(tmp_path / "work")]
    report = versions.main([*words, "--rounds", "1"])
    assert len(report["faster_by"]) == 7


def test_tables_joined_to_files(capsys: pytest.CaptureFixture[str]) -> None:
    found = joined.main(["--files", "2500", "--runs", "1", "--json"])
    assert json.loads(capsys.readouterr().out) == found
    assert {numbers["files"] for numbers in found.values()} == {2500}
    assert all(numbers["seconds"] > 0 and numbers["mb"] > 1 for numbers in found.values())


@pytest.mark.parametrize("what", ["ours", "foreign", "listing"])
def test_planning_of_many_shards_is_measured(what: str) -> None:
    (report,) = shards.main([what, "--shards", "30", "--samples", "40", "--latency", "0"])
    assert report.get("samples", report.get("objects")) == (30 if what == "listing" else 1200)
