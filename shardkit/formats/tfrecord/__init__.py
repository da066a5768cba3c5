"""TFRecord files of tf.train.Example, compatible with TensorFlow and TFDS.

example.py   how fields become features, and the encoding of the messages
reader.py    reads messages, and guesses the fields of files of other programs
records.py   a file's records with their checksums: random access by an index, writing, joining
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import FormatError, rename_option
from shardkit.formats.base import Format
from shardkit.formats.tfrecord.example import (
    BYTES,
    EXACT,
    SHAPE,
    features_table,
    list_of,
    raw_table,
)
from shardkit.formats.tfrecord.records import TFRecordReader, TFRecordWriter, join
from shardkit.schema import Array, Schema


class Examples(Format):
    """Base class of formats whose records are Examples."""

    layout_types = MappingProxyType({"features": dict[str, dict[str, Any]], "raw": dict[str, str]})

    def layout(self, schema: Schema) -> dict[str, Any]:
        raw = raw_table(schema)
        named = [n + (SHAPE if n in raw else EXACT) for n in schema]
        if taken := schema.keys() & {*named}:
            raise FormatError(
                f"a feature that belongs to another field would have the name of {min(taken)!r}",
                fix=f"rename it: {rename_option(min(taken))}",
            )
        return {"schema": schema.to_json(), "features": features_table(schema), "raw": raw}

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        return payload + 96 * (fields + 1)

    def notes(self, schema: Schema) -> list[str]:
        raw = raw_table(schema)
        npy = [n for n, k in schema.items() if isinstance(k, Array) and list_of(k) == BYTES]
        npy = [name for name in npy if name not in raw]
        words = "arrays that TensorFlow cannot decode are stored as .npy: "
        return [words + ", ".join(npy)] if npy else []


class TFRecord(Examples):
    name = "tfrecord"
    abilities = (
        "write: tf.train.Example, all field types, CRC-32C, an index beside each shard",
        "read at random: its own by their index, others after one pass over their headers",
        "read third-party files: all types of lists, gzip after unpacking; no SequenceExample",
    )
    reader = TFRecordReader
    writer = TFRecordWriter
    join = staticmethod(join)

    def shard_stem(self, number: int, shards: int) -> str:
        return f"data-{number:05d}-of-{shards:05d}"


FORMAT = TFRecord()
