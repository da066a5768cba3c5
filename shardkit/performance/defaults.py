"""Opens any dataset or folder of images for `bench` and `doctor`, with usual options for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.codecs.image import is_mask_name
from shardkit.dataset.dataset import Dataset
from shardkit.dataset.find import open_dataset
from shardkit.dataset.readers import SequenceReader
from shardkit.errors import FormatError, UsageError, warn
from shardkit.helpers.words import counted
from shardkit.preprocess.transform import load_transform
from shardkit.schema import Array, FieldType, Image
from shardkit.sources import open_sources
from shardkit.sources.image_folder import ImageFolder
from shardkit.storage import fs
from shardkit.storage.remote.path import RemotePath
from shardkit.stream.collate import pad_collate
from shardkit.transforms.on_image import with_what_is_on
from shardkit.transforms.steps import CenterCrop, Decode, RandomResizedCrop, Resize

FOLDER = "folder"  # format name of image files
TRANSFORMS = ("crop", "resize", "center", "decode", "none")
_ADDED = ("attention_mask", "lengths")  # added by padding; stored fields of these names are skipped


def open_any(path: str | os.PathLike[str]) -> Dataset:
    """Open a dataset like `shardkit.open`, or a folder of images like `shardkit convert`.

    Raises the same errors, UsageError for a folder of splits, and FormatError for text.
    """
    try:
        return open_dataset(path)
    except FormatError as error:
        refused = error
    found, root = open_sources(path), fs.source(path)
    first = next(iter(found.values()))
    if not isinstance(first, ImageFolder) and not first.reads_text:  # a damaged dataset
        raise refused
    if len(found) > 1:
        raise UsageError(
            "the folder contains several splits, each of which is a separate dataset",
            path=path,
            found=", ".join(found),
            fix=f"use one of them: {root / next(iter(found))}",
        )
    if not isinstance(first, ImageFolder) or isinstance(root, RemotePath):
        what = "text, and image files at a URL, cannot be loaded without conversion"
        raise FormatError(what, path=path, fix="convert them first: shardkit convert")
    if first.problems:
        raise first.problems[0]
    return LooseImages(root, first)


class LooseImages(Dataset):
    """A folder of images as a dataset of one shard. Each sample is read from its own files."""

    def __init__(self, path: Path, images: ImageFolder) -> None:
        shard = (".", len(images), int(images.sizes().sum()))
        reader = SequenceReader(images, images.schema, images.class_names, path)
        super().__init__(path, FOLDER, [shard], None, reader=reader)
        self._images = images

    def sample_path(self, shard: int, position: int) -> Path:
        return self.path / self._images.name(position)


def usual_options(
    dataset: Dataset, *, batch_size: int, transform: str = "crop", size: int = 224
) -> dict[str, Any]:
    """Options of a `Loader` that trains on the dataset, in shuffled batches.

    transform: for the first image field. "crop": a random crop, resized to `size` x `size` pixels;
    "resize": the center of the resized image; "center": the center of the image; "decode": the
    whole image; "none": encoded, as stored; "module:function": a function of the pixels.

    Arrays of different lengths are padded to the longest of a batch. A dataset that is smaller than
    a batch is one batch, with a warning. Raises UsageError for a transform that cannot be used, and
    for a dataset without samples.
    """
    if not len(dataset):
        raise UsageError("the dataset has no samples", path=dataset.place)
    if batch_size > len(dataset):
        few = f"{dataset.place} has only {counted(len(dataset), 'sample')}"
        warn(f"{few}, fewer than a batch of {batch_size:,}: all are one batch; rates say little")
        batch_size = len(dataset)
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True}
    field = image_field(dataset)
    steps = _steps(transform, size)
    if field is not None and steps:
        own = ":" in transform  # a function gets the values of several fields by name
        fields = () if own else with_what_is_on([field], dataset.schema)
        options["transforms"] = {fields if len(fields) > 1 else field: steps}
    elif field is None and ":" in transform:
        raise UsageError(
            "the transform needs images, but the dataset has none",
            path=dataset.place,
            found=", ".join(f"{name}: {kind}" for name, kind in dataset.schema.items()),
        )
    return options | _padding(dataset)


def stored_bytes(dataset: Dataset) -> int:
    """Total bytes of all shards."""
    return sum(dataset.extent(shard)[1] for shard in range(dataset.shards))


def image_field(dataset: Dataset) -> str | None:
    """The first field of encoded images, else of pixels; a mask only if there is no other image."""
    for kinds in (_encoded, _pixels):
        found = [name for name, kind in dataset.schema.items() if kinds(kind)]
        if found:
            return min(found, key=is_mask_name)
    return None


def _encoded(kind: FieldType) -> bool:
    return isinstance(kind, Image)


def _pixels(kind: FieldType) -> bool:
    if not isinstance(kind, Array) or kind.dtype != np.dtype(np.uint8).str or kind.shape is None:
        return False
    return len(kind.shape) == 3 and kind.shape[2] == 3


def _steps(transform: str, size: int) -> list[Any]:
    known: dict[str, list[Any]] = {
        "crop": [RandomResizedCrop(size)],
        "resize": [Resize(size), CenterCrop(size)],
        "center": [CenterCrop(size)],
        "decode": [Decode()],
        "none": [],
    }
    if transform in known:
        return known[transform]
    if ":" not in transform:
        raise UsageError(
            "unknown transform",
            found=repr(transform),
            expected=", ".join(TRANSFORMS) + ", or module:function",
        )
    return [Decode(), load_transform(transform, None).function]


def _padding(dataset: Dataset) -> dict[str, Any]:
    """Options that pad one-dimensional arrays of different lengths, if there are any.

    Empty if not all fields of a batch can be collated; arrays are then delivered in lists.
    """
    schema = {name: kind for name, kind in dataset.schema.items() if name not in _ADDED}
    arrays = {name: kind for name, kind in schema.items() if isinstance(kind, Array)}
    varying = {name for name, kind in arrays.items() if _length_varies(dataset, name, kind)}
    fixed = all(
        kind.shape is not None and None not in kind.shape
        for name, kind in arrays.items()
        if name not in varying
    )
    optional = any(kind.optional for kind in schema.values())
    if not varying or not fixed or optional or image_field(dataset):
        return {}
    fields = {"fields": list(schema)} if len(schema) < len(dataset.schema) else {}
    return {"collate": pad_collate(), **fields}


def _length_varies(dataset: Dataset, name: str, kind: Array) -> bool:
    if kind.shape is None:  # data of other libraries: read a value
        first = dataset[0].get(name)
        return isinstance(first, np.ndarray) and first.ndim == 1
    return kind.shape == (None,)
