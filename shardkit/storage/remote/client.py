"""What a client of a store does: the requests, and what they return."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import xxhash

from shardkit.errors import DamagedError, NotFoundError, ShardkitError

MANIFEST = "__shardkit__/manifest.json"  # marks a folder as a dataset where listing is impossible
LARGEST = 5000 << 20  # largest object, in bytes, that all stores accept in one request
FULL_PAGE = 1000  # objects in a full page of a listing: the most that one request returns
UNKNOWN = -1  # version number of an object without tag and modification time
RETRY_SECONDS = 60.0  # seconds after which a request is not retried


class Digests(Protocol):
    """The digests of an object's pieces (`FilePieces`)."""

    def ask(self) -> None: ...

    def wrong(self, data: memoryview, first: int) -> list[int]: ...


class Info(NamedTuple):
    """Metadata of an object."""

    size: int
    modified: float = 0  # seconds since 1970
    tag: str | None = None  # ETag or version: differs if the bytes differ
    checksum: str | None = None  # of the bytes, if a manifest has it
    pieces: Digests | None = None  # digests to compare the bytes with

    @property
    def version(self) -> str:
        """A string that differs if the bytes differ."""
        return self.checksum or self.tag or str(self.modified)

    @property
    def number(self) -> int:
        """A hash of the tag, or of the modification time if there is no tag: < 2^63, or UNKNOWN."""
        known = self.tag or (str(self.modified) if self.modified else "")
        return xxhash.xxh3_64_intdigest(known.encode()) >> 1 if known else UNKNOWN


class Entry(NamedTuple):
    """One name in the listing of a folder."""

    name: str
    info: Info | None  # None for a folder


Page: TypeAlias = "list[tuple[str, Info]]"  # one page of a listing: keys and metadata


class Tag(NamedTuple):
    """Identifies one version of an object, for conditional requests."""

    e_tag: str | None
    version: str | None


class PassingError(Exception):
    """A transient failure of a request. It is retried; `error` is raised if all attempts fail."""

    def __init__(self, error: ShardkitError) -> None:
        super().__init__(str(error))
        self.error = error


class Client(Protocol):
    """Requests to a store, made by a library. Each call is one request, or one per page.

    `read` returns the bytes, and the metadata of the object that they belong to; None if they are
    unknown. `below` returns the pages of a recursive listing of a folder, starting after the key
    `after`. Writes are atomic: an object appears complete, or not at all; web servers and fsspec
    have none. Raises `PassingError` for transient failures, and ShardkitError for permanent ones.
    """

    lists: bool  # whether `entries` is supported

    def find(self, key: str) -> Info | None: ...

    def read(
        self, key: str, start: int, stop: int, tag: str | None
    ) -> tuple[bytes, Info | None]: ...

    def read_all(self, key: str) -> tuple[bytes, Info]: ...

    def entries(self, folder: str) -> list[Entry]: ...

    def below(self, folder: str, after: str) -> Iterator[Page]: ...

    def read_tagged(self, key: str) -> tuple[bytes, Tag]: ...

    def put(self, key: str, data: bytes | Path, size: int) -> None: ...

    def put_if(self, key: str, data: bytes, tag: Tag | None) -> Tag | None: ...

    def copy(self, old: str, new: str, size: int) -> None: ...

    def delete(self, key: str) -> None: ...


def replaced(path: str) -> DamagedError:
    """Return the error for an object that was replaced after it was opened."""
    return DamagedError(
        "the object was replaced while it was in use",
        path=path,
        fix="open the dataset again; write each new version of a dataset to its own URL",
    )


def time_for(size: int) -> float:
    """Timeout, in seconds, of a request that transfers `size` bytes: about 2 s for each MiB."""
    return RETRY_SECONDS * (2 << (size >> 26).bit_length())


class Cached(Protocol):
    """Reads through a cache (`shardkit.storage.pages.Pages`)."""

    def read(self, path: Any, offset: int, length: int) -> bytes: ...

    def add(self, path: Any, number: int, page: bytes) -> None: ...


def no_object(url: str) -> NotFoundError:
    """Return the error for an object that does not exist, or a folder of a web server."""
    if not url.startswith("http"):
        return NotFoundError("there is no such object", path=url)
    return NotFoundError(
        "there is no such file, and a web server cannot list the contents of a folder",
        path=url,
        fix="give a dataset with a manifest, or a single file; copy other data to this machine"
        " first",
    )
