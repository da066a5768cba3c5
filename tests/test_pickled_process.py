"""Processes that answer calls end with the one that asks, and in the middle of what they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from shardkit import storage
from shardkit.errors import StorageError
from tests.conversion.test_kill import is_alive, wait_for

SERVER = """
import sys, time
from shardkit.pickled_process import read_message, serve

class Sleeper:
    def sleep(self, began):
        open(began, "w").close()
        time.sleep(600)

read_message(sys.stdin.buffer)
serve(sys.stdin.buffer, sys.stdout.buffer, Sleeper(), 2)
"""
PARENT = """
import sys
from shardkit.pickled_process import PickledProcess

process = PickledProcess("sleeper", None, RuntimeError)
answer = process.call("sleep", sys.argv[1])
print(process._process.pid, flush=True)
answer.result()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into Linux's /proc")
def test_nothing_goes_on_for_a_process_that_was_killed(tmp_path):
    (tmp_path / "sleeper.py").write_text(SERVER)
    began = tmp_path / "began"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, began],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        wait_for(began.exists)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_for(lambda: not is_alive(pid))


def test_a_folder_is_removed_that_is_written_to_for_a_moment(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    real, times = os.rmdir, [0]

    def rmdir(path, **given):
        times[0] += 1
        if times[0] < 4:
            (folder / f"late{times[0]}").touch()
        real(path, **given)

    monkeypatch.setattr(os, "rmdir", rmdir)
    storage.remove(folder)
    assert not folder.exists()
    assert times == [4]


def test_a_folder_that_is_written_to_all_the_time_is_an_error(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    real = os.rmdir

    def rmdir(path, **given):
        (folder / f"{time.monotonic_ns()}").touch()
        real(path, **given)

    monkeypatch.setattr(os, "rmdir", rmdir)
    monkeypatch.setattr("shardkit.storage._PAUSE", 0)
    with pytest.raises(StorageError, match="not empty"):
        storage.remove(folder)
