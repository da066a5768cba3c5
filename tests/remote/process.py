"""Servers that tests start: processes that listen on a port of their own, on loopback."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
_START = 60  # seconds a server may take
# Ends the server when this process closes the pipe, be it by its death.
_GUARD = '"$@" & read -r _; kill $!; wait $!'


def executable(name):
    """Where a server is installed: beside this Python, or in PATH."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"]
    return shutil.which(name, path=os.pathsep.join(folders))


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Process:
    """Runs `command(port)` until `close`; `endpoint` is its URL, without a slash at the end."""

    def __init__(self, command, scheme="http"):
        self.port = free_port()
        self.endpoint = f"{scheme}://127.0.0.1:{self.port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            ["sh", "-c", _GUARD, "sh", *command(self.port)],
            stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT,
            cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + _START
        while not self._listens():
            if time.monotonic() > deadline:
                output = self.output()
                self.close()
                raise RuntimeError(f"{command(self.port)} does not listen:\n{output}")
            time.sleep(0.02)

    def _listens(self):
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def output(self):
        """The last that it wrote."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 4000, max(0, size - 4000)).decode(errors="replace")

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)
        self._log.close()

    def __enter__(self):  # Self, of typing in Python 3.11
        return self

    def __exit__(self, *_):
        self.close()
