"""Which fields are masks of images, boxes on them, and arrays with a row for each box.

The pixels of a mask are numbers: classes, instances or depth. Fields with names that WebDataset and
Hugging Face users give to masks are masks. The field `boxes`, floats of shape (n, 4), is taken as
boxes: x0, y0, x1, y1 in pixels. If other fields look like masks or boxes, the user is asked, as a
wrong guess would destroy their values.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from shardkit.codecs.boxes import WITH_BOXES, is_boxes
from shardkit.codecs.header import read_header
from shardkit.codecs.image import NotAnImageError, is_mask_name
from shardkit.codecs.pixels import loaded
from shardkit.codecs.shapes import is_shape, rows_in
from shardkit.errors import SampleError, UsageError, near
from shardkit.options import MAX_PIXELS
from shardkit.sample import Sample
from shardkit.schema import Array, Json, Schema
from shardkit.sources.base import Source, Stream, some_of

# The share of pixels that equal their neighbour: 0.9 or more in masks of ADE20K, Cityscapes and
# COCO; less than 0.2 in photos that were never a JPEG, up to 0.7 in those on white.
_FLAT = 0.8


def mask_fields(
    image_fields: Sequence[str], named: tuple[str, ...] | None, source: Source | Stream | None
) -> dict[str, str]:
    """Return the masks among image fields, each with its image.

    `named` are the masks named by the user, or None. If names are not enough, samples of `source`
    are decoded. Raises UsageError if it is not clear which fields are masks.
    """
    masks = tuple(filter(is_mask_name, image_fields)) if named is None else named
    if not set(masks) <= set(image_fields):
        found = ", ".join(image_fields) or None
        raise UsageError("masks must be image fields", expected=found, found=", ".join(masks))
    images = [name for name in image_fields if name not in masks]
    if named is None and source is not None and len(images) != 1:
        _ask_about(_maps(images or masks, source), images)
    if named and not images:
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


_NAMES = {"box", "boxes", "bbox", "bboxes", "bndbox"}
_FLOATS = {"<f4", "<f8"}


class OnImage(NamedTuple):
    """The image that boxes are on, and the fields that have a row for each box."""

    image: str
    others: tuple[str, ...]

    def note(self, field: str) -> str:
        """Describe to the user how the boxes are treated."""
        others = f"; along with {', '.join(map(repr, self.others))}" if self.others else ""
        words = "x0, y0, x1, y1 in pixels, transformed with it and clipped"
        return f"{field!r} is taken as boxes on {self.image!r}: {words}{others}"

    def check(self, sample: Sample, field: str) -> None:
        """Raise SampleError if the value is not boxes, or other fields have more or fewer rows."""
        boxes = sample[field]
        if not is_boxes(boxes):
            raise SampleError(
                "the value is not boxes",
                key=sample["__key__"],
                field=field,
                expected="an array of floats, (n, 4)",
                found=f"{boxes.dtype} {boxes.shape}",
                fix="repair it; or, if the field is not boxes, use --boxes none",
            )
        for name in self.others:
            if name in sample and rows_in(sample[name]) != len(boxes):
                raise SampleError(
                    f"the sample has {len(boxes):,} boxes, but the field has more or fewer rows",
                    key=sample["__key__"],
                    field=name,
                    expected=f"{len(boxes):,} rows",
                    found=f"{rows_in(sample[name]):,}",
                    fix="repair it; or, if these are not boxes, use --boxes none",
                )


def box_fields(
    schema: Schema,
    images: Sequence[str],
    named: tuple[str, ...] | None,
    source: Source | Stream | None,
    ask: bool,
) -> dict[str, OnImage]:
    """Return the fields of boxes, each with its image and the fields that go with it.

    `named` are the fields named by the user, or None. Raises UsageError for fields that cannot be
    boxes, and, if `ask` is true, for fields of which it is not clear whether they are.
    """
    arrays = {name: kind for name, kind in schema.items() if isinstance(kind, Array)}
    if named is None:
        boxes = tuple(n for n, k in arrays.items() if n == "boxes" and _is_sure(k))
        unclear = [n for n, k in arrays.items() if n not in boxes and is_box_name(n) and _may_be(k)]
        if ask and unclear and images:
            name = unclear[0]
            raise UsageError(
                f"the field {name!r} may be boxes, which would no longer fit the changed images",
                expected="floats of shape (n, 4) with the name 'boxes', or the option --boxes",
                found=repr(arrays[name]),
                fix=f"--boxes {name} transforms it as x0, y0, x1, y1 in pixels; --boxes none leaves"
                " it unchanged",
            )
    else:
        boxes = named
        wrong = [n for n in named if n not in arrays or not _may_be(arrays[n])]
        if wrong:
            known = [n for n, k in arrays.items() if _may_be(k)]
            raise UsageError(
                f"{wrong[0]!r} is not a field of boxes",
                expected=near(wrong[0], known) if known else "a dataset with boxes",
                found=str(schema.get(wrong[0], "no such field")),
                fix="boxes are arrays of floats, (n, 4): x0, y0, x1, y1 in pixels",
            )
    if not (boxes and images):
        return {}
    others = _rows_of(boxes, arrays, source)
    others[boxes[0]] += tuple(shape_fields(schema, images))
    return {
        name: OnImage(image_of(name, images), (*dict.fromkeys(others[name]),)) for name in boxes
    }


def shape_fields(schema: Schema, images: Sequence[str]) -> dict[str, str]:
    """Return the fields of segmentation and keypoints, each with its image."""
    names = [name for name, kind in schema.items() if is_shape(name, kind)] if images else []
    return {name: image_of(name, images) for name in names}


def json_boxes(schema: Schema) -> list[str]:
    """Return the JSON fields that are named like boxes, or `objects` as on Hugging Face."""
    names = [name for name, kind in schema.items() if isinstance(kind, Json)]
    return [name for name in names if name == "objects" or is_box_name(name)]


def is_box_name(field: str) -> bool:
    return not _NAMES.isdisjoint(re.split("[^a-z]+", field.lower()))


def _is_sure(kind: Array) -> bool:
    shape = kind.shape or ()
    return kind.dtype in _FLOATS and len(shape) == 2 and shape[1] == 4


def _may_be(kind: Array) -> bool:
    number = kind.dtype is None or np.dtype(kind.dtype).kind in "iuf"
    return number and (kind.shape is None or kind.shape[-1:] in ((4,), (None,)))


def _rows_of(
    boxes: Sequence[str], arrays: Collection[str], source: Source | Stream | None
) -> dict[str, tuple[str, ...]]:
    """Return, for each field of boxes, the arrays that have as many rows, in their order.

    Those of WITH_BOXES belong to the first; for others, a few samples decide.
    """
    owner = dict.fromkeys(WITH_BOXES, boxes[0])
    left = [n for n in arrays if n not in (*boxes, *WITH_BOXES) and not is_mask_name(n)]
    some = some_of(source) if left and source is not None else ()
    samples = [d.sample for d in some if not isinstance(d.sample, SampleError)]
    for other in left:
        for name in boxes:
            pairs = [(s[name], s[other]) for s in samples if name in s and other in s]
            fit = all(value.ndim > 0 and len(value) == len(rows) for rows, value in pairs)
            if fit and any(len(rows) for rows, _ in pairs):
                owner.setdefault(other, name)
    return {name: tuple(n for n in arrays if owner.get(n) == name) for name in boxes}
