"""Warnings are told of the line of the user's code that has called shardkit."""

from __future__ import annotations

import gzip
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import shardkit
from shardkit.errors import ShardkitWarning
from shardkit.stream import Loader
from tests.parsed import code


def assert_told(call: Callable[[], object], message: str, place: str, lines: int = 1) -> None:
    """Of the only warning of a call: of the line in this file that ends with a comment, `place`.

    Python tells of a call in several lines by any of them, so of these `lines` up to that one.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    (one,) = [warning for warning in caught if warning.category is ShardkitWarning]
    assert message in str(one.message)
    assert one.filename == __file__
    every = Path(__file__).read_text("utf-8").splitlines()
    (last,) = [number for number, text in enumerate(every, 1) if text.endswith(f"  # {place}")]
    assert last - lines < one.lineno <= last


@pytest.fixture
def made(images, tmp_path):
    shardkit.convert(images, "wds", tmp_path / "made", shard_samples=5, workers=0)
    return tmp_path / "made"


def zipped(made: Path) -> Path:
    """The shards alone, compressed."""
    folder = made.with_name("zipped")
    folder.mkdir()
    for shard in sorted(made.glob("*.tar")):
        (folder / f"{shard.name}.gz").write_bytes(gzip.compress(shard.read_bytes()))
    return folder


def test_opening(made):
    folder = made.with_name("foreign")
    shutil.copytree(made, folder / "inner")
    shutil.copy(made / "shard-000000.tar", folder / "a.tar")

    def call():
        shardkit.open(folder)  # of opening

    assert_told(call, "not those in its folders", "of opening")


def test_shards_that_threads_look_into(made):
    folder = made.with_name("zipped")
    folder.mkdir()
    for shard in sorted(made.glob("*.tar")):
        (folder / f"{shard.name}.gz").write_bytes(gzip.compress(shard.read_bytes()))

    def call():
        warnings.simplefilter("default")  # of several shards once
        shardkit.open(folder)  # of a thread

    assert_told(call, "unpacked to temporary files", "of a thread")


def test_a_loader(made):
    def call():
        Loader(made, batch_size=64, threads=2)  # its end

    assert_told(call, "smaller than one batch", "its end", lines=5)


def test_an_iteration(tmp_path):
    names = [f"class {n}" for n in range(100)]
    schema = {"label": shardkit.Int()}
    with shardkit.create(tmp_path / "sorted", "wds", schema, classes=names) as writer:
        for number in range(4000):
            writer.write({"label": number // 40})
    loader = Loader(tmp_path / "sorted", batch_size=64, shuffle=True, window=100)
    assert_told(lambda: next(iter(loader)), "sorted by class", "of an iteration")  # of an iteration


def test_torch(made, monkeypatch):
    import torch

    from shardkit.torch import Loader as TorchLoader

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def call():
        TorchLoader(made, batch_size=4, pin_memory=True)  # of torch

    assert_told(call, "", "of torch")


def test_a_thread_of_the_user(made):
    def work():
        Loader(made, batch_size=64)  # of the user's thread

    def call():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert_told(call, "", "of the user's thread")


def test_all_warnings_go_the_same_way():
    """tests/conftest.py looks at each that any test sees."""
    assert [file for file, name in code().attributes if name == "warnings.warn"] == ["errors.py"]
