"""Find out which array format a path has, and open its sources."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shardkit.codecs.array import npy_header
from shardkit.codecs.media import ARCHIVES, ARRAYS
from shardkit.dataset.folders import Contents
from shardkit.errors import ShardkitError, SourceError, UsageError
from shardkit.formats.unsupported import CIFAR, HDF5, MNIST, NPZ, Kind, kind_of_file
from shardkit.helpers import os_errors
from shardkit.metadata.splits import in_order, split_of
from shardkit.schema import Array, Schema
from shardkit.sources.arrays import binary, npy
from shardkit.sources.arrays.hdf5 import find_hdf5
from shardkit.sources.arrays.rows import LABELS, ArraySource, Column, FileSpan, Found, split_in
from shardkit.sources.base import Source
from shardkit.sources.candidate import Candidate, Splits, refuse_metadata
from shardkit.sources.labels import LABEL
from shardkit.storage import fs
from shardkit.storage.walk import is_folder, scandir
from shardkit.storage.walk import kind_of_file as in_words

_MAX_ROWS = 1 << 23  # allowed for small files
_NEAR = 10  # values from which on an array of nearly the length of the others is one of them
_MAX_FIELDS = 16  # `.npy` files in a folder that may be fields of the same samples
_TEXTS = 20  # text files that may accompany arrays, to describe them


def recognise(candidate: Candidate) -> Splits | None:
    """Return a file or folder of arrays. Raises UsageError if it is not clear what a sample is."""
    path, recipe = candidate.path, candidate.recipe
    found = candidate.contents if candidate.is_folder else None
    if found is not None and _are_samples(path, found):
        found.media[ARCHIVES] = len(found.unsupported.pop(NPZ))
        return None  # `folder_scan` takes them
    told = _of_file(path) if found is None else _of_folder(path, found)
    if told is None:
        return None
    refuse_metadata(recipe, path)
    splits, others, short = _by_split(path, told.arrays)
    if candidate.together and len(splits) > 1:
        raise UsageError(
            "arrays of several splits cannot be merged into one",
            path=path,
            found=", ".join(splits),
            fix="remove --split none, and convert the results together",
        )
    own = candidate.strict and recipe.label_column is None
    classes = recipe.classes if own and not isinstance(recipe.classes, Mapping) else None
    sources: dict[str, Source] = {}
    for name in in_order(splits):
        _check_rows(path, splits[name])
        source = ArraySource(path, splits[name])
        source.others = {**others[name]}
        source.class_names = _named(source.schema, told.class_names, classes, path)
        sources["" if len(splits) == 1 else name] = source
    first = next(iter(sources.values()))
    first.ignored = {**told.ignored, **short}
    first.notes = told.notes
    if found is not None:
        rest = Counter(found.ignored)
        rest.subtract(in_words(name.rpartition("/")[2]) for name in told.files)
        first.ignored.update({words: n for words, n in rest.items() if n > 0})
    return candidate.labelled(sources)


def _check_rows(path: Path, columns: Mapping[str, Column]) -> None:
    """Raise SourceError if there are more rows than files of this size can hold."""
    every = {file for column in columns.values() for file in column.files}
    size = sum(fs.status(file).st_size for file in every)
    rows = max(map(len, columns.values()))
    if rows > max(8 * size, _MAX_ROWS):
        raise SourceError(
            "the arrays have more rows than their files can hold",
            path=path,
            expected=f"at most 8 per byte, of {size:,} bytes",
            found=f"{rows:,}",
            fix="the files are damaged or hold no data: create them again",
        )


def _named(
    schema: Schema, found: Mapping[str, tuple[str, ...]], classes: Sequence[str] | None, path: Path
) -> dict[str, tuple[str, ...]]:
    """Return the class names: those of the files, or those given by the user."""
    if classes is None:
        return {field: names for field, names in found.items() if field in schema}
    if LABEL not in schema:
        raise UsageError(
            f"class names were given, but there is no field {LABEL!r}",
            path=path,
            found=", ".join(schema),
            fix="remove --classes, or name the field of the labels: --label-column NAME",
        )
    return {**found, LABEL: tuple(classes)}


# --- the formats ---------------------------------------------------------------------------------


def _of_file(path: Path) -> Found | None:
    if path.name.lower().endswith(".npy"):
        found = npy.find_npy(path.parent, [path.name])
        return found._replace(arrays={"array": next(iter(found.arrays.values()))})
    kind = kind_of_file(path)
    if kind == MNIST:
        return Found({"image": binary.read_idx("image", path)}, [path.name])
    if kind == CIFAR:
        return binary.find_cifar(path.parent, [path.name])
    return _OF_FILE[kind](path) if kind in _OF_FILE else None


def _of_folder(root: Path, found: Contents) -> Found | None:
    media = sum(found.media.values())
    if found.shards:
        return None
    if found.media[ARRAYS] and found.media[ARRAYS] == media:
        return _columns(root, media)
    if media or len(found.unsupported) != 1:
        return None
    ((kind, names),) = found.unsupported.items()
    if found.text_files > max(_TEXTS, len(names)):
        return None
    if kind in (MNIST, CIFAR):
        return binary.find_idx(root, names) if kind == MNIST else binary.find_cifar(root, names)
    return _of_files(root, names, _OF_FILE[kind]) if kind in _OF_FILE else None


def _are_samples(root: Path, found: Contents) -> bool:
    """Return whether a folder has several `.npz` files, each a sample, judging by one of them.

    They are not if they are named after splits, or if a value for each row, such as a label, is
    beside rows.
    """
    names = found.unsupported.get(NPZ, [])
    others = len(found.unsupported) > 1 or found.media or found.shards
    if len(names) < 2 or others or found.text_files > max(_TEXTS, len(names)):
        return False
    if all(split_of(name.rpartition("/")[2]) for name in names):
        return False
    arrays = npy.find_npz(root / min(names)).arrays.values()
    rows = [array for array in arrays if not isinstance(array, ShardkitError)]
    values = {len(each) for each in rows if not isinstance(each.kind, Array)}
    return not any(isinstance(each.kind, Array) and len(each) in values for each in rows)


def _columns(root: Path, count: int) -> Found | None:
    """Return the few arrays in a folder if they are the fields of the same samples.

    They are if they have one length and different shapes or types, or are named after splits.
    """
    with os_errors.explained("list", root), scandir(root) as entries:
        names = sorted(
            e.name for e in entries if e.name.lower().endswith(".npy") and not is_folder(e)
        )
    if len(names) != count or not 2 <= len(names) <= _MAX_FIELDS:
        return None
    lengths: dict[str, set[int]] = defaultdict(set)
    kinds = set()
    for name in names:
        with os_errors.explained("open", root / name):
            source = FileSpan(root / name).open()
            header = npy_header(source.read(0, min(npy.HEAD, source.size)))
        if header is None or not header.shape:
            return None
        lengths[split_in(name[:-4])[0]].add(header.shape[0])
        kinds.add((header.shape[1:], header.descr))
    if any(len(each) > 1 for each in lengths.values()) or (len(kinds) == 1 and "" in lengths):
        return None
    note = f"{', '.join(names)} are the fields of the same samples: their lengths match"
    return npy.find_npy(root, names)._replace(notes=(note,))


def _of_files(root: Path, names: Sequence[str], find: Callable[[Path], Found]) -> Found:
    """Return the arrays of a file, or of several files that are named after splits."""
    if len(names) == 1:
        return find(root / names[0])
    arrays: dict[str, Column | ShardkitError] = {}
    splits: list[str | None] = [None]
    ignored: Counter[str] = Counter()
    for name in names:
        found, split = find(root / name), split_of(name.rpartition("/")[2])
        if split in splits or any(split_in(field)[0] for field in found.arrays):
            raise UsageError(
                "the folder contains several files of arrays",
                path=root,
                found=", ".join(sorted(names)[:5]),
                expected="one, or files named after splits: train.npz, test.npz",
                fix="give one of them, or several as sources: shardkit convert A B --to ...",
            )
        splits.append(split)
        arrays.update({f"{split}_{field}": array for field, array in found.arrays.items()})
        ignored.update(found.ignored)
    return Found(arrays, names, ignored=ignored)


_OF_FILE: dict[Kind | None, Callable[[Path], Found]] = {NPZ: npy.find_npz, HDF5: find_hdf5}


# --- splits and lengths --------------------------------------------------------------------------


def _by_split(
    path: Path, arrays: Mapping[str, Column | ShardkitError]
) -> tuple[dict[str, dict[str, Column]], dict[str, dict[str, ShardkitError]], Counter[str]]:
    """Return the fields of each split, the arrays that cannot be fields, and what was ignored.

    The fields are the longest arrays, which have one common length. Raises UsageError if it is not
    clear which arrays belong together.
    """
    groups: dict[str, dict[str, Column]] = defaultdict(dict)
    others: dict[str, dict[str, ShardkitError]] = defaultdict(dict)
    split = any(split_in(name)[0] for name in arrays)
    for name, array in arrays.items():
        group, field = split_in(name) if split else ("", name)
        if isinstance(array, ShardkitError):
            others[group][field] = array
        else:
            groups[group][field] = array
    alone = groups.pop("", {}) if split and groups.keys() - {""} else {}
    ignored = Counter({f"array {name!r}, which belongs to no split": 1 for name in alone})
    if not groups:
        for errors in others.values():
            raise next(iter(errors.values())).located(path=path)
        raise SourceError("there are no arrays", path=path)
    for columns in groups.values():
        for name in _short(path, columns):
            del columns[name]
            ignored[f"array {name!r} of another length"] += 1
    return groups, others, ignored


def _short(path: Path, columns: Mapping[str, Column]) -> list[str]:
    """Return the names of the arrays that are not the longest, no two of which are equally long."""
    lengths = Counter(len(column) for column in columns.values())
    longest = max(lengths)
    if any(count > 1 for length, count in lengths.items() if length != longest):
        found = ", ".join(f"{name!r} of {len(column):,}" for name, column in columns.items())
        raise UsageError(
            "the arrays have several lengths, so it is not clear what a sample is",
            path=path,
            expected="one length for all samples; or names such as train_images, test_images",
            found=found,
            fix="save the arrays that belong together in separate files",
        )
    short = [name for name, column in columns.items() if len(column) < longest]
    for name in short:
        # A few values may be names of classes or means of channels.
        near = len(columns[name]) >= _NEAR and 2 * len(columns[name]) > longest
        if near or name.lower() in LABELS:
            raise UsageError(
                f"the array {name!r} is not as long as the others",
                path=path,
                expected=f"{longest:,} values",
                found=f"{len(columns[name]):,}",
                fix="save it with one value per sample, or in a file of its own if it is not part"
                " of the samples",
            )
    return short
