"""Loaders over data in a store: the same batches, and no more bytes than needed.

The store is our own small one, which answers in a tenth of the time that moto takes.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit import storage
from shardkit.errors import ShardkitWarning, StorageError
from shardkit.opening import open_dataset
from shardkit.options import parse_size
from shardkit.page_cache import PAGE, MemoryCache
from shardkit.remote import store as stores
from shardkit.schema import Array, Bytes, Schema
from shardkit.stream.loader import Loader
from shardkit.stream.order import Order
from shardkit.stream.read_ahead import NextUse
from tests.remote.conftest import Through
from tests.remote.proxy import Proxy, Rule
from tests.remote.servers import Google
from tests.remote.test_reading import upload

pytestmark = pytest.mark.filterwarnings("ignore:the cache holds")
FORMATS = ("wds", "lmdb", "arrow", "parquet", "hf", "beton", "megatron")
SAMPLES, SIZE = 600, 40_000  # 24 MB: enough pages to have more of them than a cache takes


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each format, the others than TAR with a third of the samples."""
    root, rng = tmp_path_factory.mktemp("datasets"), np.random.default_rng(5)
    values = [rng.integers(0, 200, SIZE, np.uint8) for _ in range(SAMPLES)]
    for format in FORMATS:
        tokens = format == "megatron"
        kind: Any = Array("|u1", (None,)) if tokens else Bytes()
        samples = SAMPLES if format == "wds" else SAMPLES // 3
        with shardkit.create(root / format, format, Schema({"x": kind}), shard_size="3MB") as out:
            for n, value in enumerate(values[:samples]):
                out.write({"__key__": f"k{n}", "x": value if tokens else value.tobytes()})
    return root


@pytest.fixture(scope="module")
def bucket(google: Google, datasets: Path) -> str:
    return upload(google, datasets)


def loader(source: Any, options: dict[str, Any], **more: Any) -> Loader:
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
        pytest.param(
            format, cache, marks=[] if "memory" in cache or format == "wds" else pytest.mark.large
        )
        for format in FORMATS
        for cache in ("memory", "half", "folder")
    ],
)
def test_the_batches_are_those_of_this_machine(
    format: str, cache: str, google: Google, bucket: str, datasets: Path, tmp_path: Path
) -> None:
    more: dict[str, Any] = {}
    if cache == "half":
        more = {"cache_limit": stored(datasets / format) // 2}
    elif cache == "folder":
        more = {"cache": tmp_path / "cache", "cache_limit": stored(datasets / format) // 2}
    here = Loader(datasets / format, batch_size=16, shuffle=True, seed=7)
    there = loader(google.url(bucket, format), google.options(), **more)
    assert epochs(there, 2) == epochs(here, 2)


@pytest.fixture
def counted(google: Google, bucket: str, through: Through) -> Proxy:
    return through(google)


def downloads(proxy: Proxy, made: Loader, count: int) -> list[float]:
    """Bytes of each epoch."""
    found = []
    for _ in range(count):
        proxy.clear()
        for _ in made:
            pass
        found.append(proxy.count("GET").sent)
    return found


def test_an_epoch_downloads_the_dataset_once(
    google: Google, bucket: str, datasets: Path, counted: Proxy
) -> None:
    size = stored(datasets / "wds")
    made = loader(google.url(bucket, "wds"), google.options(counted.endpoint))
    first, second = downloads(counted, made, 2)
    assert 0.9 * size < first <= 1.02 * size
    assert second == 0


@pytest.mark.large
@pytest.mark.parametrize("folder", [False, True])
def test_with_room_for_half_later_epochs_download_half(
    folder: bool, google: Google, bucket: str, datasets: Path, counted: Proxy, tmp_path: Path
) -> None:
    size = stored(datasets / "wds")
    more = {"cache": tmp_path} if folder else {}
    made = loader(
        google.url(bucket, "wds"), google.options(counted.endpoint), cache_limit=size // 2, **more
    )
    first, *later = downloads(counted, made, 3)
    assert first <= 1.15 * size  # the samples that came before their page was there
    assert max(later) <= 0.57 * size  # of 25 pages, one is 4 %


@pytest.mark.large
def test_an_epoch_does_not_begin_before_the_cache_knows_of_it(
    google: Google,
    bucket: str,
    datasets: Path,
    counted: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that is late compares what the epoch before needed with what this one does: to it
    all pages in the cache are needed later than its own, which then takes their room."""
    reserve = MemoryCache.reserve

    def late(*given: Any) -> bool:
        time.sleep(0.1)
        return reserve(*given)

    size = stored(datasets / "wds")
    made = loader(
        google.url(bucket, "wds"), google.options(counted.endpoint), cache_limit=size // 2
    )
    downloads(counted, made, 1)
    monkeypatch.setattr(MemoryCache, "reserve", late)
    assert max(downloads(counted, made, 2)) <= 0.57 * size


@pytest.mark.large
def test_a_cache_that_is_small_for_the_window_is_warned_of(
    google: Google, bucket: str, datasets: Path, counted: Proxy
) -> None:
    """Once, with a size that is enough: with that size the second epoch requests nothing."""
    url, options = google.url(bucket, "wds"), google.options(counted.endpoint)
    size = stored(datasets / "wds")
    with pytest.warns(ShardkitWarning, match="the cache holds 12 MB") as told:
        list(loader(url, options, cache_limit="12MB"))
    assert len(told) == 1
    enough = re.findall('cache_limit="(.*?)"', str(told[0].message))
    assert downloads(counted, loader(url, options, cache_limit=enough[0]), 2)[1] == 0
    assert size < parse_size(enough[0]) < 1.1 * size
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardkitWarning)
        list(loader(url, options, cache_limit="12MB", window=140))
        list(loader(url, options, cache_limit=enough[0]))


def test_two_machines_download_half_each(
    google: Google, bucket: str, datasets: Path, counted: Proxy, tmp_path: Path
) -> None:
    size = stored(datasets / "wds")
    for rank in range(2):
        made = loader(
            google.url(bucket, "wds"), google.options(counted.endpoint),
            parts=2, rank=rank, world_size=2, cache=tmp_path / str(rank),
        )  # fmt: skip
        assert downloads(counted, made, 1)[0] <= 0.55 * size + 3 * PAGE  # where blocks are cut


def test_ranks_of_one_machine_request_each_page_once(
    google: Google, bucket: str, datasets: Path, counted: Proxy, tmp_path: Path
) -> None:
    """At the same time, and of the same pages: all samples of a block are shuffled."""
    program = (
        "import sys; from shardkit.stream.loader import Loader\n"
        "made = Loader(sys.argv[1], batch_size=16, shuffle=True, rank=int(sys.argv[2]),"
        " world_size=2, cache=sys.argv[3])\n"
        "print(len(made), flush=True); input()\n"
        "for batch in made: pass"
    )
    counted.add(Rule(latency=0.1, method="GET", match="tar"))
    environ = {**os.environ, **google.environ(counted.endpoint)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, google.url(bucket, "wds"), str(rank), str(tmp_path)],
            env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in ranks:
        assert process.stdout is not None
        process.stdout.readline()
    for process in ranks:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in ranks:
        process.communicate(timeout=60)
    assert [process.returncode for process in ranks] == [0, 0]
    assert counted.count("GET", "tar").sent <= stored(datasets / "wds")


def test_opening_takes_few_requests_and_no_payload(
    google: Google, counted: Proxy, tmp_path: Path
) -> None:
    with shardkit.create(tmp_path / "d", "wds", {"x": Bytes()}, shard_samples=1) as out:
        for n in range(200):
            out.write({"x": bytes([n])})
    bucket = upload(google, tmp_path / "d")
    with storage.using(google.options(counted.endpoint)):
        found = open_dataset(google.url(bucket))
        assert len(found) == 200
    assert counted.count().requests <= 10
    assert counted.count(match=r"\.tar").requests == 0


def test_the_first_batch_takes_two_rounds(google: Google, bucket: str, counted: Proxy) -> None:
    """An index and pages, and beside them the list of checksums: each request waits for one other
    at most."""
    with storage.using(google.options(counted.endpoint)):
        found = open_dataset(google.url(bucket, "wds"))
    counted.clear()
    next(iter(Loader(found, batch_size=16, shuffle=True)))
    kinds = {(e.method, e.target.rpartition(".")[2]) for e in counted.log()}
    assert kinds == {("GET", "npy"), ("GET", "tar"), ("HEAD", "xxh3"), ("GET", "xxh3")}


@pytest.mark.parametrize(
    "rule",
    [
        Rule(status=503, times=20, skip=3, match="tar", method="GET"),
        Rule(reset_after=1000, times=10, skip=3, match="tar", method="GET"),
        Rule(close_after=1000, times=10, skip=3, match="tar", method="GET"),
        Rule(shorten=100, times=10, skip=3, match="tar", method="GET"),
        Rule(whole=True, times=10, skip=3, match="tar", method="GET"),
    ],
    ids=["503", "reset", "close", "shorten", "whole"],
)
def test_faults_that_pass_change_nothing(
    rule: Rule, google: Google, bucket: str, datasets: Path, counted: Proxy
) -> None:
    counted.add(rule)
    there = loader(google.url(bucket, "wds"), google.options(counted.endpoint))
    assert epochs(there, 1) == epochs(loader(datasets / "wds", {}), 1)


def test_a_store_that_goes_away_ends_the_epoch_with_an_error(
    google: Google, bucket: str, counted: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "ATTEMPTS", 2)
    there = loader(
        google.url(bucket, "wds"), google.options(counted.endpoint), cache_limit=2 * PAGE
    )
    batches = iter(there)
    next(batches)
    counted.add(Rule(status=503))
    with pytest.raises(StorageError, match="returned an unexpected response"):
        list(batches)


def test_a_state_goes_on_from_another_machine(google: Google, bucket: str, datasets: Path) -> None:
    here = loader(datasets / "wds", {})
    batches = iter(here)
    for _ in range(5):
        next(batches)
    there = loader(google.url(bucket, "wds"), google.options())
    there.load_state_dict(here.state_dict())
    assert pickle.dumps(list(batches)) == pickle.dumps(list(there))


def test_a_fork_does_not_wait_for_requests_of_its_parent(
    google: Google, bucket: str, counted: Proxy
) -> None:
    made = loader(google.url(bucket, "wds"), google.options(counted.endpoint)).dataset
    counted.add(Rule(latency=1, method="GET", match="tar"))
    thread = threading.Thread(target=lambda: next(made.iterate(0)))
    thread.start()
    pages = made.stream.pages
    while pages is None or not pages._requested:
        time.sleep(0.01)
    child = os.fork()
    if not child:
        signal.alarm(40)  # ends it
        try:
            next(made.iterate(0))
            os._exit(0)
        finally:
            os._exit(1)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_program_ends_in_the_middle_of_an_epoch(google: Google, bucket: str) -> None:
    program = (
        "import sys; from shardkit.stream.dataset import StreamingDataset\n"
        "sys.made = iter(StreamingDataset(sys.argv[1], batch_size=8))\n"
        "next(sys.made)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, google.url(bucket, "wds")],
        check=False, env={**os.environ, **google.environ()}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


# --- the order of use ----------------------------------------------------------------------------


def test_next_use_is_that_of_the_order(tmp_path: Path) -> None:
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


def test_pages_are_of_the_blocks_that_they_hold(datasets: Path) -> None:
    dataset = open_dataset(datasets / "wds")
    sizes = np.array([dataset.extent(n)[0] for n in range(dataset.shards)])
    order = Order(sizes, shuffle=True, seed=1, window=64)
    assert order.blocks_of(0, 0) == slice(0, 1)
    assert order.blocks_of(0, len(dataset) - 1) == slice(0, order.blocks)
    assert NextUse(order, [dataset])("unknown", 0) == np.inf


def test_a_folder_for_the_cache_is_left_as_it_was_by_local_data(
    datasets: Path, tmp_path: Path
) -> None:
    shutil.copytree(datasets / "arrow", tmp_path / "d")
    with pytest.raises(shardkit.UsageError, match="for remote data"):
        loader(tmp_path / "d", {}, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
