"""Servers and proxies for tests, started when the first asks, one of each in a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkit.remote import store as stores
from tests.conftest import few
from tests.remote.buckets import Bucket
from tests.remote.process import Process
from tests.remote.proxy import Proxy
from tests.remote.servers import S3, Azure, Google, Nginx, Store, self_signed

Through = Callable[[Process], Proxy]
_SLOW = {"s3", "azure", "store"}  # servers that take seconds to start
_QUICK = {"google", "bucket", "seen", "web", "secure_web", "through"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with slow servers run in one process, so that each of those is started once. Of others,
    those of a file do, as they share its datasets."""
    for item in items:
        params = getattr(item, "callspec", None)  # some ask for a server by name
        named = map(str, params.params.values()) if params is not None else ()
        asked = {*getattr(item, "fixturenames", ()), *named}
        if asked & _SLOW:
            item.add_marker(pytest.mark.xdist_group("servers"))
        elif asked & _QUICK:
            item.add_marker(pytest.mark.xdist_group(f"remote {item.path.stem}"))


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is requested again at once."""
    monkeypatch.setattr(stores, "_PAUSE", (0, 0))


def _run(server: Any) -> Iterator[Any]:
    if server.missing():
        pytest.skip(server.missing())
    with server() as running:
        yield running


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    yield from _run(S3)


@pytest.fixture(scope="session")
def google() -> Iterator[Google]:
    yield from _run(Google)


@pytest.fixture(scope="session")
def azure() -> Iterator[Azure]:
    yield from _run(Azure)


@pytest.fixture(scope="session", params=few(["google", "s3", "azure"], "google", "s3"))
def store(request: pytest.FixtureRequest) -> Store:
    """Each of the object stores, for what may differ between them."""
    running: Store = request.getfixturevalue(request.param)
    return running


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> Bucket:
    """An empty bucket of the store that answers quickly, or of one that a test names."""
    return Bucket(request.getfixturevalue(getattr(request, "param", "google")))


def buckets_of(*names: str) -> pytest.MarkDecorator:
    """The bucket of a test is in each of these; the large run has all but the quick one."""
    return pytest.mark.parametrize("bucket", few(names, "google"), indirect=True)


# For requests that moto and azurite, which checks signatures, may take otherwise than our own.
EACH_STORE = buckets_of("google", "s3", "azure")


@pytest.fixture
def seen(data: Bucket, through: Through) -> Bucket:
    """The `data` of a module, through a proxy that counts requests and disturbs them by rules."""
    return data.through(through(data.store))


@pytest.fixture(scope="session")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    """A web server; what is written below `web.root` is at `web.endpoint`."""
    yield from _nginx(tmp_path_factory, None)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return self_signed(tmp_path_factory.mktemp("certificate") / "key.pem")


@pytest.fixture(scope="session")
def secure_web(tmp_path_factory: pytest.TempPathFactory, certificate: Path) -> Iterator[Nginx]:
    """The same over https; clients must be told of `certificate`."""
    yield from _nginx(tmp_path_factory, certificate)


def _nginx(factory: pytest.TempPathFactory, certificate: Path | None) -> Iterator[Nginx]:
    if Nginx.missing():
        pytest.skip(Nginx.missing())
    with Nginx(factory.mktemp("root"), factory.mktemp("nginx"), certificate) as running:
        yield running


@pytest.fixture(scope="session")
def _proxies() -> Iterator[dict[str, Proxy]]:
    proxies: dict[str, Proxy] = {}
    yield proxies
    for proxy in proxies.values():
        proxy.close()


@pytest.fixture
def through(_proxies: dict[str, Proxy]) -> Iterator[Through]:
    """`through(server)` is a proxy before it, without rules and with nothing counted."""

    def start(server: Process) -> Proxy:
        if server.endpoint not in _proxies:
            _proxies[server.endpoint] = Proxy(server.endpoint)
        _proxies[server.endpoint].clear()
        return _proxies[server.endpoint]

    yield start
    for proxy in _proxies.values():  # what it holds must not hold the threads of this process
        proxy.clear()
