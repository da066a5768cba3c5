"""Turns data files into a dataset: pylance writes its manifest; times and UUIDs are removed."""

from __future__ import annotations

from pathlib import Path

from shardkit.codecs.protobuf import fields
from shardkit.errors import StorageError
from shardkit.formats.arrow.columns import arrow_schema
from shardkit.formats.lance.process import ask
from shardkit.formats.lance.writer import lance_schema
from shardkit.helpers import os_errors
from shardkit.metadata.manifest import Manifest
from shardkit.storage import fs

# Fields of a manifest that differ from run to run: the time, and the transaction that wrote it.
_CHANGING = {7, 12, 23}


def commit(folder: Path, manifest: Manifest) -> list[Path]:
    """Write the Lance manifest of version 1, with the data files listed in our manifest."""
    schema = lance_schema(arrow_schema(manifest.schema, manifest.class_names))
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
