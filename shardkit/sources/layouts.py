"""What the folders below a root of images are: splits, classes, or neither.

Folders of images beside annotations or masks are not classes. Treating such folders as classes
would silently give wrong labels, so they are refused, and the error names the folder to give
instead.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from shardkit.codecs.media import IMAGES as IMAGE_FILES
from shardkit.codecs.media import Kind
from shardkit.errors import UsageError
from shardkit.helpers import os_errors
from shardkit.metadata.splits import (
    KINDS,
    beside_splits,
    kind_of_split,
    mixed_splits,
    refuse_synonyms,
    several_subsets,
    word_of_split,
)
from shardkit.sources.imagenet import DEVKIT
from shardkit.sources.metadata import FILES as METADATA_FILES
from shardkit.storage.walk import is_folder, kind_of_file, passed_over, scandir

# The fields of folders that each hold one image of every sample, in the order of a sample.
_SIDES = {
    "image": "images image imgs img jpegimages jpeg photos pictures rgb leftimg8bit",
    **{name: f"{name} {name}s" for name in ("input", "target", "output")},
    **{name: name for name in ("hr", "lr", "lq", "hq", "a", "b")},
    "gt": "gt ground_truth groundtruth",
    "mask": "mask masks annotation annotations anno annos label labels lbl lbls seg segs"
    " segmentation segmentations segmentationclass",
    "instances": "segmentationobject instances",
    **{name: f"{name} {name}s" for name in ("depth", "trimap", "matte", "edge", "normal")},
}
# Names of the folders of such datasets, in lower case: those with images, and those with
# annotations (boxes, masks, lists).
IMAGES = {
    *f"{_SIDES['image']} {_SIDES['input']}".split(),
    *("audio", "audios", "wav", "wavs", "flac", "mp3", "clips", "recordings", "sounds", "video"),
    *("videos", "imagestr", "imagests"),
}
ANNOTATIONS = {"imagesets", "bboxes", "boxes", "xml", "xmls", "gtfine", "labelstr", "labelsts"}
ANNOTATIONS |= {
    folder
    for name in ("mask", "instances", "gt", "matte", "trimap", "depth", "target")
    for folder in _SIDES[name].split()
}
_FIELDS = {folder: name for name, folders in _SIDES.items() for folder in folders.split()}
# Fields that leave no doubt.
_PAIRS = ({"input", "target"}, {"hr", "lr"}, {"hq", "lq"}, {"gt", "lq"}, {"a", "b"})
# Names of folders that are sides, or classes.
_PERHAPS = {*_FIELDS, "x", "y", "high", "low", "highres", "lowres", "normals"}
_PERHAPS |= {"clean", "noisy", "noise", "hazy", "rainy", "blur", "blurry", "blurred", "sharp"}
_PERHAPS |= {"source", "sources", "src", "tgt", "left", "right", "before", "after"}
_PERHAPS |= {"reference", "ref", "original", "edited"}
_DOMAINS = re.compile(r"(train|test|val|valid)_?[ab]")  # as in CycleGAN's datasets
_KINDS = {  # of datasets that are refused, by a folder that tells
    "jpegimages": "a dataset in the layout of Pascal VOC",
    "labels": "a dataset in the layout of YOLO",
    "annotations": "a dataset in the layout of COCO, or one with masks",
}
_SHOWN = 5  # files to name in errors
_DEEP = 8  # maximum number of nested folders that hold nothing but one folder


class Tree:
    """The folder tree below a root, and which folders hold images themselves or further below."""

    def __init__(
        self, root: Path, below: Mapping[str, Sequence[str]], images: Sequence[str], what: str
    ) -> None:
        """`below` has the subfolders of each folder, `images` the folders with `what`."""
        self.root = root
        self.what = what
        self._below = below
        self.images = sorted(images)
        parts = [folder.split("/") for folder in images]
        self._above = {"/".join(p[:n]) for p in parts for n in range(1, len(p) + 1)}

    def folders(self, folder: str = "") -> list[str]:
        """Return the names of the subfolders of a folder."""
        return sorted(self._below.get(folder, ()))

    def filled(self, folder: str = "") -> list[str]:
        """Return the subfolders of a folder that hold images, at any depth."""
        prefix = f"{folder}/" if folder else ""
        return [name for name in self.folders(folder) if prefix + name in self._above]

    def has_own(self, folder: str) -> bool:
        """Return whether a folder holds images itself."""
        return folder in self.images

    def path(self, folder: str) -> Path:
        return self.root / folder if folder else self.root


def refuse_annotations(tree: Tree) -> None:
    """Raise UsageError for image folders beside folders of annotations or masks."""
    for folder in ("", *tree.folders()):
        names = {name.lower() for name in tree.folders(folder)}
        tells = names & ANNOTATIONS
        holds = names & IMAGES or {name for name in names if kind_of_split(name)}
        others = {name.lower() for name in tree.filled(folder)} - ANNOTATIONS - holds
        # One of many classes may be called mask or target.
        few = len(others) <= len(holds) + len(tells)
        if tells and few and (holds or tree.has_own(folder)):
            raise _annotated(tree, folder, names)


def _annotated(tree: Tree, folder: str, names: set[str]) -> UsageError:
    """The error for a folder of images beside annotations; `names` of its folders tell the kind."""
    kinds = (kind for name, kind in _KINDS.items() if name in names)
    prefix = f"{folder}/" if folder else ""
    below = (name for name in tree.images if name.startswith(prefix) and name != folder)
    tops = ((name, name[len(prefix) :].partition("/")[0].lower()) for name in below)
    way = next((tree.path(name) for name, top in tops if top not in ANNOTATIONS), None)
    such = "" if way is None else f", such as {way}"
    return UsageError(
        f"this is {next(kinds, 'a dataset with annotations or masks')}, whose annotations shardkit"
        " cannot read yet",
        path=tree.path(folder),
        found=", ".join(f"{name}/" for name in tree.folders(folder)[:6]),
        expected="a folder for each class, or only images",
        fix=f"give a folder that holds only images{such}; or, if these folders are classes, list"
        " them with --classes FILE",
    )


def check_classes(tree: Tree) -> None:
    """Raise UsageError if the only folder of a root is not a class."""
    if len(tree.filled()) != 1:
        return
    (only,) = tree.filled()
    if not tree.has_own(only):
        below = only
        while not tree.has_own(below) and len(tree.filled(below)) == 1:
            below = f"{below}/{tree.filled(below)[0]}"
        names = tree.filled(below)
        classes = below if names else below.rpartition("/")[0]
        raise UsageError(
            f"all images are in folders below {only!r}, which would be the only class",
            path=tree.root,
            found=", ".join(f"{below}/{name}/" for name in names[:5]) or f"{below}/",
            fix=f"give the folder that holds the classes, or the splits: {tree.path(classes)}; or"
            " list the classes with --classes FILE",
        )
    if only.lower() in IMAGES or kind_of_split(only):
        raise UsageError(
            f"the only folder with {tree.what} is called {only!r}, which is not a class",
            path=tree.root,
            fix=f"to convert {tree.what} without labels, give that folder: {tree.path(only)}",
        )


def check_sides(tree: Tree, stems: Callable[[str], Iterable[str]]) -> list[str]:
    """Return a note on two folders of files with the same names: they may hold pairs.

    Raises UsageError if their names tell it, too, such as `hr/` and `lr/`; `stems` returns those of
    files, in order, without suffix.
    """
    names = tree.filled()
    doubtful = [n for n in names if n.lower() in _PERHAPS or _DOMAINS.fullmatch(n.lower())]
    pair = len(names) == 2 and tree.what == IMAGE_FILES.many
    if len(names) < 2 or (doubtful != names and not pair):
        return []
    alike = all(_are_equal(stems(names[0]), stems(name)) for name in names[1:])
    if doubtful != names:
        words = f"the files in {names[0]}/ and {names[1]}/ have the same names: if they are pairs"
        return [f"{words}, not classes, give --fields {','.join(names)}"] * alike
    if not alike and not all(_DOMAINS.fullmatch(name.lower()) for name in names):
        return []
    shown = ", ".join(f"{name}/" for name in names[:6])
    raise UsageError(
        f"the folders seem to hold different {tree.what} of the same samples, not classes",
        path=tree.root,
        expected="a folder for each class, or folders whose names leave no doubt, such as images/"
        " and masks/, input/ and target/, hr/ and lr/",
        found=f"{shown}, with files of the same names" if alike else shown,
        fix=f"name the folders: --fields {','.join(map(field_of, names))} if each has an image of"
        f" every sample, or --classes FILE if they are classes; or convert {tree.path(names[0])} by"
        " itself",
    )


def _are_equal(names: Iterable[str], others: Iterable[str]) -> bool:
    """Return whether all names are the same, and more than one; stops at the first difference."""
    count = 0
    for name, other in zip_longest(names, others):
        if name != other:
            return False
        count += 1
    return count > 1


def field_of(folder: str) -> str:
    """Return the field of a folder that holds an image of each sample.

    >>> field_of("SegmentationClass"), field_of("Left")
    ('mask', 'left')
    """
    return _FIELDS.get(folder.lower(), folder.lower())


def in_order_of_sides(fields: Iterable[str]) -> list[str]:
    """Return fields in their order in a sample: the image comes first, and others last."""
    order = [*_SIDES]
    return sorted(fields, key=lambda n: (order.index(n) if n in order else len(order), n))


def are_sides(fields: Collection[str]) -> bool:
    """Return whether the names of folders, as fields, leave no doubt that they are no classes."""
    found = {*fields}
    some = "image" in found and len(found) > 1 and found.isdisjoint("ab")
    return (some or any(pair <= found for pair in _PAIRS)) and found <= _SIDES.keys()


def ignored_in(folder: Path, read: Collection[str]) -> Counter[str]:
    """Count the files in a folder, and the folders in it that are not read."""
    listed = _list(folder, IMAGE_FILES)
    found = Counter(f"folder {name}/" for name in listed.folders if name not in read)
    return found + listed.ignored + Counter(map(kind_of_file, listed.data))


def check_splits(tree: Tree) -> None:
    """Raise UsageError if folders seem to be splits, or if each of them holds splits."""
    classes = tree.filled()
    subsets = [
        name for name in classes if len({*map(kind_of_split, tree.filled(name))} - {None}) > 1
    ]
    if len(subsets) > 1 and subsets == classes:
        raise several_subsets(tree.root, subsets)
    for folder in ("", *classes):
        names = tree.filled(folder)
        told = [(kind, name) for name in names if (kind := kind_of_split(name))]
        kinds = dict(told)
        if len(kinds) > 1 and 2 * len(told) >= len(names):  # else classes: bullet_train, test_tube
            prefix = f"{folder}/" if folder else ""
            raise mixed_splits(tree.root, [f"{prefix}{name}/" for name in sorted(kinds.values())])


# --- splits ------------------------------------------------------------------------------------


@dataclass
class SplitFolders:
    """The split folders by split name, in output order."""

    root: Path  # the parent of the split folders: the given folder, or one nested in it
    folders: dict[str, str] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)  # files beside them
    notes: tuple[str, ...] = ()

    @property
    def paths(self) -> dict[str, Path]:
        return {split: self.root / folder for split, folder in self.folders.items()}


@dataclass
class _Listed:
    """The direct contents of a folder."""

    folders: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)  # names of the first images or metadata files
    ignored: Counter[str] = field(default_factory=Counter)  # other files


def find_split_folders(root: Path, media: Kind, without: str | None = None) -> SplitFolders:
    """Return the splits of a folder of images or other media; empty if its folders are not splits.

    If a folder holds nothing but one other folder, that one is searched instead, with a note.
    Raises UsageError for splits beside other folders or images, and for two folders of one split.
    """
    found = _splits_in(root, listed := _list(root, media, without))
    if found.folders:
        return found
    top, ignored = root, Counter(listed.ignored)
    for _ in range(_DEEP):
        if listed.data or len(listed.folders) != 1 or word_of_split(listed.folders[0]):
            break
        top = top / listed.folders[0]
        listed = _list(top, media)
        if len(listed.folders) > 1:
            found = _splits_in(top, listed) if len(_named(listed.folders)) > 1 else found
            break
        ignored += listed.ignored
    if not found.folders:
        return SplitFolders(root)
    found.ignored += ignored
    found.notes = (f"the splits were found in {top}",)
    return found


def _splits_in(root: Path, listed: _Listed) -> SplitFolders:
    named = _named(listed.folders)
    of_splits = [name for names in named.values() for name in names]
    others = [name for name in listed.folders if name not in of_splits]
    with_classes = any(_holds_classes(root / name) for name in of_splits)
    if not with_classes and (others or listed.data):
        return SplitFolders(root)  # flat folders with such names are classes among others
    devkits = [name for name in others if DEVKIT.fullmatch(name)]
    beside = [f"{name}/" for name in others if name not in devkits] + listed.data
    if named and beside:
        raise beside_splits(root, named, beside)
    refuse_synonyms(root, named)
    for names in named.values():
        if len(names) > 1:
            raise UsageError(
                f"two folders are the same split: {'/ and '.join(names)}/",
                path=root,
                fix="convert one of them at a time, move one elsewhere, or treat all folders as"
                " classes with --split none",
            )
    listed.ignored.update({"devkit folder": len(devkits)} if devkits else {})
    return SplitFolders(root, {split: named[split][0] for split in named}, listed.ignored)


def _list(folder: Path, media: Kind, without: str | None = None) -> _Listed:
    found = _Listed()
    with os_errors.explained("list", folder), scandir(folder) as entries:
        for entry in entries:
            if entry.name == without:
                continue
            if (words := passed_over(entry.name)) is not None:
                found.ignored[words] += 1
            elif is_folder(entry):
                found.folders.append(entry.name)
            elif entry.name in METADATA_FILES or media.has(entry.name):
                found.data += [entry.name] if len(found.data) < _SHOWN else []
            else:
                found.ignored[kind_of_file(entry.name)] += 1
    found.folders.sort()
    return found


def _named(folders: Sequence[str]) -> dict[str, list[str]]:
    """The folders named after splits, whose names differ only in the split and in numbers."""
    alike: dict[str, dict[str, list[str]]] = {}
    for name in folders:
        if word := word_of_split(name):
            rest = re.sub(r"[-_. ]?\d+", "", name.lower().replace(word, "*", 1))
            alike.setdefault(rest, {}).setdefault(word, []).append(name)
    found = max(alike.values(), key=len, default={})
    if len(found) < 2:
        exact = [name for name in folders if name.lower() in KINDS]
        found = {name.lower(): [n for n in exact if n.lower() == name.lower()] for name in exact}
    return {split: found[split] for split in KINDS if split in found}


def _holds_classes(folder: Path) -> bool:
    with os_errors.explained("list", folder), scandir(folder) as entries:
        return any(
            entry.name in METADATA_FILES or (is_folder(entry) and passed_over(entry.name) is None)
            for entry in entries
        )
