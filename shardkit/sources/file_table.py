"""Tables of the files of a source: 54 bytes and a name each, in temporary files if large."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import xxhash

from shardkit.helpers.mapped import Growing
from shardkit.sample import key_of, unique_key
from shardkit.sources.base import Source
from shardkit.sources.files import FilePath, Planned
from shardkit.sources.packed_names import GrowingNames, Names
from shardkit.storage.remote.path import RemotePath

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.sources.annotations import Annotations
    from shardkit.sources.base import Indices
    from shardkit.sources.columns import Metadata

_Table = TypeVar("_Table", bound="FileTable")
_REQUESTS = 64  # concurrent: at 50 ms each, 1,280 objects a second per process


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
        return self.relative(index).rpartition(".")[0]

    def key(self, index: int) -> str:
        return self.odd_keys.get(index) or key_of(self.stem(index))

    def relative(self, index: int) -> str:
        folder = self.folders[self.folder_of[index]]
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
