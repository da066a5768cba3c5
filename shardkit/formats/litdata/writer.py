"""Writes a chunk: offsets, then for each sample the sizes of its values and the values."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from shardkit.formats.base import KEY, ShardSpec, encoded, key_bytes
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
        kinds = spec.schema.items()
        self._fields = [(name, kind, encoder(leaves[name], kind)) for name, kind in kinds]
        self._absent = {name: absent(leaves[name], kind) for name, kind in kinds}

    def stored(self, sample: Sample) -> list[bytes]:
        """The sizes of the values, the values, and the names of missing fields."""
        key = key_bytes(sample[KEY])
        values = [key, *{**self._absent, **dict(encoded(sample, self._fields))}.values()]
        # LitData ignores bytes after the last value.
        missing = [name for name in self._absent if name not in sample]
        sizes = self._sizes.pack(*map(len, values))
        return [sizes, *values, json.dumps(missing).encode() if missing else b""]
