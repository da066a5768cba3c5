"""Open files: one bound for the process, and never taken for damage. In processes of few files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.formats import FORMATS
from shardkit.testing import make_image

SCHEMA = {"image": shardkit.Image(), "label": shardkit.Int()}
SHARDS = 30
START = """
import gc, os, random, resource, sys
import shardkit, shardkit.stream
from shardkit.errors import StorageError
from shardkit.sources import files

def limit(files):
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))

def held():
    return len(os.listdir("/proc/self/fd"))

def fill(handles):
    try:
        while True:
            handles.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass

paths = sys.argv[1:]
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="counts open files in Linux's /proc"
)


def run(code: str, *paths: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", f"{START}SHARDS = {SHARDS}\n{code}", *paths]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


def write(out: Path, to: str, shards: int) -> Path:
    schema = SCHEMA if to != "megatron" else {"tokens": shardkit.Array("uint16", (None,))}
    with shardkit.create(out, to=to, schema=schema, shard_samples=1) as writer:
        for number in range(shards):
            pixels = {"image": make_image(number % 3), "label": number}
            writer.write(pixels if to != "megatron" else {"tokens": np.array([number], np.uint16)})
    return out


@pytest.fixture(scope="module")
def every(tmp_path_factory, large):
    root = tmp_path_factory.mktemp("every")
    few = ["lmdb", "megatron", "wds"]
    formats = sorted({*FORMATS} - {*few}) if large else few
    return [write(root / format, format, SHARDS) for format in formats]


def test_few_files_are_enough_for_many_shards_and_datasets(every):
    code = """
limit(64)
photos = [path for path in paths if "megatron" not in path]

# As many shards stay open as may, however often they were opened.
dataset = shardkit.open(photos[0])
for number in range(SHARDS):
    dataset[number]
most = held()
for number in random.Random(0).choices(range(SHARDS), k=300):
    dataset[number]
assert held() == most, (held(), most)
dataset.close()

for path in paths:
    assert shardkit.verify(path).sound, path
datasets = [shardkit.open(path) for path in paths]
for number in range(SHARDS):
    for dataset in datasets:
        dataset[number]
assert held() < 60, held()
del dataset, datasets
options = {"batch_size": 8, "shuffle": True, "last": "short"}
for threads in (0, 3):
    loader = shardkit.stream.Loader(photos, threads=threads, **options)
    assert sum(len(batch["label"]) for batch in loader) == SHARDS * len(photos)
assert held() < 60, held()
del loader

# Shards make room for what the process opens besides.
limit(200)
dataset = shardkit.open(photos[-1])
for number in range(20):
    dataset[number]
fill([])
dataset[25]
assert shardkit.open(photos[-1])[3]["label"] == 3
"""
    run(code, *every)


def test_too_many_open_files_are_no_damage_in_any_format(every, tmp_path):
    """The shards are sound: no sample is skipped, and `verify` finds no problem, but ends."""
    code = """
image, *paths = paths
files.read_file(image)
limit(held() - 1)
try:
    files.read_file(image)
except StorageError as error:
    assert "ulimit -n" in error.fix
else:
    raise SystemExit("it was read")
limit(1024)

for path in paths:
    shardkit.verify(path), shardkit.open(path)[0]  # imports what it needs
    loader = shardkit.stream.Loader(path, batch_size=4, threads=0, on_error="skip")
    next(iter(loader)), loader.dataset.stream.samples.close()
    dataset = shardkit.open(path)
    limit(held() + 20)
    ballast = []
    uses = {
        "dataset": lambda: dataset[1],
        "verify": lambda: shardkit.verify(path),
        "loader": lambda: next(iter(loader)),
    }
    for name, use in uses.items():
        for left in range(3):
            gc.collect()  # an error of before may hold open shards, of which use() would make room
            fill(ballast)
            for _ in range(left):
                os.close(ballast.pop())
            try:
                use()
            except StorageError as error:
                assert "ulimit -n" in error.fix, error
            else:
                assert left, (path, name)
            dataset.close(), loader.dataset.stream.samples.close()
    for handle in ballast:
        os.close(handle)
    limit(1024)
"""
    (tmp_path / "0.jpg").write_bytes(make_image())
    run(code, tmp_path / "0.jpg", *every)


def test_shards_whose_tables_take_too_much_memory_are_closed(tmp_path, monkeypatch):
    first, second = (shardkit.open(write(tmp_path / name, "wds", 6)) for name in "ab")
    table = first.reader(0).in_memory
    assert table > 0
    # A shard that is opened again is counted once.
    monkeypatch.setattr("shardkit.open_shards._MEMORY", 7.5 * table)
    for _ in range(5):
        first.close()
        assert [sample["label"] for sample in first] == list(range(6))
        assert [*first._readers] == list(range(6))
    first.close()
    monkeypatch.setattr("shardkit.open_shards._MEMORY", 3.5 * table)
    for dataset in (first, second):
        assert [sample["label"] for sample in dataset] == list(range(6))
    assert [*first._readers] == []
    assert [*second._readers] == [3, 4, 5]
    monkeypatch.setattr("shardkit.open_shards._MEMORY", 0.5 * table)
    assert [sample["label"] for sample in second] == list(range(6))
    assert [*second._readers] == [5]
