"""Paths that users give, and URLs."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit import storage
from shardkit.errors import UsageError
from shardkit.remote.path import RemotePath

URL = "s3://bucket/folder/x.tar"


@pytest.mark.parametrize("url", [URL, Path(URL)], ids=["text", "path"])  # of two slashes, one
def test_a_url_is_a_remote_path(url):
    assert storage.output(url) == storage.source(url)
    found = storage.source(url)
    assert isinstance(found, RemotePath)
    assert str(found) == URL
    assert storage.source(found) is found
    assert (found.name, found.parent / "y.tar") == ("x.tar", storage.source(f"{URL[:-5]}y.tar"))


def test_a_file_url_is_refused():
    with pytest.raises(UsageError, match="without a scheme") as error:
        storage.source("file:///tmp/x")
    assert error.value.fix == "give /tmp/x"


def test_names_with_colons_are_no_urls(tmp_path, monkeypatch):
    for name in ("a:b", "C:/data", "./s3:/x", "12:30/x"):
        assert storage.source(name) == Path(name)
    (tmp_path / "data:" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert storage.source("data:/x") == Path("data:/x")
