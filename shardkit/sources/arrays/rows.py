"""One field of all samples, whose values are rows of an array, and the source of such fields."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from time import time_ns
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.codecs.compression import COMPRESSED_BLOCK, unpacked
from shardkit.errors import DamagedError, FormatError, ShardkitError, SourceError, drop_option
from shardkit.metadata.splits import KINDS
from shardkit.sample import Sample
from shardkit.schema import (
    Array,
    Bool,
    Bytes,
    FieldType,
    Float,
    Image,
    Int,
    Schema,
    Text,
    check_label,
    int64,
)
from shardkit.sources.base import Indices, Source
from shardkit.sources.files import Planned, refuse_changed
from shardkit.storage import fs
from shardkit.storage.byte_source import ByteSource, open_source

Make = Callable[["npt.NDArray[Any]"], Any]  # makes a value from a row, a view of read-only bytes


class Column(Protocol):
    """One field, whose rows any thread can read. Small when pickled for a worker process."""

    @property
    def kind(self) -> FieldType: ...

    @property
    def row_bytes(self) -> int:
        """Bytes per value, as far as known."""

    @property
    def files(self) -> Sequence[Path]: ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> Any: ...


@dataclass(frozen=True)
class FileSpan:
    """Bytes of a file: all of it, or a member of an archive; decompressed if necessary."""

    path: Path
    compression: str = ""  # a name from `codecs.compression`
    start: int = 0
    size: int = -1  # as stored; -1: to the end of the file

    def open(self) -> ByteSource:
        """Return the bytes; unless compressed, offsets count from the beginning of the file."""
        return _open(self, fs.status(self.path).st_mtime_ns)


@lru_cache(8)  # otherwise each task in a process would unpack the file again
def _open(part: FileSpan, time: int) -> ByteSource:
    source = open_source(part.path)
    if not part.compression:
        return source
    stop = source.size if part.size < 0 else part.start + part.size
    blocks = (
        source.read(at, min(COMPRESSED_BLOCK, stop - at))
        for at in range(part.start, stop, COMPRESSED_BLOCK)
    )
    return unpacked(part.path, blocks, part.compression, "a compressed array")


@dataclass(frozen=True)
class Rows:
    """Values of one type, each at a multiple of `stride` bytes in one or several files."""

    kind: FieldType
    parts: tuple[
        tuple[FileSpan, int, int], ...
    ]  # the part, the offset of its first value, the count
    dtype: str
    shape: tuple[int, ...]
    stride: int
    make: Make

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * np.dtype(self.dtype).itemsize

    @property
    def files(self) -> Sequence[Path]:
        return [part.path for part, _, _ in self.parts]

    def __len__(self) -> int:
        return sum(count for _, _, count in self.parts)

    @cached_property
    def _opened(self) -> tuple[list[int], list[ByteSource], int]:
        """The index at which each part's rows end, the bytes of each part, the size of a row."""
        ends = np.cumsum([count for _, _, count in self.parts]).tolist()
        return ends, [part.open() for part, _, _ in self.parts], self.row_bytes

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    def row(self, index: int) -> Any:
        ends, sources, size = self._opened
        number = bisect_right(ends, index)
        _, start, count = self.parts[number]
        data = sources[number].read(start + (index - ends[number] + count) * self.stride, size)
        return self.make(np.frombuffer(data, self.dtype).reshape(self.shape))


def copied(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.copy()


def single(value: npt.NDArray[Any]) -> Any:
    """Return the only value of an array, as Python's own type."""
    found = value.reshape(-1)[0].item()
    if isinstance(found, np.floating):  # which Python's float does not hold exactly
        return float(found)
    return int64(found) if type(found) is int else found


_SINGLE: dict[str, FieldType] = {
    "b": Bool(),
    "i": Int(),
    "u": Int(),
    "f": Float(),
    "U": Text(),
    "S": Bytes(),
}
LABELS = ("label", "labels", "target", "targets", "y")


def kind_of(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[FieldType, Make]:
    """Return the field type for values of this type and shape, and a function to make a value.

    Single numbers and texts are not arrays, nor are labels of shape (1,). Raises FormatError for
    values that no field can hold.
    """
    if dtype.hasobject or dtype.names is not None or dtype.kind == "V":
        what = "Python objects, which are pickled" if dtype.hasobject else f"records of {dtype}"
        raise unusable(name, what)
    if shape == (1,) and dtype.kind in "iu" and name in LABELS:
        return Int(), single
    if shape == () and dtype.kind in _SINGLE:
        return _SINGLE[dtype.kind], single
    return Array(dtype.str, shape), copied


_WORDS = re.compile(r"[_.\-]")


def split_in(name: str) -> tuple[str, str]:
    """Return the split that an array is named after, "" if none, and the rest of its name.

    >>> split_in("train_images"), split_in("x_test"), split_in("features")
    (('train', 'images'), ('test', 'x'), ('', 'features'))
    """
    first, last = (_WORDS.split(name)[at] for at in (0, -1))
    for word, rest in ((first, name[len(first) + 1 :]), (last, name[: -len(last) - 1])):
        if word.lower() in KINDS:
            return word.lower(), rest or "array"
    return "", name


def unusable(name: str, found: str) -> FormatError:
    """Return the error for an array that cannot be a field."""
    return FormatError(
        "an array cannot be stored as a field",
        field=name,
        expected="numbers, text or bytes; nothing is ever unpickled",
        found=found,
        fix=f"convert without it: {drop_option(name)}, or save it as numbers",
    )


class Found(NamedTuple):
    """What was found at a path: arrays by name, and the files that contain them.

    The names may begin or end with that of a split. An array that cannot be a field is an error.
    """

    arrays: Mapping[str, Column | ShardkitError]
    files: Sequence[str]
    class_names: Mapping[str, tuple[str, ...]] = {}
    notes: Sequence[str] = ()
    ignored: Mapping[str, int] = {}


class ArraySource(Source):
    """Samples that are the rows of columns of one length. Keys are row numbers."""

    def __init__(
        self,
        root: Path,
        columns: Mapping[str, Column],
        indices: Indices | None = None,
        planned: Mapping[Path, Planned] | None = None,
    ) -> None:
        super().__init__()
        self._root, self._columns, self._planned = root, columns, planned or {}
        self.schema = Schema({name: column.kind for name, column in columns.items()})
        self.unique_keys = True
        images = (c for c in columns.values() if isinstance(c, Rows) and type(c.kind) is Image)
        self.encodes_images = any(images)
        length = len(next(iter(columns.values())))
        self._indices = np.arange(length) if indices is None else indices
        if not length:
            raise SourceError("the arrays have no rows", path=root)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Sample:
        number = int(self._indices[index])
        sample: Sample = {"__key__": self.key(index)}
        for name in self.schema:
            column = self._columns[name]
            try:
                sample[name] = column.row(number)
            except Exception as error:
                found = fs.unreadable(error, column.files[0], number)
                raise found from found.__cause__
        for field, names in self.class_names.items():
            check_label(sample, field, names)
        return sample

    def key(self, index: int) -> str:
        return f"{int(self._indices[index]):09d}"

    def sizes(self) -> npt.NDArray[np.int64]:
        size = sum(column.row_bytes for column in self._columns.values())
        return np.full(len(self), size, np.int64)

    def select(self, indices: Indices) -> ArraySource:
        source = ArraySource(self._root, self._columns, self._indices[indices], self._planned)
        source.schema, source.selection = self.schema, self.selection
        source.class_names = self.class_names
        return source

    def fingerprint(self) -> dict[str, str]:
        files, times, began = xxhash.xxh3_128(), xxhash.xxh3_128(), time_ns()
        self._planned = {}
        for name, column in self._columns.items():
            about = f"{name}\0{column.kind!r}\0{len(column)}\0{column.row_bytes}\0"
            files.update(about.encode("utf-8", "surrogateescape"))
            for path in column.files:
                found = fs.status(path)
                files.update(f"{path.name}\0{found.st_size}\0".encode("utf-8", "surrogateescape"))
                times.update(f"{found.st_mtime_ns}\0".encode())
                self._planned[path] = Planned(found.st_mtime_ns, found.st_ino, began)
        files.update(f"{dict(self.class_names)}".encode())
        return {"files": files.hexdigest(), "times": times.hexdigest()}

    def check_unchanged(self) -> None:
        for path, planned in self._planned.items():
            refuse_changed(str(path), fs.status(path), planned, SourceError)

    def name(self, index: int) -> str:
        return f"{self._root.name}:{int(self._indices[index])}"


def damaged(path: Path, what: str, expected: str, found: str) -> DamagedError:
    """Return the error for a file that does not match its header."""
    fix = "copy or download the file again"
    return DamagedError(what, path=path, expected=expected, found=found, fix=fix)
