"""Writes tf.train.Example records, and their index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardkit.codecs.array import dump_array
from shardkit.codecs.media import check
from shardkit.codecs.protobuf import dump_varint
from shardkit.formats.base import KEY, ShardSpec, ShardWriter, key_bytes, not_stored
from shardkit.formats.tfrecord.example import BYTES, Feature, entry
from shardkit.formats.tfrecord.records import HEAD, INDEX, ROW, TAIL, checksum, header, index_path
from shardkit.formats.tfrecord.values import encoded
from shardkit.sample import Sample
from shardkit.schema import Scalar, Schema
from shardkit.storage import fs


class TFRecordWriter(ShardWriter):
    """Stores key and numbers first in a record, so that they can be read without the rest."""

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, spec)
        self._rows = bytearray()
        self._file = fs.BufferedFile(path)

    def write(self, sample: Sample) -> bool:
        first, *others = chunks = example(sample, self.spec.schema)
        length = sum(map(len, chunks))
        size = HEAD + length + TAIL
        if self.spec.is_full(len(self._rows), self._file.size + size):
            return False
        self._rows += ROW.pack(self._file.size, size, HEAD + len(first) if others else size)
        self._file.write(header(length), *chunks, checksum(*chunks))
        return True

    def finish(self) -> None:
        with self._file:
            pass
        _write_index(self.path, bytes(self._rows))


def example(sample: Sample, schema: Schema) -> list[bytes]:
    """The Example of a sample, in chunks; the first one has the key and the numbers."""
    key = sample[KEY]
    first = entry(KEY, Feature(BYTES, [key_bytes(key)]))
    others: list[bytes] = []
    for name, kind in schema.items():
        if name not in sample:
            continue
        value = sample[name]
        check(kind, value, key, name)
        chunks = first if isinstance(kind, Scalar) else others
        try:
            for each in encoded(name, kind, value):
                chunks += entry(*each)
        except (TypeError, ValueError, RecursionError) as error:
            raise not_stored(error, value, key, name) from error
    size = sum(map(len, first)) + sum(map(len, others))
    return [b"".join((b"\x0a", dump_varint(size), *first)), *others]


def join(path: Path, parts: Sequence[Path], spec: ShardSpec) -> None:
    """Join several files into one, by concatenating their records and indexes."""
    rows, start = bytearray(), 0
    with fs.create(path) as file:
        for part in parts:
            index = np.load(index_path(part))
            index["offset"] += start
            rows += index.tobytes()
            start += fs.append(file, part, part.stat().st_size)
    _write_index(path, bytes(rows))


def _write_index(path: Path, rows: bytes) -> None:
    fs.make_folder(index_path(path).parent)
    with fs.create(index_path(path)) as file:
        fs.write(file, [dump_array(np.frombuffer(rows, INDEX))])
