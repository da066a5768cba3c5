"""Keys: those that shards of others repeat, those that others cannot read, and `safe_keys`."""

import io
import tarfile
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.formats.wds.names import split
from shardkit.sample import safe_key
from tests.conftest import write_images
from tests.peers import by_webdataset
from tests.test_cli import run


def write_tar(path, members):
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def shards(folder, *names, samples=3):
    """TARs that all count their samples from 0, as img2dataset and many scripts do."""
    for shard, name in enumerate(names):
        members = [(f"{n:09d}.txt", f"{shard} {n}".encode()) for n in range(samples)]
        write_tar(folder / name, members)
    return folder


def convert(source, to, out, **options):
    return shardkit.convert(source, to, out, **{"workers": 0, **options})


def content(path):
    with shardkit.open(path) as dataset:
        found = {sample.pop("__key__"): sample for sample in dataset}
        assert len(found) == len(dataset)
        return found


@pytest.mark.parametrize("to", ["wds", "lmdb", "parquet"])
def test_keys_that_shards_repeat_begin_with_the_shard(tmp_path, to):
    source = shards(tmp_path / "in", "00000.tar")
    write_tar(source / "00002.tar", [("000000009.txt", b"2 9")])  # which no other shard has
    assert convert(source, to, tmp_path / "differ").notes == []
    assert list(content(tmp_path / "differ")) == [f"{n:09d}" for n in (0, 1, 2, 9)]
    result = convert(shards(source, "00000.tar", "00001.tar"), to, tmp_path / "out")
    expected = {f"{s:05d}/{n:09d}": {"txt": f"{s} {n}"} for s in range(2) for n in range(3)}
    assert content(tmp_path / "out") == {**expected, "00002/000000009": {"txt": "2 9"}}
    (note,) = result.notes
    assert note.startswith("6 samples have the key of a sample in another shard")
    assert all(words in note for words in ("SHARD/KEY", "00000/"))
    assert shardkit.verify(tmp_path / "out", against=source).sound
    assert convert(source, to, tmp_path / "out").already_complete


def test_every_task_gives_the_same_keys(tmp_path):
    source = shards(tmp_path / "in", "a.tar", "b.tar", "c.tar", samples=5)
    options = {"shuffle": True, "shard_samples": 2, "split": "train=0.5,val=0.5"}
    convert(source, "wds", tmp_path / "out", **options)
    found = {**content(tmp_path / "out/train"), **content(tmp_path / "out/val")}
    assert set(found) == {f"{s}/{n:09d}" for s in "abc" for n in range(5)}
    assert shardkit.verify(tmp_path / "out", against=source).sound


def test_names_of_shards_that_repeat_keys(tmp_path):
    for n, (names, safe, found) in enumerate(
        (  # a .gz that is none is told by its bytes
            (("a.tar", "b.tar.gz"), False, {"a/000000000", "b/000000000"}),
            (("part 1.tar", "part 2.tar"), True, {"part%201/000000000", "part%202/000000000"}),
        )
    ):
        source, out = shards(tmp_path / f"in{n}", *names, samples=1), tmp_path / f"out{n}"
        convert(source, "wds", out, safe_keys=safe)
        assert set(content(out)) == found
        assert shardkit.verify(out, against=source).sound


def test_a_key_again_in_one_shard_is_refused_where_webdataset_makes_two_samples(tmp_path):
    members = [("a.txt", b"1"), ("b.txt", b"2"), ("a.txt", b"3")]
    path = write_tar(tmp_path / "x.tar", members)
    found = [(sample["__key__"], sample["txt"]) for sample in by_webdataset(path)]
    assert found == [("a", b"1"), ("b", b"2"), ("a", b"3")]
    with pytest.raises(shardkit.DamagedError, match="have the same key") as error:
        convert(path, "wds", tmp_path / "out")
    assert "give samples different names" in str(error.value.fix)


ODD = ["a b", "dir name/c", "tab\tx", "\u00fc/\u732b", "50%", "a%20b", "x.y", "__x__", "//x/", ".."]


def test_safe_keys_are_safe_and_reversible(tmp_path):
    odd = [{"__key__": key, "text": key} for key in ODD]
    assert not convert(odd, "wds", tmp_path / "out", safe_keys=True).notes
    found = content(tmp_path / "out")
    assert [unquote(key) for key in found] == ODD
    assert [sample["text"] for sample in found.values()] == ODD
    for theirs, key in zip(by_webdataset(tmp_path / "out/shard-000000.tar"), ODD, strict=True):
        assert (unquote(theirs["__key__"]), theirs["txt"].decode()) == (key, key)


@given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("/_. %-"), min_size=1))
def test_any_key(key):
    safe = safe_key(key)
    assert unquote(safe) == key
    assert split(f"{safe}.txt") == (safe, "txt")
    assert not any(blank.isspace() for blank in safe)
    assert Path(safe).as_posix() == safe
    assert not safe.startswith("/")


def test_keys_and_fields_that_others_cannot_take_are_counted(tmp_path):
    keys = [{"__key__": key, "text": ""} for key in ("a b", "c\td", "\u00e9", "e", "f/g-h_i")]
    result = convert(keys, "wds", tmp_path / "keys", shard_samples=1)
    assert result.splits[""].keys == {"blanks": 2, "characters outside of ASCII": 1}
    blanks, other = result.notes
    assert blanks.startswith("keys with blanks")
    assert "cannot handle: 2; --safe-keys" in blanks
    assert "outside of ASCII" in other
    # A blank in what stands behind the dot of a member's name, which is a field.
    fields = [{"__key__": "a", "my text": "", "b": ""}]
    (note,) = convert(fields, "wds", tmp_path / "fields").notes
    assert all(said in note for said in ("DALI's index", "'my text'", "--rename"))
    for number, source in enumerate((keys, fields)):
        assert convert(source, "parquet", tmp_path / f"{number}").notes == []


def test_the_command_says_so_and_its_safe_keys_are_verified_and_resumed(tmp_path):
    source = write_images(tmp_path / "my photos", classes=2, each=2, kilobytes=1)
    for path in sorted(source.glob("*/*.jpg")):
        path.rename(path.with_name(f"my {path.name}"))
    (source / "class1/my 000.jpg").rename(source / "class1/v 1.0.jpg")
    (source / "class1/my 001.jpg").write_bytes(b"no")
    words = ["convert", source, "--to", "wds", "--workers", "0", "--on-error", "skip", "-o"]
    said = run(*words, tmp_path / "plain")
    assert "keys with blanks" in said.stdout + said.stderr
    run(*words, tmp_path / "safe", "--safe-keys")
    assert "class0/my%20000" in content(tmp_path / "safe")
    with shardkit.open(tmp_path / "safe") as dataset:
        assert dataset.original_paths() == {"class1/v%201_0": "class1/v 1.0.jpg"}
    assert shardkit.verify(tmp_path / "safe", against=source).sound
    skip = {"on_error": "skip"}
    assert convert(source, "wds", tmp_path / "safe", safe_keys=True, **skip).already_complete
    with pytest.raises(shardkit.OutputError, match="another dataset"):
        convert(source, "wds", tmp_path / "safe", **skip)
    # Made of a dataset with such keys, another keeps them; and is as its source and as the first.
    convert(tmp_path / "safe", "lmdb", tmp_path / "on", safe_keys=True)
    assert content(tmp_path / "on").keys() == content(tmp_path / "safe").keys()
    assert shardkit.verify(tmp_path / "on", against=tmp_path / "safe").sound
    assert shardkit.verify(tmp_path / "safe", against=tmp_path / "on").sound
