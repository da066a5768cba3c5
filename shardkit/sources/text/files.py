"""What is kept of each file of text, in order: about 130 bytes of memory for one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from shardkit.sources.files import Planned
from shardkit.sources.text.names import Name, parse_name

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.sources.base import Indices


@dataclass
class Files:
    """Files below a root. Folders are relative to it, "" being the root itself."""

    folders: list[str]
    names: list[str]
    folder_of: npt.NDArray[np.uint32]
    sizes: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]
    inodes: npt.NDArray[np.uint64]
    encodings: list[str]
    encoding_of: npt.NDArray[np.uint8]
    # Bytes of output for one byte of input, by compression.
    ratios: dict[str, float] = field(default_factory=dict)
    began: int = 0  # when the first was looked at, in nanoseconds

    def __len__(self) -> int:
        return len(self.names)

    def relative(self, index: int) -> str:
        folder: str = self.folders[self.folder_of[index]]
        return f"{folder}/{self.names[index]}" if folder else self.names[index]

    def name(self, index: int) -> Name:
        name = parse_name(self.names[index])
        assert name is not None  # others are no files of text
        return name

    def stem(self, index: int) -> str:
        """The path without suffixes, which is the key of a whole file but for odd ones."""
        suffixes = len(self.names[index]) - len(self.name(index).stem)
        return self.relative(index)[:-suffixes]

    def encoding(self, index: int) -> str:
        encoding: str = self.encodings[self.encoding_of[index]]
        return encoding

    def planned(self, index: int) -> Planned:
        return Planned(int(self.times[index]), int(self.inodes[index]), self.began)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Bytes once decompressed, as estimated by the ratios."""
        ratio = [self.ratios.get(name.rpartition(".")[2].lower(), 1.0) for name in self.names]
        return (np.maximum(self.sizes, 0) * np.array(ratio, np.float64)).astype(np.int64)

    def select(self, indices: Indices) -> Files:
        used, folder_of = np.unique(self.folder_of[indices], return_inverse=True)
        return Files(
            folders=[self.folders[f] for f in used],
            names=[self.names[i] for i in indices.tolist()],
            folder_of=folder_of.astype(np.uint32),
            sizes=self.sizes[indices],
            times=self.times[indices],
            inodes=self.inodes[indices],
            encodings=self.encodings,
            encoding_of=self.encoding_of[indices],
            ratios=self.ratios,
            began=self.began,
        )

    def fingerprint(self, fields: list[str]) -> dict[str, str]:
        """What identifies the files, and that these fields of them are read."""
        digest = xxhash.xxh3_128()
        for texts in (fields, self.folders):
            digest.update("\0".join(texts).encode("utf-8", "surrogateescape") + b"\0\0")
        for first in range(0, len(self.names), 4096):
            names = "\0".join(self.names[first : first + 4096])
            digest.update(names.encode("utf-8", "surrogateescape") + b"\0")
        for numbers in (self.folder_of, self.sizes):
            digest.update(np.ascontiguousarray(numbers).data)
        times = xxhash.xxh3_128(np.ascontiguousarray(self.times).data)
        return {"files": digest.hexdigest(), "times": times.hexdigest()}
