"""What lies in the folder of a dataset and is no part of it: counted, as it is passed over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardkit import storage
from shardkit.dataset import Dataset
from shardkit.formats import FORMATS
from shardkit.manifest import FOLDER, OLD_NAME
from shardkit.remote.path import RemotePath
from shardkit.walk import is_folder, kind_of_file, scandir

# What else such folders have: of `datasets` by Hugging Face, and of our splits.
_OWN = {FOLDER, OLD_NAME, "state.json", "dataset_info.json", "dataset_dict.json"}


def beside(path: Path, datasets: Mapping[str, Dataset]) -> Counter[str]:
    """How often, by kind, for datasets of which a file names the shards.

    In other folders all shards are found by looking, and what lies beside them with them. `path`
    is a dataset, or has one in a folder for each split.
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
        with storage.explained("list", folder), scandir(folder) as entries:
            for entry in entries:
                if entry.name not in own:
                    kind = "folder" if is_folder(entry) else kind_of_file(entry.name)
                    found["hidden" if entry.name[0] == "." else kind] += 1
    return found


def _listed(dataset: Dataset) -> bool:
    """Whether a file says which shards the dataset has."""
    return dataset.manifest is not None or bool(FORMATS[dataset.format].listing)


def _names(dataset: Dataset) -> Iterator[str]:
    """The files of a dataset, relative to its folder."""
    yield from (dataset.shard_name(number) for number in range(dataset.shards))
    if dataset.manifest is not None:
        yield from (file.name for file in dataset.manifest.all_files())
        yield from (file.name for file in dataset.manifest.files)
