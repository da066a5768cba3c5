"""Requests of a forked process, made by a separate process.

obstore uses threads, which a fork does not copy: in a forked process, such as a worker of torch's
DataLoader, it would hang. Therefore a new interpreter makes the requests of such a process: it
reads them from stdin and writes the responses to stdout, in any order.

    python -m shardkit.storage.remote.clients
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardkit.errors import StorageError
from shardkit.helpers.pickled_process import PickledProcess
from shardkit.storage.remote.client import Entry, Info, Page, Tag


class ForkedClient(PickledProcess):
    """A `Client` whose requests are made by another process."""

    def __init__(self, site: str, options: Mapping[str, Any]) -> None:
        self.lists = not site.startswith("http")
        super().__init__(
            "shardkit.storage.remote.clients", (site, dict(options)), lambda *_: _ended(site)
        )

    def find(self, key: str) -> Info | None:
        found: Info | None = self.ask("find", key)
        return found

    def read(self, key: str, start: int, stop: int, tag: str | None) -> tuple[bytes, Info | None]:
        found: tuple[bytes, Info | None] = self.ask("read", key, start, stop, tag)
        return found

    def read_all(self, key: str) -> tuple[bytes, Info]:
        found: tuple[bytes, Info] = self.ask("read_all", key)
        return found

    def entries(self, folder: str) -> list[Entry]:
        found: list[Entry] = self.ask("entries", folder)
        return found

    def below(self, folder: str, after: str) -> Iterator[Page]:
        pages: list[Page] = self.ask("below", folder, after)
        if pages:  # the whole listing has arrived: give it as a single page
            yield [entry for page in pages for entry in page]

    def keys(self, folder: str) -> list[str]:
        found: list[str] = self.ask("keys", folder)
        return found

    def read_tagged(self, key: str) -> tuple[bytes, Tag]:
        found: tuple[bytes, Tag] = self.ask("read_tagged", key)
        return found

    def put(self, key: str, data: bytes | Path, size: int) -> None:
        self.ask("put", key, data, size)

    def put_if(self, key: str, data: bytes, tag: Tag | None) -> Tag | None:
        made: Tag | None = self.ask("put_if", key, data, tag)
        return made

    def copy(self, old: str, new: str, size: int) -> None:
        self.ask("copy", old, new, size)

    def delete(self, key: str) -> None:
        self.ask("delete", key)


def _ended(site: str) -> StorageError:
    return StorageError("the process that makes the requests has exited", path=site)
