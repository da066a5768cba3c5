"""Our Arrow files: the contract, and what pyarrow, pandas and datasets make of them."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import shardkit
from shardkit import storage
from shardkit.errors import FormatError, SampleError
from shardkit.formats import get_format
from shardkit.formats.arrow import writer
from shardkit.formats.arrow.parquet import READS_GAPS
from shardkit.formats.base import ShardSpec
from shardkit.sample import JsonText
from shardkit.schema import Array, Bool, Bytes, FieldType, Float, Image, Int, Json, Schema, Text
from shardkit.testing import (
    EVERYTHING,
    OPTIONAL,
    FormatContract,
    assert_reads,
    assert_same,
    everything,
    make_image,
    write_shard,
)
from tests.conftest import few

ARROW = get_format("arrow")


def table_of(path: Path) -> pa.Table:
    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
        return file.read_all()


class TestArrow(FormatContract):
    tested = get_format("arrow")
    provides = OPTIONAL

    def independent_keys(self, path: Path) -> list[str]:
        return list(table_of(path).column("__key__").to_pylist())


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard-000000.arrow"
    write_shard(ARROW, path, EVERYTHING, [everything(n) for n in range(7)])
    return path


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
        (Array("|u1", (None, 4, 5)), pa.list_(pa.list_(pa.list_(pa.uint8(), 5), 4))),
        (Array("<f2", (2, 2)), pa.list_(pa.list_(pa.float16(), 2), 2)),
        (Array("<f4"), pa.binary()),
        (Array(), pa.binary()),
        (Array("<f4", (3, None)), pa.binary()),
        (Array("<f4", (0,)), pa.binary()),
        (Array("<f4", ()), pa.binary()),
        (Array("|b1", (3,)), pa.binary()),
        (Array(">i4", (3,)), pa.binary()),
        (Array("<c8", (3,)), pa.binary()),
    ],
    ids=str,
)
def test_each_type_has_its_column(tmp_path: Path, kind: FieldType, stored: pa.DataType) -> None:
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


def test_numbers_need_no_pandas_and_reading_no_threads(shard: Path, tmp_path: Path) -> None:
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


def test_batches_are_small_where_samples_are_large(tmp_path: Path) -> None:
    for schema, sample, rows in (
        (Schema({"x": Int()}), {"x": 1}, 1000),
        (Schema({"x": Image()}), {"x": make_image()}, 100),
        (Schema({"x": Bytes()}), {"x": b""}, 100),
        (Schema({"x": Bytes()}), {"x": bytes(5 << 20)}, 4),
    ):
        path = tmp_path / "shard.arrow"
        count = rows + 1
        write_shard(ARROW, path, schema, [{"__key__": str(n), **sample} for n in range(count)])
        assert [batch.num_rows for batch in table_of(path).to_batches()] == [rows, 1]
        path.unlink()


def test_many_batches_read_at_random(tmp_path: Path) -> None:
    schema = Schema({"n": Int(), "text": Text(optional=True), "a": Array("<i4", (None, 2))})

    def sample(n: int) -> dict[str, Any]:
        value = {"__key__": f"{n}", "n": n, "a": np.full((n % 4, 2), n, "<i4")}
        return value if n % 5 else {**value, "text": "x" * (n % 7)}

    reader: Any = write_shard(ARROW, tmp_path / "s.arrow", schema, [sample(n) for n in range(2500)])
    for n in np.random.default_rng(0).permutation(2500).tolist():
        found, expected = reader[n], sample(n)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value)
    assert reader.sizes("a").tolist() == [sample(n)["a"].nbytes for n in range(2500)]
    assert len(reader.sizes("text")) == 500
    assert reader.keys() == [str(n) for n in range(2500)]
    assert len(pickle.dumps(reader)) < 1000


@pytest.mark.parametrize("name", few(["arrow", "parquet", "hf"], "arrow"))
@pytest.mark.parametrize("size", [10, 3000])
def test_a_bounded_shard_is_full_but_not_over(tmp_path: Path, name: str, size: int) -> None:
    format = get_format(name)
    kinds = {"image": Image(), "x": Array("|u1", (None,)), "n": Int(optional=True)}
    schema = Schema({**kinds, "text": Text(), "any": Array()})
    rng = np.random.default_rng(1)
    path = tmp_path / "shard"
    made = format.create(path, ShardSpec(schema, max_bytes=2_000_000))
    taken = 0
    while True:
        sample = {
            "__key__": str(taken),
            "image": make_image(taken) + rng.bytes(size),
            "x": np.frombuffer(rng.bytes(size), "|u1"),
            "text": rng.bytes(size).hex(),
            "any": np.frombuffer(rng.bytes(size), "|u1"),
        }
        if taken % 2:
            sample["n"] = taken
        if not made.write(sample):
            break
        taken += 1
    made.close()
    # Until a batch is written, it is counted with what its encoding may take at most.
    assert 900_000 < path.stat().st_size <= 2_000_000
    assert len(format.open(path, format.layout(schema))) == taken


def test_a_value_that_no_column_can_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_LARGEST", 1000)  # 2 GiB in truth
    made = ARROW.create(tmp_path / "s.arrow", ShardSpec(Schema({"x": Bytes(), "y": Bytes()})))
    assert made.write({"__key__": "a", "x": bytes(900), "y": b""})
    with pytest.raises(SampleError, match="larger than a column") as error:
        made.write({"__key__": "b", "x": bytes(1001), "y": b""})
    assert error.value.where == {"key": "b", "field": "x"}
    assert made.write({"__key__": "c", "x": bytes(900), "y": b""})  # begins a batch
    made.close()
    assert [batch.num_rows for batch in table_of(tmp_path / "s.arrow").to_batches()] == [1, 1]


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    made = ARROW.create(tmp_path / "s.arrow", ShardSpec(Schema({"text": Text()})))
    with pytest.raises(SampleError, match="cannot be stored") as error:
        made.write({"__key__": "a", "text": "\ud800"})
    assert error.value.where == {"key": "a", "field": "text"}
    with pytest.raises(SampleError, match="key is not valid Unicode"):
        made.write({"__key__": "\ud800", "text": ""})
    assert made.write({"__key__": "b", "text": ""})
    made.close()
    assert table_of(tmp_path / "s.arrow").num_rows == 1


def test_the_checksum_is_known_without_reading(shard: Path, tmp_path: Path) -> None:
    written = storage.checksum(shard)
    assert written == storage.checksum(shard)  # the second one reads the file


def test_metadata_name_schema_and_classes(tmp_path: Path) -> None:
    path = tmp_path / "s.arrow"
    classes = {"label": ["a", "b\udce4"]}  # a folder's name that is not Unicode
    ARROW.create(path, ShardSpec(EVERYTHING, classes=classes)).close()
    reader = ARROW.open(path)
    assert reader.schema == EVERYTHING
    assert reader.layout["classes"] == classes
    features = json.loads(table_of(path).schema.metadata[b"huggingface"])["info"]["features"]
    assert features["label"] == {"names": classes["label"], "_type": "ClassLabel"}
    assert list(features) == ["__key__", *EVERYTHING]


def test_columns_that_others_changed_are_read_as_they_are(shard: Path, tmp_path: Path) -> None:
    """pyarrow keeps our metadata when a column goes."""
    changed = table_of(shard).drop_columns(["about", "label"])
    file = pa.OSFile(str(tmp_path / "t.arrow"), "wb")
    with file, pa.ipc.new_file(file, changed.schema) as made:
        made.write_table(changed)
    reader = ARROW.open(tmp_path / "t.arrow")
    assert list(reader.schema) == [n for n in EVERYTHING if n not in ("about", "label")]
    expected = {n: v for n, v in everything(3).items() if n not in ("about", "label")}
    assert_same(reader[3], expected)


def test_a_layout_that_the_columns_do_not_fit_is_named(shard: Path) -> None:
    with pytest.raises(FormatError, match="no column for a field") as error:
        ARROW.open(shard, ARROW.layout(Schema({"other": Int()})))
    assert error.value.where == {"path": shard, "field": "other"}
    with pytest.raises(FormatError, match="does not match the type of its field"):
        ARROW.open(shard, ARROW.layout(Schema({"label": Text()})))


def test_json_that_is_stored_passes_through(tmp_path: Path) -> None:
    schema = Schema({"about": Json(optional=True)})
    texts = ["null", " [1.0]\n", '{"a":1e5}']
    samples: list[dict[str, Any]] = [
        {"__key__": str(n), "about": JsonText(text)} for n, text in enumerate(texts)
    ]
    reader: Any = write_shard(ARROW, tmp_path / "s.arrow", schema, [*samples, {"__key__": "none"}])
    assert [reader.sample(n, json_text=True)["about"] for n in range(3)] == texts
    assert [reader[n]["about"] for n in range(3)] == [None, [1.0], {"a": 1e5}]
    assert reader[3] == reader.sample(3, json_text=True) == {"__key__": "none"}


def test_optional_arrays_may_be_absent(tmp_path: Path) -> None:
    for name in ("arrow", "hf", "parquet")[: 3 if READS_GAPS else 2]:
        kinds = {"list": Array("<i4", (None, 2)), "fixed": Array("<f4", (2, 3)), "any": Array()}
        schema = Schema({field: replace(kind, optional=True) for field, kind in kinds.items()})
        fixed = np.ones((2, 3), "<f4")
        whole = {"list": np.ones((3, 2), "<i4"), "fixed": fixed, "any": np.array("x")}
        samples = [{"__key__": "a", **whole}, {"__key__": "b"}, {"__key__": "c", **whole}]
        samples.append({"__key__": "d", "fixed": fixed})
        assert_reads(write_shard(get_format(name), tmp_path / name, schema, samples), samples)


def test_equal_slices_of_memory_are_stored(tmp_path: Path) -> None:
    """Arrays that are views: transposed, strided, read-only."""
    base = np.arange(24, dtype="<f4").reshape(4, 6)
    base.flags.writeable = False
    schema = Schema({"x": Array("<f4", (None, 2))})
    values = [base.T[:, :2], base[::2, ::3], base[:, :2]]
    samples = [{"__key__": str(n), "x": value} for n, value in enumerate(values)]
    reader = write_shard(ARROW, tmp_path / "s.arrow", schema, samples)
    for number, value in enumerate(values):
        np.testing.assert_array_equal(reader[number]["x"], value)


def test_what_is_in_memory_is_bounded_however_large_a_batch_is(tmp_path: Path) -> None:
    """As Polars writes it: all rows in one batch, of which pages of rows are read."""
    rows = 30_000
    table = pa.table(
        {
            "__key__": [f"{n:06d}" for n in range(rows)],
            "n": pa.array(range(rows), pa.int64()),
            "gaps": pa.array([n if n % 3 else None for n in range(rows)]),
            "x": pa.array([[n, n + 1] for n in range(rows)], pa.list_(pa.int32())),
        }
    )
    path = tmp_path / "large.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as made:
        made.write_table(table)
    reader = ARROW.open(path)
    for n in (0, 1023, 1024, 29_999, 15_001):
        sample = reader[n]
        assert (sample["__key__"], sample["n"], sample.get("gaps")) == (
            f"{n:06d}", n, n if n % 3 else None,
        )  # fmt: skip
        assert sample["x"].tolist() == [n, n + 1]
    assert 0 < reader.in_memory < 500_000  # four pages
    out = np.zeros((3, 2), np.int32)
    assert reader.read_rows("x", np.array([7, 29_999, 2048]), out)
    assert out.tolist() == [[7, 8], [29_999, 30_000], [2048, 2049]]
    assert reader.keys() == table.column("__key__").to_pylist()


def test_pages_in_memory_are_forgotten_where_they_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("name", ["arrow", "hf", "lance", "parquet"])
def test_missing_arrays_of_a_fixed_shape_count_as_what_they_take(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of fixed size that is missing takes as much space as another, at least in memory."""
    largest = 0
    build = writer.BatchWriter._write_batch

    def counted(self: Any) -> None:
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
    assert [sample["n"] for sample in shardkit.open(tmp_path / "d")] == [*range(30)]
