"""LitData datasets: chunks of samples, and an index.json that describes how to read them.

values.py    LitData's serializers; nested.py: the one for lists and objects
index.py     index.json
chunk.py     where the samples of a chunk are, and how they are compressed
reader.py    random access; rows.py: the same for rows that LitData stores as Arrow
writer.py    writes a chunk in one pass
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardkit.formats.base import Format
from shardkit.formats.litdata.index import leaves_of, load, write_index
from shardkit.formats.litdata.reader import open_chunk
from shardkit.formats.litdata.values import FILE
from shardkit.formats.litdata.writer import LitDataWriter
from shardkit.formats.offsets import LARGEST
from shardkit.metadata.manifest import Manifest
from shardkit.schema import Array, Image, Schema


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
