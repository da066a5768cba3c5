"""Counts the files in the folder of a dataset that do not belong to it and are ignored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardkit.dataset.dataset import Dataset
from shardkit.formats import FORMATS
from shardkit.helpers import os_errors
from shardkit.metadata.manifest import FOLDER, OLD_NAME
from shardkit.storage.remote.path import RemotePath
from shardkit.storage.walk import is_folder, kind_of_file, scandir

# Other files of such folders: those of Hugging Face `datasets`, and of shardkit itself.
_OWN = {FOLDER, OLD_NAME, "state.json", "dataset_info.json", "dataset_dict.json"}


def beside(path: Path, datasets: Mapping[str, Dataset]) -> Counter[str]:
    """Count ignored files, by kind, beside datasets whose shards a manifest or index names.

    Other datasets find their shards by listing the folder, which counts ignored files as well.
    `path` is a dataset, or has a dataset in a folder for each split.
    """
    found: Counter[str] = Counter()
    if not path.is_dir() or not all(map(_listed, datasets.values())):
        return found
    folders = dict.fromkeys([path, *(d.place for d in datasets.values() if d.place.is_dir())])
    for folder in folders:
        if isinstance(folder, RemotePath) and not folder.store.lists:
            continue
        own = {*_OWN, *(split for split in datasets if folder == path)}
        for dataset in datasets.values():
            own.add(FORMATS[dataset.format].listing)
            if dataset.path == folder:
                own |= {name.partition("/")[0] for name in _names(dataset)}
        own |= {stem + lock for stem in own for lock in ("-lock", ".lock")}
        with os_errors.explained("list", folder), scandir(folder) as entries:
            for entry in entries:
                if entry.name not in own:
                    kind = "folder" if is_folder(entry) else kind_of_file(entry.name)
                    found["hidden" if entry.name[0] == "." else kind] += 1
    return found


def _listed(dataset: Dataset) -> bool:
    """Whether a manifest or index names the shards of the dataset."""
    return dataset.manifest is not None or bool(FORMATS[dataset.format].listing)


def _names(dataset: Dataset) -> Iterator[str]:
    """The files of a dataset, relative to its folder."""
    yield from (dataset.shard_name(number) for number in range(dataset.shards))
    if dataset.manifest is not None:
        yield from (file.name for file in dataset.manifest.all_files())
        yield from (file.name for file in dataset.manifest.files)
