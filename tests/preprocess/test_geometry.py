"""Sizes, crops and margins: by formula, and for any image."""

from hypothesis import given
from hypothesis import strategies as st

from shardkit.codecs.window import Window
from shardkit.options import RESIZE_MODES, ImageOptions
from shardkit.preprocess.single_image import geometry
from tests.sources.real import cases

SIDES = st.integers(1, 65500)
MODES = st.sampled_from(RESIZE_MODES)


def placed(width: int, height: int, resize: int | None, mode="shorter", **options) -> Window:
    window = geometry(width, height, ImageOptions(resize=resize, resize_mode=mode, **options))
    assert (window.x, window.y, window.width, window.height) == (0, 0, width, height)
    assert not window.flip
    return window


def full(window: Window) -> tuple[int, int]:
    return window.full_width, window.full_height


def canvas_of(window: Window) -> tuple[int, int]:
    return window.columns, window.rows


# The other side is its exact length, rounded: half a pixel is rounded up; never less than one.
# Between the two sides, only what is too long becomes shorter; a small image is enlarged if asked.
@cases(
    "size resize upscale shorter longer exact",
    ((500, 375), 256, False, (341, 256), (256, 192), (256, 256)),  # 341.33
    ((400, 300), 200, False, (267, 200), (200, 150), (200, 200)),  # 266.67
    ((301, 200), 100, False, (151, 100), (100, 66), (100, 100)),  # 150.5, 66.45
    ((200, 301), 100, False, (100, 151), (66, 100), (100, 100)),
    ((65500, 1), 1, False, (65500, 1), (1, 1), (1, 1)),
    ((65500, 1), 100, False, (65500, 1), (100, 1), (100, 1)),
    ((400, 100), 256, False, (400, 100), (256, 64), (256, 100)),
    ((100, 75), 256, False, (100, 75), (100, 75), (100, 75)),
    ((100, 75), 256, True, (341, 256), (256, 192), (256, 256)),
)
def test_sizes_are_exact(size, resize, upscale, shorter, longer, exact):
    cut = tuple(min(side, resize) for side in shorter)
    for mode, expected, canvas in (
        *(("shorter", shorter, shorter), ("longer", longer, longer), ("exact", exact, exact)),
        *(("crop", shorter, cut), ("pad", longer, (resize, resize))),
    ):
        made = placed(*size, resize, mode, upscale=upscale)
        assert (full(made), canvas_of(made)) == (expected, canvas), mode
        assert (made == Window.whole(*size)) == (expected == canvas == size)
    assert placed(*size, None) == Window.whole(*size)  # without resize nothing changes


@cases(
    "mode size left top",
    ("crop", (10, 6), 2, 0),
    ("crop", (9, 6), 1, 0),  # of three columns, one on the left and two on the right
    ("crop", (6, 11), 0, 2),
    ("crop", (6, 6), 0, 0),
    ("pad", (6, 4), 0, -1),
    ("pad", (6, 3), 0, -2),  # of three rows, two above and one below
    ("pad", (1, 6), -3, 0),
    ("pad", (6, 6), 0, 0),
)
def test_crops_and_margins_are_around_the_centre(mode, size, left, top):
    made = placed(*size, 6, mode)
    assert (made.left, made.top) == (left, top)
    assert (full(made), canvas_of(made)) == (size, (6, 6))


@given(SIDES, SIDES, SIDES, MODES, st.booleans())
def test_any_image_has_the_side_that_is_asked_for_its_aspect_and_its_centre(
    width, height, resize, mode, upscale
):
    """No side becomes longer unasked, or none at all; the aspect is kept to half a pixel."""
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
    else:
        which = max if mode in ("longer", "pad") else min
        old = which(width, height)
        goal = resize if upscale else min(old, resize)
        assert which(full(made)) == goal
        for new, side in zip(full(made), (width, height), strict=True):
            assert new == 1 or 2 * abs(new * old - side * goal) <= old  # side * goal / old
    # A turned image becomes the turned one.
    other = placed(height, width, resize, mode, upscale=upscale)
    for window, start, size, canvas in (
        (other, made.left, made.full_width, made.columns),
        (made, made.top, made.full_height, made.rows),
    ):
        assert 0 <= size - canvas - 2 * start <= 1
        assert (window.top, window.full_height, window.rows) == (start, size, canvas)
