"""Commands on a terminal: a pseudo-terminal that stands in for standard output and error."""

import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios
import threading
from collections.abc import Iterator

import pytest

from tests import test_cli

COLUMNS, LINES = 100, 30


def on_terminal(*words: object, check: int | None = 0, **environ: str) -> str:
    """All that a command prints on a terminal, to either stream, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TERM_PROGRAM", "NO_COLOR"):
            patch.delenv(name, raising=False)
        usual = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": str(COLUMNS)}
        for name, value in {**usual, "LINES": str(LINES), **environ}.items():
            patch.setenv(name, value)
        patch.setattr(test_cli, "_captured", _on_terminal)
        found = test_cli.run(*words, check=None)
    assert check in (None, found.returncode), found.stdout
    return found.stdout


@contextlib.contextmanager
def _on_terminal(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """As `_captured` of test_cli; both streams are in the first text, with `\\r` as lines end."""
    texts: list[str] = []
    shown = bytearray()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    reading = threading.Thread(target=_read, args=(ours, shown))
    reading.start()
    kept = [os.dup(number) for number in (1, 2)]
    out, err = (os.fdopen(os.dup(theirs), "w", encoding="utf-8") for _ in range(2))
    try:
        for number, (name, file) in enumerate((("stdout", out), ("stderr", err)), 1):
            os.dup2(theirs, number)
            patch.setattr(sys, name, file)
        yield texts
    finally:
        for number, (handle, file) in enumerate(zip(kept, (out, err), strict=True), 1):
            file.close()
            os.dup2(handle, number)
            os.close(handle)
        os.close(theirs)  # which ends what is read
        reading.join()
        os.close(ours)
        texts += [shown.decode(), ""]


def _read(terminal: int, into: bytearray) -> None:
    with contextlib.suppress(OSError):  # the other end is closed
        while more := os.read(terminal, 1 << 16):
            into += more
