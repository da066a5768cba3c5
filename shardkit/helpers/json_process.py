"""A child process that receives and returns lines of JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from shardkit.errors import WorkerError
from shardkit.helpers import os_errors
from shardkit.helpers.words import ended

_EXIT_SECONDS = 10  # seconds to wait for a process to exit by itself


class JsonProcess:
    """A running process. It is killed if a line takes longer than `timeout` seconds.

    As a context manager, it is closed at the end, and killed at once after an exception.
    """

    def __init__(
        self, command: Sequence[str], timeout: float = math.inf, **environment: str
    ) -> None:
        """Start the process. Raises WorkerError if it cannot be started."""
        self._timeout = timeout
        folder = os_errors.temporary_folder()
        with os_errors.explained("make a temporary file", folder / "shardkit"):
            self._errors = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed with it
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                encoding="utf-8",
                errors="replace",
                env={**os.environ, **environment},
            )
        except OSError as error:
            self._errors.close()
            raise WorkerError(f"{command[0]} cannot be started: {error.strerror}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._waiting: float | None = None  # start time of a pending `receive`
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def send(self, request: Any) -> None:
        """Send a line."""
        with contextlib.suppress(OSError):  # the process has ended: `receive` will raise
            print(json.dumps(request), file=self._input, flush=True)

    def receive(self) -> Any:
        """Return the next line, parsed. Raises WorkerError if the process ended, or sent no JSON.

        The error's `found` is the last line that the process wrote to standard error, if any.
        """
        began = self._waiting = time.monotonic()
        try:
            line = self._output.readline()
        except BaseException:  # Ctrl-C
            self._process.kill()
            raise
        self._waiting = None
        if not line.endswith("\n"):
            raise self._ended(time.monotonic() - began)
        try:
            return json.loads(line)
        except ValueError:
            raise WorkerError(f"the process answered {line!r:.100}") from None

    def close(self) -> None:
        """Close the input of the process, and kill it if it does not exit in time."""
        self._closed.set()
        for pipe in (self._input, self._output):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(_EXIT_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> JsonProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._process.kill()
        self.close()

    def _watch(self) -> None:
        while not self._closed.wait(1):
            since = self._waiting
            if since is not None and time.monotonic() - since > self._timeout:
                self._process.kill()

    def _ended(self, waited: float) -> WorkerError:
        """Return the error for a missing line, after waiting for so many seconds."""
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        how = ended(code)
        if waited > self._timeout:
            how = f"was killed, as it did not respond for {self._timeout:.0f} s"
        return WorkerError(f"the process {how}", found=lines[-1][:500] if lines else None)
