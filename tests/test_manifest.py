"""Manifests that are damaged, or made to do harm: every value is of its type, or is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit import checked
from shardkit import manifest as manifests
from shardkit.errors import DamagedError, FormatError
from tests.conftest import write_pictures


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of three shards with classes."""
    root = tmp_path_factory.mktemp("manifest")
    shardkit.convert(write_pictures(root / "in"), "wds", root / "out", shard_samples=4, workers=0)
    return root / "out"


@pytest.fixture
def change(made: Path, tmp_path: Path) -> Callable[..., Path]:
    """What sets an entry of a manifest, and seals it again."""

    def changed(value: Any, *keys: str | int) -> Path:
        data = json.loads(manifests.manifest_path(made).read_bytes())
        del data[manifests._OWN_CHECKSUM]
        inner: Any = data
        for key in keys[:-1]:
            inner = inner[key]
        if value is ...:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = value
        manifests._write(tmp_path / "out/__shardkit__/manifest.json", data)
        return tmp_path / "out"

    return changed


@pytest.mark.parametrize(
    ("value", "keys", "place", "expected", "found"),
    [
        ("x", ("shards", 2, "samples"), "shards[2].samples", "a whole number from 0 up", '"x"'),
        (-1, ("shards", 0, "file", "bytes"), "shards[0].file.bytes", "from 0 up", "-1"),
        (True, ("errors",), "errors", "from 0 up", "true"),
        (2**63, ("errors",), "errors", "from 0 up", "9223372036854775808"),
        (1.5, ("errors",), "errors", "from 0 up", "1.5"),
        (..., ("shards", 1, "file"), "shards[1].file", "a value", "nothing"),
        (None, ("shards", 1), "shards[1]", "an object", "null"),
        ({}, ("shards",), "shards", "a list", "an object of 0"),
        ("é" * 99, ("shards", 0, "beside"), "shards[0].beside", "a list", r'"\u00e9\u00e9'),
        ("X" * 32, ("shards", 0, "file", "checksum"), "checksum", "32 hex digits", '"XXX'),
        ([["a"]], ("class_names", "label"), "class_names.label[0]", "text", "a list of 1"),
        ({"\x1b[2J": 0}, ("class_names",), r'class_names["\u001b[2J"]', "a list", "0"),
        ([1, 2], ("label_counts",), "label_counts", "a count for each class", "a list of 2"),
        (2**63 - 1, ("shards", 0, "samples"), "shards", "sums below 2^63", ""),
        (5, ("layout", "schema"), "layout.schema", "an object", "5"),
        (7, ("layout", "schema", "label", "type"), "layout.schema.label.type", "text", "7"),
        (1, ("layout", "schema", "label", "optional"), "label.optional", "true or false", "1"),
        (..., ("layout", "extensions"), "layout.extensions", "an object", "null"),
        ([{}], ("layout", "extensions", "label"), "extensions.label[0]", "text", "an object of 0"),
        ({"file": "x"}, ("tokenizer",), "tokenizer.kind", "a value", "nothing"),
        ({"tokens": 1}, ("text",), "text.documents", "a value", "nothing"),
    ],
)
def test_a_value_that_is_wrong_is_named(
    change: Callable[..., Path], value: Any, keys: Any, place: str, expected: str, found: str
) -> None:
    with pytest.raises(DamagedError, match="the manifest is damaged at ") as error:
        shardkit.open(change(value, *keys))
    assert place in error.value.what
    assert expected in str(error.value.expected)
    assert found in str(error.value.found)
    assert str(error.value).isascii()


@pytest.mark.parametrize(
    "kind",
    [
        {"dtype": "O"},
        {"dtype": "(1,"},
        {"dtype": "<f3"},
        {"dtype": "i4,i4"},
        {"dtype": "<f4", "shape": "abc"},
        {"shape": [-1]},
        {"shape": [2**40, 2]},
        {"shape": [1] * 33},
        {"unknown": 1},
    ],
)
def test_array_types_that_nobody_can_have_are_refused(
    change: Callable[..., Path], kind: dict[str, Any]
) -> None:
    with pytest.raises(DamagedError, match=r"at layout\.schema\.x"):
        shardkit.open(change({"type": "Array", **kind}, "layout", "schema", "x"))


def test_what_a_later_version_may_say_is_no_damage(change: Callable[..., Path]) -> None:
    with pytest.raises(FormatError, match="a type that this version does not know"):
        shardkit.open(change({"type": "Video"}, "layout", "schema", "x"))
    with pytest.raises(FormatError, match="a format that this version does not know"):
        shardkit.open(change("zarr", "format"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"shardkit": 1, "x": NaN}', "no number that JSON has"),
        (b'{"shardkit": 1, "x": 1e999}', "no number that JSON has"),
        (b'{"shardkit": 1, "x": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b"[" * 10**6, "too deep inside one another"),
        (b'{"shardkit": 1, "x": ' + b"[" * 900 + b"]" * 900 + b"}", "damaged"),
        (b'{"shardkit": 1, "x": "\xff"}', "utf-8"),
    ],
)
def test_json_that_is_no_manifest_is_damaged(made: Path, text: bytes, message: str) -> None:
    path = made.parent / "other/__shardkit__/manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    with pytest.raises(DamagedError, match=message):
        shardkit.open(made.parent / "other")


def test_values_inside_one_another_are_bounded(change: Callable[..., Path]) -> None:
    value: Any = 1
    for _ in range(32):
        value = {"a": [value]}
    with pytest.raises(DamagedError, match=r"at options\.a") as error:
        shardkit.open(change(value, "options"))
    assert error.value.expected == "at most 32 lists and objects inside one another"


def test_a_manifest_has_a_size_that_neither_reader_nor_writer_exceed(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifests.load(made)
    monkeypatch.setattr(manifests, "MOST_BYTES", 1000)
    monkeypatch.setattr(checked, "MOST_BYTES", 1000)
    with pytest.raises(DamagedError, match="more than 1,000 bytes"):
        manifests.load(made)
    with pytest.raises(FormatError, match="more shards than a manifest can name"):
        manifest.write(tmp_path / "manifest.json")
    assert not [*tmp_path.iterdir()]
