"""Perceptual hashes: numbers that are similar for images that look alike.

The hash is pHash (Zauner, "Implementation and Benchmarking of Perceptual Image Hash Functions",
2010): the image is reduced to 32 x 32 grey pixels, and the bits say which of the 8 x 8 lowest
frequencies of its discrete cosine transform are above their median. Copies of an image in another
size, format or quality differ in a few of the 64 bits; different images in about half of them.
"""

from __future__ import annotations

import numpy as np

from shardkit.codecs.pixels import to_rgb

_SIDE, _KEPT = 32, 8
_FLAT = 2.0  # standard deviation of the 256 grey levels; below it, the hash is noise
# Integers, so that sums are exact and the hash is the same on every processor.
_COSINES = np.rint(
    np.cos(np.pi * np.arange(_KEPT)[:, None] * (2 * np.arange(_SIDE) + 1) / (2 * _SIDE)) * 2**20
).astype(np.int64)


def perceptual_hash(image: bytes) -> int | None:
    """Return the 64-bit hash of an encoded image as displayed; None for one without contrast.

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
