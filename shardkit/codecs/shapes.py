"""Segmentation and keypoints of the objects on an image: masks of them, and how they move with it.

The field `segmentation` is a list with COCO's value for each object: polygons, [[x0, y0, x1, y1,
...], ...], RLE, or None. `keypoints` are floats (n, k, 3): x, y, and COCO's visibility: 0 for a
point that is not labelled, whose x and y are 0, too; 1: hidden, 2: visible. Coordinates are
continuous, as those of boxes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs import rle
from shardkit.codecs.boxes import Points, inner_edges, placed
from shardkit.codecs.image import NotAnImageError
from shardkit.codecs.window import Window, cut_mask
from shardkit.errors import UsageError
from shardkit.options import MAX_PIXELS
from shardkit.schema import FieldType, Json, holds_keypoints

_Edges = tuple[Points, Points]  # lowest and highest x, y
_Steps = npt.NDArray[np.int64]  # fine coordinates

SEGMENTATION, KEYPOINTS = "segmentation", "keypoints"
SHAPES = (SEGMENTATION, KEYPOINTS)
_DIGITS = 3  # decimals of polygons that were moved
_FINE = 5  # steps per pixel of an outline, as in COCO's own library
_FARTHEST = 1 << 28  # coordinate beyond which an outline is cut off
_CROSSINGS = 1 << 22  # most columns that an outline crosses, counted each time
_MOST = 1 << 32  # pixels of all masks of one image


class SegmentationError(NotAnImageError):
    """The segmentation of an object that is not one as COCO has it."""

    what = "the value is not the segmentation of objects"
    expected = "for each object a list of polygons, RLE of the size of the image, or null"
    fix = "repair it; if it is something else, a conversion leaves it alone with --boxes none"


def is_shape(name: str, kind: FieldType | None) -> bool:
    """Return whether a field has the segmentation or keypoints of objects, by name and type."""
    return (name == SEGMENTATION and isinstance(kind, Json)) or (
        name == KEYPOINTS and holds_keypoints(kind)
    )


def kept_rows(values: Any, kept: npt.NDArray[np.bool_]) -> Any:
    """Return those rows of an array or a list that are `kept`."""
    return values[kept] if isinstance(values, np.ndarray) else [*compress(values, kept)]


def rows_in(value: Any) -> int:
    """Return the number of rows of an array, or of a list, also of one that is still JSON text."""
    return len(_objects(value) if isinstance(value, str) else value)


def check_segmentation(value: Any) -> None:
    """Raise SegmentationError if a value is not the segmentation of an object."""
    try:
        if isinstance(value, dict):
            rle.counts_of(value)
        elif value is not None:
            _polygons(value)
    except ValueError as error:
        raise SegmentationError(f"{error}") from error


def _polygons(value: Any) -> list[Points]:
    """Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"{type(value).__name__} {value!r:.40}")
    for polygon in value:
        if not isinstance(polygon, list) or not {*map(type, polygon)} <= {int, float}:
            raise ValueError(f"a polygon that is not a list of numbers: {polygon!r:.40}")
        if len(polygon) % 2:
            raise ValueError(f"a polygon of {len(polygon)} numbers: x, y, x, y, ...")
    try:
        found = [np.array(polygon, np.float64).reshape(-1, 2) for polygon in value]
    except OverflowError as error:
        raise ValueError(str(error)) from error
    if not all(np.isfinite(points).all() for points in found):
        raise ValueError("a polygon with a coordinate that is not finite")
    return found


def masks(segmentation: Sequence[Any], height: int, width: int) -> npt.NDArray[np.uint8]:
    """Return the masks of the objects on an image, uint8 (n, height, width), of 0 and 1.

    segmentation: the value of the field: for each object polygons, RLE, or None for no pixels.
    height, width: the size of the image, in pixels.

    The masks equal those of pycocotools' `annToMask`. Raises UsageError for a value that is not a
    segmentation of this size.
    """
    if not all(isinstance(side, int | np.integer) and side >= 0 for side in (height, width)):
        raise UsageError("height and width are numbers of pixels", found=f"{height!r}, {width!r}")
    try:
        objects = _objects(segmentation)
        _check_pixels(len(objects), (width, height))
        made = np.zeros((len(objects), height, width), np.uint8)
        for number, one in enumerate(objects):
            if isinstance(one, dict):
                made[number] = _decoded(one, (width, height))
            else:
                for polygon in _polygons(one or []):
                    _fill(made[number], polygon)
    except ValueError as error:
        raise UsageError(
            SegmentationError.what,
            expected=SegmentationError.expected,
            found=str(error),
            fix="give the size of the image to which it belongs",
        ) from error
    return made


def _check_pixels(count: int, size: tuple[int, int]) -> None:
    """Raise SegmentationError for masks that would take too much memory, or time."""
    if size[0] * size[1] > MAX_PIXELS or count * size[0] * size[1] > _MOST:
        raise SegmentationError(f"{count:,} masks of {size[0]:,} x {size[1]:,} pixels")


def _objects(value: Any) -> list[Any]:
    """Return the segmentation of each object, also of a value that is still JSON text."""
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, list | tuple):
        raise SegmentationError(f"{type(found).__name__} {found!r:.40}")
    return [*found]


def _decoded(value: dict[str, Any], size: tuple[int, int]) -> rle.Mask:
    mask = rle.decode(value)
    if mask.shape != size[::-1]:
        found = f"a mask of {mask.shape[1]} x {mask.shape[0]} pixels"
        raise SegmentationError(f"{found} on an image of {size[0]} x {size[1]}")
    return mask


def _fill(mask: rle.Mask, polygon: Points) -> None:
    """Fill a polygon: in each column the pixels below an odd number of edges."""
    height, width = mask.shape
    columns, rows = _crossings(polygon, width)
    if not len(columns):
        return
    high = np.ceil(((rows + 0.5) / _FINE - 0.5).clip(0, height)).astype(np.int64)
    first, count = columns.min(), np.ptp(columns) + 1
    places = (columns - first) * (height + 1) + high
    turns = np.bincount(places, minlength=count * (height + 1)).reshape(count, height + 1)
    inside = turns[:, :height].cumsum(axis=1).T & 1
    mask[:, first : first + count] |= inside.astype(np.uint8)


def _crossings(polygon: Points, width: int) -> tuple[_Steps, _Steps]:
    """Return where the outline crosses the middle of a column: columns, and rows in fine steps.

    An edge is drawn in steps of a fifth of a pixel along its longer side, as in `rleFrPoly` of
    COCO's library, whose rounding this repeats. Raises SegmentationError for too long outlines.
    """
    fine = np.trunc(_FINE * polygon.clip(-_FARTHEST, _FARTHEST) + 0.5).astype(np.int64)
    ends = np.stack([fine, np.roll(fine, -1, axis=0)], axis=1)  # (edges, 2 ends, x and y)
    sides = np.abs(ends[:, 1] - ends[:, 0])
    flat = sides[:, 0] >= sides[:, 1]
    along = ends[np.arange(len(ends)), :, np.where(flat, 0, 1)]
    ends = np.where((along[:, 0] > along[:, 1])[:, None, None], ends[:, ::-1], ends)
    # A column is crossed between the fine steps 2 and 3 of its pixel.
    first = (-((2 - ends[..., 0].min(axis=1)) // _FINE)).clip(0)
    last = ((ends[..., 0].max(axis=1) - 3) // _FINE).clip(None, width - 1)
    counts = (last - first + 1).clip(0)
    if counts.sum() > _CROSSINGS:
        raise SegmentationError(f"an outline that crosses {counts.sum():,} columns of pixels")
    edge = np.repeat(np.arange(len(ends)), counts)
    column = np.arange(len(edge)) - np.repeat(counts.cumsum() - counts, counts) + first[edge]
    row, is_flat = np.empty(len(edge), np.int64), flat[edge]
    for wanted, rows_of in ((is_flat, _rows_on_flat), (~is_flat, _rows_on_steep)):
        row[wanted] = rows_of(ends[edge[wanted]], _FINE * column[wanted] + 2)
    return column, row


def _rows_on_flat(ends: _Steps, step: _Steps) -> Points:
    """Return the upper row of edges at a step of x and the next one."""
    (x0, y0), (x1, y1) = ends[:, 0].T, ends[:, 1].T
    slope, at = (y1 - y0) / (x1 - x0), step - x0
    found: Points = np.trunc(y0 + slope * np.stack([at, at + 1]) + 0.5).min(axis=0)
    return found


def _rows_on_steep(ends: _Steps, step: _Steps) -> Points:
    """Return the last row before edges get from a step of x to the next one, or back."""
    (x0, y0), (x1, y1) = ends[:, 0].T, ends[:, 1].T
    slope = (x1 - x0) / (y1 - y0)
    at = np.floor((step + 0.5 - x0) / slope) - 1  # rounding decides which of the next three
    for _ in range(3):
        at += (x0 + slope * at + 0.5 >= step + 1) != (slope > 0)
    found: Points = y0 + at - 1
    return found


def scaled_shapes(sample: Mapping[str, Any], size: tuple[int, int]) -> dict[str, Any]:
    """Return the shapes in a sample, in pixels instead of shares of the image's width and height.

    Raises SegmentationError for RLE, which has a size of its own.
    """

    def no_mask(value: dict[str, Any]) -> dict[str, Any]:
        raise SegmentationError("RLE among shares of the image's size")

    return _moved(sample, lambda points: points * size, no_mask, None)


def moved_shapes(
    sample: Mapping[str, Any], orientation: int, size: tuple[int, int], window: Window | None = None
) -> dict[str, Any]:
    """Return the shapes in a sample, moved along with their image.

    The image, of `size`, width and height, is turned as EXIF says, and cut to a window, where
    polygons are clipped, and keypoints outside are no longer labelled. Raises SegmentationError.
    """

    def points(given: Points) -> Points:
        turned = turned_points(given, orientation, size)
        return turned if window is None else _points_in(turned, window)

    count = 0

    def mask(value: dict[str, Any]) -> dict[str, Any]:
        nonlocal count
        count += 1
        _check_pixels(count, size)
        turned = _turned_mask(_decoded(value, size), orientation)
        return rle.encode(turned if window is None else cut_mask(turned, window), value)

    return _moved(sample, points, mask, None if window is None else _edges(window))


def _edges(window: Window) -> _Edges:
    """Return the first and last x, y that show the image, after mirroring."""
    low, high = inner_edges(window)
    if window.flip:
        low[0], high[0] = window.columns - high[0], window.columns - low[0]
    return low, high


def _moved(
    sample: Mapping[str, Any],
    points: Callable[[Points], Points],
    mask: Callable[[dict[str, Any]], dict[str, Any]],
    edges: _Edges | None,
) -> dict[str, Any]:
    def outlines(polygons: list[Any]) -> list[list[float]]:
        moved = [points(polygon) for polygon in _polygons(polygons)]
        if edges is not None:
            moved = [_clipped(polygon, *edges) for polygon in moved]
        return [polygon.round(_DIGITS).ravel().tolist() for polygon in moved if len(polygon)]

    made: dict[str, Any] = {}
    if KEYPOINTS in sample:
        made[KEYPOINTS] = _moved_keypoints(sample[KEYPOINTS], points, edges)
    if SEGMENTATION in sample:
        try:
            made[SEGMENTATION] = [
                mask(one) if isinstance(one, dict) else one and outlines(one)
                for one in _objects(sample[SEGMENTATION])
            ]
        except ValueError as error:
            raise SegmentationError(str(error)) from error
    return made


def _clipped(polygon: Points, low: Points, high: Points) -> Points:
    """Return the part of a polygon in a rectangle: cut at one side after the other."""
    for axis, sign, limit in ((0, 1, low[0]), (1, 1, low[1]), (0, -1, high[0]), (1, -1, high[1])):
        beyond = sign * (polygon[:, axis] - limit)
        inside: npt.NDArray[np.bool_] = beyond >= 0
        if not inside.all():
            following, after = np.roll(polygon, -1, axis=0), np.roll(beyond, -1)
            cuts = inside != np.roll(inside, -1)
            share = np.divide(beyond, beyond - after, out=np.zeros_like(beyond), where=cuts)
            cut = polygon + share[:, None] * (following - polygon)
            cut[:, axis] = limit
            kept = np.stack([inside, cuts], axis=1)
            polygon = np.stack([polygon, cut], axis=1)[kept]
    return polygon


def _moved_keypoints(
    keypoints: npt.NDArray[Any], points: Callable[[Points], Points], edges: _Edges | None
) -> npt.NDArray[Any]:
    made = keypoints.copy()
    made[..., :2] = moved = points(keypoints[..., :2].astype(np.float64))
    gone = keypoints[..., 2] == 0
    if edges is not None:
        gone |= ((moved < edges[0]) | (moved > edges[1])).any(axis=-1)
    made[gone] = 0
    return made


def turned_points(points: Points, orientation: int, size: tuple[int, ...]) -> Points:
    """Return points on an image of this width and height after it is turned upright."""
    x, y = points[..., 0], points[..., 1]
    if orientation in (2, 3, 7, 8):
        x = size[0] - x
    if orientation in (3, 4, 6, 7):
        y = size[1] - y
    return np.stack([y, x] if orientation >= 5 else [x, y], axis=-1)


def _turned_mask(mask: rle.Mask, orientation: int) -> rle.Mask:
    if orientation in (2, 3, 7, 8):
        mask = mask[:, ::-1]
    if orientation in (3, 4, 6, 7):
        mask = mask[::-1]
    return mask.T if orientation >= 5 else mask


def _points_in(points: Points, window: Window) -> Points:
    made = placed(points, window)
    if window.flip:
        made[..., 0] = window.columns - made[..., 0]
    return made
