"""Datasets whose manifest and lists stand among the shards, as earlier versions wrote them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import shardkit
from shardkit import manifest as manifests
from shardkit.inspection import inspect
from tests.conftest import files_of

STORED = Path(__file__).parent / "bytes/dataset"
BOTH = pytest.mark.parametrize("name", ["folder", "train.tar"])
PREFIXES = {"folder": "folder/", "train.tar": "train."}
KEYS = ["cat/0", "cat/a_b", "dog/1"]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED, tmp_path / "stored"))


@BOTH
def test_it_is_read_inspected_verified_and_a_source(
    stored: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, shardkit.open(stored / name) as dataset:
        patch.setattr("shardkit.formats.wds.kept.scan", None)  # its index is not built again
        assert [sample["__key__"] for sample in dataset] == KEYS
        assert dataset.place == stored / name
        assert dataset.classes == ("cat", "dog")
        assert dataset.original_paths() == {"cat/a_b": "cat/a.b.jpg"}
    assert inspect(stored / name)["errors"] == 1
    report = shardkit.verify(stored / name, against=stored / "source", decode=True)
    assert report.sound, report.problems
    assert report.files == (6 if name == "folder" else 4)
    if name == "folder":
        with shardkit.open(stored / "folder/shard-000001.tar") as shard:
            assert [sample["__key__"] for sample in shard] == KEYS[2:]
            assert shard.classes == ("cat", "dog")
    shardkit.convert(stored / name, "wds", tmp_path / "out", workers=0)
    with shardkit.open(tmp_path / "out") as dataset:
        assert [sample["__key__"] for sample in dataset] == KEYS
        assert dataset.original_paths() == {"cat/a_b": "cat/a.b.jpg"}
    assert set(files_of(tmp_path / "out")) >= {"__shardkit__/manifest.json", "shard-000000.tar"}


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("folder", "folder/errors.jsonl"),
        ("folder", "folder/shard-000001.index.npy"),
        ("train.tar", "train.tar.keys.jsonl"),
        ("train.tar", "train.index.npy"),
    ],
)
def test_damage_to_what_lies_among_its_shards_is_found(stored: Path, name: str, file: str) -> None:
    path = stored / file
    path.write_bytes(path.read_bytes()[:-1])
    (problem,) = shardkit.verify(stored / name).problems
    assert problem.where["path"] == path


@BOTH
def test_it_is_replaced_and_nothing_of_it_stays(stored: Path, name: str) -> None:
    before = set(files_of(stored))
    with pytest.raises(shardkit.OutputError, match="holds another dataset"):
        shardkit.convert(stored / "source/cat", "wds", stored / name, workers=0)
    assert set(files_of(stored)) == before
    shardkit.convert(stored / "source/cat", "wds", stored / name, workers=0, overwrite=True)
    old = {file for file in before if file.startswith(PREFIXES[name])}
    assert len(old) == (7 if name == "folder" else 5)
    left = {"folder/shard-000000.tar"} if name == "folder" else {"train.tar"}
    assert set(files_of(stored)) & old == left
    with shardkit.open(stored / name) as dataset:
        assert len(dataset) == 2
    assert shardkit.verify(stored / name).sound


def with_old_names(out: Path) -> None:
    """Move what is in __shardkit__ to where earlier versions put it."""
    made = manifests.load(out)
    place = manifests.manifest_path(out)
    folder = manifests.folder_of(place)
    text = place.read_text().replace("__shardkit__/", "")
    old = folder / place.name.replace("manifest.json", "shardkit.json")
    for file in (*made.files, *(beside for shard in made.shards for beside in shard.beside)):
        if file.name.startswith("__shardkit__/"):
            (folder / file.name).rename(folder / file.name.removeprefix("__shardkit__/"))
    data = json.loads(text)
    del data[manifests._OWN_CHECKSUM]
    manifests._write(old, data)
    place.unlink()


@BOTH
def test_the_command_that_made_it_finds_it_complete(tmp_path: Path, name: str) -> None:
    def run() -> bool:
        source, out = STORED / "source", tmp_path / name
        return shardkit.convert(source, "wds", out, on_error="skip", workers=0).already_complete

    assert not run()
    with_old_names(tmp_path / name)
    before = files_of(tmp_path)
    assert run()
    assert files_of(tmp_path) == before
    assert not [file for file in before if "__shardkit__" in file]


def test_the_fingerprint_of_its_source_is_as_it_was(stored: Path) -> None:
    again = shardkit.convert(
        stored / "source", "wds", stored / "folder", shard_samples=2, on_error="skip", workers=0
    )
    assert again.already_complete
