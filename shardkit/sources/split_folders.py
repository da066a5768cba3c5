"""Finds the split folders of images in or below a root: `train/`, `val2017/`, `seg_test/`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardkit.codecs.media import Kind
from shardkit.errors import UsageError
from shardkit.helpers import os_errors
from shardkit.metadata.splits import KINDS, beside_splits, refuse_synonyms, word_of_split
from shardkit.sources.imagenet import DEVKIT
from shardkit.sources.metadata import FILES as METADATA_FILES
from shardkit.storage.walk import is_folder, kind_of_file, passed_over, scandir

_SHOWN = 5  # files to name in errors
_DEEP = 8  # maximum number of nested folders that hold nothing but one folder


@dataclass
class SplitFolders:
    """The split folders by split name, in output order."""

    root: Path  # the parent of the split folders: the given folder, or one nested in it
    folders: dict[str, str] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)  # files beside them
    notes: tuple[str, ...] = ()

    @property
    def paths(self) -> dict[str, Path]:
        return {split: self.root / folder for split, folder in self.folders.items()}


@dataclass
class _Listed:
    """The direct contents of a folder."""

    folders: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)  # names of the first images or metadata files
    ignored: Counter[str] = field(default_factory=Counter)  # other files


def find_split_folders(root: Path, media: Kind, without: str | None = None) -> SplitFolders:
    """The splits of a folder of images or other media; empty if its folders are not splits.

    If a folder holds nothing but one other folder, that one is searched instead, with a note.
    Raises UsageError for splits beside other folders or images, and for two folders of one split.
    """
    found = _splits_in(root, listed := _list(root, media, without))
    if found.folders:
        return found
    top, ignored = root, Counter(listed.ignored)
    for _ in range(_DEEP):
        if listed.data or len(listed.folders) != 1 or word_of_split(listed.folders[0]):
            break
        top = top / listed.folders[0]
        listed = _list(top, media)
        if len(listed.folders) > 1:
            found = _splits_in(top, listed) if len(_named(listed.folders)) > 1 else found
            break
        ignored += listed.ignored
    if not found.folders:
        return SplitFolders(root)
    found.ignored += ignored
    found.notes = (f"the splits were found in {top}",)
    return found


def _splits_in(root: Path, listed: _Listed) -> SplitFolders:
    named = _named(listed.folders)
    of_splits = [name for names in named.values() for name in names]
    others = [name for name in listed.folders if name not in of_splits]
    with_classes = any(_holds_classes(root / name) for name in of_splits)
    if not with_classes and (others or listed.data):
        return SplitFolders(root)  # flat folders with such names are classes among others
    devkits = [name for name in others if DEVKIT.fullmatch(name)]
    beside = [f"{name}/" for name in others if name not in devkits] + listed.data
    if named and beside:
        raise beside_splits(root, named, beside)
    refuse_synonyms(root, named)
    for names in named.values():
        if len(names) > 1:
            raise UsageError(
                f"two folders are the same split: {'/ and '.join(names)}/",
                path=root,
                fix="convert one of them at a time, move one elsewhere, or treat all folders as"
                " classes with --split none",
            )
    listed.ignored.update({"devkit folder": len(devkits)} if devkits else {})
    return SplitFolders(root, {split: named[split][0] for split in named}, listed.ignored)


def _list(folder: Path, media: Kind, without: str | None = None) -> _Listed:
    found = _Listed()
    with os_errors.explained("list", folder), scandir(folder) as entries:
        for entry in entries:
            if entry.name == without:
                continue
            if (words := passed_over(entry.name)) is not None:
                found.ignored[words] += 1
            elif is_folder(entry):
                found.folders.append(entry.name)
            elif entry.name in METADATA_FILES or media.has(entry.name):
                found.data += [entry.name] if len(found.data) < _SHOWN else []
            else:
                found.ignored[kind_of_file(entry.name)] += 1
    found.folders.sort()
    return found


def _named(folders: Sequence[str]) -> dict[str, list[str]]:
    """The folders named after splits, whose names differ only in the split and in numbers."""
    alike: dict[str, dict[str, list[str]]] = {}
    for name in folders:
        if word := word_of_split(name):
            rest = re.sub(r"[-_. ]?\d+", "", name.lower().replace(word, "*", 1))
            alike.setdefault(rest, {}).setdefault(word, []).append(name)
    found = max(alike.values(), key=len, default={})
    if len(found) < 2:
        exact = [name for name in folders if name.lower() in KINDS]
        found = {name.lower(): [n for n in exact if n.lower() == name.lower()] for name in exact}
    return {split: found[split] for split in KINDS if split in found}


def _holds_classes(folder: Path) -> bool:
    with os_errors.explained("list", folder), scandir(folder) as entries:
        return any(
            entry.name in METADATA_FILES or (is_folder(entry) and passed_over(entry.name) is None)
            for entry in entries
        )
