"""Peers of the benchmarks: they get all samples, the missing ones are named, stores kept apart.

Numbers are for the benchmarks: nothing here is timed.
"""

import gc
import importlib.util
import io
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.errors import UsageError
from shardkit.helpers.processors import processors
from shardkit.performance import peer_loops as peer
from shardkit.performance.defaults import open_any
from shardkit.performance.peers import PEERS, contenders, interpreters_in
from shardkit.testing import make_image
from tests.conftest import few, write_images

SAMPLES = 3 * 4 + 1
READ = {"measure": "read", "workers": 2}
LOAD = {"measure": "load", "workers": 1, "batch_size": 5, "transform": "crop", "size": 32}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Class folders of JPEGs, and a PNG."""
    root = write_images(tmp_path_factory.mktemp("images") / "images")
    (root / "class2" / "last.png").write_bytes(make_image(7, "PNG", (40, 30)))
    return root


@pytest.fixture(scope="module")
def ready(images, tmp_path_factory):
    """What this environment has."""
    work = tmp_path_factory.mktemp("peers")
    return {c.name: c for c in contenders(open_any(images), [], work, limit=100)[0]}


@pytest.fixture
def mmap(tmp_path):
    """The loop over a mapped file of blocks of eight tokens, all different."""
    schema = {"tokens": shardkit.Array("uint32", (8,))}
    with shardkit.create(tmp_path / "tokens", to="arrow", schema=schema) as made:
        for number in range(SAMPLES):
            made.write({"tokens": np.arange(8, dtype="uint32") + 8 * number})
    ready, skipped = contenders(open_any(tmp_path / "tokens"), [], tmp_path / "work", limit=100)
    assert skipped["webdataset"] == "not measured with tokens, only with images"
    (found,) = (contender for contender in ready if contender.name == "mmap")
    return found


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """An interpreter without any library, which is told to be our own; returns the real one."""
    real = sys.executable
    venv.create(tmp_path / "bare", symlinks=True)
    (python,) = interpreters_in([tmp_path / "bare"])
    monkeypatch.setattr(sys, "executable", python)
    return real


def answers(contender, *requests, **environment):
    """What its process says to requests, until its stdin closes and it ends."""
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    given = {"input": lines, "text": True, "env": {**os.environ, **environment}}
    said = subprocess.check_output(contender.command, stderr=subprocess.DEVNULL, **given)
    return [json.loads(line) for line in said.splitlines()]


def epoch(contender, **setting):
    """The batches of an epoch, made in this process."""
    made = peer.PEERS[contender.command[3]].load(contender.path, peer.Setting(**setting))
    return list(made)


@pytest.mark.large  # ffcv takes its time to be imported and compiled
@pytest.mark.skipif(importlib.util.find_spec("ffcv") is None, reason="ffcv is not installed")
def test_ffcv_loads_what_we_wrote_for_it(ready, tmp_path):
    pixels = write_pixels(tmp_path / "pixels", "arrow")
    (raw,), _ = contenders(open_any(pixels), [], tmp_path / "work", limit=100)
    for contender in (ready["ffcv"], raw):
        assert contender.measures == ("load",)
        assert [one.get("samples") for one in answers(contender, LOAD)] == [SAMPLES]
    assert ready["ffcv"].about["note"] == "encoded as JPEG for it: 1 png"


# webdataset leaves its files to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", few(["imagefolder", "webdataset", "datasets"], "imagefolder"))
def test_peers_get_the_bytes_of_the_images(images, ready, name):
    read = [data for batch in epoch(ready[name], measure="read", workers=0) for data in batch]
    assert sorted(read) == sorted(path.read_bytes() for path in images.rglob("*.*g"))
    loaded = epoch(ready[name], measure="load", workers=0, batch_size=SAMPLES, size=24)
    (batch,) = loaded
    assert batch[0].shape == (SAMPLES, 24, 24, 3)
    assert sorted(batch[1].tolist()) == [0] * 4 + [1] * 4 + [2] * 5
    gc.collect()


def test_the_mapped_loop_gets_the_tokens(mmap):
    read = [block.tolist() for batch in epoch(mmap, measure="read", workers=0) for block in batch]
    assert sorted(read) == [list(range(8 * n, 8 * n + 8)) for n in range(SAMPLES)]
    batches = [batch[0] for batch in epoch(mmap, measure="load", workers=0, batch_size=5)]
    assert [tuple(batch.shape) for batch in batches] == [(5, 8), (5, 8), (3, 8)]
    assert all(str(batch.dtype) == "torch.int64" for batch in batches)
    assert all((batch.diff() == 1).all() for batch in batches)


@pytest.mark.large
def test_processes_answer_whatever_a_library_prints_and_workers_share_samples(
    mmap, ready, tmp_path
):
    noisy = "import os\nos.write(1, b'noise')\ndef xxh3_64_intdigest(data): print('more noise')"
    (tmp_path / "xxhash.py").write_text(noisy)
    found = answers(mmap, READ, LOAD, READ, PYTHONPATH=str(tmp_path))
    found += answers(ready["webdataset"], READ, LOAD)
    assert [answer.get("samples") for answer in found] == [SAMPLES] * 5, found


def test_what_goes_wrong_is_an_answer_and_the_next_run_is_made(images, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "broken.jpg").write_bytes((images / "class0/000.jpg").read_bytes()[:300])
    ready, skipped = contenders(open_any(data), [], tmp_path / "work", limit=100)
    assert skipped["webdataset"].startswith("its store could not be written: ")
    assert not any(tmp_path.rglob("webdataset"))
    assert not any(tmp_path.rglob("unfinished-*"))
    (files,) = (contender for contender in ready if contender.name == "imagefolder")
    load, read = {**LOAD, "workers": 0}, {**READ, "workers": 0}
    requests = "\n".join(map(json.dumps, [load, {**load, "transform": "center"}, read]))
    said = io.StringIO()
    peer.serve("imagefolder", files.path, io.StringIO(requests), said)
    wrong, other, right = map(json.loads, said.getvalue().splitlines())
    assert wrong["error"] == "ValueError: OpenCV cannot decode an image"
    assert "only with the transform 'crop'" in other["error"]
    assert right["samples"] == 1


def test_stores_are_of_these_samples_alone(images, tmp_path):
    def stores(path, limit=100):
        ready, _ = contenders(open_any(path), [], tmp_path / "work", limit=limit)
        return {contender.path for contender in ready}

    first = stores(images)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*")}
    shardkit.convert(images, "arrow", tmp_path / "arrow", workers=0)
    assert stores(tmp_path / "arrow") == first  # the same samples in another format
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*")}
    assert stores(images, limit=5).isdisjoint(first)
    other = write_images(tmp_path / "images")
    (other / "class2" / "last.png").write_bytes(make_image(8, "PNG", (40, 30)))
    assert stores(other).isdisjoint(first)
    assert any("5-images" in path.name for path in (tmp_path / "work").iterdir())


def write_pixels(out, to):
    """Images as their pixels, in arrays; in a .beton, as raw images."""
    pixels = np.arange(SAMPLES * 20 * 30 * 3, dtype=np.uint8).reshape(SAMPLES, 20, 30, 3)
    head = b"P6\n30 20\n255\n"
    kind = shardkit.Image() if to == "beton" else shardkit.Array("uint8", (None, None, 3))
    with shardkit.create(out, to=to, schema={"image": kind}) as made:
        for each in pixels:
            made.write({"image": head + each.tobytes() if to == "beton" else each})
    return out


def test_raw_pixels_are_for_ffcv_alone_and_data_of_other_kinds_for_no_peer(tmp_path):
    found = []
    for to in ("arrow", "beton"):
        data = open_any(write_pixels(tmp_path / to, to))
        ready, skipped = contenders(data, [], tmp_path / "work", limit=100)
        assert skipped["litdata"] == "not measured with raw pixels, only with images and tokens"
        assert {*skipped, *(contender.name for contender in ready)} == {*PEERS}
        assert {contender.name for contender in ready} <= {"ffcv"}
        found.append([contender.path for contender in ready])
    assert found[0] == found[1]
    with shardkit.create(tmp_path / "text", to="arrow", schema={"text": shardkit.Text()}) as made:
        made.write({"text": "words"})
    ready, skipped = contenders(open_any(tmp_path / "text"), [], tmp_path, limit=100)
    assert ready == []
    assert {*skipped} == {*PEERS}
    assert "neither images nor token blocks" in skipped["datasets"]


def test_a_peer_that_is_not_installed_is_named(images, tmp_path, bare):
    ready, skipped = contenders(open_any(images), [], tmp_path / "work", limit=100)
    assert ready == []
    assert {*skipped} == {*PEERS}
    assert skipped["litdata"].startswith("not installed: pip install litdata ")
    assert skipped["streaming"].startswith("not installed: pip install mosaicml-streaming ")
    assert not (tmp_path / "work").exists()
    ready, _ = contenders(open_any(images), [bare], tmp_path / "work", limit=100)
    assert {"imagefolder", "webdataset"} <= {contender.name for contender in ready}
    assert all(contender.command[0] == bare for contender in ready)
    (tars,) = (contender.path for contender in ready if contender.name == "webdataset")
    assert len([*tars.glob("*.tar")]) >= min(2 * processors(), SAMPLES)  # none has to be shared


def test_environments_are_found_in_folders_and_beside_each_other(tmp_path):
    for name in ("one", "two"):
        venv.create(tmp_path / name, symlinks=True)
    (tmp_path / "neither").mkdir()
    pythons = interpreters_in([tmp_path, tmp_path / "two"])
    assert [Path(python).parents[1].name for python in pythons] == ["one", "two", "two"]
    with pytest.raises(UsageError, match="no virtual environments"):
        interpreters_in([tmp_path / "neither"])
    with pytest.raises(UsageError, match="no such file or folder"):
        interpreters_in([tmp_path / "nowhere"])
