"""Whether an encoded picture decodes to its end, strictly: what a decoder forgives is damage here.

JPEG goes through simplejpeg, whose strict mode turns libjpeg's warnings into errors. OpenCV fills
up what is missing without a word, so all else goes through Pillow.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator

from shardkit.codecs.image import format_of


class TooLargeError(Exception):
    """Pillow refuses pictures of so many pixels; that does not make them damaged."""


def damage(data: bytes) -> str | None:
    """What is wrong with a picture, in the decoder's words; None if it is whole.

    Raises TooLargeError for a picture that was not decoded.
    """
    format = format_of(data)
    if format is None:
        return f"bytes that are no picture: {data[:12].hex(' ')}" if data else "0 bytes"
    if format != "jpeg":
        return _pillow(data, format)
    import simplejpeg

    try:
        simplejpeg.decode_jpeg(data, strict=True)
    except ValueError as error:
        if "nsupported" in str(error) or str(error).startswith("tjDecompressHeader"):
            return _pillow(data, format)  # it knows kinds of JPEG that simplejpeg does not take
        return str(error)
    return None


def _pillow(data: bytes, format: str) -> str | None:
    import PIL.Image
    import PIL.ImageSequence

    try:
        if format == "png":  # the checksums of its chunks, which decoding does not look at
            with PIL.Image.open(io.BytesIO(data)) as picture:
                picture.verify()
        with PIL.Image.open(io.BytesIO(data)) as picture:
            for frame in PIL.ImageSequence.Iterator(picture):
                frame.load()
    except PIL.Image.DecompressionBombError:
        raise TooLargeError from None
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
