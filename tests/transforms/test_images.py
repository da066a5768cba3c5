"""Images, pixels and masks through the transforms: compared with Pillow, step by step."""

import io
from typing import Any

import numpy as np
import PIL.Image
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st

from shardkit import CenterCrop, Decode, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize
from shardkit.codecs import crop
from shardkit.codecs.crop import has_crop_many
from shardkit.codecs.pixels import to_ppm, to_rgb
from shardkit.codecs.window import Window
from shardkit.errors import SampleError
from shardkit.schema import Array, Image, Schema
from shardkit.transforms import Transforms
from tests.codecs import test_crop
from tests.codecs.sample_images import encoded, exif, photo, photo_like, rgb_profile
from tests.codecs.sample_profiles import SRGB, grey_profile
from tests.preprocess.test_masks import assert_lies_on, drawn, scene
from tests.sources.real import cases, refused
from tests.transforms.chunks import (
    BOTH,
    IMAGES,
    applied,
    assert_same,
    begun,
    directly,
    draws_of,
    file_of,
    photos,
)

ARRAYS = Schema({"image": Array("|u1")})
BILINEAR, NEAREST = PIL.Image.Resampling.BILINEAR, PIL.Image.Resampling.NEAREST
CROP = RandomResizedCrop(32)
FLIP = RandomHorizontalFlip(1.0)


def by_pillow(image, steps, filter=BILINEAR):
    """What steps without chance do, one after the other."""
    for step in steps:
        width, height = image.size
        window = Window.whole(width, height)
        step.apply(window, [0.5] * step.numbers)
        if isinstance(step, RandomHorizontalFlip):
            image = image.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT)
        elif isinstance(step, CenterCrop):
            box = window.left, window.top, window.left + window.columns, window.top + window.rows
            image = image.crop(box)  # 0 beyond its edges
        else:
            box = window.x, window.y, window.x + window.width, window.y + window.height
            image = image.crop(box).resize((window.columns, window.rows), filter)
    return np.asarray(image)


def assert_alike(pixels, expected, resizes=1):
    """But for rounding between two passes, which Pillow does in another order since 13."""
    assert pixels.dtype == np.uint8
    np.testing.assert_allclose(pixels.astype(int), expected, rtol=0, atol=resizes)


def decoded(data):
    if data.startswith(b"\xff\xd8"):
        return PIL.Image.fromarray(simplejpeg.decode_jpeg(data))
    return PIL.Image.open(io.BytesIO(data)).convert("RGB")


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "array"])
def test_a_random_crop_is_cropped_resized_and_mirrored(format):
    samples = photos(24, "PNG" if format == "array" else format)
    images = [decoded(sample["image"]) for sample in samples]
    schema = IMAGES
    if format == "array":
        schema = ARRAYS
        for sample, image in zip(samples, images, strict=True):
            sample["image"] = np.asarray(image)
    step = RandomResizedCrop((32, 40))
    found = applied({"image": [step, RandomHorizontalFlip()]}, samples, schema)
    numbers = draws_of(24).uniform(0, step.numbers + 1)
    for image, sample, row in zip(images, found, numbers.tolist(), strict=True):
        window = Window.whole(*image.size)
        step.apply(window, row[:-1])
        box = window.x, window.y, window.x + window.width, window.y + window.height
        expected = np.asarray(image.crop(box).resize((40, 32), BILINEAR))
        assert_alike(sample["image"], expected[:, :: -1 if row[-1] < 0.5 else 1])
    assert 4 < (numbers[:, -1] < 0.5).sum() < 20


SIDES = st.integers(12, 60)
SIZES = SIDES | st.tuples(SIDES, SIDES)
STEPS = st.one_of(
    *(SIZES.map(Resize), SIZES.map(CenterCrop), st.just(FLIP), st.just(Decode())),
    SIZES.map(lambda size: RandomResizedCrop(size, scale=(40, 50), ratio=(0.8, 1.2))),
)


def unchanged(value):
    return value


def both_unchanged(image, mask):
    return {"image": image, "mask": mask}


@pytest.mark.parametrize("format", ["JPEG", "PNG", "array"])
@given(st.integers(16, 60), st.integers(16, 60), st.lists(STEPS, min_size=1, max_size=4))
def test_steps_that_are_done_at_once_are_those_done_one_by_one(format, width, height, steps):
    pixels = photo_like(width, width, height)
    value: Any = pixels if format == "array" else file_of(pixels, format)
    image = PIL.Image.fromarray(pixels) if format == "array" else decoded(value)
    expected = by_pillow(image, [step for step in steps if not isinstance(step, Decode)])
    one_by_one = [one for step in steps for one in (step, unchanged)]
    sample = {"__key__": "a", "image": value}
    schema = ARRAYS if format == "array" else IMAGES
    normalize = Normalize((0.4, 0.5, 0.6), (0.1, 0.2, 0.3), "float16")
    for more in ([], [normalize]):
        together = applied({"image": [*steps, *more]}, [sample], schema)
        assert_same(together, applied({"image": [*one_by_one, *more]}, [sample], schema))
        if not more:
            assert_alike(together[0]["image"], expected, len(steps))


# Images that are done in one call, and others that may be.
PLAIN = [make(photo_like(2, 47, 31)) for make in test_crop.KINDS.values()]
PLAIN += [encoded(photo(size=(33, 20)), "JPEG", exif=exif(n)) for n in range(1, 9)]
PLAIN += [encoded(photo("L"), "JPEG"), encoded(photo(), "JPEG", exif=exif(0))]
OTHER = [*test_crop.OTHERS.values(), None, *(photos(3, "PNG")[n]["image"] for n in range(3))]


@test_crop.needs_crop_many
@given(st.lists(STEPS | st.just(RandomHorizontalFlip()), min_size=1, max_size=4), st.data())
def test_one_call_gives_what_samples_become(steps, data):
    dtype = data.draw(st.sampled_from([None, "float32", "float16", "bfloat16"]))
    more = [Normalize((0.4, 0.5, 0.6), (0.1, 0.2, 0.3), dtype)] if dtype else []
    transforms = Transforms({"image": [*steps, *more]}, IMAGES)
    values = data.draw(st.permutations(PLAIN + OTHER))[:20]
    draws = draws_of(len(values), seed=data.draw(st.integers(0, 99)))
    samples = [{"__key__": "a", "image": value} for value in values]
    direct = directly(transforms, samples, draws)
    one_job = len(transforms.chains[0].stages) == 1 + len(more)
    assert (direct is not None) == (one_job and bool(transforms.outputs()))
    if direct is not None:
        out = begun(transforms, len(values))
        errors = transforms.apply(samples, draws, out)
        for row, is_done in enumerate(direct[1]):
            assert is_done or values[row] in OTHER or row in errors
            if is_done:
                assert row not in errors
                np.testing.assert_array_equal(direct[0]["image"][row], out["image"][row])


class OwnFlip(RandomHorizontalFlip):
    def apply(self, window, drawn):
        window.flip = True


@cases(
    "kind steps",
    (Image(), RandomHorizontalFlip()),  # of no known size
    (Image(), [CROP, unchanged]),
    (Image(), [CROP, OwnFlip()]),
    (Image(), [CROP, RandomResizedCrop(8)]),
    (Array("|u1", (None, None, 3)), CROP),
    (Array(None, (8, 9, 3)), CROP),
)
def test_samples_are_needed_for_all_but_one_job_of_our_own_transforms(kind, steps):
    assert Transforms({"image": steps}, Schema({"image": kind})).direct() is None
    both = Schema({"image": kind, "other": Image()})
    assert Transforms({"image": steps, "other": CROP}, both).direct() is None
    assert (Transforms({"other": CROP}, both).direct() is not None) == has_crop_many()


@test_crop.needs_crop_many
def test_a_profile_of_srgb_is_done_in_one_call_once_it_is_known(monkeypatch):
    monkeypatch.setattr(crop, "_srgb_profiles", [])
    transforms = Transforms({"image": CROP}, IMAGES)
    profiles = [rgb_profile(SRGB, None), rgb_profile(), b"nonsense"]
    values = [
        encoded(photo(), "JPEG", icc_profile=profile, exif=exif(n))
        for profile in profiles
        for n in (6, 1)
    ]
    grey = grey_profile(None)
    values += [encoded(photo("L"), "JPEG", icc_profile=grey)]
    values += [encoded(photo(), "JPEG", icc_profile=grey)]
    for known in (False, True):
        samples = [{"__key__": "a", "image": value} for value in values]
        done = directly(transforms, samples, draws_of(8))[1]
        assert done.tolist() == [known, known, False, False, False, False, known, False]
        applied({"image": CROP}, samples)


def test_margins_are_black_and_lie_around_the_image():
    pixels = np.full((10, 20, 3), 200, np.uint8)
    for format in ("PNG", "JPEG"):
        sample = {"__key__": "a", "image": file_of(pixels, format)}
        found = applied({"image": [CenterCrop((13, 25)), FLIP]}, [sample])[0]["image"]
        assert (found[1:11, 3:23] == 200).all()
        assert found.sum() == 200 * pixels.size


# Each orientation, each format, and JPEG, which libjpeg itself turns, in all of them.
TURNED = [("JPEG", n) for n in range(1, 9)] + [("PNG", 6), ("WEBP", 5), ("TIFF", 8), ("TIFF", 3)]
KINDS = {
    "cmyk": encoded(photo("CMYK"), "JPEG"),
    "grey": encoded(photo("L"), "JPEG"),
    "icc": encoded(photo("RGB"), "JPEG", icc_profile=rgb_profile()),
    "progressive": encoded(photo("RGB"), "JPEG", progressive=True),
    "tail": encoded(photo("RGB"), "JPEG") + b"behind the end",
    "alpha": encoded(photo("RGBA"), "PNG"),
    "palette": encoded(photo("P"), "PNG"),
    "L": encoded(photo("L"), "PNG"),
    "gif": encoded(photo("RGB"), "GIF"),
    "bmp": encoded(photo("RGB"), "BMP"),
    "ppm": to_ppm(np.asarray(photo("RGB"))),
    **{f"{f} {n}": encoded(scene(), f, exif=exif(n), lossless=True) for f, n in TURNED},
}


@pytest.mark.parametrize("data", KINDS.values(), ids=KINDS)
def test_every_image_is_seen_upright_as_the_codecs_see_it(data):
    upright, samples = to_rgb(data), [{"__key__": "a", "image": data}]
    np.testing.assert_array_equal(applied({"image": Decode()}, samples)[0]["image"], upright)
    steps = [Resize(11), FLIP] if upright.size < 24 * 16 * 4 else [Resize(40), CenterCrop((30, 24))]
    expected = by_pillow(PIL.Image.fromarray(upright), steps)
    assert_alike(applied({"image": steps}, samples)[0]["image"], expected)


WHOLE = {format: file_of(photo_like(1, 80, 60), format) for format in ("JPEG", "PNG", "WEBP")}
HALF = {format: data[: len(data) // 2] for format, data in WHOLE.items()}
DAMAGED = {"empty": b"", "text": b"some text", "start": b"\xff\xd8\xff", "int": 3, "none": None}
DAMAGED |= {**HALF, "jpeg-end": HALF["JPEG"] + b"\xff\xd9"}
DAMAGED["png-byte"] = HALF["PNG"] + b"\0" + WHOLE["PNG"][len(HALF["PNG"]) + 1 :]


@pytest.mark.parametrize("steps", [CROP, [Decode(), unchanged, CROP]])
@pytest.mark.parametrize("bad", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_image_is_an_error_of_its_sample_alone(bad, steps):
    samples = photos(7)
    samples[3] = None
    samples[4]["image"] = bad
    transforms = Transforms({"image": steps}, IMAGES)
    out = begun(transforms, 7)
    errors = transforms.apply(samples, draws_of(7), out)
    assert list(errors) == [4]
    assert isinstance(errors[4], SampleError)
    assert errors[4].where == {"key": "4", "field": "image"}
    assert 'on_error="skip"' in str(errors[4].fix)
    assert (out["image"][3] == 77).all()
    for row in (0, 1, 2, 5, 6):
        alone = begun(transforms, 1)
        assert not transforms.apply([photos(7)[row]], draws_of(1, first=row), alone)
        np.testing.assert_array_equal(out["image"][row], alone["image"][0])


LONG = file_of(np.zeros((1, 5000, 3), np.uint8))
SHAPES = ((8, 8), (8, 8, 5), (0, 8, 3), (1, 8, 8, 3))
NO_PIXELS = [np.zeros((8, 8, 3), np.complex64), *(np.zeros(shape, np.uint8) for shape in SHAPES)]
TALL = (Array("|u1", (8, 9, 3)), np.zeros((9, 8, 3), np.uint8), FLIP)
MANY = "163,840,000 x 32,768 after resizing"


@cases(
    "kind value steps words found",
    *((Array(), pixels, CROP, "not an image", str(pixels.shape)) for pixels in NO_PIXELS),
    (*TALL, "not have the size", "8 x 9 pixels instead of 9 x 8"),
    (Image(), LONG, Resize(1 << 15), "too many pixels", MANY),
    (Image(), LONG, [Resize(1 << 15), CenterCrop(8)], "too many pixels", MANY),
)
def test_what_is_no_image_of_its_field_or_too_large_is_an_error(kind, value, steps, words, found):
    sample, schema = {"__key__": "a", "image": value}, Schema({"image": kind})
    error = refused(SampleError, words, applied, {"image": steps}, [sample], schema)
    assert found in str(error.found)
    assert words != "not an image" or "numbers (height, width, channels)" in str(error.expected)


def test_pixels_may_lie_in_memory_in_any_way_and_the_extension_changes_nothing(monkeypatch):
    pixels = photo_like(1, 60, 50)
    views = [pixels.copy(), pixels.swapaxes(0, 1), pixels[::-1, ::2], np.asfortranarray(pixels)]
    views[0].flags.writeable = False
    sized = Schema({"image": Array("|u1", (60, 50, 3))})
    made = applied({"image": FLIP}, [{"__key__": "a", "image": pixels.swapaxes(0, 1)}], sized)
    assert made[0]["image"].shape == (60, 50, 3)
    for view in views:
        found = applied({"image": Resize(20)}, [{"__key__": "a", "image": view}], ARRAYS)
        expected = by_pillow(PIL.Image.fromarray(np.ascontiguousarray(view)), [Resize(20)])
        assert_alike(found[0]["image"], expected)
    steps = {"image": [RandomResizedCrop(24), RandomHorizontalFlip()]}
    before = applied(steps, photos(20))
    monkeypatch.setattr(crop, "_crop", None)
    assert_same(applied(steps, photos(20)), before)


def pair(format="PNG", orientation=1, mode="L"):
    options = {"subsampling": 0, "quality": 98} if format == "JPEG" else {}
    image = encoded(scene(), format, exif=exif(orientation), **options)
    return {"__key__": "a", "image": image, "mask": encoded(drawn(mode), "PNG")}


@pytest.mark.parametrize(
    "steps",
    [
        [RandomResizedCrop((50, 70), scale=(0.5, 1)), RandomHorizontalFlip()],
        [Decode(), both_unchanged, RandomResizedCrop(64, scale=(0.5, 1))],
        [Resize(90), CenterCrop(80), RandomHorizontalFlip()],
        [RandomHorizontalFlip(), CenterCrop(200)],
        [Decode()],
    ],
)  # fmt: skip
@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_a_mask_lies_on_its_image(steps, format):
    for orientation in range(1, 9):
        samples = [pair(format, orientation)]
        found = applied({("image", "mask"): steps}, samples, BOTH, turn=orientation)[0]
        pixels, mask = found["image"], found["mask"]
        assert mask.dtype == np.int64
        inside = ~(pixels == 0).all(axis=2)  # without margins
        assert (mask[~inside] == 0).all()
        rows, columns = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
        part = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert_lies_on(pixels[part], mask[part])


@pytest.mark.parametrize("mode", ["L", "P", "I;16"])
def test_a_mask_has_the_nearest_of_its_own_values(mode):
    step = RandomResizedCrop((30, 41))
    values = np.asarray(drawn(mode)).astype(np.int32)
    for turn in range(8):
        steps = {("image", "mask"): [step, FLIP]}
        found = applied(steps, [pair(mode=mode)], BOTH, turn=turn)[0]["mask"]
        window = Window.whole(120, 80)
        step.apply(window, draws_of(1, turn=turn).uniform(0, step.numbers)[0].tolist())
        box = window.x, window.y, window.x + window.width, window.y + window.height
        expected = PIL.Image.fromarray(values).crop(box).resize((41, 30), NEAREST)
        np.testing.assert_array_equal(found, np.asarray(expected)[:, ::-1])


def test_masks_may_be_arrays_and_images_in_colour_that_is_grey_in_any_number_of_fields():
    steps = {("image", "mask"): [RandomResizedCrop(33), RandomHorizontalFlip()]}
    expected = applied(steps, [pair()], BOTH)
    values = np.asarray(drawn())
    in_colour = np.repeat(values[:, :, None], 3, axis=2)
    for mask in (to_ppm(in_colour), file_of(in_colour)):
        assert_same(applied(steps, [{**pair(), "mask": mask}], BOTH), expected)
    schema = Schema({"image": Array(), "mask": Array()})
    for array in (values, values.astype(np.int64), values.astype(">u2"), in_colour):
        sample = {"__key__": "a", "image": np.asarray(scene()), "mask": array}
        assert_same(applied(steps, [sample], schema), expected)
    sample = {**pair(), "depth": encoded(drawn("I;16"), "PNG")}
    steps = {("image", "mask", "depth"): [CROP, RandomHorizontalFlip()]}
    found = applied(steps, [sample], Schema({**BOTH, "depth": Image()}))[0]
    np.testing.assert_array_equal(found["mask"] * 300, found["depth"])


@cases(
    "mask words found",
    (encoded(PIL.Image.new("L", (80, 120)), "PNG"), "does not match its image", "80 x 120"),
    (np.zeros((120, 80), np.uint8), "does not match its image", "80 x 120"),
    (encoded(scene(), "PNG"), "not a mask", "uint8 (80, 120, 3)"),
    (np.zeros((80, 120), np.float32), "not a mask", "float32"),
    (np.zeros(3, np.int64), "not a mask", "(3,)"),
    ("text", "not a mask", "str"),
    (encoded(drawn(), "PNG")[:-20], "is truncated", "png"),
    (b"", "not an image", "empty"),
)
def test_what_cannot_lie_on_the_image_is_an_error_of_its_sample(mask, words, found):
    samples = [pair("JPEG"), {**pair("JPEG"), "mask": mask}, pair("JPEG", 6)]
    schema = BOTH if isinstance(mask, bytes) else Schema({"image": Image(), "mask": Array()})
    transforms = Transforms({("image", "mask"): CROP}, schema)
    if has_crop_many():
        assert directly(transforms, samples, draws_of(3))[1].tolist() == [True, False, True]
    errors = transforms.apply(samples, draws_of(3), begun(transforms, 3))
    assert list(errors) == [1]
    assert isinstance(errors[1], SampleError)
    assert words in str(errors[1])
    assert found in str(errors[1].found)
    assert errors[1].where == {"key": "a", "field": "mask"}
