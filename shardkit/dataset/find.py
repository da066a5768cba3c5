"""Opens the dataset or splits at a path: a folder, a shard or a pattern, ours or of others."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shardkit.dataset.card import named_subset
from shardkit.dataset.dataset import Dataset
from shardkit.dataset.folders import (
    datasets_of_splits,
    listed_shards,
    look_into,
    refuse_unsupported,
    shards_by_split,
    shards_like,
    shards_of,
    way_to,
)
from shardkit.errors import (
    AGAIN,
    DamagedError,
    FormatError,
    NotFoundError,
    ShardkitError,
    warn,
)
from shardkit.formats import FORMATS, format_of, unknown_format
from shardkit.formats.table_folders import partition_columns, partitioned, refuse_files_of_table
from shardkit.formats.unsupported import kind_of_file
from shardkit.helpers import os_errors
from shardkit.helpers.checked import MAX_BYTES
from shardkit.helpers.mistyped import meant
from shardkit.metadata import manifest as manifests
from shardkit.metadata.job import JOB, LOCK, PARTS, parsed_job
from shardkit.metadata.manifest import Manifest, Shard, Splits
from shardkit.metadata.splits import grouped
from shardkit.storage import fs
from shardkit.storage.checksums import WHOLE, listed
from shardkit.storage.digests import FilePieces, PieceList
from shardkit.storage.patterns import incomplete, is_pattern, refuse_incomplete
from shardkit.storage.remote.client import Info
from shardkit.storage.remote.path import RemotePath

_COMPRESSED = re.compile(r"\.(tgz|tar\.(gz|zst|bz2|xz))(?= |$)")


def open_dataset(path: str | os.PathLike[str], *, partly: bool = False) -> Dataset:
    """Open a dataset folder, a folder of shards without a manifest, or a single shard.

    partly: also open a dataset with fields that cannot be read. `unusable` has these fields and the
        errors.

    Raises NotFoundError if the path does not exist, FormatError if it is not a dataset, and
    DamagedError if the dataset is damaged.
    """
    dataset = _only(fs.source(path))
    if not partly:
        _refuse_unusable(dataset)
    return dataset


def open_splits(
    path: str | os.PathLike[str], *, together: bool = False, partly: bool = False, subset: str = ""
) -> dict[str, Dataset]:
    """Open the dataset at a path as `{"": dataset}`, or its splits by name.

    together: open shards as one dataset, even if their names belong to several splits.
    partly: also open datasets with fields that cannot be read. `unusable` has these fields and the
        errors.
    subset: the subset in README.md to open, which the path can also name: `FOLDER#SUBSET`.
    """
    splits = _at(fs.source(path), together, subset)
    found = {name: opened() for name, (_, opened) in splits.items()}
    for dataset in () if partly else found.values():
        _refuse_unusable(dataset)
    return found


def open_files(files: Sequence[Path], *, together: bool = False) -> dict[str, Dataset]:
    """Open shards of one format as if they were the only files of a folder.

    Returns one dataset per split that their names indicate, or a single one if `together`. Fields
    that cannot be read are in `unusable`.
    """
    folder, names, format = shards_of(files)
    splits = {} if together else grouped(folder, names)
    if len(splits) < 2:
        return {"": _of_files(folder, names, format)}
    return {
        split: _of_files(*shards_of([files[n] for n in numbers]))
        for split, (_, numbers) in splits.items()
    }


def describing(files: Iterable[Path]) -> dict[Path, Path | None]:
    """Map each file to the path of the dataset that describes it: its folder, the file, or None."""
    named: dict[Path, frozenset[str]] = {}  # the shards that the manifest of a folder names
    single: dict[Path, bool] = {}  # whether the files of a folder may have their own manifests
    found: dict[Path, Path | None] = {}
    for file in files:
        folder = file.parent
        if folder not in named:
            manifest = manifests.load_any(folder) if manifests.has_manifest(folder) else None
            shards = manifest.shards if isinstance(manifest, Manifest) else ()
            named[folder] = frozenset(shard.file.name for shard in shards)
            single[folder] = not shards and (folder / manifests.FOLDER).is_dir()
        own = file if single[folder] and manifests.single_manifest(file) else None
        found[file] = folder if file.name in named[folder] else own
    return found


def _refuse_unusable(dataset: Dataset) -> None:
    for error in dataset.unusable.values():
        raise error


def _only(path: Path) -> Dataset:
    """Open the single dataset at a path, even if some of its fields cannot be read."""
    found = _at(path)
    if list(found) != [""]:
        raise manifests.one_of_splits(path, [split.path for split in found.values()])
    return found[""].open()


class _Found(NamedTuple):
    """The path of a single dataset, and the function that opens it."""

    path: str | Path
    open: Callable[[], Dataset]


def _at(path: Path, together: bool = False, subset: str = "") -> dict[str, _Found]:
    """Find the datasets at a path: one named "", or one per split."""
    path, subset = (path, subset) if subset else named_subset(path)
    _refuse_working_folder(path)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if is_pattern(path):
            return {"": _Found(path, lambda: _of_files(*shards_like(path)))}
        raise unreadable(error, "open", path) from error
    if not stat.S_ISDIR(mode):
        return {"": _Found(path, lambda: _open_file(path))}
    manifest = manifests.load_any(path) if manifests.has_manifest(path) else None
    if isinstance(manifest, Manifest):
        shown = manifest, manifests.manifest_path(path), manifest.shards
        return {"": _Found(path, partial(_described, *shown))}
    if names := manifests.split_names(path) if manifest is None else manifest.splits:
        return {name: _Found(path / name, partial(_only, path / name)) for name in names}
    unfinished = path / manifests.FOLDER / manifests.UNFINISHED
    if isinstance(path, RemotePath) and path.store.lists and unfinished.is_file():
        raise FormatError(
            "this dataset is still being written, or its conversion was interrupted",
            path=path,
            fix="wait until the conversion has finished, or run the command again: it continues",
        )
    if (listed := listed_shards(path)) is not None:
        format, names = listed
        return {"": _Found(path, partial(_third_party, path, names, format))}
    return _looked_into(path, together, subset)


def _refuse_working_folder(path: Path) -> None:
    """Raise FormatError for the working folder of a conversion, and for what is in it."""
    for folder in (path, *fs.absolute(path).parents):
        if folder.name.endswith(_PARTIAL) and any(map(Path.is_file, (folder / JOB, folder / LOCK))):
            raise FormatError(
                "this is an unfinished conversion, not a dataset",
                path=path,
                fix="; ".join(filter(None, (_again(folder), _meant(folder)))),
            )


def _looked_into(path: Path, together: bool, subset: str) -> dict[str, _Found]:
    """Find the datasets in a folder that has no manifest and no list of shards."""
    if format_of(path) and (described := _in_manifest(path.parent, path)) is not None:
        return {"": _Found(path, lambda: described)}
    found = look_into(path)
    refuse_incomplete(path, found.shards)
    if not found.shards:
        refuse_unsupported(found)
        raise unknown_format(path)
    if found.beside:
        beside = ", ".join(map(repr, found.beside[:5])) + ", ..." * (len(found.beside) > 5)
        warn(f"only the shards directly in {path} are opened, not those in its folders: {beside}")
    if by_split := datasets_of_splits(found):
        ways = {split: path / folder for split, folder in by_split.items()}
        return {split: _Found(way, partial(_only, way)) for split, way in ways.items()}
    every = shards_by_split(found, together=together, subset=subset)
    if found.image_files:
        found.ignored["image"] = found.image_files
    format = found.shards[next(iter(every.values()))[0]]
    return {
        split: _Found(
            way_to(path, names, found.shards),
            # Count the other files of the folder once, not once per split.
            partial(_shards, path, names, format, {} if number else dict(found.ignored)),
        )
        for number, (split, names) in enumerate(every.items())
    }


_PARTIAL = ".partial"  # suffix of the working folder of a conversion
_UNKNOWN = "run the interrupted command again"
_AGAIN = {  # by what the job in that folder says
    "recipe": "run the interrupted command again: it continues where it stopped",
    "export": "run the interrupted command again: it starts over",
    "repair": "run the interrupted `shardkit verify --repair` again",
    "create": "`shardkit.create` has not closed it: if that program was interrupted, run it again,"
    " which starts over",
}


def _again(folder: Path) -> str:
    """Return how to go on with the unfinished work in a folder."""
    with contextlib.suppress(ShardkitError, OSError):
        job = parsed_job(fs.read(folder / JOB, MAX_BYTES))
        if "recipe" in job and (folder / PARTS).is_dir():
            out = folder.with_name(folder.name.removesuffix(_PARTIAL))
            return f"once all its parts (--part I/N) have ended, run `shardkit merge {out}`"
        return next((words for kind, words in _AGAIN.items() if kind in job), _UNKNOWN)
    return _UNKNOWN


def unreadable(error: OSError, doing: str, path: Path) -> ShardkitError:
    """The error for a path that does not exist or cannot be accessed, with a fix if one is known.

    `doing` is the failed action, such as "open".
    """
    explained = os_errors.explain(error, doing, path)
    if isinstance(explained, NotFoundError) and explained.fix is None:
        explained.fix = _meant(path)
    return explained


def _meant(path: Path) -> str | None:
    """What the user probably meant by a path that does not exist or is unfinished, if known."""
    with contextlib.suppress(ShardkitError, OSError):
        if path.name.endswith(_PARTIAL):
            out = path.with_name(path.name.removesuffix(_PARTIAL))
            return f"to read the dataset, give {out}" if manifests.has_manifest(out) else None
        working = path.with_name(path.name + _PARTIAL)
        if (working / JOB).is_file():
            return f"its conversion is unfinished: {_again(working)}"
        return meant(path)
    return None


def _shards(folder: Path, names: list[str], format: str, ignored: dict[str, int]) -> Dataset:
    """Open the shards of a folder without a manifest; a single shard may have its own manifest."""
    files = [folder / name.removesuffix(FORMATS[format].inside) for name in names]
    ours = manifests.with_own(files)
    if len(ours) == len(files) == 1:
        dataset = open_described(ours[0])
        dataset.beside = ignored
        return dataset
    tables = {file: manifests.load(file).class_names for file in ours}
    if any(table != tables[ours[0]] for table in tables.values()):
        raise FormatError(
            "the datasets in this folder number their classes differently",
            path=folder,
            found=", ".join(file.name for file in ours[:5]),
            fix=f"give one of them: {', '.join(map(str, ours[:5]))}",
        )
    return _third_party(folder, names, format, ignored)


def _of_files(folder: Path, names: list[str], format: str) -> Dataset:
    """Open some shards of a folder, using its manifest if that names all of them."""
    if manifests.has_manifest(folder):
        manifest = manifests.load_any(folder)
        shards = {} if isinstance(manifest, Splits) else {s.file.name: s for s in manifest.shards}
        if isinstance(manifest, Manifest) and set(names) <= set(shards):
            path = manifests.manifest_path(folder)
            return _described(manifest, path, [shards[name] for name in names])
    if len(names) > 1:
        for some in incomplete(names):
            warn(f"only some of the files that their names announce are read: {some}")
    return _third_party(folder, names, format)


def _third_party(
    folder: Path, names: list[str], format: str, ignored: dict[str, int] | None = None
) -> Dataset:
    _refuse_copies(folder, names)
    if format == "parquet":
        refuse_files_of_table((folder / name).parent for name in names)
    dataset = Dataset(folder, format, [(name, None, None) for name in names], None)
    columns = partition_columns(folder, [posixpath.dirname(name) for name in names], format)
    if lost := {name: values for name, values in columns.items() if name not in dataset.schema}:
        dataset.partitions = lost
        dataset.unusable = {**dataset.unusable, **{n: partitioned(folder, n) for n in lost}}
    dataset.beside = ignored or {}
    return dataset


def _refuse_copies(folder: Path, names: list[str]) -> None:
    """Raise FormatError for a TAR that is there plain and compressed."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(_COMPRESSED.sub(".tar", name), name)
        if other != name and _COMPRESSED.search(f"{name} {other}"):
            raise FormatError(
                "a shard and its compressed copy are in the same folder",
                path=folder,
                expected="each shard once",
                found=f"{other} and {name}",
                fix=f"remove one of the two, such as {name}",
            )


def open_described(path: Path) -> Dataset:
    """Open the dataset of the manifest at a path; shards may be missing."""
    manifest = manifests.load(path)
    return _described(manifest, manifests.manifest_path(path), manifest.shards)


def _described(manifest: Manifest, path: Path, shards: Sequence[Shard]) -> Dataset:
    """Create a dataset of some of the shards that the manifest at a path describes."""
    entries = [(s.file.name, s.samples, s.file.bytes) for s in shards]
    folder = manifests.folder_of(path)
    dataset = Dataset(folder, manifest.format, [*entries], manifest, path)
    if isinstance(folder, RemotePath):
        names = {shard.file.name for shard in shards}
        every = _remote_files(manifest, folder)
        dataset.remote_files = {name: files for name, files in every if name in names}
        dataset.expect(*names)
    return dataset


def _remote_files(
    manifest: Manifest, folder: RemotePath
) -> Iterator[tuple[str, list[tuple[str, Info]]]]:
    """Yield the name of each shard, and the size and checksums of each of its files."""
    found = manifest.list_named(manifests.PIECES)
    pieces = None if found is None or manifest.checksum == WHOLE else PieceList(folder / found.name)
    first = 0
    for shard in manifest.shards:
        files = []
        for file in shard.files:
            number, known = listed(file.bytes), None
            if pieces is not None or not number:
                known = FilePieces(file.bytes, file.checksum, pieces if number else None, first)
            files.append((file.name, Info(file.bytes, checksum=file.checksum, pieces=known)))
            first += number
        yield shard.file.name, files


def _in_manifest(top: Path, path: Path) -> Dataset | None:
    """Open a shard, which may be a folder, of the dataset at `top`, if its manifest names it."""
    manifest = manifests.load_any(top) if manifests.has_manifest(top) else None
    if isinstance(manifest, Manifest):
        inside = FORMATS[manifest.format].inside
        for shard in manifest.shards:
            if top / shard.file.name.removesuffix(inside) == path or top / shard.file.name == path:
                return _described(manifest, manifests.manifest_path(top), [shard])
    return None


def _open_file(path: Path) -> Dataset:
    if manifests.has_manifest(path):
        return open_described(path)
    folder, format = path.parent, format_of(path)
    # A shard may be a folder itself, or be in one.
    inside = any(f"/{path.name}" == declared.inside for declared in FORMATS.values())
    below = format is not None and FORMATS[format].below == folder.name
    if (described := _in_manifest(folder.parent if inside or below else folder, path)) is not None:
        return described
    listing, names = listed_shards(folder) or (None, [])
    format = listing if path.name in names else format
    if format is None or (format != listing and kind_of_file(path) is not None):
        raise unknown_format(path)
    return _third_party(folder, [path.name], format)


# --- copies that lack their manifest --------------------------------------------------------------

_OURS = (".index.npy", ".keys", manifests.KEYS)  # earlier versions wrote them beside the shards


def without_manifest(path: Path, datasets: Collection[Dataset]) -> DamagedError | None:
    """The error for shards that shardkit wrote, but whose manifest is missing; otherwise None.

    An interrupted copy looks like this, and other shards may be missing as well. A shard that is
    given by itself may have been copied on purpose, unless it has other shardkit files beside it.
    """
    found = [(dataset.ours, _without_manifest(dataset)) for dataset in datasets]
    bare = {top: ours for ours, tops in found for top in tops}
    alone = path in bare or not path.is_dir()
    stems = tuple(top.name.partition(".")[0] + "." for top in bare)
    traces: list[str] = []
    for folder in sorted({*(top.parent for top in bare), *(() if alone else [path])}):
        if isinstance(folder, RemotePath) and not folder.store.lists:
            continue
        own = folder / manifests.FOLDER
        with os_errors.explained("list", folder):
            inside = sorted(path.name for path in own.iterdir()) if own.is_dir() else []
            beside = sorted(path.name for path in folder.iterdir() if path.name.endswith(_OURS))
        if own.is_dir() and not alone and not any(name.endswith(manifests.NAME) for name in inside):
            traces.append(str(own))
        traces += [str(own / name) for name in inside if name.startswith(stems)]
        traces += [str(folder / name) for name in beside if name.startswith(stems)]
    if not alone:
        traces += [f"the metadata of {top}" for top, ours in bare.items() if ours]
    if not traces:
        return None
    return DamagedError(
        "the dataset is incomplete: its manifest is missing",
        path=manifests.manifest_path(path),
        expected="a manifest beside what shardkit wrote",
        found=traces[0],
        fix=f"{AGAIN}; a shard is checked by itself, without checksums, if you give its path",
    )


def _without_manifest(dataset: Dataset) -> list[Path]:
    """Return the shards of a dataset that has no manifest: files, or folders for LMDB."""
    if dataset.manifest is not None:
        return []
    inside = FORMATS[dataset.format].inside[1:]
    shards = [dataset.shard_path(number) for number in range(dataset.shards)]
    tops = [shard.parent if shard.name == inside else shard for shard in shards]
    described = set(manifests.with_own(tops))
    return [top for top in tops if top not in described]
