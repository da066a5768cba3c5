"""Boxes while loading: what is painted stays in its box through crop, size, flip and margins."""

from typing import Any

import numpy as np
import pytest
import torch

import shardkit
from shardkit import CenterCrop, Decode, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize
from shardkit.codecs.crop import has_crop_many
from shardkit.errors import SampleError, UsageError
from shardkit.schema import Array, Schema
from shardkit.stream.collate import pad_collate
from shardkit.torch import Loader
from shardkit.transforms import Transforms
from tests.boxed import COLOURS, coco, painted_box, some_painted
from tests.preprocess.test_boxes import KINDS, assert_boxed, stored_sample
from tests.sources.real import cases, refused
from tests.transforms.chunks import applied, directly, draws_of

FIELDS = ("image", "boxes", "categories", "segmentation", "keypoints")
SCHEMA = Schema(KINDS)


CHAINS: dict[str, list[Any]] = {
    "decode": [Decode()],
    "crop": [RandomResizedCrop(48, scale=(0.1, 1))],
    "wide crop": [RandomResizedCrop((40, 90), scale=(0.05, 0.4)), RandomHorizontalFlip()],
    "resize": [Resize(50)],
    "flip": [RandomHorizontalFlip(1)],
    "exact": [Resize((33, 70)), RandomHorizontalFlip()],
    "middle": [Resize(60), CenterCrop(40), RandomHorizontalFlip()],
    "margins": [RandomHorizontalFlip(), CenterCrop((200, 170))],
    "two": [RandomHorizontalFlip(), RandomResizedCrop(64), CenterCrop(70), RandomHorizontalFlip()],
    "jobs": [Resize(90), CenterCrop(80), RandomResizedCrop(50), CenterCrop(60)],
    "function": [Decode(), lambda **values: values, RandomHorizontalFlip(), CenterCrop(50)],
}


@pytest.mark.parametrize("name", CHAINS)
def test_what_is_painted_stays_in_its_box(name):
    """Of every orientation; objects without a box are not to be seen, but at a crop's edge."""
    images = some_painted(32, 7, range(1, 9))
    samples = [stored_sample(image, ("PNG", "JPEG")[n // 8 % 2]) for n, image in enumerate(images)]
    made = applied({FIELDS: CHAINS[name]}, samples, SCHEMA, seed=len(name))
    gone = seen = 0
    for sample, image in zip(made, images, strict=True):
        boxes = sample["boxes"]
        assert (boxes.dtype, boxes.shape) == (np.float32, (len(sample["categories"]), 4))
        assert_boxed(sample["image"], sample, image, 3.5, least=6, edge=3)  # edges are blurred
        gone += len(image.boxes) - len(boxes)
        seen += (boxes[:, 2:] - boxes[:, :2] >= 6).all(axis=1).sum()
    assert seen > 10
    assert bool(gone) == (name in ("crop", "wide crop", "middle", "two", "jobs", "function"))


@pytest.mark.parametrize("fields", [FIELDS, "image"])
@pytest.mark.parametrize("steps", [Decode(), RandomHorizontalFlip(1), CenterCrop((300, 300))])
def test_without_resizing_boxes_are_exact(steps, fields):
    images = some_painted(24, 3, range(1, 9))
    made = applied({fields: steps}, [*map(stored_sample, images)], SCHEMA)
    for sample, image in zip(made, images, strict=True):
        assert len(sample["boxes"]) == len(image.boxes)
        for box, colour in zip(sample["boxes"].tolist(), COLOURS, strict=False):
            assert painted_box(sample["image"], colour) == tuple(box)


def test_decoding_turns_boxes_and_leaves_masks_encoded():
    """As EXIF turns the image; a mask may be a picture to be decoded by its own transform."""
    kinds = Schema({"image": shardkit.Image(), "mask": shardkit.Image(), **SCHEMA})
    sample = stored_sample(some_painted(8, 3, range(1, 9))[5])
    sample["mask"] = sample["image"]
    (both,) = applied({FIELDS: Decode()}, [sample], SCHEMA)
    for mask in ({}, {"mask": Decode()}):
        (made,) = applied({"image": Decode(), **mask}, [sample], kinds)
        assert isinstance(made["mask"], bytes) == (not mask)
        assert made["boxes"].tolist() == both["boxes"].tolist() != sample["boxes"].tolist()
        assert made["segmentation"] == both["segmentation"]


def test_boxes_with_masks_and_pixels(tmp_path):
    """A mask of the objects goes with them; raw pixels as images do."""
    kinds = {"image": Array("|u1", (None, None, 3)), "mask": Array("|i4", (None, None))}
    kinds |= {"boxes": Array("<f8", (None, 4)), "scores": Array("<f4", (None,))}
    samples = []
    for image in some_painted(8, 5):
        pixels = applied({FIELDS: Decode()}, [stored_sample(image)], SCHEMA)[0]["image"]
        mask = np.zeros(pixels.shape[:2], np.int32)
        for number, (x0, y0, x1, y1) in enumerate(image.boxes):
            mask[y0:y1, x0:x1] = number + 1
        boxes = np.array(image.boxes, np.float64).reshape(-1, 4)
        scores = np.arange(1, len(boxes) + 1, dtype=np.float32)
        samples.append({"image": pixels, "mask": mask, "boxes": boxes, "scores": scores})
    shardkit.convert(samples, "arrow", tmp_path / "out", schema=kinds)
    steps = [RandomResizedCrop(64), RandomHorizontalFlip(), Normalize((0, 0, 0), (1, 1, 1))]
    dataset = shardkit.open(tmp_path / "out", transforms={tuple(kinds): steps})
    seen = 0
    for sample in [dataset[n] for n in range(8) for _ in range(6)]:  # random each time
        for number, box in zip(sample["scores"], sample["boxes"], strict=True):
            if (box[2:] - box[:2] >= 6).all():
                rows, columns = np.nonzero(sample["mask"] == number)
                drawn = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                assert np.abs(drawn - box).max() <= 3
                seen += 1
    assert seen > 10


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    root = tmp_path_factory.mktemp("boxes")
    shardkit.convert(
        coco(root / "coco", some_painted(12, 2), shapes=True), "wds", root / "out", workers=0
    )
    return root / "out/train"


CROP = [RandomResizedCrop(32), RandomHorizontalFlip()]
ALL = ("image", "boxes", "categories", "iscrowd", "segmentation", "keypoints")


def test_batches_have_a_list_of_boxes_or_padded_ones(shards):
    """One tensor for each sample, as detectors take them, of any batch and number of threads."""

    def load(**options):
        found = {}
        for batch in Loader(shards, transforms={ALL: CROP}, **options):
            assert batch["image"].shape[1:] == (3, 32, 32)
            for name, kind in (("boxes", torch.float32), ("categories", torch.int64)):
                assert isinstance(batch[name], list)
                assert all(value.dtype == kind for value in batch[name])
            kinds = [len(categories) for categories in batch["categories"]]
            assert [boxes.shape for boxes in batch["boxes"]] == [(count, 4) for count in kinds]
            assert [len(rows) for rows in batch["segmentation"]] == kinds
            assert [rows.shape for rows in batch["keypoints"]] == [(n, 4, 3) for n in kinds]
            assert all(isinstance(rows, list) for rows in batch["segmentation"])
            values = [boxes.tolist() for boxes in batch["boxes"]]
            found |= zip(batch["__key__"], values, strict=True)
        return found

    assert load(batch_size=4, threads=0) == load(batch_size=3, threads=2)

    def one(**values):
        return {n: value if n == "image" else value[:0] for n, value in values.items()}

    # Also where all samples have as many, so that their type never changes.
    for options in ({"batch_size": 1, "fields": ["boxes"]}, {"batch_size": 4}):
        more = {} if "fields" in options else {"transforms": {ALL: [CenterCrop(32), one]}}
        assert isinstance(next(iter(Loader(shards, **options, **more)))["boxes"], list)
    options = {"batch_size": 4, "transforms": {ALL: CROP}}
    collate = pad_collate({"categories": -1, "keypoints": 0}, field="boxes")
    for batch in Loader(shards, collate=collate, **options):
        number = max(batch["lengths"].tolist())
        assert batch["boxes"].shape == (4, number, 4)
        assert batch["categories"].shape == batch["attention_mask"].shape == (4, number)
        assert ((batch["categories"] >= 0) == batch["attention_mask"]).all()
        assert (batch["boxes"][~batch["attention_mask"]] == 0).all()
        assert batch["image"].shape == (4, 3, 32, 32)
        assert batch["keypoints"].shape == (4, number, 4, 3)
    collate = pad_collate({"keypoints": 0}, field="boxes", length=9)
    fixed = Loader(shards, collate=collate, **options)
    assert next(iter(fixed))["boxes"].shape == (4, 9, 4)
    unlike = [{"boxes": np.zeros((2, 4), np.float32)}, {"boxes": np.zeros((2, 5), np.float32)}]
    error = refused(SampleError, "differ in shape or type", pad_collate(field="boxes"), unlike)
    assert error.expected == "an array of float32 of shape (n, 4)"


def test_what_goes_with_boxes_is_named_unless_nothing_drops_them(shards):
    some = {"batch_size": 4, "fields": ["image", "boxes", "categories", "iscrowd", "image_id"]}
    for fields, message in (
        (("image", "boxes"), "'categories' also has a row for each"),
        (("image", "boxes", "categories"), "'iscrowd' also has a row for each"),
        (("image", "categories"), "'categories' cannot be the mask of an image, or boxes"),
        (("image", "boxes", "image_id"), "'image_id' cannot be the mask of an image"),
    ):
        refused(UsageError, message, Loader, shards, **some, transforms={fields: CROP})
    transforms = {ALL[:4]: CROP}
    message = "'segmentation' also has a row for each"
    refused(UsageError, message, Loader, shards, batch_size=4, transforms=transforms)
    transforms = {("image", "boxes"): RandomHorizontalFlip()}
    message = "not what is on it: 'segmentation'"
    refused(UsageError, message, Loader, shards, batch_size=4, transforms=transforms)
    schema = Schema({**SCHEMA, "others": Array("<f4", (None, 4))})
    refused(UsageError, "one field of boxes", Transforms, {(*FIELDS, "others"): CROP}, schema)
    transforms = {("image", "boxes"): [Resize((20, 30)), RandomHorizontalFlip()]}
    for batch in Loader(shards, **some, transforms=transforms):
        assert [*map(len, batch["boxes"])] == [*map(len, batch["categories"])]
    options = {"transforms": {("image", "boxes"): CROP}, "fields": ["image", "boxes"]}
    assert len(next(iter(Loader(shards, batch_size=4, **options)))["boxes"]) == 4


@cases(
    "change field message",
    ({"boxes": np.zeros((2, 4), int)}, "boxes", "not boxes"),
    ({"boxes": np.zeros((2, 3))}, "boxes", "not boxes"),
    ({"boxes": None}, "boxes", "not boxes"),
    ({"categories": np.zeros(7, int)}, "categories", "differs from the number of boxes"),
    ({"segmentation": [None]}, "segmentation", "differs from the number of boxes"),
    ({"segmentation": {}}, "segmentation", "not the segmentation of objects"),
    ({"segmentation": [[[1]], None, None]}, "segmentation", "a polygon of 1 numbers"),
    ({"segmentation": [{"size": [1, 1], "counts": [1]}]}, "segmentation", "1 x 1 pixels on an"),
)
def test_values_that_do_not_fit_are_errors_of_their_sample(change, field, message):
    schema = Schema({**KINDS, "boxes": Array(), "categories": Array()})
    good, transforms = stored_sample(some_painted(4)[3], "JPEG"), Transforms({FIELDS: CROP}, schema)
    sample = {**good, **change}
    errors = transforms.apply([sample], draws_of(1), {})
    assert message in str(errors[0])
    assert errors[0].where["field"] == field
    if has_crop_many():
        absent = {name: value for name, value in good.items() if name != field}
        done = directly(transforms, [good, sample, absent], draws_of(3))[1]
        assert done.tolist() == [True, False, False]
