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


def told(call: Callable[[], object]) -> warnings.WarningMessage:
    """The only warning of a call, which is in this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    (one,) = [warning for warning in caught if warning.category is ShardkitWarning]
    assert one.filename == __file__
    return one


def line(words: str) -> int:
    """The number of the line that ends with these words as a comment."""
    every = Path(__file__).read_text("utf-8").splitlines()
    (found,) = [n for n, text in enumerate(every, 1) if text.endswith(f"  # {words}")]
    return found


@pytest.fixture
def made(images: Path, tmp_path: Path) -> Path:
    shardkit.convert(images, "wds", tmp_path / "made", shard_samples=5, workers=0)
    return tmp_path / "made"


def zipped(made: Path) -> Path:
    """The shards alone, compressed."""
    folder = made.with_name("zipped")
    folder.mkdir()
    for shard in sorted(made.glob("*.tar")):
        (folder / f"{shard.name}.gz").write_bytes(gzip.compress(shard.read_bytes()))
    return folder


def test_opening(made: Path) -> None:
    folder = made.with_name("foreign")
    shutil.copytree(made, folder / "inner")
    shutil.copy(made / "shard-000000.tar", folder / "a.tar")

    def call() -> None:
        shardkit.open(folder)  # of opening

    found = told(call)
    assert "not those in its folders" in str(found.message)
    assert found.lineno == line("of opening")


def test_shards_that_threads_look_into(made: Path) -> None:
    folder = zipped(made)

    def call() -> None:
        warnings.simplefilter("default")  # of several shards once
        shardkit.open(folder)  # of a thread

    found = told(call)
    assert "unpacked to temporary files" in str(found.message)
    assert found.lineno == line("of a thread")


def test_a_loader(made: Path) -> None:
    def call() -> None:
        Loader(
            made,
            batch_size=64,
            threads=2,
        )  # its end

    found = told(call)
    assert "smaller than one batch" in str(found.message)
    assert line("its end") - 4 <= found.lineno <= line("its end")


def test_an_iteration(tmp_path: Path) -> None:
    names = [f"class {n}" for n in range(100)]
    schema = {"label": shardkit.Int()}
    with shardkit.create(tmp_path / "sorted", "wds", schema, classes=names) as writer:
        for number in range(4000):
            writer.write({"label": number // 40})
    loader = Loader(tmp_path / "sorted", batch_size=64, shuffle=True, window=100)

    def call() -> None:
        next(iter(loader))  # of an iteration

    found = told(call)
    assert "sorted by class" in str(found.message)
    assert found.lineno == line("of an iteration")


def test_torch(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from shardkit.torch import Loader as TorchLoader

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def call() -> None:
        TorchLoader(made, batch_size=4, pin_memory=True)  # of torch

    assert told(call).lineno == line("of torch")


def test_a_thread_of_the_user(made: Path) -> None:
    def work() -> None:
        Loader(made, batch_size=64)  # of the user's thread

    def call() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert told(call).lineno == line("of the user's thread")


def test_all_warnings_go_the_same_way() -> None:
    """tests/conftest.py looks at each that any test sees."""
    assert [file for file, name in code().attributes if name == "warnings.warn"] == ["errors.py"]
