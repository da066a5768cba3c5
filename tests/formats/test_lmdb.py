"""Our LMDBs: the contract, what the LMDB library makes of them, and damage."""

from __future__ import annotations

from pathlib import Path

import lmdb
import msgpack
import numpy as np
import pytest

import shardkit
from shardkit.errors import DamagedError, FormatError
from shardkit.formats import get_format
from shardkit.formats.base import ShardSpec
from shardkit.formats.lmdb import reader as lmdb_reader
from shardkit.formats.lmdb.layout import PAGE, Tree
from shardkit.schema import Bytes, Schema
from shardkit.testing import EVERYTHING, FormatContract, everything, write_shard
from tests.conftest import files_of

LMDB = get_format("lmdb")


def entries(path: Path) -> dict[bytes, bytes]:
    """All entries of an environment, by the LMDB library."""
    with (
        lmdb.open(str(path.parent), readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        return dict(transaction.cursor())


class TestLmdb(FormatContract):
    tested = get_format("lmdb")
    provides = frozenset({"join", "spans"})
    least_bytes = 6 * PAGE

    def independent_keys(self, path: Path) -> list[str]:
        found = entries(path)
        del found[b"__shardkit__"]
        assert list(found) == [b"%012d" % n for n in range(len(found))]
        return [msgpack.unpackb(value)["__key__"] for value in found.values()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "one.lmdb/data.mdb"
    write_shard(LMDB, place, EVERYTHING, [everything(n) for n in range(50)])
    return place


def test_the_library_and_msgpack_read_the_values(path: Path) -> None:
    found = entries(path)
    assert len(found) == 51
    for number in range(50):
        stored, expected = msgpack.unpackb(found[b"%012d" % number]), everything(number)
        assert list(stored) == list(expected)
        for name in ("__key__", "image", "label", "score", "good", "text", "blob"):
            assert stored[name] == expected[name]
        assert stored["about"] == shardkit.sample.JsonText.of(expected["about"])


def tree_of(path: Path, values: list[bytes]) -> None:
    """An LMDB of these values, compared with what the library says of it."""
    samples = [{"__key__": f"{n}", "x": value} for n, value in enumerate(values)]
    reader = write_shard(LMDB, path, Schema({"x": Bytes()}), samples)
    assert [reader[n]["x"] for n in range(len(values))] == values
    reader.close()
    with lmdb.open(str(path.parent), readonly=True, lock=False) as environment:
        stat, info = environment.stat(), environment.info()
        assert stat["entries"] == len(values) + 1
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        assert info["last_pgno"] == pages + 1  # two meta pages, and none that is free
        assert path.stat().st_size == (pages + 2) * PAGE
        with environment.begin() as transaction:
            for number, value in enumerate(values):
                stored = transaction.get(b"%012d" % number)
                assert msgpack.unpackb(stored)["x"] == value
            assert transaction.get(b"000000000000x") is None


@pytest.mark.parametrize("count", [1, 2, 29, 30, 31, 5_000, 30_000])
def test_trees_of_any_height_are_those_of_the_library(tmp_path: Path, count: int) -> None:
    tree_of(tmp_path / "t.lmdb/data.mdb", [b"%d" % n * (n % 30) for n in range(count)])


def test_values_around_every_limit_of_a_page(tmp_path: Path) -> None:
    sizes = [*range(1960, 2040), *range(4030, 4090), *range(8120, 8190), 65_535, 65_536, 10**6]
    tree_of(tmp_path / "t.lmdb/data.mdb", [bytes([n % 256]) * n for n in sizes])


def test_the_library_copies_and_changes_our_files(path: Path, tmp_path: Path) -> None:
    before = entries(path)
    (tmp_path / "copy").mkdir()
    with lmdb.open(str(path.parent), map_size=1 << 26) as environment:
        environment.copy(str(tmp_path / "copy"), compact=True)
        with environment.begin(write=True) as transaction:
            for number in range(0, 50, 2):
                assert transaction.delete(b"%012d" % number)
            for number in range(200):
                assert transaction.put(b"new%d" % number, bytes(number * 50))
    assert entries(tmp_path / "copy/data.mdb") == before
    after = entries(path)
    assert len(after) == 51 - 25 + 200
    assert all(after[key] == value for key, value in before.items() if key in after)


def test_a_joined_file_has_the_bytes_of_one_that_was_written_whole(tmp_path: Path) -> None:
    samples = [everything(n) for n in range(40)]
    parts = []
    for number, start in enumerate(range(0, 40, 15)):
        parts.append(tmp_path / f"{number}.lmdb/data.mdb")
        write_shard(LMDB, parts[-1], EVERYTHING, samples[start : start + 15])
    joined, whole = tmp_path / "joined.lmdb/data.mdb", tmp_path / "whole.lmdb/data.mdb"
    LMDB.join(joined, parts, ShardSpec(EVERYTHING))  # type: ignore[attr-defined]
    write_shard(LMDB, whole, EVERYTHING, samples)
    assert joined.read_bytes() == whole.read_bytes()


def test_a_dataset_is_one_environment_that_opens_by_any_of_its_names(tmp_path: Path) -> None:
    inside = "out/shard-000000.lmdb/data.mdb"
    for out, files in {
        "out": {"out/__shardkit__/manifest.json", inside},
        "train.lmdb": {"__shardkit__/train.lmdb.manifest.json", "train.lmdb/data.mdb"},
    }.items():
        before = set(files_of(tmp_path))
        with shardkit.create(tmp_path / out, "lmdb", EVERYTHING) as writer:
            for number in range(5):
                writer.write(everything(number))
        assert set(files_of(tmp_path)) - before == files
    for name in ("out", "out/shard-000000.lmdb", inside, "train.lmdb"):
        with shardkit.open(tmp_path / name) as dataset:
            assert dataset[3]["text"] == everything(3)["text"]


@pytest.mark.parametrize("memory", [200, 200_000])
def test_large_shards_are_read_with_little_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    """Leaves are found from an index of leaves, or of the branches above them."""
    monkeypatch.setattr(lmdb_reader, "IN_MEMORY", memory)
    values = [b"%d" % n * (n % 9) if n % 500 else bytes([n % 7]) * 9000 for n in range(12_000)]
    samples = [{"__key__": f"k{n}", "x": value} for n, value in enumerate(values)]
    reader = write_shard(LMDB, tmp_path / "t.lmdb/data.mdb", Schema({"x": Bytes()}), samples)
    for number in np.random.default_rng(1).permutation(len(values))[:1500].tolist():
        assert reader[number] == samples[number]
    assert reader.keys() == [sample["__key__"] for sample in samples]
    assert 0 < reader.in_memory <= 2 * memory


@pytest.mark.parametrize("memory", [200, 1 << 20])
def test_samples_that_the_library_adds_are_read(
    path: Path, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    monkeypatch.setattr(lmdb_reader, "IN_MEMORY", memory)
    schema = Schema({"x": Bytes()})
    path.unlink()
    write_shard(LMDB, path, schema, [{"__key__": f"{n}", "x": b"%d" % n} for n in range(50)])
    numbers = np.random.default_rng(2).permutation(np.arange(50, 4000)).tolist()
    with lmdb.open(str(path.parent), map_size=1 << 26) as environment:
        for some in np.array_split(numbers, 9):
            with environment.begin(write=True) as transaction:
                for n in some.tolist():
                    value = msgpack.packb({"__key__": f"{n}", "x": b"%d" % n * (n % 50)})
                    transaction.put(b"%012d" % n, value)
                transaction.put(b"num-samples", b"4000")
    reader = LMDB.open(path)
    assert reader.layout["ignored"] == {"entry 'num-samples'": 1}
    assert [reader[n]["x"] for n in range(50, 4000)] == [
        b"%d" % n * (n % 50) for n in range(50, 4000)
    ]
    assert reader.keys() == [f"{n}" for n in range(4000)]


def test_a_cut_file_is_named_before_it_is_touched(path: Path) -> None:
    data = path.read_bytes()
    for size in (0, 100, PAGE, 2 * PAGE, 3 * PAGE, len(data) - PAGE, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises((DamagedError, FormatError)) as error:
            LMDB.open(path, LMDB.layout(EVERYTHING))
        assert error.value.where["path"] == path


def test_another_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with lmdb.open(str(tmp_path / "x")) as environment, environment.begin(write=True) as txn:
        txn.put(b"__shardkit__", b'{"shardkit_lmdb": 7, "samples": 0}')
    with pytest.raises(FormatError, match="another version") as error:
        shardkit.open(tmp_path / "x")
    assert error.value.found == "version 7"


def test_pages_that_lead_in_a_circle_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "t.lmdb/data.mdb"
    write_shard(
        LMDB, path, Schema({"x": Bytes()}), [{"__key__": f"{n}", "x": b""} for n in range(5000)]
    )
    root = Tree(path).main.root
    data = bytearray(path.read_bytes())
    at = root * PAGE
    for node in range(3):  # children that are their own parent
        pointer = int.from_bytes(data[at + 16 + 2 * node : at + 18 + 2 * node], "little")
        data[at + pointer : at + pointer + 4] = root.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="form a cycle"):
        LMDB.open(path, LMDB.layout(Schema({"x": Bytes()})))[0]


def test_pointers_to_one_long_key_are_refused_before_it_is_copied_for_each(path: Path) -> None:
    schema = Schema({"blob": Bytes()})
    samples = [{"__key__": f"{n}", "blob": bytes(9)} for n in range(12)]
    write_shard(LMDB, path, schema, samples).close()
    data = bytearray(path.read_bytes())
    leaf = next(at for at in range(2 * 4096, len(data), 4096) if data[at + 10] == 2)
    lower = int.from_bytes(data[leaf + 12 : leaf + 14], "little")
    first = int.from_bytes(data[leaf + 16 : leaf + 18], "little")
    assert first < 4096
    for at in range(leaf + 16, leaf + lower, 2):  # one node for all entries, with a key of 2,000
        data[at : at + 2] = (1024).to_bytes(2, "little")
    data[leaf + 1024 : leaf + 1032] = bytes(6) + (2000).to_bytes(2, "little")
    path.write_bytes(data)
    tree = Tree(path)
    with pytest.raises(DamagedError, match="the nodes of a page overlap"):
        tree.entries(next(iter(tree.leaves())))
