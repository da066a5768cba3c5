"""ArrayRecord files of tf.train.Example, as TFDS and Grain write and read them.

records.py   records by their positions, without the library
reader.py    Examples at random, or records that are none as bytes
writer.py    Examples by the library
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardkit.formats.array_record.reader import ArrayRecordReader
from shardkit.formats.array_record.writer import CHUNK_BYTES, ArrayRecordWriter
from shardkit.formats.base import Format
from shardkit.formats.tfrecord import FORMAT as EXAMPLES
from shardkit.schema import Schema

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class ArrayRecord(Format):
    name = "array_record"
    abilities = (
        "write: tf.train.Example, all field types, one to a chunk, not compressed",
        "read at random, from URLs too: uncompressed, Zstandard, Brotli and Snappy",
        "read foreign files: features of all lists; records that are no Example as Bytes",
    )
    reader = ArrayRecordReader
    writer = ArrayRecordWriter
    layout_types = EXAMPLES.layout_types

    def layout(self, schema: Schema) -> dict[str, Any]:
        return EXAMPLES.layout(schema)

    def notes(self, schema: Schema) -> list[str]:
        return EXAMPLES.notes(schema)

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        bound = EXAMPLES.bound(payload, fields) + CHUNK_BYTES
        return bound + bound // 1000  # headers of blocks


FORMAT = ArrayRecord()
