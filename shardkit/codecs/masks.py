"""Masks: images whose pixels are class numbers, instances or depth.

A mask gets the geometry of its image, by nearest pixels, and is stored losslessly. Margins are 0.
Values are kept as stored: palettes, profiles and backgrounds are not applied.
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
    """The size of a mask differs from that of its image."""

    what = "the mask does not match its image"
    expected = "the same width and height"
    fix = "resize it to the size of the image"


class DeepMaskError(NotAnImageError):
    """A mask with values that a format cannot hold."""

    what = "the format cannot hold the values of the mask"
    expected = "8 bits"
    fix = "convert to another format, or turn it into an array with your own --transform"


def mask_of(data: bytes, image: Header, window: Window) -> Any:
    """Return the `window` of an upright mask, as a Pillow image. The window has no crop or flip.

    `image` is the header of its image. A mask with the stored size of the image has its
    orientation, unless its own header has one. Raises NotAnImageError.
    """
    from PIL.Image import Resampling

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
        cut = turned(mask, orientation).copy()
    full = (window.full_width, window.full_height)
    if cut.size != full:
        cut = cut.resize(full, Resampling.NEAREST)
    if (window.columns, window.rows) != full:  # Pillow fills a crop beyond the edges with 0
        left, top = window.left, window.top
        cut = cut.crop((left, top, left + window.columns, top + window.rows))
    return cut


def values_of(mask: Any) -> npt.NDArray[Any]:
    """Return the values of a mask: (height, width), or (height, width, channels) for several."""
    values = np.asarray(mask)
    return values.astype(np.uint8) if values.dtype == bool else values


def encode_mask(mask: Any) -> bytes:
    """Encode a mask as a PNG, with its palette, if any; raises ValueError if PNG cannot hold it."""
    file = io.BytesIO()
    try:
        mask.save(file, "PNG")
    except OSError as error:
        raise ValueError(str(error)) from error
    return file.getvalue()


def ppm_mask(mask: Any) -> bytes:
    """Encode a mask as a PPM with its values in all channels, for formats that store PNGs as JPEGs.

    Raises DeepMaskError for values over 8 bits.
    """
    values = values_of(mask)
    if values.dtype != np.uint8 or values.shape[2:] not in ((), (3,)):
        raise DeepMaskError(
            f"a mask of {values.dtype} {values.shape}, but only 8-bit RGB is supported"
        )
    return to_ppm(values if values.ndim == 3 else np.repeat(values[:, :, None], 3, axis=2))


def with_values(mask: Any, values: npt.NDArray[Any]) -> Any:
    """Return a mask with other values, and the palette of `mask`, if it has one.

    Raises ValueError for values that PNG cannot hold.
    """
    from PIL import Image

    try:
        made = Image.fromarray(np.ascontiguousarray(values))
    except TypeError:
        raise ValueError(f"a mask of {values.dtype} {values.shape}") from None
    if mask.mode == "P" and made.mode == "L":
        made.putpalette(mask.getpalette())
    return made
