"""The table of formats. A format is imported on first use; a new one is a module and a row here."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.errors import FormatError, UsageError
from shardkit.extras import extra
from shardkit.formats.foreign import kind_of_file, not_read
from shardkit.manifest import FOLDER, NAME

if TYPE_CHECKING:
    from shardkit.formats.base import Format


@dataclass(frozen=True)
class Row:
    """Where a format lives, and what its shards are called."""

    module: str
    suffixes: tuple[str, ...]  # the first is the one we write
    summary: str
    inside: str = ""  # where the file is in a shard that is a folder
    one_shard: bool = False  # people expect a dataset to be one shard, unless they ask for more
    single: bool = True  # a shard by itself, with its manifest, can be a dataset
    extra: str = ""  # of shardkit, that brings the library it needs


FORMATS: dict[str, Row] = {
    "wds": Row(
        "shardkit.formats.wds",
        (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz"),
        "TAR shards as WebDataset reads them, with an index for random access",
    ),
    "lmdb": Row(
        "shardkit.formats.lmdb",
        (".lmdb", "data.mdb"),
        "LMDB environments: a folder with data.mdb, values in msgpack",
        inside="/data.mdb",
        one_shard=True,
    ),
    "arrow": Row(
        "shardkit.formats.arrow",
        (".arrow", ".feather"),
        "Arrow IPC files, for pyarrow, pandas and Hugging Face datasets",
        extra="arrow",
    ),
    "parquet": Row(
        "shardkit.formats.arrow.parquet",
        (".parquet",),
        "Parquet files of the same columns, read by row groups",
        extra="arrow",
    ),
    "hf": Row(
        "shardkit.formats.arrow.hf",
        (".arrow",),
        "a folder as Hugging Face datasets saves it, for load_from_disk",
        single=False,
        extra="arrow",
    ),
    "beton": Row(
        "shardkit.formats.beton",
        (".beton",),
        "FFCV's files, one by default",
        one_shard=True,
    ),
    "megatron": Row(
        "shardkit.formats.megatron",
        (".bin",),
        "Megatron-LM's tokens: a .bin with its .idx, one pair by default",
        one_shard=True,
    ),
}


def file_name(stem: str, format: str) -> str:
    """The name of a shard's file: `shard-000000.tar`, or `shard-000000.lmdb/data.mdb`."""
    row = FORMATS[format]
    return stem + row.suffixes[0] + row.inside


def get_format(name: str) -> Format:
    """The format called `name`; raises UsageError for an unknown one, and without its library."""
    row = FORMATS.get(name)
    if row is None:
        raise UsageError(
            f"there is no format {name!r}",
            expected="one of " + ", ".join(sorted(FORMATS)),
        )
    with extra(row.extra, f"the format {name!r}"):
        format: Format = importlib.import_module(row.module).FORMAT
    return format


def format_of(path: Path) -> str | None:
    """The name of the format that a file's name says it is of; None for a name of no format."""
    name = path.name.lower()
    for format, row in FORMATS.items():
        if name.endswith(row.suffixes):
            return format
    return None


def unknown_format(path: Path) -> FormatError:
    """The error for a path that none of the formats claims."""
    kind = kind_of_file(path)
    if kind is not None:
        return not_read(kind, path)
    suffixes = sorted({suffix for row in FORMATS.values() for suffix in row.suffixes})
    pair = path.with_suffix(".bin")
    if path.suffix == ".idx" and pair.is_file():
        return FormatError("this is the index of a Megatron file", path=path, fix=f"give {pair}")
    if FOLDER in (path.name, path.parent.name):
        folder = path if path.name == FOLDER else path.parent
        return FormatError(
            "this holds what shardkit knows of a dataset, and no samples",
            path=path,
            fix=f"give the dataset: {folder.parent}, or the file beside {FOLDER}",
        )
    return FormatError(
        "this is no dataset or shard that shardkit knows",
        path=path,
        expected=f"a folder with {FOLDER}/{NAME}, a file or folder of {', '.join(suffixes)}",
        fix="`shardkit formats` lists what can be read"
        + (f"; images and text: shardkit convert {path} --to wds" if path.is_dir() else ""),
    )
