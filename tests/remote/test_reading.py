"""Datasets of every format, read from stores: the same samples as from this machine."""

import io
import os
import pickle
import re
import shutil
import signal
import sys
import tarfile
import threading
import traceback
from array import array
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit import errors
from shardkit.dataset.find import open_dataset
from shardkit.errors import DamagedError, NotFoundError, ShardkitWarning, StorageError, UsageError
from shardkit.inspection.inspect import inspect
from shardkit.schema import Array, Schema
from shardkit.storage import fs
from shardkit.storage.page_cache import MemoryCache
from shardkit.storage.pages import Pages
from shardkit.storage.remote import clients
from shardkit.storage.remote import store as stores
from shardkit.storage.remote.clients import ForkedClient
from shardkit.storage.remote.path import RemotePath
from shardkit.testing import EVERYTHING, everything, make_image
from tests.remote.buckets import Bucket
from tests.remote.process import Process
from tests.remote.proxy import Rule

FORMATS = ("wds", "lmdb", "arrow", "parquet", "hf", "beton", "megatron", "tfrecord", "litdata")
SAMPLES = 40
SECRET = "testtoken"  # of tests.remote.servers


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """A dataset of every format, with a few shards where a format has several; and the same
    without manifests."""
    root = tmp_path_factory.mktemp("datasets")
    for format in FORMATS:
        tokens = format == "megatron"
        schema = Schema({"x": Array("<u2", (None,))} if tokens else EVERYTHING)
        with shardkit.create(root / format, to=format, schema=schema, shard_samples=15) as out:
            for n in range(SAMPLES):
                sample = {"__key__": f"k{n}", "x": np.arange(n, dtype="<u2")}
                out.write(sample if tokens else everything(n))
    shutil.copytree(root, root / "bare", ignore=shutil.ignore_patterns("__shardkit__", "bare"))
    return root


def equal(one, other):
    return pickle.dumps(one) == pickle.dumps(other)


def same(found, local):
    return len(found) == len(local) and all(equal(found[n], local[n]) for n in range(len(local)))


@pytest.mark.parametrize("name", [*FORMATS, *(f"bare/{format}" for format in FORMATS)])
def test_every_format_reads_from_a_bucket(name, data, datasets):
    local, found = open_dataset(datasets / name), data.open(name)
    assert len(found) == SAMPLES
    assert same(found, local)
    assert found.schema == local.schema
    assert found.reader(0).keys() == local.reader(0).keys()
    assert str(found.shard_path(0)) == data.url(f"{name}/{local.shard_name(0)}")


def test_every_store_has_the_same(store, datasets):
    bucket = Bucket(store, datasets / "wds")
    found = bucket.open()
    assert same(found, open_dataset(datasets / "wds"))
    found = bucket.open()
    assert len(found.reader(0)) == found.extent(0)[0]
    bucket.put({found.shard_name(0): b"x" * found.extent(0)[1]})
    with pytest.raises(DamagedError, match="replaced while it was in use"):
        found[1]
    with pytest.raises(NotFoundError, match="there is no such"):
        bucket.open("nothing")
    with pytest.raises(NotFoundError, match="no such bucket"), fs.using(bucket.options):
        open_dataset(store.url("no-such-bucket", "x"))


def test_a_web_server(web, datasets, tmp_path):
    """It has no listings."""
    url, local = f"{web.endpoint}/sets/wds", open_dataset(datasets / "wds")
    shutil.copytree(datasets / "wds", web.root / "sets" / "wds")
    for each, here in ((url, local.path), (f"{url}/{local.shard_name(1)}", local.shard_path(1))):
        assert same(open_dataset(each), open_dataset(here))
        assert inspect(each)["incomplete"] is None
        report = shardkit.verify(each)
        assert report.sound
        assert report.notes == ["a web server has no listings: extra shards cannot be detected"]
    assert shardkit.verify(url, datasets / "wds", decode=True).samples == SAMPLES
    assert shardkit.convert(url, "arrow", tmp_path / "out", workers=0).samples == SAMPLES


def test_a_web_server_that_refuses_to_show_folders(web, datasets):
    """As nginx does by default: it answers 403 for each folder."""
    shutil.copytree(datasets / "wds", web.root / "unlisted" / "wds")
    (web.root / "unlisted/images").mkdir()
    assert len(open_dataset(f"{web.endpoint}/unlisted/wds")) == SAMPLES
    with pytest.raises(StorageError, match="refuses access") as caught:
        open_dataset(f"{web.endpoint}/unlisted/images")
    assert "datasets with a manifest" in (caught.value.fix or "")


def test_a_server_of_whole_files_is_called_so(datasets, through, tmp_path):
    """As `python -m http.server`, which answers each range with the whole file."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "sets").symlink_to(datasets)
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "-d", str(tmp_path)]
    with closing(Process(lambda port: [*command, str(port)])) as server:
        url = server.endpoint
        for use in (
            lambda: shardkit.open(f"{url}/sets/wds"),
            lambda: shardkit.open(f"{url}/sets/bare/wds/shard-{{000000..000001}}.tar"),
            lambda: shardkit.convert(f"{url}/a.txt", "wds", tmp_path / "out", workers=0),
        ):
            with pytest.raises(StorageError, match="whole files only") as caught:
                use()
            assert "python -m RangeHTTPServer" in (caught.value.fix or "")
        proxy = through(server)  # as that one, which finds no file where a folder is
        proxy.add(Rule(method="GET", match="sets", status=404))
        with pytest.raises(NotFoundError, match="cannot list") as missing:
            shardkit.open(f"{proxy.endpoint}/sets")
        assert "give a dataset with a manifest" in (missing.value.fix or "")


def test_any_file_system_of_fsspec(datasets):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(datasets / "arrow"), "/sets/arrow", recursive=True)
    assert same(open_dataset("memory://sets/arrow"), open_dataset(datasets / "arrow"))
    memory.rm("/sets", recursive=True)


def test_opening_reads_no_payloads_and_statistics_read_them_once(seen, datasets):
    found = seen.open("wds")
    assert len(found) == SAMPLES
    assert seen.proxy.count(match=r"shard-\d+\.tar$").requests == 0
    assert seen.proxy.count().requests < 12
    assert found.stats() == open_dataset(datasets / "wds").stats()
    size = sum(path.stat().st_size for path in (datasets / "wds").glob("*.tar"))
    assert size <= seen.proxy.count("GET", r"\.tar$").sent <= 1.02 * size


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 503}, {"status": 500}, {"status": 429}, {"refuse": True}, {"reset_after": 100},
        {"close_after": 100}, {"shorten": 10}, {"whole": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_fault_that_passes_is_not_seen(fault, seen, datasets):
    requests = []
    for times in (0, 2):
        found = seen.open("wds")
        seen.proxy.clear()
        seen.proxy.add(Rule(method="GET", match="shard", times=times, **fault))
        assert same(found, open_dataset(datasets / "wds"))
        requests.append(seen.proxy.count(match="shard").requests)
    assert requests[1] == requests[0] + 2


def test_a_fault_that_stays_is_an_error(seen):
    """Of the command line, where it is met at once: as a wrong bucket is."""
    found = seen.open("wds")
    seen.proxy.clear()
    seen.proxy.add(Rule(status=503, match="shard"))
    with pytest.raises(StorageError, match="returned an unexpected response") as caught:
        found[0]
    assert caught.value.found == "HTTP 503"
    assert str(caught.value.where["path"]).startswith(seen.url("wds"))
    assert seen.proxy.count("GET", "shard").requests == stores.ATTEMPTS
    seen.proxy.add(Rule(refuse=True))
    with pytest.raises(StorageError, match="cannot be reached") as later:
        found[0]
    with pytest.raises(StorageError, match="cannot be reached") as first:
        seen.open("wds")
    assert [each.value.exit_code for each in (later, first)] == [1, 2]


def test_what_cannot_be_opened(data):
    url, options = data.url(), data.options
    cases = [
        (f"{data.store.scheme}://no-such-bucket/x", options, NotFoundError, "no such bucket"),
        (data.url("nothing"), options, NotFoundError, "there is no such"),
        (url, {**options, "endpint": "x"}, UsageError, "found: endpint"),
        (url, {**options, "base_url": "http://127.0.0.1:9"}, errors.UnreachableError, "refused"),
        (data.url("a\0b"), options, UsageError, "not a valid object name"),
        ("nonsense://x/y", {}, UsageError, "unknown URL scheme"),
        ("https://a:secret@example.org/x", {}, UsageError, "a URL with a password"),
        ("https://example.org/x?token=secret", {}, UsageError, "with a query"),
        ("s3://", {}, UsageError, "does not name a bucket or server"),
    ]
    for where, given, kind, words in cases:
        with pytest.raises(kind) as caught, fs.using(given):
            open_dataset(where)
        assert words.lower() in str(caught.value).lower()
        assert not {SECRET, "a:secret"} & {*re.findall(r"[\w:]+", str(caught.value))}


def test_what_was_meant_is_said(google, datasets, tmp_path):
    """A dataset and the folder of its unfinished work are taken for each other; and an image."""
    bucket = Bucket(google, {"photos/a.JPG": make_image()})
    for name in ("made", "done"):
        bucket.put(datasets / "wds", f"{name}/")
    bucket.put(dict.fromkeys(["made.partial/job.json", "begun.partial/job.json"], b"{}"))
    url = bucket.url()
    cases = {
        "made.partial": (
            errors.FormatError,
            f"command again; to read the dataset, give {url}/made",
        ),
        "begun": (NotFoundError, "its conversion is unfinished: run the interrupted command"),
        "done.partial": (NotFoundError, f"to read the dataset, give {url}/done"),
        "photos/a.JPG": (errors.FormatError, f"pass the folder that contains it, {url}/photos"),
    }
    for name, (kind, words) in cases.items():
        with pytest.raises(kind) as caught:
            bucket.open(name)
        assert words in str(caught.value.fix)
    given = {"storage_options": bucket.options}
    with pytest.raises(errors.FormatError, match="a single image"):
        shardkit.convert(f"{url}/photos/a.JPG", "wds", tmp_path / "out", **given)


def test_no_permission(seen):
    for status, code, words in (
        (403, "AccessDenied", "refuses access"),
        (400, "ExpiredToken", "the credentials have expired"),
        (400, "AuthorizationHeaderMalformed", "the store refuses"),
        (301, "PermanentRedirect", "the bucket is in another region"),
    ):
        seen.proxy.clear()
        body = f"<Error><Code>{code}</Code><Message>{SECRET}</Message></Error>"
        seen.proxy.add(Rule(status=status, body=body))
        with pytest.raises(StorageError, match=words) as caught:
            list(seen.path("wds").iterdir())
        shown = "".join(traceback.format_exception(caught.value))
        assert SECRET not in shown
        assert "obstore.exceptions" not in shown  # it repeats the request and the answer
        assert words in shown
        if status == 403:
            with pytest.raises(StorageError, match=words) as caught:
                seen.open("wds")
            assert caught.value.found == "HTTP 403"  # an answer to HEAD has no body


def test_folders_beside_shards_are_named(google, datasets):
    """Datasets, for all that is known: the shards alone are opened."""
    bucket = Bucket(google)
    for name in ("wds", "lmdb"):
        bucket.put(datasets / name, f"{name}/")
    shard = datasets / "parquet/shard-000000.parquet"
    bucket.put({"train.parquet": shard.read_bytes()})
    with pytest.warns(ShardkitWarning, match="not those in its folders: 'lmdb', 'wds'"):
        found = bucket.open()
    assert len(found) == 15
    assert found.ignored["folder"] == 2
    with pytest.warns(ShardkitWarning, match="not those in its folders: 'lmdb', 'wds'"):
        about = inspect(bucket.url(), storage_options=bucket.options)
    assert about["ignored"]["folder"] == 2


# --- processes and threads -----------------------------------------------------------------------


def test_threads_that_begin_together_make_one_client(monkeypatch):
    made, together = [], threading.Barrier(8)

    def connect(site, options):
        made.append(site)
        return object()

    def client(store):
        together.wait(60)
        return store.client()

    monkeypatch.setattr(clients, "connect", connect)
    with ThreadPoolExecutor(8) as threads:
        assert len({*threads.map(client, [stores.Store("s3://bucket")] * 8)}) == len(made) == 1


def test_requests_of_a_fork_outlive_ctrl_c(data):
    client = ForkedClient(data.url(), data.options)
    with client._process as process:
        assert client.find("nothing") is None
        process.send_signal(signal.SIGINT)
        assert client.find("nothing") is None
        process.kill()
        for thread in threading.enumerate():
            if thread.name == "shardkit-answers":
                thread.join()


def test_a_process_for_requests_that_dies_while_it_answers():
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


def test_names_stay_in_their_bucket_and_options_are_in_none(data):
    path = fs.source("s3://bucket/a//b/./../c/")
    assert str(path) == "s3://bucket/a/c"
    assert str(path / ".." / ".." / ".." / "d") == "s3://bucket/d"
    assert path.relative_to(fs.source("s3://bucket/a")) == PurePosixPath("c")
    assert path.is_relative_to(fs.source("s3://bucket/a"))
    other = fs.source("s3://other/a")
    assert not path.is_relative_to(other)
    with pytest.raises(ValueError, match="other"):
        path.relative_to(other)
    joined = Path("/x") / path  # a path of this machine before it goes away
    assert joined == path
    assert isinstance(joined, RemotePath)
    with pytest.raises(UsageError, match="needs a local path"):
        os.stat(path)
    found = data.open("wds")
    assert SECRET not in repr(found) + repr(found.path) + repr(data.path("wds").store)


def test_reads_through_a_cache_have_the_same_client():
    store = stores.Store("memory://x")
    assert store.through(Pages(MemoryCache())).client() is store.client()


@pytest.mark.parametrize("copied", [False, True])
def test_an_object_of_any_file_system_that_is_replaced_is_not_read_in_two_versions(
    copied,
):
    import fsspec

    def put(letter):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(4):
                member = tarfile.TarInfo(f"{number}.bin")
                member.size = 1 << 20
                tar.addfile(member, io.BytesIO(letter * (1 << 20)))
        system.pipe_file("/replaced/x.tar", file.getvalue())

    system = fsspec.filesystem("memory")
    put(b"a")
    dataset = open_dataset("memory://replaced/x.tar")
    assert dataset[0]["bin"] == b"a" * (1 << 20)
    put(b"b")
    dataset = pickle.loads(pickle.dumps(dataset)) if copied else dataset
    with pytest.raises(DamagedError, match="the object was replaced while it was in use"):
        dataset[3]
    assert open_dataset("memory://replaced/x.tar")[3]["bin"] == b"b" * (1 << 20)
