"""How much of a shard is read, rows of many samples, and shards that change while they are open.

What holds for all formats alike is in `shardkit.testing.FormatContract`.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit import byte_source
from shardkit.byte_source import LocalFile
from shardkit.errors import DamagedError
from shardkit.formats import FORMATS, file_name, get_format
from shardkit.opening import open_splits
from shardkit.sample import Sample
from shardkit.schema import Array, Bytes, Schema, Text
from shardkit.testing import assert_same, open_files, write_shard
from tests.conftest import few

ROWS = ["arrow", "beton", "hf", "megatron", "wds"]  # the formats that read many rows at once


@pytest.fixture(params=["from memory", "by waiting"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reads that keep the lock, and without."""
    if request.param == "by waiting":
        monkeypatch.setattr(byte_source, "_preadv2", None)


@pytest.fixture
def tmp_path(disk: Path) -> Path:
    """Memory is no disk: systems read, and drop, its files in other ways."""
    return Path(tempfile.mkdtemp(dir=disk))


# --- formats -------------------------------------------------------------------------------------


def shard(folder: Path, name: str, schema: Schema, samples: list[Sample]) -> Any:
    """A reader of a new shard."""
    return write_shard(get_format(name), folder / file_name("shard-000000", name), schema, samples)


def blobs(count: int, size: int) -> list[Sample]:
    random = np.random.default_rng(1)
    return [{"__key__": f"{n:05d}", "blob": random.bytes(size)} for n in range(count)]


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", ["arrow", "beton", "hf", "lmdb", "wds"])
def test_to_read_a_sample_takes_little_more_than_its_bytes(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = blobs(300, 20_000)
    reader = shard(tmp_path, name, Schema({"blob": Bytes()}), samples)
    taken: list[int] = []
    plain = LocalFile._read

    def counted(self: LocalFile, offset: int, length: int) -> bytes:
        taken.append(length)
        return plain(self, offset, length)

    monkeypatch.setattr(LocalFile, "_read", counted)
    for number in (150, 151, 3):
        assert_same(reader[number], samples[number])
    assert sum(taken) < 3 * 20_000 + 32_768
    before = sum(taken)
    assert reader.sample(153, ()) == {"__key__": "00153"}
    assert name == "lmdb" or sum(taken) - before < 4096  # there key and fields are one value


@pytest.mark.parametrize("name", ROWS)
def test_arrays_of_several_lengths_are_rows_where_they_are_alike(tmp_path: Path, name: str) -> None:
    schema = Schema({"x": Array("<i4", (None,))})
    lengths = [600 if n % 3 else 10 + n for n in range(60)]
    samples: list[Sample] = [
        {"__key__": f"{n}", "x": np.arange(length, dtype="<i4") - n}
        for n, length in enumerate(lengths)
    ]
    reader = shard(tmp_path, name, schema, samples)
    out = np.full((3, 600), 7, np.float32)
    if name == "beton":  # FFCV has no type for them
        assert not reader.read_rows("x", np.array([1, 2, 4]), out)
        return
    assert reader.read_rows("x", np.array([4, 1, 58]), out)
    assert out.tolist() == [samples[n]["x"].tolist() for n in (4, 1, 58)]
    out[:] = 7
    assert not reader.read_rows("x", np.array([1, 3, 2]), out)
    assert (out == 7).all()


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", [name for name in ROWS if name != "megatron"])
def test_rows_of_any_shape_and_type_are_the_arrays_of_the_samples(
    tmp_path: Path, name: str
) -> None:
    kinds = {
        "a": Array("<f4", (3, 4)), "b": Array("|u1", (2, 3, 2)), "c": Array("<i8", (None, 2)),
        "d": Array(">i2", (5,)), "e": Array("<u2", (300,), optional=True),
        "f": Array("<f8", (300,)),
    }  # fmt: skip
    schema = Schema({**kinds, "text": Text()})
    random = np.random.default_rng(3)
    samples: list[Sample] = []
    for number in range(25):
        samples.append({"__key__": f"{number}"})
        for field, kind in kinds.items():
            shape = [4 if size is None else size for size in kind.shape or ()]
            samples[-1][field] = random.integers(0, 99, shape).astype(kind.dtype)
        samples[-1]["text"] = "x"
    del samples[20]["e"]
    reader = shard(tmp_path, name, schema, samples)
    positions = np.array([3, 19, 0, 3])
    seen = set()
    for field in "abcdef":
        expected = np.stack([samples[n][field] for n in positions])
        out = np.full(expected.shape, 7, np.float64)
        if reader.read_rows(field, positions, out):
            seen.add(field)
            np.testing.assert_array_equal(out, expected)
        else:
            assert (out == 7).all()
    assert seen >= {"arrow": set("abcef"), "hf": set("abcef"), "beton": set("abef")}.get(
        name, set("abcdef")
    )
    assert not reader.read_rows("text", positions, np.zeros((4, 1)))
    assert not reader.read_rows("e", np.array([19, 20]), np.zeros((2, 300)))


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_file_that_is_cut_are_left_to_be_read_one_by_one(
    tmp_path: Path, name: str
) -> None:
    schema = Schema({"x": Array("<u2", (500,))})
    samples: list[Sample] = [{"__key__": f"{n}", "x": np.full(500, n, "<u2")} for n in range(40)]
    reader = shard(tmp_path, name, schema, samples)
    path = tmp_path / file_name("shard-000000", name)
    out = np.zeros((2, 500), np.int64)
    assert reader.read_rows("x", np.array([0, 39]), out)
    os.truncate(path, path.stat().st_size // 2)
    out[:] = -1
    assert not reader.read_rows("x", np.array([0, 39]), out)
    with pytest.raises(DamagedError, match="truncated while it was open") as error:
        reader[39]
    assert error.value.where["position"] == 39


@pytest.mark.parametrize("name", ["arrow", "parquet"])
def test_a_batch_that_is_first_looked_at_when_it_is_gone_is_named(
    tmp_path: Path, name: str
) -> None:
    samples = blobs(250, 2000)
    reader = shard(tmp_path, name, Schema({"blob": Bytes()}), samples)
    assert_same(reader[0], samples[0])
    path = tmp_path / file_name("shard-000000", name)
    os.truncate(path, path.stat().st_size // 2)
    assert_same(reader[90], samples[90])
    with pytest.raises(DamagedError) as error:
        reader[249]
    assert error.value.where["path"] == path
    assert error.value.where["position"] == 249
    assert error.value.where["offset"] > 0


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_keys_that_are_longer_than_values_read_the_same(tmp_path: Path, name: str) -> None:
    schema = Schema({"x": Array("<u2", (2,))})
    samples: list[Sample] = [
        {"__key__": f"{n:04d}/" + "ключ" * 30, "x": np.array([n, 1], "<u2")} for n in range(90)
    ]
    reader = shard(tmp_path, name, schema, samples)
    for number in range(90):
        assert_same(reader[number], samples[number])
    assert reader.read_keys(np.array([89, 5])) == [samples[n]["__key__"] for n in (89, 5)]


# --- datasets ------------------------------------------------------------------------------------


def many_shards(folder: Path, name: str, count: int) -> shardkit.Dataset:
    schema = {"x": Array("<u2", (4,))}
    with shardkit.create(folder, to=name, schema=schema, shard_samples=1) as writer:
        for number in range(count):
            writer.write({"__key__": f"{number}", "x": np.full(4, number, "<u2")})
    return shardkit.open(folder)


@pytest.mark.parametrize("name", few(["arrow", "wds"], "wds"))
def test_a_dataset_has_a_bounded_number_of_files_open(tmp_path: Path, name: str) -> None:
    dataset = many_shards(tmp_path / "x", name, 130)
    for _ in range(2):
        assert [int(sample["x"][0]) for sample in dataset] == list(range(130))
    assert open_files(tmp_path) == 128
    dataset.close()
    assert open_files(tmp_path) == 0


def test_a_copy_of_a_dataset_shares_nothing_that_is_open(tmp_path: Path) -> None:
    dataset = many_shards(tmp_path / "x", "arrow", 3)
    assert dataset[0]["__key__"] == "0"
    for other in (copy.copy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert [s["__key__"] for s in other] == ["0", "1", "2"]
        assert other.reader(0) is not dataset.reader(0)
    dataset.close()
    assert other[2]["__key__"] == "2"


def test_a_shard_that_was_replaced_before_it_is_opened_is_noticed(tmp_path: Path) -> None:
    dataset = many_shards(tmp_path / "x", "wds", 3)
    assert dataset[0]["__key__"] == "0"
    path = dataset.shard_path(1)
    path.write_bytes(path.read_bytes()[:-512])
    with pytest.raises(DamagedError, match="not as long as its manifest says"):
        dataset[1]


@pytest.mark.parametrize("name", ["litdata", "mds"])
def test_splits_without_our_manifest_are_folders_with_an_index_each(
    images: Path, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "out"
    shardkit.convert(images, name, out, split="train=0.5,val=0.5", workers=0)
    for manifest in list(out.glob("**/__shardkit__")):
        shutil.rmtree(manifest)
    found = open_splits(out)
    assert {split: dataset.path.name for split, dataset in found.items()} == {
        "train": "train",
        "val": "val",
    }
    assert sum(map(len, found.values())) == 12


def _tar(path: Path, letter: bytes, year: int) -> Path:
    """A foreign TAR of 20 samples of 3,000 bytes, changed on the first day of a year."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(20):
            member = tarfile.TarInfo(f"{number:02d}.bin")
            member.size = 3000
            tar.addfile(member, io.BytesIO(letter * 3000))
    os.utime(path, ((year - 1970) * 31_557_600,) * 2)
    return path


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("reopened", [False, True, "in a copy"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_foreign_shard_is_never_read_in_two_versions(
    tmp_path: Path, reopened: bool | str, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _tar(tmp_path / "x.tar", b"a", 2001)
    dataset = shardkit.open(path)
    assert dataset[0]["bin"] == b"a" * 3000
    monkeypatch.setattr(byte_source, "_AGE", 0)
    dataset.close()
    assert dataset[1]["bin"] == b"a" * 3000
    other = _tar(tmp_path / "other", b"b", 2002)
    if in_place:
        path.write_bytes(other.read_bytes())
        os.utime(path, (978_307_200 + 86_400,) * 2)
    else:
        other.rename(path)
    if reopened == "in a copy":
        dataset = pickle.loads(pickle.dumps(dataset))
    elif reopened:
        dataset.close()
    if not in_place and not reopened:  # the old file has no name any more
        assert dataset[2]["bin"] == b"a" * 3000
        return
    for _ in range(2):
        with pytest.raises(DamagedError, match="was changed while it was open") as error:
            dataset[2]
    assert str(path) in str(error.value)
    assert shardkit.open(path)[2]["bin"] == b"b" * 3000


def test_shards_of_a_dataset_that_was_made_anew_are_not_mixed_with_old_ones(tmp_path: Path) -> None:
    dataset = many_shards(tmp_path / "x", "wds", 3)
    assert dataset[0]["__key__"] == "0"
    manifest = tmp_path / "x/__shardkit__/manifest.json"
    os.utime(manifest, (1e9, 1e9))  # as another conversion has another time
    with pytest.raises(DamagedError, match="was changed while it was open") as error:
        dataset[1]
    assert str(manifest) in str(error.value)
