"""Recognises datasets and shards of any format, also those of other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from shardkit.dataset.concatenated import Concatenated
from shardkit.dataset.dataset import Dataset
from shardkit.dataset.find import open_files, open_splits, without_manifest
from shardkit.errors import SourceError, UsageError
from shardkit.formats import FORMATS, format_of, unknown_format
from shardkit.formats.unsupported import kind_of_file
from shardkit.helpers.indices import array
from shardkit.metadata.job import JOB
from shardkit.metadata.manifest import FOLDER, has_manifest
from shardkit.metadata.recipe import Recipe
from shardkit.sources.base import WHOLE, Source
from shardkit.sources.candidate import Candidate, Splits
from shardkit.sources.companions import beside
from shardkit.sources.dataset import DatasetSource
from shardkit.sources.img2dataset import of_shards
from shardkit.sources.inputs import group_inputs
from shardkit.sources.prepared import check_prepared
from shardkit.storage.remote.path import RemotePath


def recognise_dataset(candidate: Candidate) -> Splits | None:
    """A shard, or a folder with a manifest or index. Raises FormatError for `__shardkit__`."""
    path = candidate.path
    if not candidate.is_folder:
        its_format = format_of(path) is not None and kind_of_file(path) is None
        return _open(candidate) if its_format else None
    if path.name == FOLDER:
        raise unknown_format(path)
    return _open(candidate) if _is_dataset(path) else None


def recognise_shards(candidate: Candidate) -> Splits | None:
    """A folder of shards without a manifest."""
    there = candidate.is_folder and candidate.contents.shards
    return _open(candidate) if there else None


def _is_dataset(folder: Path) -> bool:
    """Whether a folder is a dataset with a manifest or index, or an unfinished conversion."""
    unfinished = (folder / JOB).is_file() and (folder / "tasks").is_dir()
    saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    listings = {d.listing for d in FORMATS.values() if d.below}
    if not isinstance(folder, RemotePath):
        saved = saved or any((folder / name).is_dir() for name in listings)
    return unfinished or saved or has_manifest(folder)


def _open(candidate: Candidate) -> Splits:
    candidate.refuse_options()
    path, subset = candidate.path, candidate.subset
    found = open_splits(path, together=candidate.together, partly=True, subset=subset)
    if candidate.together and list(found) != [WHOLE]:
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
    sources = candidate.labelled(every)
    next(iter(sources.values())).ignored |= beside(path, found)
    lost = without_manifest(path, found.values())
    if lost is not None:
        note = f"{lost.what} ({lost.found}), so it cannot be checked for completeness"
        for source in sources.values():
            source.notes = (*source.notes, note)
    return sources


def of_shard_files(files: Sequence[Path], recipe: Recipe) -> dict[str, Source]:
    """The samples of several shards of one format, by split."""
    found = open_files(files, together=recipe.split == "none")
    return {name: DatasetSource(dataset) for name, dataset in found.items()}


def of_dataset(dataset: Dataset, recipe: Recipe) -> Source:
    """The samples of an open dataset, or of a view of one."""
    if dataset.transform is not None:
        raise UsageError(
            "a dataset with transforms cannot be converted",
            path=dataset.place,
            fix="open it without transforms, or pass transform= to the conversion instead",
        )
    if dataset.indices is not None and not len(dataset):
        raise SourceError("the view has no samples", path=dataset.place)
    if isinstance(dataset, Concatenated):
        from shardkit.sources.united import View, unite

        named = zip(group_inputs(dataset.parts), dataset.parts, strict=True)
        parts = {one.name: {WHOLE: of_dataset(part, recipe)} for one, part in named}
        united = unite(parts, recipe)[WHOLE]
        assert isinstance(united, Source)
        return united if dataset.indices is None else View(united, dataset.indices)
    if dataset.sequence is not None:
        from shardkit.sources.sequence import SequenceSource

        chosen = None if dataset.indices is None else array(dataset.indices)
        samples = cast("Sequence[Any]", dataset.sequence)
        return SequenceSource(samples, dataset.schema, dataset.class_names, chosen)
    return DatasetSource(dataset)
