"""`engine="ray"`: on a cluster of two nodes of this machine (`ray_cases.py`), and without Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shardkit
from shardkit.conversion import ray_engine
from shardkit.conversion.ray_engine import _connect
from shardkit.errors import ShardkitWarning, SourceError, UsageError, WorkerError
from tests.conftest import write_images
from tests.remote.servers import S3

ROOT = Path(__file__).parent.parent.parent
_SECONDS = 280  # for all cases, on a busy machine

pytestmark = pytest.mark.xdist_group("ray")  # one cluster, not one for each process of tests

Result = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case came to: one cluster, and one process, for all of them."""
    if S3.missing():
        pytest.skip(S3.missing())
    folder = tmp_path_factory.mktemp("ray")
    command = [sys.executable, "-m", "tests.conversion.ray_cases", str(folder)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
    lines = folder.joinpath("results.jsonl").read_text().splitlines()
    found = {name: result for name, result, _ in map(json.loads, lines)}
    found["said"] = {"text": said[-3000:]}
    return found


@pytest.fixture
def of(results: dict[str, Any]) -> Callable[[str], Any]:
    def result(name: str) -> Any:
        assert name in results, results["said"]["text"]
        if "raised" in results[name]:
            raise AssertionError(results[name]["raised"])
        return results[name]

    return result


Of = Callable[[str], Any]


@pytest.mark.large
@pytest.mark.timeout(_SECONDS + 20)
@pytest.mark.parametrize(
    ("name", "samples", "errors"),
    [
        ("tokens", 200, 0),
        ("one_shard", 90, 0),
        ("splits_and_samples_that_are_skipped", 28, 2),
        ("shards", 23, 0),
        ("a_sequence", 100, 0),
        ("inodes_of_another_machine", 40, 0),
        ("a_worker_that_dies_once", 90, 0),
    ],
)
def test_the_bytes_are_those_of_one_process(of: Of, name: str, samples: int, errors: int) -> None:
    found = of(name)
    assert found["same"]
    assert (found["samples"], found["errors"]) == (samples, errors)
    assert found["seen"] == samples + errors
    assert found["left"] == []


@pytest.mark.large
def test_an_interrupted_run_is_continued_by_the_other_engine(of: Of) -> None:
    """In a folder, and with source and output in a bucket."""
    assert of("interrupted_runs") == {"same": True}
    assert of("a_store") == {"same": [True, True], "all": ["a", "b", "c", "in"]}


@pytest.mark.large
def test_ctrl_c_ends_all_tasks_and_the_command_continues(of: Of) -> None:
    found = of("ctrl_c")
    assert (found["code"], found["left"], found["same"]) == (130, [], True)
    assert found["said"][0] == ""  # Ray has printed nothing
    assert "interrupted; the same command run again continues" in found["said"][1]
    assert "continuing" in found["again"]
    assert found["samples"] == 90


@pytest.mark.large
def test_the_tasks_of_a_node_that_dies_are_done_again(of: Of) -> None:
    assert of("a_node_that_dies") == {"same": True, "seen": 90}


@pytest.mark.large
def test_a_task_that_kills_two_workers_stops_the_run(of: Of) -> None:
    for found in of("workers_that_die_twice"):
        assert found["error"] == "WorkerError"
        assert "two workers or their nodes died on the same task" in found["what"]
        assert "class1/00" in found["found"]


@pytest.mark.large
def test_errors_of_samples_are_those_of_one_process(of: Of) -> None:
    ours, theirs, too_many = of("bad_samples")
    assert ours == theirs
    assert ours["key"] == "a/005"
    assert too_many["what"] == "more than 1 samples are bad"


@pytest.mark.large
def test_a_node_that_is_not_as_the_driver_is_refused_by_name(of: Of) -> None:
    found = of("a_node_that_differs")
    assert all("on node " in error["found"] for error in found.values())
    assert found["output"]["what"] == "a node does not see the output"
    assert "s3://bucket/name" in found["output"]["fix"]
    for name in ("source", "size"):
        assert "does not see the source" in found[name]["what"]
        assert found[name]["expected"] == "10 bytes"
    assert found["versions"]["expected"] == "shardkit 0.0.1"
    transform = of("a_transform_that_nodes_cannot_import")
    assert "No module named 'only_here'" in transform["found"]
    assert "on node " in transform["found"]
    assert "ray job submit --working-dir" in transform["fix"]


@pytest.mark.large
def test_what_tasks_may_ask_for(of: Of) -> None:
    found = of("options")
    assert found["special"] == 9
    assert "'num_gpus'" in found["unknown"]["what"]
    assert found["unknown"]["expected"] == "num_cpus, memory, special"
    assert "must be a number above 0" in found["number"]["what"]
    assert "must be a number above 0" in found["zero"]["what"]
    assert found["room"]["what"] == "no node of the Ray cluster has room for a task"
    assert found["room"]["expected"] == "num_cpus=2, special=0.5"
    assert "another Ray cluster already" in found["another"]["what"]


@pytest.mark.large
def test_addresses_that_lead_nowhere(of: Of) -> None:
    found = of("a_cluster_that_does_not_listen")
    assert not found["running"]
    assert {error["what"] for error in found["errors"]} == {"cannot connect to a Ray cluster"}


# --- without a cluster ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "spark"}, "engine must be one of 'local', 'ray'"),
        ({"ray_address": "auto"}, "ray_address and ray_options require"),
        ({"ray_options": {"num_cpus": 1}}, "ray_address and ray_options require"),
        ({"engine": "ray", "workers": 0}, "workers=0 cannot be combined"),
        ({"engine": "ray", "ray_options": ["num_cpus"]}, "ray_options must be a dict"),
        ({"engine": "ray", "part": "1/2"}, "parts are for clusters without Ray"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: Result, words: str) -> None:
    images = write_images(tmp_path / "in")
    with pytest.raises(UsageError, match=words):
        shardkit.convert(images, "wds", tmp_path / "out", **options)


@pytest.mark.parametrize("address", ["ray://here:10001", "http://127.0.0.1:8265", "here", "a:b"])
def test_what_is_no_address_is_said_to_be_none(address: str) -> None:
    exceptions = SimpleNamespace(RayError=RuntimeError)
    ray = SimpleNamespace(is_initialized=lambda: False, exceptions=exceptions)
    with pytest.raises(WorkerError, match="cannot connect to a Ray cluster") as error:
        _connect(ray, address, 1)
    assert error.value.found == f"{address}: it is not HOST:PORT"
    assert "ray job submit" in (error.value.fix or "")


def test_a_cluster_of_this_machine_alone_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    asked = []

    def init(address: str, **_: Any) -> None:
        asked.append(address)
        if address == "auto":
            raise ConnectionError

    exceptions = SimpleNamespace(RayError=RuntimeError)
    ray = SimpleNamespace(is_initialized=lambda: False, exceptions=exceptions, init=init)
    with pytest.warns(ShardkitWarning, match="no Ray cluster was found"):
        assert _connect(ray, None, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _connect(ray, "local", 1)
    assert asked == ["auto", "local", "local"]


def test_a_cluster_is_asked_for_once_there_is_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ConnectedError(Exception):
        pass

    def connect(*_: object) -> None:
        raise ConnectedError

    monkeypatch.setattr(ray_engine, "_ray", lambda: SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(ray_engine, "_connect", connect)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError):
        shardkit.convert(tmp_path / "empty", "wds", tmp_path / "out", engine="ray")
    with pytest.raises(ConnectedError):
        shardkit.convert(write_images(tmp_path / "in"), "wds", tmp_path / "out", engine="ray")
    assert not (tmp_path / "out.partial").exists()


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    images = write_images(tmp_path / "in")
    with pytest.raises(UsageError, match=r'pip install "shardkit\[ray\]"'):
        shardkit.convert(images, "wds", tmp_path / "out", engine="ray")
    assert not (tmp_path / "out.partial").exists()
