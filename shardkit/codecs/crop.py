"""Crop, resize and mirror images, writing them into the rows of a batch: many in one call.

Resizing is Pillow's antialiased BILINEAR, bit for bit, along the rows first, as Pillow did before
13. A C extension (`_crop.c`) decodes only what a crop needs, without the interpreter lock; without
the extension, simplejpeg and Pillow give bit-identical results. `crop_many`, which only the
extension has, also reads the headers and computes the windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardkit.codecs.color import ProfileError, to_srgb
from shardkit.codecs.extension import _crop
from shardkit.codecs.header import Header
from shardkit.codecs.jpeg import reduction
from shardkit.codecs.pixels import upright
from shardkit.codecs.window import Pixels
from shardkit.options import MAX_PIXELS

Jobs = npt.NDArray[np.int32]
Rows = Pixels | Sequence[Pixels]

_T = TypeVar("_T")

# The columns of a job: a crop in pixels of the upright image; the size to which it is resized; the
# top left corner of a window in the result (as large as the output row); whether the window is
# mirrored left to right, 1 or 0; and EXIF's orientation of a JPEG, which is turned upright first.
JOB = (
    *("x", "y", "width", "height", "full_width", "full_height", "left", "top", "flip"),
    "orientation",
)

# The columns of what `crop_many` returns: a window, as in `codecs.window`; then width, height and
# orientation in the header of its image.
WINDOW = (*JOB[:-1], "columns", "rows", "image_width", "image_height", "orientation")

# The columns of a step of `crop_many`. Some kinds take random numbers in [0, 1).
STEP = ("kind", "width", "height", "scale_or_p", "most_scale", "ratio", "most_ratio")
RANDOM_RESIZED_CROP, RESIZE, RESIZE_SHORTER, CENTER_CROP, HORIZONTAL_FLIP = range(5)

_MOST_PROFILES = 64
_srgb_profiles: list[bytes] = []  # those that `can_crop` found to need no conversion

_CHROMA = ("444", "422", "420", "440", "411")
_INK = ("CMYK", "YCCK")
_END = b"\xff\xd9"


def can_crop(data: bytes, header: Header) -> bool:
    """Return whether `crop_jpegs` supports an image.

    It supports 8-bit JPEGs in grey or YCbCr that end with the end marker and need no conversion to
    sRGB. `header` is the result of `read_header` for `data`.
    """
    if header.format != "jpeg" or header.oddity:
        return False
    if header.colour != "GRAY" and header.chroma not in _CHROMA:
        return False
    if header.width * header.height > MAX_PIXELS or not data.endswith(_END):
        return False
    return header.profile is None or _is_srgb(header.profile, header.colour)


def _is_srgb(profile: bytes, colour: str) -> bool:
    try:
        if to_srgb(profile, colour) is not None:
            return False
    except ProfileError:
        return False
    if profile not in _srgb_profiles and len(_srgb_profiles) < _MOST_PROFILES:
        _srgb_profiles.append(profile)
    return True


def has_crop_many() -> bool:
    """Return whether there is the extension, which `crop_many` needs."""
    return _crop is not None


def crop_many(
    data: Any,
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    drawn: npt.NDArray[np.float64],
    program: npt.NDArray[np.float64],
    out: npt.NDArray[Any],
    *,
    table: npt.NDArray[Any] | None = None,
    size: tuple[int, int] | None = None,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int32]]:
    """Read, crop, resize and mirror the images in a buffer, in one call without interpreter lock.

    data: a buffer of bytes. Image n has the `sizes[n]` bytes from `starts[n]`; -1 if it is absent.
    drawn: random numbers in [0, 1) of shape (images, numbers): those of all steps, in order.
    program: what to do, of shape (steps, STEP): the transforms in a `transforms.chain.Job`.
    out: C-contiguous (images, height, width, 3), of uint8, or of the type of `table`.
    table: (256, 3) of 2 or 4 bytes: what each value of a channel becomes, as in `look_up`.
    size: height and width of the images if they are pixels, uint8 (height, width, 3). None: they
        are encoded.

    Returns which images are done, (images,), and their windows, (images, WINDOW). Those that are
    not done must be decoded by `pixels.to_rgb`, which gives the reason if it fails: they are not
    JPEGs that `can_crop` supports, they are damaged, their windows are too large or not of the size
    of `out`, or they have a profile that `can_crop` has not seen yet. Their rows are undefined.

    Raises ValueError for arrays that do not fit together. There must be an extension.
    """
    return _many(data, starts, sizes, drawn, program, out, out.shape[1:3], table, size)


def windows_of_many(
    data: Any,
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    drawn: npt.NDArray[np.float64],
    program: npt.NDArray[np.float64],
    shape: tuple[int, ...],
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int32]]:
    """Return what `crop_many` would for a height and width of the result, without decoding.

    Done are only upright JPEGs, surely grey or YCbCr, of which other decoders than libjpeg make the
    same, with windows inside of their edges. Whether they are damaged is not known.
    """
    none = np.empty(0, np.uint8)
    done, windows = _many(data, starts, sizes, drawn, program, none, shape, None, None)
    found = dict(zip(WINDOW, windows.T, strict=True))
    done &= found["orientation"] == 1
    for first, count, full in (("left", "columns", "full_width"), ("top", "rows", "full_height")):
        done &= (found[first] >= 0) & (found[first] + found[count] <= found[full])
    return done, windows


def _many(
    data: Any,
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    drawn: npt.NDArray[np.float64],
    program: npt.NDArray[np.float64],
    out: npt.NDArray[Any],
    shape: tuple[int, ...],
    table: npt.NDArray[Any] | None,
    size: tuple[int, int] | None,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int32]]:
    """Call the extension; an `out` of no bytes means that no image is decoded."""
    assert _crop is not None
    count, (height, width) = len(out) or len(starts), shape
    done = np.zeros(count, np.bool_)
    windows = np.zeros((count, len(WINDOW)), np.int32)
    starts, sizes = (np.ascontiguousarray(array, np.int64) for array in (starts, sizes))
    drawn, program = (np.ascontiguousarray(array, np.float64) for array in (drawn, program))
    _crop.crop_many(
        data, starts, sizes, drawn, program, table, out, done, windows,
        (height, width), size or (0, 0), tuple(_srgb_profiles), MAX_PIXELS,
    )  # fmt: skip
    return done, windows


def crop_jpegs(images: Sequence[bytes], jobs: Jobs, out: Rows) -> npt.NDArray[np.bool_]:
    """Decode, turn, crop, resize and mirror JPEGs; the first into `out[0]`, and so on.

    `jobs` has a row with the columns JOB for each image. `out` is an array or a list of
    C-contiguous arrays (height, width, 3) of uint8.

    Returns False for each image that could not be decoded: libjpeg failed or warned, or the crop is
    not inside the image. Its row is then undefined; `pixels.to_rgb` raises an error that says why.
    Damage after the last line that a crop needs may go unnoticed.
    """
    jobs = np.ascontiguousarray(jobs, np.int32)
    done = np.zeros(len(images), np.bool_)
    if _crop is not None:
        _crop.crop_jpegs(images, jobs, out, done, MAX_PIXELS)
        return done
    for n, (data, job, row) in enumerate(_each(images, jobs, out)):
        done[n] = _crop_jpeg(data, job, row)
    return done


def crop_pixels(images: Sequence[Pixels], jobs: Jobs, out: Rows, reduced: int = 1) -> None:
    """Crop, resize and mirror decoded images: C-contiguous RGB arrays (height, width, 3).

    `reduced` is 2, 4 or 8 for images decoded at 1/2, 1/4 or 1/8 of their size. Jobs are in pixels
    of the full size, and may end inside a pixel of the reduced image.
    """
    jobs = np.ascontiguousarray(jobs, np.int32)
    if _crop is not None:
        _crop.crop_pixels(images, jobs, out, reduced)
        return
    each = _each(images, jobs, out)
    for pixels, job, _ in each:
        if not _is_inside(job, pixels.shape[1] * reduced, pixels.shape[0] * reduced):
            raise ValueError("a crop that is not inside of its image")
    for pixels, job, row in each:
        _resample(pixels, job, reduced, row)


def crop_values(values: npt.NDArray[Any], job: Sequence[int], out: npt.NDArray[Any]) -> None:
    """Crop, resize and mirror values (height, width, channels) of any type into such an array.

    Each channel is resized as one of RGB; other types than uint8 in float32. Without resizing,
    values are unchanged. Raises TypeError for resizing integers or floats that float32 rounds.
    """
    x, y, width, height, full_width, full_height, left, top, flip, _ = job
    rows, columns, channels = out.shape
    if (width, height) == (full_width, full_height):
        window = values[y + top : y + top + rows, x + left : x + left + columns]
        out[:] = window[:, ::-1] if flip else window
        return
    kind = values.dtype
    if kind.kind not in "uif" or (kind.itemsize > 2 and kind != np.float32):
        raise TypeError(f"{kind} values, which float32 would round")
    plane = np.empty((rows, columns), np.uint8 if kind == np.uint8 else np.float32)
    for channel in range(channels):
        _resample(values[:, :, channel].astype(plane.dtype), [*job], 1, plane)
        out[:, :, channel] = np.rint(plane) if kind.kind in "ui" else plane


def resize(
    pixels: Pixels, width: int, height: int, of: tuple[int, int] | None = None, reduced: int = 1
) -> Pixels:
    """Resize pixels (height, width, 3).

    `of` is the width and height of the image if it was decoded at 1/`reduced` of its size.
    """
    old = of or (pixels.shape[1], pixels.shape[0])
    smaller = min(width, old[0]), min(height, old[1])
    if smaller not in (old, (width, height)):
        # One side shrinks and the other grows: shrink first, for fewer pixels between the passes.
        pixels, old, reduced = resize(pixels, *smaller, old, reduced), smaller, 1
    out = np.empty((height, width, 3), np.uint8)
    job = np.array([(0, 0, *old, width, height, 0, 0, 0, 1)], np.int32)
    crop_pixels([np.ascontiguousarray(pixels)], job, [out], reduced)
    return out


def look_up(pixels: Pixels, table: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Map pixels (height, width, 3) through `table` (256, 3), whose type has 2 or 4 bytes."""
    if _crop is not None:
        _crop.look_up(np.ascontiguousarray(pixels), table, out)
        return
    for channel in range(3):
        out[:, :, channel] = table[:, channel][pixels[:, :, channel]]


# --- without the extension -----------------------------------------------------------------------


def _each(images: Sequence[_T], jobs: Jobs, out: Rows) -> list[tuple[_T, list[int], Pixels]]:
    """Return each image with its job and row. Raises ValueError for invalid jobs."""
    if not jobs.shape == (len(out), len(JOB)) == (len(images), len(JOB)):
        raise ValueError(f"{len(jobs)} jobs and {len(out)} rows for {len(images)} images")
    each = list(zip(images, jobs.tolist(), out, strict=True))
    for _, (x, y, width, height, full_width, full_height, left, top, _, turn), row in each:
        rows, columns, _ = row.shape
        starts = min(x, y, left, top) >= 0 and min(width, height, rows, columns) > 0
        if (
            not starts
            or not 1 <= turn <= 8
            or left + columns > full_width
            or top + rows > full_height
        ):
            raise ValueError("a crop without pixels, or a window that is not inside of its size")
    return each


def _is_inside(job: list[int], width: int, height: int) -> bool:
    return job[0] + job[2] <= width and job[1] + job[3] <= height


def _crop_jpeg(data: bytes, job: list[int], out: Pixels) -> bool:
    import simplejpeg

    *_, orientation = job
    reduced = reduction(*job[2:6]) if orientation == 1 else 1
    try:
        rows, columns, space, _ = simplejpeg.decode_jpeg_header(data)
        size = (rows, columns) if orientation >= 5 else (columns, rows)
        if space in _INK or rows * columns > MAX_PIXELS or not _is_inside(job, *size):
            return False
        least = -(-rows // reduced), -(-columns // reduced)
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=least[0], min_width=least[1])
    except ValueError:
        return False
    _resample(upright(pixels, orientation), job, reduced, out)
    return True


def _resample(
    pixels: npt.NDArray[Any], job: list[int], reduced: int, out: npt.NDArray[Any]
) -> None:
    """Resample with Pillow, RGB or one channel of uint8 or float32.

    All reduced pixels that the crop touches are used, the outer ones partially: otherwise the
    result would be visibly shifted, by up to half of a reduced pixel.
    """
    from PIL import Image

    x, y, width, height, full_width, full_height, left, top, flip, _ = job
    first = x // reduced, y // reduced
    stop = -(-(x + width) // reduced), -(-(y + height) // reduced)
    crop = Image.fromarray(np.ascontiguousarray(pixels[first[1] : stop[1], first[0] : stop[0]]))
    # Along the rows first, as in Pillow before 13.
    rows = x / reduced - first[0], 0, (x + width) / reduced - first[0], crop.height
    wide = crop.resize((full_width, crop.height), Image.Resampling.BILINEAR, rows)
    columns = 0, y / reduced - first[1], full_width, (y + height) / reduced - first[1]
    size = full_width, full_height
    resized = np.asarray(wide.resize(size, Image.Resampling.BILINEAR, columns))
    window = resized[top : top + out.shape[0], left : left + out.shape[1]]
    out[:] = window[:, ::-1] if flip else window
