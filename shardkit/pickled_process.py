"""A process of ours that answers calls, in any order: what a library needs that stands no fork.

Messages are pickles between two processes of the same program, on pipes that nobody else has.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import IO, Any, NoReturn

_HELD = 1 << 16  # bytes of what a quiet process says


class PickledProcess:
    """A running module of ours, which calls `serve`."""

    def __init__(
        self, module: str, about: Any, ended: Callable[[int], Exception], *, quiet: bool = False
    ) -> None:
        """`about` is its first message; `ended` makes the error for calls that it cannot answer.

        It gets the exit code, or 0 after `kill`. If it is `quiet`, `kill` alone tells what it says
        on stderr.
        """
        self._ended = ended
        self._killed, self._code, self._said = False, 0, b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if quiet else None,
        )
        self._numbers = count()
        self._writing = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._send(about)
        self._receiver = threading.Thread(
            target=self._receive, name="shardkit-answers", daemon=True
        )
        self._receiver.start()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        with self._writing:
            _write(self._process.stdin, message)

    def _receive(self) -> None:
        assert self._process.stdout is not None
        listener = threading.Thread(target=self._listen, daemon=True)
        listener.start()
        try:
            while (answer := read_message(self._process.stdout)) is not None:
                number, value, error = answer
                future = self._pending.pop(number)
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
        except BaseException:  # an answer that cannot be read
            self._killed = True
            self._process.kill()
            raise
        finally:
            self._process.stdout.close()
            code = self._process.wait()
            listener.join()
            self._code = 0 if self._killed else code
            for number in [*self._pending]:
                self._fail(number)

    def _listen(self) -> None:
        if self._process.stderr is not None:
            with self._process.stderr as errors:
                while said := os.read(errors.fileno(), _HELD):
                    self._said = (self._said + said)[-_HELD:]

    def _fail(self, number: int) -> None:
        """Let a call raise; whoever takes its future away sets it."""
        if (future := self._pending.pop(number, None)) is not None:
            future.set_exception(self._ended(self._code))

    def ask(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """What a method of the other side's object answers, or raises."""
        return self.call(method, *arguments).result(timeout)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """The same, without waiting."""
        number, future = next(self._numbers), Future[Any]()
        self._pending[number] = future
        try:
            self._send((number, method, arguments))
        except OSError:
            self._receiver.join()
            self._fail(number)
        return future

    def kill(self) -> str:
        """End the process; calls that wait for answers raise. Returns what it said last."""
        self._killed = True
        self._process.kill()
        self._receiver.join()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        return self._said.decode("utf-8", "replace")


def _write(file: IO[bytes], message: Any) -> None:
    buffers: list[pickle.PickleBuffer] = []  # Arrow's, of which a copy takes as long as the pipe
    data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    parts: list[Any] = [data, *(buffer.raw() for buffer in buffers)]
    file.write(array("Q", [len(parts), *map(len, parts)]).tobytes())
    for part in parts:
        file.write(part)
    file.flush()


def read_message(file: IO[bytes]) -> Any:
    """The next message; None at the end."""
    sizes = array("Q")
    try:
        sizes.fromfile(file, 1)
        sizes.fromfile(file, sizes.pop())
    except EOFError:
        return None
    data, *buffers = parts = [file.read(size) for size in sizes]
    return pickle.loads(data, buffers=buffers) if sum(map(len, parts)) == sum(sizes) else None


def serve(requests: IO[bytes], answers: IO[bytes], target: Any, threads: int) -> NoReturn:
    """Answer by the methods of an object, until there are no more requests, which ends the process.

    What is not answered by then is left in the middle: whoever asked is dead, and what it wrote is
    about to be removed.
    """
    writing = threading.Lock()

    def answer(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        value: Any = None
        failure: Exception | None = None
        try:
            value = getattr(target, method)(*arguments)
            if isinstance(value, Iterator):
                value = list(value)
        except Exception as error:
            failure = error
        except BaseException as error:  # a panic of Rust, which no pickle holds
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        with writing:
            _write(answers, (number, value, failure))

    pool = ThreadPoolExecutor(threads)
    while (request := read_message(requests)) is not None:
        pool.submit(answer, *request)
    os._exit(0)
