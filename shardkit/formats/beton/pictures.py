"""What a picture becomes in a .beton: FFCV decodes plain JPEGs and rows of pixels, nothing else.

A JPEG that FFCV decodes rightly is stored byte for byte, a PPM as its pixels. FFCV shows garbage
for all other files, without an error, and overlooks EXIF's orientation: those are encoded anew.
"""

from __future__ import annotations

from typing import NamedTuple

from shardkit.codecs import pixels
from shardkit.codecs.image import NotAnImageError, probe
from shardkit.errors import SampleError
from shardkit.formats.beton.layout import JPEG, RAW

QUALITY = 95
_MAX_SIDE = 0xFFFF


class Picture(NamedTuple):
    """A picture as it is stored; `encoded` says why it is not the bytes that came, or is ""."""

    mode: int
    width: int
    height: int
    data: bytes | memoryview
    encoded: str

    def file(self) -> bytes:
        """The bytes of the file that a reader gives."""
        if self.mode == RAW:
            return pixels.ppm_start(self.width, self.height) + self.data
        return bytes(self.data)


NOTHING = Picture(RAW, 1, 1, bytes(3), "")  # stands where a sample has no picture


def stored(value: bytes) -> Picture:
    """What a picture is stored as; raises ValueError, mostly NotAnImageError, if it cannot be."""
    if value.startswith(b"\xff\xd8\xff"):
        header = pixels.jpeg_header(value)
        if header.oddity:
            return _anew(value, f"{header.oddity} jpeg")
        if header.orientation != 1:
            return _anew(value, "rotated jpeg")
        return Picture(JPEG, header.width, header.height, value, "")
    ppm = pixels.ppm_header(value)
    if ppm is None:
        return _anew(value, _format(value))
    if max(ppm.width, ppm.height) > _MAX_SIDE:
        raise ValueError(f"{ppm.width:,} x {ppm.height:,} pixels, over {_MAX_SIDE:,} a side")
    start = pixels.ppm_start(ppm.width, ppm.height)
    same = ppm.stop == len(value) and value.startswith(start)
    data = memoryview(value)[ppm.start : ppm.stop]
    return Picture(RAW, ppm.width, ppm.height, data, "" if same else "ppm with another header")


def _anew(value: bytes, reason: str) -> Picture:
    rows = pixels.to_rgb(value)
    height, width, _ = rows.shape
    return Picture(JPEG, width, height, pixels.encode_jpeg(rows, QUALITY), reason)


_PORTABLE = {b"P4": "pbm", b"P5": "pgm", b"P6": "16-bit ppm"}


def _format(value: bytes) -> str:
    return _PORTABLE.get(value[:2]) or probe(value).format


def checked(value: bytes, key: str, field: str) -> Picture:
    """What a field's value is stored as; raises SampleError for one that cannot be."""
    try:
        return stored(value)
    except pixels.CutError as error:
        what, found = "the picture is cut", str(error)
        fix = "copy it again, or drop such samples with --on-error skip"
    except NotAnImageError as error:
        what, found = "the value is no picture", str(error)
        fix = "repair or remove it, or drop such samples with --on-error skip"
    except ValueError as error:
        what, found = "a .beton cannot hold the picture", str(error)
        fix = "make it smaller, or drop such samples with --on-error skip"
    raise SampleError(
        what,
        key=key,
        field=field,
        expected="an encoded picture: JPEG, PNG, WebP, GIF, BMP, TIFF or PPM",
        found=found,
        fix=fix,
    )
