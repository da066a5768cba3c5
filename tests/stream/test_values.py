"""What reaches the training loop is what was asked for, whichever door it comes through."""

from __future__ import annotations

import pytest

import shardkit
import shardkit.stream
from shardkit.stream import batching
from shardkit.torch import Loader
from tests.stream.data import write_documents, write_photos

CROP = shardkit.CenterCrop(16)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("values") / "photos", samples=8)


# --- what the user writes into a batch -----------------------------------------------------------


def test_what_is_written_into_a_batch_does_not_come_back(photos):
    for loader in (shardkit.stream.Loader(photos, batch_size=4), Loader(photos, batch_size=4)):
        for _ in range(2):
            loader.set_epoch(0)
            batch = next(iter(loader))
            assert batch["valid"].tolist() == [True] * 4
            assert batch["label"].tolist() == [0, 1, 2, 3]
            batch["valid"][:] = False
            batch["label"][:] = 99


def test_loaders_and_iterations_of_one_dataset_plan_each_window_once(tmp_path, monkeypatch):
    """They shared one plan, which each of them made anew at each step."""
    plans, plan = [], batching.Pack.plan
    monkeypatch.setattr(batching.Pack, "plan", lambda *at: plans.append(at) or plan(*at))
    path = write_documents(tmp_path / "documents", [1 + n % 5 for n in range(80)])
    dataset = shardkit.stream.StreamingDataset(path, batching=shardkit.Pack(8, 2), window=20)

    def planned(one, other):
        plans.clear()
        next(other)  # so that they are at different windows
        assert sum(1 for _ in zip(one, other, strict=False)) > 12
        return len(plans)

    loaders = [shardkit.stream.Loader(dataset, threads=0, prefetch=1) for _ in range(2)]
    loaders[1].set_epoch(1)
    assert planned(*map(iter, loaders)) <= 8
    assert planned(iter(loaders[0]), iter(loaders[0])) <= 8
    assert planned(dataset.iterate(0), dataset.iterate(1)) <= 8
