"""Files that are there plain and compressed, as `zstd` and `gunzip -k` leave them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from shardkit.errors import SourceError
from shardkit.sources.file_names import COMPRESSIONS, parse_name
from shardkit.sources.files import FilePath
from shardkit.sources.text.blocks import blocks

COPIES = "compressed copy of a file beside it"  # among what is passed over
_PIECE = 1 << 16  # bytes that are compared at a time


def copies(folders: Sequence[int], names: Sequence[str]) -> dict[int, int]:
    """Return the files that have the name of another one in their folder, but for the compression.

    Each is given by its number, with that of the other file, which is the plain one if there is.
    """
    if not any(name.lower().endswith(COMPRESSIONS) for name in names):
        return {}
    first: dict[tuple[int, str], int] = {}
    plain = [_plain(name) for name in names]
    for wanted in (False, True):  # compressed
        for number, name in enumerate(names):
            if (plain[number] != name) is wanted:
                first.setdefault((folders[number], plain[number]), number)
    if len(first) == len(names):
        return {}
    others = (first[key] for key in zip(folders, plain, strict=True))
    return {number: other for number, other in enumerate(others) if other != number}


def _plain(name: str) -> str:
    parsed = parse_name(name)
    return name[: -len(parsed.compression) - 1] if parsed and parsed.compression else name


def check_copy(copy: FilePath, size: int, path: FilePath, path_size: int) -> None:
    """Raise SourceError unless both files, of these sizes, hold the same bytes decompressed."""
    at = 0
    both = (_pieces(copy, size), _pieces(path, path_size))
    for one, other in zip_longest(*both, fillvalue=b""):
        if one != other:
            same = next(
                (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None
            )
            at += min(len(one), len(other)) if same is None else same
            raise SourceError(
                "a file and its compressed copy have different contents",
                path=copy,
                expected=f"the same bytes as in {path}",
                found=f"they differ from byte {at:,} on, decompressed",
                fix="remove or rename one of the two",
            )
        at += len(one)


def _pieces(path: FilePath, size: int) -> Iterator[bytes]:
    """Yield all bytes of a file, decompressed, in pieces of the same length."""
    parsed = parse_name(str(path).rpartition("/")[2])
    assert parsed is not None
    return _regrouped(blocks(path, size, parsed.compression))


def _regrouped(found: Iterable[bytes]) -> Iterator[bytes]:
    held = b""
    for block in found:
        held += block
        while len(held) >= _PIECE:
            yield held[:_PIECE]
            held = held[_PIECE:]
    if held:
        yield held
