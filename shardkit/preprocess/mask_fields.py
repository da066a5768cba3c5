"""Which image fields are masks: maps of classes, instances or depth, whose pixels are numbers.

Fields with names that WebDataset and Hugging Face users give to masks are masks. If another image
looks like a mask, the user is asked, as a wrong guess would destroy its values.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from shardkit.codecs.header import read_header
from shardkit.codecs.image import NotAnImageError, is_mask_name
from shardkit.codecs.pixels import loaded
from shardkit.errors import SampleError, UsageError
from shardkit.options import MAX_PIXELS
from shardkit.sources.base import Source, Stream, some_of

# The share of pixels that equal their neighbour: 0.9 or more in masks of ADE20K, Cityscapes and
# COCO; less than 0.2 in photos that were never a JPEG, up to 0.7 in those on white.
_FLAT = 0.8


def mask_fields(
    image_fields: Sequence[str], said: tuple[str, ...] | None, source: Source | Stream | None
) -> dict[str, str]:
    """Return the masks among image fields, each with its image.

    `said` are the masks named by the user, or None. If names are not enough, samples of `source`
    are decoded. Raises UsageError if it is not clear which fields are masks.
    """
    masks = said if said is not None else tuple(name for name in image_fields if is_mask_name(name))
    if not set(masks) <= set(image_fields):
        found = ", ".join(image_fields) or None
        raise UsageError("masks must be image fields", expected=found, found=", ".join(masks))
    images = [name for name in image_fields if name not in masks]
    if said is None and source is not None and len(images) != 1:
        _ask_about(_maps(images or masks, source), images)
    if said and not images:
        raise UsageError("masks need images, but all images are masks", found=", ".join(masks))
    # If all fields have names of masks, they are images.
    return {name: image_of(name, images) for name in masks if images}


def _ask_about(maps: Sequence[str], images: Sequence[str]) -> None:
    if maps and not images:
        raise UsageError(
            f"the field {maps[0]!r} contains masks, but there is no image to which they belong",
            fix="convert them with their images; or convert them as images: --masks none",
        )
    if maps:
        masks = ",".join(maps if len(maps) < len(images) else maps[1:])
        raise UsageError(
            "images may be masks, whose values resizing or JPEG would change",
            expected="names such as mask or seg.png, or the option --masks",
            found=f"{', '.join(maps)}: lossless, and with large uniform areas, a palette, or"
            " more than 8 bits",
            fix=f"--masks {masks} keeps the values; --masks none treats all as images",
        )


def image_of(mask: str, images: Sequence[str]) -> str:
    """Return the image that shares the most leading words; if equal, "image" or the first one."""

    def likeness(name: str) -> tuple[int, bool]:
        words = zip(re.split("[._]", name), re.split("[._]", mask), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], words)), name == "image"

    return max(images, key=likeness)


def _maps(fields: Sequence[str], source: Source | Stream) -> list[str]:
    """Return the fields whose values could be masks in all of a few samples."""
    seen: dict[str, bool] = {}
    for document in some_of(source):
        sample = document.sample
        if isinstance(sample, SampleError):
            continue
        for name in fields:
            if name in sample and seen.get(name, True):
                with contextlib.suppress(NotAnImageError):  # the conversion will report it
                    seen[name] = _may_be_mask(sample[name])
    return [name for name in fields if seen.get(name)]


def _may_be_mask(data: bytes) -> bool:
    header = read_header(data)
    if not header.lossless or header.width * header.height > MAX_PIXELS:
        return False
    with loaded(data, header) as image:
        if image.mode in ("1", "P", "PA", "F") or image.mode.startswith("I"):
            return True
        values = np.asarray(image)
    same = values[:, 1:] == values[:, :-1]
    if not same.size:  # one pixel wide: no neighbours
        return False
    return bool((same if same.ndim == 2 else same.all(axis=2)).mean() >= _FLAT)
