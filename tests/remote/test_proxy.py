"""Each fault of the proxy, as a client without retries meets it, and what it counts."""

from __future__ import annotations

import http.client
import time
import urllib.error
from datetime import timedelta
from typing import Any

import pytest

from tests.remote.conftest import Through
from tests.remote.proxy import Count, Proxy, Rule
from tests.remote.servers import S3, Google, request

obstore = pytest.importorskip("obstore")
DATA = bytes(range(251)) * 1000


class Place:
    """An object "a" of `DATA` in a bucket of its own, seen through the proxy."""

    def __init__(self, server: Google, proxy: Proxy) -> None:
        self.server, self.proxy, self.bucket = server, proxy, server.bucket()
        self.put(DATA)
        self.opened: Any = server.open(self.bucket, proxy.endpoint)

    def put(self, data: bytes, key: str = "a") -> None:
        request(f"{self.server.endpoint}/{self.bucket}/{key}", "PUT", data)

    def get(self, first: int = 10, last: int = 19) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Status, headers and body of a range, by a client that checks nothing."""
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.port, timeout=10)
        headers = {"Range": f"bytes={first}-{last}"}
        try:
            connection.request("GET", f"/{self.bucket}/a", headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()


@pytest.fixture
def place(google: Google, through: Through) -> Place:
    return Place(google, through(google))


def test_without_rules_nothing_changes_and_all_is_counted(place: Place) -> None:
    assert bytes(obstore.get(place.opened, "a").bytes()) == DATA
    assert bytes(obstore.get_range(place.opened, "a", start=5, length=7)) == DATA[5:12]
    obstore.put(place.opened, "b", b"new")
    assert place.server.objects(place.bucket) == {"a": DATA, "b": b"new"}
    assert place.proxy.count("GET", "/a$") == Count(2, 0, len(DATA) + 7)
    assert place.proxy.count("PUT") == Count(1, 3, 0)
    assert [entry.range for entry in place.proxy.log()] == ["", "bytes=5-11", ""]
    place.proxy.clear()
    assert place.proxy.count() == Count(0, 0, 0)


def test_latency_is_of_each_request_and_the_rate_of_each_response(place: Place) -> None:
    place.proxy.add(Rule(latency=0.1), Rule(rate=len(DATA) / 0.2))
    start = time.monotonic()
    assert place.get(0, len(DATA) - 1)[2] == DATA
    assert time.monotonic() - start > 0.25
    for method in (place.get, place.get):
        method()
    assert time.monotonic() - start > 0.45


def test_rules_match_and_are_numbered(place: Place) -> None:
    place.proxy.add(Rule(method="GET", match="/a$", skip=1, times=2, status=503))
    assert [place.get()[0] for _ in range(4)] == [206, 503, 503, 206]
    place.put(b"1", "b")
    assert request(f"{place.proxy.endpoint}/{place.bucket}/b") == b"1"


@pytest.mark.parametrize("status", [403, 429, 500, 503])
def test_an_answer_of_its_own(place: Place, status: int) -> None:
    place.proxy.add(Rule(status=status, body="<Code>Slow</Code>", retry_after="3"))
    got, headers, body = place.get()
    assert (got, headers["Retry-After"], body) == (status, "3", b"<Code>Slow</Code>")


def test_a_connection_that_is_refused_never_reaches_the_server(place: Place) -> None:
    place.proxy.add(Rule(method="PUT", refuse=True))
    with pytest.raises(OSError, match=r"reset|closed|pipe"):
        request(f"{place.proxy.endpoint}/{place.bucket}/b", "PUT", b"1")
    assert place.server.keys(place.bucket) == ["a"]


def test_a_reset_before_the_answer_comes_after_the_deed(place: Place) -> None:
    place.proxy.add(Rule(method="PUT", reset_after=0))
    with pytest.raises(OSError, match=r"reset|closed|pipe"):
        request(f"{place.proxy.endpoint}/{place.bucket}/b", "PUT", b"1")
    assert place.server.keys(place.bucket) == ["a", "b"]
    assert place.proxy.log()[-1].status == 0


def test_a_reset_within_the_body(place: Place) -> None:
    place.proxy.add(Rule(reset_after=1000))
    with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
        place.get(0, 200_000)
    assert place.proxy.count("GET").sent == 1000


def test_a_body_that_ends_early(place: Place) -> None:
    place.proxy.add(Rule(close_after=1000))
    with pytest.raises(http.client.IncompleteRead) as error:
        place.get(0, 200_000)
    assert len(error.value.partial) == 1000


def test_a_body_that_stalls(place: Place) -> None:
    place.proxy.add(Rule(stall_after=1000, stall=0.3))
    start = time.monotonic()
    assert place.get(0, 2000)[2] == DATA[:2001]
    assert time.monotonic() - start >= 0.3


def test_a_body_that_is_short_and_says_so(place: Place) -> None:
    place.proxy.add(Rule(shorten=4))
    status, headers, body = place.get(10, 19)
    assert (status, headers["Content-Length"], body) == (206, "6", DATA[10:16])
    assert headers["Content-Range"] == f"bytes 10-19/{len(DATA)}"


def test_another_range_under_the_right_header(place: Place) -> None:
    place.proxy.add(Rule(shift=7))
    status, headers, body = place.get(10, 19)
    assert (status, body) == (206, DATA[17:27])
    assert headers["Content-Range"] == f"bytes 10-19/{len(DATA)}"


def test_the_whole_instead_of_a_range(place: Place) -> None:
    place.proxy.add(Rule(whole=True))
    status, headers, body = place.get(10, 19)
    assert (status, headers["Content-Range"], body) == (200, None, DATA)


def test_a_listing_that_is_stale(place: Place) -> None:
    place.proxy.add(Rule(match=r"list-type=2", stale=True))
    for _ in range(2):
        assert [found["path"] for found in obstore.list(place.opened).collect()] == ["a"]
        place.put(b"1", "b")
    place.proxy.clear()
    assert [found["path"] for found in obstore.list(place.opened).collect()] == ["a", "b"]


@pytest.mark.parametrize("name", ["s3", "google"])
def test_an_object_that_is_replaced(
    name: str, through: Through, request: pytest.FixtureRequest
) -> None:
    server: S3 | Google = request.getfixturevalue(name)
    place = Place(server, through(server))
    place.proxy.add(Rule(method="GET", match="/a$", skip=1, times=1, replace="new"))
    tag = obstore.get(place.opened, "a").meta["e_tag"]
    with pytest.raises(obstore.exceptions.PreconditionError):
        obstore.get(place.opened, "a", options={"if_match": tag})
    assert server.objects(place.bucket) == {"a": b"new"}


def test_obstore_repeats_what_failed(place: Place) -> None:
    place.proxy.add(Rule(times=1, status=503), Rule(skip=1, times=1, refuse=True))
    assert bytes(obstore.get_range(place.opened, "a", start=5, length=7)) == DATA[5:12]
    assert [entry.status for entry in place.proxy.log()] == [503, 0, 206]


def test_a_stalled_request_ends_by_its_timeout(google: Google, through: Through) -> None:
    from obstore.store import from_url

    place = Place(google, through(google))
    opened = from_url(
        google.url(place.bucket),
        client_options={"allow_http": True, "timeout": "300ms"},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        **google.options(place.proxy.endpoint),
    )
    place.proxy.add(Rule(stall_after=1000))
    start = time.monotonic()
    with pytest.raises(obstore.exceptions.GenericError):
        obstore.get(opened, "a").bytes()
    assert time.monotonic() - start < 5


def test_a_server_that_is_not_there_is_no_fault_of_the_proxy(place: Place) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        request(f"{place.proxy.endpoint}/no-such-bucket/a")
