"""Requests of a forked process, made by a process of its own.

obstore works in threads that a fork does not copy: in a forked process, such as a worker of torch's
DataLoader, it would wait for ever. There a fresh interpreter makes the requests: it takes them on
stdin and answers on stdout, in any order.

    python -m shardkit.remote.forked
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import IO, Any

from shardkit.errors import StorageError
from shardkit.remote.store import Entry, Info, Page, Tag

_LENGTH = 8  # bytes before each message


class ForkedClient:
    """A `Client` whose requests another process makes."""

    def __init__(self, site: str, options: Mapping[str, Any]) -> None:
        self._site = site
        self.lists = not site.startswith("http")
        command = [sys.executable, "-m", "shardkit.remote.forked"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._numbers = count()
        self._writing = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._send((site, dict(options)))
        threading.Thread(target=self._receive, name="shardkit-answers", daemon=True).start()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        with self._writing:
            _write(self._process.stdin, message)

    def _receive(self) -> None:
        assert self._process.stdout is not None
        try:
            while (answer := _read(self._process.stdout)) is not None:
                number, value, error = answer
                future = self._pending.pop(number)
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
        finally:
            for future in [*self._pending.values()]:
                future.set_exception(_ended(self._site))

    def _ask(self, method: str, *arguments: Any) -> Any:
        number, future = next(self._numbers), Future[Any]()
        self._pending[number] = future
        try:
            self._send((number, method, arguments))
        except OSError as error:
            raise _ended(self._site) from error
        return future.result()

    def find(self, key: str) -> Info | None:
        found: Info | None = self._ask("find", key)
        return found

    def read(self, key: str, start: int, stop: int, tag: str | None) -> tuple[bytes, str | None]:
        found: tuple[bytes, str | None] = self._ask("read", key, start, stop, tag)
        return found

    def read_all(self, key: str) -> tuple[bytes, Info]:
        found: tuple[bytes, Info] = self._ask("read_all", key)
        return found

    def entries(self, folder: str) -> list[Entry]:
        found: list[Entry] = self._ask("entries", folder)
        return found

    def below(self, folder: str, after: str) -> Iterator[Page]:
        pages: list[Page] = self._ask("below", folder, after)
        yield from pages

    def keys(self, folder: str) -> list[str]:
        found: list[str] = self._ask("keys", folder)
        return found

    def read_tagged(self, key: str) -> tuple[bytes, Tag]:
        found: tuple[bytes, Tag] = self._ask("read_tagged", key)
        return found

    def put(self, key: str, data: bytes | Path, size: int) -> None:
        self._ask("put", key, data, size)

    def put_if(self, key: str, data: bytes, tag: Tag | None) -> Tag | None:
        made: Tag | None = self._ask("put_if", key, data, tag)
        return made

    def copy(self, old: str, new: str, size: int) -> None:
        self._ask("copy", old, new, size)

    def delete(self, key: str) -> None:
        self._ask("delete", key)


def _ended(site: str) -> StorageError:
    return StorageError("the process that makes the requests has ended", path=site)


def _write(file: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message, protocol=5)
    file.write(len(data).to_bytes(_LENGTH, "little") + data)
    file.flush()


def _read(file: IO[bytes]) -> Any:
    """The next message; None at the end."""
    size = file.read(_LENGTH)
    if len(size) < _LENGTH:
        return None
    length = int.from_bytes(size, "little")
    data = file.read(length)
    return pickle.loads(data) if len(data) == length else None


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    from shardkit.remote.clients import connect

    site, options = _read(requests)
    client = connect(site, options)
    writing = threading.Lock()

    def answer(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        value, failure = None, None
        try:
            value = getattr(client, method)(*arguments)
            if isinstance(value, Iterator):
                value = list(value)
        except BaseException as error:  # also a panic of obstore: somebody waits for the answer
            failure = error
        with writing:
            _write(answers, (number, value, failure))

    with ThreadPoolExecutor(32) as threads:
        while (request := _read(requests)) is not None:
            threads.submit(answer, *request)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    _serve(sys.stdin.buffer, sys.stdout.buffer)
