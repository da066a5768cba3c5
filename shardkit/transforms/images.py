"""Crop, resize and mirror many images at once into the rows of a batch.

A value is an encoded image or its pixels. Plain JPEGs that become 8-bit RGB are processed in one
call that decodes only what is needed; all others are decoded strictly, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.crop import can_crop, crop_jpegs, crop_pixels
from shardkit.codecs.header import Header, read_header
from shardkit.codecs.image import CutError, NotAnImageError, TooLargeError
from shardkit.codecs.pixels import ppm_header, to_rgb
from shardkit.codecs.values import as_type, cut, decoded, with_channels
from shardkit.codecs.window import Pixels, Window
from shardkit.options import MAX_PIXELS
from shardkit.transforms.steps import Decode, are_channels

Errors = dict[int, NotAnImageError]
# Makes an array for a sample's index in its group, of a shape and type; raises SizeError.
Make = Callable[[int, tuple[int, ...], "np.dtype[Any]"], "npt.NDArray[Any]"]
Arrays = dict[int, "npt.NDArray[Any]"]


class PixelsError(NotAnImageError):
    """A value that is neither an encoded image nor its pixels."""

    expected = "an encoded image, or pixels: numbers (height, width, channels)"
    fix = "convert it to pixels before this transform"


class SizeError(NotAnImageError):
    """An image whose size differs from that of its field."""

    what = "the image does not have the size of all images in its field"
    expected = None
    fix = "return uint8 from a function before crops; or convert again, or repair the sample"


@dataclass
class ImageBatch:
    """Values with their headers. Those in `errors` are not valid images."""

    values: Sequence[Any]
    sizes: list[tuple[int, int]]  # width and height of each, upright
    headers: dict[int, Header]  # of encoded images
    errors: Errors
    decode: Decode = Decode()  # noqa: RUF009 - frozen

    @classmethod
    def of(cls, values: Sequence[Any], decode: Decode) -> ImageBatch:
        made = cls([_as_pixels(value) for value in values], [], {}, {}, decode)
        for number in range(len(values)):
            try:
                made.sizes.append(made._size_of(number))
            except NotAnImageError as error:
                made.sizes.append((0, 0))
                made.errors[number] = error
        return made

    def header(self, number: int) -> Header:
        """Return the header of an image, for its masks; for pixels, one with their size."""
        return self.headers.get(number) or Header("", *self.sizes[number])

    def cut(self, windows: Mapping[int, Window], make: Make) -> tuple[Arrays, Errors]:
        """Return each image's window, in arrays from `make`, and the errors."""
        rgb = {number: w for number, w in windows.items() if self._is_rgb(number)}
        eight = np.dtype(np.uint8)
        out: Arrays = {n: make(n, (w.rows, w.columns, 3), eight) for n, w in rgb.items()}
        errors = self.cut_rgb(rgb, out)
        for number in windows.keys() - rgb.keys():  # one by one, to bound memory
            try:
                out[number] = self._cut_values(number, windows[number], make)
            except NotAnImageError as error:
                errors[number] = error
        return out, errors

    def _is_rgb(self, number: int) -> bool:
        value = self.values[number]
        if isinstance(value, bytes) or not self.decode.is_rgb:
            return self.decode.is_rgb
        return bool(value.dtype == np.uint8 and value.shape[2] == 3)

    def _cut_values(self, number: int, window: Window, make: Make) -> npt.NDArray[Any]:
        value, decode = self.values[number], self.decode
        if isinstance(value, bytes):
            values = decoded(value, decode.dtype, decode.channels)
        elif decode.is_rgb:
            values = value
        else:
            values = with_channels(as_type(value, decode.dtype), decode.channels)
        made = make(number, (window.rows, window.columns, values.shape[2]), values.dtype)
        cut(values, window, made)
        return made

    def cut_rgb(self, windows: Mapping[int, Window], out: Mapping[int, Pixels]) -> Errors:
        """Write windows of images that become 8-bit RGB to their arrays; returns the errors."""
        inside = {n: window.clipped() for n, window in windows.items()}
        within = {
            n: np.empty((inner.rows, inner.columns, 3), np.uint8) if windows[n].beyond else out[n]
            for n, inner in inside.items()
        }
        errors: Errors = {}
        left = self._all_plain(inside, within)
        arrays = [number for number in left if isinstance(self.values[number], np.ndarray)]
        if arrays:
            crop_pixels(
                [np.ascontiguousarray(self.values[number]) for number in arrays],
                np.array([inside[number].job() for number in arrays], np.int32),
                [within[number] for number in arrays],
            )
        for number in set(left).difference(arrays):  # one by one, to bound memory
            try:
                pixels = to_rgb(self.values[number])
            except NotAnImageError as error:
                errors[number] = error
            else:
                job = np.array([inside[number].job()], np.int32)
                crop_pixels([pixels], job, [within[number]])
        for number, window in windows.items():
            if window.beyond and number not in errors:
                out[number][:] = window.with_margins(within[number])
        return errors

    def _size_of(self, number: int) -> tuple[int, int]:
        """Return width and height of an upright image. Raises NotAnImageError."""
        value = self.values[number]
        if isinstance(value, bytes):
            header = self.headers[number] = read_header(value)
            if header.width * header.height > MAX_PIXELS:
                raise TooLargeError(f"{header.width:,} x {header.height:,}")
            return header.upright
        if not isinstance(value, np.ndarray):
            raise PixelsError(f"{type(value).__name__} {value!r:.60}")
        shaped = value.ndim == 3 and are_channels(value.shape[2], self.decode)
        if value.dtype.kind not in "uif" or not shaped or not value.size:
            raise PixelsError(f"an array of {value.dtype} {value.shape}")
        return value.shape[1], value.shape[0]

    def _all_plain(self, windows: Mapping[int, Window], out: Mapping[int, Pixels]) -> list[int]:
        """Process all images that one call can handle; returns the indexes of the others."""
        headers = {n: self.headers[n] for n in windows if n in self.headers}
        plain = [n for n, header in headers.items() if can_crop(self.values[n], header)]
        if not plain:
            return list(windows)
        jobs = [windows[number].job(headers[number].orientation) for number in plain]
        done = crop_jpegs(
            [self.values[number] for number in plain],
            np.array(jobs, np.int32),
            [out[number] for number in plain],
        )
        ready = {number for number, is_done in zip(plain, done.tolist(), strict=True) if is_done}
        return [number for number in windows if number not in ready]


def _as_pixels(value: Any) -> Any:
    """Return the pixels of a PPM, which are uncompressed; any other value unchanged."""
    if not isinstance(value, bytes) or not value.startswith(b"P6"):
        return value
    try:
        header = ppm_header(value)
    except CutError:
        return value  # decoding it raises the error
    if header is None:
        return value
    pixels = np.frombuffer(value, np.uint8, header.stop - header.start, header.start)
    return pixels.reshape(header.height, header.width, 3)
