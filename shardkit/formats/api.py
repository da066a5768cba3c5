"""The interface for formats in other packages, described in docs/adding-a-format.md.

What is here keeps its names and meanings; other modules of shardkit may change at any time.

To add a format, write one module with a `ShardReader`, a `ShardWriter`, a `Format` and `FORMAT`,
declare it with an entry point, and run `shardkit.testing.FormatContract` on it.

Reader. Implement `__len__` and `read(position, fields, json_text)`, which returns a dict with
`__key__` and those of the requested fields of `reader.schema` that the sample has: a missing field
is absent from the dict, not None. The caller owns the values; their Python types are those defined
in `shardkit.schema`, the same in every format. Bytes are read through a `ByteSource`. Readers are
thread-safe and deterministic, and may be used after a fork. The base class does the rest:
`reader[i]` and `reader.sample(...)` check the position and convert any exception from `read` into a
shardkit error that names path, position, key and field; `close()` only drops references, because
another thread may still be reading; a pickle contains the path and the layout, never an open file.

Writer. Implement `write(sample)` and `finish()`. The writer gets a path that does not exist, in a
folder that does (a shard that is a folder creates its own). It creates that file and, optionally,
others whose names begin with the path's stem: beside it, or in the folder `api.FOLDER` beside it if
only shardkit reads them. `write` takes samples that have passed `Schema.check`. It raises
SampleError for a damaged image (`api.check`) or a key that it cannot store (`api.key_bytes`), and
leaves the shard unchanged. It returns False, without writing anything, if the sample would make
the shard too large (`spec.is_full`); an empty shard accepts any sample. `finish` completes the
files. Final names, syncing, retries, checksums and progress are not the writer's task: the engine
handles them, and removes the files of a failed writer. The same calls produce the same bytes.

A format with `join` can write a single file: parallel tasks write shards, which it joins.

Errors are those of `shardkit.errors` and name the key; the engine adds path and shard.
"""

from shardkit.codecs.array import dump_array, load_array
from shardkit.codecs.media import check
from shardkit.errors import DamagedError, FormatError, SampleError, UsageError
from shardkit.formats import Declaration
from shardkit.formats.base import (
    Columns,
    Format,
    Joins,
    Ranges,
    ShardReader,
    ShardSpec,
    ShardWriter,
    key_bytes,
)
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
from shardkit.storage.blobs import ABSENT, Blobs
from shardkit.storage.byte_source import ByteSource, Table, open_source

__all__ = [
    "ABSENT", "FOLDER", "Array", "Audio", "Blobs", "Bool", "ByteSource", "Bytes", "Columns",
    "DamagedError", "Declaration", "Float", "Format", "FormatError", "Image", "Images", "Int",
    "Joins", "Json", "JsonText", "Ranges", "Sample", "SampleError", "Schema", "ShardReader",
    "ShardSpec", "ShardWriter", "Table", "Text", "UsageError", "Video", "check", "dump_array",
    "fs", "key_bytes", "load_array", "open_source",
]  # fmt: skip
