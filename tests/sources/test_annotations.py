"""COCO and Pascal VOC as downloaded: what is read equals what pycocotools and the XML say."""

import io
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

import shardkit
from shardkit import SampleError, SourceError, UsageError
from shardkit.sources import annotated
from shardkit.sources import coco as coco_module
from shardkit.sources.base import Source
from tests.boxed import (
    CATEGORIES,
    COLOURS,
    NAMES_OF_POINTS,
    Painted,
    beside,
    coco,
    coco_json,
    painted_box,
    some_painted,
    voc,
    voc_xml,
)
from tests.conftest import files_of
from tests.sources import real
from tests.sources.real import all_of, cases, convert, keys, one, opened, put, refused, verified

BY_ID = ("person", "bottle", "toothbrush")  # 1, 44, 90
BY_NAME = ("bottle", "person", "toothbrush")


def single(root: Path, *images: Painted, **more: Any) -> Path:
    """A folder of images and one file of annotations."""
    put(root, {f"images/{image.name}.png": image.file() for image in images})
    return put(root, {"annotations/instances_default.json": coco_json(images, **more)})


def problems(root: Path) -> list[Any]:
    """The errors of images, all of which `--on-error skip` lists, with the images left."""
    error = refused(SampleError, None, convert, root, root.parent / "failed")
    (split,) = convert(root, root.parent / "skipped", on_error="skip").splits.values()
    found = one(root).problems
    assert str(error) == str(found[0])
    assert split.errors == len(found)
    return list(found)


def assert_painted(source: Source) -> None:
    """Each box is that of what is painted in the colour of its object."""
    for sample in all_of(source):
        with Image.open(io.BytesIO(sample["image"])) as image:
            pixels = np.asarray(image.convert("RGB"))
        assert len(sample["boxes"]) == len(sample["categories"])
        for box, colour in zip(sample["boxes"].tolist(), COLOURS, strict=False):
            assert painted_box(pixels, colour) == tuple(box)
        if "segmentation" in sample:
            masks = shardkit.masks(sample["segmentation"], *pixels.shape[:2])
            for mask, colour in zip(masks, COLOURS, strict=False):
                assert np.array_equal(mask, (pixels == colour).all(axis=2))


# --- COCO ----------------------------------------------------------------------------------------
def test_coco_as_pycocotools_reads_it(tmp_path):
    pycocotools = pytest.importorskip("pycocotools.coco")
    root = coco(tmp_path / "coco", some_painted(9), some_painted(5, seed=1))
    sources = opened(root)
    assert list(sources) == ["train", "val"]
    for split, source in sources.items():
        theirs = pycocotools.COCO(str(root / f"annotations/instances_{split}2017.json"))
        assert source.class_names == {"categories": BY_ID}
        assert tuple(c["name"] for c in theirs.loadCats(sorted(theirs.getCatIds()))) == BY_ID
        assert len(source) == len(theirs.imgs)
        for sample in all_of(source):
            (about,) = theirs.loadImgs([sample["image_id"]])
            assert about["file_name"] == f"{sample['__key__']}.png"
            objects = theirs.loadAnns(theirs.getAnnIds([about["id"]]))
            x, y, w, h = np.array([o["bbox"] for o in objects]).reshape(-1, 4).T
            assert np.array_equal(sample["boxes"], np.stack([x, y, x + w, y + h], axis=1))
            names = [BY_ID[n] for n in sample["categories"]]
            assert names == [CATEGORIES[o["category_id"]] for o in objects]
            assert sample["iscrowd"].tolist() == [bool(o["iscrowd"]) for o in objects]
        assert_painted(source)


def test_coco_fields_and_what_is_passed_over_by_any_number_of_workers(tmp_path):
    root = coco(tmp_path / "coco", some_painted(4), some_painted(4, seed=1))
    put(root, {"test2017/1.jpg": None, "notes.txt": ""})
    out, again = tmp_path / "out", tmp_path / "again"
    result = verified(root, out, "arrow", shard_samples=2)
    dataset = shardkit.open(out / "train")
    arrays = {n: k for n, k in dataset.schema.items() if isinstance(k, shardkit.Array)}
    expected = {"boxes": ("<f4", (None, 4)), "categories": ("<i8", (None,))}
    expected["iscrowd"] = ("|b1", (None,))
    assert dataset.schema["segmentation"] == shardkit.Json()
    assert arrays == {name: shardkit.Array(*kind) for name, kind in expected.items()}
    assert dataset[0]["boxes"].shape == (0, 4)  # of an image without objects
    assert dataset[0]["categories"].shape == (0,)
    values = {"info": 2, "licenses": 2, "license": 8, "supercategory": 6}
    values |= {"area": 12}
    assert {**result.ignored} == {
        **dict.fromkeys(("folder test2017/", ".txt file"), 1),
        **{f"values of {name!r}": count for name, count in values.items()},
    }
    shardkit.convert(root, "arrow", again, workers=2, shard_samples=2)
    assert files_of(again) == files_of(out)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools
@pytest.mark.parametrize("count", [9, pytest.param(600, marks=pytest.mark.large)])
def test_segmentation_keypoints_and_captions_as_pycocotools_reads_them(tmp_path, count):
    """Through a format: segmentation as it is in the file, keypoints at the middle of pixels."""
    pycocotools = pytest.importorskip("pycocotools.coco")
    root = coco(tmp_path / "coco", some_painted(count), some_painted(5, seed=1), shapes=True)
    result = verified(root, tmp_path / "out", "lmdb")
    assert not [what for what in result.ignored if "file" in what]
    for split in ("train", "val"):
        files = {
            name: pycocotools.COCO(str(root / f"annotations/{name}_{split}2017.json"))
            for name in ("instances", "person_keypoints", "captions")
        }
        theirs, points, captions = files.values()
        dataset = shardkit.open(tmp_path / "out" / split)
        assert dataset.class_names["keypoints"] == tuple(NAMES_OF_POINTS)
        assert dataset.schema["keypoints"] == shardkit.Array("<f4", (None, 4, 3))
        for sample in dataset:
            about = theirs.imgs[sample["image_id"]]
            objects = theirs.imgToAnns[about["id"]]
            assert sample["segmentation"] == [found["segmentation"] for found in objects]
            assert sample["captions"] == [c["caption"] for c in captions.imgToAnns[about["id"]]]
            expected = np.zeros((len(objects), 4, 3), np.float32)
            for row, found in zip(expected, objects, strict=True):
                if found["id"] in points.anns:
                    row[:] = np.reshape(points.anns[found["id"]]["keypoints"], (-1, 3))
                    row[:3, :2] += 0.5
            assert np.array_equal(sample["keypoints"], expected)
            masks = shardkit.masks(sample["segmentation"], about["height"], about["width"])
            assert len(masks) == len(objects)
            for mask, found in zip(masks, objects, strict=True):
                assert np.array_equal(mask, theirs.annToMask(found))


def test_keypoints_or_captions_alone(tmp_path):
    images, fields = some_painted(4), {"captions": {"image", "captions", "image_id"}}
    fields["person_keypoints"] = {*["boxes", "categories", "iscrowd", "segmentation", "keypoints"]}
    fields["person_keypoints"] |= {"image", "image_id"}
    for kind, names in fields.items():
        root = put(tmp_path / kind, {f"x/{image.name}.png": image.file() for image in images})
        put(root, {f"annotations/{kind}_x.json": beside(images)[kind]})
        verified(root, tmp_path / f"{kind}.out")
        assert {*shardkit.open(tmp_path / f"{kind}.out").schema} == names
    captions = [sample["captions"] for sample in shardkit.open(tmp_path / "captions.out")]
    assert [*map(len, captions)] == [2, 0, 2, 0]


@cases(
    "change message",
    ({"segmentation": "abc"}, "no segmentation, but str 'abc'"),
    ({"segmentation": [[1, 2, 3]]}, "polygon of 3 numbers"),
    ({"segmentation": [[1, 2, "3", 4]]}, "not a list of numbers"),
    ({"segmentation": [[1, 2, float("inf"), 4]]}, "not finite"),
    ({"segmentation": {"counts": [4]}}, "its size is None"),
    ({"segmentation": {"size": [2, 2], "counts": [3]}}, "do not add up to 2 x 2"),
    ({"segmentation": {"size": [1 << 20, 1 << 20], "counts": [3]}}, "1048576 x 1048576 pixels"),
    ({"segmentation": {"size": [2, 2], "counts": [4]}}, "has RLE of 2 x 2 pixels, not those of"),
    ({"segmentation": {"size": [2, 2], "counts": "é"}}, "not compressed RLE"),
    ({"keypoints": [1, 2]}, "not x, y and visibility"),
    ({"keypoints": [1, 2, float("nan")]}, "not x, y and visibility"),
    ({"keypoints": [1, 2, 7]}, "visibility 0, 1 or 2"),
)
def test_shapes_that_cannot_be_are_errors_of_their_image(tmp_path, change, message):
    objects = [{**OBJECT, **change}, {**OBJECT, "id": 2, "image_id": 101}]
    (error,) = problems(single(tmp_path / "x", *some_painted(2), annotations=objects))
    assert message in str(error)
    assert error.where["position"] == 0


def test_what_does_not_fit_between_files_is_said(tmp_path):
    root = coco(tmp_path / "coco", some_painted(4), shapes=True)
    path = root / "annotations/person_keypoints_train2017.json"
    whole = json.loads(path.read_text())
    whole["annotations"][0]["keypoints"][9] = 7  # of a point that is not labelled
    whole["annotations"][1]["id"] = 7
    whole["annotations"][2]["keypoints"] = None
    whole["categories"][0]["keypoints"] = ["a"]
    path.write_text(json.dumps(whole))
    source = opened(root)["train"]
    assert source.ignored["positions of keypoints that are not labelled"] == 1
    assert source.ignored["keypoints of objects that the main file does not list"] == 1
    assert any("names of keypoints, which get numbers" in note for note in source.notes)
    assert source.class_names["keypoints"] == ("0", "1", "2", "3")
    whole["annotations"][0]["bbox"][0] += 1
    path.write_text(json.dumps(whole))
    error = refused(SourceError, "has another box", opened, root)
    assert error.where["path"] == path


def test_keypoints_that_splits_name_differently_get_numbers(tmp_path):
    images = some_painted(4), some_painted(3, 1)
    root = coco(tmp_path / "coco", *images, shapes=True)
    path = root / "annotations/person_keypoints_val2017.json"
    whole = json.loads(path.read_text())
    for kind in whole["categories"]:
        kind["keypoints"] = [name.upper() for name in kind["keypoints"]]
    path.write_text(json.dumps(whole))
    sources = opened(root)
    assert {source.class_names["keypoints"] for source in sources.values()} == {tuple("0123")}
    (note,) = [note for note in sources["train"].notes if "differently" in note]
    assert note.startswith("the splits name keypoints")


@cases(
    "image annotations split",
    ("images/train2017/{}.png", "annotations/instances_train2017.json", "train"),
    ("train/{}.png", "train/_annotations.coco.json", "train"),
    ("{}.png", "_annotations.coco.json", ""),
    ("images/{}.png", "annotations/instances_default.json", ""),
    ("images/{}.png", "annotations/val.json", "val"),
    ("images/a/{}.png", "annotations/x.json", ""),
    ("{}.png", "annotations/instances.json", ""),
)
def test_where_images_and_annotations_lie(tmp_path, image, annotations, split):
    images = some_painted(4)
    put(tmp_path, {image.format(one.name): one.file() for one in images})
    inside = "a/" if "/a/" in image else ""
    put(tmp_path, {annotations: coco_json([p._replace(name=inside + p.name) for p in images])})
    ((name, source),) = opened(tmp_path).items()
    assert name == split
    assert_painted(source)
    assert list(opened(tmp_path, split="none")) == [""]
    assert not any("json file" in what for what in source.ignored)


def test_one_folder_of_images_for_several_splits(tmp_path):
    """Each file of annotations has its images; those that none lists are counted."""
    train, val = some_painted(3), [p._replace(name=f"v{p.name}") for p in some_painted(4, 1)]
    put(tmp_path, {f"images/{p.name}.png": p.file() for p in (*train, *val)})
    put(tmp_path, {"images/other.png": None, "annotations/train.json": coco_json(train)})
    put(tmp_path, {"annotations/val.json": coco_json(val)})
    sources = opened(tmp_path)
    assert real.counts(sources) == {"train": 3, "val": 4}
    assert sources["train"].ignored["images of no split"] == 1
    put(tmp_path, {"annotations/val.json": coco_json([*val, train[0]])})
    error = refused(UsageError, "splits 'train' and 'val' overlap", opened, tmp_path)
    assert "000000.png" in str(error.found)
    refused(UsageError, "each has annotations of its own", opened, tmp_path, split="none")


def test_a_json_file_is_read_in_any_order_and_form(tmp_path, monkeypatch):
    """Lists may come in any order, ids may be text, sizes may be missing; blocks may be small."""
    images = some_painted(4)
    whole = json.loads(coco_json(images))
    for entry in whole["images"]:
        entry["id"] = f"image {entry['id']} äöü"
        del entry["width"]
    for entry in whole["annotations"]:
        entry["image_id"] = f"image {entry['image_id']} äöü"
    for indent in (None, 3):
        turned = json.dumps(dict(reversed(whole.items())), indent=indent, ensure_ascii=False)
        put(tmp_path, {f"images/{image.name}.png": image.file() for image in images})
        put(tmp_path, {"annotations/x.json": "\ufeff" + turned + "\n"})
        for block in (1, 7, 1 << 20):
            monkeypatch.setattr(coco_module, "_BLOCK", block)
            source = one(tmp_path)
            assert_painted(source)
            assert "image_id" not in source.schema
            assert source.class_names == {"categories": BY_ID}


def test_classes_in_an_order_of_ones_own_and_one_table_for_all_splits(tmp_path):
    """By name, though other files number them in another way, or have more of them."""
    root = coco(tmp_path / "coco", some_painted(4), some_painted(4, seed=1))
    before = {name: [s["categories"] for s in all_of(some)] for name, some in opened(root).items()}
    names = ("toothbrush", "cat", "bottle", "person")
    source = opened(root, classes=names)["train"]
    assert source.class_names == {"categories": names}
    for found, plain in zip(all_of(source), before["train"], strict=True):
        assert [names[n] for n in found["categories"]] == [BY_ID[n] for n in plain]
    words = "does not name the category 'person'"
    refused(UsageError, words, opened, root, classes=("bottle", "toothbrush"))
    verified(root, tmp_path / "out", classes=names)
    path = root / "annotations/instances_val2017.json"
    whole, other = json.loads(path.read_text()), {1: 7, 44: 6, 90: 5}
    for entry in whole["categories"]:
        entry["id"] = other[entry["id"]]
    for entry in whole["annotations"]:
        entry["category_id"] = other[entry["category_id"]]
    whole["categories"].append({"id": 3, "name": "unicorn"})
    path.write_text(json.dumps(whole))
    sources = opened(root)
    names = {"categories": (*BY_ID, "unicorn")}
    assert all(source.class_names == names for source in sources.values())
    for found, plain in zip(all_of(sources["val"]), before["val"], strict=True):
        assert np.array_equal(found["categories"], plain)


OBJECT = {"id": 1, "image_id": 100, "category_id": 44, "bbox": [1, 2, 3, 4]}


def test_an_object_that_cannot_be_is_an_error_of_its_image(tmp_path):
    wrong = (
        ({"bbox": [0, 0, -1, 5]}, "a box that ends before it begins"),
        ({"bbox": [0, 0, float("nan"), 5]}, "not finite"),
        ({"bbox": [500, 0, 5, 5]}, "outside its image"),
        ({"bbox": [-9, 0, 5, 5]}, "outside its image"),
        ({"category_id": 2}, "a category that the annotations do not define"),
    )
    of_images = [{**OBJECT, "id": n, "image_id": 100 + n} for n in range(6)]
    objects = [of_images[0], *(a | b for a, (b, _) in zip(of_images[1:], wrong, strict=True))]
    found = problems(single(tmp_path / "x", *some_painted(6), annotations=objects))
    for number, (error, (_, message)) in enumerate(zip(found, wrong, strict=True), 1):
        assert message in str(error)
        assert f"'{number:06d}.png'" in str(error.found)
        assert error.where["position"] == number
    assert keys(tmp_path / "skipped") == ["000000"]


def test_images_and_entries_without_each_other_or_without_their_folder(tmp_path, monkeypatch):
    root = single(tmp_path / "x", *some_painted(3))
    (root / "images/000001.png").unlink()
    put(root, {"images/other.png": None})
    absent, unlisted = problems(root)
    assert "name an image that is not there" in str(absent)
    assert absent.found == "000001.png"
    assert "is not listed in the annotations" in str(unlisted)
    assert unlisted.found == "other.png"
    assert keys(tmp_path / "skipped") == ["000000", "000002"]
    monkeypatch.setattr(annotated, "_MAX_PROBLEMS", 1)
    error = refused(SourceError, "2 images and annotations do not match", opened, root)
    assert "not there: 000001.png" in str(error.found)
    # All come in one archive.
    root = coco(tmp_path / "coco", some_painted(3), some_painted(4, 1))
    shutil.rmtree(root / "train2017")
    sources = opened(root)
    assert real.counts(sources) == {"val": 4}
    assert "no folder train2017/" in sources["val"].notes[0]
    assert sources["val"].ignored["file instances_train2017.json"] == 1
    assert not sources["val"].problems


def test_objects_of_no_image_without_area_and_what_repeats_are_said(tmp_path):
    objects = [OBJECT, OBJECT, {**OBJECT, "image_id": 7}]
    source = one(single(tmp_path / "x", *some_painted(2), annotations=objects))
    assert source.ignored["objects of images that the annotations do not list"] == 1
    assert "2 objects in instances_default.json have a duplicate id" in source.notes[0]
    twice = single(tmp_path / "y", *some_painted(1), *some_painted(1))
    refused(SourceError, "list an image twice", opened, twice)
    # Names of files do not lead out of the folder.
    put(tmp_path, {"secret.png": None})
    image = {"id": 100, "file_name": "../../secret.png"}  # of no size: it would be looked at
    root = single(tmp_path / "z", *some_painted(1), images=[image], annotations=[])
    assert "not there" in str(one(root).problems[0])
    # As some of COCO's own are: clipped, or left out; and a class called like its project.
    (image,) = some_painted(1)
    width, height = image.size
    boxes = [[-3, 5, 10, height], [0, 0, width, height], [5, 5, 0, 9], [width, 0, 0, 5]]
    ids = (44, 5, 0, 0)
    objects = [OBJECT | {"id": n, "bbox": b, "category_id": ids[n]} for n, b in enumerate(boxes)]
    categories = [{"id": 44, "name": "cat"}, {"id": 0, "name": "cat"}, {"id": 5, "name": "dog"}]
    source = one(single(tmp_path / "edge", image, annotations=objects, categories=categories))
    assert source[0]["boxes"].tolist() == [[0, 5, 7, height], [0, 0, width, height]]
    assert source.class_names == {"categories": ("cat", "dog")}
    assert source[0]["categories"].tolist() == [0, 1]
    assert source.ignored["objects whose box has no area"] == 2
    assert any("1 boxes extend beyond their image" in note for note in source.notes)
    assert any("categories of one name were merged: 'cat'" in note for note in source.notes)
    assert not source.problems


def test_an_image_of_another_size_than_annotated_is_an_error(tmp_path):
    images = some_painted(3)
    root, out = single(tmp_path / "x", *images), tmp_path / "out"
    put(root, {"images/000001.png": images[1]._replace(size=(50, 40), boxes=[]).file()})
    error = refused(SampleError, "size of the image differs", convert, root, out)
    assert error.where["key"] == "000001"
    assert "--drop boxes,segmentation)" in str(error.fix)
    assert convert(root, out, on_error="skip").errors == 1
    convert(root, tmp_path / "unboxed", drop=["boxes", "segmentation"])
    assert len(keys(tmp_path / "unboxed")) == 3
    # Other annotations are another run.
    path = root / "annotations/instances_default.json"
    path.write_text(path.read_text().replace('"iscrowd": 0', '"iscrowd": 1'))
    refused(shardkit.OutputError, None, convert, root, out, on_error="skip")
    assert not shardkit.verify(out, against=root).sound


# The size of an image tells in 5 to 8, if it is not square.
@pytest.mark.parametrize("size", [(80, 120), (120, 120)])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_of_upright_images_become_those_of_stored_ones(tmp_path, size, orientation):
    """Another image of the file tells, or the user; otherwise they are refused."""
    boxes = [(10, 20, 30, 90), (40, 5, 70, 15), (33, 20, 36, 22), (71, 1, 75, 3), (40, 80, 44, 90)]
    image = Painted("a", size, boxes, ["person"] * 5, orientation)
    alone = single(tmp_path / "alone", image)
    if orientation == 1 or (orientation >= 5 and size[0] != size[1]):
        assert_painted(one(alone))
    else:
        with pytest.raises(SampleError, match="not known whether the boxes") as error:
            one(alone)[0]
        assert "--annotations-frame upright" in str(error.value.fix)
        stored = one(alone, annotations_frame="stored")
        assert stored[0]["boxes"].tolist() == [list(map(float, box)) for box in boxes]
    assert_painted(one(alone, annotations_frame="upright"))
    turned = Painted("b", (80, 120), boxes, ["person"] * 5, 6)
    assert_painted(one(single(tmp_path / "both", image, turned)))


@cases(
    "text message",
    ("", "expected '{', found 'the end'"),
    ("{}", "it lists no 'images'"),
    ("[1]", "expected '{', found '\\['"),
    ('{"images": [{"id": 1}]}', r"images\[0\] has no 'file_name'"),
    ('{"images": [{"id": 1, "file_name": "a.png", "width": -1}]}', "not a number of pixels"),
    ('{"images": [7]}', r"images\[0\] is invalid"),
    ('{"images": [{"id": [1], "file_name": "a"}]}', "unhashable"),
    ('{"annotations": [{"image_id": 1, "category_id": 1}]}', "has no 'bbox'"),
    ('{"annotations": [{"image_id": 1, "category_id": 1, "bbox": [1, 2]}]}', "unpack"),
    ('{"annotations": [{"image_id": 1, "category_id": 1, "bbox": "abcd"}]}', "not a number"),
    ('{"categories": [{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]}', "already in use"),
    ('{"images": [] "annotations": []}', "expected ','"),
    ('{"images": [', "not valid JSON"),
    ("{" * 100_000, "not valid JSON"),
    ('{"x": ' + "[" * 100_000, "not valid JSON"),
    ('{"x": 1} 2', "extra data after its end"),
    ('{"images": [{"id": 1, "file_name": "\udcff"}]}', "not valid JSON"),
)
def test_damaged_json_is_an_error_with_its_place(tmp_path, text, message):
    data = text.encode("utf-8", "surrogateescape")
    put(tmp_path, {"images/a.png": None, "annotations/a.json": data})
    error = refused(SourceError, message, opened, tmp_path)
    assert error.where["path"] == tmp_path / "annotations/a.json"
    assert "give the image folder" in str(error.fix)


@pytest.mark.large
def test_a_large_file_takes_the_memory_of_its_boxes_and_text(tmp_path):
    """5,000 objects with polygons, 6 MB: a fraction of what json.load takes."""
    path = tmp_path / "x.json"
    polygon = ", ".join(f"{n / 7:.2f}" for n in range(160))
    head = '{"images": [{"id": 1, "file_name": "a.png", "width": 9, "height": 9}],'
    rest = f'"image_id": 1, "category_id": 1, "bbox": [1, 1, 2.5, 3], "segmentation": [[{polygon}]]'
    lists = '"categories": [{"id": 1, "name": "a"}], "annotations": ['
    path.write_text(head + lists + ",".join(f'{{"id": {n}, {rest}}}' for n in range(5000)) + "]}")
    peaks = []
    for read in (lambda: coco_module.read_coco(path).boxes, lambda: json.loads(path.read_text())):
        tracemalloc.start()
        found = read()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(found) in (5000, 3)
    assert peaks[0] < peaks[1] / 3


# --- Pascal VOC ----------------------------------------------------------------------------------
def test_voc_as_its_xml_says(tmp_path):
    """As torchvision's VOCDetection parses it: coordinates count from 1, the last in the box."""
    train, val = some_painted(9), [p._replace(name=f"v{p.name}") for p in some_painted(5, 1)]
    lists = {"train": train, "val": val, "trainval": [*train, *val]}
    root = voc(tmp_path / "VOCdevkit/VOC2012", lists)
    sources = opened(tmp_path / "VOCdevkit")
    assert list(sources) == ["train", "val"]
    assert "trainval.txt is not read" in sources["train"].notes[0]
    for source, images in zip(sources.values(), (train, val), strict=True):
        assert source.class_names == {"categories": BY_NAME}
        assert len(source) == len(images)
        for sample in all_of(source):
            tree = ElementTree.parse(root / f"Annotations/{sample['__key__']}.xml")
            objects = tree.findall("object")
            for row, found in enumerate(objects):
                sides = ("xmin", "ymin", "xmax", "ymax")
                box = [int(found.findtext(f"bndbox/{side}")) for side in sides]
                assert sample["boxes"][row].tolist() == [box[0] - 1, box[1] - 1, *box[2:]]
                assert BY_NAME[sample["categories"][row]] == found.findtext("name")
                assert sample["difficult"][row] == (found.findtext("difficult") == "1")
                assert sample["truncated"][row] == (found.findtext("truncated") == "1")
            assert len(sample["boxes"]) == len(objects)
        assert_painted(source)
    verified(tmp_path / "VOCdevkit", tmp_path / "out", "lmdb")
    assert len(opened(root, split="none")[""]) == 14


def test_voc_splits_and_what_is_passed_over(tmp_path):
    images = some_painted(6)
    root = voc(tmp_path / "VOCdevkit/VOC2007", {"trainval": images[:4], "test": images[4:]})
    put(root, {"JPEGImages/other.png": None, "Annotations/other.xml": voc_xml(images[0])})
    sources = opened(root)
    assert real.counts(sources) == {"test": 2, "trainval": 4}
    ignored = [{**source.ignored} for source in sources.values()]
    assert sum(some.get("images of no split", 0) for some in ignored) == 1
    found = ignored[0] | ignored[1]
    assert found["folder SegmentationClass/"] == 1
    masks = "the boxes are read, and not the masks in SegmentationClass/, which --fields image,mask"
    assert any(masks in note for note in sources["test"].notes)
    assert found["other lists in ImageSets/Main"] == 2
    assert found["values of 'pose'"] > 0
    put(root, {"ImageSets/Main/test.txt": "000001\n"})
    refused(UsageError, "splits 'test' and 'trainval' overlap", opened, root)
    # Images without annotations, as VOC2012's test images are; several years.
    root = voc(tmp_path / "VOCdevkit/VOC2012", {"train": images[:3]})
    put(root, {"JPEGImages/9.png": None, "ImageSets/Main/test.txt": "9\n"})
    source = one(root)
    assert "test.txt is not read: its images have no annotations" in source.notes
    assert source.ignored["images of no split"] == 1
    assert not source.problems
    error = refused(UsageError, "several datasets in the layout of Pascal VOC", opened, tmp_path)
    assert "VOC2012" in str(error.fix)


BOX = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox>"
BOX = f"<annotation><object><name>a</name>{BOX}</object></annotation>"
FILE = '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]>'
MANY = '<!DOCTYPE a [<!ENTITY b "bb"><!ENTITY c "&b;&b;">]>'
FOREIGN = '<?xml version="1.0" encoding="cp037"?>'


DAMAGED_XML = [
    ("", "no element found"),
    ("<annotation>", "no element found"),
    ("<other/>", "root element is <other>"),
    (f"{MANY}<annotation>&c;</annotation>", "DOCTYPE"),
    (f"{FILE}<annotation>&b;</annotation>", "DOCTYPE"),
    (f"{FILE}<annotation>&b;</annotation>".encode("utf-16"), "not UTF-8"),
    (f"{FILE}<annotation>&b;</annotation>".encode("utf-16-le"), "not UTF-8"),
    (FOREIGN + FILE, "DOCTYPE"),
    (FOREIGN.encode() + FILE.encode("cp037"), "decode"),
    ("<annotation>&b;</annotation>", "undefined entity"),
    (b"<annotation>" + b"x" * (1 << 20), "more than 1,048,576 bytes"),
    ("<annotation><object/></annotation>", "an object has no name"),
    ("<annotation><object><name>a</name></object></annotation>", "'a' has no bndbox"),
    (BOX.replace("9", "x"), "could not convert"),
    (BOX.replace("xmax", "w"), "no <xmax>"),
    ("<annotation><size><width>-1</width><height>1</height></size></annotation>", "pixels"),
]


def test_damaged_or_deep_xml_and_absent_files_are_errors_of_their_images(tmp_path):
    root = voc(tmp_path / "x", {"train": some_painted(1 + len(DAMAGED_XML))})
    for number, (text, _) in enumerate(DAMAGED_XML, 1):
        put(root, {f"Annotations/{number:06d}.xml": text})
    found = problems(root)
    for number, (error, (_, message)) in enumerate(zip(found, DAMAGED_XML, strict=True), 1):
        assert message in str(error)
        assert error.where["path"] == root / f"Annotations/{number:06d}.xml"
    assert keys(tmp_path / "skipped/train") == ["000000"]
    root = voc(tmp_path / "deep/x", {"train": some_painted(4)})
    deep = "<a>" * 20_000 + "</a>" * 20_000
    put(root, {"Annotations/000000.xml": f"<annotation>{deep}</annotation>"})
    (root / "Annotations/000001.xml").unlink()
    (root / "JPEGImages/000002.png").unlink()
    absent, bad = problems(root)
    assert "not there" in str(absent)
    assert "an image has no annotations" in str(bad)
    assert keys(tmp_path / "deep/skipped/train") == ["000000", "000003"]


def test_without_lists_and_sizes_there_is_one_dataset_with_the_size_of_the_image(tmp_path):
    images = some_painted(4)
    put(tmp_path, {f"JPEGImages/{image.name}.png": image.file() for image in images})
    for size in ("", "<size><width>0</width><height>0</height></size>"):
        xml = {f"Annotations/{image.name}.xml": voc_xml(image, size=size) for image in images}
        assert len(one(put(tmp_path, xml))) == 4
        assert_painted(one(tmp_path))


# --- what remains unread -------------------------------------------------------------------------
@cases(
    "names kind",
    ("annotations/1.txt train2017/1.jpg", "COCO"),
    ("Annotations/1.txt JPEGImages/1.jpg", "VOC"),
    ("annotations/stuff_train2017.json train2017/1.jpg", "COCO"),
)
def test_other_annotations_are_refused(tmp_path, names, kind):
    put(tmp_path, {name: None if name.endswith("jpg") else "{}" for name in names.split()})
    refused(UsageError, f"{kind}.*cannot read", opened, tmp_path)
