"""Which pixels of an image are taken, and where they go: crop, resize, window, flip.

The same for converting and for loading. Plain numbers of one image: for the few that a thread works
on at a time, arrays take longer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Colour = tuple[int, int, int]

BLACK = (0, 0, 0)


@dataclass
class Window:
    """A crop of the image, resized, and a window of that, which may reach beyond its edges.

    The window is counted before anything is mirrored. The first fields are those of
    `codecs.crop.JOB`.
    """

    x: int  # the crop, in pixels of the image
    y: int
    width: int
    height: int
    full_width: int  # what the crop is resized to
    full_height: int
    left: int  # the window of that, which is what comes out
    top: int
    flip: bool
    columns: int
    rows: int

    @classmethod
    def whole(cls, width: int, height: int) -> Window:
        """An image as it is."""
        return cls(0, 0, width, height, width, height, 0, 0, False, width, height)

    def crop(self, x: int, y: int, width: int, height: int) -> None:
        """Take a part of an image to which nothing has happened yet."""
        self.x, self.y, self.width, self.height = x, y, width, height

    def resize(self, width: int, height: int) -> None:
        """Give another size to an image of which at most a part was taken."""
        self.full_width, self.full_height = self.columns, self.rows = width, height

    def cut(self, left: int, top: int, width: int, height: int) -> None:
        """Take a part of all that comes out; or more, where numbers are negative."""
        self.left = self.columns - width - left if self.flip else left
        self.top = top
        self.columns, self.rows = width, height

    @property
    def pixels(self) -> int:
        """How many there are at most: resized along the rows, along both sides, or at the end."""
        full = self.full_width * max(self.full_height, self.height)
        return max(full, self.columns * self.rows)

    @property
    def beyond(self) -> bool:
        """Whether the window reaches beyond the edges."""
        right, bottom = self.left + self.columns, self.top + self.rows
        outside = self.left < 0 or self.top < 0
        return outside or right > self.full_width or bottom > self.full_height

    def clipped(self) -> Window:
        """With a window that ends at the edges."""
        left, top = max(self.left, 0), max(self.top, 0)
        columns = min(self.left + self.columns, self.full_width) - left
        rows = min(self.top + self.rows, self.full_height) - top
        return replace(self, left=left, top=top, columns=columns, rows=rows)

    def with_margins(self, inner: Pixels, background: Colour = BLACK) -> Pixels:
        """The whole window, given the pixels of the `clipped` one."""
        if not self.beyond:
            return inner
        height, width, _ = inner.shape
        left, top = max(-self.left, 0), max(-self.top, 0)
        if self.flip:
            left = self.columns - left - width
        made = np.empty((self.rows, self.columns, 3), np.uint8)
        made[:] = background
        made[top : top + height, left : left + width] = inner
        return made

    def job(self) -> tuple[int, ...]:
        """As `codecs.crop` wants it."""
        return (
            self.x, self.y, self.width, self.height, self.full_width, self.full_height,
            self.left, self.top, self.flip,
        )  # fmt: skip
