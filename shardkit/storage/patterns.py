"""Names that stand for several files: patterns, expanded as by a shell, and numbered sets.

Patterns are `{a,b}`, `{000..099}`, `*`, `?` and `[abc]`. A name such as `train-00003-of-00004` says
how many files there are.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from shardkit.errors import NotFoundError, SourceError, UsageError
from shardkit.helpers import os_errors
from shardkit.storage.remote.path import RemotePath

_GLOB = re.compile(r"[*?[]")
_BRACES = re.compile(r"\{(?:(\d{1,9})\.\.(\d{1,9})|([^{}]*,[^{}]*))\}")
_NESTED = re.compile(r"\{[^{}]*\{")
_MAX_NAMES = 1 << 20  # maximum number of names from the braces of a pattern


def is_pattern(path: Path) -> bool:
    """Whether a path is a pattern, such as `data/train-*.parquet` or `{a,b}/{000..127}.tar`."""
    text = path.key if isinstance(path, RemotePath) else str(path)
    special = _GLOB.search(text) or _BRACES.search(text)
    return bool(special) and not (path.exists() or path.is_symlink())


def expanded(paths: Iterable[Path]) -> list[Path]:
    """Return the paths, with patterns replaced by the paths that they match."""
    return [one for path in paths for one in (expand(path) if is_pattern(path) else [path])]


def expand(pattern: Path) -> list[Path]:
    """Return the paths that match a pattern, in the same order as in a shell.

    A pattern that has only braces is expanded without looking into folders. Hidden files are not
    matched. Raises NotFoundError if `*`, `?` or `[` match nothing, in any alternative in braces.
    """
    text = pattern.key if isinstance(pattern, RemotePath) else str(pattern)
    found: list[Path] = []
    for one in _unbraced(text, pattern):
        path = RemotePath(pattern.store, one) if isinstance(pattern, RemotePath) else Path(one)
        matches = _matches(path) if _GLOB.search(one) else [path]
        if not matches:
            raise NotFoundError("nothing matches the pattern", path=path, fix=_hint(pattern))
        found += matches
    return found


def _unbraced(text: str, pattern: Path) -> list[str]:
    """Expand the braces in a text."""
    parts: list[Sequence[str]] = []
    at, names = 0, 1
    for braces in _BRACES.finditer(text):
        first, last, words = braces.groups()
        numbers = range(int(first or 0), int(last or 0) + 1)
        names *= len(numbers) if words is None else 1 + words.count(",")
        if not 0 < names <= _MAX_NAMES or _NESTED.search(text):
            raise UsageError(
                "the braces in a pattern are empty or nested, or expand to too many names",
                path=pattern,
                found=braces[0],
                fix=_hint(pattern),
            )
        if words is None:
            padded = any(len(number) > 1 and number[0] == "0" for number in (first, last))
            width = max(len(first), len(last)) if padded else 0  # as in bash
            words = ",".join(f"{n:0{width}d}" for n in numbers)
        parts += [[text[at : braces.start()]], words.split(",")]
        at = braces.end()
    return ["".join(names) for names in itertools.product(*parts, [text[at:]])]


def _matches(pattern: Path) -> list[Path]:
    """Return the existing paths that match `*`, `?` and `[` in the parts of a path."""
    ways = [pattern, *pattern.parents]
    found, looked = [ways.pop()], False
    for way in reversed(ways):
        literal = [folder / way.name for folder in found]
        if not _GLOB.search(way.name):
            found = [path for path in literal if not looked or path.exists()]
            continue
        looked = True
        found = [
            path
            for one in literal
            for path in ([one] if one.exists() else _fitting(one.parent, way.name))
        ]
    return sorted(found, key=str)


def _fitting(folder: Path, name: str) -> list[Path]:
    if not folder.is_dir() and not isinstance(folder, RemotePath):
        return []
    with os_errors.explained("list", folder):
        return [
            path
            for path in folder.iterdir()
            if fnmatch.fnmatchcase(path.name, name) and (path.name[0] != "." or name[0] == ".")
        ]


def _hint(pattern: Path) -> str:
    hint = "give a pattern such as folder/train-{000..127}.tar or folder/train-*.parquet, in quotes"
    folder = pattern.parent
    whole = not _GLOB.search(str(folder)) and folder.name and folder.is_dir()
    return hint + (f"; or the whole folder, {folder}" if whole else "")


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
