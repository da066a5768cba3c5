"""TAR shards, as the WebDataset library writes and reads them.

names.py                maps member names to keys and fields
values.py               encodes and decodes the payloads of members
layout.py               the byte layout of our shards and their indexes
writer.py               writes a shard and its index
reader.py               random access through the index
members.py              parses the members of any TAR
third_party.py          builds the index of a TAR that has none
remote_index_cache.py   caches the indexes of remote TARs
extra_indexes.py        files for the loaders of other libraries
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.formats.base import Format
from shardkit.formats.wds import extra_indexes, layout, names
from shardkit.formats.wds.reader import WdsReader
from shardkit.formats.wds.writer import ODD, WdsWriter, join
from shardkit.metadata.manifest import Manifest
from shardkit.schema import Schema


class Wds(Format):
    name = "wds"
    abilities = (
        "write: ustar, one index beside each shard, all field types",
        "read at random: its own shards by their index, others after one pass over their headers",
        "read third-party TARs: ustar, GNU, pax, V7; .gz, .zst, .bz2, .xz after unpacking (slow)",
        "convert to other formats without decoding: values and JSON text pass through unchanged",
    )
    reader = WdsReader
    writer = WdsWriter
    join = staticmethod(join)
    mixed_types_as_bytes = True  # the payload of any member can be read as bytes
    beside = MappingProxyType(extra_indexes.LOADERS)
    layout_types = MappingProxyType({"extensions": dict[str, list[str]]})

    def layout(self, schema: Schema) -> dict[str, Any]:
        return {"schema": schema.to_json(), "extensions": names.extensions(schema)}

    def notes(self, schema: Schema) -> list[str]:
        odd = [field for field in schema if ODD.search(field)]
        if not odd:
            return []
        return [
            "fields whose names have blanks or characters outside of ASCII, which DALI's index of a"
            f" TAR and other tools cannot handle: {', '.join(map(repr, odd))[:200]}; use --rename"
        ]

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        return payload + fields * layout.MEMBER_OVERHEAD

    def complete(self, folder: Path, manifest: Manifest) -> list[Path]:
        return extra_indexes.complete(folder, {"": manifest})

    def complete_splits(self, folder: Path, splits: Mapping[str, Manifest]) -> list[Path]:
        return extra_indexes.complete(folder, splits)


FORMAT = Wds()
