"""A path that may be a source, and the recognisers that are asked, in turn, what it is.

A recogniser is a function of a `Candidate`. It returns the sources, by split, or None if the path
is of another kind. Another package adds one with an entry point in the group `shardkit.sources`
(docs/adding-a-source.md), which is asked before those of loose files.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from shardkit.codecs.image import SUFFIXES
from shardkit.dataset.card import named_subset
from shardkit.dataset.find import unreadable
from shardkit.dataset.folders import (
    Contents,
    look_into,
    refuse_empty_splits,
    refuse_unsupported,
    skipped_media,
)
from shardkit.errors import FormatError, SourceError, UsageError, warn
from shardkit.formats import unknown_format
from shardkit.formats.unsupported import way_with
from shardkit.helpers import os_errors
from shardkit.helpers.extras import entry_points, package_of
from shardkit.metadata.manifest import FOLDER
from shardkit.metadata.recipe import Recipe
from shardkit.sources.base import WHOLE, Source, Stream
from shardkit.sources.packages import Package, packaged
from shardkit.sources.text_files import parse_name
from shardkit.storage import fs
from shardkit.storage.remote.path import RemotePath
from shardkit.storage.walk import is_folder, relative_to, scandir

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Splits: TypeAlias = "Mapping[str, Source | Stream]"  # by name; `WHOLE` without splits

ENTRY_POINTS = "shardkit.sources"
# In this order. Each is imported when it is asked.
_BUILT_IN = (
    "exported:recognise",  # what `shardkit export` wrote
    "shards:recognise_dataset",  # a file of a format, a folder with a manifest or index
    "text:recognise_file",  # text and tables
    "arrays.finding:recognise",  # MNIST, CIFAR, .npy, .npz, HDF5
    "candidate:refuse_unclear",
    "shards:recognise_shards",  # without a manifest, also those of img2dataset
    "candidate:of_packages",
    "pairs:recognise_asked",
    "annotated:recognise",  # COCO, Pascal VOC
    "speech:recognise",  # Speech Commands
    "pairs:recognise",  # folders of images and masks, of input and target
    "img2dataset:recognise",  # loose files
    "folder_scan:recognise",  # images, audio, video; ImageNet, LibriSpeech
    "text:recognise_folder",
)


@dataclass
class Candidate:
    """A file or folder for which recognisers are asked whether it is of their kind.

    path: it may be given as `FOLDER#SUBSET`, and is without the subset afterwards.
    is_folder: whether it is a folder.
    recipe: the options of the conversion, which shardkit itself applies to sources.
    strict: whether they were given for this source, not for another one that it is compared with.
    """

    path: Path
    recipe: Recipe
    strict: bool = True

    def __post_init__(self) -> None:
        self.path, self.subset = named_subset(self.path)
        if isinstance(self.path, RemotePath) and self.path.store.lists:
            self.path = self.path.listed()
        try:
            self.is_folder = self.path.is_dir()
            self.path.stat()
        except OSError as error:
            raise unreadable(error, "read the source", self.path) from error

    @property
    def together(self) -> bool:
        """Whether the user wants one dataset of all splits."""
        return self.recipe.split == "none"

    @cached_property
    def contents(self) -> Contents:
        """What is in a folder, by kind: `images` (one of each folder), `media` (counts), ..."""
        table = None if self.recipe.metadata is None else fs.source(self.recipe.metadata)
        own = None if table is None else relative_to(table, self.path)
        return look_into(self.path, lambda name: parse_name(name) is not None, own)

    def refuse_options(self) -> None:
        """Raise UsageError for a table of metadata, and for class names without a column."""
        refuse_metadata(self.recipe, self.path)
        refuse_classes(self.recipe, self.strict)

    def labelled(self, sources: Splits) -> Splits:
        """Return the sources, with labels made from the fields that options name, if any.

        Raises UsageError if they are to be made from a stream.
        """
        if not self.recipe.has_label_column:
            return sources
        known = {name: source for name, source in sources.items() if isinstance(source, Source)}
        if len(known) < len(sources):
            raise UsageError(
                "a stream of samples cannot have a label column",
                path=self.path,
                fix="omit --label-column, or convert the resulting dataset with it",
            )
        return with_labels(known, self.recipe)

    def noted(self, sources: Splits) -> Splits:
        """Return the sources of loose files, with notes on files of other kinds beside them."""
        first = next(iter(sources.values()))
        first.notes = (*first.notes, *skipped_media(self.contents))
        return sources


# --- options that not every source has -----------------------------------------------------------


def refuse_metadata(recipe: Recipe, path: Path | None = None) -> None:
    """Raise UsageError if a metadata table is given for a source without loose files."""
    if recipe.metadata is not None:
        raise UsageError(
            "a metadata table is for folders of images, audio or video, or of text files with one"
            " document each",
            path=path,
            fix="omit --metadata; to use a column of the source, name it with --label-column",
        )


def refuse_classes(recipe: Recipe, strict: bool) -> None:
    """Raise UsageError if class names are given for a source that has its own."""
    if recipe.classes is not None and strict and recipe.label_column is None:
        raise UsageError(
            "class names come from the dataset; --classes is for folders",
            fix="name the field that --classes applies to: --label-column NAME",
        )


def with_labels(sources: Mapping[str, Source], recipe: Recipe) -> Splits:
    """Return the sources, with labels made from the fields that options name, if any."""
    from shardkit.sources.labels import LabelColumn, labelled

    asked = LabelColumn.of(recipe)
    return sources if asked is None else labelled(sources, asked)


# --- recognisers ---------------------------------------------------------------------------------


def recognise(candidate: Candidate) -> Splits:
    """Return the sources of a path, by split; raises an error that says why there are none."""
    for name in _BUILT_IN:
        module, _, function = name.partition(":")
        found: Splits | None
        found = getattr(importlib.import_module(f"shardkit.sources.{module}"), function)(candidate)
        if found is not None:
            return found
    if not candidate.is_folder:
        raise unknown_format(candidate.path)
    raise no_images(candidate.path, candidate.contents.ignored)


def no_images(root: Path, ignored: Counter[str]) -> SourceError:
    """Return the error for a folder without anything to convert."""
    return SourceError(
        "there are no images and no text in this folder",
        path=root,
        expected="files that end in "
        + ", ".join("." + suffix for suffix in SUFFIXES)
        + ", .wav, .mp4, .npy, .dcm, .nii, .txt, .jsonl, .csv, ...",
        found=", ".join(f"{n} x {what}" for what, n in ignored.most_common(4)) or "nothing",
        fix=way_with(ignored)
        or "give the folder that holds the class folders, or the images themselves"
        + ("; if they are DICOM, name them *.dcm" if ignored["file without suffix"] else ""),
    )


def refuse_unclear(candidate: Candidate) -> Splits | None:
    """Raise an error for a folder if it is not clear what its samples are.

    Data that only another package reads are its sources.
    """
    if not candidate.is_folder:
        return None
    contents = candidate.contents
    if contents.shards:
        _refuse_beside(contents)
    try:
        refuse_unsupported(contents)
    except FormatError:
        if found := of_packages(candidate):
            return found
        raise
    if candidate.recipe.split == "auto":
        refuse_empty_splits(contents)
    return None


def _refuse_beside(found: Contents) -> None:
    """Raise UsageError for a folder that holds images or other folders beside its shards."""
    others = list(found.images)
    if found.at_top and not found.listed:
        with os_errors.explained("list", found.root), scandir(found.root) as entries:
            others += [e.name for e in entries if e.name[0] != "." and is_folder(e)]
        itself = {FOLDER, *(name.partition("/")[0] for name in found.shards)}
        others = [name for name in others if name not in itself]
    if others:
        raise UsageError(
            "the folder holds both shards and what may be images",
            path=found.root,
            found=f"{min(found.shards)!r} beside {others[0]!r}",
            fix="move one of the two elsewhere, or give the path of the shards or images only",
        )


def _entry_points() -> list[EntryPoint]:
    return sorted(entry_points(ENTRY_POINTS), key=lambda one: one.name)


def of_packages(candidate: Candidate) -> Splits | None:
    """Return the sources of a path that the recogniser of another package reads."""
    for entry in () if candidate.subset else _entry_points():  # which are not asked for a subset
        package = Package(entry.name, package_of(entry), entry.value)
        what = f"a function {entry.value} that returns sources by split, or None"
        try:
            with package.named(what):
                recogniser = entry.load()
        except SourceError as error:
            warn(str(error))
            continue
        with package.named(what, path=candidate.path):
            found = recogniser(candidate)
            if found is None:
                continue
            sources = {WHOLE: found} if isinstance(found, Source | Stream) else dict(found)
            if not sources or not all(isinstance(s, Source | Stream) for s in sources.values()):
                raise TypeError(f"it returned {found!r:.100}")
        candidate.refuse_options()
        if candidate.together and list(sources) != [WHOLE]:
            raise UsageError(
                f"the splits of a source of the kind {entry.name!r} cannot be taken as one dataset",
                path=candidate.path,
                found=", ".join(sources),
                fix="omit --split none",
            )
        return candidate.labelled(packaged(sources, package))
    return None
