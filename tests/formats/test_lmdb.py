"""Our LMDBs: the contract, what the LMDB library makes of them, and damage."""

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
from tests.formats.refusals import refused

LMDB = get_format("lmdb")


def entries(path):
    """All entries of an environment, by the LMDB library."""
    with (
        lmdb.open(str(path.parent), readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        return dict(transaction.cursor())


class TestLmdb(FormatContract):
    tested = get_format("lmdb")
    provides = frozenset({"join", "plan", "spans"})
    least_bytes = 6 * PAGE

    def independent_keys(self, path):
        found = entries(path)
        del found[b"__shardkit__"]
        assert list(found) == [b"%012d" % n for n in range(len(found))]
        return [msgpack.unpackb(value)["__key__"] for value in found.values()]


def of_values(path, values):
    """A reader of an LMDB of these values."""
    path.unlink(missing_ok=True)
    samples = [{"__key__": f"{n}", "x": value} for n, value in enumerate(values)]
    return write_shard(LMDB, path, Schema({"x": Bytes()}), samples)


@pytest.fixture
def path(tmp_path):
    place = tmp_path / "one.lmdb/data.mdb"
    write_shard(LMDB, place, EVERYTHING, [everything(n) for n in range(50)])
    return place


def test_the_library_and_msgpack_read_the_values(path):
    found = entries(path)
    assert len(found) == 51
    for number in range(50):
        stored, expected = msgpack.unpackb(found[b"%012d" % number]), everything(number)
        assert list(stored) == list(expected)
        for name in ("__key__", "image", "label", "score", "good", "text", "blob"):
            assert stored[name] == expected[name]
        assert stored["about"] == shardkit.sample.JsonText.of(expected["about"])


AROUND_LIMITS = [*range(1960, 2040), *range(4030, 4090), *range(8120, 8190), 65_535, 65_536, 10**6]


@pytest.mark.parametrize("count", [1, 2, 29, 30, 31, 5_000, 30_000, "values around limits"])
def test_trees_of_any_height_are_those_of_the_library(path, count):
    if isinstance(count, int):
        values = [b"%d" % n * (n % 30) for n in range(count)]
    else:
        values = [bytes([size % 256]) * size for size in AROUND_LIMITS]
    reader = of_values(path, values)
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
                assert msgpack.unpackb(transaction.get(b"%012d" % number))["x"] == value
            assert transaction.get(b"000000000000x") is None


def test_a_joined_file_has_the_bytes_of_one_that_was_written_whole(tmp_path):
    samples = [everything(n) for n in range(40)]
    parts = []
    for number, start in enumerate(range(0, 40, 15)):
        parts.append(tmp_path / f"{number}.lmdb/data.mdb")
        write_shard(LMDB, parts[-1], EVERYTHING, samples[start : start + 15])
    joined, whole = tmp_path / "joined.lmdb/data.mdb", tmp_path / "whole.lmdb/data.mdb"
    LMDB.join(joined, parts, ShardSpec(EVERYTHING))
    write_shard(LMDB, whole, EVERYTHING, samples)
    assert joined.read_bytes() == whole.read_bytes()


def test_a_dataset_is_one_environment_that_opens_by_any_of_its_names(tmp_path):
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
def test_large_shards_are_read_with_little_in_memory(path, monkeypatch, memory):
    """Leaves are found from an index of leaves, or of the branches above them."""
    monkeypatch.setattr(lmdb_reader, "IN_MEMORY", memory)
    values = [b"%d" % n * (n % 9) if n % 500 else bytes([n % 7]) * 9000 for n in range(12_000)]
    reader = of_values(path, values)
    for number in np.random.default_rng(1).permutation(len(values))[:1500].tolist():
        assert reader[number] == {"__key__": f"{number}", "x": values[number]}
    assert reader.keys() == [f"{number}" for number in range(12_000)]
    assert 0 < reader.in_memory <= 2 * memory


@pytest.mark.parametrize("memory", [200, 1 << 20])
def test_samples_that_the_library_adds_are_read(path, monkeypatch, memory):
    monkeypatch.setattr(lmdb_reader, "IN_MEMORY", memory)
    of_values(path, [b"%d" % n for n in range(50)]).close()
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
    expected = [b"%d" % n * (n % 50) for n in range(50, 4000)]
    assert [reader[n]["x"] for n in range(50, 4000)] == expected
    assert reader.keys() == [f"{n}" for n in range(4000)]


def test_the_library_copies_and_changes_our_files(path, tmp_path):
    """It moves all pages, and takes entries out of them."""
    before, left = entries(path), {b"%012d" % n for n in range(0, 50, 2)}
    (tmp_path / "copy").mkdir()
    with lmdb.open(str(path.parent), map_size=1 << 26) as environment:
        environment.copy(str(tmp_path / "copy"), compact=True)
        with environment.begin(write=True) as transaction:
            assert all(map(transaction.delete, left))
            more = {b"new%d" % number: bytes(number * 50) for number in range(200)}
            assert all(transaction.put(*entry) for entry in more.items())
    assert entries(tmp_path / "copy/data.mdb") == before
    assert entries(path) == {k: v for k, v in before.items() if k not in left} | more


def test_another_version_is_named(tmp_path):
    (tmp_path / "x").mkdir()
    with lmdb.open(str(tmp_path / "x")) as environment, environment.begin(write=True) as txn:
        txn.put(b"__shardkit__", b'{"shardkit_lmdb": 7, "samples": 0}')
    with refused(FormatError, "another version", found="version 7"):
        shardkit.open(tmp_path / "x")


def test_pages_that_lead_in_a_circle_are_noticed(path):
    layout = of_values(path, [b""] * 5000).layout
    root = Tree(path).main.root
    data = bytearray(path.read_bytes())
    at = root * PAGE
    for node in range(3):  # children that are their own parent
        pointer = int.from_bytes(data[at + 16 + 2 * node : at + 18 + 2 * node], "little")
        data[at + pointer : at + pointer + 4] = root.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="form a cycle"):
        LMDB.open(path, layout)[0]


def test_pointers_to_one_long_key_are_refused_before_it_is_copied_for_each(path):
    of_values(path, [bytes(9)] * 12).close()
    data = bytearray(path.read_bytes())
    leaf = next(at for at in range(2 * PAGE, len(data), PAGE) if data[at + 10] == 2)
    lower = int.from_bytes(data[leaf + 12 : leaf + 14], "little")
    for at in range(leaf + 16, leaf + lower, 2):  # one node for all entries, with a key of 2,000
        data[at : at + 2] = (1024).to_bytes(2, "little")
    data[leaf + 1024 : leaf + 1032] = bytes(6) + (2000).to_bytes(2, "little")
    path.write_bytes(data)
    tree = Tree(path)
    with pytest.raises(DamagedError, match="the nodes of a page overlap"):
        list(tree.all_entries())
