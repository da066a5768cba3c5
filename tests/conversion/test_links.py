"""X3: writing follows no link that lies in its way; an output that is a link stays one."""

import json
import os
import shutil
from pathlib import Path

import pytest

import shardkit
from shardkit.conversion import target as targets
from shardkit.errors import OutputError, SampleError, ShardkitError
from shardkit.storage import fs
from shardkit.verification.verify import verify
from tests.conftest import files_of, write_images
from tests.conversion.conftest import raised
from tests.sources.test_text import put
from tests.test_names import write_json

OUTPUTS = {"out": "wds", "out.tar": "wds", "out.lmdb": "lmdb"}


@pytest.fixture
def source(tmp_path):
    return write_images(tmp_path / "in", classes=2, each=4, kilobytes=2)


@pytest.fixture
def victim(tmp_path):
    """What hostile links lead to: it must stay as it is."""
    put(tmp_path / "victim/file", b"precious")
    (tmp_path / "victim/folder").mkdir()
    return tmp_path / "victim"


def convert(source, out, **options):
    options = {"workers": 0, "shard_size": None if out.suffix else 6_000, **options}
    return shardkit.convert(source, OUTPUTS[out.name], out, **options)


def interrupted(source, out):
    """An unfinished conversion with some work done, which the next run would continue."""
    bad = source / "class1/003.jpg"
    good, about = bad.read_bytes(), bad.stat()
    for data in (b"text".ljust(len(good)), good):
        bad.write_bytes(data)
        os.utime(bad, ns=(about.st_atime_ns, about.st_mtime_ns))
        if data != good:
            with pytest.raises(SampleError):
                convert(source, out)


def unharmed(victim):
    return files_of(victim) == {"file": b"precious"} and not any((victim / "folder").iterdir())


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_link_in_the_place_of_the_working_folder_is_refused(name, source, victim, tmp_path):
    link = tmp_path / f"{name}.partial"
    for target in ("folder", "nowhere"):
        link.symlink_to(victim / target)
        with pytest.raises(OutputError) as error:
            convert(source, tmp_path / name)
        assert error.value.where["path"] == link
        assert error.value.found == f"a link to {os.fspath(victim / target)!r}"
        with pytest.raises(OutputError):
            shardkit.create(tmp_path / name, OUTPUTS[name], {"text": shardkit.Text()})
        assert unharmed(victim)
        assert link.is_symlink()
        link.unlink()
    (tmp_path / "__shardkit__").symlink_to(victim / "folder")  # of the files beside a single one
    if name != "out":
        raised(OutputError, "created by somebody else", convert, source, tmp_path / name)
        assert unharmed(victim)


@pytest.mark.parametrize("name", OUTPUTS)
def test_links_in_the_working_folder_are_not_followed(name, source, victim, tmp_path, large):
    """Each entry of an unfinished conversion, and each that is still to be made, is a link once."""
    out, folder = tmp_path / name, tmp_path / f"{name}.partial"
    interrupted(source, out)
    shutil.copytree(folder, tmp_path / "unfinished")
    made = [path.relative_to(folder) for path in folder.rglob("*")]
    own = [f"dataset/{n}" for n in ("__shardkit__", "shard-000000.tar", name)]
    made += map(
        Path, ["dataset", "copy", "job.json.abcd.tmp", "tasks/000001.abcd.tmp", "lock", *own]
    )
    assert len(made) >= 10, "several tasks should be finished"
    for number, entry in enumerate(made):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "unfinished", folder)
        placed = folder / entry
        target = victim / ("folder" if placed.is_dir() or not placed.suffix else "file")
        fs.remove(placed)
        placed.parent.mkdir(exist_ok=True)
        placed.symlink_to(target)
        for overwrite in (False, True) if large else (bool(number % 2),):
            with pytest.raises(OutputError, match="created by somebody else") as error:
                convert(source, out, overwrite=overwrite)
            assert error.value.where["path"] == placed
        assert unharmed(victim)
        assert not out.exists()


def test_what_is_placed_while_the_work_goes_on_is_replaced(source, victim, tmp_path, monkeypatch):
    real = fs.create

    def create(path):
        for place in (os.symlink, os.link):
            path.unlink(missing_ok=True)
            place(victim / "file", path)
        return real(path)

    convert(source, tmp_path / "out")
    convert(source, tmp_path / "out.tar")
    monkeypatch.setattr(fs, "create", create)
    (tmp_path / "again").mkdir()
    for name in ("out", "out.tar"):
        convert(source, tmp_path / "again" / name)
        assert verify(tmp_path / "again" / name).sound
    assert files_of(tmp_path / "again/out") == files_of(tmp_path / "out")
    assert unharmed(victim)


def test_the_working_folder_is_private_and_the_output_is_not(source, tmp_path):
    interrupted(source, tmp_path / "out")
    assert (tmp_path / "out.partial").stat().st_mode & 0o777 == 0o700
    convert(source, tmp_path / "out")
    (tmp_path / "usual").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    for name in ("out.partial", "__shardkit__"):
        (shared / name).mkdir(parents=True)

    def owned(by, above):
        """Who owns what is in the folder, and the folder."""

        def about(owner):
            def stat(path, **_):
                return os.stat_result([*os.stat(path)[:4], owner, *os.stat(path)[5:10]])

            return stat

        monkeypatch.setattr(targets.Path, "lstat", about(by))
        monkeypatch.setattr(targets.Path, "stat", about(above))

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    owned(666, 0)
    for path in ("out.partial", "__shardkit__"):
        error = raised(OutputError, "somebody else", targets.refuse_others, shared / path)
        assert error.found == "it belongs to the user 666"
    for owner, above in ((1000, 0), (666, 666), (0, 0)):  # ours, on a mapped file system, root's
        owned(owner, above)
        targets.refuse_others(shared / "out.partial")


def test_a_hostile_result_of_a_task_names_nothing_outside(source, victim, tmp_path):
    interrupted(source, tmp_path / "out")
    result = next((tmp_path / "out.partial/tasks").glob("*/result.json"))
    text = result.read_text()
    result.write_text(text.replace('"shard-000000.tar"', '"../../../victim/file"'))
    assert text != result.read_text()
    raised(ShardkitError, "unsafe name", convert, source, tmp_path / "out")
    assert unharmed(victim)


def test_a_hostile_manifest_of_a_single_file_moves_nothing_else(source, tmp_path):
    """`--overwrite` removes what the old manifest names, and that may only be the file's own."""
    convert(source, tmp_path / "out.tar")
    mine = put(tmp_path / "important.txt", "mine")
    path = tmp_path / "__shardkit__/out.tar.manifest.json"
    data = json.loads(path.read_bytes())
    data["files"].append({"name": mine.name, "bytes": 4, "checksum": "0" * 32})
    write_json(path, data)
    convert(source, tmp_path / "out.tar", overwrite=True, shuffle=True)
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_is_a_link_stays_one(name, source, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    real, link = tmp_path / "elsewhere" / name, tmp_path / name
    convert(source, real)
    before = files_of(tmp_path / "elsewhere")
    link.symlink_to(real)
    assert convert(source, link).already_complete
    raised(OutputError, "holds another dataset", convert, source, link, shuffle=True)
    convert(source, link, shuffle=True, overwrite=True)
    assert link.is_symlink()
    assert os.readlink(link) == os.fspath(real)
    assert verify(real).sound
    assert {*files_of(tmp_path / "elsewhere")} == {*before}
    assert files_of(tmp_path / "elsewhere") != before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["elsewhere", "in", name])
    with shardkit.create(link, OUTPUTS[name], {"text": shardkit.Text()}, overwrite=True) as writer:
        writer.write({"text": "one"})
    assert link.is_symlink()
    assert len(shardkit.open(real)) == 1
