"""Caches the layouts of third-party TARs at URLs in the cache folder, so that each is scanned once.

A layout is stored as the pages of a file of its own, whose name changes if the TAR is replaced. The
cache treats these pages like any others: its limit, eviction and checksums apply to them.
"""

from __future__ import annotations

import functools
import json
import math
import os
from typing import Any

import numpy as np
import xxhash

from shardkit.errors import ShardkitError, warn
from shardkit.formats.compressed import read_ahead
from shardkit.formats.wds.layout import index_struct
from shardkit.formats.wds.third_party import scan
from shardkit.schema import Schema
from shardkit.storage.byte_source import ByteSource, RemoteFile
from shardkit.storage.page_cache import PAGE, FolderCache, cache_from
from shardkit.storage.pages import Pages
from shardkit.storage.remote.client import Info
from shardkit.storage.remote.path import RemotePath

_VERSION = 3  # of the cached layouts: increase it when the result of `scan` changes


def index_id(path: RemotePath, info: Info) -> str:
    """Return the name of a TAR's layout in the cache."""
    name = f"layout {_VERSION} {path} {info.size} {info.version}"
    return f"layout{xxhash.xxh3_64_hexdigest(name.encode())}"


def scanned(source: ByteSource, layout: dict[str, Any] | None) -> dict[str, Any]:
    """Like `scan`, but uses the cache folder, if there is one, for TARs at URLs."""
    cache, file, found = None, "", None
    if isinstance(source, RemoteFile) and layout is None and (cache := _cache(source)):
        file = index_id(source.path, source.path.store.info(source.path.key))
        found = _load(cache, file)
    if found is None:
        found = scan(read_ahead(source), layout)
        if cache is not None:
            _save(cache, file, found)
    for words in found.pop("warnings"):
        warn(words)
    return found


def _cache(source: RemoteFile) -> FolderCache | None:
    """Return the cache folder of the loader, or that named by the environment."""
    pages = source.path.store.pages
    if isinstance(pages, Pages) and isinstance(pages.cache, FolderCache):
        return pages.cache
    folder = os.environ.get("SHARDKIT_CACHE")
    return _folder(folder, os.environ.get("SHARDKIT_CACHE_LIMIT")) if folder else None


@functools.lru_cache(maxsize=1)
def _folder(folder: str, limit: str | None) -> FolderCache | None:
    cache = cache_from(folder, limit)
    return cache if isinstance(cache, FolderCache) else None


def _load(cache: FolderCache, file: str) -> dict[str, Any] | None:
    """Return the layout of a TAR; None if it is not in the cache or is damaged."""
    page, data = cache.get(file, 0), b""
    while page is not None:
        data += page
        if len(page) < PAGE:
            break
        page = cache.get(file, len(data) // PAGE)
    if page is None:
        return None
    line, _, rest = data.partition(b"\n")
    try:
        layout: dict[str, Any] = json.loads(line)
        samples = layout.pop("samples")
        size = samples * index_struct(Schema.from_json(layout["schema"])).size
        if len(rest) != size + 8 * samples:
            return None
        odd_keys = {int(position): key for position, key in layout["odd_keys"].items()}
        hashes = np.frombuffer(rest, np.int64, samples, size)
        return {**layout, "index": rest[:size], "odd_keys": odd_keys, "key_hashes": hashes}
    except (ValueError, KeyError, TypeError, AttributeError, ShardkitError):
        return None


def _save(cache: FolderCache, file: str, layout: dict[str, Any]) -> None:
    """Save the layout: a line of JSON, the index, the hashes of the keys; if the cache has room.

    Raises StorageError for other failures of the cache.
    """
    index, hashes = layout["index"], layout["key_hashes"]
    # In the same order in every process, as each may save some of the pages.
    about = {name: each for name, each in layout.items() if name not in ("index", "key_hashes")}
    data = json.dumps({**about, "samples": len(hashes)}).encode() + b"\n"
    data += index + hashes.tobytes()
    # The last page is always a short one (perhaps empty), which marks the end.
    for number in range(len(data) // PAGE + 1):
        page = data[number * PAGE : (number + 1) * PAGE]
        if not cache.put(file, number, page, lambda file, page: math.inf, 0):
            return
