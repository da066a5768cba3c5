"""What is on an image, at load time: masks, boxes, shapes, and arrays with a row per box.

They get the geometry of their image. The values of masks stay unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.boxes import WITH_BOXES, boxes_in, is_boxes, turned_boxes
from shardkit.codecs.header import Header, read_header
from shardkit.codecs.image import NotAnImageError, is_mask_name
from shardkit.codecs.masks import MaskError, mask_of, values_of
from shardkit.codecs.pixels import to_rgb
from shardkit.codecs.shapes import SHAPES, is_shape, kept_rows, moved_shapes
from shardkit.codecs.window import Window, cut_mask
from shardkit.errors import ShardkitError, UsageError
from shardkit.schema import Array, FieldType, Image, Schema

Values = npt.NDArray[Any]

# Kinds of fields on an image, beside those of SHAPES; rows: one per box. Another image is only
# decoded.
MASK, BOXES, ROWS, IMAGE = "mask", "boxes", "rows", "image"


class Failed(NamedTuple):
    """The error of a value, and the index of its field."""

    error: NotAnImageError | ShardkitError
    field: int = 0


class NotAMaskError(NotAnImageError):
    """A mask with more than one value per pixel, or with values that are not integers."""

    what = "the value is not a mask"
    expected = "an integer for each pixel of its image"
    fix = "store the mask as an image of one channel"


class OnImageError(NotAnImageError):
    """A value of one of several fields on an image is invalid; `column` is the field's index."""

    def __init__(self, found: str, column: int) -> None:
        super().__init__(found)
        self.column = column


class BoxesError(OnImageError):
    """A value that is not boxes."""

    what = "the value is not boxes"
    expected = "an array of floats, (n, 4): x0, y0, x1, y1 in pixels of the image"
    fix = "repair it"


class RowsError(OnImageError):
    """An array that does not have a row for each box."""

    what = "the number of rows differs from the number of boxes"
    expected = "a row for each box"
    fix = "repair it, or leave the field out of the transform"


def kinds_of(fields: Sequence[str], schema: Schema) -> tuple[str, ...]:
    """Return the kind of each field that is transformed with an image: mask, boxes, or rows."""
    boxes = [name for name in fields if _may_be_boxes(name, schema[name])]
    if len(boxes) > 1:
        what = "an image can be transformed with only one field of boxes"
        raise UsageError(what, found=", ".join(boxes), fix="concatenate them first")

    return tuple(
        name
        if is_shape(name, schema[name])
        else BOXES
        if name in boxes
        else ROWS
        if boxes and _are_rows(name, schema[name])
        else MASK
        for name in fields
    )


def kinds_given(fields: Sequence[str], schema: Schema) -> tuple[str, ...]:
    """Return the kind of each field that a function gets along with an image; "" for others."""
    on = {name for name in fields if is_on_image(name, schema[name])}
    boxes = [name for name in on if _is_box_name(name) and isinstance(schema[name], Array)]
    kinds = dict.fromkeys(on, MASK) | dict.fromkeys(boxes, BOXES)
    kinds |= {name: name for name in on if is_shape(name, schema[name])}
    if boxes:
        kinds |= dict.fromkeys(WITH_BOXES, ROWS)
    images = {name: IMAGE for name in fields if isinstance(schema[name], Image)}
    return tuple({**images, **kinds}.get(name, "") for name in fields)


def check_mask(name: str, kind: FieldType) -> None:
    """Raise UsageError for a field that cannot be the mask of an image."""
    whole = (
        isinstance(kind, Array)
        and (kind.dtype is None or np.dtype(kind.dtype).kind in "bui")
        and (kind.shape is None or len(kind.shape) in (2, 3))
    )
    if not whole and not isinstance(kind, Image):
        raise UsageError(
            f"field {name!r} cannot be the mask of an image, or boxes on it",
            expected="a field of encoded images, or of integers (height, width); or boxes,"
            " floats (n, 4), along with arrays (n,)",
            found=repr(kind),
        )


def check_rows(fields: Sequence[str], kinds: Sequence[str], schema: Schema) -> None:
    """Raise UsageError if a crop would drop boxes, but not the rows that belong to them."""
    left = [name for name in _with_boxes(schema) if name not in fields]
    if BOXES in kinds and left:
        named = ", ".join(f'"{name}"' for name in (*fields, *left))
        raise UsageError(
            f"a crop drops boxes outside it, but {left[0]!r} also has a row for each box",
            fix=f"include it, ({named}), or leave it out of fields=[...]",
        )


def _with_boxes(schema: Schema) -> list[str]:
    """Return the fields that have a row for each box, by their names."""
    return [n for n, kind in schema.items() if n in WITH_BOXES or is_shape(n, kind)]


def is_on_image(name: str, kind: FieldType) -> bool:
    """Return whether a field has, by its type and name, a mask, boxes or shapes on an image."""
    if is_shape(name, kind):
        return True
    if isinstance(kind, Array) and _is_box_name(name):
        return _may_be_boxes("boxes", kind)
    sides = kind.shape if isinstance(kind, Array) else None
    is_map = isinstance(kind, Image) or (sides is not None and len(sides) in (2, 3))
    return is_map and is_mask_name(name)


def with_what_is_on(image: Sequence[str], schema: Schema) -> tuple[str, ...]:
    """Return the fields of an image, and those that are to be transformed along with them."""
    found = [n for n, kind in schema.items() if n not in image and is_on_image(n, kind)]
    boxes = any(isinstance(schema[name], Array) and _is_box_name(name) for name in found)
    rows = [n for n in _with_boxes(schema) if boxes and n not in (*image, *found)]
    return (*image, *found, *rows)


def _is_box_name(name: str) -> bool:
    return "box" in name.lower()


def _may_be_boxes(name: str, kind: FieldType) -> bool:
    if not isinstance(kind, Array):
        return False
    if kind.dtype is None or kind.shape is None:
        return name == "boxes"
    return np.dtype(kind.dtype).kind == "f" and len(kind.shape) == 2 and kind.shape[1] in (4, None)


def _are_rows(name: str, kind: FieldType) -> bool:
    return isinstance(kind, Array) and (name in WITH_BOXES or len(kind.shape or ()) == 1)


def move(
    columns: Sequence[list[Any]],
    kinds: Sequence[str],
    number: int,
    header: Header,
    window: Window,
    optional: bool = False,
) -> Failed | None:
    """Transform what is on an image with its window; returns the error, if any.

    `columns` have a list of values for each of `kinds`, of which those at `number` are replaced.
    `optional` is whether None is a value that the sample lacks.
    """
    whole = window == Window.whole(*header.upright)
    turn = (header.orientation, (header.width, header.height), None if whole else window)
    for field, kind in sorted(enumerate(kinds), key=lambda pair: pair[1] == BOXES):
        try:
            value = columns[field][number]
            if optional and value is None:
                continue
            if kind in SHAPES and not (whole and header.orientation == 1):
                columns[field][number] = moved_shapes({kind: value}, *turn)[kind]
            elif kind == IMAGE and isinstance(value, bytes):
                columns[field][number] = to_rgb(value)
            elif kind == MASK:
                mask = mask_values(value, header)
                columns[field][number] = cut_mask(mask, window)
            elif kind == BOXES:
                _move_boxes(columns, kinds, number, header, window)
        except OnImageError as error:
            return Failed(error, error.column)
        except NotAnImageError as error:
            return Failed(error, field)
    return None


def _move_boxes(
    columns: Sequence[list[Any]], kinds: Sequence[str], number: int, header: Header, window: Window
) -> None:
    """Raises OnImageError."""
    at = kinds.index(BOXES)
    boxes = columns[at][number]
    if not is_boxes(boxes):
        is_array = isinstance(boxes, np.ndarray)
        raise BoxesError(f"{boxes.dtype} {boxes.shape}" if is_array else f"{boxes!r:.60}", at)
    rows = [n for n, kind in enumerate(kinds) if kind in (ROWS, *SHAPES)]
    rows = [n for n in rows if columns[n][number] is not None]
    for n in rows:
        if len(columns[n][number]) != len(boxes):
            raise RowsError(f"{len(columns[n][number]):,} rows for {len(boxes):,} boxes", n)
    if header.orientation != 1:
        boxes = turned_boxes(boxes, header.orientation, (header.width, header.height))
    if window != Window.whole(*header.upright):
        boxes, kept = boxes_in(boxes, window)
        for n in rows:
            columns[n][number] = kept_rows(columns[n][number], kept)
    columns[at][number] = boxes


def decoded_mask(data: bytes) -> Values:
    """Return the values of an encoded mask (height, width). Raises NotAnImageError."""
    return mask_values(data, read_header(data))


def mask_values(value: Any, image: Header) -> Values:
    """Return the values of a mask (height, width), upright like its image.

    Raises NotAnImageError.
    """
    size = image.upright
    if isinstance(value, bytes):
        value = values_of(mask_of(value, image, Window.whole(*size)))
    if not isinstance(value, np.ndarray):
        raise NotAMaskError(f"{type(value).__name__} {value!r:.60}")
    mask: Values = value
    if mask.ndim == 3 and mask.shape[2] in (1, 3) and (mask == mask[:, :, :1]).all():
        mask = mask[:, :, 0]  # equal channels, as stored by formats with only colour images
    if mask.ndim != 2 or mask.dtype.kind not in "bui":
        raise NotAMaskError(f"an array of {mask.dtype} {mask.shape}")
    if mask.shape != size[::-1]:
        found = f"a mask of {mask.shape[1]} x {mask.shape[0]} pixels"
        raise MaskError(f"{found} on an image of {size[0]} x {size[1]}")
    return mask
