"""Keys: those that shards of others repeat, those that others cannot read, and `safe_keys`."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

import shardkit
from shardkit.cli.convert import command
from shardkit.sample import safe_key
from tests.conftest import write_images

Members = Iterable[tuple[str, bytes]]


def write_tar(path: Path, members: Members) -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def shards(folder: Path, *names: str, samples: int = 3, first: int = 0) -> Path:
    """TARs that all count their samples from 0, as img2dataset and many scripts do."""
    for shard, name in enumerate(names):
        write_tar(
            folder / name,
            [(f"{n:09d}.txt", f"{shard} {n}".encode()) for n in range(first, samples)],
        )
    return folder


def by_webdataset(path: Path) -> list[tuple[str, bytes]]:
    """Keys and texts."""
    with path.open("rb") as stream:
        files = tar_file_expander([{"url": str(path), "stream": stream}])
        return [(sample["__key__"], sample["txt"]) for sample in group_by_keys(files)]


def convert(source: Any, to: str, out: Path, **options: Any) -> shardkit.ConvertResult:
    return shardkit.convert(source, to, out, **{"workers": 0, **options})


def content(path: Path) -> dict[str, Any]:
    with shardkit.open(path) as dataset:
        found = {sample.pop("__key__"): sample for sample in dataset}
        assert len(found) == len(dataset)
        return found


@pytest.mark.parametrize("to", ["wds", "lmdb", "parquet"])
def test_keys_that_shards_repeat_begin_with_the_shard(tmp_path: Path, to: str) -> None:
    source = shards(tmp_path / "in", "00000.tar", "00001.tar")
    write_tar(source / "00002.tar", [("000000009.txt", b"2 9")])  # which no other shard has
    result = convert(source, to, tmp_path / "out")
    expected = {f"{s:05d}/{n:09d}": {"txt": f"{s} {n}"} for s in range(2) for n in range(3)}
    assert content(tmp_path / "out") == {**expected, "00002/000000009": {"txt": "2 9"}}
    (note,) = result.notes
    assert note.startswith("6 samples have the key of a sample in another shard")
    assert "SHARD/KEY" in note
    assert "00000/" in note
    assert shardkit.verify(tmp_path / "out", against=source).sound
    assert convert(source, to, tmp_path / "out").already_complete


def test_every_task_gives_the_same_keys(tmp_path: Path) -> None:
    source = shards(tmp_path / "in", "a.tar", "b.tar", "c.tar", samples=5)
    options = {"shuffle": True, "shard_samples": 2, "split": "train=0.5,val=0.5"}
    convert(source, "wds", tmp_path / "out", **options)
    found = {**content(tmp_path / "out/train"), **content(tmp_path / "out/val")}
    assert set(found) == {f"{s}/{n:09d}" for s in "abc" for n in range(5)}
    assert shardkit.verify(tmp_path / "out", against=source).sound


def test_keys_that_differ_stay_as_they_are(tmp_path: Path) -> None:
    source = shards(tmp_path / "in", "a.tar")
    write_tar(source / "b.tar", [("x.txt", b"x")])
    assert convert(source, "wds", tmp_path / "out").notes == []
    assert list(content(tmp_path / "out")) == ["000000000", "000000001", "000000002", "x"]


def test_shards_whose_names_differ_in_their_suffix_alone(tmp_path: Path) -> None:
    source = shards(tmp_path / "in", "a.tar", "b.tar", samples=1)
    (source / "b.tar").rename(source / "a.tar.gz")  # it is told by its bytes
    convert(source, "lmdb", tmp_path / "out")
    assert set(content(tmp_path / "out")) == {"a.tar/000000000", "a.tar.gz/000000000"}


def test_a_key_again_in_one_shard_is_refused_where_webdataset_makes_two_samples(
    tmp_path: Path,
) -> None:
    members = [("a.txt", b"1"), ("b.txt", b"2"), ("a.txt", b"3")]
    path = write_tar(tmp_path / "x.tar", members)
    assert by_webdataset(path) == [("a", b"1"), ("b", b"2"), ("a", b"3")]
    with pytest.raises(shardkit.DamagedError, match="have the same key") as error:
        convert(path, "wds", tmp_path / "out")
    assert "give them different names" in str(error.value.fix)


ODD = ["a b", "dir name/c", "tab\tx", "\u00fc/\u732b", "50%", "a%20b", "x.y", "__x__", "//x/", ".."]


@pytest.fixture
def odd() -> list[dict[str, Any]]:
    return [{"__key__": key, "text": key} for key in ODD]


def test_safe_keys_are_safe_and_reversible(odd: list[dict[str, Any]], tmp_path: Path) -> None:
    result = convert(odd, "wds", tmp_path / "out", safe_keys=True)
    assert not result.notes
    found = content(tmp_path / "out")
    assert [unquote(key) for key in found] == ODD
    assert [sample["text"] for sample in found.values()] == ODD
    theirs = by_webdataset(tmp_path / "out/shard-000000.tar")
    assert [(unquote(key), text.decode()) for key, text in theirs] == [(key, key) for key in ODD]


@given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("/_. %-"), min_size=1))
def test_any_key(key: str) -> None:
    from shardkit.formats.wds import names

    safe = safe_key(key)
    assert unquote(safe) == key
    assert names.split(f"{safe}.txt") == (safe, "txt")
    assert not any(blank.isspace() for blank in safe)
    assert Path(safe).as_posix() == safe
    assert not safe.startswith("/")


def test_keys_that_others_cannot_take_are_counted(tmp_path: Path) -> None:
    source = [{"__key__": key, "text": ""} for key in ("a b", "c\td", "\u00e9", "e", "f/g-h_i")]
    result = convert(source, "wds", tmp_path / "out", shard_samples=1)
    assert result.splits[""].keys == {"blanks": 2, "characters outside of ASCII": 1}
    blanks, other = result.notes
    assert blanks.startswith("keys with blanks")
    assert "cannot handle: 2; --safe-keys" in blanks
    assert "outside of ASCII" in other
    assert convert(source, "parquet", tmp_path / "p").notes == []


def test_fields_that_others_cannot_take_are_named(tmp_path: Path) -> None:
    """A blank in what stands behind the dot of a member's name, which is a field."""
    source = [{"__key__": "a", "my text": "", "b": ""}]
    (note,) = convert(source, "wds", tmp_path / "out").notes
    assert "DALI's index" in note
    assert "'my text'" in note
    assert "--rename" in note
    assert convert(source, "parquet", tmp_path / "p").notes == []


def test_the_command_says_so_and_its_safe_keys_are_verified_and_resumed(tmp_path: Path) -> None:
    source = write_images(tmp_path / "my photos", classes=2, each=2, kilobytes=1)
    for path in sorted(source.glob("*/*.jpg")):
        path.rename(path.with_name(f"my {path.name}"))
    run = CliRunner().invoke
    args = [str(source), "--to", "wds", "--workers", "0", "-o"]
    said = run(command, [*args, str(tmp_path / "plain")]).output
    assert "keys with blanks" in said
    assert run(command, [*args, str(tmp_path / "safe"), "--safe-keys"]).exit_code == 0
    assert "class0/my%20000" in content(tmp_path / "safe")
    assert shardkit.verify(tmp_path / "safe", against=source).sound
    assert convert(source, "wds", tmp_path / "safe", safe_keys=True).already_complete
    with pytest.raises(shardkit.OutputError, match="another dataset"):
        convert(source, "wds", tmp_path / "safe")
    # Made of a dataset with such keys, another keeps them; and is as its source and as the first.
    convert(tmp_path / "safe", "lmdb", tmp_path / "on", safe_keys=True)
    assert content(tmp_path / "on").keys() == content(tmp_path / "safe").keys()
    assert shardkit.verify(tmp_path / "on", against=tmp_path / "safe").sound
    assert shardkit.verify(tmp_path / "safe", against=tmp_path / "on").sound


def test_safe_keys_of_shards_that_repeat_theirs(tmp_path: Path) -> None:
    source = shards(tmp_path / "in", "part 1.tar", "part 2.tar", samples=1)
    convert(source, "wds", tmp_path / "out", safe_keys=True)
    assert set(content(tmp_path / "out")) == {"part%201/000000000", "part%202/000000000"}
    assert shardkit.verify(tmp_path / "out", against=source).sound


def test_lists_have_the_keys_of_the_dataset(tmp_path: Path) -> None:
    source = write_images(tmp_path / "in", classes=1, each=2, kilobytes=1)
    (source / "class0/000.jpg").rename(source / "class0/v 1.0.jpg")
    (source / "class0/001.jpg").write_bytes(b"no")
    convert(source, "wds", tmp_path / "out", safe_keys=True, on_error="skip")
    with shardkit.open(tmp_path / "out") as dataset:
        assert dataset.original_paths() == {"class0/v%201_0": "class0/v 1.0.jpg"}
    assert shardkit.verify(tmp_path / "out", against=source).sound
