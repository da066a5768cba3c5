"""Random access to a TAR shard: one index record has the offsets of all values of a sample.

Our own shards have an index beside them. For others, it is built in memory from the headers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.array import load_table
from shardkit.formats.base import KEY, Columns, Ranges, ShardReader
from shardkit.formats.compressed import opened
from shardkit.formats.wds import values
from shardkit.formats.wds.layout import column, find_index, index_dtype, index_struct
from shardkit.formats.wds.remote_index_cache import scanned
from shardkit.formats.wds.values import column_of
from shardkit.sample import Sample
from shardkit.schema import FieldType, Image, Json, Schema
from shardkit.storage.blobs import ABSENT, Blobs
from shardkit.storage.byte_source import Memory, Table, open_source

_BETWEEN = 8192  # unneeded bytes that a single read for several values of a sample may include

# A field, the position of its offset in an unpacked record, and its decoder.
_Column = tuple[str, int, values.Decoder | None]
_Found = tuple[str, int, int, values.Decoder | None]  # a field, its offset, size and decoder


class WdsReader(ShardReader):
    """One TAR shard, plain or compressed."""

    def __init__(self, path: Path, layout: dict[str, Any] | None = None) -> None:
        index = None if layout is None or "index" in layout else find_index(path)
        # A shard with an index is never compressed, so its first bytes need not be checked.
        source, self.temporary_bytes = (
            (open_source(path), 0) if index else opened(path, "TAR", "wds")
        )
        if layout is None or ("index" not in layout and index is None):
            layout = scanned(source, layout)
            self.key_hashes = layout.pop("key_hashes")
        super().__init__(path, layout, source)
        dtype = index_dtype(self.schema)
        if index is None:
            records: bytes = layout["index"]
            self._index = Table(Memory(records, path), 0, len(records) // dtype.itemsize, dtype)
        else:
            self._index = load_table(index, dtype, "the index of a shard")
            self.in_memory = self._index.in_memory
        self._odd_keys: dict[int, str] = layout.get("odd_keys", {})
        self._unpack = index_struct(self.schema).unpack
        self._columns = _columns(self.schema, values.DECODERS)
        self._json_columns = _columns(self.schema, {**values.DECODERS, Json: values.json_text})

    def __len__(self) -> int:
        return len(self._index)

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        source, record = self.source, self._unpack(self._index.record(position))
        first, size = record[:2]
        stop, most = first + size, size + _BETWEEN
        found: list[_Found] = [(KEY, first, size, bytes.decode)]
        for name, at, decode in self._json_columns if json_text else self._columns:
            start = record[at]
            if start and (fields is None or name in fields):
                size = record[at + 1]
                found.append((name, start, size, decode))
                first = start if start < first else first  # faster than `min`
                stop = start + size if start + size > stop else stop
                most += size
        data = source.read(first, stop - first) if stop - first <= most else None
        sample: Sample = {}
        for name, start, size, decode in found:
            at = start - first
            value = source.read(start, size) if data is None else data[at : at + size]
            sample[name] = value if decode is None else decode(value)
        if not record[1]:
            sample[KEY] = self._odd_keys[position]
        return sample

    def plan(self, positions: npt.NDArray[np.int64], fields: Collection[str]) -> Ranges | None:
        records = self._index.take(positions)
        spans = [records[column(name)] for name in (KEY, *fields)]
        offsets = np.array([span["offset"] for span in spans], np.int64)
        sizes = np.array([span["size"] for span in spans], np.int64)
        sizes[1:][offsets[1:] == 0] = ABSENT  # not of the key, which may begin the file
        kinds = {name: self.schema[name] for name in fields}
        needed = [0] + [n for n, kind in enumerate(kinds.values(), 1) if not kind.optional]
        # The second finds a key that is not in the file. To count takes half of the time of `any`.
        if np.count_nonzero(sizes[needed] < 0) or np.count_nonzero(sizes[0]) < len(positions):
            return None
        return Ranges(self.source, offsets, sizes, _Decode(kinds))

    def offset(self, position: int, field: str) -> int | None:
        record = self._index.slice(position, position + 1)[column(field)][0]
        return int(record["offset"])

    def sizes(self, field: str) -> npt.NDArray[np.int64]:
        name = column(field)
        found = [s["size"][s["offset"] != 0] for s in (c[name] for c in self._index.chunks())]
        sizes = np.concatenate([np.zeros(0, np.int64), *found], dtype=np.int64, casting="unsafe")
        return self._inside(field, sizes)

    def spans(self) -> npt.NDArray[np.int64]:
        found = [np.zeros((0, 2), np.int64)]
        for records in self._index.chunks():
            columns = [records[column(field)] for field in (KEY, *self.schema)]
            starts = np.array([each["offset"] for each in columns], np.int64)
            stops = starts + np.array([each["size"] for each in columns], np.int64)
            first = np.where(starts > 0, starts, np.iinfo(np.int64).max).min(axis=0)
            found.append(np.stack([first, stops.max(axis=0)], axis=1))
        return np.concatenate(found)


@dataclass(frozen=True)
class _Decode:
    """Turns keys and payloads into columns."""

    kinds: dict[str, FieldType]

    def __call__(self, blobs: list[Blobs]) -> Columns:
        columns: Columns = {KEY: blobs[0].texts()}
        for (name, kind), payloads in zip(self.kinds.items(), blobs[1:], strict=True):
            columns[name] = column_of(kind, payloads)
        return columns


def _columns(schema: Schema, decoders: Mapping[type, Any]) -> list[_Column]:
    columns = []
    at = 2  # after the key's offset and size
    for name, kind in schema.items():
        columns.append((name, at, kind.entry(decoders)))
        at += 4 if isinstance(kind, Image) else 2
    return columns
