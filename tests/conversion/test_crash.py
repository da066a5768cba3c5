"""C2: a run that dies at any operation leaves nothing that looks complete, and can be continued."""

import errno
import os
from functools import partial
from pathlib import Path

import pytest

import shardkit
from shardkit.errors import SampleError, ShardkitError, StorageError
from shardkit.formats import file_name
from shardkit.storage import fs
from tests.conftest import IMAGE_FORMATS, few, files_of, write_images
from tests.conversion.conftest import raised
from tests.conversion.deaths import Recorder, change, continued_after_deaths


@pytest.fixture
def source(tmp_path):
    folder = write_images(tmp_path / "in", classes=2, each=4, kilobytes=2)
    (folder / "class0/a.b.jpg").write_bytes((folder / "class0/000.jpg").read_bytes())
    (folder / "class1/001.jpg").write_bytes(b"text")
    return folder


def convert(source, out, to="wds", **options):
    options = {"workers": 0, "shard_size": 12_000, "on_error": "skip", **options}
    shardkit.convert(source, to, out, **options)


def part_of(source, out, *parts, **options):
    for part in parts:
        convert(source, out, part=part, **options)


def as_output(folder):
    """What there is when nothing else is left."""
    return {f"out/{name}": data for name, data in files_of(folder).items()}


@pytest.fixture
def out(tmp_path):
    """In a folder of its own: nothing else is copied at deaths."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here/out"


@pytest.fixture
def reference(source, tmp_path):
    convert(source, tmp_path / "reference")
    found = as_output(tmp_path / "reference")
    lists = {"out/__shardkit__/errors.jsonl", "out/__shardkit__/keys.jsonl"}
    assert {*lists, "out/shard-000002.tar"} <= found.keys()
    return found


def test_a_run_that_dies_anywhere_is_continued(source, out, reference, large):
    run = partial(convert, source, out)
    continued_after_deaths(out.parent, run, [reference], everywhere=large)


@pytest.mark.parametrize(
    "seed", [pytest.param(1, marks=pytest.mark.large), 2], ids=["another", "of the same recipe"]
)
def test_replacing_that_dies_anywhere_keeps_the_old_or_gives_the_new(
    source, tmp_path, out, seed, large
):
    convert(source, out, shuffle=True, seed=seed)
    change(source / "class0/000.jpg")
    convert(source, tmp_path / "new", shuffle=True, seed=2)
    old, new = as_output(out), as_output(tmp_path / "new")

    def replace():
        if not out.exists():  # between the two renames: both are whole, beside the output
            assert as_output(Path(f"{out}.partial/replaced")) == old
            assert as_output(Path(f"{out}.partial/dataset")) == new
        convert(source, out, shuffle=True, seed=2, overwrite=True)

    continued_after_deaths(out.parent, replace, [old, new], everywhere=large)


def test_beginning_again_without_dropped_samples_may_die_anywhere(source, out, reference, large):
    """A run that drops samples had begun to publish; the next may drop none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardkit.conversion.folder.FolderPartial.publish", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(source, out)
    assert Path(f"{out}.partial/dataset/shard-000002.tar").exists()

    def run():
        with pytest.raises(SampleError):
            convert(source, out, on_error="fail")

    def again(_):
        convert(source, out)

    options = {"everywhere": large, "hidden": False}  # shards that are half removed would open
    continued_after_deaths(out.parent, run, [reference], again, **options)


@pytest.mark.large
def test_parts_that_die_anywhere_are_continued(source, out, reference):
    def run():
        part_of(source, out, "1/2", "2/2")
        shardkit.merge(out)

    def again(number):
        run() if number % 2 else convert(source, out)

    continued_after_deaths(out.parent, run, [reference], again)


@pytest.mark.large
def test_merging_that_dies_anywhere_is_continued(source, out, reference):
    """A merge that replaces another dataset."""
    convert(source, out, shuffle=True)
    old = as_output(out)
    part_of(source, out, "1/2", "2/2", overwrite=True)

    def again(number):
        if number % 2:
            part_of(source, out, "2/2", overwrite=True)
        shardkit.merge(out)

    run = partial(shardkit.merge, out)
    continued_after_deaths(out.parent, run, [old, reference], again)


def test_create_that_dies_anywhere_leaves_nothing_that_looks_complete(tmp_path, out, large):
    def create(out):
        with shardkit.create(out, "wds", {"label": shardkit.Int()}, shard_samples=2) as writer:
            for n in range(5):
                writer.write({"label": n})

    def again(_):
        fs.remove(out)
        create(out)

    create(tmp_path / "reference")
    reference = as_output(tmp_path / "reference")
    run = partial(create, out)
    continued_after_deaths(out.parent, run, [reference], again, everywhere=large)


@pytest.mark.parametrize("shard_size", [12_000, None])
@pytest.mark.parametrize("format", few(IMAGE_FORMATS))
def test_nothing_becomes_visible_before_it_is_on_the_disk(source, out, format, shard_size):
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        convert(source, out, format, shard_size=shard_size)
    renames = [path for name, path in recorder.log if name == "rename"]
    assert renames[-1] == Path(f"{out}.partial/dataset")
    assert not {p for p in recorder.unsynced if p == out or out in p.parents or p == out.parent}
    # Each shard, index and result is synced once it is written, each task once its files are.
    synced = {path.name for name, path in recorder.log if name == "sync"}
    assert {Path(file_name("shard-000000", format)).name, "result.json", "tasks"} <= synced
    assert format != "wds" or "shard-000000.index.npy" in synced
    # After the last rename: the folder that holds the output, and only then the cleaning up.
    after = recorder.log[recorder.log.index(("rename", renames[-1])) + 1 :]
    assert after[0] == ("sync", out.parent)
    assert {name for name, _ in after[1:]} == {"remove"}


@pytest.mark.parametrize(
    "room", [0, 20_000, *(pytest.param(n, marks=pytest.mark.large) for n in (3_000, 40_000))]
)
def test_a_full_disk_is_named_and_the_run_continues_with_space(source, out, reference, room):
    real, left = fs.NewFile.write, room

    def write(file, chunks):
        nonlocal left
        left -= sum(map(len, chunks))
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, chunks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fs.NewFile, "write", write)
        error = raised(StorageError, "the disk is full", convert, source, out)
    assert "free some space, then run the same command again" in str(error)
    assert "bytes free" in str(error)
    assert not out.exists()
    left_over = [p for p in files_of(Path(f"{out}.partial")) if p.startswith("tasks/")]
    assert all(".tmp" not in path for path in left_over)
    convert(source, out)
    assert as_output(out) == reference


def test_work_that_is_done_is_not_done_again(source, out, monkeypatch):
    (source / "class1/003.jpg").write_bytes(b"not yet an image")
    raised(ShardkitError, "more than 1 samples", convert, source, out, max_errors=1)
    done = {path.parent.name for path in Path(f"{out}.partial/tasks").glob("*/result.json")}
    assert done
    seen, real = [], fs.create
    monkeypatch.setattr(fs, "create", lambda path: (seen.append(path), real(path))[1])
    convert(source, out)
    made = {p.parent.name.split(".")[0] for p in seen if p.name == "result.json"}
    assert made
    assert made.isdisjoint(done)


def test_shards_that_moved_are_not_lost_when_tasks_are_done_again(tmp_path, out):
    source = write_images(tmp_path / "in", classes=2, each=2, kilobytes=3)
    good = {path: path.read_bytes() for path in (source / "class0").iterdir()}

    def fill(files):
        for path, data in files.items():
            path.write_bytes(data)
            os.utime(path, (1, 1))

    fill({path: bytes(len(data)) for path, data in good.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardkit.metadata.manifest.Manifest.write", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # the first task dropped all, the shard has moved
            convert(source, out)
    fill(good)
    for path in (out, tmp_path / "reference"):
        convert(source, path, on_error="fail")
    assert files_of(out) == files_of(tmp_path / "reference")
    assert len(shardkit.open(out)) == 4


def test_an_old_dataset_that_was_put_aside_is_given_back(tmp_path, out):
    schema, left = {"label": shardkit.Int()}, Path(f"{out}.partial")
    with shardkit.create(out, "wds", schema) as writer:
        writer.write({"label": 1})
    before = files_of(out)
    left.mkdir()
    (left / "lock").touch()
    out.rename(left / "replaced")  # a run was killed between its two renames

    def fail():
        with shardkit.create(out, "wds", schema, overwrite=True) as writer:
            writer.write({"label": 2})
            raise KeyError("mine")

    with pytest.raises(KeyError):
        fail()
    assert files_of(out) == before


def test_after_a_failed_write_nothing_is_published(out):
    def fail(file, chunks):
        raise OSError(errno.EIO, "Input/output error")

    writer = shardkit.create(out, "wds", {"blob": shardkit.Bytes()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fs.NewFile, "write", fail)
        with pytest.raises(StorageError):
            writer.write({"blob": bytes(1_000_000)})
    with pytest.raises(ValueError, match="closed"):
        writer.write({"blob": b"x"})
    writer.close()
    assert not out.exists()
