"""Servers and proxies for tests, started when the first asks, one of each in a process."""

import threading
from collections.abc import Callable

import pytest

from shardkit.storage.remote import store as stores
from tests.conftest import few
from tests.remote.buckets import Bucket
from tests.remote.process import Process
from tests.remote.proxy import Proxy
from tests.remote.servers import S3, Azure, Google, Nginx

Through = Callable[[Process], Proxy]
_SLOW = {"s3", "azure", "store"}  # servers that take seconds to start
_QUICK = {"google", "bucket", "seen", "web", "through"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
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
def _without_pauses(monkeypatch):
    """What fails is requested again at once."""
    monkeypatch.setattr(stores, "_PAUSE", (0, 0))


def _run(server, *arguments):
    if server.missing():
        pytest.skip(server.missing())
    with server(*arguments) as running:
        yield running


@pytest.fixture(scope="session")
def s3():
    yield from _run(S3)


@pytest.fixture(scope="session")
def google():
    yield from _run(Google)


@pytest.fixture(scope="session")
def azure():
    yield from _run(Azure)


@pytest.fixture(scope="session", params=few(["google", "s3", "azure"], "google", "s3"))
def store(request):
    """Each of the object stores, for what may differ between them."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def bucket(request):
    """An empty bucket of the store that answers quickly, or of one that a test names."""
    return Bucket(request.getfixturevalue(getattr(request, "param", "google")))


def buckets_of(*names):
    """The bucket of a test is in each of these; the large run has all but the quick one."""
    return pytest.mark.parametrize("bucket", few(names, "google"), indirect=True)


# For requests that moto and azurite, which checks signatures, may take otherwise than our own.
EACH_STORE = buckets_of("google", "s3", "azure")


def renewed(claim):
    """As the thread of a claim does, but told at once if another run has it."""
    claim._renew()
    claim.check()


@pytest.fixture(scope="module")
def data(google, datasets):
    """A bucket with the `datasets` of a module."""
    return Bucket(google, datasets)


@pytest.fixture
def seen(data, through):
    """The `data` of a module, through a proxy that counts requests and disturbs them by rules."""
    return data.through(through(data.store))


@pytest.fixture
def own(bucket, through):
    """The empty `bucket`, through such a proxy."""
    return bucket.through(through(bucket.store))


@pytest.fixture(scope="session")
def web(tmp_path_factory):
    """A web server; what is written below `web.root` is at `web.endpoint`."""
    yield from _run(Nginx, *map(tmp_path_factory.mktemp, ("root", "nginx")))


@pytest.fixture(scope="session")
def _proxies():
    proxies = {}
    yield proxies
    for proxy in proxies.values():
        proxy.close()


@pytest.fixture
def through(_proxies):
    """`through(server)` is a proxy before it, without rules and with nothing counted."""

    def start(server):
        if server.endpoint not in _proxies:
            _proxies[server.endpoint] = Proxy(server.endpoint)
        _proxies[server.endpoint].clear()
        return _proxies[server.endpoint]

    yield start
    for proxy in _proxies.values():  # what it holds must not hold the threads of this process
        proxy.clear()
    for thread in threading.enumerate():  # what it still requests is not counted in the next test
        if thread.name == "shardkit-read-ahead":
            thread.join(60)
