"""Which pixels of an image are taken, and where they go: crop, resize, window, flip.

Used for both converting and loading. Holds plain numbers for one image: for the few images that a
thread works on at a time, arrays would be slower.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Colour = tuple[int, int, int]
_Values = TypeVar("_Values", bound=npt.NDArray[Any])


@dataclass
class Window:
    """A crop of the image, resized, and a window of that, which may extend beyond its edges.

    Window coordinates are those before mirroring. The first fields are those of
    `codecs.crop.JOB`.
    """

    x: int  # the crop, in pixels of the image
    y: int
    width: int
    height: int
    full_width: int  # the size to which the crop is resized
    full_height: int
    left: int  # the window of the resized crop, which is the output
    top: int
    flip: bool
    columns: int
    rows: int

    @classmethod
    def whole(cls, width: int, height: int) -> Window:
        """Return the window of an unchanged image."""
        return cls(0, 0, width, height, width, height, 0, 0, False, width, height)

    def crop(self, x: int, y: int, width: int, height: int) -> None:
        """Crop an image that has not been changed yet."""
        self.x, self.y, self.width, self.height = x, y, width, height

    def resize(self, width: int, height: int) -> None:
        """Resize an image that has not been changed yet, except for a crop."""
        self.full_width, self.full_height = self.columns, self.rows = width, height

    def cut(self, left: int, top: int, width: int, height: int) -> None:
        """Take a part of the output; or extend it, with negative numbers."""
        self.left = self.columns - width - left if self.flip else left
        self.top = top
        self.columns, self.rows = width, height

    @property
    def pixels(self) -> int:
        """The most pixels at any stage: resized along the rows, along both sides, or the output."""
        full = self.full_width * max(self.full_height, self.height)
        return max(full, self.columns * self.rows)

    @property
    def beyond(self) -> bool:
        """Whether the window extends beyond the edges."""
        right, bottom = self.left + self.columns, self.top + self.rows
        outside = self.left < 0 or self.top < 0
        return outside or right > self.full_width or bottom > self.full_height

    def clipped(self) -> Window:
        """Return the part of the window that is inside the edges."""
        left, top = max(self.left, 0), max(self.top, 0)
        columns = min(self.left + self.columns, self.full_width) - left
        rows = min(self.top + self.rows, self.full_height) - top
        return replace(self, left=left, top=top, columns=columns, rows=rows)

    def with_margins(self, inner: Pixels, background: Colour | int = 0) -> Pixels:
        """Return the pixels of the full window, given those of the `clipped` one."""
        if not self.beyond:
            return inner
        height, width, channels = inner.shape
        left, top = max(-self.left, 0), max(-self.top, 0)
        if self.flip:
            left = self.columns - left - width
        made = np.empty((self.rows, self.columns, channels), inner.dtype)
        made[:] = background
        made[top : top + height, left : left + width] = inner
        return made

    def job(self, orientation: int = 1) -> tuple[int, ...]:
        """Return the row of a job for `codecs.crop`, for a stored image of an orientation."""
        return (
            self.x, self.y, self.width, self.height, self.full_width, self.full_height,
            self.left, self.top, self.flip, orientation,
        )  # fmt: skip


def cut_mask(mask: _Values, window: Window) -> _Values:
    """Return the window of a mask: nearest values, and 0 in margins."""
    columns, no_columns = _sources(
        window.x, window.width, window.full_width, window.left, window.columns
    )
    rows, no_rows = _sources(window.y, window.height, window.full_height, window.top, window.rows)
    if window.flip:
        columns, no_columns = columns[::-1], no_columns[::-1]
    made: Any = mask[rows][:, columns]
    made[no_rows] = 0
    made[:, no_columns] = 0
    return cast("_Values", made)


def _sources(
    start: int, length: int, full: int, first: int, count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return, along one side, the source index of each new value, and which ones have no source."""
    wanted = np.arange(first, first + count)
    outside = (wanted < 0) | (wanted >= full)
    return start + _nearest(length, full)[wanted.clip(0, full - 1)], outside


@functools.lru_cache(maxsize=1024)
def _nearest(length: int, full: int) -> npt.NDArray[np.int64]:
    """Return the index of the nearest of `length` values for each of `full`, as in Pillow."""
    from PIL import Image

    line = Image.fromarray(np.arange(length, dtype=np.int32)[None])
    nearest: npt.NDArray[np.int64] = np.array(line.resize((full, 1), Image.Resampling.NEAREST))[0]
    return nearest
