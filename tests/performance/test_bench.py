"""`shardkit bench`: what is measured, what is skipped, what fails; never how fast anything is."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner

import shardkit
from shardkit.cli import group
from shardkit.cli.bench import command
from shardkit.dataset import Dataset
from shardkit.errors import OutputError, ShardkitError, UsageError
from shardkit.performance import bench as benching
from shardkit.performance import peers
from shardkit.performance.bench import bench
from shardkit.performance.contender import Contender, Process, Runner
from shardkit.performance.defaults import open_any
from shardkit.testing import make_image
from tests.conftest import write_images

RECIPE = {"batch_size": 4, "transform": "crop", "size": 16}
# A process that answers each line with what it was asked.
ECHO = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"seconds": 0.5, "samples": 12, **json.loads(line)}), flush=True)
"""


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Eight blocks of tokens."""
    schema = {"tokens": shardkit.Array("uint16", (16,))}
    with shardkit.create(tmp_path / "tokens", to="arrow", schema=schema) as writer:
        for number in range(8):
            writer.write({"__key__": str(number), "tokens": np.arange(16, dtype=np.uint16)})
    return tmp_path / "tokens"


def settings_of(report: dict[str, Any], measure: str, contender: str) -> list[tuple[Any, ...]]:
    return [
        (run["threads"], run["workers"], run["batch_size"], run["transform"])
        for run in report["runs"]
        if (run["measure"], run["contender"]) == (measure, contender)
    ]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Contenders run in this process; what each is asked, and that it was closed."""
    events: list[Any] = []

    class Here(Process):
        def ask(self, request: dict[str, Any]) -> dict[str, Any]:
            events.append(dict(request))
            try:
                return dict(Runner(self._command[-2], int(self._command[-1])).run(request))
            except ShardkitError as error:
                return {"error": str(error)}

        def close(self) -> None:
            events.append("closed")

    monkeypatch.setattr(benching, "Process", Here)
    return events


# --- the process of a contender, without the process ---------------------------------------------


@pytest.mark.parametrize("measure", ["read", "decode"])
def test_reading_and_decoding_take_each_sample_once(images: Path, measure: str) -> None:
    for threads in (0, 1, 3):
        answer = Runner(str(images), 100).run({"measure": measure, "threads": threads})
        assert answer["samples"] == 12
    assert Runner(str(images), 5).run({"measure": measure, "threads": 2})["samples"] == 5


def test_reading_uses_values_of_all_types(tmp_path: Path) -> None:
    schema = {
        "array": shardkit.Array("float32"), "number": shardkit.Float(), "json": shardkit.Json(),
        "text": shardkit.Text(), "optional": shardkit.Bytes(optional=True),
    }  # fmt: skip
    sample = {"array": np.zeros((2, 3), np.float32).T, "number": 1.5, "json": [1], "text": "ä"}
    with shardkit.create(tmp_path / "all", to="wds", schema=schema) as writer:
        writer.write({"__key__": "0", **sample})
    runner = Runner(str(tmp_path / "all"), 10)
    assert runner.run({"measure": "read", "threads": 1})["samples"] == 1


def test_loading_counts_whole_batches_but_no_padding(images: Path) -> None:
    request = {"measure": "load", "threads": 1, **RECIPE}
    assert Runner(str(images), 100).run({**request})["samples"] == 12
    assert Runner(str(images), 100).run({**request, "batch_size": 5})["samples"] == 12
    assert Runner(str(images), 9).run({**request})["samples"] == 8
    runner = Runner(str(images), 100)
    for threads in (0, 2, 2):
        assert runner.run({**request, "threads": threads})["samples"] == 12


def test_workers_of_a_dataloader_stay_and_begin_the_same_epoch_anew(images: Path) -> None:
    pytest.importorskip("torch")
    runner = Runner(str(images), 9)
    for _ in range(2):
        answer = runner.run({"measure": "load", "workers": 1, **RECIPE})
        assert answer["samples"] == 8
    [(dataset, loader)] = runner._loaders.values()
    dataset.set_epoch(0)
    first = next(iter(loader))["__key__"]
    options = {"batch_size": 4, "shuffle": True}
    assert first == next(iter(shardkit.stream.Loader(open_any(images), **options)))["__key__"]


def test_a_damaged_image_is_an_error_that_says_where(images: Path) -> None:
    (images / "class1/001.jpg").write_bytes(make_image(101)[:-200])
    for measure in ("decode", "load"):
        more = RECIPE if measure == "load" else {}
        with pytest.raises(ShardkitError) as caught:
            Runner(str(images), 100).run({"measure": measure, "threads": 2, **more})
        assert caught.value.where["key"] == "class1/001"


# --- processes -----------------------------------------------------------------------------------


def test_a_process_answers_and_ends() -> None:
    process = Process([sys.executable, "-c", ECHO])
    assert process.ask({"n": 1})["n"] == 1
    assert process.ask({"n": 2})["n"] == 2
    process.close()
    process.close()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import sys; print('no words', file=sys.stderr); sys.exit(7)", "code 7.*no words"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("input(); print('not an answer')", "not an answer"),
    ],
)
def test_a_process_that_fails_is_told_and_may_be_asked_again(code: str, error: str) -> None:
    process = Process([sys.executable, "-S", "-c", code])
    for _ in range(2):
        assert re.search(error, process.ask({})["error"])
        process.close()
    assert "cannot be started" in Process(["/no/such/python"]).ask({})["error"]


@pytest.mark.large
def test_ctrl_c_ends_a_benchmark_and_its_processes_at_once(images: Path, tmp_path: Path) -> None:
    """While it waits for an answer: a transform says when, and ends with its process alone."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "mine_steps.py").write_text(
        "import threading\n"
        "def stays(pixels):\n"
        "    with open('fifo', 'w') as file:\n"
        "        print(file=file, flush=True)\n"
        "        threading.Event().wait()\n"
    )
    words = ["--measure=load", "--transform=mine_steps:stays", "--threads=1", "--batch-size=4"]
    command = [sys.executable, "-m", "shardkit", "bench", images, *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path) as run:
        with (tmp_path / "fifo").open() as fifo:
            assert fifo.readline() == "\n"
            run.send_signal(signal.SIGINT)
            _, stderr = run.communicate(timeout=60)
            assert fifo.read() == ""  # nobody has it open any more
        assert run.returncode == 130
        assert stderr.endswith("\n\nshardkit: interrupted\n")
        assert "Traceback" not in stderr


# --- the whole -----------------------------------------------------------------------------------


def test_datasets_of_all_kinds_are_measured_side_by_side(
    images: Path, tokens: Path, tmp_path: Path, here: list[Any]
) -> None:
    shardkit.convert(images, "wds", tmp_path / "shards", workers=0)
    progress = Mock()
    paths = [images, tmp_path / "shards", tokens]
    report = bench(
        paths, threads=(1, 2), batch_sizes=(4,), size=16, rounds=2, limit=8, progress=progress
    )
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
        assert settings_of(report, "read", name) == [(n, None, None, None) for n in (1, 2)]
        assert settings_of(report, "decode", name) == [(n, None, None, None) for n in (1, 2)]
        assert settings_of(report, "load", name) == [(n, None, 4, "crop") for n in (1, 2)]
    assert settings_of(report, "load", "tokens") == [(n, None, 4, "none") for n in (1, 2)]
    assert report["skipped"] == {"tokens, decode": "the dataset has no encoded images"}
    assert report["versions"]["shardkit"] == shardkit.__version__
    assert report["machine"]["processors"] >= 1


@pytest.mark.large
def test_what_fails_is_told_and_the_others_go_on(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_bench.py").write_text(
        "def bad(p):\n    print('noise')\n    raise ValueError('no such luck')\n"
        "def good(p):\n    print('noise')\n    return 1\n"
        "def dies(p):\n    import os\n    os._exit(7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    transforms = [f"mine_bench:{name}" for name in ("bad", "good", "dies")]
    report = bench(
        [images], measures=["load"], threads=(1,), batch_sizes=(4,), transforms=transforms, rounds=1
    )
    bad, good, dies = report["runs"]
    assert "mine_bench.bad raised ValueError: no such luck" in bad["error"]
    assert "key" in bad["error"]
    assert (bad["rate"], bad["seconds"]) == (None, [])
    assert "ended with code 7" in dies["error"]
    assert good["error"] is None
    assert good["samples"] == [12]


def test_each_round_has_all_runs_in_an_order_of_its_own(images: Path, here: list[Any]) -> None:
    threads = (1, 2, 3, 4, 5, 6)
    bench([images], measures=["read"], threads=threads, rounds=3)
    asked = [event["threads"] for event in here if event != "closed"]
    rounds = [asked[start : start + 6] for start in range(0, len(asked), 6)]
    assert [sorted(each) for each in rounds] == [list(threads)] * 4
    assert len({tuple(each) for each in rounds}) == 4


def test_cold_runs_have_processes_of_their_own_whose_files_are_dropped(
    images: Path, monkeypatch: pytest.MonkeyPatch, here: list[Any]
) -> None:
    def drop(paths: Sequence[Path]) -> float:
        here.append(list(paths))
        return 0.01

    monkeypatch.setattr(benching, "drop_from_cache", drop)
    report = bench([images], measures=["read"], threads=(1,), rounds=2, cold=True)
    run_cold = ["open", [images], "read", "closed"]
    events = [event["measure"] if isinstance(event, dict) else event for event in here]
    assert events == [[images], *["read"] * 3, "closed", *run_cold, *run_cold]
    assert [(run["cold"], run["stayed"]) for run in report["runs"]] == [(False, None), (True, 0.01)]


def test_runs_whose_files_stay_in_memory_or_come_back_are_not_called_cold(
    images: Path, monkeypatch: pytest.MonkeyPatch, here: list[Any]
) -> None:
    shares = iter([0.71, 0.0, 0.3])
    monkeypatch.setattr(benching, "drop_from_cache", lambda paths: next(shares))
    options: dict[str, Any] = {"measures": ["read"], "threads": (1,), "cold": True}
    report = bench([images], rounds=1, **options)
    assert [run["cold"] for run in report["runs"]] == [False]
    skipped = {"images, cold": "not possible here (71% of the bytes stayed in memory)"}
    assert report["skipped"] == skipped
    warm, cold = bench([images], rounds=2, **options)["runs"]
    assert warm["error"] is None
    assert cold["error"] == "not cold: 30% of the bytes are in memory"


def test_other_libraries_are_measured_beside_and_missing_ones_named(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = {"seconds": 0.5, "samples": 12}
    monkeypatch.setattr(benching.Process, "ask", lambda *_: half)

    def contenders(
        dataset: Dataset, interpreters: Sequence[str], work: Path, *, limit: int
    ) -> tuple[list[Contender], dict[str, str]]:
        assert (len(dataset), list(interpreters), work, limit) == (12, [], tmp_path / "work", 8)
        about = {"version": "parrot 1.0", "note": "a note"}
        peer = Contender("parrot", "peer", [], images, about, ("load",))
        return [peer], {"dodo": "not installed: pip install dodo"}

    monkeypatch.setattr(peers, "contenders", contenders)
    report = bench(
        [images], peers=True, work=tmp_path / "work", threads=(1, 2), batch_sizes=(4,), limit=8,
        rounds=1, measures=["read", "load"],
    )  # fmt: skip
    assert report["skipped"] == {"dodo": "not installed: pip install dodo"}
    assert report["contenders"][1]["version"] == "parrot 1.0"
    assert settings_of(report, "load", "parrot") == [(None, n, 4, "crop") for n in (1, 2)]
    assert settings_of(report, "read", "parrot") == []
    assert [run["rate"] for run in report["runs"] if run["contender"] == "parrot"] == [24.0, 24.0]


def test_what_cannot_be_is_refused_before_anything_runs(images: Path, tokens: Path) -> None:
    def refused(*paths: Path, **options: Any) -> str:
        with pytest.raises(UsageError) as caught:
            bench(paths, **options)
        return str(caught.value)

    assert "batches of 64" in refused(images)
    assert "read, decode, load" in refused(images, measures=["speed"])
    assert "threads must be 0 or more" in refused(images, threads=(-1,))
    assert "workers must be 1 or more" in refused(images, workers=(0,))
    assert "rounds" in refused(images, rounds=0)
    assert "speed" in refused(images, speed=1)
    assert "no dataset to measure" in refused()
    assert "no encoded images" in refused(tokens, measures=["decode"])
    assert "no such file" in refused(images / "missing")


def test_without_torch_workers_are_skipped_and_that_is_said(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(Process, "ask", lambda *_: {"seconds": 1.0, "samples": 1})
    report = bench([images], workers=(2,), threads=(1,), batch_sizes=(4,), measures=["load"])
    assert settings_of(report, "load", "images") == [(1, None, 4, "crop")]
    assert "pip install" in report["skipped"]["workers"]


# --- the plot and the command --------------------------------------------------------------------


def test_a_plot_is_drawn_of_what_was_measured(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    run = {
        "contender": "photos", "measure": "load", "threads": 2, "workers": None, "batch_size": 64,
        "transform": "crop", "size": 224, "cold": False, "rate": None, "min": None, "max": None,
    }  # fmt: skip
    measured = {"rate": 100.0, "min": 50.0, "max": 200.0}
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        for runs, bars in (([run | measured, run, run | measured], 2), ([run], 0)):
            benching.draw({"runs": runs}, tmp_path / "bench.svg")
            text = (tmp_path / "bench.svg").read_text("utf-8")
            assert text.count("photos, 2 threads, batch 64, crop 224") == bars


def test_a_plot_that_cannot_be_written_is_told_before_anything_is_measured(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried(path: Path) -> BaseException | None:
        words = ["bench", str(images), "--plot", str(path)]
        return CliRunner().invoke(group, words, standalone_mode=False).exception

    monkeypatch.setattr(benching, "bench", lambda *_, **__: pytest.fail("it was measured"))
    assert "No such file" in str(tried(tmp_path / "missing/bench.png"))
    assert ".png" in str(tried(tmp_path / "bench.xyz"))
    assert ".png" in str(tried(tmp_path / "bench"))
    (tmp_path / "folder.png").mkdir()
    assert isinstance(tried(tmp_path / "folder.png"), OutputError)

    def denied(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", denied)
    assert "Permission denied" in str(tried(tmp_path / "bench.png"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert 'pip install "shardkit[bench]"' in str(tried(tmp_path / "bench.png"))
    assert not (tmp_path / "bench.png").exists()


def test_the_command_shows_tables_and_draws_the_plot(
    images: Path, tokens: Path, tmp_path: Path, here: list[Any]
) -> None:
    options = "--threads=1 --batch-size=4 --size=16 --rounds=1 --transform=crop,none --plot"
    words = [str(images), str(tokens), *options.split(" "), str(tmp_path / "bench.png")]
    found = CliRunner().invoke(command, words)
    assert found.exit_code == 0, found.output
    assert "1 thread, batch 4, crop 16" in found.output
    for title in ("read: ", "decode: ", "load: ", "Not measured"):
        assert title in found.output
    assert "no encoded images" in found.output
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command_fails_where_all_runs_do(tmp_path: Path, here: list[Any]) -> None:
    images = write_images(tmp_path / "bad", classes=1, each=4)
    for path in images.rglob("*.jpg"):
        path.write_bytes(make_image(0)[:-200])
    options = ["--measure=decode", "--threads=1", "--rounds=1", "--json", "--quiet"]
    found = CliRunner().invoke(command, [str(images), *options])
    assert found.exit_code == 1
    report = json.loads(found.stdout)
    assert report["runs"][0]["rate"] is None
    assert report["runs"][0]["error"] in found.stderr.replace("shardkit: bad: ", "")


def test_numbers_that_are_none_are_told(images: Path) -> None:
    for option in ("--threads", "--workers", "--batch-size"):
        found = CliRunner().invoke(command, [str(images), option, "1,x"])
        assert found.exit_code == 2
        assert "such as 1,2,4" in found.output
