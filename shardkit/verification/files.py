"""Checks the files of a dataset: their existence, sizes and checksums.

`storage.checksum` may answer from memory for a file that this process has written. Here every byte
is read.
"""

from __future__ import annotations

import stat
from pathlib import Path

import xxhash

from shardkit import storage
from shardkit.byte_source import open_source
from shardkit.errors import DamagedError, ShardkitError
from shardkit.formats import FORMATS
from shardkit.manifest import File
from shardkit.remote.path import RemotePath
from shardkit.verification.work import LAST, Findings, Meter

_BLOCK = 1 << 20
# Caches that Hugging Face's library writes beside the shards that it has loaded.
_CACHES = ("cache-", "tmp")


def is_whole(
    folder: Path,
    file: File,
    meter: Meter,
    findings: Findings,
    number: int = LAST,
    shard: str | None = None,
) -> bool:
    """Whether a file is what the manifest says; if not, adds the problem to the findings.

    `number` is the shard's number, `shard` the name of the shard that an index belongs to.
    """
    try:
        check_file(folder, file, meter, shard)
    except ShardkitError as problem:
        findings.add(problem, number)
        return False
    return True


def check_file(folder: Path, file: File, meter: Meter, shard: str | None = None) -> None:
    """Raise DamagedError or StorageError unless the file is what the manifest says.

    `shard` is the shard that an index belongs to. The meter counts the bytes, read or not.
    """
    path = folder / file.name
    counted = 0
    try:
        _check_size(path, file, shard)
        digest = xxhash.xxh3_128()
        for block in open_source(path).blocks(_BLOCK):
            digest.update(block)
            counted += len(block)
            meter.add(len(block))
    finally:
        meter.skip(file.bytes - counted)
    if digest.hexdigest() != file.checksum:
        raise DamagedError(
            "a file is not as it was written",
            path=path,
            shard=shard,
            expected=f"checksum {file.checksum}",
            found=digest.hexdigest(),
        )


def _check_size(path: Path, file: File, shard: str | None) -> None:
    try:
        about = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError(
            "a file of the dataset is missing",
            path=path,
            shard=shard,
            expected=f"{file.bytes:,} bytes",
        ) from None
    except OSError as error:
        raise storage.explain(error, "look at", path) from error
    if not stat.S_ISREG(about.st_mode):  # a pipe would block for ever
        raise DamagedError(
            "where a file of the dataset should be is something else",
            path=path,
            shard=shard,
            expected="a regular file",
        )
    if about.st_size != file.bytes:
        short = about.st_size < file.bytes
        raise DamagedError(
            "a file is cut short" if short else "a file is longer than it was",
            path=path,
            shard=shard,
            offset=min(about.st_size, file.bytes),
            expected=f"{file.bytes:,} bytes",
            found=f"{about.st_size:,} bytes",
        )


def strangers(folder: Path, format: str, known: set[str]) -> list[ShardkitError]:
    """Problems: files that a reader that lists the folder would take for further shards."""
    suffixes = FORMATS[format].suffixes
    if isinstance(folder, RemotePath) and not folder.store.lists:
        return []
    tops = {name.partition("/")[0] for name in known}
    with storage.explained("list", folder):
        names = sorted({path.name for path in folder.iterdir()} - tops)
    return [
        DamagedError(
            "a shard lies in the folder that the manifest does not name",
            path=folder / name,
            fix="move it away: readers that list the folder would take it for part of the dataset",
        )
        for name in names
        if name.lower().endswith(suffixes) and not name.startswith((".", *_CACHES))
    ]
