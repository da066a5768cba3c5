"""`Store`: whole-object reads, range reads, listings and writes for one bucket or server.

Buckets and web servers are accessed through obstore (https://developmentseed.org/obstore), all
other schemes through fsspec. Every request has a timeout, is retried after a transient failure, and
its response is compared with what was requested.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from shardkit.errors import DamagedError, NotFoundError, StorageError, warn
from shardkit.storage.checksums import PIECE
from shardkit.storage.remote.client import (
    LARGEST,
    MANIFEST,
    RETRY_SECONDS,
    UNKNOWN,
    Cached,
    Client,
    Entry,
    Info,
    Page,
    PassingError,
    Tag,
    no_object,
    replaced,
    time_for,
)

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path

ATTEMPTS = 6  # per request
_PARALLEL = 16  # concurrent requests of one call
_EXIT_SECONDS = 10.0  # seconds that pending requests may take after Ctrl-C
_MESSAGE_SECONDS = 0.5  # seconds of these before a message is shown
_LOOKS = 50  # attempts to find an object that is being copied
_PAUSE = (0.1, 5.0)  # seconds: the first pause between attempts, and the longest


Result = TypeVar("Result")
Item = TypeVar("Item")


class Store:
    """One bucket or server. Thread-safe and fork-safe.

    Metadata of objects is kept, so that all reads return bytes of the same version: it is an error
    if an object is replaced in the meantime. Pickling keeps only the site and the options.
    """

    def __init__(self, site: str, options: Mapping[str, Any] | None = None) -> None:
        """`site` is scheme and host, as in `s3://bucket`; `options` are passed to the library."""
        self.site = site
        self.options = dict(options or {})
        # By process id, and whether requests bypass HTTP caches in front of the store.
        self._clients: dict[tuple[int, bool], Client] = {}
        self._known: dict[str, Info | None] = {}
        self.pages: Cached | None = None  # if set, reads go through this cache
        self.latest: Cached | None = None  # otherwise, the latest pieces that were read

    def expect(self, key: str, info: Info) -> None:
        """Use metadata from a manifest or a plan, so that no request for it is needed."""
        known = self._known.get(key)
        if known is None:
            self._known[key] = info
        elif known.size == info.size:
            self._known[key] = info._replace(tag=known.tag, modified=known.modified)

    def through(self, pages: Cached) -> Store:
        """Return the same store, with reads through a cache."""
        store = self.anew()
        store._known, store.pages = self._known, pages
        return store

    def anew(self) -> Store:
        """Return the same store, without the metadata kept so far."""
        store = Store(self.site, self.options)
        store._clients = self._clients
        return store

    def client(self, past_caches: bool = False) -> Client:
        """Return the client for this process; each forked process creates its own."""
        which = os.getpid(), past_caches
        if which not in self._clients:
            from shardkit.storage.remote.clients import connect, without_caches

            options = without_caches(self.site, self.options) if past_caches else self.options
            # Many threads may get here at once, and a client may start a process.
            with _connecting.setdefault(os.getpid(), threading.Lock()):
                if which not in self._clients:
                    self._clients[which] = connect(self.site, options)
        return self._clients[which]

    @property
    def lists(self) -> bool:
        """Whether folders can be listed; web servers cannot list them."""
        return self.client().lists

    def url(self, key: str) -> str:
        return f"{self.site}/{key}"

    def find(self, key: str) -> Info | None:
        """Metadata of an object; None if it does not exist. Kept after the first request."""
        if not key:
            return None
        if key not in self._known:
            self._known[key] = self.look(key)
        return self._known[key]

    def find_again(self, key: str) -> Info | None:
        """Like `find`, but asks the store again: another process may have changed the object."""
        found, known = self.look(key), self._known.get(key)
        if found is not None and known is not None and found.size == known.size:
            found = known._replace(tag=found.tag, modified=found.modified)
        self._known[key] = found
        return found

    def look(self, key: str) -> Info | None:
        """Current metadata of an object, from the store; None if it does not exist."""
        return _patiently(lambda: self.client().find(key))

    def info(self, key: str) -> Info:
        """Like `find`, but raises NotFoundError if the object does not exist."""
        found = self.find(key)
        if found is None:
            raise no_object(self.url(key))
        return found

    def is_folder(self, key: str) -> bool:
        """Return whether there are objects whose keys start with this key and a slash.

        On a web server, which cannot list folders: whether a shardkit manifest is there.
        """
        if not self.lists:
            return self.find(f"{key}/{MANIFEST}".lstrip("/")) is not None
        return bool(self.entries(key))

    def entries(self, folder: str) -> list[Entry]:
        """Return the objects and folders in a folder, sorted by name."""
        found = self.list_folder(folder)
        for entry in found:
            key = f"{folder}/{entry.name}".lstrip("/")
            if entry.info is not None and self._known.get(key) is None:
                self._known[key] = entry.info
        return sorted(found)

    def list_folder(self, folder: str) -> list[Entry]:
        """Like `entries`, but unsorted, and without keeping the metadata."""
        if not self.lists:
            raise StorageError(
                "a web server cannot list the contents of a folder",
                path=self.url(folder),
                fix="give the URL of a dataset with a manifest, or of a single file",
            )
        return _patiently(lambda: self.client().entries(folder))

    def below(self, folder: str) -> Iterator[Page]:
        """Yield all objects in a folder and its subfolders, by one listing.

        If a request for a page fails, the listing is resumed after the last page received.
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
        """Return all bytes of an object. Raises NotFoundError."""
        return self.read_object(key)[0]

    def read_object(
        self, key: str, size: int | None = None, number: int = UNKNOWN
    ) -> tuple[bytes, Info]:
        """Return all bytes of an object, and its metadata, by one request.

        Raises NotFoundError, and StorageError if the object is the version `number` but the number
        of bytes received is not `size`.
        """

        def once() -> tuple[bytes, Info]:
            data, info = self.client().read_all(key)
            if size is not None and len(data) != size and info.number == number != UNKNOWN:
                raise self._other_length(key, 0, size, len(data))
            return data, info

        return _patiently(once)

    def after_reading(self, key: str) -> Info | None:
        """Metadata of the version that was read, or of the current one if reads had no tag."""
        found = self._known.get(key)
        if found is None or found.tag is None:
            return self.look(key)
        return found

    def read_pieces(self, key: str, first: int, stop: int) -> bytes:
        """Return the bytes of the pieces from `first` up to, but not including, `stop`.

        They are compared with their digests, if these are known. Pieces that differ are requested
        once more; raises DamagedError if they differ again.
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
                raise DamagedError(
                    "the bytes that the store returned are not those that were written",
                    path=self.url(key),
                    offset=start,
                    found=f"other bytes in piece {number:,} (bytes {start:,} to"
                    f" {start + len(piece) - 1:,}), also when they were requested again",
                    fix=_COPY_AGAIN,
                )
            data = data[: start - begin] + piece + data[start - begin + len(piece) :]
        return data

    def read(self, key: str, start: int, stop: int, *, past_caches: bool = False) -> bytes:
        """The bytes from `start` up to `stop` (exclusive), a range that lies within the object.

        Raises DamagedError if the object was replaced since its metadata was first read.
        """
        info = self.info(key)

        def once() -> bytes:
            data, found = self.client(past_caches).read(key, start, stop, info.tag)
            if info.pieces is None:
                found = found or self.client().find(key)
                if found is None or found.size != info.size:
                    raise replaced(self.url(key))
            if len(data) != stop - start:
                if found is not None and found.size != info.size:
                    raise PassingError(
                        DamagedError(
                            "the object is not as long as when it was written",
                            path=self.url(key),
                            expected=f"{info.size:,} bytes",
                            found=f"{found.size:,} bytes",
                            fix=_COPY_AGAIN,
                        )
                    )
                raise self._other_length(key, start, stop - start, len(data))
            if found is not None:
                self._same_version(key, info, found)
            return data

        return _patiently(once)

    def _same_version(self, key: str, info: Info, found: Info) -> None:
        """Raise DamagedError if the object that was read is another version than the known one."""
        known = self._known.setdefault(key, info) or info
        if known.tag is not None and found.tag is not None:
            same = known.tag == found.tag
        elif found.tag is not None:  # all later reads must have the same tag
            self._known[key] = known._replace(tag=found.tag)
            same = True
        else:
            same = not (known.modified and found.modified) or known.modified == found.modified
        if not same:
            raise replaced(self.url(key))

    def _other_length(self, key: str, start: int, asked: int, found: int) -> PassingError:
        return PassingError(
            StorageError(
                "the store returned a different number of bytes than requested",
                path=self.url(key),
                offset=start,
                expected=f"{asked:,} bytes",
                found=f"{found:,}",
                fix="run the same command again; if it persists, contact the store's administrator",
            )
        )

    # --- writing, supported for buckets only

    def keys(self, folder: str) -> list[str]:
        """Return the keys of all objects below a folder, as listed by the store."""
        keys = (key for page in self.below(folder) for key, _ in page)
        return sorted(key for key in keys if key.startswith(f"{folder}/"))  # not "folder/" itself

    def read_tagged(self, key: str) -> tuple[bytes, Tag] | None:
        """All bytes of the current version of an object, and its tag; None if it does not exist."""
        try:
            return _patiently(lambda: self.client().read_tagged(key))
        except NotFoundError as error:
            if error.found is not None:  # the bucket itself does not exist
                raise
            return None

    def put(self, key: str, data: bytes | Path) -> None:
        """Create an object from bytes or from a file, by one request.

        Raises StorageError if it is too large for one request.
        """
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        if size > LARGEST:
            raise StorageError(
                "the object is larger than one request to a store can write",
                path=self.url(key),
                expected=f"at most {LARGEST:,} bytes",
                found=f"{size:,}",
                fix="make smaller shards, with --shard-size",
            )
        self._known.pop(key, None)
        _patiently(lambda: self.client().put(key, data, size), time_for(size))
        self._known.pop(key, None)

    def put_if(self, key: str, data: bytes, tag: Tag | None) -> Tag | None:
        """Replace an object if it has this tag, or create it if `tag` is None; return its new tag.

        Returns None if the condition does not hold. That also happens when the response to an
        earlier attempt was lost: the caller has to check who wrote the existing object.
        """
        self._known.pop(key, None)
        return _patiently(lambda: self.client().put_if(key, data, tag))

    def copy(self, old: str, new: str, size: int) -> None:
        """Copy an object of `size` bytes within the store."""

        def once() -> None:
            self.client().copy(old, new, size)

        def arrived() -> None:  # some stores respond before the copy is complete
            found = self.client().find(new)
            if found is None or found.size != size:
                raise PassingError(
                    StorageError(
                        "the store did not complete the copy of an object",
                        path=self.url(new),
                        expected=f"{size:,} bytes",
                        found="none" if found is None else f"{found.size:,}",
                        fix="run the same command again: it resumes where it stopped",
                    )
                )

        self._known.pop(new, None)
        _patiently(once, time_for(size))
        _patiently(arrived, time_for(size), _LOOKS)
        self._known.pop(new, None)

    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""
        self._known.pop(key, None)
        _patiently(lambda: self.client().delete(key))

    def __reduce__(self) -> tuple[Any, ...]:  # without metadata and cache
        return _of_task, (self.site, self.options)

    def __repr__(self) -> str:
        return f"Store({self.site!r})"  # without the options, which may contain secrets


def _of_task(site: str, options: Mapping[str, Any]) -> Store:
    """Unpickle a store; equal stores share their clients."""
    store = Store(site, options)
    store._clients = _shared.setdefault((site, repr(sorted(options.items()))), store._clients)
    return store


# Clients of unpickled stores, by site and options: tasks share connections and credentials.
_shared: dict[tuple[str, str], dict[tuple[int, bool], Client]] = {}
_connecting: dict[int, threading.Lock] = {}  # by process id: a fork may copy a lock that is held


_COPY_AGAIN = (
    "run `shardkit verify` on the dataset; copy the files that it reports as damaged again from an"
    " intact copy, or create them again"
)


def _patiently(
    request: Callable[[], Result], seconds: float = RETRY_SECONDS, attempts: int | None = None
) -> Result:
    """Make a request, and retry it after transient failures, with increasing pauses."""
    until, attempts = time.monotonic() + seconds, attempts or ATTEMPTS
    for attempt in range(attempts):
        try:
            return request()
        except PassingError as failure:
            over: threading.Event | None = getattr(_batch, "over", None)
            if (over and over.is_set()) or attempt == attempts - 1 or time.monotonic() > until:
                raise failure.error from failure.__cause__
            least, most = _PAUSE
            time.sleep(random.uniform(0.5, 1) * min(least * 2**attempt, most))
    raise AssertionError


_pools: dict[int, ThreadPoolExecutor] = {}


def pool() -> ThreadPoolExecutor:
    """Return the thread pool of this process for concurrent requests."""
    found = _pools.get(os.getpid())
    if found is None:
        from concurrent.futures import ThreadPoolExecutor  # not needed to read local files

        made = ThreadPoolExecutor(_PARALLEL, "shardkit-request")
        found = _pools.setdefault(os.getpid(), made)
    return found


_batch = threading.local()  # `over`, an event that is set when the batch of a thread has failed


def together(
    work: Callable[[Item], object],
    items: Iterable[Item],
    report: Callable[[Item], object] = lambda item: None,
) -> None:
    """Call `work` for each item in several threads, and `report` for finished ones in this thread.

    No work continues after this function returns or raises: it waits for pending requests, which
    are not retried. After Ctrl-C it waits for a few seconds only: requests that take longer are
    aborted when the program exits, and do not create their objects.
    """
    every = list(items)
    left, over = deque(every), threading.Event()
    ended: SimpleQueue[tuple[Item, BaseException | None]] = SimpleQueue()

    def do() -> None:
        _batch.over = over
        while not over.is_set():
            try:
                item = left.popleft()  # a shared iterator may give two threads the same
            except IndexError:
                return
            try:
                work(item)
                ended.put((item, None))
            except BaseException as error:
                ended.put((item, error))

    threads = [  # daemons: the interpreter does not wait for them when it exits
        threading.Thread(target=do, name="shardkit-request", daemon=True)
        for _ in range(min(_PARALLEL, len(every)))
    ]
    interrupted = False
    try:
        for thread in threads:
            thread.start()
        for _ in every:
            item, error = ended.get()
            if error is not None:
                raise error
            report(item)
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        over.set()
        started = [thread for thread in threads if thread.ident]
        if interrupted and not _join(started, _MESSAGE_SECONDS):
            warn(f"waiting up to {_EXIT_SECONDS:.0f} s for pending requests")
        _join(started, _EXIT_SECONDS if interrupted else threading.TIMEOUT_MAX)


def _join(threads: list[threading.Thread], seconds: float) -> bool:
    """Wait for threads to end, for at most `seconds`; return whether they have."""
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0))
    return not any(thread.is_alive() for thread in threads)
