"""Other libraries read a dataset's folder as it is: they pass over what only shardkit reads."""

import json
from pathlib import Path

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
def made(tmp_path_factory):
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
    options = {"on_error": "skip", "workers": 0, "shard_samples": 2, "text": text}
    for format in (*NAMES, "hf"):
        shardkit.convert(folder / "in", format, folder / f"{format}-splits", **options)
        shardkit.convert(folder / "in/train", format, folder / f"{format}-one", **options)
        own = {path.name for path in (folder / f"{format}-one/__shardkit__").iterdir()}
        assert own >= OURS
    return folder


EACH_LAYOUT = pytest.mark.parametrize(
    ("layout", "rows"), {"one": {"train": ROWS["train"]}, "splits": ROWS}.items()
)


@EACH_LAYOUT
@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_pandas_pyarrow_and_polars(made, layout, rows, format):
    folder, count = made / f"{format}-{layout}", sum(rows.values())
    found = pyarrow.dataset.dataset(folder, format=NAMES[format][0])
    assert found.to_table().num_rows == count
    scan = polars.scan_parquet if format == "parquet" else polars.scan_ipc
    assert len(scan(folder / f"**/*.{format}").collect()) == count
    if format == "parquet":
        frame = pandas.read_parquet(folder)
        assert len(frame) == count
        assert list(frame["tokens"][1]) == [1, 1]


@EACH_LAYOUT
@pytest.mark.parametrize("format", [*NAMES, "hf"])
def test_datasets_by_the_name_of_the_format_and_by_the_folder(made, layout, rows, format, tmp_path):
    folder, options = str(made / f"{format}-{layout}"), {"cache_dir": str(tmp_path)}
    if format == "hf":
        found = datasets.load_from_disk(folder)
        found = {"train": found} if layout == "one" else found
    else:
        found = datasets.load_dataset(NAMES[format][1], data_dir=folder, **options)
        again = datasets.load_dataset(folder, **options)
        assert sum(map(len, again.values())) == sum(rows.values())
    counts = {split.replace("validation", "val"): len(found[split]) for split in found}
    assert counts == rows


def test_polars_refuses_any_folder_with_another_suffix(tmp_path, made):
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


def test_single_files_beside_each_other(made, tmp_path):
    for split in ROWS:
        out = tmp_path / f"{split}.parquet"
        shardkit.convert(made / "in" / split, "parquet", out, on_error="skip", workers=0)
    assert len(pandas.read_parquet(tmp_path)) == sum(ROWS.values())
    options = {"data_dir": str(tmp_path), "cache_dir": str(tmp_path / "cache")}
    found = datasets.load_dataset("parquet", **options)
    assert {split: len(found[split]) for split in found} == {"train": 4, "validation": 2}


def test_datasets_takes_tars_with_files_for_other_loaders_beside_them(tmp_path):
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
