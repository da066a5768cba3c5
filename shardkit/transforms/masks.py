"""Transforms of masks at load time: they get the geometry of their image, with unchanged values."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.header import Header
from shardkit.codecs.image import NotAnImageError
from shardkit.codecs.masks import MaskError, mask_of, values_of
from shardkit.codecs.window import Window

Values = npt.NDArray[Any]


class ColourError(NotAnImageError):
    """A mask with more than one value per pixel, or with values that are not integers."""

    what = "the value is not a mask"
    expected = "an integer for each pixel of its image"
    fix = "store the mask as an image of one channel"


def mask_values(value: Any, image: Header) -> Values:
    """Return the values of a mask (height, width), upright like its image.

    Raises NotAnImageError.
    """
    size = image.upright
    if isinstance(value, bytes):
        value = values_of(mask_of(value, image, Window.whole(*size)))
    if not isinstance(value, np.ndarray):
        raise ColourError(f"{type(value).__name__} {value!r:.60}")
    mask: Values = value
    if mask.ndim == 3 and mask.shape[2] in (1, 3) and (mask == mask[:, :, :1]).all():
        mask = mask[:, :, 0]  # equal channels, as stored by formats with only colour images
    if mask.ndim != 2 or mask.dtype.kind not in "bui":
        raise ColourError(f"an array of {mask.dtype} {mask.shape}")
    if mask.shape != size[::-1]:
        raise MaskError(
            f"a mask of {mask.shape[1]} x {mask.shape[0]} pixels on an image of "
            f"{size[0]} x {size[1]}"
        )
    return mask


def cut_mask(mask: Values, window: Window) -> Values:
    """Return the window of a mask: nearest values, and 0 in margins."""
    columns, no_columns = _sources(
        window.x, window.width, window.full_width, window.left, window.columns
    )
    rows, no_rows = _sources(window.y, window.height, window.full_height, window.top, window.rows)
    if window.flip:
        columns, no_columns = columns[::-1], no_columns[::-1]
    made: Values = mask[rows][:, columns]
    made[no_rows] = 0
    made[:, no_columns] = 0
    return made


def _sources(
    start: int, length: int, full: int, first: int, count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return, along one side, the source index of each new value, and which ones have no source."""
    wanted = np.arange(first, first + count)
    outside = (wanted < 0) | (wanted >= full)
    return start + _nearest(length, full)[wanted.clip(0, full - 1)], outside


@functools.lru_cache(maxsize=1024)
def _nearest(length: int, full: int) -> npt.NDArray[np.int64]:
    """Return the index of the nearest of `length` values for each of `full`, as in Pillow."""
    from PIL import Image

    line = Image.fromarray(np.arange(length, dtype=np.int32)[None])
    nearest: npt.NDArray[np.int64] = np.array(line.resize((full, 1), Image.Resampling.NEAREST))[0]
    return nearest
