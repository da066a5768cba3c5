"""Recognises datasets and shards of any format, also those of other libraries."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from shardkit.dataset.concatenated import Concatenated
from shardkit.dataset.dataset import Dataset
from shardkit.dataset.find import open_files, open_splits, without_manifest
from shardkit.errors import DamagedError, SourceError, UsageError
from shardkit.formats import FORMATS, format_of, unknown_format
from shardkit.formats.unsupported import kind_of_file as unsupported_kind
from shardkit.helpers import os_errors
from shardkit.helpers.checked import MAX_BYTES
from shardkit.helpers.indices import array
from shardkit.metadata.job import JOB
from shardkit.metadata.manifest import FOLDER, OLD_NAME, has_manifest
from shardkit.metadata.recipe import Recipe
from shardkit.sources.base import WHOLE, Source
from shardkit.sources.candidate import Candidate, Splits
from shardkit.sources.dataset import DatasetSource
from shardkit.sources.img2dataset import of_shards
from shardkit.sources.inputs import group_inputs
from shardkit.sources.partitioned import with_partitions
from shardkit.storage import fs
from shardkit.storage.remote.path import RemotePath
from shardkit.storage.walk import is_folder, kind_of_file, scandir

_INFO = "dataset_info.json"
# Of TensorFlow Datasets, `mnist-train.tfrecord-00000-of-00001`; of Hugging Face's prepared
# datasets, `mnist-train.arrow` or `mnist-train-00000-of-00002.arrow`.
_OF_SPLIT = re.compile(r".*?-(\w+?)(-\d+-of-\d+)?\.(tfrecord|array_record|arrow)(-\d+-of-\d+)?")
# Other files of such folders: those of Hugging Face `datasets`, and of shardkit itself.
_OWN = {FOLDER, OLD_NAME, "state.json", _INFO, "dataset_dict.json"}


def recognise_dataset(candidate: Candidate) -> Splits | None:
    """A shard, or a folder with a manifest or index. Raises FormatError for `__shardkit__`."""
    path = candidate.path
    if not candidate.is_folder:
        its_format = format_of(path) is not None and unsupported_kind(path) is None
        return _open(candidate) if its_format else None
    if path.name == FOLDER:
        raise unknown_format(path)
    return _open(candidate) if _is_dataset(path) else None


def recognise_shards(candidate: Candidate) -> Splits | None:
    """Return a folder of shards without a manifest."""
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
            _check_numbers(path, dataset)
    every: dict[str, Source] = {
        name: of_shards(path, dataset) if dataset.manifest is None else DatasetSource(dataset)
        for name, dataset in found.items()
    }
    every = with_partitions(every, found)
    sources = candidate.labelled(every)
    next(iter(sources.values())).ignored |= _companions(path, found)
    lost = without_manifest(path, found.values())
    if lost is not None:
        note = f"{lost.what} ({lost.found}), so it cannot be checked for completeness"
        for source in sources.values():
            source.notes = (*source.notes, note)
    return sources


def _check_numbers(folder: Path, dataset: Dataset) -> None:
    """Raise DamagedError if there are more or fewer samples than dataset_info.json says."""
    path = folder / _INFO
    if not path.is_file() or dataset.format == "hf":  # which keeps the numbers of its origin
        return
    known: dict[str, Any] = {}
    with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError, AttributeError):
        splits = json.loads(fs.read(path, MAX_BYTES))["splits"]
        for split in splits if isinstance(splits, list) else splits.values():
            lengths = split.get("shardLengths")
            known[split["name"]] = sum(map(int, lengths)) if lengths else split.get("num_examples")
    totals: Counter[str] = Counter()
    for shard in range(dataset.shards):
        if match := _OF_SPLIT.fullmatch(dataset.shard_name(shard)):
            totals[match[1]] += dataset.extent(shard)[0]
    for name, found in totals.items():
        if type(known.get(name)) is int and known[name] != found:
            raise DamagedError(
                f"there are more or fewer samples than {_INFO} says",
                path=path,
                expected=f"{known[name]:,} in the split {name!r}",
                found=f"{found:,}",
            )


def _companions(path: Path, datasets: Mapping[str, Dataset]) -> Counter[str]:
    """Count ignored files, by kind, beside datasets whose shards a manifest or index names.

    Other datasets find their shards by listing the folder, which counts ignored files as well.
    `path` is a dataset, or has a dataset in a folder for each split.
    """
    found: Counter[str] = Counter()
    named = (d.manifest is not None or FORMATS[d.format].listing for d in datasets.values())
    if not path.is_dir() or not all(named):
        return found
    for folder in dict.fromkeys([path, *(d.place for d in datasets.values() if d.place.is_dir())]):
        if isinstance(folder, RemotePath) and not folder.store.lists:
            continue
        own = {*_OWN, *(split for split in datasets if folder == path)}
        for dataset in datasets.values():
            own.add(FORMATS[dataset.format].listing)
            if dataset.path == folder:
                names = [dataset.shard_name(number) for number in range(dataset.shards)]
                if dataset.manifest is not None:
                    names += [f.name for f in dataset.manifest.all_files()]
                    names += [f.name for f in dataset.manifest.files]
                own |= {name.partition("/")[0] for name in names}
        own |= {stem + lock for stem in own for lock in ("-lock", ".lock")}
        with os_errors.explained("list", folder), scandir(folder) as entries:
            for entry in entries:
                if entry.name not in own:
                    kind = "folder" if is_folder(entry) else kind_of_file(entry.name)
                    found["hidden" if entry.name[0] == "." else kind] += 1
    return found


def of_shard_files(files: Sequence[Path], recipe: Recipe) -> dict[str, Source]:
    """Return the samples of several shards of one format, by split."""
    found = open_files(files, together=recipe.split == "none")
    return with_partitions({name: DatasetSource(d) for name, d in found.items()}, found)


def of_dataset(dataset: Dataset, recipe: Recipe) -> Source:
    """Return the samples of an open dataset, or of a view of one."""
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
