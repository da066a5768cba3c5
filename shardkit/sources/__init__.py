"""Sources: what a conversion reads. `open_sources` finds out which one a path is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardkit import storage
from shardkit.codecs.image import SUFFIXES
from shardkit.errors import UsageError
from shardkit.formats import format_of, unknown_format
from shardkit.manifest import FOLDER, has_manifest, split_names
from shardkit.options import ALL_FIELDS, Selection, TextOptions
from shardkit.schema import Schema
from shardkit.sources.base import Source, Stream

# The name of the only dataset of a conversion without splits.
WHOLE = ""


def open_sources(
    source: str | os.PathLike[str] | Sequence[Any],
    *,
    split: str = "auto",
    classes: Sequence[str] | None = None,
    schema: Mapping[str, Any] | None = None,
    text: TextOptions | None = None,
    selection: Selection = ALL_FIELDS,
    strict: bool = True,
) -> dict[str, Source | Stream]:
    """The sources behind a path or a sequence, one per split; `{"": source}` without splits.

    Raises UsageError where the `selection` leaves no field or, if `strict`, names one that none of
    the sources has.
    """
    sources = _opened(source, split, classes, schema, text or TextOptions(), selection)
    _narrow(sources, selection, strict)
    return sources


def _opened(
    source: str | os.PathLike[str] | Sequence[Any],
    split: str,
    classes: Sequence[str] | None,
    schema: Mapping[str, Any] | None,
    text: TextOptions,
    selection: Selection,
) -> dict[str, Source | Stream]:
    if isinstance(source, str | os.PathLike):
        path = storage.local(source)
        try:
            folder = path.is_dir()
            path.stat()
        except OSError as error:
            raise storage.explain(error, "read the source", path) from error
        if schema is not None:
            raise UsageError("a schema is for Python sequences: a path has its own")
        loose = folder and not has_manifest(path) and not _holds_shards(path)
        if classes is not None and not loose:
            raise UsageError("class names come from the dataset; --classes is for folders")
        if loose or (not folder and format_of(path) is None):
            return _loose(path, folder, split, classes, text, selection)
        return _datasets(path, split)
    from shardkit.dataset import Dataset
    from shardkit.sources.dataset import DatasetSource
    from shardkit.sources.sequence import SequenceSource

    if isinstance(source, Dataset) and schema is None and classes is None:
        return {WHOLE: DatasetSource(source)}
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise UsageError(
            "a source is a path, or a sequence of samples with a length",
            found=f"{type(source).__name__}, of which nobody knows how many samples it gives",
            fix="make a list of it, or write its samples one by one with shardkit.create",
        )
    declared = None if schema is None else Schema(schema)
    return {WHOLE: SequenceSource(source, declared, classes)}


def _loose(
    path: Path,
    folder: bool,
    split: str,
    classes: Sequence[str] | None,
    options: TextOptions,
    selection: Selection,
) -> dict[str, Source | Stream]:
    """Files of pictures or of text; text that stands beside pictures belongs to them."""
    from shardkit.sources.folder_scan import NoPicturesError, scan_folder
    from shardkit.sources.text import is_text, open_text

    text = is_text(path)
    if folder:
        try:
            return {**scan_folder(path, split=split, classes=classes)}
        except NoPicturesError:
            if not text:
                raise
    if text:
        return open_text(path, options, split=split, selection=selection)
    raise unknown_format(path)


def _datasets(path: Path, split: str) -> dict[str, Source | Stream]:
    from shardkit.dataset import open_partly
    from shardkit.sources.dataset import DatasetSource

    names = split_names(path) if split == "auto" else []
    if names:
        return {name: DatasetSource(open_partly(path / name)) for name in names}
    return {WHOLE: DatasetSource(open_partly(path))}


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


def _holds_shards(folder: Path) -> bool:
    """Whether a folder is a dataset: finished, unfinished, or shards that others made.

    Raises UsageError for a folder of shards that holds pictures or other folders as well.
    """
    unfinished = (folder / "job.json").is_file() and (folder / "tasks").is_dir()
    if unfinished or (folder / "state.json").is_file() or split_names(folder):
        return True
    with storage.explained("list", folder), os.scandir(folder) as entries:
        visible = [e for e in entries if not e.name.startswith(".") and e.name != FOLDER]
    shards = [e.name for e in visible if format_of(Path(e.name)) and not e.is_dir()]
    others = [
        e.name for e in visible if e.is_dir() or e.name.rpartition(".")[2].lower() in SUFFIXES
    ]
    if shards and others:
        raise UsageError(
            "the folder holds both shards and what may be pictures",
            path=folder,
            found=f"{shards[0]!r} beside {others[0]!r}",
            fix="move one of them away, or give the shard itself as the source",
        )
    return bool(shards)
