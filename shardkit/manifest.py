"""The manifest: what a dataset holds, so that opening it reads nothing else.

It stands in the folder `__shardkit__`, with all other files that shardkit alone reads. Pyarrow and
pandas, Spark, Dask and Hugging Face datasets pass over a folder of such a name, so that they find
nothing but shards in a dataset. A dataset that is a single file, `train.beton`, has its manifest in
`__shardkit__/train.beton.manifest.json`. No times, no absolute paths, no worker counts: the same
source and options give the same bytes.

Earlier versions put these files among the shards, the manifest as `shardkit.json` or
`train.beton.shardkit.json`. Such datasets are read as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from shardkit import storage
from shardkit.errors import DamagedError, FormatError
from shardkit.names import checked_name
from shardkit.schema import Schema

FOLDER = "__shardkit__"
NAME = "manifest.json"
_OLD_NAME = "shardkit.json"
KEYS = "keys.jsonl"  # the key table: what a sample's file was called, where its key does not say
ERRORS = "errors.jsonl"  # the samples that were dropped as they are bad, and why
LENGTHS = "lengths.npy"  # how long the values of one-dimensional arrays are, sample by sample
FILTERED = "filtered.jsonl"  # those that were dropped as options ask for it
VERSION = 1

_T = TypeVar("_T")


@dataclass(frozen=True)
class File:
    """A file of a dataset: path relative to its folder, bytes, and xxh3-128 in hex."""

    name: str
    bytes: int
    checksum: str


@dataclass(frozen=True)
class Shard:
    """One shard: its own file, and those that stand beside it (a TAR's index)."""

    file: File  # names have slashes where a shard is a folder: shard-000000.lmdb/data.mdb
    samples: int
    beside: tuple[File, ...] = ()


@dataclass(frozen=True)
class FieldStats:
    """Sizes of one field's values in bytes. `median` is within 1 % of the true one."""

    count: int
    bytes: int
    min: int
    median: int
    max: int


@dataclass(frozen=True)
class Manifest:
    """One dataset."""

    format: str
    layout: dict[str, Any]  # what the format's reader needs: the schema and, say, a field map
    shards: tuple[Shard, ...]
    class_names: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by field
    label: str = "label"  # the field that holds the class of a sample
    label_counts: tuple[int, ...] | None = None  # samples of each of its classes
    fields: dict[str, FieldStats] = field(default_factory=dict)
    errors: int = 0  # samples that were dropped, listed in errors.jsonl
    # What was passed over, in words, and how often: files, rows, fields, entries of a database.
    ignored: dict[str, int] = field(default_factory=dict)
    encoded: dict[str, int] = field(default_factory=dict)  # by the format, as it demands: reasons
    keys: dict[str, int] = field(default_factory=dict)  # that others stumble over: what they have
    # What the steps did: samples dropped, pictures by what became of them, and why they changed.
    filtered: dict[str, int] = field(default_factory=dict)
    pictures: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)  # documents, tokens, padding, ...
    tokenizer: dict[str, Any] = field(default_factory=dict)  # its file here, digest, size, eos id
    files: tuple[File, ...] = ()  # errors.jsonl, keys.jsonl, and what the format adds
    source: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def schema(self) -> Schema:
        return Schema.from_json(self.layout["schema"])

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the label's classes."""
        return self.class_names.get(self.label)

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Of the shards, without indexes."""
        return sum(shard.file.bytes for shard in self.shards)

    def all_files(self) -> list[File]:
        """The files of all shards, in order."""
        return [f for shard in self.shards for f in (shard.file, *shard.beside)]

    def list_named(self, name: str) -> File | None:
        """What is called so (KEYS, ERRORS, FILTERED, LENGTHS) beside the manifest, if it is."""
        bases = ((file, file.name.rpartition("/")[2]) for file in self.files)
        return next((f for f, base in bases if base == name or base.endswith("." + name)), None)

    def write(self, path: Path) -> None:
        _write(path, {"shardkit": VERSION, "checksum": storage.CHECKSUM, **asdict(self)})


@dataclass(frozen=True)
class Splits:
    """The manifest of a folder that holds one dataset per split."""

    format: str
    splits: dict[str, int]  # name of the folder -> samples
    errors: int  # samples that were dropped, in all of them
    source: dict[str, Any]
    options: dict[str, Any]
    files: tuple[File, ...] = ()  # what the format adds

    def write(self, path: Path) -> None:
        _write(path, {"shardkit": VERSION, **asdict(self)})


def beside(path: Path, name: str = NAME) -> Path:
    """What belongs to a dataset that is a single file: `__shardkit__/x.beton.manifest.json`."""
    return path.parent / FOLDER / f"{path.name}.{name}"


def single_manifest(path: Path) -> Path | None:
    """The manifest of a dataset that is a single file; None where there is none."""
    old = path.with_name(f"{path.name}.{_OLD_NAME}") if path.name else path
    return next((place for place in (beside(path), old) if place.is_file()), None)


def manifest_path(dataset: Path) -> Path:
    """Where the manifest of a dataset stands, or would."""
    single = single_manifest(dataset)
    if single is not None:
        return single
    new, old = dataset / FOLDER / NAME, dataset / _OLD_NAME
    return old if old.is_file() and not new.is_file() else new


def read_checked(path: Path, checksum: str) -> bytes:
    """A file beside the shards, whole. Raises DamagedError for one that was not written so."""
    data = storage.read(path)
    found = xxhash.xxh3_128_hexdigest(data)
    if found != checksum:
        raise DamagedError(
            "a file is not as it was written",
            path=path,
            expected=f"checksum {checksum}",
            found=found,
            fix="copy it again from where it is whole, or convert again",
        )
    return data


def folder_of(manifest: Path) -> Path:
    """The folder that the names in the manifest at this path are relative to."""
    return manifest.parent.parent if manifest.parent.name == FOLDER else manifest.parent


def dataset_of(manifest: Path) -> Path:
    """The dataset whose manifest stands at this path: a folder, or a single file in it."""
    single = re.fullmatch(rf"(.+)\.({re.escape(NAME)}|{re.escape(_OLD_NAME)})", manifest.name)
    return folder_of(manifest) / single[1] if single else folder_of(manifest)


def has_manifest(dataset: Path) -> bool:
    return manifest_path(dataset).is_file()


def load_any(dataset: Path) -> Manifest | Splits:
    """The manifest of a dataset; raises DamagedError or FormatError that says what is wrong."""
    path = manifest_path(dataset)
    try:
        data = json.loads(storage.read(path))
        version = data.pop("shardkit")
        own = data.pop(_OWN_CHECKSUM, None)
        if version == VERSION and own != _own_checksum({"shardkit": version, **data}):
            raise ValueError("it is not as it was written")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedError(f"the manifest is damaged: {error}", path=path) from error
    if version != VERSION:
        raise FormatError(
            "the manifest is of another version",
            path=path,
            expected=f"version {VERSION}",
            found=f"version {version!r}",
            fix="use the shardkit that wrote it, or a newer one",
        )
    try:
        if "splits" in data:
            splits = _of(Splits, {**data, "files": _files(data["files"])})
            _check_files(splits.files, "files", path)
            for name in splits.splits:
                if checked_name(name, path, "splits", flat=True) == FOLDER:
                    raise ValueError(f"a split is called {FOLDER}")
            return splits
        manifest = _from_json(data)
        _check_names(manifest, path)
        if min(
            [0, *(s.samples for s in manifest.shards), *(s.file.bytes for s in manifest.shards)]
        ):
            raise ValueError("a count is negative")
        manifest.schema  # noqa: B018 - raises for what is no schema
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"the manifest is damaged: {error!r}", path=path) from error


def _check_names(manifest: Manifest, path: Path) -> None:
    """Raise DamagedError for a name that leads out of the dataset's folder."""
    for number, shard in enumerate(manifest.shards):
        checked_name(shard.file.name, path, f"shards[{number}].file.name")
        _check_files(shard.beside, f"shards[{number}].beside", path)
    _check_files(manifest.files, "files", path)
    if manifest.tokenizer:
        file = checked_name(manifest.tokenizer["file"], path, "tokenizer.file", flat=True)
        if file.lower() in (NAME, KEYS, ERRORS, LENGTHS, FILTERED):  # which a copy would replace
            raise ValueError(f"the tokenizer's file is called {file}")


def _check_files(files: Iterable[File], field: str, path: Path) -> None:
    for number, file in enumerate(files):
        checked_name(file.name, path, f"{field}[{number}].name")


def split_names(folder: Path) -> list[str]:
    """The datasets in a folder of splits, ours or one that Hugging Face datasets saved."""
    if has_manifest(folder):
        manifest = load_any(folder)
        return list(manifest.splits) if isinstance(manifest, Splits) else []
    path = folder / "dataset_dict.json"
    if not path.is_file():
        return []
    try:
        names = [
            checked_name(name, path, "splits", flat=True)
            for name in json.loads(storage.read(path))["splits"]
        ]
        if not all((folder / name).is_dir() for name in names):
            raise ValueError(f"no folders for {names!r:.100}")
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"the file is damaged: {error}", path=path) from error
    return names


def load(folder: Path) -> Manifest:
    """The manifest of one dataset; raises FormatError for a folder of splits."""
    manifest = load_any(folder)
    if isinstance(manifest, Splits):
        raise one_of_splits(folder, [folder / name for name in manifest.splits])
    return manifest


def one_of_splits(folder: Path, paths: Iterable[str | Path]) -> FormatError:
    """The error for a folder of splits where a dataset is asked for; `paths` open one each."""
    names = ", ".join(map(str, paths))
    return FormatError(
        "this folder holds one dataset per split", path=folder, fix=f"open one of them: {names}"
    )


def _from_json(data: dict[str, Any]) -> Manifest:
    data["shards"] = tuple(
        Shard(_of(File, s["file"]), s["samples"], _files(s["beside"])) for s in data["shards"]
    )
    data["fields"] = {name: _of(FieldStats, stats) for name, stats in data["fields"].items()}
    data["files"] = _files(data["files"])
    if data.get("classes") is not None:  # of one field alone, as manifests had it at first
        data["class_names"] = {data["label"]: data["classes"]}
    named = data.get("class_names", {})
    data["class_names"] = {name: tuple(map(str, names)) for name, names in named.items()}
    if data["label_counts"] is not None:
        data["label_counts"] = tuple(data["label_counts"])
    return _of(Manifest, data)


def _files(entries: list[dict[str, Any]]) -> tuple[File, ...]:
    return tuple(_of(File, entry) for entry in entries)


def _of(kind: type[_T], data: dict[str, Any]) -> _T:
    """An object of JSON; entries that a later version has added are left out."""
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in data.items() if name in names})


_OWN_CHECKSUM = "manifest_checksum"


def _own_checksum(data: dict[str, Any]) -> str:
    """Of a manifest's content, so that a change in it is noticed as well."""
    return xxhash.xxh3_128_hexdigest(_text(data))


def _write(path: Path, data: dict[str, Any]) -> None:
    storage.make_folder(path.parent)
    storage.write_file(path, _text({**data, _OWN_CHECKSUM: _own_checksum(data)}) + b"\n")
    storage.sync(path.parent)


def _text(data: dict[str, Any]) -> bytes:
    # A class name that is not Unicode becomes an escape that JSON reads back.
    text = json.dumps(data, ensure_ascii=False, indent=1, allow_nan=False)
    return text.encode("utf-8", "backslashreplace")
