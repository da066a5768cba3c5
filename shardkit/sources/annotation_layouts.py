"""Finds the images and annotations of a folder, by split: the layouts of COCO, Pascal VOC and YOLO.

- COCO: `annotations/instances_train2017.json` beside `train2017/` or `images/train2017/`; one
  `images/` for all annotation files; or `train/_annotations.coco.json` among the images.
- Pascal VOC: `JPEGImages/` and `Annotations/`, with splits from `ImageSets/Main/`; also below
  `VOCdevkit/VOC2012/`.
- YOLO: `images/train/` beside `labels/train/`, `train/images/` beside `train/labels/`, or `images/`
  beside `labels/`; `data.yaml` names the splits and the classes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardkit.errors import UsageError
from shardkit.helpers import os_errors
from shardkit.metadata.splits import KINDS, in_order, split_of
from shardkit.sources.layouts import IMAGES as NAMED_IMAGES
from shardkit.sources.layouts import field_of
from shardkit.sources.yolo import CONFIGS, Config, labels_of, read_config
from shardkit.storage import fs
from shardkit.storage.walk import Walk, is_folder, kind_of_file, relative_to, scandir

AMONG = "_annotations.coco.json"  # among its images, as Roboflow exports
# Prefixes of COCO's annotation files: those that are read, and others.
_OBJECTS = ("instances_", "person_keypoints_", "captions_")
_OTHERS = ("image_info_", "panoptic_", "stuff_")
_VOC = ("JPEGImages", "Annotations")
_ABOVE_VOC = re.compile(r"VOC[\w-]*", re.I)  # VOCdevkit, VOC2012
_YOLO = ("images", "labels")
_NAMES = ("classes.txt", "obj.names", "labels/classes.txt")  # class names, one per line
_MAX_LIST = 1 << 28  # maximum bytes of an image list


@dataclass
class Split:
    """The images of a split, from an annotation file or an image list, with their annotations."""

    folder: Path  # where the images are
    file: Path  # the JSON, or the folder of XML or label files
    names: set[str] | None = None  # names of the images, without suffixes; None: all
    shared: bool = False  # whether the folder also holds images of other splits
    yolo: Config | None = None  # how label files are read, if it has such
    beside: tuple[Path, ...] = ()  # other JSON files of the same images: keypoints, captions


@dataclass
class Layout:
    """What was found at a root folder: splits by name, and counts of ignored files."""

    splits: dict[str, Split]
    ignored: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    by_name: bool = False  # whether classes are sorted by name, not as the annotations list them


class _Folder:
    """The names of the files and subfolders in a folder, without hidden ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with os_errors.explained("list", path), scandir(path) as found:
            entries = [(e.name, is_folder(e)) for e in found if not e.name.startswith(".")]
        self.folders = sorted(name for name, below in entries if below)
        self.files = sorted(name for name, below in entries if not below)

    def below(self, name: str) -> _Folder:
        return _Folder(self.path / name)


def find_layout(root: Path, together: bool, classes: Sequence[str] | None) -> Layout | None:
    """Return the layout of a root folder with object annotations; None for any other folder.

    `classes` are the names that the user gives, for label files without names.
    """
    top = _Folder(root)
    while len(top.folders) == 1 and not top.files and _ABOVE_VOC.fullmatch(top.folders[0]):
        top = top.below(top.folders[0])
    years = [name for name in top.folders if _ABOVE_VOC.fullmatch(name)]
    if len(years) > 1 and {*_VOC} <= {*top.below(years[0]).folders}:
        raise UsageError(
            "the folder holds several datasets in the layout of Pascal VOC",
            path=root,
            found=", ".join(f"{name}/" for name in years),
            fix=f"give one of them: {top.path / years[-1]}",
        )
    if {*_VOC} <= {*top.folders} and any(n.endswith(".xml") for n in top.below(_VOC[1]).files):
        return _voc(top, together)
    found = _coco(top) or _yolo(top, classes)
    if found is None or not together:
        return found
    if len(found.splits) > 1:
        raise UsageError(
            "the splits cannot be taken as one dataset: each has annotations of its own",
            path=root,
            found=", ".join(str(relative_to(s.file, top.path)) for s in found.splits.values()),
            fix="omit --split none, and convert the resulting datasets together",
        )
    found.splits = {"": next(iter(found.splits.values()))}
    return found


def _coco(top: _Folder) -> Layout | None:
    annotations = next((name for name in top.folders if name.lower() == "annotations"), None)
    if annotations is None:
        return _among(top)
    files = [n for n in top.below(annotations).files if n.lower().endswith(".json")]
    chosen = _of_objects(files)
    if not chosen:
        return _among(top)
    layout = Layout({})
    folders = _folders_of(top, chosen, layout)
    beside = {stem: _of_same_images(files, stem, chosen[stem]) for stem in folders}
    read = {name for stem in folders for name in (chosen[stem], *beside[stem])}
    layout.ignored.update(f"file {name}" for name in files if name not in read)
    order = in_order(sorted(split_of(stem) or stem for stem in folders))
    for stem in sorted(folders, key=lambda stem: order.index(split_of(stem) or stem)):
        split = split_of(stem) or (stem if len(folders) > 1 else "")
        if split in layout.splits:
            raise UsageError(
                f"several annotation files are for the split {split!r}",
                path=top.path / annotations,
                found=", ".join(chosen.values()),
                fix="keep one of them, and move the others elsewhere",
            )
        within, times = folders[stem], [*folders.values()].count(folders[stem])
        folder = top.path / within if within else top.path
        file = top.path / annotations / chosen[stem]
        others = tuple(file.with_name(name) for name in beside[stem])
        layout.splits[split] = Split(folder, file, shared=times > 1, beside=others)
    used = {within.partition("/")[0] for within in folders.values()}
    layout.ignored += _beside(top, [annotations, *used])
    return layout


def _folders_of(top: _Folder, chosen: dict[str, str], layout: Layout) -> dict[str, str]:
    """The image folder of each annotation file: the one of the same name, or else one for all.

    If some files have one, those without are skipped: COCO's archive has the files of all splits.
    """
    images = next((name for name in top.folders if name.lower() in NAMED_IMAGES), "")
    every = {name: name for name in top.folders}
    if images:
        every = {name: f"{images}/{name}" for name in top.below(images).folders} | every
    found = {stem: every[stem] for stem in chosen if stem in every}
    if not found:
        return dict.fromkeys(chosen, images)
    for stem, name in chosen.items():
        if stem not in found:
            layout.notes.append(f"{name} is not read: there is no folder {stem}/")
    return found


def _among(top: _Folder) -> Layout | None:
    """Splits whose annotation file is in the same folder as their images."""
    splits = {}
    for name in ("", *top.folders):
        split = split_of(name) or ""
        folder = top.below(name) if split else top
        if (split or not name) and AMONG in folder.files:
            splits[split] = Split(folder.path, folder.path / AMONG)
    used = [split.folder.name for split in splits.values()]
    return Layout(splits, _beside(top, used)) if splits else None


def _of_objects(files: Sequence[str]) -> dict[str, str]:
    """COCO's main annotation files, by the stem of the name without prefix: `train2017`."""
    plain = [n for n in files if not n.startswith((*_OBJECTS, *_OTHERS))]
    kinds = [[n for n in files if n.startswith(begin)] for begin in _OBJECTS]
    chosen = next(filter(None, (kinds[0], plain, *kinds[1:])), [])
    stems = {n: n[: -len(".json")] for n in chosen}
    return {re.sub(f"^({'|'.join(_OBJECTS)})", "", stem): name for name, stem in stems.items()}


def _of_same_images(files: Sequence[str], stem: str, main: str) -> list[str]:
    """COCO's other files of the images of a main file: their keypoints and captions."""
    names = [f"{begin}{stem}.json" for begin in _OBJECTS[1:]]
    return [name for name in names if name in files and name != main]


def _voc(top: _Folder, together: bool) -> Layout:
    layout = Layout({}, _beside(top, [*_VOC, "ImageSets"]), by_name=True)
    folder, annotations = (top.path / name for name in _VOC)
    main = top.below("ImageSets").folders if "ImageSets" in top.folders else []
    lists = top.below("ImageSets").below("Main").files if "Main" in main and not together else []
    named = {n[:-4]: n for n in lists if n.endswith(".txt") and n[:-4] in (*KINDS, "trainval")}
    if "trainval" in named and {"train", "val"} & named.keys():
        del named["trainval"]
        layout.notes.append("trainval.txt is not read: it combines train.txt and val.txt")
    described = {name.rpartition(".")[0] for name in top.below(_VOC[1]).files}
    for split in in_order(sorted(named)):
        path = top.path / "ImageSets/Main" / named[split]
        names = {line.split()[0] for line in _lines(path)}
        if names and names.isdisjoint(described):
            layout.notes.append(f"{path.name} is not read: its images have no annotations")
        else:
            layout.splits[split] = Split(folder, annotations, names, shared=True)
    if not layout.splits:
        layout.splits[""] = Split(folder, annotations)
    if masks := [name for name in top.folders if field_of(name) == "mask" and name != _VOC[1]]:
        layout.notes.append(
            f"the boxes are read, and not the masks in {masks[0]}/, which --fields image,mask takes"
        )
    if others := len(lists) - len(named):
        layout.ignored["other lists in ImageSets/Main"] = others
    return layout


def _lines(path: Path, encoding: str = "utf-8") -> list[str]:
    """The lines of a list of images or classes, without blank ones."""
    with os_errors.explained("read", path):
        text = fs.read(path, _MAX_LIST).decode(encoding, "replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _beside(top: _Folder, used: Sequence[str]) -> Counter[str]:
    """Counts of the files and folders beside those that are used."""
    found = Counter(f"folder {name}/" for name in top.folders if name not in used)
    found.update(kind_of_file(name) for name in top.files if name not in (AMONG, *used))
    return found


def _yolo(top: _Folder, classes: Sequence[str] | None) -> Layout | None:
    """The splits that `data.yaml` names, or else those of the folders."""
    folders = _image_folders(top)
    labelled = any(_has_labels(top.path / str(labels_of(one))) for one in folders.values())
    file = next((name for name in CONFIGS if name in top.files), None)
    if not labelled and (file is None or folders):
        return None  # `labels/` may hold masks
    config = None if file is None else read_config(top.path / file)
    if config is None:
        if not labelled:
            return None
        config = Config(_class_names(top) or tuple(classes or ()))
    layout = Layout({}, Counter())
    paths = config.paths or folders
    for split in in_order(sorted(paths)):
        _add_yolo(layout, top, split, paths[split], config)
    if not layout.splits and not folders:
        return None
    if not layout.splits:
        raise UsageError(
            "none of the images that this file names are there",
            path=top.path / str(file),
            found=", ".join(config.paths.values()),
            fix="correct the paths of train, val and test",
        )
    if not config.names:
        layout.notes.append(
            "the classes have no names, only numbers: there is no data.yaml and no classes.txt;"
            " --classes FILE names them"
        )
    folders_used = (str(relative_to(split.folder, top.path)) for split in layout.splits.values())
    used = {path.partition("/")[0] for path in folders_used}
    lists = [path.rpartition("/")[2] for path in paths.values() if path.endswith(".txt")]
    layout.ignored = _beside(top, [*used, "labels", str(file), *_NAMES, *lists])
    return layout


def _add_yolo(layout: Layout, top: _Folder, split: str, given: str, config: Config) -> None:
    """Add the split whose images are in a folder, or in a list, unless they are not there."""
    path = _resolved(top.path, given)
    if path is None:
        layout.notes.append(f"no split {split!r}: there is no {given}")
        return
    names = None
    if path.endswith(".txt"):
        lines = _lines(top.path / path)
        names = {line.rpartition("images/")[2].rpartition(".")[0] for line in lines}
        path = "images"
    folder, labels = top.path / path, labels_of(path)
    if labels is None and not _has_labels(folder):
        return
    if labels is None:
        raise UsageError(
            "the images of a YOLO dataset are expected in a folder called images",
            path=folder,
            expected="images/ and labels/, with files of the same names",
            fix="rename the folder to images, and move the label files to labels beside it",
        )
    same = [
        name for name, one in layout.splits.items() if (one.folder, one.names) == (folder, names)
    ]
    if same:
        layout.notes.append(f"no split {split!r}: its images are those of {same[0]!r}")
        return
    layout.splits[split] = Split(folder, top.path / labels, names, names is not None, config)


def _image_folders(top: _Folder) -> dict[str, str]:
    """The folders of images that have one of labels, by split."""
    if {*_YOLO} <= {*top.folders}:
        images = top.below("images")
        splits = {name: split_of(name) for name in images.folders}
        if images.files or not all(splits.values()):
            return {"": "images"}
        return {split or "": f"images/{name}" for name, split in splits.items()}
    found = {split: name for name in top.folders if (split := split_of(name))}
    return {
        split: f"{name}/images"
        for split, name in found.items()
        if {*_YOLO} <= {*top.below(name).folders}
    }


def _has_labels(folder: Path) -> bool:
    files = (file.name for listing in Walk(folder) for file in listing.files)
    return folder.is_dir() and any(name.endswith(".txt") for name in files)


def _class_names(top: _Folder) -> tuple[str, ...]:
    """The class names that are listed in a file, one per line; none without such a file."""
    for path in (top.path / name for name in _NAMES):
        if path.is_file():
            return tuple(_lines(path, "utf-8-sig"))
    return ()


def _resolved(root: Path, path: str) -> str | None:
    """The longest end of a path that exists in a folder: paths may be those of another machine."""
    parts = [part for part in re.split(r"[/\\]", path) if part not in ("", ".", "..")]
    ends = ("/".join(parts[n:]) for n in range(len(parts)) if ":" not in parts[n])
    return next((end for end in ends if (root / end).exists()), None)
