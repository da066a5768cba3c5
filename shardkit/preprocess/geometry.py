"""Sizes, crops and margins that options ask for, in whole pixels."""

from __future__ import annotations

from shardkit.codecs.window import Window
from shardkit.options import ImageOptions


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
