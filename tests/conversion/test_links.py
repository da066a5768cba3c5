"""X3: writing follows no link that lies in its way; an output that is a link stays one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit import storage
from shardkit.conversion import partial
from shardkit.errors import OutputError, SampleError, ShardkitError
from shardkit.verification.verify import verify
from tests.conftest import files_of, write_images
from tests.test_names import write_json

OUTPUTS = {"out": "wds", "out.tar": "wds", "out.lmdb": "lmdb"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_images(tmp_path / "in", classes=2, each=4, kilobytes=2)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """What hostile links lead to: it must stay as it is."""
    folder = tmp_path / "victim"
    (folder / "folder").mkdir(parents=True)
    (folder / "file").write_bytes(b"precious")
    return folder


def convert(source: Path, out: Path, **options: Any) -> Any:
    options = {"workers": 0, "shard_size": None if out.suffix else 6_000, **options}
    return shardkit.convert(source, OUTPUTS[out.name], out, **options)


def interrupted(source: Path, out: Path) -> None:
    """An unfinished conversion with some work done, which the next run would continue."""
    bad = source / "class1/003.jpg"
    good = bad.read_bytes()
    bad.write_bytes(b"text" * (len(good) // 4) + good[len(good) - len(good) % 4 :])
    about = bad.stat()
    with pytest.raises(SampleError):
        convert(source, out)
    bad.write_bytes(good)
    os.utime(bad, ns=(about.st_atime_ns, about.st_mtime_ns))


def unharmed(victim: Path) -> bool:
    return files_of(victim) == {"file": b"precious"} and not any((victim / "folder").iterdir())


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_link_in_the_place_of_the_working_folder_is_refused(
    name: str, source: Path, victim: Path, tmp_path: Path
) -> None:
    for target in ("folder", "nowhere"):
        link = tmp_path / f"{name}.partial"
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


@pytest.mark.parametrize("name", OUTPUTS)
def test_links_in_the_working_folder_are_never_written_through(
    name: str, source: Path, victim: Path, tmp_path: Path, large: bool
) -> None:
    """Each entry of an unfinished conversion, and each that is still to be made, is a link once."""
    out, folder = tmp_path / name, tmp_path / f"{name}.partial"
    interrupted(source, out)
    shutil.copytree(folder, tmp_path / "unfinished")
    made = [path.relative_to(folder) for path in folder.rglob("*")]
    own = [f"dataset/{n}" for n in ("__shardkit__", "shard-000000.tar", name)]
    made += map(Path, ["dataset", "copy", "job.json.tmp", "tasks/000001.abcd.tmp", "lock", *own])
    assert len(made) >= 10, "several tasks should be finished"
    for number, entry in enumerate(made):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "unfinished", folder)
        placed = folder / entry
        target = victim / ("folder" if placed.is_dir() or not placed.suffix else "file")
        storage.remove(placed)
        placed.parent.mkdir(exist_ok=True)
        placed.symlink_to(target)
        for overwrite in (False, True) if large else (bool(number % 2),):
            with pytest.raises(OutputError, match="created by somebody else") as error:
                convert(source, out, overwrite=overwrite)
            assert error.value.where["path"] == placed
        assert unharmed(victim)
        assert not out.exists()


def test_what_is_placed_while_the_work_goes_on_is_replaced(
    source: Path, victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = storage.create

    def create(path: Path) -> storage.NewFile:
        for place in (os.symlink, os.link):
            path.unlink(missing_ok=True)
            place(victim / "file", path)
        return real(path)

    convert(source, tmp_path / "out")
    convert(source, tmp_path / "out.tar")
    monkeypatch.setattr(storage, "create", create)
    (tmp_path / "again").mkdir()
    for name in ("out", "out.tar"):
        convert(source, tmp_path / "again" / name)
        assert verify(tmp_path / "again" / name).sound
    assert files_of(tmp_path / "again/out") == files_of(tmp_path / "out")
    assert unharmed(victim)


def test_the_working_folder_is_private_and_the_output_is_not(source: Path, tmp_path: Path) -> None:
    interrupted(source, tmp_path / "out")
    assert (tmp_path / "out.partial").stat().st_mode & 0o777 == 0o700
    convert(source, tmp_path / "out")
    (tmp_path / "usual").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_folder_of_another_user_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/out.partial").mkdir()
    (tmp_path / "shared/__shardkit__").mkdir()
    real = os.stat_result

    def owned(by: dict[str, int]) -> Callable[[Path], os.stat_result]:
        def lstat(path: Path, **_: Any) -> os.stat_result:
            about = list(os.stat(path))
            about[4] = by.get(path.name, 0)
            return real(about)

        return lstat

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(partial.Path, "lstat", owned({"out.partial": 666, "__shardkit__": 666}))
    monkeypatch.setattr(partial.Path, "stat", owned({"shared": 0}))
    for path in ("out.partial", "__shardkit__"):
        with pytest.raises(OutputError, match="somebody else") as error:
            partial.refuse_others(tmp_path / "shared" / path)
        assert error.value.found == "it belongs to the user 666"
    for owner, above in ((1000, 0), (666, 666), (0, 0)):  # ours, on a mapped file system, root's
        monkeypatch.setattr(partial.Path, "lstat", owned({"out.partial": owner}))
        monkeypatch.setattr(partial.Path, "stat", owned({"shared": above}))
        partial.refuse_others(tmp_path / "shared/out.partial")


def test_a_link_for_the_files_beside_a_single_one_is_refused(
    source: Path, victim: Path, tmp_path: Path
) -> None:
    (tmp_path / "__shardkit__").symlink_to(victim / "folder")
    with pytest.raises(OutputError, match="created by somebody else"):
        convert(source, tmp_path / "out.tar")
    assert unharmed(victim)


def test_a_hostile_result_of_a_task_names_nothing_outside(
    source: Path, victim: Path, tmp_path: Path
) -> None:
    interrupted(source, tmp_path / "out")
    result = next((tmp_path / "out.partial/tasks").glob("*/result.json"))
    text = result.read_text()
    result.write_text(text.replace('"shard-000000.tar"', '"../../../victim/file"'))
    assert text != result.read_text()
    with pytest.raises(ShardkitError, match="unsafe name"):
        convert(source, tmp_path / "out")
    assert unharmed(victim)


def test_a_hostile_manifest_of_a_single_file_moves_nothing_else(
    source: Path, tmp_path: Path
) -> None:
    """`--overwrite` removes what the old manifest names, and that may only be the file's own."""
    convert(source, tmp_path / "out.tar")
    (tmp_path / "important.txt").write_text("mine")
    path = tmp_path / "__shardkit__/out.tar.manifest.json"
    data = json.loads(path.read_bytes())
    data["files"].append({"name": "important.txt", "bytes": 4, "checksum": "0" * 32})
    write_json(path, data)
    convert(source, tmp_path / "out.tar", overwrite=True, shuffle=True)
    assert (tmp_path / "important.txt").read_text() == "mine"


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_is_a_link_stays_one(name: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    real, link = tmp_path / "elsewhere" / name, tmp_path / name
    convert(source, real)
    before = files_of(tmp_path / "elsewhere")
    link.symlink_to(real)
    assert convert(source, link).already_complete
    with pytest.raises(OutputError, match="holds another dataset"):
        convert(source, link, shuffle=True)
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
