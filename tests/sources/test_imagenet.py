"""ImageNet and Tiny ImageNet as they are unpacked: labels of val from the files beside it."""

from pathlib import Path

import numpy as np
import pytest
import scipy.io

import shardkit
from shardkit import FormatError, SourceError, UsageError, verify
from shardkit.sources import open_sources
from shardkit.testing import make_image
from tests.sources.real import cases, one, opened, put, refused, tar, verified

# In the order of names; as in ImageNet, the devkit numbers them otherwise.
WNIDS = ["n01440764", "n01443537", "n02119789", "n03100240"]
IDS = {"n02119789": 1, "n03100240": 2, "n01440764": 3, "n01443537": 4}
TRUTH = [WNIDS[n] for n in (2, 0, 3, 1, 2, 0)]  # of the images in the order of their names
NAMES = [f"ILSVRC2012_val_{n:08d}" for n in range(1, 7)]
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"


def imagenet(root: Path, val: str = "val") -> Path:
    put(root, {f"train/{wnid}/{wnid}_{n}.JPEG": None for wnid in WNIDS for n in range(2)})
    for number, name in enumerate(NAMES):
        put(root, {f"{val}/{name}.JPEG": make_image(number)})
    return put(root, {"test/ILSVRC2012_test_00000001.JPEG": None})


def devkit(folder: Path, *, table: bool = False) -> Path:
    """Its files, with a synset that is above others and no class."""
    put(folder, {GROUND_TRUTH: "".join(f"{IDS[wnid]}\n" for wnid in TRUTH)})
    rows = sorted((number, wnid) for wnid, number in IDS.items())
    if table:
        put(folder, {"map_clsloc.txt": "".join(f"{w} {n} some_words\n" for n, w in rows)})
        return folder
    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O")]
    synsets = np.zeros((len(rows) + 1, 1), [*kind, ("num_children", "O")])
    for at, (number, wnid) in enumerate([*rows, (5, "n00015388")]):
        synsets[at, 0] = (number, wnid, f"words of {wnid}", "gloss", 0 if at < len(rows) else 3)
    scipy.io.savemat(folder / "meta.mat", {"synsets": synsets})
    return folder


def table(folder: Path, kind: str) -> str:
    """One of the tables that tell of each image; the name of its file."""
    rows = list(zip(NAMES, TRUTH, strict=True))
    solution = "".join(f"{n},{w} 1 2 30 40 {w} 5 6 7 8\n" for n, w in rows)
    caffe = [f"{n}.JPEG {WNIDS.index(w)}\n" for n, w in rows]
    name, content = {
        "kaggle": ("LOC_val_solution.csv", "ImageId,PredictionString\n" + solution),
        "caffe": ("val.txt", "".join(caffe)),
        "cntk": ("val_map.txt", "".join(f"val/{line}".replace(" ", "\t") for line in caffe)),
        "names": ("val_list.txt", "".join(f"{n}.JPEG {w}\n" for n, w in rows)),
    }[kind]
    put(folder, {name: content})
    return name


def labels(root: Path, split: str = "val", **options: str) -> dict[str, str]:
    """By file, the class of each image."""
    source = opened(root, **options)[split]
    assert source.classes is not None
    return {source.name(n): source.classes[source[n]["label"]] for n in range(len(source))}


EXPECTED = {f"{name}.JPEG": wnid for name, wnid in zip(NAMES, TRUTH, strict=True)}


def test_a_flat_val_has_the_labels_of_the_devkit_as_torchvision_has_them(tmp_path):
    root = imagenet(tmp_path / "imagenet")
    kit = devkit(root / "ILSVRC2012_devkit_t12/data")
    # What torchvision.datasets.ImageNet does: leaves of meta.mat by number; images sorted.
    meta = scipy.io.loadmat(kit / "meta.mat", squeeze_me=True)["synsets"]
    wnid_of = {int(one[0]): str(one[1]) for one in meta if one[4] == 0}
    numbers = [int(line) for line in (kit / GROUND_TRUTH).read_text().split()]
    images = sorted(path.name for path in (root / "val").iterdir())
    theirs = {name: wnid_of[n] for name, n in zip(images, numbers, strict=True)}
    assert labels(root) == theirs == EXPECTED
    sources = open_sources(root)
    assert [len(source) for source in sources.values()] == [8, 6, 1]
    labelled = ["image", "label"]
    assert [list(s.schema) for s in sources.values()] == [labelled, labelled, ["image"]]
    assert {source.classes for source in sources.values()} == {tuple(WNIDS), None}
    assert sources["val"].notes == (f"the labels of val come from {kit / GROUND_TRUTH}",)
    assert sources["train"].ignored == {"devkit folder": 1}
    verified(root, tmp_path / "out")
    out = shardkit.open(tmp_path / "out/val")
    assert [out.classes[sample["label"]] for sample in out] == TRUTH
    put(kit, {GROUND_TRUTH: "1\n" * 6})
    assert not verify(tmp_path / "out", against=root).sound


@cases("place table", (".", False), ("val", True), ("ILSVRC_devkit", True), ("devkit/data", False))
def test_the_devkits_files_are_found(tmp_path, place, table):
    devkit(imagenet(tmp_path) / place, table=table)
    assert labels(tmp_path) == EXPECTED


@cases("kind place", ("kaggle", "."), ("caffe", "val"), ("cntk", "."), ("names", "val"))
def test_tables_of_the_images_are_read(tmp_path, kind, place):
    name = table(imagenet(tmp_path) / place, kind)
    assert labels(tmp_path) == EXPECTED
    sources = open_sources(tmp_path)
    assert sources["val"].notes == (f"the labels of val come from {tmp_path / place / name}",)
    assert sources["train"].ignored == sources["val"].ignored == {}
    # A flat val by itself has no labels, and that is said.
    source = one(tmp_path / "val")
    assert (list(source.schema), len(source.notes)) == (["image"], 1)
    assert "give the parent folder with train" in source.notes[0]
    assert open_sources(tmp_path / "test")[""].notes == ()


def test_kaggles_folder_has_its_table_above(tmp_path):
    root = imagenet(tmp_path / "ILSVRC/Data/CLS-LOC")
    table(tmp_path, "kaggle")
    put(tmp_path / "ILSVRC/ImageSets/CLS-LOC", {"val.txt": f"{NAMES[0]} 1\n{NAMES[1]} 2\n"})
    put(tmp_path / "ILSVRC/Annotations/CLS-LOC/val", {f"{NAMES[0]}.xml": "<annotation/>"})
    assert labels(root) == EXPECTED
    error = refused(UsageError, "would be the only class", open_sources, tmp_path)
    assert f"the splits: {root};" in str(error.fix)
    # Their val.txt numbers the images, and so tells no classes.
    put(root, {"val.txt": f"{NAMES[0]} 1\n{NAMES[1]} 2\n"})
    assert labels(root) == EXPECTED


def test_a_list_of_synsets_says_what_numbers_mean(tmp_path):
    table(imagenet(tmp_path), "caffe")
    order = [*reversed(WNIDS), "n09999999"]
    put(tmp_path, {"synset_words.txt": "".join(f"{wnid} some, words\n" for wnid in order)})
    expected = {name: order[WNIDS.index(wnid)] for name, wnid in EXPECTED.items()}
    assert labels(tmp_path) == expected


def test_tiny_imagenet(tmp_path):
    images = {f"train/{wnid}/images/{wnid}_{n}.JPEG": None for wnid in WNIDS for n in range(2)}
    put(tmp_path, {**images, "wnids.txt": "\n".join(reversed(WNIDS)), "words.txt": "n01\twords\n"})
    lines = "".join(f"{name}\t{wnid}\t0\t32\t44\t62\n" for name, wnid in EXPECTED.items())
    put(tmp_path, {f"val/images/{name}": None for name in EXPECTED})
    put(tmp_path, {"val/val_annotations.txt": lines, "test/images/test_0.JPEG": None})
    assert labels(tmp_path) == {f"images/{name}": wnid for name, wnid in EXPECTED.items()}
    sources = open_sources(tmp_path)
    assert [len(source) for source in sources.values()] == [8, 6, 1]
    assert sources["test"].notes[0].startswith("no labels in test")


def test_val_in_class_folders_needs_no_file(tmp_path):
    put(tmp_path, {f"train/{wnid}/{wnid}_{n}.JPEG": None for wnid in WNIDS for n in range(2)})
    put(tmp_path, {f"val/{wnid}/{name}": None for name, wnid in EXPECTED.items()})
    table(tmp_path, "kaggle")  # says the same, and is ignored
    found = {name.rpartition("/")[2]: wnid for name, wnid in labels(tmp_path).items()}
    assert found == EXPECTED
    assert open_sources(tmp_path)["train"].ignored == {".csv file": 1}


MAP, TWO = "map_clsloc.txt", f"a,b\n{NAMES[0]},n1\n{NAMES[0]},n2\n"


@cases(
    "files message found",
    ({}, "images of val have no labels", "no class folders"),
    ({GROUND_TRUTH: "1\n"}, "no file maps them to class names", None),
    ({GROUND_TRUTH: "1\n", MAP: "n01440764 1 x\n"}, "lacks an image", NAMES[1]),
    ({GROUND_TRUTH: "7\n", MAP: "n01440764 1 x\n"}, "no class in row 1", NAMES[0]),
    ({GROUND_TRUTH: "1\n", "meta.mat": "x"}, "cannot be read", None),
    ({"val.txt": f"{NAMES[0]}.JPEG 4\n"}, "index that is out of range", "4, of 4 classes"),
    ({"LOC_val_solution.csv": TWO}, "two classes", NAMES[0]),
    (
        {"val.txt": "".join(f"{name}.JPEG dog\n" for name in NAMES)},
        "a class that train does not have",
        "dog",
    ),
)
def test_each_mistake_has_its_sentence(tmp_path, files, message, found):
    put(imagenet(tmp_path), files)
    raised = refused(SourceError if files else UsageError, message, open_sources, tmp_path)
    assert found is None or raised.found == found
    assert len(open_sources(tmp_path / "train")[""]) == 8  # the splits by themselves are as ever


@pytest.mark.parametrize("name", ["ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"])
def test_archives_as_they_are_downloaded_are_to_be_unpacked(tmp_path, name):
    tar(tmp_path / "a" / name, "n01440764_1")
    tar(tmp_path / "b/n01440764.tar", "n01440764_1")
    for path in (tmp_path / "a", tmp_path / "a" / name, tmp_path / "b"):
        for use in (open_sources, shardkit.open):
            error = refused(FormatError, "ImageNet as it is downloaded", use, path)
            assert "unpack them" in str(error.fix)
