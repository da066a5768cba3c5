"""Folders whose files are not the table by themselves: logs, chunks, partitions, other formats."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardkit
from shardkit.errors import ShardkitError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
ROWS = {"x": [1, 2], "s": ["a", "b"]}


def _parquet(path: Path, metadata: dict[bytes, bytes] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(ROWS).replace_schema_metadata(metadata), path)


def _file(path: Path, text: str = "{}") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _delta(top: Path) -> None:
    _file(top / "_delta_log" / f"{0:020}.json")
    _parquet(top / "part-0.parquet")
    _parquet(top / "label=cat" / "part-1.parquet")


def _iceberg(top: Path) -> None:
    _file(top / "metadata" / "v1.metadata.json")
    _parquet(top / "data" / "label=cat" / "part-0.parquet")


def _hudi(top: Path) -> None:
    _file(top / ".hoodie" / "hoodie.properties")
    _parquet(top / "part-0.parquet")


def _zarr2(top: Path) -> None:
    _file(top / ".zgroup")
    _file(top / "a" / "0", "123")


def _zarr3(top: Path) -> None:
    _file(top / "zarr.json")
    _file(top / "a" / "zarr.json")


def _petastorm(top: Path) -> None:
    _parquet(top / "part-0.parquet")
    _parquet(top / "_common_metadata", {b"dataset-toolkit.unischema.v1": b"..."})


@pytest.mark.parametrize(
    ("make", "way", "named"),
    [
        (_delta, "", "a Delta Lake table"),
        (_delta, "*.parquet", "a Delta Lake table"),
        (_delta, "part-0.parquet", "a Delta Lake table"),
        (_delta, "label=cat/part-1.parquet", "a Delta Lake table"),
        (_iceberg, "", "an Apache Iceberg table"),
        (_iceberg, "data/*/*.parquet", "an Apache Iceberg table"),
        (_hudi, "", "an Apache Hudi table"),
        (_hudi, "*.parquet", "an Apache Hudi table"),
        (_zarr2, "", "a Zarr store"),
        (_zarr3, "", "a Zarr store"),
        (_petastorm, "", "a dataset of Petastorm"),
        (_petastorm, "*.parquet", "a dataset of Petastorm"),
    ],
)
def test_tables_that_are_more_than_their_files(make, way, named, tmp_path):
    make(tmp_path / "t")
    with pytest.raises(ShardkitError, match=f"this is {named}") as raised:
        shardkit.convert(tmp_path / "t" / way, to="arrow", out=tmp_path / "o")
    assert raised.value.fix
    with pytest.raises(ShardkitError, match=f"this is {named}"):
        shardkit.open(tmp_path / "t" / way)


TEXTS = {
    "csv": "x,s\n1,a\n2,b\n",
    "tsv": "x\ts\n1\ta\n2\tb\n",
    "jsonl": '{"x": 1, "s": "a"}\n{"x": 2, "s": "b"}\n',
}
FORMS = ["parquet", *TEXTS]


def _table(top: Path, form: str, *folders: str) -> None:
    for folder in folders:
        path = top / folder / f"p.{form}"
        _parquet(path) if form == "parquet" else _file(path, TEXTS[form])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["", "*/*"])
def test_columns_in_names_of_folders_become_fields(form, way, tmp_path):
    _table(tmp_path / "t", form, "label=a%2Fb", "label=__HIVE_DEFAULT_PARTITION__", "label=dog")
    for name, options, found in (
        ("all", {}, lambda s: (s["x"], s["s"], s.get("label"))),
        ("named", {"label_column": "label", "where": "label == 'dog'"}, lambda s: s["label"]),
        ("dropped", {"drop": ["label"]}, len),
    ):
        out, skip = tmp_path / name, {"on_error": "skip"}
        shardkit.convert(tmp_path / "t" / way, "arrow", out, workers=0, **options, **skip)
        ds = shardkit.open(out)
        expected = {
            "all": [
                (x, s, label) for label in (None, "a/b", "dog") for x, s in ((1, "a"), (2, "b"))
            ],
            "named": [ds.class_names.get("label", ("a/b", "dog")).index("dog")] * 2,
            "dropped": [3] * 6,
        }
        assert [found(sample) for sample in ds] == expected[name]
    assert shardkit.verify(tmp_path / "all", against=tmp_path / "t" / way).sound


@pytest.mark.parametrize("form", FORMS)
def test_columns_in_names_of_folders_have_types_and_belong_to_all_files(form, tmp_path):
    _table(tmp_path / "t", form, "train/day=1/h-1 =0.5", "train/day=2/h-1 =1", "test/day=3/h-1 =2")
    shardkit.convert(tmp_path / "t", "arrow", tmp_path / "out", workers=0)
    ds = shardkit.open(tmp_path / "out/train")
    assert [(s["x"], s["day"], s["h-1 "]) for s in ds] == [
        (1, 1, 0.5),
        (2, 1, 0.5),
        (1, 2, 1),
        (2, 2, 1),
    ]
    assert [s["day"] for s in shardkit.open(tmp_path / "out/test")] == [3, 3]
    _table(tmp_path / "u", form, "day=1", "day=2/h=1")
    with pytest.raises(ShardkitError, match="do not name the same columns") as raised:
        shardkit.convert(tmp_path / "u", "arrow", tmp_path / "no", workers=0)
    assert raised.value.found == "day, h in 'day=2/h=1'"


def test_a_partitioned_table_is_converted_to_be_opened_and_its_parts_are_not_mixed(tmp_path):
    _table(tmp_path / "t", "parquet", "label=cat", "label=dog")
    with pytest.raises(ShardkitError, match="the column 'label' is in the names") as raised:
        shardkit.open(tmp_path / "t")
    assert f"shardkit convert {tmp_path / 't'} --to parquet" in str(raised.value.fix)
    with pytest.raises(ShardkitError, match="the column 'label' is in the names"):
        shardkit.convert(tmp_path / "t" / "*", "arrow", tmp_path / "o", workers=0)
    done = shardkit.convert(tmp_path / "t/label=cat", "arrow", tmp_path / "one", workers=0)
    assert any("column 'label'" in note for note in done.notes)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.safetensors", "safetensors"),
        ("a.nrrd", "a volume"),
        ("a.ply", "point cloud"),
        ("a.zip", ".zip archive"),
        ("a.v1.pkl", "pickle"),
        ("a.xlsx", "spreadsheet"),
    ],
)
def test_other_formats_are_named(name, words, tmp_path):
    _file(tmp_path / "d" / name, "data")
    for path in (tmp_path / "d" / name, tmp_path / "d"):
        with pytest.raises(ShardkitError, match=re.escape(words)) as raised:
            shardkit.convert(path, to="arrow", out=tmp_path / "o")
        assert raised.value.fix
