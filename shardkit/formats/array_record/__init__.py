"""ArrayRecord files of tf.train.Example records, compatible with TFDS and Grain.

`records.py` reads raw records, without the array_record library. Written chunks have one record, as
Grain expects, and are not compressed: images are compressed already, and so the bytes do not depend
on the version of Zstandard.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import FormatError
from shardkit.formats.array_record.records import BLOCK, BLOCK_HEADER, Records, TransposedError
from shardkit.formats.base import KEY, Columns, ShardSpec, ShardWriter
from shardkit.formats.tfrecord import Examples
from shardkit.formats.tfrecord.example import example
from shardkit.formats.tfrecord.reader import ExampleReader, scan
from shardkit.helpers import os_errors
from shardkit.helpers.extras import extra
from shardkit.sample import Sample
from shardkit.schema import Bytes, Schema
from shardkit.storage.blobs import Blobs, Numbers
from shardkit.storage.byte_source import open_source

RECORD = "record"  # the field of a third-party file whose records are not Examples


class ArrayRecordReader(ExampleReader):
    """One file."""

    def __init__(self, path: Path, layout: dict[str, Any] | None = None) -> None:
        source = open_source(path)
        self._records = Records(source)
        self.in_memory = self._records.in_memory
        if layout is None:
            try:
                read = partial(self._records.read, source)
                layout = scan(path, len(self._records), read)
            except TransposedError:
                raise
            except FormatError:
                layout = {"schema": Schema({RECORD: Bytes()}).to_json(), RECORD: True}
        super().__init__(path, layout, source)

    def __len__(self) -> int:
        return len(self._records)

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        if RECORD not in self.layout:
            return super().read(position, fields, json_text)
        sample: Sample = {KEY: self.key(position)}
        if fields is None or RECORD in fields:
            sample[RECORD] = self._records.read(self.source, position)
        return sample

    def record(self, position: int, numbers: bool) -> tuple[bytes, bool]:
        return self._records.read(self.source, position), True

    def ranges(
        self, positions: npt.NDArray[np.int64], numbers: bool
    ) -> tuple[Numbers, Numbers, bool] | None:
        found = self._records.ranges(positions)
        return None if found is None else (*found, True)

    def examples(self, positions: Sequence[int], records: Blobs, whole: bool) -> Blobs:
        every = zip(records.values(), positions, strict=True)
        found = [self._records.parsed(data, self.path, position) for data, position in every]
        sizes = np.array([*map(len, found)], np.int64)
        return Blobs(np.frombuffer(b"".join(found), np.uint8), sizes.cumsum() - sizes, sizes)

    def _columns(
        self, positions: list[int], fields: Collection[str], whole: bool, blobs: list[Blobs]
    ) -> Columns:
        if RECORD not in self.layout:
            return super()._columns(positions, fields, whole, blobs)
        records = self.examples(positions, blobs[0], whole)
        keys = [self.key(position) for position in positions]
        return {KEY: keys, **dict.fromkeys(fields, records)}

    def offset(self, position: int, field: str) -> int:
        return self._records.offset(position)

    def spans(self) -> npt.NDArray[np.int64]:
        return self._records.spans()


CHUNK_BYTES = 72  # overhead of a chunk with its footer entry, at most
_OPTIONS = "uncompressed,group_size:1"
_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.ENOENT)


class ArrayRecordWriter(ShardWriter):
    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, spec)
        with extra("array-record", "writing ArrayRecord files"):
            from array_record.python.array_record_module import ArrayRecordWriter as Writer
        self._size = 0  # of chunks and footer entries, at most
        with self._explained():
            self._writer = Writer(str(path), _OPTIONS)
            if not self._writer.ok():
                self._writer.close()  # raises the error from opening

    def write(self, sample: Sample) -> bool:
        data = b"".join(example(sample, self.spec.schema))
        size, most = self._size + len(data) + CHUNK_BYTES, self.spec.max_bytes
        if most and self._size and (size > most or _file_size(size) > max(most, 2 * BLOCK)):
            return False
        self._size = size
        with self._explained():
            self._writer.write(data)
        return True

    def finish(self) -> None:
        with self._explained():
            self._writer.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert the library's errors, which carry only text, to those of the system."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            number = next((n for n in _ERRORS if os.strerror(n) in text), errno.EIO)
            raise os_errors.explain(OSError(number, text), "write", self.path) from error


def _file_size(size: int) -> int:
    """File size for `size` bytes of chunks: whole blocks, and one for the postscript."""
    return (-(-(size + 256) // (BLOCK - 2 * BLOCK_HEADER)) + 1) * BLOCK


class ArrayRecord(Examples):
    name = "array_record"
    abilities = (
        "write: tf.train.Example, all field types, one per chunk, not compressed",
        "read at random, from URLs too: uncompressed, Zstandard, Brotli and Snappy",
        "read third-party files: features of all list types; records other than Examples as Bytes",
    )
    reader = ArrayRecordReader
    writer = ArrayRecordWriter

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        bound = super().bound(payload, fields) + CHUNK_BYTES
        return bound + bound // 1000  # block headers


FORMAT = ArrayRecord()
