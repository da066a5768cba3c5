"""The index.json of a folder: its shards, with their encodings, sizes and hashes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

import xxhash

from shardkit.errors import DamagedError, ShardkitError
from shardkit.formats.mds.shard import columns_of
from shardkit.formats.unsupported import MDS, not_read
from shardkit.helpers.checked import MOST_BYTES, Count, from_json, of_version
from shardkit.helpers.names import checked_name
from shardkit.metadata.manifest import Manifest
from shardkit.storage import fs
from shardkit.storage.byte_source import open_source

NAME = "index.json"
_BLOCK = 1 << 20
_KINDS = {name: getattr(xxhash, name) for name in xxhash.algorithms_available}
_KINDS |= {
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


def write_index(folder: Path, manifest: Manifest) -> Path:
    """Write the index.json of a finished dataset."""
    shards = [
        {
            **columns_of(manifest.schema),
            "raw_data": {"basename": shard.file.name, "bytes": shard.file.bytes, "hashes": {}},
            "samples": shard.samples,
            "zip_data": None,
        }
        for shard in manifest.shards
    ]
    path = folder / NAME
    fs.write_file(path, json.dumps({"shards": shards, "version": 2}, sort_keys=True).encode())
    return path


def files_of(folder: Path) -> list[tuple[_Shard, _File]] | None:
    """The shards of a folder, each with its existing file; None if the index is not MDS."""
    path, found = folder / NAME, []
    text = fs.read(path, MOST_BYTES)
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


def problems(folder: Path, names: Sequence[str]) -> Iterator[ShardkitError]:
    """Differences between the index, if there is one, and the shards with these names."""
    for shard, file in (files_of(folder) or ()) if (folder / NAME).is_file() else ():
        if file["basename"] in names:
            yield from _differing(folder / file["basename"], shard, file)


def _differing(path: Path, shard: _Shard, file: _File) -> Iterator[ShardkitError]:
    source = open_source(path)
    hashers = {name: _KINDS[name]() for name in file["hashes"] if name in _KINDS}
    for block in source.blocks(_BLOCK) if hashers else ():
        for hasher in hashers.values():
            hasher.update(block)
    said: dict[str, Any] = {"bytes": file["bytes"], **file["hashes"]}
    found = {"bytes": source.size, **{name: hasher.hexdigest() for name, hasher in hashers.items()}}
    if file is shard["raw_data"]:
        said["samples"] = shard["samples"]
        found["samples"] = int.from_bytes(source.read(0, min(4, source.size)), "little")
    for name, value in said.items():
        if value != found.get(name, "no such hash"):
            words = {"expected": f"{name} {value}", "found": f"{found.get(name, 'unknown')}"}
            yield DamagedError(f"the shard does not match {NAME}", path=path, **words)
