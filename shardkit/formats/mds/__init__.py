"""MDS, the shards of MosaicML Streaming, with the index.json that StreamingDataset needs.

layout.py    encodings of columns, and the bytes of values
shard.py     reads and writes shards, which describe themselves
index.py     index.json: written for our datasets, and compared with foreign shards
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardkit.errors import FormatError, ShardkitError, rename_option
from shardkit.formats.base import Format
from shardkit.formats.mds import index
from shardkit.formats.mds.layout import ABSENT, encoding_of
from shardkit.formats.mds.shard import MdsReader, MdsWriter
from shardkit.formats.offsets import LARGEST
from shardkit.metadata.manifest import Manifest
from shardkit.schema import Array, Image, Schema


class Mds(Format):
    name = "mds"
    abilities = (
        "write: folders for StreamingDataset with their index.json, all field types",
        "read at random: all encodings (except pickle); also shards compressed with zstd, gz, bz2",
        "verify foreign shards: sizes and hashes from index.json",
    )
    reader = MdsReader
    writer = MdsWriter
    largest = LARGEST
    optional_changes_encoding = True

    def layout(self, schema: Schema) -> dict[str, Any]:
        if ABSENT in schema:
            raise FormatError(
                f"{ABSENT!r} is the column in which shardkit stores the names of missing fields",
                field=ABSENT,
                fix=f"rename it: {rename_option(ABSENT)}",
            )
        return super().layout(schema)

    def notes(self, schema: Schema) -> list[str]:
        found = []
        for name, kind in schema.items():
            if isinstance(kind, Array) and encoding_of(kind) == "bytes":
                found.append(f"{name!r}: MDS has no such arrays, so they are stored as .npy bytes")
            if isinstance(kind, Image) and kind.optional:
                found.append(f"{name!r}: MDS returns optional images as bytes, not decoded")
        if any(kind.optional for kind in schema.values()):
            found.append(f"the column {ABSENT!r} has the names of a sample's missing fields")
        return found

    def shard_stem(self, number: int, shards: int) -> str:
        return f"shard.{number:05d}"

    def listed(self, folder: Path) -> list[str] | None:
        files = index.files_of(folder)
        return None if files is None else [file["basename"] for _, file in files]

    def check_listed(self, folder: Path, names: Sequence[str]) -> Iterator[ShardkitError]:
        return index.problems(folder, names)

    def complete(self, folder: Path, manifest: Manifest) -> list[Path]:
        return [index.write_index(folder, manifest)]


FORMAT = Mds()
