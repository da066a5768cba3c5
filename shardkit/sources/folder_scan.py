"""Planning an image folder: one walk finds images, classes, splits, sidecars, metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import time_ns
from typing import TYPE_CHECKING

import numpy as np

from shardkit import storage
from shardkit.codecs.image import SUFFIXES
from shardkit.errors import SourceError, UsageError
from shardkit.schema import FieldType, Image, Int, Schema
from shardkit.sources.base import Source
from shardkit.sources.file_table import odd_keys
from shardkit.sources.files import file_path
from shardkit.sources.image_folder import SIDECARS, Files, ImageFolder, mixed_time
from shardkit.sources.layouts import (
    Tree,
    check_classes,
    check_splits,
    refuse_annotations,
    split_folders,
)
from shardkit.sources.metadata import FILES as METADATA_FILES
from shardkit.sources.metadata import Metadata, read_metadata
from shardkit.walk import DirEntry, Walk, is_folder, kind_of_file, look, scandir

if TYPE_CHECKING:
    import numpy.typing as npt


def scan_folder(
    root: Path, *, split: str = "auto", classes: Sequence[str] | None = None, strict: bool = True
) -> dict[str, Source]:
    """The source of a folder, or one per split folder with one class table over all.

    Unless `strict`, classes that are not among `classes` come after those.
    Raises SourceError for a folder without images, UsageError for folders that `classes` lacks, and
    for those that are neither classes nor splits.
    """
    splits = _split_folders(root) if split == "auto" else {}
    folders = {name: root / folder for name, folder in splits.items()} or {"": root}
    scans = {name: _Scan(folder) for name, folder in folders.items()}
    if splits:  # what lies beside their folders is named once
        next(iter(scans.values())).ignored.update(_files_in(root))
    if not any(scan.files.names for scan in scans.values()):
        for scan in scans.values():
            if scan.problems:
                raise scan.problems[0]
        raise no_images(root, sum((scan.ignored for scan in scans.values()), Counter()))
    labelled = all(scan.labelled for scan in scans.values())
    filled = sorted({name for scan in scans.values() for name in scan.tree.filled()})
    if not strict and classes is not None:
        classes = [*classes, *(name for name in filled if name not in set(classes))]
    elif classes is None:
        for scan in scans.values():
            scan.check_folders(splits=split == "auto")
        _refuse_empty(root, scans.values(), filled, labelled)
    else:
        _check_classes(root, classes, filled, labelled)
    table = tuple(filled if classes is None else classes) if labelled else None
    return {name: scan.source(table) for name, scan in scans.items()}


def _refuse_empty(
    root: Path, scans: Iterable[_Scan], filled: Sequence[str], labelled: bool
) -> None:
    """Raise UsageError for a folder without images beside those of classes."""
    every = {name for scan in scans for name in scan.class_folders}
    empty = sorted(every - set(filled))
    if labelled and empty:
        raise UsageError(
            "there are folders without images beside those of the classes",
            path=root,
            found=", ".join(f"{name}/" for name in empty[:5]),
            expected="images in each folder, as it would be a class",
            fix="move them away, or name the classes with --classes FILE: one that is listed may be"
            " empty, and an empty folder that is not listed is passed over",
        )


def _files_in(folder: Path) -> list[str]:
    """What to call the files in a folder itself, and what is hidden there."""
    with storage.explained("list", folder), scandir(folder) as entries:
        return [
            "hidden" if entry.name[0] == "." else kind_of_file(entry.name)
            for entry in entries
            if entry.name[0] == "." or not is_folder(entry)
        ]


def _split_folders(root: Path) -> dict[str, str]:
    """The split folders of a root, if that is what its folders are: train/, val/, test/."""
    with storage.explained("list", root), scandir(root) as entries:
        visible = [e for e in entries if not e.name.startswith(".")]
    folders = [e.name for e in visible if is_folder(e)]
    files = [e.name for e in visible if e.name in METADATA_FILES or _is_image(e.name)]
    named = split_folders(folders)
    splits = {name: folder for name, folder in named.items() if _holds_classes(root / folder)}
    if not splits and len(named) == len(folders) and not set(files) - set(folders):
        return named  # all are, and hold nothing but images
    others = sorted(set(folders) - set(splits.values()))
    beside = [f"{name}/" for name in others] + [n for n in files if n not in folders]
    if splits and beside:
        raise UsageError(
            f"the folder holds splits ({', '.join(splits)}) and something else as well",
            path=root,
            found=", ".join(beside[:5]),
            expected="nothing but split folders, each with a folder per class",
            fix="move the others away, convert one split at a time, or take all folders as classes"
            " with --split none",
        )
    return splits


def _holds_classes(folder: Path) -> bool:
    with storage.explained("list", folder), scandir(folder) as entries:
        return any(
            e.name in METADATA_FILES or (is_folder(e) and not e.name.startswith("."))
            for e in entries
        )


def _is_image(name: str) -> bool:
    stem, _, suffix = name.rpartition(".")
    return bool(stem) and suffix.lower() in SUFFIXES


def _check_classes(
    root: Path, classes: Sequence[str], found: Iterable[str], labelled: bool
) -> None:
    if len(set(classes)) != len(classes):
        twice = next(name for name, count in Counter(classes).items() if count > 1)
        raise UsageError("the list of classes names one twice", found=repr(twice))
    if not labelled:
        raise UsageError("a list of classes needs a folder per class", path=root)
    missing = [name for name in found if name not in set(classes)]
    if missing:
        raise UsageError(
            f"the list of classes does not name the folder {missing[0]!r}",
            path=root,
            found=f"{len(missing)} folder(s) that are not listed",
            fix="add the name to the list, or move the folder away",
        )


def no_images(root: Path, passed_over: Counter[str]) -> SourceError:
    """The error for a folder that has nothing to convert."""
    return SourceError(
        "there are no images and no text in this folder",
        path=root,
        expected="files that end in "
        + ", ".join("." + suffix for suffix in SUFFIXES)
        + ", .txt, .jsonl, .csv, ...",
        found=", ".join(f"{n} x {what}" for what, n in passed_over.most_common(4)) or "nothing",
        fix="give the folder that holds the class folders, or the images themselves",
    )


class _Scan:
    """One walk through a folder tree: files in order, class folders, what was passed over."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._walk = Walk(root)
        self.ignored = self._walk.ignored
        self.problems = self._walk.problems
        self._below: dict[str, list[str]] = {}  # folder -> names of those in it
        self._metadata: list[str] = []
        self._at_root: set[str] = set()  # files
        began = time_ns()
        self.files = Files.joined(self._images())
        self.files.began = began
        self.tree = Tree(root, self._below, self.files.folders)
        self.class_folders = self.tree.folders()
        images_at_root = "" in self.files.folders
        # A metadata file above one folder of images is the Hugging Face layout: no classes.
        one_folder = len(self.tree.filled()) < 2 and bool(self._metadata)
        self.numbered = self._is_numbered()
        self.labelled = bool(self.class_folders) and not (
            images_at_root or one_folder or self.numbered
        )
        self.files.metadata = self._read_metadata()

    def _is_numbered(self) -> bool:
        """Whether folders are but parts of a list: `00000/` beside `00000_stats.json`.

        img2dataset makes them, with `output_format="files"`.
        """
        return bool(self.tree.filled()) and all(
            name.isdigit() and {f"{name}.parquet", f"{name}_stats.json"} & self._at_root
            for name in self.tree.filled()
        )

    def check_folders(self, *, splits: bool) -> None:
        """Raise UsageError for folders that would be taken for what they are not."""
        refuse_annotations(self.tree)
        if self.labelled:
            check_classes(self.tree)
        if splits:
            check_splits(self.tree)

    def source(self, classes: tuple[str, ...] | None) -> ImageFolder:
        """The source, labelled by its folders' numbers in `classes`."""
        files = self.files
        fields: dict[str, FieldType] = {"image": Image()}
        own_label = files.metadata is not None and "label" in files.metadata.schema
        if classes is not None and not own_label:
            number = {name: label for label, name in enumerate(classes)}
            files.labels = [number[folder.partition("/")[0]] for folder in files.folders]
            fields["label"] = Int()
        else:
            files.labels = [None] * len(files.folders)
            classes = None
        for bit, sidecar in enumerate(SIDECARS):
            count = int(np.count_nonzero(files.sidecars >> bit & 1))
            if count:
                fields[sidecar.field] = type(sidecar.type)(optional=count < len(files.names))
        if files.metadata is not None:
            self._add_columns(fields, files.metadata.schema)
        source = ImageFolder(file_path(self.root), files, Schema(fields), classes)
        if "" in files.folders and len(files.folders) > 1:
            first = files.names[files.folder_of.tolist().index(files.folders.index(""))]
            source.notes = (f"no labels from folders: {first!r} lies beside them",)
        elif self.numbered:
            folder = self.tree.filled()[0]
            source.notes = (f"no labels from folders: {folder}/ is a part that img2dataset made",)
        source.notes = (*source.notes, *self._walk.notes)
        source.problems = self.problems
        source.ignored = dict(self.ignored)
        if files.metadata is not None:
            source.others = files.metadata.unusable
            if files.metadata.lacking:
                source.ignored["images without a row of metadata"] = files.metadata.lacking
        if classes is not None and (unlisted := set(self.class_folders) - set(classes)):
            source.ignored["folder without images"] = len(unlisted)
        return source

    def _add_columns(self, fields: dict[str, FieldType], columns: Schema) -> None:
        for name, kind in columns.items():
            if name in fields:
                raise SourceError(
                    f"the metadata have a column {name!r}, which is the name of another field",
                    path=self.root / self._metadata[0],
                    found=", ".join(fields),
                    fix="rename the column",
                )
            fields[name] = kind

    def _images(self) -> list[Files]:
        """The images of every folder, in torchvision's order: by class, then by path as text."""
        found = []
        for folder, entries, subfolders in self._walk:
            if not folder.relative:
                self._at_root = {entry.name for entry in entries}
            files = self._take(folder.relative, entries)
            if files.names:
                found.append(files)
            if subfolders:
                names = [below.relative.rpartition("/")[2] for below in subfolders]
                self._below[folder.relative] = names
        found.sort(key=lambda files: (files.folders[0].partition("/")[0], files.folders[0]))
        return found

    def _take(self, folder: str, entries: list[DirEntry]) -> Files:
        """A folder's images, with their sidecars."""
        images: dict[str, DirEntry] = {}
        others: dict[str, DirEntry] = {}
        for entry in entries:
            name = entry.name
            if _is_image(name):
                images[name] = entry
            elif name in METADATA_FILES and entry.is_file():
                self._metadata.append(f"{folder}/{name}" if folder else name)
            else:
                others[name] = entry
        stems = {name[: name.rfind(".")] for name in images}
        for ending in (s.ending for s in SIDECARS if isinstance(s.type, Image)):
            for name in [n for n in images if n.endswith(ending)]:
                if name.removesuffix(ending) in stems:
                    others[name] = images.pop(name)
        self._ignore(others, stems)
        names = sorted(images)
        about = [look(images[name]) for name in names]
        bits, sidecar_sizes, sidecar_times = _sidecars_of(names, others)
        return Files(
            folders=[folder],
            names=names,
            folder_of=np.zeros(len(names), np.uint32),
            sizes=np.array([size for size, _, _ in about], np.int64),
            times=np.array([time for _, time, _ in about], np.int64),
            inodes=np.array([inode for _, _, inode in about], np.uint64),
            sidecar_times=sidecar_times,
            sidecars=bits,
            sidecar_sizes=sidecar_sizes,
            odd_keys=_odd_keys(folder, names),
        )

    def _ignore(self, others: dict[str, DirEntry], stems: set[str]) -> None:
        for name in others:
            ending = next((s.ending for s in SIDECARS if name.endswith(s.ending)), None)
            if ending is None or name.removesuffix(ending) not in stems:
                self.ignored[kind_of_file(name)] += 1

    def _read_metadata(self) -> Metadata | None:
        if not self._metadata:
            return None
        files = self.files
        index = {files.relative(i): i for i in range(len(files.names))}
        return read_metadata(self.root, self._metadata, index, self.problems)


def _odd_keys(folder: str, names: list[str]) -> dict[int, str]:
    """The keys in a folder that are not simply the path without its suffix."""
    stems = [name[: name.rfind(".")] for name in names]
    if len(set(stems)) == len(stems) and not any("." in stem for stem in stems):
        return {}
    prefix = f"{folder}/" if folder else ""
    return odd_keys(
        (prefix + stem, name[len(stem) + 1 :].lower())
        for name, stem in zip(names, stems, strict=True)
    )


def _sidecars_of(
    names: list[str], others: dict[str, DirEntry]
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Per image its sidecars, as bits in the order of SIDECARS, their bytes, and their times.

    Of the times only a mixture is kept: it is for noticing that one has changed.
    """
    bits = np.zeros(len(names), np.uint16)
    sizes = np.zeros(len(names), np.int64)
    times = np.zeros(len(names), np.int64)
    if others:
        for number, name in enumerate(names):
            stem = name[: name.rfind(".")]
            for bit, sidecar in enumerate(SIDECARS):
                entry = others.get(stem + sidecar.ending)
                if entry is not None:
                    size, time, _ = look(entry)
                    bits[number] |= 1 << bit
                    sizes[number] += max(size, 0)
                    times[number] ^= mixed_time(time, bit)
    return bits, sizes, times
