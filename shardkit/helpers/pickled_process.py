"""A child process that answers calls, in any order, for libraries that do not support fork.

Messages are pickles, exchanged between two processes of the same program through private pipes.
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

# Like `-m`, but with the paths of the parent process, and without the current folder's modules.
_START = """
import sys
module, *sys.path = sys.argv[1:]
import runpy
runpy.run_module(module, run_name="__main__")
"""
_HELD = 1 << 16  # bytes of a quiet process's stderr that are kept


class PickledProcess:
    """A running shardkit module, which calls `serve`."""

    def __init__(
        self, module: str, about: Any, ended: Callable[[int], Exception], *, quiet: bool = False
    ) -> None:
        """`about` is the first message; `ended` makes the error for calls that remain unanswered.

        `ended` is passed the exit code, or 0 after `kill`. `quiet`: capture stderr, which `kill`
        then returns.
        """
        self._ended = ended
        self._killed, self._code, self._written = False, 0, b""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, module, *filter(None, sys.path)],
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
                while written := os.read(errors.fileno(), _HELD):
                    self._written = (self._written + written)[-_HELD:]

    def _fail(self, number: int) -> None:
        """Make a call raise, unless another thread has taken its future and sets it."""
        if (future := self._pending.pop(number, None)) is not None:
            future.set_exception(self._ended(self._code))

    def ask(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Call a method of the other process's object, and return or raise its result."""
        return self.call(method, *arguments).result(timeout)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Like `ask`, but return a future at once."""
        number, future = next(self._numbers), Future[Any]()
        self._pending[number] = future
        try:
            self._send((number, method, arguments))
        except OSError:
            self._receiver.join()
            self._fail(number)
        return future

    def kill(self) -> str:
        """Kill the process; pending calls raise. Returns the end of its stderr, if `quiet`."""
        self._killed = True
        self._process.kill()
        self._receiver.join()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        return self._written.decode("utf-8", "replace")


def _write(file: IO[bytes], message: Any) -> None:
    buffers: list[pickle.PickleBuffer] = []  # out of band: copying Arrow data takes as long as I/O
    data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    parts: list[Any] = [data, *(buffer.raw() for buffer in buffers)]
    file.write(array("Q", [len(parts), *map(len, parts)]).tobytes())
    for part in parts:
        file.write(part)
    file.flush()


def read_message(file: IO[bytes]) -> Any:
    """Read the next message; None at the end of the stream."""
    sizes = array("Q")
    try:
        sizes.fromfile(file, 1)
        sizes.fromfile(file, sizes.pop())
    except EOFError:
        return None
    data, *buffers = parts = [file.read(size) for size in sizes]
    return pickle.loads(data, buffers=buffers) if sum(map(len, parts)) == sum(sizes) else None


def private_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Take stdin and stdout for messages: code in this process then reads nothing from stdin, and
    prints to stderr."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def serve(
    requests: IO[bytes],
    answers: IO[bytes],
    target: Any,
    threads: int,
    ending: Callable[[], object] | None = None,
) -> NoReturn:
    """Answer calls with the methods of `target` until the requests end, and exit the process.

    Calls that are still running then are abandoned: the caller is dead, and what it wrote is about
    to be removed. `ending` is called before that.
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
        except BaseException as error:  # a Rust panic, which cannot be pickled
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        with writing:
            try:
                _write(answers, (number, value, failure))
            except OSError:
                raise
            except Exception as error:  # it cannot be pickled; nothing was written yet
                words = f"{type(error).__name__}: {error}"
                _write(answers, (number, None, RuntimeError(words)))

    pool = ThreadPoolExecutor(threads)
    while (request := read_message(requests)) is not None:
        pool.submit(answer, *request)
    if ending is not None:
        ending()
    os._exit(0)
