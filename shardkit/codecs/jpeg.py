"""JPEG with libjpeg-turbo. Its warnings are errors, unless nothing of the image is lost.

simplejpeg is imported where it is used, as it switches on the lock of a free-threaded Python.
"""

from __future__ import annotations

import functools
import struct

import numpy as np

from shardkit.codecs.image import FRAMES, DecodeError, jpeg_segments
from shardkit.codecs.window import Pixels

_END = b"\xff\xd9"
_START = 20  # bytes before a profile: the start marker and the JFIF segment
_PROFILE_PART = 65519  # most bytes of a profile in one segment, of up to 255 segments
_SEQUENTIAL = (0xC0, 0xC1)
_TRIES = 4
# A JPEG is decoded at 1/2, 1/4 or 1/8 if the result still has this many times the wanted size:
# the PSNR is then 40 dB or more against the full image (tests/benchmarks/quality.py).
LEFT = 3
# Smaller images gain nothing, and several fractions would give the same number of pixels.
_SHORTEST = 8


def reduction(width: int, height: int, to_width: int, to_height: int) -> int:
    """Return the factor (8, 4, 2 or 1) by which a JPEG is reduced in decoding, before resizing."""
    if max(width, height) < _SHORTEST:
        return 1
    scale = min(width // to_width, height // to_height)
    return next((part for part in (8, 4, 2) if scale >= part * LEFT), 1)


def decode_jpeg(data: bytes, kind: str, width: int = 0, height: int = 0) -> Pixels | None:
    """Return pixels (height, width, channels) of kind "RGB", "GRAY" or "CMYK"; None for a kind of
    JPEG that this library does not support.

    Decodes at the smallest size that is at least `width` x `height`. Raises DecodeError.
    """
    import simplejpeg

    for _ in range(_TRIES):
        try:
            pixels: Pixels = simplejpeg.decode_jpeg(data, kind, min_height=height, min_width=width)
            return pixels
        except ValueError as error:
            words = str(error)
        if "nsufficient memory" in words:
            raise MemoryError(words)
        if "nsupported" in words or words.startswith("tjDecompressHeader"):
            return None
        mended = _mended(data, words)
        if mended == data:
            break
        data = mended
    raise DecodeError(f"a damaged jpeg file: {words}")


def _mended(data: bytes, warning: str) -> bytes:
    """Return the bytes with the cause of a warning removed, if the image does not depend on it.

    Decoding again then shows any other damage, as the library reports only its first warning.
    """
    if "extraneous bytes before marker 0xd9" in warning:  # a damaged scan leaves some, too
        pixels, end, _ = data.rpartition(_END)
        return pixels.rstrip(b"\0") + end
    changed = bytearray(data)
    frame = 0
    for marker, start, _ in jpeg_segments(data):
        if marker in _SEQUENTIAL:
            frame = marker
        if marker == 0xE0 and "JFIF revision" in warning and data.startswith(b"JFIF\0", start):
            changed[start + 5] = 1
        elif marker == 0xDA and "SOS parameters" in warning and frame:
            at = start + 1 + 2 * data[start]  # after the components: constant in sequential files
            changed[at : at + 3] = b"\0\x3f\0"
    return bytes(changed)


def with_huffman_tables(data: bytes) -> bytes:
    """Add the standard Huffman tables to a JPEG without any, such as a frame of Motion JPEG.

    A decoder that is reused for several images would otherwise use those of the previous one.
    """
    frame = next(start for marker, start, _ in jpeg_segments(data) if marker in FRAMES) - 4
    return data[:frame] + _standard_tables() + data[frame:]


@functools.cache
def _standard_tables() -> bytes:
    """Return the segments with the tables of ITU T.81, annex K.3, the default of encoders."""
    import simplejpeg

    data: bytes = simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8))
    segments = jpeg_segments(data)
    return b"".join(data[start - 4 : stop] for marker, start, stop in segments if marker == 0xC4)


def encode_jpeg(pixels: Pixels, quality: int, chroma: str, profile: bytes | None) -> bytes:
    """Encode pixels, RGB or grey (height, width, 3 or 1), as a JPEG.

    Raises ValueError for too long a profile.
    """
    import simplejpeg

    colours, chroma = ("RGB", chroma) if pixels.shape[2] == 3 else ("GRAY", "Gray")
    data: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels), quality=quality, colorspace=colours, colorsubsampling=chroma
    )
    if profile is None:
        return data
    parts = [profile[at : at + _PROFILE_PART] for at in range(0, len(profile), _PROFILE_PART)]
    if len(parts) > 255:
        raise ValueError(f"a colour profile of {len(profile):,} bytes, which no jpeg can hold")
    segments = [
        b"\xff\xe2%sICC_PROFILE\0%c%c%s" % (struct.pack(">H", 16 + len(p)), n, len(parts), p)
        for n, p in enumerate(parts, 1)
    ]
    return b"".join([data[:_START], *segments, data[_START:]])
