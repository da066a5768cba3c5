"""Processes that answer calls end with the one that asks, and in the middle of what they do."""

import os
import signal
import subprocess
import sys

import pytest

from shardkit.errors import StorageError
from shardkit.storage import fs
from tests.conversion.test_kill import is_alive, wait_for

SERVER = """
import sys, time
from shardkit.helpers.pickled_process import read_message, serve

class Sleeper:
    def sleep(self, began):
        open(began, "w").close()
        time.sleep(600)

read_message(sys.stdin.buffer)
serve(sys.stdin.buffer, sys.stdout.buffer, Sleeper(), 2)
"""
PARENT = """
import sys
from shardkit.helpers.pickled_process import PickledProcess

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


@pytest.mark.parametrize("late", [3, 10**6])
def test_a_folder_that_is_written_to_for_a_moment_is_removed(tmp_path, monkeypatch, late):
    """One that is written to all the time is an error."""
    folder, real, times = tmp_path / "folder", os.rmdir, []
    folder.mkdir()

    def rmdir(path, **given):
        times.append(path)
        if len(times) <= late:
            (folder / f"late{len(times)}").touch()
        real(path, **given)

    monkeypatch.setattr(os, "rmdir", rmdir)
    monkeypatch.setattr("shardkit.storage.fs._PAUSE", 0)
    if late == 3:
        fs.remove(folder)
        assert len(times) == 4
    else:
        with pytest.raises(StorageError, match="not empty"):
            fs.remove(folder)
    assert folder.exists() == (late != 3)
