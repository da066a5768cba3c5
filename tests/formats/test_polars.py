"""Polars: every way in which it writes a table is read, and it reads what shardkit writes."""

import contextlib
import datetime
import decimal
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars
import polars.testing
import pytest

import shardkit
from shardkit.errors import ShardkitError
from shardkit.formats import get_format
from shardkit.schema import Array, Bool, Bytes, Float, Image, Int, Json, Text
from shardkit.storage.byte_source import LocalFile
from shardkit.testing import EVERYTHING, everything, make_image, write_shard

OLDEST, NEWEST = polars.CompatLevel.oldest(), polars.CompatLevel.newest()
LONG = "longer than the twelve bytes that a view has room for"
Write = Callable[[polars.DataFrame, Path], object]

WAYS = {
    "plain": lambda frame, path: frame.write_ipc(path),
    "oldest": lambda frame, path: frame.write_ipc(path, compat_level=OLDEST),
    "newest": lambda frame, path: frame.write_ipc(path, compat_level=NEWEST),
    "lz4": lambda frame, path: frame.write_ipc(path, compression="lz4"),
    "lz4 oldest": lambda f, path: f.write_ipc(path, compression="lz4", compat_level=OLDEST),
    "zstd": lambda frame, path: frame.write_ipc(path, compression="zstd"),
    "batches": lambda frame, path: frame.write_ipc(path, record_batch_size=2),
    "batches zstd": lambda f, path: f.write_ipc(path, compression="zstd", record_batch_size=2),
    "stream": lambda frame, path: frame.write_ipc_stream(path),
    "stream oldest": lambda frame, path: frame.write_ipc_stream(path, compat_level=OLDEST),
    "stream zstd": lambda frame, path: frame.write_ipc_stream(path, compression="zstd"),
    "sink": lambda frame, path: frame.lazy().sink_ipc(path),
    "sink zstd": lambda frame, path: frame.lazy().sink_ipc(path, compression="zstd"),
    "sink batches": lambda frame, path: frame.lazy().sink_ipc(path, record_batch_size=2),
    "parquet": lambda frame, path: frame.write_parquet(path),
    "sink parquet": lambda frame, path: frame.lazy().sink_parquet(path),
}
DAY = datetime.datetime(2020, 1, 2, 3, 4, 5)
STRUCT = polars.Struct({"bytes": polars.Binary, "path": polars.String})

LINKED = [{"bytes": make_image(n), "path": "p"} for n in range(4)] + [None]

# Column, its field, and what samples have.
COLUMNS = {
    name: (polars.Series(name, values, dtype, strict=False), kind, found)
    for name, dtype, values, kind, found in [
        ("int", polars.Int64, [1, 2, 3, 4, 5], Int(), [1, 2, 3, 4, 5]),
        ("small", polars.UInt8, [1, 0, 255, 4, 5], Int(), [1, 0, 255, 4, 5]),
        ("float", polars.Float32, [1, 0, 0.5, 4, 5], Float(), [1.0, 0.0, 0.5, 4.0, 5.0]),
        ("bool", polars.Boolean, [True, False, True, True, False], Bool(), None),
        ("text", polars.String, ["", "ä", LONG, "exactly 12 b", LONG * 9], Text(), None),
        ("maybe", polars.String, ["a", None, LONG, None, "e"], Text(optional=True), None),
        ("blob", polars.Binary, [b"", b"\0", b"x" * 12, b"x" * 13, bytes(999)], Bytes(), None),
        ("image", polars.Binary, [make_image(n) for n in range(5)], Image(), None),
        ("linked", STRUCT, LINKED, Image(optional=True), [*map(make_image, range(4)), None]),
        ("category", polars.Categorical, ["x", LONG, "x", "z", LONG], Text(), None),
        ("gaps", polars.Categorical, ["x", None, "x", None, "w"], Text(optional=True), None),
        ("enum", polars.Enum(["p", LONG]), ["p", LONG, "p", "p", LONG], Text(), None),
        ("list", polars.List(polars.Int16), [[1], [], [2, 3], [], []], Array("<i2", (None,)), None),
        ("array", polars.Array(polars.Float32, (2, 2)), [[[n, 1], [2, 3]] for n in range(5)],
         Array("<f4", (2, 2)), None),
        ("texts", polars.List(polars.String), [["a", LONG], [], ["b"], [], []], Json(), None),
        ("struct", polars.Struct({"a": polars.Int8, "b": polars.String}),
         [{"a": 1, "b": LONG}, {"a": None, "b": "x"}] * 2 + [{"a": 1, "b": "y"}], Json(), None),
        ("kinds", polars.List(polars.Categorical), [["a"], ["b", "a"], [], [], []], Json(), None),
        ("day", polars.Date, [DAY.date()] * 5, Json(), ["2020-01-02"] * 5),
        ("when", polars.Datetime("us"), [DAY] * 5, Json(), ["2020-01-02T03:04:05"] * 5),
        ("time", polars.Time, [DAY.time()] * 5, Json(), ["03:04:05"] * 5),
        ("price", polars.Decimal(10, 2), [decimal.Decimal("1.50")] * 5, Json(), ["1.50"] * 5),
        ("null", polars.Null, [None] * 5, Json(optional=True), None),
    ]
}  # fmt: skip
FRAME = polars.DataFrame([series for series, _, _ in COLUMNS.values()])


def written(folder, way, frame=FRAME):
    path = folder / ("t.parquet" if "parquet" in way else "t.arrow")
    WAYS[way](frame, path)
    return path


@pytest.mark.parametrize("way", WAYS)
def test_every_type_in_every_way_is_read(tmp_path, way):
    dataset = shardkit.open(written(tmp_path, way))
    assert dict(dataset.schema) == {name: kind for name, (_, kind, _) in COLUMNS.items()}
    assert len(dataset) == 5
    for n in (3, 0, 4, 1, 2):
        sample = dataset[n]
        assert sample.pop("__key__") == f"t/{n:09d}"
        for name, (series, _, values) in COLUMNS.items():
            expected = series.to_list()[n] if values is None else values[n]
            value = sample.pop(name, None)
            if isinstance(value, np.ndarray):
                value = value.tolist()
            assert value == expected, name
        assert not sample


@pytest.mark.parametrize("way", ["plain", "zstd", "stream"])
def test_sizes_are_those_of_the_values(tmp_path, way):
    reader = get_format("arrow").open(written(tmp_path, way))
    for name in ("text", "blob", "image", "linked", "category"):
        values = [reader[n][name] for n in range(5) if name in reader[n]]
        sizes = [len(v.encode() if isinstance(v, str) else v) for v in values]
        assert reader.sizes(name).tolist() == sizes


def test_a_slice_and_a_frame_of_chunks(tmp_path):
    frame = polars.concat([FRAME[1:4], FRAME[2:]], rechunk=False)
    texts = frame["text"].to_list()
    for way in ("plain", "batches", "stream"):
        dataset = shardkit.open(written(tmp_path, way, frame))
        assert [dataset[n]["text"] for n in range(len(dataset))] == texts
        assert [dataset[n]["text"] for n in range(6)] == texts


def test_values_are_read_where_they_stand(tmp_path, monkeypatch):
    """A view into the file is followed to the value: the column is not copied."""
    frame = polars.DataFrame({"blob": [bytes([n]) * 1_000_000 for n in range(9)]})
    reader = get_format("arrow").open(written(tmp_path, "plain", frame))
    asked, real = [], LocalFile.read

    def noted(self, offset, length):
        asked.append(length)
        return real(self, offset, length)

    monkeypatch.setattr(LocalFile, "read", noted)
    assert reader[7]["blob"] == frame["blob"][7]
    assert 1_000_000 <= sum(asked) < 1_100_000


@pytest.mark.parametrize("way", ["plain", "oldest", "zstd", "stream"])
def test_a_changed_file_gives_samples_or_errors_of_ours(tmp_path, way):
    path = written(tmp_path, way)
    data = path.read_bytes()
    for at in range(len(data) - 1, max(0, len(data) - 3000), -211):  # the footer
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        with contextlib.suppress(ShardkitError):
            assert [*shardkit.open(path)]


@pytest.mark.parametrize("format", ["arrow", "parquet", "hf"])
def test_polars_reads_ours_and_what_it_makes_of_it_comes_back(tmp_path, format):
    path = tmp_path / f"s.{format}"
    samples = [everything(n) for n in range(7)]
    write_shard(get_format(format), path, EVERYTHING, samples).close()
    read = {"parquet": polars.read_parquet, "hf": polars.read_ipc_stream}
    frame = read.get(format, polars.read_ipc)(path)
    assert frame.columns == ["__key__", *EVERYTHING]
    for row, expected in zip(frame.to_dicts(), samples, strict=True):
        assert row.pop("image") == {"bytes": expected["image"], "path": None}
        assert row.pop("points") == expected["points"].tolist()
        assert json.loads(row.pop("about")) == expected["about"]
        assert row.pop("caption") == expected.get("caption")
        assert row == {name: expected[name] for name in row}
    frame = frame.filter(polars.col("__key__") != "")
    frame.write_ipc(tmp_path / "b.arrow", compression="zstd")
    with shardkit.open(tmp_path / "b.arrow") as found:
        assert dict(found.schema) == {**EVERYTHING, "about": Text()}
        for sample, expected in zip(found, samples, strict=True):
            sample["about"] = json.loads(sample["about"])
            np.testing.assert_equal(sample, expected)
