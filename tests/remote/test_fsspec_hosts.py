"""File systems of fsspec in whose paths the host or the repository does not occur."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import shardkit
from shardkit.errors import MissingLibraryError, StorageError
from shardkit.testing import make_image

fsspec = pytest.importorskip("fsspec")
memory = pytest.importorskip("fsspec.implementations.memory")


class _OnHost(memory.MemoryFileSystem):  # type: ignore[misc]
    """As `sftp://` and `github://`: the part before the path is an argument."""

    protocol = "onhost"
    cachable = False

    def __init__(self, host: str, **options: Any) -> None:
        super().__init__(**options)
        assert host == "server"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        path = str(path).partition("://server")[2] if "://" in str(path) else str(path)
        return "/" + path.strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        return {"host": path.partition("://")[2].partition("/")[0], "path": "/"}


@pytest.fixture
def registered() -> Iterator[None]:
    fsspec.register_implementation("onhost", _OnHost, clobber=True)
    yield
    memory.MemoryFileSystem.store.clear()
    memory.MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.usefixtures("registered")
def test_a_host_is_no_folder(tmp_path):
    for name in ("a", "b"):
        memory.MemoryFileSystem().pipe(f"/texts/{name}.txt", name.encode())
    shardkit.convert("onhost://server/texts", to="arrow", out=tmp_path / "o", workers=0)
    assert [s["text"] for s in shardkit.open(tmp_path / "o")] == ["a", "b"]


@pytest.mark.usefixtures("registered")
def test_one_connection_gets_one_request_at_a_time(tmp_path, monkeypatch):
    """As of SFTP and FTP: requests of several threads at once waited for ever."""
    for n in range(40):
        memory.MemoryFileSystem().pipe(f"/images/{n}.jpg", make_image(n))
    busy, together = threading.Lock(), []
    real = _OnHost.cat_file

    def alone(self, *given, **named):
        if not busy.acquire(blocking=False):
            together.append(given)
            return real(self, *given, **named)
        time.sleep(0.002)  # for other threads to come
        busy.release()
        return real(self, *given, **named)

    monkeypatch.setattr(_OnHost, "cat_file", alone)
    shardkit.convert("onhost://server/images", to="wds", out=tmp_path / "o", workers=0)
    assert together == []


def test_the_library_of_a_scheme_is_named(monkeypatch):
    def lacking(scheme):
        raise ImportError(f"install lib{scheme}")

    monkeypatch.setattr(fsspec, "get_filesystem_class", lacking)
    with pytest.raises(MissingLibraryError) as error:
        shardkit.open("sftp://server/x")
    assert error.value.found == "install libsftp"


class _OtherLibraryError(Exception):
    """As of httpx or paramiko, whose errors are none of the system."""


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("kind", [ConnectionError, ValueError, _OtherLibraryError])
@pytest.mark.parametrize("method", ["__init__", "info"])
def test_whatever_a_file_system_raises_is_an_error_of_the_store(kind, method, monkeypatch):
    def fails(*_, **__):
        raise kind("a secret")

    monkeypatch.setattr(_OnHost, method, fails)
    with pytest.raises(StorageError) as error:
        shardkit.open("onhost://server/texts")
    assert (error.value.found, "secret" in str(error.value)) == (kind.__name__, False)
    assert "check the address" in str(error.value.fix)
