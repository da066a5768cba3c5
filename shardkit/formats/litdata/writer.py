"""Writes a chunk: offsets, then for each sample the sizes of its values and the values."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from shardkit.codecs.media import check
from shardkit.formats.base import KEY, ShardSpec, key_bytes, not_stored
from shardkit.formats.litdata.index import leaves_of
from shardkit.formats.litdata.values import absent, encoder
from shardkit.formats.offsets import OffsetsWriter
from shardkit.sample import Sample


class LitDataWriter(OffsetsWriter):
    called, room, fill = "LitData", 1 << 16, b"\0"

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, spec)
        leaves = dict(leaves_of(spec.schema))
        self._sizes = struct.Struct(f"<{len(leaves)}I")
        self._fields = [
            (name, kind, encoder(leaves[name], kind), absent(leaves[name], kind))
            for name, kind in spec.schema.items()
        ]

    def stored(self, sample: Sample) -> list[bytes]:
        """The sizes of the values, the values, and the names of missing fields."""
        key = sample[KEY]
        values = [key_bytes(key)]
        for name, kind, encode, nothing in self._fields:
            value = sample.get(name)
            try:
                if name in sample:
                    check(kind, value, key, name)
                values.append(encode(value) if name in sample else nothing)
            except (TypeError, ValueError, RecursionError) as error:
                raise not_stored(error, value, key, name) from error
        # LitData ignores bytes after the last value.
        missing = [name for name, *_ in self._fields if name not in sample]
        sizes = self._sizes.pack(*map(len, values))
        return [sizes, *values, json.dumps(missing).encode() if missing else b""]
