"""Real processes that train together: ranks with gloo, over datasets that do not divide.

`main` is one rank, which writes down what it got.
"""

from __future__ import annotations

import datetime
import io
import itertools
import json
import tarfile
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import shardkit
from shardkit.errors import ShardkitWarning, UsageError
from shardkit.torch import Loader, StreamingDataset
from tests.stream.data import write_documents
from tests.stream.launch import launch, results

BATCH = 4  # samples of a rank
SAMPLES = {"one_shard": 37, "uneven_shards": 37, "few": 3}
FIXED = [
    ("one_shard", "pad"),
    *itertools.product(["uneven_shards", "few"], ["pad", "drop", "short"]),
]
DOCUMENTS = [1 + 7 * number % 23 for number in range(50)]  # tokens of each
EPOCHS = 2

pytestmark = [pytest.mark.torchrun, pytest.mark.xdist_group("torchrun")]


# --- a rank --------------------------------------------------------------------------------------


def main(*folders):
    data, out = map(Path, folders)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    warnings.simplefilter("ignore", ShardkitWarning)  # that a dataset is small
    got = {}
    for name, last in FIXED:
        options = {"shuffle": True, "batch_size": BATCH, "last": last}
        got[f"{name} {last} Loader"] = epochs(Loader, data / name, options)
        got[f"{name} {last} DataLoader"] = epochs(one_worker, data / name, options)
    for last in ("pad", "drop"):
        options = {"shuffle": True, "batching": shardkit.Dynamic(64), "window": 20, "last": last}
        got[f"documents {last} Loader"] = epochs(Loader, data / "documents", options)
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(got))
    dist.destroy_process_group()


def one_worker(path, **options):
    return DataLoader(StreamingDataset(path, **options), batch_size=None, num_workers=1)


def epochs(door, path, options):
    """Keys, what is valid, and the state behind each batch of some epochs; or why there is none.

    All ranks meet at each step, as they do in training.
    """
    try:
        loader = door(path, **options)
        len(loader)  # a DataLoader does not ask its dataset before
    except UsageError as error:
        meet(-2)
        return str(error)
    made = []
    for _ in range(EPOCHS):
        batches, expected = [], len(loader)
        for step, batch in enumerate(loader):
            meet(step)
            state = loader.state_dict() if isinstance(loader, Loader) else None
            batches.append((batch["__key__"], batch["valid"].tolist(), state))
        meet(-1)
        assert len(batches) == expected
        made.append(batches)
    return made


def meet(step):
    """Wait for the other ranks, which must be at the same step."""
    steps = torch.tensor([step, -step])
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    assert steps.tolist() == [step, -step], f"ranks are at different steps, this one at {step}"


# --- what they must get --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_shards(folder / "one_shard", [37])
    write_shards(folder / "uneven_shards", [1, 29, 2, 5])
    write_shards(folder / "few", [3])
    write_documents(folder / "documents", DOCUMENTS, shard=9)
    return folder


def write_shards(folder, sizes):
    """TARs of somebody else's, with so many samples each."""
    folder.mkdir()
    numbers = itertools.count()
    for shard, size in enumerate(sizes):
        with tarfile.open(folder / f"train-{shard}.tar", "w") as tar:
            for number in itertools.islice(numbers, size):
                member = tarfile.TarInfo(f"{number:04d}.cls")
                member.size = 1
                tar.addfile(member, io.BytesIO(b"1"))


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.large)])
def ranks(request, data, tmp_path_factory):
    """What each rank of several processes got."""
    out = tmp_path_factory.mktemp("out")
    launch(__name__, [[request.param, data, out]])
    return results(out, request.param)


def counted(ranks_batches):
    """How often each sample came in an epoch of all ranks, without padding and with it."""
    real, every = Counter(), Counter()
    for keys, valid, _ in itertools.chain(*ranks_batches):
        real.update(key for key, is_real in zip(keys, valid, strict=True) if is_real)
        every.update(keys)
    return real, every


@pytest.mark.parametrize("door", ["Loader", "DataLoader"])
@pytest.mark.parametrize(("name", "last"), FIXED)
def test_ranks_get_each_sample_once_in_as_many_batches(ranks, name, last, door):
    """S1 and S2, with real processes."""
    samples, size = SAMPLES[name], BATCH * len(ranks)
    got = [rank[f"{name} {last} {door}"] for rank in ranks]
    if last == "drop" and samples < size:
        assert all("smaller than one batch" in error for error in got)
        return
    steps = samples // size if last == "drop" else -(-samples // size)
    for epoch in zip(*got, strict=True):
        assert [len(batches) for batches in epoch] == [steps] * len(ranks)
        real, every = counted(epoch)
        assert set(every) <= {f"{number:04d}" for number in range(samples)}
        assert set(real.values()) == {1}
        assert real.total() == (steps * size if last == "drop" else samples)
        if last == "short":
            # A rank without a sample would wait for the others: it gets one of padding.
            rest = samples - (steps - 1) * size
            assert every.total() == (steps - 1) * size + max(rest, len(ranks))
            ends = [len(batches[-1][0]) for batches in epoch]
            assert max(ends) - min(ends) <= 1
        else:
            assert every.total() == steps * size
            assert {len(keys) for keys, _, _ in itertools.chain(*epoch)} == {BATCH}
    if samples > size:
        assert got[0][0] != got[0][1], "epochs must differ"


@pytest.mark.parametrize("last", ["pad", "drop"])
def test_ranks_get_each_document_once_in_as_many_batches_of_unlike_sizes(ranks, last):
    """S1 and S2 for batches that are planned by length."""
    got = [rank[f"documents {last} Loader"] for rank in ranks]
    for epoch in zip(*got, strict=True):
        assert len({len(batches) for batches in epoch}) == 1
        real, every = counted(epoch)
        assert set(real.values()) == {1}
        if last == "pad":
            assert len(real) == len(DOCUMENTS)
        else:
            assert every == real
            assert len(real) > len(DOCUMENTS) / 2


def test_all_ranks_have_the_same_state_at_every_step(ranks):
    """S4: any of them may save it."""
    for case in (case for case in ranks[0] if case.endswith(" Loader")):
        states = [
            rank[case] if isinstance(rank[case], str) else [s for e in rank[case] for *_, s in e]
            for rank in ranks
        ]
        assert all(each == states[0] for each in states), case


def test_a_worker_of_a_dataloader_changes_nothing(ranks):
    """S3: both doors give each rank the same batches."""
    for rank in ranks:
        for name, last in FIXED:
            one, other = (rank[f"{name} {last} {door}"] for door in ("Loader", "DataLoader"))
            if isinstance(one, str):
                assert one == other
                continue
            for epoch, same in zip(one, other, strict=True):
                assert [batch[:2] for batch in epoch] == [batch[:2] for batch in same]
