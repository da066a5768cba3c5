"""Loaders over data in a store and over views of them: the same batches, and no more bytes than
needed."""

import os
import pickle
import queue
import re
import signal
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest

import shardkit
from shardkit.dataset.find import open_dataset
from shardkit.errors import ShardkitWarning, StorageError
from shardkit.formats.testing_samples import in_fork
from shardkit.helpers.words import parse_size
from shardkit.schema import Array, Bytes, Int
from shardkit.storage.page_cache import PAGE
from shardkit.storage.pages import file_id
from shardkit.stream import read_ahead
from shardkit.stream.loader import Loader
from shardkit.stream.order import Order
from shardkit.stream.read_ahead import NextUse
from tests.conftest import few
from tests.remote.proxy import Rule

pytestmark = pytest.mark.filterwarnings("ignore:the cache holds")
CHOSEN = np.random.default_rng(2).permutation(400)[:150]
FORMATS = ("wds", "lmdb", "arrow", "parquet", "hf", "beton", "megatron")
SAMPLES, SIZE = 600, 40_000  # 24 MB: enough pages to have more of them than a cache takes


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """One of each format, the others than TAR with a sixth of the samples."""
    root, rng = tmp_path_factory.mktemp("datasets"), np.random.default_rng(5)
    values = [rng.integers(0, 200, SIZE, np.uint8) for _ in range(SAMPLES)]
    for format in FORMATS:
        tokens = format == "megatron"
        more = {"label": Int()} if format == "wds" else {}
        schema = {"x": Array("|u1", (None,))} if tokens else {"x": Bytes(), **more}
        samples = SAMPLES if format == "wds" else SAMPLES // 6
        with shardkit.create(root / format, format, schema, shard_size="3MB") as out:
            for n, value in enumerate(values[:samples]):
                labels = {"label": n % 7} if more else {}
                out.write({"__key__": f"k{n}", "x": value if tokens else value.tobytes(), **labels})
    return root


def loader(source, options=None, **more):
    return Loader(
        source, **{"batch_size": 16, "shuffle": True, "seed": 7, "storage_options": options, **more}
    )


def epochs(made, count):
    """All that comes in some epochs."""
    return [pickle.dumps(list(made)) for _ in range(count)]


def stored(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("format", "cache"),
    [
        *((format, "memory") for format in FORMATS),
        *(pytest.param(*case.values, "folder", marks=case.marks) for case in few(FORMATS, "wds")),
    ],
)
def test_the_batches_are_those_of_this_machine(format, cache, data, datasets, tmp_path):
    """With room for half of the dataset."""
    more = {"cache_limit": stored(datasets / format) // 2}
    if cache == "folder":
        more["cache"] = tmp_path / "cache"
    here, there = loader(datasets / format), loader(data.url(format), data.options, **more)
    assert epochs(there, 2) == epochs(here, 2)


def downloads(seen, made, count=1):
    """Bytes of each epoch."""
    found = []
    for _ in range(count):
        seen.proxy.clear()
        for _ in made:
            pass
        found.append(seen.proxy.count("GET").sent)
    return found


def test_an_epoch_downloads_the_dataset_once(seen, datasets):
    size = stored(datasets / "wds")
    first, second = downloads(seen, loader(seen.url("wds"), seen.options), 2)
    assert 0.9 * size < first <= 1.02 * size
    assert second == 0


@pytest.mark.parametrize("folder", [False, pytest.param(True, marks=pytest.mark.large)])
def test_with_room_for_half_later_epochs_download_half(folder, seen, datasets, tmp_path):
    size = stored(datasets / "wds")
    more = {"cache": tmp_path} if folder else {}
    made = loader(seen.url("wds"), seen.options, cache_limit=size // 2, **more)
    first, later = downloads(seen, made, 2)
    assert first <= 1.15 * size  # the samples that came before their page was there
    assert later <= 0.57 * size  # of 25 pages, one is 4 %


def test_an_epoch_does_not_begin_before_the_cache_knows_of_it(data, monkeypatch):
    """Else all pages in the cache are needed later than those that its threads read first, which
    then take their room."""
    known = []
    reads = []
    at = NextUse.at

    def come_to(self, epoch, *where):
        known.append(epoch)
        at(self, epoch, *where)

    class Reads(queue.SimpleQueue):
        def put(self, read, *how):
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
def test_a_cache_that_is_small_for_the_window_is_warned_of(seen, datasets):
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


def test_two_machines_download_half_each(seen, datasets, tmp_path):
    for rank in range(2):
        more = {"parts": 2, "rank": rank, "world_size": 2, "cache": tmp_path / str(rank)}
        made = loader(seen.url("wds"), seen.options, **more)
        # The pages where blocks are cut are of both.
        assert downloads(seen, made, 1)[0] <= 0.55 * stored(datasets / "wds") + 3 * PAGE


def test_ranks_of_one_machine_request_each_page_once(seen, datasets, tmp_path):
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


def test_opening_takes_few_requests_and_the_first_batch_two_rounds(seen):
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


def test_faults_that_pass_change_nothing(seen, datasets):
    faults = [{"status": 503}, {"reset_after": 1000}, {"shorten": 100}, {"whole": True}]
    # In all fewer than a request is repeated: all of them may meet the same one.
    for number, fault in enumerate(faults):
        seen.proxy.add(Rule(method="GET", match="tar", skip=3 + 4 * number, times=1, **fault))
    assert epochs(loader(seen.url("wds"), seen.options), 1) == epochs(loader(datasets / "wds"), 1)
    assert seen.proxy.count("GET", "tar").requests > 19  # all faults


def test_a_store_that_goes_away_ends_the_epoch_with_an_error(seen):
    batches = iter(loader(seen.url("wds"), seen.options, cache_limit=2 * PAGE))
    # After a counted request: how far the loader has read at its first batch is chance.
    seen.proxy.add(Rule(method="GET", match="tar", skip=100, status=503))
    received = []
    with pytest.raises(StorageError, match="returned an unexpected response"):
        received.extend(batches)
    assert len(received) < SAMPLES // 16


def test_a_state_goes_on_from_another_machine(data, datasets):
    here, there = loader(datasets / "wds"), loader(data.url("wds"), data.options)
    batches = iter(here)
    for _ in range(5):
        next(batches)
    there.load_state_dict(here.state_dict())
    assert pickle.dumps(list(batches)) == pickle.dumps(list(there))


def test_a_fork_does_not_wait_for_requests_of_its_parent(seen):
    made = loader(seen.url("wds"), seen.options).dataset
    # Those of this process, as many as it makes at a time, are held until the other has its batch.
    thread = threading.Thread(target=lambda: next(made.iterate(0)))
    seen.proxy.add(Rule(method="GET", match="tar", times=1, hold=True))
    thread.start()
    seen.proxy.wait("GET", "tar")

    def work():
        signal.alarm(120)  # ends it
        next(made.iterate(0))

    try:
        in_fork(work)
    finally:
        seen.proxy.clear()
        thread.join()


def test_a_program_ends_in_the_middle_of_an_epoch(data):
    program = (
        "import sys; from shardkit.stream.dataset import StreamingDataset\n"
        "sys.made = iter(StreamingDataset(sys.argv[1], batch_size=8)); next(sys.made)"
    )
    command = [sys.executable, "-c", program, data.url("wds")]
    environ = {**os.environ, **data.environ}
    done = subprocess.run(command, env=environ, check=True, capture_output=True)
    assert done.stderr == b""


# --- views ---------------------------------------------------------------------------------------

VIEWS = {
    "slice": lambda ds, here: ds[90:290],
    "backwards": lambda ds, here: ds[::-3],
    "chosen": lambda ds, here: ds.select(CHOSEN),
    "where": lambda ds, here: ds.filter("label in (3, 5)"),
    "twice": lambda ds, here: shardkit.concatenate([ds[:50], ds[30:80]]),
    "beside a folder": lambda ds, here: shardkit.concatenate([ds[100:160], here[:40]]),
}


@pytest.mark.parametrize(
    ("name", "shuffle"),
    [
        ("chosen", True),
        ("twice", False),
        ("beside a folder", True),
        *(
            pytest.param(name, shuffle, marks=pytest.mark.large)
            for name, shuffle in (
                ("slice", True), ("backwards", False), ("backwards", True), ("where", True),
                ("twice", True), ("chosen", False),
            )
        ),
    ],
)  # fmt: skip
def test_batches_of_views_are_those_of_this_machine(data, datasets, name, shuffle):
    here, folder = open_dataset(datasets / "wds"), open_dataset(datasets / "wds")
    local, remote = (VIEWS[name](dataset, folder) for dataset in (here, data.open("wds")))
    assert remote.keys() == local.keys()
    found = loader(remote, shuffle=shuffle, cache_limit=6 * PAGE)
    assert epochs(found, 2) == epochs(loader(local, shuffle=shuffle), 2)


def test_a_view_downloads_its_pages_alone(seen):
    first, second = downloads(seen, loader(seen.open("wds")[90:290]), 2)
    assert first <= 200 * 42_000 + 2 * PAGE
    assert second == 0


def test_a_small_cache_keeps_what_the_view_needs_next(seen):
    """Half of the pages stay; with the oldest removed first, a whole epoch is downloaded anew."""
    size = 300 * 42_000
    made = loader(seen.open("wds")[50:350], cache_limit=size // 2)
    assert downloads(seen, made, 2)[1] <= 0.7 * size


def test_the_next_use_of_a_page_is_that_of_its_samples_in_the_view(data):
    """No later than that of any of them; never, where there are none, nor within half a page."""
    view = data.open("wds")[5::30]
    stream = loader(view, batch_size=2, window=2).dataset.stream
    order, [dataset] = stream.order, stream.datasets
    uses, every = NextUse(order, stream.datasets), np.arange(len(view))
    uses.at(0, 0, None)
    window = np.empty(len(view))  # in which each sample of the view comes
    window[order.draw(0, every).number] = every // order.window
    numbers, later = dataset.stored(every), 0
    for shard in range(dataset.shards):
        path, (samples, _) = dataset.shard_path(shard), dataset.extent(shard)
        info, start = path.store.info(path.key), dataset.start(shard)
        own = (numbers >= start) & (numbers < start + samples)
        for page in range(-(-info.size // PAGE)):
            first, last = start + np.array([page, page + 1]) * PAGE * samples / info.size
            half = 0.6 * (last - first) + 1
            inside = window[own & (numbers >= first) & (numbers < last)]
            near = window[own & (numbers >= first - half) & (numbers < last + half)]
            found = uses(file_id(path, info), page)
            assert near.size or found == np.inf
            if inside.size:
                assert found <= inside.min()
                later += found > 0
    assert later


def test_a_filter_requests_each_page_once(seen, datasets):
    there, here = seen.open("wds"), open_dataset(datasets / "wds")
    view = there.filter(lambda sample: sample["x"][0] < 100)
    assert seen.proxy.count("GET", "tar").sent <= stored(datasets / "wds")
    assert view.keys() == here.filter(lambda s: s["x"][0] < 100).keys()
    with pytest.raises(ZeroDivisionError):
        there.filter(lambda sample: 1 // 0)


def test_large_downloads_of_small_fields_are_warned_of(data, datasets, monkeypatch):
    there = data.open("wds")
    monkeypatch.setattr("shardkit.dataset.views._LARGE", 8_000_000)
    for read, what in (
        (lambda ds: ds.keys(), "keys of 600"),
        (lambda ds: ds.column("label"), "values of 'label' of 600"),
        (lambda ds: ds["k12"], "keys of 600"),
        (lambda ds: ds.filter("label == 3"), "values of 'label' of 600"),
    ):
        with pytest.warns(ShardkitWarning, match=f"the {what} samples.* about 0.0 GB") as told:
            read(there)
        assert [warning.filename for warning in told] == [__file__]
        read(there[:100])
        read(open_dataset(datasets / "wds"))


def test_views_are_converted_from_a_store(data, datasets, tmp_path):
    every = data.open("wds"), open_dataset(datasets / "wds")
    view, same = (dataset.select(CHOSEN[:40]) for dataset in every)
    shardkit.convert(view, "arrow", tmp_path / "out", workers=0)
    assert [*shardkit.open(tmp_path / "out")] == [*same]
    assert shardkit.verify(tmp_path / "out", view).sound


# --- the order of use ----------------------------------------------------------------------------


def test_next_use_is_that_of_the_order(datasets):
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


def test_a_folder_for_the_cache_is_left_as_it_was_by_local_data(datasets, tmp_path):
    with pytest.raises(shardkit.UsageError, match="for remote data"):
        loader(datasets / "wds", cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
