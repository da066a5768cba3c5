"""Boxes while converting: what is painted stays in its box, wherever the image goes."""

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

import shardkit
from shardkit import Array, Image, ImageOptions, Json, SampleError, Schema, UsageError
from shardkit.codecs.boxes import TURNED_BACK, boxes_in, turned_boxes
from shardkit.codecs.window import Window
from shardkit.preprocess.images import Shaped
from shardkit.sources.sequence import SequenceSource
from tests.boxed import (
    COLOURS,
    Painted,
    coco,
    outline,
    painted_box,
    points_of,
    some_painted,
    turned_back,
)
from tests.conftest import examples, few
from tests.preprocess.test_images import steps_of
from tests.sources.real import cases, convert, refused, verified

NUMBERS = Array("<i8", (None,))
KINDS = {"image": Image(), "boxes": Array("<f4", (None, 4)), "categories": NUMBERS}
KINDS |= {"segmentation": Json(), "keypoints": Array("<f4", (None, 4, 3))}


def stored_sample(image: Painted, format: str = "PNG") -> dict[str, Any]:
    """A sample as it is stored: boxes in pixels of the stored image."""
    upright = np.array(image.boxes, np.float32).reshape(-1, 4)
    boxes = turned_boxes(upright, TURNED_BACK[image.orientation], image.size)
    sample = {"__key__": image.name, "image": image.file(format), "boxes": boxes}
    size = image.size if image.orientation < 5 else image.size[::-1]
    whole = boxes.astype(int).tolist()
    keypoints = np.array([points_of(box) for box in whole], np.float32).reshape(-1, 4, 3)
    keypoints[:, :3, :2] += 0.5
    outlines = [outline(box, size, (0, 3, 4)[n % 3]) for n, box in enumerate(whole)]
    shapes = {"segmentation": outlines, "keypoints": keypoints}
    return {**sample, "categories": np.arange(len(upright)), **shapes}


def converted(sample: dict[str, Any], **options: Any) -> Shaped:
    return steps_of(KINDS, **options)(sample)


def assert_painted(sample: dict[str, Any], image: Painted, tolerance: float) -> None:
    """All objects that are painted have their boxes, and those that are gone have none."""
    with Pillow.open(io.BytesIO(sample["image"])) as file:
        assert file.getexif().get(0x0112, 1) == 1
        assert_boxed(np.asarray(file.convert("RGB")), sample, image, tolerance)


def assert_boxed(pixels, sample, image: Painted, tolerance: float, least=3, edge=0) -> None:
    """`edge`: what may be left of objects without a box at the edge of a crop."""
    height, width, _ = pixels.shape
    boxes = dict(zip(sample["categories"].tolist(), sample["boxes"].tolist(), strict=True))
    for number in range(len(image.boxes)):
        seen = painted_box(pixels, COLOURS[number])
        if number not in boxes:
            assert seen is None or min(seen[2] - seen[0], seen[3] - seen[1]) < edge
            continue
        x0, y0, x1, y1 = boxes[number]
        assert 0 <= x0 < x1 <= width
        assert 0 <= y0 < y1 <= height
        if min(x1 - x0, y1 - y0) >= least:  # else resizing blends it with what is around
            assert seen is not None
            assert np.abs(np.array(seen) - boxes[number]).max() <= tolerance
            if "segmentation" in sample:
                assert_shaped(pixels, sample, number, tolerance)


def assert_shaped(pixels: Any, sample: dict[str, Any], number: int, tolerance: float) -> None:
    """The mask of an object fills its box, and points on the object have its colour."""
    (row,) = np.flatnonzero(sample["categories"] == number)
    box = sample["boxes"][row]
    mask = shardkit.masks(sample["segmentation"], *pixels.shape[:2])[row]
    rows, columns = np.nonzero(mask)
    drawn = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    assert np.abs(drawn - box).max() <= tolerance + 1
    assert mask.sum() == (drawn[2] - drawn[0]) * (drawn[3] - drawn[1])
    assert (sample["keypoints"][row, 3] == 0).all()
    for x, y, visibility in sample["keypoints"][row, :3].tolist():
        if visibility == 0:  # outside of a crop
            continue
        assert (box[:2] <= (x, y)).all()
        assert (box[2:] >= (x, y)).all()
        if (np.abs(box - [x, y, x, y]) > 1 + tolerance).all():  # else it is blended
            assert (np.abs(pixels[int(y), int(x)].astype(int) - COLOURS[number]) < 100).all()
            assert mask[int(y), int(x)]


SIDES = st.integers(40, 130)


@st.composite
def painted_images(draw: Any) -> Painted:
    """Up to 3 objects, side by side, in an image of any size and orientation."""
    width, height = draw(SIDES), draw(SIDES)
    edges = sorted(draw(st.lists(st.integers(0, width), min_size=6, max_size=6, unique=True)))
    boxes = []
    for n in range(draw(st.integers(0, 3))):
        y0 = draw(st.integers(0, height - 1))
        boxes.append((edges[2 * n], y0, edges[2 * n + 1], draw(st.integers(y0 + 1, height))))
    return Painted("0", (width, height), boxes, ["person"] * len(boxes), draw(st.integers(1, 8)))


@settings(max_examples=examples(30))
@given(
    painted_images(),
    st.sampled_from(["shorter", "longer", "exact", "crop", "pad"]),
    st.integers(20, 160),
    st.booleans(),
)
def test_what_is_painted_stays_in_its_box(image, mode, side, upscale):
    """Through every orientation, and every way of resizing. Blended edges may seem a pixel off."""
    shaped = converted(stored_sample(image), resize=side, resize_mode=mode, upscale=upscale)
    scale = max(side / min(image.size), 1) if upscale else 1
    assert_painted(shaped.sample, image, 1 + scale)
    gone = len(image.boxes) - len(shaped.sample["boxes"])
    assert sum(shaped.ignored.values()) == gone
    assert gone == 0 or mode == "crop"


@pytest.mark.parametrize("mode", ["shorter", "crop", "pad"])
def test_turning_cutting_and_padding_are_exact(mode):
    for image in some_painted(16, 3, range(1, 9)):
        side = {"shorter": 500, "crop": min(image.size), "pad": max(image.size)}[mode]
        options = {"resize_mode": mode, "format": "png", "icc": "srgb"}
        assert_painted(converted(stored_sample(image), resize=side, **options).sample, image, 0)


def test_turning_there_and_back_gives_the_same_and_a_crop_drops_boxes_with_their_rows():
    size, boxes = (80, 20), np.array([[1, 2, 30, 14], [0, 0, 80, 20]], np.float32)
    pixels = np.zeros((20, 80, 3), np.uint8)
    pixels[2:14, 1:30] = COLOURS[0]
    for orientation in range(1, 9):
        stored = size if orientation < 5 else size[::-1]
        back = turned_boxes(boxes, TURNED_BACK[orientation], size)
        assert np.array_equal(turned_boxes(back, orientation, stored), boxes)
        assert painted_box(turned_back(pixels, orientation), COLOURS[0]) == tuple(back[0])
    # What touches the edge from outside is gone; what reaches in is clipped.
    window = Window.whole(100, 50)
    window.cut(25, 0, 50, 50)
    boxes = np.array([[0, 0, 25, 9], [0, 0, 26, 9], [75, 0, 90, 9], [30, 10, 80, 60]], np.float32)
    made, kept = boxes_in(boxes, window)
    assert kept.tolist() == [False, True, False, True]
    assert made.tolist() == [[0, 0, 1, 9], [5, 10, 50, 50]]
    assert boxes_in(boxes[:0], window)[0].shape == (0, 4)


def test_an_image_that_passes_leaves_its_boxes_alone():
    """Also those that are clipped otherwise, or have no area: nothing is looked at twice."""
    sample = stored_sample(some_painted(4)[3])
    sample["boxes"] = np.array([[-5, 0, 900, 3], [1, 1, 1, 1], [0, 0, 1, 1]], np.float64)
    steps = steps_of({**KINDS, "boxes": Array("<f8", (None, 4))}, icc="srgb")
    assert steps(sample).sample["boxes"] is sample["boxes"]
    shaped = converted(sample, resize=20)
    assert shaped.sample["boxes"].dtype == np.float64
    assert shaped.sample["categories"].tolist() == [0, 2]
    assert shaped.ignored == {"boxes of which a crop left nothing": 1}


@pytest.mark.parametrize(
    "to", few(["wds", "lmdb", "arrow", "parquet", "hf", "beton"], "lmdb", "beton")
)
def test_boxes_through_every_format_with_and_without_steps(tmp_path, to):
    """From COCO to a format, moved there; and on to another, moved again."""
    images = some_painted(7, 3, (1, 5, 6, 7, 8))
    a, b, c = (tmp_path / name for name in "abc")
    convert(coco(tmp_path / "coco", images, shapes=True), a, to)
    convert(a, b, image=ImageOptions(icc="srgb"))
    verified(b, c, to, image=ImageOptions(resize=50, resize_mode="crop"))
    for folder in (b, c):
        dataset = shardkit.open(folder / "train")
        assert dataset.class_names["categories"] == ("person", "bottle", "toothbrush")
        lost = dict(dataset.manifest.ignored).get("boxes of which a crop left nothing", 0)
        boxes = sum(len(sample["boxes"]) for sample in dataset)
        assert boxes + lost == sum(len(image.boxes) for image in images)
        for sample, image in zip(dataset, images, strict=True):
            assert len(sample["boxes"]) == len(sample["categories"]) == len(sample["iscrowd"])
            if folder == b:
                sample["categories"] = np.arange(len(sample["boxes"]))
                assert_painted(sample, image, 3 if to == "beton" else 0)


def test_which_fields_are_boxes_and_which_cannot_be():
    boxes = Array("<f4", (None, 4))
    schema = {"image": Image(), "boxes": boxes, "iscrowd": NUMBERS, "tokens": NUMBERS}
    steps = steps_of(schema, resize=9)
    assert steps.boxes["boxes"] == ("image", ("iscrowd",))
    assert "'boxes' is taken as boxes on 'image': x0, y0, x1, y1 in pixels" in steps.notes()[0]
    assert steps.notes()[0].endswith("along with 'iscrowd'")
    for options in ({"min_size": 3}, {"check": "decode"}):
        assert not steps_of(schema, **options).notes()
    assert not steps_of(schema, resize=9, boxes="none").boxes
    kinds = {"box": Array("<f4", (None, 3)), "inbox": Array("<f4", (None, 4)), "objects": Json()}
    schema = {"image": Image(), **kinds}  # of which none is asked about
    assert steps_of(schema, resize=9).notes() == ["'objects' is JSON: boxes in it are not moved"]
    for name in ("box", "objects", "image", "other"):
        refused(UsageError, f"'{name}' is not a field of boxes", steps_of, schema, boxes=name)
    steps = steps_of({"image": Image(), "bbox": Array()}, resize=30, boxes="bbox")
    for value in (np.zeros((2, 5), np.float32), np.zeros((2, 4), int), np.zeros(4)):
        sample = {**stored_sample(some_painted(1)[0]), "bbox": value}
        refused(SampleError, "the value is not boxes", steps, sample)


@cases(
    "name kind",
    ("bbox", Array("<f4", (None, 4))),
    ("gt_bboxes", Array("<f8", (None, 4))),
    ("boxes", Array("<i8", (None, 4))),
    ("boxes", Array()),
    ("boxes", Array("<f4", (None, None))),
    ("box", Array("<f4", (4,))),
)
def test_what_may_be_boxes_is_asked_about(name, kind):
    schema = {"image": Image(), name: kind}
    error = refused(UsageError, f"'{name}' may be boxes", steps_of, schema, resize=9)
    assert f"--boxes {name}" in str(error.fix)
    for options in ({"min_size": 3}, {"resize": 9, "boxes": "none"}):
        assert not steps_of(schema, **options).boxes
    assert list(steps_of(schema, resize=9, boxes=name).boxes) == [name]


def test_arrays_with_as_many_rows_go_with_the_boxes():
    """A few samples tell; one that differs later is an error, and not cut."""
    samples = [stored_sample(image) for image in some_painted(5)]
    for sample in samples:
        sample["scores"] = sample["categories"] / 8
        sample["tokens"] = np.arange(7)
        sample["points"] = np.repeat(sample["boxes"][:, None], 2, axis=1)
    points = Array("<f4", (None, 2, 4))
    kinds = {**KINDS, "scores": Array("<f8", (None,)), "tokens": NUMBERS, "points": points}
    source = SequenceSource(samples, Schema(kinds), None)
    steps = steps_of(kinds, source, resize=30, resize_mode="crop")
    assert {*steps.boxes["boxes"].others} == {*KINDS, "scores", "points"} - {"image", "boxes"}
    moved = samples[3]["boxes"] - [[400, 0, 400, 0], *[[0] * 4] * 2]
    found = steps({**samples[3], "boxes": moved}).sample
    assert found["categories"].tolist()[0] != 0
    assert np.array_equal(found["scores"] * 8, found["categories"])
    assert (len(found["points"]), len(found["tokens"])) == (len(found["boxes"]), 7)
    with pytest.raises(SampleError, match="the field has more or fewer rows") as error:
        steps({**samples[3], "scores": np.arange(9)})
    assert error.value.where["field"] == "scores"


def halved(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform that sees boxes where the pixels are, and moves both, without other shapes."""
    del sample["segmentation"], sample["keypoints"]
    pixels, boxes = sample["image"], sample["boxes"]
    for box, colour in zip(boxes.astype(int), COLOURS, strict=False):
        assert painted_box(pixels, colour) == tuple(box)
    return {**sample, "image": pixels[::2, ::2], "boxes": boxes / 2}


def test_a_transform_gets_boxes_on_the_pixels_that_it_gets(tmp_path):
    images = some_painted(7, 5, range(1, 9))
    samples, out = [stored_sample(image) for image in images], tmp_path / "out"
    shardkit.convert(samples, "wds", out, schema=Schema(KINDS), transform=halved)
    for sample, image in zip(shardkit.open(out), images, strict=True):
        assert_painted(sample, image, 1)


def test_options_decide_whether_a_run_is_the_same(tmp_path):
    root, out = coco(tmp_path / "coco", some_painted(4)), tmp_path / "out"
    crop = {"resize": 50, "resize_mode": "crop"}
    first = verified(root, out, image=ImageOptions(**crop))
    assert not first.already_complete
    assert any("'boxes' is taken as boxes" in note for note in first.notes)
    assert convert(root, out, image=ImageOptions(**crop)).already_complete
    other = ImageOptions(**crop, boxes="none")
    refused(shardkit.OutputError, "another dataset", convert, root, out, image=other)
