"""MDS, the shards of MosaicML Streaming, with the index.json that StreamingDataset needs.

index.json lists the shards of a folder with their encodings, sizes and hashes. It is written for
our datasets, and compared with third-party shards.

layout.py    encodings of columns, and the bytes of values
shard.py     reads and writes shards, which describe themselves
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

import xxhash

from shardkit.errors import DamagedError, FormatError, ShardkitError, rename_option
from shardkit.formats.base import Format
from shardkit.formats.mds.layout import ABSENT, encoding_of
from shardkit.formats.mds.shard import MdsReader, MdsWriter, columns_of
from shardkit.formats.offsets import LARGEST
from shardkit.formats.unsupported import MDS, not_read
from shardkit.helpers.checked import MAX_BYTES, Count, from_json, of_version
from shardkit.helpers.names import checked_name
from shardkit.metadata.manifest import Manifest
from shardkit.schema import Array, Image, Schema
from shardkit.storage import fs
from shardkit.storage.byte_source import open_source

_INDEX = "index.json"
_BLOCK = 1 << 20
_HASHES = {name: getattr(xxhash, name) for name in xxhash.algorithms_available}
_HASHES |= {
    name: getattr(hashlib, name) for name in hashlib.algorithms_guaranteed if name[:6] != "shake_"
}


class _File(TypedDict):
    basename: str
    bytes: Count
    hashes: dict[str, str]


class _Shard(TypedDict):
    format: str
    samples: Count
    raw_data: _File
    zip_data: _File | None  # the same, compressed; one of the two files exists, or both


class _Index(TypedDict):
    shards: list[_Shard]


class Mds(Format):
    name = "mds"
    abilities = (
        "write: folders for StreamingDataset with their index.json, all field types",
        "read at random: all encodings (except pickle); also shards compressed with zstd, gz, bz2",
        "verify third-party shards: sizes and hashes from index.json",
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
        files = _files_of(folder)
        return None if files is None else [file["basename"] for _, file in files]

    def check_listed(self, folder: Path, names: Sequence[str]) -> Iterator[ShardkitError]:
        for shard, file in (_files_of(folder) or ()) if (folder / _INDEX).is_file() else ():
            if file["basename"] in names:
                yield from _differences(folder / file["basename"], shard, file)

    def complete(self, folder: Path, manifest: Manifest) -> list[Path]:
        shards = [
            {
                **columns_of(manifest.schema),
                "raw_data": {"basename": shard.file.name, "bytes": shard.file.bytes, "hashes": {}},
                "samples": shard.samples,
                "zip_data": None,
            }
            for shard in manifest.shards
        ]
        path = folder / _INDEX
        fs.write_file(path, json.dumps({"shards": shards, "version": 2}, sort_keys=True).encode())
        return [path]


def _files_of(folder: Path) -> list[tuple[_Shard, _File]] | None:
    """Return the shards of a folder, each with its existing file; None if the index is not MDS."""
    path, found = folder / _INDEX, []
    text = fs.read(path, MAX_BYTES)
    if not re.search(rb'"shards"\s*:', text) or re.search(rb'"chunks"\s*:', text):  # LitData's
        return None
    of_version(2, "version", text, "the index", path=path, fix="update shardkit")
    for shard in from_json(_Index, text, "the index", path=path)["shards"]:
        raw, compressed = shard["raw_data"], shard["zip_data"]
        for file in filter(None, (raw, compressed)):
            checked_name(file["basename"], path, "basename")
        there = compressed is None or (folder / raw["basename"]).is_file()
        file = raw if there or compressed is None else compressed
        if shard["format"] != "mds" or file["basename"].endswith((".br", ".snappy")):
            raise not_read(MDS, folder, file["basename"])
        found.append((shard, file))
    return found


def _differences(path: Path, shard: _Shard, file: _File) -> Iterator[ShardkitError]:
    """Differences between a shard and what the index says about it."""
    source = open_source(path)
    hashers = {name: _HASHES[name]() for name in file["hashes"] if name in _HASHES}
    for block in source.blocks(_BLOCK) if hashers else ():
        for hasher in hashers.values():
            hasher.update(block)
    recorded: dict[str, Any] = {"bytes": file["bytes"], **file["hashes"]}
    found = {"bytes": source.size, **{name: hasher.hexdigest() for name, hasher in hashers.items()}}
    if file is shard["raw_data"]:
        recorded["samples"] = shard["samples"]
        found["samples"] = int.from_bytes(source.read(0, min(4, source.size)), "little")
    for name, value in recorded.items():
        if value != found.get(name, "no such hash"):
            words = {"expected": f"{name} {value}", "found": f"{found.get(name, 'unknown')}"}
            yield DamagedError(f"the shard does not match {_INDEX}", path=path, **words)


FORMAT = Mds()
