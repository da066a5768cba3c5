"""`engine="ray"`: on a cluster of two nodes of this machine (`ray_cases.py`), and without Ray."""

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import shardkit
from shardkit.conversion import ray_engine
from shardkit.conversion.ray_engine import RayEngine, _connect
from shardkit.errors import ShardkitWarning, SourceError, UsageError, WorkerError
from shardkit.options import ConvertOptions
from tests.remote.servers import Google

ROOT = Path(__file__).parent.parent.parent
_SECONDS = 280  # for all cases, on a busy machine

pytestmark = pytest.mark.xdist_group("ray")  # one cluster, not one for each process of tests

CASES = re.findall(r"@case\ndef (\w+)", (Path(__file__).parent / "ray_cases.py").read_text())


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """What went wrong in each case: one cluster, and one process, for all of them."""
    if Google.missing():
        pytest.skip(Google.missing())
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
    found = dict.fromkeys(CASES, f"it did not end: {said[-3000:]}")
    return {**found, **{name: error for name, error, _ in map(json.loads, lines)}}


@pytest.mark.large
@pytest.mark.timeout(_SECONDS + 20)
@pytest.mark.parametrize("case", CASES)
def test_on_a_cluster(errors, case):
    assert not errors[case], errors[case]


def test_options_that_make_no_sense(images, out):
    for options, words in (
        ({"engine": "spark"}, "engine must be one of 'local', 'ray'"),
        ({"ray_address": "auto"}, "ray_address requires engine='ray'"),
        ({"ray_options": {"num_cpus": 1}}, "ray_options requires engine='ray'"),
        ({"engine": "ray", "workers": 0}, "workers=0 cannot be combined"),
        ({"engine": "ray", "ray_options": ["num_cpus"]}, "ray_options must be a dict"),
        ({"engine": "ray", "part": "1/2"}, "parts are for clusters without Ray"),
    ):
        with pytest.raises(UsageError, match=words):
            shardkit.convert(images, "wds", out, **options)


def ray_with(init=None):
    exceptions = SimpleNamespace(RayError=RuntimeError)
    return SimpleNamespace(is_initialized=lambda: False, exceptions=exceptions, init=init)


@pytest.mark.parametrize("address", ["ray://here:10001", "http://127.0.0.1:8265", "here", "a:b"])
def test_what_is_no_address_is_said_to_be_none(address):
    with pytest.raises(WorkerError, match="cannot connect to a Ray cluster") as error:
        _connect(ray_with(), address, 1)
    assert error.value.found == f"{address}: it is not HOST:PORT"
    assert "ray job submit" in error.value.fix


def test_a_cluster_of_this_machine_alone_is_announced(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    asked = []

    def init(address, **_):
        asked.append(address)
        if address == "auto":
            raise ConnectionError

    with pytest.warns(ShardkitWarning, match="no Ray cluster was found"):
        assert _connect(ray_with(init), None, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _connect(ray_with(init), "local", 1)
    assert asked == ["auto", "local", "local"]


def test_libraries_of_the_format_are_compared_also_where_shards_are_joined():
    pytest.importorskip("pyarrow")
    work = SimpleNamespace(input=None, recipe=SimpleNamespace(format="arrow"))
    assert ray_engine.versions_of(work).keys() == {"shardkit", "python", "pyarrow"}


def test_a_program_keeps_its_own_way_of_ending(images, monkeypatch):
    """Ray's handler of SIGTERM prints a dump, and replaces one that the program has."""

    def init(**_):
        signal.signal(signal.SIGTERM, lambda *_: None)

    fake = ray_with(init)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.exceptions", fake.exceptions)
    monkeypatch.setattr(RayEngine, "_function", lambda _: None)
    before = signal.getsignal(signal.SIGTERM)
    options = ConvertOptions(engine="ray", ray_address="local")
    RayEngine(options, 1, images).connect()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_cluster_is_asked_for_once_there_is_a_plan(images, tmp_path, monkeypatch):
    class ConnectedError(Exception):
        pass

    def connect(*_):
        raise ConnectedError

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace())
    monkeypatch.setattr(ray_engine, "_connect", connect)
    (tmp_path / "empty").mkdir()
    for source, error in ((tmp_path / "empty", SourceError), (images, ConnectedError)):
        with pytest.raises(error):
            shardkit.convert(source, "wds", tmp_path / "out", engine="ray")
    assert not (tmp_path / "out.partial").exists()


def test_without_ray_the_extra_is_named(images, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r'pip install "shardkit\[ray\]"'):
        shardkit.convert(images, "wds", tmp_path / "out", engine="ray")
    assert not (tmp_path / "out.partial").exists()
