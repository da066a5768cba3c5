"""Shards that were written long ago are read as they were then (bytes/README.md says by whom)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash

import shardkit
from shardkit.formats import get_format
from shardkit.schema import Array, Schema
from shardkit.testing import EVERYTHING, assert_same, everything

BYTES = Path(__file__).with_name("bytes")
# xxh3-64 of the images: another Pillow may encode them otherwise, the stored ones stay.
IMAGES = ["e301bd4808361739", "22566077e0d8ef65", "7f08a1ce18c1ce04"]


@pytest.mark.parametrize(
    ("format", "name", "with_layout"),
    [
        ("wds", "ours.tar", True),
        ("lmdb", "ours.mdb", True),
        ("lmdb", "ours.mdb", False),
        ("mds", "ours-1.mds", True),
        ("mds", "ours-1.mds", False),
    ],
)
def test_our_own(format: str, name: str, with_layout: bool) -> None:
    known = get_format(format)
    reader = known.open(BYTES / format / name, known.layout(EVERYTHING) if with_layout else None)
    assert len(reader) == 3
    for number in range(3):
        found = reader[number]
        assert xxhash.xxh3_64_hexdigest(found["image"]) == IMAGES[number]
        assert_same(found, {**everything(number), "image": found["image"]})


@pytest.mark.parametrize(
    ("format", "name", "fields"),
    [("wds", "theirs.tar", {"jpg", "cls", "json"}), ("lmdb", "theirs.mdb", {"image"})],
)
def test_those_of_others(format: str, name: str, fields: set[str]) -> None:
    reader = get_format(format).open(BYTES / format / name, None)
    assert set(reader.schema) == fields
    assert len(reader) == 3
    for number in range(3):
        found = reader[number]
        assert found.pop("__key__") == f"cat/{number}"
        assert found.get("cls", number) == number
        assert found.get("json", {"n": number}) == {"n": number}
        image = found.get("jpg", found.get("image"))
        assert xxhash.xxh3_64_hexdigest(image) == IMAGES[number]


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


def test_tokens_of_others() -> None:
    reader = get_format("megatron").open(BYTES / "megatron/theirs.bin", None)
    assert len(reader) == 3
    for number in range(3):
        tokens = np.array([*range(number + 1), 70_000 + number], "<i4")
        assert_same(reader[number], {"__key__": f"theirs/{number:09d}", "tokens": tokens})
