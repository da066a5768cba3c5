"""What is at the output when a run ends: the dataset to replace, or what came there meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.conversion import run
from shardkit.errors import OutputError
from tests.conftest import files_of, write_images
from tests.conversion.deaths import Interrupted, change


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """40 images of 6 kB: several tasks with shards of 50 kB."""
    return write_images(tmp_path / "in", classes=2, each=20, kilobytes=5)


def convert(source: Path, out: Path, **options: Any) -> Any:
    return shardkit.convert(source, "wds", out, **{"workers": 0, **options})


def test_replacing_a_dataset_of_the_same_recipe_is_continued(source: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out", {"shard_size": "50kB"}
    convert(source, out, **options)
    old = files_of(out)
    change(source / "class1/019.jpg")
    done = []
    for _ in range(2):
        monitor = Interrupted(most=8)
        with pytest.raises(KeyboardInterrupt):
            convert(source, out, progress=monitor, overwrite=True, **options)
        done.append(monitor.done)
    assert done[0] == 0 < done[1] < 40
    assert files_of(out) == old
    assert not convert(source, out, overwrite=True, **options).already_complete
    convert(source, tmp_path / "fresh", **options)
    assert files_of(out) == files_of(tmp_path / "fresh") != old
    assert not (tmp_path / "out.partial").exists()


def come_meanwhile(monkeypatch: pytest.MonkeyPatch, what: Path, out: Path) -> None:
    """As a run begins to publish, what is in a folder comes to the folder of the output, once."""
    assemble = run.assemble

    def assembled(*args: Any) -> None:
        assemble(*args)
        monkeypatch.setattr(run, "assemble", assemble)
        shutil.copytree(what, out.parent, dirs_exist_ok=True)

    monkeypatch.setattr(run, "assemble", assembled)


def dataset(source: Path, folder: Path, name: str) -> Path:
    folder.mkdir()
    convert(source, folder / name, shuffle=True)
    return folder


@pytest.mark.parametrize("name", ["out", "out.tar"])
def test_a_dataset_that_comes_while_a_run_works_is_refused(
    source: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dataset(source, tmp_path / "other", name)
    out = tmp_path / "here" / name
    out.parent.mkdir()
    come_meanwhile(monkeypatch, other, out)
    with pytest.raises(OutputError, match="put at the output while this run was") as error:
        convert(source, out)
    assert str(error.value.fix).endswith(f"continues with the finished work in {out}.partial")
    with shardkit.open(out) as found, shardkit.open(other / name) as as_it_came:
        assert found[0]["__key__"] == as_it_came[0]["__key__"]
    with pytest.raises(OutputError, match="holds another dataset"):
        convert(source, out)
    monitor = Interrupted(most=40)
    assert convert(source, out, progress=monitor, overwrite=True).samples == 40
    assert monitor.done == 40
    convert(source, tmp_path / name)
    with shardkit.open(out) as found, shardkit.open(tmp_path / name) as fresh:
        assert [s["__key__"] for s in found] == [s["__key__"] for s in fresh]
    assert not out.with_name(f"{name}.partial").exists()


def test_a_dataset_that_comes_is_replaced_where_that_is_asked_for_and_else_nothing_is(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "here/out"
    out.parent.mkdir()
    come_meanwhile(monkeypatch, dataset(source, tmp_path / "other", "out"), out)
    convert(source, out, overwrite=True)
    convert(source, tmp_path / "fresh")
    assert files_of(out) == files_of(tmp_path / "fresh")
    shutil.rmtree(out)
    (tmp_path / "thesis/out").mkdir(parents=True)
    (tmp_path / "thesis/out/thesis.txt").write_text("years of work")
    come_meanwhile(monkeypatch, tmp_path / "thesis", out)
    with pytest.raises(OutputError, match="put at the output while") as error:
        convert(source, out, overwrite=True)
    assert "not a dataset written by shardkit: thesis.txt" in str(error.value.found)
    assert files_of(out) == {"thesis.txt": b"years of work"}
    shutil.rmtree(out)
    convert(source, out)
    assert files_of(out) == files_of(tmp_path / "fresh")


def test_a_dataset_that_comes_while_samples_are_written_is_refused(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def make(come: Callable[[], Any], **options: Any) -> None:
        with shardkit.create(out, "wds", {"label": shardkit.Int()}, **options) as writer:
            writer.write({"label": 1})
            come()

    convert(source, tmp_path / "other")
    with pytest.raises(OutputError, match="put at the output while"):
        make(lambda: shutil.copytree(tmp_path / "other", out))
    assert files_of(out) == files_of(tmp_path / "other")
    make(lambda: None, overwrite=True)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("same", [True, False])
def test_what_another_run_publishes_while_a_run_waits_for_the_lock_is_found(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    """A run that looks at the output right before another one publishes does not work in vain."""
    out = tmp_path / "out"
    convert(source, tmp_path / "made", **({} if same else {"limit": 3}))
    is_done = run.is_done

    def looked(*args: Any, **options: Any) -> bool:
        found = is_done(*args, **options)
        shutil.copytree(tmp_path / "made", out)
        return found

    monkeypatch.setattr(run, "is_done", looked)
    monkeypatch.setattr(run, "_work", None)  # nothing is to be done
    if same:
        assert convert(source, out).already_complete
    else:
        with pytest.raises(OutputError, match="the output exists and holds another dataset"):
            convert(source, out)
    assert files_of(out) == files_of(tmp_path / "made")
    assert not (tmp_path / "out.partial/tasks").exists() or not same
