"""The index.json of a folder: its chunks, and the values that their samples consist of."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import xxhash

from shardkit.errors import FormatError
from shardkit.formats.base import KEY
from shardkit.formats.litdata.values import serializer_for
from shardkit.helpers import os_errors
from shardkit.helpers.checked import MOST_BYTES, Count, MismatchError, checked, damaged, parse
from shardkit.helpers.names import checked_name
from shardkit.metadata.manifest import Manifest
from shardkit.schema import Schema
from shardkit.storage import fs

NAME = "index.json"
ABOUT = "shardkit"  # our entry: schema and classes, for reading without a shardkit manifest

Leaves = list[tuple[str, str]]  # name and serializer of each value of a sample, in order


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
    """The index of a folder; None if there is none, or if it belongs to another format."""
    path = folder / NAME
    with os_errors.explained("open", path):
        found = path.stat() if path.is_file() else None
    return found and _load(path, found.st_size, found.st_mtime_ns)


@functools.lru_cache(4)  # it is needed again for each chunk that is opened
def _load(path: Path, size: int, changed: int) -> Index | None:
    text = fs.read(path, MOST_BYTES)
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
    """The layout of all chunks, without a schema if it has to be guessed from the values."""
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
    """The names of the leaves of a pytree: for each, the keys on the path to it."""
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


def leaves_of(schema: Schema) -> Leaves:
    """The values of samples that shardkit writes; FormatError for types LitData cannot store."""
    return [(KEY, "str"), *((name, serializer_for(name, kind)) for name, kind in schema.items())]


def write_index(folder: Path, manifest: Manifest) -> Path:
    """Write the index.json of a finished dataset."""
    names, formats = zip(*leaves_of(manifest.schema), strict=True)
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    tree = {
        "type": "builtins.dict",
        "context": json.dumps(names),
        "children_spec": [leaf] * len(names),
    }
    chunks = [
        {"chunk_bytes": s.file.bytes, "chunk_size": s.samples, "dim": None, "filename": s.file.name}
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
    return path
