"""The interface for formats in other packages, described in docs/adding-a-format.md.

What is here keeps its names and meanings; other modules of shardkit may change at any time.
"""

from shardkit.codecs.array import dump_array, load_array
from shardkit.codecs.media import check
from shardkit.errors import DamagedError, FormatError, SampleError, UsageError
from shardkit.formats import Declaration
from shardkit.formats.base import Format, ShardReader, ShardSpec, ShardWriter, key_bytes
from shardkit.metadata.manifest import FOLDER
from shardkit.sample import JsonText, Sample
from shardkit.schema import (
    Array,
    Audio,
    Bool,
    Bytes,
    Float,
    Image,
    Images,
    Int,
    Json,
    Schema,
    Text,
    Video,
)
from shardkit.storage import fs
from shardkit.storage.byte_source import ByteSource, Table, open_source

__all__ = [
    "FOLDER", "Array", "Audio", "Bool", "ByteSource", "Bytes", "DamagedError", "Declaration",
    "Float", "Format", "FormatError", "Image", "Images", "Int", "Json", "JsonText", "Sample",
    "SampleError", "Schema", "ShardReader", "ShardSpec", "ShardWriter", "Table", "Text",
    "UsageError", "Video", "check", "dump_array", "fs", "key_bytes", "load_array", "open_source",
]  # fmt: skip
