"""Strict check that an encoded image decodes to its end: warnings of decoders count as damage.

JPEGs are decoded by libjpeg-turbo, whose warnings are errors unless nothing of the image is lost.
Other formats are decoded by Pillow, and a TIFF that Pillow cannot read by tifffile. Pillow silently
fills in missing rows of a PNG whose compressed data end early but correctly, so the rows are
counted here.
"""

from __future__ import annotations

import contextlib
import struct
import warnings
import zlib
from collections.abc import Iterator

from shardkit.codecs import tiff
from shardkit.codecs.header import png_chunks, read_header
from shardkit.codecs.image import (
    NotAnImageError,
    TooLargeError,
    is_unknown_mode,
    opened,
    probe,
    refuse_want_of_memory,
)
from shardkit.codecs.jpeg import decode_jpeg
from shardkit.codecs.values import page_values
from shardkit.options import MAX_PIXELS

# Of an image with several frames or pages: a few minutes of work, as Pillow's for each page of a
# TIFF grows with the pages before it.
MAX_FRAMES, MAX_DECODED = 1 << 15, 1 << 36  # pixels of all frames


class TooManyFramesError(TooLargeError):
    """The image has too many frames or pages for decoding all of them."""

    what = "the image has too many frames or pages"
    expected = f"at most {MAX_FRAMES:,}, of {MAX_DECODED:,} pixels in all"
    fix = "store them as images of their own"


def damage(data: bytes, max_pixels: int = MAX_PIXELS) -> str | None:
    """Return the decoder's message for a damaged image; None for an intact one.

    Raises TooLargeError for an image that is too large to be decoded, and MissingLibraryError if
    only tifffile can decode it; it may be intact.
    """
    try:
        format, width, height = probe(data)
    except NotAnImageError as error:
        return str(error)
    if width * height > max_pixels:
        raise TooLargeError(f"{width:,} x {height:,}")
    if format != "jpeg":
        return _pillow(data, format, width * height)
    try:
        if decode_jpeg(data, read_header(data).colour) is not None:
            return None
    except NotAnImageError as error:
        return str(error)
    return _pillow(data, format, width * height)


def _pillow(data: bytes, format: str, pixels: int) -> str | None:
    import PIL.ImageSequence

    try:
        if format == "png":  # check the checksums of its chunks, which decoding ignores
            with opened(data) as image:
                image.verify()
        with opened(data) as image:
            total = 0
            for number, frame in enumerate(PIL.ImageSequence.Iterator(image), 1):
                total += frame.width * frame.height
                if number > MAX_FRAMES or total > MAX_DECODED:
                    raise TooManyFramesError(f"{number:,} or more, of {total:,} pixels in all")
                frame.load()
        if format == "png":
            return _rows_missing(data)
    except TooLargeError:
        raise
    except Exception as error:  # Pillow's parsers raise any exception on damaged data
        if is_unknown_mode(error):
            return _tiff(data)
        refuse_want_of_memory(error, pixels)
        return str(error) or type(error).__name__
    return None


def _tiff(data: bytes) -> str | None:
    """Decode a TIFF that has pages of which Pillow has no mode."""
    total = 0
    try:
        header = read_header(data)
        for page in tiff.pages(data):
            total += page.width * page.height
            if total > MAX_DECODED:
                raise TooManyFramesError(f"{page.number + 1:,} or more, of {total:,} pixels in all")
            page_values(data, header, page)
    except TooLargeError:
        raise
    except NotAnImageError as error:
        return str(error)
    return None


# First column and row, and steps, of the pixels in each pass of an interlaced PNG.
_ADAM7 = (
    (0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2),
    (0, 1, 1, 2),
)  # fmt: skip
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_INFLATED = 1 << 20  # bytes to decompress at a time


def _rows_missing(data: bytes) -> str | None:
    """Return a message for a PNG with fewer rows, in any frame, than its header says; else None."""
    depth, colour, interlaced = data[24], data[25], data[28]
    passes = _ADAM7 if interlaced else ((0, 0, 1, 1),)

    def size(at: int) -> int:
        """Return the bytes of all rows of the frame whose width and height are at `at`."""
        width, height = struct.unpack_from(">II", data, at)
        sides = [(-((x - width) // dx), -((y - height) // dy)) for x, y, dx, dy in passes]
        bits = depth * _CHANNELS[colour]
        return sum(rows * (1 + -(-columns * bits // 8)) for columns, rows in sides if columns > 0)

    frames = [(size(16), bytearray())]
    for name, start, length in png_chunks(data):
        if name == b"fcTL" and frames[-1][1]:  # one before IDAT belongs to the first frame
            frames.append((size(start + 4), bytearray()))
        elif name in (b"IDAT", b"fdAT"):  # fdAT begins with a sequence number
            frames[-1][1].extend(data[start + 4 * (name == b"fdAT") : start + length])
    for expected, packed in frames:
        found, unpack = 0, zlib.decompressobj()
        left = bytes(packed)
        while left and found < expected:
            found += len(unpack.decompress(left, _INFLATED))
            left = unpack.unconsumed_tail
        if not left:
            found += len(unpack.flush())
        if found < expected:
            return f"a png file whose rows end after {found:,} of {expected:,} bytes"
    return None


@contextlib.contextmanager
def strict_warnings() -> Iterator[None]:
    """Turn Pillow's warning about truncated files into an error, and ignore its other warnings.

    Warning filters are global to the process, so this is entered once, around all threads.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.filterwarnings("error", message="Truncated File Read")
        yield
