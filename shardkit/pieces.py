"""Checksums of files, made of the digests of their pieces of 1 MiB.

So a piece that is read alone can be compared with its digest, and the digests with the checksum
that the manifest has of their file.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

PIECE = 1 << 20  # bytes; the last piece of a file is shorter
DIGEST = 16  # bytes of a piece's digest, which is xxh3-128

MOST = 1 << 24  # pieces of a file whose digests are used: 16 TiB

# Kinds of checksums, as manifests name them.
CHECKSUM = "xxh3-128-1MiB"  # of the pieces' digests; of an only piece its digest
WHOLE = "xxh3-128"  # of all bytes, as earlier versions made them


def count(size: int) -> int:
    """Pieces of a file with so many bytes."""
    return -(-size // PIECE)


def listed(size: int) -> int:
    """Digests of a file in the list of pieces: none of an only piece, as it is the checksum."""
    number = count(size)
    return number if number > 1 else 0


def checksum_of(digests: bytes) -> str:
    """The checksum, in 32 hex digits, of a file whose pieces have these digests."""
    return (digests if len(digests) == DIGEST else xxhash.xxh3_128_digest(digests)).hex()


def checksum(data: bytes, kind: str = CHECKSUM) -> str:
    """The checksum of a whole file's bytes, of one of the kinds."""
    if kind == WHOLE:
        return xxhash.xxh3_128_hexdigest(data)
    hasher = Hasher()
    hasher.update(data)
    return checksum_of(hasher.digests())


class Hasher:
    """Makes the digests of a file's pieces, of its bytes in their order."""

    def __init__(self) -> None:
        self._done = bytearray()
        self._piece = xxhash.xxh3_128()
        self._room = PIECE  # bytes that the piece lacks

    def update(self, chunk: bytes | memoryview) -> None:
        if len(chunk) < self._room:  # nearly always
            self._piece.update(chunk)
            self._room -= len(chunk)
            return
        left = memoryview(chunk)
        while len(left) >= self._room:
            self._piece.update(left[: self._room])
            left = left[self._room :]
            self._done += self._piece.digest()
            self._piece.reset()
            self._room = PIECE
        self._piece.update(left)
        self._room -= len(left)

    def update_all(self, chunks: Sequence[bytes | memoryview], size: int) -> None:
        """As `update` with each of the chunks, which are so many bytes together."""
        if size < self._room:
            update = self._piece.update
            for chunk in chunks:
                update(chunk)
            self._room -= size
        else:
            for chunk in chunks:
                self.update(chunk)

    def digests(self) -> bytes:
        """Those of all pieces so far, the last of which may be shorter."""
        return bytes(self._done) + (self._piece.digest() if self._room < PIECE else b"")
