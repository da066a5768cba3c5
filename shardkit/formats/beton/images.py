"""Images as a .beton stores them: FFCV only decodes plain JPEGs and raw pixels.

A JPEG that FFCV decodes correctly is stored byte for byte, a PPM as its pixels. Other images are
re-encoded, because FFCV decodes them to garbage without an error, and ignores EXIF's orientation.
"""

from __future__ import annotations

from typing import NamedTuple

from shardkit.codecs import pixels
from shardkit.codecs.header import Header, read_header
from shardkit.codecs.image import check_end
from shardkit.codecs.jpeg import with_huffman_tables
from shardkit.formats.beton.layout import JPEG, RAW

QUALITY = 95
_MAX_SIDE = 0xFFFF


class Image(NamedTuple):
    """A stored image. `encoded` is the reason why it was re-encoded, or ""."""

    mode: int
    width: int
    height: int
    data: bytes | memoryview
    encoded: str

    def file(self) -> bytes:
        """The image file that a reader returns."""
        if self.mode == RAW:
            return pixels.ppm_start(self.width, self.height) + self.data
        return bytes(self.data)


NOTHING = Image(RAW, 1, 1, bytes(3), "")  # the placeholder for samples without an image


def stored(value: bytes) -> Image:
    """The image as it is stored; raises ValueError, mostly NotAnImageError, if it cannot be."""
    ppm = pixels.ppm_header(value)
    if ppm is None:
        header = read_header(value)
        check_end(value, header.format)
        reason = _reason(header, value)
        if reason:
            return _reencoded(value, reason)
        if not header.huffman:  # FFCV would use the tables of the previous image
            tables = with_huffman_tables(value)
            return Image(JPEG, header.width, header.height, tables, "jpeg without Huffman tables")
        return Image(JPEG, header.width, header.height, value, "")
    if max(ppm.width, ppm.height) > _MAX_SIDE:
        raise ValueError(f"{ppm.width:,} x {ppm.height:,} pixels, more than {_MAX_SIDE:,} per side")
    start = pixels.ppm_start(ppm.width, ppm.height)
    same = ppm.stop == len(value) and value.startswith(start)
    data = memoryview(value)[ppm.start : ppm.stop]
    return Image(RAW, ppm.width, ppm.height, data, "" if same else "ppm with another header")


def _reencoded(value: bytes, reason: str) -> Image:
    rows = pixels.to_rgb(value)
    height, width, _ = rows.shape
    data = pixels.encode(rows, "jpeg", quality=QUALITY, chroma="444")
    return Image(JPEG, width, height, data, reason)


# Properties of images that a JPEG cannot represent.
_LOST = {"animated": "{} (first frame)", "transparent": "{} (transparent)", "16-bit": "{} (16-bit)"}
_PORTABLE = {b"P4": "pbm", b"P5": "pgm", b"P6": "16-bit ppm"}


def _reason(header: Header, value: bytes) -> str:
    """Why an image cannot be stored unchanged; "" for a plain JPEG."""
    if header.format != "jpeg":
        kind = _PORTABLE.get(value[:2]) or header.format
        return _LOST.get(header.oddity, "{}").format(kind)
    oddity = "rotated" if header.orientation != 1 else ""
    return f"{header.oddity or oddity} jpeg" if header.oddity or oddity else ""
