"""YOLO as Ultralytics, Roboflow and CVAT write it: what is read is what Ultralytics documents."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shardkit
from shardkit import SampleError, ShardkitError, SourceError, UsageError
from shardkit.inspection.samples import in_words
from shardkit.sources import yolo as yolo_module
from tests.boxed import COLOURS, YAML, YOLO_NAMES, painted_box, some_painted, yolo, yolo_lines
from tests.sources import real
from tests.sources.real import all_of, cases, convert, keys, one, opened, put, refused, verified

NAMES = "names: [person, bottle, toothbrush]\n"
ROBOFLOW = "train: ../train/images\nval: ../val/images\n\nnc: 3\n" + NAMES
LISTS = "path: ./\ntrain: train.txt\nval: val.txt\n" + NAMES


def assert_painted(source: Any, off: float = 1e-3) -> int:
    """Each box is that of what is painted in the colour of its object; returns their number."""
    seen = 0
    for sample in all_of(source):
        with Image.open(io.BytesIO(sample["image"])) as image:
            pixels = np.asarray(image.convert("RGB"))
        assert len(sample["boxes"]) == len(sample["categories"])
        for box, colour in zip(sample["boxes"], COLOURS, strict=False):
            assert np.abs(box - painted_box(pixels, colour)).max() < off
            seen += 1
    return seen


def theirs(label: Path, width: int, height: int) -> tuple[list[int], Any]:
    """Classes and x0, y0, x1, y1 in pixels, as Ultralytics documents label files."""
    rows = [line.split() for line in label.read_text().splitlines()] if label.exists() else []
    values = np.array(rows, np.float64).reshape(-1, 5)
    x, y, w, h = values[:, 1:].T * np.array([width, height, width, height])[:, None]
    corners = np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], axis=1)
    return values[:, 0].astype(int).tolist(), corners.clip(0, [width, height, width, height])


def assert_as_theirs(root: Path, split: str, source: Any) -> None:
    assert source.class_names == {"categories": YOLO_NAMES}
    for sample in all_of(source):
        with Image.open(io.BytesIO(sample["image"])) as image:
            label = root / f"labels/{split}/{sample['__key__']}.txt"
            kinds, boxes = theirs(label, *image.size)
        assert sample["categories"].tolist() == kinds
        assert np.allclose(sample["boxes"], boxes, atol=1e-4)
        assert (sample["boxes"].dtype, sample["boxes"].shape) == (np.float32, (len(kinds), 4))


def test_yolo_as_ultralytics_reads_it(tmp_path):
    splits = {"train": some_painted(9), "val": some_painted(5, seed=1)}
    root = yolo(tmp_path / "x", splits)
    sources = opened(root)
    assert real.counts(sources) == {"train": 9, "val": 5}
    for split, source in sources.items():
        assert_as_theirs(root, split, source)
        assert assert_painted(source)
    lacking = (
        f"images without a label file in {root / 'labels/train'}, thus without objects: 3 of 9"
    )
    assert lacking in sources["train"].notes
    result = verified(root, tmp_path / "out", "arrow")
    assert not result.ignored
    kinds = shardkit.open(tmp_path / "out/train").schema
    assert kinds["boxes"] == shardkit.Array("<f4", (None, 4))


@pytest.mark.large
def test_a_larger_set(tmp_path):
    root = yolo(tmp_path / "x", {"train": some_painted(3000, 2), "val": some_painted(300, 3)})
    for split, source in opened(root).items():
        assert_as_theirs(root, split, source)
    verified(root, tmp_path / "out", workers=2)


@cases(
    "where config splits",
    ("{0}/{1}", YAML, ["train", "val"]),
    ("{0}/{1}", "", ["train", "val"]),
    ("{1}/{0}", ROBOFLOW, ["train", "val"]),
    ("{1}/{0}", "", ["train", "val"]),
    ("{0}/{1}", YAML.replace("images/", "/content/data/images/"), ["train", "val"]),
    ("{0}/{1}", NAMES, ["train", "val"]),
    ("{0}/{1}", LISTS, ["train", "val"]),
    ("{0}/{1}2017", "", ["train", "val"]),
    ("{0}/{1}", YAML.replace("images/val", "images/train"), ["train"]),
    ("{0}/{1}", YAML.replace("images/val", "images/x"), ["train"]),
    ("{0}", "", [""]),
    ("{0}/of/{1}", "", [""]),
)
def test_where_images_and_labels_lie(tmp_path, where, config, splits):
    given = {
        "train": some_painted(5),
        "val": [p._replace(name=p.name + "v") for p in some_painted(4, 1)],
    }
    root = yolo(tmp_path, given, where, config)
    for split, images in given.items() if config == LISTS else ():
        lines = "".join(f"./images/{split}/{image.name}.png\n" for image in images)
        put(root, {f"{split}.txt": lines})
    put(root, {} if config else {"classes.txt": "person\nbottle\ntoothbrush\n"})
    sources = opened(root)
    assert list(sources) == splits
    assert sum(map(assert_painted, sources.values())) > 5
    for source in sources.values():
        assert source.class_names == {"categories": YOLO_NAMES}
        assert not source.ignored
    notes = [note for source in sources.values() for note in source.notes]
    assert any("no split" in note for note in notes) == (splits == ["train"])


def test_names_of_classes(tmp_path):
    """In a list or a mapping, in a file of lines, given, or only numbers."""
    root = yolo(tmp_path, {"train": some_painted(4)}, config="")
    source = one(root)
    assert source.class_names["categories"] == tuple("012")[: len(source.class_names["categories"])]
    assert "--classes FILE names them" in str(source.notes)
    assert one(root, classes=YOLO_NAMES).class_names == {"categories": YOLO_NAMES}
    put(root, {"data.yaml": "names: {'0': 1, '1': b c, '2': ö}\n"})
    assert one(root).class_names == {"categories": ("1", "b c", "ö")}
    # In another order: the numbers follow.
    before = [sample["categories"] for sample in all_of(one(root))]
    after = [sample["categories"] for sample in all_of(one(root, classes=("ö", "b c", "1")))]
    assert all(np.array_equal(2 - a, b) for a, b in zip(after, before, strict=True))
    refused(UsageError, "does not name the category '1'", opened, root, classes=("ö", "b c"))


@cases(
    "config words",
    ("names: [a, a, b]", "two classes are called 'a'"),
    ("names: {0: a, 2: b}", "not a list, or a mapping"),
    ("names: 3", "not a list, or a mapping"),
    ("names: [no, yes]", "False is not a class name"),
    ("names: [a, b, c]\nnc: 4", "nc is 4, but there are 3 names"),
    ("names: [a\n", "ParserError"),
    ("names: [a, b, c]\ntrain: [images/a, images/b]", "only one folder"),
    ("names: [" + "1" * 1001 + "]", "over 1,000 digits"),
    ("names: [a, b, c]\ntrain: nowhere", None),
)
def test_a_damaged_description_is_refused(tmp_path, config, words):
    root = yolo(tmp_path, {"train": some_painted(4)}, config=config)
    kind = UsageError if words is None else SourceError
    error = refused(kind, words or "none of the images", opened, root)
    assert error.where["path"] == root / "data.yaml"


BAD = [
    ("0 .5 .5 .2", "line 1 has 4 numbers"),
    ("0 .5 .5 .2 .2 .9", "line 1 has 6 numbers"),
    ("\n\n0 .5 .5 x .2", "line 3 is not a list of numbers"),
    ("0 320 200 100 50", "line 1 has 320, which is not a share"),
    ("0 nan .5 .1 .1", "line 1 has nan, which is not a share"),
    ("0.5 .5 .5 .1 .1", "begins with 0.5 instead of the number of a class"),
    ("1e300 .5 .5 .1 .1", "begins with 1e\\+300"),
    (b"\xff\xfe0", "codec"),
    ("3 .5 .5 .1 .1", "a category that the annotations do not define"),
    ("-1 .5 .5 .1 .1", "a category that the annotations do not define"),
    ("0 1e999 .5 .1 .1", "has inf, which is not a share"),
    ("0 .5 .5 -0.005 .1", "a box that ends before it begins"),
]


def test_damaged_labels_are_errors_of_their_images(tmp_path, monkeypatch):
    images = some_painted(1 + len(BAD))
    root = yolo(tmp_path / "x", {"train": images})
    put(root, {f"labels/train/{n:06d}.txt": text for n, (text, _) in enumerate(BAD, 1)})
    refused(SampleError, None, convert, root, tmp_path / "failed")
    (split,) = convert(root, tmp_path / "out", on_error="skip").splits.values()
    assert split.errors == len(BAD)
    assert keys(tmp_path / "out/train") == ["000000"]
    found = {Path(str(e.where["path"])).stem: str(e) for e in one(root).problems}
    for number, (_, words) in enumerate(BAD, 1):
        assert words.replace("\\", "") in found[f"{number:06d}"]
    monkeypatch.setattr(yolo_module, "_MAX_BYTES", 300)
    put(root, {"labels/train/000000.txt": "0 .5 .5 .1 .1\n" * 30})
    assert "more than 300 bytes" in str(one(root).problems[0])


def shares(points, size):
    """As in a line, of points (n, 2) in pixels."""
    return " ".join(f"{value:.6f}" for value in (np.array(points) / size).ravel())


def test_polygons_and_oriented_boxes(tmp_path):
    """Of any number of corners, beside lines of boxes; four corners are those of oriented boxes."""
    images = some_painted(8, 5)
    root, expected = yolo(tmp_path / "x", {"train": images}), []
    for image in images:
        lines, polygons = [], []
        for n, (x0, y0, x1, y1) in enumerate(image.boxes):
            corners = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
            corners += [(x0, (y0 + y1) / 2)] * (n == 1)
            lines.append(f"{n} {shares(corners, image.size)}")
            polygons.append(np.ravel(corners))
        if image.boxes:
            lines.append("0 .5 .5 .25 .25")
            polygons.append(None)
            put(root, {f"labels/train/{image.name}.txt": "\n".join(lines)})
        expected.append(polygons)
    marked = [sum(one is not None for one in polygons) for polygons in expected]
    some = f"oriented boxes: {sum(marked)} of {sum(map(len, expected))}; 'boxes' has the upright"
    assert some in str(one(root).notes)
    for steps in ({}, {"resize": 40}):
        convert(root, tmp_path / f"out{len(steps)}", **steps)
    plain = shardkit.open(tmp_path / "out0/train")
    assert isinstance(plain.schema["segmentation"], shardkit.Json)
    for sample, polygons, image in zip(plain, expected, images, strict=True):
        assert len(sample["segmentation"]) == len(sample["boxes"]) == len(polygons)
        boxes = np.reshape(image.boxes, (-1, 4))
        assert np.allclose(sample["boxes"][: len(boxes)], boxes, atol=1e-3)
        for found, polygon in zip(sample["segmentation"], polygons, strict=True):
            assert (found is None) == (polygon is None)
            assert polygon is None or np.allclose(found[0], polygon, atol=2e-3)
    for sample, image in zip(shardkit.open(tmp_path / "out1/train"), images, strict=True):
        scale = 40 / min(image.size)
        for found, box in zip(sample["segmentation"], image.boxes, strict=False):
            assert np.allclose(found[0][:4], np.array(box)[[0, 1, 2, 1]] * scale, atol=1)


@pytest.mark.parametrize("each", [2, 3])
@pytest.mark.parametrize("names", [True, False])
def test_poses(tmp_path, each, names):
    images = some_painted(8, 5, (1, 6))
    config = YAML + f"kpt_shape: [3, {each}]\n"
    config += "kpt_names:\n" + "".join(f"  {n}: [a, b, c]\n" for n in range(3)) if names else ""
    root = yolo(tmp_path / "x", {"train": images}, config=config)
    for image in images:
        lines = []
        for line, (x0, y0, x1, y1) in zip(yolo_lines(image).splitlines(), image.boxes, strict=True):
            points = np.array([(x0, y0), (x1, y1), (-1, -1) if each == 2 else (0, 0)])
            seen = np.array([[2], [1], [0]])
            made = np.concatenate([points / image.size, *[seen] * (each == 3)], axis=1)
            lines.append(f"{line} {' '.join(f'{value:.6f}' for value in made.ravel())}")
        put(root, {f"labels/train/{image.name}.txt": "\n".join(lines)} if lines else {})
    source = one(root)
    assert source.class_names["keypoints"] == (("a", "b", "c") if names else ("0", "1", "2"))
    for sample, image in zip(all_of(source), images, strict=True):
        found = sample["keypoints"]
        assert (found.dtype, found.shape) == (np.float32, (len(image.boxes), 3, 3))
        corners = sample["boxes"].reshape(-1, 2, 2)  # of the stored image, as the points
        for points, (low, high) in zip(found, corners, strict=True):
            assert (points[:2, :2] >= low - 1e-2).all()
            assert (points[:2, :2] <= high + 1e-2).all()
            assert not np.allclose(points[0], points[1])
            assert points[:, 2].tolist() == [2, 2 if each == 2 else 1, 0]
            assert not points[2].any()


def test_names_of_keypoints_are_not_those_of_numbers(tmp_path):
    """They are shown as what they are, and only datasets with the same ones are united."""
    (image,) = some_painted(2)[1:]
    out = {}
    for names in ("a, b", "b, a"):
        config = f"{YAML}kpt_shape: [2, 2]\nkpt_names:\n  0: [{names}]\n"
        root = yolo(tmp_path / names / "x", {"train": [image]}, config=config)
        put(root, {f"labels/train/{image.name}.txt": "0 .5 .5 .2 .2 .4 .4 .6 .6"})
        convert(root, tmp_path / names / "out")
        out[names] = tmp_path / names / "out/train"
    found = shardkit.open(out["a, b"])
    words = in_words(found, "keypoints", found[0]["keypoints"], short=True)
    assert words.startswith("float32 (1, 2, 3): ")
    assert "(" not in words.partition(": ")[2]
    assert "2 keypoints: a, b" in repr(found)
    assert "2 keypoints: a, b" in found._repr_html_()
    assert not len(found.filter("1 in keypoints"))
    message = "keypoints, have different names"
    refused(ShardkitError, message, convert, [*out.values()], tmp_path / "no")
    refused(ShardkitError, message, shardkit.concatenate, [*map(shardkit.open, out.values())])


@cases(
    "config line words",
    ("", "0 .1 .1 .2 .2 .3 .3 .4", "line 1 has 8 numbers: poses need kpt_shape"),
    ("", "0 .1 .1 .2 .2 .3 1.3", "1.3, which is not a share"),
    ("kpt_shape: [2, 3]", "0 .5 .5 .2 .2 .1 .1 2 .2 .2", "line 1 has 10 numbers"),
    ("kpt_shape: [2, 3]", "0 .5 .5 .2 .2 .1 .1 3 .2 .2 1", "the visibility 3 instead of"),
    ("kpt_shape: [2, 2]", "0 .5 .5 .2 .2 .1 .1 .2 9", "9, which is not a share"),
    ("kpt_shape: [2, 2]", "0 .5 .5 .2 .2 .1 .1 .2 nan", "nan, which is not a share"),
    ("kpt_shape: [1, 2]", "0 .5 .5 .2 .2 -inf .2", "-inf, which is not a share"),
    ("kpt_shape: [1, 3]", "0 .5 .5 .2 .2 nan .2 0", "nan, which is not a share"),
)
def test_lines_of_other_kinds_are_errors_of_their_image(tmp_path, config, line, words):
    (image,) = some_painted(2)[1:]
    root = yolo(tmp_path / "x", {"train": [image]}, config=YAML + config)
    put(root, {f"labels/train/{image.name}.txt": line})
    (error,) = one(root).problems
    assert words in str(error)


def test_names_of_keypoints_that_classes_do_not_share_are_numbers(tmp_path):
    config = YAML + "kpt_shape: [2, 2]\nkpt_names:\n  0: [a, b]\n  1: [c, d]\n"
    source = one(yolo(tmp_path, {"train": some_painted(1)}, config=config))
    assert source.class_names["keypoints"] == ("0", "1")
    assert "kpt_names is not 2 names that all classes share" in str(source.notes)


@pytest.mark.parametrize("shape", ["17", "[17, 4]", "[0, 3]", "[1e9, 3]"])
def test_the_shape_of_keypoints_is_two_numbers(tmp_path, shape):
    root = yolo(tmp_path, {"train": some_painted(2)}, config=f"{YAML}kpt_shape: {shape}")
    refused(SourceError, "instead of .number of keypoints", opened, root)


def test_repeated_lines_strays_and_boxes_over_the_edge(tmp_path):
    root = yolo(tmp_path / "x", {"train": some_painted(3)})
    put(
        root,
        {"labels/train/000001.txt": "2 .5 .5 .1 .1\n2 .5 .5 .1 .1\n0 .1 .5 .4 .2\n1 .5 .5 0 1\n"},
    )
    put(root, {"labels/train/gone.txt": "", "labels/train/a.cache": "", "notes.md": ""})
    source = one(root)
    assert source.ignored == {
        "repeated lines of labels": 1, "label file without an image": 1, ".cache file": 1,
        "objects whose box has no area": 1, ".md file": 1,
    }  # fmt: skip
    assert "1 boxes extend beyond their image" in str(source.notes)
    sample = source[1]
    assert sample["categories"].tolist() == [2, 0]
    width, height = some_painted(3)[1].size
    assert np.allclose(sample["boxes"][1], [0, 0.4 * height, 0.3 * width, 0.6 * height])


def test_labels_are_on_the_upright_image_as_ultralytics_reads_it(tmp_path):
    """Unless the user says otherwise; boxes are on the stored image, also without reading it."""
    images = some_painted(16, 3, range(1, 9))
    root = yolo(tmp_path / "x", {"train": images})
    assert assert_painted(one(root)) == sum(len(image.boxes) for image in images)
    boxes = [sample["boxes"] for sample in all_of(one(root))]
    convert(root, tmp_path / "out", fields=("boxes",))
    for sample, expected in zip(shardkit.open(tmp_path / "out/train"), boxes, strict=True):
        assert np.array_equal(sample["boxes"], expected)
    stored = [sample["boxes"] for sample in all_of(one(root, annotations_frame="stored"))]
    for image, here, there in zip(images, boxes, stored, strict=True):
        assert np.array_equal(here, there) == (image.orientation == 1 or not image.boxes)


def test_labels_beside_their_images_and_other_data_yaml(tmp_path):
    (image,) = some_painted(2)[1:]
    root = put(tmp_path / "x", {"train/1.png": image.file(), "train/1.txt": yolo_lines(image)})
    put(root, {"data.yaml": "train: train\n" + NAMES})
    error = refused(UsageError, "expected in a folder called images", opened, root)
    assert "labels beside it" in str(error.fix)
    root = put(
        tmp_path / "y", {"cat/1.png": None, "dog/1.png": None, "data.yaml": "names: [a, b]\n"}
    )
    assert one(root).classes == ("cat", "dog")
    masks = put(tmp_path / "z", {"images/1.png": None, "labels/1.png": None})
    assert list(one(masks).schema) == ["image", "mask"]
