"""Tables of the files of a source: 54 bytes and a name each, in temporary files if large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import xxhash

from shardkit.errors import SourceError
from shardkit.helpers.mapped import Growing, pieces
from shardkit.sample import key_of, stem_of, unique_key
from shardkit.sources.base import Source
from shardkit.sources.files import FilePath, Planned
from shardkit.storage.remote.path import RemotePath

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.sources.annotations import Annotations
    from shardkit.sources.base import Indices
    from shardkit.sources.columns import Metadata

_Table = TypeVar("_Table", bound="FileTable")
_DECODED = 4096  # names that are decoded at a time
FEW = 1 << 16  # up to so many files, as in a task, have names and numbers as Python objects
_REQUESTS = 64  # concurrent: at 50 ms each, 1,280 objects a second per process


class Names(Sequence[str]):
    """A list of names, with 9 bytes of overhead for each."""

    def __init__(self, data: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> None:
        self.data, self._ends = data, ends
        self._decoded: list[str] | None = None

    @classmethod
    def of(cls, names: Sequence[str]) -> Names:
        growing = GrowingNames()
        growing.extend(names)
        return growing.names()

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if self._decoded is None and len(self) <= FEW:
            self._decoded = list(self)
        if self._decoded is not None:
            return self._decoded[index]
        start, end = self._start(index), self._ends[index]
        return self.data[start : end - 1].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _DECODED):
            end = self._ends[min(first + _DECODED, len(self)) - 1]
            data = self.data[self._start(first) : end - 1].tobytes()
            yield from data.decode("utf-8", "surrogateescape").split("\0")

    def __reduce__(self) -> tuple[Any, ...]:
        return Names, (self.data, self._ends)

    def take(self, indices: Indices) -> Names:
        """Only these names, in this order."""
        if not len(indices):
            return Names.of([])
        first, last = int(indices[0]), int(indices[-1])
        start = self._start(first)
        if last - first + 1 == len(indices) and (np.diff(indices) == 1).all():
            ends = self._ends[first : last + 1] - start
            return Names(self.data[start : self._ends[last]], ends)
        data, ends, total = Growing(np.uint8), Growing(np.int64), 0
        for piece in pieces(len(indices)):
            chosen = indices[piece]
            stops = self._ends[chosen]
            starts = np.where(chosen > 0, self._ends[chosen - 1], 0)
            lengths = stops - starts
            after = np.cumsum(lengths)
            at = np.repeat(starts - after + lengths, lengths) + np.arange(after[-1])
            data.extend(self.data[at])
            ends.extend(after + total)
            total += int(after[-1])
        return Names(data.array(), ends.array())

    def _start(self, index: int) -> Any:
        return self._ends[index - 1] if index else 0


class GrowingNames:
    """A list of names that can be appended to."""

    def __init__(self) -> None:
        self._data, self._ends = Growing(np.uint8), Growing(np.int64)

    def extend(self, names: Sequence[str]) -> None:
        data = "\0".join((*names, "")).encode("utf-8", "surrogateescape")
        found = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(found == 0)
        if len(ends) != len(names):
            such = next(name for name in names if "\0" in name)
            raise SourceError("the name of a file has a zero byte", found=repr(such))
        self._ends.extend(ends + (len(self._data) + 1))
        self._data.extend(found)

    def names(self) -> Names:
        return Names(self._data.array(), self._ends.array())


@dataclass
class FileTable:
    """Files below a root, in order. Folders are relative to the root, which is "" itself."""

    columns: ClassVar[tuple[str, ...]] = ("sizes", "times", "inodes")  # arrays, indexed by file
    by_folder: ClassVar[tuple[str, ...]] = ("folders", "labels")  # lists, indexed by folder

    folders: list[str] = field(default_factory=list)
    names: Sequence[str] = ()  # `Names`, except for a single folder
    folder_of: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    sizes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    times: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    inodes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    began: int = 0  # when the scan began, in nanoseconds
    odd_keys: dict[int, str] = field(default_factory=dict)  # keys that are not the stem
    labels: list[int | None] = field(default_factory=list)  # by folder; None: not a class
    metadata: Metadata | Annotations | None = None

    def __len__(self) -> int:
        return len(self.names)

    def stem(self, index: int) -> str:
        """The path without its suffix, from which the key is made unless it is in `odd_keys`."""
        return stem_of(self.relative(index))

    def key(self, index: int) -> str:
        return self.odd_keys.get(index) or key_of(self.stem(index))

    def folder(self, index: int) -> str:
        return str(self.folders[self.folder_of[index]])

    def relative(self, index: int) -> str:
        folder = self.folder(index)
        return f"{folder}/{self.names[index]}" if folder else self.names[index]

    def planned(self, index: int) -> Planned:
        return Planned(int(self.times[index]), int(self.inodes[index]), self.began)

    @classmethod
    def joined(cls: type[_Table], parts: Iterable[_Table]) -> _Table:
        """Concatenate tables of one folder each."""
        files, names = cls(), GrowingNames()
        columns = {n: Growing(getattr(files, n).dtype) for n in (*cls.columns, "folder_of")}
        for number, part in enumerate(parts):
            before = len(columns["folder_of"])
            files.odd_keys.update({before + n: key for n, key in part.odd_keys.items()})
            files.folders += part.folders
            names.extend(part.names)
            part.folder_of += np.uint32(number)
            for name, column in columns.items():
                column.extend(getattr(part, name))
        found: dict[str, Any] = {name: column.array() for name, column in columns.items()}
        return replace(files, names=names.names(), **found)

    def select(self: _Table, indices: Indices) -> _Table:
        """Only these files, in this order."""
        used, folder_of = np.unique(self.folder_of[indices], return_inverse=True)
        odd = self.odd_keys
        changed: dict[str, Any] = {
            **{name: getattr(self, name)[indices] for name in self.columns},
            **{n: [old[f] for f in used] for n in self.by_folder if (old := getattr(self, n))},
        }
        return replace(
            self,
            names=self.packed_names().take(indices),
            folder_of=folder_of.astype(np.uint32),
            odd_keys={n: odd[i] for n, i in enumerate(indices.tolist()) if i in odd} if odd else {},
            metadata=self.metadata.select(indices) if self.metadata is not None else None,
            **changed,
        )

    def hash_names(self, digest: xxhash.xxh3_128) -> None:
        digest.update(self.packed_names().data.data)

    def packed_names(self) -> Names:
        return self.names if isinstance(self.names, Names) else Names.of(self.names)


class _Keys(Sequence[str]):
    """The keys of a table's files, computed on access."""

    def __init__(self, files: FileTable) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: Any) -> Any:
        return self._files.key(index)


class FileSource(Source, Generic[_Table]):
    """Files below a root, each of which is a sample, together with its sidecars."""

    def __init__(self, root: FilePath, files: _Table) -> None:
        super().__init__()
        self.root = root
        self.files = files
        self.requests = _REQUESTS if isinstance(root, RemotePath) else 0

    def __len__(self) -> int:
        return len(self.files)

    def key(self, index: int) -> str:
        return self.files.key(index)

    def all_keys(self) -> Sequence[str]:
        return _Keys(self.files)

    def name(self, index: int) -> str:
        return self.files.relative(index)

    def original(self, index: int, key: str) -> str | None:
        files = self.files
        return files.relative(index) if files.key(index) != files.stem(index) else None


def odd_keys(names: Iterable[tuple[str, str]]) -> dict[int, str]:
    """Keys that differ from the plain path, by file number; `names` are paths and suffixes."""
    odd: dict[int, str] = {}
    taken: set[str] = set()
    for number, (path, suffix) in enumerate(names):
        plain = key_of(path)
        key = unique_key(plain, suffix, taken)
        taken.add(key)
        if key != plain:
            odd[number] = key
    return odd
