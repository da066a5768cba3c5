"""The layouts of foreign TARs at URLs, kept in the cache folder: each TAR is searched once.

A layout is kept as pages of a file of its own, which has another name where the TAR was replaced.
The cache counts them in its limit, removes them like others, and compares their checksums.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import numpy as np
import xxhash

from shardkit.byte_source import ByteSource, RemoteFile
from shardkit.errors import ShardkitError, warn
from shardkit.formats.streamed import Streamed
from shardkit.formats.wds.foreign import scan
from shardkit.formats.wds.layout import index_struct
from shardkit.page_cache import PAGE, FolderCache, cache_from
from shardkit.pages import Pages
from shardkit.remote.path import RemotePath
from shardkit.remote.store import Info
from shardkit.schema import Schema

_VERSION = 1  # of what is kept: changes with what `scan` makes of a TAR


def index_id(path: RemotePath, info: Info) -> str:
    """The name in a cache of what is kept of a TAR."""
    name = f"layout {_VERSION} {path} {info.size} {info.version}"
    return f"layout{xxhash.xxh3_64_hexdigest(name.encode())}"


def scanned(source: ByteSource, layout: dict[str, Any] | None) -> dict[str, Any]:
    """As `scan`, which a TAR at a URL needs once, if there is a cache folder."""
    kept = None
    if isinstance(source, RemoteFile):
        cache = _cache(source)
        kept = _Kept(source, cache) if cache is not None and layout is None else None
    found = None if kept is None else kept.load()
    if found is None:
        found = scan(Streamed(source) if isinstance(source, RemoteFile) else source, layout)
        if kept is not None:
            kept.save(found)
    for words in found.pop("warnings"):
        warn(words)
    return found


def _cache(source: RemoteFile) -> FolderCache | None:
    """The folder that a loader has, or that the environment names."""
    pages = source.path.store.pages
    if isinstance(pages, Pages):
        return pages.cache if isinstance(pages.cache, FolderCache) else None
    folder = os.environ.get("SHARDKIT_CACHE")
    return _folder(folder, os.environ.get("SHARDKIT_CACHE_LIMIT")) if folder else None


@functools.lru_cache(maxsize=1)
def _folder(folder: str, limit: str | None) -> FolderCache | None:
    cache = cache_from(folder, limit)
    return cache if isinstance(cache, FolderCache) else None


class _Kept:
    """What is kept of one TAR: a line of JSON, the index, the hashes of the keys."""

    def __init__(self, source: RemoteFile, cache: FolderCache) -> None:
        self._cache = cache
        self._size = source.size
        self._file = index_id(source.path, source.path.store.info(source.path.key))

    def load(self) -> dict[str, Any] | None:
        """None where it is not there, or is not as it was saved."""
        page, data = self._cache.get(self._file, 0), b""
        while page is not None:
            data += page
            if len(page) < PAGE:
                break
            page = self._cache.get(self._file, len(data) // PAGE)
        if page is None:
            return None
        try:
            return self._parsed(data)
        except (ValueError, KeyError, TypeError, AttributeError, ShardkitError):
            return None

    def _parsed(self, data: bytes) -> dict[str, Any]:
        line, _, rest = data.partition(b"\n")
        layout: dict[str, Any] = json.loads(line)
        samples, checksum = layout.pop("samples"), layout.pop("checksum")
        size = samples * index_struct(Schema.from_json(layout["schema"])).size
        if len(rest) != size + 8 * samples or xxhash.xxh3_128_hexdigest(rest) != checksum:
            raise ValueError
        return {
            **layout,
            "index": rest[:size],
            "odd_keys": {int(position): key for position, key in layout["odd_keys"].items()},
            "key_hashes": np.frombuffer(rest, np.int64, samples, size),
        }

    def save(self, layout: dict[str, Any]) -> None:
        """As far as there is room for it. Raises StorageError where the folder fails otherwise."""
        index, hashes = layout["index"], layout["key_hashes"]
        rest = index + hashes.tobytes()
        about = {name: layout[name] for name in layout.keys() - {"index", "key_hashes"}}
        about |= {"samples": len(hashes), "checksum": xxhash.xxh3_128_hexdigest(rest)}
        data = json.dumps(about).encode() + b"\n" + rest
        # The last page is a short one, which says that it is the last.
        for number in range(len(data) // PAGE + 1):
            page = data[number * PAGE : (number + 1) * PAGE]
            if not self._cache.put(self._file, number, page, lambda file, page: float("inf"), 0):
                return
