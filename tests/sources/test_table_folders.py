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


@pytest.mark.parametrize("form", ["parquet", "csv", "tsv", "jsonl"])
@pytest.mark.parametrize("way", ["", "*/*", "*"])
def test_columns_in_names_of_folders(form, way, tmp_path, monkeypatch):
    """The refusal's fix gives a table with the column; one folder alone gives a note."""
    texts = {"csv": "x,s\n1,a\n2,b\n", "tsv": "x\ts\n1\ta\n2\tb\n"}
    lines = '{"x": 1, "s": "a"}\n{"x": 2, "s": "b"}\n'
    for label in ("cat", "dog"):
        path = tmp_path / "t" / f"label={label}" / f"p.{form}"
        _parquet(path) if form == "parquet" else _file(path, texts.get(form, lines))
    with pytest.raises(ShardkitError, match="column 'label' is in the names") as raised:
        shardkit.convert(tmp_path / "t" / way, to="arrow", out=tmp_path / "o")
    if way != "*":
        code = re.search(r"import .*'table.parquet'\)", str(raised.value.fix))
        assert code is not None
        monkeypatch.chdir(tmp_path)
        exec(code[0], {})
        shardkit.convert("table.parquet", to="arrow", out="o", workers=0)
        assert [(s["x"], s["s"], s["label"]) for s in shardkit.open("o")] == [
            (x, s, label) for label in ("cat", "dog") for x, s in zip(*ROWS.values(), strict=True)
        ]
    done = shardkit.convert(tmp_path / "t/label=cat", to="arrow", out=tmp_path / "one", workers=0)
    assert any("column 'label'" in note for note in done.notes)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.safetensors", "safetensors"),
        ("a.dcm", "DICOM"),
        ("a.nii", "NIfTI"),
        ("a.nii.gz", "NIfTI"),
        ("a.ply", "point cloud"),
        ("a.zip", ".zip archive"),
        ("a.v1.pkl", "pickle"),
        ("a.xlsx", "spreadsheet"),
    ],
)
def test_other_formats_are_named(name, words, tmp_path):
    _file(tmp_path / "d" / name, "data")
    for path in (tmp_path / "d" / name, tmp_path / "d")[: 1 if name.endswith(".gz") else 2]:
        with pytest.raises(ShardkitError, match=re.escape(words)) as raised:
            shardkit.convert(path, to="arrow", out=tmp_path / "o")
        assert raised.value.fix
