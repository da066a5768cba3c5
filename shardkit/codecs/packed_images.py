"""Images as stored by MDS and LitData: lists of images, and raw pixels of Pillow images."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable
from functools import cache

import numpy as np

from shardkit.codecs.pixels import ppm_start
from shardkit.errors import warn
from shardkit.sample import UnsupportedError


def image_list(decode: Callable[[bytes], bytes], at: int, data: bytes) -> list[bytes]:
    """Return a list of images: their number is at byte `at`, followed by their sizes and data."""
    (count,) = struct.unpack_from("<I", data, at)
    sizes = np.frombuffer(data, "<u4", count, at + 4).tolist() if count else []
    at += 4 + 4 * count
    if at + sum(sizes) != len(data):
        raise ValueError("the sizes of the images in a list do not add up")
    ends = np.cumsum([at, *sizes]).tolist()
    return [decode(data[end - size : end]) for size, end in zip(sizes, ends[1:], strict=True)]


# Bytes per pixel in Pillow's modes, and a lossless format for it.
_MODES = {
    "L": (1, "PPM"), "RGB": (3, "PPM"), "1": (1 / 8, "PNG"), "LA": (2, "PNG"), "RGBA": (4, "PNG"),
    "P": (1, "PPM"), "I;16": (2, "TIFF"), "CMYK": (4, "TIFF"), "I": (4, "TIFF"), "F": (4, "TIFF"),
}  # fmt: skip
_OTHER = ("HSV", "YCbCr", "LAB", "PA", "La", "RGBa", "RGBX")  # no image file of ours keeps them


def pillow_image(data: bytes) -> bytes:
    """Return the pixels of a Pillow image as a file: RGB as PPM, grey as PGM, else PNG or TIFF."""
    width, height, length = struct.unpack_from("<3I", data)
    mode, pixels = data[12 : 12 + length].decode(), data[12 + length :]
    if mode in _OTHER:
        raise UnsupportedError(f"the image has Pillow's mode {mode!r}, not {', '.join(_MODES)}")
    each, format = _MODES.get(mode, (0, ""))
    if not each or math.ceil(width * each) * height != len(pixels):
        raise ValueError(f"{len(pixels):,} bytes for {width} x {height} pixels of mode {mode!r}")
    if mode == "RGB":
        return ppm_start(width, height) + pixels
    import PIL.Image

    file = io.BytesIO()
    if mode == "P":
        mode = "L"
        warn_of_palettes()
    PIL.Image.frombytes(mode, (width, height), pixels).save(file, format)
    return file.getvalue()


@cache  # once per process
def warn_of_palettes() -> None:
    warn(
        "images with a palette (Pillow's mode P) were stored without it by the library that wrote"
        " them: their pixels are the numbers of colours, as grey"
    )
