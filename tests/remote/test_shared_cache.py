"""Processes share a cache folder that is too small for them, and are killed."""

import contextlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardkit
from shardkit.schema import Bytes
from tests.remote.pages import LIMIT, SAMPLES, SIZE, page
from tests.remote.process import ROOT
from tests.remote.test_page_cache import check, linux, on_disk


class Process(subprocess.Popen[str]):
    """One of tests/remote/pages.py."""

    def __init__(self, *words):
        command = [sys.executable, "-m", "tests.remote.pages", *map(str, words)]
        super().__init__(command, cwd=ROOT, stdout=-1, stderr=-1, text=True)

    def go_on(self, turns=1, word=""):
        """Until it has said so often that it goes on; an error with what it wrote, if it ended."""
        while turns:
            line = self.stdout.readline()
            assert line, self.communicate()[1]
            turns -= line.startswith(word)

    def die(self):
        self.kill()
        self.communicate()


@contextlib.contextmanager
def stopped(processes):
    """No process moves: what is on the disk then was there at one moment."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    for process in processes:
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] not in "TtZX":
            time.sleep(0.0005)
    yield
    for process in processes:
        process.send_signal(signal.SIGCONT)


@linux
@pytest.mark.parametrize("loads", [False, pytest.param(True, marks=pytest.mark.large)])
def test_processes_keep_the_limit_at_every_moment_and_leave_nothing(
    loads, large, bucket, tmp_path, monkeypatch
):
    """They use pages, or load a dataset; one of those meets a full disk now and then."""
    cache, more = tmp_path / "cache", []
    if loads:
        with shardkit.create(tmp_path / "in", "wds", {"x": Bytes()}, shard_size="5MB") as out:
            for number in range(SAMPLES):
                out.write({"__key__": f"{number}", "x": page("x", number, SIZE)})
        bucket.put(tmp_path / "in")
        more = [bucket.url()]
        for name, value in bucket.environ.items():
            monkeypatch.setenv(name, value)
    draw, most = random.Random(5), 0
    processes = [Process(cache, n, *more, *(["full"] if loads and not n else [])) for n in range(3)]
    try:
        for kill in range(6 if large else 3):
            for process in processes:
                process.go_on(draw.randrange(1, 20))
            with stopped(processes):
                most = max(most, on_disk(cache))
                processes[victim := kill % 3].die()
                assert on_disk(cache) <= LIMIT
            processes[victim] = Process(cache, 100 + kill, *more)
        for process in processes if loads else ():
            process.go_on(2, "epoch")
        assert LIMIT / 3 < most <= LIMIT
    finally:
        for process in processes:
            process.die()
    check(cache, ours=not loads)
    again = Process(cache, 1, *more)
    again.go_on(5)
    again.die()
