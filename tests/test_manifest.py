"""Manifests that are damaged, or made to do harm: every value is of its type, or is named."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from click.testing import CliRunner

import shardkit
from shardkit import checked
from shardkit import manifest as manifests
from shardkit.cli.inspect import command as inspect
from shardkit.errors import DamagedError, FormatError, NotFoundError
from shardkit.testing_samples import in_fork
from tests.codecs.tokenizer_zoo import write_json
from tests.conftest import IMAGE_FORMATS, write_images
from tests.fuzz_manifests import fuzz


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of three shards with classes."""
    root = tmp_path_factory.mktemp("manifest")
    shardkit.convert(write_images(root / "in"), "wds", root / "out", shard_samples=4, workers=0)
    return root / "out"


def put(data: Any, value: Any, keys: Any) -> Any:
    """The data with a value under these keys; with `...`, without one."""
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    return data


@pytest.fixture
def change(made: Path, tmp_path: Path) -> Callable[..., Path]:
    """What sets an entry of a manifest, and seals it again."""

    def changed(value: Any, *keys: str | int) -> Path:
        data = json.loads(manifests.manifest_path(made).read_bytes())
        del data[manifests._OWN_CHECKSUM]
        manifests._write(tmp_path / "out/__shardkit__/manifest.json", put(data, value, keys))
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
        (2**63 - 1, ("shards", 0, "samples"), "shards", "add up to less than 2^63", ""),
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
    assert "copy it again" in str(error.value.fix)
    assert str(error.value).isascii()


def test_array_types_that_nobody_can_have_are_refused(change: Callable[..., Path]) -> None:
    kinds = [{"dtype": dtype} for dtype in ("O", "(1,", "<f3", "i4,i4")]
    kinds += [{"dtype": "<f4", "shape": "abc"}, {"shape": [-1]}, {"shape": [2**40, 2]}]
    for kind in (*kinds, {"shape": [1] * 33}, {"unknown": 1}):
        with pytest.raises(DamagedError, match=r"at layout\.schema\.x"):
            shardkit.open(change({"type": "Array", **kind}, "layout", "schema", "x"))


def test_what_a_later_version_may_say_is_no_damage(change: Callable[..., Path]) -> None:
    with pytest.raises(FormatError, match="a type that this version does not know"):
        shardkit.open(change({"type": "Mesh"}, "layout", "schema", "x"))
    with pytest.raises(FormatError, match="a format that this version does not know"):
        shardkit.open(change("zarr", "format"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"shardkit": 1, "x": NaN}', "not a JSON number"),
        (b'{"shardkit": 1, "x": 1e999}', "not a JSON number"),
        (b'{"shardkit": 1, "x": ' + b"9" * 5000 + b"}", r"4300 digits|limit \(4300\)"),
        (b"[" * 10**6, "nested too deeply"),
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
    with pytest.raises(DamagedError, match=r"at recipe\.a") as error:
        shardkit.open(change(value, "recipe"))
    assert error.value.expected == "at most 32 levels of lists and objects"


def test_a_manifest_has_a_size_that_neither_reader_nor_writer_exceed(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifests.load(made)
    monkeypatch.setattr(manifests, "MOST_BYTES", 1000)
    monkeypatch.setattr(checked, "MOST_BYTES", 1000)
    with pytest.raises(DamagedError, match="more than 1,000 bytes"):
        manifests.load(made)
    with pytest.raises(FormatError, match="more shards than a manifest can list"):
        manifest.write(tmp_path / "manifest.json")
    assert not [*tmp_path.iterdir()]


# --- what lies beside it -------------------------------------------------------------------------


def replaced(dataset: Path, name: str, data: bytes) -> Path:
    """Write a file that a manifest lists, with a checksum that holds."""
    place = manifests.manifest_path(dataset)
    manifest = json.loads(place.read_bytes())
    del manifest[manifests._OWN_CHECKSUM]
    (entry,) = (file for file in manifest["files"] if file["name"].endswith(name))
    path = dataset / entry["name"]
    path.write_bytes(data)
    entry |= {"bytes": len(data), "checksum": xxhash.xxh3_128_hexdigest(data)}
    manifests._write(place, manifest)
    return path


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with a key table and a list of errors."""
    root = tmp_path_factory.mktemp("listed")
    images = write_images(root / "in", classes=1)
    shutil.copy(images / "class0/000.jpg", images / "class0/a.b.jpg")
    (images / "class0/bad.jpg").write_text("no image")
    shardkit.convert(images, "wds", root / "out", on_error="skip", workers=0)
    return root / "out"


@pytest.mark.parametrize(
    "data",
    [b"{", b"\xff\xfe", b"[1]\n", b'{"key": [1], "path": "x"}', b"[" * 10**5, b'{"key": NaN}'],
)
def test_a_damaged_line_of_a_list_is_named(listed: Path, tmp_path: Path, data: bytes) -> None:
    dataset = Path(shutil.copytree(listed, tmp_path / "out"))
    path = replaced(dataset, "keys.jsonl", b'{"key": "a", "path": "b"}\n' + data)
    for use in (
        lambda: shardkit.open(dataset).original_paths(),
        lambda: shardkit.convert(dataset, "arrow", tmp_path / "to", workers=0),
    ):
        with pytest.raises(DamagedError, match="line 2 of the key table is damaged") as error:
            use()
        assert error.value.where["path"] == path
    dataset = Path(shutil.copytree(listed, tmp_path / "other"))
    path = replaced(dataset, "errors.jsonl", data)
    (problem,) = shardkit.verify(dataset).problems
    assert "line 1 of errors.jsonl is damaged" in problem.what
    assert problem.where["path"] == path


HEADER = "{'descr': %s, 'fortran_order': False, 'shape': (%d,), }"


def test_a_damaged_table_of_lengths_is_named(tmp_path: Path) -> None:
    tokens = [{"__key__": str(n), "tokens": np.arange(n, dtype="<u2")} for n in range(9)]
    schema = {"tokens": shardkit.Array("<u2", (None,))}
    out = tmp_path / "out"
    shardkit.convert(tokens, "parquet", out, schema=schema, workers=0)
    assert shardkit.open(out).lengths("tokens").tolist() == [*range(9)]
    for header, values in (
        ("{'descr': [('tokens', '<u4'", 36),
        ("'''", 36),
        (HEADER % ("[('tokens', '<u4')]", 10**21), 36),
        (HEADER % ("[('tokens', '<u4')]", 9), 32),
        (HEADER % ("[('tokens', '<u4')]", 8), 32),
        (HEADER % ("[('tokens', '|S0')]", 10**12), 0),
        (HEADER % ("[('tokens', '<f4')]", 9), 36),
        (HEADER % ("'|O'", 9), 72),
    ):
        text = header.ljust(117).encode() + b"\n"
        start = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little")
        path = replaced(out, "lengths.npy", start + text + bytes(values))
        with pytest.raises(DamagedError, match="the table of arrays' lengths") as error:
            shardkit.open(out).lengths("tokens")
        assert error.value.where["path"] == path


def test_a_missing_shard_is_named_when_a_conversion_is_planned(made: Path, tmp_path: Path) -> None:
    dataset = Path(shutil.copytree(made, tmp_path / "out"))
    (dataset / "shard-000001.tar").unlink()
    with pytest.raises(NotFoundError, match="cannot open the shard") as error:
        shardkit.convert(dataset, "arrow", tmp_path / "to", workers=0)
    assert error.value.where["path"] == dataset / "shard-000001.tar"


@pytest.mark.parametrize("format", ["arrow", "lmdb", "beton"])
def test_damaged_metadata_in_a_shard_are_named(made: Path, tmp_path: Path, format: str) -> None:
    """Shards of ours without a manifest say themselves what is in them."""
    shardkit.convert(made, format, tmp_path / "to", workers=0)
    with shardkit.open(tmp_path / "to") as dataset:
        path = dataset.shard_path(0)
    shutil.rmtree(tmp_path / "to/__shardkit__")
    assert len(shardkit.open(path)) == 12
    whole = path.read_bytes()
    for old, new in (
        ('"classes"', '"klasses"'),
        ('["class0", "class1", "class2"]', '["class0", "class1", 12345678]'),
        ('"label": {"type": "Int"}', '"label": {"type": 12345}'),
        ('"label": {"type": "Int"}', '"label": ["type", "Int"]'),
        ('"schema"', '"sxhema"'),
        ('"schema": {"image"', '"schema": {{{{{{{{'),
    ):
        if format == "beton":  # whose text has no blanks
            changed = whole.replace(old.replace(" ", "").encode(), new.replace(" ", "").encode())
        else:
            changed = whole.replace(old.encode(), new.encode())
        assert len(changed) == len(whole), "all offsets stay as they are"
        assert changed != whole
        path.write_bytes(changed)
        with pytest.raises(DamagedError, match=r"damaged|contradicts") as error:
            shardkit.open(path)
        assert error.value.where["path"] == path


def test_no_memory_is_taken_for_samples_that_no_shard_has(
    change: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(DamagedError, match=r"at shards\[0\]\.samples"):
        shardkit.open(change(2**40, "shards", 0, "samples"))
    file = {"name": "shard-000000.tar", "bytes": 2**20, "checksum": "0" * 32}
    dataset = change([{"file": file, "samples": 2**26, "beside": []}], "shards")
    (dataset / file["name"]).write_bytes(b"x")
    with pytest.raises(DamagedError, match="not as long as its manifest says"):
        shardkit.convert(dataset, "arrow", tmp_path / "to", workers=0)


def test_a_damaged_result_of_a_task_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = write_images(tmp_path / "in")

    def convert() -> None:
        shardkit.convert(images, "wds", tmp_path / "out", workers=0)

    with monkeypatch.context() as patch:
        patch.setattr("shardkit.conversion.run.assemble", None)
        with pytest.raises(TypeError):
            convert()
    path = tmp_path / "out.partial/tasks/000000/result.json"
    whole = path.read_bytes()
    damages: list[tuple[Any, tuple[Any, ...], str]] = [
        ("x", ("errors",), "errors"),
        (-1, ("shards", 0, "samples"), r"shards\[0\]\.samples"),
        ({"x": 1}, ("stats", "labels"), "labels"),
        (..., ("stats", "text"), "text"),
        ([], ("stats", "fields", "image", "buckets"), "fields.image.buckets"),
    ]
    for value, keys, place in damages:
        path.write_text(json.dumps(put(json.loads(whole), value, keys)))
        said = f"the result of a task is damaged at .*{place}"
        with pytest.raises(DamagedError, match=said) as error:
            convert()
        assert error.value.where["path"] == path
    shutil.rmtree(path.parent)  # as the error says
    convert()


# --- at random -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each format, of splits, and of tokens."""
    root = tmp_path_factory.mktemp("fuzz")
    images = write_images(root / "images", classes=2, each=3)
    (images / "class0/000.txt").write_text("a caption")
    (images / "class0/a.b.jpg").write_bytes((images / "class0/001.jpg").read_bytes())
    (root / "of").mkdir()
    for format in IMAGE_FORMATS:
        shardkit.convert(images, format, root / f"of/{format}", shard_samples=4, workers=0)
    shardkit.convert(images, "hf", root / "of/splits", split="a=0.5,b=0.5", workers=0)
    tokens = [
        {"__key__": str(n), "tokens": np.arange(n, dtype="<u2"), "score": n / 7} for n in range(9)
    ]
    row = shardkit.Array("<u2", (None,))
    schema = {"tokens": row, "score": shardkit.Float()}
    shardkit.convert(tokens, "parquet", root / "of/tokens", schema=schema, workers=0)
    few = [{name: token[name] for name in ("__key__", "tokens")} for token in tokens]
    shardkit.convert(few, "megatron", root / "of/megatron", schema={"tokens": row}, workers=0)
    (root / "texts").mkdir()
    (root / "texts/a.txt").write_text("a word\nand another\n" * 9)
    text = shardkit.TextOptions(tokenizer=write_json(root, "gpt2"), seq_len=8)
    shardkit.convert(root / "texts", "arrow", root / "of/text", text=text, workers=0)
    return root / "of"


def test_a_histogram_of_no_documents_is_shown(datasets: Path, tmp_path: Path) -> None:
    shutil.copytree(datasets / "text", tmp_path / "text")
    path = manifests.manifest_path(tmp_path / "text")
    data = json.loads(path.read_bytes())
    del data[manifests._OWN_CHECKSUM]
    data["text"]["histogram"] = dict.fromkeys(data["text"]["histogram"], 0)
    manifests._write(path, data)
    result = CliRunner().invoke(inspect, [str(tmp_path / "text")])
    assert result.exit_code == 0, result.exception
    assert "Histogram" in result.output


def test_manifests_with_wrong_values_give_samples_or_our_errors(
    datasets: Path, large: bool
) -> None:
    """X1, X4: none ends the process, takes 1 GiB more than a sound one, or 10 seconds."""
    full = int(os.environ.get("SHARDKIT_DAMAGE", "0"))  # as in formats/test_damage.py
    seed = random.randrange(10**6) if full else 2_170_800
    count = (full or 300) if large else 100
    failed, outcomes = in_fork(fuzz, datasets, seed, count)
    assert not failed, "\n".join(failed)[:10_000]
    assert outcomes["open: done"] > count / 20
    assert outcomes["open: DamagedError"] > count / 20


def test_no_object_of_a_manifest_has_an_entry_for_unknown_ones(tmp_path: Path) -> None:
    with shardkit.create(tmp_path / "d", "wds", {"x": shardkit.Int()}) as writer:
        writer.write({"x": 1})
    text = (tmp_path / "d/__shardkit__/manifest.json").read_text()
    assert '"unknown"' not in text
