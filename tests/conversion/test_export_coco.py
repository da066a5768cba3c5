"""Exports to COCO: what pycocotools reads, and what they become when they are converted again."""

import io
import json

import numpy as np
import pytest
from PIL import Image

import shardkit
from shardkit.errors import SampleError, UsageError
from tests.boxed import CATEGORIES, coco, some_painted


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Two splits, with objects of all kinds, keypoints and captions."""
    root = tmp_path_factory.mktemp("coco")
    train, val = some_painted(12, 2), some_painted(5, 3)
    shardkit.convert(coco(root / "coco", train, val, shapes=True), "wds", root / "d", workers=0)
    shardkit.export(root / "d", "coco", root / "x")
    return root


KINDS = {
    "image_id": shardkit.Int(),
    "segmentation": shardkit.Json(),
    "captions": shardkit.Json(),
    "keypoints": shardkit.Array("<f4", (None, 2, 3)),
}
ONE = {"boxes": np.array([[1, 2, 11, 12]], np.float32), "categories": np.array([0])}


def boxed(path, rows, classes=("a", "b"), **more):
    """A dataset of one image per row, with its boxes and categories."""
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, "JPEG", exif=more.pop("exif", b""))
    kinds = {
        "boxes": shardkit.Array("<f4", (None, 4)),
        "categories": shardkit.Array("<i8", (None,)),
    }
    schema = {"image": shardkit.Image(), **kinds, **more}
    names = {"categories": classes} if classes else {}
    with shardkit.create(path, "wds", schema, classes=names) as writer:
        for key, row in rows.items():
            made = {"boxes": np.zeros((0, 4), np.float32), "categories": np.zeros(0, np.int64)}
            writer.write({"__key__": key, "image": file.getvalue(), **made, **row})
    return path


def test_the_export_becomes_the_same_dataset(dataset):
    shardkit.convert(dataset / "x", "wds", dataset / "again", workers=0)
    for split in ("train", "val"):
        one, other = (shardkit.open(dataset / name / split) for name in ("d", "again"))
        assert (one.schema, one.class_names) == (other.schema, other.class_names)
        assert {"segmentation", "keypoints", "captions", "iscrowd", "image_id"} < one.schema.keys()
        for sample, again in zip(one, other, strict=True):
            for name, value in sample.items():
                if isinstance(value, np.ndarray):
                    np.testing.assert_array_equal(value, again[name])
                else:
                    assert value == again[name]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools
def test_pycocotools_reads_the_export(dataset):
    theirs = pytest.importorskip("pycocotools.coco", reason="the reader of COCO")
    for split in ("train", "val"):
        samples = list(shardkit.open(dataset / "d" / split))
        read = theirs.COCO(dataset / f"x/annotations/instances_{split}.json")
        names = [kind["name"] for kind in read.loadCats(read.getCatIds())]
        assert names == [CATEGORIES[id] for id in sorted(CATEGORIES)]
        for sample in samples:
            (image,) = read.loadImgs([sample["image_id"]])
            assert (dataset / f"x/images/{split}" / image["file_name"]).read_bytes() == sample[
                "image"
            ]
            found = read.loadAnns(read.getAnnIds([image["id"]]))
            assert [one["category_id"] - 1 for one in found] == [*sample["categories"]]
            corners = np.array([one["bbox"] for one in found]).reshape(-1, 4)
            corners[:, 2:] += corners[:, :2]
            np.testing.assert_array_equal(corners, sample["boxes"])
            masks = shardkit.masks(sample["segmentation"], image["height"], image["width"])
            for one, mask in zip(found, masks, strict=True):
                np.testing.assert_array_equal(read.annToMask(one), mask)
                assert one["area"] == mask.sum()  # as all are rectangles
        captions = theirs.COCO(dataset / f"x/annotations/captions_{split}.json")
        for sample in samples:
            found = captions.imgToAnns[sample["image_id"]]
            assert [one["caption"] for one in found] == sample["captions"]


def test_images_without_ids_and_names_get_numbers(tmp_path):
    box = np.array([[1.5, 2, 11.25, 7]], np.float32)
    rows = {
        "a/1": {"boxes": box, "categories": np.array([2])},
        "A/1": {},
        "b:2": {},
    }
    boxed(tmp_path / "d", rows, (), label=shardkit.Int(optional=True))
    result = shardkit.export(tmp_path / "d", "coco", tmp_path / "x")
    assert result.notes == ["fields that COCO has no place for: label"]
    assert sum(result.renamed.values()) == 2
    found = json.loads((tmp_path / "x/annotations/instances_default.json").read_bytes())
    (one,) = found["annotations"]
    assert one == {
        "id": 1, "image_id": 1, "category_id": 3, "bbox": [1.5, 2, 9.75, 5], "area": 48.75,
        "iscrowd": 0,
    }  # fmt: skip
    assert [kind["name"] for kind in found["categories"]] == ["0", "1", "2"]
    assert [image["id"] for image in found["images"]] == [1, 2, 3]
    files = [image["file_name"] for image in found["images"]]
    assert len({name.casefold() for name in files}) == 3
    assert all((tmp_path / "x/images" / name).is_file() for name in files)
    shardkit.convert(tmp_path / "x", "wds", tmp_path / "again", workers=0)
    assert len(shardkit.open(tmp_path / "again")) == 3


def test_images_that_are_turned_are_counted(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    boxed(tmp_path / "d", {"a": {}}, exif=exif)
    result = shardkit.export(tmp_path / "d", "coco", tmp_path / "x")
    assert result.notes == ["images with an EXIF orientation: 1; boxes are on the image as stored"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"boxes": np.zeros((2, 4), np.float32)}, "a value for each box"),
        ({"boxes": np.zeros((1, 4), np.float32), "categories": np.array([-1])}, "has no name"),
        ({"image_id": 5}, "distinct numbers"),
        ({**ONE, "boxes": np.full((1, 4), np.nan, np.float32)}, "boxes(?s:.)*finite"),
        ({**ONE, "keypoints": np.full((1, 2, 3), np.inf, np.float32)}, "keypoints(?s:.)*finite"),
        ({**ONE, "segmentation": None}, "a list"),
        ({**ONE, "segmentation": [[[1, 2, 3]]]}, "polygons, RLE"),
        ({**ONE, "segmentation": [{"size": [4, 6], "counts": [24]}]}, "of the image's size"),
        ({**ONE, "segmentation": [{"size": [30, 40], "counts": "!"}]}, "polygons, RLE"),
        ({"captions": "a text, not a list"}, "captions(?s:.)*a list"),
        ({"captions": [1]}, "a list of texts"),
    ],
)
def test_samples_that_do_not_fit_are_errors(tmp_path, row, words):
    more = {name: kind for name, kind in KINDS.items() if name in row}
    boxed(tmp_path / "d", {"a": row, "b": row}, **more)
    with pytest.raises(SampleError, match=words):
        shardkit.export(tmp_path / "d", "coco", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_category_of_any_number_without_a_name_is_an_error(tmp_path):
    boxed(tmp_path / "d", {"a": {**ONE, "categories": np.array([1 << 40])}}, ())
    with pytest.raises(SampleError, match="no name"):
        shardkit.export(tmp_path / "d", "coco", tmp_path / "x")


def test_fields_of_other_types_are_left_out_and_named(tmp_path):
    kinds = {"image_id": shardkit.Text(), "captions": shardkit.Text()}
    row = {**ONE, "image_id": "n1", "captions": "a text"}
    boxed(tmp_path / "d", {"a": row}, **kinds)
    result = shardkit.export(tmp_path / "d", "coco", tmp_path / "x")
    assert result.notes == ["fields that COCO has no place for: image_id, captions"]
    found = json.loads((tmp_path / "x/annotations/instances_default.json").read_bytes())
    assert [image["id"] for image in found["images"]] == [1]


def test_a_dataset_without_objects_is_refused(tmp_path):
    schema = {"image": shardkit.Image(), "label": shardkit.Int()}
    file = io.BytesIO()
    Image.new("RGB", (4, 3)).save(file, "PNG")
    with shardkit.create(tmp_path / "d", "wds", schema) as writer:
        writer.write({"image": file.getvalue(), "label": 1})
    with pytest.raises(UsageError, match="nothing for annotations of COCO"):
        shardkit.export(tmp_path / "d", "coco", tmp_path / "x")
