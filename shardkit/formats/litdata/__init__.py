"""LitData datasets: chunks of samples, and an index.json that describes how to read them.

values.py   LitData's serializers
index.py    index.json
chunk.py    reads and writes the samples of a chunk
rows.py     reads rows that LitData stores as Arrow
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardkit.errors import FormatError
from shardkit.formats.base import Format, ShardReader
from shardkit.formats.litdata.chunk import LitDataReader, LitDataWriter, rows_of
from shardkit.formats.litdata.index import NAME, leaves_of, load, write_index
from shardkit.formats.litdata.values import FILE
from shardkit.formats.offsets import LARGEST
from shardkit.helpers.extras import extra
from shardkit.metadata.manifest import Manifest
from shardkit.schema import Array, Image, Schema
from shardkit.storage.byte_source import open_source


def open_chunk(path: Path, layout: dict[str, Any] | None = None) -> ShardReader:
    """The reader of a chunk: of samples, or of rows that LitData stores as Arrow."""
    if layout is None:
        layout = _of_index(path)
    if "rows" not in layout and ("leaves" not in layout or rows_of(open_source(path)) is None):
        return LitDataReader(path, layout)
    with extra("arrow", "reading text rows of LitData"):
        from shardkit.formats.litdata.rows import RowsReader
    return RowsReader(path, layout if "rows" in layout else None)


def _of_index(path: Path) -> dict[str, Any]:
    """The layout of a chunk, from index.json."""
    index = load(path.parent)
    if index is None or path.name not in index.samples:
        raise FormatError(
            "a chunk can only be read with an index.json beside it that lists it",
            path=path,
            expected=str(path.with_name(NAME)),
            fix="copy the index.json too, and give the folder",
        )
    return {**index.layout, "samples": index.samples[path.name]}


class LitData(Format):
    name = "litdata"
    abilities = (
        "write: folders for litdata.StreamingDataset with their index.json, all field types",
        "read at random: all serializers (except pickle), tokens, text rows; all Zstandard modes",
    )
    reader = staticmethod(open_chunk)
    writer = LitDataWriter
    largest = LARGEST

    def layout(self, schema: Schema) -> dict[str, Any]:
        leaves_of(schema)
        return super().layout(schema)

    def notes(self, schema: Schema) -> list[str]:
        found = []
        for name, stored in leaves_of(schema):
            kind = schema.get(name)
            if stored == FILE and isinstance(kind, Array):
                found.append(
                    f"{name!r}: LitData has no such arrays, so they are stored as .npy bytes"
                )
            if stored == FILE and isinstance(kind, Image):
                found.append(f"{name!r}: LitData returns optional images as bytes, not decoded")
        if any(kind.optional for kind in schema.values()):
            found.append("LitData returns missing values as 0, nan, null or empty values")
        return found

    def listed(self, folder: Path) -> list[str] | None:
        index = load(folder)
        return None if index is None else [*index.samples]

    def shard_stem(self, number: int, shards: int) -> str:
        return f"chunk-0-{number:05d}"  # some of LitData's tools expect such names

    def complete(self, folder: Path, manifest: Manifest) -> list[Path]:
        return [write_index(folder, manifest)]


FORMAT = LitData()
