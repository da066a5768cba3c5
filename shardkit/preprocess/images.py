"""What happens to the pictures of a sample: filters, then pixels, then a step of the user's own.

A picture that already is what was asked for passes byte for byte. The others are decoded, resized,
turned, converted to sRGB, cut or filled up, and encoded, in this order: what is done after resizing
has fewer pixels to do it on.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import numpy as np
import PIL
import simplejpeg

from shardkit.codecs.color import ProfileError, converted, to_srgb
from shardkit.codecs.damage import TooLargeError, damage
from shardkit.codecs.header import Header, read_header
from shardkit.codecs.image import NotAnImageError, check_end, unusable
from shardkit.codecs.pixels import decode, encode, upright
from shardkit.codecs.resize import resize
from shardkit.errors import SampleError
from shardkit.options import CHROMA, IMAGE_DEFAULTS, MAX_PIXELS, ImageOptions
from shardkit.preprocess import masks
from shardkit.preprocess.filtered import Filtered
from shardkit.preprocess.geometry import Geometry, geometry
from shardkit.preprocess.transform import Transform
from shardkit.sample import Sample

if TYPE_CHECKING:
    import numpy.typing as npt

    Pixels = npt.NDArray[np.uint8]

_WRITABLE = ("jpeg", "png", "webp", "ppm")
# Larger pictures are decoded one at a time in a process, so that its memory has a bound.
_LARGE = 1 << 24
_one_large = threading.Lock()
_one_transform = threading.Lock()  # a user's function need not know of threads
_CHANGED = "changed by the transform"
# ITU T.81 annex K, table K.1, and how libjpeg scales it to a quality (jcparam.c).
_LUMA = (
    "16 11 10 16 24 40 51 61 12 12 14 19 26 58 60 55 14 13 16 24 40 57 69 56 "
    "14 17 22 29 51 87 80 62 18 22 37 56 68 109 103 77 24 35 55 64 81 104 113 92 "
    "49 64 78 87 103 121 120 101 72 92 95 98 112 100 103 99"
)


_ODD = {"animated": "animated, of which the first frame stays"}


@dataclass
class Shaped:
    """A sample as it is to be stored; pictures by what became of them, and why."""

    sample: Sample
    pictures: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)


class _Picture(NamedTuple):
    """A picture whose header was read."""

    name: str
    data: bytes
    header: Header
    geometry: Geometry
    format: str  # to be stored in
    reasons: list[str]  # why its pixels must be made anew; none: it can pass


@dataclass(frozen=True)
class ImageSteps:
    """The steps for samples with these fields: pictures, and masks with the picture of each."""

    options: ImageOptions
    pictures: tuple[str, ...]
    masks: dict[str, str]
    transform: Transform | None = None
    raw: str = "array"  # what raw pixels are stored as: "array", or "ppm" files

    def __call__(self, sample: Sample) -> Shaped:
        """Raises Filtered, and SampleError for a picture that is none or cannot be stored."""
        shaped = Shaped(dict(sample))
        found = {n: self._look_at(sample, n) for n in self.pictures if n in sample}
        drawn = {n: sample[n] for n, of in self.masks.items() if n in sample and of in found}
        if self.transform is None:
            for name, picture in found.items():
                shaped.sample[name] = self._stored(sample, picture, shaped)
            for name, data in drawn.items():
                picture = found[self.masks[name]]
                if self._moves(picture):
                    shaped.sample[name] = self._mask(_drawn(sample, name, data, picture))
            return shaped
        return self._transformed(sample, found, drawn, shaped)

    def notes(self) -> list[str]:
        """What a user may not expect."""
        return [
            f"{mask!r} is taken for the mask of {of!r}: same geometry, nearest pixels, no loss"
            for mask, of in self.masks.items()
            if self.options.pixels or self.transform is not None
        ]

    def versions(self) -> dict[str, str]:
        """Of the libraries that decide the bytes."""
        return {
            "simplejpeg": simplejpeg.__version__,
            "opencv": cv2.__version__,
            "pillow": PIL.__version__,
            "numpy": np.__version__,
        }

    # --- looking at the header -------------------------------------------------------------------

    def _look_at(self, sample: Sample, name: str) -> _Picture:
        data, options = sample[name], self.options
        with _about(sample, name):
            header = read_header(data)
            check_end(data, header.format)
        _filter(header, options, sample["__key__"])
        placed = geometry(*header.upright, options)
        format = options.format
        if format == "keep":
            format = header.format if header.format in _WRITABLE else "png"
        reasons = []
        if options.pixels or self.transform is not None:
            if placed.changes(*header.upright):
                reasons.append("resized")
            reasons += self._not_plain(header)
            wanted = header.format if options.format == "keep" else options.format
            if header.format != wanted:
                reasons.append(f"{header.format} to {wanted}")
        return _Picture(name, data, header, placed, format, reasons)

    def _not_plain(self, header: Header) -> list[str]:
        reasons = [_ODD.get(header.oddity, header.oddity)] if header.oddity else []
        if header.orientation != 1:
            reasons.append("rotated")
        if header.profile is not None and self.options.icc != "keep":
            try:
                if to_srgb(header.profile, header.colour) is not None:
                    reasons.append("with a colour profile")
            except ProfileError:
                reasons.append("with an unreadable colour profile, taken as sRGB")
        return reasons

    def _is_finer(self, header: Header) -> bool:
        """Whether a picture that could pass has more quality than was asked for."""
        quality, chroma = self.options.quality, self.options.chroma
        if header.format == "jpeg":
            finer = quality is not None and 0 < header.table < _table(quality)
            known = chroma is not None and header.chroma in CHROMA
            return finer or (known and CHROMA.index(header.chroma) > CHROMA.index(str(chroma)))
        return header.format == "webp" and quality is not None and not header.lossless

    # --- without a transform ---------------------------------------------------------------------

    def _stored(
        self, sample: Sample, picture: _Picture, shaped: Shaped, pixels: Pixels | None = None
    ) -> Any:
        """A picture as it is to be stored, and counted. `pixels` are its own, if they are there."""
        again = not picture.reasons and self._is_finer(picture.header)
        if not (picture.reasons or again):
            self._check(sample, picture)
            return _counted(shaped, picture, "passed", picture.data)
        if pixels is None:
            pixels = self._pixels(sample, picture)
        value = self._value(sample, picture, pixels)
        if again and len(value) >= len(picture.data):
            return _counted(shaped, picture, "kept", picture.data)
        what = "resized" if "resized" in picture.reasons else "encoded"
        return _counted(shaped, picture, what, value)

    def _check(self, sample: Sample, picture: _Picture) -> None:
        """Decode a picture that passes, if that is asked for."""
        if self.options.check != "decode":
            return
        with _about(sample, picture.name), _room(picture.header):
            _guard(picture.header, self.options)
            try:
                words = damage(picture.data)
            except TooLargeError:
                words = "more pixels than Pillow decodes"
            if words is not None:
                raise NotAnImageError(words)

    def _pixels(self, sample: Sample, picture: _Picture) -> Pixels:
        """Decode a picture and do all that the options ask for."""
        header, placed, options = picture.header, picture.geometry, self.options
        transform = None
        if header.profile is not None and (options.icc != "keep" or header.colour != "RGB"):
            with contextlib.suppress(ProfileError):
                transform = to_srgb(header.profile, header.colour)
        size = placed.turned(header.orientation)
        with _about(sample, picture.name), _room(header):
            _guard(header, options)
            pixels, extent = decode(
                picture.data,
                header,
                least=size if placed.changes(*header.upright) else None,
                background=_rgb(options.background),
                transform=transform,
            )
            if (pixels.shape[1], pixels.shape[0]) != size:
                pixels = resize(pixels, *size, extent)
            pixels = upright(pixels, header.orientation)
            if transform is not None and header.colour == "RGB":
                pixels = converted(pixels, transform)
            return _on_canvas(pixels, placed, options)

    def _value(self, sample: Sample, picture: _Picture, pixels: Pixels) -> Any:
        """Pixels as they are stored: encoded, or as an array."""
        options, header = self.options, picture.header
        if options.format == "raw" and self.raw == "array":
            return pixels
        keeps = options.icc == "keep" and header.colour == "RGB"
        try:
            return encode(
                pixels,
                "ppm" if options.format == "raw" else picture.format,
                quality=options.quality or IMAGE_DEFAULTS["quality"],
                chroma=options.chroma or IMAGE_DEFAULTS["chroma"],
                lossless=options.format == "keep" and header.lossless,
                profile=header.profile if keeps else None,
            )
        except ValueError as error:
            raise SampleError(
                "the picture cannot be stored",
                key=sample["__key__"],
                field=picture.name,
                found=str(error),
                fix="resize it, choose another --image-format, or drop it with --on-error skip",
            ) from None

    def _moves(self, picture: _Picture) -> bool:
        """Whether the mask of a picture must be made anew."""
        header = picture.header
        changes = picture.geometry.changes(*header.upright) or header.orientation != 1
        return self.options.format == "raw" or (changes and bool(picture.reasons))

    def _mask(self, mask: Any) -> Any:
        raw = self.options.format == "raw" and self.raw == "array"
        return masks.values_of(mask) if raw else masks.encode_mask(mask)

    # --- with a transform ------------------------------------------------------------------------

    def _transformed(
        self,
        sample: Sample,
        found: dict[str, _Picture],
        drawn: dict[str, bytes],
        shaped: Shaped,
    ) -> Shaped:
        assert self.transform is not None
        given = dict(sample)
        on_picture = {
            name: _drawn(sample, name, data, found[self.masks[name]])
            for name, data in drawn.items()
        }
        for name, picture in found.items():
            given[name] = _read_only(self._pixels(sample, picture))
        for name, mask in on_picture.items():
            given[name] = _read_only(masks.values_of(mask))
        with _one_transform:
            made = self.transform(dict(given))
        if made is None:
            raise Filtered("dropped by the transform", self.transform.name, sample["__key__"])
        shaped.sample = made
        for name, picture in found.items():
            pixels = made.get(name)
            if pixels is given[name]:
                made[name] = self._stored(sample, picture, shaped, pixels)
            elif isinstance(pixels, np.ndarray):
                changed = picture._replace(reasons=[*picture.reasons, _CHANGED])
                pixels = _as_picture(pixels, sample, name)
                made[name] = self._stored(sample, changed, shaped, pixels)
        for name, mask in on_picture.items():
            value = made.get(name)
            if value is given[name] and not self._moves(found[self.masks[name]]):
                made[name] = drawn[name]
            elif isinstance(value, np.ndarray):
                with _about(sample, name):
                    made[name] = self._mask(_with_values(mask, value))
        return shaped


# --- parts of the above --------------------------------------------------------------------------


def _filter(header: Header, options: ImageOptions, key: str) -> None:
    """Raise Filtered for a picture that is not wanted."""
    short, long = sorted((header.width, header.height))
    size = f"{header.width} x {header.height}"
    if options.min_size is not None and short < options.min_size:
        raise Filtered(f"smaller than {options.min_size}", size, key)
    if options.max_aspect is not None and long > options.max_aspect * short:
        raise Filtered(f"aspect over {options.max_aspect:g}", size, key)
    if options.max_pixels is not None and short * long > options.max_pixels:
        raise Filtered(f"more than {options.max_pixels:,} pixels", size, key)


def _guard(header: Header, options: ImageOptions) -> None:
    """Raise NotAnImageError for so many pixels that decoding them would take all memory."""
    count = header.width * header.height
    if options.max_pixels is None and count > MAX_PIXELS:
        raise _TooManyPixelsError(
            f"{header.width:,} x {header.height:,}, which is {count:,} pixels"
        )


class _TooManyPixelsError(NotAnImageError):
    pass


class _about:  # noqa: N801 - a function in all but speed
    """Errors of a picture become those of its sample."""

    def __init__(self, sample: Sample, name: str) -> None:
        self._key = sample["__key__"]
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _TooManyPixelsError):
            raise SampleError(
                "the picture has too many pixels to be decoded",
                key=self._key,
                field=self._name,
                expected=f"at most {MAX_PIXELS:,}, unless told otherwise",
                found=str(error),
                fix="drop those over N pixels with --max-pixels N, which may be larger than this",
            ) from None
        if isinstance(error, NotAnImageError):
            raise unusable(error, self._key, self._name) from None


def _room(header: Header) -> contextlib.AbstractContextManager[Any]:
    large = header.width * header.height > _LARGE
    return _one_large if large else contextlib.nullcontext()


def _rgb(colour: str | None) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex((colour or IMAGE_DEFAULTS["background"])[1:])
    return red, green, blue


def _on_canvas(pixels: Pixels, placed: Geometry, options: ImageOptions) -> Pixels:
    """Cut pixels, or put margins around them."""
    height, width, _ = pixels.shape
    if placed.canvas == (width, height):
        return pixels
    left, top = placed.left, placed.top
    if left >= 0 and top >= 0:
        columns, rows = placed.canvas
        return np.ascontiguousarray(pixels[top : top + rows, left : left + columns])
    canvas = np.empty((placed.canvas[1], placed.canvas[0], 3), np.uint8)
    canvas[:] = _rgb(options.background)
    canvas[-top : -top + height, -left : -left + width] = pixels
    return canvas


def _counted(shaped: Shaped, picture: _Picture, what: str, value: Any) -> Any:
    """The value, once what became of the picture is counted."""
    for name, number in ((what, 1), ("bytes in", len(picture.data)), ("bytes out", _bytes(value))):
        shaped.pictures[name] = shaped.pictures.get(name, 0) + number
    for reason in picture.reasons:
        if reason != "resized":
            shaped.reasons[reason] = shaped.reasons.get(reason, 0) + 1
    return value


def _drawn(sample: Sample, name: str, data: bytes, picture: _Picture) -> Any:
    with _about(sample, name):
        return masks.mask_of(data, picture.header, picture.geometry)


def _with_values(mask: Any, values: Any) -> Any:
    try:
        return masks.with_values(mask, values)
    except (TypeError, ValueError) as error:
        raise NotAnImageError(f"a transform's mask that PNG cannot hold: {error}") from None


def _read_only(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values = values.view()
    values.flags.writeable = False
    return values


def _as_picture(values: npt.NDArray[Any], sample: Sample, name: str) -> Pixels:
    """What a transform returned as a picture's pixels; raises SampleError if it is none."""
    if values.dtype == np.uint8 and values.ndim == 2:
        values = np.repeat(values[:, :, None], 3, axis=2)
    if values.dtype != np.uint8 or values.ndim != 3 or values.shape[2] != 3 or not values.size:
        raise SampleError(
            "the transform returned something that is no picture",
            key=sample["__key__"],
            field=name,
            expected="uint8 pixels, (height, width, 3) or (height, width)",
            found=f"{values.dtype} {values.shape}",
        )
    return np.ascontiguousarray(values)


def _bytes(value: Any) -> int:
    return int(value.nbytes) if isinstance(value, np.ndarray) else len(value)


def _table(quality: int) -> int:
    """The sum of libjpeg's luma table for a quality."""
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    return sum(min(max((int(n) * percent + 50) // 100, 1), 255) for n in _LUMA.split())
