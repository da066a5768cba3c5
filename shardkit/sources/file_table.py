"""What is known of each file of a source: about 130 bytes of memory for one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import xxhash

from shardkit.remote.path import RemotePath
from shardkit.sample import key_of, unique_key
from shardkit.sources.base import Source
from shardkit.sources.files import FilePath, Planned

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.sources.annotations import Annotations
    from shardkit.sources.base import Indices
    from shardkit.sources.metadata import Metadata

_Table = TypeVar("_Table", bound="FileTable")
_NAMES = 4096  # that are hashed together
_REQUESTS = 64  # at a time: at 50 ms each, 1,280 objects a second in each process


@dataclass
class FileTable:
    """Files below a root, in order. Folders are relative to it, "" being the root itself."""

    columns: ClassVar[tuple[str, ...]] = ("sizes", "times", "inodes")  # arrays by file
    by_folder: ClassVar[tuple[str, ...]] = ("folders", "labels")  # lists by folder

    folders: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    folder_of: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    sizes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    times: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    inodes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    began: int = 0  # when the first was looked at, in nanoseconds
    odd_keys: dict[int, str] = field(default_factory=dict)  # those that are not path minus suffix
    labels: list[int | None] = field(default_factory=list)  # by folder, if it is a class
    metadata: Metadata | Annotations | None = None

    def __len__(self) -> int:
        return len(self.names)

    def stem(self, index: int) -> str:
        """The path without its suffix, which is the key but for `odd_keys`."""
        return self.relative(index).rpartition(".")[0]

    def key(self, index: int) -> str:
        return self.odd_keys.get(index) or self.stem(index)

    def relative(self, index: int) -> str:
        folder = self.folders[self.folder_of[index]]
        return f"{folder}/{self.names[index]}" if folder else self.names[index]

    def planned(self, index: int) -> Planned:
        return Planned(int(self.times[index]), int(self.inodes[index]), self.began)

    def select(self: _Table, indices: Indices) -> _Table:
        """These files alone, in this order."""
        used, folder_of = np.unique(self.folder_of[indices], return_inverse=True)
        chosen, odd = indices.tolist(), self.odd_keys
        changed: dict[str, Any] = {
            **{name: getattr(self, name)[indices] for name in self.columns},
            **{n: [old[f] for f in used] for n in self.by_folder if (old := getattr(self, n))},
        }
        return replace(
            self,
            names=[self.names[i] for i in chosen],
            folder_of=folder_of.astype(np.uint32),
            odd_keys={n: odd[i] for n, i in enumerate(chosen) if i in odd} if odd else {},
            metadata=self.metadata.select(indices) if self.metadata is not None else None,
            **changed,
        )

    def hash_names(self, digest: xxhash.xxh3_128) -> None:
        for first in range(0, len(self.names), _NAMES):
            names = "\0".join(self.names[first : first + _NAMES])
            digest.update(names.encode("utf-8", "surrogateescape") + b"\0")


class FileSource(Source, Generic[_Table]):
    """Files below a root: each is a sample, with what belongs to it."""

    def __init__(self, root: FilePath, files: _Table) -> None:
        super().__init__()
        self._root = root
        self._files = files
        self.requests = _REQUESTS if isinstance(root, RemotePath) else 0

    def __len__(self) -> int:
        return len(self._files)

    def key(self, index: int) -> str:
        return self._files.key(index)

    def name(self, index: int) -> str:
        return self._files.relative(index)

    def original(self, index: int, key: str) -> str | None:
        return self._files.relative(index) if index in self._files.odd_keys else None


def odd_keys(names: Iterable[tuple[str, str]]) -> dict[int, str]:
    """By number, the keys of files that are not simply the path; `names` are paths and suffixes."""
    odd: dict[int, str] = {}
    taken: set[str] = set()
    for number, (path, suffix) in enumerate(names):
        key = unique_key(key_of(path), suffix, taken)
        taken.add(key)
        if key != path:
            odd[number] = key
    return odd
