"""Our Arrow files: the contract, and what pyarrow, pandas and datasets make of them."""

import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

import shardkit
from shardkit.errors import FormatError, SampleError
from shardkit.formats import get_format
from shardkit.formats.arrow import writer
from shardkit.formats.arrow.parquet import READS_GAPS
from shardkit.formats.base import ShardSpec
from shardkit.formats.testing_samples import (
    assert_reads,
    assert_same,
    everything,
    make_image,
    read_at_once,
    write_shard,
)
from shardkit.sample import JsonText
from shardkit.schema import Array, Bool, Bytes, Float, Image, Int, Json, Schema, Text
from shardkit.testing import EVERYTHING, OPTIONAL, FormatContract
from tests.conftest import few
from tests.formats.refusals import refused

ARROW = get_format("arrow")


BIG = bytes(5 << 20)


def table_of(path):
    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
        return file.read_all()


class TestArrow(FormatContract):
    tested = get_format("arrow")
    provides = OPTIONAL

    def independent_keys(self, path):
        return list(table_of(path).column("__key__").to_pylist())


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "shard-000000.arrow"
    write_shard(ARROW, path, EVERYTHING, [everything(n) for n in range(7)])
    return path


AS_BYTES = [Array(), *(Array("<f4", shape) for shape in (None, (3, None), (0,), ()))]
AS_BYTES += [Array(dtype, (3,)) for dtype in (">i4", "<c8")]


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        (Image(), pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        (Int(), pa.int64()),
        (Float(), pa.float64()),
        (Bool(), pa.bool_()),
        (Text(), pa.string()),
        (Bytes(), pa.binary()),
        (Json(), pa.string()),
        (Array("<f4", (None,)), pa.list_(pa.float32())),
        (Array("<f4", (3,)), pa.list_(pa.float32(), 3)),
        (Array("|b1", (3,)), pa.list_(pa.uint8(), 3)),
        (Array("|u1", (None, 4, 5)), pa.list_(pa.list_(pa.list_(pa.uint8(), 5), 4))),
        (Array("<f2", (2, 2)), pa.list_(pa.list_(pa.float16(), 2), 2)),
        *((kind, pa.binary()) for kind in AS_BYTES),
    ],
    ids=str,
)
def test_each_type_has_its_column(tmp_path, kind, stored):
    path = tmp_path / "shard-000000.arrow"
    write_shard(ARROW, path, Schema({"x": kind}), [])
    assert table_of(path).schema.field("x").type == stored


ALONE = """
import math, os, sys
import shardkit
from shardkit import Bool, Float, Int

schema = {"whole": Int(optional=True), "real": Float(optional=True), "truth": Bool(optional=True)}
rows = [{"whole": -(2**63), "real": -0.0, "truth": True}, {}, {"real": math.nan, "truth": False}]
with shardkit.create(sys.argv[1], "arrow", schema) as writer:
    for row in rows:
        writer.write(row)
print([{k: v for k, v in s.items() if k != "__key__"} for s in shardkit.open(sys.argv[1])])
print("pandas" in sys.modules)

def threads():
    return len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 0

before = threads()
for path in sys.argv[2:]:
    with shardkit.open(path) as dataset:
        dataset[len(dataset) - 1]
print(threads() - before)
"""


def test_numbers_need_no_pandas_and_reading_no_threads(shard, tmp_path):
    """The import takes half a second of each process; one that exits while pyarrow starts threads
    may be aborted."""
    table = table_of(shard)
    categories = table.append_column("c", pa.array(["a"] * len(table)).dictionary_encode())
    with pa.ipc.new_file(tmp_path / "c.arrow", categories.schema) as file:
        file.write(categories)
    command = [sys.executable, "-c", ALONE, tmp_path / "out", shard, tmp_path / "c.arrow"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    whole = "{'whole': -9223372036854775808, 'real': -0.0, 'truth': True}"
    assert done.stdout == f"[{whole}, {{}}, {{'real': nan, 'truth': False}}]\nFalse\n0\n"


@pytest.mark.parametrize(
    ("kind", "value", "rows"),
    [(Int(), 1, 1000), (Image(), make_image(), 100), (Bytes(), bytes(9), 100), (Bytes(), BIG, 4)],
)
def test_batches_are_small_where_samples_are_large(tmp_path, kind, value, rows):
    samples = [{"__key__": str(n), "x": value} for n in range(rows + 1)]
    write_shard(ARROW, tmp_path / "s.arrow", Schema({"x": kind}), samples)
    assert [batch.num_rows for batch in table_of(tmp_path / "s.arrow").to_batches()] == [rows, 1]


def test_many_batches_read_at_random(tmp_path):
    schema = Schema({"n": Int(), "text": Text(optional=True), "a": Array("<i4", (None, 2))})
    samples = [{"__key__": f"{n}", "n": n} for n in range(2500)]
    for n, sample in enumerate(samples):
        if n % 5 == 0:
            sample["text"] = "x" * (n % 7)
        sample["a"] = np.broadcast_to(np.int32(n), (2, n % 4)).T  # views: transposed, read-only
    reader = write_shard(ARROW, tmp_path / "s.arrow", schema, samples)
    for n in np.random.default_rng(0).permutation(2500).tolist():
        assert_same(reader[n], samples[n])
    assert reader.sizes("a").tolist() == [sample["a"].nbytes for sample in samples]
    assert len(reader.sizes("text")) == 500
    assert reader.keys() == [str(n) for n in range(2500)]
    assert len(pickle.dumps(reader)) < 1000


@pytest.mark.parametrize("name", few(["arrow", "parquet", "hf"], "arrow"))
@pytest.mark.parametrize("size", [10, 3000])
def test_a_bounded_shard_is_full_but_not_over(tmp_path, name, size):
    format, path, rng = get_format(name), tmp_path / "shard", np.random.default_rng(1)
    kinds = {"image": Image(), "x": Array("|u1", (None,)), "n": Int(optional=True)}
    schema = Schema({**kinds, "text": Text(), "any": Array()})

    def sample(number):
        return {
            "__key__": str(number),
            "image": make_image(number) + rng.bytes(size),
            "x": np.frombuffer(rng.bytes(size), "|u1"),
            **({"n": number} if number % 2 else {}),
            "text": rng.bytes(size).hex(),
            "any": np.frombuffer(rng.bytes(size), "|u1"),
        }

    made, taken = format.create(path, ShardSpec(schema, max_bytes=2_000_000)), 0
    while made.write(sample(taken)):
        taken += 1
    made.close()
    # Until a batch is written, it is counted with what its encoding may take at most.
    assert 900_000 < path.stat().st_size <= 2_000_000
    assert len(format.open(path, format.layout(schema))) == taken


def test_a_value_that_no_column_can_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_LARGEST", 1000)  # 2 GiB in truth
    path, schema = tmp_path / "s.arrow", Schema({"x": Bytes(), "text": Text()})
    made = ARROW.create(path, ShardSpec(schema))
    assert made.write({"__key__": "a", "x": bytes(900), "text": ""})
    with refused(SampleError, "larger than a column", where={"key": "b", "field": "x"}):
        made.write({"__key__": "b", "x": bytes(1001), "text": ""})
    with refused(SampleError, "cannot be stored", where={"key": "b", "field": "text"}):
        made.write({"__key__": "b", "x": b"", "text": "\ud800"})
    with pytest.raises(SampleError, match="key is not valid Unicode"):
        made.write({"__key__": "\ud800", "x": b"", "text": ""})
    assert made.write({"__key__": "c", "x": bytes(900), "text": ""})  # begins a batch
    made.close()
    assert [batch.num_rows for batch in table_of(path).to_batches()] == [1, 1]


def test_metadata_names_schema_and_classes(tmp_path):
    path = tmp_path / "s.arrow"
    classes = {"label": ["a", "b\udce4"]}  # a folder's name that is not Unicode
    ARROW.create(path, ShardSpec(EVERYTHING, classes=classes)).close()
    reader = ARROW.open(path)
    assert (reader.schema, reader.layout["classes"]) == (EVERYTHING, classes)
    features = json.loads(table_of(path).schema.metadata[b"huggingface"])["info"]["features"]
    assert features["label"] == {"names": classes["label"], "_type": "ClassLabel"}
    assert list(features) == ["__key__", *EVERYTHING]


def test_columns_count_whatever_metadata_and_layout_say(shard, tmp_path):
    """pyarrow keeps our metadata when a column goes."""
    changed = table_of(shard).drop_columns(["about", "label"])
    with pa.ipc.new_file(tmp_path / "t.arrow", changed.schema) as made:
        made.write_table(changed)
    expected = {n: v for n, v in everything(3).items() if n not in ("about", "label")}
    assert_same(ARROW.open(tmp_path / "t.arrow")[3], expected)
    where = {"path": shard, "field": "other"}
    with refused(FormatError, "no column that can hold a field", where=where):
        ARROW.open(shard, ARROW.layout(Schema({"other": Int()})))
    with pytest.raises(FormatError, match="no column that can hold a field"):
        ARROW.open(shard, ARROW.layout(Schema({"label": Text()})))


@pytest.mark.parametrize("name", ["arrow", "hf", "parquet"] if READS_GAPS else ["arrow", "hf"])
def test_optional_arrays_and_json_may_be_absent(tmp_path, name):
    """And JSON's null is none of those, and is kept as it was written."""
    whole = {"list": np.ones((3, 2), "<i4"), "fixed": np.ones((2, 3), "<f4"), "any": np.array("x")}
    kinds = {"list": Array("<i4", (None, 2)), "fixed": Array("<f4", (2, 3)), "any": Array()}
    kinds["about"] = Json()
    schema = Schema({field: replace(kind, optional=True) for field, kind in kinds.items()})
    texts = {"a": "null", "b": None, "c": " [1.0]\n", "d": '{"a":1e5}'}
    samples = [{"__key__": "a", **whole}, {"__key__": "b"}, {"__key__": "c", **whole}]
    samples.append({"__key__": "d", "fixed": whole["fixed"]})
    for sample in samples:
        if text := texts[sample["__key__"]]:
            sample["about"] = JsonText(text)
    reader = write_shard(get_format(name), tmp_path / name, schema, samples)
    found = [reader.sample(n, json_text=True).get("about") for n in range(4)]
    assert found == [*texts.values()]
    for sample, about in zip(samples, [None, ..., [1.0], {"a": 1e5}], strict=True):
        if about is not ...:
            sample["about"] = about
    assert_reads(reader, samples)


def test_what_is_in_memory_is_bounded_however_large_a_batch_is(tmp_path):
    """As Polars writes it: all rows in one batch, of which pages of rows are read."""
    rows, path = 30_000, tmp_path / "large.arrow"
    keys = [f"{n:06d}" for n in range(rows)]
    gaps = [n if n % 3 else None for n in range(rows)]
    pairs = pa.array([[n, n + 1] for n in range(rows)], pa.list_(pa.int32()))
    table = pa.table({"__key__": keys, "n": range(rows), "gaps": pa.array(gaps), "x": pairs})
    with pa.ipc.new_file(path, table.schema) as made:
        made.write_table(table)
    reader = ARROW.open(path)
    for n in (0, 1023, 1024, 29_999, 15_001):
        sample = reader[n]
        assert (sample["__key__"], sample["n"], sample.get("gaps")) == (keys[n], n, gaps[n])
        assert sample["x"].tolist() == [n, n + 1]
    assert 0 < reader.in_memory < 500_000  # four pages
    found = read_at_once(reader, [7, 29_999, 2048], ["x"])
    assert [one["x"].tolist() for one in found] == [[7, 8], [29_999, 30_000], [2048, 2049]]
    assert reader.keys() == keys


@pytest.mark.parametrize("name", ["arrow", "hf", "parquet"])
def test_rows_of_several_batches_are_read_at_once(tmp_path, monkeypatch, name):
    """With values of different lengths, and some that are absent from whole batches."""
    kinds = {"image": Image(optional=True), "label": Int(optional=True), "good": Bool()}
    schema = Schema({**kinds, "tokens": Array("<u2", (None,)), "about": Json(), "text": Text()})
    monkeypatch.setattr(writer, "_LARGE_ROWS", 10)
    samples = []
    for n in range(45):
        sample = {"__key__": f"{n}", "good": n % 3 == 0, "about": [n], "text": n * "x"}
        if n not in range(8, 23):
            sample |= {"image": make_image(n), "label": n}
        samples.append({**sample, "tokens": np.arange(n % 5, dtype="<u2")})
    reader = write_shard(get_format(name), tmp_path / name, schema, samples)
    for seed in range(4):
        positions = np.random.default_rng(seed).integers(0, 45, 1 + 20 * seed).tolist()
        found = read_at_once(reader, positions, [*schema])
        for sample, position in zip(found, positions, strict=True):
            assert_same(sample, reader.read(position))


def test_many_rows_are_read_one_by_one(tmp_path, monkeypatch):
    """What would be kept of them takes too much memory."""
    samples = [{"__key__": f"{n}", "n": n} for n in range(5)]
    reader = write_shard(ARROW, tmp_path / "s.arrow", Schema({"n": Int()}), samples)
    monkeypatch.setattr("shardkit.formats.arrow.reader._IN_MEMORY", 25 * len(samples))
    assert reader.plan(np.array([3, 0]), ["n"]) == {"__key__": ["3", "0"], "n": [3, 0]}
    monkeypatch.setattr("shardkit.formats.arrow.reader._IN_MEMORY", 26 * len(samples))
    assert not isinstance(reader.plan(np.array([0]), ["n"]), dict)


def test_pages_in_memory_are_forgotten_where_they_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr("shardkit.formats.arrow.reader._IN_MEMORY", 100_000)
    samples = [{"__key__": str(n), "n": n} for n in range(20_000)]
    reader = write_shard(ARROW, tmp_path / "s.arrow", Schema({"n": Int()}), samples)
    for n in np.random.default_rng(0).permutation(20_000)[:500].tolist():
        assert reader[n] == samples[n]
        assert reader.in_memory <= 100_000 + 50_000  # and the page that is added
    monkeypatch.setattr("shardkit.formats.arrow.reader._ALL_IN_MEMORY", 50_000)
    other = ARROW.open(tmp_path / "s.arrow", reader.layout)
    for n in range(0, 20_000, 100):
        assert other[n] == samples[n]
        assert reader.in_memory + other.in_memory <= 150_000 + 50_000
    reader.close()
    assert reader.in_memory == 0


def test_threads_that_forget_pages_at_once_leave_the_sum_of_all_right(tmp_path, monkeypatch):
    for limit in ("_IN_MEMORY", "_ALL_IN_MEMORY"):
        monkeypatch.setattr(f"shardkit.formats.arrow.reader.{limit}", 100_000)
    monkeypatch.setattr("shardkit.formats.arrow.reader.BatchReader._sizes", {})  # of other tests
    samples = [{"__key__": str(n), "n": n} for n in range(20_000)]
    readers = [write_shard(ARROW, tmp_path / "s.arrow", Schema({"n": Int()}), samples)]
    readers.append(ARROW.open(tmp_path / "s.arrow", readers[0].layout))

    def read(thread):
        for n in np.random.default_rng(thread).permutation(20_000)[:50].tolist():
            assert readers[n % 2][n] == samples[n]

    with ThreadPoolExecutor(8) as threads:
        [*threads.map(read, range(8))]
    for reader in readers:
        reader.close()
    reader = ARROW.open(tmp_path / "s.arrow", readers[0].layout)
    assert reader[0] == samples[0]
    assert reader.in_memory == sum(reader._sizes.values()) > 0


@pytest.mark.parametrize("name", ["arrow", "hf", "lance", "parquet"])
def test_missing_arrays_of_a_fixed_shape_count_as_what_they_take(tmp_path, name, monkeypatch):
    """A list of fixed size that is missing takes as much space as another, at least in memory."""
    largest = 0
    build = writer.BatchWriter._write_batch

    def counted(self):
        nonlocal largest
        largest = max(largest, len(self._rows))
        build(self)

    monkeypatch.setattr(writer.BatchWriter, "_write_batch", counted)
    schema = {"x": Array("<f4", (250, 1000), optional=True), "n": Int()}  # a million bytes
    with shardkit.create(tmp_path / "d", to=name, schema=schema, shard_size="4MB") as out:
        for number in range(30):
            out.write({"__key__": str(number), "n": number})
    assert largest <= 17
    assert all(p.stat().st_size <= 4_000_000 for p in (tmp_path / "d").rglob("*") if p.is_file())
    dataset = shardkit.open(tmp_path / "d")
    assert [sample["n"] for sample in dataset] == [*range(30)]
    assert (dataset.shards == 1) is (name == "parquet")  # which stores nothing for them
