"""Masks: images whose pixels are class numbers, instances or depth.

A mask gets the geometry of its image, by nearest pixels, and is stored without loss. Margins are 0.
Values are the stored ones: palettes, profiles and backgrounds are not applied.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.header import Header, read_header
from shardkit.codecs.image import NotAnImageError, check_end
from shardkit.codecs.pixels import loaded, to_ppm, turned
from shardkit.codecs.window import Window


class MaskError(NotAnImageError):
    """A mask of another size than its image."""

    what = "the mask does not fit its image"
    expected = "the same width and height"
    fix = "make it of the image's size"


class TooDeepError(NotAnImageError):
    """A mask with values that a format cannot hold."""

    what = "the format cannot hold the values of the mask"
    expected = "8 bits"
    fix = "convert to another format, or make an array of it by a --transform of your own"


def mask_of(data: bytes, image: Header, window: Window) -> Any:
    """The `window` of an upright mask, as a Pillow image. The window has no crop, and no flip.

    `image` is the header of its image. A mask of the image's stored size has the image's
    orientation, unless its own header has one. Raises NotAnImageError.
    """
    header = read_header(data)
    check_end(data, header.format)
    stored, upright = (image.width, image.height), image.upright
    size = (header.width, header.height)
    orientation = header.orientation
    if orientation == 1 and size == stored:
        orientation = image.orientation
    if (size if orientation < 5 else size[::-1]) != upright:
        raise MaskError(
            f"a mask of {size[0]} x {size[1]} pixels on an image of {stored[0]} x {stored[1]}"
        )
    with loaded(data, header) as mask:
        return _cut(turned(mask, orientation).copy(), window)


def _cut(mask: Any, window: Window) -> Any:
    from PIL.Image import Resampling

    size = (window.full_width, window.full_height)
    if mask.size != size:
        mask = mask.resize(size, Resampling.NEAREST)
    if (window.columns, window.rows) != size:  # a crop is 0 beyond the edges
        left, top = window.left, window.top
        mask = mask.crop((left, top, left + window.columns, top + window.rows))
    return mask


def values_of(mask: Any) -> npt.NDArray[Any]:
    """The values of a mask, (height, width), or (height, width, channels) if it has several."""
    values = np.asarray(mask)
    return values.astype(np.uint8) if values.dtype == bool else values


def encode_mask(mask: Any) -> bytes:
    """A mask as a PNG, with its palette if it has one; raises ValueError if no PNG can hold it."""
    file = io.BytesIO()
    try:
        mask.save(file, "PNG")
    except OSError as error:
        raise ValueError(str(error)) from error
    return file.getvalue()


def ppm_mask(mask: Any) -> bytes:
    """A mask as a PPM with its values in all channels, for formats that make JPEGs of PNGs.

    Raises TooDeepError for values over 8 bits.
    """
    values = values_of(mask)
    if values.dtype != np.uint8 or values.shape[2:] not in ((), (3,)):
        raise TooDeepError(
            f"a mask of {values.dtype} {values.shape}, where 8-bit RGB is all there is"
        )
    return to_ppm(values if values.ndim == 3 else np.repeat(values[:, :, None], 3, axis=2))


def with_values(mask: Any, values: npt.NDArray[Any]) -> Any:
    """A mask with other values, and the palette of `mask` where it has one.

    Raises ValueError for values that no PNG can hold.
    """
    from PIL import Image

    try:
        made = Image.fromarray(np.ascontiguousarray(values))
    except TypeError:
        raise ValueError(f"a mask of {values.dtype} {values.shape}") from None
    if mask.mode == "P" and made.mode == "L":
        made.putpalette(mask.getpalette())
    return made
