"""`shardkit verify --part`: parts check together what one process does, or say what they do not."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest

import shardkit
from shardkit import manifest as manifests
from shardkit.errors import UsageError
from tests.conftest import IMAGE_FORMATS, few
from tests.test_cli import run
from tests.test_verify import flip, make, shard_paths

EACH_FORMAT = pytest.mark.parametrize("format", few(IMAGE_FORMATS, "lmdb", "wds"))


def parts_of(path: Path, number: int, **options: bool) -> list[shardkit.VerifyReport]:
    return [
        shardkit.verify(path, part=f"{part}/{number}", **options) for part in range(1, number + 1)
    ]


@pytest.mark.parametrize(("format", "number"), [("wds", 2), ("lmdb", 5)])
def test_parts_check_every_shard_and_file_once(
    images: Path, tmp_path: Path, format: str, number: int
) -> None:
    out = make(images, format, tmp_path / "out", shard_samples=4)
    whole, parts = shardkit.verify(out), parts_of(out, number)
    assert all(part.sound for part in parts)
    for name in ("samples", "shards", "files", "bytes"):
        assert sum(getattr(part, name) for part in parts) == getattr(whole, name)
    assert [part.shards for part in parts] == ([2, 1] if number == 2 else [1, 1, 1, 0, 0])
    assert [part.part for part in parts] == [f"{n + 1}/{number}" for n in range(number)]
    assert whole.part is None
    assert any("without --part" in note for note in parts[0].notes)
    assert any("part 1 checks" in note for note in parts[1].notes)


@EACH_FORMAT
def test_parts_find_what_the_whole_finds(images: Path, tmp_path: Path, format: str) -> None:
    """Each problem is found by exactly one of them, and named the same."""
    (images / "class1/broken.jpg").write_bytes(b"no image")
    out = make(images, format, tmp_path / "out", shard_samples=3, on_error="skip")
    paths = shard_paths(out)
    for path in (paths[0], paths[1], manifests.folder_of(manifests.manifest_path(out)) / ERRORS):
        flip(path, path.stat().st_size // 2)
    (paths[2] if paths[2].is_file() else paths[2].parent).replace(tmp_path / "away")
    if format != "lance":  # whose own manifest says what counts
        top = out / paths[1].relative_to(out).parts[0]
        (shutil.copytree if top.is_dir() else shutil.copy)(top, out / top.name.replace("1", "7", 1))
    whole = sorted(map(str, shardkit.verify(out).problems))
    assert len(whole) >= 4
    parts = [sorted(map(str, part.problems)) for part in parts_of(out, 3)]
    assert sorted(itertools.chain(*parts)) == whole
    assert all(parts)


ERRORS = f"{manifests.FOLDER}/{manifests.ERRORS}"


def test_shards_of_splits_are_shared_as_one_list(images: Path, tmp_path: Path) -> None:
    out = make(images, "wds", tmp_path / "out", folds=4, shard_samples=None)
    assert [part.shards for part in parts_of(out, 4)] == [1, 1, 1, 1]
    shard = out / "fold2/shard-000000.tar"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert [part.sound for part in parts_of(out, 4)] == [True, True, False, True]


def test_shards_of_others_are_shared_too(images: Path, tmp_path: Path) -> None:
    out = make(images, "wds", tmp_path / "out", shard_samples=4)
    shutil.rmtree(out / manifests.FOLDER)
    for path in out.glob("*.tar"):
        path.rename(out / path.name.replace("shard", "theirs"))
    second = out / "theirs-000001.tar"
    second.write_bytes(second.read_bytes()[:2000])
    whole = {str(problem) for problem in shardkit.verify(out).problems}
    assert whole  # what cannot be opened is said by each part
    assert [{str(problem) for problem in part.problems} for part in parts_of(out, 3)] == [whole] * 3


@pytest.mark.large  # webdataset imports torch
def test_a_part_decodes_and_asks_the_library_for_its_shards_alone(
    images: Path, tmp_path: Path
) -> None:
    out = make(images, "wds", tmp_path / "out", shard_samples=5)
    second = shardkit.verify(out, part="2/2", client=True, decode=True)
    assert second.sound
    assert (second.samples, second.clients["webdataset"].samples) == (5, 5)
    assert +second.clients["webdataset"].not_compared == {}


def test_the_command_takes_a_part(images: Path, tmp_path: Path) -> None:
    out = make(images, "wds", tmp_path / "out")
    report = json.loads(run("verify", out, "--part", "3/3", "--json").stdout)
    assert (report["part"], report["samples"], report["sound"]) == ("3/3", 2, True)
    assert "part 3/3 of 3 shards" in run("verify", out, "--part", "3/3").stdout
    assert "--part I/N" in run("verify", out, "--part", "0/3", check=2).stderr
    with pytest.raises(UsageError, match="cannot be compared with its source"):
        shardkit.verify(out, images, part="1/2")
    assert shardkit.verify(out, images, part="1/1").sound
