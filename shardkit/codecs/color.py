"""Colour profiles (ICC): conversion of pixels to sRGB with LittleCMS, through Pillow."""

from __future__ import annotations

import functools
import io
from typing import Any

import numpy as np
import numpy.typing as npt

_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
_SAME = 2  # levels of 255 by which a profile may differ from sRGB and still count as sRGB


class ProfileError(ValueError):
    """The bytes are not a profile, or not one for pixels of this kind."""


@functools.lru_cache(maxsize=64)
def to_srgb(profile: bytes, colour: str) -> Any:
    """Return the transform of pixels ("RGB", "GRAY" or "CMYK") to sRGB; None if it changes nothing.

    The intent is perceptual, as in browsers. Raises ProfileError.
    """
    from PIL import Image, ImageCms

    mode = _MODES[colour]
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if opened.profile.xcolor_space.strip() != colour:
            raise ProfileError(f"a profile of {opened.profile.xcolor_space} on {colour} pixels")
        target = ImageCms.createProfile("sRGB")
        # The optimized transform is coarse in dark greys, and a table of 256 values is fast anyway.
        flags = ImageCms.Flags.NOOPTIMIZE if mode == "L" else ImageCms.Flags.NONE
        intent = ImageCms.Intent.PERCEPTUAL
        made = ImageCms.buildTransform(opened, target, mode, "RGB", intent, flags)
    except (ImageCms.PyCMSError, OSError, ValueError) as error:
        raise ProfileError(str(error)) from error
    if mode == "CMYK":
        return made
    levels = np.arange(256, dtype=np.uint8)
    if mode == "L":
        table = np.array(ImageCms.applyTransform(Image.fromarray(levels[None]), made))[0]
        return None if _is_same(table, levels[:, None]) else table
    cube = np.stack(np.meshgrid(levels[::15], levels[::15], levels[::15]), axis=-1)
    probe = cube.reshape(1, -1, 3)
    found = np.asarray(ImageCms.applyTransform(Image.fromarray(probe), made))
    return None if _is_same(found, probe) else made


def _is_same(found: npt.NDArray[np.uint8], expected: npt.NDArray[np.uint8]) -> bool:
    return bool(np.abs(found.astype(int) - expected).max() <= _SAME)


def converted(pixels: npt.NDArray[np.uint8], transform: Any) -> npt.NDArray[np.uint8]:
    """Convert pixels (height, width[, 3 or 4]) to sRGB (height, width, 3).

    `transform` is the result of `to_srgb`: for grey a table of colours, otherwise LittleCMS's own.
    """
    if isinstance(transform, np.ndarray):
        table: npt.NDArray[np.uint8] = transform
        return table[pixels]
    from PIL import Image, ImageCms

    image = cmyk(pixels) if pixels.shape[2:] == (4,) else Image.fromarray(pixels)
    return np.asarray(ImageCms.applyTransform(image, transform))


def cmyk(pixels: npt.NDArray[np.uint8]) -> Any:
    """Return CMYK pixels (height, width, 4) as a Pillow image."""
    from PIL import Image

    height, width, _ = pixels.shape
    return Image.frombytes("CMYK", (width, height), pixels.tobytes())
