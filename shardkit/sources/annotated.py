"""Folders of images with object annotations: COCO and Pascal VOC, as downloaded.

- COCO: `annotations/instances_train2017.json` beside `train2017/` or `images/train2017/`; one
  `images/` for all annotation files; or `train/_annotations.coco.json` among the images.
- Pascal VOC: `JPEGImages/` and `Annotations/`, with splits from `ImageSets/Main/`; also below
  `VOCdevkit/VOC2012/`.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardkit.codecs.media import IMAGES
from shardkit.dataset.folders import media_of
from shardkit.errors import SampleError, SourceError, UsageError
from shardkit.helpers import os_errors
from shardkit.metadata.splits import KINDS, in_order, split_of
from shardkit.sources.annotations import (
    CATEGORIES,
    Annotations,
    Read,
    annotations_of,
    check_boxes,
    frame_of,
)
from shardkit.sources.base import Source
from shardkit.sources.candidate import Candidate, Splits, refuse_metadata
from shardkit.sources.folder_scan import FolderScan
from shardkit.sources.layouts import IMAGES as NAMED_IMAGES
from shardkit.storage import fs
from shardkit.storage.walk import is_folder, kind_of_file, scandir

AMONG = "_annotations.coco.json"  # among its images, as Roboflow exports
# Prefixes of COCO's annotation files: those with objects, and those that are not read.
_OBJECTS = ("instances_", "person_keypoints_")
_OTHERS = ("captions_", "image_info_", "panoptic_", "stuff_")
_VOC = ("JPEGImages", "Annotations")
_ABOVE_VOC = re.compile(r"VOC[\w-]*", re.I)  # VOCdevkit, VOC2012
_MAX_LIST = 1 << 28  # maximum bytes of an image list
_MAX_PROBLEMS = 100_000  # maximum number that is reported one by one


@dataclass
class _Split:
    """The images of a split, from an annotation file or an image list, with their annotations."""

    folder: Path  # where the images are
    file: Path  # the JSON, or the folder of XML files
    names: set[str] | None = None  # names of the images, without suffixes; None: all
    shared: bool = False  # whether the folder also holds images of other splits


@dataclass
class Layout:
    """What was found at a root folder: splits by name, and counts of ignored files."""

    splits: dict[str, _Split]
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


def recognise(candidate: Candidate) -> Splits | None:
    """Return a folder of images with object annotations."""
    if not candidate.is_folder or media_of(candidate.contents) is not IMAGES:
        return None
    path, recipe = candidate.path, candidate.recipe
    layout = _find(path, candidate.together)
    if layout is None:
        return None
    refuse_metadata(recipe, path)
    if recipe.label_column is not None:
        raise UsageError(
            "the labels of these images are the categories of their boxes",
            path=path,
            fix="omit --label-column",
        )
    return candidate.noted(_open(layout, candidate))


def _find(root: Path, together: bool) -> Layout | None:
    """Return the layout of a root folder with object annotations; None for any other folder."""
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
    found = _coco(top)
    if found is None or not together:
        return found
    if len(found.splits) > 1:
        raise UsageError(
            "there are several annotation files, each for its own split",
            path=root,
            found=", ".join(split.file.name for split in found.splits.values()),
            fix="omit --split none, or convert one split at a time",
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
    layout = Layout({}, Counter(f"file {n}" for n in files if n not in chosen.values()))
    folders = _folders_of(top, chosen, layout)
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
        layout.splits[split] = _Split(folder, file, shared=times > 1)
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
            layout.ignored[f"file {name}"] += 1
            layout.notes.append(f"{name} is not read: there is no folder {stem}/")
    return found


def _among(top: _Folder) -> Layout | None:
    """Splits whose annotation file is in the same folder as their images."""
    splits = {}
    for name in ("", *top.folders):
        split = split_of(name) or ""
        folder = top.below(name) if split else top
        if (split or not name) and AMONG in folder.files:
            splits[split] = _Split(folder.path, folder.path / AMONG)
    used = [split.folder.name for split in splits.values()]
    return Layout(splits, _beside(top, used)) if splits else None


def _of_objects(files: Sequence[str]) -> dict[str, str]:
    """COCO's object annotation files, by the stem of the name without prefix: `train2017`."""
    plain = [n for n in files if not n.startswith((*_OBJECTS, *_OTHERS))]
    kinds = [[n for n in files if n.startswith(begin)] for begin in _OBJECTS]
    chosen = next(filter(None, (kinds[0], plain, kinds[1])), [])
    stems = {n: n[: -len(".json")] for n in chosen}
    return {re.sub(f"^({'|'.join(_OBJECTS)})", "", stem): name for name, stem in stems.items()}


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
        with os_errors.explained("read", path):
            text = fs.read(path, _MAX_LIST).decode("utf-8", "replace")
        names = {line.split()[0] for line in text.splitlines() if line.strip()}
        if names and names.isdisjoint(described):
            layout.notes.append(f"{path.name} is not read: its images have no annotations")
        else:
            layout.splits[split] = _Split(folder, annotations, names, shared=True)
    if not layout.splits:
        layout.splits[""] = _Split(folder, annotations)
    if others := len(lists) - len(named):
        layout.ignored["other lists in ImageSets/Main"] = others
    return layout


def _beside(top: _Folder, used: Sequence[str]) -> Counter[str]:
    """Counts of the files and folders beside those that are used."""
    found = Counter(f"folder {name}/" for name in top.folders if name not in used)
    found.update(kind_of_file(name) for name in top.files if name != AMONG)
    return found


def _open(layout: Layout, candidate: Candidate) -> dict[str, Source]:
    """Open the sources of a layout, one per split, with the same list of classes for all splits.

    Raises UsageError for overlapping splits, and for categories missing from `classes`.
    """
    folders = dict.fromkeys(split.folder for split in layout.splits.values())
    scans = {folder: FolderScan(folder, IMAGES) for folder in folders}
    for scan in scans.values():
        if scan.metadata_files:
            scan.ignored["metadata beside annotations"] += 1
    reads, chosen = {}, {}
    for name, split in layout.splits.items():
        scan = scans[split.folder]
        scan.ignored[".json file"] -= split.file.is_relative_to(split.folder)
        read = reads[name] = _read(split, scan)
        files = _joined(split, read, scan)
        paths = {image: scan.files.relative(file) for file, image in files.items()}
        read.frame = candidate.recipe.annotations_frame or frame_of(read, paths, split.folder)
        check_boxes(read, paths, split.folder)
        _refuse_many(read)
        chosen[name] = {file: image for file, image in files.items() if image not in read.bad}
    _refuse_overlap(layout, chosen, scans)
    table = _table(layout, reads, candidate)
    sources: dict[str, Source] = {}
    left = {path: len(scan.files) for path, scan in scans.items()}
    for name, split in layout.splits.items():
        read, scan = reads[name], scans[split.folder]
        left[split.folder] -= len(chosen[name]) + len(read.bad)
        annotations = annotations_of(read, list(chosen[name].values()), table)
        sources[name] = _source(scan, list(chosen[name]), annotations, read)
        sources[name].class_names = {CATEGORIES: table}
    first = next(iter(sources.values()))
    first.notes = (*layout.notes, *first.notes)
    shared = {split.folder for split in layout.splits.values() if split.shared}
    layout.ignored["images of no split"] += sum(left[path] for path in shared)
    first.ignored |= +layout.ignored
    return sources


def _source(
    scan: FolderScan, images: Sequence[int], annotations: Annotations, read: Read
) -> Source:
    """Some images of a folder with their annotations. Ignored files are reported once."""
    part = copy.copy(scan)
    part.files = scan.files.select(np.array(images, np.int64))
    part.files.metadata = annotations
    scan.ignored, scan.problems = Counter(), []
    part.ignored = +part.ignored + read.ignored
    part.problems = [*part.problems, *read.problems, *read.bad.values()]
    source = part.source(None)
    source.notes = (*source.notes, *read.notes)
    return source


def _read(split: _Split, scan: FolderScan) -> Read:
    """Read the annotations of a split."""
    from shardkit.sources.coco import read_coco  # imported only where needed
    from shardkit.sources.voc import read_voc

    if split.file.suffix.lower() == ".json":
        return read_coco(split.file)
    files = [scan.files.relative(n) for n in range(len(scan.files))]
    if split.names is None:
        return read_voc(split.file, files)
    by_stem = {name.rpartition(".")[0]: name for name in files}
    read = read_voc(split.file, [by_stem[n] for n in sorted(split.names) if n in by_stem])
    read.problems += [_not_there(split.file, n) for n in sorted(split.names) if n not in by_stem]
    return read


def _joined(split: _Split, read: Read, scan: FolderScan) -> dict[int, int]:
    """Map the number of each image file that has annotations to the image's number in `read`."""
    numbers = {scan.files.relative(n): n for n in range(len(scan.files))}
    begin = f"{split.folder.name}/"  # file names may include the folder
    found: dict[int, int] = {}
    for row, name in enumerate(read.images):
        file = numbers.get(name)
        if file is None:
            file = numbers.get(name.removeprefix(begin))
        if file is None:
            read.problems.append(_not_there(read.path, name))
        elif file in found:
            raise SourceError(
                "the annotations list an image twice", path=read.path, found=name,
                fix="merge the two entries: each of them may have only some of the objects",
            )  # fmt: skip
        else:
            found[file] = row
    if not split.shared:
        for file in range(len(scan.files)):
            if file not in found:
                error = SampleError(
                    "an image is not listed in the annotations, so its objects are unknown",
                    path=read.path,
                    found=scan.files.relative(file),
                    fix="add it to the list, even without objects, or exclude it with --on-error"
                    " skip",
                )
                read.problems.append(error)
    return dict(sorted(found.items()))


def _refuse_many(read: Read) -> None:
    """Raise SourceError for so many problems that the annotations are for other images."""
    problems = [*read.problems, *read.bad.values()]
    if len(problems) > _MAX_PROBLEMS:
        raise SourceError(
            f"{len(problems):,} images and annotations do not match",
            path=read.path,
            expected=f"at most {_MAX_PROBLEMS:,}, with --on-error skip",
            found=f"{problems[0].what}: {problems[0].found}",
            fix="check that the annotations are for these images",
        )


def _refuse_overlap(
    layout: Layout, chosen: dict[str, dict[int, int]], scans: dict[Path, FolderScan]
) -> None:
    seen: dict[tuple[Path, int], str] = {}
    for name, split in layout.splits.items():
        for file in chosen[name]:
            other = seen.setdefault((split.folder, file), name)
            if other != name:
                raise UsageError(
                    f"the splits {other!r} and {name!r} overlap",
                    path=split.folder,
                    found=f"{scans[split.folder].files.relative(file)!r} is in both",
                    fix="correct the lists, or convert all images as one dataset with --split none",
                )


def _table(layout: Layout, reads: dict[str, Read], candidate: Candidate) -> tuple[str, ...]:
    """The names of all categories, in the order of `--classes` or else of the first split."""
    classes = candidate.recipe.classes
    found = list(dict.fromkeys(kind for read in reads.values() for kind in read.kinds))
    if layout.by_name:
        found.sort()
    if classes is None or isinstance(classes, Mapping):
        return tuple(found)
    missing = [name for name in found if name not in set(classes)]
    if missing and candidate.strict:
        raise UsageError(
            f"the list of classes does not name the category {missing[0]!r}",
            path=next(iter(reads.values())).path,
            found=f"{len(missing)} categories that are not in the list",
            fix="add them to the list, by the names that the annotations use",
        )
    return (*classes, *missing)


def _not_there(path: Path, name: str) -> SampleError:
    return SampleError(
        "the annotations name an image that is not there",
        path=path,
        found=name,
        fix="restore the image, or exclude it with --on-error skip",
    )
