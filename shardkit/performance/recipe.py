"""The options with which a dataset is usually loaded for training, found out from its schema."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardkit.dataset import Dataset
from shardkit.errors import UsageError
from shardkit.preprocess.mask_fields import is_mask_name
from shardkit.preprocess.transform import load_transform
from shardkit.schema import Array, FieldType, Image
from shardkit.stream.collate import pad_collate
from shardkit.transforms.steps import CenterCrop, Decode, RandomResizedCrop, Resize

TRANSFORMS = ("crop", "resize", "center", "decode", "none")
_ADDED = ("attention_mask", "lengths")  # by padding: stored ones would be in its way


def usual_options(
    dataset: Dataset, *, batch_size: int, transform: str = "crop", size: int = 224
) -> dict[str, Any]:
    """Options of a `Loader` that trains on the dataset: shuffled batches of what is in it.

    `transform` is for the first field of images: "crop", a random part of `size` pixels a side;
    "resize", the middle of a smaller image; "center", the middle of the image; "decode", all of
    it; "none", as stored; or "module:function", what that makes of the pixels. Arrays of unlike
    lengths are padded to the longest of a batch.

    Raises UsageError for what cannot be, a batch that is larger than the dataset among it.
    """
    if batch_size > len(dataset):
        raise UsageError(
            "the dataset is smaller than one batch",
            path=dataset.place,
            found=f"{len(dataset):,} samples, batches of {batch_size:,}",
            fix=f"make batches of {len(dataset):,} or less, or give a larger dataset",
        )
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True}
    field = image_field(dataset)
    steps = _steps(transform, size)
    if field is not None and steps:
        options["transforms"] = {field: steps}
    elif field is None and ":" in transform:
        raise UsageError(
            "the transform is for images, of which the dataset has none",
            path=dataset.place,
            found=", ".join(f"{name}: {kind}" for name, kind in dataset.schema.items()),
        )
    return options | _padding(dataset)


def image_field(dataset: Dataset) -> str | None:
    """The first field of encoded images, or else of pixels; None where there is none.

    A mask only where there is nothing else.
    """
    for is_image in (_is_encoded, _is_pixels):
        found = [name for name, kind in dataset.schema.items() if is_image(kind)]
        if found:
            return min(found, key=is_mask_name)
    return None


def _is_encoded(kind: FieldType) -> bool:
    return isinstance(kind, Image)


def _is_pixels(kind: FieldType) -> bool:
    if not isinstance(kind, Array) or kind.dtype != np.dtype(np.uint8).str or kind.shape is None:
        return False
    return len(kind.shape) == 3 and kind.shape[2] == 3


def _steps(transform: str, size: int) -> list[Any]:
    if transform == "crop":
        return [RandomResizedCrop(size)]
    if transform == "resize":
        return [Resize(size), CenterCrop(size)]
    if transform == "center":
        return [CenterCrop(size)]
    if transform == "decode":
        return [Decode()]
    if transform == "none":
        return []
    if ":" not in transform:
        raise UsageError(
            "there is no such transform",
            found=repr(transform),
            expected=", ".join(TRANSFORMS) + ", or module:function",
        )
    return [Decode(), load_transform(transform, None).function]


def _padding(dataset: Dataset) -> dict[str, Any]:
    """What makes rows of arrays that have one dimension and no common length, if there are any.

    Where a batch could not be padded as a whole it is left as it is, with lists of arrays.
    """
    kept = {name: kind for name, kind in dataset.schema.items() if name not in _ADDED}
    arrays = {name: kind for name, kind in kept.items() if isinstance(kind, Array)}
    varying = [name for name, kind in arrays.items() if _length_varies(dataset, name, kind)]
    others = [kind for name, kind in arrays.items() if name not in varying]
    if not varying or not all(map(_is_fixed, others)):
        return {}
    if image_field(dataset) or any(kind.optional for kind in kept.values()):
        return {}
    left_out = len(kept) < len(dataset.schema)
    return {"collate": pad_collate(), **({"fields": list(kept)} if left_out else {})}


def _length_varies(dataset: Dataset, name: str, kind: Array) -> bool:
    if kind.shape is None:  # data of others may tell only where a value is read
        first = dataset[0].get(name)
        return isinstance(first, np.ndarray) and first.ndim == 1
    return kind.shape == (None,)


def _is_fixed(kind: Array) -> bool:
    return kind.shape is not None and None not in kind.shape
