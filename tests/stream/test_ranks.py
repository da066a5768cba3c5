"""Real processes with gloo that train together, over datasets that do not divide (S1 to S4, S6).

`main` is one rank: what it got, and what it was told of ranks that differ.
"""

import itertools
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import shardkit
from shardkit.errors import ShardkitWarning, UsageError
from shardkit.stream import ranks as ranks_module
from shardkit.stream.ranks import Comparison, World
from shardkit.torch import Loader, StreamingDataset
from tests.stream.data import write_documents, write_photos
from tests.stream.launch import launch

FIXED = {"shuffle": True, "batch_size": 4, "fields": ["label"]}
PLANNED = {"shuffle": True, "batching": shardkit.Dynamic(64), "window": 20}
CASES = [*itertools.product(["a", "few"], ["pad", "drop", "short"], [None, 1])]
CASES += [("documents", last, None) for last in ("pad", "drop")]
OPTIONS = {"global_batch_size": 4, "shuffle": True, "fields": ["label"]}

pytestmark = [pytest.mark.torchrun, pytest.mark.xdist_group("torchrun")]


# --- a rank --------------------------------------------------------------------------------------


def main(data):
    data = Path(data)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*smaller than one batch", ShardkitWarning)
    rank, world = dist.get_rank(), dist.get_world_size()
    odd = rank == world - 1
    got = {str(case): epochs(data, *case) for case in CASES}

    def case(name, path="a", state=None, door=Loader, **options):
        loader = door(data / path, **{**OPTIONS, **options})
        if state is not None:
            loader.load_state_dict(state)
        got[name] = told(loader)

    case("right")
    middle = Loader(data / "a", **OPTIONS)
    for _ in zip(range(3), middle, strict=False):
        pass
    state = middle.state_dict()
    case("resumed", state=state)
    case("numpy", to="numpy")
    case("worker", door=lambda *a, **k: in_workers(1, *a, **k))
    case("no worker", door=lambda *a, **k: in_workers(0, *a, **k))
    uneven = Loader(data / "a", **OPTIONS)
    for _ in zip(range(rank + 1), uneven, strict=False):  # each rank stops elsewhere
        pass
    got["stopped early"] = told(uneven)
    if rank == 0:  # nobody else looks at batches, and nobody waits
        list(Loader(data / "b", **{**OPTIONS, "rank": 0, "world_size": 1}))
        next(iter(Loader(data / "b", check_ranks=False, **OPTIONS)))
    case("after a look")
    looked = Loader(data / "a", **OPTIONS)
    if rank == 0:
        next(iter(looked))
    looked.set_epoch(0)
    got["looked, then set_epoch"] = told(looked)
    case("other state", state=state if odd else None)
    case("other dataset", path="b" if odd else "a")
    case("other dataset, first", path="a" if rank else "b")
    case("other seed", seed=int(odd))
    case("other batch size", global_batch_size=8 if odd else 4)
    case("unchecked", seed=int(odd), check_ranks=False)
    case("other seed, no worker", seed=int(odd), door=lambda *a, **k: in_workers(0, *a, **k))
    late = Loader(data / "a", **OPTIONS)
    late.set_epoch(int(odd))
    got["other epoch"] = told(late)
    return got


def in_workers(workers, *args, **options):
    return DataLoader(StreamingDataset(*args, **options), batch_size=None, num_workers=workers)


def epochs(data, name, last, workers, **place):
    """Keys, what is valid, and the state behind each batch of two epochs; or why there is none."""
    options = {**(PLANNED if name == "documents" else FIXED), "last": last, **place}
    try:
        made = in_workers(1, data / name, **options) if workers else Loader(data / name, **options)
        steps, found = len(made), []
    except UsageError as error:
        meet(-2)
        return str(error)
    for epoch in range(2):
        for step, batch in enumerate(made):
            meet(step)
            state = None if workers else made.state_dict()
            found.append([epoch, batch["__key__"], batch["valid"].tolist(), state])
        meet(-1)
    assert len(found) == 2 * steps
    return found


def meet(step):
    """Wait for the other ranks, as in training: they must be at the same step."""
    if dist.is_initialized():
        steps = torch.tensor([step, -step])
        dist.all_reduce(steps, dist.ReduceOp.MAX)
        assert steps.tolist() == [step, -step], f"ranks are at different steps, this at {step}"


def told(loader):
    """What a rank is told in two epochs, in which all meet after each step, as in training."""
    said = None
    for _ in range(2):
        batches = iter(loader)
        for _ in range(100):
            try:
                next(batches)
                over = 0
            except StopIteration:
                over = 1
            except UsageError as error:
                said, over = str(error), 2
            state = torch.tensor(over)
            dist.all_reduce(state, dist.ReduceOp.MAX)
            if state == 2 and said is None:  # the step that no optimizer does: others hear of it
                try:
                    list(batches)
                except UsageError as error:
                    said = str(error)
            if state:
                break
        if said is not None:
            return said
    return said


# --- what they must get and be told --------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for name, samples in (("a", 37), ("b", 36), ("few", 3)):
        write_photos(folder / name, samples=samples)
    write_documents(folder / "documents", [1 + 7 * n % 23 for n in range(50)], shard=9)
    return folder


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.large)])
def ranks(request, data):
    return launch(__name__, [[request.param, data]])[0]


@pytest.mark.filterwarnings("ignore:.*smaller than one batch")
def test_processes_get_what_loaders_do_that_are_told_their_rank(ranks, data):
    """S1 to S4, which tests/stream/test_loader.py proves of those; and a worker changes nothing."""
    for (rank, got), case in itertools.product(enumerate(ranks), CASES):
        expected = epochs(data, *case[:2], None, rank=rank, world_size=len(ranks))
        if case[2] and not isinstance(expected, str):
            expected = [[*batch[:3], None] for batch in expected]
        assert got[str(case)] == json.loads(json.dumps(expected)), case
        refused = case[:2] == ("few", "drop")
        assert ("smaller than one batch" in got[str(case)]) is refused


RIGHT = [
    "right", "resumed", "numpy", "worker", "no worker", "stopped early", "after a look",
    "looked, then set_epoch",
]  # fmt: skip


@pytest.mark.parametrize("case", [*RIGHT, "unchecked"])
def test_ranks_that_read_the_same_are_told_nothing(ranks, case):
    assert [rank[case] for rank in ranks] == [None] * len(ranks)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other state", ["progress [0, 0]", "progress [12, 0]"]),
        ("other dataset", ["datasets", "samples 37", "samples 36"]),
        ("other dataset, first", ["datasets"]),
        ("other seed", ["seed 0", "seed 1"]),
        ("other batch size", ["batch_size"]),
        ("other seed, no worker", ["seed 0", "seed 1"]),
        ("other epoch", ["epoch 0", "epoch 1"]),
    ],
)
def test_all_ranks_are_told_which_of_them_differ_and_in_what(ranks, case, words):
    world = len(ranks)
    odd = 0 if case.endswith("first") else world - 1
    for rank in ranks:
        assert "the ranks do not read the same data" in rank[case], case
        assert f"on all {world} ranks" in rank[case]
        assert f"rank {odd}: " in rank[case]
        assert all(word in rank[case] for word in words)


def test_the_error_says_what_differs_from_a_rank_that_is_further(monkeypatch):
    monkeypatch.setattr(ranks_module, "_FACTS_SECONDS", 0)
    store = dist.HashStore()
    for number in (1, 2):
        Comparison(store, World(0, 2), "loader", number, {"seed": 0})
    with pytest.raises(UsageError) as error:
        Comparison(store, World(1, 2), "loader", 1, {"seed": 1})
    assert "the same seed on all 2 ranks" in str(error.value)
    assert "rank 1: seed 1; another rank: seed 0" in str(error.value)


def test_a_fork_while_torch_is_imported_is_silent():
    code = """
import os, sys, types
import shardkit.stream
sys.modules["torch"] = types.ModuleType("torch")
if os.fork():
    os.wait()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr == ""
