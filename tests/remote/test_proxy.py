"""What the proxy counts, and what the tests that use its rules would not notice if it failed."""

import http.client
import subprocess
import sys
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.remote.buckets import Bucket
from tests.remote.process import ROOT, Process
from tests.remote.proxy import Count, Rule
from tests.remote.servers import request

DATA = bytes(range(251)) * 1000


@pytest.fixture(scope="module")
def data(google):
    return Bucket(google, {"a": DATA})


def get(seen, first=10, last=19):
    """Status, headers and body of a range, by a client that checks nothing."""
    connection = http.client.HTTPConnection("127.0.0.1", seen.proxy.port, timeout=60)
    try:
        connection.request("GET", f"/{seen.name}/a", headers={"Range": f"bytes={first}-{last}"})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def put(seen):
    request(f"{seen.proxy.endpoint}/{seen.name}/b", "PUT", b"new")


def test_without_rules_nothing_changes_and_all_is_counted(google, seen):
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


def test_rules_match_and_are_numbered(seen):
    seen.proxy.add(Rule(method="GET", match="/a$", skip=1, times=2, status=503, body="<Slow>"))
    assert [get(seen)[0] for _ in range(4)] == [206, 503, 503, 206]
    seen.proxy.add(Rule(method="PUT", status=503), Rule(match="/b", status=429, body="<Slow>"))
    with pytest.raises(urllib.error.HTTPError, match="429") as error:
        put(seen)
    assert error.value.read() == b"<Slow>"


def test_a_reset_comes_before_or_after_the_deed(seen):
    for rule, after in ((Rule(refuse=True), ["a"]), (Rule(reset_after=0), ["a", "b"])):
        seen.proxy.clear()
        seen.proxy.add(rule)
        with pytest.raises(OSError, match=r"reset|closed|pipe"):
            put(seen)
        assert seen.proxy.log()[-1].status == 0
        assert seen.listed() == after
    seen.delete("b")


@pytest.mark.parametrize("rule", [Rule(gather=3, times=3), Rule(hold=True)], ids=["gather", "hold"])
def test_requests_are_held_until_they_are_many_or_all_is_cleared(rule, seen):
    seen.proxy.add(rule)
    with ThreadPoolExecutor(3) as threads:
        asked = []
        for number in range(3):
            assert not any(each.done() for each in asked)
            asked.append(threads.submit(get, seen))
            seen.proxy.wait("GET", "/a$", number + 1)
        if rule.hold:
            assert not any(each.done() for each in asked)
            seen.proxy.clear()
    for each in asked:
        if rule.hold:
            assert isinstance(each.exception(), OSError)
        else:
            assert each.result()[2] == DATA[10:20]


def test_a_server_ends_with_the_process_that_started_it():
    script = (
        "from tests.remote.servers import Google; import os; server = Google();"
        "print(server.port, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=-1, check=False)
    gone = object.__new__(Process)
    gone.port = int(done.stdout)
    while gone._listens():  # the limit of a test ends this
        time.sleep(0.01)
