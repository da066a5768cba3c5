"""Detects image folders that are not class folders: COCO, VOC, YOLO, splits with other names.

Their labels are in files that are not read yet. Treating such folders as classes would silently
give wrong labels, so they are refused, and the error names the folder to give instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from shardkit.errors import UsageError
from shardkit.metadata.splits import kind_of_split, mixed_splits, several_subsets

# Names of the folders of such datasets, in lower case: those with images, and those with
# annotations (boxes, masks, lists).
IMAGES = {
    *("images", "image", "imgs", "img", "jpegimages", "jpeg", "photos", "pictures", "rgb"),
    *("leftimg8bit", "input", "inputs"),
    *("audio", "audios", "wav", "wavs", "flac", "mp3", "clips", "recordings", "sounds", "video"),
    "videos",
}
ANNOTATIONS = {
    *(
        "annotations",
        "annotation",
        "labels",
        "label",
        "imagesets",
        "bboxes",
        "boxes",
        "xml",
        "xmls",
    ),
    *("masks", "mask", "segmentation", "segmentations", "segmentationclass", "segmentationobject"),
    *("lbls", "lbl", "anno", "annos", "seg", "segs", "matte", "mattes"),
    *("gt", "gtfine", "ground_truth", "groundtruth", "trimaps", "depth", "target", "targets"),
}
# Names of folders of which each holds one side of a sample, in files of equal names.
_SIDES = IMAGES | ANNOTATIONS
_SIDES |= {"a", "b", "x", "y", "hr", "lr", "hq", "lq", "high", "low", "highres", "lowres"}
_SIDES |= {"clean", "noisy", "noise", "hazy", "rainy", "blur", "blurry", "blurred", "sharp"}
_SIDES |= {"source", "sources", "src", "tgt", "output", "outputs", "edge", "edges", "normals"}
_SIDES |= {"left", "right", "before", "after", "reference", "ref", "original", "edited"}
_DOMAINS = re.compile(r"(train|test|val|valid)_?[ab]")  # as in CycleGAN's datasets


class Tree:
    """The folder tree below a root, and which folders hold images themselves or further below."""

    def __init__(
        self,
        root: Path,
        below: Mapping[str, Sequence[str]],
        images: Sequence[str],
        what: str = "images",
    ) -> None:
        """`below` are the subfolder names of each folder; `images` the folders with images.

        `what` names the kind of the files, which may also be audio or video.
        """
        self.root = root
        self.what = what
        self._below = below
        self.images = sorted(images)
        parts = [folder.split("/") for folder in images]
        self._above = {"/".join(p[:n]) for p in parts for n in range(1, len(p) + 1)}

    def folders(self, folder: str = "") -> list[str]:
        """The names of the subfolders of a folder."""
        return sorted(self._below.get(folder, ()))

    def filled(self, folder: str = "") -> list[str]:
        """The subfolders of a folder that hold images, at any depth."""
        prefix = f"{folder}/" if folder else ""
        return [name for name in self.folders(folder) if prefix + name in self._above]

    def has_own(self, folder: str) -> bool:
        """Whether a folder holds images itself."""
        return folder in self.images

    def path(self, folder: str) -> Path:
        return self.root / folder if folder else self.root


def refuse_annotations(tree: Tree) -> None:
    """Raise UsageError for image folders beside folders of annotations or masks."""
    for folder in ("", *tree.folders()):
        _refuse_annotations(tree, folder)


def check_classes(tree: Tree) -> None:
    """Raise UsageError if the only folder of a root is not a class."""
    classes = tree.filled()
    if len(classes) == 1 and not tree.has_own(classes[0]):
        raise _too_high(tree, classes[0])
    if len(classes) == 1 and (classes[0].lower() in IMAGES or kind_of_split(classes[0])):
        raise UsageError(
            f"the only folder with {tree.what} is called {classes[0]!r}, which is not a class",
            path=tree.root,
            fix=f"to convert {tree.what} without labels, give that folder: {tree.path(classes[0])}",
        )


def refuse_sides(tree: Tree, stems: Callable[[str], Collection[str]]) -> None:
    """Raise UsageError for folders that hold the sides of pairs, such as `hr/` and `lr/`.

    Both their names and those of their files tell it; `stems` returns the latter without suffix.
    """
    names = tree.filled()
    if len(names) < 2 or not all(
        name.lower() in _SIDES or _DOMAINS.fullmatch(name.lower()) for name in names
    ):
        return
    first = set(stems(names[0]))
    alike = len(first) > 1 and all(set(stems(name)) == first for name in names[1:])
    if not alike and not all(_DOMAINS.fullmatch(name.lower()) for name in names):
        return
    shown = ", ".join(f"{name}/" for name in names[:6])
    raise UsageError(
        f"the folders seem to hold different {tree.what} of the same samples, not classes",
        path=tree.root,
        expected="a folder for each class, or the masks of NAME.jpg beside it, as NAME_mask.png",
        found=f"{shown}, with files of the same names" if alike else shown,
        fix=f"convert one by itself: {tree.path(names[0])}; or, if these folders are classes, list"
        " them with --classes FILE",
    )


def check_splits(tree: Tree) -> None:
    """Raise UsageError if folders seem to be splits, or if each of them holds splits."""
    subsets = [folder for folder in tree.filled() if len(_kinds(tree.filled(folder))) > 1]
    if len(subsets) > 1 and subsets == tree.filled():
        raise several_subsets(tree.root, subsets)
    for folder in ("", *tree.filled()):
        names = tree.filled(folder)
        told = [(kind, name) for name in names if (kind := kind_of_split(name))]
        kinds = dict(told)
        if len(kinds) > 1 and 2 * len(told) >= len(names):  # else classes: bullet_train, test_tube
            prefix = f"{folder}/" if folder else ""
            raise mixed_splits(tree.root, [f"{prefix}{name}/" for name in sorted(kinds.values())])


def _kinds(names: Iterable[str]) -> set[str]:
    return {kind for name in names if (kind := kind_of_split(name))}


def _refuse_annotations(tree: Tree, folder: str) -> None:
    names = {name.lower() for name in tree.folders(folder)}
    tells = sorted(names & ANNOTATIONS)
    holds = names & IMAGES or {name for name in names if kind_of_split(name)}
    if not tells or not (holds or tree.has_own(folder)):
        return
    others = {name.lower() for name in tree.filled(folder)} - ANNOTATIONS - holds
    if len(others) > len(holds) + len(tells):
        return  # one of many classes may be called mask or target
    kind = "a dataset with annotations or masks"
    if "jpegimages" in names:
        kind = "a dataset in the layout of Pascal VOC"
    elif "labels" in names:
        kind = "a dataset in the layout of YOLO"
    elif "annotations" in names:
        kind = "a dataset in the layout of COCO, or one with masks"
    prefix = f"{folder}/" if folder else ""
    of_images = [
        name
        for name in tree.images
        if name.startswith(prefix)
        and name[len(prefix) :].partition("/")[0].lower() not in ANNOTATIONS
        and name != folder
    ]
    way = f", such as {tree.path(of_images[0])}" if of_images else ""
    raise UsageError(
        f"this is {kind}, whose annotations shardkit cannot read yet",
        path=tree.path(folder),
        found=", ".join(f"{name}/" for name in tree.folders(folder)[:6]),
        expected="a folder for each class, or only images",
        fix=f"give a folder that holds only images{way}; or, if these folders are classes, list"
        " them with --classes FILE",
    )


def _too_high(tree: Tree, folder: str) -> UsageError:
    """The error for a root whose only folder holds the class folders."""
    below = folder
    while not tree.has_own(below) and len(tree.filled(below)) == 1:
        below = f"{below}/{tree.filled(below)[0]}"
    names = tree.filled(below)
    classes = below if names else below.rpartition("/")[0]
    return UsageError(
        f"all images are in folders below {folder!r}, which would be the only class",
        path=tree.root,
        found=", ".join(f"{below}/{name}/" for name in names[:5]) or f"{below}/",
        fix=f"give the folder that holds the classes, or the splits: {tree.path(classes)}; or list"
        " the classes with --classes FILE",
    )
