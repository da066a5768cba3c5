"""Checks the files of a dataset: their existence, sizes and checksums.

`storage.checksum` may answer from memory for a file that this process has written. Here every byte
is read.
"""

from __future__ import annotations

import contextlib
import errno
import posixpath
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import xxhash

from shardkit import storage
from shardkit.byte_source import ByteSource, open_source
from shardkit.errors import DamagedError, ShardkitError
from shardkit.formats import FORMATS
from shardkit.manifest import File
from shardkit.pieces import CHECKSUM, DIGEST, PIECE, WHOLE, Hasher, checksum_of, count
from shardkit.remote.path import RemotePath
from shardkit.verification.work import Meter, in_threads, in_words, numbered, runs

_SPAN = 16  # pieces that a thread reads at a time, where they have digests
# Caches that Hugging Face's library writes beside the shards that it has loaded.
_CACHES = ("cache-", "tmp")

Ranges = list[tuple[int, int]]  # of bytes, from the first to before the second


def check_files(
    folder: Path, files: Iterable[File], kind: str, meter: Meter
) -> list[ShardkitError]:
    """What is wrong with files of the dataset in a folder; `kind` is that of their checksums."""
    return [problem for _, problem in find_damage(folder, files, kind, meter)]


def find_damage(
    folder: Path, files: Iterable[File], kind: str, meter: Meter
) -> list[tuple[File, ShardkitError]]:
    """As `check_files`, with the files."""
    checks = [FileCheck(folder, file, kind, meter) for file in files]
    jobs = (partial(check.read, *span) for check in checks for span in check.spans())
    for _ in in_threads(lambda job: job(), jobs, meter, folder):
        pass
    found = ((check.file, check.problem()) for check in checks)
    return [(file, problem) for file, problem in found if problem is not None]


def is_damage(problem: ShardkitError) -> bool:
    """Whether a file is damaged or missing, or its disk is; and not, say, forbidden to read."""
    cause = problem.__cause__
    return isinstance(problem, DamagedError) or getattr(cause, "errno", None) == errno.EIO


class FileCheck:
    """A file that is compared with what the manifest says.

    All of its `spans` go to `read`, in any threads, while they are given. Then `problem` tells what
    is wrong.
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
        """`kind` is that of the checksum, `digests` are those of the pieces, where they are known.

        `shard` is the shard that an index belongs to. The meter counts the bytes, read or not.
        """
        self._path, self.file, self._kind, self._meter = folder / file.name, file, kind, meter
        self._shard = shard
        self._pieces = number = count(file.bytes)
        if number == 1:
            digests = bytes.fromhex(file.checksum)
        self._known = digests if checksum_of(digests) == file.checksum else b""
        self._found: dict[int, bytes] = {}  # digests, or that of the whole, by the span's beginning
        self._errors: dict[int, ShardkitError] = {}
        self._unfit: ShardkitError | None = None
        self._looked_at = False
        self._open = 1  # spans that are being read; one as long as they are given
        self._lock, self._done = threading.Lock(), threading.Event()

    def spans(self) -> Iterator[tuple[int, int]]:
        """The numbers of pieces that a thread is to read: from the first to before the second.

        They end as soon as the file is known to have another size.
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
        """What is wrong with the file: None if nothing is. Waits for the spans.

        `samples` says in words which of them lie in ranges of bytes.
        """
        self._done.wait()
        if self._errors:
            return self._errors[min(self._errors)]
        digests = b"".join(found for _, found in sorted(self._found.items()))
        found = checksum_of(digests) if self._kind == CHECKSUM else digests.hex()
        if self.file.checksum == found or self.file.checksum == self._found_again():
            return None
        offset = None
        if self._known and self._pieces > 1:
            offset, found = self._damaged(digests, samples)
        return DamagedError(
            "a file is not as it was written",
            path=self._path,
            shard=self._shard,
            offset=offset,
            expected=f"checksum {self.file.checksum}",
            found=found,
            fix="repair it, with --repair SOURCE, or copy it again from where it is whole",
        )

    def _damaged(self, digests: bytes, samples: Callable[[Ranges], str] | None) -> tuple[int, str]:
        """The first byte of the first damaged piece; all of them, in words."""
        found, known = (np.frombuffer(each, f"V{DIGEST}") for each in (digests, self._known))
        numbers = np.flatnonzero(found != known).tolist()
        size = self.file.bytes
        ranges = [(a * PIECE, min((b + 1) * PIECE, size)) for a, b in runs(numbers)]
        words = [
            f"{numbered('piece', a, b)} (bytes {start:,} to {stop - 1:,})"
            for (a, b), (start, stop) in zip(runs(numbers), ranges, strict=True)
        ]
        lying = f"; {samples(ranges)}" if samples else ""
        said = f"other bytes in {in_words(words)}, of {self._pieces:,} pieces{lying}"
        return ranges[0][0], said

    def _look_at(self) -> None:
        """Raise DamagedError where there is no such file, or one of another size; asked once."""
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
        """A piece, and its digest if such are compared."""
        path, start = self._path, number * PIECE
        length = min(PIECE, self.file.bytes - start)
        digest = xxhash.xxh3_128_digest if self._kind == CHECKSUM else lambda piece: b""
        if not isinstance(path, RemotePath):
            piece = self._source.read(start, length)
            return piece, digest(piece)
        piece = path.store.read(path.key, start, start + length)
        found, known = digest(piece), self._known[number * DIGEST : (number + 1) * DIGEST]
        if known and found != known:  # changed on the way, perhaps
            piece = path.store.read(path.key, start, start + length, past_caches=True)
            return piece, digest(piece)
        if path.store.pages is not None:  # so that what is read of it now is not requested again
            path.store.pages.add(path, number, piece)
        return piece, found

    def _found_again(self) -> str | None:
        """The checksum of a file whose pieces were not compared, requested once more."""
        path = self._path
        if not isinstance(path, RemotePath) or (self._known and self._kind == CHECKSUM):
            return None
        whole = Hasher() if self._kind == CHECKSUM else xxhash.xxh3_128()
        with contextlib.suppress(ShardkitError):  # then it stays as it was found
            for start in range(0, self.file.bytes, PIECE):
                stop = min(start + PIECE, self.file.bytes)
                whole.update(path.store.read(path.key, start, stop, past_caches=True))
        return checksum_of(whole.digests()) if isinstance(whole, Hasher) else whole.hexdigest()

    @cached_property
    def _source(self) -> ByteSource:
        return open_source(self._path)


def _check_size(path: Path, file: File, shard: str | None) -> None:
    try:
        if isinstance(path, RemotePath):
            path.store.look_again(path.key)
        about = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError(
            "a file of the dataset is missing",
            path=path,
            shard=shard,
            expected=f"{file.bytes:,} bytes",
        ) from None
    except OSError as error:
        raise storage.explain(error, "look at", path) from error
    if not stat.S_ISREG(about.st_mode):  # a pipe would block for ever
        raise DamagedError(
            "where a file of the dataset should be is something else",
            path=path,
            shard=shard,
            expected="a regular file",
        )
    if about.st_size != file.bytes:
        short = about.st_size < file.bytes
        raise DamagedError(
            "a file is cut short" if short else "a file is longer than it was",
            path=path,
            shard=shard,
            offset=min(about.st_size, file.bytes),
            expected=f"{file.bytes:,} bytes",
            found=f"{about.st_size:,} bytes",
        )


def strangers(folder: Path, format: str, known: set[str]) -> list[ShardkitError]:
    """Problems: files that a reader that lists the folder would take for further shards."""
    if isinstance(folder, RemotePath) and not folder.store.lists:
        return []
    if FORMATS[format].below:  # a list says which shards count: another one would be read
        folder /= FORMATS[format].listing
        known = {posixpath.basename(name) for name in known}
    tops = {name.partition("/")[0] for name in known}
    with storage.explained("list", folder):
        names = sorted({path.name for path in folder.iterdir()} - tops)
    return [
        DamagedError(
            "a shard lies in the folder that the manifest does not name",
            path=folder / name,
            fix="move it away: readers that list the folder would take it for part of the dataset",
        )
        for name in names
        if FORMATS[format].fits(name.lower()) and not name.startswith((".", *_CACHES))
    ]
