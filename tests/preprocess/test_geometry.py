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
    ("mode", "size", "resize", "expected", "canvas"),
    [
        # The other side is its exact length, rounded: half a pixel is rounded up.
        ("shorter", (500, 375), 256, (341, 256), (341, 256)),  # 341.33
        ("shorter", (375, 500), 256, (256, 341), (256, 341)),
        ("shorter", (400, 300), 200, (267, 200), (267, 200)),  # 266.67
        ("shorter", (301, 200), 100, (151, 100), (151, 100)),  # 150.5
        ("longer", (500, 375), 256, (256, 192), (256, 192)),
        ("longer", (375, 500), 256, (192, 256), (192, 256)),
        ("longer", (200, 301), 100, (66, 100), (66, 100)),  # 66.45
        ("exact", (500, 375), 256, (256, 256), (256, 256)),
        ("crop", (500, 375), 256, (341, 256), (256, 256)),
        ("crop", (375, 500), 256, (256, 341), (256, 256)),
        ("pad", (500, 375), 256, (256, 192), (256, 256)),
        ("pad", (375, 500), 256, (192, 256), (256, 256)),
        ("shorter", (65500, 1), 1, (65500, 1), (65500, 1)),
        ("longer", (65500, 1), 100, (100, 1), (100, 1)),  # never less than one pixel
        ("longer", (1, 65500), 100, (1, 100), (1, 100)),
        ("exact", (65500, 1), 100, (100, 1), (100, 1)),
        ("crop", (65500, 1), 100, (65500, 1), (100, 1)),
        ("pad", (65500, 1), 100, (100, 1), (100, 100)),
    ],
)  # fmt: skip
def test_sizes_are_exact(
    mode: str,
    size: tuple[int, int],
    resize: int,
    expected: tuple[int, int],
    canvas: tuple[int, int],
) -> None:
    made = placed(*size, resize, mode)
    assert (full(made), canvas_of(made)) == (expected, canvas)


@pytest.mark.parametrize(
    ("mode", "expected", "canvas"),
    [
        ("shorter", (100, 75), (100, 75)),
        ("longer", (100, 75), (100, 75)),
        ("exact", (100, 75), (100, 75)),
        ("crop", (100, 75), (100, 75)),
        ("pad", (100, 75), (256, 256)),
    ],
)
def test_a_small_image_is_not_enlarged(
    mode: str, expected: tuple[int, int], canvas: tuple[int, int]
) -> None:
    made = placed(100, 75, 256, mode)
    assert (full(made), canvas_of(made)) == (expected, canvas)


@pytest.mark.parametrize(
    ("mode", "expected", "canvas"),
    [
        ("shorter", (341, 256), (341, 256)),
        ("longer", (256, 192), (256, 192)),
        ("exact", (256, 256), (256, 256)),
        ("crop", (341, 256), (256, 256)),
        ("pad", (256, 192), (256, 256)),
    ],
)
def test_a_small_image_is_enlarged_if_that_is_asked_for(
    mode: str, expected: tuple[int, int], canvas: tuple[int, int]
) -> None:
    made = placed(100, 75, 256, mode, upscale=True)
    assert (full(made), canvas_of(made)) == (expected, canvas)


def test_between_the_two_sides_only_what_is_too_long_becomes_shorter() -> None:
    assert full(placed(400, 100, 256)) == (400, 100)
    assert full(placed(400, 100, 256, "longer")) == (256, 64)
    assert full(placed(400, 100, 256, "exact")) == (256, 100)
    cropped, padded = placed(400, 100, 256, "crop"), placed(400, 100, 256, "pad")
    assert (full(cropped), canvas_of(cropped)) == ((400, 100), (256, 100))
    assert (full(padded), canvas_of(padded)) == ((256, 64), (256, 256))


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


def test_a_change_is_one_of_size_or_canvas() -> None:
    assert placed(256, 256, 256, "crop") == Window.whole(256, 256)
    assert placed(300, 256, 256, "crop") != Window.whole(300, 256)  # cut, and not resized
    assert placed(256, 100, 256, "pad") != Window.whole(256, 100)  # margins alone
    assert placed(512, 512, 256) != Window.whole(512, 512)
    assert placed(100, 75, 256) == Window.whole(100, 75)


# --- for any image -----------------------------------------------------------------------------


@given(SIDES, SIDES, SIDES, MODES)
def test_no_side_becomes_longer(width: int, height: int, resize: int, mode: str) -> None:
    made = placed(width, height, resize, mode)
    assert 1 <= made.full_width <= width
    assert 1 <= made.full_height <= height
    if mode == "pad":
        assert canvas_of(made) == (resize, resize)
    else:
        assert made.columns <= made.full_width
        assert made.rows <= made.full_height


@given(SIDES, SIDES, SIDES, MODES, st.booleans())
def test_the_side_that_is_named_has_the_length_that_is_asked_for(
    width: int, height: int, resize: int, mode: str, upscale: bool
) -> None:
    made = placed(width, height, resize, mode, upscale=upscale)
    if mode == "exact":
        limit = (resize, resize) if upscale else (min(resize, width), min(resize, height))
        assert (full(made), canvas_of(made)) == (limit, limit)
        return
    which = max if mode in ("longer", "pad") else min
    old = which(width, height)
    new = which(made.full_width, made.full_height)
    assert new == (resize if upscale else min(old, resize))


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
def test_the_centre_stays_the_centre(
    width: int, height: int, resize: int, mode: str, upscale: bool
) -> None:
    made = placed(width, height, resize, mode, upscale=upscale)
    for start, size, canvas in (
        (made.left, made.full_width, made.columns),
        (made.top, made.full_height, made.rows),
    ):
        behind = size - canvas - start
        assert 0 <= behind - start <= 1


@given(SIDES, SIDES, SIDES, MODES, st.booleans())
def test_a_turned_image_becomes_the_turned_one(
    width: int, height: int, resize: int, mode: str, upscale: bool
) -> None:
    made = placed(width, height, resize, mode, upscale=upscale)
    other = placed(height, width, resize, mode, upscale=upscale)
    assert (full(other)[::-1], canvas_of(other)[::-1]) == (full(made), canvas_of(made))
    assert (other.top, other.left) == (made.left, made.top)
