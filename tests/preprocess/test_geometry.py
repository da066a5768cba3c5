"""Sizes, crops and margins: by formula, and for any image."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.codecs.window import Window
from shardkit.options import RESIZE_MODES, ImageOptions
from shardkit.preprocess.geometry import geometry

SIDES = st.integers(1, 65500)
MODES = st.sampled_from(RESIZE_MODES)


def placed(
    width: int, height: int, resize: int | None, mode: str = "shorter", **options: Any
) -> Window:
    window = geometry(width, height, ImageOptions(resize=resize, resize_mode=mode, **options))
    assert (window.x, window.y, window.width, window.height) == (0, 0, width, height)
    assert not window.flip
    return window


def full(window: Window) -> tuple[int, int]:
    return window.full_width, window.full_height


def canvas_of(window: Window) -> tuple[int, int]:
    return window.columns, window.rows


@pytest.mark.parametrize(
    ("mode", "size", "resize", "upscale", "expected", "canvas"),
    [
        # The other side is its exact length, rounded: half a pixel is rounded up.
        ("shorter", (500, 375), 256, False, (341, 256), (341, 256)),  # 341.33
        ("shorter", (400, 300), 200, False, (267, 200), (267, 200)),  # 266.67
        ("shorter", (301, 200), 100, False, (151, 100), (151, 100)),  # 150.5
        ("longer", (500, 375), 256, False, (256, 192), (256, 192)),
        ("longer", (200, 301), 100, False, (66, 100), (66, 100)),  # 66.45
        ("exact", (500, 375), 256, False, (256, 256), (256, 256)),
        ("crop", (500, 375), 256, False, (341, 256), (256, 256)),
        ("pad", (500, 375), 256, False, (256, 192), (256, 256)),
        ("shorter", (65500, 1), 1, False, (65500, 1), (65500, 1)),
        ("longer", (65500, 1), 100, False, (100, 1), (100, 1)),  # never less than one pixel
        ("exact", (65500, 1), 100, False, (100, 1), (100, 1)),
        ("crop", (65500, 1), 100, False, (65500, 1), (100, 1)),
        ("pad", (65500, 1), 100, False, (100, 1), (100, 100)),
        # Between the two sides, only what is too long becomes shorter.
        ("shorter", (400, 100), 256, False, (400, 100), (400, 100)),
        ("longer", (400, 100), 256, False, (256, 64), (256, 64)),
        ("exact", (400, 100), 256, False, (256, 100), (256, 100)),
        ("crop", (400, 100), 256, False, (400, 100), (256, 100)),
        ("pad", (400, 100), 256, False, (256, 64), (256, 256)),
        # A small image is enlarged if that is asked for.
        ("shorter", (100, 75), 256, False, (100, 75), (100, 75)),
        ("exact", (100, 75), 256, False, (100, 75), (100, 75)),
        ("pad", (100, 75), 256, False, (100, 75), (256, 256)),
        ("shorter", (100, 75), 256, True, (341, 256), (341, 256)),
        ("longer", (100, 75), 256, True, (256, 192), (256, 192)),
        ("exact", (100, 75), 256, True, (256, 256), (256, 256)),
        ("crop", (100, 75), 256, True, (341, 256), (256, 256)),
        ("pad", (100, 75), 256, True, (256, 192), (256, 256)),
    ],
)  # fmt: skip
def test_sizes_are_exact(
    mode: str, size: tuple[int, int], resize: int, upscale: bool, expected: Any, canvas: Any
) -> None:
    made = placed(*size, resize, mode, upscale=upscale)
    assert (full(made), canvas_of(made)) == (expected, canvas)
    assert (made == Window.whole(*size)) == (expected == canvas == size)


def test_without_resize_nothing_changes() -> None:
    assert placed(400, 100, None) == Window.whole(400, 100)


@pytest.mark.parametrize(
    ("mode", "size", "left", "top"),
    [
        ("crop", (10, 6), 2, 0),
        ("crop", (9, 6), 1, 0),  # of three columns, one on the left and two on the right
        ("crop", (6, 11), 0, 2),
        ("crop", (6, 6), 0, 0),
        ("pad", (6, 4), 0, -1),
        ("pad", (6, 3), 0, -2),  # of three rows, two above and one below
        ("pad", (1, 6), -3, 0),
        ("pad", (6, 6), 0, 0),
    ],
)
def test_crops_and_margins_are_around_the_centre(
    mode: str, size: tuple[int, int], left: int, top: int
) -> None:
    made = placed(*size, 6, mode)
    assert (made.left, made.top) == (left, top)
    assert (full(made), canvas_of(made)) == (size, (6, 6))


# --- for any image -----------------------------------------------------------------------------


@given(SIDES, SIDES, SIDES, MODES, st.booleans())
def test_the_side_that_is_named_has_the_length_that_is_asked_for(
    width: int, height: int, resize: int, mode: str, upscale: bool
) -> None:
    """And no side becomes longer unasked, or none at all."""
    made = placed(width, height, resize, mode, upscale=upscale)
    assert upscale or (1 <= made.full_width <= width and 1 <= made.full_height <= height)
    if mode == "pad":
        assert canvas_of(made) == (resize, resize)
    else:
        assert made.columns <= made.full_width
        assert made.rows <= made.full_height
    if mode == "exact":
        limit = (resize, resize) if upscale else (min(resize, width), min(resize, height))
        assert (full(made), canvas_of(made)) == (limit, limit)
        return
    which = max if mode in ("longer", "pad") else min
    old = which(width, height)
    assert which(full(made)) == (resize if upscale else min(old, resize))


@given(SIDES, SIDES, SIDES, MODES.filter("exact".__ne__), st.booleans())
def test_the_aspect_is_kept_to_half_a_pixel(
    width: int, height: int, resize: int, mode: str, upscale: bool
) -> None:
    made = placed(width, height, resize, mode, upscale=upscale)
    old = (max if mode in ("longer", "pad") else min)(width, height)
    goal = resize if upscale else min(old, resize)
    for new, side in (
        (made.full_width, width),
        (made.full_height, height),
    ):  # new is side * goal / old
        assert new == 1 or 2 * abs(new * old - side * goal) <= old


@given(SIDES, SIDES, SIDES, MODES, st.booleans())
def test_the_centre_stays_the_centre_and_a_turned_image_becomes_the_turned_one(
    width: int, height: int, resize: int, mode: str, upscale: bool
) -> None:
    made = placed(width, height, resize, mode, upscale=upscale)
    other = placed(height, width, resize, mode, upscale=upscale)
    for window, start, size, canvas in (
        (other, made.left, made.full_width, made.columns),
        (made, made.top, made.full_height, made.rows),
    ):
        assert 0 <= size - canvas - 2 * start <= 1
        assert (window.top, window.full_height, window.rows) == (start, size, canvas)
