"""Crops of JPEGs and of pixels: Pillow's bits of simplejpeg's pixels, by each way to make them."""

import itertools
import math
import random
import resource
import struct
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st

from shardkit.codecs import crop
from shardkit.codecs.crop import JOB, can_crop, crop_jpegs, crop_pixels
from shardkit.codecs.header import read_header
from shardkit.codecs.image import NotAnImageError, jpeg_segments
from shardkit.codecs.jpeg import LEFT
from shardkit.codecs.pixels import upright
from tests.codecs.sample_images import damaged, encoded, exif, photo, photo_like
from tests.codecs.sample_profiles import SRGB, cmyk_profile, grey_profile, rgb_profile
from tests.conftest import few

BILINEAR = PIL.Image.Resampling.BILINEAR
EXTENSION = crop._crop
WAYS = ["avx2", "plain", "libraries"]
SIZES = [(1, 1), (2, 3), (7, 40), (17, 18), (66, 34), (131, 97), (97, 131), (3, 250)]


def save(pixels, mode="RGB", **options):
    return encoded(PIL.Image.fromarray(pixels).convert(mode), "JPEG", **{"quality": 92, **options})


def by_simplejpeg(chroma, pixels):
    return simplejpeg.encode_jpeg(pixels, 92, "RGB", chroma)


# How an image can be stored, as far as decoding a part of it differs.
KINDS = {
    "444": partial(save, subsampling="4:4:4"),
    "422": partial(save, subsampling="4:2:2"),
    "420": partial(save, subsampling="4:2:0"),
    "progressive 422": partial(save, subsampling="4:2:2", progressive=True),
    "progressive 420": partial(save, subsampling="4:2:0", progressive=True),
    "restarts anywhere": partial(save, subsampling="4:2:2", restart_marker_blocks=3),
    "440": partial(by_simplejpeg, "440"),
    "411": partial(by_simplejpeg, "411"),
    "grey": partial(save, mode="L"),
    "progressive grey": partial(save, mode="L", progressive=True),
    "restarts in rows": partial(save, restart_marker_rows=1),
}
PHOTO = photo_like(3, 341, 256)
IMAGES = [make(PHOTO[:height, :width].copy()) for width, height in SIZES for make in KINDS.values()]
JPEG = save(PHOTO)


# A row of jobs, and the height and width of the row that it is written to.
Job = namedtuple("Job", [*JOB, "row"])


def whole(width, height, **changes):
    """The image as it is, but for `changes`; the row is all of what it is resized to."""
    job = Job(0, 0, width, height, width, height, 0, 0, 0, 1, (0, 0))._replace(**changes)
    return job if "row" in changes else job._replace(row=(job.full_height, job.full_width))


def as_array(jobs):
    return np.array([job[:-1] for job in jobs], np.int32).reshape(-1, len(JOB))


@pytest.fixture(params=WAYS)
def way(request):
    with by(request.param):
        yield request.param


@contextmanager
def by(way):
    """One of WAYS is used inside."""
    if way != "libraries" and EXTENSION is None:
        pytest.skip("the extension was not built: it needs a compiler and libjpeg-dev")
    crop._crop = EXTENSION if way != "libraries" else None
    if EXTENSION is not None:
        EXTENSION.use_avx2(way != "plain")
    try:
        yield
    finally:
        crop._crop = EXTENSION
        if EXTENSION is not None:
            EXTENSION.use_avx2(True)


def made(data, *jobs):
    """The rows of the jobs of one image, which all succeed."""
    rows = [np.full((*job.row, 3), 77, np.uint8) for job in jobs]
    assert crop_jpegs([data] * len(jobs), as_array(jobs), rows).all()
    return rows


def resized(pixels, job, box):
    """What Pillow makes of `box` of a crop, one pass after the other."""
    left, top, right, bottom = box
    size = job.full_width, job.full_height
    image = PIL.Image.fromarray(np.ascontiguousarray(pixels))
    wide = image.resize((size[0], image.height), BILINEAR, (left, 0, right, image.height))
    full = np.asarray(wide.resize(size, BILINEAR, (0, top, size[0], bottom)))
    window = full[job.top : job.top + job.row[0], job.left : job.left + job.row[1]]
    return window[:, ::-1] if job.flip else window


def expected(pixels, job):
    part = pixels[job.y : job.y + job.height, job.x : job.x + job.width]
    return resized(part, job, (0, 0, job.width, job.height))


def of_pixels(pixels, *jobs):
    """The rows of the jobs of pixels."""
    rows = [np.empty((*job.row, 3), np.uint8) for job in jobs]
    crop_pixels([pixels] * len(jobs), as_array(jobs), rows)
    return rows


def same(found, other):
    np.testing.assert_array_equal(found, other, strict=True)


@st.composite
def jobs(draw, width, height, most=math.inf):
    """Any job of an image, at most `most` times smaller on one side."""

    def side(length):
        size = draw(st.integers(1, length))
        start = draw(st.sampled_from([0, length - size]) | st.integers(0, length - size))
        least = math.floor(size / most) + 1
        full = draw(st.just(size) | st.integers(least, max(least, 90)))
        window = draw(st.just(full) | st.integers(1, full))
        return start, size, full, draw(st.integers(0, full - window)), window

    x, wide, full_width, left, columns = side(width)
    y, high, full_height, top, rows = side(height)
    flip = draw(st.integers(0, 1))
    return Job(x, y, wide, high, full_width, full_height, left, top, flip, 1, (rows, columns))


@given(st.data())
@pytest.mark.parametrize("way", WAYS)
def test_any_job_gives_pillows_bits(way, data):
    """Of a JPEG and of pixels, which may be made any number of times smaller."""
    jpeg = data.draw(st.sampled_from(IMAGES))
    pixels = simplejpeg.decode_jpeg(jpeg)
    height, width, _ = pixels.shape
    for most, make, image in ((2 * LEFT, made, jpeg), (math.inf, of_pixels, pixels)):
        wanted = data.draw(st.lists(jobs(width, height, most), min_size=1, max_size=3))
        with by(way):
            rows = make(image, *wanted)
        for job, row in zip(wanted, rows, strict=True):
            same(row, expected(pixels, job))


@given(st.sampled_from(IMAGES), st.integers(2, 8), st.data())
@pytest.mark.parametrize("way", WAYS)
def test_images_are_turned_before_they_are_cropped(way, jpeg, orientation, data):
    pixels = upright(simplejpeg.decode_jpeg(jpeg), orientation)
    wanted = data.draw(st.lists(jobs(pixels.shape[1], pixels.shape[0]), min_size=1, max_size=3))
    with by(way):
        rows = made(jpeg, *(job._replace(orientation=orientation) for job in wanted))
    for job, row in zip(wanted, rows, strict=True):
        same(row, expected(pixels, job))


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_has_the_pixels_that_the_whole_has(way, kind, large):
    # Wherever it begins and ends: decoding a part sees no neighbours outside of it.
    for width, height in (
        [(33, 17), (18, 66)] if large else [(33, 17) if way == "avx2" else (18, 34)]
    ):
        jpeg = KINDS[kind](photo_like(8, width, height))
        pixels = simplejpeg.decode_jpeg(jpeg)
        across = [(x, min(n, width - x)) for x in range(width) for n in (1, 2, 9, width)]
        down = [(y, min(n, height - y)) for y in range(height) for n in (1, 2, 9, height)]
        wanted = [whole(n, height, x=x) for x, n in across]
        wanted += [whole(width, n, y=y) for y, n in down]
        pairs = zip(across, itertools.cycle(down), strict=False)
        wanted += [whole(n, m, x=x, y=y) for (x, n), (y, m) in pairs]
        for job, row in zip(wanted, made(jpeg, *wanted), strict=True):
            same(row, pixels[job.y : job.y + job.height, job.x : job.x + job.width])


def test_training_crops_are_pillows_in_one_call(way):
    sizes = [(190, 190), (256, 256), (100, 240), (224, 224), (223, 225)]
    wanted = [whole(*size, x=31, full_width=224, full_height=224) for size in sizes]
    for (width, height), row in zip(sizes, made(JPEG, *wanted), strict=True):
        pixels = simplejpeg.decode_jpeg(JPEG)[:height, 31 : 31 + width]
        image = PIL.Image.fromarray(np.ascontiguousarray(pixels))
        # Pillow 13 takes the columns first in some cases, which rounds otherwise.
        pillows = np.asarray(image.resize((224, 224), BILINEAR)).astype(int)
        assert np.abs(row - pillows).max() <= 1


# What part of its sides is asked for, of crops at several places inside of whole blocks.
REDUCED = {
    whole(1100, 720, full_width=45, full_height=30): 8,
    whole(1100, 721, x=5, y=170, full_width=45, full_height=30, flip=1): 8,
    whole(1093, 727, x=101, y=53, full_width=90, full_height=60): 4,
    whole(1100, 720, x=113, y=191, full_width=183, full_height=120, flip=1): 2,
    whole(1100, 720, x=3, y=2, full_width=184, full_height=120): 1,
    whole(1200, 720, full_width=50, full_height=121): 1,
}


@pytest.mark.parametrize("kind", few(KINDS, "420", "grey"))
def test_crops_far_larger_than_what_is_asked_for_are_decoded_smaller(way, kind):
    jpeg = large_jpeg(kind)
    for (job, part), row in zip(REDUCED.items(), made(jpeg, *REDUCED), strict=True):
        smaller = {"min_width": -(-1213 // part), "min_height": -(-911 // part)}
        pixels = simplejpeg.decode_jpeg(jpeg, **smaller)
        x, y, width, height = (side / part for side in job[:4])
        left, top = math.floor(x), math.floor(y)
        # Those that the crop touches, the outer ones partly.
        inside = pixels[top : math.ceil(y + height), left : math.ceil(x + width)]
        same(row, resized(inside, job, (x - left, y - top, x - left + width, y - top + height)))
    # A part is what it is in the whole at smaller sizes too.
    job = whole(1200, 900, x=13, y=7, full_width=49, full_height=37)
    (full,) = made(jpeg, job)
    parts = [(0, 0), (11, 3), (39, 30), (1, 29)]
    some = [job._replace(left=left, top=top, row=(7, 10)) for left, top in parts]
    for (left, top), row in zip(parts, made(jpeg, *some), strict=True):
        same(row, full[top : top + 7, left : left + 10])
    # And near what the image in full gives: to 40 dB, as conversions are.
    for width, height in ((182, 120), (90, 60), (45, 30)):
        job = whole(1100, 720, x=33, y=50, full_width=width, full_height=height)
        (row,) = made(jpeg, job)
        wrong = row.astype(int) - expected(simplejpeg.decode_jpeg(jpeg), job)
        assert np.square(wrong).mean() <= 255**2 / 10**4


@cache
def large_jpeg(kind):
    return KINDS[kind](photo_like(11, 1213, 911))


def test_tiny_images_are_decoded_as_they_are(way):
    for size in [(6, 6), (7, 6), (6, 8), (8, 8), (1, 9)]:
        jpeg, job = save(PHOTO[: size[1], : size[0]]), whole(*size, full_width=1, full_height=1)
        (row,) = made(jpeg, job)
        if max(size) < 8:
            same(row, expected(simplejpeg.decode_jpeg(jpeg), job))


HUGE = JPEG.replace(struct.pack(">HH", 256, 341), b"\xff" * 4, 1)  # pixels, says the header


def may_be_cropped(data):
    try:
        return can_crop(data, read_header(data))
    except NotAnImageError:
        return False


def jpeg(mode="RGB", **options):
    return encoded(photo(mode), "JPEG", **options)


OTHERS = {
    "nothing": b"",
    "text": b"no image",
    "a png": encoded(photo(), "PNG"),
    "cmyk": jpeg("CMYK"),
    "of other colours": jpeg(icc_profile=rgb_profile()),
    "grey of other shades": jpeg("L", icc_profile=grey_profile(1.0)),
    "a profile that is none": jpeg(icc_profile=b"nonsense"),
    "a profile of ink": jpeg(icc_profile=cmyk_profile()),
    "of too many pixels": HUGE,
    "cut": JPEG[:-2],
    "followed by something": JPEG + b"\0",
    "only a header": JPEG[:300],
}


def test_other_images_are_left_to_others(way):
    for name, data in OTHERS.items():
        assert not may_be_cropped(data), name
    some = [b"\xff", b"\xff\xd8\xff", HUGE, *map(OTHERS.get, ("nothing", "text", "a png", "cmyk"))]
    rows = np.empty((len(some), 4, 4, 3), np.uint8)
    assert not crop_jpegs(some, as_array([whole(4, 4)] * len(some)), rows).any()
    plain = [make(photo_like(1, 40, 30)) for make in KINDS.values()]
    plain += [*(jpeg(exif=exif(n)) for n in range(1, 9)), jpeg(icc_profile=rgb_profile(SRGB, None))]
    assert all(map(may_be_cropped, plain))


def harmed(seed, data=JPEG):
    return damaged(data, random.Random(seed), 300)


def test_damage_ends_a_image_and_no_other(way):
    job = whole(341, 256, full_width=32, full_height=24)
    (right,) = made(JPEG, job)
    for seed in range(30):
        some = [JPEG, harmed(seed, IMAGES[seed]), JPEG, harmed(seed), JPEG]
        rows = np.zeros((5, 24, 32, 3), np.uint8)
        done = crop_jpegs(some, as_array([job] * 5), rows)
        assert done[::2].all()
        for row in rows[::2]:
            same(row, right)


def test_a_cut_image_is_done_only_where_all_of_the_crop_is_there(way):
    job = whole(341, 60, y=20)
    (right,) = made(JPEG, job)
    done = 0
    for stop in range(0, len(JPEG), 997):
        row = np.empty((1, *job.row, 3), np.uint8)
        if crop_jpegs([JPEG[:stop]], as_array([job]), row)[0]:
            same(row[0], right)
            done += 1
    # Libraries decode all of it, the extension ends behind the last line.
    assert (done == 0) if way == "libraries" else (0 < done < len(JPEG) // 997)


@pytest.mark.skipif(EXTENSION is None, reason="without the extension, all of it is decoded anyway")
def test_unfinished_progressive_images_are_left_to_others():
    # The library smooths them, and a part would be smoothed otherwise than the whole.
    progressive = save(PHOTO, progressive=True)
    scans = [at for at in range(len(progressive)) if progressive.startswith(b"\xff\xda", at)]
    row = np.empty((1, 9, 9, 3), np.uint8)
    for at in scans[1:]:
        end = progressive.rfind(b"\xff\xc4", 0, at)  # the scan's tables are before it
        short = progressive[:end] + b"\xff\xd9"
        assert not crop_jpegs([short], as_array([whole(9, 9)]), row).any()


@pytest.mark.parametrize(
    "changes",
    [
        *[{"x": -1}, {"y": -1}, {"width": 0}, {"height": -3}, {"left": -1}, {"top": -1}],
        *[{"left": 1}, {"top": 1}, {"full_width": 39}, {"full_height": 0}, {"row": (0, 40)}],
        *[{"left": 2**31 - 1}, {"row": (31, 40)}, {"row": (30, 0)}],
        *[{"orientation": 0}, {"orientation": 9}],
        # Inside of the size, but not of the image, of which a JPEG's is known late.
        *[{"x": 302}, {"y": 227}, {"width": 342}, {"height": 2**31 - 1}, {"x": 2**31 - 1}],
    ],
)
def test_jobs_that_make_no_sense_are_refused(way, changes):
    job = whole(40, 30, row=(30, 40))._replace(**changes)
    row = [np.empty((*job.row, 3), np.uint8)]
    with pytest.raises(ValueError, match=r"not inside of its (size|image)") as error:
        crop_pixels([PHOTO], as_array([job]), row)
    if "image" in str(error.value):
        assert not crop_jpegs([JPEG], as_array([job]), row).any()
    else:
        with pytest.raises(ValueError, match="a window that is not inside of its size"):
            crop_jpegs([JPEG], as_array([job]), row)


def test_as_many_jobs_and_rows_as_images_are_needed(way):
    job = as_array([whole(4, 4)])
    rows = np.empty((2, 4, 4, 3), np.uint8)
    for images, some, out in [(2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 2), (0, 1, 0)]:
        for use, image in ((crop_jpegs, JPEG), (crop_pixels, PHOTO)):
            with pytest.raises(ValueError, match=r"\d|as many rows"):
                use([image] * images, np.repeat(job, some, axis=0), rows[:out])
    assert crop_jpegs([], as_array([]), []).shape == (0,)
    crop_pixels([], as_array([]), np.empty((0, 4, 4, 3), np.uint8))


def without(jpeg, marker, ordinal=None):
    """A JPEG without its segments of a marker, or without one of them."""
    found = [(start, stop) for kind, start, stop in jpeg_segments(jpeg) if kind == marker]
    for start, stop in reversed(found if ordinal is None else found[ordinal:][:1]):
        jpeg = jpeg[: start - 4] + jpeg[stop:]
    return jpeg


DQT, DHT = 0xDB, 0xC4
SMALL = photo_like(21, 40, 24)
small = partial(save, SMALL)
MOTION = {f"motion jpeg {chroma}": by_simplejpeg(chroma, SMALL) for chroma in ("420", "444")}
FRAMES = {kind: without(jpeg, DHT) for kind, jpeg in MOTION.items()}
ADOBE, RESTARTS = small(keep_rgb=True), small(restart_marker_blocks=1)
# What a decoder remembers of each is of no use to the next, and would not be missed by it.
NEIGHBOURS = {
    **FRAMES,
    "coarse": small(quality=20, optimize=True),
    "fine": small(quality=98, optimize=True),
    "grey": small("L", optimize=True),
    "not YCbCr": ADOBE,
    "not YCbCr, unsaid": without(ADOBE, 0xEE),
    "progressive": small(progressive=True),
    "restarts": RESTARTS,
    "restarts, unsaid": without(RESTARTS, 0xDD),
    "no steps": without(MOTION["motion jpeg 420"], DQT),
    "no steps for colour": without(MOTION["motion jpeg 444"], DQT, 1),
    "a step marker with a flipped bit": MOTION["motion jpeg 420"].replace(b"\xff\xdb", b"\xff\xeb"),
    "one table of four": without(MOTION["motion jpeg 444"], DHT, 2),
    "progressive without tables": without(small(progressive=True), DHT),
    "cmyk": small("CMYK"),
    "cut": MOTION["motion jpeg 420"][:700],
    "tables alone": MOTION["motion jpeg 420"][:640] + b"\xff\xd9",
}


@pytest.mark.parametrize("kind", MOTION)
def test_without_huffman_tables_the_standard_ones_hold(way, kind):
    assert FRAMES[kind] != MOTION[kind]
    job = whole(40, 24, full_width=13, full_height=9)
    same(made(FRAMES[kind], job)[0], expected(simplejpeg.decode_jpeg(MOTION[kind]), job))


@given(st.lists(st.sampled_from(list(NEIGHBOURS)), min_size=2, max_size=9))
@pytest.mark.parametrize("way", WAYS)
def test_an_image_does_not_depend_on_those_before_it(way, names):
    some = [NEIGHBOURS[name] for name in names]
    job = whole(40, 24)
    rows = np.zeros((len(some), *job.row, 3), np.uint8)
    with by(way):
        done = crop_jpegs(some, as_array([job] * len(some)), rows)
        for jpeg, row, is_done in zip(some, rows, done, strict=True):
            alone = np.zeros((1, *job.row, 3), np.uint8)
            assert crop_jpegs([jpeg], as_array([job]), alone)[0] == is_done
            if is_done:
                same(row, alone[0])
                same(row, simplejpeg.decode_jpeg(jpeg, "RGB"))
    must = {"motion jpeg 420", "motion jpeg 444", "coarse", "fine", "grey", "progressive"}
    assert all(is_done for name, is_done in zip(names, done, strict=True) if name in must)


def test_nothing_is_written_beside_a_row(way):
    for width in (*range(1, 18), 24, 31, 32, 33, 39):
        rows = np.full((3, 5, width, 3), 77, np.uint8)
        wanted = [whole(90, 50, full_width=width, full_height=5)]
        assert crop_jpegs([JPEG], as_array(wanted), rows[1:2]).all()
        crop_pixels([PHOTO], as_array(wanted), rows[1:2])
        assert (rows[::2] == 77).all()


def test_threads_do_not_disturb_one_another(way):
    wanted = [whole(300, 200, x=n, full_width=64, full_height=48) for n in range(8)]
    right = made(JPEG, *wanted)

    def work(_):
        equal = True
        for turn in range(6):
            batch = np.zeros((9, 48, 64, 3), np.uint8)
            rows = [batch[place] for place in (8, 1, 6, 3, 5, 2, 7, 4)]  # wherever they lie
            crop_jpegs([JPEG, harmed(turn)] * 4, as_array(wanted), rows)
            equal &= all((rows[n] == right[n]).all() for n in range(0, 8, 2))
            equal &= not batch[0].any()
        return equal

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


# The arguments of `crop_many` for three images that become 4 x 5 pixels.
MANY = {
    "data": JPEG,
    "starts": np.zeros(3, np.int64),
    "sizes": np.full(3, len(JPEG)),
    "drawn": np.full((3, 23), 0.5),
    "program": np.array([[0, 5, 4, 0.1, 1, 0.5, 2], [4, 1, 1, 0.6, 0, 0, 0]]),
    "out": np.full((3, 4, 5, 3), 77, np.uint8),
}
NUMBER = st.sampled_from([0, -1, 1, len(JPEG), 2**63 - 1, -(2**63), 2**62]) | st.integers(-9, 9)
needs_crop_many = pytest.mark.skipif(EXTENSION is None, reason="the extension was not built")


@needs_crop_many
@pytest.mark.parametrize(
    "changes",
    [
        *({name: MANY[name][:2]} for name in ("starts", "sizes", "drawn", "out")),
        {"drawn": MANY["drawn"][:, :22]},
        *({"program": MANY["program"] + n} for n in (-1, 2**15, math.nan)),
        *({"out": np.zeros((3, *shape, 3), np.uint8)} for shape in [(0, 5), (4, 0)]),
        {"out": MANY["out"][..., :2].copy()},
        {"out": MANY["out"].astype(np.uint16)},
        *({"size": size} for size in [(0, 4), (-1, 4), (4, 1 << 29)]),
        *({"table": np.zeros((n, 3), kind)} for n, kind in [(255, "f4"), (256, "f8"), (1, "u1")]),
        {"table": np.zeros((256, 3), np.float32)},  # but not for an output of bytes
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(changes):
    assert crop.crop_many(**MANY)[0].all()
    with pytest.raises(ValueError, match=r"arrays that do not fit together, or invalid steps"):
        crop.crop_many(**MANY | changes)


@needs_crop_many
@given(st.lists(NUMBER, min_size=3, max_size=3), st.lists(NUMBER, min_size=3, max_size=3))
@pytest.mark.parametrize("size", [None, (2, 3)])
def test_no_byte_outside_of_the_data_is_read(size, starts, sizes):
    changes = {"starts": np.array(starts, np.int64), "sizes": np.array(sizes, np.int64)}
    found, _ = crop.crop_many(**MANY | changes, size=size)
    for start, length, is_done in zip(starts, sizes, found, strict=True):
        inside = start >= 0 and start + length <= len(JPEG)
        whole = length == 18 if size else (start, length) == (0, len(JPEG))
        assert is_done == (inside and whole)


@needs_crop_many
def test_a_random_number_out_of_range_is_no_crop_outside_of_the_image():
    for number in (-1e-9, 1, 1e300, math.inf, -math.inf, math.nan):
        for column in (0, 1):
            drawn = MANY["drawn"].copy()
            drawn[1, column] = number
            assert crop.crop_many(**MANY | {"drawn": drawn})[0].tolist() == [True, False, True]


@needs_crop_many
def test_windows_are_computed_without_decoding_for_images_that_others_decode_alike():
    """And damage neither crashes, nor is it more than a window less."""
    others = OTHERS | {"with a wrong marker": JPEG[:-9] + b"\xff\xc4" + JPEG[-7:]}
    some = [
        JPEG,
        *others.values(),
        *(harmed(seed) for seed in range(200)),
        jpeg(exif=exif(6)),
        JPEG,
    ]
    sizes = np.array([len(data) for data in some])
    drawn, more = np.random.default_rng(1).random((len(some), 23)), MANY["program"]
    given = b"".join(some), sizes.cumsum() - sizes, sizes, drawn, more
    done, windows = crop.windows_of_many(*given, (4, 5))
    decoded, same_windows = crop.crop_many(*given, np.empty((len(some), 4, 5, 3), np.uint8))
    assert done[[0, -1]].tolist() == [True, True]
    assert not done[1 : len(others) + 1].any()
    assert not done[-2]
    assert (windows[done & decoded] == same_windows[done & decoded]).all()


STATM = Path("/proc/self/statm")


def resident():
    """The bytes of memory of this process, and not the most that other tests once took."""
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


@pytest.mark.large
@pytest.mark.skipif(not STATM.exists(), reason="reads Linux's /proc")
def test_damage_leaks_no_memory(way):
    some = [harmed(seed) for seed in range(30)]
    rows = np.empty((30, 24, 32, 3), np.uint8)
    job = as_array([whole(341, 256, full_width=32, full_height=24)] * 30)
    for turn in range(45):
        if turn == 5:
            before = resident()
        crop_jpegs(some, job, rows)
    assert resident() - before < 8 << 20
