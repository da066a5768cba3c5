"""Recognizes splits by the names of files (`train-00000.parquet`) and folders (`test/`)."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from shardkit.errors import UsageError
from shardkit.helpers.names import is_safe

# Names of splits, in the order of an output, and the standard split that each stands for.
KINDS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
    "holdout": "holdout",
}
_ORDER = list(KINDS)
_FIRST = re.compile(rf"({'|'.join(sorted(KINDS, key=len, reverse=True))})($|[.-]|[ _]?\d)", re.I)
_LETTERS = re.compile("[a-z]+")
_WORD = re.compile(rf"(?<![a-z])({'|'.join(sorted(KINDS, key=len, reverse=True))})(?![a-z])", re.I)
_SHARDED = re.compile(
    r"((?:.*/)?)(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[-.].*"
)  # as `datasets` names shards


class Split(NamedTuple):
    """The files of a split: their numbers, and the folder that contains them all ("": none)."""

    folder: str
    numbers: list[int]


def split_of(name: str, *, numbered: bool = True) -> str | None:
    """Return the split that a file or folder is named after: its name starts with the split.

    `train2017` counts only if `numbered` is True.

    >>> split_of("Validation-00000-of-00002.json.gz")
    'validation'
    """
    match = _FIRST.match(name)
    if match is None or (not numbered and match[2][-1:].isdigit()):
        return None
    return match[1].lower()


def kind_of_split(name: str) -> str | None:
    """Return the standard split that a name contains anywhere, if it contains exactly one.

    >>> kind_of_split("seg_train"), kind_of_split("train_test")
    ('train', None)
    """
    kinds = {KINDS[word] for word in _LETTERS.findall(name.lower()) if word in KINDS}
    return kinds.pop() if len(kinds) == 1 else None


def grouped(path: Path, names: Sequence[str], *, documents: bool = False) -> dict[str, Split]:
    """Return the splits of the files below a folder; empty if the names contain no splits.

    The names of files or folders directly below the folder that contains all files decide: either
    how they start, or the only word in which they differ (`my_train.csv`, `my_test.csv`). For
    `documents`, files that are one sample each, a name like `test.txt` means nothing. Raises
    UsageError for ambiguous names.
    """
    start = _common_folder(names)
    if sharded := _sharded(names):
        return sharded
    tops, others = _tops(names, len(start), numbered=not documents)
    if not tops and (found := _named_alike(names, documents)):
        refuse_synonyms(path, found)
        return found
    named = [split for split, folder in tops if not folder]
    if not tops or (documents and others and len(named) == len(tops)):
        if not documents:
            _refuse_hints(path, names, start)
        return {}
    found_in = {s: sorted((f for t, f in tops if t == s), reverse=True) for s, _ in tops}
    twice = [
        " beside ".join(f"{folder}/" if folder else f"a file {split}" for folder in folders)
        for split, folders in found_in.items()
        if len(folders) > 1
    ]
    if others or twice:
        raise beside_splits(path, found_in, [*others, *twice])
    refuse_synonyms(path, found_in)
    order = sorted(tops, key=lambda top: _ORDER.index(top[0]))
    return {split: Split(start + f if f else "", tops[split, f]) for split, f in order}


def in_order(splits: Iterable[str]) -> list[str]:
    """Splits in the order of an output; unknown names come last."""
    return sorted(splits, key=lambda name: _ORDER.index(name) if name in KINDS else len(_ORDER))


def beside_splits(path: Path, splits: Iterable[str], others: Sequence[str]) -> UsageError:
    """Return the error for splits, folders or files, beside something else."""
    return UsageError(
        f"the folder holds splits ({', '.join(splits)}) and something else as well",
        path=path,
        found=", ".join(others[:5]),
        expected="only folders or files that are named after splits",
        fix="move the others away, convert one split at a time, or take all together with"
        " --split none",
    )


def refuse_synonyms(path: Path, splits: Iterable[str]) -> None:
    """Raise UsageError if two names mean the same split, such as val and valid."""
    by_kind: dict[str, list[str]] = {}
    for split in splits:
        by_kind.setdefault(KINDS.get(split, split), []).append(split)
    for kind, names in by_kind.items():
        if len(names) > 1:
            raise UsageError(
                f"several names for the same split: {' and '.join(names)} are both {kind}",
                path=path,
                fix="convert one of them at a time, move one away, or take all together with"
                " --split none",
            )


def _sharded(names: Sequence[str]) -> dict[str, Split]:
    """The splits of shards named by `datasets`, with any split name: `unseen-00000-of-00001`.

    One of them must be a known split, or their folder must be called data, as in repositories.
    """
    found = [_SHARDED.fullmatch(name) for name in names]
    splits: dict[str, list[int]] = {}
    for number, match in enumerate(found):
        if match is None or not is_safe(match[2], flat=True):
            return {}
        splits.setdefault(match[2], []).append(number)
    folders = {match[1] for match in found if match}
    usual = "data/" in folders or any(split in KINDS for split in splits)
    if len(splits) < 2 or len(folders) > 1 or not usual:
        return {}
    order = [split for split in _ORDER if split in splits]
    order += sorted(set(splits) - set(order))
    return {split: Split("", splits[split]) for split in order}


def _named_alike(names: Sequence[str], documents: bool) -> dict[str, Split]:
    """The splits of files whose names differ only in them: `my_train_0.csv`, `my_test_0.csv`.

    Compares what precedes the split in a file's name, or all but the numbers in a folder's name.
    """
    splits: dict[str, list[int]] = {}
    alike = set()
    start = len(posixpath.commonpath([posixpath.dirname(name) for name in names]))
    for number, name in enumerate(names):
        parts = name[start:].lstrip("/").split("/")
        told = [
            n for n, part in enumerate(parts[: -1 if documents else None]) if word_of_split(part)
        ]
        if not told:
            return {}
        part = parts[told[0]]
        word = word_of_split(part) or ""
        before, _, after = part.lower().partition(word)
        rest = before if told[0] == len(parts) - 1 else f"{before}*{after}"
        alike.add(("/".join(parts[: told[0]]), re.sub(r"\d+", "", rest)))
        splits.setdefault(word, []).append(number)
    if len(alike) > 1 or len(splits) < 2:
        return {}
    return {split: Split("", splits[split]) for split in _ORDER if split in splits}


def word_of_split(name: str) -> str | None:
    """Return the word in a name that is the name of a split, if there is exactly one.

    >>> word_of_split("my_Train_2.csv"), word_of_split("train_test.csv")
    ('train', None)
    """
    found = {word.lower() for word in _WORD.findall(name)}
    return found.pop() if len(found) == 1 else None


def common_start(names: Iterable[str]) -> str:
    """Return the longest common prefix of all names, character by character.

    >>> common_start(["train-0.tar", "train-1.tar"])
    'train-'
    """
    first, last = min(names), max(names)
    alike = next(
        (n for n, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), None
    )
    return first[:alike]


def _common_folder(names: Sequence[str]) -> str:
    """The deepest folder that contains all files, with a slash, but none named after a split."""
    folders = [name.split("/")[:-1] for name in names]
    common = ""
    for parts in zip(*folders, strict=False):
        if len(set(parts)) > 1 or split_of(parts[0]):
            break
        common += parts[0] + "/"
    return common


def _tops(
    names: Sequence[str], start: int, *, numbered: bool
) -> tuple[dict[tuple[str, str], list[int]], list[str]]:
    """Return the files by split and folder, and the names that contain no split."""
    tops: dict[tuple[str, str], list[int]] = {}
    others: dict[str, None] = {}
    for number, name in enumerate(names):
        top, below, _ = name[start:].partition("/")
        split = split_of(top, numbered=numbered)
        if split is None or (below and split != top.partition(".")[0].lower()):
            others[top + below] = None
        else:
            tops.setdefault((split, top if below else ""), []).append(number)
    return tops, list(others)


def _refuse_hints(path: Path, names: Sequence[str], start: str) -> None:
    """Raise UsageError if names contain several splits, but not where splits are recognized."""
    examples: dict[str, str] = {}
    below: dict[str, set[str]] = {}  # folder -> the splits in names below it
    for name in names:
        parts = name[len(start) :].split("/")
        kind = next(filter(None, map(kind_of_split, parts)), None)
        if kind is not None:
            examples.setdefault(kind, name)
        below.setdefault("/".join(parts[:1] if parts[1:] else []), set()).add(kind or "")
    if len(examples) > 1:
        if len(below) > 1 and all(len(kinds - {""}) > 1 for kinds in below.values()):
            raise several_subsets(path, [start + folder for folder in below])
        raise mixed_splits(path, examples.values())


def several_subsets(path: Path, folders: Iterable[str]) -> UsageError:
    """Return the error for folders that each contain splits."""
    names = sorted(folders)
    return UsageError(
        "the folders hold splits of their own, so that each is a dataset",
        path=path,
        found=", ".join(f"{name}/" for name in names[:5]),
        fix=f"give one of them: {', '.join(str(path / name) for name in names[:5])}; or take all"
        " together with --split none",
    )


def mixed_splits(path: Path, found: Iterable[str]) -> UsageError:
    """Return the error for names that seem to contain splits, but not in a supported way."""
    return UsageError(
        "the names seem to contain several splits, which would be mixed",
        path=path,
        found=", ".join(found),
        expected="train, val and test as folder names, or at the start of file names",
        fix="convert one split at a time, rename them, or take all together with --split none",
    )
