"""`shardkit merge A B -o C`, and making shards of another size: nothing is decoded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.errors import UsageError
from shardkit.testing import everything
from tests.conftest import IMAGE_FORMATS, few, files_of
from tests.conversion.test_any_to_any import assert_holds, no_codec, write
from tests.test_cli import run

__all__ = ["no_codec"]  # of all tests here
SAMPLES = [everything(n) for n in range(12)]


@pytest.mark.parametrize("format", few(IMAGE_FORMATS))
def test_several_datasets_become_one_of_their_format(tmp_path: Path, format: str) -> None:
    write(tmp_path / "a", format, SAMPLES[:5])
    write(tmp_path / "b", format, SAMPLES[3:9])
    result = shardkit.merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "c")
    assert (result.format, result.samples) == (format, 11)
    both = [("a", range(5)), ("b", range(3, 9))]
    keys = [f"{name}/folder/{n:04d}" for name, numbers in both for n in numbers]
    samples = [SAMPLES[n] for _, numbers in both for n in numbers]
    expected = [{**s, "__key__": key} for key, s in zip(keys, samples, strict=True)]
    assert_holds(tmp_path / "c", expected)
    shardkit.convert([tmp_path / "a", tmp_path / "b"], format, tmp_path / "d", workers=0)
    assert files_of(tmp_path / "c") == files_of(tmp_path / "d")


def test_classes_of_one_name_are_one(tmp_path: Path) -> None:
    for name, classes in (("a", ["cat", "dog"]), ("b", ["ant", "cat"])):
        schema = {"label": shardkit.Int()}
        with shardkit.create(tmp_path / name, "wds", schema, classes=classes) as writer:
            for label in range(2):
                writer.write({"label": label})
    assert "4 samples" in run("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "c").stdout
    with shardkit.open(tmp_path / "c") as merged:
        assert merged.classes is not None
        assert [merged.classes[s["label"]] for s in merged] == ["cat", "dog", "ant", "cat"]


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", "wds", SAMPLES[:1])
    write(tmp_path / "b", "lmdb", SAMPLES[1:2])
    with pytest.raises(UsageError, match="have different formats") as refused:
        shardkit.merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "c")
    assert "convert" in str(refused.value)
    assert "give -o OUT" in run("merge", tmp_path / "a", tmp_path / "b", check=2).stderr
    assert "Missing argument" in run("merge", check=2).stderr
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_tokens_are_merged_and_cut_into_other_shards(tmp_path: Path) -> None:
    schema = {"tokens": shardkit.Array("<i4", (None,))}
    tokens = [np.arange(n, 3 * n, dtype="<i4") for n in range(1, 9)]
    for name, part in (("a", tokens[:4]), ("b", tokens[4:])):
        with shardkit.create(tmp_path / name, "megatron", schema) as writer:
            for each in part:
                writer.write({"tokens": each})
    shardkit.merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "c")
    shardkit.convert(tmp_path / "c", "megatron", tmp_path / "d", shard_samples=3, workers=0)
    for name, shards in (("c", 1), ("d", 3)):
        with shardkit.open(tmp_path / name) as dataset:
            assert dataset.shards == shards
            found = [sample["tokens"].tolist() for sample in dataset]
            assert found == [each.tolist() for each in tokens]
