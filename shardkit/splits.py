"""Splits by name: what a file (`train-00000.parquet`) or a folder (`test/`) is called after."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from shardkit import storage
from shardkit.codecs.image import SUFFIXES
from shardkit.errors import UsageError

# Names of splits, in the order of an output, and which of the usual three each is.
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
}
_ORDER = list(KINDS)
_FIRST = re.compile(rf"({'|'.join(sorted(KINDS, key=len, reverse=True))})($|[.-]|[ _]?\d)", re.I)
_LETTERS = re.compile("[a-z]+")
CARD = "README.md"  # of a repository on the Hugging Face Hub
_CARD_BYTES = 1 << 20
# A path, or a URL on the Hub, in Markdown or HTML.
_SHOWN = re.compile(
    rf"(?:https?://[^\s\"'()<>]*?/(?:resolve|blob|raw)/[^/\s]+/)?"
    rf"([^\s\"'()<>\[\]=]+\.(?:{'|'.join(SUFFIXES)}))\b",
    re.I,
)


class Split(NamedTuple):
    """The files of a split: their numbers, and the folder that holds them ("" if none does)."""

    folder: str
    numbers: list[int]


def split_of(name: str, *, numbered: bool = True) -> str | None:
    """The split that a file or folder is named after: what its name begins with.

    `train2017` counts only if it may be `numbered`.

    >>> split_of("Validation-00000-of-00002.json.gz")
    'validation'
    """
    match = _FIRST.match(name)
    if match is None or (not numbered and match[2][-1:].isdigit()):
        return None
    return match[1].lower()


def kind_of_split(name: str) -> str | None:
    """Which of "train", "validation", "test" a name contains anywhere, if it is one of them.

    >>> kind_of_split("seg_train"), kind_of_split("train_test")
    ('train', None)
    """
    kinds = {KINDS[word] for word in _LETTERS.findall(name.lower()) if word in KINDS}
    return kinds.pop() if len(kinds) == 1 else None


def grouped(path: Path, names: Sequence[str], *, documents: bool = False) -> dict[str, Split]:
    """The splits of files below a folder; empty where names contain none.

    What files or folders are called below the folder that holds them all decides, and where they
    begin alike (`imagenet-train-0.tar`), what follows. Among `documents`, files that are a sample
    each, a name like `test.txt` says nothing. Raises UsageError where names leave a question.
    """
    start = _common_folder(names)
    tops, others = _tops(names, len(start), numbered=not documents)
    if not tops and not documents:
        alike = common_start(names)[len(start) :]
        begin = re.match(r"[^/]*[-_. ]", alike)
        if begin:
            tops, others = _tops(names, len(start) + len(begin[0]), numbered=True)
    named = [split for split, folder in tops if not folder]
    if not tops or (documents and others and len(named) == len(tops)):
        if not documents:
            _refuse_hints(path, names, start)
        return {}
    found = {split: sorted((f for s, f in tops if s == split), reverse=True) for split, _ in tops}
    twice = [
        " beside ".join(f"{folder}/" if folder else f"a file {split}" for folder in folders)
        for split, folders in found.items()
        if len(folders) > 1
    ]
    if others or twice:
        raise UsageError(
            f"the folder holds splits ({', '.join(found)}) and something else as well",
            path=path,
            found=", ".join([*others, *twice][:5]),
            expected="nothing but folders or files that are named after splits",
            fix="move the others away, convert one split at a time, or take all together with"
            " --split none",
        )
    order = sorted(tops, key=lambda top: _ORDER.index(top[0]))
    return {split: Split(start + f if f else "", tops[split, f]) for split, f in order}


def common_start(names: Iterable[str]) -> str:
    """What all names begin with, character by character.

    >>> common_start(["train-0.tar", "train-1.tar"])
    'train-'
    """
    first, last = min(names), max(names)
    alike = next(
        (n for n, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), None
    )
    return first[:alike]


def _common_folder(names: Sequence[str]) -> str:
    """The folder that holds all files, with a slash: not one that is itself named after a split."""
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
    """The files by split and folder, and what is named after no split."""
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
    """Raise UsageError where names contain several splits, but not where they are looked for."""
    said: dict[str, str] = {}
    for name in names:
        parts = name[len(start) :].split("/")
        kind = next(filter(None, map(kind_of_split, parts)), None)
        if kind is not None:
            said.setdefault(kind, name)
    if len(said) > 1:
        raise mixed_splits(path, said.values())


def mixed_splits(path: Path, found: Iterable[str]) -> UsageError:
    """The error for names that seem to tell splits, but not in a way that is understood."""
    return UsageError(
        "the names tell of several splits, which would be mixed",
        path=path,
        found=", ".join(found),
        expected="train, val and test as the names of folders, or at the beginning of files'",
        fix="convert one split at a time, rename them, or take all together with --split none",
    )


def check_card(folder: Path, found: Collection[str]) -> None:
    """Compare the splits `found` by names with those of a Hub repository's README.md, if any.

    Raises UsageError where that names several subsets, or splits that names of files do not tell.
    """
    configs, splits = _card(folder / CARD)
    if len(configs) > 1:
        raise UsageError(
            "the repository has several subsets, which are datasets of their own",
            path=folder / CARD,
            found=", ".join(configs[:5]),
            fix="give the folder of one of them, or take all together with --split none",
        )
    told = {KINDS.get(split, split) for split in splits}
    if len(told) > 1 and told != {KINDS.get(split, split) for split in found}:
        raise UsageError(
            "the repository has splits that the names of its files do not tell",
            path=folder / CARD,
            expected=", ".join(splits),
            found=", ".join(filter(None, found)) or "none by name",
            fix="give the files of one split, or take all together with --split none",
        )


def shown_images(folder: Path) -> frozenset[str]:
    """The images that a folder's README.md shows: paths relative to it."""
    found = _SHOWN.findall(_text_of(folder / CARD))
    return frozenset(posixpath.normpath(unquote(name)) for name in found)


def _text_of(path: Path) -> str:
    if not path.is_file():
        return ""
    return storage.read(path, _CARD_BYTES).decode("utf-8", "replace")


def _card(path: Path) -> tuple[list[str], list[str]]:
    """The names of subsets and of splits under `configs:` in the YAML at a README's beginning."""
    front = re.match(r"---\s*\n(.*?)\n---", _text_of(path), re.DOTALL)
    block = re.search(r"^configs:[^\n]*\n((?:[-\s][^\n]*\n?)*)", front[1] if front else "", re.M)
    lines = block[1] if block else ""

    def values(key: str) -> list[str]:
        found = re.findall(rf"^[-\s]*{key}:\s*[\"']?(.+?)[\"']?\s*$", lines, re.M)
        return list(dict.fromkeys(found))

    return values("config_name"), values("split")
