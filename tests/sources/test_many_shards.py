"""Datasets of many shards as sources: what planning asks for, and what tasks carry."""

import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit import ConvertOptions, Dataset, ShardkitError
from shardkit.conversion.cuts import _evenly
from shardkit.conversion.plan import Plan
from shardkit.conversion.run import prepare
from shardkit.formats.wds.reader import WdsReader
from shardkit.metadata.manifest import with_own
from tests.benchmarks.shards import make_foreign, make_ours
from tests.sources.real import all_of, cases, refused


def plan_of(source: object, out: Path, **options: Any) -> Plan:
    return prepare(source, "wds", out, ConvertOptions.of(**options))


def test_planning_looks_at_each_shard_a_few_times(tmp_path, monkeypatch):
    make_ours(tmp_path / "data", 200, 1000)
    plan = plan_of(tmp_path / "data", tmp_path / "out", shard_size="30MB")
    asked, extent = [], Dataset.extent
    monkeypatch.setattr(Dataset, "extent", lambda *args: asked.append(0) or extent(*args))
    sizes = [len(pickle.dumps(task.reading())) for task in plan.tasks]
    assert len(plan.tasks) >= 200
    assert len(asked) < 20 * len(plan.tasks)  # not once for each pair of shard and task
    assert max(sizes) < 4000  # not 8 bytes for each sample


@cases("options", {}, {"shuffle": True}, {"limit": 25}, {"sample": 0.5, "seed": 1})
def test_tasks_have_the_samples_of_their_slices(tmp_path, options):
    data, out = tmp_path / "data", tmp_path / "out"
    make_foreign(data, 12, 5)
    whole = shardkit.open(data).keys()
    shardkit.convert(data, "wds", out, workers=0, shard_samples=7, **options)
    keys = shardkit.open(out).keys()
    assert len(set(keys)) == len(keys)
    assert set(keys) <= set(whole)
    assert (keys == [key for key in whole if key in keys]) == ("shuffle" not in options)
    tasks = plan_of(data, tmp_path / "out2", **options).tasks
    assert [s["__key__"] for task in tasks for s in all_of(task.reading().source)] == keys


def test_foreign_shards_are_opened_side_by_side(tmp_path, monkeypatch):
    make_foreign(tmp_path / "data", 12, 2)
    meeting, opened, open_ = threading.Barrier(4), [], WdsReader.__init__

    def slow(self, path, layout=None):
        opened.append(path)
        if len(opened) > 4:  # the first ones are looked at by themselves
            meeting.wait(120)  # which only ends a hang
        open_(self, path, layout)

    monkeypatch.setattr(WdsReader, "__init__", slow)
    assert len(shardkit.open(tmp_path / "data")) == 24
    assert len(opened) == 12


@pytest.mark.parametrize("bad", [(7, 3, 5), (9, 6, 5, 3, 4, 2)])
def test_the_first_bad_shard_is_named(tmp_path, bad):
    make_foreign(tmp_path / "data", 12, 2)
    for number in bad:
        (tmp_path / f"data/data-{number:06d}.tar").write_bytes(b"\x01" * 2048)
    refused(ShardkitError, rf"data-00000{min(bad)}\.tar", shardkit.open, tmp_path / "data")


def test_of_many_files_with_manifests_the_folder_tells(tmp_path, monkeypatch):
    make_foreign(tmp_path / "data", 20, 1)
    files = sorted((tmp_path / "data").glob("*.tar"))
    asked = []
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: asked.append(path) or is_file(path))
    assert with_own(files) == []
    assert not asked
    with_manifest = tmp_path / "data/other.tar"
    shardkit.convert([{"__key__": "a", "x": 1}], "wds", with_manifest)
    assert with_own([*files, with_manifest]) == [with_manifest]


@cases(
    "options", {}, {"shard_samples": 7}, {"limit": 50}, {"split": "a=0.5,b=0.5"}, {"shuffle": True}
)
def test_tasks_are_the_same_for_sizes_by_shard(tmp_path, monkeypatch, options):
    make_foreign(tmp_path / "a", 12, 5)
    make_foreign(tmp_path / "b", 3, 9)
    monkeypatch.setattr("shardkit.conversion.cuts._TASK_BYTES", 5000)
    size = {} if "shard_samples" in options else {"shard_size": 30_000}
    found = []
    for most in (1 << 25, 0):  # bytes of an array that is made of them
        monkeypatch.setattr("shardkit.sources.dataset.MAX_IN_MEMORY", most)
        for source in (tmp_path / "a", [tmp_path / "a", tmp_path / "b"]):
            plan = plan_of(source, tmp_path / "out", **(size | options))
            found.append([(task.start, task.stop, task.size, task.joined) for task in plan.tasks])
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert len(found[0]) > 4


def test_sources_whose_sizes_are_by_shard_are_compared(tmp_path, monkeypatch):
    """As with more than two million samples."""
    make_foreign(tmp_path / "a", 4, 5)
    shardkit.convert(tmp_path / "a", "lmdb", tmp_path / "out", workers=0)
    monkeypatch.setattr("shardkit.sources.dataset.MAX_IN_MEMORY", 0)
    monkeypatch.setattr("shardkit.helpers.mapped.MAX_IN_MEMORY", 0)
    monkeypatch.setattr("shardkit.helpers.mapped.PIECE", 3)
    report = shardkit.verify(tmp_path / "out", against=tmp_path / "a")
    assert report.sound, report.problems


def test_tasks_of_very_much_are_even(tmp_path):
    """Products of bytes and numbers of tasks have more than 64 bits."""
    ends = np.arange(400_001) * 10**10
    assert (np.diff(_evenly(ends, 200_000)) == 2).all()


@pytest.mark.parametrize("options", [{}, {"exclude_class": ("c3",)}])
def test_tasks_carry_no_number_for_each_sample(tmp_path, options):
    text = "x" * 99
    samples = [{"__key__": f"v1.0.{n:04d}", "name": f"c{n % 5}", "text": text} for n in range(1500)]
    for name in "ab":
        shardkit.convert(samples, "lmdb", tmp_path / name, shard_samples=500, workers=0)
    given = [tmp_path / "a", tmp_path / "b"]
    plan = plan_of(given, tmp_path / "out", label_column="name", **options)
    readings = [pickle.dumps(task.reading()) for task in plan.tasks]
    left = [s["__key__"] for s in samples if s["name"] not in options.get("exclude_class", ())] * 2
    assert plan.samples == len(left)
    most = 8 * len(left) if options else 0  # the numbers of those that are left
    assert sum(map(len, readings)) < 9000 * len(readings) + most
    read = [sample for data in readings for sample in pickle.loads(data).source.documents()]
    assert [document.sample["__key__"][2:] for document in read] == left
