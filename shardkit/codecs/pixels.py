"""Pixels of encoded pictures, the same on every machine: what one becomes in formats of pixels.

`to_rgb` gives what a person sees: the first frame, turned as its EXIF data say, in 8-bit RGB.
- Transparent pixels show white.
- Palettes and grey become RGB; of 16-bit samples the high byte counts.
- CMYK becomes RGB without a colour profile, as Pillow does it; no picture's profile is applied.
- Floating-point pixels have no range, and are refused.
"""

from __future__ import annotations

import io
import re
import struct
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from shardkit.codecs.image import NotAnImageError

if TYPE_CHECKING:
    import numpy.typing as npt

_SEGMENT = struct.Struct(">BBH")
_FRAME = struct.Struct(">BHHB")
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a segment
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_HUFFMAN = frozenset({0xC0, 0xC1, 0xC2})  # baseline, extended, progressive
_LOSSLESS = frozenset({0xC3, 0xC5, 0xC6, 0xC7})  # and hierarchical
_END = b"\xff\xd9"
_ORIENTATION = {"<": b"\x12\x01\x03\x00\x01\x00\x00\x00", ">": b"\x01\x12\x00\x03\x00\x00\x00\x01"}


class CutError(NotAnImageError):
    """The end of the picture is not there."""


class JpegHeader(NamedTuple):
    """What the header of a JPEG says; `oddity` is what sets it apart from plain ones, or ""."""

    width: int
    height: int
    oddity: str
    orientation: int  # EXIF's number: 1 is upright


def jpeg_header(data: bytes) -> JpegHeader:
    """Read a JPEG's header, in microseconds: no pixel is decoded.

    Raises NotAnImageError for a header that is none, CutError for a picture without its end.
    """
    try:
        header, scan = _walk(data)
    except (struct.error, IndexError):
        raise NotAnImageError("a jpeg file that ends inside its header") from None
    # Cameras and web servers leave bytes behind the end; in the pixels it cannot appear by chance.
    if not data.endswith(_END) and data.rfind(_END, scan) < 0:
        raise CutError(f"{len(data):,} bytes of a jpeg without its end marker")
    return header


def _walk(data: bytes) -> tuple[JpegHeader, int]:
    """The header, and where the scan begins."""
    at, orientation, frame = 2, 1, None
    while True:
        fill, marker, length = _SEGMENT.unpack_from(data, at)
        if fill != 0xFF:
            raise NotAnImageError(f"a jpeg file whose header is damaged at byte {at}")
        if marker == 0xDA:
            break
        if marker == 0xFF:  # fill bytes may stand before a marker
            at += 1
            continue
        if marker in _ALONE:
            at += 2
            continue
        if marker == 0xD9:
            raise NotAnImageError("a jpeg file that ends before its pixels")
        if marker == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
            orientation = _exif_orientation(data[at + 10 : at + 2 + length])
        elif marker in _FRAMES:
            frame = (marker, *_FRAME.unpack_from(data, at + 4))
        at += 2 + length
    if frame is None:
        raise NotAnImageError("a jpeg file without a frame header")
    marker, precision, height, width, components = frame
    if not (width and height):
        raise NotAnImageError(f"a jpeg header that says {width} x {height} pixels")
    return JpegHeader(width, height, _oddity(marker, precision, components), orientation), at


def _oddity(marker: int, precision: int, components: int) -> str:
    if marker not in _HUFFMAN:
        return "lossless" if marker in _LOSSLESS else "arithmetic"
    if precision != 8:
        return f"{precision}-bit"
    if components == 4:
        return "cmyk"
    return "" if components in (1, 3) else f"{components}-component"


def _exif_orientation(tiff: bytes) -> int:
    """The orientation in EXIF data; 1 where there is none that makes sense."""
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


# --- PPM -----------------------------------------------------------------------------------------

_PPM = re.compile(
    rb"P6" + rb"(?:\s|#[^\r\n]*[\r\n])+(\d{1,9})" * 2 + rb"(?:\s|#[^\r\n]*[\r\n])+255\s"
)
_PPM_HEADER = 1 << 12  # bytes at most: comments are the only long part


class PpmHeader(NamedTuple):
    """Where the pixels of a PPM stand: rows of 8-bit RGB from the byte `start` on."""

    width: int
    height: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + 3 * self.width * self.height


def ppm_header(data: bytes) -> PpmHeader | None:
    """The header of a PPM of 8-bit RGB (P6 with 255 values); None for anything else.

    Raises CutError if the pixels are not all there.
    """
    match = _PPM.match(data, 0, _PPM_HEADER)
    if match is None or not int(match[1]) or not int(match[2]):
        return None
    header = PpmHeader(int(match[1]), int(match[2]), match.end())
    if header.stop > len(data):
        raise CutError(f"{len(data):,} bytes of a ppm file of {header.stop:,}")
    return header


def ppm_start(width: int, height: int) -> bytes:
    """The bytes before the pixels of a PPM."""
    return b"P6\n%d %d\n255\n" % (width, height)


def to_ppm(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Pixels, (height, width, 3), as a PPM file: nothing is lost, and nothing need be decoded."""
    height, width, _ = pixels.shape
    return ppm_start(width, height) + pixels.tobytes()


# --- decoding and encoding -----------------------------------------------------------------------


def encode_jpeg(pixels: npt.NDArray[np.uint8], quality: int) -> bytes:
    """Pixels, (height, width, 3) RGB, as a JPEG with colour in full resolution."""
    import simplejpeg

    height, width, _ = pixels.shape
    if max(height, width) > 65500:
        raise ValueError(f"{width:,} x {height:,} pixels, where a jpeg has at most 65,500 a side")
    data: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels), quality=quality, colorspace="RGB", colorsubsampling="444"
    )
    return data


def to_rgb(data: bytes) -> npt.NDArray[np.uint8]:
    """The pixels of any picture, (height, width, 3).

    Raises NotAnImageError that says what is wrong.
    """
    if data.startswith(b"\xff\xd8\xff"):
        header = jpeg_header(data)
        if not header.oddity:
            pixels = _plain_jpeg(data)
            if pixels is not None:
                return _upright(pixels, header.orientation)
    ppm = ppm_header(data)
    if ppm is not None:
        rows = np.frombuffer(data, np.uint8, ppm.stop - ppm.start, ppm.start)
        return rows.reshape(ppm.height, ppm.width, 3).copy()
    return _by_pillow(data)


def _plain_jpeg(data: bytes) -> npt.NDArray[np.uint8] | None:
    """By libjpeg-turbo; None for what it warns of, which Pillow judges more finely."""
    import simplejpeg

    try:
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB")
    except ValueError:
        return None
    return pixels


def _upright(pixels: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """Pixels turned as EXIF's orientation says."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _by_pillow(data: bytes) -> npt.NDArray[np.uint8]:
    import PIL.Image
    import PIL.ImageOps

    try:
        with PIL.Image.open(io.BytesIO(data)) as opened:
            opened.load()  # the first frame
            return _as_rgb(PIL.ImageOps.exif_transpose(opened))
    except NotAnImageError:
        raise
    except Exception as error:  # its decoders raise whatever damage leads them to
        raise NotAnImageError(f"a damaged picture: {error}") from None


def _as_rgb(picture: Any) -> npt.NDArray[np.uint8]:
    import PIL.Image

    if picture.mode == "F":
        raise NotAnImageError("floating-point pixels, of which no value is known to be white")
    if picture.mode.startswith("I"):
        # "I" is how Pillow says 16 bits where it has no mode of that size for the file's format.
        grey = (np.asarray(picture).clip(0, 0xFFFF) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if picture.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        white = PIL.Image.new("RGBA", picture.size, "white")
        picture = PIL.Image.alpha_composite(white, picture)
    return cast("npt.NDArray[np.uint8]", np.array(picture.convert("RGB")))
