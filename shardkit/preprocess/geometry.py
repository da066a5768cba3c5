"""Where the pixels of an image go: sizes, crops and margins, in whole numbers."""

from __future__ import annotations

from typing import NamedTuple

from shardkit.options import ImageOptions


class Geometry(NamedTuple):
    """Resize to `width` x `height`, then cut or fill up to `canvas`, both around the centre."""

    width: int
    height: int
    canvas: tuple[int, int]  # width and height of the result

    @property
    def left(self) -> int:
        """Columns cut off on the left; negative: columns added."""
        return (self.width - self.canvas[0]) // 2

    @property
    def top(self) -> int:
        return (self.height - self.canvas[1]) // 2

    def changes(self, width: int, height: int) -> bool:
        """Whether an image of this size becomes another."""
        return (width, height) != (self.width, self.height) or self.canvas != (width, height)

    def turned(self, orientation: int) -> tuple[int, int]:
        """The size to resize to before an image is turned as EXIF's orientation says."""
        return (self.height, self.width) if orientation >= 5 else (self.width, self.height)


def geometry(width: int, height: int, options: ImageOptions) -> Geometry:
    """What becomes of an upright image of this size.

    - shorter, longer: that side becomes `resize` pixels, and the other keeps the aspect.
    - exact: both sides become `resize`, whatever the aspect was.
    - crop: as shorter, then the square in the middle.
    - pad: as longer, then margins around it to a square.

    No side becomes longer than it was, without `upscale`; but margins are added.
    """
    side, mode = options.resize, options.resize_mode
    if side is None:
        return Geometry(width, height, (width, height))
    if mode == "exact":
        size = (side, side) if options.upscale else (min(side, width), min(side, height))
        return Geometry(*size, size)
    which = max if mode in ("longer", "pad") else min
    old = which(width, height)
    if old > side or options.upscale:
        width, height = (
            max((2 * length * side + old) // (2 * old), 1) for length in (width, height)
        )
    if mode == "crop":
        return Geometry(width, height, (min(width, side), min(height, side)))
    return Geometry(width, height, (side, side) if mode == "pad" else (width, height))
