"""LitData datasets: chunks of samples, and an index.json that describes how to read them.

values.py   LitData's serializers
chunk.py    reads and writes the samples of a chunk
rows.py     reads rows that LitData stores as Arrow
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import xxhash

from shardkit.errors import FormatError
from shardkit.formats.base import Format, ShardReader
from shardkit.formats.litdata.chunk import LitDataReader, LitDataWriter, rows_of
from shardkit.formats.litdata.values import FILE, leaves_of
from shardkit.formats.offsets import LARGEST
from shardkit.helpers import os_errors
from shardkit.helpers.checked import MAX_BYTES, Count, MismatchError, checked, damaged, parse
from shardkit.helpers.extras import extra
from shardkit.helpers.names import checked_name
from shardkit.metadata.manifest import Manifest
from shardkit.schema import Array, Image, Schema
from shardkit.storage import fs
from shardkit.storage.byte_source import open_source

NAME = "index.json"
ABOUT = "shardkit"  # our entry: schema and classes, for reading without a shardkit manifest


class _Chunk(TypedDict):
    filename: str
    chunk_size: Count  # samples


class _Config(TypedDict):
    data_format: list[str]
    data_spec: str


class _Index(TypedDict):
    chunks: list[_Chunk]
    config: _Config


class _About(TypedDict):
    schema: dict[str, Any]
    classes: dict[str, list[str]]


class Index(NamedTuple):
    """What a reader needs from index.json."""

    samples: Mapping[str, int]  # by chunk
    layout: Mapping[str, Any]  # of all chunks


def load(folder: Path) -> Index | None:
    """Return the index of a folder; None if there is none, or if it belongs to another format."""
    path = folder / NAME
    with os_errors.explained("open", path):
        found = path.stat() if path.is_file() else None
    return found and _load(path, found.st_size, found.st_mtime_ns)


@functools.lru_cache(4)  # it is needed again for each chunk that is opened
def _load(path: Path, size: int, changed: int) -> Index | None:
    text = fs.read(path, MAX_BYTES)
    if not all(re.search(rb'"%b"\s*:' % key, text) for key in (b"chunks", b"config")):
        return None
    try:
        found = parse(text)
        index = checked(_Index, found)
        _refuse(found["config"], path)
        layout = _layout(index["config"], found)
    except ValueError as error:
        raise damaged("the index", error, path=path) from error
    samples = {}
    for number, chunk in enumerate(index["chunks"]):
        name = checked_name(chunk["filename"], path, f"chunks[{number}].filename", flat=True)
        samples[name] = chunk["chunk_size"]
    return Index(samples, layout)


def _layout(config: _Config, index: dict[str, Any]) -> dict[str, Any]:
    """Return the layout of all chunks, without a schema if it has to be guessed from the values."""
    leaves = [*zip(_names(config["data_spec"]), config["data_format"], strict=True)]
    if ABOUT in index:
        about = checked(_About, index[ABOUT], ABOUT)
        if leaves_of(Schema.from_json(about["schema"])) == leaves:
            return {"schema": about["schema"], "classes": about["classes"], "ours": True}
    more: dict[str, Any] = index["config"]
    bare = len(leaves) == 1 and leaves[0][1].startswith("no_header_tensor")
    loader = more.get("item_loader", "TokensLoader" if bare else None)
    each = more.get("compression_level") == "sample"
    return {"leaves": leaves, "tokens": loader == "TokensLoader", "each": each}


def _refuse(config: dict[str, Any], path: Path) -> None:
    """Raise FormatError for datasets that are stored in an unsupported way."""
    loader = config.get("item_loader", "PyTreeLoader")
    what, fix = "", "read them with LitData and write them with shardkit.create"
    if config.get("encryption"):
        what = "the chunks are encrypted"
    elif loader == "ParquetLoader":
        what, fix = "the index lists Parquet files", "give the Parquet files: 'FOLDER/*.parquet'"
    elif loader not in ("PyTreeLoader", "TokensLoader"):
        what = f"the chunks are for another loader, {loader!r:.60}"
    if what:
        raise FormatError(f"{what}; shardkit cannot read it", path=path, fix=fix)


def _names(spec: str) -> list[str]:
    """Return the names of the leaves of a pytree: for each, the keys on the path to it."""
    try:
        version, tree = json.loads(spec)
        names = ["/".join(way) or "value" for way in _leaves(tree)]
    except (TypeError, KeyError, RecursionError):
        version, names = 0, []
    if version != 1 or len({*names}) < len(names):
        raise MismatchError("a pytree with distinct leaf names", spec, "config", "data_spec")
    return names


def _leaves(tree: dict[str, Any], *way: str) -> Iterator[tuple[str, ...]]:
    children = tree["children_spec"]
    if tree["type"] is None:
        yield way
    context = json.loads(tree["context"] or "null")
    if isinstance(context, dict):  # a defaultdict
        context = context["dict_context"]
    keys = context if isinstance(context, list) else range(len(children))
    for key, child in zip(keys, children, strict=True):
        yield from _leaves(child, *way, str(key))


def open_chunk(path: Path, layout: dict[str, Any] | None = None) -> ShardReader:
    """Return the reader of a chunk: of samples, or of rows that LitData stores as Arrow."""
    if layout is None:
        layout = _of_index(path)
    if "rows" not in layout and ("leaves" not in layout or rows_of(open_source(path)) is None):
        return LitDataReader(path, layout)
    with extra("arrow", "reading text rows of LitData"):
        from shardkit.formats.litdata.rows import RowsReader
    return RowsReader(path, layout if "rows" in layout else None)


def _of_index(path: Path) -> dict[str, Any]:
    """Return the layout of a chunk, from index.json."""
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
        names, formats = zip(*leaves_of(manifest.schema), strict=True)
        leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
        tree = {
            "type": "builtins.dict",
            "context": json.dumps(names),
            "children_spec": [leaf] * len(names),
        }
        chunks = [
            {
                "chunk_bytes": s.file.bytes,
                "chunk_size": s.samples,
                "dim": None,
                "filename": s.file.name,
            }
            for s in manifest.shards
        ]
        config = {
            "chunk_bytes": max(shard.file.bytes for shard in manifest.shards),
            "chunk_size": None,
            "compression": None,
            "data_format": formats,
            "data_spec": json.dumps([1, tree]),
            "encryption": None,
            "item_loader": "PyTreeLoader",
        }
        version = xxhash.xxh3_64()  # LitData names its caches after it
        for file in manifest.all_files():
            version.update(f"{file.checksum} ".encode())
        index = {
            "chunks": chunks,
            "config": config,
            ABOUT: {"schema": manifest.schema.to_json(), "classes": manifest.class_names},
            "updated_at": version.hexdigest(),
        }
        path = folder / NAME
        fs.write_file(path, json.dumps(index).encode())
        return [path]


FORMAT = LitData()
