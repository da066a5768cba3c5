"""Other libraries read a dataset's folder as it is: they pass over what only shardkit reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pandas
import polars
import pyarrow.dataset
import pytest

import shardkit
from shardkit.testing import make_image
from tests.conversion.text_corpora import few_words

ROWS = {"train": 4, "val": 2}
# How each format is called by pyarrow and by datasets.
NAMES = {"parquet": ("parquet", "parquet"), "arrow": ("ipc", "arrow"), "wds": ("", "webdataset")}
OURS = {"manifest.json", "errors.jsonl", "keys.jsonl", "lengths.npy", "tokenizer.json"}

datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Per format a folder of shards and one of splits, with every file that shardkit adds."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "tokenizer.json").write_text(json.dumps(few_words(9)))
    for split, count in ROWS.items():
        (folder / "in" / split).mkdir(parents=True)
        for number in range(count):
            (folder / f"in/{split}/{number}.v1.txt").write_text(" ".join(["w1"] * (number + 1)))
        (folder / f"in/{split}/bad.txt").write_bytes(b"\xff\xfe\xfd")
    text = shardkit.TextOptions(
        tokenizer=folder / "tokenizer.json", keep_fields=True, append_eos=False, documents="file"
    )
    options: dict[str, Any] = {"on_error": "skip", "workers": 0, "shard_samples": 2, "text": text}
    for format in (*NAMES, "hf"):
        shardkit.convert(folder / "in", format, folder / f"{format}-splits", **options)
        shardkit.convert(folder / "in/train", format, folder / f"{format}-one", **options)
        own = {path.name for path in (folder / f"{format}-one/__shardkit__").iterdir()}
        assert own >= OURS
    return folder


@pytest.fixture(params=["one", "splits"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def rows(layout: str) -> dict[str, int]:
    return {"train": ROWS["train"]} if layout == "one" else ROWS


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_pandas_pyarrow_and_polars(made: Path, layout: str, format: str) -> None:
    folder, count = made / f"{format}-{layout}", sum(rows(layout).values())
    found = pyarrow.dataset.dataset(folder, format=NAMES[format][0])
    assert found.to_table().num_rows == count
    scan = polars.scan_parquet if format == "parquet" else polars.scan_ipc
    assert len(scan(folder / f"**/*.{format}").collect()) == count
    if format == "parquet":
        frame = pandas.read_parquet(folder)
        assert len(frame) == count
        assert list(frame["tokens"][1]) == [1, 1]


@pytest.mark.parametrize("format", NAMES)
def test_datasets_by_the_name_of_the_format_and_by_the_folder(
    made: Path, layout: str, format: str, tmp_path: Path
) -> None:
    folder, cache = str(made / f"{format}-{layout}"), str(tmp_path)
    found = datasets.load_dataset(NAMES[format][1], data_dir=folder, cache_dir=cache)
    counts = {split.replace("validation", "val"): len(found[split]) for split in found}
    assert counts == rows(layout)
    found = datasets.load_dataset(folder, cache_dir=cache)
    assert sum(len(found[split]) for split in found) == sum(rows(layout).values())


def test_polars_refuses_any_folder_with_another_suffix(tmp_path: Path, made: Path) -> None:
    """Whatever the name: so there is none that we could choose. The day it passes, say so."""
    shard = made / "parquet-one/shard-000000.parquet"
    for number, name in enumerate([".shardkit", "_shardkit", "_shardkit/_x.json", ".x/.x.json"]):
        folder = tmp_path / str(number)
        (folder / name).parent.mkdir(parents=True)
        (folder / "x.parquet").write_bytes(shard.read_bytes())
        assert len(polars.read_parquet(folder)) == 2
        (folder / name).write_text("{}")
        with pytest.raises(polars.exceptions.PolarsError, match="glob pattern"):
            polars.read_parquet(folder)


def test_datasets_from_disk(made: Path, layout: str) -> None:
    found = datasets.load_from_disk(made / f"hf-{layout}")
    counts = {"train": len(found)} if layout == "one" else {s: len(found[s]) for s in found}
    assert counts == rows(layout)


def test_single_files_beside_each_other(made: Path, tmp_path: Path) -> None:
    for split in ROWS:
        source = made / "in" / split
        shardkit.convert(
            source, "parquet", tmp_path / f"{split}.parquet", on_error="skip", workers=0
        )
    assert len(pandas.read_parquet(tmp_path)) == sum(ROWS.values())
    found = datasets.load_dataset(
        "parquet", data_dir=str(tmp_path), cache_dir=str(tmp_path / "cache")
    )
    assert {split: len(found[split]) for split in found} == {"train": 4, "validation": 2}


def test_datasets_takes_tars_with_files_for_other_loaders_beside_them(tmp_path: Path) -> None:
    """By the pattern of docs/wds.md: of the folder it would take each file for a TAR."""
    samples = [{"__key__": f"{n}", "image": make_image(n), "label": n} for n in range(6)]
    out, beside = tmp_path / "everywhere", ("dali", "energon", "wids")
    shardkit.convert(samples, "wds", out, workers=0, shard_samples=3, beside=beside)
    text = Path(__file__).parents[2].joinpath("docs/wds.md").read_text("utf-8")
    assert 'load_dataset("webdataset", data_files="everywhere/*.tar")' in text
    files, cache = str(out / "*.tar"), str(tmp_path / "cache")
    found = datasets.load_dataset("webdataset", data_files=files, cache_dir=cache)["train"]
    assert [row["__key__"] for row in found] == [f"{n}" for n in range(6)]
    assert [row["cls"] for row in found] == [*range(6)]
    assert found[5]["jpg"].size == (8, 6)
