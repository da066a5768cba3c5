"""A process that answers each line of JSON with another: a contender of `shardkit bench`."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

_RUN = 1800  # seconds: who takes longer hangs
_PATIENCE = 10  # seconds, for a process to end by itself


class Process:
    """Started when it is first asked; started again where it has died."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer; `{"error": ...}` where there is none."""
        try:
            process = self._process = self._process or self._started()
        except OSError as error:
            self._errors.close()
            return {"error": f"{self._command[0]} cannot be started: {error.strerror}"}
        assert process.stdin is not None
        assert process.stdout is not None
        line = ""
        late = threading.Timer(_RUN, process.kill)
        late.daemon = True  # the interpreter waits for others at its end, if Ctrl-C comes just now
        try:
            late.start()
            with contextlib.suppress(OSError):  # it has ended
                print(json.dumps(request), file=process.stdin, flush=True)
                line = process.stdout.readline()
        except BaseException:  # Ctrl-C: nobody waits for the answer
            process.kill()
            raise
        finally:
            late.cancel()
        if not line:
            return {"error": self._last_words()}
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            return {"error": f"the process answered {line!r:.100}"}
        return answer

    def close(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_PATIENCE)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        self._errors.close()

    def _started(self) -> subprocess.Popen[str]:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="utf-8",
            errors="replace",
        )

    def _last_words(self) -> str:
        """Why a process has ended, as far as it has said."""
        assert self._process is not None
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        self.close()
        how = (
            f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        return f"the process {how}" + (f"; the last that it printed: {lines[-1]}" if lines else "")
