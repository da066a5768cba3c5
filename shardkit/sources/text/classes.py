"""Folders of texts that are classes: `pos/`, `neg/`, as IMDb's reviews have them.

Folders of images are classes by convention; those of texts are as often languages, years or parts
of a corpus. So they are classes if a list names them, or if all speaks for it: each text is a
document and lies in a folder of the first level, and these are called like classes.
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

# Of documents that have no class, whose label is -1.
_UNLABELLED = {"unsup", "unsupervised", "unlabeled", "unlabelled"}
# What parts of a corpus are called, in lower case.
_PARTS = {
    *("data", "text", "texts", "txt", "raw", "clean", "cleaned", "corpus", "corpora", "source"),
    *("docs", "documents", "document", "files", "file", "src", "output", "out", "extracted"),
    *("all", "other", "others", "misc", "extra", "main", "new", "old", "sample", "samples"),
    *("part", "parts", "shard", "shards", "chunk", "chunks", "batch", "original", "processed"),
}
_LANGUAGE = re.compile(r"[a-z]{2}([-_][a-z]{2,4})?", re.I)
_FEW = 10  # folders; more are classes only if there are more documents


@dataclass(frozen=True)
class FolderClasses:
    """The classes that folders are, and what was decided."""

    names: tuple[str, ...] | None  # None: folders are none
    notes: tuple[str, ...] = ()
    unlabelled: frozenset[str] = frozenset()  # splits whose texts lie in no folders

    def labels(self, split: str, files: Files) -> list[int | None]:
        """The label of each of the folders of a split; -1 for none."""
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
    """The classes that folders are, whose labels the files get.

    `every` has all folders of each split, also those without texts; `whole` says whether each file
    is a document. Raises UsageError where a list of classes does not fit.
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
    """The classes that a list names; unless `strict`, folders that it lacks come after them."""
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
    """The classes, if folders are clearly some; a note says what was decided."""
    flat = _flat(splits)
    nested = {name: files for name, files in splits.items() if name not in flat}
    tops = sorted({_top(f) for files in nested.values() for f in files.folders} - {""})
    if len(tops) < 2:
        return FolderClasses(None)
    names = tuple(name for name in tops if name not in _UNLABELLED)
    empty = {_top(f) for name in nested for f in every[name]} - {*tops, ""}
    doubt = next(_doubts(nested, names, sorted(empty)), None)
    if doubt is not None:
        words = f"no labels from the folders {_some(tops)}: {doubt}; --classes FILE takes them"
        return FolderClasses(None, (words,))
    said = f"labels from the folders, taken for classes: {_some(names)}; --drop label without"
    return FolderClasses(names, (said, *_notes(splits, names)), flat)


def _too_high(path: Path, splits: Mapping[str, Files]) -> tuple[str, ...]:
    """A note where all texts lie in what may be class folders, in one folder below."""
    folders = [folder for files in splits.values() for folder in files.folders]
    above = posixpath.commonpath(folders) if list(splits) == [""] and all(folders) else ""
    names = sorted({folder[len(above) + 1 :] for folder in folders})
    if not above or len(names) < 2 or "" in names or any("/" in name for name in names):
        return ()
    if next(_doubts({}, names, ()), None) is not None:
        return ()
    return (
        f"no labels: the folders {_some(names)} lie in {above}/, for labels give {path / above}",
    )


def _doubts(
    splits: Mapping[str, Files], names: Sequence[str], empty: Sequence[str]
) -> Iterator[str]:
    """Why folders may be no classes."""
    for files in splits.values():
        if "" in files.folders:
            yield f"{_stray(files)!r} lies beside them"
        if deep := [folder for folder in files.folders if "/" in folder]:
            yield f"there are folders in them, such as {deep[0]}/"
    if empty:
        yield f"{empty[0]}/ beside them holds no text"
    if len(names) < 2:
        yield "a single one is no choice"
    for name in names:
        letters = re.sub(r"[\W\d_]", "", name).lower()
        if len(name) < 3 or _LANGUAGE.fullmatch(name) or letters in {"", *_PARTS}:
            yield f"{name}/ may be a language, a year or a part"
    if len({re.sub(r"\d+", "", name) for name in names}) < len(names):
        yield "their names differ in numbers alone"
    if splits and len(names) > _FEW and len(names) >= sum(map(len, splits.values())):
        yield "each holds a single document"


def _notes(splits: Mapping[str, Files], names: Sequence[str]) -> tuple[str, ...]:
    notes = [
        f"no labels in {name}: its texts lie in no folders"
        for name in sorted(_flat(splits))
        if name
    ]
    without = 0
    for files in splits.values():
        of_none = [n for n, f in enumerate(files.folders) if _top(f) in _UNLABELLED - set(names)]
        without += int(np.isin(files.folder_of, of_none).sum())
    if without:
        notes.append(f"documents of no class, whose label is -1: {without:,}")
    return tuple(notes)


def _flat(splits: Mapping[str, Files]) -> frozenset[str]:
    """The splits whose texts lie in no folders."""
    return frozenset(name for name, files in splits.items() if set(files.folders) == {""})


def _stray(files: Files) -> str:
    """The name of a file in no folder."""
    return str(files.names[files.folder_of.tolist().index(files.folders.index(""))])


def _top(path: str) -> str:
    return path.partition("/")[0]


def _some(names: Sequence[str]) -> str:
    return ", ".join(f"{name}/" for name in names[:5]) + ", ..." * (len(names) > 5)
