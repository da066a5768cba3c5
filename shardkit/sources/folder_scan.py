"""Scans image folders: one walk finds images, classes, splits, sidecars and metadata."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from time import time_ns
from typing import TYPE_CHECKING

import numpy as np

from shardkit.codecs.media import ARCHIVES, AUDIO, Kind
from shardkit.dataset.card import check_images
from shardkit.dataset.folders import media_of
from shardkit.errors import SourceError, UsageError
from shardkit.helpers.mapped import pieces
from shardkit.metadata.splits import KINDS
from shardkit.sample import stem_of
from shardkit.schema import Image, Int, Schema
from shardkit.sources.base import WHOLE
from shardkit.sources.candidate import Candidate, Splits, no_images
from shardkit.sources.file_table import odd_keys
from shardkit.sources.files import file_path
from shardkit.sources.image_folder import (
    SIDECARS,
    Files,
    ImageFolder,
    Sidecar,
    mixed_time,
    sidecars_of,
)
from shardkit.sources.imagenet import EXPECTED, Truth, find_truth, is_validation
from shardkit.sources.labels import LabelColumn, check_names
from shardkit.sources.layouts import (
    IMAGES,
    SplitFolders,
    Tree,
    check_classes,
    check_sides,
    check_splits,
    find_split_folders,
    refuse_annotations,
)
from shardkit.sources.metadata import FILES as METADATA_FILES
from shardkit.sources.metadata import GivenTable, Joined, add_columns, join
from shardkit.sources.tables import Table
from shardkit.sources.transcripts import TRANSCRIPTS, read_transcripts
from shardkit.sources.volumes import FOLDERS
from shardkit.storage.walk import DirEntry, Walk, kind_of_file, look, relative_to

if TYPE_CHECKING:
    import numpy.typing as npt


def recognise(candidate: Candidate) -> Splits | None:
    """Return a folder of images, audio or video."""
    media = media_of(candidate.contents) if candidate.is_folder else None
    return None if media is None else checked(candidate, scan_splits(candidate, media))


def checked(candidate: Candidate, sources: Splits) -> Splits:
    """Return the splits of files, as README.md says them, with notes on other files beside them."""
    if candidate.recipe.split == "auto" or candidate.subset:
        names = [name for name in sources if name != WHOLE]
        check_images(candidate.path, names, candidate.subset)
    return candidate.noted(sources)


def scan_splits(candidate: Candidate, media: Kind, no_class: str = "") -> dict[str, ImageFolder]:
    """The source of a folder, or one per split folder with one list of classes for all splits.

    `no_class` is a folder that is ignored. Raises SourceError for a folder without images, and
    UsageError for folders that are neither classes nor splits, or missing from the given classes.
    """
    root, recipe, splits = candidate.path, candidate.recipe, candidate.recipe.split == "auto"
    metadata_table, labels = GivenTable.of(recipe), LabelColumn.of(recipe)
    own = None if metadata_table is None else relative_to(metadata_table.path, root)
    found = find_split_folders(root, media, own) if splits else SplitFolders(root)
    folders = found.paths or {"": root}
    scans = {
        name: FolderScan(folder, media, metadata_table, no_class)
        for name, folder in folders.items()
    }
    next(iter(scans.values())).ignored.update(found.ignored)  # reported once
    if not any(scan.files.names for scan in scans.values()):
        problems = [problem for scan in scans.values() for problem in scan.problems]
        every = sum((scan.ignored for scan in scans.values()), Counter())
        raise problems[0] if problems else no_images(root, every)
    add_metadata(root, [*scans.values()], metadata_table, labels)
    if labels is None:
        _find_labels(found.root, scans)
    table = _class_table(candidate, scans, stray=labels is not None or metadata_table is not None)
    sources = {name: scan.source(table if scan.labelled else None) for name, scan in scans.items()}
    first = next(iter(sources.values()))
    first.notes = (*found.notes, *first.notes)
    if candidate.strict and labels is None and first.classes and len(first.classes) == 1:
        way = next(iter(folders.values())) / first.classes[0]
        note = f"all have the class {first.classes[0]!r}: to convert without labels, give {way}"
        first.notes = (*first.notes, note)
    return sources


def add_metadata(
    root: Path,
    scans: Sequence[FolderScan],
    metadata_table: GivenTable | None,
    labels: LabelColumn | None,
) -> None:
    """Join the images with the given table, or with the metadata files beside them."""
    if metadata_table is None:
        for scan in scans:
            scan.read_metadata(labels)
        return
    parts = [(relative_to(scan.root, root) or "", scan.files) for scan in scans]
    joined = join(metadata_table.read(), parts, metadata_table.labels, every=True)
    for scan, found in zip(scans, joined, strict=True):
        scan.take(found)


def _class_table(
    candidate: Candidate, scans: Mapping[str, FolderScan], *, stray: bool
) -> tuple[str, ...] | None:
    """The classes of all splits: those that the user gives, or the folders; None without labels.

    Unless `strict`, folders that are missing from those given are appended to them. `stray`: images
    beside class folders are fine.
    """
    root, recipe = candidate.path, candidate.recipe
    labelled = [scan for scan in scans.values() if scan.labelled]
    filled = sorted({name for scan in labelled for name in scan.classes()})
    classes: Sequence[str] | None = None
    if not isinstance(recipe.classes, Mapping) and recipe.label_column is None:
        classes = recipe.classes
    if classes is None:
        for scan in scans.values():
            scan.check_folders(splits=recipe.split == "auto")
            if recipe.selection.has("label") and not stray:
                scan.refuse_stray()
        for scan in labelled:
            scan.refuse_empty(filled)
        classes = filled
    elif candidate.strict:
        check_names(classes)
        if not labelled:
            raise UsageError(
                "a list of classes needs a folder per class",
                path=root,
                fix="put the images into folders, name a column of labels with --label-column, or"
                " leave out --classes",
            )
        missing = [name for name in filled if name not in set(classes)]
        if missing:
            raise UsageError(
                f"the list of classes does not name the folder {missing[0]!r}",
                path=root,
                found=f"{len(missing)} folder(s) that are not in the list",
                fix="add the name to the list, or move the folder elsewhere",
            )
    else:
        classes = [*classes, *(name for name in filled if name not in set(classes))]
    return tuple(classes) if labelled else None


def _find_labels(root: Path, scans: Mapping[str, FolderScan]) -> None:
    """Detect splits without labels, usually test, while other splits have labels.

    Their images are in no folder, or in a single one that is not a class. ImageNet's validation
    images have labels in a file. Raises UsageError for any other split without labels.
    """
    of_train = _classes_of(scans, "train")
    for kind, others in (("validation", ["train"]), ("test", ["train", "validation", "holdout"])):
        known = _classes_of(scans, *others)
        for scan in [s for name, s in scans.items() if s.labelled and KINDS.get(name) == kind]:
            only = set(scan.tree.filled())
            if len(known) > 1 and len(only) == 1 and not only & known:
                scan.labelled = kind != "test" and not only & IMAGES
    if not any(scan.labelled for scan in scans.values()):
        for scan in scans.values():
            if scan.files.metadata is None and is_validation(scan.files.names):
                scan.notes.append(
                    "no labels: to get those of ImageNet's val, give the parent folder with train"
                )
        return
    for name, scan in scans.items():
        found = scan.tree.filled()
        where = f"{found[0]}/, not a class of other splits" if found else "no class folders"
        if scan.labelled:
            extra = sorted(set(found) - of_train)
            words = f"classes of {name} that train does not have: {', '.join(extra[:5])}"
            scan.notes += [words] if extra and of_train else []
        elif KINDS.get(name) == "validation" and (truth := scan.find_truth(root, of_train)):
            scan.label_by(truth, of_train)
            about = scan if truth.path.parent == scan.root else next(iter(scans.values()))
            if truth.path.parent in (scan.root, root):
                about.ignored.subtract([kind_of_file(truth.path.name)])
        elif scan.files.metadata is not None or KINDS.get(name) == "test":
            scan.notes.append(f"no labels in {name}: its images are in {where}")
        else:
            raise UsageError(
                f"the images of {name} have no labels, but those of other splits do",
                path=scan.root,
                expected="a folder for each class: " + ", ".join(sorted(of_train)[:3]),
                found=where,
                fix="put them into class folders, or convert one split at a time; for ImageNet, add"
                f" {EXPECTED}",
            )


def _classes_of(scans: Mapping[str, FolderScan], *kinds: str) -> set[str]:
    """Return the class folders of all labelled splits of these kinds."""
    found = (scan for name, scan in scans.items() if scan.labelled and KINDS.get(name) in kinds)
    return {folder for scan in found for folder in scan.classes()}


class FolderScan:
    """The result of one walk through a folder tree: ordered files, class folders, ignored files."""

    def __init__(
        self, root: Path, media: Kind, metadata_table: GivenTable | None = None, no_class: str = ""
    ) -> None:
        self.root = root
        self.media = media
        self._sidecars = sidecars_of(media)
        self._has_table = metadata_table is not None  # instead of metadata files beside the images
        table = None if metadata_table is None else relative_to(metadata_table.path, root)
        beside = tuple(sidecar.ending for sidecar in self._sidecars)
        self._walk = Walk(root, table, lambda name: media.has(name) or name.endswith(beside))
        self.ignored = self._walk.ignored
        self.problems = self._walk.problems
        self._below: dict[str, list[str]] = {}  # folder -> names of its subfolders
        self.metadata_files: list[str] = []
        self._at_root: set[str] = set()  # file names
        self._no_class = no_class
        self._transcripts: list[str] = []
        began = time_ns()
        self.files = Files.joined(self._images())
        self.files.began = began
        self.tree = Tree(root, self._below, self.files.folders, media.many)
        filled = self.tree.filled()
        # img2dataset writes `00000/` beside `00000_stats.json` with `output_format="files"`.
        self.numbered = bool(filled) and all(
            name.isdigit() and {f"{name}.parquet", f"{name}_stats.json"} & self._at_root
            for name in filled
        )
        # A metadata file above a single image folder is the Hugging Face layout, without classes.
        one_folder = len(filled) < 2 and bool(self.metadata_files)
        self.class_folders = self.tree.folders()
        self.labelled = bool(self.class_folders) and not (
            "" in self.files.folders or one_folder or self.numbered
        )
        note = "each .npz file is a sample; to take rows as samples, convert one file"
        self.notes = [note] if media is ARCHIVES else []
        self.class_of: list[str] = []  # the class of each image, if not given by its folder

    def classes(self) -> list[str]:
        """Return the class folders that hold images."""
        return [] if self.class_of else self.tree.filled()

    def find_truth(self, root: Path, classes: Collection[str]) -> Truth | None:
        """Return the labels of images that are all in one folder, if there is a file with them."""
        if self.files.metadata is not None or len(self.files.folders) != 1:
            return None
        return find_truth(root, self.root, sorted(classes))

    def label_by(self, truth: Truth, known: Collection[str]) -> None:
        """Use the labels of a file."""
        self.class_of = truth.classes(self.files.names, known)
        self.labelled, self.class_folders = True, []
        self.notes.append(f"the labels of {self.root.name} come from {truth.path}")

    def check_folders(self, *, splits: bool) -> None:
        """Raise UsageError for folders that would be misinterpreted as classes."""
        refuse_annotations(self.tree)
        by_folder = self.labelled and not self.class_of
        if by_folder:
            check_classes(self.tree)
        if splits:
            check_splits(self.tree)
        if by_folder:
            self.notes += check_sides(self.tree, self._stems)

    def refuse_empty(self, filled: Sequence[str]) -> None:
        """Raise UsageError for a folder without images beside class folders."""
        empty = [name for name in self.class_folders if name not in set(filled)]
        if empty:
            raise UsageError(
                f"there are folders without {self.media.many} beside the class folders",
                path=self.root,
                found=", ".join(f"{name}/" for name in empty[:5]),
                expected=f"{self.media.many} in each folder, as each would be a class",
                fix="move them elsewhere, or list the classes with --classes FILE: a listed class"
                " may be empty, and an empty folder that is not listed is ignored",
            )

    def _stems(self, top: str) -> Iterator[str]:
        """Yield the paths of the images below a folder, relative to it and without suffixes."""
        files = self.files
        folders = [n for n, name in enumerate(files.folders) if f"{name}/".startswith(f"{top}/")]
        numbers = np.flatnonzero(np.isin(files.folder_of, folders)).tolist()
        return (files.stem(number).removeprefix(f"{top}/") for number in numbers)

    def refuse_stray(self) -> None:
        """Raise UsageError for a few images beside class folders: none would have labels."""
        files = self.files
        # Images in the root come first.
        if "" not in files.folders or self.class_of or files.metadata or self.numbered:
            return
        stray = int(np.searchsorted(files.folder_of, files.folders.index(""), "right"))
        if 1 < len(self.tree.filled()) > stray:
            raise UsageError(
                f"there are {self.media.many} beside the class folders, which have no class",
                path=self.root,
                found=", ".join(files.names[n] for n in range(min(stray, 5))),
                expected=", ".join(f"{name}/" for name in self.tree.filled()[:5]),
                fix="move them elsewhere, or into the folders of their classes; to convert all"
                f" without labels, use --fields {self.media.field}",
            )

    def source(self, classes: tuple[str, ...] | None) -> ImageFolder:
        """Return the source, with the indices of its folders in `classes` as labels."""
        files, metadata = self.files, self.files.metadata
        if metadata is not None and "label" in metadata.schema:
            classes = None
        made, root = FOLDERS.get(self.media, ImageFolder), file_path(self.root)
        fields = made.fields_of(self.media, root, files)
        own = {**fields}
        class_names = {} if metadata is None else metadata.class_names
        files.labels = [None] * len(files.folders)
        if classes is not None:
            number = {name: label for label, name in enumerate(classes)}
            if self.class_of:  # repeat the only folder for each class, as labels are by folder
                files.folders *= len(classes)
                files.folder_of = np.array([number[name] for name in self.class_of], np.uint32)
                files.labels = [*number.values()]
            else:
                files.labels = [number[folder.partition("/")[0]] for folder in files.folders]
            fields["label"] = Int()
            class_names = {"label": classes}
        for bit, sidecar in enumerate(SIDECARS):
            every = (files.sidecars[piece] >> bit & 1 for piece in pieces(len(files)))
            count = sum(int(np.count_nonzero(found)) for found in every)
            if count:
                fields[sidecar.field] = type(sidecar.type)(optional=count < len(files.names))
        if metadata is not None:
            add_columns(fields, metadata)
        if taken := [name for name, kind in own.items() if fields[name] is not kind]:
            raise SourceError(
                f"the files have an array {taken[0]!r}, the name of another field",
                path=self.root,
                fix="rename it, or convert the folders of classes one by one",
            )
        source = made(root, files, Schema(fields), class_names, self.media)
        source.own = tuple(own)
        source.notes = (*self._unlabelled_notes(), *self.notes, *self._walk.notes)
        source.problems = self.problems
        source.ignored = dict(+self.ignored)
        if metadata is not None:
            source.others = metadata.unusable
            if metadata.lacking:
                source.ignored[f"{self.media.many} without a row of metadata"] = metadata.lacking
        if classes is not None and (unlisted := set(self.class_folders) - set(classes)):
            source.ignored[f"folder without {self.media.many}"] = len(unlisted)
        return source

    def _unlabelled_notes(self) -> Iterator[str]:
        """Why folders are not classes, where that may surprise."""
        files = self.files
        if "" in files.folders and len(files.folders) > 1 and not self.class_of:
            first = files.names[int(np.argmax(files.folder_of == files.folders.index("")))]
            yield f"no labels from folders: {first!r} lies beside them"
        elif self.numbered:
            folder = self.tree.filled()[0]
            yield f"no labels from folders: {folder}/ is a part written by img2dataset"

    def _images(self) -> Iterator[Files]:
        """The images of each folder, in torchvision's order: by class, then by path as a string."""
        for folder, entries, subfolders in self._walk:
            if not folder.relative:
                self._at_root = {entry.name for entry in entries}
            if self._no_class and folder.relative.partition("/")[0] == self._no_class:
                files = sum(self.media.has(entry.name) for entry in entries)
                self.ignored[f"file in {self._no_class}"] += files
                continue
            taken = self._take(folder.relative, entries)
            if taken.names:
                yield taken
            if subfolders:
                below = [one.relative for one in subfolders if one.relative != self._no_class]
                self._below[folder.relative] = [path.rpartition("/")[2] for path in below]

    def _take(self, folder: str, entries: list[DirEntry]) -> Files:
        """Return the images of one folder, with their sidecars."""
        images: dict[str, DirEntry] = {}
        others: dict[str, DirEntry] = {}
        for entry in entries:
            name = entry.name
            if self.media.has(name):
                images[name] = entry
            elif name in METADATA_FILES and entry.is_file() and not self._has_table:
                self.metadata_files.append(f"{folder}/{name}" if folder else name)
            elif name.endswith(TRANSCRIPTS) and self.media is AUDIO and not self._has_table:
                self._transcripts.append(f"{folder}/{name}" if folder else name)
            else:
                others[name] = entry
        entries.clear()  # frees their cached stat results: a lot for 10^6 files
        stems = {stem_of(name) for name in images}
        for ending in (s.ending for s in self._sidecars if isinstance(s.type, Image)):
            for name in [n for n in images if n.endswith(ending)]:
                if name.removesuffix(ending) in stems:
                    others[name] = images.pop(name)
        for name in others:
            own = (s.ending for s in self._sidecars if name.endswith(s.ending))
            if name.removesuffix(next(own, name)) not in stems:
                self.ignored[kind_of_file(name)] += 1
        names = sorted(images)
        about = [look(images.pop(name)) for name in names]
        bits, sidecar_sizes, sidecar_times = _sidecars_of(names, others, self._sidecars)
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

    def read_metadata(self, labels: LabelColumn | None) -> None:
        """Read the metadata files beside images; a column of them may hold the labels."""
        if not self.metadata_files:
            if labels is not None:
                raise UsageError(
                    f"there is no table with the column {labels.column!r}",
                    path=self.root,
                    expected=" or ".join(METADATA_FILES) + " beside the images",
                    fix="name the table with --metadata FILE",
                )
            if self._transcripts:
                found = read_transcripts(self.root, self._transcripts, self.files, self.problems)
                self.files.metadata = found
            return
        self.ignored.update(map(kind_of_file, self._transcripts))
        table = Table()
        for file in sorted(self.metadata_files):
            table.read(self.root / file, "file_name", posixpath.dirname(file))
        (joined,) = join(table, [("", self.files)], labels, every=labels is not None)
        self.take(joined)

    def take(self, joined: Joined) -> None:
        """Keep only the files that have the metadata they need."""
        if len(joined.files) < len(self.files):
            self.files = self.files.select(joined.files)
        self.files.metadata = joined.metadata
        self.problems += joined.problems
        self.notes += joined.notes
        if joined.labelled:
            self.labelled = False  # by its folders


def _odd_keys(folder: str, names: list[str]) -> dict[int, str]:
    """Return the keys in a folder that differ from the path without its suffix."""
    stems = [stem_of(name) for name in names]
    if len(set(stems)) == len(stems) and not any("." in stem for stem in stems):
        return {}
    prefix = f"{folder}/" if folder else ""
    return odd_keys(
        (prefix + stem, name[len(stem) + 1 :].lower())
        for name, stem in zip(names, stems, strict=True)
    )


def _sidecars_of(
    names: list[str], others: dict[str, DirEntry], sidecars: Sequence[Sidecar]
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each image: its sidecars, as bits in the order of SIDECARS, their size, their times."""
    bits = np.zeros(len(names), np.uint16)
    sizes = np.zeros(len(names), np.int64)
    times = np.zeros(len(names), np.int64)
    if others:
        for number, name in enumerate(names):
            stem = stem_of(name)
            for bit, sidecar in enumerate(sidecars):
                entry = others.get(stem + sidecar.ending)
                if entry is not None:
                    size, time, _ = look(entry)
                    bits[number] |= 1 << bit
                    sizes[number] += max(size, 0)
                    times[number] ^= mixed_time(time, bit)
    return bits, sizes, times
