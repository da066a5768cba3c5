"""Full headers of images: all properties that decoders may treat differently.

A plain image is upright, 8-bit, grey or RGB, opaque, a single frame, and has no colour profile
other than sRGB: all decoders give the same RGB pixels. Layouts: ITU T.81 (JPEG), the PNG
specification, RFC 9649 (WebP), Exif 2.3, ICC.1 annex B (profiles in files).
"""

from __future__ import annotations

import contextlib
import re
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from shardkit.codecs import tiff
from shardkit.codecs.image import (
    FRAMES,
    NotAnImageError,
    UnsupportedError,
    jpeg_segments,
    opened,
    probe,
    refuse_want_of_memory,
    riff_chunks,
)

_FRAME = struct.Struct(">BHHB")
_HUFFMAN = frozenset({0xC0, 0xC1, 0xC2})  # baseline, extended, progressive
_LOSSLESS = frozenset({0xC3, 0xC5, 0xC6, 0xC7})  # and hierarchical
_ORIENTATION = {"<": b"\x12\x01\x03\x00\x01\x00\x00\x00", ">": b"\x01\x12\x00\x03\x00\x00\x00\x01"}
_CHROMA = {(1, 1): "444", (2, 1): "422", (2, 2): "420", (1, 2): "440", (4, 1): "411"}
_PROFILE_BYTES = 16 << 20  # upper limit when decompressing one


class Header(NamedTuple):
    """The header of an image."""

    format: str
    width: int  # pixels, as stored: before EXIF's orientation is applied
    height: int
    orientation: int = 1  # EXIF's number: 1 is upright
    oddity: str = ""  # why the image is not plain, in a word or two; "" if it is
    profile: bytes | None = None  # its ICC profile
    colour: str = "RGB"  # the colour space that a profile is for: RGB, GRAY or CMYK
    lossless: bool = True
    chroma: str = ""  # JPEG: chroma subsampling, "420" and so on
    huffman: bool = False  # JPEG: whether it has Huffman tables
    table: int = 0  # JPEG: the sum of the luma quantization table: higher is coarser
    dtype: str = "uint8"  # of the values of its channels
    channels: int = 3  # as stored, with alpha; palettes and CMYK count as what they become
    pages: int = 1  # of a TIFF, without smaller versions of others

    @property
    def upright(self) -> tuple[int, int]:
        """Width and height of the upright image."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)

    @property
    def is_deep(self) -> bool:
        """Whether 8-bit grey or RGB, with alpha, cannot hold all of its values."""
        return self.dtype != "uint8" or self.pages > 1 or self.oddity == BANDS

    @property
    def kind(self) -> str:
        """The format, and what differs from 8-bit RGB: "png (16-bit, 1 channel)"."""
        return f"{self.format} ({', '.join(self.details)})" if self.details else self.format

    @property
    def details(self) -> list[str]:
        """What differs from 8-bit RGB, in words."""
        bits, words = 8 * np.dtype(self.dtype).itemsize, []
        if self.dtype != "uint8":
            words.append(f"{bits}-bit" if self.dtype == "uint16" else self.dtype)
        if self.channels != 3 or self.oddity == BANDS:
            words.append(f"{self.channels} channel{'s' * (self.channels > 1)}")
        if self.pages > 1:
            words.append(f"{self.pages:,} pages")
        elif self.oddity == "animated":
            words.append(self.oddity)
        return words


def read_header(data: bytes) -> Header:
    """Return the header of an image, without decoding pixels. Raises NotAnImageError."""
    format, width, height = probe(data)
    about: dict[str, Any] = {"width": width, "height": height}
    try:
        about |= _READERS.get(format, _other)(data)
    except (struct.error, IndexError):
        raise NotAnImageError(f"a {format} file that ends inside its header") from None
    header = Header(format, **about)
    if header.colour == "GRAY" and header.profile and header.profile[16:20] == b"RGB ":
        return header._replace(colour="RGB")  # many editors keep an RGB profile in grey images
    return header


# --- JPEG ----------------------------------------------------------------------------------------


def _jpeg(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"lossless": False}
    profile: dict[int, bytes] = {}
    for marker, start, stop in jpeg_segments(data):
        if marker in FRAMES:
            precision, _, _, components = _FRAME.unpack_from(data, start)
            found["oddity"] = _jpeg_oddity(marker, precision, components)
            found["colour"] = {1: "GRAY", 4: "CMYK"}.get(components, "RGB")
            found["channels"] = 1 if components == 1 else 3
            sampling = [divmod(data[start + 7 + 3 * n], 16) for n in range(components)]
            if components == 3 and sampling[1] == sampling[2] == (1, 1):
                found["chroma"] = _CHROMA.get(sampling[0], "")
        elif marker == 0xE1 and data.startswith(b"Exif\0\0", start):
            found["orientation"] = _exif_orientation(data[start + 6 : stop])
        elif marker == 0xE2 and data.startswith(b"ICC_PROFILE\0", start):
            profile[data[start + 12]] = data[start + 14 : stop]
        elif marker == 0xC4:
            found["huffman"] = True
        elif marker == 0xDB:
            found["table"] = _luma_table(data[start:stop]) or found.get("table", 0)
    if profile:
        found["profile"] = b"".join(profile[number] for number in sorted(profile))
    return found


def _jpeg_oddity(marker: int, precision: int, components: int) -> str:
    if marker not in _HUFFMAN:
        return "lossless" if marker in _LOSSLESS else "arithmetic"
    if precision != 8:
        return f"{precision}-bit"
    if components == 4:
        return "cmyk"
    return "" if components in (1, 3) else f"{components}-component"


def _luma_table(tables: bytes) -> int:
    """Return the sum of table 0 in a DQT segment; 0 if the segment does not have it."""
    at = 0
    while at < len(tables):
        size = 128 if tables[at] >> 4 else 64
        if tables[at] & 15 == 0:
            steps = tables[at + 1 : at + 1 + size]
            return sum(steps) if size == 64 else sum(struct.unpack(">64H", steps))
        at += 1 + size
    return 0


def _exif_orientation(tiff: bytes) -> int:
    """Return the orientation in EXIF data; 1 if there is none, or an invalid one."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None or _ORIENTATION[order] not in tiff:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, start)
        for entry in range(start + 2, start + 2 + 12 * count, 12):
            if tiff[entry : entry + 8] == _ORIENTATION[order]:
                (number,) = struct.unpack_from(order + "H", tiff, entry + 8)
                return int(number) if 1 <= number <= 8 else 1
    except struct.error:
        pass
    return 1


# --- PNG -----------------------------------------------------------------------------------------


def _png(data: bytes) -> dict[str, Any]:
    depth, colours = data[24], data[25]
    found: dict[str, Any] = {"colour": "RGB" if colours & 2 else "GRAY"}
    found["channels"] = (3 if colours & 2 else 1) + bool(colours & 4)
    if depth == 16:
        found |= {"oddity": "16-bit", "dtype": "uint16"}
    if colours & 4:
        found["oddity"] = "transparent"
    for name, start, size in png_chunks(data):
        if name == b"tRNS":
            found["oddity"] = "transparent"
            found["channels"] = 4 if colours & 2 else 2
        elif name == b"acTL":
            found["oddity"] = "animated"
        elif name == b"iCCP":
            packed = data[start : start + size].partition(b"\0")[2][1:]
            found["profile"] = _unpacked(packed)
        elif name == b"eXIf":
            found["orientation"] = _exif_orientation(data[start : start + size])
    return found


def png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, content offset and size of each chunk. Bytes after the last one are ignored."""
    at, name = 8, b""
    while at < len(data) and name != b"IEND":
        size, name = struct.unpack_from(">I4s", data, at)
        yield name, at + 8, size
        at += 12 + size


def _unpacked(packed: bytes) -> bytes:
    """Return a decompressed profile; b"", an invalid profile, if that fails."""
    with contextlib.suppress(zlib.error):
        return zlib.decompressobj().decompress(packed, _PROFILE_BYTES)
    return b""


# --- WebP ----------------------------------------------------------------------------------------


def _webp(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"lossless": False}
    for name, start, size in riff_chunks(data):
        if name == b"VP8X":
            if data[start] & 0x10:
                found["oddity"] = "transparent"
            if data[start] & 0x02:
                found["oddity"] = "animated"
        elif name == b"VP8L":
            found["lossless"] = True
            if data[start + 4] & 0x10 and "oddity" not in found:
                found["oddity"] = "transparent"
        elif name == b"ICCP":
            found["profile"] = data[start : start + size]
        elif name == b"ANMF":  # a frame: its first chunk says how it is compressed
            found["lossless"] |= data.startswith(b"VP8L", start + 16)
        elif name == b"EXIF":
            found["orientation"] = _exif_orientation(
                data[start : start + size].removeprefix(b"Exif\0\0")
            )
    return found | ({"channels": 4} if found.get("oddity") == "transparent" else {})


# --- PPM -----------------------------------------------------------------------------------------

PPM_SPACE = rb"(?:\s|#[^\r\n]*[\r\n])+"  # between the words of a header; comments count as space
_MAXIMUM = re.compile(rb"P[56]" + (PPM_SPACE + rb"\d+") * 2 + PPM_SPACE + rb"(\d+)")


def _ppm(data: bytes) -> dict[str, Any]:
    maximum = _MAXIMUM.match(data)
    many = maximum is not None and int(maximum[1]) > 255
    return {**_other(data), **({"oddity": "16-bit", "dtype": "uint16"} if many else {})}


# --- TIFF ----------------------------------------------------------------------------------------

BANDS = "more bands than colours"


def _tiff(data: bytes) -> dict[str, Any]:
    pages = tiff.pages(data)
    first = pages[0]
    about: dict[str, Any] = {"dtype": first.dtype, "channels": first.channels, "pages": len(pages)}
    if first.bands:
        return about | {"orientation": first.orientation, "oddity": BANDS}
    try:
        return about | _other(data, len(pages))
    except UnsupportedError:  # Pillow has no mode for its type
        return about | {"orientation": first.orientation, "oddity": first.dtype}


# --- other formats, by Pillow --------------------------------------------------------------------


def _other(data: bytes, pages: int = 0) -> dict[str, Any]:
    with opened(data) as image:
        try:
            return {**_described(image), **({"oddity": "animated"} if pages > 1 else {})}
        except Exception as error:  # Pillow's parsers raise any exception on damaged data
            refuse_want_of_memory(error, 0)
            raise NotAnImageError(f"a damaged image: {error}") from error


def of_unknown_white(image: Any) -> str:
    """Return what kind of pixels a Pillow image has, if it is not defined which value is white."""
    if image.mode == "F":
        return "floating-point"
    if image.format != "TIFF":
        return ""
    if _SIGNED in image.tag_v2.get(_SAMPLE_FORMAT, ()):
        return "signed"
    return "32-bit" if image.mode == "I" and max(image.tag_v2.get(_BITS, (8,))) > 16 else ""


def _described(image: Any) -> dict[str, Any]:
    mode, tiff = image.mode, image.format == "TIFF"
    colour = "CMYK" if mode == "CMYK" else "GRAY" if mode in _GREY else "RGB"
    oddity = "cmyk" if mode == "CMYK" else of_unknown_white(image)
    if mode.startswith("I") or (tiff and max(image.tag_v2.get(_BITS, (8,))) > 8):
        oddity = oddity or "16-bit"
    if mode in ALPHA_MODES or "transparency" in image.info:
        oddity = "transparent"
    if getattr(image, "is_animated", False) and not tiff:
        oddity = "animated"
    found: dict[str, Any] = {"oddity": oddity, "colour": colour}
    if not tiff:
        found["channels"] = _CHANNELS.get(mode, 3) + (mode == "P" and "transparency" in image.info)
        found["dtype"] = "uint16" if mode.startswith("I") else "uint8"
    profile = image.info.get("icc_profile")
    if profile is not None:
        found["profile"] = profile if isinstance(profile, bytes) else b""
    orientation = image.getexif().get(_ORIENTATION_TAG, 1) if tiff else 1
    if orientation in range(2, 9):
        found["orientation"] = orientation
        if orientation >= 5:  # Pillow gives the size of the upright image
            found["height"], found["width"] = image.size
    return found


ALPHA_MODES = ("RGBA", "RGBa", "LA", "La", "PA")  # of Pillow's images
_GREY = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "F"}
_BITS, _SAMPLE_FORMAT, _SIGNED = 258, 339, 2  # tags of TIFF, and the value for signed integers
_ORIENTATION_TAG = 0x0112
_CHANNELS = {"1": 1, "L": 1, "LA": 2, "RGBA": 4, "I": 1}  # by mode, if not 3
_READERS = {"jpeg": _jpeg, "png": _png, "webp": _webp, "ppm": _ppm, "tiff": _tiff}
