"""`Store`: the objects of one bucket or server, read whole, by ranges and by listing.

Buckets and web servers are reached through obstore (https://developmentseed.org/obstore), all other
schemes through fsspec. Every request has a time-out, is repeated when it fails for a reason that
may pass, and what comes back is compared with what was asked for.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import xxhash

from shardkit.errors import (
    DamagedError,
    NotFoundError,
    ShardkitError,
    StorageError,
    warn,
)
from shardkit.pieces import PIECE

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path

    from shardkit.remote.path import RemotePath
    from shardkit.remote.pieces import FilePieces

MANIFEST = "__shardkit__/manifest.json"  # which tells a dataset where nothing is listed
ATTEMPTS = 6  # to make a request
LARGEST = 5000 << 20  # bytes of an object that one request can make, in all stores
_PARALLEL = 16  # requests of one call at a time
_PATIENCE = 60.0  # seconds after which a request is not repeated
_GOODBYE = 10.0  # seconds that requests may take after Ctrl-C
_SOON = 0.5  # seconds of these without a word
_LOOKS = 50  # at an object that is being copied
_PAUSE = (0.1, 5.0)  # seconds before the second attempt, and before any at most

FULL_PAGE = 1000  # objects of a listing at a time: as many as a request gives
UNKNOWN = -1  # in place of the number of a version

Result = TypeVar("Result")
Item = TypeVar("Item")


class Info(NamedTuple):
    """What a store says of an object."""

    size: int
    modified: float = 0  # seconds since 1970
    tag: str | None = None  # ETag or version: another one means other bytes
    checksum: str | None = None  # of the bytes, where a manifest says it
    pieces: FilePieces | None = None  # what the bytes are compared with

    @property
    def version(self) -> str:
        """What is another for other bytes."""
        return self.checksum or self.tag or str(self.modified)

    @property
    def number(self) -> int:
        """A number made of the tag, or of the time where there is none: below 2^63, or UNKNOWN."""
        known = self.tag or (str(self.modified) if self.modified else "")
        return xxhash.xxh3_64_intdigest(known.encode()) >> 1 if known else UNKNOWN


class Entry(NamedTuple):
    """What a listing says of one name in a folder."""

    name: str
    info: Info | None  # None for a folder


Page: TypeAlias = "list[tuple[str, Info]]"  # of a listing: keys, and what it says of the objects


class Tag(NamedTuple):
    """What tells one version of an object from all others, for requests with a condition."""

    e_tag: str | None
    version: str | None


class PassingError(Exception):
    """A request failed for a reason that may pass: it is repeated, then `error` is raised."""

    def __init__(self, error: ShardkitError) -> None:
        super().__init__(str(error))
        self.error = error


class Client(Protocol):
    """What a library does for a store. Each call is one request, or as many as a listing has pages.

    `read` gives the bytes and the tag of the object that they are of; `below` the pages of a
    listing of all objects in a folder and below, those after a key.
    Raises `PassingError`, or ShardkitError for what is final.
    """

    lists: bool  # whether `entries` can be asked

    def find(self, key: str) -> Info | None: ...

    def read(
        self, key: str, start: int, stop: int, tag: str | None
    ) -> tuple[bytes, str | None]: ...

    def read_all(self, key: str) -> tuple[bytes, Info]: ...

    def entries(self, folder: str) -> list[Entry]: ...

    def below(self, folder: str, after: str) -> Iterator[Page]: ...


class WritingClient(Client, Protocol):
    """What a library does for a store that is written. An object appears whole, or not at all."""

    def keys(self, folder: str) -> list[str]: ...

    def read_tagged(self, key: str) -> tuple[bytes, Tag]: ...

    def put(self, key: str, data: bytes | Path, size: int) -> None: ...

    def put_if(self, key: str, data: bytes, tag: Tag | None) -> Tag | None: ...

    def copy(self, old: str, new: str, size: int) -> None: ...

    def delete(self, key: str) -> None: ...


class Cached(Protocol):
    """Reads through a cache (`shardkit.pages.Pages`)."""

    def read(self, path: RemotePath, offset: int, length: int) -> bytes: ...

    def add(self, path: RemotePath, number: int, page: bytes) -> None: ...


class Store:
    """One bucket or server. Any thread may use it, and a process after a fork.

    What it was told of an object is remembered, so that all reads are of the same bytes: an object
    that is replaced meanwhile is an error. A pickle carries site and options.
    """

    def __init__(self, site: str, options: Mapping[str, Any] | None = None) -> None:
        """`site` is scheme and host, `s3://bucket`; `options` are those of the library."""
        self.site = site
        self.options = dict(options or {})
        # By process, and whether caches between here and the store are to be passed by.
        self._clients: dict[tuple[int, bool], Client] = {}
        self._known: dict[str, Info | None] = {}
        self.pages: Cached | None = None  # reads go through it, where it is set
        self.latest: dict[tuple[str, int], bytes] = {}  # pieces by key and number; oldest first

    def expect(self, key: str, info: Info) -> None:
        """Take the word of a manifest, or a plan, for an object: it is not asked for first."""
        known = self._known.get(key)
        if known is None:
            self._known[key] = info
        elif known.size == info.size:
            self._known[key] = info._replace(tag=known.tag, modified=known.modified)

    def through(self, pages: Cached) -> Store:
        """The same store, with reads through a cache."""
        store = self.anew()
        store._known, store.pages = self._known, pages
        return store

    def anew(self) -> Store:
        """The same store, of which nothing is remembered."""
        store = Store(self.site, self.options)
        store._clients = self._clients
        return store

    def client(self, past_caches: bool = False) -> Client:
        """The library's client, made anew after a fork."""
        which = os.getpid(), past_caches
        if which not in self._clients:
            from shardkit.remote.clients import connect, without_caches

            options = without_caches(self.site, self.options) if past_caches else self.options
            # Many threads begin at once, and a client may be a process.
            with _connecting.setdefault(os.getpid(), threading.Lock()):
                if which not in self._clients:
                    self._clients[which] = connect(self.site, options)
        return self._clients[which]

    @property
    def lists(self) -> bool:
        """Whether it tells what is in a folder, which web servers do not."""
        return self.client().lists

    def url(self, key: str) -> str:
        return f"{self.site}/{key}"

    def find(self, key: str) -> Info | None:
        """Size, time and tag of an object; None where there is no such object."""
        if not key:
            return None
        if key not in self._known:
            self._known[key] = self.look(key)
        return self._known[key]

    def look(self, key: str) -> Info | None:
        """What is at `key` now."""
        return _patiently(lambda: self.client().find(key))

    def info(self, key: str) -> Info:
        """As `find`; raises NotFoundError."""
        found = self.find(key)
        if found is None:
            raise NotFoundError("there is no such object", path=self.url(key))
        return found

    def is_folder(self, key: str) -> bool:
        """Whether there are objects whose names begin with this one and a slash.

        Of a web server, which has no listings: whether a dataset of ours is there.
        """
        if not self.lists:
            return self.find(f"{key}/{MANIFEST}".lstrip("/")) is not None
        return bool(self.entries(key))

    def entries(self, folder: str) -> list[Entry]:
        """The objects and folders in a folder, by name."""
        found = self.list_folder(folder)
        for entry in found:
            key = f"{folder}/{entry.name}".lstrip("/")
            if entry.info is not None and self._known.get(key) is None:
                self._known[key] = entry.info
        return sorted(found)

    def list_folder(self, folder: str) -> list[Entry]:
        """The same in no order, and not remembered."""
        if not self.lists:
            raise StorageError(
                "a web server does not tell what is in a folder",
                path=self.url(folder),
                fix="give a dataset that has its manifest, or one of the files",
            )
        return _patiently(lambda: self.client().entries(folder))

    def below(self, folder: str) -> Iterator[Page]:
        """All objects in a folder and in those below it, by one listing.

        Where a request for a page fails, what follows the last page is asked for again.
        """
        after, pages = "", self.client().below(folder, "")

        def following() -> Page | None:
            nonlocal pages
            try:
                return next(pages, None)
            except PassingError:
                pages = self.client().below(folder, after)
                raise

        while (page := _patiently(following)) is not None:
            yield page
            after = page[-1][0]

    def read_all(self, key: str) -> bytes:
        """All bytes of an object. Raises NotFoundError."""
        return self.read_object(key)[0]

    def read_object(
        self, key: str, size: int | None = None, number: int = UNKNOWN
    ) -> tuple[bytes, Info]:
        """All bytes of an object by one request, and what they are.

        Raises NotFoundError, and StorageError where the version of that `number` comes in another
        size than it has.
        """

        def once() -> tuple[bytes, Info]:
            data, info = self.client().read_all(key)
            if size is not None and len(data) != size and info.number == number != UNKNOWN:
                raise self._other_length(key, 0, size, len(data))
            return data, info

        return _patiently(once)

    def after_reading(self, key: str) -> Info | None:
        """What an object is since its ranges were read; if they had no tag, what is there now."""
        found = self._known.get(key)
        if found is None or found.tag is None:
            return self.look(key)
        return found

    def look_again(self, key: str) -> None:
        """Ask the store for an object of which only a manifest has told."""
        found = self.look(key)
        known = self._known.get(key)
        if found is None or known is None or found.size != known.size:
            self._known[key] = found
        else:
            self._known[key] = known._replace(tag=found.tag, modified=found.modified)

    def read_pieces(self, key: str, first: int, stop: int) -> bytes:
        """The bytes of the pieces from `first` to before `stop`, as they were written.

        They are compared with their digests, if these are known. Raises DamagedError where they
        differ, also when they are requested once more.
        """
        info = self.info(key)
        begin, end = first * PIECE, min(stop * PIECE, info.size)
        data = self.read(key, begin, end)
        if info.pieces is None:
            return data
        wrong = info.pieces.wrong(memoryview(data), first)
        for number in wrong:
            start = number * PIECE
            piece = self.read(key, start, min(start + PIECE, end), past_caches=True)
            if info.pieces.wrong(memoryview(piece), number):
                raise other_bytes(self.url(key), number, start, start + len(piece))
            data = data[: start - begin] + piece + data[start - begin + len(piece) :]
        return data

    def read(self, key: str, start: int, stop: int, *, past_caches: bool = False) -> bytes:
        """The bytes from `start` to before `stop`, which lie within the object.

        Raises DamagedError where the object was replaced since it was first looked at.
        """
        info = self.info(key)

        def once() -> bytes:
            data, tag = self.client(past_caches).read(key, start, stop, info.tag)
            if len(data) != stop - start:
                raise self._other_length(key, start, stop - start, len(data))
            if tag is not None:  # from now on
                known = self._known.setdefault(key, info) or info
                if known.tag is None:
                    self._known[key] = known._replace(tag=tag)
                elif known.tag != tag:
                    raise replaced(self.url(key))
            return data

        return _patiently(once)

    def _other_length(self, key: str, start: int, asked: int, found: int) -> PassingError:
        return PassingError(
            StorageError(
                "the store sent another number of bytes than was asked for",
                path=self.url(key),
                offset=start,
                expected=f"{asked:,} bytes",
                found=f"{found:,}",
                fix="run the same command again; if it persists, ask who runs the store",
            )
        )

    # --- writing: buckets alone

    def _writer(self) -> WritingClient:
        return cast("WritingClient", self.client())

    def find_again(self, key: str) -> Info | None:
        """As `find`, where another process may have changed the object."""
        self._known.pop(key, None)
        return self.find(key)

    def keys(self, folder: str) -> list[str]:
        """The keys of all objects below a folder, as far as the store's listing shows them."""
        return sorted(_patiently(lambda: self._writer().keys(folder)))

    def read_tagged(self, key: str) -> tuple[bytes, Tag] | None:
        """All bytes of an object as it is now, and its tag; None where there is no such object."""
        try:
            return _patiently(lambda: self._writer().read_tagged(key))
        except NotFoundError as error:
            if error.found is not None:  # not the key alone, but the bucket
                raise
            return None

    def put(self, key: str, data: bytes | Path) -> None:
        """Make an object of bytes or of a file, by one request.

        Raises StorageError for more than a request can carry.
        """
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        if size > LARGEST:
            raise StorageError(
                "an object is larger than one request can make",
                path=self.url(key),
                expected=f"at most {LARGEST:,} bytes",
                found=f"{size:,}",
                fix="make smaller shards, with --shard-size",
            )
        self._known.pop(key, None)
        _patiently(lambda: self._writer().put(key, data, size), time_for(size))
        self._known.pop(key, None)

    def put_if(self, key: str, data: bytes, tag: Tag | None) -> Tag | None:
        """Make an object where it has this tag, or for None where there is none; its new tag.

        None where the condition does not hold. That can be as an answer was lost: whoever asks has
        to look who made the object that is there.
        """
        self._known.pop(key, None)
        return _patiently(lambda: self._writer().put_if(key, data, tag))

    def copy(self, old: str, new: str, size: int) -> None:
        """Copy an object of so many bytes within the store."""

        def once() -> None:
            self._writer().copy(old, new, size)

        def arrived() -> None:  # some stores copy after they have answered
            found = self._writer().find(new)
            if found is None or found.size != size:
                raise PassingError(
                    StorageError(
                        "a copy in the store has not become whole",
                        path=self.url(new),
                        expected=f"{size:,} bytes",
                        found="none" if found is None else f"{found.size:,}",
                        fix="run the same command again: it continues where it was",
                    )
                )

        self._known.pop(new, None)
        _patiently(once, time_for(size))
        _patiently(arrived, time_for(size), _LOOKS)
        self._known.pop(new, None)

    def delete(self, key: str) -> None:
        """Remove an object, if it exists."""
        self._known.pop(key, None)
        _patiently(lambda: self._writer().delete(key))

    def __reduce__(self) -> tuple[Any, ...]:  # without a cache
        return _of_task, (self.site, self.options)

    def __repr__(self) -> str:
        return f"Store({self.site!r})"  # without the options, which may be secret


def _of_task(site: str, options: Mapping[str, Any]) -> Store:
    """A store that was pickled."""
    store = Store(site, options)
    store._clients = _shared.setdefault((site, repr(sorted(options.items()))), store._clients)
    return store


# The clients of all tasks by site and options: with their connections and credentials.
_shared: dict[tuple[str, str], dict[tuple[int, bool], Client]] = {}
_connecting: dict[int, threading.Lock] = {}  # by process: a fork may copy one that is held


def other_bytes(path: str, number: int, start: int, stop: int) -> DamagedError:
    """The error for a piece that is not as it was written, from `start` to before `stop`."""
    return DamagedError(
        "the bytes that the store sent are not those that were written",
        path=path,
        offset=start,
        found=f"other bytes in piece {number:,} (bytes {start:,} to {stop - 1:,}),"
        " also when they were requested once more",
        fix="run `shardkit verify` on the dataset; what it finds damaged is to be copied again"
        " from where it is whole, or made again",
    )


def replaced(path: str) -> DamagedError:
    """The error for an object that is not the one that was opened."""
    return DamagedError(
        "the object was replaced while it was in use",
        path=path,
        fix="open the dataset again; write a new version of a dataset to a URL of its own",
    )


def time_for(size: int) -> float:
    """Seconds that a request which carries so many bytes may take: about 2 for each MiB."""
    return _PATIENCE * (2 << (size >> 26).bit_length())


def _patiently(
    request: Callable[[], Result], seconds: float = _PATIENCE, attempts: int | None = None
) -> Result:
    """Make a request, again where its failure may pass, each time after a longer pause."""
    until = time.monotonic() + seconds
    attempts = attempts or ATTEMPTS
    for attempt in range(attempts):
        try:
            return request()
        except PassingError as failure:
            given_up = _batch.over is not None and _batch.over.is_set()
            if given_up or attempt == attempts - 1 or time.monotonic() > until:
                raise failure.error from failure.__cause__
            least, most = _PAUSE
            time.sleep(random.uniform(0.5, 1) * min(least * 2**attempt, most))
    raise AssertionError


def forget_oldest(entries: dict[Any, Any], most: int) -> None:
    """Leave `most` of the entries, those that were added last; other threads may do the same."""
    with suppress(RuntimeError, StopIteration):
        while len(entries) > most:
            entries.pop(next(iter(entries)), None)


_pools: dict[int, ThreadPoolExecutor] = {}


def pool() -> ThreadPoolExecutor:
    """The threads of this process that make requests side by side."""
    found = _pools.get(os.getpid())
    if found is None:
        from concurrent.futures import ThreadPoolExecutor  # not for those who read local files

        made = ThreadPoolExecutor(_PARALLEL, "shardkit-request")
        found = _pools.setdefault(os.getpid(), made)
    return found


class _Batch(threading.local):
    """What a thread of the pool works for."""

    over: threading.Event | None = None  # set when the batch has failed: no request is repeated


_batch = _Batch()


def together(
    work: Callable[[Item], object],
    items: Iterable[Item],
    report: Callable[[Item], object] = lambda item: None,
) -> None:
    """Do work for each item, several at a time; each that is done is reported in this thread.

    Nothing of it goes on after this, also where one of them raises: requests that were made are
    waited for, and not repeated. After Ctrl-C they are waited for a few seconds: a program that
    ends then cuts them off, and what they were to make is not made.
    """
    every = list(items)
    left, over = iter(every), threading.Event()
    ended: SimpleQueue[tuple[Item, BaseException | None]] = SimpleQueue()

    def do() -> None:
        _batch.over = over
        for item in left:
            if over.is_set():
                return
            try:
                work(item)
            except BaseException as error:
                ended.put((item, error))
            else:
                ended.put((item, None))

    threads = [  # daemons: the interpreter does not wait for them when it ends
        threading.Thread(target=do, name="shardkit-request", daemon=True)
        for _ in range(min(_PARALLEL, len(every)))
    ]
    patience = threading.TIMEOUT_MAX
    try:
        for thread in threads:
            thread.start()
        for _ in every:
            item, error = ended.get()
            if error is not None:
                raise error
            report(item)
    except KeyboardInterrupt:
        patience = _GOODBYE
        raise
    finally:
        over.set()
        _join([thread for thread in threads if thread.ident], patience)


def _join(threads: list[threading.Thread], seconds: float) -> None:
    """Wait for threads to end, so many seconds at most."""
    began = time.monotonic()

    def join(most: float) -> bool:
        for thread in threads:
            thread.join(max(began + most - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in threads)

    if seconds == _GOODBYE and not join(_SOON):
        what = f"waiting up to {seconds:.0f} s for requests that were made"
        warn(what)
    join(seconds)
