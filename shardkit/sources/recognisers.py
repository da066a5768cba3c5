"""Finds out which kind of source a path is, by asking one recogniser after the other.

A recogniser is a function of a `Candidate`. It returns the sources, by split, or None if the path
is of another kind. Another package adds one with an entry point in the group `shardkit.sources`
(docs/adding-a-source.md), which is asked about paths that none of the built-in ones reads.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardkit.dataset.folders import Contents, refuse_empty_splits, refuse_foreign
from shardkit.errors import FormatError, ShardkitError, SourceError, UsageError, warn
from shardkit.formats import unknown_format
from shardkit.helpers import os_errors
from shardkit.metadata.manifest import FOLDER
from shardkit.sources.base import WHOLE, Source, Stream
from shardkit.sources.candidate import Candidate, Splits
from shardkit.storage.walk import is_folder, scandir

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "shardkit.sources"
# In this order. Each is imported when it is asked.
_BUILT_IN = (
    "exported:recognise",  # what `shardkit export` wrote
    "shards:recognise_dataset",  # a file of a format, a folder with a manifest or index
    "text:recognise_file",  # text and tables
    "arrays.finding:recognise",  # MNIST, CIFAR, .npy, .npz, HDF5
    "recognisers:refuse_unclear",
    "shards:recognise_shards",  # without a manifest, also those of img2dataset
    "annotated:recognise",  # COCO, Pascal VOC
    "folder_scan:recognise",  # images, audio, video; ImageNet, LibriSpeech, Speech Commands
    "text:recognise_folder",
)


def recognise(candidate: Candidate) -> Splits:
    """The sources of a path, by split; raises an error that says why there are none."""
    for name in _BUILT_IN:
        module, _, function = name.partition(":")
        found: Splits | None
        found = getattr(importlib.import_module(f"shardkit.sources.{module}"), function)(candidate)
        if found is not None:
            return found
    found = _of_packages(candidate)
    if found is not None:
        return found
    if not candidate.is_folder:
        raise unknown_format(candidate.path)
    from shardkit.sources.folder_scan import no_images

    raise no_images(candidate.path, candidate.contents.ignored)


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
        refuse_foreign(contents)
    except FormatError:
        if found := _of_packages(candidate):
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


# --- other packages ------------------------------------------------------------------------------


@functools.cache
def _entry_points() -> list[EntryPoint]:
    import importlib.metadata  # slow, and rarely needed

    return sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda one: one.name)


def _of_packages(candidate: Candidate) -> Splits | None:
    """The sources of a path that the recogniser of another package reads."""
    for entry in _entry_points():
        try:
            recogniser = entry.load()
        except Exception as error:
            warn(str(_broken(entry, f"{type(error).__name__}: {error}")))
            continue
        try:
            found = recogniser(candidate)
        except (ShardkitError, MemoryError):
            raise
        except Exception as error:
            raise _broken(entry, f"{type(error).__name__}: {error}", candidate) from error
        if found is not None:
            return _checked(entry, found, candidate)
    return None


def _checked(entry: EntryPoint, found: Any, candidate: Candidate) -> Splits:
    """What a recogniser returned, as sources by split, with the labels that the user asked for."""
    sources: Any = {WHOLE: found} if isinstance(found, Source | Stream) else found
    every = list(sources.values()) if isinstance(sources, Mapping) else [sources]
    other = next((one for one in every if not isinstance(one, Source | Stream)), None)
    if other is not None or not every:
        raise _broken(entry, "no sources" if other is None else type(other).__name__, candidate)
    candidate.refuse_options()
    if candidate.together and list(sources) != [WHOLE]:
        raise UsageError(
            f"the splits of a source of the kind {entry.name!r} cannot be taken as one dataset",
            path=candidate.path,
            found=", ".join(sources),
            fix="omit --split none",
        )
    if candidate.recipe.label_column is not None and any(isinstance(s, Stream) for s in every):
        raise UsageError(
            f"a source of the kind {entry.name!r} cannot have a label column",
            path=candidate.path,
            fix="omit --label-column, or convert the resulting dataset with it",
        )
    return candidate.labelled(sources)


def _broken(entry: EntryPoint, found: str, candidate: Candidate | None = None) -> SourceError:
    package = entry.dist.name if entry.dist is not None else entry.value
    return SourceError(
        f"the source {entry.name!r} of the package {package} failed",
        path=None if candidate is None else candidate.path,
        expected=f"a function {entry.value} that returns sources by split, or None",
        found=found,
        fix=f"install another version of {package}, or uninstall it",
    )
