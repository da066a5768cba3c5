"""C2: a run that dies at any operation leaves nothing that looks complete, and can be continued."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit import storage
from shardkit.errors import SampleError, ShardkitError, StorageError
from shardkit.formats import file_name
from tests.conftest import IMAGE_FORMATS, few, files_of, write_images
from tests.conversion.deaths import (
    Recorder,
    change,
    left_by_deaths,
)

# Other tests of runs that die find these here.


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write_images(tmp_path / "in", classes=2, each=4, kilobytes=2)
    (folder / "class0/a.b.jpg").write_bytes((folder / "class0/000.jpg").read_bytes())
    (folder / "class1/001.jpg").write_bytes(b"text")
    return folder


def convert(source: Path, out: Path, to: str = "wds", **options: Any) -> None:
    options = {"workers": 0, "shard_size": 12_000, "on_error": "skip", **options}
    shardkit.convert(source, to, out, **options)


def part_of(source: Path, out: Path, *parts: str, **options: Any) -> None:
    for part in parts:
        convert(source, out, part=part, **options)


def as_output(files: dict[str, bytes]) -> dict[str, bytes]:
    """What there is when nothing else is left."""
    return {f"out/{name}": data for name, data in files.items()}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder of outputs: nothing else is copied at deaths."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.fixture
def reference(source: Path, tmp_path: Path) -> dict[str, bytes]:
    convert(source, tmp_path / "reference")
    found = files_of(tmp_path / "reference")
    lists = {"__shardkit__/errors.jsonl", "__shardkit__/keys.jsonl"}
    assert {*lists, "shard-000002.tar"} <= found.keys()
    return found


def test_a_run_that_dies_anywhere_is_continued(
    source: Path, here: Path, reference: dict[str, bytes], large: bool
) -> None:
    out = here / "out"
    for _ in left_by_deaths(here, lambda: convert(source, out), large):
        if out.exists():
            assert files_of(out) == reference
        if (here / "out.partial").exists():
            with pytest.raises(ShardkitError):
                shardkit.open(here / "out.partial")
        convert(source, out)
        assert files_of(here) == as_output(reference)


@pytest.mark.parametrize(
    "seed", [pytest.param(1, marks=pytest.mark.large), 2], ids=["another", "of the same recipe"]
)
def test_replacing_a_dataset_that_dies_anywhere_keeps_the_old_or_gives_the_new(
    source: Path, tmp_path: Path, here: Path, seed: int, large: bool
) -> None:
    out = here / "out"
    convert(source, out, shuffle=True, seed=seed)
    change(source / "class0/000.jpg")
    convert(source, tmp_path / "new", shuffle=True, seed=2)
    old, new = files_of(out), files_of(tmp_path / "new")

    def replace() -> None:
        convert(source, out, shuffle=True, seed=2, overwrite=True)

    for _ in left_by_deaths(here, replace, large):
        if out.exists():
            assert files_of(out) in (old, new)
        else:  # between the two renames: both are whole, beside the output
            assert files_of(here / "out.partial/replaced") == old
            assert files_of(here / "out.partial/dataset") == new
        replace()
        assert files_of(here) == as_output(new)


def test_beginning_again_without_dropped_samples_may_die_anywhere(
    source: Path, here: Path, reference: dict[str, bytes], large: bool
) -> None:
    """A run that drops samples had begun to publish; the next may drop none."""
    out = here / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardkit.conversion.commit.Commit.publish", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(source, out)
    assert (here / "out.partial/dataset/shard-000002.tar").exists()

    def run() -> None:
        with pytest.raises(SampleError):
            convert(source, out, on_error="fail")

    for _ in left_by_deaths(here, run, large):
        convert(source, out)
        assert files_of(here) == as_output(reference)


@pytest.mark.large
def test_parts_that_die_anywhere_are_continued(
    source: Path, here: Path, reference: dict[str, bytes]
) -> None:
    out = here / "out"
    states = left_by_deaths(here, lambda: part_of(source, out, "1/2", "2/2"))
    for number, _ in enumerate(states):
        if out.exists():
            assert files_of(out) == reference
        part_of(source, out, "1/2", "2/2") if number % 2 else convert(source, out)
        assert files_of(here) == as_output(reference)


@pytest.mark.large
def test_merging_that_dies_anywhere_is_continued(
    source: Path, here: Path, reference: dict[str, bytes]
) -> None:
    """A merge that replaces another dataset."""
    out = here / "out"
    convert(source, out, shuffle=True)
    old = files_of(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardkit.conversion.partial.FolderPartial.try_alone", lambda partial: False)
        part_of(source, out, "1/2", "2/2", overwrite=True)
    for number, _ in enumerate(left_by_deaths(here, lambda: [shardkit.merge(out)])):
        if out.exists():
            assert files_of(out) in (old, reference)
        shardkit.merge(out) if number % 2 else part_of(source, out, "2/2", overwrite=True)
        assert files_of(here) == as_output(reference)


def test_create_that_dies_anywhere_leaves_nothing_that_looks_complete(
    tmp_path: Path, here: Path, large: bool
) -> None:
    def create(out: Path) -> None:
        with shardkit.create(out, "wds", {"label": shardkit.Int()}, shard_samples=2) as writer:
            for n in range(5):
                writer.write({"label": n})

    create(tmp_path / "reference")
    reference = files_of(tmp_path / "reference")
    out = here / "out"
    for _ in left_by_deaths(here, lambda: create(out), large):
        if out.exists():
            assert files_of(out) == reference
            storage.remove(out)
        if (here / "out.partial").exists():
            with pytest.raises(ShardkitError):
                shardkit.open(here / "out.partial")
        create(out)
        assert files_of(here) == as_output(reference)


@pytest.mark.parametrize("shard_size", [12_000, None])
@pytest.mark.parametrize("format", few(IMAGE_FORMATS))
def test_nothing_becomes_visible_before_it_is_on_the_disk(
    source: Path, tmp_path: Path, format: str, shard_size: int | None
) -> None:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        convert(source, out, format, shard_size=shard_size)
    renames = [path for name, path in recorder.log if name == "rename"]
    assert renames[-1] == tmp_path / "out.partial/dataset"
    assert not {p for p in recorder.unsynced if p == out or out in p.parents or p == out.parent}
    # Each shard, index and result is synced once it is written, each task once its files are.
    synced = {path.name for name, path in recorder.log if name == "sync"}
    shard = Path(file_name("shard-000000", format)).name
    assert {shard, "result.json", "tasks"} <= synced
    assert format != "wds" or "shard-000000.index.npy" in synced
    # After the last rename: the folder that holds the output, and only then the cleaning up.
    after = recorder.log[recorder.log.index(("rename", renames[-1])) + 1 :]
    assert after[0] == ("sync", tmp_path)
    assert {name for name, _ in after[1:]} == {"remove"}


@pytest.mark.parametrize(
    "room", [0, 20_000, *(pytest.param(n, marks=pytest.mark.large) for n in (3_000, 40_000))]
)
def test_a_full_disk_is_named_and_the_run_continues_when_there_is_space(
    source: Path, tmp_path: Path, room: int
) -> None:
    convert(source, tmp_path / "reference")
    real = storage.NewFile.write
    left = room

    def write(file: storage.NewFile, chunks: list[bytes]) -> None:
        nonlocal left
        left -= sum(map(len, chunks))
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, chunks)

    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.NewFile, "write", write)
        with pytest.raises(StorageError, match="the disk is full") as error:
            convert(source, out)
    assert "free some space, then run the same command again" in str(error.value)
    assert "bytes free" in str(error.value)
    assert not out.exists()
    left_over = [p for p in files_of(tmp_path / "out.partial") if p.startswith("tasks/")]
    assert all(".tmp" not in path for path in left_over)
    convert(source, out)
    assert files_of(out) == files_of(tmp_path / "reference")


def test_work_that_is_done_is_not_done_again(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (source / "class1/003.jpg").write_bytes(b"not yet an image")
    with pytest.raises(ShardkitError, match="more than 1 samples"):
        convert(source, out, max_errors=1)
    done = {p: p.stat().st_mtime_ns for p in (tmp_path / "out.partial/tasks").glob("*/result.json")}
    assert done
    seen: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        real = storage.create
        patch.setattr(storage, "create", lambda path: (seen.append(path), real(path))[1])
        convert(source, out)
    made = {p.parent.name.split(".")[0] for p in seen if p.name == "result.json"}
    assert made
    assert made.isdisjoint(path.parent.name for path in done)


def test_shards_that_moved_are_not_lost_when_tasks_are_done_again(tmp_path: Path) -> None:
    source = write_images(tmp_path / "in", classes=2, each=2, kilobytes=3)
    bad = [source / f"class0/{n:03d}.jpg" for n in range(2)]
    good = [path.read_bytes() for path in bad]
    times = [path.stat().st_mtime_ns for path in bad]
    for path in bad:
        path.write_bytes(bytes(path.stat().st_size))
        os.utime(path, ns=(times[0], times[0]))
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardkit.manifest.Manifest.write", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # the first task dropped all, the shard has moved
            convert(source, out)
    for path, data in zip(bad, good, strict=True):
        path.write_bytes(data)
        os.utime(path, ns=(times[0], times[0]))
    convert(source, out, on_error="fail")
    convert(source, tmp_path / "reference", on_error="fail")
    assert files_of(out) == files_of(tmp_path / "reference")
    assert len(shardkit.open(out)) == 4


def test_an_old_dataset_that_was_put_aside_is_given_back(tmp_path: Path) -> None:
    schema = {"label": shardkit.Int()}
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with shardkit.create(out, "wds", schema) as writer:
        writer.write({"label": 1})
    before = files_of(out)
    partial.mkdir()
    (partial / "lock").touch()
    out.rename(partial / "replaced")  # a run was killed between its two renames

    def fail() -> None:
        with shardkit.create(out, "wds", schema, overwrite=True) as writer:
            writer.write({"label": 2})
            raise KeyError("mine")

    with pytest.raises(KeyError):
        fail()
    assert files_of(out) == before


def test_after_a_failed_write_nothing_is_published(tmp_path: Path) -> None:
    schema = {"blob": shardkit.Bytes()}
    writer = shardkit.create(tmp_path / "out", "wds", schema)
    with pytest.MonkeyPatch.context() as patch:

        def fail(file: storage.NewFile, chunks: list[bytes]) -> None:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr(storage.NewFile, "write", fail)
        with pytest.raises(StorageError):
            writer.write({"blob": bytes(1_000_000)})
    with pytest.raises(ValueError, match="closed"):
        writer.write({"blob": b"x"})
    writer.close()
    assert not (tmp_path / "out").exists()
