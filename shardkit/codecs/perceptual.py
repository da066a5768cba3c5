"""Perceptual hashes: numbers that images share if they look alike.

The hash is pHash (Zauner, "Implementation and Benchmarking of Perceptual Image Hash Functions",
2010): the image in grey and 32 x 32 pixels, its discrete cosine transform, and of the 8 x 8 lowest
frequencies which are above their median. Copies of an image in another size, format or quality
differ in a few of the 64 bits; of other images about half differ.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkit.codecs.pixels import to_rgb

_SIDE, _KEPT = 32, 8
_FLAT = 2.0  # standard deviation of grey values, of 256: below it the hash is noise
# Whole numbers, so that sums are exact and the hash is the same on every processor.
_COSINES = np.rint(
    np.cos(np.pi * np.arange(_KEPT)[:, None] * (2 * np.arange(_SIDE) + 1) / (2 * _SIDE)) * 2**20
).astype(np.int64)
_ONES = np.array([number.bit_count() for number in range(1 << 16)], np.uint8)


def perceptual_hash(image: bytes) -> int | None:
    """The hash of an encoded image as it is displayed, of 64 bits; None for one without contrast.

    Raises NotAnImageError for a damaged image.
    """
    from PIL import Image

    pixels = Image.fromarray(to_rgb(image, (_SIDE, _SIDE))).convert("L")
    grey = np.asarray(pixels.resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), np.int64)
    if grey.std() < _FLAT:
        return None
    frequencies = (_COSINES @ grey @ _COSINES.T).ravel()
    bits = np.packbits(frequencies > np.median(frequencies))
    return int.from_bytes(bits.tobytes(), "big")


def distances(one: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    """How many bits differ, pair by pair."""
    parts = (one ^ other).view(np.uint16).reshape(-1, 4)
    found: npt.NDArray[np.uint8] = _ONES[parts].sum(axis=1, dtype=np.uint8)
    return found
