"""Resizing is Pillow's BILINEAR, to the bit, by each way to make it; also of what was decoded
smaller. Bounds in dB of PSNR: 40 dB is an average error of 2.6 levels of 255, which nobody sees;
tests/benchmarks/quality.py measures the same on real photos.
"""

import math

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from PIL.Image import Resampling, fromarray

from shardkit.codecs import crop
from shardkit.codecs.crop import look_up, resize
from shardkit.codecs.header import read_header
from shardkit.codecs.pixels import decode
from tests.benchmarks.quality import psnr
from tests.codecs.sample_images import photo_like
from tests.codecs.test_crop import WAYS, by

SIDES = st.integers(1, 90)


def by_pillow(pixels, width, height):
    """In two calls, as Pillow 13 chooses the order of its passes by the size."""
    rows, columns, _ = pixels.shape
    first = width, rows
    if (width > columns and height < rows) or (width < columns and height > rows):
        first = min(width, columns), min(height, rows)
    once = fromarray(pixels).resize(first, Resampling.BILINEAR)
    return np.asarray(once.resize((width, height), Resampling.BILINEAR))


@pytest.mark.parametrize("way", WAYS)
@given(SIDES, SIDES, SIDES, SIDES, st.integers(0, 2**32 - 1))
def test_any_size_becomes_any_other_as_pillow_does_it(way, width, height, columns, rows, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    with by(way):
        made = resize(pixels, columns, rows)
    np.testing.assert_array_equal(made, by_pillow(pixels, columns, rows), strict=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        *[((65500, 3), (100, 1)), ((65500, 3), (65500, 7)), ((3, 65500), (1, 333))],
        *[((480, 360), size) for size in ((480, 360), (341, 256), (700, 500))],
        ((65500, 1), (50, 40)),
    ],
)
def test_images_of_any_shape_are_resized(way, old, new):
    pixels = np.random.default_rng(0).integers(0, 256, (old[1], old[0], 3), np.uint8)
    before = pixels.copy()
    with by(way):
        np.testing.assert_array_equal(resize(pixels, *new), by_pillow(pixels, *new))
        np.testing.assert_array_equal(resize(pixels[:, ::-1], *new), resize(before[:, ::-1], *new))
    np.testing.assert_array_equal(pixels, before)


def test_no_more_pixels_between_the_passes_than_before_or_after(monkeypatch):
    between = []
    original = crop.crop_pixels

    def watched(images, jobs, *rest):
        between.append(len(images[0]) * jobs[0, 4])
        original(images, jobs, *rest)

    monkeypatch.setattr(crop, "crop_pixels", watched)
    assert resize(np.full((1 << 18, 1, 3), 9, np.uint8), 500, 100).mean() == 9
    assert max(between) <= 1 << 18


@pytest.mark.parametrize(
    ("size", "scales"),
    [((481, 361), (6.1, 9, 16, 24)), ((487, 353), (6.5, 10, 20)), ((723, 499), (7, 8, 12))],
)
def test_a_jpeg_decoded_at_a_smaller_size_gives_the_same(size, scales):
    data = simplejpeg.encode_jpeg(photo_like(len(scales), *size), quality=92)
    for scale in scales:
        wanted = int(size[0] / scale), int(size[1] / scale)
        left = min(size[0] / wanted[0], size[1] / wanted[1])
        pixels, reduced, _ = decode(data, read_header(data), least=wanted)
        assert reduced == max(n for n in (2, 4, 8) if n <= left / 3)
        assert pixels.shape[:2] == (math.ceil(size[1] / reduced), math.ceil(size[0] / reduced))
        made = resize(pixels, *wanted, size, reduced)
        assert made.shape == (wanted[1], wanted[0], 3)
        assert psnr(made, resize(simplejpeg.decode_jpeg(data), *wanted)) >= 40
        with by("libraries"):
            np.testing.assert_array_equal(resize(pixels, *wanted, size, reduced), made)


@pytest.mark.parametrize("way", WAYS)
def test_a_part_of_a_pixel_at_the_end_does_not_shift_the_others(way):
    # A ramp of 21 pixels decoded as 10.5, the last of which is cut in half: if it counted whole,
    # each new pixel would stand for a bit more than it should, and the last one be too bright.
    ramp = np.repeat((20 * np.arange(11, dtype=np.uint8))[None, :, None], 3, axis=2)
    ramp = np.ascontiguousarray(np.broadcast_to(ramp, (6, 11, 3)))
    with by(way):
        made = resize(ramp, 3, 6, (21, 12), 2)[0, :, 0]
        middle = 20 * (3.5 * 1.5 - 0.5)  # of the second of three pixels, 3.5 old ones wide each
        assert abs(int(made[1]) - middle) <= 1
        assert int(resize(ramp, 3, 6)[0, 1, 0]) > made[1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
def test_values_are_looked_up_in_the_table_of_their_channel(way, dtype):
    random = np.random.default_rng(1)
    table = random.integers(0, 60_000, (256, 3)).astype(dtype)
    for shape in [(1, 1), (7, 5), (40, 31)]:
        pixels = random.integers(0, 256, (*shape, 3), np.uint8)
        for some in (pixels, pixels[:, ::-1]):
            out = np.zeros(some.shape, dtype)
            with by(way):
                look_up(some, table, out)
            np.testing.assert_array_equal(out, table[some, [0, 1, 2]])


def test_tables_and_outputs_of_other_sizes_are_refused():
    if crop._crop is None:
        pytest.skip("the extension was not built: it needs a compiler and libjpeg-dev")
    pixels, table = np.zeros((2, 2, 3), np.uint8), np.zeros((256, 3), np.float32)
    for size, out in [(256, (2, 1, 3)), (255, (2, 2, 3)), (256, (2, 2, 4))]:
        with pytest.raises(ValueError, match="sizes"):
            look_up(pixels, table[:size], np.zeros(out, np.float32))
    with pytest.raises(ValueError, match="sizes"):
        look_up(pixels, table.astype(np.float64), np.zeros((2, 2, 3)))
