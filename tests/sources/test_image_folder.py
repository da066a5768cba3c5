"""The image folder source: order, labels, splits, keys, sidecars, metadata, what is ignored."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

import shardkit
from shardkit.errors import FormatError, SampleError, SourceError, UsageError
from shardkit.preprocess.on_image import is_mask_name
from shardkit.sample import Sample
from shardkit.schema import Array, Bool, Float, Image, Int, Json, Text
from shardkit.sources import open_sources
from shardkit.sources.base import Source
from shardkit.testing import make_image
from tests.sources.real import all_of, cases, keys, one, put, refused

IMAGE = make_image()


def test_class_folders_give_labels_in_the_order_of_their_names_or_of_a_list(images, tmp_path):
    source = one(images)
    assert source.classes == ("class0", "class1", "class2")
    assert dict(source.schema) == {"image": Image(), "label": Int()}
    assert [source[n]["label"] for n in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    assert source[5] == {"__key__": "class1/001", "image": make_image(101), "label": 1}
    names = ("class2", "other", "class0", "class1")
    source = one(images, classes=names)
    assert source.classes == names
    assert [source[n]["label"] for n in (0, 4, 8)] == [2, 3, 0]
    flat = put(tmp_path / "flat", dict.fromkeys(("b.jpg", "a.png", "deep/c.jpg")))
    assert one(flat).classes is None
    assert dict(one(flat).schema) == {"image": Image()}
    assert keys(one(flat)) == ["a", "b", "deep/c"]
    for root, classes, message in (
        (images, ("class0", "class1"), "does not name the folder 'class2'"),
        (images, ("a", "a"), "has a duplicate"),
        (flat, ("deep",), "needs a folder per class"),
    ):
        refused(UsageError, message, one, root, classes=classes)


def test_the_order_is_torchvisions(tmp_path):
    names = ["b/1.jpg", "a/z.jpg", "a/b/1.jpg", "a/b-c/1.jpg", "a-b/1.jpg", "B/1.JPG", "a/Z.jpg"]
    put(tmp_path, dict.fromkeys(names))
    # What torchvision 0.2x does: classes sorted; os.walk of each, sorted; names sorted.
    expected = []
    classes = sorted(e.name for e in os.scandir(tmp_path) if e.is_dir())
    for label, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(tmp_path / name, followlinks=True)):
            expected += [(f"{folder}/{file}", label) for file in sorted(files)]
    source = one(tmp_path)
    found = [(f"{tmp_path}/{source.name(n)}", source[n]["label"]) for n in range(len(source))]
    assert (found, source.classes) == (expected, tuple(classes))


def test_an_empty_folder_beside_classes_is_refused_unless_classes_are_named(images):
    (images / "class00").mkdir()
    put(images, {"notes/deep/a.txt": "x"})
    error = refused(UsageError, "without images beside the class folders", one, images)
    assert error.found == "class00/, notes/"
    source = one(images, classes=["class0", "class00", "class1", "class2"])
    assert source.classes == ("class0", "class00", "class1", "class2")
    assert source[4]["label"] == 2
    assert source.ignored == {"folder without images": 1, ".txt file": 1}


def test_split_folders_share_one_table_of_classes_and_others_beside_them_are_a_question(tmp_path):
    names = ("train/cat/1.jpg", "train/dog/2.jpg", "val/bird/3.jpg", "test/cat/4.jpg")
    put(tmp_path, dict.fromkeys(names))
    (tmp_path / "val/dog").mkdir()  # a class may be empty in one of the splits
    sources = open_sources(tmp_path)
    assert list(sources) == ["train", "val", "test"]
    assert {source.classes for source in sources.values()} == {("bird", "cat", "dog")}
    first = sources["val"][0]
    assert (first["__key__"], first["label"]) == ("bird/3", 0)
    assert sources["train"][0]["label"] == 1
    (tmp_path / "val/dog").rmdir()
    whole = one(tmp_path, split="none")
    assert (whole.classes, keys(whole)[0]) == (("test", "train", "val"), "test/cat/4")
    for other, found in (("1.jpg", "1.jpg"), ("extra/cat/3.jpg", "extra/, 1.jpg")):
        put(tmp_path, {other: None})  # beside them
        error = refused(UsageError, "and something else", open_sources, tmp_path)
        assert error.found == found
        assert "--split none" in str(error)


def test_keys_are_paths_without_suffix_dots_and_collisions(tmp_path):
    expected = {"c/a.JPG": "c/a", "c/a.b.jpg": "c/a_b", "c/a.jpg": "c/a~jpg", "c/a.png": "c/a~png"}
    expected |= {"c/a_b.jpg": "c/a_b~jpg", "c/a_b.png": "c/a_b~png", "c/a~png.gif": "c/a~png~gif"}
    expected["c/v1.0/x.jpg"] = "c/v1.0/x"
    source = one(put(tmp_path, dict.fromkeys(expected)))
    assert dict(zip(map(source.name, range(8)), keys(source), strict=True)) == expected
    assert {source.name(n) for n in range(8) if source.original(n, "")} == {
        name for name, key in expected.items() if key != name.rpartition(".")[0]
    }


def test_sidecars_become_fields_and_damaged_ones_are_named(tmp_path):
    put(tmp_path / "c", {"a.jpg": IMAGE, "a.txt": "a caption", "a.json": '{"x": 1.50}'})
    put(tmp_path / "c", {"a_mask.png": make_image(5, "PNG"), "b.jpg": IMAGE})
    put(tmp_path / "c", {"lonely_mask.png": None})
    np.save(tmp_path / "c/a.npy", np.eye(2))
    source = one(tmp_path)
    beside = {"text": Text(optional=True), "json": Json(optional=True), "npy": Array(optional=True)}
    beside["mask"] = Image(optional=True)
    assert dict(source.schema) == {"image": Image(), "label": Int(), **beside}
    first, second, third = all_of(source)
    np.testing.assert_array_equal(first.pop("npy"), np.eye(2))
    more = {"text": "a caption", "json": '{"x": 1.50}'}  # the text itself, for writers
    more["mask"] = make_image(5, "PNG")
    assert first == {"__key__": "c/a", "image": IMAGE, "label": 0, **more}
    assert second == {"__key__": "c/b", "image": IMAGE, "label": 0}
    assert third["__key__"] == "c/lonely_mask"  # no image that it could be the mask of
    for name, data in (("json", "{"), ("txt", b"\xff\xfe"), ("npy", b"\x93NUMPY"), ("npy", b"x")):
        put(tmp_path, {"damaged/c/a.jpg": None, f"damaged/c/a.{name}": data})
        source = one(tmp_path / "damaged")
        error = refused(SampleError, "file of a field is damaged", source.__getitem__, 0)
        assert error.where["path"] == f"{tmp_path}/damaged/c/a.{name}"
        assert error.where["key"] == "c/a"
        (tmp_path / f"damaged/c/a.{name}").unlink()


def test_masks_beside_images_are_fields_and_no_samples(tmp_path):
    mask = make_image(2, "PNG")
    for ending in (f"{sign}{kind}.png" for sign in "_." for kind in ("mask", "seg", "depth")):
        field = ending[1:] if ending[0] == "." else ending[1:-4]
        root = put(tmp_path / field, {"a/1.jpg": None, f"a/1{ending}": mask})
        put(root, {f"a/2{ending}": None})  # beside no image that it could lie on
        source = one(root)
        assert (len(source), source[0][field]) == (2, mask)
        assert isinstance(source.schema[field], Image)
        assert field not in source[1]
        assert is_mask_name(field)


def columns(source: Source) -> list[Sample]:
    return [{k: v for k, v in s.items() if k not in ("image", "__key__")} for s in all_of(source)]


def test_metadata_add_their_columns_and_those_of_one_folder_are_the_hugging_face_layout(tmp_path):
    root = put(tmp_path / "csv", dict.fromkeys(("cat/1.jpg", "cat/2.jpg", "dog/3.jpg")))
    rows = 'cat/1.jpg,3,007,1.5,hello\ndog/3.jpg,4,123,,"a, b"\n'
    put(root, {"metadata.csv": "file_name,age,zip,weight,note\n" + rows})
    source = one(root)
    kinds = {"age": Int, "zip": Text, "weight": Float, "note": Text}
    expected = {name: kind(optional=True) for name, kind in kinds.items()}
    assert dict(source.schema) == {"image": Image(), "label": Int(), **expected}
    assert columns(source) == [
        {"label": 0, "age": 3, "zip": "007", "weight": 1.5, "note": "hello"},
        {"label": 0},
        {"label": 1, "age": 4, "zip": "123", "note": "a, b"},
    ]
    lines = [
        {"file_name": "1.jpg", "good": True, "n": 1, "x": 1, "any": [1], "label": "tabby"},
        {"file_name": "2.jpg", "good": False, "n": 2, "x": 2.5, "any": {"a": 1}, "label": "lion"},
    ]
    put(tmp_path / "hub/images", {"1.jpg": None, "2.jpg": None})
    put(tmp_path / "hub/images", {"metadata.jsonl": "\n".join(map(json.dumps, lines))})
    source = one(tmp_path / "hub")
    assert source.classes is None
    kinds = {"good": Bool(), "n": Int(), "x": Float(), "any": Json(), "label": Text()}
    assert dict(source.schema) == {"image": Image(), **kinds}
    assert [{"file_name": f"{n + 1}.jpg", **row} for n, row in enumerate(columns(source))] == lines
    assert [row["n"] for row in columns(source.select(np.array([1, 0, 1])))] == [2, 1, 2]


def test_metadata_that_name_no_image_are_a_problem_and_selections_are_small(images):
    put(images, {"metadata.csv": "file_name,x\nclass0/000.jpg,1\nclass0/nothing.jpg,2\n"})
    source = one(images)
    (problem,) = source.problems
    assert "line 3 of the metadata names a file that does not exist" in str(problem)
    chosen = source.select(np.array([11, 3, 4]))
    copy = pickle.loads(pickle.dumps(chosen))
    assert all_of(copy) == [source[n] for n in (11, 3, 4)]
    assert copy.sizes().tolist() == source.sizes()[[11, 3, 4]].tolist()
    assert len(pickle.dumps(chosen)) < 3500


@cases(
    "text message",
    ("file_name,x\na.jpg\n", "line 2 of the metadata is damaged: a row does not"),
    ("name,x\na.jpg,1\n", "have no column .file_name. that names files"),
    ("file_name;x\na.jpg;1\n", "have no column .file_name. that names files"),
    ("file_name,x,x\na.jpg,1,2\n", "two columns of the table have the same name"),
    ('file_name\n"a', "line 2 of the metadata is damaged: a row is not CSV"),
    ("{", "the file is a single JSON object"),
    ("[}", "a JSON array cannot be read"),
    (b"file_name\n\xff.jpg\n", "not valid UTF-8"),
    ("file_name,image\nclass0/000.jpg,1\n", "the name of another field"),
    ("file_name\nclass0/000.jpg\nclass0/000.jpg\n", "names a file a second time"),
)
def test_damaged_metadata_are_named(images, text, message):
    name = "metadata.jsonl" if "JSON" in message else "metadata.csv"
    put(images, {name: text})
    error = refused(SourceError, message, one, images)
    assert str(error.where["path"]) == str(images / name)
    assert error.fix


def test_other_files_are_passed_over_and_counted(images):
    names = ("README.txt", "class0/notes.txt", "class0/.hidden.jpg", ".git/x.jpg", "LICENSE")
    source = one(put(images, dict.fromkeys(names, "x")))
    assert len(source) == 12
    assert source.ignored == {".txt file": 2, "hidden": 2, "file without suffix": 1}


def test_links_are_followed_loops_named_and_those_that_lead_out_counted(images, tmp_path):
    """X3: an archive may bring a link to a private file, which must not be read without a word."""
    put(tmp_path, {"secret": "SECRET", "elsewhere/a.jpg": make_image(7)})
    for target in ("..", ".", "../../images"):
        loop = images / "class0/loop"
        loop.symlink_to(target)
        source = one(images)
        assert len(source) == 12
        (problem,) = source.problems
        assert "leads back to a folder above it" in str(problem)
        assert problem.where["path"] == str(loop)
        loop.unlink()
    (images / "class1/again.jpg").symlink_to("../class0/000.jpg")
    assert one(images).notes == ()
    (images / "class1/001.txt").symlink_to(tmp_path / "secret")
    (note,) = one(images).notes
    says = f"1 link leads out of {images}, to data that are read as well: "
    assert note == f"{says}{images}/class1/001.txt -> {tmp_path}/secret"
    (images / "class2/002.txt").symlink_to("../../secret")
    (images / "class3").symlink_to("../images/class0/../../images")  # inside, and a loop
    (note,) = one(images).notes
    assert note.startswith("2 links lead out of")
    (tmp_path / "link").symlink_to(images)
    assert "2 links" in one(tmp_path / "link").notes[0]
    (images / "class4").symlink_to(tmp_path / "elsewhere")
    (images / "class0/zz.jpg").symlink_to(tmp_path / "elsewhere/a.jpg")
    source = one(images)
    assert source.classes[-1] == "class4"
    found = {sample["__key__"]: sample["image"] for sample in all_of(source)}
    assert found["class4/a"] == found["class0/zz"] == make_image(7)


def test_what_is_no_file_or_has_changed_is_a_bad_sample_and_nobody_waits_for_it(images):
    (images / "class0/self.jpg").symlink_to("self.jpg")
    (images / "class0/broken.jpg").symlink_to("nowhere.jpg")
    os.mkfifo(images / "class0/000.png")
    os.mkfifo(images / "class2/000.txt")
    source = one(images)
    (images / "class1/000.jpg").unlink()
    (images / "class1/000.jpg").mkdir()  # even root cannot read a folder as a file
    numbers = {source.name(n): n for n in range(len(source))}
    for name, message in {
        "class0/broken.jpg": "(?s)the symbolic link is broken.*a link to 'nowhere.jpg'",
        "class0/self.jpg": "the symbolic link cannot be followed: Too many levels",
        "class0/000.png": "not a regular file",
        "class1/000.jpg": "cannot be read: Is a directory",
        "class2/000.jpg": "not a regular file",
    }.items():
        error = refused(SampleError, message, source.__getitem__, numbers[name])
        assert str(images / name.partition("/")[0]) in str(error.where["path"])
    for data in (make_image(100)[:-1], make_image(100) + b"more"):  # since it was planned
        (images / "class1/001.jpg").write_bytes(data)
        changed = numbers["class1/001.jpg"]
        refused(SampleError, "changed while the conversion ran", source.__getitem__, changed)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs a system with users")
def test_a_file_without_permission_is_a_bad_sample(images):
    path = images / "class0/000.jpg"
    source = one(images)
    path.chmod(0)
    user = os.geteuid()
    for parent in (path, *path.parents)[1:]:
        if parent.stat().st_uid == user and parent != parent.parent and "pytest" in str(parent):
            parent.chmod(0o755)
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(SampleError, match="cannot be read: Permission denied") as error:
            source[0]
    finally:
        os.seteuid(user)
    assert "permissions" in str(error.value)


def test_an_empty_folder_and_one_without_images_are_refused(tmp_path):
    others = {"a.pdf": "", "c/b.doc": ""}
    for files, found in (({}, "nothing"), (others, "1 x .pdf file, 1 x .doc file")):
        put(tmp_path, files)
        assert refused(SourceError, "there are no images", one, tmp_path).found == found


def test_the_fingerprint_tells_names_sizes_labels_and_times_apart(images):
    first = one(images).fingerprint()
    assert one(images).fingerprint() == first
    os.utime(images / "class0/000.jpg", (1, 1))
    touched = one(images).fingerprint()
    assert touched["files"] == first["files"]
    assert touched["times"] != first["times"]
    (images / "class0/000.jpg").rename(images / "class0/009.jpg")
    assert one(images).fingerprint()["files"] != first["files"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.large
@pytest.mark.xdist_group("memory")
def test_planning_many_files_takes_little_memory(tmp_path):
    """100,000 of them, with names as long as ImageNet's; 300 bytes each, and what imports take."""
    for folder in range(100):
        path = tmp_path / f"class{folder:03d}"
        path.mkdir()
        for number in range(1000):
            name = path / f"ILSVRC2012_{folder:03d}_{number:08d}.JPEG"
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
    script = (
        "import re, sys, numpy\n"
        "import shardkit.conversion.run as run\n"
        # `ru_maxrss` begins with that of the process that started it.
        "peak = lambda: int(re.findall('VmHWM:(.*) kB', open('/proc/self/status').read())[0])\n"
        "run.prepare(sys.argv[1] + '/class000', 'wds')\n"  # what is imported on the way
        "before = peak()\n"
        "plan = run.prepare(sys.argv[1], 'wds')\n"
        "print(plan.samples, (peak() - before) * 1024 // plan.samples)"
    )
    command = [sys.executable, "-c", script, tmp_path]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert found[0] == "100000"
    assert int(found[1]) <= 300


@cases(
    "names metadata theirs ours",
    ("cat/1.jpg dog/2.jpg", None, (2, ["cat", "dog"]), (2, ["cat", "dog"])),
    ("cat/a/1.jpg dog/b/2.jpg", None, (2, ["a", "b"]), (2, ["cat", "dog"])),
    ("cat/1.jpg", None, (1, None), (1, ["cat"])),
    ("cat/1.jpg dog/2.jpg", "cat/1.jpg", (1, None), (2, ["cat", "dog"])),
    ("p/1.jpg p/2.jpg", "p/1.jpg", (1, None), (2, None)),
)
def test_hugging_faces_imagefolder_differs_as_documented(tmp_path, names, metadata, theirs, ours):
    import datasets

    root = put(tmp_path / "in", dict.fromkeys(names.split()))
    if metadata is not None:
        put(root, {"metadata.jsonl": json.dumps({"file_name": metadata, "age": 3})})
    where = {"data_dir": str(root), "cache_dir": str(tmp_path / "cache")}
    loaded = datasets.load_dataset("imagefolder", split="train", **where)
    label = loaded.features.get("label")
    assert (len(loaded), label and label.names) == theirs
    source = one(root)
    assert (len(source), source.classes and list(source.classes)) == ours


def test_other_suffixes_of_images(tmp_path):
    """Those of readable formats are read; other formats are named, and refused if most are such."""
    image = PIL.Image.new("RGB", (4, 4), (200, 10, 10))
    for suffix, format in [("jfif", "JPEG"), ("jpe", "JPEG"), ("pnm", "PPM"), ("apng", "PNG")]:
        image.save(tmp_path / f"{suffix}.{suffix}", format)
    (tmp_path / "a.avif").write_bytes(b"....ftypavif")
    result = shardkit.convert(tmp_path, to="arrow", out=tmp_path.with_name("o"), workers=0)
    assert result.samples == 4
    assert any("such as 'a.avif' ignored" in note for note in result.notes)
    for name in ("b.heic", "c.jp2", "d.tga"):
        (tmp_path / name).write_bytes(b"...")
    with pytest.raises(FormatError, match="image data in a format other than") as error:
        shardkit.convert(tmp_path, to="arrow", out=tmp_path.with_name("p"))
    assert "PNG" in str(error.value.fix)
