"""`open_any`: a dataset of any format, or a folder of loose images as if it were one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from shardkit.dataset import Dataset, open_dataset
from shardkit.errors import FormatError, UsageError
from shardkit.formats.base import ShardReader
from shardkit.open_shards import Readers
from shardkit.sample import JsonText, Sample
from shardkit.schema import Json
from shardkit.sources import open_sources
from shardkit.sources.image_folder import ImageFolder

FOLDER = "folder"  # the format of loose images


def open_any(path: str | os.PathLike[str]) -> Dataset:
    """Open what `shardkit.open` does, or a folder of images as `shardkit convert` reads it.

    Raises what those raise, UsageError for a folder of splits, and FormatError for text.
    """
    try:
        return open_dataset(path)
    except FormatError as error:
        refused = error
    found = open_sources(path)
    first = next(iter(found.values()))
    if first.reads_text:
        raise FormatError(
            "text cannot be loaded as it is: where its documents begin is not known",
            path=path,
            fix="convert it first: shardkit convert",
        )
    if not isinstance(first, ImageFolder):  # a dataset, of which something is wrong
        raise refused
    if len(found) > 1:
        raise UsageError(
            "the folder holds splits, each of which is a dataset of its own",
            path=path,
            found=", ".join(found),
            fix=f"give one of them: {Path(path) / next(iter(found))}",
        )
    if first.problems:
        raise first.problems[0]
    return LooseImages(Path(path), first)


class LooseImages(Dataset):
    """Loose images as a dataset: one shard, whose reader opens a file for each sample.

    The folder was read once; a sample costs no more than opening and reading its files.
    """

    def __init__(self, path: Path, images: ImageFolder) -> None:
        self.path, self.format = path, FOLDER
        self.manifest = self.manifest_path = self.transforms = None
        self._beside = dict(images.ignored)
        self.schema = images.schema
        self._images, self._reader = images, _Files(images)
        # What the methods of all datasets go by.
        self._names, self._bytes = ["."], [int(images.sizes().sum())]
        self._layouts = [self._reader.layout]
        self._class_names = {**images.class_names}
        self._starts, self._length = [0], len(images)
        self._mapped = False
        self._readers = Readers()

    def reader(self, shard: int) -> ShardReader:
        return self._reader

    def sample_path(self, shard: int, position: int) -> Path:
        return self.path / self._images.name(position)

    def close(self) -> None:
        """Does nothing: files are open for as long as they are read."""


class _Files(ShardReader):
    """The files of a folder by position."""

    def __init__(self, images: ImageFolder) -> None:
        self.schema = images.schema
        self.layout: dict[str, Any] = {"schema": self.schema.to_json()}
        self._images = images
        self._json = [name for name, kind in self.schema.items() if isinstance(kind, Json)]

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, position: int) -> Sample:
        sample = self._images[position]
        for name in self._json:
            if name in sample:  # as the text to store, or as what all samples share
                sample[name] = json.loads(JsonText.of(sample[name]))
        return sample

    def close(self) -> None: ...
