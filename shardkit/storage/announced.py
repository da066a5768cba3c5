"""Compares how many files names announce, as in `train-00003-of-00004`, with those there are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shardkit.errors import SourceError

_NUMBERED = re.compile(
    r"(.*?)(\d{3,})-of-(\d{3,})(?:-[0-9a-f]{4,}(?=\.|$))?(.*?)(\.(?:gz|zst|bz2|xz))?", re.DOTALL
)
_SHOWN = 5


class Incomplete(NamedTuple):
    """Some files of a set: its names as a pattern, the numbers of those missing, and of all."""

    pattern: str
    missing: list[str]
    total: int

    def __str__(self) -> str:
        some = ", ".join(self.missing[:_SHOWN])
        more = ", ..." * (len(self.missing) > _SHOWN)
        return (
            f"{self.total - len(self.missing):,} of {self.total:,} {self.pattern}, not {some}{more}"
        )


def incomplete(names: Iterable[str]) -> list[Incomplete]:
    """Return the sets of files, by names that number them from 0 or 1, of which some are missing.

    Some files of a set may be compressed.

    >>> [str(found) for found in incomplete(["a-000-of-003.txt", "a-002-of-003.txt"])]
    ['2 of 3 a-*-of-003*.txt, not 001']
    """
    sets: dict[tuple[str, str, str], dict[int, str]] = {}  # with the compression of each
    for name in names:
        if "-of-" in name and (match := _NUMBERED.fullmatch(name)):
            before, number, total, after, compression = match.groups("")
            if len(number) == len(total):
                sets.setdefault((before, total, after), {})[int(number)] = compression
    found = []
    for (before, total, after), numbers in sets.items():
        count, first = int(total), int(int(total) in numbers and 0 not in numbers)
        if len(numbers) < count < first + 10**7:
            every = range(first, first + count)
            missing = [str(n).zfill(len(total)) for n in every if n not in numbers]
            kinds = {*numbers.values()}
            end = kinds.pop() if len(kinds) == 1 else "*"
            found.append(Incomplete(f"{before}*-of-{total}*{after}{end}", missing, count))
    return found


def refuse_incomplete(folder: Path, names: Iterable[str]) -> None:
    """Raise SourceError if the names of a folder's files announce others that are missing."""
    found = incomplete(names)
    if found:
        pattern = found[0].pattern
        raise SourceError(
            "files are missing that the names of others announce",
            path=folder,
            expected="all files of each set",
            found="; ".join(map(str, found[:_SHOWN])),
            fix=f"get the others, or give those that are there by a pattern: '{folder}/{pattern}'",
        )
