"""The digests of a dataset's pieces, read on demand from the dataset's piece list."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import xxhash

from shardkit.errors import DamagedError, NotFoundError, ShardkitError
from shardkit.storage.byte_source import RemoteFile
from shardkit.storage.checksums import DIGEST, MAX_PIECES, PIECE, checksum_of, count
from shardkit.storage.remote.path import RemotePath

_BLOCK = 1 << 20  # bytes of the list that are read at once: the digests of 64 GiB
_BLOCKS = 4  # maximum number that are kept in memory


class PieceList:
    """The file with the digests of the pieces of all shards of a dataset. Thread-safe."""

    def __init__(self, path: RemotePath) -> None:
        self.path = path
        self._asked: set[int] = set()  # blocks
        self._blocks: dict[int, bytes] = {}  # some, which stay when a cache evicts their pages

    def __reduce__(self) -> tuple[Any, ...]:
        return PieceList, (self.path,)

    def ask(self, first: int) -> None:
        """Start a request for the block with digest `first`, unless it was already requested."""
        number = first * DIGEST // _BLOCK
        if number not in self._asked:
            self._asked.add(number)
            threading.Thread(target=self._try, args=(number,), daemon=True).start()

    def _try(self, number: int) -> None:
        with suppress(ShardkitError):  # raised again when the block is needed
            self._block(number)

    def of(self, first: int, number: int, checksum: str) -> bytes:
        """The `number` digests from `first` on, checked against the checksum of their file."""
        start, stop = first * DIGEST, (first + number) * DIGEST
        blocks = range(start // _BLOCK, (stop - 1) // _BLOCK + 1)
        for again in (False, True):  # the second time past all caches, which may hold bad bytes
            if number > MAX_PIECES or stop > self._size():
                break
            found = b"".join(self._block(block, again) for block in blocks)
            digests = found[start % _BLOCK :][: stop - start]
            if checksum_of(digests) == checksum:
                return digests
        raise DamagedError(
            "the list of piece checksums is damaged",
            path=self.path,
            offset=start,
            fix="copy it again from an intact copy of the dataset, or create the dataset again",
        )

    def _block(self, number: int, past_caches: bool = False) -> bytes:
        found = None if past_caches else self._blocks.get(number)
        if found is None:
            start = number * _BLOCK
            stop = min(start + _BLOCK, self._size())
            if past_caches:
                found = self.path.store.read(self.path.key, start, stop, past_caches=True)
            else:
                found = RemoteFile(self.path).read(start, stop - start)
            if len(self._blocks) >= _BLOCKS:
                self._blocks.clear()
            self._blocks[number] = found
        return found

    def _size(self) -> int:
        try:
            return self.path.store.info(self.path.key).size
        except NotFoundError as error:
            raise DamagedError(
                "the list of piece checksums is missing",
                path=self.path,
                fix="copy the dataset again, with all files in its folder __shardkit__",
            ) from error


class FilePieces:
    """The digests of the pieces of one file."""

    def __init__(self, size: int, checksum: str, listed: PieceList | None, first: int) -> None:
        """`first` is the number of the first digest in the list. A one-piece file needs no list."""
        self._number, self._checksum = count(size), checksum
        self._list, self._first = listed, first
        self._digests = bytes.fromhex(checksum) if self._number == 1 else b""

    def ask(self) -> None:
        """Start requesting the digests, which will be needed, without waiting for them."""
        if self._list is not None and not self._digests:
            self._list.ask(self._first)

    def wrong(self, data: memoryview, first: int) -> list[int]:
        """Return the numbers of the pieces that differ from their digests.

        `data` consists of whole pieces; `first` is the number of the first one.
        """
        digests = self._known()
        return [
            number
            for number, at in enumerate(range(0, len(data), PIECE), first)
            if xxhash.xxh3_128_digest(data[at : at + PIECE])
            != digests[DIGEST * number : DIGEST * (number + 1)]
        ]

    def _known(self) -> bytes:
        if not self._digests and self._list is not None:
            self._digests = self._list.of(self._first, self._number, self._checksum)
        return self._digests
