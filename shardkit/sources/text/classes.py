"""Folders of texts as classes: `pos/` and `neg/`, as in the IMDb reviews.

Folders of images are classes by convention, but folders of texts are just as often languages,
years or parts of a corpus. They are taken as classes only if a list names them, or if everything
suggests it: each file is a document in a top-level folder, and the names look like classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from shardkit.errors import UsageError
from shardkit.sources.labels import check_names
from shardkit.sources.text.documents import Files

# Folders of documents without a class, whose label is -1.
_UNLABELLED = {"unsup", "unsupervised", "unlabeled", "unlabelled"}
# Common names for parts of a corpus, in lower case.
_PARTS = {
    *("data", "text", "texts", "txt", "raw", "clean", "cleaned", "corpus", "corpora", "source"),
    *("docs", "documents", "document", "files", "file", "src", "output", "out", "extracted"),
    *("all", "other", "others", "misc", "extra", "main", "new", "old", "sample", "samples"),
    *("part", "parts", "shard", "shards", "chunk", "chunks", "batch", "original", "processed"),
}
_LANGUAGE = re.compile(r"[a-z]{2}([-_][a-z]{2,4})?", re.I)
_FEW = 10  # more folders are classes only if there are more documents than folders


def label_folders(
    path: Path,
    splits: Mapping[str, Files],
    every: Mapping[str, Iterable[str]],
    classes: Sequence[str] | None,
    *,
    guess: bool,
    strict: bool,
) -> tuple[tuple[str, ...] | None, list[str]]:
    """Set the labels of files from their folders; returns the classes, if any, and notes.

    `every` lists all folders of each split, including those without texts. Without a list of
    `classes`, folders are classes only with `guess`, if they seem to be. Raises UsageError if the
    list does not fit; unless `strict`, folders that are not listed are appended.
    """
    nested = {name: files for name, files in splits.items() if set(files.folders) != {""}}
    tops = {_top(folder) for files in nested.values() for folder in files.folders} - {""}
    notes = []
    if classes is not None:
        names = _listed(path, nested or splits, classes, tops, strict=strict)
    elif guess and len(tops) > 1:
        names = tuple(sorted(tops - _UNLABELLED))
        empty = {_top(folder) for name in nested for folder in every[name]} - tops - {""}
        doubt = next(_doubts(nested, names, sorted(empty)), None)
        if doubt is not None:
            some = _some(sorted(tops))
            return None, [
                f"no labels from the folders {some}: {doubt}; --classes FILE overrides this"
            ]
        some = _some(names)
        notes = [f"labels from the folders, taken as classes: {some}; --drop label omits them"]
    else:
        return None, []
    numbers = {name: label for label, name in enumerate(names)}
    without = 0
    for name, files in sorted(splits.items()):
        if name in nested:
            files.labels = [numbers.get(_top(folder), -1) for folder in files.folders]
            unlabelled = [n for n, label in enumerate(files.labels) if label == -1]
            without += int(np.isin(files.folder_of, unlabelled).sum())
        elif name:
            notes.append(f"no labels in {name}: its texts are not in folders")
    if without:
        notes.append(f"documents without a class, whose label is -1: {without:,}")
    return names, notes


def _listed(
    path: Path,
    splits: Mapping[str, Files],
    classes: Sequence[str],
    tops: set[str],
    *,
    strict: bool,
) -> tuple[str, ...]:
    check_names(classes)
    for files in splits.values():
        if "" in files.folders:
            raise UsageError(
                "a list of classes needs a folder per class",
                path=path,
                found=_stray(files),
                fix="put the texts into folders, or name a column of labels with --label-column",
            )
    missing = sorted(tops - set(classes) - _UNLABELLED)
    if missing and strict:
        raise UsageError(
            f"the list of classes does not name the folder {missing[0]!r}",
            path=path,
            found=f"{len(missing)} folder(s) that are not listed",
            fix="add the name to the list, or move the folder away",
        )
    return (*classes, *missing)


def _doubts(
    splits: Mapping[str, Files], names: Sequence[str], empty: Sequence[str]
) -> Iterator[str]:
    """Yield the reasons why the folders may not be classes."""
    for files in splits.values():
        if "" in files.folders:
            yield f"{_stray(files)!r} is next to them"
        if deep := [folder for folder in files.folders if "/" in folder]:
            yield f"they contain folders, such as {deep[0]}/"
    if empty:
        yield f"{empty[0]}/ next to them contains no text"
    if len(names) < 2:
        yield "there is only one"
    for name in names:
        letters = re.sub(r"[\W\d_]", "", name).lower()
        if len(name) < 3 or _LANGUAGE.fullmatch(name) or letters in {"", *_PARTS}:
            yield f"{name}/ may be a language, a year or a part of a corpus"
    if len({re.sub(r"\d+", "", name) for name in names}) < len(names):
        yield "their names differ only in numbers"
    if len(names) > _FEW and len(names) >= sum(map(len, splits.values())):
        yield "each contains a single document"


def _stray(files: Files) -> str:
    """Return the name of a file that is not in a folder."""
    return str(files.names[files.folder_of.tolist().index(files.folders.index(""))])


def _top(path: str) -> str:
    return path.partition("/")[0]


def _some(names: Sequence[str]) -> str:
    return ", ".join(f"{name}/" for name in names[:5]) + ", ..." * (len(names) > 5)
