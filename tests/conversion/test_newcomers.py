"""What comes or changes while a run works: at its output, and among the files of its source."""

import os
import re
import shutil

import numpy as np
import pytest

import shardkit
from shardkit.conversion import run
from shardkit.conversion.existing import partial_of
from shardkit.conversion.locks import PartLock
from shardkit.conversion.target import Target
from shardkit.errors import (
    DamagedError,
    NotFoundError,
    OutputError,
    SampleError,
    ShardkitError,
    SourceError,
)
from shardkit.sources import candidate
from shardkit.sources.files import Planned, read_file
from tests.conftest import files_of, write_images
from tests.conversion.conftest import raised
from tests.conversion.deaths import Interrupted, change
from tests.sources.test_text import put
from tests.test_irregular import Swap


@pytest.fixture
def source(tmp_path):
    """40 images of 6 kB: several tasks with shards of 50 kB."""
    return write_images(tmp_path / "in", classes=2, each=20, kilobytes=5)


def convert(source, out, **options):
    return shardkit.convert(source, "wds", out, **{"workers": 0, **options})


def test_replacing_a_dataset_of_the_same_recipe_is_continued(source, tmp_path, out):
    options = {"shard_size": "50kB"}
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


def test_an_output_that_went_away_before_its_run_had_cleaned_up_is_not_made_without_shards(
    source, tmp_path, out, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr("shardkit.conversion.folder.FolderPartial.discard", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(source, out)
    out.rename(tmp_path / "moved")
    error = raised(OutputError, "a shard of a finished task is missing", convert, source, out)
    assert "output was moved" in error.found
    assert not out.exists()
    shutil.rmtree(f"{out}.partial")  # as the error says
    convert(source, out)
    assert files_of(out) == files_of(tmp_path / "moved")


@pytest.fixture
def come_meanwhile(monkeypatch):
    """As a run begins to publish, what is in a folder comes to the folder of the output, once."""

    def come(what, out):
        assemble = run.assemble

        def assembled(*args):
            assemble(*args)
            monkeypatch.setattr(run, "assemble", assemble)
            shutil.copytree(what, out.parent, dirs_exist_ok=True)

        out.parent.mkdir(exist_ok=True)
        monkeypatch.setattr(run, "assemble", assembled)

    return come


def dataset(source, folder, name):
    folder.mkdir()
    convert(source, folder / name, shuffle=True)
    return folder


@pytest.mark.parametrize("name", ["out", "out.tar"])
def test_a_dataset_that_comes_while_a_run_works_is_refused(source, tmp_path, name, come_meanwhile):
    other, out = dataset(source, tmp_path / "other", name), tmp_path / "here" / name
    come_meanwhile(other, out)
    error = raised(OutputError, "put at the output while this run was", convert, source, out)
    assert str(error.fix).endswith(f"continues with the finished work in {out}.partial")
    assert shardkit.open(out)[0]["__key__"] == shardkit.open(other / name)[0]["__key__"]
    raised(OutputError, "holds another dataset", convert, source, out)
    monitor = Interrupted(most=40)
    assert convert(source, out, progress=monitor, overwrite=True).samples == 40
    assert monitor.done == 40
    convert(source, tmp_path / name)
    found, fresh = ([s["__key__"] for s in shardkit.open(at)] for at in (out, tmp_path / name))
    assert found == fresh
    assert not out.with_name(f"{name}.partial").exists()


def test_a_dataset_that_comes_is_replaced_where_asked_for_and_no_other(
    source, tmp_path, come_meanwhile
):
    out = tmp_path / "here/out"
    come_meanwhile(dataset(source, tmp_path / "other", "out"), out)
    convert(source, out, overwrite=True)
    convert(source, tmp_path / "fresh")
    assert files_of(out) == files_of(tmp_path / "fresh")
    shutil.rmtree(out)
    put(tmp_path / "thesis/out/thesis.txt", "years of work")
    come_meanwhile(tmp_path / "thesis", out)
    error = raised(OutputError, "put at the output while", convert, source, out, overwrite=True)
    assert "not a dataset written by shardkit: thesis.txt" in str(error.found)
    assert files_of(out) == {"thesis.txt": b"years of work"}
    shutil.rmtree(out)
    convert(source, out)
    assert files_of(out) == files_of(tmp_path / "fresh")


def test_a_dataset_that_comes_while_samples_are_written_is_refused(source, tmp_path, out):
    convert(source, tmp_path / "other")
    for options in ({}, {"overwrite": True}):
        writer = shardkit.create(out, "wds", {"label": shardkit.Int()}, **options)
        writer.write({"label": 1})
        if options:
            writer.close()
        else:
            shutil.copytree(tmp_path / "other", out)
            raised(OutputError, "put at the output while", writer.close)
            assert files_of(out) == files_of(tmp_path / "other")
    assert not (tmp_path / "out.partial").exists()


def _images(root):
    write_images(root, classes=2, each=3)
    put(root / "class1/001.txt", "a caption")
    return root / "class1/001.jpg"


def _sidecar(root):
    return _images(root).with_suffix(".txt")


def _texts(root, suffix="txt", text="text {}"):
    for number in range(3):
        put(root / f"{number}.{suffix}", text.format(number))
    return root / f"1.{suffix}"


def _lines(root):
    return _texts(root, "jsonl", '{{"text": "text {}"}}\n')


def _shards(root):
    shardkit.convert([{"text": "text 1"}] * 6, "lmdb", root, shard_samples=2, workers=0)
    return root / "shard-000001.lmdb/data.mdb"


def _third_party(root):
    _shards(root)
    shutil.rmtree(root / "__shardkit__")
    return root / "shard-000001.lmdb/data.mdb"


def _other(path):
    """Other content, which is as good as what is there."""
    data, swap = path.read_bytes(), {b"text 1": b"next 1", b"next 1": b"text 1"}
    other = re.sub(b"[nt]ext 1", lambda found: swap[found[0]], data)
    return other if other != data else data[:-2] + b"XX"


def rewritten(path):
    """The same size and inode, another content."""
    before = path.stat()
    path.write_bytes(_other(path))
    if path.stat().st_mtime_ns == before.st_mtime_ns:  # within one tick of the system's clock
        os.utime(path)
    assert path.stat().st_size == before.st_size


def replaced(path):
    """Another file of the same size and time."""
    about = path.stat()
    other = path.with_name("other")
    other.write_bytes(_other(path))
    os.utime(other, ns=(about.st_atime_ns, about.st_mtime_ns))
    other.rename(path)
    assert path.stat().st_mtime_ns == about.st_mtime_ns


@pytest.mark.parametrize("change", [rewritten, replaced])
@pytest.mark.parametrize("make", [_images, _sidecar, _texts, _lines, _shards, _third_party])
def test_a_file_of_the_source_that_keeps_its_size_is_noticed(make, change, tmp_path, out):
    """X1: written or replaced while a conversion runs."""
    if (make, change) == (_sidecar, replaced):
        change = rewritten  # of what lies beside an image only the time is known
    path, kind = (
        make(tmp_path / "in"),
        SourceError if make in (_shards, _third_party) else SampleError,
    )

    def run(**options):
        return shardkit.convert(tmp_path / "in", "wds", out, workers=0, **options)

    words = "changed while (the conversion ran|it was open)"
    with pytest.raises(ShardkitError, match=words) as error:
        run(progress=Swap(lambda: change(path)))
    in_place = (
        make is _third_party and change is rewritten
    )  # may be noticed by reading the open file
    assert type(error.value) in ((kind, DamagedError) if in_place else (kind,))
    near = path.with_suffix(".jpg") if make is _sidecar else path
    assert str(error.value.where["path"]) in (str(path), str(near), str(path.parent))
    assert not out.exists()
    if kind is SampleError:  # the others do not suffer
        shutil.rmtree(tmp_path / "out.partial")
        assert run(progress=Swap(lambda: change(path)), on_error="skip").errors == 1
    else:  # nobody writes any more
        assert run(overwrite=True).errors == 0


def test_arrays_that_vanish_are_missed_by_name(tmp_path, out, monkeypatch):
    """X1: before planning has listed their folder again, and once they were read."""
    path = tmp_path / "in/x.npy"
    path.parent.mkdir()
    np.save(path, np.arange(100).reshape(50, 2))
    words = "there is no such file or folder"
    with pytest.raises(NotFoundError, match=words) as error:
        shardkit.convert(path, "wds", out, workers=0, progress=Swap(path.unlink))
    assert str(error.value.where["path"]) == str(path)
    np.save(path, np.arange(100).reshape(50, 2))
    look = candidate.look_into

    def looked(*args):
        found = look(*args)
        shutil.rmtree(path.parent)
        return found

    monkeypatch.setattr(candidate, "look_into", looked)
    raised(NotFoundError, words, shardkit.convert, path.parent, "wds", out, workers=0)
    assert not out.exists()


def test_what_only_looks_changed_is_none(tmp_path, out):
    """Links made by a backup, permissions, and files that a file system numbers anew."""
    path = _images(tmp_path / "in")

    def touch():
        os.link(path, tmp_path / "backup")
        path.chmod(0o600)

    options = {"workers": 0, "progress": Swap(touch)}
    assert shardkit.convert(tmp_path / "in", "wds", out, **options).samples == 6
    path = _texts(tmp_path / "texts")
    about = path.stat()
    planned = Planned(about.st_mtime_ns, about.st_ino + 1, about.st_ctime_ns + 1)
    assert read_file(str(path), about.st_size, planned) == b"text 1"
    with pytest.raises(SampleError, match="changed"):
        read_file(str(path), about.st_size, planned._replace(began=about.st_ctime_ns))


@pytest.mark.parametrize("part", [None, "1/2"])
@pytest.mark.parametrize("same", [True, False])
def test_what_another_run_publishes_while_a_run_waits_for_the_lock_is_found(
    source, tmp_path, monkeypatch, same, part
):
    """A run that looks at the output right before another one publishes does not work in vain."""
    out = tmp_path / "out"
    convert(source, tmp_path / "made", **({} if same else {"limit": 3}))
    is_done = run.is_done

    def looked(*args, **options):
        found = is_done(*args, **options)
        shutil.copytree(tmp_path / "made", out)
        return found

    monkeypatch.setattr(run, "is_done", looked)
    monkeypatch.setattr(run, "_work", None)  # nothing is to be done
    if same:
        assert convert(source, out, part=part).already_complete
    else:
        with pytest.raises(OutputError, match="the output exists and holds another dataset"):
            convert(source, out, part=part)
    assert files_of(out) == files_of(tmp_path / "made")
    assert not (tmp_path / "out.partial/tasks").exists() or not same


@pytest.fixture
def unfinished(source, out):
    """A run that was interrupted after some tasks; returns what continues it."""
    options = {"shard_size": "50kB"}
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, progress=Interrupted(most=8), **options)
    return lambda: convert(source, out, **options)


def test_other_work_that_ends_as_a_run_looks_at_it_is_not_damaged(
    source, out, unfinished, monkeypatch
):
    """Nor is anybody told to remove what that run has just made."""
    look = PartLock.refuse_busy

    def looked(lock):
        monkeypatch.setattr(PartLock, "refuse_busy", look)
        look(lock)
        unfinished()

    monkeypatch.setattr(PartLock, "refuse_busy", looked)
    error = raised(OutputError, "the output exists and holds another dataset", convert, source, out)
    assert "shard_size" in error.found


def test_who_would_lose_work_is_told_whether_its_run_is_alive(source, tmp_path, out, unfinished):
    convert(source, tmp_path / "other")
    others = (
        lambda: shardkit.create(out, "wds", {"label": shardkit.Int()}),
        lambda: shardkit.export(tmp_path / "other", "jsonl", out),
    )
    partial = partial_of(Target(out, "wds"))
    job = partial.job()
    partial.begin(job, resume=True)
    for other in others:
        raised(OutputError, "another run is working on this output", other)
    partial.release()
    for other in others:
        error = raised(OutputError, "there is an unfinished conversion to this output", other)
        assert "finish it with its own command" in error.fix
    assert not unfinished().already_complete


def test_a_part_that_waits_while_the_others_publish_finds_the_dataset(
    source, tmp_path, out, monkeypatch
):
    convert(source, tmp_path / "made")
    partial = partial_of(Target(out, "wds"))
    partial.begin({"recipe": {}}, resume=True)

    def publish(seconds):
        shutil.copytree(tmp_path / "made", out)
        partial.discard()

    monkeypatch.setattr("time.sleep", publish)
    monkeypatch.setattr(run, "_work", None)  # nothing is to be done
    assert convert(source, out, part="1/2").already_complete
    assert files_of(out) == files_of(tmp_path / "made")
    assert not partial.exists()
