"""Shards that were written long ago are read as they were then (bytes/README.md says by whom).

So are datasets whose manifest and lists stand among the shards.
"""

import json
import lzma
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash

import shardkit
from shardkit.formats import get_format
from shardkit.inspection.inspect import inspect
from shardkit.schema import Array, Schema
from shardkit.testing import EVERYTHING, assert_reads, everything
from tests.conftest import files_of

BYTES = Path(__file__).with_name("bytes")
# xxh3-64 of the images: another Pillow may encode them otherwise, the stored ones stay.
IMAGES = ["e301bd4808361739", "22566077e0d8ef65", "7f08a1ce18c1ce04"]
TOKENS = Schema({"tokens": Array("<u2", (None,))})


@pytest.mark.parametrize(
    ("format", "name"),
    [("wds", "wds/ours.tar"), ("lmdb", "lmdb/ours.mdb"), ("mds", "mds/ours-1.mds"),
     ("arrow", "arrow/ours.arrow"), ("parquet", "arrow/ours.parquet"),
     ("hf", "arrow/ours-hf.arrow"), ("megatron", "megatron/ours.bin")],
)  # fmt: skip
def test_our_own(format, name):
    known, schema = get_format(format), TOKENS if format == "megatron" else EVERYTHING
    for layout in (known.layout(schema), None):
        if layout is None and format == "wds":  # which has other names without it
            continue
        reader = known.open(BYTES / name, layout)
        assert reader.schema == schema
        if name.startswith("arrow/") and layout is None:
            assert reader.layout["classes"] == {"label": ["a", "b", "c"]}
        if format == "megatron":
            values = [np.arange(n * n, dtype="<u2") for n in range(3)]
            assert_reads(
                reader, [{"__key__": f"doc/{n}", "tokens": v} for n, v in enumerate(values)]
            )
            continue
        images = [reader[number]["image"] for number in range(3)]
        assert [*map(xxhash.xxh3_64_hexdigest, images)] == IMAGES
        assert_reads(reader, [{**everything(n), "image": images[n]} for n in range(3)])


def column(reader, name):
    values = [reader[number].get(name) for number in range(len(reader))]
    return [v.tolist() if isinstance(v, np.ndarray) else v for v in values]


THREE = {"image": "images", "label": [0, 1, 0], "text": ["a", None, "c"]}
PANDAS = {**THREE, "kind": ["p", "q", "p"], "when": ["2020-01-02T00:00:00"] * 3}
OLD = {**THREE, "vector": [[1.0, 2.0], [], [3.0]]}
DATASETS = {**THREE, "box": [[n, 1, 2, 3] for n in range(3)]}
DOCUMENTS = {"tokens": [[*range(n + 1), 70_000 + n] for n in range(3)]}


@pytest.mark.parametrize(
    ("format", "name", "key", "expected"),
    [
        ("wds", "wds/theirs.tar", "cat/{}", {"jpg": "images", "cls": [0, 1, 2]}),
        ("lmdb", "lmdb/theirs.mdb", "cat/{}", {"image": "images"}),
        ("arrow", "arrow/pandas.feather", "pandas/{:09}", PANDAS),
        ("parquet", "arrow/pandas.parquet", "pandas/{:09}", PANDAS),
        ("arrow", "arrow/pyarrow-14.arrow", "pyarrow-14/{:09}", OLD),
        ("parquet", "arrow/pyarrow-14.parquet", "pyarrow-14/{:09}", OLD),
        ("hf", "arrow/datasets.arrow", "datasets/{:09}", DATASETS),
        ("megatron", "megatron/theirs.bin", "theirs/{:09}", DOCUMENTS),
    ],
)  # fmt: skip
def test_those_of_others(format, name, key, expected):
    reader = get_format(format).open(BYTES / name, None)
    assert reader.keys() == [key.format(number) for number in range(3)]
    assert {*reader.schema} - {*expected} <= {"json"}
    for field, values in expected.items():
        found = column(reader, field)
        if values == "images":
            assert list(map(xxhash.xxh3_64_hexdigest, found)) == IMAGES
        else:
            assert found == values
    if format == "hf":
        assert reader.layout["classes"] == {"label": ["x", "y"]}
        assert reader.schema["box"] == Array("<f4", (4,))
    if format == "wds":
        assert column(reader, "json") == [{"n": number} for number in range(3)]


@pytest.mark.parametrize("name", ["ours-1", "ffcv-1.0.2"])
@pytest.mark.parametrize("memory", [0, 1 << 20])  # without its tables and with them
def test_beton_of_ours_and_of_ffcv(tmp_path, monkeypatch, name, memory):
    monkeypatch.setattr("shardkit.storage.byte_source.IN_MEMORY", memory)
    path = tmp_path / f"{name}.beton"
    path.write_bytes(lzma.decompress((BYTES / f"beton/{name}.beton.xz").read_bytes()))
    reader = get_format("beton").open(path)
    expected = json.loads((BYTES / f"beton/{name}.json").read_text("utf-8"))
    assert len(reader) == len(expected) == 4
    for number, sample in enumerate(expected):
        found = {n: v.hex() if isinstance(v, bytes) else v for n, v in reader[number].items()}
        found["x"] = found["x"].tolist()
        assert found == {"__key__": f"ffcv-1_0_2/{number:09d}", **sample}
    if name == "ours-1":
        assert reader.layout["classes"] == {"label": ["circle", "square"]}


BOTH = pytest.mark.parametrize("name", ["folder", "train.tar"])
PREFIXES = {"folder": "folder/", "train.tar": "train."}
KEYS = ["cat/0", "cat/a_b", "dog/1"]


@pytest.fixture
def stored(tmp_path):
    return Path(shutil.copytree(BYTES / "dataset", tmp_path / "stored"))


@BOTH
def test_a_dataset_is_read_inspected_verified_and_a_source(stored, name, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, shardkit.open(stored / name) as dataset:
        # Its index is not built again.
        patch.setattr("shardkit.formats.wds.remote_index_cache.scan", None)
        assert [sample["__key__"] for sample in dataset] == KEYS
        assert dataset.place == stored / name
        assert (dataset.label, dataset.classes) == ("label", ("cat", "dog"))
        assert dataset.class_names == {"label": ("cat", "dog")}
        assert dataset.original_paths() == {"cat/a_b": "cat/a.b.jpg"}
    assert inspect(stored / name)["errors"] == 1
    report = shardkit.verify(stored / name, against=stored / "source", decode=True)
    assert report.sound, report.problems
    assert report.files == (6 if name == "folder" else 4)
    if name == "folder":
        with shardkit.open(stored / "folder/shard-000001.tar") as shard:
            assert [sample["__key__"] for sample in shard] == KEYS[2:]
            assert shard.classes == ("cat", "dog")
    shardkit.convert(stored / name, "wds", tmp_path / "out", workers=0)
    with shardkit.open(tmp_path / "out") as dataset:
        assert [sample["__key__"] for sample in dataset] == KEYS
        assert dataset.original_paths() == {"cat/a_b": "cat/a.b.jpg"}
    assert set(files_of(tmp_path / "out")) >= {"__shardkit__/manifest.json", "shard-000000.tar"}


def test_damage_to_what_lies_among_its_shards_is_found(stored):
    for file in ("errors.jsonl", "shard-000001.index.npy"):
        assert_finds_damage(stored / "folder", stored / "folder" / file)
    for file in ("train.tar.keys.jsonl", "train.index.npy"):
        assert_finds_damage(stored / "train.tar", stored / file)


def assert_finds_damage(dataset, path):
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    (problem,) = shardkit.verify(dataset).problems
    assert problem.where["path"] == path
    path.write_bytes(data)


@BOTH
def test_a_dataset_is_replaced_and_nothing_of_it_stays(stored, name):
    before = set(files_of(stored))
    with pytest.raises(shardkit.OutputError, match="holds another dataset"):
        shardkit.convert(stored / "source/cat", "wds", stored / name, workers=0)
    assert set(files_of(stored)) == before
    shardkit.convert(stored / "source/cat", "wds", stored / name, workers=0, overwrite=True)
    old = {file for file in before if file.startswith(PREFIXES[name])}
    assert len(old) == (7 if name == "folder" else 5)
    left = {"folder/shard-000000.tar"} if name == "folder" else {"train.tar"}
    assert set(files_of(stored)) & old == left
    with shardkit.open(stored / name) as dataset:
        assert len(dataset) == 2
    assert shardkit.verify(stored / name).sound


@BOTH
def test_the_command_that_made_a_dataset_finds_it_complete(stored, name):
    """By the fingerprint of its source, which is as it was."""
    options = {"shard_samples": 2} if name == "folder" else {}
    options |= {"on_error": "skip", "workers": 0}
    before = files_of(stored)
    assert shardkit.convert(stored / "source", "wds", stored / name, **options).already_complete
    assert files_of(stored) == before
