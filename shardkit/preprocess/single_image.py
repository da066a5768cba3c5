"""The steps for one image: decode, resize, turn upright, convert to sRGB, crop, encode.

An image that already meets the options passes byte for byte. Resizing comes first, so that later
steps have fewer pixels.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import PIL
import simplejpeg

from shardkit.codecs.color import ProfileError, converted, to_srgb
from shardkit.codecs.crop import resize
from shardkit.codecs.damage import damage
from shardkit.codecs.header import BANDS, Header, read_header
from shardkit.codecs.image import DecodeError, NotAnImageError, TooDeepError, check_end
from shardkit.codecs.pixels import decode, encode, to_png, upright
from shardkit.codecs.values import KindError, Values, cut, stored_values, to_tiff
from shardkit.codecs.window import Colour, Window
from shardkit.options import CHROMA, IMAGE_DEFAULTS, MAX_PIXELS, ImageOptions

RESIZED = "resized"
# The image formats that are kept if pixels change, and the format for all others: for datasets
# that can hold any image ("array"), and for those that hold only JPEG and raw pixels ("ppm").
_WRITABLE = {"array": (("jpeg", "png", "webp", "ppm"), "png"), "ppm": (("jpeg", "ppm"), "jpeg")}
# The types and the number of channels that PNG can hold, for images that are not 8-bit RGB.
_PNG_TYPES, _PNG_CHANNELS = ("uint8", "uint16"), 4
_ODD = {"animated": "animated (first frame)"}
# Larger images are decoded one at a time per process, to bound its memory.
_LARGE = 1 << 24
_one_large = threading.Lock()
# ITU T.81 annex K, table K.1.
_LUMA = (
    "16 11 10 16 24 40 51 61 12 12 14 19 26 58 60 55 14 13 16 24 40 57 69 56 "
    "14 17 22 29 51 87 80 62 18 22 37 56 68 109 103 77 24 35 55 64 81 104 113 92 "
    "49 64 78 87 103 121 120 101 72 92 95 98 112 100 103 99"
)


class TooManyPixelsError(NotAnImageError):
    """The image has too many pixels to be decoded or resized in memory."""

    what = "the image has too many pixels"
    expected = f"at most {MAX_PIXELS:,} to be decoded, unless --max-pixels is given"
    fix = "drop images over N pixels with --max-pixels N, where N may be larger than this"


class ChangedValuesError(NotAnImageError):
    """A step would change values that are to be kept."""

    what = "the image cannot be resized or encoded again with all its values"
    expected = None
    fix = "store it as it is, without --resize and --image-format"


class Image(NamedTuple):
    """An image whose header has been read, and the steps for it."""

    data: bytes
    header: Header
    window: Window  # on its upright pixels
    format: str  # the image format to store
    to_srgb: Any  # the transform of its colour profile, or None
    reasons: list[str]  # why it must be re-encoded; if empty, it can pass
    has_values: bool = False  # whether its values are kept, which 8-bit RGB cannot hold

    @property
    def is_whole(self) -> bool:
        """Whether it is not resized, cropped or padded."""
        return self.window == Window.whole(*self.header.upright)

    @property
    def moves(self) -> bool:
        """Whether it is resized, cropped, padded or turned upright."""
        changes = not self.is_whole or self.header.orientation != 1
        return changes and bool(self.reasons)


@dataclass(frozen=True)
class ImageProcessor:
    """The steps that options ask for, on one image. All raise NotAnImageError."""

    options: ImageOptions
    raw: str  # how raw pixels are stored: "array", or "ppm" files
    pixels: bool  # whether any step changes pixels; otherwise all images pass
    transformed: bool = False  # whether a user's function gets 8-bit RGB

    @property
    def as_array(self) -> bool:
        return self.options.format == "raw" and self.raw == "array"

    def plan(self, data: bytes) -> Image:
        """Read the header, and decide on the steps."""
        options, header = self.options, read_header(data)
        check_end(data, header.format)
        window = geometry(*header.upright, options)
        format = options.format if options.format != "raw" else "ppm"
        if format == "keep":
            writable, other = _WRITABLE[self.raw]
            format = header.format if header.format in writable else other
        if not self.pixels:
            return Image(data, header, window, format, None, [])
        reasons = [] if window == Window.whole(*header.upright) else [RESIZED]
        if self._keeps_values(header):
            return self._plan_values(Image(data, header, window, format, None, reasons, True))
        reasons += _reduced(header)
        if header.orientation != 1:
            reasons.append("rotated")
        if options.format != "keep" and (header.format != format or self.as_array):
            reasons.append(f"{header.format} to {options.format}")
        elif options.format == "raw" and header.colour == "GRAY":
            reasons.append("grey to raw")
        transform, about_it = self._profile(header)
        if about_it and (options.icc != "keep" or (reasons and header.colour != "RGB")):
            reasons.append(about_it)
        return Image(data, header, window, format, transform, reasons)

    def _keeps_values(self, header: Header) -> bool:
        """Return whether values that 8-bit RGB cannot hold are kept. Raises TooDeepError."""
        reduces = self.transformed or self.options.format in ("jpeg", "webp")
        if not header.is_deep or reduces:
            return False
        if self.raw == "ppm":
            raise TooDeepError(header.kind)
        return True

    def _plan_values(self, image: Image) -> Image:
        header, reasons, asked = image.header, image.reasons, self.options.format
        whole = header.pages == 1 and header.oddity != BANDS and header.channels <= _PNG_CHANNELS
        format = "png" if whole and header.dtype in _PNG_TYPES else "tiff"
        if asked == "png" != format:
            raise TooDeepError(f"{header.kind}, which PNG cannot hold")
        if header.orientation != 1:
            reasons.append("rotated")
        if asked != "keep" and (self.as_array or header.format != format):
            reasons.append(f"{header.format} to {asked}")
        if reasons and self._profile(header)[1]:
            reasons.append("with a colour profile, not applied")
        return image._replace(format=format)

    def _profile(self, header: Header) -> tuple[Any, str]:
        """Return the transform of a colour profile, and a description of it if it is not sRGB."""
        if header.profile is None or (self.options.icc == "keep" and header.colour == "RGB"):
            return None, ""
        try:
            transform = to_srgb(header.profile, header.colour)
        except ProfileError:
            return None, "with an unreadable colour profile, taken as sRGB"
        return transform, "with a colour profile" if transform is not None else ""

    def stored(self, image: Image, pixels: Values | None = None) -> tuple[Any, str]:
        """Return an image as it is stored, the bytes of a file or raw pixels, and what was done.

        That is "passed", "resized", "encoded", "recompressed", or "kept" if that was not smaller.
        `pixels` is the result of `made`, if already called. Raises ValueError for pixels that the
        format cannot hold.
        """
        again = not image.reasons and self.pixels and self._is_finer(image.header)
        if not (image.reasons or again):
            if pixels is None:
                self.check(image.data, image.header)
            return image.data, "passed"
        value = self._value(image, self.made(image) if pixels is None else pixels)
        if again:
            smaller = len(value) < len(image.data)
            return (value, "recompressed") if smaller else (image.data, "kept")
        return value, "resized" if RESIZED in image.reasons else "encoded"

    def check(self, data: bytes, header: Header | None = None) -> None:
        """If the options ask for it, decode an image or mask that passes to its end."""
        if self.options.check != "decode":
            return
        with _guarded(header or read_header(data), self.options):
            words = damage(data, self.options.max_pixels or MAX_PIXELS)
        if words is not None:
            raise DecodeError(words)

    def _is_finer(self, header: Header) -> bool:
        """Return whether an image that could pass has a higher quality than the options ask for."""
        quality, chroma = self.options.quality, self.options.chroma
        if header.format == "jpeg":
            finer = quality is not None and 0 < header.table < _table(quality)
            known = chroma is not None and header.chroma in CHROMA
            return finer or (known and CHROMA.index(header.chroma) > CHROMA.index(str(chroma)))
        return header.format == "webp" and quality is not None and not header.lossless

    def made(self, image: Image) -> Values:
        """Return the pixels (height, width, 3), or the values that are kept, after all steps."""
        header, window = image.header, image.window
        if image.has_values:
            with _guarded(header, self.options):
                return _cut_values(image)
        size = full = (window.full_width, window.full_height)
        if header.orientation >= 5:
            size = full[::-1]
        with _guarded(header, self.options):
            if full[0] * full[1] > MAX_PIXELS:
                raise TooManyPixelsError(f"{full[0]:,} x {full[1]:,} after resizing")
            pixels, reduced, transform = decode(
                image.data,
                header,
                least=None if image.is_whole else size,
                background=self._background,
                transform=image.to_srgb,
            )
            if (pixels.shape[1], pixels.shape[0]) != size:
                pixels = resize(pixels, *size, (header.width, header.height), reduced)
            pixels = upright(pixels, header.orientation)
            if transform is not None:
                pixels = converted(pixels, transform)
            part = window.clipped()
            inner = pixels[part.top : part.top + part.rows, part.left : part.left + part.columns]
            return np.ascontiguousarray(window.with_margins(inner, self._background))

    def _value(self, image: Image, pixels: Values) -> Any:
        """Return pixels as they are stored: encoded, or as an array."""
        options, header = self.options, image.header
        if self.as_array:
            return pixels
        if image.format == "tiff":
            colours = header.oddity != BANDS and header.pages == 1
            return to_tiff(pixels, rgb=colours, profile=header.profile)
        if image.has_values:
            return to_png(pixels, header.profile)
        if header.channels == 1 and (pixels == pixels[:, :, :1]).all():
            pixels = pixels[:, :, :1]
        keeps = options.icc == "keep" and header.colour == "RGB"
        return encode(
            pixels,
            image.format,
            quality=options.quality or IMAGE_DEFAULTS["quality"],
            chroma=options.chroma or IMAGE_DEFAULTS["chroma"],
            lossless=options.format == "keep" and header.lossless,
            profile=header.profile if keeps else None,
        )

    @property
    def _background(self) -> Colour:
        colour = self.options.background or IMAGE_DEFAULTS["background"]
        red, green, blue = bytes.fromhex(colour[1:])
        return red, green, blue


def _reduced(header: Header) -> list[str]:
    """Return what 8-bit RGB does not keep of an image, in words."""
    words = [_ODD.get(header.oddity, header.oddity)] if header.oddity else []
    if header.pages > 1:
        words = ["several pages (first page)"]
    if header.dtype == "uint16" and "16-bit" not in words:
        words.append("16-bit")
    return words


def _cut_values(image: Image) -> Values:
    try:
        values = stored_values(image.data, image.header)
        made = np.empty((image.window.rows, image.window.columns, values.shape[2]), values.dtype)
        cut(values, image.window, made)
    except KindError as error:
        raise ChangedValuesError(str(error)) from error
    return made


def codec_versions() -> dict[str, str]:
    """Return the versions of the libraries that determine the bytes."""
    return {
        "simplejpeg": simplejpeg.__version__,
        "pillow": PIL.__version__,
        "numpy": np.__version__,
        "zlib": zlib.ZLIB_RUNTIME_VERSION,  # for PNG
    }


@contextlib.contextmanager
def _guarded(header: Header, options: ImageOptions) -> Any:
    """Guard decoding: raises TooManyPixelsError; one thread at a time decodes a large image."""
    count = header.width * header.height
    if options.max_pixels is None and count > MAX_PIXELS:
        raise TooManyPixelsError(f"{header.width:,} x {header.height:,}, which is {count:,} pixels")
    with _one_large if count > _LARGE else contextlib.nullcontext():
        yield


@functools.cache
def _table(quality: int) -> int:
    """Return the sum of libjpeg's luma table for a quality (jcparam.c, jpeg_quality_scaling)."""
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    return sum(min(max((int(n) * percent + 50) // 100, 1), 255) for n in _LUMA.split())


def geometry(width: int, height: int, options: ImageOptions) -> Window:
    """Return the window of an upright image of this size that the options ask for.

    - shorter, longer: that side becomes `resize` pixels, and the other keeps the aspect.
    - exact: both sides become `resize`, regardless of the aspect.
    - crop: as shorter, then the square in the middle.
    - pad: as longer, then margins to make a square.

    Without `upscale` no side becomes longer, except by margins.
    """
    window = Window.whole(width, height)
    side, mode = options.resize, options.resize_mode
    if side is None:
        return window
    if mode == "exact":
        limits = (side, side) if options.upscale else (width, height)
        window.resize(min(side, limits[0]), min(side, limits[1]))
        return window
    which = max if mode in ("longer", "pad") else min
    old = which(width, height)
    if old > side or options.upscale:
        width, height = (
            max((2 * length * side + old) // (2 * old), 1) for length in (width, height)
        )
    window.resize(width, height)
    if mode in ("crop", "pad"):
        columns, rows = (side, side) if mode == "pad" else (min(width, side), min(height, side))
        window.cut((width - columns) // 2, (height - rows) // 2, columns, rows)
    return window
