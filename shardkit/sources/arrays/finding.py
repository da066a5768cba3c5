"""Find out which array format a path has, and open its sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardkit.codecs.media import ARRAYS
from shardkit.dataset.folders import Contents
from shardkit.errors import ShardkitError, SourceError, UsageError
from shardkit.formats.unsupported import CIFAR, HDF5, MNIST, NPZ, Kind, kind_of_file
from shardkit.helpers import os_errors
from shardkit.metadata.splits import in_order, split_of
from shardkit.sources.arrays import binary, npy
from shardkit.sources.arrays.rows import ArraySource, Column, Found
from shardkit.sources.base import Source
from shardkit.sources.candidate import Candidate, Splits, refuse_metadata
from shardkit.storage import fs
from shardkit.storage.walk import is_folder, scandir
from shardkit.storage.walk import kind_of_file as in_words

_MOST_ROWS = 1 << 23  # allowed for small files
_TEXTS = 20  # text files that may accompany arrays, to describe them


def recognise(candidate: Candidate) -> Splits | None:
    """A file or folder of arrays. Raises UsageError if it is not clear what a sample is."""
    path, recipe = candidate.path, candidate.recipe
    found = candidate.contents if candidate.is_folder else None
    told = _of_file(path) if found is None else _of_folder(path, found)
    if told is None:
        return None
    classes = None if isinstance(recipe.classes, Mapping) else recipe.classes
    if not candidate.strict or recipe.label_column is not None:
        classes = None
    if candidate.together and len(told.splits) > 1:
        raise UsageError(
            "arrays of several splits cannot be merged into one",
            path=path,
            found=", ".join(told.splits),
            fix="remove --split none, and convert the results together",
        )
    whole = len(told.splits) == 1
    sources: dict[str, Source] = {}
    for name in in_order(told.splits):
        _check_rows(path, told.splits[name])
        source = ArraySource(path, told.splits[name])
        source.others = _others(told.others.get(name, {}))
        source.class_names = _named(path, source, told.class_names, classes)
        sources["" if whole else name] = source
    first = next(iter(sources.values()))
    first.ignored = dict(told.ignored)
    first.notes = told.notes
    if found is not None:
        rest = Counter(found.ignored)
        rest.subtract(in_words(name.rpartition("/")[2]) for name in told.files)
        first.ignored.update({words: n for words, n in rest.items() if n > 0})
    refuse_metadata(recipe, path)
    return candidate.labelled(sources)


def _check_rows(path: Path, columns: Mapping[str, Column]) -> None:
    """Raise SourceError if there are more rows than files of this size can hold."""
    every = {file for column in columns.values() for file in column.files}
    size = sum(fs.status(file).st_size for file in every)
    rows = max(map(len, columns.values()))
    if rows > max(8 * size, _MOST_ROWS):
        raise SourceError(
            "the arrays have more rows than their files can hold",
            path=path,
            expected=f"at most 8 per byte, of {size:,} bytes",
            found=f"{rows:,}",
            fix="the files are damaged or hold no data: create them again",
        )


def _others(errors: Mapping[str, ShardkitError]) -> dict[str, ShardkitError | None]:
    return dict(errors)


def _named(
    path: Path,
    source: ArraySource,
    found: Mapping[str, tuple[str, ...]],
    classes: Sequence[str] | None,
) -> dict[str, tuple[str, ...]]:
    """Return the class names: those of the files, or those given by the user."""
    if classes is None:
        return source.names_in(source.schema, {}) | {
            field: names for field, names in found.items() if field in source.schema
        }
    if "label" not in source.schema:
        raise UsageError(
            "class names were given, but there is no field 'label'",
            path=path,
            found=", ".join(source.schema),
            fix="remove --classes, or name the field of the labels: --label-column NAME",
        )
    return {**found, "label": tuple(classes)}


def _of_file(path: Path) -> Found | None:
    if path.name.lower().endswith(".npy"):
        return npy.find_npy(path)
    kind = kind_of_file(path)
    if kind == MNIST:
        column = binary.read_idx("image", path)
        return Found({"": {"image": column}}, [path.name])
    if kind == CIFAR:
        return binary.find_cifar(path.parent, [path.name])
    return _FINDERS[kind](path, [""]) if kind in (NPZ, HDF5) else None


def _of_folder(root: Path, found: Contents) -> Found | None:
    media = sum(found.media.values())
    if found.shards:
        return None
    if found.media[ARRAYS] and found.media[ARRAYS] == media:
        return _columns(root, media)
    kind = next((kind for kind in _FINDERS if kind in found.foreign), None)
    if kind is None or media or len(found.foreign) > 1:
        return None
    names = found.foreign[kind]
    if found.text_files > max(_TEXTS, len(names)):
        return None
    return _FINDERS[kind](root, names)


def _columns(root: Path, count: int) -> Found | None:
    """Return the few arrays in a folder if they are the fields of the same samples."""
    with os_errors.explained("list", root), scandir(root) as entries:
        names = sorted(
            e.name for e in entries if e.name.lower().endswith(".npy") and not is_folder(e)
        )
    if len(names) != count or not npy.are_columns(root, names):
        return None
    note = f"{', '.join(names)} are the fields of the same samples: their lengths match"
    return npy.find_columns(root, names)._replace(notes=(note,))


def _each(find: Callable[[Path], Found]) -> Callable[[Path, Sequence[str]], Found]:
    """Extend `find` to several files that are the splits of a dataset by their names."""

    def found(root: Path, names: Sequence[str]) -> Found:
        paths = {name: root / name if name else root for name in names}
        if len(paths) == 1:
            return find(*paths.values())
        splits: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for path in paths.values():
            split = split_of(path.name)
            one = find(path)
            if split is None or split in splits or list(one.splits) != [""]:
                raise UsageError(
                    "the folder contains several files of arrays",
                    path=root,
                    found=", ".join(sorted(names)[:5]),
                    expected="one, or files named after splits: train.npz, test.npz",
                    fix="give one of them, or several as sources: shardkit convert A B --to ...",
                )
            splits[split], others[split] = one.splits[""], one.others.get("", {})
        return Found(splits, names, others=others)

    return found


def _hdf5(path: Path) -> Found:
    from shardkit.sources.arrays.hdf5 import find_hdf5

    return find_hdf5(path)


_FINDERS: dict[Kind, Callable[[Path, Sequence[str]], Found]] = {
    MNIST: binary.find_idx,
    CIFAR: binary.find_cifar,
    NPZ: _each(npy.find_npz),
    HDF5: _each(_hdf5),
}
