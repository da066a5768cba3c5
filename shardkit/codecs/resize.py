"""Antialiased resizing: what Pillow and torchvision call BILINEAR, several times as fast.

That filter is a triangle as wide as the scale (Pillow's Resample.c). OpenCV has none, but it has
two steps that are very fast: a symmetric filter over whole pixels, and interpolation between
pixels. One after the other they are close to a triangle, if the weights of the first are fitted.
Where they are not, at the edges of small results and for images of noise, Pillow does it.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import numpy.typing as npt

    Pixels = npt.NDArray[np.uint8]

# Averaging whole blocks of pixels first is exact enough where so much is left to the triangle.
LEFT = 4
_STEPS = 64  # scales are rounded to 1/64, so that few are fitted
_PHASES = 16

# From this scale on, the outer pixels of the result are a large part of it, and made exactly.
_EDGES = 2.5
# Mean squared steps between neighbours, times the error of a fit, over which a result would come
# near to 40 dB of Pillow's: that is so for 1 or 2 of 100 photos (tests/benchmarks/quality.py).
_NOISE = 1.5
_ROWS = 32  # of which one tells how large the steps are


def resize(
    pixels: Pixels, width: int, height: int, extent: tuple[float, float] | None = None
) -> Pixels:
    """Pixels (height, width, 3) in another size; an array that can be written to is overwritten.

    `extent` is the width and height of the image in these pixels, if the last row or column
    stands for a part of a pixel only: half of an odd width, say.
    """
    rows, columns = pixels.shape[:2]
    across, down = extent or (columns, rows)
    if (across < width and down > height) or (across > width and down < height):
        pixels = resize(pixels, min(width, columns), min(height, rows))
        return resize(pixels, width, height)
    by_x, by_y = (_blocks(across / width), _blocks(down / height))
    if by_x > 1 or by_y > 1:
        pixels = _averaged(pixels, by_x, by_y)
        across, down = across / by_x, down / by_y
    x, y = across / width, down / height
    if x <= 1 and y <= 1:
        return _interpolated(pixels, x, y, cv2.INTER_LINEAR)
    fits = [(_fit(round(x * _STEPS), i), _fit(round(y * _STEPS), i)) for i in _KERNELS]
    fit_x, fit_y = min(fits, key=lambda pair: pair[0].error + pair[1].error)
    if (fit_x.error + fit_y.error) * _contrast(pixels) > _NOISE:
        return _by_pillow(pixels, (width, height), (0, 0, across, down))
    edges = _edges(pixels, (width, height), (across, down)) if max(x, y) >= _EDGES else []
    if not (pixels.flags.writeable and pixels.flags.c_contiguous):
        pixels = pixels.copy()
    cv2.sepFilter2D(pixels, -1, fit_x.taps, fit_y.taps, dst=pixels, borderType=cv2.BORDER_REFLECT)
    made = _interpolated(pixels, x, y, fit_x.interpolation)
    for place, values in edges:
        made[place] = values
    return made


def _averaged(pixels: Pixels, by_x: int, by_y: int) -> Pixels:
    """The means of blocks of pixels; on the right and below, of what is left there."""
    height, width, _ = pixels.shape
    made = np.empty((-(-height // by_y), -(-width // by_x), 3), np.uint8)
    for old_rows, rows in _whole_and_rest(height, by_y):
        for old_columns, columns in _whole_and_rest(width, by_x):
            part = made[rows, columns]
            if part.size:
                blocks = pixels[old_rows, old_columns]
                means = cv2.resize(blocks, part.shape[1::-1], interpolation=cv2.INTER_AREA)
                part[:] = means.reshape(part.shape)
    return made


def _whole_and_rest(length: int, by: int) -> list[tuple[slice, slice]]:
    """Where whole blocks are and where their means go; and the same for what is left."""
    whole = length // by
    return [(slice(whole * by), slice(whole)), (slice(whole * by, None), slice(whole, None))]


def _interpolated(pixels: Pixels, x: float, y: float, interpolation: int) -> Pixels:
    pixels = np.ascontiguousarray(pixels)
    made = cv2.resize(pixels, None, fx=1 / x, fy=1 / y, interpolation=interpolation)
    return np.asarray(made, np.uint8)


def _by_pillow(
    pixels: Pixels, size: tuple[int, int], box: tuple[float, float, float, float]
) -> Pixels:
    resized = Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR, box)
    return np.asarray(resized)


def _edges(
    pixels: Pixels, size: tuple[int, int], extent: tuple[float, float]
) -> list[tuple[Any, Pixels]]:
    """Where the outer rows and columns of the result go, and their values."""
    (width, height), (across, down) = size, extent
    x, y = across / width, down / height
    near_x, near_y = math.ceil(2 * x), math.ceil(2 * y)  # pixels that such a row is made of
    far_x, far_y = max(int(across) - near_x, 0), max(int(down) - near_y, 0)
    return [
        (np.s_[:1], _by_pillow(pixels[:near_y], (width, 1), (0, 0, across, y))),
        (
            np.s_[-1:],
            _by_pillow(pixels[far_y:], (width, 1), (0, down - y - far_y, across, down - far_y)),
        ),
        (np.s_[:, :1], _by_pillow(pixels[:, :near_x], (1, height), (0, 0, x, down))),
        (
            np.s_[:, -1:],
            _by_pillow(
                pixels[:, far_x:], (1, height), (across - x - far_x, 0, across - far_x, down)
            ),
        ),
    ]


def _contrast(pixels: Pixels) -> float:
    """The mean squared difference of neighbours, across plus down, of some rows."""
    some, below = pixels[:-1:_ROWS], pixels[1::_ROWS]
    if not some.size or pixels.shape[1] < 2:
        return 0.0
    across = cv2.norm(some[:, 1:], some[:, :-1], cv2.NORM_L2SQR)
    down = cv2.norm(some, below, cv2.NORM_L2SQR)
    return float(across + down) / some.size


def _blocks(scale: float) -> int:
    """The side of the blocks that are averaged first."""
    return int(scale / LEFT) if scale >= 2 * LEFT else 1


class _Fit(NamedTuple):
    interpolation: int
    taps: npt.NDArray[np.float32]
    error: float


def _linear(distance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    kernel: npt.NDArray[np.float64] = np.maximum(1 - np.abs(distance), 0)
    return kernel


def _cubic(distance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """OpenCV's INTER_CUBIC: Keys' kernel with a = -0.75."""
    d = np.abs(distance)
    near = (1.25 * d - 2.25) * d * d + 1
    far = ((-0.75 * d + 3.75) * d - 6) * d + 3
    kernel: npt.NDArray[np.float64] = np.where(d < 1, near, np.where(d < 2, far, 0))
    return kernel


_KERNELS = {cv2.INTER_LINEAR: _linear, cv2.INTER_CUBIC: _cubic}


@functools.lru_cache(maxsize=4096)
def _fit(steps: int, interpolation: int) -> _Fit:
    """The symmetric filter that, followed by an interpolation, is nearest to the triangle.

    Least squares over the positions that a new pixel can have between two old ones. Neighbours are
    alike in photos as in a random walk, where the error of weights is that of their running sums.
    """
    scale, kernel = steps / _STEPS, _KERNELS[interpolation]
    if scale <= 1:
        return _Fit(interpolation, np.ones(1, np.float32), 0.0)
    reach = max(math.ceil(scale) - 1, 1)
    span = np.arange(-reach - 3, reach + 4)
    phases = (np.arange(_PHASES) + 0.5) / _PHASES - 0.5
    distance = span - phases[:, None]
    triangle = np.maximum(1 - np.abs(distance) / scale, 0)
    triangle /= triangle.sum(axis=1, keepdims=True)
    alone = kernel(distance)
    # The weights sum to one: each pair of taps takes twice its weight from the middle one.
    pairs = [kernel(distance - n) + kernel(distance + n) - 2 * alone for n in range(1, reach + 1)]
    sums = np.cumsum([triangle - alone, *pairs], axis=2).reshape(reach + 1, -1)
    weights = np.linalg.lstsq(sums[1:].T, sums[0], rcond=None)[0]
    taps = np.concatenate([weights[::-1], [1 - 2 * weights.sum()], weights])
    error = float(np.square(sums[0] - weights @ sums[1:]).mean())
    return _Fit(interpolation, taps.astype(np.float32), error)
