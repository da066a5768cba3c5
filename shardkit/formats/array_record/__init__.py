"""ArrayRecord files of tf.train.Example records, compatible with TFDS and Grain.

records.py   random access to raw records, without the array_record library
reader.py    random access to Examples; other records are returned as bytes
writer.py    writes Examples with the array_record library
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkit.formats.array_record.reader import ArrayRecordReader
from shardkit.formats.array_record.writer import CHUNK_BYTES, ArrayRecordWriter
from shardkit.formats.tfrecord import Examples


class ArrayRecord(Examples):
    name = "array_record"
    abilities = (
        "write: tf.train.Example, all field types, one per chunk, not compressed",
        "read at random, from URLs too: uncompressed, Zstandard, Brotli and Snappy",
        "read foreign files: features of all list types; records other than Examples as Bytes",
    )
    reader = ArrayRecordReader
    writer = ArrayRecordWriter

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        bound = super().bound(payload, fields) + CHUNK_BYTES
        return bound + bound // 1000  # block headers


FORMAT = ArrayRecord()
