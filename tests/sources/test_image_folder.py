"""The image folder source: order, labels, splits, keys, sidecars, metadata, what is passed over."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from shardkit.errors import SampleError, SourceError, UsageError
from shardkit.preprocess.mask_fields import is_mask_name
from shardkit.recipe import Recipe
from shardkit.schema import Array, Bool, Float, Image, Int, Json, Text
from shardkit.sources import open_sources
from shardkit.sources.base import Source
from shardkit.testing import make_image


def open_one(root: Path, **options: object) -> Source:
    (source,) = open_sources(root, Recipe("wds", **options)).values()  # type: ignore[arg-type]
    return source


def put(path: Path, data: bytes | str = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data or make_image())
    return path


def keys(source: Source) -> list[str]:
    return [source[n]["__key__"] for n in range(len(source))]


def test_class_folders_give_labels_in_the_order_of_their_names(images: Path) -> None:
    source = open_one(images)
    assert source.classes == ("class0", "class1", "class2")
    assert dict(source.schema) == {"image": Image(), "label": Int()}
    assert [source[n]["label"] for n in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    assert source[5] == {"__key__": "class1/001", "image": make_image(101), "label": 1}


def test_the_order_is_torchvisions(tmp_path: Path) -> None:
    names = ["b/1.jpg", "a/z.jpg", "a/b/1.jpg", "a/b-c/1.jpg", "a-b/1.jpg", "B/1.JPG", "a/Z.jpg"]
    for name in names:
        put(tmp_path / name)
    # What torchvision 0.2x does: classes sorted; os.walk of each, sorted; names sorted.
    expected = []
    classes = sorted(e.name for e in os.scandir(tmp_path) if e.is_dir())
    for label, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(tmp_path / name, followlinks=True)):
            expected += [(f"{folder}/{file}", label) for file in sorted(files)]
    source = open_one(tmp_path)
    found = [(f"{tmp_path}/{source.name(n)}", source[n]["label"]) for n in range(len(source))]
    assert found == expected
    assert source.classes == tuple(classes)


def test_a_list_of_classes_gives_their_order(images: Path) -> None:
    names = ["class2", "other", "class0", "class1"]
    source = open_one(images, classes=names)
    assert source.classes == tuple(names)
    assert [source[n]["label"] for n in (0, 4, 8)] == [2, 3, 0]


@pytest.mark.parametrize(
    ("names", "message"),
    [(["class0", "class1"], "does not name the folder 'class2'"), (["a", "a"], "has a duplicate")],
)
def test_a_list_of_classes_that_does_not_fit_is_refused(
    images: Path, names: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        open_one(images, classes=names)


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    for name in ("b.jpg", "a.png", "deep/c.jpg"):
        put(tmp_path / name)
    source = open_one(tmp_path)
    assert source.classes is None
    assert dict(source.schema) == {"image": Image()}
    assert keys(source) == ["a", "b", "deep/c"]
    with pytest.raises(UsageError, match="needs a folder per class"):
        open_one(tmp_path, classes=["deep"])


def test_an_empty_folder_beside_classes_is_refused_unless_classes_are_named(images: Path) -> None:
    (images / "class00").mkdir()
    put(images / "notes/deep/a.txt", "x")
    with pytest.raises(UsageError, match="without images beside the class folders") as error:
        open_one(images)
    assert error.value.found == "class00/, notes/"
    source = open_one(images, classes=["class0", "class00", "class1", "class2"])
    assert source.classes == ("class0", "class00", "class1", "class2")
    assert source[4]["label"] == 2
    assert source.ignored == {"folder without images": 1, ".txt file": 1}


def test_a_class_may_be_empty_in_one_of_the_splits(tmp_path: Path) -> None:
    for name in ("train/cat/1.jpg", "train/dog/2.jpg", "val/cat/3.jpg"):
        put(tmp_path / name)
    (tmp_path / "val/dog").mkdir()
    assert {source.classes for source in open_sources(tmp_path).values()} == {("cat", "dog")}


def test_split_folders_share_one_table_of_classes(tmp_path: Path) -> None:
    for name in ("train/cat/1.jpg", "train/dog/2.jpg", "val/bird/3.jpg", "test/cat/4.jpg"):
        put(tmp_path / name)
    sources = open_sources(tmp_path)
    assert list(sources) == ["train", "val", "test"]
    assert {source.classes for source in sources.values()} == {("bird", "cat", "dog")}
    assert sources["val"][0] == {"__key__": "bird/3", "image": make_image(), "label": 0}
    assert sources["train"][0]["label"] == 1
    whole = open_one(tmp_path, split="none")
    assert whole.classes == ("test", "train", "val")
    assert keys(whole)[0] == "test/cat/4"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["train/cat/1.jpg", "val/cat/2.jpg", "extra/cat/3.jpg"], "extra/"),
        (["train/cat/1.jpg", "1.jpg"], "1.jpg"),
    ],
)
def test_split_folders_beside_others_are_a_question(
    tmp_path: Path, names: list[str], found: str
) -> None:
    for name in names:
        put(tmp_path / name)
    with pytest.raises(UsageError, match="and something else") as error:
        open_sources(tmp_path)
    assert error.value.found == found
    assert "--split none" in str(error.value)


def test_a_class_called_train_is_no_split(tmp_path: Path) -> None:
    for name in ("train/1.jpg", "plane/2.jpg"):
        put(tmp_path / name)
    assert open_one(tmp_path).classes == ("plane", "train")


def test_keys_are_paths_without_suffix_dots_and_collisions(tmp_path: Path) -> None:
    names = ["a.b.jpg", "a.jpg", "a.png", "a.JPG", "a_b.jpg", "v1.0/x.jpg", "a_b.png", "a~png.gif"]
    for name in names:
        put(tmp_path / "c" / name)
    source = open_one(tmp_path)
    found = {source.name(n): source[n]["__key__"] for n in range(len(source))}
    assert found == {
        "c/a.JPG": "c/a",
        "c/a.b.jpg": "c/a_b",
        "c/a.jpg": "c/a~jpg",
        "c/a.png": "c/a~png",
        "c/a_b.jpg": "c/a_b~jpg",
        "c/a_b.png": "c/a_b~png",
        "c/a~png.gif": "c/a~png~gif",
        "c/v1.0/x.jpg": "c/v1.0/x",
    }
    originals = {n: source.original(n, "") for n in range(len(source))}
    assert {source.name(n) for n, path in originals.items() if path} == {
        name for name, key in found.items() if key != name.rpartition(".")[0]
    }


def test_sidecars_become_fields(tmp_path: Path) -> None:
    put(tmp_path / "c/a.jpg")
    put(tmp_path / "c/a.txt", "a caption")
    put(tmp_path / "c/a.json", '{"x": 1.50}')
    put(tmp_path / "c/a_mask.png", make_image(5, "PNG"))
    np.save(tmp_path / "c/a.npy", np.eye(2))
    put(tmp_path / "c/b.jpg")
    put(tmp_path / "c/lonely_mask.png", make_image(1, "PNG"))
    source = open_one(tmp_path)
    assert dict(source.schema) == {
        "image": Image(),
        "label": Int(),
        "text": Text(optional=True),
        "json": Json(optional=True),
        "npy": Array(optional=True),
        "mask": Image(optional=True),
    }
    first = source[0]
    np.testing.assert_array_equal(first.pop("npy"), np.eye(2))
    assert first == {
        "__key__": "c/a",
        "image": make_image(),
        "label": 0,
        "text": "a caption",
        "json": '{"x": 1.50}',  # the text itself, for writers
        "mask": make_image(5, "PNG"),
    }
    assert source[1] == {"__key__": "c/b", "image": make_image(), "label": 0}
    assert source[2]["__key__"] == "c/lonely_mask"  # no image that it could be the mask of


@pytest.mark.parametrize(
    ("ending", "field"),
    [
        *[("_mask.png", "mask"), ("_seg.png", "seg"), ("_depth.png", "depth")],
        *[(".mask.png", "mask.png"), (".seg.png", "seg.png"), (".depth.png", "depth.png")],
    ],
)
def test_masks_beside_images_are_fields_and_no_samples(
    tmp_path: Path, ending: str, field: str
) -> None:
    put(tmp_path / "a/1.jpg", make_image(1))
    put(tmp_path / f"a/1{ending}", make_image(2, "PNG"))
    put(tmp_path / f"a/2{ending}", make_image(3, "PNG"))  # beside no image that it could lie on
    source = open_one(tmp_path)
    assert len(source) == 2
    assert source[0][field] == make_image(2, "PNG")
    assert isinstance(source.schema[field], Image)
    assert field not in source[1]
    assert is_mask_name(field)


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.json", "{"), ("a.txt", b"\xff\xfe"), ("a.npy", b"\x93NUMPY"), ("a.npy", b"x")],
)
def test_a_damaged_sidecar_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    put(tmp_path / "c/a.jpg")
    path = put(tmp_path / "c" / name, data)
    with pytest.raises(SampleError, match="the file beside an image is damaged") as error:
        open_one(tmp_path)[0]
    assert error.value.where["path"] == str(path)
    assert error.value.where["key"] == "c/a"


def test_metadata_add_their_columns(tmp_path: Path) -> None:
    for name in ("cat/1.jpg", "cat/2.jpg", "dog/3.jpg"):
        put(tmp_path / name)
    put(
        tmp_path / "metadata.csv",
        'file_name,age,zip,weight,note\ncat/1.jpg,3,007,1.5,hello\ndog/3.jpg,4,123,,"a, b"\n',
    )
    source = open_one(tmp_path)
    assert dict(source.schema) == {
        "image": Image(),
        "label": Int(),
        "age": Int(optional=True),
        "zip": Text(optional=True),
        "weight": Float(optional=True),
        "note": Text(optional=True),
    }
    rows = [{n: v for n, v in source[i].items() if n not in ("image", "__key__")} for i in range(3)]
    assert rows == [
        {"label": 0, "age": 3, "zip": "007", "weight": 1.5, "note": "hello"},
        {"label": 0},
        {"label": 1, "age": 4, "zip": "123", "note": "a, b"},
    ]


def test_metadata_of_one_folder_are_the_hugging_face_layout(tmp_path: Path) -> None:
    lines = [
        {"file_name": "1.jpg", "good": True, "n": 1, "x": 1, "any": [1], "label": "tabby"},
        {"file_name": "2.jpg", "good": False, "n": 2, "x": 2.5, "any": {"a": 1}, "label": "lion"},
    ]
    for line in lines:
        put(tmp_path / "images" / str(line["file_name"]))
    put(tmp_path / "images/metadata.jsonl", "\n".join(map(json.dumps, lines)))
    source = open_one(tmp_path)
    assert source.classes is None
    assert dict(source.schema) == {
        "image": Image(),
        "good": Bool(),
        "n": Int(),
        "x": Float(),
        "any": Json(),
        "label": Text(),
    }
    assert source[1]["any"] == {"a": 1}
    assert source[1]["label"] == "lion"
    chosen = source.select(np.array([1, 0, 1]))
    assert [chosen[n]["n"] for n in range(3)] == [2, 1, 2]


def test_metadata_that_name_no_image_are_a_problem(images: Path) -> None:
    put(images / "metadata.csv", "file_name,x\nclass0/000.jpg,1\nclass0/nothing.jpg,2\n")
    source = open_one(images)
    assert len(source.problems) == 1
    assert "line 3 of the metadata names a file that does not exist" in str(source.problems[0])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metadata.csv", "file_name,x\na.jpg\n", "has 1 cells, but the header has 2"),
        ("metadata.csv", "name,x\na.jpg,1\n", "have no column .file_name. that names files"),
        ("metadata.csv", "file_name;x\na.jpg;1\n", "seem to be separated by ';'"),
        ("metadata.csv", "file_name,x,x\na.jpg,1,2\n", "two columns have the same name"),
        ("metadata.csv", 'file_name\n"a', "is not valid CSV"),
        ("metadata.jsonl", "{", "is not valid JSON"),
        ("metadata.jsonl", "[]", "is not a JSON object"),
        ("metadata.csv", b"file_name\n\xff.jpg\n", "not valid UTF-8"),
        ("metadata.csv", "file_name,image\nclass0/000.jpg,1\n", "the name of another field"),
        (
            "metadata.csv",
            "file_name\nclass0/000.jpg\nclass0/000.jpg\n",
            "names a file a second time",
        ),
    ],
)
def test_damaged_metadata_are_named(images: Path, name: str, text: str, message: str) -> None:
    path = put(images / name, text)
    with pytest.raises(SourceError, match=message) as error:
        open_one(images)
    assert str(error.value.where["path"]) == str(path)
    assert error.value.fix


def test_other_files_are_passed_over_and_counted(images: Path) -> None:
    for name in ("README.txt", "class0/notes.txt", "class0/.hidden.jpg", ".git/x.jpg", "LICENSE"):
        put(images / name, "x")
    source = open_one(images)
    assert len(source) == 12
    assert source.ignored == {".txt file": 2, "hidden": 2, "file without suffix": 1}


def test_links_to_folders_and_files_are_followed(images: Path, tmp_path: Path) -> None:
    put(tmp_path / "elsewhere/a.jpg", make_image(7))
    (images / "class3").symlink_to(tmp_path / "elsewhere")
    (images / "class0/zz.jpg").symlink_to(tmp_path / "elsewhere/a.jpg")
    source = open_one(images)
    assert source.classes is not None
    assert source.classes[-1] == "class3"
    found = {source[n]["__key__"]: source[n]["image"] for n in range(len(source))}
    assert found["class3/a"] == found["class0/zz"] == make_image(7)


def test_links_that_lead_out_are_counted(images: Path, tmp_path: Path) -> None:
    """X3: an archive may bring a link to a private file, which must not be read without a word."""
    (tmp_path / "secret").write_text("SECRET")
    (images / "class1/again.jpg").symlink_to("../class0/000.jpg")
    assert open_one(images).notes == ()
    (images / "class1/001.txt").symlink_to(tmp_path / "secret")
    (note,) = open_one(images).notes
    says = f"1 link leads out of {images}, to data that are read as well: "
    assert note == f"{says}{images}/class1/001.txt -> {tmp_path}/secret"
    (images / "class2/002.txt").symlink_to("../../secret")
    (images / "class3").symlink_to("../images/class0/../../images")  # inside, and a loop
    (note,) = open_one(images).notes
    assert note.startswith("2 links lead out of")
    (tmp_path / "link").symlink_to(images)
    assert "2 links" in open_one(tmp_path / "link").notes[0]


@pytest.mark.parametrize("target", ["..", ".", "../../images"])
def test_a_loop_of_links_is_named(images: Path, target: str) -> None:
    link = images / "class0" / "loop"
    link.symlink_to(target)
    source = open_one(images)
    assert len(source) == 12
    (problem,) = source.problems
    assert "leads back to a folder above it" in str(problem)
    assert problem.where["path"] == str(link)


def test_a_link_to_itself_and_a_broken_link_are_bad_samples(images: Path) -> None:
    (images / "class0/self.jpg").symlink_to("self.jpg")
    (images / "class0/broken.jpg").symlink_to("nowhere.jpg")
    source = open_one(images)
    names = {source.name(n): n for n in range(len(source))}
    with pytest.raises(SampleError, match="the symbolic link is broken") as error:
        source[names["class0/broken.jpg"]]
    assert error.value.found == "a link to 'nowhere.jpg'"
    with pytest.raises(SampleError, match="the symbolic link cannot be followed: Too many levels"):
        source[names["class0/self.jpg"]]


def test_a_pipe_is_a_bad_sample_and_nobody_waits_for_it(images: Path) -> None:
    os.mkfifo(images / "class0/000.png")
    source = open_one(images)
    with pytest.raises(SampleError, match="not a regular file"):
        source[1]
    os.mkfifo(images / "class2/000.txt")
    with pytest.raises(SampleError, match="not a regular file"):
        open_one(images)[9]


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs a system with users")
def test_a_file_without_permission_is_a_bad_sample(images: Path) -> None:
    path = images / "class0/000.jpg"
    source = open_one(images)
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


def test_a_file_that_cannot_be_read_is_a_bad_sample(images: Path) -> None:
    path = images / "class0/000.jpg"
    source = open_one(images)
    path.unlink()
    path.mkdir()  # even root cannot read a folder as a file
    with pytest.raises(SampleError, match="cannot be read: Is a directory") as error:
        source[0]
    assert error.value.where == {"path": str(path), "key": "class0/000"}


@pytest.mark.parametrize("data", [make_image(0)[:-1], make_image(0) + b"more"])
def test_a_file_that_changed_since_planning_is_a_bad_sample(images: Path, data: bytes) -> None:
    source = open_one(images)
    (images / "class0/000.jpg").write_bytes(data)
    with pytest.raises(SampleError, match="changed while the conversion ran"):
        source[0]


def test_an_empty_folder_and_one_without_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="there are no images") as error:
        open_one(tmp_path)
    assert error.value.found == "nothing"
    put(tmp_path / "a.pdf", "x")
    put(tmp_path / "c/b.doc", "x")
    with pytest.raises(SourceError, match="there are no images") as error:
        open_one(tmp_path)
    assert error.value.found == "1 x .pdf file, 1 x .doc file"


def test_a_selection_is_small_and_reads_the_same(images: Path) -> None:
    source = open_one(images)
    chosen = source.select(np.array([11, 3, 4]))
    copy = pickle.loads(pickle.dumps(chosen))
    assert [copy[n] for n in range(3)] == [source[n] for n in (11, 3, 4)]
    assert copy.sizes().tolist() == source.sizes()[[11, 3, 4]].tolist()
    assert len(pickle.dumps(chosen)) < 3000


def test_the_fingerprint_tells_names_sizes_labels_and_times_apart(images: Path) -> None:
    first = open_one(images).fingerprint()
    assert open_one(images).fingerprint() == first
    os.utime(images / "class0/000.jpg", (1, 1))
    touched = open_one(images).fingerprint()
    assert first is not None
    assert touched is not None
    assert touched["files"] == first["files"]
    assert touched["times"] != first["times"]
    (images / "class0/000.jpg").rename(images / "class0/009.jpg")
    renamed = open_one(images).fingerprint()
    assert renamed is not None
    assert renamed["files"] != first["files"]


@pytest.mark.large
@pytest.mark.xdist_group("memory")
@pytest.mark.timeout(1200)
def test_planning_a_million_files_is_quick_and_small(disk: Path) -> None:
    tmp_path = Path(tempfile.mkdtemp(dir=disk))
    for folder in range(1000):
        path = tmp_path / f"class{folder:03d}"
        path.mkdir()
        for number in range(1000):
            name = path / f"ILSVRC2012_{folder:03d}_{number:08d}.JPEG"
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
    script = (
        "import resource, sys, time, numpy\n"
        "import shardkit.conversion.run as run\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "began = time.perf_counter()\n"
        "plan = run.prepare(sys.argv[1], 'wds')\n"
        "seconds = time.perf_counter() - began\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "print(plan.samples, grown * 1024 // plan.samples, round(seconds, 2))"
    )
    command = [sys.executable, "-c", script, tmp_path]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    print(f"\n1,000,000 files planned: {found[1]} bytes of memory each, {found[2]} s")
    assert found[0] == "1000000"
    assert int(found[1]) <= 300
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(
    ("names", "metadata", "theirs", "ours"),
    [
        (["cat/1.jpg", "dog/2.jpg"], None, (2, ["cat", "dog"]), (2, ["cat", "dog"])),
        (["cat/a/1.jpg", "dog/b/2.jpg"], None, (2, ["a", "b"]), (2, ["cat", "dog"])),
        (["cat/1.jpg"], None, (1, None), (1, ["cat"])),
        (["cat/1.jpg", "dog/2.jpg"], "cat/1.jpg", (1, None), (2, ["cat", "dog"])),
        (["p/1.jpg", "p/2.jpg"], "p/1.jpg", (1, None), (2, None)),
    ],
)
def test_hugging_faces_imagefolder_differs_as_documented(
    tmp_path: Path,
    names: list[str],
    metadata: str | None,
    theirs: tuple[int, list[str] | None],
    ours: tuple[int, list[str] | None],
) -> None:
    import datasets

    for name in names:
        put(tmp_path / "in" / name)
    if metadata is not None:
        put(tmp_path / "in/metadata.jsonl", json.dumps({"file_name": metadata, "age": 3}))
    loaded = datasets.load_dataset(
        "imagefolder",
        data_dir=str(tmp_path / "in"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    label = loaded.features.get("label")
    assert (len(loaded), label and label.names) == theirs
    source = open_one(tmp_path / "in")
    assert (len(source), source.classes and list(source.classes)) == ours
