"""The registry of formats: built-in formats and those added by other packages.

A format is imported when it is first used. Another package adds a format with an entry point in the
group `shardkit.formats`, which has the name of the format and refers to its `Declaration`.

Each imports only those on lines below its own:

    contract
    api array_record/ lance/ litdata/ mds/ testing_samples
    __init__ arrow/ beton/ columns lmdb/ megatron/ offsets packed table_folders tfrecord/
      wds/
    base compressed unsupported
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.errors import FormatError, UsageError, near, warn
from shardkit.formats.unsupported import (
    TFRECORD_NAMES,
    TFRECORD_SUFFIXES,
    kind_of_file,
    not_read,
    other_kind,
)
from shardkit.helpers.extras import entry_points, extra, package_of
from shardkit.metadata.manifest import FOLDER, NAME

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from shardkit.formats.base import Format

ENTRY_POINTS = "shardkit.formats"


@dataclass(frozen=True)
class Declaration:
    """The module of a format and the names of its shards: what must be known before importing it.

    module: the module that contains the format as `FORMAT`.
    suffixes: the suffixes of a shard's file; the first one is used for writing.
    inside: the path of that file inside a shard that is a folder, such as "/data.mdb".
    one_shard: a dataset is a single shard by default, as users of the format expect.
    single: a single shard with its manifest can be a dataset.
    needs: the suffix of a companion file, without which a file of that name is not a shard.
    beside: suffixes of files that belong to a shard -> the suffix of the shard.
    listing: a file or folder that marks its folder as a dataset of the format and names the shards
        (`Format.listed`). Other formats and unrelated programs may use the same name.
    names: a pattern for other names of shard files, in lower case.
    below: the subfolder of a dataset that contains its shards; the dataset itself may then be named
        like a shard.
    extra: the extra of shardkit that installs the library which the format needs.
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
        """Return whether a file name, in lower case, is that of a shard of the format."""
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
        extra="lmdb",
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
        names=re.compile(r"\d+\.manifest"),  # the manifest of a version
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

# Other names for the formats. They are not accepted, but errors suggest the right name.
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
    """Formats by name. Entry points are only loaded for names that are not built in.

    Looking up a format that cannot be loaded raises FormatError; iteration skips it with a warning.
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
    return {entry.name: entry for entry in entry_points(ENTRY_POINTS)}


@functools.cache
def _others() -> dict[str, Declaration]:
    """Return the formats of other packages that can be loaded."""
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
    package = package_of(entry)
    return FormatError(
        f"the format {entry.name!r} cannot be loaded",
        expected=f"a shardkit.formats.Declaration at {entry.value}, with FORMAT in its module",
        found=found,
        fix=f"reinstall the package {package}, install another version of it, or uninstall it",
    )


def format_names() -> list[str]:
    """Return the names of all formats, including those of other packages that cannot be loaded."""
    return sorted({**_OURS, **_entry_points()})


def file_name(stem: str, format: str) -> str:
    """Return the name of a shard's file: `shard-000000.tar`, or `shard-000000.lmdb/data.mdb`."""
    declaration = FORMATS[format]
    return stem + declaration.suffixes[0] + declaration.inside


def get_format(name: str) -> Format:
    """The format called `name`; raises UsageError if it is unknown or its library is missing."""
    declaration = FORMATS.get(name) if isinstance(name, str) else None
    if declaration is None:
        raise _unknown_name(str(name))
    format: Format
    if name in _OURS:
        with extra(declaration.extra, f"the format {name!r}"):
            format = importlib.import_module(declaration.module).FORMAT
        return format
    try:
        format = importlib.import_module(declaration.module).FORMAT
    except Exception as error:
        raise _not_loaded(_entry_points()[name], f"{type(error).__name__}: {error}") from error
    return format


def _unknown_name(name: str) -> UsageError:
    from difflib import get_close_matches

    fixes = []
    if close := get_close_matches(name.lower(), MEANT, 1, 0.7):
        meant = MEANT[close[0]]
        fixes.append(f"did you mean {meant} ({_OURS[meant].summary})?")
    if name.lower() in ("folder", "jsonl"):
        fixes.append(f"`shardkit export --to {name.lower()}` writes plain files of a dataset")
    expected, fix = near(name, format_names()), "; ".join(fixes) or None
    return UsageError(f"there is no format {name!r}", expected=expected, fix=fix)


def format_of(path: Path) -> str | None:
    """Return the name of the format that a file name indicates; None if it matches no format."""
    name = path.name.lower()
    # Built-in formats come first.
    return next((f for f, declared in FORMATS.items() if declared.fits(name)), None)


def unknown_format(path: Path) -> FormatError:
    """Return the error for a path that matches none of the formats."""
    kind = kind_of_file(path) or other_kind(path.name)
    if kind is not None:
        return not_read(kind, path)
    from shardkit.codecs.media import ARRAYS, kind_by_name  # imported only for this error

    media = kind_by_name(path.name)
    if media not in (None, ARRAYS) and path.is_file():
        return FormatError(
            f"this is a single {media.one.partition(' ')[2]}, not a dataset",
            path=path,
            fix=f"pass the folder that contains it, {path.parent}, to `shardkit convert`",
        )
    if FOLDER in (path.name, path.parent.name):
        folder = path if path.name == FOLDER else path.parent
        return FormatError(
            "this contains shardkit's metadata of a dataset, but no samples",
            path=path,
            fix=f"pass the dataset: {folder.parent}, or the file beside {FOLDER}",
        )
    suffixes = sorted({suffix for known in FORMATS.values() for suffix in known.suffixes})
    source = path.is_dir() or path.suffix.lower() in (".csv", ".tsv", ".json", ".jsonl", ".txt")
    return FormatError(
        "this is not a dataset or shard that shardkit can read",
        path=path,
        expected=f"a folder with {FOLDER}/{NAME}, or a name that ends in {', '.join(suffixes)}",
        fix="`shardkit formats` lists what can be read"
        + (f"; images, text and tables: shardkit convert {path} --to wds" if source else ""),
    )
