"""Pixels of encoded images, the same on every machine: decoding any image, and encoding.

`to_rgb` gives what a person sees: the first frame, turned as its EXIF data say, in 8-bit sRGB.
- Transparent pixels show a background, white unless told otherwise.
- Palettes and grey become RGB; of 16-bit samples the high byte counts.
- A colour profile is applied. CMYK without one becomes RGB as Pillow does it: 255 - ink - black.
- Floating-point pixels have no range, and are refused.
- What a decoder only warns of is damage, unless nothing of the image is lost.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardkit.codecs.color import ProfileError, cmyk, converted, to_srgb
from shardkit.codecs.header import ALPHA_MODES, PPM_SPACE, Header, read_header
from shardkit.codecs.image import CutError, DecodeError, NotAnImageError, check_end, opened
from shardkit.codecs.jpeg import decode_jpeg, encode_jpeg

if TYPE_CHECKING:
    import numpy.typing as npt

    Pixels = npt.NDArray[np.uint8]
    Colour = tuple[int, int, int]

WHITE = (255, 255, 255)
# JPEGs are decoded at 1/2, 1/4 or 1/8 where so many times the size that is asked for is left: then
# the result is within 40 dB of Pillow's (tests/benchmarks/quality.py).
LEFT = 3
_SIDES = {"jpeg": 65500, "webp": 16383}  # the longest that a format takes
_PNG_START = 33  # bytes before a profile: the mark of the file, and IHDR


# --- PPM -----------------------------------------------------------------------------------------

_PPM = re.compile(rb"P6" + (PPM_SPACE + rb"(\d{1,9})") * 2 + PPM_SPACE + rb"255\s")
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


# --- decoding ------------------------------------------------------------------------------------


class Decoded(NamedTuple):
    """Pixels, (height, width, 3) RGB, not turned yet.

    `extent` is the width and height of the image in these pixels, which may end in a part of one
    where it was decoded at a smaller size. `to_srgb` is what is left to be done with `converted`.
    """

    pixels: Pixels
    extent: tuple[float, float]
    to_srgb: Any = None


def to_rgb(data: bytes) -> Pixels:
    """The pixels of any image as they are seen, (height, width, 3).

    Raises NotAnImageError that says what is wrong.
    """
    header = read_header(data)
    transform = None
    if header.profile is not None:
        with contextlib.suppress(ProfileError):
            transform = to_srgb(header.profile, header.colour)
    pixels, _, transform = decode(data, header, transform=transform)
    if transform is not None:
        pixels = converted(pixels, transform)
    return upright(pixels, header.orientation)


def decode(
    data: bytes,
    header: Header,
    *,
    least: tuple[int, int] | None = None,
    background: Colour = WHITE,
    transform: Any = None,
) -> Decoded:
    """Decode the first frame. `header` is what `read_header` says of `data`.

    `least` is the width and height that the image is to be resized to: a JPEG of many times that
    size is decoded at a smaller one. A `transform` of `color.to_srgb` is applied here, or left to
    the caller, who may have fewer pixels later.

    Raises NotAnImageError that says what is wrong, and never gives a part of an image.
    """
    check_end(data, header.format)
    if header.format == "jpeg" and header.oddity in ("", "cmyk"):
        decoded = _by_turbo(data, header, _reduction(header, least), transform)
        if decoded is not None:
            return decoded
    ppm = ppm_header(data)
    if ppm is not None:
        rows = np.frombuffer(data, np.uint8, ppm.stop - ppm.start, ppm.start)
        pixels = rows.reshape(ppm.height, ppm.width, 3).copy()
    else:
        with loaded(data, header) as image:
            pixels = _as_rgb(image, header.colour, background, transform)
    return Decoded(pixels, (header.width, header.height))


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """Pixels turned as EXIF's orientation says."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def turned(image: Any, orientation: int) -> Any:
    """A Pillow image turned as EXIF's orientation says."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image


def _reduction(header: Header, least: tuple[int, int] | None) -> int:
    """8, 4, 2 or 1: by what a JPEG is made smaller while it is decoded."""
    if least is None:
        return 1
    scale = min(header.width / least[0], header.height / least[1])
    return next((part for part in (8, 4, 2) if scale >= part * LEFT), 1)


def _by_turbo(data: bytes, header: Header, reduced: int, transform: Any) -> Decoded | None:
    """By libjpeg-turbo; None for a kind of JPEG that it leaves to others."""
    colour = header.colour
    kind = colour if colour == "CMYK" or (colour == "GRAY" and transform is not None) else "RGB"
    extent = (header.width / reduced, header.height / reduced)
    pixels = decode_jpeg(data, kind, math.ceil(extent[0]), math.ceil(extent[1]))
    if pixels is None:
        return None
    if kind == "GRAY":
        return Decoded(converted(pixels[:, :, 0], transform), extent)
    if kind == "CMYK":  # Adobe stores ink inverted, and so do all others since
        return Decoded(_from_cmyk(255 - pixels, transform), extent)
    return Decoded(pixels, extent, transform)


def _from_cmyk(pixels: Pixels, transform: Any) -> Pixels:
    if transform is not None:
        return converted(pixels, transform)
    return np.array(cmyk(pixels).convert("RGB"))


@contextlib.contextmanager
def loaded(data: bytes, header: Header) -> Iterator[Any]:
    """The first frame as a Pillow image, not turned yet. Raises NotAnImageError."""
    try:
        if header.format == "png":  # the checksums of its chunks, which decoding passes over
            with opened(data) as image:
                image.verify()
        with opened(data) as image:
            image.load()
            # Pillow turns a TIFF itself. Turning it back costs little, and rotated TIFFs are rare.
            back = {6: 8, 8: 6}.get(header.orientation, header.orientation)
            yield turned(image, back) if header.format == "tiff" else image
    except NotAnImageError:
        raise
    except Exception as error:  # its decoders raise whatever damage leads them to
        raise DecodeError(f"a damaged image: {error}") from error


def _as_rgb(image: Any, colour: str, background: Colour, transform: Any) -> Pixels:
    import PIL.Image

    alpha = None
    if image.mode == "F":
        raise DecodeError("floating-point pixels, of which no value is known to be white")
    if image.mode == "CMYK":
        return _from_cmyk(np.asarray(image), transform)
    if image.mode.startswith("I"):
        # "I" is how Pillow says 16 bits where it has no mode of that size for the file's format.
        values = np.asarray(image).clip(0, 0xFFFF)
        if isinstance(image.info.get("transparency"), int):
            alpha = PIL.Image.fromarray(values != image.info["transparency"]).convert("L")
        image = PIL.Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode in ALPHA_MODES or "transparency" in image.info:
        image = image.convert("RGBA")
        alpha = image.getchannel("A")
    if transform is None:
        pixels = np.array(image.convert("RGB"))
    else:
        mode = "L" if colour == "GRAY" else "RGB"
        pixels = converted(np.asarray(image.convert(mode)), transform)
    if alpha is None:
        return pixels
    under = PIL.Image.new("RGB", image.size, background)
    return np.array(PIL.Image.composite(PIL.Image.fromarray(pixels), under, alpha))


# --- encoding ------------------------------------------------------------------------------------


def encode(
    pixels: Pixels,
    format: str,
    *,
    quality: int = 90,
    chroma: str = "420",
    lossless: bool = False,
    profile: bytes | None = None,
) -> bytes:
    """Pixels, (height, width, 3) RGB, as a file of `format`: jpeg, png, webp or ppm.

    `quality` and `chroma` ("444", "422", "420") are for lossy ones, `lossless` is for WebP. A
    `profile` is stored with the image. Raises ValueError for an image that the format is too
    small for.
    """
    side = max(pixels.shape[:2])
    if side > _SIDES.get(format, side):
        raise ValueError(
            f"a side of {side:,} pixels, where {format} has at most {_SIDES[format]:,}"
        )
    if format == "jpeg":
        return encode_jpeg(pixels, quality, chroma, profile)
    if format == "png":
        return _to_png(pixels, profile)
    if format == "webp":
        return _to_webp(pixels, quality, lossless, profile)
    return to_ppm(pixels)


def _to_png(pixels: Pixels, profile: bytes | None) -> bytes:
    import cv2

    data: bytes = cv2.imencode(".png", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))[1].tobytes()
    if profile is None:
        return data
    content = b"iCCP" + b"icc\0\0" + zlib.compress(profile)
    chunk = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    return data[:_PNG_START] + chunk + data[_PNG_START:]


def _to_webp(pixels: Pixels, quality: int, lossless: bool, profile: bytes | None) -> bytes:
    import PIL.Image

    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(
        file, "WEBP", quality=quality, lossless=lossless, icc_profile=profile or b""
    )
    return file.getvalue()
