"""Writes MDS shards: offsets, a JSON header padded with spaces, and the samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.formats.base import KEY, ShardSpec, encoded, key_bytes
from shardkit.formats.mds.layout import ABSENT, encoding_of, own_codec
from shardkit.formats.offsets import OffsetsWriter
from shardkit.sample import Sample
from shardkit.schema import Schema


def columns_of(schema: Schema) -> dict[str, Any]:
    """The description of a shard in its header and in index.json, with columns sorted by name."""
    encodings = {KEY: "str", **{name: encoding_of(kind) for name, kind in schema.items()}}
    sizes = {name: own_codec(kind).size for name, kind in schema.items()}
    if any(kind.optional for kind in schema.values()):
        encodings[ABSENT] = "json"
    return {
        "column_encodings": [encodings[name] for name in sorted(encodings)],
        "column_names": sorted(encodings),
        "column_sizes": [sizes.get(name) for name in sorted(encodings)],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": None,
        "version": 2,
    }


class MdsWriter(OffsetsWriter):
    called, room, fill = "MDS", 1 << 17, b" "

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, spec)
        columns, fields = columns_of(spec.schema), spec.schema.items()
        self._sizes = dict(zip(columns["column_names"], columns["column_sizes"], strict=True))
        codecs = {name: own_codec(kind) for name, kind in fields}
        self._fields = [(name, kind, codecs[name].encode) for name, kind in fields]
        self._absent = {name: codecs[name].absent for name, kind in fields if kind.optional}
        classes = {name: list(names) for name, names in spec.classes.items()}
        about = {"schema": spec.schema.to_json(), "classes": classes}
        self.header = json.dumps({**columns, "shardkit": about}).encode()

    def stored(self, sample: Sample) -> list[bytes]:
        """The sizes of a sample's values, and the values."""
        values = {KEY: key_bytes(sample[KEY]), **self._absent}
        values[ABSENT] = json.dumps([name for name in self._absent if name not in sample]).encode()
        values.update(encoded(sample, self._fields))
        stored = [values[name] for name in self._sizes]
        lengths = [len(values[name]) for name, size in self._sizes.items() if size is None]
        return [np.array(lengths, np.int64).astype("<u4").tobytes(), *stored]
