"""The sources a conversion reads. `candidate` finds out which kind a path is.

Each imports only those on lines below its own:

    __init__
    shards
    annotated img2dataset pairs speech
    annotation_layouts folder_scan
    layouts text/
    api arrays/ exported metadata united volumes
    candidate image_folder inputs subset tables transcripts
    coco dataset duplicates file_table key_lists labels packages partitioned sequence
      text_files/ voc yolo
    annotations base columns conversations files imagenet
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardkit.dataset.dataset import Dataset
from shardkit.dataset.folders import common_folder
from shardkit.errors import UsageError, near
from shardkit.formats.table_folders import partitions
from shardkit.metadata.manifest import has_manifest
from shardkit.metadata.recipe import Recipe
from shardkit.options import ALL_FIELDS, Selection
from shardkit.schema import Schema
from shardkit.sources.base import WHOLE as WHOLE
from shardkit.sources.base import Source, Stream
from shardkit.sources.candidate import (
    Candidate,
    Splits,
    recognise,
    refuse_classes,
    refuse_metadata,
    with_labels,
)
from shardkit.sources.file_table import FileSource
from shardkit.sources.inputs import TABLES, TEXTS, Input, group_inputs, listed

if TYPE_CHECKING:
    from shardkit.sources.key_lists import KeyList

_NAMED = 20  # excluded fields that the summary names


def open_sources(
    source: str | os.PathLike[str] | Sequence[Any],
    recipe: Recipe | None = None,
    *,
    schema: Mapping[str, Any] | None = None,
    strict: bool = True,
    lists: Mapping[str, KeyList] = MappingProxyType({}),
) -> dict[str, Source | Stream]:
    """Open the sources of paths or a sequence, one per split; `{"": source}` without splits.

    `source` is a path, a glob pattern, a list of paths, patterns and datasets, which are united
    into one source, or a sequence of samples.

    The recipe selects the splits, samples, classes and fields, and says how text is read; `lists`
    are the key lists it refers to. Unless `strict`, the recipe may come from the conversion
    of another source: fields that this source lacks are ignored, and classes that the recipe does
    not name are appended to those it does. Raises UsageError if no field would be left.
    """
    recipe = recipe or Recipe("")
    several = listed(source)
    sources: dict[str, Source | Stream]
    if several is None:
        assert not isinstance(source, str | os.PathLike)
        refuse_metadata(recipe)
        sources = {**with_labels({WHOLE: _sequence(source, schema, recipe, strict)}, recipe)}
    elif schema is not None:
        raise UsageError("a schema is for Python sequences only: a path has its own schema")
    else:
        sources = _of_all(group_inputs(several), recipe, strict)
    if recipe.chooses or lists:
        from shardkit.sources.subset import choose

        sources = choose(sources, recipe, lists, strict)
    if recipe.split_column is not None:
        from shardkit.sources.subset import by_column

        sources = {**by_column(next(iter(sources.values())), recipe.split_column)}
    _narrow(sources, recipe.selection, strict)
    return sources


def _of_all(grouped: Sequence[Input], recipe: Recipe, strict: bool) -> dict[str, Source | Stream]:
    """Open the given sources, and unite them if there are several."""
    if isinstance(recipe.classes, Mapping) and strict:
        raise UsageError(
            "class names by field are for Python sequences only",
            fix="give a list of names for a folder; a dataset has its own class names",
        )
    shares = bool(recipe.splits) or recipe.split_column is not None
    how = replace(recipe, split="auto") if shares else recipe
    if len(grouped) > 1 and recipe.metadata is not None:
        raise UsageError(
            "a metadata table describes one folder, but several sources are given",
            found=", ".join(one.name for one in grouped[:5]),
            fix="convert each source on its own, then convert the resulting datasets together",
        )
    opened = {one.name: _opened(one, how, strict) for one in grouped}
    _check_partitions(grouped, opened)
    if len(grouped) == 1:
        found = opened[grouped[0].name]
    else:
        from shardkit.sources.united import unite

        found = unite(opened, recipe)
        if note := _of_siblings(grouped, opened):
            for source in found.values():
                source.notes = (*source.notes, note)
    if shares and len(found) > 1:
        raise UsageError(
            "the source already has splits, which splitting it again would mix",
            path=grouped[0].path,
            found=", ".join(found),
            fix="omit --split and --split-column to keep them, or convert and split one of them",
        )
    return {WHOLE: next(iter(found.values()))} if shares else {**found}


def _check_partitions(grouped: Sequence[Input], opened: Mapping[str, Splits]) -> None:
    """Refuse several folders such as `label=cat`, and note the columns that a single one names."""
    named: dict[str, str] = {}
    for one in grouped:
        path = common_folder(one.files) if len(one.files) > 1 else one.path
        if one.dataset is not None or not (partitions(path) or partitions(path.parent)):
            continue
        if has_manifest(one.path):
            continue
        path = path if path.is_dir() else path.parent
        for column, value in partitions(path).items():
            source = next(iter(opened[one.name].values()))
            if column in source.schema or column in source.others or isinstance(source, FileSource):
                continue
            if named.setdefault(column, value) != value:
                raise UsageError(
                    f"the column {column!r} is in the names of the folders, and would be lost",
                    path=path,
                    fix=f"give the folder of the whole table, {path.parent}, or one of the folders",
                )
            note = f"the column {column!r}, which the folder {path} names, is not stored"
            source.notes = (*source.notes, note)


def _of_siblings(grouped: Sequence[Input], opened: Mapping[str, Splits]) -> str:
    """Return a note for unlabelled folders with one parent folder: they may be meant as classes."""
    from shardkit.sources.image_folder import ImageFolder

    every = [source for splits in opened.values() for source in splits.values()]
    parents = {one.path.parent for one in grouped}
    if len(parents) > 1 or any(one.dataset is not None or one.kind is not None for one in grouped):
        return ""
    if not all(isinstance(source, ImageFolder) and not source.class_names for source in every):
        return ""
    return f"there are no labels: if the folders are classes, convert {parents.pop()} instead"


def _opened(grouped: Input, recipe: Recipe, strict: bool) -> Splits:
    if grouped.kind in (TEXTS, TABLES):
        from shardkit.sources.text import of_files

        return of_files(common_folder(grouped.files), recipe, strict, grouped.files)
    if grouped.dataset is None and grouped.kind is None:
        return recognise(Candidate(grouped.path, recipe, strict))
    from shardkit.sources.shards import of_dataset, of_shard_files

    refuse_metadata(recipe, grouped.path)
    refuse_classes(recipe, strict)
    if grouped.dataset is None:
        return with_labels(of_shard_files(grouped.files, recipe), recipe)
    return with_labels({WHOLE: of_dataset(grouped.dataset, recipe)}, recipe)


def _sequence(
    source: Sequence[Any], schema: Mapping[str, Any] | None, recipe: Recipe, strict: bool
) -> Source:
    from shardkit.sources.sequence import Rows, SequenceSource, is_table

    classes = recipe.classes if strict and recipe.label_column is None else None
    if isinstance(source, Dataset) and schema is None and classes is None:
        from shardkit.sources.shards import of_dataset

        return of_dataset(source, recipe)
    if isinstance(source, Mapping):
        source = Rows(source)
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")) or is_table(source):
        raise UsageError(
            "a source is a path, samples in a list, or another sequence with a length",
            found=type(source).__name__,
            fix="convert it to a list, or write it to a file; collect a lazy table",
        )
    return SequenceSource(source, None if schema is None else Schema(schema), classes)


def _narrow(sources: Mapping[str, Source | Stream], selection: Selection, strict: bool) -> None:
    """Exclude fields that are not selected; `sources` are the splits of one source."""
    known = dict.fromkeys(n for s in sources.values() for n in (*s.schema, *s.others))
    asked = (*(selection.fields or ()), *selection.drop)
    unknown = [name for name in asked if name not in known]
    if strict and unknown and (selection.fields or all(s.all_known for s in sources.values())):
        raise UsageError(
            f"there is no field {unknown[0]!r} in the source",
            expected=near(unknown[0], known),
            fix="use the field names of the source, before --rename",
        )
    left = [repr(name) for name in known if not selection.has(name)]
    if left:  # counted once, as files beside the splits are
        names = ", ".join(left[:_NAMED]) + (", ..." if len(left) > _NAMED else "")
        next(iter(sources.values())).ignored[f"fields dropped as asked: {names}"] = len(left)
    for source in sources.values():
        for name, error in source.others.items():
            if error is not None and selection.has(name):
                raise error
        if unknown:
            source.notes = (*source.notes, f"the first documents have no field {unknown[0]!r}")
        if selection != ALL_FIELDS:
            source.narrow(selection)
        if not source.schema:
            raise UsageError("no field of the source would be stored", found=", ".join(known))
