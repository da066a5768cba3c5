"""What a table says about the files of a source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from shardkit.errors import SourceError
from shardkit.schema import Schema
from shardkit.sources.columns import Column

if TYPE_CHECKING:
    import numpy.typing as npt


class Metadata:
    """Columns of values, and the row number of each file (-1 if it has no row)."""

    def __init__(
        self,
        schema: Schema,
        columns: dict[str, Column],
        rows: npt.NDArray[np.int64],
        unusable: Mapping[str, SourceError] = MappingProxyType({}),
        class_names: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        path: Path | None = None,
    ) -> None:
        self.schema = schema
        self.path = path
        self.unusable = unusable  # columns that cannot be fields
        self.class_names = class_names  # by field
        self._columns = columns
        self._rows = rows

    @property
    def lacking(self) -> int:
        """How many files have no row."""
        return int(np.count_nonzero(self._rows < 0))

    def row(self, file: int) -> dict[str, Any]:
        """The fields of one file, without missing values."""
        row = int(self._rows[file])
        if row < 0:
            return {}
        values = ((name, column[row]) for name, column in self._columns.items())
        return {name: value for name, value in values if value is not None}

    def select(self, files: npt.NDArray[np.int64]) -> Metadata:
        rows = self._rows[files]
        used, inverse = np.unique(rows[rows >= 0], return_inverse=True)
        renumbered = np.full(len(rows), -1, np.int64)
        renumbered[rows >= 0] = inverse
        columns = {name: column.take(used) for name, column in self._columns.items()}
        return Metadata(self.schema, columns, renumbered, {}, dict(self.class_names))

    def fingerprint(self) -> bytes:
        digest = xxhash.xxh3_128(np.ascontiguousarray(self._rows).data)
        for name, column in self._columns.items():
            digest.update((name + "\0").encode("utf-8", "surrogatepass"))
            column.update(digest)
        return digest.digest()
