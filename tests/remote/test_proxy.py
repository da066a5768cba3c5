"""What the proxy counts, and what the tests that use its rules would not notice if it failed."""

from __future__ import annotations

import http.client
import threading
import urllib.error
from typing import Any

import pytest

from tests.remote.buckets import Bucket
from tests.remote.proxy import Count, Rule
from tests.remote.servers import Google, request

DATA = bytes(range(251)) * 1000
RESET = r"reset|closed|pipe"


@pytest.fixture(scope="module")
def data(google: Google) -> Bucket:
    return Bucket(google, {"a": DATA})


def get(seen: Bucket, first: int = 10, last: int = 19) -> tuple[int, Any, bytes]:
    """Status, headers and body of a range, by a client that checks nothing."""
    connection = http.client.HTTPConnection("127.0.0.1", seen.proxy.port, timeout=60)
    try:
        connection.request("GET", f"/{seen.name}/a", headers={"Range": f"bytes={first}-{last}"})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def put(seen: Bucket) -> None:
    request(f"{seen.proxy.endpoint}/{seen.name}/b", "PUT", b"new")


def test_without_rules_nothing_changes_and_all_is_counted(google: Google, seen: Bucket) -> None:
    status, headers, body = get(seen, 5, 11)
    assert (status, headers["Content-Range"]) == (206, f"bytes 5-11/{len(DATA)}")
    assert (body, get(seen, 0, len(DATA))[2]) == (DATA[5:12], DATA)
    put(seen)
    assert seen.objects() == {"a": DATA, "b": b"new"}
    seen.delete("b")
    assert seen.proxy.count("GET", "/a$") == Count(2, 0, len(DATA) + 7)
    assert seen.proxy.count("PUT") == Count(1, 3, 0)
    assert [entry.range for entry in seen.proxy.log()][::2] == ["bytes=5-11", ""]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        request(f"{seen.proxy.endpoint}/no-such-bucket/a")
    seen.proxy.clear()
    assert seen.proxy.count() == Count(0, 0, 0)


def test_rules_match_and_are_numbered(seen: Bucket) -> None:
    seen.proxy.add(Rule(method="GET", match="/a$", skip=1, times=2, status=503, body="<Slow>"))
    assert [get(seen)[0] for _ in range(4)] == [206, 503, 503, 206]
    seen.proxy.add(Rule(method="PUT", status=503), Rule(match="/b", status=429, body="<Slow>"))
    with pytest.raises(urllib.error.HTTPError, match="429") as error:
        put(seen)
    assert error.value.read() == b"<Slow>"


@pytest.mark.parametrize("rule", [Rule(refuse=True), Rule(reset_after=0)], ids=["refuse", "reset"])
def test_a_reset_comes_before_or_after_the_deed(rule: Rule, seen: Bucket) -> None:
    seen.proxy.add(rule)
    with pytest.raises(OSError, match=RESET):
        put(seen)
    assert seen.proxy.log()[-1].status == 0
    assert seen.listed() == (["a"] if rule.refuse else ["a", "b"])
    if not rule.refuse:
        seen.delete("b")


@pytest.mark.parametrize("rule", [Rule(gather=3, times=3), Rule(hold=True)], ids=["gather", "hold"])
def test_requests_are_held_until_they_are_many_or_all_is_cleared(rule: Rule, seen: Bucket) -> None:
    ended: list[Any] = []

    def ask() -> None:
        try:
            ended.append(get(seen)[2])
        except OSError as error:
            ended.append(type(error))

    seen.proxy.add(rule)
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for number, thread in enumerate(threads):
        assert not ended
        thread.start()
        seen.proxy.wait("GET", "/a$", number + 1)
    if rule.hold:
        assert not ended
        seen.proxy.clear()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 3
    assert (DATA[10:20] in ended) == (not rule.hold)
