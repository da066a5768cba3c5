"""Checks the files of a dataset: their existence, sizes and checksums.

Unlike `storage.checksum`, which may use digests remembered from writing, this reads every byte.
"""

from __future__ import annotations

import errno
import posixpath
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import xxhash

from shardkit.errors import DamagedError, ShardkitError
from shardkit.formats import FORMATS
from shardkit.helpers import os_errors
from shardkit.metadata.manifest import File
from shardkit.storage.byte_source import ByteSource, open_source
from shardkit.storage.checksums import CHECKSUM, DIGEST, PIECE, WHOLE, checksum_of, count
from shardkit.storage.remote.path import RemotePath
from shardkit.verification.work import Meter, in_threads, in_words, numbered, runs

_SPAN = 16  # pieces that a thread reads at a time, if there are digests of pieces
# Prefixes of cache files that Hugging Face datasets writes beside the shards it loads.
_CACHES = ("cache-", "tmp")

Ranges = list[tuple[int, int]]  # half-open byte ranges


def find_damage(
    folder: Path, files: Iterable[File], kind: str, meter: Meter
) -> list[tuple[File, ShardkitError]]:
    """The damaged files of a folder, with their problems; `kind` is that of their checksums."""
    checks = [FileCheck(folder, file, kind, meter) for file in files]
    jobs = (partial(check.read, *span) for check in checks for span in check.spans())
    for _ in in_threads(lambda job: job(), jobs, meter, folder):
        pass
    found = ((check.file, check.problem()) for check in checks)
    return [(file, problem) for file, problem in found if problem is not None]


def is_damage(problem: ShardkitError) -> bool:
    """Whether a problem means a damaged or missing file, or a failing disk; not, say, EACCES."""
    cause = problem.__cause__
    return isinstance(problem, DamagedError) or getattr(cause, "errno", None) == errno.EIO


class FileCheck:
    """Compares a file with its entry in the manifest.

    Pass each of its `spans` to `read`, in any thread, as they are generated. Then `problem` returns
    what is wrong.
    """

    def __init__(
        self,
        folder: Path,
        file: File,
        kind: str,
        meter: Meter,
        digests: bytes = b"",
        shard: str | None = None,
    ) -> None:
        """`kind` is the kind of checksum; `digests` are the expected ones of the pieces, if known.

        `shard` is the shard that an index file belongs to. The meter counts all bytes of the file,
        those that are skipped too.
        """
        self._path, self.file, self._kind, self._meter = folder / file.name, file, kind, meter
        self._shard = shard
        self._pieces = number = count(file.bytes)
        if number == 1:
            digests = bytes.fromhex(file.checksum)
        self._known = digests if checksum_of(digests) == file.checksum else b""
        self._found: dict[int, bytes] = {}  # first piece of a span -> digests, or the whole file's
        self._errors: dict[int, ShardkitError] = {}
        self._unfit: ShardkitError | None = None
        self._looked_at = False
        self._open = 1  # spans being read, plus one while spans are still being generated
        self._lock, self._done = threading.Lock(), threading.Event()

    def spans(self) -> Iterator[tuple[int, int]]:
        """Half-open ranges of piece numbers, each to be read by one thread.

        Generation stops as soon as the file is known to be missing or to have the wrong size.
        """
        first = 0
        try:
            while self._unfit is None and (first < self._pieces or not first):
                stop = self._pieces if self._kind == WHOLE else min(first + _SPAN, self._pieces)
                with self._lock:
                    self._open += 1
                yield first, stop
                first = max(stop, 1)
        finally:
            self._closed()
        if first < self._pieces:
            self._meter.skip(self.file.bytes - first * PIECE)

    def _closed(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self.__dict__.pop("_source", None)  # closes it
                self._done.set()

    def read(self, first: int, stop: int) -> None:
        """Read the pieces from `first` to before `stop`."""
        left = min(stop * PIECE, self.file.bytes) - first * PIECE
        digests, whole = bytearray(), xxhash.xxh3_128()
        try:
            self._look_at()
            for number in range(first, stop):
                piece, digest = self._piece(number)
                digests += digest
                if self._kind == WHOLE:
                    whole.update(piece)
                left -= len(piece)
                self._meter.add(len(piece))
            self._found[first] = whole.digest() if self._kind == WHOLE else bytes(digests)
        except ShardkitError as error:
            self._errors[first] = error
        finally:
            self._closed()
            if left:
                self._meter.skip(left)

    def problem(self, samples: Callable[[Ranges], str] | None = None) -> ShardkitError | None:
        """Wait for all spans, and return what is wrong with the file, or None.

        `samples` describes in words which samples lie in given byte ranges.
        """
        self._done.wait()
        if self._errors:
            return self._errors[min(self._errors)]
        digests = b"".join(found for _, found in sorted(self._found.items()))
        found = checksum_of(digests) if self._kind == CHECKSUM else digests.hex()
        if self.file.checksum == found:
            return None
        offset = None
        if self._known and self._pieces > 1:
            offset, found = self._damaged(digests, samples)
        return DamagedError(
            "a file has changed since it was written",
            path=self._path,
            shard=self._shard,
            offset=offset,
            expected=f"checksum {self.file.checksum}",
            found=found,
            fix="repair it with --repair SOURCE, or copy it again from an undamaged copy",
        )

    def _damaged(self, digests: bytes, samples: Callable[[Ranges], str] | None) -> tuple[int, str]:
        """Return the offset of the first damaged piece, and a description of all damaged pieces."""
        found, known = (np.frombuffer(each, f"V{DIGEST}") for each in (digests, self._known))
        numbers = np.flatnonzero(found != known).tolist()
        size = self.file.bytes
        ranges = [(a * PIECE, min((b + 1) * PIECE, size)) for a, b in runs(numbers)]
        words = [
            f"{numbered('piece', a, b)} (bytes {start:,} to {stop - 1:,})"
            for (a, b), (start, stop) in zip(runs(numbers), ranges, strict=True)
        ]
        lying = f"; {samples(ranges)}" if samples else ""
        words_of_damage = f"different bytes in {in_words(words)}, of {self._pieces:,} pieces{lying}"
        return ranges[0][0], words_of_damage

    def _look_at(self) -> None:
        """Raise DamagedError if the file is missing or has the wrong size. Checked only once."""
        with self._lock:
            if not self._looked_at:
                try:
                    _check_size(self._path, self.file, self._shard)
                except ShardkitError as error:
                    self._unfit = error
                self._looked_at = True
        if self._unfit is not None:
            raise self._unfit

    def _piece(self, number: int) -> tuple[bytes, bytes]:
        """Return a piece, and its digest if digests of pieces are compared."""
        path, start = self._path, number * PIECE
        length = min(PIECE, self.file.bytes - start)
        digest = xxhash.xxh3_128_digest if self._kind == CHECKSUM else lambda piece: b""
        if not isinstance(path, RemotePath):
            piece = self._source.read(start, length)
            return piece, digest(piece)
        piece = path.store.read(path.key, start, start + length)
        found, known = digest(piece), self._known[number * DIGEST : (number + 1) * DIGEST]
        if known and found != known:  # it may have been corrupted in transit: request it again
            piece = path.store.read(path.key, start, start + length, past_caches=True)
            return piece, digest(piece)
        if path.store.pages is not None:  # so that later reads do not request it again
            path.store.pages.add(path, number, piece)
        return piece, found

    @cached_property
    def _source(self) -> ByteSource:
        return open_source(self._path)


def _check_size(path: Path, file: File, shard: str | None) -> None:
    try:
        if isinstance(path, RemotePath):
            path.store.find_again(path.key)
        about = path.stat()
        size: int | None = about.st_size
    except (FileNotFoundError, NotADirectoryError):
        size = None
    except OSError as error:
        raise os_errors.explain(error, "look at", path) from error
    if size is None:
        what, found = "a file of the dataset is missing", None
    elif not stat.S_ISREG(about.st_mode):  # reading a pipe would block forever
        what, found = "a file of the dataset is not a regular file", None
    elif size != file.bytes:
        what = "a file is truncated" if size < file.bytes else "a file is longer than it was"
        found = f"{size:,} bytes"
    else:
        return
    offset = None if found is None or size is None else min(size, file.bytes)
    expected = f"{file.bytes:,} bytes"
    raise DamagedError(what, path=path, shard=shard, offset=offset, expected=expected, found=found)


def strangers(folder: Path, format: str, known: set[str]) -> list[ShardkitError]:
    """Errors for files that are not `known`, but that readers that list the folder would read."""
    if isinstance(folder, RemotePath) and not folder.store.lists:
        return []
    if FORMATS[format].below:  # Lance reads the fragments that its newest version file lists
        folder /= FORMATS[format].listing
        known = {posixpath.basename(name) for name in known}
    tops = {name.partition("/")[0] for name in known}
    with os_errors.explained("list", folder):
        names = sorted({path.name for path in folder.iterdir()} - tops)
    return [
        DamagedError(
            "the folder contains a shard that the manifest does not list",
            path=folder / name,
            fix="move it away: readers that list the folder would take it for part of the dataset",
        )
        for name in names
        if FORMATS[format].fits(name.lower()) and not name.startswith((".", *_CACHES))
    ]
