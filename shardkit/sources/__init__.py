"""The sources a conversion reads. `open_sources` detects which kind a path is.

Each imports only those on lines below its own:

    __init__
    annotated
    folder_scan
    img2dataset speech split_folders text/
    image_folder metadata
    file_table subset
    arrays/ dataset duplicates exported key_lists labelled packed_names sequence united
    base coco file_metadata inputs labels tables voc
    annotations columns companions file_names files imagenet layouts prepared quotes
      requested
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from shardkit.codecs.media import IMAGES
from shardkit.dataset.card import check_images, named_subset
from shardkit.dataset.conditions import names_in
from shardkit.dataset.dataset import Dataset
from shardkit.dataset.folders import (
    Contents,
    common_folder,
    look_into,
    media_of,
    refuse_empty_splits,
    refuse_foreign,
    skipped_media,
)
from shardkit.dataset.incomplete import without_manifest
from shardkit.errors import SourceError, UsageError, near
from shardkit.formats import FORMATS, format_of, unknown_format
from shardkit.formats.table_folders import partitions
from shardkit.formats.unsupported import kind_of_file
from shardkit.helpers import os_errors
from shardkit.helpers.indices import array
from shardkit.metadata.manifest import FOLDER, has_manifest
from shardkit.metadata.recipe import Recipe
from shardkit.options import ALL_FIELDS, Selection
from shardkit.schema import Schema
from shardkit.sources.base import Source, Stream
from shardkit.sources.companions import beside
from shardkit.sources.exported import open_exported, read_about
from shardkit.sources.file_table import FileSource
from shardkit.sources.inputs import TABLES, TEXTS, Given, gathered, listed
from shardkit.storage import fs
from shardkit.storage.remote.path import RemotePath
from shardkit.storage.walk import is_folder, relative_to, scandir

if TYPE_CHECKING:
    from shardkit.sources.key_lists import KeyList

# Name of the single dataset of a conversion without splits.
WHOLE = ""
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
        _refuse_metadata(None, recipe)
        sources = {**_with_labels({WHOLE: _sequence(source, schema, recipe, strict)}, recipe)}
    elif schema is not None:
        raise UsageError("a schema is for Python sequences only: a path has its own schema")
    else:
        sources = _of_all(gathered(several), recipe, strict)
    if recipe.chooses or lists:
        from shardkit.sources.subset import choose

        sources = choose(sources, recipe, lists, strict)
    _narrow(sources, recipe.selection, strict)
    return sources


def _of_all(given: Sequence[Given], recipe: Recipe, strict: bool) -> dict[str, Source | Stream]:
    """Open the given sources, and unite them if there are several."""
    if isinstance(recipe.classes, Mapping) and strict:
        raise UsageError(
            "class names by field are for Python sequences only",
            fix="give a list of names for a folder; a dataset has its own class names",
        )
    shares = bool(recipe.splits)
    how = replace(recipe, split="auto") if shares else recipe
    if len(given) > 1 and recipe.metadata is not None:
        raise UsageError(
            "a metadata table describes one folder, but several sources are given",
            found=", ".join(one.name for one in given[:5]),
            fix="convert each source on its own, then convert the resulting datasets together",
        )
    opened = {one.name: _opened(one, how, strict) for one in given}
    _check_partitions(given, opened)
    if len(given) == 1:
        found = opened[given[0].name]
    else:
        from shardkit.sources.united import unite

        found = unite(opened, recipe)
        if note := _of_siblings(given, opened):
            for source in found.values():
                source.notes = (*source.notes, note)
    if shares and len(found) > 1:
        raise UsageError(
            "the source already has splits, which splitting by shares would mix",
            path=given[0].path,
            found=", ".join(found),
            fix="omit --split to keep them, or convert and split one of them",
        )
    return {WHOLE: next(iter(found.values()))} if shares else found


def _check_partitions(
    given: Sequence[Given], opened: Mapping[str, Mapping[str, Source | Stream]]
) -> None:
    """Refuse several folders such as `label=cat`, and note the columns that a single one names."""
    named: dict[str, str] = {}
    for one in given:
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


def _of_siblings(
    given: Sequence[Given], opened: Mapping[str, Mapping[str, Source | Stream]]
) -> str:
    """A note for unlabelled folders with one parent folder: they may be meant as classes."""
    from shardkit.sources.image_folder import ImageFolder

    every = [source for splits in opened.values() for source in splits.values()]
    parents = {one.path.parent for one in given}
    if len(parents) > 1 or any(one.dataset is not None or one.kind is not None for one in given):
        return ""
    if not all(isinstance(source, ImageFolder) and not source.class_names for source in every):
        return ""
    return f"there are no labels: if the folders are classes, convert {parents.pop()} instead"


def _opened(given: Given, recipe: Recipe, strict: bool) -> dict[str, Source | Stream]:
    if given.kind in (TEXTS, TABLES):
        return _text(common_folder(given.files), recipe, strict, given.files)
    if given.dataset is None and given.kind is None:
        return _exported(given.path, recipe, strict) or _found_at(given.path, recipe, strict)
    from shardkit.dataset.find import open_files
    from shardkit.sources.dataset import DatasetSource

    _refuse_classes(recipe, strict)
    if given.dataset is not None:
        return {**_with_labels({WHOLE: _dataset(given.dataset, recipe)}, recipe)}
    found = open_files(given.files, together=recipe.split == "none")
    return {**_with_labels({n: DatasetSource(dataset) for n, dataset in found.items()}, recipe)}


def _with_labels(sources: Mapping[str, Source], recipe: Recipe) -> Mapping[str, Source]:
    """The sources, with a label made from the field that `label_column` names, if any."""
    if recipe.label_column is None:
        return sources
    from shardkit.sources.labelled import labelled
    from shardkit.sources.labels import Asked

    asked = Asked.of(recipe)
    return sources if asked is None else labelled(sources, asked)


def _dataset(dataset: Dataset, recipe: Recipe) -> Source:
    """An open dataset, or a view of one."""
    from shardkit.dataset.concatenated import Concatenated
    from shardkit.sources.dataset import DatasetSource

    if dataset.transform is not None:
        raise UsageError(
            "a dataset with transforms cannot be converted",
            path=dataset.place,
            fix="open it without transforms, or pass transform= to the conversion instead",
        )
    if dataset.indices is not None and not len(dataset):
        raise SourceError("the view has no samples", path=dataset.place)
    if isinstance(dataset, Concatenated):
        from shardkit.sources.united import unite, view_of

        named = zip(gathered(dataset.parts), dataset.parts, strict=True)
        parts = {one.name: {WHOLE: _dataset(part, recipe)} for one, part in named}
        united = unite(parts, recipe)[WHOLE]
        assert isinstance(united, Source)
        return united if dataset.indices is None else view_of(united, dataset.indices)
    if dataset.sequence is not None:
        from shardkit.sources.sequence import SequenceSource

        chosen = None if dataset.indices is None else array(dataset.indices)
        samples = cast("Sequence[Any]", dataset.sequence)
        return SequenceSource(samples, dataset.schema, dataset.class_names, chosen)
    return DatasetSource(dataset)


def _sequence(
    source: Sequence[Any], schema: Mapping[str, Any] | None, recipe: Recipe, strict: bool
) -> Source:
    from shardkit.sources.sequence import SequenceSource

    classes = recipe.classes if strict and recipe.label_column is None else None
    if isinstance(source, Dataset) and schema is None and classes is None:
        return _dataset(source, recipe)
    if isinstance(source, Mapping) or (hasattr(source, "columns") and hasattr(source, "shape")):
        raise UsageError(
            "a source is a path, or a sequence of samples",
            found=f"{type(source).__name__}, which is a table of columns",
            fix="give its rows: table.to_dict('records') of pandas, table.to_pylist() of pyarrow,"
            " or [dict(zip(columns, row)) for row in zip(*columns.values())]",
        )
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise UsageError(
            "a source is a path, or a sequence of samples with a length",
            found=f"{type(source).__name__}, which has no length",
            fix="convert it to a list, or write its samples one by one with shardkit.create",
        )
    return SequenceSource(source, None if schema is None else Schema(schema), classes)


def _exported(path: Path, recipe: Recipe, strict: bool) -> dict[str, Source | Stream] | None:
    """The splits of a folder that `shardkit export` wrote; None for any other path."""
    about = read_about(path)
    if about is None:
        return None
    _refuse_metadata(path, recipe)
    _refuse_classes(recipe, strict)
    return {**_with_labels(open_exported(path, about), recipe)}


def _found_at(given: Path, recipe: Recipe, strict: bool) -> dict[str, Source | Stream]:
    path, subset = named_subset(given)
    if isinstance(path, RemotePath) and path.store.lists:
        given = path = path.listed()
    try:
        folder = path.is_dir()
        path.stat()
    except OSError as error:
        from shardkit.dataset.find import unreadable

        raise unreadable(error, "read the source", path) from error
    if not folder:
        if format_of(path) is None or kind_of_file(path) is not None:
            return _loose(path, None, recipe, strict)
        return _datasets(path, recipe, strict)
    if path.name == FOLDER:
        raise unknown_format(path)
    if _is_dataset(path):
        return _datasets(path, recipe, strict)
    from shardkit.sources.file_names import parse_name

    table = None if recipe.metadata is None else fs.source(recipe.metadata)
    own = None if table is None else relative_to(table, path)
    found = look_into(path, lambda name: parse_name(name) is not None, own)
    arrays = _arrays(path, found, recipe, strict)
    if arrays is not None:
        return arrays
    if found.shards:
        _refuse_beside(found)
    refuse_foreign(found)
    if recipe.split == "auto":
        refuse_empty_splits(found)
    if found.shards:
        return _datasets(given, recipe, strict)
    sources = _loose(path, found, recipe, strict, subset)
    first = next(iter(sources.values()))
    first.notes = (*first.notes, *skipped_media(found))
    return sources


def _refuse_metadata(path: Path | None, recipe: Recipe) -> None:
    """Raise UsageError if a metadata table is given for a source without loose files."""
    if recipe.metadata is not None:
        raise UsageError(
            "a metadata table is for folders of images, audio or video, or of text files with one"
            " document each",
            path=path,
            fix="omit --metadata; to use a column of the source, name it with --label-column",
        )


def _loose(
    path: Path, found: Contents | None, recipe: Recipe, strict: bool, subset: str = ""
) -> dict[str, Source | Stream]:
    """Open loose files: images, audio, video or text. Text beside media files is a sidecar.

    `found` is the content of a folder, None for a file; `subset` is one that README.md declares.
    """
    from shardkit.sources.annotated import find_annotated, open_annotated
    from shardkit.sources.file_names import parse_name
    from shardkit.sources.folder_scan import no_images, scan_folder
    from shardkit.sources.img2dataset import of_files
    from shardkit.sources.labels import Asked
    from shardkit.sources.metadata import GivenTable

    media = None if found is None else media_of(found)
    if media is not None:
        classes = None if isinstance(recipe.classes, Mapping) else recipe.classes
        layout = find_annotated(path, recipe.split == "none") if media is IMAGES else None
        if layout is not None:
            _refuse_metadata(path, recipe)
            if recipe.label_column is not None:
                raise UsageError(
                    "the labels of these images are the categories of their boxes",
                    path=path,
                    fix="omit --label-column",
                )
            frame = recipe.annotations_frame
            return {**open_annotated(layout, classes=classes, strict=strict, frame=frame)}
        files = scan_folder(
            path,
            media,
            split=recipe.split,
            classes=classes,
            strict=strict,
            given=GivenTable.of(recipe),
            labels=Asked.of(recipe),
            by_folder=recipe.selection.has("label"),
        )
        if recipe.split == "auto" or subset:
            check_images(path, [name for name in files if name != WHOLE], subset)
        return {name: of_files(path, source) for name, source in files.items()}
    if found.text_files if found is not None else parse_name(path.name):
        return _text(path, recipe, strict, subset=subset)
    if found is None:
        arrays = _arrays(path, None, recipe, strict)
        if arrays is not None:
            return arrays
        raise unknown_format(path)
    raise no_images(path, found.ignored)


def _arrays(
    path: Path, found: Contents | None, recipe: Recipe, strict: bool
) -> dict[str, Source | Stream] | None:
    """The splits of files of arrays; None for any other files."""
    from shardkit.sources.arrays.finding import array_sources

    classes = None if isinstance(recipe.classes, Mapping) or not strict else recipe.classes
    if recipe.label_column is not None:
        classes = None
    sources = array_sources(path, found, split=recipe.split, classes=classes)
    if sources is None:
        return None
    _refuse_metadata(path, recipe)
    return {**_with_labels(sources, recipe)}


def _text(
    path: Path, recipe: Recipe, strict: bool, files: Sequence[Path] = (), subset: str = ""
) -> dict[str, Source | Stream]:
    """The splits of a text file or a folder of text, or of some `files` or a `subset` of it."""
    from shardkit.sources.metadata import Labelling
    from shardkit.sources.text.scan import open_text  # slow to import, and not needed for images

    return open_text(
        path,
        recipe.documents,
        split=recipe.split,
        selection=recipe.selection,
        listed=files,
        subset=subset,
        also=names_in(recipe.where) if recipe.where else (),
        labels=Labelling.of(recipe, strict),
    )


def _refuse_classes(recipe: Recipe, strict: bool) -> None:
    if recipe.classes is not None and strict and recipe.label_column is None:
        raise UsageError(
            "class names come from the dataset; --classes is for folders",
            fix="name the field that --classes applies to: --label-column NAME",
        )


def _datasets(path: Path, recipe: Recipe, strict: bool) -> dict[str, Source | Stream]:
    from shardkit.dataset.find import open_splits
    from shardkit.sources.dataset import DatasetSource
    from shardkit.sources.img2dataset import of_shards
    from shardkit.sources.prepared import check_prepared

    _refuse_metadata(path, recipe)
    _refuse_classes(recipe, strict)
    found = open_splits(path, together=recipe.split == "none", partly=True)
    if recipe.split == "none" and list(found) != [WHOLE]:
        raise UsageError(
            "a folder with a dataset for each split cannot be taken as one dataset",
            path=path,
            found=", ".join(found),
            fix="omit --split none, or convert one of them",
        )
    for dataset in found.values():
        if dataset.manifest is None and path.is_dir():
            check_prepared(path, dataset)
    every: dict[str, Source] = {
        name: of_shards(path, dataset) if dataset.manifest is None else DatasetSource(dataset)
        for name, dataset in found.items()
    }
    sources = _with_labels(every, recipe)
    next(iter(sources.values())).ignored |= beside(path, found)
    lost = without_manifest(path, found.values())
    if lost is not None:
        note = f"{lost.what} ({lost.found}), so it cannot be checked for completeness"
        for source in sources.values():
            source.notes = (*source.notes, note)
    return {**sources}


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
        next(iter(sources.values())).ignored[f"fields left out as asked: {names}"] = len(left)
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


def _is_dataset(folder: Path) -> bool:
    """Whether a folder is a dataset with a manifest or index, or an unfinished conversion."""
    unfinished = (folder / "job.json").is_file() and (folder / "tasks").is_dir()
    saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    listings = {d.listing for d in FORMATS.values() if d.below}
    if not isinstance(folder, RemotePath):
        saved = saved or any((folder / name).is_dir() for name in listings)
    return unfinished or saved or has_manifest(folder)


def _refuse_beside(found: Contents) -> None:
    """Raise UsageError for a folder that holds images or other folders beside its shards."""
    beside = list(found.images)
    if found.at_top and not found.listed:
        with os_errors.explained("list", found.root), scandir(found.root) as entries:
            beside += [e.name for e in entries if e.name[0] != "." and is_folder(e)]
        itself = {FOLDER, *(name.partition("/")[0] for name in found.shards)}
        beside = [name for name in beside if name not in itself]
    if beside:
        raise UsageError(
            "the folder holds both shards and what may be images",
            path=found.root,
            found=f"{min(found.shards)!r} beside {beside[0]!r}",
            fix="move one of the two elsewhere, or give the path of the shards or images only",
        )
