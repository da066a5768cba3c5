"""The servers do what the tests of remote datasets rely on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import obstore
import pytest

import shardkit
from tests.remote.buckets import Bucket
from tests.remote.process import ROOT, Process
from tests.remote.servers import RETRIES, Nginx, Store

DATA = bytes(range(256)) * 40


def test_objects_are_read_by_ranges_and_listed_after_a_key(store: Store) -> None:
    bucket = Bucket(store, {"a/1": DATA, "a/2": b"x", "b/1": b"y", "top": b"z"})
    opened = store.open(bucket.name)
    assert obstore.head(opened, "a/1")["size"] == len(DATA)
    ranges = obstore.get_ranges(opened, "a/1", starts=[5, 900], lengths=[7, 11], coalesce=0)
    assert [bytes(piece) for piece in ranges] == [DATA[5:12], DATA[900:911]]
    with pytest.raises(FileNotFoundError):
        obstore.get(opened, "a/c.bin")
    after = [found["path"] for found in obstore.list(opened, offset="a/2").collect()]
    assert after[-2:] == ["b/1", "top"]
    assert len(after) == 2 or store.scheme == "az"  # azurite knows no `startFrom`, as Azure does
    found = obstore.list_with_delimiter(opened)
    assert sorted(found["common_prefixes"]) == ["a", "b"]
    assert [entry["path"] for entry in found["objects"]] == ["top"]
    bucket.delete("a/1", "top")
    assert bucket.objects() == {"a/2": b"x", "b/1": b"y"}


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


def test_environment_is_enough(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.environ().items():
        monkeypatch.setenv(name, value)
    url = store.url(store.bucket(), "out")
    with shardkit.create(url, "wds", {"x": shardkit.Int()}) as out:
        out.write({"x": 3})
    assert shardkit.open(url)[0]["x"] == 3


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


def test_a_server_ends_with_the_process_that_started_it() -> None:
    script = (
        "from tests.remote.servers import Google; import os; server = Google();"
        "print(server.port, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=-1, check=False)
    gone = object.__new__(Process)
    gone.port = int(done.stdout)
    while gone._listens():  # the limit of a test ends this
        time.sleep(0.01)
