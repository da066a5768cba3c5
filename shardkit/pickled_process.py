"""A process of ours that answers calls, in any order: what a library needs that stands no fork.

Messages are pickles between two processes of the same program, on pipes that nobody else has.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import IO, Any

_LENGTH = 8  # bytes before each message


class PickledProcess:
    """A running module of ours, which calls `serve`."""

    def __init__(
        self, module: str, about: Any, ended: Callable[[], Exception], *, quiet: bool = False
    ) -> None:
        """`about` is its first message; `ended` makes the error for calls that it cannot answer.

        If it is `quiet`, nothing that it says on stderr is seen.
        """
        self._ended = ended
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
        )
        self._numbers = count()
        self._writing = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._send(about)
        threading.Thread(target=self._receive, name="shardkit-answers", daemon=True).start()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        with self._writing:
            _write(self._process.stdin, message)

    def _receive(self) -> None:
        assert self._process.stdout is not None
        try:
            while (answer := read_message(self._process.stdout)) is not None:
                number, value, error = answer
                future = self._pending.pop(number)
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
        finally:
            self._process.stdout.close()
            self._process.poll()
            for future in [*self._pending.values()]:
                future.set_exception(self._ended())

    def ask(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """What a method of the other side's object answers, or raises."""
        number, future = next(self._numbers), Future[Any]()
        self._pending[number] = future
        try:
            self._send((number, method, arguments))
        except OSError as error:
            raise self._ended() from error
        return future.result(timeout)

    def kill(self) -> None:
        """End the process; calls that wait for answers raise."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def _write(file: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message, protocol=5)
    file.write(len(data).to_bytes(_LENGTH, "little") + data)
    file.flush()


def read_message(file: IO[bytes]) -> Any:
    """The next message; None at the end."""
    size = file.read(_LENGTH)
    if len(size) < _LENGTH:
        return None
    length = int.from_bytes(size, "little")
    data = file.read(length)
    return pickle.loads(data) if len(data) == length else None


def serve(requests: IO[bytes], answers: IO[bytes], target: Any, threads: int) -> None:
    """Answer by the methods of an object, until there are no more requests."""
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

    with ThreadPoolExecutor(threads) as pool:
        while (request := read_message(requests)) is not None:
            pool.submit(answer, *request)
