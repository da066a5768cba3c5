"""Format and size of an encoded image, from its first bytes; and whether its end is present.

No pixels are decoded. JPEG, PNG and WebP are parsed here in a few microseconds, as each image of a
conversion is checked; rarer formats are read by Pillow. `header` reads all other properties.
Layouts: ITU T.81 annex B (JPEG), RFC 2083 (PNG), RFC 9649 (WebP).
"""

from __future__ import annotations

import importlib
import io
import math
import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from shardkit.codecs.tiff import pages
from shardkit.errors import SampleError, is_want_of_memory
from shardkit.options import MAX_PIXELS
from shardkit.storage.pointers import is_html

# File suffixes of images, with the format that each usually contains; the first suffix of a format
# is the one that is written. A superset of torchvision's IMG_EXTENSIONS.
SUFFIXES = {
    "jpg": "jpeg", "jpeg": "jpeg", "jpe": "jpeg", "jfif": "jpeg", "png": "png", "webp": "webp",
    "gif": "gif", "bmp": "bmp", "tif": "tiff", "tiff": "tiff", "ppm": "ppm", "pgm": "ppm",
    "pbm": "ppm", "pnm": "ppm", "apng": "png",
}  # fmt: skip

_MAGIC = (
    (b"\xff\xd8\xff", "jpeg"), (b"\x89PNG\r\n\x1a\n", "png"), (b"GIF8", "gif"), (b"BM", "bmp"),
    (b"II*\0", "tiff"), (b"MM\0*", "tiff"), (b"II+\0", "tiff"), (b"MM\0+", "tiff"),
    (b"P4", "ppm"), (b"P5", "ppm"), (b"P6", "ppm"),
    *((b"P%d%c" % (number, blank), "ppm") for number in (1, 2, 3) for blank in b" \t\r\n#"),
)  # fmt: skip
# Offset and value of the first bytes of images in other formats.
_OTHERS = (
    *((4, b"ftyp" + brand, "AVIF") for brand in (b"avif", b"avis")),
    *((4, b"ftyp" + brand, "HEIC") for brand in (b"heic", b"heix", b"hevc", b"mif1", b"msf1")),
    (4, b"jP  \r\n\x87\n", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"\xff\x0a", "JPEG XL"),
    (4, b"JXL \r\n\x87\n", "JPEG XL"),
    (0, b"<svg", "SVG"),
)
# Start-of-frame markers: C0 to CF without DHT (C4), JPG (C8) and DAC (CC).
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a segment
_SEGMENT = struct.Struct(">BBH")
_FRAME = struct.Struct(">HH")
_JPEG_END = b"\xff\xd9"
_PNG_END = b"IEND\xae\x42\x60\x82"
_GIF_END = b"\0;"  # the last block's end, and the trailer
_TAKEN = 16  # bytes of memory per pixel: three RGBA frames in WebP's decoder, one in Pillow

# Pillow's readers by name: `Image.open` would also try others, and has its own size limit.
_PLUGINS = {
    "png": "Png", "webp": "WebP", "gif": "Gif", "bmp": "Bmp", "tiff": "Tiff", "ppm": "Ppm",
    "jpeg": "Jpeg",
}  # fmt: skip

# Words in names of masks, such as `seg.png`, `cat_mask`, `annotation`, `depth_map`, `labelIds`.
_MASKS = {
    *("mask", "masks", "trimap", "parsing", "panoptic", "semantic", "instances", "instanceids"),
    *("seg", "segs", "segm", "segmap", "segmask", "segmentation", "segmentations", "semseg"),
    *("label", "labels", "labelmap", "labelids", "annot", "annotation", "annotations"),
    *("depth", "depthmap", "disparity"),
}
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


def is_mask_name(field: str) -> bool:
    """Return whether a field has a name that masks usually have."""
    stem, dot, suffix = field.rpartition(".")
    name = stem if dot and suffix.lower() in SUFFIXES else field
    words = {name.lower(), *(word.lower() for word in _WORDS.findall(name))}
    return not words.isdisjoint(_MASKS)


class ImageInfo(NamedTuple):
    """Format (a value of SUFFIXES), width and height in pixels as stored, not yet oriented."""

    format: str
    width: int
    height: int


class NotAnImageError(ValueError):
    """The bytes are not an image of a known format, or its header is truncated or damaged.

    `what`, `expected` and `fix` are used for the error of a sample.
    """

    what = "the value is not an image"
    expected: str | None = "an encoded image: JPEG, PNG, WebP, GIF, BMP, TIFF or PPM"
    fix = "repair or remove it"


class OtherFormatError(NotAnImageError):
    """An image in a format that is not read."""

    what = "the image is in a format that cannot be read"
    fix = "convert it to PNG or JPEG: PIL.Image.open(FILE).save(OUT)"


class UnsupportedError(NotAnImageError):
    """An image whose kind of pixels cannot be read."""

    what = "the image has pixels of a kind that cannot be read"
    expected = "grey or RGB, 8 or 16 bits per channel"
    fix = 'store it unchanged, and load it with shardkit.Decode(dtype="auto")'


class TooDeepError(NotAnImageError):
    """The target cannot hold the values of the image."""

    what = "the image has more bits, channels or pages than can be stored there"
    expected = None
    fix = (
        "give --image-format keep or raw, with another format than beton; or, of 16 bits or several"
        " pages, keep the high byte and the first page with --image-format jpeg"
    )


class CutError(NotAnImageError):
    """The end of the image is missing."""

    what = "the image is truncated"
    expected = None
    fix = "copy it again"


class DecodeError(NotAnImageError):
    """The header is valid, but the rest is damaged, or has pixels without a defined colour."""

    what = "the image cannot be decoded"
    expected = None


class TooLargeError(NotAnImageError):
    """The image has too many pixels to be decoded or resized in memory."""

    what = "the image has too many pixels"
    expected = f"at most {MAX_PIXELS:,}"
    fix = "make it smaller, for example with --resize while converting"


def format_of(data: bytes) -> str | None:
    """Return the format of an image from its first bytes; None if no format is known."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    for magic, format in _MAGIC:
        if data.startswith(magic):
            return format
    return None


def _unknown(data: bytes) -> NotAnImageError:
    """Return the error for bytes of no readable format, which names other formats of images."""
    for at, magic, name in _OTHERS:
        if data.startswith(magic, at):
            return OtherFormatError(f"{name}, judging by its first bytes")
    return NotAnImageError(describe(data))


def is_image(data: bytes) -> bool:
    """Return whether the first bytes are those of an image (its header may still be damaged)."""
    format = format_of(data)
    if format == "bmp":  # two letters are weak evidence: the reserved bytes must also be zero
        return data[6:10] == bytes(4)
    return format not in (None, "ppm")


def probe(data: bytes) -> ImageInfo:
    """Return format and size of an encoded image; raises NotAnImageError with the reason."""
    format = format_of(data)
    try:
        if format == "jpeg":
            width, height = _jpeg_size(data)
        elif format == "png":
            if data[12:16] != b"IHDR":
                raise NotAnImageError("a png file whose first chunk is not IHDR")
            width, height = struct.unpack_from(">II", data, 16)
        elif format == "webp":
            width, height = _webp_size(data)
        elif format == "tiff":
            _, width, height, *_ = pages(data, 1)[0]
        elif format is not None:
            with opened(data) as image:
                width, height = image.size
        else:
            raise _unknown(data)
    except (struct.error, IndexError):
        raise NotAnImageError(f"a {format} file that ends inside its header") from None
    if not (width and height):
        raise NotAnImageError(f"a {format} header that says {width} x {height} pixels")
    return ImageInfo(format, width, height)


def check_end(data: bytes, format: str) -> None:
    """Raise CutError for an image whose end is missing, as far as its format marks the end.

    Bytes after the end are ignored: cameras and web servers append some.
    """
    if format == "jpeg":  # these two bytes never occur in the compressed pixels
        whole = data.endswith(_JPEG_END) or data.rfind(_JPEG_END, _scan(data)) >= 0
    elif format == "png":
        whole = data.endswith(_PNG_END) or _PNG_END in data
    elif format == "gif":
        whole = data.endswith(_GIF_END) or _GIF_END in data
    elif format == "webp":
        whole = int.from_bytes(data[4:8], "little") + 8 <= len(data)
    else:
        return
    if not whole:
        raise CutError(f"{len(data):,} bytes of a {format} file without its end")


def checked(value: bytes, key: str, field: str) -> ImageInfo:
    """`probe` for the value of a field; raises SampleError if it is not a complete image."""
    try:
        info = probe(value)
        check_end(value, info.format)
        return info
    except NotAnImageError as error:
        raise unusable(error, key, field) from error


def unusable(
    error: NotAnImageError,
    key: str,
    field: str,
    otherwise: str = "drop such samples with --on-error skip",
) -> SampleError:
    """Return the error for a sample whose value is not an image, or not a complete one."""
    return SampleError(
        error.what,
        key=key,
        field=field,
        expected=error.expected,
        found=str(error),
        fix=f"{error.fix}, or {otherwise}",
    )


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, content start and stop of each segment, up to and including the first scan.

    Raises struct.error if the data ends before that.
    """
    at = 2
    while True:
        fill, marker, length = _SEGMENT.unpack_from(data, at)
        if fill != 0xFF:
            raise NotAnImageError(f"a jpeg file whose header is damaged at byte {at}")
        if marker == 0xFF:  # fill bytes are allowed before a marker
            at += 1
        elif marker in _ALONE:
            at += 2
        elif marker == 0xD9:
            raise NotAnImageError("a jpeg file that ends before its pixels")
        else:
            yield marker, at + 4, at + 2 + length
            if marker == 0xDA:
                return
            at += 2 + length


def _jpeg_size(data: bytes) -> tuple[int, int]:
    for marker, start, _ in jpeg_segments(data):
        if marker in FRAMES:
            height, width = _FRAME.unpack_from(data, start + 1)
            return width, height
    raise NotAnImageError("a jpeg file without a frame header")


def _scan(data: bytes) -> int:
    """Return the offset of the pixels of a JPEG, or the end of the data if it ends before them."""
    try:
        return [start for _, start, _ in jpeg_segments(data)][-1]
    except struct.error:
        return len(data)


def riff_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, start and size of each chunk of a RIFF file; the last may exceed the file."""
    at = 12
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        yield name, at + 8, size
        at += 8 + size + size % 2


def _webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":  # two 24-bit numbers, each the size less one
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":  # after the signature byte, two 14-bit numbers, each the size less one
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise NotAnImageError("a webp file whose first chunk is not an image")


def opened(data: bytes) -> Any:
    """Return the image as a Pillow image with only its header read; close it after use.

    Raises NotAnImageError.
    """
    format = format_of(data)
    if format is None:
        raise _unknown(data)
    name = _PLUGINS[format]
    try:
        plugin = importlib.import_module(f"PIL.{name}ImagePlugin")
        return getattr(plugin, f"{name}ImageFile")(io.BytesIO(data))
    except Exception as error:  # Pillow's parsers raise any exception on damaged data
        # The one of WebP already allocates memory for the pixels here.
        refuse_want_of_memory(error, math.prod(_webp_size(data)) if format == "webp" else 0)
        if is_unknown_mode(error):
            raise UnsupportedError(f"a {format} file, not damaged, but: {error}") from error
        raise NotAnImageError(f"a damaged {format} file: {error}") from error


def is_unknown_mode(error: Exception) -> bool:
    """Return whether Pillow has no mode for the bands or the type of a page of a TIFF."""
    return "unknown pixel mode" in str(error)


def refuse_want_of_memory(error: Exception, pixels: int) -> None:
    """Raise MemoryError if decoding `pixels` pixels failed for lack of memory, not due to damage.

    Some decoders give the same message for both, so try to allocate the memory that they need.
    """
    try:
        if is_want_of_memory(error):
            raise MemoryError
        bytes(_TAKEN * min(pixels, MAX_PIXELS))  # zeros that are never written to
    except MemoryError:
        raise MemoryError(f"an image of {pixels:,} pixels could not be decoded") from error


def describe(data: bytes) -> str:
    """Describe bytes of no known format in words."""
    if not data:
        return "an empty file (0 bytes)"
    if is_html(data[:1024]):
        return f"an HTML page, perhaps of an error during the download: {data[:24]!r}"
    text = data[:24]
    if text.isascii() and text.decode().replace("\n", " ").replace("\r", " ").isprintable():
        return f"text: {text.decode()!r}"
    return f"bytes that are not an image: {text[:12].hex(' ')}"
