"""Resizing is Pillow's BILINEAR, nearly: on pixels that are like photos, and at the edges of use.

Bounds are in dB of PSNR. 40 dB is an average error of 2.6 levels of 255, which nobody sees;
tests/benchmarks/quality.py measures the same on real photos.
"""

from __future__ import annotations

import functools
import math
import statistics

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st

from shardkit.codecs.header import read_header
from shardkit.codecs.pixels import decode
from shardkit.codecs.resize import resize
from tests.benchmarks.quality import by_pillow, psnr
from tests.codecs.sample_images import Pixels, photo_like

PHOTOS = [photo_like(seed) for seed in range(6)]
HEIGHT, WIDTH, _ = PHOTOS[0].shape
SIDES = st.integers(1, 40)


def resized(pixels: Pixels, width: int, height: int) -> Pixels:
    """Ours, of a copy: the array that is given may be overwritten."""
    made = resize(pixels.copy(), width, height)
    assert made.shape == (height, width, 3)
    assert made.dtype == np.uint8
    return made


def decibels(width: int, height: int) -> list[float]:
    """How near ours is to Pillow's, of each photo."""
    size = width, height
    return [psnr(resized(photo, *size), by_pillow(photo, *size)) for photo in PHOTOS]


def differ(one: Pixels, other: Pixels) -> int:
    """The levels that two images differ by, at most."""
    return int(np.abs(one.astype(int) - other).max())


@pytest.mark.parametrize(
    "scale", [1.05, 1.2, 1.35, 1.5, 1.7, 2, 2.5, 3, 4, 5, 6, 7.9, 8, 9, 10, 12, 14, 16, 20]
)
def test_it_is_pillows_bilinear(scale: float) -> None:
    found = decibels(round(WIDTH / scale), round(HEIGHT / scale))
    assert statistics.mean(found) >= 45
    assert min(found) >= 40


@pytest.mark.parametrize("scale", [2.5, 4, 9])
def test_the_outer_pixels_are_pillows_where_they_are_many(scale: float) -> None:
    size = round(WIDTH / scale), round(HEIGHT / scale)
    for photo in PHOTOS:
        ours, theirs = resized(photo, *size), by_pillow(photo, *size)
        for edge in (np.s_[0], np.s_[-1], np.s_[:, 0], np.s_[:, -1]):
            assert differ(ours[edge], theirs[edge]) <= 2


@pytest.mark.parametrize("scale", [25, 30, 40])
def test_it_is_near_where_a_thumbnail_is_left(scale: int) -> None:
    # 12 x 9 pixels have more edge than middle, and averaging blocks first shows at the edges.
    found = decibels(round(WIDTH / scale), round(HEIGHT / scale))
    assert statistics.mean(found) >= 42
    assert min(found) >= 38


@pytest.mark.parametrize(
    ("width", "height"),
    [
        (200, HEIGHT), (WIDTH, 100), (WIDTH - 1, 100), (300, 90), (60, 300), (48, 359),
        (200, 500), (700, 100), (20, 361),
    ],
)  # fmt: skip
def test_each_side_has_a_scale_of_its_own(width: int, height: int) -> None:
    found = decibels(width, height)
    assert statistics.mean(found) >= 45
    assert min(found) >= 40


@pytest.mark.parametrize("size", [(481, 361), (500, 400), (WIDTH, 500), (960, 720), (1111, 1000)])
def test_larger_is_interpolated_as_pillow_does_it(size: tuple[int, int]) -> None:
    photo = PHOTOS[0]
    # Pillow rounds to whole levels between its two passes, OpenCV does not.
    assert differ(resized(photo, *size), by_pillow(photo, *size)) <= 1


def test_the_same_size_is_the_same_image() -> None:
    np.testing.assert_array_equal(resized(PHOTOS[0], WIDTH, HEIGHT), PHOTOS[0])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((1, 1), (1, 1)),
        ((1, 1), (40, 30)),
        ((1, 500), (1, 20)),
        ((500, 1), (3, 1)),
        ((1, 500), (40, 20)),
        ((477, 359), (101, 77)),
        ((65500, 3), (100, 1)),
        ((65500, 3), (65499, 3)),
        ((65500, 3), (40000, 2)),
        ((3, 65500), (1, 333)),
        ((65500, 1), (6550, 1)),
        ((65500, 3), (65500, 7)),
    ],
)
def test_sizes_are_exact(old: tuple[int, int], new: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (old[1], old[0], 3), np.uint8)
    # Noise is not what the filter is fitted to; that nothing moves shows on it nevertheless.
    assert psnr(resized(pixels, *new), by_pillow(pixels, *new)) >= 30


@pytest.mark.parametrize("level", [0, 1, 100, 127, 128, 200, 254, 255])
def test_a_constant_image_stays_as_it_is(level: int) -> None:
    pixels = np.full((60, 80, 3), level, np.uint8)
    for size in [(79, 60), (70, 50), (64, 37), (40, 30), (31, 23), (20, 15), (7, 5), (99, 20)]:
        assert (resized(pixels, *size) == level).all()


@pytest.mark.parametrize("width", [400, 300, 200, 150, 96, 80, 60, 48, 40, 12])
def test_a_ramp_keeps_its_mean(width: int) -> None:
    row = np.linspace(0, 255, WIDTH).round().astype(np.uint8)
    for pixels in (row, row[::-1]):
        ramp = np.broadcast_to(pixels[None, :, None], (HEIGHT, WIDTH, 3))
        # Three steps round to whole levels, each by a half at most where neighbours differ by one.
        made = resized(ramp, width, width * 3 // 4)
        assert abs(made.mean() - ramp.mean()) < 1


@pytest.mark.parametrize(
    "size",
    [(400, 300), (300, 225), (200, 150), (137, 101), (96, 72), (31, 17), (12, 9), (700, 500)],
)
def test_a_mirrored_image_becomes_the_mirrored_one(size: tuple[int, int]) -> None:
    # Blocks are counted from the left and the top: these sizes leave no part of one.
    for photo in PHOTOS[:2]:
        made = resized(photo, *size)
        assert differ(resized(photo[:, ::-1], *size)[:, ::-1], made) <= 1
        assert differ(resized(photo[::-1], *size)[::-1], made) <= 1


def test_channels_do_not_mix() -> None:
    photo = PHOTOS[0]
    made = resized(photo, 111, 77)
    for channel in range(3):
        alone = np.repeat(photo[:, :, channel, None], 3, axis=2)
        np.testing.assert_array_equal(resized(alone, 111, 77)[:, :, 0], made[:, :, channel])


@pytest.mark.parametrize("size", [(400, 300), (150, 99), (30, 20), (600, 100), (500, 500)])
def test_it_is_the_same_twice(size: tuple[int, int]) -> None:
    assert resized(PHOTOS[0], *size).tobytes() == resized(PHOTOS[0], *size).tobytes()


@given(SIDES, SIDES, SIDES, SIDES, st.integers(0, 2**32 - 1))
def test_any_size_becomes_any_other(
    width: int, height: int, columns: int, rows: int, seed: int
) -> None:
    levels = np.array([64, 192], np.uint8)
    pixels = np.random.default_rng(seed).choice(levels, (height, width, 3))
    made = resized(pixels, columns, rows).astype(int)
    # The lobes of cubic interpolation, 3/16 of its weight, are more than halved by the averaging
    # before it: to 0.081 at worst, for scales just above 1. On both axes that is, of the range,
    # 1.081^2 + 0.081^2 - 1 = 0.175 beyond it.
    beyond = 0.175 * 128 + 1
    assert made.min() >= 64 - beyond
    assert made.max() <= 192 + beyond


# --- the extent of an image ---------------------------------------------------------------------


@functools.cache
def jpegs(size: tuple[int, int]) -> list[bytes]:
    photos = [photo_like(seed, *size) for seed in range(3)]
    return [simplejpeg.encode_jpeg(photo, quality=92) for photo in photos]


@pytest.mark.parametrize("scale", [6.1, 6.5, 7, 8, 9, 10, 12, 16, 20, 24])
@pytest.mark.parametrize("size", [(481, 361), (487, 353), (723, 499)])
def test_a_jpeg_decoded_at_a_smaller_size_gives_the_same(
    size: tuple[int, int], scale: float
) -> None:
    wanted = int(size[0] / scale), int(size[1] / scale)
    left = min(size[0] / wanted[0], size[1] / wanted[1])
    for data in jpegs(size):
        pixels, extent, _ = decode(data, read_header(data), least=wanted)
        part = round(size[0] / extent[0])
        assert part == max(n for n in (2, 4, 8) if n <= left / 3)
        assert extent == (size[0] / part, size[1] / part)
        assert pixels.shape[:2] == (math.ceil(size[1] / part), math.ceil(size[0] / part))
        made = resize(pixels, *wanted, extent)
        assert made.shape == (wanted[1], wanted[0], 3)
        assert psnr(made, resized(simplejpeg.decode_jpeg(data), *wanted)) >= 40


def test_a_part_of_a_pixel_at_the_end_does_not_shift_the_others() -> None:
    # A ramp of 10.5 pixels, the last of which is cut in half: without the extent each new pixel
    # would stand for a bit more than it should, and the last one be too bright.
    ramp = np.repeat((20 * np.arange(11, dtype=np.uint8))[None, :, None], 3, axis=2)
    ramp = np.ascontiguousarray(np.broadcast_to(ramp, (6, 11, 3)))
    made = resize(ramp.copy(), 3, 6, (10.5, 6))[0, :, 0]
    middle = 20 * (3.5 * 1.5 - 0.5)  # of the second of three new pixels, 3.5 old ones wide each
    assert abs(int(made[1]) - middle) <= 1
    assert int(resize(ramp.copy(), 3, 6)[0, 1, 0]) > made[1]
