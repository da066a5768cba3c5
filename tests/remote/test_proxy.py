"""What the tests that use rules of the proxy would not notice if it failed."""

import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.remote.buckets import Bucket
from tests.remote.process import ROOT, Process
from tests.remote.proxy import Rule
from tests.remote.servers import request

DATA = bytes(range(251)) * 10


@pytest.fixture(scope="module")
def data(google):
    return Bucket(google, {"a": DATA})


def get(seen):
    with urllib.request.urlopen(f"{seen.proxy.endpoint}/{seen.name}/a", timeout=60) as answer:
        return answer.read()


def put(seen):
    request(f"{seen.proxy.endpoint}/{seen.name}/b", "PUT", b"new")


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
            assert each.result() == DATA


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
