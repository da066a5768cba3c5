"""Sources: what a conversion reads. `open_sources` finds out which one a path is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardkit import storage
from shardkit.errors import UsageError
from shardkit.folders import Contents, is_pattern, look_into, refuse_foreign
from shardkit.formats import format_of, unknown_format
from shardkit.formats.foreign import kind_of_file
from shardkit.incomplete import without_manifest
from shardkit.manifest import FOLDER, has_manifest
from shardkit.options import ALL_FIELDS, Selection
from shardkit.recipe import Recipe
from shardkit.remote.path import RemotePath
from shardkit.schema import ClassNames, Schema
from shardkit.sources.base import Source, Stream
from shardkit.splits import check_card
from shardkit.walk import is_folder, scandir

# The name of the only dataset of a conversion without splits.
WHOLE = ""


def open_sources(
    source: str | os.PathLike[str] | Sequence[Any],
    recipe: Recipe | None = None,
    *,
    schema: Mapping[str, Any] | None = None,
    strict: bool = True,
) -> dict[str, Source | Stream]:
    """The sources behind a path or a sequence, one per split; `{"": source}` without splits.

    The recipe says which splits, classes and fields they have, and how text is read. Unless
    `strict`, it may be that of a dataset that another source was converted to: fields that this one
    does not have are passed over, and classes that are not named come after those that are.
    Raises UsageError where no field would be left.
    """
    recipe = recipe or Recipe("")
    if isinstance(source, str | os.PathLike):
        if schema is not None:
            raise UsageError("a schema is for Python sequences: a path has its own")
        sources = _of_path(storage.source(source), recipe, strict)
    else:
        sources = {WHOLE: _sequence(source, schema, recipe.classes if strict else None)}
    _narrow(sources, recipe.selection, strict)
    return sources


def _sequence(
    source: Sequence[Any], schema: Mapping[str, Any] | None, classes: ClassNames | None
) -> Source:
    from shardkit.dataset import Dataset
    from shardkit.sources.dataset import DatasetSource
    from shardkit.sources.sequence import SequenceSource

    if isinstance(source, Dataset) and schema is None and classes is None:
        return DatasetSource(source)
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise UsageError(
            "a source is a path, or a sequence of samples with a length",
            found=f"{type(source).__name__}, which does not say how many samples it gives",
            fix="make a list of it, or write its samples one by one with shardkit.create",
        )
    return SequenceSource(source, None if schema is None else Schema(schema), classes)


def _of_path(path: Path, recipe: Recipe, strict: bool) -> dict[str, Source | Stream]:
    if isinstance(recipe.classes, Mapping) and strict:
        raise UsageError(
            "class names by field are for Python sequences",
            fix="give a list of names for a folder; a dataset has names of its own",
        )
    if recipe.split in ("auto", "none"):
        return _found_at(path, recipe, strict)
    found = _found_at(path, replace(recipe, split="auto"), strict)
    if len(found) > 1:
        raise UsageError(
            "the source has splits of its own, which shares would mix",
            path=path,
            found=", ".join(found),
            fix="leave --split away to keep them, or split one of them",
        )
    return {WHOLE: next(iter(found.values()))}


def _found_at(path: Path, recipe: Recipe, strict: bool) -> dict[str, Source | Stream]:
    if isinstance(path, RemotePath) and path.store.lists:
        path = path.listed()
    try:
        folder = path.is_dir()
        path.stat()
    except OSError as error:
        if not is_pattern(path):
            raise storage.explain(error, "read the source", path) from error
        return _datasets(path, recipe, strict)
    if not folder:
        if format_of(path) is None or kind_of_file(path) is not None:
            return _loose(path, None, recipe, strict)
        return _datasets(path, recipe, strict)
    if path.name == FOLDER:
        raise unknown_format(path)
    if _is_dataset(path):
        return _datasets(path, recipe, strict)
    from shardkit.sources.text.names import parse_name

    found = look_into(path, lambda name: parse_name(name) is not None)
    if found.shards:
        _refuse_beside(found)
    refuse_foreign(found)
    if found.shards:
        return _datasets(path, recipe, strict)
    sources = _loose(path, found, recipe, strict)
    if recipe.split == "auto":
        check_card(path, [name for name in sources if name != WHOLE])
    return sources


def _loose(
    path: Path, found: Contents | None, recipe: Recipe, strict: bool
) -> dict[str, Source | Stream]:
    """Files of images or of text; text beside images belongs to them.

    `found` is what is in a folder, None for a file.
    """
    from shardkit.sources.folder_scan import no_images, scan_folder
    from shardkit.sources.text.names import parse_name

    if found is not None and found.image_files:
        classes = None if isinstance(recipe.classes, Mapping) else recipe.classes
        return {**scan_folder(path, split=recipe.split, classes=classes, strict=strict)}
    if found.text_files if found is not None else parse_name(path.name):
        if recipe.classes is not None and strict:
            raise UsageError("--classes is for folders of images", path=path, found="text")
        from shardkit.sources.text.scan import open_text  # much, and nothing that images need

        return open_text(path, recipe.documents, split=recipe.split, selection=recipe.selection)
    if found is None:
        raise unknown_format(path)
    raise no_images(path, found.ignored)


def _datasets(path: Path, recipe: Recipe, strict: bool) -> dict[str, Source | Stream]:
    from shardkit.opening import open_splits
    from shardkit.sources.dataset import DatasetSource

    if recipe.classes is not None and strict:
        raise UsageError("class names come from the dataset; --classes is for folders")
    found = open_splits(path, together=recipe.split == "none", partly=True)
    if recipe.split == "none" and list(found) != [WHOLE]:
        raise UsageError(
            "a folder with a dataset for each split cannot be taken as one dataset",
            path=path,
            found=", ".join(found),
            fix="leave --split none away, or convert one of them",
        )
    sources: dict[str, Source | Stream] = {n: DatasetSource(d) for n, d in found.items()}
    lost = without_manifest(path, found.values())
    if lost is not None:
        note = f"{lost.what} ({lost.found}), so that nothing tells whether it is whole"
        for source in sources.values():
            source.notes = (*source.notes, note)
    return sources


def _narrow(sources: Mapping[str, Source | Stream], selection: Selection, strict: bool) -> None:
    """Leave out the fields that are not selected, of sources that are the splits of one."""
    known = dict.fromkeys(n for s in sources.values() for n in (*s.schema, *s.others))
    asked = (*(selection.fields or ()), *selection.drop)
    unknown = [name for name in asked if name not in known]
    if strict and unknown and (selection.fields or all(s.all_known for s in sources.values())):
        raise UsageError(
            f"there is no field {unknown[0]!r} in the source",
            expected="some of " + ", ".join(known),
            fix="names of fields are those of the source, before --rename",
        )
    for source in sources.values():
        for name, error in source.others.items():
            if error is not None and selection.has(name):
                raise error
        if unknown:
            source.notes = (*source.notes, f"not among the first documents: {unknown[0]!r}")
        if selection != ALL_FIELDS:
            source.narrow(selection)
        if not source.schema:
            raise UsageError("no field of the source would be stored", found=", ".join(known))


def _is_dataset(folder: Path) -> bool:
    """Whether a folder is a dataset with a manifest, of ours or another kind, or unfinished."""
    unfinished = (folder / "job.json").is_file() and (folder / "tasks").is_dir()
    saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    return unfinished or saved or has_manifest(folder)


def _refuse_beside(found: Contents) -> None:
    """Raise UsageError for a folder of shards that holds images or other folders as well."""
    beside = list(found.images)
    if found.at_top:
        with storage.explained("list", found.root), scandir(found.root) as entries:
            beside += [e.name for e in entries if e.name[0] != "." and is_folder(e)]
        itself = {FOLDER, *(name.partition("/")[0] for name in found.shards)}
        beside = [name for name in beside if name not in itself]
    if beside:
        raise UsageError(
            "the folder holds both shards and what may be images",
            path=found.root,
            found=f"{min(found.shards)!r} beside {beside[0]!r}",
            fix="move one of them away, or give the shard, or the folder that holds either alone",
        )
