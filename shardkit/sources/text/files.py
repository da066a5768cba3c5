"""The files of a text corpus: their names, sizes and encodings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.sources.file_names import Name, parse_name
from shardkit.sources.file_table import FileTable

UNSURE = 2  # a table with quoted cells, and with quotes that are not closed


@dataclass
class Files(FileTable):
    """The table of text files."""

    columns = (*FileTable.columns, "encoding_of", "quoted_of")

    header: tuple[str, ...] | None = None  # of tables that have none; () numbers their columns
    encodings: list[str] = field(default_factory=list)
    encoding_of: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    # Whether the cells of a table are quoted: 0, 1, or `UNSURE`.
    quoted_of: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    # Decompressed bytes per compressed byte, by compression.
    ratios: dict[str, float] = field(default_factory=dict)

    def name(self, index: int) -> Name:
        name = parse_name(self.names[index])
        assert name is not None  # other files are not listed
        return name

    def stem(self, index: int) -> str:
        """Return the path without its suffixes, including that of the compression."""
        suffixes = len(self.names[index]) - len(self.name(index).stem)
        return self.relative(index)[:-suffixes]

    def encoding(self, index: int) -> str:
        encoding: str = self.encodings[self.encoding_of[index]]
        return encoding

    def quoted(self, index: int) -> bool | None:
        found = int(self.quoted_of[index])
        return None if found == UNSURE else bool(found)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the sizes after decompression, estimated from the ratios."""
        ratio = [self.ratios.get(name.rpartition(".")[2].lower(), 1.0) for name in self.names]
        return (np.maximum(self.sizes, 0) * np.array(ratio, np.float64)).astype(np.int64)

    def fingerprint(self, fields: list[str], classes: Sequence[str] | None) -> dict[str, str]:
        """Return hashes that identify the files and the fields that are read from them."""
        digest = xxhash.xxh3_128()
        for texts in (fields, self.folders):
            digest.update("\0".join(texts).encode("utf-8", "surrogateescape") + b"\0\0")
        self.hash_names(digest)
        for numbers in (self.folder_of, self.sizes):
            digest.update(np.ascontiguousarray(numbers).data)
        if classes is not None or self.labels:
            digest.update(json.dumps([classes, self.labels]).encode())
        if self.metadata is not None:
            digest.update(self.metadata.fingerprint())
        times = xxhash.xxh3_128(np.ascontiguousarray(self.times).data)
        return {"files": digest.hexdigest(), "times": times.hexdigest()}
