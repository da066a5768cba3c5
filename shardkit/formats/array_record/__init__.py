"""ArrayRecord files of tf.train.Example, as TFDS and Grain write and read them.

records.py   records by their positions, without the library
reader.py    Examples at random, or records that are none as bytes
writer.py    Examples by the library
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
        "write: tf.train.Example, all field types, one to a chunk, not compressed",
        "read at random, from URLs too: uncompressed, Zstandard, Brotli and Snappy",
        "read foreign files: features of all lists; records that are no Example as Bytes",
    )
    reader = ArrayRecordReader
    writer = ArrayRecordWriter

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        bound = super().bound(payload, fields) + CHUNK_BYTES
        return bound + bound // 1000  # headers of blocks


FORMAT = ArrayRecord()
