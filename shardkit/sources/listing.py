"""The stored listing of a source: written by one part of a conversion, loaded by the others.

asked             16 bytes, a digest of the options that the source was listed with
digest            16 bytes, xxh3-128 of the rest of the file
length            8 bytes, of the header
header            JSON, a `_Header`
columns           concatenated arrays of little-endian numbers and of packed names
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from shardkit.codecs.media import KINDS, Kind
from shardkit.errors import FormatError
from shardkit.helpers import os_errors
from shardkit.helpers.checked import Count, checked, damaged, parse, plain
from shardkit.helpers.mapped import Growing, pieces
from shardkit.helpers.names import is_safe
from shardkit.options import Selection
from shardkit.schema import Int, Schema
from shardkit.sources.base import Source, Stream
from shardkit.sources.files import NEVER, file_path
from shardkit.sources.image_folder import SIDECARS, Files, ImageFolder
from shardkit.sources.packed_names import Names
from shardkit.storage import fs
from shardkit.storage.walk import NO_FILE, relative_to

if TYPE_CHECKING:
    import numpy.typing as npt

    Columns = Mapping[str, npt.NDArray[Any]]

_DIGEST = 16  # bytes
_MOST_CLASSES = 1 << 32
_MOST_BYTES = 1 << 50  # maximum size of a file
_AT_ONCE = 64  # folders that a thread checks at a time
_BY_FILE: dict[str, np.dtype[Any]] = {
    name: getattr(Files(), name).dtype for name in ("folder_of", *Files.columns)
}
_PACKED = ("names", "folders", "odd_keys")  # lists of strings; the folder "" is the root itself
# `odd` are the numbers of the files with `odd_keys`; a label of -1 means no label.
_TEXT: np.dtype[Any] = np.dtype(np.uint8)
_NUMBER: np.dtype[Any] = np.dtype(np.int64)
_DTYPES = {**_BY_FILE, **dict.fromkeys(_PACKED, _TEXT), "labels": _NUMBER, "odd": _NUMBER}
# The folders of the source that hold files, with their parents, and their modification times.
_WATCHED = {"watched": _TEXT, "changed": _NUMBER}


@dataclass(frozen=True)
class _Table:
    """The files of one split: an `ImageFolder`."""

    split: str
    root: str  # relative to the source, "" being the source itself
    kind: str  # the field name of the media files
    began: Count
    schema: dict[str, Any]
    class_names: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]
    ignored: dict[str, Count]
    counts: dict[str, Count]  # lengths of its columns


@dataclass(frozen=True)
class _Header:
    machine: str  # hash of the machine that the inodes belong to
    counts: dict[str, Count]
    tables: tuple[_Table, ...]


class Listing(NamedTuple):
    """A listing, which `write` stores in a file of `size` bytes."""

    head: bytes
    columns: list[npt.NDArray[Any]]

    @property
    def size(self) -> int:
        return 2 * _DIGEST + 8 + len(self.head) + sum(column.nbytes for column in self.columns)


def listing_of(sources: Mapping[str, Source | Stream], root: Path, machine: str) -> Listing | None:
    """The listing of a folder at `root`, made on `machine`; None if it cannot be shared.

    Only plain files can be shared: no metadata, problems or filtered samples. A folder that was
    modified while it was listed cannot be shared either.
    """
    tables: list[_Table] = []
    columns: list[npt.NDArray[Any]] = []
    watched = {""}
    for name, source in sources.items():
        if (way := _way_to(source, root)) is None:
            return None
        assert isinstance(source, ImageFolder)
        files = source.files
        of_table = _columns(files)
        if not all(map(_is_inside, files.folders)) or (of_table["names"] == ord("\\")).any():
            return None
        for folder in files.folders:
            path = "/".join(filter(None, (way, folder)))
            while path not in watched:
                watched.add(path)
                path = path.rpartition("/")[0]
        tables.append(
            _Table(
                split=name,
                root=way,
                kind=source.media.field,
                began=files.began,
                schema=source.schema.to_json(),
                class_names=dict(source.class_names),
                notes=tuple(source.notes),
                ignored=dict(source.ignored),
                counts={column: len(values) for column, values in of_table.items()},
            )
        )
        columns += of_table.values()
    folders = sorted(watched)
    changed = _changes(root, folders)
    if changed is None or changed.max() >= min(table.began for table in tables):
        return None
    about: Columns = {"watched": Names.of(folders).data, "changed": changed}
    counts = {name: len(values) for name, values in about.items()}
    header = _Header(_digest(machine), counts, tuple(tables))
    return Listing(json.dumps(plain(header)).encode(), [*about.values(), *columns])


def _digest(machine: str) -> str:
    return xxhash.xxh3_128_hexdigest(machine.encode())


def _way_to(source: Source | Stream, root: Path) -> str | None:
    """The path from `root` to the files of a source; None if it has more than plain files."""
    if type(source) is not ImageFolder or not isinstance(source.root, str):
        return None
    if source.files.metadata is not None or source.problems or source.others or source.filtered:
        return None
    own = Path(source.root)
    way = "" if fs.absolute(own) == fs.absolute(root) else relative_to(own, root)
    return way if way is not None and _is_inside(way) else None


def _is_inside(folder: str) -> bool:
    return not folder or is_safe(folder)


def _columns(files: Files) -> dict[str, npt.NDArray[Any]]:
    packed = (files.packed_names(), Names.of(files.folders), Names.of([*files.odd_keys.values()]))
    labels = [-1 if label is None else label for label in files.labels]
    return {
        **{name: getattr(files, name) for name in _BY_FILE},
        **{name: names.data for name, names in zip(_PACKED, packed, strict=True)},
        "labels": np.array(labels, np.int64),
        "odd": np.array([*files.odd_keys], np.int64),
    }


def _changes(root: Path, folders: Sequence[str]) -> npt.NDArray[np.int64] | None:
    """The modification time of each folder, in nanoseconds; None if one is inaccessible."""

    def look(first: int) -> list[int]:
        some = folders[first : first + _AT_ONCE]
        return [os.stat(root / folder).st_mtime_ns for folder in some]

    with ThreadPoolExecutor(thread_name_prefix="shardkit-look") as pool:
        try:
            found = [*pool.map(look, range(0, len(folders), _AT_ONCE))]
        except OSError:
            return None
    return np.array([time for times in found for time in times], np.int64)


def write(listing: Listing, asked: bytes, path: Path) -> None:
    """Write a listing to a file, and sync it; `asked` is a digest of the listing options."""
    head = len(listing.head).to_bytes(8, "little") + listing.head
    digest = xxhash.xxh3_128(head)
    for chunk in _chunks(listing.columns):
        digest.update(chunk)
    with fs.create(path) as file:
        fs.write(file, [asked + digest.digest() + head])
        for chunk in _chunks(listing.columns):
            fs.write(file, [chunk])
    fs.sync(path)


def _chunks(columns: Sequence[npt.NDArray[Any]]) -> Iterator[memoryview]:
    for column in columns:
        for piece in pieces(len(column)):
            values = np.ascontiguousarray(column[piece], column.dtype.newbyteorder("<"))
            yield values.view(np.uint8).data


def read(
    path: Path, shown: Path, asked: bytes, root: Path, machine: str, selection: Selection
) -> dict[str, Source] | None:
    """Read the sources in a file, named `shown` in errors; all names are inside `root`.

    Returns None if it was listed with other options, or if a folder changed since: the source must
    be listed again then. Raises DamagedError.
    """
    try:
        with (
            os_errors.explained("read", shown),
            open(path, "rb", buffering=0, opener=fs.regular) as file,
        ):
            if file.read(_DIGEST) != asked:
                return None
            reading = _Reading(file)
            header = reading.header
            about = reading.columns(_WATCHED, header.counts)
            columns = [reading.columns(_DTYPES, table.counts) for table in header.tables]
            reading.end()
        folders = [*_names(about["watched"])]
        if not all(map(_is_inside, folders)) or len(folders) != len(about["changed"]):
            raise ValueError("it has invalid names")
        made = {
            table.split: _source(table, found, root)
            for table, found in zip(header.tables, columns, strict=True)
        }
    except (ValueError, FormatError) as error:
        fix = "remove it: the next part lists the source again"
        raise damaged("the stored listing of the source", error, path=shown, fix=fix) from error
    now = _changes(root, folders)
    if now is None or not np.array_equal(now, about["changed"]):
        return None
    here = machine and _digest(machine) == header.machine
    for source in made.values():
        source.selection = selection
        source.files.began = source.files.began if here else NEVER
    return {**made}


class _Reading:
    """Reads a file sequentially, never allocating more memory than the file has bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._left = os.fstat(file.fileno()).st_size - file.tell()
        self._hash = xxhash.xxh3_128()
        self._digest = self._read(_DIGEST)
        self._hash.reset()
        length = int.from_bytes(self._read(8), "little")
        self.header = checked(_Header, parse(self._read(length)))

    def _read(self, length: int) -> bytes:
        data = self._file.read(length) if length <= self._left else b""
        if len(data) != length:
            raise ValueError("it is truncated")
        self._left -= length
        self._hash.update(data)
        return data

    def columns(
        self, dtypes: Mapping[str, np.dtype[Any]], counts: Mapping[str, int]
    ) -> dict[str, npt.NDArray[Any]]:
        found = {}
        if dtypes.keys() != counts.keys():
            raise ValueError("it has unexpected columns")
        for name, dtype in dtypes.items():
            growing, stored = Growing(dtype), dtype.newbyteorder("<")
            if counts[name] * dtype.itemsize > self._left:
                raise ValueError("it is truncated")
            for piece in pieces(counts[name]):
                data = self._read((piece.stop - piece.start) * dtype.itemsize)
                growing.extend(np.frombuffer(data, stored))
            found[name] = growing.array()
        return found

    def end(self) -> None:
        if self._left or self._hash.digest() != self._digest:
            raise ValueError("its digest does not match")


def _names(data: npt.NDArray[np.uint8]) -> Names:
    if len(data) and data[-1]:
        raise ValueError("the last name is not terminated")
    return Names.packed(data)


def _source(table: _Table, columns: Columns, root: Path) -> ImageFolder:
    """The source of a split; raises ValueError for values that no listing can contain."""
    kind = next((kind for kind in KINDS if kind.field == table.kind), None)
    schema = Schema.from_json(table.schema)
    if kind is None or not _is_inside(table.root) or not _is_of(schema, kind):
        raise ValueError("it has unexpected fields, or an invalid folder")
    names, folders, keys = (_names(columns[name]) for name in _PACKED)
    labels, odd = columns["labels"], columns["odd"]
    count = len(names)
    if any(len(columns[name]) != count for name in _BY_FILE) or len(odd) != len(keys):
        raise ValueError("its columns have different lengths")
    classes = table.class_names.get("label", ())
    known = len(classes) if "label" in schema else _MOST_CLASSES
    if (
        len(labels) != len(folders)
        or not _within(columns["folder_of"], 0, len(folders))
        or not _within(labels, 0 if "label" in schema else -1, known)
        or not _within(odd, 0, count)
        or not _within(columns["sidecars"], 0, 1 << len(SIDECARS))
        or not _within(columns["sizes"], NO_FILE, _MOST_BYTES)
        or not _within(columns["sidecar_sizes"], 0, _MOST_BYTES)
        or not table.class_names.keys() <= {"label"} & schema.keys()
    ):
        raise ValueError("it has numbers out of range")
    if not all(map(_is_inside, folders)) or not _are_files(names):
        raise ValueError("it has invalid names")
    by_file: dict[str, Any] = {name: columns[name] for name in _BY_FILE}
    files = Files(
        folders=[*folders],
        names=names,
        labels=[None if label < 0 else label for label in labels.tolist()],
        odd_keys=dict(zip(odd.tolist(), keys, strict=True)),
        began=table.began,
        **by_file,
    )
    found = ImageFolder(file_path(root / table.root), files, schema, table.class_names, kind)
    found.notes, found.ignored = table.notes, table.ignored
    return found


def _is_of(schema: Schema, kind: Kind) -> bool:
    """Whether all fields are ones that a folder of such files can have."""
    types = {side.field: type(side.type) for side in SIDECARS}
    types |= {kind.field: kind.type, "label": Int}
    return all(type(value) is types.get(name) for name, value in schema.items())


def _within(values: npt.NDArray[Any], start: int, stop: int) -> bool:
    return not len(values) or bool(values.min() >= start and values.max() < stop)


def _are_files(names: Names) -> bool:
    """Whether all are file names that a walk accepts: not hidden, with a suffix, no slashes."""
    for piece in pieces(len(names)):
        data, starts = names.slice(piece)
        first = data[starts]
        dots = np.add.reduceat(data == ord("."), starts, dtype=np.int64)
        slashes = (data == ord("/")) | (data == ord("\\"))
        if slashes.any() or not (dots.all() and first.all() and (first != ord(".")).all()):
            return False
    return True
