"""Masks share the geometry of their images, and keep their values."""

from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest

from shardkit import Array, Image, ImageOptions, SampleError, Schema, UsageError
from shardkit.preprocess.images import Shaped, steps_for
from shardkit.preprocess.on_image import is_mask_name, mask_fields
from shardkit.sources.sequence import SequenceSource
from tests.codecs.sample_images import photo_like
from tests.preprocess.test_images import SWAPPED, encoded, exif, finely, opened, pixels_of, steps_of
from tests.sources.real import cases, refused

BOTH = {"image": Image(), "mask": Image()}
# A grey wall with rectangles; the mask has the number of each. None is symmetric in any way.
WALL, COLOURS = (90, 90, 90), {3: (250, 40, 40), 7: (40, 250, 40), 200: (40, 40, 250)}
PLACES = {3: (10, 8, 60, 40), 7: (80, 20, 110, 72), 200: (0, 60, 50, 80)}
SIZE = (120, 80)


def scene() -> PIL.Image.Image:
    image = PIL.Image.new("RGB", SIZE, WALL)
    for number, place in PLACES.items():
        image.paste(COLOURS[number], place)
    return image


def drawn(mode: str = "L") -> PIL.Image.Image:
    """The mask of the scene, with its numbers as grey, 16-bit or palette values."""
    factor, kind = (300, np.uint16) if mode == "I;16" else (1, np.uint8)
    values = np.zeros(SIZE[::-1], kind)
    for number, (left, top, right, bottom) in PLACES.items():
        values[top:bottom, left:right] = number * factor
    made = PIL.Image.fromarray(values)
    if mode == "P":
        made.putpalette(PALETTE)
    return made


def one_bit() -> PIL.Image.Image:
    return drawn().point(lambda value: 255 if value else 0).convert("1")


PALETTE = np.random.default_rng(0).integers(0, 256, 768, np.uint8).tolist()


def shaped(image: bytes, mask: bytes, schema=BOTH, raw="array", **options) -> Shaped:
    values = dict(zip(schema, (image, mask), strict=True))
    return steps_of(schema, raw=raw, **options)({"__key__": "a", **values})


def values_of(mask: Any) -> np.ndarray[Any, Any]:
    return mask if isinstance(mask, np.ndarray) else np.asarray(opened(mask))


def assert_lies_on(pixels: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    """An image's colours say which number its mask must have, except where edges are mixed."""
    assert pixels.shape[:2] == values.shape
    seen = 0
    for number, colour in {0: WALL, **COLOURS}.items():
        exactly = (np.abs(pixels.astype(int) - colour) <= 25).all(axis=2)
        assert (values[exactly] == number).all()
        seen += int(exactly.sum())
    assert set(np.unique(values)) <= {0, *PLACES}
    margin = (pixels == 255).all(axis=2)
    assert (values[margin] == 0).all()
    assert seen + margin.sum() > 0.7 * values.size


@pytest.mark.parametrize("orientation", range(1, 9))
@cases(
    "modes upscale format",
    ("shorter longer crop", False, "PNG"),
    ("shorter crop", True, "JPEG"),
    ("exact pad", True, "PNG"),
)
def test_a_mask_still_lies_on_what_it_was_drawn_on(modes, upscale, format, orientation):
    image, mask = finely(scene(), format, exif=exif(orientation)), encoded(drawn(), "PNG")
    for mode in modes.split():
        for size in (33, 200):
            options = {"resize": size, "resize_mode": mode, "upscale": upscale}
            found = shaped(image, mask, format="png", **options)
            assert_lies_on(pixels_of(found.sample["image"]), values_of(found.sample["mask"]))


def upright(image: PIL.Image.Image, orientation: int) -> PIL.Image.Image:
    return PIL.ImageOps.exif_transpose(opened(encoded(image, "PNG", exif=exif(orientation))))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turning_alone_turns_the_mask_as_well(orientation):
    for format in ("PNG", "JPEG", "WEBP", "TIFF"):
        image = finely(scene(), format, exif=exif(orientation))
        found = shaped(image, encoded(drawn(), "PNG"), format="raw")
        np.testing.assert_array_equal(found.sample["mask"], upright(drawn(), orientation))
        assert_lies_on(found.sample["image"], found.sample["mask"])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_mask_may_be_upright_or_say_itself_how_it_is_turned(orientation):
    turned = encoded(scene(), "PNG", exif=exif(orientation))
    mask = encoded(drawn(), "PNG", exif=exif(orientation))
    cases = [
        (turned, mask, {"resize": 33}),
        (encoded(upright(scene(), orientation), "PNG", exif=exif(1)), mask, {"resize": 33}),
    ]
    if orientation >= 5:  # else its size does not tell
        drawn_upright = encoded(upright(drawn(), orientation), "PNG")
        for options in ({"resize": 33}, {"format": "raw"}, {"icc": "srgb"}):
            cases.append((turned, drawn_upright, options))
    for image, its_mask, options in cases:
        found = shaped(image, its_mask, **options)
        values = found.sample["mask"]
        assert_lies_on(pixels_of(found.sample["image"]), values_of(values))
        assert isinstance(values, np.ndarray) or not opened(values).getexif()


@pytest.mark.parametrize("mode", ["L", "P", "I;16"])
def test_values_are_those_that_were_there(mode):
    before = drawn(mode)
    for orientation, options in (
        (1, {"resize": 33}),
        (3, {"resize": 200, "upscale": True}),
        (6, {"resize": 50, "resize_mode": "crop"}),
        (1, {"resize": 100, "resize_mode": "pad"}),
        (6, {"resize": 40, "format": "raw"}),
    ):
        image = encoded(scene(), "PNG", exif=exif(orientation))
        found = shaped(image, encoded(before, "PNG"), **options).sample["mask"]
        values = values_of(found)
        assert values.dtype == np.asarray(before).dtype
        assert set(np.unique(values)) == set(np.unique(np.asarray(before)))
        if mode == "P" and "format" not in options:
            after = opened(found)
            assert after.mode == "P"
            palette = np.array(PALETTE, np.uint8).reshape(-1, 3)
            np.testing.assert_array_equal(after.convert("RGB"), palette[values])


def test_masks_of_other_kinds_keep_their_values():
    """Any values, one bit a pixel, colours that are numbers, transparency, a palette's hole."""
    clear, hole = scene().convert("RGBA"), drawn("P")
    clear.putalpha(drawn())
    hole.info["transparency"] = 3
    noise = np.random.default_rng(0).integers(0, 256, SIZE[::-1], np.uint8)
    for mask in (PIL.Image.fromarray(noise), one_bit(), scene(), clear, hole):
        for size in (33, 79):
            found = shaped(encoded(scene(), "PNG"), encoded(mask, "PNG"), resize=size)
            small = opened(found.sample["mask"])
            assert small.mode == mask.mode
            expected = mask.resize(small.size, PIL.Image.Resampling.NEAREST)
            np.testing.assert_array_equal(small, expected)
    # Neither profile nor background nor quality is for masks.
    image = encoded(scene(), "JPEG", icc_profile=SWAPPED)
    options = {"resize_mode": "pad", "background": "#030303", "quality": 1, "format": "jpeg"}
    mask = encoded(drawn(), "PNG", icc_profile=SWAPPED)
    found = shaped(image, mask, resize=100, **options).sample["mask"]
    values = values_of(found)
    assert (opened(found).format, set(np.unique(values))) == ("PNG", {0, *PLACES})
    assert not values[:16].any()
    assert not values[-16:].any()


def test_a_mask_whose_image_stays_where_it_is_keeps_its_bytes():
    image, turned = encoded(scene(), "JPEG"), encoded(scene(), "JPEG", exif=exif(6))
    mask, small = encoded(drawn(), "PNG"), encoded(PIL.Image.new("L", (3, 2)), "PNG")
    for other in (mask + b"behind the end", encoded(drawn(), "PNG", exif=exif(3)), small):
        assert shaped(turned, other, min_size=10).sample["mask"] == other  # no image to filters
    for options in ({"resize": 80}, {"resize": 500}, {"icc": "srgb"}, {"quality": 95}):
        found = shaped(image, mask, **options)
        assert found.sample == {"__key__": "a", "image": image, "mask": mask}
        assert found.images["passed"] == 1
    for other, options in (
        (encoded(scene(), "JPEG", quality=95), {"quality": 20}),
        (encoded(scene(), "BMP"), {"format": "png"}),
        (encoded(scene(), "PNG", icc_profile=SWAPPED), {"icc": "srgb"}),
    ):
        found = shaped(other, mask, **options)
        assert found.sample["image"] != other
        assert found.sample["mask"] == mask


def test_raw_masks_are_arrays_and_pixels_where_only_those_are_without_loss():
    """As in .beton, which would make a JPEG of a PNG."""
    for mask, expected in (
        *((drawn(mode), np.asarray(drawn(mode))) for mode in ("L", "P", "I;16")),
        (one_bit(), (np.asarray(drawn()) > 0).astype(np.uint8)),
    ):
        found = shaped(encoded(scene(), "JPEG"), encoded(mask, "PNG"), format="raw").sample["mask"]
        np.testing.assert_array_equal(found, expected, strict=True)
        Array().check(found)
    for options in ({"resize": 40}, {"resize": 500}, {"format": "raw"}, {"format": "jpeg"}):
        for mask in (encoded(drawn(mode), "PNG") for mode in ("L", "P")):
            found = shaped(encoded(scene(), "PNG"), mask, raw="ppm", **options).sample["mask"]
            small = drawn().resize(opened(found).size, PIL.Image.Resampling.NEAREST)
            assert opened(found).format == "PPM"
            np.testing.assert_array_equal(values_of(found), np.asarray(small.convert("RGB")))


def test_a_mask_that_is_damaged_of_another_size_or_of_no_place_is_an_error_of_its_sample():
    whole = encoded(drawn(), "PNG")
    flipped = whole.replace(whole[60:61], bytes([whole[60] ^ 1]), 1)
    bad = [(mask, {"resize": 33}, "") for mask in (whole[: len(whole) // 2], b"text", b"", flipped)]
    for width, height in (60, 40), (80, 120), (121, 80), (1, 1):
        other = encoded(PIL.Image.new("L", (width, height)), "PNG")
        for options in ({"resize": 33}, {"format": "raw"}):
            bad.append((other, options, f"{width} x {height}"))
    for options in ({"resize": 40}, {"format": "raw"}, {"resize": 500}):
        bad.append((encoded(drawn("I;16"), "PNG"), {**options, "raw": "ppm"}, ""))
    for mask, options, size in bad:
        error = refused(SampleError, None, shaped, encoded(scene(), "JPEG"), mask, **options)
        assert error.where == {"key": "a", "field": "mask"}
        assert size in str(error.found)
        assert not size or "120 x 80" in str(error.found)


def test_every_mask_follows_the_image_of_its_name_or_the_first():
    tall, its_mask = (m.transpose(PIL.Image.Transpose.ROTATE_90) for m in (scene(), drawn()))
    images = {"cat": tall, "cat_mask": its_mask, "image": scene(), "mask": drawn()}
    sample = {"__key__": "a", **{name: encoded(image, "PNG") for name, image in images.items()}}
    steps = steps_of(dict.fromkeys(images, Image()), resize=40)
    found = steps(sample)
    assert list(found.sample) == list(sample)
    assert found.images["resized"] == 2  # masks are not counted
    for image, mask in (("cat", "cat_mask"), ("image", "mask")):
        assert_lies_on(pixels_of(found.sample[image]), values_of(found.sample[mask]))
    assert (opened(found.sample["cat_mask"]).size, len(steps.notes())) == ((40, 60), 2)
    assert "'cat_mask' is taken as the mask of 'cat'" in steps.notes()[0]
    image, mask = sample["image"], sample["mask"]
    found = shaped(image, mask, {"photo": Image(), "cat_mask": Image()}, resize=40).sample
    assert_lies_on(pixels_of(found["photo"]), values_of(found["cat_mask"]))
    alone = steps_of({"mask": Image()}, resize=40)  # a mask by its name, and yet an image
    assert alone({"__key__": "a", "mask": image}).images["resized"] == 1
    # A sample may lack its mask, or the image of it.
    steps = steps_of({"image": Image(optional=True), "mask": Image(optional=True)}, resize=40)
    assert list(steps({"__key__": "a", "image": image}).sample) == ["__key__", "image"]
    assert steps({"__key__": "a", "mask": mask}).sample == {"__key__": "a", "mask": mask}


MASK_NAMES = """
    mask image_mask mask.png seg.png cat.seg.png seg.jpg segm segmentation.png semantic_map
    semseg.png panoptic.png labels annotation annotation.png label.png depth depth.png depth_map
    disparity.tiff labelIds instanceIds segmentation_mask trimap.png MASK.PNG
"""
OTHER_NAMES = """
    image jpg png masked_image unlabeled.jpg instance_image target gt input.png edges.png segment7
"""


def test_names_of_masks_and_which_image_they_lie_on():
    assert [name for name in MASK_NAMES.split() if not is_mask_name(name)] == []
    assert [name for name in OTHER_NAMES.split() if is_mask_name(name)] == []
    for images, mask, expected in (
        (["left.jpg", "right.jpg"], "right.seg.png", "right.jpg"),
        (["left_image", "right_image"], "right_depth", "right_image"),
        (["photo", "image"], "seg", "image"),
        (["photo", "other"], "seg", "photo"),
        (["seal.jpg", "cat.jpg"], "seg.png", "seal.jpg"),  # the first, and not a part of a word
        (["cat.jpg", "seal.jpg"], "seg.png", "cat.jpg"),
    ):
        assert mask_fields([*images, mask], None, None) == {mask: expected}


class Samples(SequenceSource):
    """Samples of two fields, `one` and `other`."""

    def __init__(self, one: bytes, other: bytes, names: tuple[str, str] = ("one", "other")) -> None:
        sample = {"__key__": "a", **dict(zip(names, (one, other), strict=True))}
        super().__init__([sample] * 3, Schema(dict.fromkeys(names, Image())), None)


PHOTO_PNG = encoded(PIL.Image.fromarray(photo_like(1, 120, 80)), "PNG")
PHOTO_JPEG = encoded(PIL.Image.fromarray(photo_like(1, 120, 80)), "JPEG")
GREY_PHOTO = encoded(PIL.Image.fromarray(photo_like(1, 120, 80)).convert("L"), "PNG")
NARROW = encoded(PIL.Image.fromarray(photo_like(1, 1, 80)), "PNG")  # no pixel is beside another


@cases(
    "map", *(encoded(drawn(mode), "PNG") for mode in ("L", "P", "I;16")), encoded(scene(), "PNG")
)
def test_an_image_that_may_be_a_mask_is_a_question(map):
    """What is not called one: palettes, 16 bits, and large even areas, in colour too."""
    for other in (PHOTO_JPEG, PHOTO_PNG, encoded(drawn("I;16"), "PNG")):
        source = Samples(other, map)
        for options in ({"resize": 40}, {"raw": "ppm"}, {"format": "raw"}):
            with pytest.raises(UsageError, match="--masks other keeps the values"):
                steps_of(source.schema, source, **options)
        # Where nothing is done to pixels, and once there is an answer, there is no question.
        assert steps_for(source.schema, ImageOptions(), None, "array", source) is None
        assert steps_of(source.schema, source, min_size=3)
        assert steps_of(source.schema, source, resize=40, masks="other").masks == {"other": "one"}
        steps = steps_of(source.schema, source, resize=40, masks="none")
        assert (steps.masks, steps.images) == ({}, ("one", "other"))


def test_masks_without_images_are_refused_and_photos_of_any_name_are_images():
    alone = Samples(encoded(drawn(), "PNG"), encoded(drawn(), "PNG"), ("mask", "seg.png"))
    words = "no image to which they belong"
    refused(UsageError, words, steps_of, alone.schema, alone, resize=40)
    photos = Samples(PHOTO_JPEG, PHOTO_PNG, ("mask", "seg.png"))
    assert steps_of(photos.schema, photos, resize=40).images == ("mask", "seg.png")
    for other in (PHOTO_JPEG, PHOTO_PNG, GREY_PHOTO, NARROW, encoded(scene(), "JPEG")):
        source = Samples(PHOTO_JPEG, other)
        assert not steps_of(source.schema, source, resize=40).masks
    for said in ("nothing", "image,mask", ""):  # no field that can be a mask
        refused(UsageError, "masks", steps_of, BOTH, resize=40, masks=said)
    schema = {"image": Image(), "seg.npy": Array("|u1", (80, 120)), "scores": Array()}
    notes = steps_of(schema, resize=40).notes()
    assert notes == ["'seg.npy' is an array, so it is not resized"]
