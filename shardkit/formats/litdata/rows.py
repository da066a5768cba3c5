"""Random access to text rows, which LitData stores as an Arrow file at the end of a chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardkit.formats.arrow.reader import IpcReader
from shardkit.formats.litdata.chunk import rows_of
from shardkit.storage.byte_source import ByteSource, open_source


class RowsReader(IpcReader):
    def __init__(self, path: Path, layout: dict[str, Any] | None = None) -> None:
        super().__init__(path, layout)
        self.layout["rows"] = True

    def _bytes_of(self, path: Path) -> ByteSource:
        rows = rows_of(open_source(path))
        if rows is None:
            raise ValueError("the size of its rows is missing")
        return rows
