"""The servers do what the tests of remote datasets rely on, for obstore and for fsspec."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.remote import servers
from tests.remote.process import ROOT, Process
from tests.remote.servers import RETRIES, S3, Google, Nginx, Store

obstore = pytest.importorskip("obstore")
DATA = bytes(range(256)) * 40


def test_objects_are_put_and_read_by_ranges(store: Store) -> None:
    opened = store.open(store.bucket())
    tag = obstore.put(opened, "a/b.bin", DATA)["e_tag"]
    assert obstore.head(opened, "a/b.bin")["size"] == len(DATA)
    assert obstore.head(opened, "a/b.bin")["e_tag"] == tag
    assert bytes(obstore.get(opened, "a/b.bin").bytes()) == DATA
    ranges = obstore.get_ranges(opened, "a/b.bin", starts=[5, 900], lengths=[7, 11], coalesce=0)
    assert [bytes(piece) for piece in ranges] == [DATA[5:12], DATA[900:911]]
    with pytest.raises(FileNotFoundError):
        obstore.get(opened, "a/c.bin")


def test_objects_are_listed_after_a_key_and_by_folder(store: Store) -> None:
    opened = store.open(store.bucket())
    for key in ("a/1", "a/2", "b/1", "top"):
        obstore.put(opened, key, b"x")
    assert [found["path"] for found in obstore.list(opened).collect()] == [
        "a/1",
        "a/2",
        "b/1",
        "top",
    ]
    after = [found["path"] for found in obstore.list(opened, offset="a/2").collect()]
    if store.scheme == "az":  # azurite lists all: it does not know `startFrom`, which Azure does
        assert after[-2:] == ["b/1", "top"]
    else:
        assert after == ["b/1", "top"]
    found = obstore.list_with_delimiter(opened)
    assert sorted(found["common_prefixes"]) == ["a", "b"]
    assert [entry["path"] for entry in found["objects"]] == ["top"]
    obstore.delete(opened, ["a/1", "top"])
    assert [found["path"] for found in obstore.list(opened).collect()] == ["a/2", "b/1"]


def test_conditions_are_kept(store: Store) -> None:
    opened = store.open(store.bucket())
    put = obstore.put(opened, "a", b"1", mode="create")
    first = {key: value for key, value in put.items() if value is not None}
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(opened, "a", b"2", mode="create")
    second = obstore.put(opened, "a", b"3", mode=first)
    with pytest.raises(obstore.exceptions.PreconditionError):
        obstore.put(opened, "a", b"4", mode=first)
    assert bytes(obstore.get(opened, "a", options={"if_match": second["e_tag"]}).bytes()) == b"3"
    with pytest.raises(obstore.exceptions.PreconditionError):
        obstore.get(opened, "a", options={"if_match": first["e_tag"]})


def test_large_objects_are_uploaded_in_parts(store: Store) -> None:
    opened, data = store.open(store.bucket()), os.urandom(1 << 20) * 11
    obstore.put(opened, "large", data, chunk_size=5 << 20)
    assert bytes(obstore.get(opened, "large").bytes()) == data


@pytest.mark.parametrize("name", ["s3", "google"])
def test_unfinished_uploads_are_seen(name: str, request: pytest.FixtureRequest) -> None:
    server: S3 | Google = request.getfixturevalue(name)
    bucket = server.bucket()
    servers.request(f"{server.endpoint}/{bucket}/part%20a?uploads", "POST", **servers.SIGNED)
    assert server.uploads(bucket) == ["part a"]
    assert server.keys(bucket) == []
    obstore.put(server.open(bucket), "x y&z", b"1")
    assert server.objects(bucket) == {"x y&z": b"1"}


def test_environment_is_enough(store: Store) -> None:
    bucket = store.bucket()
    obstore.put(store.open(bucket), "a", DATA)
    script = (
        "import obstore, sys; from obstore.store import from_url;"
        "print(len(obstore.get(from_url(sys.argv[1]), 'a').bytes()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, store.url(bucket)],
        env={**os.environ, **store.environ()}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == str(len(DATA)), done.stderr


def test_fsspec_reads_and_writes_s3(s3: S3) -> None:
    s3fs = pytest.importorskip("s3fs")
    files = s3fs.S3FileSystem(
        key="testkey", secret="testsecret", endpoint_url=s3.endpoint, skip_instance_cache=True
    )
    path = f"{s3.bucket()}/a.bin"
    files.pipe_file(path, DATA)
    assert files.cat_ranges([path, path], [5, 900], [12, 911]) == [DATA[5:12], DATA[900:911]]


@pytest.mark.parametrize("name", ["web", "secure_web"])
def test_web_servers_give_ranges(
    name: str, certificate: Path, request: pytest.FixtureRequest
) -> None:
    from obstore.store import HTTPStore

    server: Nginx = request.getfixturevalue(name)
    (server.root / "a.bin").write_bytes(DATA)
    options = {"allow_http": True, "root_certificate": (Path(f"{certificate}.pem")).read_bytes()}
    opened = HTTPStore.from_url(server.endpoint, client_options=options, retry_config=RETRIES)
    assert bytes(obstore.get_range(opened, "a.bin", start=5, end=12)) == DATA[5:12]
    assert obstore.head(opened, "a.bin")["e_tag"]
    with pytest.raises(FileNotFoundError):
        obstore.get(opened, "b.bin")


def test_web_server_takes_puts_and_fsspec_reads_it(web: Nginx) -> None:
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    servers.request(f"{web.endpoint}/new/b.bin", "PUT", DATA)
    assert (web.root / "new/b.bin").read_bytes() == DATA
    files = fsspec.filesystem("http", skip_instance_cache=True)
    assert files.cat_file(f"{web.endpoint}/new/b.bin", 5, 12) == DATA[5:12]


def test_a_server_ends_with_the_process_that_started_it() -> None:
    script = (
        "from tests.remote.servers import Google; import os; server = Google();"
        "print(server.port, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    gone = object.__new__(Process)
    gone.port = int(done.stdout)
    for _ in range(200):
        if not gone._listens():
            return
        time.sleep(0.05)
    raise AssertionError("the server still listens")
