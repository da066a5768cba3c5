"""`shardkit.open` as a data source of Grain, in this process and in another."""

from __future__ import annotations

import numpy as np
import pytest

import shardkit
from tests.conftest import IMAGE_FORMATS, few
from tests.stream.data import write_photos

grain = pytest.importorskip("grain", reason="needs grain")


class Half(grain.transforms.Map):
    """Small enough to go to another process."""

    def map(self, element):
        return {"key": element["__key__"], "half": element["label"] / 2}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("grain")
    return {format: write_photos(root / format, format) for format in IMAGE_FORMATS}


def without_caption(sample):
    """Grain puts samples into batches only if all have the same fields."""
    return {"image": len(sample["image"]), "label": sample["label"], "key": sample["__key__"]}


@pytest.mark.parametrize("format", few(IMAGE_FORMATS))
def test_a_map_dataset_shuffles_and_makes_batches(photos, format):
    dataset = shardkit.open(photos[format])
    batches = grain.MapDataset.source(dataset).seed(3).shuffle().map(without_caption).batch(8)
    assert len(batches) == 5
    came = [label for n in range(len(batches)) for label in batches[n]["label"].tolist()]
    assert sorted(came) == list(range(37))
    assert came != sorted(came)
    first = batches[0]
    for label, key, size in zip(first["label"], first["key"], first["image"], strict=True):
        assert key == f"{label:04d}"
        assert size == len(dataset[int(label)]["image"])


def test_threads_of_grain_read_the_same(photos):
    """`to_iter_dataset` reads in 16 threads."""
    dataset = grain.MapDataset.source(shardkit.open(photos["wds"])).map(without_caption)
    found = [sample["label"] for sample in dataset.to_iter_dataset()]
    assert found == list(range(37))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.large)])
def test_a_data_loader_samples_in_this_process_and_in_a_worker(photos, workers):
    loader = grain.DataLoader(
        data_source=shardkit.open(photos["wds"]),
        sampler=grain.samplers.IndexSampler(37, shuffle=True, seed=5, num_epochs=2),
        operations=[Half(), grain.transforms.Batch(6)],
        worker_count=workers,
    )
    batches = list(loader)
    keys = np.concatenate([batch["key"] for batch in batches])
    halves = np.concatenate([batch["half"] for batch in batches])
    assert sorted(keys.tolist()) == sorted([f"{n:04d}" for n in range(37)] * 2)
    assert [int(key) / 2 for key in keys] == halves.tolist()


def test_a_data_loader_continues_at_a_state_with_a_dataset_opened_anew(photos):
    """Grain compares data sources by their text, which must be the same each time."""

    def iterate():
        sampler = grain.samplers.IndexSampler(37, shuffle=True, seed=5, num_epochs=1)
        return iter(
            grain.DataLoader(
                data_source=shardkit.open(photos["wds"]), sampler=sampler, operations=[Half()]
            )
        )

    first, again = iterate(), iterate()
    for _ in range(10):
        next(first)
    again.set_state(first.get_state())
    assert [sample["key"] for sample in again] == [sample["key"] for sample in first]


def of_two_epochs(photos, workers):
    """Batches of two epochs in an order of Grain's, read in processes if there are any."""
    dataset = grain.MapDataset.source(shardkit.open(photos)).seed(3).shuffle().repeat(2)
    batches = dataset.map(without_caption).batch(6).to_iter_dataset()
    if workers:
        options = grain.multiprocessing.MultiprocessingOptions(num_workers=workers)
        batches = batches.mp_prefetch(options)
    return iter(batches)


def labels(batches):
    return [batch["label"].tolist() for batch in batches]


@pytest.mark.parametrize(
    ("format", "workers"), [("wds", 0), pytest.param("lmdb", 2, marks=pytest.mark.large)]
)
def test_epochs_of_a_map_dataset_continue_in_the_middle(photos, format, workers):
    expected = labels(of_two_epochs(photos[format], 0))
    every = [label for batch in expected for label in batch]
    assert sorted(every[:37]) == sorted(every[37:]) == list(range(37))
    assert every[:37] != every[37:]
    first, again = of_two_epochs(photos[format], workers), of_two_epochs(photos[format], workers)
    done = [next(first)["label"].tolist() for _ in range(8)]
    again.set_state(first.get_state())
    rest = labels(again)
    assert done + rest == expected
    assert labels(first) == rest
