"""The table of formats: those of shardkit, and those that other packages add.

A format is imported when it is first used. Another package adds one by an entry point of the group
`shardkit.formats`, which is named like the format and leads to its `Declaration`.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.codecs.image import SUFFIXES
from shardkit.errors import FormatError, UsageError, near, warn
from shardkit.extras import extra
from shardkit.formats.foreign import TFRECORD_NAMES, TFRECORD_SUFFIXES, kind_of_file, not_read
from shardkit.manifest import FOLDER, NAME

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from shardkit.formats.base import Format

ENTRY_POINTS = "shardkit.formats"


@dataclass(frozen=True)
class Declaration:
    """Where a format lives, and what its shards are called: what is known before it is imported.

    module: has the format as `FORMAT`.
    suffixes: of a shard's file; the first is the one that we write.
    inside: where that file is in a shard that is a folder, such as "/data.mdb".
    one_shard: a dataset is one shard, as people expect, unless they ask for more.
    single: a shard by itself, with its manifest, can be a dataset.
    needs: the suffix of a file without which a file of the first suffix is no shard.
    beside: endings of files that belong to a shard -> the ending of the shard.
    listing: a file, or a folder, whose folder is a dataset of the format, and names the shards
        (`Format.listed`). Other formats, and strangers, may have a file of that name.
    names: a pattern of other names of shards' files, in lower case.
    below: the folder of a dataset that its shards lie in; a dataset may be called like a shard.
    extra: of shardkit, that brings the library which the format needs.
    """

    module: str
    suffixes: tuple[str, ...]
    summary: str
    inside: str = ""
    one_shard: bool = False
    single: bool = True
    needs: str = ""
    beside: Mapping[str, str] = field(default_factory=dict)
    listing: str = ""
    names: re.Pattern[str] | None = None
    below: str = ""
    extra: str = ""

    def fits(self, name: str) -> bool:
        """Whether a file's name, in lower case, is one of shards of the format."""
        return name.endswith(self.suffixes) or bool(self.names and self.names.fullmatch(name))


_OURS: dict[str, Declaration] = {
    "wds": Declaration(
        "shardkit.formats.wds",
        (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz"),
        "TAR shards as WebDataset reads them, with an index for random access",
        beside={".index.npy": ".tar", ".idx": ".tar", ".tar.idx": ".tar"},
    ),
    "lmdb": Declaration(
        "shardkit.formats.lmdb",
        (".lmdb", "data.mdb"),
        "LMDB environments: a folder with data.mdb, values in msgpack",
        inside="/data.mdb",
        one_shard=True,
        beside={"lock.mdb": "data.mdb", ".lmdb-lock": ".lmdb"},
    ),
    "arrow": Declaration(
        "shardkit.formats.arrow",
        (".arrow", ".feather"),
        "Arrow IPC files, for pyarrow, pandas and Hugging Face datasets",
        extra="arrow",
    ),
    "parquet": Declaration(
        "shardkit.formats.arrow.parquet",
        (".parquet",),
        "Parquet files of the same columns, read by row groups",
        extra="arrow",
    ),
    "hf": Declaration(
        "shardkit.formats.arrow.hf",
        (".arrow",),
        "a folder as Hugging Face datasets saves it, for load_from_disk",
        single=False,
        listing="state.json",
        extra="arrow",
    ),
    "beton": Declaration(
        "shardkit.formats.beton", (".beton",), "FFCV's files, one by default", one_shard=True
    ),
    "lance": Declaration(
        "shardkit.formats.lance",
        (".lance",),
        "a Lance dataset, for lance.dataset: its fragments are the shards",
        single=False,
        listing="_versions",
        below="data",
        names=re.compile(r"\d+\.manifest"),  # of a version
        extra="lance",
    ),
    "megatron": Declaration(
        "shardkit.formats.megatron",
        (".bin",),
        "Megatron-LM's tokens: a .bin with its .idx, one pair by default",
        one_shard=True,
        needs=".idx",
        beside={".idx": ".bin", ".keys": ".bin"},
    ),
    "mds": Declaration(
        "shardkit.formats.mds",
        (".mds", ".mds.zstd", ".mds.gz", ".mds.bz2"),
        "MosaicML Streaming's shards with their index.json, for StreamingDataset",
        single=False,
        listing="index.json",
    ),
    "tfrecord": Declaration(
        "shardkit.formats.tfrecord",
        TFRECORD_SUFFIXES,
        "TFRecord files of tf.train.Example, for tf.data, DALI and Grain",
        names=TFRECORD_NAMES,
        extra="tfrecord",
    ),
    "litdata": Declaration(
        "shardkit.formats.litdata",
        (".bin",),
        "LitData's chunks with their index.json, for litdata.StreamingDataset",
        single=False,
        listing="index.json",
    ),
    "array_record": Declaration(
        "shardkit.formats.array_record",
        (".array_record", ".arrayrecord"),
        "ArrayRecord files of tf.train.Example, for Grain and TFDS",
        single=False,
        names=re.compile(r".+\.array_?record-\d+-of-\d+"),
        extra="array-record",
    ),
}


BUILT_IN = tuple(_OURS)

# What formats are called elsewhere: errors name ours, as one name is enough.
MEANT = {
    **dict.fromkeys(("tar", "webdataset"), "wds"),
    **dict.fromkeys(("huggingface", "hugging_face", "datasets"), "hf"),
    **dict.fromkeys(("jsonl", "json", "csv"), "parquet"),  # tables
    **dict.fromkeys(("streaming", "mosaicml"), "mds"),
    **dict.fromkeys(("tfrecords", "tfds", "tf"), "tfrecord"),
    **dict.fromkeys(("feather", "ipc"), "arrow"),
    "ffcv": "beton",
    "lightning": "litdata",
    "arrayrecord": "array_record",
}


class _Formats(Mapping[str, Declaration]):
    """Formats by name. Other packages are looked for when none of shardkit's is meant.

    To ask for a format that cannot be loaded raises FormatError; where all are gone through, it is
    left out with a warning.
    """

    def __getitem__(self, name: str) -> Declaration:
        return _OURS[name] if name in _OURS else _declaration(_entry_points()[name])

    def __iter__(self) -> Iterator[str]:
        return iter({**_OURS, **_others()})

    def __len__(self) -> int:
        return len({**_OURS, **_others()})


FORMATS: Mapping[str, Declaration] = _Formats()


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    import importlib.metadata  # takes as long as all the rest of this module

    return {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}


@functools.cache
def _others() -> dict[str, Declaration]:
    """The formats of other packages that can be loaded."""
    found = {}
    for name, entry in _entry_points().items():
        try:
            found[name] = _declaration(entry)
        except FormatError as error:
            warn(str(error))
    return found


@functools.cache
def _declaration(entry: EntryPoint) -> Declaration:
    try:
        found = entry.load()
    except Exception as error:
        raise _not_loaded(entry, f"{type(error).__name__}: {error}") from error
    if not isinstance(found, Declaration):
        raise _not_loaded(entry, f"a {type(found).__name__}")
    if not isinstance(found.suffixes, tuple) or not all(found.suffixes) or not found.suffixes:
        raise _not_loaded(entry, f"one with the suffixes {found.suffixes!r}")
    return found


def _not_loaded(entry: EntryPoint, found: str) -> FormatError:
    package = entry.dist.name if entry.dist is not None else entry.value
    return FormatError(
        f"the format {entry.name!r} cannot be loaded",
        expected=f"a shardkit.formats.Declaration at {entry.value}, with FORMAT in its module",
        found=found,
        fix=f"install the package {package} again, or another version of it, or uninstall it",
    )


def format_names() -> list[str]:
    """All formats, also those of other packages that cannot be loaded."""
    return sorted({**_OURS, **_entry_points()})


def file_name(stem: str, format: str) -> str:
    """The name of a shard's file: `shard-000000.tar`, or `shard-000000.lmdb/data.mdb`."""
    declaration = FORMATS[format]
    return stem + declaration.suffixes[0] + declaration.inside


def get_format(name: str) -> Format:
    """The format called `name`; raises UsageError for an unknown one, and without its library."""
    declaration = FORMATS.get(name)
    if declaration is None:
        from difflib import get_close_matches

        close = get_close_matches(name.lower(), MEANT, 1, 0.7)
        meant = MEANT[close[0]] if close else ""
        fix = f"did you mean {meant} ({_OURS[meant].summary})?" if meant else None
        if name.lower() in ("folder", "jsonl", "files"):
            export = f"`shardkit export --to {name.lower()}` writes plain files of a dataset"
            fix = f"{fix}; {export}" if fix else export
        expected = near(name, format_names())
        raise UsageError(f"there is no format {name!r}", expected=expected, fix=fix)
    format: Format
    if name in _OURS:
        with extra(declaration.extra, f"the format {name!r}"):
            format = importlib.import_module(declaration.module).FORMAT
    else:
        try:
            format = importlib.import_module(declaration.module).FORMAT
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            raise _not_loaded(_entry_points()[name], found) from error
    return format


def format_of(path: Path) -> str | None:
    """The name of the format that a file's name says it is of; None for a name of no format."""
    name = path.name.lower()
    return next((f for f, declared in FORMATS.items() if declared.fits(name)), None)  # ours first


def unknown_format(path: Path) -> FormatError:
    """The error for a path that none of the formats claims."""
    kind = kind_of_file(path)
    if kind is not None:
        return not_read(kind, path)
    suffixes = sorted({suffix for known in FORMATS.values() for suffix in known.suffixes})
    pair = path.with_suffix(".bin")
    if path.suffix == ".idx" and pair.is_file():
        return FormatError("this is the index of a Megatron file", path=path, fix=f"give {pair}")
    if path.name.lower().endswith(tuple(f".{suffix}" for suffix in SUFFIXES)) and path.is_file():
        return FormatError(
            "this is a single image, and no dataset",
            path=path,
            fix=f"give the folder that it is in, {path.parent}, to `shardkit convert`",
        )
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
