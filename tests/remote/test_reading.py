"""Datasets of every format, read from stores: the same samples as from this machine."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit import storage
from shardkit.errors import (
    DamagedError,
    FormatError,
    NotFoundError,
    ShardkitWarning,
    StorageError,
    UnreachableError,
    UsageError,
)
from shardkit.inspection import inspect
from shardkit.opening import open_dataset
from shardkit.page_cache import MemoryCache
from shardkit.pages import Pages
from shardkit.remote import clients
from shardkit.remote import store as stores
from shardkit.remote.forked import ForkedClient
from shardkit.remote.path import RemotePath
from shardkit.schema import Array, Schema
from shardkit.stream.loader import Loader
from shardkit.testing import EVERYTHING, everything, make_image
from tests.remote.conftest import Through
from tests.remote.proxy import Rule
from tests.remote.servers import S3, Nginx, Store

FORMATS = ("wds", "lmdb", "arrow", "parquet", "hf", "beton", "megatron", "tfrecord", "litdata")
SAMPLES = 40


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of every format, with a few shards where a format has several."""
    root = tmp_path_factory.mktemp("datasets")
    for format in FORMATS:
        tokens = format == "megatron"
        schema = Schema({"x": Array("<u2", (None,))} if tokens else EVERYTHING)
        with shardkit.create(root / format, to=format, schema=schema, shard_samples=15) as out:
            for n in range(SAMPLES):
                sample = {"__key__": f"k{n}", "x": np.arange(n, dtype="<u2")}
                out.write(sample if tokens else everything(n))
    return root


def upload(store: Store, folder: Path) -> str:
    """A bucket with the files of a folder."""
    bucket = store.bucket()
    client = store.open(bucket)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            client.put(path.relative_to(folder).as_posix(), path.read_bytes())
    return bucket


@pytest.fixture(scope="module")
def bucket(s3: S3, datasets: Path) -> str:
    return upload(s3, datasets)


def equal(one: Any, other: Any) -> bool:
    return pickle.dumps(one) == pickle.dumps(other)


Open = Callable[[str], shardkit.Dataset]


def opened(url: str, options: dict[str, Any]) -> shardkit.Dataset:
    with storage.using(options):
        return open_dataset(url)


def opened_path(url: str, options: dict[str, Any]) -> Path:
    with storage.using(options):
        return storage.source(url)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bare", [False, True], ids=["ours", "without manifest"])
def test_every_format_reads_from_a_bucket(
    format: str, bare: bool, s3: S3, bucket: str, datasets: Path, tmp_path: Path
) -> None:
    folder = datasets / format
    if bare:
        folder = tmp_path / format
        shutil.copytree(datasets / format, folder, ignore=shutil.ignore_patterns("__shardkit__"))
        bucket = upload(s3, tmp_path)
    local, found = open_dataset(folder), opened(s3.url(bucket, format), s3.options())
    assert len(found) == len(local) == SAMPLES
    assert found.schema == local.schema
    for number in range(SAMPLES):
        assert equal(found[number], local[number])
    assert found.reader(0).keys() == local.reader(0).keys()
    assert str(found.shard_path(0)) == s3.url(bucket, f"{format}/{local.shard_name(0)}")


def test_every_store_has_the_same(store: Store, datasets: Path) -> None:
    bucket = upload(store, datasets / "wds")
    found = opened(store.url(bucket), store.options())
    local = open_dataset(datasets / "wds")
    assert all(equal(found[n], local[n]) for n in range(SAMPLES))


def test_a_web_server(web: Nginx, datasets: Path) -> None:
    shutil.copytree(datasets / "wds", web.root / "sets" / "wds")
    found, local = open_dataset(f"{web.endpoint}/sets/wds"), open_dataset(datasets / "wds")
    assert all(equal(found[n], local[n]) for n in range(SAMPLES))
    name = local.shard_name(1)
    alone, mine = open_dataset(f"{web.endpoint}/sets/wds/{name}"), open_dataset(local.path / name)
    assert [alone[n]["__key__"] for n in range(len(alone))] == [
        mine[n]["__key__"] for n in range(len(mine))
    ]


def test_a_web_server_that_refuses_to_show_folders(web: Nginx, datasets: Path) -> None:
    """As nginx does by default: it answers 403 for each folder."""
    shutil.copytree(datasets / "wds", web.root / "unlisted" / "wds")
    (web.root / "unlisted" / "images").mkdir()
    (web.root / "unlisted" / "images" / "0.jpg").write_bytes(b"x")
    assert len(open_dataset(f"{web.endpoint}/unlisted/wds")) == SAMPLES
    with pytest.raises(StorageError, match="refuses access") as caught:
        open_dataset(f"{web.endpoint}/unlisted/images")
    assert "datasets with a manifest" in (caught.value.fix or "")


def test_any_file_system_of_fsspec(datasets: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(datasets / "arrow"), "/sets/arrow", recursive=True)
    found, local = open_dataset("memory://sets/arrow"), open_dataset(datasets / "arrow")
    assert all(equal(found[n], local[n]) for n in range(SAMPLES))
    memory.rm("/sets", recursive=True)


def test_a_loader_gives_the_same_batches(s3: S3, bucket: str, datasets: Path) -> None:
    options: dict[str, Any] = {"batch_size": 7, "shuffle": True, "seed": 3, "fields": ["text"]}
    here = Loader(open_dataset(datasets / "wds"), **options)
    there = Loader(opened(s3.url(bucket, "wds"), s3.options()), **options)
    for _ in range(2):
        assert equal([b["__key__"] for b in here], [b["__key__"] for b in there])


def test_a_forked_process_reads_on(s3: S3, bucket: str) -> None:
    found = opened(s3.url(bucket, "wds"), s3.options())
    expected = found[20]
    child = os.fork()
    if not child:
        try:
            ok = equal(found[20], expected) and equal(found[3]["__key__"], found[3]["__key__"])
            os._exit(0 if ok else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert equal(found[20], expected)


@pytest.mark.large
def test_the_command_line(s3: S3, bucket: str, datasets: Path, tmp_path: Path) -> None:
    environ = {**os.environ, **s3.environ()}
    url = s3.url(bucket, "wds")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "shardkit", *command)
        return subprocess.run(
            command, check=False, env=environ, capture_output=True, text=True, timeout=120,
            cwd=tmp_path,
        )  # fmt: skip

    done = run("verify", url)
    assert done.returncode == 0, done.stderr
    done = run("inspect", url)
    assert done.returncode == 0, done.stderr
    assert url in done.stdout
    done = run("convert", url, "--to", "arrow", "-o", "out", "--workers", "2")
    assert done.returncode == 0, done.stderr
    local = open_dataset(datasets / "wds")
    assert all(equal(open_dataset(tmp_path / "out")[n], local[n]) for n in range(SAMPLES))


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        Rule(status=503, times=2, method="GET", match="shard"),
        Rule(status=500, times=2, method="GET", match="shard"),
        Rule(status=429, times=2, method="GET", match="shard", retry_after="0"),
        Rule(refuse=True, times=2, method="GET", match="shard"),
        Rule(reset_after=100, times=2, method="GET", match="shard"),
        Rule(close_after=100, times=2, method="GET", match="shard"),
        Rule(shorten=10, times=2, method="GET", match="shard"),
        Rule(whole=True, times=2, method="GET", match="shard"),
    ],
    ids=lambda rule: next(
        n for n in vars(rule) if n not in ("times", "method", "match") and getattr(rule, n)
    ),
)
def test_a_fault_that_passes_is_not_seen(
    rule: Rule, s3: S3, bucket: str, datasets: Path, through: Through
) -> None:
    proxy, local = through(s3), open_dataset(datasets / "wds")
    requests = []
    for rules in ([], [rule]):
        found = opened(s3.url(bucket, "wds"), s3.options(proxy.endpoint))
        proxy.clear()
        proxy.add(*rules)
        assert all(equal(found[n], local[n]) for n in range(SAMPLES))
        requests.append(proxy.count(match="shard").requests)
    assert requests[1] == requests[0] + 2


def test_a_fault_that_stays_is_an_error(
    s3: S3, bucket: str, through: Through, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "ATTEMPTS", 2)
    proxy = through(s3)
    found = opened(s3.url(bucket, "wds"), s3.options(proxy.endpoint))
    proxy.add(Rule(status=503, match="shard"))
    with pytest.raises(StorageError, match="returned an unexpected response") as caught:
        found[0]
    assert caught.value.found == "HTTP 503"
    assert s3.url(bucket) in str(caught.value)


def test_an_object_that_is_replaced(s3: S3, datasets: Path, through: Through) -> None:
    bucket = upload(s3, datasets / "wds")
    found = opened(s3.url(bucket), s3.options())
    name = found.shard_name(0)
    assert len(found.reader(0)) == found.extent(0)[0]
    s3.open(bucket).put(name, b"x" * found.extent(0)[1])
    with pytest.raises(DamagedError, match="replaced while it was in use"):
        found[1]


def test_what_cannot_be_opened(s3: S3, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "ATTEMPTS", 1)
    options = s3.options()
    cases: list[tuple[str, dict[str, Any], type[Exception], str]] = [
        ("s3://no-such-bucket/x", options, NotFoundError, "there is no such bucket"),
        (s3.url(bucket, "nothing"), options, NotFoundError, "there is no such"),
        (s3.url(bucket), {**options, "endpint": "x"}, UsageError, "found: endpint"),
        (
            s3.url(bucket),
            {**options, "endpoint": "http://127.0.0.1:9"},
            UnreachableError,
            "refused",
        ),
        ("nonsense://x/y", {}, UsageError, "unknown URL scheme"),
        ("https://a:secret@example.org/x", {}, UsageError, "a URL with a password"),
        ("https://example.org/x?token=secret", {}, UsageError, "with a query"),
        ("s3://", options, UsageError, "does not name a bucket or server"),
    ]
    for url, given, kind, words in cases:
        with pytest.raises(kind) as caught:
            opened(url, given)
        assert words.lower() in str(caught.value).lower()
        assert not {"testsecret", "a:secret"} & {*re.findall(r"[\w:]+", str(caught.value))}


def test_a_wrong_endpoint_is_the_fault_of_the_command_line(
    s3: S3, bucket: str, through: Through, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a wrong bucket is; a store that goes away later is not."""
    monkeypatch.setattr(stores, "ATTEMPTS", 1)
    proxy = through(s3)
    found = opened(s3.url(bucket, "wds"), s3.options(proxy.endpoint))
    proxy.add(Rule(refuse=True))
    with pytest.raises(StorageError, match="cannot be reached") as later:
        found[0]
    with pytest.raises(StorageError, match="cannot be reached") as first:
        opened(s3.url(bucket, "wds"), s3.options(proxy.endpoint))
    with pytest.raises(UsageError, match="no such bucket") as other:
        opened("s3://no-such-bucket/x", s3.options())
    assert [each.value.exit_code for each in (later, first, other)] == [1, 2, 2]


def test_what_was_meant_is_said(s3: S3, datasets: Path, tmp_path: Path) -> None:
    """A dataset and the folder of its unfinished work are taken for each other; and an image."""
    shutil.copytree(datasets / "wds", tmp_path / "in/made")
    for name in ("made.partial/job.json", "begun.partial/job.json"):
        (tmp_path / "in" / name).parent.mkdir()
        (tmp_path / "in" / name).write_text("{}")
    shutil.copytree(datasets / "wds", tmp_path / "in/done")
    (tmp_path / "in/photos").mkdir()
    (tmp_path / "in/photos/a.JPG").write_bytes(make_image())
    url, options = s3.url(upload(s3, tmp_path / "in")), s3.options()
    cases = {
        "made.partial": (FormatError, f"it stopped; to read the dataset, give {url}/made"),
        "begun": (NotFoundError, "its conversion is unfinished: run the interrupted command"),
        "done.partial": (NotFoundError, f"to read the dataset, give {url}/done"),
        "photos/a.JPG": (FormatError, f"pass the folder that contains it, {url}/photos"),
    }
    for name, (kind, words) in cases.items():
        with pytest.raises(kind) as caught:
            opened(f"{url}/{name}", options)
        assert words in str(caught.value.fix)
    with pytest.raises(FormatError, match="a single image"):
        shardkit.convert(f"{url}/photos/a.JPG", "wds", tmp_path / "out", storage_options=options)


def test_no_permission(s3: S3, bucket: str, through: Through) -> None:
    proxy = through(s3)
    body = "<Error><Code>AccessDenied</Code><Message>testsecret</Message></Error>"
    proxy.add(Rule(status=403, body=body))
    with pytest.raises(StorageError, match="refuses access") as caught:
        opened(s3.url(bucket, "wds"), s3.options(proxy.endpoint))
    assert caught.value.found == "HTTP 403"  # an answer to HEAD has no body
    assert "testsecret" not in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value))
    assert "obstore.exceptions" not in shown  # it repeats the request and the answer
    assert "refuses access" in shown
    proxy.clear()
    proxy.add(Rule(status=400, body=body.replace("AccessDenied", "ExpiredToken")))
    with pytest.raises(StorageError, match="have expired"):
        list(opened_path(s3.url(bucket, "wds"), s3.options(proxy.endpoint)).iterdir())


def test_a_path_of_this_machine_is_demanded_by_functions_of_the_system() -> None:
    with pytest.raises(UsageError, match="needs a local path"):
        os.stat(storage.source("s3://bucket/x"))


def test_options_are_in_no_message(s3: S3, bucket: str) -> None:
    found = opened(s3.url(bucket, "wds"), s3.options())
    assert "testsecret" not in repr(found) + repr(found.path) + repr(found.path.store)  # type: ignore[attr-defined]


def test_folders_beside_shards_are_named(s3: S3, datasets: Path, tmp_path: Path) -> None:
    """Datasets, for all that is known: the shards alone are opened."""
    for name in ("wds", "lmdb"):
        shutil.copytree(datasets / name, tmp_path / name)
    shutil.copy(datasets / "parquet/shard-000000.parquet", tmp_path / "train.parquet")
    url = s3.url(upload(s3, tmp_path))
    with pytest.warns(ShardkitWarning, match="not those in its folders: 'lmdb', 'wds'"):
        found = opened(url, s3.options())
    assert len(found) == 15
    assert found.ignored["folder"] == 2
    with pytest.warns(ShardkitWarning, match="not those in its folders: 'lmdb', 'wds'"):
        assert inspect(url, storage_options=s3.options())["ignored"]["folder"] == 2


def test_opening_reads_no_payloads(s3: S3, bucket: str, through: Through) -> None:
    proxy = through(s3)
    found = opened(s3.url(bucket, "wds"), s3.options(proxy.endpoint))
    assert len(found) == SAMPLES
    assert found.lengths("x") is not None if "x" in found.schema else True
    assert proxy.count(match=r"shard-\d+\.tar$").requests == 0
    assert proxy.count().requests < 12


# --- processes and threads -----------------------------------------------------------------------


def test_threads_that_begin_together_make_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def connect(site: str, options: object) -> object:
        time.sleep(0.05)
        made.append(site)
        return object()

    monkeypatch.setattr(clients, "connect", connect)
    store = stores.Store("s3://bucket")
    with ThreadPoolExecutor(8) as threads:
        found = {*threads.map(lambda _: store.client(), range(8))}
    assert len(found) == len(made) == 1


@pytest.fixture
def forked(s3: S3, bucket: str) -> Iterator[ForkedClient]:
    client = ForkedClient(f"s3://{bucket}", s3.options())
    yield client
    client._process.kill()
    for thread in threading.enumerate():
        if thread.name == "shardkit-answers":
            thread.join()
    client._process.__exit__(None, None, None)


def test_requests_of_a_fork_outlive_ctrl_c(forked: ForkedClient) -> None:
    assert forked.find("nothing") is None
    forked._process.send_signal(signal.SIGINT)
    assert forked.find("nothing") is None


def test_a_process_for_requests_that_dies_while_it_answers() -> None:
    client, waiting = ForkedClient.__new__(ForkedClient), Future[Any]()
    answer = io.BytesIO(array("Q", [1, 255]).tobytes() + b"x")  # one of 255 bytes
    vars(client).update(
        _process=SimpleNamespace(stdout=answer, stderr=None, wait=lambda: 1),
        _pending={0: waiting},
        _killed=False,
        _ended=lambda code: StorageError(f"it has ended with {code}"),
    )
    client._receive()
    with pytest.raises(StorageError, match="has ended with 1"):
        waiting.result(timeout=0)


# --- names ---------------------------------------------------------------------------------------


def test_names_stay_in_their_bucket() -> None:
    path = storage.source("s3://bucket/a//b/./../c/")
    assert str(path) == "s3://bucket/a/c"
    assert str(path / ".." / ".." / ".." / "d") == "s3://bucket/d"
    assert path.relative_to(storage.source("s3://bucket/a")) == PurePosixPath("c")
    assert path.is_relative_to(storage.source("s3://bucket/a"))
    other = storage.source("s3://other/a")
    assert not path.is_relative_to(other)
    with pytest.raises(ValueError, match="other"):
        path.relative_to(other)


def test_a_path_of_this_machine_before_a_url_goes_away() -> None:
    path = storage.source("s3://bucket/a")
    assert Path("/x") / path == path
    assert isinstance(Path("/x") / path, RemotePath)


def test_reads_through_a_cache_have_the_same_client() -> None:
    store = stores.Store("memory://x")
    through = store.through(Pages(MemoryCache()))
    assert through.client() is store.client()


def test_a_name_that_no_object_has(s3: S3, bucket: str) -> None:
    with pytest.raises(UsageError, match="not a valid object name"):
        opened(s3.url(bucket, "a\0b"), s3.options())


def test_statistics_of_a_bucket_download_it_once(
    s3: S3, bucket: str, datasets: Path, through: Through
) -> None:
    proxy = through(s3)
    dataset = opened(s3.url(bucket, "wds"), s3.options(proxy.endpoint))
    before = proxy.count(".tar").sent
    assert dataset.stats() == open_dataset(datasets / "wds").stats()
    size = sum(path.stat().st_size for path in (datasets / "wds").glob("*.tar"))
    assert proxy.count(".tar").sent - before <= 1.02 * size
