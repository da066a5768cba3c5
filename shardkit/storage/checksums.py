"""Checksums of files, computed from the digests of their 1 MiB pieces.

A piece that is read alone can be compared with its digest, and the digests with the checksum of
their file in the manifest.
"""

from __future__ import annotations

import xxhash

PIECE = 1 << 20  # bytes; the last piece of a file is shorter
DIGEST = 16  # bytes of a piece's digest, an xxh3-128

MAX_PIECES = 1 << 24  # maximum number of pieces of a file with digests: 16 TiB

# Kinds of checksums, as named in manifests.
CHECKSUM = "xxh3-128-1MiB"  # of the pieces' digests; for a single piece, its digest
WHOLE = "xxh3-128"  # of all bytes, as in earlier versions


def count(size: int) -> int:
    """Number of pieces of a file of this size."""
    return -(-size // PIECE)


def listed(size: int) -> int:
    """Number of a file's digests in the list of pieces; a single piece's is the checksum itself."""
    number = count(size)
    return number if number > 1 else 0


def checksum_of(digests: bytes) -> str:
    """Return the checksum, as 32 hex digits, of a file whose pieces have these digests."""
    return (digests if len(digests) == DIGEST else xxhash.xxh3_128_digest(digests)).hex()


def checksum(data: bytes, kind: str = CHECKSUM) -> str:
    """Return the checksum, of this kind, of a file with these bytes."""
    if kind == WHOLE:
        return xxhash.xxh3_128_hexdigest(data)
    hasher = Hasher()
    hasher.update(data)
    return checksum_of(hasher.digests())


class Hasher:
    """Computes the digests of a file's pieces incrementally, from its bytes in order."""

    def __init__(self) -> None:
        self._done = bytearray()
        self._piece = xxhash.xxh3_128()
        self._room = PIECE  # bytes missing from the current piece

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

    def digests(self) -> bytes:
        """Return the digests of all pieces so far, the last of which may be incomplete."""
        return bytes(self._done) + (self._piece.digest() if self._room < PIECE else b"")
