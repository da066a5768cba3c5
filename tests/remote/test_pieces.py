"""Bytes that a store sends are compared with the digests of their pieces."""

from __future__ import annotations

import pickle
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit import manifest as manifests
from shardkit.errors import DamagedError, ShardkitError
from shardkit.opening import _remote_files, open_dataset
from shardkit.pieces import CHECKSUM, DIGEST, PIECE, WHOLE, checksum, count
from shardkit.remote.pieces import FilePieces, PieceList
from shardkit.remote.store import Info, Store
from shardkit.schema import Array, Bytes, Schema
from shardkit.stream.loader import Loader
from shardkit.verification.files import check_files
from shardkit.verification.work import Meter
from tests.remote.conftest import Through
from tests.remote.proxy import Proxy, Rule
from tests.remote.servers import Google
from tests.remote.test_reading import equal, opened, opened_path, upload
from tests.test_verify import as_earlier_versions_wrote_it

FORMATS = ("wds", "lmdb", "arrow", "parquet", "hf", "beton", "megatron")
SAMPLES, SIZE = 60, 70_000  # two shards of 2 MB
LIST = f"__shardkit__/{manifests.PIECES}"
OTHER = "the bytes that the store returned are not those that were written"


def make(out: Path, format: str, *, lengths: bool = False) -> Path:
    rng, tokens = np.random.default_rng(5), format == "megatron" or lengths
    kind: Any = Array("|u1", (None,)) if tokens else Bytes()
    with shardkit.create(out, format, Schema({"x": kind}), shard_samples=SAMPLES // 2) as made:
        for n in range(SAMPLES):
            value = rng.integers(0, 200, SIZE + n, np.uint8)
            made.write({"__key__": f"k{n}", "x": value if tokens else value.tobytes()})
    return out


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("datasets")
    for format in FORMATS:
        make(root / format, format)
    return root


@pytest.fixture(scope="module")
def bucket(google: Google, datasets: Path) -> str:
    return upload(google, datasets)


@pytest.fixture
def proxy(google: Google, bucket: str, through: Through) -> Proxy:
    return through(google)


def shards(dataset: shardkit.Dataset) -> str:
    """A regular expression for the files of all shards."""
    assert dataset.manifest is not None
    return "|".join(file.name.replace(".", "[.]") + "$" for file in dataset.manifest.all_files())


@pytest.mark.parametrize("format", FORMATS)
def test_a_wrong_byte_is_requested_once_more(
    format: str, google: Google, bucket: str, datasets: Path, proxy: Proxy
) -> None:
    local = open_dataset(datasets / format)
    found = opened(google.url(bucket, format), google.options(proxy.endpoint))
    proxy.add(Rule(flip=1000, times=1, method="GET", match=shards(local)))
    assert all(equal(found[n], local[n]) for n in range(SAMPLES))


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_that_stay_wrong_are_an_error(
    format: str, google: Google, bucket: str, datasets: Path, proxy: Proxy
) -> None:
    """Reading at random, and by a loader: never a sample, and no end of the epoch."""
    local = open_dataset(datasets / format)
    url, options = google.url(bucket, format), google.options(proxy.endpoint)
    name = local.shard_name(1)
    found = opened(url, options)
    proxy.add(Rule(flip=1000, method="GET", match=name.replace(".", "[.]") + "$"))
    for n in (SAMPLES // 2, SAMPLES - 1):
        with pytest.raises(DamagedError, match=OTHER) as caught:
            found[n]
        assert str(caught.value.where["path"]) == f"{url}/{name}"
        assert "also when they were requested again" in str(caught.value.found)
    loader = Loader(url, batch_size=4, shuffle=True, storage_options=options)
    with pytest.raises(DamagedError, match=OTHER):
        list(loader)


def test_the_error_names_the_piece_and_its_bytes(
    google: Google, bucket: str, datasets: Path, proxy: Proxy
) -> None:
    found = opened(google.url(bucket, "wds"), google.options(proxy.endpoint))
    found[0]
    proxy.add(Rule(flip=0, method="GET", match="shard-000000[.]tar$"))
    with pytest.raises(DamagedError) as caught:
        found[20]
    assert caught.value.where["offset"] == PIECE
    assert "piece 1 (bytes 1,048,576 to 2,097,151)" in str(caught.value.found)
    assert "shardkit verify" in str(caught.value.fix)


def wait_until_idle(proxy: Proxy) -> None:
    """Return once there has been no request for a while."""
    seen = -1
    while (requests := len(proxy.log())) != seen or any(not one.end for one in proxy.log()):
        seen = requests
        time.sleep(0.3)


@pytest.mark.parametrize("cache", ["memory", "folder"])
def test_a_wrong_page_is_not_put_into_the_cache(
    cache: str, google: Google, bucket: str, datasets: Path, proxy: Proxy, tmp_path: Path
) -> None:
    more = {"cache": tmp_path / "cache"} if cache == "folder" else {}
    there = Loader(
        google.url(bucket, "wds"),
        batch_size=4,
        storage_options=google.options(proxy.endpoint),
        **more,
    )
    proxy.add(Rule(flip=5000, method="GET", match="shard-000001[.]tar$"))
    with pytest.raises(DamagedError, match=OTHER):
        list(there)
    wait_until_idle(proxy)  # threads that read ahead may have a wrong page still
    proxy.clear()
    here = Loader(datasets / "wds", batch_size=4)
    assert pickle.dumps(list(there)) == pickle.dumps(list(here))


def test_a_conversion_copies_no_wrong_bytes(
    google: Google, bucket: str, datasets: Path, proxy: Proxy, tmp_path: Path
) -> None:
    """Its workers compare what they read as well."""
    proxy.add(Rule(flip=9000, skip=1, method="GET", match="shard-000001[.]tar$"))
    with pytest.raises(ShardkitError, match=OTHER):
        shardkit.convert(
            google.url(bucket, "wds"), "arrow", tmp_path / "out", workers=2, shard_samples=10,
            storage_options=google.options(proxy.endpoint),
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_a_pickle_compares_too(google: Google, bucket: str, proxy: Proxy) -> None:
    found = pickle.loads(
        pickle.dumps(opened(google.url(bucket, "wds"), google.options(proxy.endpoint)))
    )
    part = pickle.loads(pickle.dumps(found.part([1])))
    proxy.clear()
    proxy.add(Rule(flip=9, method="GET", match="[.]tar$"))
    for dataset in (found, part):
        with pytest.raises(DamagedError, match=OTHER):
            dataset[3]
    assert proxy.count("HEAD", "shard-").requests == 0


def test_lengths_and_other_lists_are_compared(
    google: Google, tmp_path: Path, through: Through
) -> None:
    bucket, proxy = upload(google, make(tmp_path / "d", "wds", lengths=True)), through(google)
    found = opened(google.url(bucket), google.options(proxy.endpoint))
    proxy.add(Rule(flip=200, times=1, method="GET", match="lengths[.]npy$"))
    with pytest.raises(DamagedError, match="a file has changed since it was written"):
        found.lengths("x")
    assert found.lengths("x").tolist() == [SIZE + n for n in range(SAMPLES)]


class _Cache(BaseHTTPRequestHandler):
    """A cache with a wrong byte, which is asked for nothing where the client wants no cache."""

    data = bytes(range(200))

    def do_GET(self) -> None:
        wanted = self.headers.get("Cache-Control") == "no-cache"
        self.send_response(206)
        self.send_header("Content-Range", f"bytes 0-{len(self.data) - 1}/{len(self.data)}")
        self.send_header("Content-Length", str(len(self.data)))
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(self.data if wanted else b"x" + self.data[1:])

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_what_a_cache_has_wrong_is_requested_past_it() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Cache)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        store = Store(f"http://127.0.0.1:{server.server_port}")
        size, known = len(_Cache.data), checksum(_Cache.data)
        store.expect("x", Info(size, checksum=known, pieces=FilePieces(size, known, None, 0)))
        assert store.read("x", 0, size) != _Cache.data
        assert store.read_pieces("x", 0, 1) == _Cache.data
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# --- the list of pieces --------------------------------------------------------------------------


def test_the_list_is_read_once_and_not_at_opening(
    google: Google, bucket: str, proxy: Proxy
) -> None:
    found = opened(google.url(bucket, "wds"), google.options(proxy.endpoint))
    assert len(found) == SAMPLES
    assert proxy.count(match=manifests.PIECES).requests == 0
    for n in range(SAMPLES):
        found[n]
    assert proxy.count("GET", manifests.PIECES).requests == 1


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_damaged_list_is_an_error(
    damage: str, google: Google, bucket: str, datasets: Path, proxy: Proxy
) -> None:
    listed = datasets / "wds" / LIST
    if damage == "flipped":
        proxy.add(Rule(flip=20, method="GET", match=manifests.PIECES))
    else:
        client = google.open(bucket)
        client.delete(f"wds/{LIST}")
        if damage == "cut":
            client.put(f"wds/{LIST}", listed.read_bytes()[:-1])
    try:
        found = opened(google.url(bucket, "wds"), google.options(proxy.endpoint))
        with pytest.raises(DamagedError, match="the list of piece checksums") as caught:
            [found[n] for n in (0, SAMPLES - 1)]
        assert str(caught.value).count(manifests.PIECES) >= 1
    finally:
        google.open(bucket).put(f"wds/{LIST}", listed.read_bytes())


def test_a_list_that_came_wrong_once_is_requested_again(
    google: Google, bucket: str, datasets: Path, proxy: Proxy
) -> None:
    local = open_dataset(datasets / "wds")
    found = opened(google.url(bucket, "wds"), google.options(proxy.endpoint))
    proxy.add(Rule(flip=20, times=1, method="GET", match=manifests.PIECES))
    assert all(equal(found[n], local[n]) for n in range(SAMPLES))
    assert proxy.count("GET", manifests.PIECES).requests == 2


@pytest.mark.parametrize("cache", ["memory", "folder"])
def test_a_list_that_came_wrong_into_the_cache_is_requested_again(
    cache: str, google: Google, bucket: str, datasets: Path, proxy: Proxy, tmp_path: Path
) -> None:
    more = {"cache": tmp_path / "cache"} if cache == "folder" else {}
    proxy.add(Rule(flip=20, times=1, method="GET", match=manifests.PIECES))
    options = google.options(proxy.endpoint)
    for _ in range(2):  # the second finds the wrong one in the folder
        there = Loader(google.url(bucket, "wds"), batch_size=4, storage_options=options, **more)
        here = Loader(datasets / "wds", batch_size=4)
        assert pickle.dumps(list(there)) == pickle.dumps(list(here))


def test_few_blocks_of_a_long_list_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardkit.remote import pieces

    data = np.random.default_rng(0).bytes(16 * 1000)
    asked = []

    class FakeStore:
        site, pages = "s3://bucket", None

        def info(self, key: str) -> Info:
            return Info(len(data))

        def read(self, key: str, start: int, stop: int, *, past_caches: bool) -> bytes:
            assert not past_caches
            asked.append((start, stop))
            return data[start:stop]

    monkeypatch.setattr(pieces, "_BLOCK", 160)
    path: Any = type("Path", (), {"store": FakeStore(), "key": "x"})()
    listed = PieceList(path)
    for first, number in ((0, 2), (5, 30), (995, 5), (3, 2)):
        digests = data[16 * first : 16 * (first + number)]
        assert listed.of(first, number, pieces.checksum_of(digests)) == digests
    assert asked == [(0, 160), (160, 320), (320, 480), (480, 640), (15840, 16000), (0, 160)]
    assert len(listed._blocks) == 4


# --- what has no pieces --------------------------------------------------------------------------


def test_a_dataset_of_an_earlier_version_reads_and_verifies(
    google: Google, tmp_path: Path, through: Through
) -> None:
    """Its files of several pieces cannot be compared while they are read; its indexes can."""
    local = open_dataset(make(tmp_path / "d", "wds"))
    expected = [local[n] for n in range(SAMPLES)]
    as_earlier_versions_wrote_it(tmp_path / "d")
    bucket, proxy = upload(google, tmp_path / "d"), through(google)
    found = opened(google.url(bucket), google.options(proxy.endpoint))
    assert all(equal(found[n], expected[n]) for n in range(SAMPLES))
    assert shardkit.verify(google.url(bucket), storage_options=google.options()).sound
    proxy.add(Rule(flip=200, method="GET", match="index[.]npy$"))
    with pytest.raises(DamagedError, match=OTHER):
        opened(google.url(bucket), google.options(proxy.endpoint))[0]


# --- verify --------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_verify_downloads_each_byte_once(
    format: str, google: Google, bucket: str, datasets: Path, proxy: Proxy
) -> None:
    report = shardkit.verify(
        google.url(bucket, format), storage_options=google.options(proxy.endpoint)
    )
    assert report.sound
    manifest = manifests.load(datasets / format)
    for file in (*manifest.all_files(), *manifest.files):
        assert proxy.count("GET", f"/{format}/{file.name}$").sent == file.bytes, file.name


def damage(google: Google, bucket: str, name: str, change: Callable[[bytes], bytes]) -> None:
    client = google.open(bucket)
    client.put(name, change(bytes(client.get(name).bytes())))


def test_verify_names_pieces_and_samples_at_a_url(google: Google, datasets: Path) -> None:
    bucket = upload(google, datasets / "wds")
    name = open_dataset(datasets / "wds").shard_name(1)
    damage(google, bucket, name, lambda data: data[:PIECE] + b"x" + data[PIECE + 1 :])
    (problem,) = shardkit.verify(google.url(bucket), storage_options=google.options()).problems
    assert problem.where["offset"] == PIECE
    assert "piece 1 (bytes 1,048,576 to" in str(problem.found)
    assert "sample" in str(problem.found)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data: data + b"x", "a file is longer than it was"),
        (lambda data: data[:-1], "a file is truncated"),
    ],
)
def test_verify_asks_the_store_for_sizes(
    change: Callable[[bytes], bytes], what: str, google: Google, datasets: Path
) -> None:
    bucket = upload(google, datasets / "wds")
    damage(google, bucket, open_dataset(datasets / "wds").shard_name(0), change)
    report = shardkit.verify(google.url(bucket), storage_options=google.options())
    assert [problem.what for problem in report.problems] == [what]


def test_verify_is_not_misled_by_the_way(google: Google, bucket: str, proxy: Proxy) -> None:
    proxy.add(Rule(flip=1000, times=1, method="GET", match="wds/shard-000001[.]tar$"))
    url = google.url(bucket, "wds")
    assert shardkit.verify(url, storage_options=google.options(proxy.endpoint)).sound


def test_verify_requests_a_long_list_once_more(google: Google, proxy: Proxy) -> None:
    """Of such a file, and of a shard whose list of digests came wrong, nothing tells the piece."""
    data = bytes(range(256)) * 8000  # two pieces
    bucket = google.bucket()
    google.open(bucket).put("list", data)
    folder = opened_path(google.url(bucket), google.options(proxy.endpoint))
    for kind in (CHECKSUM, WHOLE):
        file = manifests.File("list", len(data), checksum(data, kind))
        proxy.clear()
        proxy.add(Rule(flip=1000, times=1, method="GET", match="list$"))
        assert check_files(folder, [file], kind, Meter(None)) == []
        assert proxy.count("GET", "list$").requests == 4
        proxy.add(Rule(flip=1000, method="GET", match="list$"))
        (problem,) = check_files(folder, [file], kind, Meter(None))
        assert problem.what == "a file has changed since it was written"


def test_digests_of_very_many_shards_take_little_memory() -> None:
    """All that is known of a shard of 256 MB and its index, once it was read: 10,000 of them take
    less than 60 MB."""
    shard = manifests.File("shard.tar", 256_000_000, "0" * 32)
    index = manifests.File("__shardkit__/shard.index.npy", 80_000, "1" * 32)
    every = tuple(
        manifests.Shard(replace(shard, name=f"{n}.tar"), 10, (index,)) for n in range(500)
    )
    listed: Any = SimpleNamespace(
        shards=every, checksum=CHECKSUM, list_named=lambda name: manifests.File(name, 0, "")
    )
    folder: Any = opened_path("s3://bucket/folder", {"region": "x"})
    tracemalloc.start()
    try:
        known = dict(_remote_files(listed, folder))
        for files in known.values():
            for _, info in files:
                assert info.pieces is not None
                info.pieces._digests = info.pieces._digests or bytes(DIGEST * count(info.size))
        assert tracemalloc.get_traced_memory()[0] < 6000 * len(every)
    finally:
        tracemalloc.stop()
