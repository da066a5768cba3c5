"""The manifest: describes the contents of a dataset, so that opening it reads no other files.

It is in the folder `__shardkit__`, with all other files that only shardkit reads. Pyarrow, pandas,
Spark, Dask and Hugging Face datasets ignore folders with such a name, so that they find only shards
in a dataset. A dataset that is a single file, `x.tar`, has its manifest in
`__shardkit__/x.tar.manifest.json`. A manifest has no times, absolute paths or worker counts: the
same source and options give the same bytes.

Earlier versions put these files among the shards, the manifest as `shardkit.json` or
`x.tar.shardkit.json`, with `source` and `options` instead of a recipe. Such datasets can still be
read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

import xxhash

from shardkit.errors import DamagedError, FormatError, ShardkitError, StorageError
from shardkit.helpers.checked import (
    MAX_BYTES,
    Count,
    Digest,
    Extensible,
    MismatchError,
    Rule,
    checked,
    damaged,
    from_json,
    of_version,
    plain,
    under,
)
from shardkit.helpers.names import checked_name
from shardkit.schema import Schema
from shardkit.storage import checksums, fs
from shardkit.storage.checksums import CHECKSUM, DIGEST, WHOLE, listed
from shardkit.storage.remote.client import MANIFEST

FOLDER, NAME = MANIFEST.split("/")
OLD_NAME = "shardkit.json"
KEYS = "keys.jsonl"  # the key table: paths of samples' files, if they do not follow from the keys
ERRORS = "errors.jsonl"  # bad samples that were dropped, and why
LENGTHS = "lengths.npy"  # lengths of one-dimensional arrays and audio, by sample
FILTERED = "filtered.jsonl"  # samples dropped by filter options
UNFINISHED = "unfinished.json"  # exists in a store while objects are being published or removed
PIECES = "pieces.xxh3"  # digests of the pieces of all shards' files, in order
CHOSEN = "chosen.u64"  # sorted hashes of the keys of `Recipe.keys`
_LISTS = (NAME, KEYS, ERRORS, LENGTHS, FILTERED, PIECES, CHOSEN)
VERSION = 1
_FEW = 16  # files up to which each is looked up by itself, without listing folders
_MAX_SAMPLES = 64  # per byte of a shard: far more than even the best compression reaches

# Manifests are checked against the types of these classes when they are read.


@dataclass(frozen=True)
class File(Extensible):
    """A file of a dataset: path relative to the dataset's folder, size, and checksum in hex."""

    name: str
    bytes: Count
    checksum: Digest


@dataclass(frozen=True)
class Shard(Extensible):
    """One shard: its file, and the files beside it, such as an index."""

    file: File  # its name has a slash if the shard is a folder
    samples: Count
    beside: tuple[File, ...] = ()
    tasks: tuple[Count, ...] = ()  # numbers of the first and the last task that made it

    @property
    def files(self) -> tuple[File, ...]:
        return self.file, *self.beside

    @property
    def listed(self) -> int:
        """Number of digests that its files have in the list of pieces."""
        return sum(listed(file.bytes) for file in self.files)


@dataclass(frozen=True)
class FieldStats(Extensible):
    """Sizes of one field's values in bytes. `median` is within 1 % of the true one."""

    count: Count
    bytes: Count
    min: Count
    median: Count
    max: Count


@dataclass(frozen=True)
class PixelStats(Extensible):
    """Mean and standard deviation of red, green and blue (0 to 1) over all pixels of images."""

    images: Count
    pixels: Count
    mean: tuple[float, ...]
    std: tuple[float, ...]


class _Layout(TypedDict):
    """The entries that readers of all formats need; some formats have more."""

    schema: dict[str, Any]


_POWERS = 65  # buckets of a histogram by powers of two: 0, and one per bit of a 64-bit number
_SIZES = Rule(
    "counts of sizes, by powers of two",
    lambda counts: 0 < len(counts) <= _POWERS and min(counts) >= 0,
)


# Of conversations only.
_OfChats = TypedDict(
    "_OfChats", {"learned": Count, "too long": Count, "longest too long": Count}, total=False
)


class TextEntry(_OfChats):
    """Counts of documents: `TextTally.summary`. Lengths are in tokens."""

    documents: Count
    tokens: Count
    bytes: Count
    padding: Count
    dropped: Count
    cut: Count
    shortest: Count
    median: Count
    longest: Count
    histogram: Annotated[dict[int, Count], _SIZES]


@dataclass(frozen=True)
class Manifest(Extensible):
    """One dataset."""

    format: str
    layout: dict[str, Any]  # what the format's reader needs: the schema and, e.g., a field map
    shards: tuple[Shard, ...]
    class_names: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by field
    label: str = "label"  # the field that holds the class of a sample
    label_counts: tuple[Count, ...] | None = None  # number of samples of each class
    fields: dict[str, FieldStats] = field(default_factory=dict)
    errors: Count = 0  # samples that were dropped, listed in errors.jsonl
    # What was ignored, in words, and how often: files, rows, fields, entries of a database.
    ignored: dict[str, Count] = field(default_factory=dict)
    encoded: dict[str, Count] = field(default_factory=dict)  # why the format re-encoded images
    keys: dict[str, Count] = field(default_factory=dict)  # problems of keys for other tools
    # What the steps did: samples dropped, images by what was done to them, and reasons for changes.
    filtered: dict[str, Count] = field(default_factory=dict)
    images: dict[str, Count] = field(default_factory=dict)
    reasons: dict[str, Count] = field(default_factory=dict)
    pixels: dict[str, PixelStats] = field(default_factory=dict)  # by field, if requested
    text: dict[str, Any] = field(default_factory=dict)  # a TextEntry, for a dataset of tokens
    tokenizer: dict[str, Any] = field(default_factory=dict)  # a TokenizerEntry
    files: tuple[File, ...] = ()  # errors.jsonl, keys.jsonl, and what the format adds
    recipe: dict[str, Any] = field(default_factory=dict)  # what `Recipe.from_json` takes
    versions: dict[str, str] = field(default_factory=dict)  # of the libraries that shape the bytes
    checksum: str = CHECKSUM  # the kind of its files' checksums

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
        """Total size of the shards, without indexes."""
        return sum(shard.file.bytes for shard in self.shards)

    def all_files(self) -> list[File]:
        """Return the files of all shards, in order."""
        return [file for shard in self.shards for file in shard.files]

    def list_named(self, name: str) -> File | None:
        """The file with this name (KEYS, ERRORS, ..., PIECES) beside the manifest, if any."""
        bases = ((file, file.name.rpartition("/")[2]) for file in self.files)
        return next((f for f, base in bases if base == name or base.endswith("." + name)), None)

    def write(self, path: Path) -> None:
        _write(path, {"shardkit": VERSION, "checksum": self.checksum, **plain(self)})


@dataclass(frozen=True)
class Splits(Extensible):
    """The manifest of a folder with one dataset per split."""

    format: str
    splits: dict[str, Count]  # name of the folder -> samples
    errors: Count  # samples that were dropped, in all splits
    recipe: dict[str, Any] = field(default_factory=dict)  # what `Recipe.from_json` takes
    files: tuple[File, ...] = ()  # what the format adds
    checksum: str = CHECKSUM  # the kind of its files' checksums

    def write(self, path: Path) -> None:
        _write(path, {"shardkit": VERSION, "checksum": self.checksum, **plain(self)})


class _DatasetDict(TypedDict):
    """dataset_dict.json, as Hugging Face datasets writes it."""

    splits: list[str]


def beside(path: Path, name: str = NAME) -> Path:
    """Return a file that belongs to a single-file dataset: `__shardkit__/x.tar.manifest.json`."""
    return path.parent / FOLDER / f"{path.name}.{name}"


def manifest_paths(path: Path) -> tuple[Path, ...]:
    """Possible paths of a dataset's manifest: two for a single file, and two for a folder."""
    old = path.with_name(f"{path.name}.{OLD_NAME}") if path.name else path
    return beside(path), old, path / FOLDER / NAME, path / OLD_NAME


def single_manifest(path: Path) -> Path | None:
    """Return the path of a single-file dataset's manifest; None if there is none."""
    return next((found for found in manifest_paths(path)[:2] if found.is_file()), None)


def with_own(files: Sequence[Path]) -> list[Path]:
    """The files that have a manifest of their own. If there are many, lists their folders."""
    names: dict[Path, set[str] | None] = {}

    def may_exist(path: Path) -> bool:
        folder = path.parent
        if folder not in names:
            try:
                names[folder] = {entry.name for entry in folder.iterdir()}
            except FileNotFoundError:
                names[folder] = set()
            except (OSError, StorageError):  # it cannot be listed, for example on a web server
                names[folder] = None
        found = names[folder]
        return found is None or path.name in found

    if len(files) > _FEW:
        files = [file for file in files if any(map(may_exist, manifest_paths(file)[:2]))]
    return [file for file in files if single_manifest(file)]


def manifest_path(dataset: Path) -> Path:
    """Return the path of a dataset's manifest, which need not exist."""
    single = single_manifest(dataset)
    if single is not None:
        return single
    new, old = manifest_paths(dataset)[2:]
    return old if old.is_file() and not new.is_file() else new


def read_checked(path: Path, checksum: str, kind: str) -> bytes:
    """Read a file of a dataset. Raises DamagedError if its checksum differs."""
    data = fs.read(path)
    found = checksums.checksum(data, kind)
    if found != checksum:
        raise DamagedError(
            "a file has changed since it was written",
            path=path,
            expected=f"checksum {checksum}",
            found=found,
        )
    return data


def folder_of(manifest: Path) -> Path:
    """Return the folder that the names in the manifest at this path are relative to."""
    return manifest.parent.parent if manifest.parent.name == FOLDER else manifest.parent


def dataset_of(manifest: Path) -> Path:
    """Return the dataset whose manifest is at this path: a folder, or a single file in it."""
    single = re.fullmatch(rf"(.+)\.({re.escape(NAME)}|{re.escape(OLD_NAME)})", manifest.name)
    return folder_of(manifest) / single[1] if single else folder_of(manifest)


def has_manifest(dataset: Path) -> bool:
    return manifest_path(dataset).is_file()


def load_any(dataset: Path) -> Manifest | Splits:
    """Return the manifest of a dataset. Raises DamagedError, or FormatError for another version."""
    path = manifest_path(dataset)
    text = fs.read(path, MAX_BYTES)
    data = of_version(VERSION, "shardkit", text, "the manifest", path=path)
    try:
        own = data.pop(_OWN_CHECKSUM, None)
        if not _is_as_written(text, own, data):
            raise ValueError("it has changed since it was written")
        del data["shardkit"]
        return _from_json(data, path)
    except (ValueError, RecursionError) as error:
        raise damaged("the manifest", error, path=path) from error
    except ShardkitError as error:  # such as a field type of a later version
        raise error.located(path=path) from error.__cause__


def _check_names(manifest: Manifest, path: Path) -> None:
    """Raise DamagedError for a file name that leads out of the dataset's folder."""
    for number, shard in enumerate(manifest.shards):
        checked_name(shard.file.name, path, f"shards[{number}].file.name")
        _check_files(shard.beside, f"shards[{number}].beside", path)
    _check_files(manifest.files, "files", path)
    if manifest.tokenizer:
        file = checked_name(manifest.tokenizer["file"], path, "tokenizer.file", flat=True)
        if file.lower() in _LISTS:  # a copy of the tokenizer would overwrite the list
            raise ValueError(f"the tokenizer's file is called {file}")


def _check_files(files: Iterable[File], field: str, path: Path) -> None:
    for number, file in enumerate(files):
        checked_name(file.name, path, f"{field}[{number}].name")


def split_names(folder: Path) -> list[str]:
    """The names of the splits in a folder written by shardkit or by Hugging Face datasets."""
    if has_manifest(folder):
        manifest = load_any(folder)
        return list(manifest.splits) if isinstance(manifest, Splits) else []
    path = folder / "dataset_dict.json"
    if not path.is_file():
        return []
    found = from_json(_DatasetDict, fs.read(path, MAX_BYTES), "the file", path=path)
    names = [checked_name(name, path, "splits", flat=True) for name in found["splits"]]
    for name in names:
        if not (folder / name).is_dir():
            raise DamagedError("the folder of a split is missing", path=folder / name)
    return names


def load(folder: Path) -> Manifest:
    """Return the manifest of one dataset; raises FormatError for a folder of splits."""
    manifest = load_any(folder)
    if isinstance(manifest, Splits):
        raise one_of_splits(folder, [folder / name for name in manifest.splits])
    return manifest


def one_of_splits(folder: Path, paths: Iterable[str | Path]) -> FormatError:
    """The error for a folder of splits instead of one dataset. `paths` open one split each."""
    names = ", ".join(map(str, paths))
    return FormatError(
        "this folder holds one dataset per split", path=folder, fix=f"open one of them: {names}"
    )


def _upgrade(data: dict[str, Any]) -> None:
    """Convert entries written by earlier versions to the current names."""
    if "options" in data and "recipe" not in data:
        source, options = data.pop("source", None), data.pop("options")
        options = checked(dict[str, Any], options, "options")
        from shardkit.metadata.recipe import recipe_of_version_1

        data["recipe"] = recipe_of_version_1(data.get("format"), source, options)
    if "splits" in data:
        return
    if (names := data.pop("classes", None)) is not None:  # only for the label
        data["class_names"] = {str(data.get("label")): names}
    if "pictures" in data:
        data["images"] = data.pop("pictures")


def _from_json(data: dict[str, Any], path: Path) -> Manifest | Splits:
    _upgrade(data)
    if data.setdefault("checksum", WHOLE) not in (WHOLE, CHECKSUM):
        raise MismatchError(f"{WHOLE!r} or {CHECKSUM!r}", data["checksum"], "checksum")
    if "splits" in data:
        splits = checked(Splits, data)
        _check_files(splits.files, "files", path)
        for name in splits.splits:
            if checked_name(name, path, "splits", flat=True) == FOLDER:
                raise ValueError(f"a split is called {FOLDER}")
        return splits
    manifest = checked(Manifest, data)
    with under("layout"):
        checked(_Layout, manifest.layout)
        with under("schema"):
            manifest.schema  # noqa: B018 - raises for an invalid schema
    if manifest.text:
        checked(TextEntry, manifest.text, "text")
    if manifest.tokenizer:
        from shardkit.metadata.recipe import TokenizerEntry  # only imported for datasets of tokens

        checked(TokenizerEntry, manifest.tokenizer, "tokenizer")
    _check_names(manifest, path)
    _check_together(manifest)
    return manifest


def _check_together(manifest: Manifest) -> None:
    """Check values against each other. `verify` compares the counts with those of the shards."""
    total, counts = manifest.samples, manifest.label_counts
    if (most := max(total, manifest.bytes)) >= 2**63:
        raise MismatchError("samples and bytes that add up to less than 2^63", most, "shards")
    for number, shard in enumerate(manifest.shards):
        size = shard.file.bytes + sum(file.bytes for file in shard.beside)
        if shard.samples > _MAX_SAMPLES * size:  # a forged count would exhaust memory
            raise MismatchError(
                f"{size:,} bytes' worth", shard.samples, "shards", number, "samples"
            )
    names = {shard.file.name for shard in manifest.shards}
    if len(names) != len(manifest.shards):
        raise ValueError("a shard is listed twice")
    digests = DIGEST * sum(shard.listed for shard in manifest.shards)
    found = manifest.list_named(PIECES)
    if manifest.checksum == CHECKSUM and digests != (0 if found is None else found.bytes):
        raise ValueError(f"{PIECES} does not have a digest for each piece of the shards")
    if counts is not None and (len(counts) != len(manifest.classes or ()) or sum(counts) > total):
        raise MismatchError("a count for each class", [*counts], "label_counts")


_OWN_CHECKSUM = "manifest_checksum"


def _is_as_written(text: bytes, own: Any, data: dict[str, Any]) -> bool:
    """Return whether a manifest matches its own checksum, `own`, even if it was reformatted."""
    begin = text.rfind(b",")
    found = text[:begin] + b"\n}"
    return text == _sealed(found) or own == xxhash.xxh3_128_hexdigest(_text(data))


def as_written(dataset: Path) -> bytes | None:
    """Return the bytes of a manifest as they were written, if it now says the same in other bytes.

    Readers accept a manifest that was reformatted, which may also hide a flipped bit: `1E+16`.
    """
    text = fs.read(manifest_path(dataset), MAX_BYTES)
    data = json.loads(text)
    own = data.pop(_OWN_CHECKSUM)
    written = _text(data)
    same = own == xxhash.xxh3_128_hexdigest(written) and text != _sealed(written)
    return _sealed(written) if same else None


def _write(path: Path, data: dict[str, Any]) -> None:
    text = _sealed(_text(data))
    if len(text) > MAX_BYTES:
        raise FormatError(
            "there are more shards than a manifest can list",
            path=path,
            expected=f"a manifest of at most {MAX_BYTES:,} bytes",
            found=f"{len(text):,}",
            fix="make larger shards, with --shard-size",
        )
    fs.make_folder(path.parent)
    fs.write_file(path, text)
    fs.sync(path.parent)


def _sealed(text: bytes) -> bytes:
    """Append the manifest's checksum as its last entry, to detect changes."""
    checksum = xxhash.xxh3_128_hexdigest(text)
    return text.removesuffix(b"\n}") + f',\n "{_OWN_CHECKSUM}": "{checksum}"\n}}\n'.encode()


def _text(data: dict[str, Any]) -> bytes:
    # A lone surrogate in a class name is written as an escape, which JSON can read back.
    text = json.dumps(data, ensure_ascii=False, indent=1, allow_nan=False)
    return text.encode("utf-8", "backslashreplace")
