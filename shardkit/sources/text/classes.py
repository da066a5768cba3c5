"""Folders of texts as classes: `pos/` and `neg/`, as in the IMDb reviews.

Folders of images are classes by convention, but folders of texts are just as often languages,
years or parts of a corpus. They are taken as classes only if a list names them, or if everything
suggests it: each file is a document in a top-level folder, and the names look like classes.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardkit.errors import UsageError
from shardkit.sources.labels import check_names
from shardkit.sources.metadata import Labelling
from shardkit.sources.text.files import Files

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


@dataclass(frozen=True)
class FolderClasses:
    """The classes given by folders, and notes on what was decided."""

    names: tuple[str, ...] | None  # None: folders are not classes
    notes: tuple[str, ...] = ()
    unlabelled: frozenset[str] = frozenset()  # splits whose texts are not in folders

    def labels(self, split: str, files: Files) -> list[int | None]:
        """Return the label of each folder of a split; -1 for folders without a class."""
        if self.names is None or split in self.unlabelled:
            return []
        number = {name: label for label, name in enumerate(self.names)}
        return [number.get(_top(folder), -1) for folder in files.folders]


def folder_classes(
    path: Path,
    splits: Mapping[str, Files],
    every: Mapping[str, Iterable[str]],
    labelling: Labelling,
    *,
    whole: bool,
) -> FolderClasses:
    """Determine the classes given by folders, and set the labels of the files.

    `every` lists all folders of each split, including those without texts; `whole` says whether
    each file is a document. Raises UsageError if a list of classes does not fit.
    """
    classes = FolderClasses(None)
    if labelling.classes is not None:
        classes = _listed(path, splits, labelling.classes, strict=labelling.strict)
    elif labelling.guess and whole:
        classes = _found(splits, every)
        if classes.names is None and not classes.notes:
            classes = FolderClasses(None, _too_high(path, splits))
    for name, files in splits.items():
        files.labels = classes.labels(name, files)
    return classes


def _listed(
    path: Path, splits: Mapping[str, Files], classes: Sequence[str], *, strict: bool
) -> FolderClasses:
    """Return the listed classes; unless `strict`, folders that are not listed are appended."""
    check_names(classes)
    flat = _flat(splits)
    for name, files in splits.items():
        if "" in files.folders and (name not in flat or len(flat) == len(splits)):
            raise UsageError(
                "a list of classes needs a folder per class",
                path=path,
                found=_stray(files),
                fix="put the texts into folders, or name a column of labels with --label-column",
            )
    found = {_top(folder) for files in splits.values() for folder in files.folders} - {""}
    missing = sorted(found - set(classes) - _UNLABELLED)
    if missing and strict:
        raise UsageError(
            f"the list of classes does not name the folder {missing[0]!r}",
            path=path,
            found=f"{len(missing)} folder(s) that are not listed",
            fix="add the name to the list, or move the folder away",
        )
    names = (*classes, *missing)
    return FolderClasses(names, _notes(splits, names), flat)


def _found(splits: Mapping[str, Files], every: Mapping[str, Iterable[str]]) -> FolderClasses:
    """Return the classes if the folders clearly are classes; a note says what was decided."""
    flat = _flat(splits)
    nested = {name: files for name, files in splits.items() if name not in flat}
    tops = sorted({_top(f) for files in nested.values() for f in files.folders} - {""})
    if len(tops) < 2:
        return FolderClasses(None)
    names = tuple(name for name in tops if name not in _UNLABELLED)
    empty = {_top(f) for name in nested for f in every[name]} - {*tops, ""}
    doubt = next(_doubts(nested, names, sorted(empty)), None)
    if doubt is not None:
        words = f"no labels from the folders {_some(tops)}: {doubt}; --classes FILE overrides this"
        return FolderClasses(None, (words,))
    said = f"labels from the folders, taken as classes: {_some(names)}; --drop label omits them"
    return FolderClasses(names, (said, *_notes(splits, names)), flat)


def _too_high(path: Path, splits: Mapping[str, Files]) -> tuple[str, ...]:
    """Return a note if all texts are in folders that may be classes, inside one common folder."""
    folders = [folder for files in splits.values() for folder in files.folders]
    above = posixpath.commonpath(folders) if list(splits) == [""] and all(folders) else ""
    names = sorted({folder[len(above) + 1 :] for folder in folders})
    if not above or len(names) < 2 or "" in names or any("/" in name for name in names):
        return ()
    if next(_doubts({}, names, ()), None) is not None:
        return ()
    return (
        f"no labels: the folders {_some(names)} are in {above}/; for labels, give {path / above}",
    )


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
    if splits and len(names) > _FEW and len(names) >= sum(map(len, splits.values())):
        yield "each contains a single document"


def _notes(splits: Mapping[str, Files], names: Sequence[str]) -> tuple[str, ...]:
    notes = [
        f"no labels in {name}: its texts are not in folders"
        for name in sorted(_flat(splits))
        if name
    ]
    without = 0
    for files in splits.values():
        of_none = [n for n, f in enumerate(files.folders) if _top(f) in _UNLABELLED - set(names)]
        without += int(np.isin(files.folder_of, of_none).sum())
    if without:
        notes.append(f"documents without a class, whose label is -1: {without:,}")
    return tuple(notes)


def _flat(splits: Mapping[str, Files]) -> frozenset[str]:
    """Return the splits whose texts are not in folders."""
    return frozenset(name for name, files in splits.items() if set(files.folders) == {""})


def _stray(files: Files) -> str:
    """Return the name of a file that is not in a folder."""
    return str(files.names[files.folder_of.tolist().index(files.folders.index(""))])


def _top(path: str) -> str:
    return path.partition("/")[0]


def _some(names: Sequence[str]) -> str:
    return ", ".join(f"{name}/" for name in names[:5]) + ", ..." * (len(names) > 5)
