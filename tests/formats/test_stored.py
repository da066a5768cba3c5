"""Shards that were written long ago are read as they were then (bytes/README.md says by whom)."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import shardkit
from shardkit.formats import get_format
from shardkit.formats.base import ShardReader
from shardkit.schema import Array, Schema
from shardkit.testing import EVERYTHING, assert_same, everything

BYTES = Path(__file__).with_name("bytes")
# xxh3-64 of the images: another Pillow may encode them otherwise, the stored ones stay.
IMAGES = ["e301bd4808361739", "22566077e0d8ef65", "7f08a1ce18c1ce04"]


@pytest.mark.parametrize(
    ("format", "name"),
    [("wds", "wds/ours.tar"), ("lmdb", "lmdb/ours.mdb"), ("mds", "mds/ours-1.mds"),
     ("arrow", "arrow/ours.arrow"), ("parquet", "arrow/ours.parquet"),
     ("hf", "arrow/ours-hf.arrow")],
)  # fmt: skip
def test_our_own(format: str, name: str) -> None:
    known = get_format(format)
    for layout in (known.layout(EVERYTHING), None):
        if layout is None and format == "wds":  # which has other names without it
            continue
        reader = known.open(BYTES / name, layout)
        assert len(reader) == 3
        assert reader.schema == EVERYTHING
        if name.startswith("arrow/") and layout is None:
            assert reader.layout["classes"] == {"label": ["a", "b", "c"]}
        for number in range(3):
            found = reader[number]
            assert xxhash.xxh3_64_hexdigest(found["image"]) == IMAGES[number]
            assert_same(found, {**everything(number), "image": found["image"]})


def column(reader: ShardReader, name: str) -> list[Any]:
    values = [reader[number].get(name) for number in range(len(reader))]
    return [v.tolist() if isinstance(v, np.ndarray) else v for v in values]


THREE = {"image": "images", "label": [0, 1, 0], "text": ["a", None, "c"]}
PANDAS = {**THREE, "kind": ["p", "q", "p"], "when": ["2020-01-02T00:00:00"] * 3}
OLD = {**THREE, "vector": [[1.0, 2.0], [], [3.0]]}
DATASETS = {**THREE, "box": [[n, 1, 2, 3] for n in range(3)]}
TOKENS = {"tokens": [[*range(n + 1), 70_000 + n] for n in range(3)]}


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
        ("megatron", "megatron/theirs.bin", "theirs/{:09}", TOKENS),
    ],
)  # fmt: skip
def test_those_of_others(format: str, name: str, key: str, expected: dict[str, Any]) -> None:
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
def test_beton_of_ours_and_of_ffcv(tmp_path: Path, name: str) -> None:
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


@pytest.mark.parametrize("name", ["folder", "train.tar"])
def test_class_names_of_one_field_as_manifests_had_them(name: str) -> None:
    with shardkit.open(BYTES / "dataset" / name) as found:
        assert (found.label, found.classes) == ("label", ("cat", "dog"))
        assert found.class_names == {"label": ("cat", "dog")}


def test_tokens_of_our_own() -> None:
    schema = Schema({"tokens": Array("<u2", (None,))})
    known = get_format("megatron")
    for layout in (known.layout(schema), None):
        reader = known.open(BYTES / "megatron/ours.bin", layout)
        assert len(reader) == 3
        for number in range(3):
            tokens = np.arange(number * number, dtype="<u2")
            assert_same(reader[number], {"__key__": f"doc/{number}", "tokens": tokens})
