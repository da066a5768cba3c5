"""A folder of pictures as a source: `class/.../file`, or flat without labels.

Order and labels are those of torchvision's ImageFolder (`datasets/folder.py`): classes by name,
inside a class the folders by path, in a folder the files by name. Links to folders are followed.
Next to a picture `cat.jpg`, its sidecars become fields: `cat.txt` -> text, `cat.json` -> json,
`cat.npy` -> npy, `cat_mask.png` -> mask; a `metadata.csv` or `metadata.jsonl` adds its columns.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit import storage
from shardkit.codecs.image import SUFFIXES
from shardkit.errors import SampleError, ShardkitError, SourceError, UsageError
from shardkit.sample import JsonText, Sample, key_of, unique_key
from shardkit.schema import Array, FieldType, Image, Int, Json, Schema, Text
from shardkit.sources.base import Indices, Source
from shardkit.sources.metadata import FILES as METADATA_FILES
from shardkit.sources.metadata import Metadata, read_metadata

SPLIT_FOLDERS = ("train", "val", "valid", "validation", "test")


class _Sidecar(NamedTuple):
    """A file beside a picture that becomes a field: what its name ends with after the stem."""

    ending: str
    field: str
    type: FieldType


_SIDECARS = (
    _Sidecar(".txt", "text", Text()),
    _Sidecar(".json", "json", Json()),
    _Sidecar(".npy", "npy", Array()),
    _Sidecar("_mask.png", "mask", Image()),
)
_NO_FILE = -1  # the size of what is no regular file: a broken link, a pipe


class ImageFolder(Source):
    """Pictures under `root`. About 110 bytes of memory per file: names, sizes and times."""

    def __init__(self, root: Path, files: _Files, schema: Schema, classes: tuple[str, ...] | None):
        super().__init__()
        self._root = os.fspath(root)
        self._files = files
        self.schema = schema
        self.classes = classes

    def __len__(self) -> int:
        return len(self._files.names)

    def __getitem__(self, index: int) -> Sample:
        files = self._files
        path = self._path(index)
        key = self.key(index)
        try:
            sample: Sample = {"__key__": key, "image": _read(path, int(files.sizes[index]))}
            if "label" in self.schema:
                label = files.labels[files.folder_of[index]]
                if label is not None:
                    sample["label"] = label
            if files.sidecars[index]:
                stem = path[: path.rindex(".")]
                for bit, sidecar in enumerate(_SIDECARS):
                    if files.sidecars[index] >> bit & 1:
                        sample[sidecar.field] = _read_sidecar(stem + sidecar.ending, sidecar)
        except ShardkitError as error:
            raise error.located(key=key) from None
        if files.metadata is not None:
            sample.update(files.metadata.row(index))
        return sample

    def sizes(self) -> npt.NDArray[np.int64]:
        return np.maximum(self._files.sizes, 0) + self._files.sidecar_sizes

    def select(self, indices: Indices) -> ImageFolder:
        return ImageFolder(Path(self._root), self._files.select(indices), self.schema, self.classes)

    def fingerprint(self) -> dict[str, str]:
        files = self._files
        digest = xxhash.xxh3_128()
        for folder in files.folders:
            digest.update(os.fsencode(folder) + b"\0")
        for first in range(0, len(files.names), 4096):
            names = "\0".join(files.names[first : first + 4096])
            digest.update(names.encode("utf-8", "surrogateescape") + b"\0")
        for numbers in (files.folder_of, files.sizes, files.sidecars, files.sidecar_sizes):
            digest.update(np.ascontiguousarray(numbers).data)
        if files.metadata is not None:
            digest.update(files.metadata.fingerprint())
        digest.update(json.dumps([self.classes, files.labels]).encode())
        times = xxhash.xxh3_128(files.times.data)
        return {"files": digest.hexdigest(), "times": times.hexdigest()}

    def key(self, index: int) -> str:
        files = self._files
        odd = files.odd_keys.get(index)
        if odd is not None:
            return odd
        return files.relative(index).rpartition(".")[0]

    def name(self, index: int) -> str:
        return self._files.relative(index)

    def original(self, index: int, key: str) -> str | None:
        return self._files.relative(index) if index in self._files.odd_keys else None

    def _path(self, index: int) -> str:
        return f"{self._root}/{self._files.relative(index)}"


@dataclass
class _Files:
    """What is kept of each file, in order. Folders are relative to the root, "" being the root."""

    folders: list[str] = field(default_factory=list)
    labels: list[int | None] = field(default_factory=list)  # per folder
    names: list[str] = field(default_factory=list)
    folder_of: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    sizes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    times: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    sidecars: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    sidecar_sizes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    odd_keys: dict[int, str] = field(default_factory=dict)  # those that are not path minus suffix
    metadata: Metadata | None = None

    def relative(self, index: int) -> str:
        folder = self.folders[self.folder_of[index]]
        return f"{folder}/{self.names[index]}" if folder else self.names[index]

    def select(self, indices: Indices) -> _Files:
        used, folder_of = np.unique(self.folder_of[indices], return_inverse=True)
        chosen = indices.tolist()
        odd = self.odd_keys
        return _Files(
            folders=[self.folders[f] for f in used],
            labels=[self.labels[f] for f in used],
            names=[self.names[i] for i in chosen],
            folder_of=folder_of.astype(np.uint32),
            sizes=self.sizes[indices],
            times=self.times[indices],
            sidecars=self.sidecars[indices],
            sidecar_sizes=self.sidecar_sizes[indices],
            odd_keys={n: odd[i] for n, i in enumerate(chosen) if i in odd} if odd else {},
            metadata=self.metadata.select(indices) if self.metadata else None,
        )


# --- reading one sample --------------------------------------------------------------------------


def _read(path: str, size: int | None = None) -> bytes:
    """All bytes of a file; of a file that was `size` bytes long when the run was planned."""
    if size == _NO_FILE and os.path.exists(path):  # opening a pipe would wait for ever
        raise SampleError(
            "this is no regular file", path=path, fix="remove it, or use --on-error skip"
        )
    try:
        data = storage.read_whole(path, size)
    except OSError as error:
        raise _unreadable(error, path) from None
    if size is not None and len(data) != size:
        raise SampleError(
            "the file changed while the conversion ran",
            path=path,
            expected=f"{size:,} bytes, as when the run was planned",
            found=f"{len(data):,} bytes" if len(data) < size else "more",
        )
    return data


def _unreadable(error: OSError, path: str) -> SampleError:
    if os.path.islink(path):
        try:
            os.stat(path)
        except OSError as reason:
            what = "the link leads nowhere" if isinstance(reason, FileNotFoundError) else None
            return SampleError(
                what or f"the link cannot be followed: {os.strerror(reason.errno or 0)}",
                path=path,
                found=f"a link to {os.readlink(path)!r}",
                fix="restore what it points to or remove it, or use --on-error skip",
            )
    return SampleError(
        f"the file cannot be read: {os.strerror(error.errno or 0)}",
        path=path,
        fix="check the file's permissions and its disk, or drop it with --on-error skip",
    )


def _read_sidecar(path: str, sidecar: _Sidecar) -> Any:
    data = _read(path)
    try:
        if isinstance(sidecar.type, Image):
            return data
        if isinstance(sidecar.type, Array):
            return _load_array(data)
        text = data.decode("utf-8-sig")
        if isinstance(sidecar.type, Json):
            json.loads(text)
            return JsonText(text)
        return text
    except (ValueError, EOFError, RecursionError) as error:
        raise SampleError(
            "the file beside a picture is damaged",
            path=path,
            field=sidecar.field,
            expected=sidecar.type.python + (", UTF-8" if isinstance(sidecar.type, Text) else ""),
            found=str(error),
        ) from None


def _load_array(data: bytes) -> npt.NDArray[Any]:
    import io

    return cast("npt.NDArray[Any]", np.load(io.BytesIO(data), allow_pickle=False))


# --- planning ------------------------------------------------------------------------------------


def scan_folder(
    root: Path, *, split: str = "auto", classes: Sequence[str] | None = None
) -> dict[str, Source]:
    """The source of a folder, or one per split folder with one class table over all.

    Raises SourceError for a folder without pictures, UsageError for folders that `classes` lacks.
    """
    splits = _split_folders(root) if split == "auto" else []
    folders = {name: root / name for name in splits} or {"": root}
    scans = {name: _Scan(folder) for name, folder in folders.items()}
    if not any(scan.files.names for scan in scans.values()):
        raise _no_pictures(root, list(scans.values()))
    labelled = all(scan.labelled for scan in scans.values())
    found = sorted({name for scan in scans.values() for name in scan.class_folders})
    table = tuple(classes if classes is not None else found) if labelled else None
    if classes is not None:
        _check_classes(root, classes, found, labelled)
    return {name: scan.source(table) for name, scan in scans.items()}


def _split_folders(root: Path) -> list[str]:
    """The split folders of a root, if that is what its folders are: train/, val/, test/."""
    with storage.explained("list", root), os.scandir(root) as entries:
        visible = [e for e in entries if not e.name.startswith(".")]
    folders = [e.name for e in visible if _is_folder(e)]
    splits = [n for n in SPLIT_FOLDERS if n in folders and _holds_classes(root / n)]
    others = sorted(set(folders) - set(splits))
    if len(splits) > 1 and others:
        raise UsageError(
            f"the folder holds splits ({', '.join(splits)}) and something else as well",
            path=root,
            found=", ".join(f"{name}/" for name in others[:5]),
            fix="move the others away, convert one split at a time, or take them all as classes"
            " with --split none",
        )
    return [] if others else splits


def _holds_classes(folder: Path) -> bool:
    with storage.explained("list", folder), os.scandir(folder) as entries:
        return any(
            e.name in METADATA_FILES or (_is_folder(e) and not e.name.startswith("."))
            for e in entries
        )


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


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


def _no_pictures(root: Path, scans: list[_Scan]) -> SourceError:
    passed_over: Counter[str] = sum((scan.ignored for scan in scans), Counter())
    for scan in scans:
        if scan.problems:
            return cast(SourceError, scan.problems[0])
    return SourceError(
        "there are no pictures in this folder",
        path=root,
        expected="files that end in " + ", ".join("." + suffix for suffix in SUFFIXES),
        found=", ".join(f"{n} x {what}" for what, n in passed_over.most_common(4)) or "nothing",
        fix="give the folder that holds the class folders, or the pictures themselves",
    )


class _Folder(NamedTuple):
    """A folder on the way: path relative to the root, its real path, and the one above it."""

    relative: str
    real: str
    parent: _Folder | None

    def ancestors(self) -> Iterator[_Folder]:
        folder: _Folder | None = self
        while folder is not None:
            yield folder
            folder = folder.parent


class _Scan:
    """One walk through a folder tree: files in order, class folders, what was passed over."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = _Files()
        self.ignored: Counter[str] = Counter()
        self.problems: list[ShardkitError] = []
        self.class_folders: list[str] = []
        self._metadata: list[str] = []
        self._numbers: dict[str, list[npt.NDArray[Any]]] = {
            name: [] for name in ("folder_of", "sizes", "times", "sidecars", "sidecar_sizes")
        }
        self._walk()
        for name, parts in self._numbers.items():
            if parts:
                setattr(self.files, name, np.concatenate(parts))
        pictures_at_root = "" in self.files.folders
        # A metadata file above one folder of pictures is the Hugging Face layout: no classes.
        one_folder = len(self.class_folders) < 2 and bool(self._metadata)
        self.labelled = bool(self.class_folders) and not pictures_at_root and not one_folder
        self.files.metadata = self._read_metadata()

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
        for bit, sidecar in enumerate(_SIDECARS):
            count = int(np.count_nonzero(files.sidecars >> bit & 1))
            if count:
                fields[sidecar.field] = type(sidecar.type)(optional=count < len(files.names))
        if files.metadata is not None:
            self._add_columns(fields, files.metadata.schema)
        source = ImageFolder(self.root, files, Schema(fields), classes)
        source.problems = self.problems
        source.ignored = dict(self.ignored)
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

    def _walk(self) -> None:
        real = os.path.realpath(self.root)
        pending = [_Folder("", real, None)]
        found = []
        while pending:
            folder = pending.pop()
            entries, subfolders = self._list(folder)
            pending += subfolders
            if entries:
                found.append((folder.relative, entries))
            if folder.parent is None:
                self.class_folders = sorted(f.relative for f in subfolders)
        # torchvision's order: by class, then by the path of the folder as text.
        found.sort(key=lambda item: (item[0].partition("/")[0], item[0]))
        for relative, entries in found:
            self._take(relative, entries)

    def _list(self, folder: _Folder) -> tuple[list[os.DirEntry[str]], list[_Folder]]:
        """The files and the folders in a folder; hidden ones are passed over."""
        files, folders = [], []
        path = f"{self.root}/{folder.relative}" if folder.relative else os.fspath(self.root)
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.name[0] == ".":
                        self.ignored["hidden"] += 1
                    elif _is_folder(entry):
                        below = self._below(folder, entry)
                        folders += [below] if below else []
                    else:
                        files.append(entry)
        except OSError as error:
            self.problems.append(storage.explain(error, "list the folder", Path(path)))
        return files, folders

    def _below(self, folder: _Folder, entry: os.DirEntry[str]) -> _Folder | None:
        relative = f"{folder.relative}/{entry.name}" if folder.relative else entry.name
        if not entry.is_symlink():
            return _Folder(relative, f"{folder.real}/{entry.name}", folder)
        real = os.path.realpath(entry.path)
        if any(real == above.real for above in folder.ancestors()):
            self.problems.append(
                SourceError(
                    "a link leads back to a folder above it: the folders have no end",
                    path=entry.path,
                    found=f"a link to {os.readlink(entry.path)!r}",
                    fix="remove the link",
                )
            )
            return None
        return _Folder(relative, real, folder)

    def _take(self, folder: str, entries: list[os.DirEntry[str]]) -> None:
        """Add a folder's pictures, with their sidecars, to the files."""
        pictures: dict[str, os.DirEntry[str]] = {}
        others: dict[str, os.DirEntry[str]] = {}
        for entry in entries:
            name = entry.name
            dot = name.rfind(".")
            if name[dot + 1 :].lower() in SUFFIXES and dot > 0:
                pictures[name] = entry
            elif name in METADATA_FILES:
                self._metadata.append(f"{folder}/{name}" if folder else name)
            else:
                others[name] = entry
        stems = {name[: name.rfind(".")] for name in pictures}
        for name in [n for n in pictures if n.endswith("_mask.png")]:
            if name.removesuffix("_mask.png") in stems:
                others[name] = pictures.pop(name)
        self._ignore(others, stems)
        if not pictures:
            return
        names = sorted(pictures)
        self._name_keys(folder, names)
        about = [_look(pictures[name]) for name in names]
        bits, extra = _sidecars_of(names, others)
        numbers = self._numbers
        numbers["folder_of"].append(np.full(len(names), len(self.files.folders), np.uint32))
        numbers["sizes"].append(np.array([size for size, _ in about], np.int64))
        numbers["times"].append(np.array([time for _, time in about], np.int64))
        numbers["sidecars"].append(bits)
        numbers["sidecar_sizes"].append(extra)
        self.files.folders.append(folder)
        self.files.names += names

    def _ignore(self, others: dict[str, os.DirEntry[str]], stems: set[str]) -> None:
        for name in others:
            ending = next((s.ending for s in _SIDECARS if name.endswith(s.ending)), None)
            if ending is None or name.removesuffix(ending) not in stems:
                suffix = name.rpartition(".")[2] if "." in name else ""
                self.ignored[f".{suffix} file" if suffix else "file without suffix"] += 1

    def _name_keys(self, folder: str, names: list[str]) -> None:
        """Note the keys that are not simply the path without its suffix."""
        stems = [name[: name.rfind(".")] for name in names]
        if len(set(stems)) == len(stems) and not any("." in stem for stem in stems):
            return
        first = len(self.files.names)
        taken: set[str] = set()
        for number, (name, stem) in enumerate(zip(names, stems, strict=True)):
            plain = f"{folder}/{stem}" if folder else stem
            key = unique_key(key_of(plain), name[len(stem) + 1 :].lower(), taken)
            taken.add(key)
            if key != plain:
                self.files.odd_keys[first + number] = key

    def _read_metadata(self) -> Metadata | None:
        if not self._metadata:
            return None
        files = self.files
        index = {files.relative(i): i for i in range(len(files.names))}
        return read_metadata(self.root, self._metadata, index, self.problems)


def _look(entry: os.DirEntry[str]) -> tuple[int, int]:
    """Size and time of a file; what is none is kept, so that reading it fails in its turn."""
    try:
        about = entry.stat()
    except OSError:
        return _NO_FILE, 0
    return about.st_size if stat.S_ISREG(about.st_mode) else _NO_FILE, about.st_mtime_ns


def _sidecars_of(
    names: list[str], others: dict[str, os.DirEntry[str]]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Per picture which sidecars it has, as bits in the order of _SIDECARS, and their bytes."""
    bits = np.zeros(len(names), np.uint8)
    sizes = np.zeros(len(names), np.int64)
    if others:
        for number, name in enumerate(names):
            stem = name[: name.rfind(".")]
            for bit, sidecar in enumerate(_SIDECARS):
                entry = others.get(stem + sidecar.ending)
                if entry is not None:
                    bits[number] |= 1 << bit
                    sizes[number] += max(_look(entry)[0], 0)
    return bits, sizes
