"""Any sequence of samples as a dataset: for loaders, and for what has no shards."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.stream import Loader

SCHEMA = shardkit.Schema({"label": shardkit.Int(), "json": shardkit.Json()})
SAMPLES = [{"__key__": f"{n}", "label": n % 2, "json": [n]} for n in range(10)]


def test_a_list_of_samples_is_a_dataset():
    names = {"label": ["even", "odd"]}
    dataset = shardkit.Dataset.from_sequence(SAMPLES, SCHEMA, class_names=names, size=99)
    assert list(dataset) == SAMPLES
    assert (dataset.schema, dataset.classes) == (SCHEMA, ("even", "odd"))
    assert (dataset.shards, dataset.extent(0)) == (1, (10, 99))
    assert pickle.loads(pickle.dumps(dataset))[3] == SAMPLES[3]
    dataset[3]["json"].append(4)
    assert SAMPLES[3]["json"] == [3]
    with pytest.raises(IndexError):
        dataset[10]


def test_a_loader_reads_it_as_it_reads_shards(tmp_path):
    with shardkit.create(tmp_path / "shards", to="wds", schema=SCHEMA) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    sequence = shardkit.Dataset.from_sequence(SAMPLES, SCHEMA)
    one, other = (
        list(Loader(source, batch_size=4, shuffle=True, seed=3))
        for source in (sequence, tmp_path / "shards")
    )
    for batch, stored in zip(one, other, strict=True):
        assert batch["__key__"] == stored["__key__"]
        assert np.array_equal(batch["label"], stored["label"])


def test_errors_of_reading_say_which_sample():
    class Broken(list):  # type: ignore[type-arg]
        schema = SCHEMA

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            raise OSError("gone")

    with pytest.raises(shardkit.ShardkitError, match="gone") as caught:
        shardkit.Dataset.from_sequence(Broken(SAMPLES))[4]
    assert caught.value.where["position"] == 4


def test_an_error_of_the_sequence_itself_blames_no_field():
    asked: list[int] = []

    class Broken(list):  # type: ignore[type-arg]
        raised: Exception = RuntimeError("my own bug")

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            asked.append(index)
            raise self.raised

    dataset = shardkit.Dataset.from_sequence(Broken(SAMPLES), SCHEMA)
    with pytest.raises(shardkit.SampleError) as caught:
        dataset[4]
    assert caught.value.what == "the sequence raised RuntimeError: my own bug"
    assert caught.value.where == {"path": Path(), "position": 4}
    assert caught.value.expected is None
    assert caught.value.__cause__ is Broken.raised
    assert asked == [4]
    Broken.raised = shardkit.SampleError("no such image", key="k")
    with pytest.raises(shardkit.SampleError, match="no such image") as caught:
        dataset[4]
    assert caught.value.where == {"path": Path(), "position": 4, "key": "k"}
    Broken.raised = MemoryError()
    with pytest.raises(MemoryError):
        dataset[4]


def test_a_value_of_a_sequence_that_is_invalid_is_named_with_its_field():
    samples = [{"__key__": "a", "label": 1, "json": {1, 2}}]
    with pytest.raises(shardkit.ShardkitError) as caught:
        shardkit.Dataset.from_sequence(samples, SCHEMA)[0]
    assert (caught.value.where["key"], caught.value.where["field"]) == ("a", "json")
