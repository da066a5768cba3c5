"""Decoding and encoding of images, with the same pixels on every machine.

`to_rgb` gives the image as displayed: the first frame, turned upright by its EXIF data, in 8-bit
sRGB.
- Transparent pixels show a background, white by default.
- Palettes and grey become RGB; 16-bit values are reduced to the high byte (`values` keeps them).
- A colour profile is applied. CMYK without one becomes RGB as in Pillow: 255 - ink - black.
- Floating-point pixels and bands beyond RGB are rejected, as they have no defined colours.
- Warnings of a decoder count as damage, unless nothing of the image is lost.
"""

from __future__ import annotations

import contextlib
import io
import re
import struct
import sys
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.color import ProfileError, cmyk, converted, to_srgb
from shardkit.codecs.header import (
    ALPHA_MODES,
    BANDS,
    PPM_SPACE,
    Header,
    of_unknown_white,
    read_header,
)
from shardkit.codecs.image import (
    CutError,
    DecodeError,
    NotAnImageError,
    TooLargeError,
    UnsupportedError,
    check_end,
    opened,
    refuse_want_of_memory,
)
from shardkit.codecs.jpeg import decode_jpeg, encode_jpeg, reduction
from shardkit.codecs.window import Colour, Pixels
from shardkit.errors import warn
from shardkit.options import MAX_PIXELS

WHITE = (255, 255, 255)
_SIDES = {"jpeg": 65500, "webp": 16383}  # longest side that a format supports
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


# --- PPM -----------------------------------------------------------------------------------------

_PPM = re.compile(rb"P6" + (PPM_SPACE + rb"(\d{1,9})") * 2 + PPM_SPACE + rb"255\s")
_PPM_HEADER = 1 << 12  # upper limit in bytes; only comments can be long


class PpmHeader(NamedTuple):
    """The size of a PPM; its pixels are rows of 8-bit RGB from byte `start` to `stop`."""

    width: int
    height: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + 3 * self.width * self.height


def ppm_header(data: bytes) -> PpmHeader | None:
    """Return the header of an 8-bit RGB PPM (P6, maximum 255); None for anything else.

    Raises CutError if pixels are missing.
    """
    match = _PPM.match(data, 0, _PPM_HEADER)
    if match is None or not int(match[1]) or not int(match[2]):
        return None
    header = PpmHeader(int(match[1]), int(match[2]), match.end())
    if header.stop > len(data):
        raise CutError(f"{len(data):,} bytes of a ppm file of {header.stop:,}")
    return header


def ppm_start(width: int, height: int) -> bytes:
    """Return the bytes before the pixels of a PPM."""
    return b"P6\n%d %d\n255\n" % (width, height)


def to_ppm(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return pixels (height, width, 3) as a PPM file: lossless and uncompressed."""
    height, width, _ = pixels.shape
    return ppm_start(width, height) + pixels.tobytes()


# --- decoding ------------------------------------------------------------------------------------


class Decoded(NamedTuple):
    """RGB pixels (height, width, 3), before EXIF's orientation is applied.

    `reduced` is 2, 4 or 8 if the image was decoded at 1/2, 1/4 or 1/8 of its size; it may then end
    in the middle of a pixel. `to_srgb` is a transform that is still to be applied with `converted`.
    """

    pixels: Pixels
    reduced: int = 1
    to_srgb: Any = None


# What decoding to 8-bit RGB leaves out.
_LEFT_OUT = {
    "16-bit": "images with 16 bits per channel are decoded to 8 bits: the low byte is lost;"
    ' shardkit.Decode(dtype="auto") keeps it',
    "animated": "of images with several frames or pages, only the first is decoded;"
    ' shardkit.Decode(dtype="auto") decodes the pages of TIFFs as channels',
}
_warned: set[str] = set()  # of these, in this process


def to_rgb(data: bytes, least: tuple[int, int] | None = None) -> Pixels:
    """Return the pixels (height, width, 3) of any image as displayed; `least` as in `decode`.

    Warns, once per process, of bits and frames that are ignored.

    Raises NotAnImageError with the reason.
    """
    header = read_header(data)
    if header.width * header.height > MAX_PIXELS:
        raise TooLargeError(f"{header.width:,} x {header.height:,}")
    for left_out in {
        "16-bit" if header.dtype == "uint16" else "",
        header.oddity,
    } & _LEFT_OUT.keys():
        if left_out not in _warned:
            _warned.add(left_out)
            warn(_LEFT_OUT[left_out])
    transform = None
    if header.profile is not None:
        with contextlib.suppress(ProfileError):
            transform = to_srgb(header.profile, header.colour)
    pixels, _, transform = decode(data, header, least=least, transform=transform)
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
    """Decode the first frame. `header` is the result of `read_header` for `data`.

    `least` is the width and height to which the image will be resized: a JPEG of many times that
    size is decoded at a reduced one. A `transform` from `color.to_srgb` is applied here, or left to
    the caller, who can apply it to fewer pixels after resizing.

    Raises NotAnImageError with the reason, and never returns a partial image.
    """
    check_end(data, header.format)
    if header.oddity == BANDS:
        raise UnsupportedError(header.kind)
    if header.format == "jpeg" and header.oddity in ("", "cmyk"):
        reduced = reduction(header.width, header.height, *least) if least else 1
        decoded = _by_turbo(data, header, reduced, transform)
        if decoded is not None:
            return decoded
    ppm = ppm_header(data)
    if ppm is not None:
        rows = np.frombuffer(data, np.uint8, ppm.stop - ppm.start, ppm.start)
        pixels = rows.reshape(ppm.height, ppm.width, 3).copy()
    else:
        with loaded(data, header) as image:
            pixels = _as_rgb(image, header.colour, background, transform)
    return Decoded(pixels)


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """Return pixels turned upright as EXIF's orientation says."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def turned(image: Any, orientation: int) -> Any:
    """Return a Pillow image turned upright as EXIF's orientation says."""
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


def _by_turbo(data: bytes, header: Header, reduced: int, transform: Any) -> Decoded | None:
    """Decode with libjpeg-turbo; None for a kind of JPEG that it does not support."""
    colour = header.colour
    kind = colour if colour == "CMYK" or (colour == "GRAY" and transform is not None) else "RGB"
    pixels = decode_jpeg(data, kind, -(-header.width // reduced), -(-header.height // reduced))
    if pixels is None:
        return None
    if kind == "GRAY":
        return Decoded(converted(pixels[:, :, 0], transform), reduced)
    if kind == "CMYK":  # Adobe stores ink inverted, and others followed
        return Decoded(_from_cmyk(255 - pixels, transform), reduced)
    return Decoded(pixels, reduced, transform)


def _from_cmyk(pixels: Pixels, transform: Any) -> Pixels:
    if transform is not None:
        return converted(pixels, transform)
    return np.array(cmyk(pixels).convert("RGB"))


@contextlib.contextmanager
def loaded(data: bytes, header: Header, page: int = 0, low: bool = False) -> Iterator[Any]:
    """Open the first frame, or a page, as a Pillow image, as stored. Raises NotAnImageError.

    Of several channels of 16 bits, Pillow loads the high bytes, or the `low` ones.
    """
    try:
        if header.format == "png":  # check the checksums of its chunks, which decoding ignores
            with opened(data) as image:
                image.verify()
        with opened(data) as image:
            if page:
                image.seek(page)
            if low:
                image.tile = [tile._replace(args=_other_byte(tile.args)) for tile in image.tile]
            image.load()
            # Pillow applies the orientation of a TIFF itself; undo that.
            back = {6: 8, 8: 6}.get(header.orientation, header.orientation)
            yield turned(image, back) if header.format == "tiff" else image
    except NotAnImageError:
        raise
    except Exception as error:  # Pillow's decoders raise any exception on damaged data
        refuse_want_of_memory(error, header.width * header.height)
        raise DecodeError(f"a damaged image: {error}") from error


_OTHER_BYTE = {"L": "B", "B": "L", "N": "B" if sys.byteorder == "little" else "L"}


def _other_byte(args: Any) -> Any:
    """Change the layout of pixels that Pillow reads so that it takes the other byte of two."""
    layout, *others = [args] if isinstance(args, str) else args
    swapped = layout[:-1] + _OTHER_BYTE[layout[-1]]
    return (swapped, *others) if others else swapped


def _as_rgb(image: Any, colour: str, background: Colour, transform: Any) -> Pixels:
    import PIL.Image

    alpha = None
    if kind := of_unknown_white(image):
        raise UnsupportedError(f"{kind} pixels, for which the value of white is not defined")
    if image.mode == "CMYK":
        return _from_cmyk(np.asarray(image), transform)
    if image.mode.startswith("I"):
        # Pillow uses mode "I" for 16-bit values of formats for which it has no 16-bit mode.
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
    """Encode pixels, RGB or grey (height, width, 3 or 1), as a file: jpeg, png, webp or ppm.

    `quality` and `chroma` ("444", "422", "420") apply to lossy formats, `lossless` to WebP. A
    `profile` is stored with the image. Raises ValueError for an image that is too large for the
    format.
    """
    side = max(pixels.shape[:2])
    if side > _SIDES.get(format, side):
        raise ValueError(
            f"a side of {side:,} pixels, but {format} supports at most {_SIDES[format]:,}"
        )
    if format == "jpeg":
        return encode_jpeg(pixels, quality, chroma, profile)
    if format == "png":
        return to_png(pixels, profile)
    pixels = np.broadcast_to(pixels, (*pixels.shape[:2], 3))
    if format == "webp":
        import PIL.Image

        file, icc = io.BytesIO(), profile or b""
        image = PIL.Image.fromarray(np.ascontiguousarray(pixels))
        image.save(file, "WEBP", quality=quality, lossless=lossless, icc_profile=icc)
        return file.getvalue()
    return to_ppm(pixels)


_PNG_COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}  # by number of channels; 4 is a flag for alpha


def to_png(pixels: npt.NDArray[Any], profile: bytes | None = None) -> bytes:
    """Encode values as a PNG: uint8 or uint16, (height, width) or up to 4 channels.

    Uses filter 1 (Sub) for each row and zlib's run-length strategy: photos are 3 % larger than
    with Pillow, in half the time.
    """
    height, width, channels = pixels.shape if pixels.ndim == 3 else (*pixels.shape, 1)
    big_endian = np.ascontiguousarray(pixels, pixels.dtype.newbyteorder(">"))
    values = big_endian.reshape(height, -1).view(np.uint8)
    step = channels * pixels.itemsize
    rows = np.empty((height, 1 + step * width), np.uint8)
    rows[:, 0] = 1
    rows[:, 1 : 1 + step] = values[:, :step]
    np.subtract(values[:, step:], values[:, :-step], out=rows[:, 1 + step :])
    compressor = zlib.compressobj(1, strategy=zlib.Z_RLE)
    kind = 8 * pixels.itemsize, _PNG_COLOURS[channels], 0, 0, 0
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, *kind))]
    if profile is not None:
        chunks.append((b"iCCP", b"icc\0\0" + zlib.compress(profile)))
    chunks += [(b"IDAT", compressor.compress(rows.data) + compressor.flush()), (b"IEND", b"")]
    return _PNG_SIGNATURE + b"".join(
        struct.pack(">I", len(content)) + name + content
        + struct.pack(">I", zlib.crc32(content, zlib.crc32(name)))
        for name, content in chunks
    )  # fmt: skip
