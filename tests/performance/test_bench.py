"""`shardkit bench`: what is measured, what is skipped, what fails; never how fast anything is."""

import json
import sys
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner

import shardkit
from shardkit.cli.bench import command
from shardkit.errors import ShardkitError, ShardkitWarning, UsageError
from shardkit.performance import on_gpu
from shardkit.performance.bench import bench
from shardkit.performance.contender import Contender, Result, Setting
from shardkit.stream import torch_loader
from shardkit.testing import make_image
from tests.codecs.test_crop import needs_crop_many

READ, DECODE = Setting("read", 2), Setting("decode", 2)
LOAD = Setting("load", 2, None, 4, "crop", 16)


@pytest.fixture
def tokens(tmp_path):
    """Eight blocks of tokens."""
    schema = {"tokens": shardkit.Array("uint16", (16,))}
    with shardkit.create(tmp_path / "tokens", to="arrow", schema=schema) as writer:
        for number in range(8):
            writer.write({"__key__": str(number), "tokens": np.arange(16, dtype=np.uint16)})
    return tmp_path / "tokens"


def settings_of(report, measure, contender):
    return [
        (run["threads"], run["workers"], run["batch_size"], run["transform"])
        for run in report["runs"]
        if (run["measure"], run["contender"]) == (measure, contender)
    ]


@pytest.fixture
def asked(monkeypatch):
    """What contenders are asked, and that they were closed."""
    events = []
    for name in ("run", "close"):
        method = getattr(Contender, name)

        def noted(self, *setting, name=name, method=method):
            events.append(setting[0] if setting else name)
            return method(self, *setting)

        monkeypatch.setattr(Contender, name, noted)
    return events


def test_each_sample_is_taken_once_and_padding_is_none(images):
    for limit, setting, samples in [
        *[(100, replace(what, threads=n), 12) for what in (READ, DECODE) for n in (0, 1, 3)],
        *[(5, what, 5) for what in (READ, DECODE)],
        *[(100, replace(LOAD, batch_size=size), 12) for size in (4, 5)],
        (9, LOAD, 8),  # whole batches
    ]:
        assert Contender(images, limit).run(setting).samples == samples
    contender = Contender(images, 100)
    for threads in (0, 2, 2):
        assert contender.run(replace(LOAD, threads=threads)).samples == 12


def test_reading_uses_values_of_all_types(tmp_path):
    schema = {
        "array": shardkit.Array("float32"), "number": shardkit.Float(), "json": shardkit.Json(),
        "text": shardkit.Text(), "optional": shardkit.Bytes(optional=True),
    }  # fmt: skip
    sample = {"array": np.zeros((2, 3), np.float32).T, "number": 1.5, "json": [1], "text": "ä"}
    with shardkit.create(tmp_path / "all", to="wds", schema=schema) as writer:
        writer.write({"__key__": "0", **sample})
    assert Contender(tmp_path / "all", 10).run(READ).samples == 1


def test_workers_of_a_dataloader_stay_and_begin_the_same_epoch_anew(images, tmp_path):
    pytest.importorskip("torch")
    shardkit.convert(images, "wds", tmp_path / "shards", workers=0)
    contender = Contender(tmp_path / "shards", 9)
    for _ in range(2):
        assert contender.run(replace(LOAD, threads=None, workers=1)).samples == 8
    (loader,) = contender._loaders.values()
    loader.dataset.set_epoch(0)
    first = next(iter(loader))["__key__"]
    ours = shardkit.stream.Loader(tmp_path / "shards", batch_size=4, shuffle=True)
    assert first == next(iter(ours))["__key__"]


def test_image_files_are_loaded_by_a_dataloader_without_shardkit(images):
    pytest.importorskip("torch")
    contender = Contender(images, 100)
    assert contender.run(replace(LOAD, threads=None, workers=1)).samples == 12
    (loader,) = contender._loaders.values()
    batches = list(loader)
    assert all(batch["image"].shape == (4, 16, 16, 3) for batch in batches)
    assert sorted(label for batch in batches for label in batch["label"].tolist()) == [
        *[0] * 4, *[1] * 4, *[2] * 4,
    ]  # fmt: skip
    sweep = {"measures": ["load"], "threads": (1,), "workers": (1,), "batch_sizes": (4,)}
    report = bench([images], transforms=["center"], size=8, rounds=1, **sweep)
    assert settings_of(report, "load", "images") == [(1, None, 4, "center")]
    assert report["skipped"] == {"images, DataLoader": "measured only with the transform crop"}


def test_a_damaged_image_is_an_error_that_says_where(images):
    (images / "class1/001.jpg").write_bytes(make_image(101)[:-200])
    for setting in (DECODE, LOAD):
        with pytest.raises(ShardkitError) as caught:
            Contender(images, 100).run(setting)
        assert caught.value.where["key"] == "class1/001"


def test_datasets_of_all_kinds_are_measured_side_by_side(images, tokens, tmp_path):
    shardkit.convert(images, "wds", tmp_path / "shards", workers=0)
    progress, paths = Mock(), [images, tmp_path / "shards", tokens]
    options = {"threads": (1, 2), "batch_sizes": (4,), "size": 16, "rounds": 2, "limit": 8}
    report = bench(paths, **options, progress=progress)
    assert json.loads(json.dumps(report))["runs"] == report["runs"]
    for run in report["runs"]:
        assert run["error"] is None
        assert run["samples"] == [8, 8]
        assert run["min"] <= run["rate"] <= run["max"]
        assert run["bytes_per_second"] > 0
    runs = len(report["runs"]) * 3
    assert [call.args[1] for call in progress.start.call_args_list] == [runs]
    assert sum(call.args[0] for call in progress.advance.call_args_list) == runs
    assert [c["format"] for c in report["contenders"]] == ["folder", "wds", "arrow"]
    for name in ("images", "shards"):
        for measure, more in {
            "read": (None,) * 2,
            "decode": (None,) * 2,
            "load": (4, "crop"),
        }.items():
            assert settings_of(report, measure, name) == [(n, None, *more) for n in (1, 2)]
    assert settings_of(report, "load", "tokens") == [(n, None, 4, "none") for n in (1, 2)]
    assert report["skipped"] == {"tokens, decode": "the dataset has no encoded images"}
    assert report["versions"]["shardkit"] == shardkit.__version__
    assert report["machine"]["processors"] >= 1


def test_what_fails_is_told_and_the_others_go_on(images, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine_bench.py").write_text(
        "def bad(p):\n    print('noise')\n    raise ValueError('no such luck')\n"
        "def good(p):\n    print('noise')\n    return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    transforms = [f"mine_bench:{name}" for name in ("bad", "good")]
    options = {"measures": ["load"], "threads": (1,), "batch_sizes": (4,), "rounds": 1}
    bad, good = bench([images], transforms=transforms, **options)["runs"]
    assert "mine_bench.bad raised ValueError: no such luck" in bad["error"]
    assert "key" in bad["error"]
    assert (bad["rate"], bad["seconds"]) == (None, [])
    assert (good["error"], good["samples"]) == (None, [12])
    assert capsys.readouterr().out == ""


def test_each_round_has_all_runs_in_an_order_of_its_own(images, asked):
    threads = (1, 2, 3, 4, 5, 6)
    bench([images], measures=["read"], threads=threads, rounds=3)
    numbers = [event.threads for event in asked if event != "close"]
    rounds = [numbers[start : start + 6] for start in range(0, len(numbers), 6)]
    assert [sorted(each) for each in rounds] == [list(threads)] * 4
    assert len({tuple(each) for each in rounds}) == 4


def test_what_cannot_be_is_refused_before_anything_runs(images, tokens):
    for paths, options, message in [
        ([images], {"measures": ["speed"]}, "read, decode, load"),
        ([images], {"threads": (-1,)}, "threads must be 0 or more"),
        ([images], {"workers": (0,)}, "workers must be 1 or more"),
        ([images], {"rounds": 0}, "rounds"),
        ([images], {"decode": ["npu"]}, "unknown place to decode"),
        ([images], {"speed": 1}, "speed"),
        ([], {}, "no dataset to measure"),
        ([tokens], {"measures": ["decode"]}, "no encoded images"),
        ([images / "missing"], {}, "no such file"),
    ]:
        with pytest.raises(UsageError) as caught:
            bench(paths, **options)
        assert message in str(caught.value)
    for option in ("--threads", "--workers", "--batch-size"):
        found = CliRunner().invoke(command, [str(images), option, "1,x"])
        assert found.exit_code == 2
        assert "such as 1,2,4" in found.output


def test_batches_are_at_most_the_dataset_and_each_is_measured_once(images, monkeypatch):
    monkeypatch.setattr(Contender, "run", lambda *_: Result(1.0, 1))
    options = {"measures": ["load"], "threads": (1,), "rounds": 1}
    with pytest.warns(ShardkitWarning, match="fewer than a batch of"):
        report = bench([images], batch_sizes=(64, 128), **options)
    samples = report["contenders"][0]["samples"]
    assert settings_of(report, "load", "images") == [(1, None, samples, "crop")]


def test_without_torch_workers_are_skipped_and_that_is_said(images, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(Contender, "run", lambda *_: Result(1.0, 1))
    report = bench([images], workers=(2,), threads=(1,), batch_sizes=(4,), measures=["load"])
    assert settings_of(report, "load", "images") == [(1, None, 4, "crop")]
    assert "pip install" in report["skipped"]["workers"]


@needs_crop_many
def test_decoding_on_a_gpu_is_measured_beside_that_on_the_processor(images, tokens, monkeypatch):
    pytest.importorskip("nvidia.dali")
    options = {"measures": ["load"], "threads": (1, 2), "batch_sizes": (4,), "size": 16}
    options |= {"rounds": 2, "decode": ["cpu", "gpu"], "limit": 9}
    report = bench([images, tokens], **options)
    assert [run["decode"] for run in report["runs"]] == [None] * 4
    reason = "torch finds no GPU"
    assert report["skipped"]["images, batches on a GPU"] == reason
    assert report["skipped"]["tokens, batches on a GPU"] == "the dataset has no encoded images"
    monkeypatch.setattr(on_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(torch_loader, "_DEVICES", ["cpu"])
    for transform, error in (("crop", None), ("decode", 'no field has images for decode="gpu"')):
        report = bench([images], transforms=[transform], **options)
        runs = [(run["threads"], run["decode"]) for run in report["runs"]]
        assert runs == [(1, "cpu"), (1, "gpu"), (2, "cpu"), (2, "gpu")]
        assert not report["skipped"]
        for run in report["runs"]:
            failed = error if run["decode"] == "gpu" else None
            assert run["error"] is None if failed is None else run["error"].startswith(failed)
            assert run["samples"] == ([] if failed else [8, 8])
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    words = "--measure=load --threads=1 --batch-size=4 --size=16 --rounds=1 --decode=gpu,cpu"
    found = CliRunner().invoke(command, [str(images), *words.split(" ")])
    assert found.exit_code == 0, found.output
    assert "batch 4, crop 16, decode cpu" in found.output
    assert "failed" in found.output
    assert 'pip install "shardkit[gpu]"' in found.stderr


def test_the_command_shows_tables_and_fails_where_all_runs_do(images, tokens):
    options = "--threads=1 --batch-size=4 --size=16 --rounds=1 --transform=crop,none"
    words = [str(images), str(tokens), *options.split(" ")]
    found = CliRunner().invoke(command, words)
    assert found.exit_code == 0, found.output
    told = ("1 thread, batch 4, crop 16", "read: ", "decode: ", "load: ", "Not measured")
    assert all(words in found.output for words in (*told, "no encoded images")), found.output
    for path in images.rglob("*.jpg"):
        path.write_bytes(make_image(0)[:-200])
    options = ["--measure=decode", "--threads=1", "--rounds=1", "--json", "--quiet"]
    found = CliRunner().invoke(command, [str(images), *options])
    assert found.exit_code == 1
    report = json.loads(found.stdout)
    assert report["runs"][0]["rate"] is None
    assert report["runs"][0]["error"] in found.stderr.replace("shardkit: images: ", "")
