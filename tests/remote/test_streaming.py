"""Loaders over data in a store: the same batches, and no more bytes than needed."""

from __future__ import annotations

import os
import pickle
import queue
import re
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.errors import ShardkitWarning, StorageError
from shardkit.opening import open_dataset
from shardkit.options import parse_size
from shardkit.page_cache import PAGE
from shardkit.schema import Array, Bytes, Schema
from shardkit.stream import read_ahead
from shardkit.stream.loader import Loader
from shardkit.stream.order import Order
from shardkit.stream.read_ahead import NextUse
from shardkit.testing_samples import in_fork
from tests.conftest import few
from tests.remote.buckets import Bucket
from tests.remote.proxy import Rule
from tests.remote.servers import Google

pytestmark = pytest.mark.filterwarnings("ignore:the cache holds")
FORMATS = ("wds", "lmdb", "arrow", "parquet", "hf", "beton", "megatron")
SAMPLES, SIZE = 600, 40_000  # 24 MB: enough pages to have more of them than a cache takes


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each format, the others than TAR with a sixth of the samples."""
    root, rng = tmp_path_factory.mktemp("datasets"), np.random.default_rng(5)
    values = [rng.integers(0, 200, SIZE, np.uint8) for _ in range(SAMPLES)]
    for format in FORMATS:
        tokens = format == "megatron"
        kind: Any = Array("|u1", (None,)) if tokens else Bytes()
        samples = SAMPLES if format == "wds" else SAMPLES // 6
        with shardkit.create(root / format, format, Schema({"x": kind}), shard_size="3MB") as out:
            for n, value in enumerate(values[:samples]):
                out.write({"__key__": f"k{n}", "x": value if tokens else value.tobytes()})
    return root


@pytest.fixture(scope="module")
def data(google: Google, datasets: Path) -> Bucket:
    return Bucket(google, datasets)


def loader(source: Any, options: Any = None, **more: Any) -> Loader:
    return Loader(
        source, batch_size=16, shuffle=True, seed=7, storage_options=options or None, **more
    )


def epochs(made: Loader, count: int) -> list[bytes]:
    """All that comes in some epochs."""
    return [pickle.dumps(list(made)) for _ in range(count)]


def stored(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("format", "cache"),
    [
        *((format, "memory") for format in FORMATS),
        *(pytest.param(*case.values, "folder", marks=case.marks) for case in few(FORMATS, "wds")),
    ],
)
def test_the_batches_are_those_of_this_machine(
    format: str, cache: str, data: Bucket, datasets: Path, tmp_path: Path
) -> None:
    """With room for half of the dataset."""
    more: dict[str, Any] = {"cache_limit": stored(datasets / format) // 2}
    if cache == "folder":
        more["cache"] = tmp_path / "cache"
    here, there = loader(datasets / format), loader(data.url(format), data.options, **more)
    assert epochs(there, 2) == epochs(here, 2)


def downloads(seen: Bucket, made: Loader, count: int) -> list[float]:
    """Bytes of each epoch."""
    found = []
    for _ in range(count):
        seen.proxy.clear()
        for _ in made:
            pass
        found.append(seen.proxy.count("GET").sent)
    return found


def test_an_epoch_downloads_the_dataset_once(seen: Bucket, datasets: Path) -> None:
    size = stored(datasets / "wds")
    first, second = downloads(seen, loader(seen.url("wds"), seen.options), 2)
    assert 0.9 * size < first <= 1.02 * size
    assert second == 0


@pytest.mark.parametrize("folder", [False, pytest.param(True, marks=pytest.mark.large)])
def test_with_room_for_half_later_epochs_download_half(
    folder: bool, seen: Bucket, datasets: Path, tmp_path: Path
) -> None:
    size = stored(datasets / "wds")
    more = {"cache": tmp_path} if folder else {}
    made = loader(seen.url("wds"), seen.options, cache_limit=size // 2, **more)
    first, later = downloads(seen, made, 2)
    assert first <= 1.15 * size  # the samples that came before their page was there
    assert later <= 0.57 * size  # of 25 pages, one is 4 %


def test_an_epoch_does_not_begin_before_the_cache_knows_of_it(
    data: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all pages in the cache are needed later than those that its threads read first, which
    then take their room."""
    known: list[int] = []
    reads: list[int] = []
    at = NextUse.at

    def come_to(self: NextUse, epoch: int, *where: Any) -> None:
        known.append(epoch)
        at(self, epoch, *where)

    class Reads(queue.SimpleQueue):  # type: ignore[type-arg]
        def put(self, read: Any, *how: Any) -> None:
            if read is not None:
                reads.append(known[-1])
            super().put(read, *how)

    monkeypatch.setattr(NextUse, "at", come_to)
    monkeypatch.setattr(read_ahead, "SimpleQueue", Reads)
    epochs(loader(data.url("lmdb"), data.options), 2)
    half = len(reads) // 2
    assert half >= SAMPLES // 6
    assert reads == [0] * half + [1] * half


@pytest.mark.large
def test_a_cache_that_is_small_for_the_window_is_warned_of(seen: Bucket, datasets: Path) -> None:
    """Once, with a size that is enough: with that size the second epoch requests nothing."""
    url, size = seen.url("wds"), stored(datasets / "wds")
    with pytest.warns(ShardkitWarning, match="the cache holds 12 MB") as told:
        list(loader(url, seen.options, cache_limit="12MB"))
    assert len(told) == 1
    enough = re.findall('cache_limit="(.*?)"', str(told[0].message))
    assert downloads(seen, loader(url, seen.options, cache_limit=enough[0]), 2)[1] == 0
    assert size < parse_size(enough[0]) < 1.1 * size
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardkitWarning)
        list(loader(url, seen.options, cache_limit="12MB", window=140))
        list(loader(url, seen.options, cache_limit=enough[0]))


def test_two_machines_download_half_each(seen: Bucket, datasets: Path, tmp_path: Path) -> None:
    for rank in range(2):
        more = {"parts": 2, "rank": rank, "world_size": 2, "cache": tmp_path / str(rank)}
        made = loader(seen.url("wds"), seen.options, **more)
        # The pages where blocks are cut are of both.
        assert downloads(seen, made, 1)[0] <= 0.55 * stored(datasets / "wds") + 3 * PAGE


def test_ranks_of_one_machine_request_each_page_once(
    seen: Bucket, datasets: Path, tmp_path: Path
) -> None:
    """At the same time, and of the same pages: all samples of a block are shuffled."""
    program = (
        "import sys; from shardkit.stream.loader import Loader\n"
        "made = Loader(sys.argv[1], batch_size=16, shuffle=True, rank=int(sys.argv[2]),"
        " world_size=2, cache=sys.argv[3])\n"
        "for batch in made: pass"
    )
    # Both have asked for pages before either gets one.
    seen.proxy.add(Rule(method="GET", match="tar", gather=2, times=2))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, seen.url("wds"), str(rank), str(tmp_path)],
            env={**os.environ, **seen.environ},
        )
        for rank in range(2)
    ]
    assert [process.wait(120) for process in ranks] == [0, 0]
    assert seen.proxy.count("GET", "tar").sent <= stored(datasets / "wds")


def test_opening_takes_few_requests_and_the_first_batch_two_rounds(seen: Bucket) -> None:
    """An index and pages, and beside them the list of checksums: each request waits for one other
    at most."""
    found = seen.open("wds")
    assert len(found) == SAMPLES
    assert seen.proxy.count().requests <= 10
    assert seen.proxy.count(match=r"\.tar").requests == 0
    seen.proxy.clear()
    next(iter(Loader(found, batch_size=16, shuffle=True)))
    kinds = {(e.method, e.target.rpartition(".")[2]) for e in seen.proxy.log()}
    assert kinds == {("GET", "npy"), ("GET", "tar"), ("HEAD", "xxh3"), ("GET", "xxh3")}


def test_faults_that_pass_change_nothing(seen: Bucket, datasets: Path) -> None:
    faults: list[dict[str, Any]] = [{"status": 503}, {"reset_after": 1000}, {"shorten": 100}]
    for number, fault in enumerate([*faults, {"whole": True}]):
        seen.proxy.add(Rule(method="GET", match="tar", skip=3 + 4 * number, times=3, **fault))
    assert epochs(loader(seen.url("wds"), seen.options), 1) == epochs(loader(datasets / "wds"), 1)
    assert seen.proxy.count("GET", "tar").requests > 19  # all faults


def test_a_store_that_goes_away_ends_the_epoch_with_an_error(seen: Bucket) -> None:
    batches = iter(loader(seen.url("wds"), seen.options, cache_limit=2 * PAGE))
    next(batches)
    seen.proxy.add(Rule(status=503))
    with pytest.raises(StorageError, match="returned an unexpected response"):
        list(batches)


def test_a_state_goes_on_from_another_machine(data: Bucket, datasets: Path) -> None:
    here, there = loader(datasets / "wds"), loader(data.url("wds"), data.options)
    batches = iter(here)
    for _ in range(5):
        next(batches)
    there.load_state_dict(here.state_dict())
    assert pickle.dumps(list(batches)) == pickle.dumps(list(there))


def test_a_fork_does_not_wait_for_requests_of_its_parent(seen: Bucket) -> None:
    made = loader(seen.url("wds"), seen.options).dataset
    # Those of this process, as many as it makes at a time, are held until the other has its batch.
    thread = threading.Thread(target=lambda: next(made.iterate(0)))
    seen.proxy.add(Rule(method="GET", match="tar", times=1, hold=True))
    thread.start()
    seen.proxy.wait("GET", "tar")

    def work() -> None:
        signal.alarm(120)  # ends it
        next(made.iterate(0))

    try:
        in_fork(work)
    finally:
        seen.proxy.clear()
        thread.join()


def test_a_program_ends_in_the_middle_of_an_epoch(data: Bucket) -> None:
    program = (
        "import sys; from shardkit.stream.dataset import StreamingDataset\n"
        "sys.made = iter(StreamingDataset(sys.argv[1], batch_size=8)); next(sys.made)"
    )
    command = [sys.executable, "-c", program, data.url("wds")]
    environ = {**os.environ, **data.environ}
    done = subprocess.run(command, env=environ, check=True, capture_output=True)
    assert done.stderr == b""


# --- the order of use ----------------------------------------------------------------------------


def test_next_use_is_that_of_the_order(datasets: Path) -> None:
    """Against a plain simulation: the next window in which any sample of a block comes."""
    order = Order(np.array([100, 250, 70]), shuffle=True, seed=4, parts=3, window=32)
    for parts in (None, frozenset({1})):
        for epoch in (0, 1):
            begin, end = order.uses(epoch, parts)
            drawn = order.draw(epoch, np.arange(order.samples)).number
            for block in range(order.blocks):
                first = order._starts[block]
                inside = (drawn >= first) & (drawn < first + order._sizes[block])
                positions = np.flatnonzero(inside)
                part = positions % order.parts
                windows = positions // order.parts // order.window
                if parts is not None:
                    windows = windows[np.isin(part, list(parts))]
                if len(windows):
                    finite = [w for w in (begin[block], end[block]) if w < np.inf]
                    assert {*finite} <= {*windows.tolist()}
                    assert min(finite) == min(windows) or len({*part.tolist()}) > 1
    dataset = open_dataset(datasets / "wds")
    sizes = np.array([dataset.extent(n)[0] for n in range(dataset.shards)])
    order = Order(sizes, shuffle=True, seed=1, window=64)
    assert order.blocks_of(0, 0) == slice(0, 1)
    assert order.blocks_of(0, len(dataset) - 1) == slice(0, order.blocks)
    assert NextUse(order, [dataset])("unknown", 0) == np.inf


def test_a_folder_for_the_cache_is_left_as_it_was_by_local_data(
    datasets: Path, tmp_path: Path
) -> None:
    with pytest.raises(shardkit.UsageError, match="for remote data"):
        loader(datasets / "wds", cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
