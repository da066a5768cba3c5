"""Reading without mapping: the file underneath, what each format does with it, and datasets.

What holds for all formats alike is in `shardkit.testing.FormatContract`.
"""

from __future__ import annotations

import ctypes
import datetime
import errno
import io
import os
import pickle
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit import storage
from shardkit.errors import DamagedError, NotFoundError, ShardkitWarning, StorageError
from shardkit.formats import FORMATS, file_name, get_format
from shardkit.formats.base import ReadsRows, ReadsUnmapped
from shardkit.sample import Sample
from shardkit.schema import Array, Bytes, Schema, Text
from shardkit.storage import PreadFile
from shardkit.testing import assert_same, make_image, write_shard

ROWS = ["arrow", "beton", "hf", "megatron", "wds"]  # the formats that read many rows at once


@pytest.fixture(params=["from memory", "by waiting"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs with the reads that keep the lock, and without."""
    if request.param == "by waiting":
        monkeypatch.setattr(storage, "_preadv2", None)


@pytest.fixture
def tmp_path(disk: Path) -> Path:
    """Memory is no disk: systems read, and drop, its files in other ways."""
    return Path(tempfile.mkdtemp(dir=disk))


# --- the file ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blob(disk: Path) -> Path:
    path = disk / "blob"
    path.write_bytes(np.random.default_rng(0).bytes(1_000_003))
    return path


_bounds = st.none() | st.integers(-1_100_000, 1_100_000)


@given(start=_bounds, stop=_bounds)
def test_a_slice_of_a_file_is_that_of_its_bytes(blob: Path, start: int, stop: int) -> None:
    file = PreadFile(blob)
    assert len(file) == 1_000_003
    assert file[start:stop] == blob.read_bytes()[start:stop]


@given(starts=st.lists(st.integers(0, 999_003), max_size=20), size=st.integers(0, 1000))
def test_rows_are_the_slices_from_their_starts_on(blob: Path, starts: list[int], size: int) -> None:
    data = blob.read_bytes()
    for source in (PreadFile(blob), data, storage.open_data(blob, mapped=True)):
        found = storage.rows(source, np.array(starts, np.int64), size)
        assert found.shape == (len(starts), size)
        assert [row.tobytes() for row in found] == [data[s : s + size] for s in starts]


@pytest.mark.parametrize("starts", [[0, -1], [999_000], [2**62]])
def test_rows_outside_of_a_file_are_refused(blob: Path, starts: list[int]) -> None:
    for source in (PreadFile(blob), storage.open_data(blob, mapped=True)):
        with pytest.raises(ValueError, match="ends before"):
            storage.rows(source, np.array(starts), 1004)


def test_a_file_that_is_cut_names_the_byte_from_which_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(10_000))
    file = PreadFile(path)
    os.truncate(path, 7000)
    assert file[5000:7000] == bytes(2000)
    with pytest.raises(DamagedError, match="cut while it was open") as error:
        file[6990:7020]
    assert error.value.where == {"path": path, "offset": 6990}
    assert (error.value.expected, error.value.found) == (
        "30 bytes from here",
        "10 bytes, then the end of the file",
    )
    with pytest.raises(DamagedError, match="cut while it was open"):
        file.rows(np.array([0, 6990]), 30)
    assert len(file) == 10_000


def test_what_cannot_be_opened_or_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="cannot open"):
        PreadFile(tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="cannot open: Is a directory") as error:
        PreadFile(tmp_path / "folder")
    assert error.value.where == {"path": tmp_path / "folder"}


def test_a_system_that_cannot_read_without_waiting_is_asked_once(
    blob: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(*arguments: Any) -> int:
        asked.append(arguments)
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(storage, "_preadv2", refuse)
    file, data = PreadFile(blob), blob.read_bytes()
    assert [file[n : n + 9] for n in range(50)] == [data[n : n + 9] for n in range(50)]
    assert file.rows(np.arange(5), 9).tobytes() == b"".join(data[n : n + 9] for n in range(5))
    assert len(asked) == 1


def test_what_the_system_does_not_have_in_memory_is_waited_for(
    blob: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def wait(*arguments: Any) -> int:
        asked.append(arguments)
        ctypes.set_errno(errno.EAGAIN)
        return -1

    monkeypatch.setattr(storage, "_preadv2", wait)
    file, data = PreadFile(blob), blob.read_bytes()
    assert file[3:99] == data[3:99]
    assert file.rows(np.array([7, 5]), 9).tobytes() == data[7:16] + data[5:14]
    assert len(asked) == 3


def test_threads_read_what_is_theirs(blob: Path) -> None:
    file, data = PreadFile(blob), blob.read_bytes()
    places = [(n * 7919 % 900_000, n * 31 % 40_000) for n in range(3000)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda place: file[place[0] : sum(place)], places))
    assert all(part == data[s : s + n] for part, (s, n) in zip(found, places, strict=True))


# --- formats -------------------------------------------------------------------------------------


def shard(folder: Path, name: str, schema: Schema, samples: list[Sample]) -> Any:
    """A reader that maps nothing, of a new shard."""
    format = get_format(name)
    assert isinstance(format, ReadsUnmapped)
    path = folder / file_name("shard-000000", name)
    layout = write_shard(format, path, schema, samples).layout
    return format.open_unmapped(path, layout)


def test_every_format_can_be_read_unmapped() -> None:
    assert all(isinstance(get_format(name), ReadsUnmapped) for name in FORMATS)


def blobs(count: int, size: int) -> list[Sample]:
    random = np.random.default_rng(1)
    return [{"__key__": f"{n:05d}", "blob": random.bytes(size)} for n in range(count)]


@pytest.mark.parametrize("name", ["arrow", "beton", "hf", "lmdb", "wds"])
def test_to_read_a_sample_takes_little_more_than_its_bytes(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = blobs(300, 20_000)
    reader = shard(tmp_path, name, Schema({"blob": Bytes()}), samples)
    taken: list[int] = []
    plain = PreadFile.__getitem__

    def counted(self: PreadFile, place: slice) -> bytes:
        data = plain(self, place)
        taken.append(len(data))
        return data

    monkeypatch.setattr(PreadFile, "__getitem__", counted)
    for number in (150, 151, 3):
        assert_same(reader[number], samples[number])
    assert sum(taken) < 3 * 20_000 + 32_768
    before = sum(taken)
    assert reader.read_fields(153, ()) == {"__key__": "00153"}
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


@pytest.mark.parametrize("name", [name for name in ROWS if name != "megatron"])
def test_rows_of_any_shape_and_type_are_the_arrays_of_the_samples(
    tmp_path: Path, name: str
) -> None:
    schema = Schema(
        {
            "a": Array("<f4", (3, 4)),
            "b": Array("|u1", (2, 3, 2)),
            "c": Array("<i8", (None, 2)),
            "d": Array(">i2", (5,)),
            "e": Array("<u2", (300,), optional=True),
            "f": Array("<f8", (300,)),
            "text": Text(),
        }
    )
    random = np.random.default_rng(3)
    samples = []
    for number in range(25):
        sample: Sample = {"__key__": f"{number}"}
        for field, shape in {"a": (3, 4), "b": (2, 3, 2), "c": (4, 2), "d": (5,)}.items():
            kind = schema[field]
            assert isinstance(kind, Array)
            sample[field] = random.integers(0, 99, shape).astype(kind.dtype)
        if number != 20:
            sample["e"] = random.integers(0, 2**16, 300).astype("<u2")
        samples.append({**sample, "f": random.random(300), "text": "x"})
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
    with pytest.raises(DamagedError, match="cut while it was open") as error:
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


def foreign_table() -> pa.Table:
    """Columns of which some values are slices of the file, and some are not."""
    count = 50
    return pa.table(
        {
            "text": [f"text {n}" for n in range(count)],
            "large": pa.array([bytes([n]) * 500 for n in range(count)], pa.large_binary()),
            "fixed": pa.array([bytes([n]) * 100 for n in range(count)], pa.binary(100)),
            "half": pa.array(np.arange(count, dtype=np.float16)),
            "maybe": [None if n % 7 == 0 else n for n in range(count)],
            "flag": [None if n % 5 == 0 else n % 2 == 0 for n in range(count)],
            "nothing": pa.nulls(count),
            "nested": [[[n, n + 1], [n + 2, n + 3]] for n in range(count)],
            "holes": [None if n == 3 else [n] * n for n in range(count)],
        }
    )


def odd_table() -> pa.Table:
    days = [datetime.date(2020, 1, 1 + n) for n in range(20)]
    return foreign_table().slice(20, 20).append_column("day", pa.array(days)).append_column(
        "name", pa.array([f"name {n % 3}" for n in range(20)]).dictionary_encode()
    ).append_column("map", pa.array([{"a": n} for n in range(20)]))  # fmt: skip


@pytest.mark.parametrize("way", ["file", "stream", "lz4", "parquet"])
@pytest.mark.parametrize("table", [foreign_table(), odd_table()], ids=["sliced", "odd"])
def test_arrow_files_of_others_read_the_same(tmp_path: Path, table: pa.Table, way: str) -> None:
    path = tmp_path / ("x.parquet" if way == "parquet" else "x.arrow")
    if way == "parquet":
        pq.write_table(table.drop_columns(["half"]), path, row_group_size=7)
    else:
        options = pa.ipc.IpcWriteOptions(compression="lz4" if way == "lz4" else None)
        make = pa.ipc.new_stream if way == "stream" else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as file, make(file, table.schema, options=options) as out:
            out.write_table(table, max_chunksize=7)
    dataset = shardkit.open(path)
    unmapped = dataset.unmapped()
    for number, sample in enumerate(dataset):
        assert_same(unmapped[number], sample)
    reader: Any = unmapped.reader(0)
    assert reader.keys() == [sample["__key__"] for sample in dataset]
    for field in dataset.schema:
        assert_same(reader.read_fields(9, {field}), dataset.reader(0).read_fields(9, {field}))  # type: ignore[attr-defined]


def test_a_tar_of_others_reads_the_same(tmp_path: Path) -> None:
    for name, mode in (("a.tar", "w"), ("b.tar.gz", "w:gz")):
        with tarfile.open(tmp_path / name, mode) as tar:
            for number in range(30):
                key = "long/" * 30 if number == 7 else ""  # a name in an extended header
                for suffix, data in (("jpg", make_image(number)), ("cls", b"%d" % number)):
                    member = tarfile.TarInfo(f"{key}{number:03d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    plain = shardkit.open(tmp_path / "a.tar")
    with pytest.warns(ShardkitWarning, match="compressed"):
        packed = shardkit.open(tmp_path / "b.tar.gz")
    unpacked = packed.unmapped()
    with pytest.warns(ShardkitWarning, match="compressed"):
        unpacked.reader(0)
    for unmapped in (plain.unmapped(), unpacked):
        for number, sample in enumerate(plain):
            assert_same(unmapped[number], sample)
        reader = unmapped.reader(0)
        assert isinstance(reader, ReadsRows)
        assert reader.read_keys(np.array([7, 8])) == ["long/" * 30 + "007", "008"]


def test_an_lmdb_of_others_reads_the_same(tmp_path: Path) -> None:
    values = {b"%06d" % n: bytes([n % 251]) * (n * 7 % 9000) for n in range(500)}
    with (
        lmdb.open(str(tmp_path / "x"), map_size=1 << 28) as environment,
        environment.begin(write=True) as transaction,
    ):
        for key, value in values.items():
            transaction.put(key, value)
    dataset = shardkit.open(tmp_path / "x")
    unmapped = dataset.unmapped()
    for number, value in enumerate(values.values()):
        assert unmapped[number] == dataset[number] == {"__key__": f"{number:06d}", "value": value}
    reader: Any = unmapped.reader(0)
    assert reader.read_fields(3, ()) == {"__key__": "000003"}
    assert reader.read_fields(3, {"value"}) == dataset[3]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_keys_that_are_longer_than_values_read_the_same(tmp_path: Path, name: str) -> None:
    schema = Schema({"x": Array("<u2", (2,))})
    samples: list[Sample] = [
        {"__key__": f"{n:04d}/" + "ключ" * 30, "x": np.array([n, 1], "<u2")} for n in range(300)
    ]
    reader = shard(tmp_path, name, schema, samples)
    for number in range(300):
        assert_same(reader[number], samples[number])
    if isinstance(reader, ReadsRows):
        assert reader.read_keys(np.array([299, 5])) == [samples[n]["__key__"] for n in (299, 5)]


# --- datasets ------------------------------------------------------------------------------------


def many_shards(folder: Path, name: str, count: int) -> shardkit.Dataset:
    schema = {"x": Array("<u2", (4,))}
    with shardkit.create(folder, to=name, schema=schema, shard_samples=1) as writer:
        for number in range(count):
            writer.write({"__key__": f"{number}", "x": np.full(4, number, "<u2")})
    return shardkit.open(folder)


@pytest.mark.parametrize("name", ["arrow", "wds"])
def test_a_dataset_has_a_bounded_number_of_files_open(tmp_path: Path, name: str) -> None:
    dataset = many_shards(tmp_path / "x", name, 150)
    before = len(os.listdir("/dev/fd"))
    unmapped = dataset.unmapped()
    for _ in range(2):
        assert [int(sample["x"][0]) for sample in unmapped] == list(range(150))
    assert len(os.listdir("/dev/fd")) == before + 128
    unmapped.close()
    assert len(os.listdir("/dev/fd")) == before


def test_an_unmapped_dataset_shares_nothing_and_stays_unmapped(tmp_path: Path) -> None:
    dataset = many_shards(tmp_path / "x", "arrow", 3)
    assert dataset[0]["__key__"] == "0"
    unmapped = dataset.unmapped()
    kinds = {type(d.reader(0)) for d in (unmapped, unmapped.part([0]), unmapped.unmapped())}
    copied = pickle.loads(pickle.dumps(unmapped))
    assert kinds == {type(copied.reader(0))} != {type(dataset.reader(0))}
    assert [s["__key__"] for s in copied] == [s["__key__"] for s in dataset] == ["0", "1", "2"]
    dataset.close()
    assert unmapped[2]["__key__"] == "2"


def test_a_shard_that_was_replaced_before_it_is_opened_is_noticed(tmp_path: Path) -> None:
    dataset = many_shards(tmp_path / "x", "wds", 3).unmapped()
    assert dataset[0]["__key__"] == "0"
    path = dataset.shard_path(1)
    path.write_bytes(path.read_bytes()[:-512])
    with pytest.raises(DamagedError, match="not as long as its manifest says"):
        dataset[1]


def test_a_format_without_the_ability_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = many_shards(tmp_path / "x", "wds", 2)
    wds = get_format("wds")
    monkeypatch.setattr(dataset, "_format", SimpleNamespace(open=wds.open))
    assert dataset.unmapped()[1]["__key__"] == "1"
