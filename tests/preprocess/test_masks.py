"""Masks share the geometry of their images, and keep their values."""

from __future__ import annotations

from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest

from shardkit.errors import SampleError, UsageError
from shardkit.options import ImageOptions
from shardkit.preprocess.images import Shaped
from shardkit.preprocess.mask_fields import is_mask_name, mask_fields
from shardkit.preprocess.steps import steps_for
from shardkit.schema import Array, Image, Schema
from shardkit.sources.base import Source
from tests.codecs.sample_images import photo_like
from tests.preprocess.test_images import SWAPPED, encoded, exif, opened, photo, pixels_of

BOTH = Schema({"image": Image(), "mask": Image()})
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
    values = np.zeros(SIZE[::-1], np.uint16 if mode == "I;16" else np.uint8)
    for number, (left, top, right, bottom) in PLACES.items():
        values[top:bottom, left:right] = number * (300 if mode == "I;16" else 1)
    made = PIL.Image.fromarray(values)
    if mode == "P":
        made.putpalette(PALETTE)
    return made


PALETTE = np.random.default_rng(0).integers(0, 256, 768, np.uint8).tolist()


def shaped(
    image: bytes, mask: bytes, schema: Schema = BOTH, raw: str = "array", **options: Any
) -> Shaped:
    steps = steps_for(schema, ImageOptions(**options), None, raw)
    assert steps is not None
    values = dict(zip(schema, (image, mask), strict=True))
    return steps({"__key__": "a", **values})


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
@pytest.mark.parametrize(
    ("mode", "upscale"),
    [
        ("shorter", False), ("shorter", True), ("longer", False), ("exact", False),
        ("exact", True), ("crop", False), ("crop", True), ("pad", False), ("pad", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_a_mask_still_lies_on_what_it_was_drawn_on(
    format: str, mode: str, upscale: bool, orientation: int
) -> None:
    options = {"subsampling": 0, "quality": 98} if format == "JPEG" else {}
    image = encoded(scene(), format, exif=exif(orientation), **options)
    for size in (33, 40, 80, 200):
        found = shaped(
            image, encoded(drawn(), "PNG"), resize=size, resize_mode=mode, upscale=upscale,
            format="png",
        )  # fmt: skip
        assert_lies_on(pixels_of(found.sample["image"]), values_of(found.sample["mask"]))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_turning_alone_turns_the_mask_as_well(format: str, orientation: int) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    image = encoded(scene(), format, exif=exif(orientation), **options)
    found = shaped(image, encoded(drawn(), "PNG"), format="raw")
    upright = PIL.ImageOps.exif_transpose(opened(encoded(drawn(), "PNG", exif=exif(orientation))))
    np.testing.assert_array_equal(found.sample["mask"], upright)
    assert_lies_on(found.sample["image"], found.sample["mask"])


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_a_mask_may_be_drawn_on_the_upright_image(orientation: int) -> None:
    image = encoded(scene(), "PNG", exif=exif(orientation))
    upright = PIL.ImageOps.exif_transpose(opened(encoded(drawn(), "PNG", exif=exif(orientation))))
    for options in ({"resize": 33}, {"format": "raw"}, {"icc": "srgb"}):
        found = shaped(image, encoded(upright, "PNG"), **options)
        assert_lies_on(pixels_of(found.sample["image"]), values_of(found.sample["mask"]))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_mask_may_say_itself_how_it_is_turned(orientation: int) -> None:
    mask = encoded(drawn(), "PNG", exif=exif(orientation))
    upright = PIL.ImageOps.exif_transpose(opened(encoded(scene(), "PNG", exif=exif(orientation))))
    for image in (upright, scene()):
        said = exif(1 if image is upright else orientation)
        found = shaped(encoded(image, "PNG", exif=said), mask, resize=33)
        assert_lies_on(pixels_of(found.sample["image"]), values_of(found.sample["mask"]))
        assert not opened(found.sample["mask"]).getexif()


@pytest.mark.parametrize("mode", ["L", "P", "I;16"])
@pytest.mark.parametrize(
    "options",
    [
        {"resize": 33},
        {"resize": 200, "upscale": True},
        {"resize": 50, "resize_mode": "crop"},
        {"resize": 100, "resize_mode": "pad"},
        {"resize": 40, "format": "raw"},
    ],
)
def test_values_are_those_that_were_there(mode: str, options: dict[str, Any]) -> None:
    before = drawn(mode)
    for orientation in (1, 3, 6):
        image = encoded(scene(), "PNG", exif=exif(orientation))
        found = shaped(image, encoded(before, "PNG"), **options).sample["mask"]
        values = values_of(found)
        assert values.dtype == np.asarray(before).dtype
        assert set(np.unique(values)) <= set(np.unique(np.asarray(before)))
        assert len(np.unique(values)) == 4
        if mode == "P" and "format" not in options:
            after = opened(found)
            assert after.mode == "P"
            palette = np.array(PALETTE, np.uint8).reshape(-1, 3)
            np.testing.assert_array_equal(after.convert("RGB"), palette[values])


def test_the_nearest_pixel_is_pillows() -> None:
    noise = np.random.default_rng(0).integers(0, 256, SIZE[::-1], np.uint8)
    mask = PIL.Image.fromarray(noise)
    for size in (33, 41, 79):
        found = shaped(encoded(scene(), "PNG"), encoded(mask, "PNG"), resize=size)
        small = opened(found.sample["mask"])
        expected = mask.resize(small.size, PIL.Image.Resampling.NEAREST)
        np.testing.assert_array_equal(small, expected)


def test_masks_of_other_kinds_keep_their_values() -> None:
    """One bit a pixel, colours that are numbers, and transparency."""
    black = drawn().point(lambda value: 255 if value else 0).convert("1")
    colours = scene()
    clear = scene().convert("RGBA")
    clear.putalpha(drawn())
    for mask in (black, colours, clear):
        found = shaped(encoded(scene(), "PNG"), encoded(mask, "PNG"), resize=33).sample["mask"]
        assert opened(found).mode == mask.mode
        expected = mask.resize(opened(found).size, PIL.Image.Resampling.NEAREST)
        np.testing.assert_array_equal(values_of(found), np.asarray(expected))


def test_the_numbers_of_a_palette_with_a_hole_stay() -> None:
    mask = drawn("P")
    mask.info["transparency"] = 3
    found = shaped(encoded(scene(), "PNG"), encoded(mask, "PNG"), resize=33).sample["mask"]
    np.testing.assert_array_equal(np.unique(values_of(found)), [0, *PLACES])


def test_neither_profile_nor_background_nor_quality_is_for_masks() -> None:
    image = encoded(scene(), "JPEG", icc_profile=SWAPPED)
    mask = encoded(drawn(), "PNG", icc_profile=SWAPPED)
    found = shaped(
        image, mask, resize=100, resize_mode="pad", background="#030303", quality=1, format="jpeg"
    )
    values = values_of(found.sample["mask"])
    assert opened(found.sample["mask"]).format == "PNG"
    assert set(np.unique(values)) == {0, *PLACES}
    assert (values[:16] == 0).all()
    assert (values[-16:] == 0).all()


def test_a_mask_whose_image_passes_keeps_its_bytes() -> None:
    mask = encoded(drawn(), "PNG") + b"behind the end"
    image = encoded(scene(), "JPEG")
    for options in ({"resize": 80}, {"resize": 500}, {"icc": "srgb"}, {"quality": 95}):
        found = shaped(image, mask, **options)
        assert found.sample == {"__key__": "a", "image": image, "mask": mask}
        assert found.images["passed"] == 1


def test_a_mask_whose_image_stays_where_it_is_keeps_its_bytes() -> None:
    mask = encoded(drawn(), "PNG")
    for image, options in (
        (encoded(scene(), "JPEG", quality=95), {"quality": 20}),
        (encoded(scene(), "BMP"), {"format": "png"}),
        (encoded(scene(), "PNG", icc_profile=SWAPPED), {"icc": "srgb"}),
    ):
        found = shaped(image, mask, **options)
        assert found.sample["image"] != image
        assert found.sample["mask"] == mask


def test_a_mask_without_a_pixel_step_keeps_its_bytes() -> None:
    for orientation in (1, 6):
        image = encoded(scene(), "JPEG", exif=exif(orientation))
        mask = encoded(drawn(), "PNG", exif=exif(3))
        assert shaped(image, mask, min_size=10).sample["mask"] == mask


@pytest.mark.parametrize("mode", ["L", "P", "I;16"])
def test_raw_masks_are_arrays(mode: str) -> None:
    found = shaped(encoded(scene(), "JPEG"), encoded(drawn(mode), "PNG"), format="raw")
    np.testing.assert_array_equal(found.sample["mask"], np.asarray(drawn(mode)))
    assert found.sample["mask"].dtype == (np.uint16 if mode == "I;16" else np.uint8)
    Array().check(found.sample["mask"])


def test_a_raw_mask_of_one_bit_is_0_and_1() -> None:
    black = drawn().point(lambda value: 255 if value else 0).convert("1")
    found = shaped(encoded(scene(), "JPEG"), encoded(black, "PNG"), format="raw").sample["mask"]
    np.testing.assert_array_equal(found, np.asarray(drawn()) > 0)
    assert found.dtype == np.uint8


@pytest.mark.parametrize("mode", ["L", "P"])
def test_where_only_raw_pixels_are_without_loss_masks_are_those(mode: str) -> None:
    """As in .beton, which would make a JPEG of a PNG."""
    for options in ({"resize": 40}, {"resize": 500}, {"format": "raw"}, {"format": "jpeg"}):
        mask = encoded(drawn(mode), "PNG")
        found = shaped(encoded(scene(), "PNG"), mask, raw="ppm", **options).sample["mask"]
        small = drawn().resize(opened(found).size, PIL.Image.Resampling.NEAREST)
        assert opened(found).format == "PPM"
        np.testing.assert_array_equal(values_of(found), np.asarray(small.convert("RGB")))


def test_a_mask_of_values_that_have_no_place_there_is_an_error_of_its_sample() -> None:
    mask = encoded(drawn("I;16"), "PNG")
    for options in ({"resize": 40}, {"format": "raw"}, {"resize": 500}):
        with pytest.raises(SampleError) as error:
            shaped(encoded(scene(), "PNG"), mask, raw="ppm", **options)
        assert error.value.where == {"key": "a", "field": "mask"}


@pytest.mark.parametrize("size", [(60, 40), (80, 120), (121, 80), (1, 1)])
def test_a_mask_of_another_size_is_an_error_of_its_sample(size: tuple[int, int]) -> None:
    mask = encoded(PIL.Image.new("L", size), "PNG")
    for options in ({"resize": 33}, {"format": "raw"}):
        with pytest.raises(SampleError) as error:
            shaped(encoded(scene(), "JPEG"), mask, **options)
        assert error.value.where == {"key": "a", "field": "mask"}
        assert f"{size[0]} x {size[1]}" in str(error.value.found)
        assert "120 x 80" in str(error.value.found)


def test_a_damaged_mask_is_an_error_of_its_sample() -> None:
    whole = encoded(drawn(), "PNG")
    flipped = whole.replace(whole[60:61], bytes([whole[60] ^ 1]), 1)
    for mask in (whole[: len(whole) // 2], b"text", b"", flipped):
        with pytest.raises(SampleError) as error:
            shaped(encoded(scene(), "JPEG"), mask, resize=33)
        assert error.value.where == {"key": "a", "field": "mask"}


def test_every_mask_follows_the_image_of_its_name() -> None:
    schema = Schema({"cat": Image(), "cat_mask": Image(), "image": Image(), "mask": Image()})
    wide, tall = scene(), scene().transpose(PIL.Image.Transpose.ROTATE_90)
    sample = {
        "__key__": "a",
        "cat": encoded(tall, "PNG"),
        "cat_mask": encoded(drawn().transpose(PIL.Image.Transpose.ROTATE_90), "PNG"),
        "image": encoded(wide, "PNG"),
        "mask": encoded(drawn(), "PNG"),
    }
    steps = steps_for(schema, ImageOptions(resize=40), None, "array")
    assert steps is not None
    found = steps(sample)
    assert list(found.sample) == list(sample)
    assert found.images["resized"] == 2  # masks are not counted
    for image, mask in (("cat", "cat_mask"), ("image", "mask")):
        assert_lies_on(pixels_of(found.sample[image]), values_of(found.sample[mask]))
    assert opened(found.sample["cat_mask"]).size == (40, 60)
    assert len(steps.notes()) == 2
    assert "'cat_mask' is taken as the mask of 'cat'" in steps.notes()[0]


def test_a_mask_of_no_image_of_its_name_follows_the_first_and_a_name_alone_is_a_image() -> None:
    found = shaped(
        encoded(scene(), "PNG"),
        encoded(drawn(), "PNG"),
        Schema({"photo": Image(), "cat_mask": Image()}),
        resize=40,
    )
    assert_lies_on(pixels_of(found.sample["photo"]), values_of(found.sample["cat_mask"]))
    alone = steps_for(Schema({"mask": Image()}), ImageOptions(resize=40), None, "array")
    assert alone is not None
    assert alone({"__key__": "a", "mask": encoded(scene(), "PNG")}).images["resized"] == 1


def test_a_sample_may_lack_its_mask_or_the_image_of_it() -> None:
    schema = Schema({"image": Image(optional=True), "mask": Image(optional=True)})
    steps = steps_for(schema, ImageOptions(resize=40), None, "array")
    assert steps is not None
    image, mask = encoded(scene(), "PNG"), encoded(drawn(), "PNG")
    assert list(steps({"__key__": "a", "image": image}).sample) == ["__key__", "image"]
    assert steps({"__key__": "a", "mask": mask}).sample == {"__key__": "a", "mask": mask}


def test_masks_are_not_images_to_filters() -> None:
    mask = encoded(PIL.Image.new("L", (3, 2)), "PNG")
    found = shaped(encoded(photo(), "PNG"), mask, min_size=50)
    assert found.sample["mask"] == mask


# --- which fields are masks ----------------------------------------------------------------------

MASK_NAMES = [
    "mask",
    "image_mask",
    "mask.png",
    "seg.png",
    "cat.seg.png",
    "seg.jpg",
    "segm",
    "segmentation.png",
    "semantic_map",
    "semseg.png",
    "panoptic.png",
    "labels",
    "annotation",
    "annotation.png",
    "label.png",
    "depth",
    "depth.png",
    "depth_map",
    "disparity.tiff",
    "labelIds",
    "instanceIds",
    "segmentation_mask",
    "trimap.png",
]
OTHER_NAMES = [
    "image",
    "jpg",
    "png",
    "masked_image",
    "unlabeled.jpg",
    "instance_image",
    "target",
    "gt",
    "input.png",
    "edges.png",
    "segment7",
]


@pytest.mark.parametrize("name", MASK_NAMES)
def test_names_of_masks(name: str) -> None:
    assert is_mask_name(name)
    assert is_mask_name(name.upper() if "." in name else name)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_others(name: str) -> None:
    assert not is_mask_name(name)


@pytest.mark.parametrize("name", ["seg.png", "label.png", "depth.png", "annotation"])
@pytest.mark.parametrize("mode", ["L", "P", "I;16"])
def test_a_mask_of_any_usual_name_keeps_its_values(name: str, mode: str) -> None:
    image, mask = encoded(scene(), "JPEG"), encoded(drawn(mode), "PNG")
    schema = Schema({"jpg": Image(), name: Image()})
    small = shaped(image, mask, schema, resize=40).sample[name]
    assert opened(small).size == (60, 40)
    np.testing.assert_array_equal(np.unique(values_of(small)), np.unique(np.asarray(drawn(mode))))


@pytest.mark.parametrize(
    ("images", "mask", "expected"),
    [
        (["left.jpg", "right.jpg"], "right.seg.png", "right.jpg"),
        (["left_image", "right_image"], "right_depth", "right_image"),
        (["photo", "image"], "seg", "image"),
        (["photo", "other"], "seg", "photo"),
        (["seal.jpg", "cat.jpg"], "seg.png", "seal.jpg"),  # the first, and not a part of a word
        (["cat.jpg", "seal.jpg"], "seg.png", "cat.jpg"),
    ],
)
def test_which_image_a_mask_lies_on(images: list[str], mask: str, expected: str) -> None:
    assert mask_fields([*images, mask], None, None) == {mask: expected}


class Samples(Source):
    """Samples of two fields, `one` and `other`."""

    def __init__(self, one: bytes, other: bytes, names: tuple[str, str] = ("one", "other")) -> None:
        super().__init__()
        self.schema = Schema(dict.fromkeys(names, Image()))
        self._values = (one, other)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"__key__": str(index), **dict(zip(self.schema, self._values, strict=True))}

    def sizes(self) -> np.ndarray[Any, Any]:
        return np.ones(3, np.int64)

    def select(self, indices: Any) -> Samples:
        return self

    def fingerprint(self) -> None:
        return None

    def name(self, index: int) -> str:
        return str(index)


PHOTO_PNG = encoded(PIL.Image.fromarray(photo_like(1, 120, 80)), "PNG")
PHOTO_JPEG = encoded(PIL.Image.fromarray(photo_like(1, 120, 80)), "JPEG")
GREY_PHOTO = encoded(PIL.Image.fromarray(photo_like(1, 120, 80)).convert("L"), "PNG")
NARROW = encoded(PIL.Image.fromarray(photo_like(1, 1, 80)), "PNG")  # no pixel is beside another


@pytest.mark.parametrize(
    "map", [encoded(drawn(mode), "PNG") for mode in ("L", "P", "I;16")] + [encoded(scene(), "PNG")]
)
def test_an_image_that_may_be_a_mask_is_a_question(map: bytes) -> None:
    """What is not called one: palettes, 16 bits, and large even areas, in colour too."""
    for other in (PHOTO_JPEG, PHOTO_PNG, encoded(drawn("I;16"), "PNG")):
        source = Samples(other, map)
        for options, raw in (({"resize": 40}, "array"), ({}, "ppm"), ({"format": "raw"}, "array")):
            with pytest.raises(UsageError, match="--masks other keeps the values"):
                steps_for(source.schema, ImageOptions(**options), None, raw, source)
        # Where nothing is done to pixels, and once there is an answer, there is no question.
        assert steps_for(source.schema, ImageOptions(), None, "array", source) is None
        assert steps_for(source.schema, ImageOptions(min_size=3), None, "array", source)
        said = ImageOptions(resize=40, masks="other")
        steps = steps_for(source.schema, said, None, "array", source)
        assert steps is not None
        assert steps.masks == {"other": "one"}
        steps = steps_for(
            source.schema, ImageOptions(resize=40, masks="none"), None, "array", source
        )
        assert steps is not None
        assert (steps.masks, steps.images) == ({}, ("one", "other"))


@pytest.mark.parametrize(
    "other", [PHOTO_JPEG, PHOTO_PNG, GREY_PHOTO, NARROW, encoded(scene(), "JPEG")]
)
def test_two_photos_are_images(other: bytes) -> None:
    source = Samples(PHOTO_JPEG, other)
    steps = steps_for(source.schema, ImageOptions(resize=40), None, "array", source)
    assert steps is not None
    assert not steps.masks


def test_masks_without_images_are_refused_and_images_of_such_names_are_not() -> None:
    alone = Samples(encoded(drawn(), "PNG"), encoded(drawn(), "PNG"), ("mask", "seg.png"))
    with pytest.raises(UsageError, match="no image to which they belong"):
        steps_for(alone.schema, ImageOptions(resize=40), None, "array", alone)
    photos = Samples(PHOTO_JPEG, PHOTO_PNG, ("mask", "seg.png"))
    steps = steps_for(photos.schema, ImageOptions(resize=40), None, "array", photos)
    assert steps is not None
    assert steps.images == ("mask", "seg.png")


@pytest.mark.parametrize("said", ["nothing", "image,mask", ""])
def test_fields_that_cannot_be_masks_are_refused(said: str) -> None:
    with pytest.raises(UsageError, match="masks"):
        steps_for(BOTH, ImageOptions(resize=40, masks=said), None, "array")


def test_an_array_that_is_called_a_mask_and_stays_as_it_is_is_named() -> None:
    schema = Schema({"image": Image(), "seg.npy": Array("|u1", (80, 120)), "scores": Array()})
    steps = steps_for(schema, ImageOptions(resize=40), None, "array")
    assert steps is not None
    assert steps.notes() == ["'seg.npy' is an array, so it is not resized"]
