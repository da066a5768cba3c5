"""Folders of images with object annotations: COCO, Pascal VOC and YOLO, as downloaded."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from shardkit.codecs.media import IMAGES
from shardkit.codecs.shapes import KEYPOINTS
from shardkit.dataset.folders import media_of
from shardkit.errors import SampleError, SourceError, UsageError
from shardkit.sources.annotation_layouts import Layout, Split, find_layout
from shardkit.sources.annotations import (
    CATEGORIES,
    Annotations,
    Read,
    annotations_of,
    check_boxes,
    frame_of,
    share_columns,
)
from shardkit.sources.base import Source
from shardkit.sources.candidate import Candidate, Splits, refuse_metadata
from shardkit.sources.folder_scan import FolderScan

_MAX_PROBLEMS = 100_000  # maximum number that is reported one by one


def recognise(candidate: Candidate) -> Splits | None:
    """Return a folder of images with object annotations."""
    if not candidate.is_folder or media_of(candidate.contents) is not IMAGES:
        return None
    path, recipe = candidate.path, candidate.recipe
    classes = None if isinstance(recipe.classes, Mapping) else recipe.classes
    layout = find_layout(path, candidate.together, classes)
    if layout is None:
        return None
    refuse_metadata(recipe, path)
    if recipe.has_label_column:
        raise UsageError(
            "the labels of these images are the categories of their boxes",
            path=path,
            fix="omit --label-column and --label-columns",
        )
    return candidate.noted(_open(layout, candidate))


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
        described = (split.file, *split.beside)
        scan.ignored[".json file"] -= sum(one.is_relative_to(split.folder) for one in described)
        read = reads[name] = _read(split, scan)
        files = _joined(split, read, scan)
        paths = {image: scan.files.relative(file) for file, image in files.items()}
        told = "upright" if read.relative else frame_of(read, paths, split.folder)
        read.frame = candidate.recipe.annotations_frame or told
        check_boxes(read, paths, split.folder)
        _refuse_many(read)
        chosen[name] = {file: image for file, image in files.items() if image not in read.bad}
    _refuse_overlap(layout, chosen, scans)
    table = _table(layout, reads, candidate)
    keypoints = share_columns(list(reads.values()))
    sources: dict[str, Source] = {}
    left = {path: len(scan.files) for path, scan in scans.items()}
    for name, split in layout.splits.items():
        read, scan = reads[name], scans[split.folder]
        left[split.folder] -= len(chosen[name]) + len(read.bad)
        annotations = annotations_of(read, list(chosen[name].values()), table)
        sources[name] = _source(scan, list(chosen[name]), annotations, read)
        named = {CATEGORIES: table} | ({KEYPOINTS: keypoints} if keypoints else {})
        sources[name].class_names = {n: v for n, v in named.items() if n in annotations.schema}
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


def _read(split: Split, scan: FolderScan) -> Read:
    """Read the annotations of a split."""
    from shardkit.sources.coco import read_coco  # imported only where needed
    from shardkit.sources.voc import read_voc
    from shardkit.sources.yolo import read_yolo

    if split.file.suffix.lower() == ".json":
        return read_coco(split.file, split.beside)

    def read_files(images: Sequence[str]) -> Read:
        if split.yolo is not None:
            return read_yolo(split.file, images, split.yolo, stray=not split.shared)
        return read_voc(split.file, images)

    files = [scan.files.relative(n) for n in range(len(scan.files))]
    if split.names is None:
        return read_files(files)
    by_stem = {name.rpartition(".")[0]: name for name in files}
    read = read_files([by_stem[n] for n in sorted(split.names) if n in by_stem])
    read.problems += [_not_there(split.file, n) for n in sorted(split.names) if n not in by_stem]
    return read


def _joined(split: Split, read: Read, scan: FolderScan) -> dict[int, int]:
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
