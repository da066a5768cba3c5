"""The files of a dataset: there, as long as they were, and the same byte for byte.

`storage.checksum` may answer from memory for a file that this process has written. Here every byte
is read.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from shardkit import storage
from shardkit.errors import DamagedError, ShardkitError
from shardkit.formats import FORMATS
from shardkit.manifest import FOLDER, KEYS, NAME, File, manifest_path, single_manifest
from shardkit.verification.work import Meter

if TYPE_CHECKING:
    from shardkit.dataset import Dataset

_BLOCK = 1 << 20
AGAIN = "copy it again from where it is whole, or convert again"
# What Hugging Face's library keeps of its own beside the shards that it has loaded.
_CACHES = ("cache-", "tmp")
_OURS = (".index.npy", ".keys", KEYS)  # as earlier versions put them beside the shards


def check_file(folder: Path, file: File, meter: Meter, shard: str | None = None) -> None:
    """Raise DamagedError or StorageError unless the file is what the manifest says.

    `shard` is the shard that an index belongs to. The meter counts the bytes, read or not.
    """
    path = folder / file.name
    counted = 0
    try:
        _check_size(path, file, shard)
        digest = xxhash.xxh3_128()
        block = memoryview(bytearray(min(_BLOCK, file.bytes + 1)))
        with (
            storage.explained("read", path),
            open(path, "rb", buffering=0, opener=storage.regular) as opened,
        ):
            while count := opened.readinto(block):
                digest.update(block[:count])
                counted += count
                meter.add(count)
    finally:
        meter.skip(file.bytes - counted)
    if digest.hexdigest() != file.checksum:
        raise DamagedError(
            "a file is not as it was written",
            path=path,
            shard=shard,
            expected=f"checksum {file.checksum}",
            found=digest.hexdigest(),
            fix=AGAIN,
        )


def _check_size(path: Path, file: File, shard: str | None) -> None:
    try:
        about = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError(
            "a file of the dataset is missing",
            path=path,
            shard=shard,
            expected=f"{file.bytes:,} bytes",
            fix=AGAIN,
        ) from None
    except OSError as error:
        raise storage.explain(error, "look at", path) from error
    if not stat.S_ISREG(about.st_mode):  # a pipe would let us wait for ever
        raise DamagedError(
            "where a file of the dataset should be is something else",
            path=path,
            shard=shard,
            expected="a regular file",
            fix=AGAIN,
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
            fix=AGAIN,
        )


def without_manifest(path: Path, datasets: list[Dataset]) -> DamagedError | None:
    """The problem of shards that shardkit wrote, and whose manifest is not there.

    A copy that was interrupted looks so: nobody can say which shards are missing. A shard that is
    given by itself may have been copied so on purpose, unless something of ours lies beside it.
    """
    bare = {top: dataset for dataset in datasets for top in _without_manifest(dataset)}
    alone = path in bare or not path.is_dir()
    stems = tuple(top.name.partition(".")[0] + "." for top in bare)
    traces: list[str] = []
    for folder in sorted({*(top.parent for top in bare), *(() if alone else [path])}):
        own = folder / FOLDER
        with storage.explained("list", folder):
            inside = sorted(os.listdir(own)) if own.is_dir() else []
            beside = sorted(name for name in os.listdir(folder) if name.endswith(_OURS))
        if own.is_dir() and not alone and not any(name.endswith(NAME) for name in inside):
            traces.append(str(own))
        traces += [str(own / name) for name in inside if name.startswith(stems)]
        traces += [str(folder / name) for name in beside if name.startswith(stems)]
    if not alone:
        traces += [f"the metadata of {top}" for top, dataset in bare.items() if dataset.ours]
    if not traces:
        return None
    return DamagedError(
        "the dataset is incomplete: its manifest is missing",
        path=manifest_path(path),
        expected="a manifest beside what shardkit wrote",
        found=traces[0],
        fix=f"{AGAIN}; a shard is checked by itself, without checksums, if you give its path",
    )


def _without_manifest(dataset: Dataset) -> list[Path]:
    """The shards of a dataset for which there is no manifest: files, or folders such as of LMDB."""
    if dataset.manifest is not None:
        return []
    inside = FORMATS[dataset.format].inside[1:]
    shards = [dataset.shard_path(number) for number in range(dataset.shards)]
    tops = (shard.parent if shard.name == inside else shard for shard in shards)
    return [top for top in tops if not single_manifest(top)]


def strangers(folder: Path, format: str, known: set[str]) -> list[ShardkitError]:
    """Problems: what a reader that lists the folder would take for further shards."""
    suffixes = FORMATS[format].suffixes
    tops = {name.partition("/")[0] for name in known}
    with storage.explained("list", folder):
        names = sorted(set(os.listdir(folder)) - tops)
    return [
        DamagedError(
            "a shard lies in the folder that the manifest does not name",
            path=folder / name,
            fix="move it away: readers that list the folder would take it for part of the dataset",
        )
        for name in names
        if name.lower().endswith(suffixes) and not name.startswith((".", *_CACHES))
    ]
