"""The values of images as stored: of any type, with any number of channels.

`decoded` gives what `Decode` asks for. Values are not scaled, and no colour profile is applied.
Palettes and CMYK become RGB; a transparent colour becomes an alpha channel. The pages of a TIFF
follow each other as channels. What Pillow cannot read, tifffile does.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs import tiff
from shardkit.codecs.crop import crop_values
from shardkit.codecs.header import PPM_SPACE, Header, read_header
from shardkit.codecs.image import (
    CutError,
    DecodeError,
    NotAnImageError,
    TooLargeError,
    UnsupportedError,
    check_end,
    refuse_want_of_memory,
)
from shardkit.codecs.pixels import decode, loaded, to_rgb, upright
from shardkit.codecs.window import Window
from shardkit.helpers.extras import extra, missing
from shardkit.options import MAX_PIXELS

Values = npt.NDArray[Any]

_MOST_BYTES = 8 * MAX_PIXELS  # of an image: RGB and alpha with 16 bits
_PPM = re.compile(rb"P([56])" + (PPM_SPACE + rb"(\d{1,9})") * 3 + rb"\s")


class KindError(NotAnImageError):
    """An image whose values, or their number, do not fit what is asked for."""

    what = "the image has values of another kind"
    expected = None
    fix = 'decode it with shardkit.Decode(dtype="auto"), or with another dtype or channels'


def decoded(data: bytes, dtype: str = "uint8", channels: int | None = None) -> Values:
    """Return an upright image (height, width, channels), as `Decode` describes it.

    Raises NotAnImageError, and MissingLibraryError if only tifffile can read the image.
    """
    header = read_header(data)
    if dtype == "uint8" and not (header.is_deep and (channels or 3) not in (1, 3)):
        if channels in (None, 3):
            return to_rgb(data)
        if channels == 1:
            from PIL import Image

            return np.asarray(Image.fromarray(to_rgb(data)).convert("L"))[:, :, None]
    values = stored_values(data, header)
    return with_channels(as_type(values, dtype), channels)


def as_type(values: Values, dtype: str) -> Values:
    """Return values as `dtype`, or unchanged if it is "auto". Raises KindError if one does not fit.

    Only numbers of more bits are rounded, to float32.
    """
    kind = values.dtype if dtype == "auto" else np.dtype(dtype)
    if kind == values.dtype:
        return values
    if kind.kind == "f":
        fits = values.dtype.kind in "uif"
    else:
        limits = np.iinfo(kind)
        whole = values.dtype.kind in "ui"
        fits = whole and limits.min <= values.min() and values.max() <= limits.max
    if not fits:
        raise KindError(f"{values.dtype}, from {values.min()} to {values.max()}, not all {kind}")
    return values.astype(kind)


def with_channels(values: Values, channels: int | None) -> Values:
    """Return values with a number of channels: grey becomes RGB, and alpha is added as opaque.

    Raises KindError for any other number.
    """
    found = values.shape[2]
    if channels is None or channels == found:
        return values
    if (found, channels) not in ((1, 2), (1, 3), (1, 4), (3, 4), (2, 4)):
        raise KindError(f"{found} channels instead of {channels}")
    colours, alpha = (
        (values[:, :, :1], values[:, :, 1:]) if found < 3 else (values, values[..., :0])
    )
    if channels >= 3 and found < 3:
        colours = np.repeat(colours, 3, axis=2)
    if channels in (2, 4) and not alpha.shape[2]:
        opaque = 1 if values.dtype.kind == "f" else np.iinfo(values.dtype).max
        alpha = np.full((*values.shape[:2], 1), opaque, values.dtype)
    return np.concatenate([colours, alpha], axis=2)


def cut(values: Values, window: Window, out: Values) -> None:
    """Write a window of values (height, width, channels) to `out`; margins are 0.

    Raises KindError for resizing values that float32 would round.
    """
    inner = window.clipped()
    inside = np.empty((inner.rows, inner.columns, out.shape[2]), out.dtype)
    try:
        crop_values(values, inner.job(), inside)
    except TypeError as error:
        raise KindError(f"{error}; only cropping and mirroring keep them") from error
    out[:] = window.with_margins(inside)


def stored_values(data: bytes, header: Header) -> Values:
    """Return the values of an upright image (height, width, channels) as they are stored.

    Raises NotAnImageError, and MissingLibraryError if only tifffile can read the image.
    """
    check_end(data, header.format)
    size = header.width * header.height
    stored = size * header.channels * header.pages * np.dtype(header.dtype).itemsize
    if size > MAX_PIXELS or stored > _MOST_BYTES:
        raise TooLargeError(f"{header.width:,} x {header.height:,}, {stored:,} bytes")
    if header.format == "jpeg":
        values: Values = decode(data, header).pixels[:, :, : header.channels]
    elif header.format == "tiff":
        values = _of_tiff(data, header)
    elif header.oddity == "animated":
        raise KindError(f"{header.kind}: several frames")
    elif header.format == "ppm" and header.dtype == "uint16":
        values = _deep_ppm(data)
    elif header.format == "png" and header.dtype == "uint16":
        values = _deep_png(data, header)
    else:
        with loaded(data, header) as image:
            values = _of_pillow(image)
    return upright(values, header.orientation)


def _of_pillow(image: Any) -> Values:
    mode, see_through = image.mode, "transparency" in image.info
    if mode == "CMYK":
        image = image.convert("RGB")
    elif mode in ("P", "PA") or (see_through and mode in ("RGB", "L", "1")):
        colours = "L" if mode in ("L", "1") else "RGB"
        alpha = {"L": "LA", "RGB": "RGBA"}[colours]
        image = image.convert(alpha if see_through or mode == "PA" else colours)
    elif mode == "1":
        image = image.convert("L")
    values: Values = np.asarray(image)
    return values if values.ndim == 3 else values[:, :, None]


def _both_bytes(data: bytes, header: Header, high: Values, page: int = 0) -> Values:
    with loaded(data, header, page, low=True) as image:
        values: Values = high.astype(np.uint16) << 8 | np.asarray(image)
    return values


def _deep_png(data: bytes, header: Header) -> Values:
    if header.channels == 2 and data[25] == 4:
        # As 8-bit RGBA, which has as many bytes per pixel: high and low bytes of grey and alpha.
        head = b"IHDR" + data[16:24] + b"\x08\x06" + data[26:29]
        checksum = struct.pack(">I", zlib.crc32(head))
        with loaded(data, header), loaded(data[:12] + head + checksum + data[33:], header) as image:
            return np.asarray(image).view(">u2").astype(np.uint16)
    with loaded(data, header) as image:
        values, key = np.asarray(image), image.info.get("transparency")
    if values.ndim == 3:
        values = _both_bytes(data, header, values)
    values = values.reshape(*values.shape[:2], -1).astype(np.uint16)
    if key is None:
        return values
    opaque = (values != np.array(key)).any(axis=2, keepdims=True)
    return np.concatenate([values, opaque * np.uint16(0xFFFF)], axis=2)


def _deep_ppm(data: bytes) -> Values:
    match = _PPM.match(data)
    if match is None:
        raise UnsupportedError("a ppm file of 16 bits in ASCII")
    width, height, channels = int(match[2]), int(match[3]), 1 if match[1] == b"5" else 3
    count = width * height * channels
    if match.end() + 2 * count > len(data):
        raise CutError(f"{len(data):,} bytes of a ppm file of {match.end() + 2 * count:,}")
    values = np.frombuffer(data, ">u2", count, match.end())
    return values.reshape(height, width, channels).astype(np.uint16)


# --- TIFF ----------------------------------------------------------------------------------------


def _of_tiff(data: bytes, header: Header) -> Values:
    pages = tiff.pages(data)
    kinds = {page.kind for page in pages}
    if len(kinds) > 1:
        sizes = ", ".join(f"{w} x {h} of {kind} x {n}" for w, h, kind, n in sorted(kinds))
        raise KindError(f"pages of different sizes or types: {sizes}")
    made = [page_values(data, header, page) for page in pages]
    return made[0] if len(made) == 1 else np.concatenate(made, axis=2)


def page_values(data: bytes, header: Header, page: tiff.Page) -> Values:
    """Return the values of one page of a TIFF (height, width, channels), as stored.

    Raises NotAnImageError, and MissingLibraryError if only tifffile can read the page.
    """
    if page.width * page.height > MAX_PIXELS:
        raise TooLargeError(f"{page.width:,} x {page.height:,}")
    values = _page_of_pillow(data, header, page) if _in_pillow(page) else None
    return _page_of_tifffile(data, page) if values is None else values


def _in_pillow(page: tiff.Page) -> bool:
    """Whether Pillow may have a mode for the values of a page."""
    if page.bands:
        return False
    return page.dtype in ("uint8", "uint16") or (
        page.channels == 1 and page.dtype in ("int16", "int32", "uint32", "float32")
    )


def _page_of_pillow(data: bytes, header: Header, page: tiff.Page) -> Values | None:
    """Return the values of a page; None if Pillow does not read all of its channels."""
    try:
        with loaded(data, header, page.number) as image:
            values = _of_pillow(image)
        if page.dtype == "uint16" and values.dtype == np.uint8:
            values = _both_bytes(data, header, values, page.number)
    except (UnsupportedError, DecodeError):
        return None  # tifffile gives the reason, if it is damaged
    if values.shape[2] != page.channels:
        return None
    values, wanted = values.astype(values.dtype.newbyteorder("=")), np.dtype(page.dtype)
    return values.view(wanted) if wanted.itemsize == values.itemsize else values.astype(wanted)


def _page_of_tifffile(data: bytes, page: tiff.Page) -> Values:
    with extra("tiff", "this kind of TIFF"):
        import tifffile
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            found = file.pages[page.number]
            values: Values = found.asarray()
            if found.axes.startswith("S"):  # one plane after the other
                values = np.moveaxis(values, 0, -1)
    except Exception as error:  # it raises any exception on damaged data
        if "imagecodecs" in str(error):
            raise missing("tiff", "this compression of a TIFF", "imagecodecs") from error
        refuse_want_of_memory(error, page.width * page.height)
        raise DecodeError(f"a damaged tiff file: {error}") from error
    if values.size != math.prod((page.width, page.height, page.channels)):
        raise UnsupportedError(f"a tiff file with pixels of shape {values.shape}")
    return values.reshape(page.height, page.width, page.channels).astype(page.dtype, copy=False)


def to_tiff(values: Values, *, rgb: bool, profile: bytes | None = None) -> bytes:
    """Encode values (height, width, channels) as an uncompressed TIFF, in one page.

    `rgb` is whether three channels are colours. Raises MissingLibraryError without tifffile.
    """
    with extra("tiff", "writing this kind of TIFF"):
        import tifffile
    file, several = io.BytesIO(), values.shape[2] > 1
    tifffile.imwrite(
        file,
        values if several else values[:, :, 0],
        photometric="rgb" if rgb and values.shape[2] == 3 else "minisblack",
        planarconfig="contig" if several else None,
        metadata=None,
        software=False,
        iccprofile=profile,
    )
    return file.getvalue()
