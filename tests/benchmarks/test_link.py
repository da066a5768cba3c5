"""The server of the remote benchmarks answers as a store does, and counts what it sends."""

import time

import pytest

from tests.benchmarks.link import Link
from tests.remote.proxy import Count
from tests.remote.servers import request

obstore = pytest.importorskip("obstore")
DATA = bytes(range(251)) * 4000  # of more than one piece


@pytest.fixture(scope="module")
def link(tmp_path_factory):
    root = tmp_path_factory.mktemp("link")
    (root / "bucket/folder").mkdir(parents=True)
    (root / "bucket/folder/a").write_bytes(DATA)
    (root / "bucket/b").write_bytes(b"b")
    with Link(root, latency=0, rate=0) as running:
        yield running


@pytest.fixture
def store(link):
    link.clear()
    options = {"endpoint": link.endpoint, "region": "us-east-1", "skip_signature": True}
    from obstore.store import S3Store

    return S3Store("bucket", **options, client_options={"allow_http": True})


def test_objects_are_those_of_a_bucket(store):
    def get(key, **options):
        return bytes(obstore.get(store, key, options=options or None).bytes())

    found = obstore.head(store, "folder/a")
    assert (found["size"], found["path"]) == (len(DATA), "folder/a")
    assert get("folder/a") == get("folder/a", if_match=found["e_tag"]) == DATA
    assert get("folder/a", range={"suffix": 9}) == DATA[-9:]
    assert bytes(obstore.get_range(store, "folder/a", start=7, end=900_000)) == DATA[7:900_000]
    listed = obstore.list_with_delimiter(store)
    assert listed["common_prefixes"] == ["folder"]
    assert [(each["path"], each["size"]) for each in listed["objects"]] == [("b", 1)]
    assert obstore.list(store, "folder").collect()[0]["e_tag"] == found["e_tag"]
    with pytest.raises(FileNotFoundError):
        get("c")
    with pytest.raises(Exception, match="PreconditionFailed"):
        get("b", if_match='"other"')
    with pytest.raises(Exception, match="MethodNotAllowed"):
        obstore.put(store, "b", b"new")


def test_it_counts(link, store):
    obstore.get_range(store, "folder/a", start=0, length=1000)
    obstore.get_range(store, "folder/a", start=500, length=1000)
    obstore.head(store, "b")
    assert request(link.url("bucket/b")) == b"b"
    assert link.count("folder/") == Count(2, 0, 2000)
    assert link.count() == Count(4, 0, 2001)
    link.clear()
    assert link.count() == Count(0, 0, 0)


def test_it_takes_its_time(tmp_path):
    (tmp_path / "a").write_bytes(DATA)
    with Link(tmp_path, latency=0.02, rate=5e7) as slow:
        began = time.monotonic()
        assert request(slow.url("a")) == DATA
        assert time.monotonic() - began >= 0.02 + len(DATA) / 5e7
