"""The benchmarks run, on little data and with nothing timed: numbers are for docs/benchmarks.md."""

import sys
from importlib.machinery import PathFinder

import pytest
import simplejpeg
from PIL import Image

from shardkit.testing import make_image
from tests.benchmarks import (
    bench,
    ecosystems,
    harness,
    loading,
    planning,
    planted,
    quality,
    remote,
    shards,
)
from tests.benchmarks import (
    data as making,
)
from tests.codecs.sample_images import photo_like

pytestmark = pytest.mark.large


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Forty photos in three classes."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "originals").mkdir()
    for n in range(3):
        (folder / f"originals/{n}.png").write_bytes(make_image(n, "PNG", (400, 300 + n)))
    words = ["photos", str(folder / "originals"), str(folder / "photos")]
    assert making.main([*words, "--samples", "40"]).startswith("40 photos, ")
    files = [path.read_bytes() for path in folder.rglob("photos/*/*.jpg")]
    assert len(set(files)) == len(files) == 40  # repeats of a photo differ
    return folder / "photos"


@pytest.fixture
def words(data, tmp_path):
    """What most are called with."""
    return ["--data", str(data), "--work", str(tmp_path / "work"), "--rounds", "1"]


def test_contenders_take_turns_and_medians_are_compared():
    called = []

    def run(name, seconds):
        called.append(name)
        return seconds

    late = iter([4.0, 9.0, 4.0])
    runs = {"ours": lambda: run("ours", 2.0), "theirs": lambda: run("theirs", next(late))}
    seconds = harness.measure(runs, 3)
    found = harness.summary(seconds, {"theirs": "ours"}, samples=8)
    assert [{*called[at : at + 2]} for at in (0, 2, 4)] == [{"ours", "theirs"}] * 3
    assert len({*zip(called[::2], called[1::2], strict=True)}) == 2, "always in the same order"
    assert found["median"] == {"ours": 2.0, "theirs": 4.0}
    assert found["faster_by"] == {"ours than theirs": 2.0}
    assert found["samples_per_second"] == {"ours": 4, "theirs": 2}


@pytest.mark.parametrize(
    ("what", "runs"),
    # Of both formats; wds as a command too, and the peers that are there: webdataset, lmdb, tar.
    [
        *[("write", 6), ("convert", 4), ("verify", 4), ("images", 4), ("start", 3)],
        ("load", {"shardkit lmdb", "shardkit wds", "imagefolder", "webdataset", "datasets"}),
        *[("first", {"first batch"}), ("profile", {"profile=False", "profile=True"})],
        ("free", {"alone", "beside 1 threads", "beside 2 threads"}),
    ],
)
def test_runs_are_compared(words, what, runs):
    report = bench.main([what, *words, "--formats", "lmdb,wds", "--count", "1000"])
    assert report["samples"] == 40
    assert [len(seconds) for seconds in report["seconds"].values()] == [1] * len(report["seconds"])
    assert runs in (len(report["seconds"]), {*report["seconds"]})


# LitData and DALI come on top where they can be imported.
@pytest.mark.parametrize(
    ("what", "runs"),
    [("tiny", 5), ("photos", 4), ("random", 1), ("lock", 6), ("threads", 2), ("dali", 3)],
)
def test_the_loader_is_measured(words, monkeypatch, what, runs):
    if what == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    there = loading.can_import  # without FFCV, which compiles for up to a minute
    monkeypatch.setattr(loading, "can_import", lambda *names: names != ("ffcv",) and there(*names))
    few = ["--samples", "40", "--threads", "1,3", "--seconds", "0"]
    report = loading.main([what, *words, *few])
    assert report["samples"] == 40
    assert len(report["seconds"]) >= runs
    if what not in ("lock", "dali"):  # whose clocks may not see so little
        assert all(seconds > 0 for (seconds,) in report["seconds"].values())


def test_tokenizing_is_measured(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(3):
        parts = [f"Paragraph {n} of text {number}, with words enough." for n in range(20)]
        (tmp_path / f"texts/{number}.txt").write_text("\n\n".join(parts))
    data = tmp_path / "data"
    said = making.main(["corpus", str(tmp_path / "texts"), str(data), "--megabytes", "0.05"])
    lines = (data / "corpus.jsonl").read_text().splitlines()
    assert len(set(lines)) == len(lines) > 20
    assert said.startswith(f"{len(lines)} documents in ")
    words = ["--data", str(data), "--work", str(tmp_path / "work"), "--rounds", "1"]
    report = bench.main(["tokens", *words, "--workers", "2,0"])
    assert report["tokens"] > 5_000  # of each: it ends with an error where they differ
    assert {*report["seconds"]} == {"shardkit", "shardkit, workers 0", *bench.TOKENIZERS}
    report = bench.main(["chats", *words])
    assert report["tokens"] > 5_000
    assert {*report["seconds"]} == {"shardkit", "datasets"}


def test_planning_is_measured():
    for table in (False, True):
        report = planning.measured(12_345, table=table)
        assert report["entries"] == 12_345
        assert 0 < report["anonymous"] <= report["with_files"]
    words = ["--shards", "30", "--samples", "40", "--latency", "0"]
    (report,) = shards.main(["ours", *words])
    assert report["samples"] == 1200
    (report,) = shards.main(["listing", *words])
    assert (report["objects"], report["at_once"] > 0, report["requests"] > 0) == (30, True, True)


CLIENT = """
import json, sys
from pathlib import Path
from tests.benchmarks.ecosystems import LIBRARIES, photos_in
photos, stores, *names = sys.argv[1:]
for name in names:
    LIBRARIES[name].write(photos_in(Path(photos)), Path(stores, name))
print(json.dumps({name: LIBRARIES[name].read(Path(stores, name)) for name in names}))
"""


# Two that import the same large library share a process; `lance` is compared below.
@pytest.mark.parametrize("names", [("tfrecord", "array_record"), ("mds", "litdata")], ids=str)
def test_libraries_read_what_they_write(data, tmp_path, names):
    for module in (ecosystems.LIBRARIES[name].module for name in names):
        if PathFinder.find_spec(module, [ecosystems.CLIENTS, *sys.path]) is None:
            pytest.skip(f"{module} is not installed")
    found = harness.script(CLIENT, data, tmp_path, *names, **ecosystems.environ("", ""))
    assert found == dict.fromkeys(names, 40)


def test_libraries_are_compared(words):
    results = ecosystems.main([*words, "lance"])
    assert [result["action"] for result in results] == ["write", "random"]
    assert [{*result["seconds"]} for result in results] == [
        {"shardkit", "cores", "copy", "lance"},
        {"shardkit", "lance"},
    ]


def test_bottlenecks_are_planted(data, tmp_path, monkeypatch):
    monkeypatch.setattr(planted, "LATE", 0.0001)
    report = planted.main(["--work", str(tmp_path), "--data", str(data), "--seconds", "0.01"])
    assert {*report} == {*planted.PLANTS}
    for row in report.values():  # which is named first depends on the machine
        assert row["named"]


def test_quality_is_measured(tmp_path):
    for seed in range(2):
        data = simplejpeg.encode_jpeg(photo_like(seed, 240, 160), colorsubsampling="420")
        (tmp_path / f"{seed}.jpg").write_bytes(data)
    (tmp_path / "notes.txt").write_text("no photo")
    report = quality.main(["sizes", "--data", str(tmp_path)])
    assert report["photos"] == 2
    assert tuple(report["scales"]) == quality.SCALES
    for row in report["scales"].values():
        assert 40 < row["minimum"] <= row["mean"]
        assert abs(row["ours to LANCZOS"] - row["BILINEAR to LANCZOS"]) < 1


def test_copies_are_counted(tmp_path):
    for n in range(3):
        Image.fromarray(photo_like(n)).save(tmp_path / f"{n}.png")
    report = quality.main(["copies", "--data", str(tmp_path)])
    assert (report["photos"], report["copies"], report["pairs"]) == (3, 27, 3)
    assert report["copies_within"][report["distance"]] == 1
    assert report["pairs_within"][report["distance"]] == 0


def test_remote_epochs_are_measured(data, tmp_path):
    words = ["--work", str(tmp_path / "work"), "--rounds", "1"]
    assert remote.main(["prepare", "--data", str(data), *words])["shardkit"] > 40_000
    names = ["link 4x1", "shardkit", "shardkit folder", "shardkit crops", "webdataset 1"]
    report = remote.main(["epoch", "--only", ",".join(names), *words])
    assert {*report["median"]} == {*names}, report["runs"]
    assert report["samples"] == 40
    report = remote.main(["bytes", *words])
    assert set(report) >= {"shardkit, limit None", "shardkit, limit 0.5", "two machines"}
    assert remote.main(["start", *words])["round trips"] >= 1


def test_conversions_in_a_bucket_are_measured(words):
    report = remote.main(["convert", *words])
    assert report["samples"] == 40
    assert set(report["of_local_and_transfer"]) == {"from", "there"}
