"""Whether an encoded picture decodes to its end, strictly: what a decoder forgives is damage here.

JPEG goes through libjpeg-turbo, whose warnings are errors unless nothing of the picture is lost.
OpenCV fills up what is missing without a word, so all else goes through Pillow.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from shardkit.codecs.header import read_header
from shardkit.codecs.image import NotAnImageError, opened, probe
from shardkit.codecs.jpeg import decode_jpeg
from shardkit.options import MAX_PIXELS


class TooLargeError(Exception):
    """Pictures of so many pixels are not decoded; that does not make them damaged."""


def damage(data: bytes, max_pixels: int = MAX_PIXELS) -> str | None:
    """What is wrong with a picture, in the decoder's words; None if it is whole.

    Raises TooLargeError for a picture that was not decoded.
    """
    try:
        format, width, height = probe(data)
    except NotAnImageError as error:
        return str(error)
    if width * height > max_pixels:
        raise TooLargeError
    if format != "jpeg":
        return _pillow(data, format)
    try:
        if decode_jpeg(data, read_header(data).colour) is not None:
            return None
    except NotAnImageError as error:
        return str(error)
    return _pillow(data, format)


def _pillow(data: bytes, format: str) -> str | None:
    import PIL.ImageSequence

    try:
        if format == "png":  # the checksums of its chunks, which decoding does not look at
            with opened(data) as picture:
                picture.verify()
        with opened(data) as picture:
            for frame in PIL.ImageSequence.Iterator(picture):
                frame.load()
    except Exception as error:  # its parsers raise whatever damage leads them to
        return str(error) or type(error).__name__
    return None


@contextlib.contextmanager
def strict_warnings() -> Iterator[None]:
    """Pillow's one warning that means damage is an error inside; its others are not shown.

    Filters of warnings belong to the process, so this is entered once and around all threads.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.filterwarnings("error", message="Truncated File Read")
        yield
