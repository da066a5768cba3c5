"""Writes a chunk: the number of samples, the offset of each and of the end, the samples.

How many offsets there are is known at the end only. A small chunk is in memory until then. A larger
one has room for them, of which the rest stays empty; one with more samples is copied once.
"""

from __future__ import annotations

import json
import struct
from array import array
from pathlib import Path

import numpy as np

from shardkit import storage
from shardkit.codecs.media import check
from shardkit.errors import SampleError
from shardkit.formats.base import KEY, ShardSpec, ShardWriter, key_bytes, not_stored
from shardkit.formats.litdata.index import leaves_of
from shardkit.formats.litdata.values import absent, encoder
from shardkit.sample import Sample

LARGEST = 2**32 - 1  # bytes of a chunk: offsets in it are uint32
_IN_MEMORY = 4 << 20  # bytes of samples
_ROOM = 1 << 16  # bytes for the offsets of a larger chunk


class LitDataWriter(ShardWriter):
    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, spec)
        leaves = dict(leaves_of(spec.schema))
        self._sizes = struct.Struct(f"<{len(leaves)}I")
        self._fields = [
            (name, kind, encoder(leaves[name], kind), absent(leaves[name], kind))
            for name, kind in spec.schema.items()
        ]
        self._ends = array("Q", [0])  # of the samples
        self._chunks: list[bytes] = []  # while all are in memory
        self._file: storage.BufferedFile | None = None

    def write(self, sample: Sample) -> bool:
        chunks = self._stored(sample)
        end = self._ends[-1] + sum(map(len, chunks))
        size = end + self._front(len(self._ends))
        empty = len(self._ends) == 1
        if empty and size > LARGEST:
            raise SampleError(
                "the sample is too large for LitData, whose offsets have 32 bits",
                key=sample[KEY],
                expected="less than 4 GiB",
                found=f"{end:,} bytes",
            )
        if not empty and size > min(self.spec.max_bytes or LARGEST, LARGEST):
            return False
        self._ends.append(end)
        if self._file is None and end > _IN_MEMORY:
            self._file = storage.BufferedFile(self.path)
            self._file.write(bytes(_ROOM), *self._chunks)
        if self._file is None:
            self._chunks += chunks
        else:
            self._file.write(*chunks)
        return True

    def _stored(self, sample: Sample) -> list[bytes]:
        """The sizes of the values, the values, and the names of absent fields."""
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
        # LitData does not look behind the last value.
        missing = [name for name, *_ in self._fields if name not in sample]
        sizes = self._sizes.pack(*map(len, values))
        return [sizes, *values, json.dumps(missing).encode() if missing else b""]

    def _front(self, samples: int) -> int:
        """Bytes before so many samples."""
        return max(4 * (samples + 2), 0 if self._file is None else _ROOM)

    def _table(self, start: int) -> bytes:
        ends = np.array(self._ends, np.uint64) + start
        return np.array([len(ends) - 1, *ends], "<u4").tobytes()

    def finish(self) -> None:
        if self._file is None:
            with storage.create(self.path) as file:
                storage.write(file, [self._table(self._front(len(self._ends) - 1)), *self._chunks])
            return
        start = self._front(len(self._ends) - 1)
        with self._file:
            self._file.flush()
            if start == _ROOM:
                storage.rewrite(self._file.file, 0, self._table(_ROOM))
                return
        samples = self.path.with_suffix(".samples")
        storage.rename(self.path, samples)
        with storage.create(self.path) as file:
            storage.write(file, [self._table(start)])
            storage.append(file, samples, self._ends[-1], _ROOM)
        storage.remove(samples)
