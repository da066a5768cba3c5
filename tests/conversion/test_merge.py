"""`shardkit merge A B -o C`, and making shards of another size: nothing is decoded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import shardkit
from shardkit.testing import everything
from tests.conversion.test_any_to_any import no_codec

__all__ = ["no_codec"]  # of all tests here
SAMPLES = [everything(n) for n in range(12)]


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
