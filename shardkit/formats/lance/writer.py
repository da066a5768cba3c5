"""Writes Lance data files batch by batch, and the manifest that makes them a dataset.

Images and other bytes become plain binary columns. pylance writes the files and the manifest, from
which times and UUIDs are removed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from shardkit.codecs.protobuf import fields
from shardkit.errors import StorageError
from shardkit.formats.arrow.columns import IMAGE, arrow_schema
from shardkit.formats.arrow.writer import BatchFile, BatchWriter, MakeOutput, ipc_file
from shardkit.formats.base import ShardSpec
from shardkit.formats.lance.process import ask, call
from shardkit.helpers import os_errors
from shardkit.metadata.manifest import Manifest
from shardkit.storage import fs

# Overhead in bytes of a value, of a column in a batch, and of a file.
_VALUE, _COLUMN, _FILE = 20, 1024, 2048
# Values are stored uncompressed. Only one entry: the order of two would differ from run to run.
_PLAIN = {"lance-encoding:compression": "none"}
# Fields of a manifest that differ from run to run: the time, and the transaction that wrote it.
_CHANGING = {7, 12, 23}
# For text Lance would choose FSST, whose symbols come from random samples: not reproducible.
_TEXT = {"lance-encoding:compression": "zstd"}


def _lance_schema(schema: pa.Schema) -> pa.Schema:
    """Return the Lance columns for the columns of `arrow_schema`."""
    columns = []
    for field in schema:
        stored = _stored(field.type)
        plain = pa.types.is_large_binary(stored) or pa.types.is_fixed_size_list(stored)
        how = _PLAIN if plain else _TEXT if pa.types.is_string(stored) else None
        columns.append(pa.field(field.name, stored, metadata=how))
    return pa.schema(columns, {b"shardkit": schema.metadata[b"shardkit"]})


def _stored(type: pa.DataType) -> pa.DataType:
    if type in (IMAGE, pa.binary()):
        return pa.large_binary()
    return pa.list_(pa.large_binary()) if type == pa.list_(IMAGE) else type


def _plain(array: pa.Array) -> pa.Array:
    """Return the array, with structs of bytes and path replaced by the bytes."""
    if array.type == IMAGE:
        array = array.field("bytes")
    elif array.type == pa.list_(IMAGE):
        inner, stored = array.values.field("bytes"), pa.list_(pa.binary())
        array = pa.Array.from_buffers(stored, len(array), array.buffers()[:2], children=[inner])
    return array


class _File(BatchFile):
    """A data file, which pylance writes in its own process."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        fs.make_folder(path.parent)
        fs.remove(path)  # from an earlier run; or a symbolic link, which must not be followed
        self._path, self._schema = path.absolute(), _lance_schema(schema)
        self._answer: Callable[[], object] | None = None  # waits for the latest call
        self._call("create", self._schema)

    def _call(self, method: str, *arguments: object) -> None:
        """Start a call once the previous one is done: pylance works while samples are read."""
        self._wait()
        with os_errors.explained("write", self._path):
            self._answer = call(self._path, method, str(self._path), *arguments)

    def _wait(self) -> None:
        answer, self._answer = self._answer, None
        with os_errors.explained("write", self._path):
            try:
                if answer is not None:
                    answer()
            except ValueError as error:  # for example, control characters in the path
                raise StorageError(f"pylance cannot write: {error}", path=self._path) from error

    def write(self, batch: pa.RecordBatch) -> int:
        columns = zip(batch.columns, self._schema.types, strict=True)
        arrays = [_plain(array).cast(stored) for array, stored in columns]
        self._call("write", pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        return int(batch.nbytes + _VALUE * batch.num_rows * len(arrays))

    def __exit__(self, kind: object, *_: object) -> None:
        self._call("finish" if kind is None else "abandon")
        self._wait()


class LanceWriter(BatchWriter):
    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, spec, ipc_file)
        self._fixed += _VALUE * len(self._columns)

    def _begin(self, make: MakeOutput) -> BatchFile:
        return _File(self.path, self._arrow_schema)

    def _overheads(self, make: MakeOutput) -> tuple[int, int]:
        about = len(json.dumps(self.spec.schema.to_json())) + len(str(self.spec.classes))
        return _FILE + 2 * about + _COLUMN * len(self._columns), _COLUMN * len(self._columns)


def commit(folder: Path, manifest: Manifest) -> list[Path]:
    """Write the Lance manifest of version 1, with the data files listed in our manifest."""
    schema = _lance_schema(arrow_schema(manifest.schema, manifest.class_names))
    every = [(Path(s.file.name).name, s.samples, s.file.bytes) for s in manifest.shards]
    shards = [shard for shard in every if shard[1]]
    temporary = os_errors.temporary_folder()
    try:
        name, data = ask(folder, "commit", str(temporary), schema, shards)
    except OSError as error:  # a full disk, or a file system without hard links
        raise StorageError(
            "pylance cannot write its temporary files",
            path=temporary,
            found=os_errors.reason(error),
            fix="free some space there, or set TMPDIR to a folder on another file system",
        ) from error
    path = folder / "_versions" / name
    fs.make_folder(path.parent)
    fs.write_file(path, _repeatable(data))
    fs.sync(path.parent)
    return [path]


def _repeatable(data: bytes) -> bytes:
    """A Lance manifest without the fields that change, and without a copy of its transaction."""
    start = int.from_bytes(data[-16:-8], "little")
    length = int.from_bytes(data[start : start + 4], "little")
    at, kept = start + 4, b""
    for tag, _, end in fields(data, at, at + length):
        kept += data[at:end] if tag >> 3 not in _CHANGING else b""
        at = end
    return len(kept).to_bytes(4, "little") + kept + bytes(8) + data[-8:]
