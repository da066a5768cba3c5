"""Our Parquet files: the contract, and what pyarrow, pandas and datasets make of them.

What they share with Arrow files (columns, bounds, datasets) is in test_arrow.py.
"""

import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import pandas
import pyarrow
import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit.errors import DamagedError, FormatError
from shardkit.formats import get_format
from shardkit.formats.arrow import parquet
from shardkit.formats.arrow import reader as readers
from shardkit.schema import Image, Int, Schema
from shardkit.testing import EVERYTHING, FormatContract, everything, make_image, write_shard
from tests.formats.refusals import refused

PARQUET = get_format("parquet")


class TestParquet(FormatContract):
    tested = get_format("parquet")
    provides = frozenset({"join", "plan", "spans"})

    def independent_keys(self, path):
        return list(pandas.read_parquet(path, columns=["__key__"])["__key__"])


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "shard-000000.parquet"
    write_shard(PARQUET, path, EVERYTHING, [everything(n) for n in range(7)])
    return path


def test_images_and_bytes_are_not_compressed_and_the_rest_is(shard):
    with pq.ParquetFile(shard) as file:
        columns = map(file.metadata.row_group(0).column, range(file.metadata.num_columns))
        found = {column.path_in_schema: column.compression for column in columns}
    plain = {name for name, codec in found.items() if codec == "UNCOMPRESSED"}
    assert plain == {"image.bytes", "image.path", "blob"}
    assert set(found.values()) == {"UNCOMPRESSED", "ZSTD"}


def test_row_groups_are_what_is_read_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_DECODED", 0)
    kept = readers.Decoded()
    monkeypatch.setattr("shardkit.formats.arrow.reader.DECODED", kept)
    schema = Schema({"image": Image(), "label": Int()})
    samples = [{"__key__": str(n), "image": make_image(n), "label": n} for n in range(250)]
    reader = write_shard(PARQUET, tmp_path / "s.parquet", schema, samples)
    assert reader.sizes("label") is None
    with pq.ParquetFile(tmp_path / "s.parquet") as file:
        assert file.metadata.num_row_groups == 3
    for n in reversed(range(250)):
        assert reader[n] == samples[n]
        assert len(kept._batches) == 1
    reader.close()
    assert not kept._batches


def test_each_thread_has_a_file_of_its_own(shard):
    """That of pyarrow is not for several threads."""
    reader, together = PARQUET.open(shard), threading.Barrier(3)

    def own(_):
        together.wait(60)
        return reader._file()

    with ThreadPoolExecutor(3) as threads:
        assert len({reader._file(), *threads.map(own, range(3))}) == 4


def test_some_fields_leave_the_other_columns_unread(shard, monkeypatch):
    reader = PARQUET.open(shard)
    asked = []
    load = reader._load
    monkeypatch.setattr(reader, "_load", lambda n, names: asked.append([*names]) or load(n, names))
    assert reader.sample(2, {"label"})["label"] == 0
    assert asked == [["__key__", "label"]]


def test_a_changed_byte_in_an_image_is_noticed_each_time(shard):
    """Each row of its batch raises what the first has found: with no more traceback than that."""
    data = bytearray(shard.read_bytes())
    data[data.index(everything(3)["image"]) + 300] ^= 1
    shard.write_bytes(data)
    reader = PARQUET.open(shard, PARQUET.layout(EVERYTHING))
    depths = []
    for _ in range(9):
        with refused(DamagedError, "batch is damaged", path=shard) as error:
            reader[3]
        cause = error.value.__cause__
        depths.append(len([*traceback.walk_tb(cause.__traceback__)]))
    assert len(set(depths[1:])) == 1


def test_a_negative_number_of_rows_is_damage(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pyarrow.table({"text": ["a"] * 50}), path)
    data = bytearray(path.read_bytes())
    # The last number 50 is that of the row group's rows; zigzag makes 100 of it, and 99 of -50.
    data[data.rindex(b"\x16\x64") + 1] = 99
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="a row group of -50 rows"):
        shardkit.open(path)


def test_a_pyarrow_that_cannot_read_missing_arrays_is_named(shard, monkeypatch):
    def old(*_, **__):
        raise pyarrow.ArrowInvalid("Expected all lists to be of size=2 but index 3 had size=0")

    reader = PARQUET.open(shard, PARQUET.layout(EVERYTHING))
    monkeypatch.setattr(parquet, "READS_GAPS", False)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", old)
    with refused(FormatError, "cannot read missing lists", says="pyarrow>=26"):
        reader[3]


@pytest.mark.parametrize("name", ["x.bytes", "x.path", "x.y"])
def test_a_column_with_a_dot_in_its_name_is_not_part_of_another(tmp_path, name):
    image = make_image()
    images = pyarrow.array([{"bytes": image, "path": None}] * 3)
    for own in (images, pyarrow.array([1, 2, 3])):
        table = pyarrow.table({"x": own, name: pyarrow.array([b"1", None, b"3"])})
        pq.write_table(table, tmp_path / "a.parquet")
        dataset = shardkit.open(tmp_path / "a.parquet")
        assert {n: kind.optional for n, kind in dataset.schema.items()} == {"x": False, name: True}
        expected = [image] * 3 if own is images else [1, 2, 3]
        assert [sample["x"] for sample in dataset] == expected
        assert [sample.get(name) for sample in dataset] == [b"1", None, b"3"]
