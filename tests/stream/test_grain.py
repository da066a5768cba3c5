"""`shardkit.open` as a data source of Grain, in this process and in another."""

import numpy as np
import pytest

import shardkit
from tests.conftest import IMAGE_FORMATS, few

grain = pytest.importorskip("grain", reason="needs grain")


class Half(grain.transforms.Map):
    """Small enough to go to another process."""

    def map(self, element):
        return {"key": element["__key__"], "half": element["label"] / 2}


def without_caption(sample):
    """Grain puts samples into batches only if all have the same fields."""
    return {"image": len(sample["image"]), "label": sample["label"], "key": sample["__key__"]}


@pytest.mark.parametrize("format", few(IMAGE_FORMATS))
def test_a_map_dataset_shuffles_makes_batches_and_reads_in_threads(every, format):
    dataset = shardkit.open(every(format))
    source = grain.MapDataset.source(dataset).map(without_caption)
    assert labels(source.to_iter_dataset()) == list(range(37))  # by 16 threads
    batches = source.seed(3).shuffle().batch(8)
    assert len(batches) == 5
    came = [label for n in range(len(batches)) for label in batches[n]["label"].tolist()]
    assert sorted(came) == list(range(37))
    assert came != sorted(came)
    first = batches[0]
    for label, key, size in zip(first["label"], first["key"], first["image"], strict=True):
        assert (key, size) == (f"{label:04d}", len(dataset[int(label)]["image"]))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.large)])
def test_a_data_loader_reads_in_a_worker_and_continues_with_a_dataset_opened_anew(every, workers):
    """Grain compares data sources by their text, which must be the same each time."""

    def iterate():
        sampler = grain.samplers.IndexSampler(37, shuffle=True, seed=5, num_epochs=2)
        return iter(
            grain.DataLoader(
                data_source=shardkit.open(every("wds")), sampler=sampler, operations=[Half()],
                worker_count=workers,
            )
        )  # fmt: skip

    first, again = iterate(), iterate()
    samples = [next(first) for _ in range(10)]
    again.set_state(first.get_state())
    rest = list(first)
    assert list(again) == rest
    samples += rest
    assert sorted(s["key"] for s in samples) == sorted([f"{n:04d}" for n in range(37)] * 2)
    assert all(int(sample["key"]) / 2 == sample["half"] for sample in samples)


def of_two_epochs(photos, workers):
    """Batches of two epochs in an order of Grain's, read in processes if there are any."""
    dataset = grain.MapDataset.source(shardkit.open(photos)).seed(3).shuffle().repeat(2)
    batches = dataset.map(without_caption).batch(6).to_iter_dataset()
    if workers:
        options = grain.multiprocessing.MultiprocessingOptions(num_workers=workers)
        batches = batches.mp_prefetch(options)
    return iter(batches)


def labels(batches):
    return [np.asarray(batch["label"]).tolist() for batch in batches]


@pytest.mark.parametrize(
    ("format", "workers"), [("wds", 0), pytest.param("lmdb", 2, marks=pytest.mark.large)]
)
def test_epochs_of_a_map_dataset_continue_in_the_middle(every, format, workers):
    expected = labels(of_two_epochs(every(format), 0))
    came = [label for batch in expected for label in batch]
    assert sorted(came[:37]) == sorted(came[37:]) == list(range(37))
    assert came[:37] != came[37:]
    first, again = of_two_epochs(every(format), workers), of_two_epochs(every(format), workers)
    done = [next(first)["label"].tolist() for _ in range(8)]
    again.set_state(first.get_state())
    rest = labels(again)
    assert done + rest == expected
    assert labels(first) == rest
