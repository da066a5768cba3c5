"""JPEG by libjpeg-turbo. Its warnings are errors, unless nothing of the image is lost."""

from __future__ import annotations

import functools
import struct

import numpy as np
import simplejpeg

from shardkit.codecs.image import FRAMES, DecodeError, jpeg_segments
from shardkit.codecs.window import Pixels

_END = b"\xff\xd9"
_START = 20  # bytes before a profile: the start marker, and JFIF's segment
_PROFILE_PART = 65519  # bytes at most of a profile in one segment, of which there are 255
_SEQUENTIAL = (0xC0, 0xC1)
_TRIES = 4
# A JPEG is decoded at 1/2, 1/4 or 1/8 where so many times the wanted size is left:
# the result then has 40 dB or more against the whole image (tests/benchmarks/quality.py).
LEFT = 3
# Smaller images gain nothing, and other fractions would give as many pixels.
_SHORTEST = 8


def reduction(width: int, height: int, to_width: int, to_height: int) -> int:
    """8, 4, 2 or 1: the factor by which a JPEG is reduced while it is decoded, before resizing."""
    if max(width, height) < _SHORTEST:
        return 1
    scale = min(width // to_width, height // to_height)
    return next((part for part in (8, 4, 2) if scale >= part * LEFT), 1)


def decode_jpeg(data: bytes, kind: str, width: int = 0, height: int = 0) -> Pixels | None:
    """Pixels, (height, width, channels), of kind "RGB", "GRAY" or "CMYK"; None for a kind of JPEG
    that this library does not read.

    Decoded at the smallest possible size that has `width` and `height`. Raises DecodeError.
    """
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
    """The bytes with the cause of a warning removed, if the image does not depend on it.

    Decoding again then shows other damage: the library gives only its first warning.
    """
    if "extraneous bytes before marker 0xd9" in warning:  # a scan that went wrong leaves some too
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
            at = start + 1 + 2 * data[start]  # behind the components: constant in such files
            changed[at : at + 3] = b"\0\x3f\0"
    return bytes(changed)


def with_huffman_tables(data: bytes) -> bytes:
    """A JPEG without Huffman tables, such as a frame of Motion JPEG, with the standard ones.

    A decoder that is used for several images would else use the tables of the one before.
    """
    frame = next(start for marker, start, _ in jpeg_segments(data) if marker in FRAMES) - 4
    return data[:frame] + _standard_tables() + data[frame:]


@functools.cache
def _standard_tables() -> bytes:
    """The segments with the tables of ITU T.81, annex K.3, which encoders use by default."""
    data: bytes = simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8))
    segments = jpeg_segments(data)
    return b"".join(data[start - 4 : stop] for marker, start, stop in segments if marker == 0xC4)


def encode_jpeg(pixels: Pixels, quality: int, chroma: str, profile: bytes | None) -> bytes:
    """Pixels, (height, width, 3) RGB, as a JPEG. Raises ValueError for too long a profile."""
    data: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels), quality=quality, colorspace="RGB", colorsubsampling=chroma
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
