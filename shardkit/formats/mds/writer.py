"""Writes MDS shards: samples as they come, and at the end the offsets before them.

How many offsets there are is known at the end only. A small shard is in memory until then. A larger
one has room for them, which is filled up with blanks behind the JSON of the header; one with more
samples is copied once.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit import storage
from shardkit.codecs.media import check
from shardkit.errors import SampleError
from shardkit.formats.base import KEY, ShardSpec, ShardWriter, key_bytes, not_stored
from shardkit.formats.mds.layout import ABSENT, LARGEST, encoding_of, own_codec
from shardkit.sample import Sample

if TYPE_CHECKING:
    from shardkit.schema import Schema

_IN_MEMORY = 4 << 20  # bytes of samples
_ROOM = 1 << 17  # bytes for the offsets and the header of a larger shard


def columns_of(schema: Schema) -> dict[str, Any]:
    """What headers and index.json say of a shard; columns are in the order of their names."""
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


class MdsWriter(ShardWriter):
    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, spec)
        columns, fields = columns_of(spec.schema), spec.schema.items()
        self._sizes = dict(zip(columns["column_names"], columns["column_sizes"], strict=True))
        codecs = {name: own_codec(kind) for name, kind in fields}
        self._encoders = {name: each.encode for name, each in codecs.items()}
        self._absent = {name: codecs[name].absent for name, kind in fields if kind.optional}
        classes = {name: list(names) for name, names in spec.classes.items()}
        about = {"schema": spec.schema.to_json(), "classes": classes}
        self._header = json.dumps({**columns, "shardkit": about}).encode()
        self._lengths = array("I")  # bytes of each sample
        self._size = 0  # bytes of all samples
        self._chunks: list[bytes] = []  # of the samples, while they are in memory
        self._file: storage.BufferedFile | None = None

    def write(self, sample: Sample) -> bool:
        chunks = self._stored(sample)
        size = sum(map(len, chunks))
        if self._front(1) + size > LARGEST:
            raise SampleError(
                "the sample is too large for MDS, whose offsets have 32 bits",
                key=sample[KEY],
                expected="less than 4 GiB",
                found=f"{size:,} bytes",
            )
        most = min(self.spec.max_bytes or LARGEST, LARGEST)
        if self._lengths and self._front(len(self._lengths) + 1) + self._size + size > most:
            return False
        self._lengths.append(size)
        self._size += size
        if self._file is not None:
            self._file.write(*chunks)
            return True
        self._chunks += chunks
        if self._size > _IN_MEMORY:
            self._file = storage.BufferedFile(self.path)
            self._file.write(bytes(_ROOM), *self._chunks)
            self._chunks = []
        return True

    def finish(self) -> None:
        if self._file is None:
            with storage.create(self.path) as file:
                storage.write(file, [self._before(0), *self._chunks])
            return
        with self._file:
            self._file.flush()
            if self._front(len(self._lengths)) == _ROOM:
                storage.rewrite(self._file.file, 0, self._before(_ROOM))
                return
        samples = self.path.with_suffix(".samples")
        storage.rename(self.path, samples)
        with storage.create(self.path) as file:
            storage.write(file, [self._before(0)])
            storage.append(file, samples, self._size, _ROOM)
        storage.remove(samples)

    def _stored(self, sample: Sample) -> list[bytes]:
        """The sizes of a sample's values, and the values."""
        key, name, value = sample[KEY], KEY, None
        values = {KEY: key_bytes(key), **self._absent}
        values[ABSENT] = json.dumps([name for name in self._absent if name not in sample]).encode()
        try:
            for name, encode in self._encoders.items():
                if name in sample:
                    value = sample[name]
                    check(self.spec.schema[name], value, key, name)
                    values[name] = encode(value)
        except (ValueError, OverflowError, RecursionError) as error:
            raise not_stored(error, value, key, name) from error
        stored = [values[name] for name in self._sizes]
        lengths = [len(values[name]) for name, size in self._sizes.items() if size is None]
        return [np.array(lengths, np.int64).astype("<u4").tobytes(), *stored]

    def _front(self, samples: int) -> int:
        """Bytes before so many samples."""
        exact = 4 * (samples + 2) + len(self._header)
        return exact if self._file is None else max(exact, _ROOM)

    def _before(self, room: int) -> bytes:
        """What stands before the samples, in so many bytes or, if it needs them, more."""
        count = len(self._lengths)
        header = self._header.ljust(room - 4 * (count + 2))
        sizes = np.asarray([4 * (count + 2) + len(header), *self._lengths], np.int64)
        return np.array([count, *np.cumsum(sizes)], "<u4").tobytes() + header
