"""HDF5, read with h5py: datasets of equal length are fields; groups may be splits, by name."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.codecs.media import guess
from shardkit.errors import FormatError, ShardkitError, SourceError, UsageError
from shardkit.helpers.extras import extra
from shardkit.metadata.splits import KINDS
from shardkit.schema import Array, Bytes, FieldType, Text
from shardkit.sources.arrays.rows import Column, Found, kind_of, single, unusable
from shardkit.storage import fs
from shardkit.storage.remote.path import RemotePath

_CACHE = 64 << 20  # bytes of unpacked chunks that are cached per dataset
_MAX_DATASETS = 4096  # datasets in a file


def _h5py() -> Any:
    with extra("hdf5", "reading HDF5"):
        import h5py

    return h5py


_reading = threading.Lock()  # not all builds of the HDF5 library lock by themselves


@dataclass(frozen=True)
class Stored:
    """One dataset of a file."""

    path: Path
    dataset: str
    kind: FieldType
    row_bytes: int
    count: int

    @property
    def files(self) -> Sequence[Path]:
        return (self.path,)

    def __len__(self) -> int:
        return self.count

    @cached_property
    def _opened(self) -> tuple[Any, Any]:
        """The file, which stays open as long as it is referenced here, and the dataset."""
        file = _h5py().File(self.path, "r", rdcc_nbytes=_CACHE)
        return file, file[self.dataset]

    def __getstate__(self) -> dict[str, Any]:  # each process opens the file itself
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    def row(self, index: int) -> Any:
        with _reading:
            value = self._opened[1][index]
        return _value(self.kind, value)


def _value(kind: FieldType, value: Any) -> Any:
    if isinstance(kind, Text):
        return value.decode() if isinstance(value, bytes) else str(value)
    if isinstance(kind, Array):
        return np.array(value, kind.dtype)
    if isinstance(kind, Bytes):  # including encoded files
        return value.tobytes() if isinstance(value, np.ndarray) else bytes(value)
    return single(np.asarray(value))


def find_hdf5(path: Path) -> Found:
    """Return the datasets of a file; raises UsageError if it is not clear what a sample is."""
    if isinstance(path, RemotePath):
        raise UsageError(
            "HDF5 cannot be read from a URL", path=path, fix="copy the file to this machine first"
        )
    h5py = _h5py()
    try:
        with _reading, h5py.File(path, "r") as file:
            found: dict[str, Any] = {}
            _collect(h5py, path, file, "", found)
            columns = {n: _column(h5py, path, n, found[n]) for n in found}
            names = _class_names(h5py, found)
    except (OSError, RuntimeError, KeyError) as error:
        raise SourceError(
            "the HDF5 file cannot be read",
            path=path,
            found=str(error),
            fix="copy it again; if another program is writing it, wait until it has closed it",
        ) from error
    if not columns:
        raise SourceError("the HDF5 file has no datasets", path=path)
    groups = {name.partition("/")[0] for name in columns if "/" in name}
    if len(groups) > 1 and not groups & KINDS.keys() and all("/" in name for name in columns):
        raise UsageError(
            "the file has a group for each sample, or several datasets",
            path=path,
            found=f"{len(groups):,} groups such as {min(groups)!r}",
            expected="datasets whose first dimension is that of the samples; or groups train, test",
            fix="read the file with h5py, and write its samples with shardkit.create",
        )
    return Found(
        {_flat(name): column for name, column in columns.items()},
        [path.name],
        {_flat(name): values for name, values in names.items()},
    )


def _flat(name: str) -> str:
    """Return the field name of a dataset in groups: `train_images` for `train/images`, a split."""
    first, slash, rest = name.partition("/")
    if slash and first.lower() in KINDS:
        return f"{first}_{rest.replace('/', '.')}"
    return name.replace("/", ".")


def _collect(h5py: Any, path: Path, group: Any, prefix: str, found: dict[str, Any]) -> None:
    """Collect all datasets by path. Soft and external links are refused: they may leave a file."""
    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise SourceError(
                "the HDF5 file has a link, which may lead to another file",
                path=path,
                field=prefix + name,
                fix="copy it into one file: h5repack, or h5py's copy(expand_external=True)",
            )
        item = group[name]
        if isinstance(item, h5py.Dataset):
            found[prefix + name] = item
        elif isinstance(item, h5py.Group) and prefix.count("/") < 8:
            _collect(h5py, path, item, f"{prefix}{name}/", found)
        if len(found) > _MAX_DATASETS:
            raise SourceError("the HDF5 file contains too many datasets", path=path)


def _column(h5py: Any, path: Path, name: str, dataset: Any) -> Column | ShardkitError:
    """Return a dataset as a column, or the error that says why it cannot be a field."""
    try:
        kind, row_bytes = _kind(h5py, path, name, dataset)
    except FormatError as error:
        return error
    return Stored(path, name, kind, row_bytes, dataset.shape[0])


def _kind(h5py: Any, path: Path, name: str, dataset: Any) -> tuple[FieldType, int]:
    """Return the field type of a dataset, and the bytes per row. Raises FormatError."""
    if dataset.is_virtual or dataset.external:
        raise unusable(name, "data in other files")
    if not dataset.shape:
        raise unusable(name, "a single value")
    inner, dtype = dataset.shape[1:], dataset.dtype
    row_bytes = int(np.prod(inner, dtype=object)) * max(dtype.itemsize, 1)
    try:  # HDF5 returns fill values where nothing is stored
        fs.check_expansion(row_bytes, fs.status(path).st_size)
    except ValueError as error:
        raise unusable(name, str(error)) from error
    if h5py.check_string_dtype(dtype) is not None:
        if inner:
            raise unusable(name, "arrays of text")
        return Text(), row_bytes
    ragged = h5py.check_vlen_dtype(dtype)
    if ragged is not None and not inner and np.dtype(ragged).kind in "iufb":
        is_bytes = len(dataset) and np.dtype(ragged) == np.uint8
        encoded = guess(bytes(dataset[0][:64])) if is_bytes else None
        return encoded() if encoded else Array(np.dtype(ragged).str, (None,)), row_bytes
    if dtype.hasobject or h5py.check_ref_dtype(dtype) is not None:
        raise unusable(name, "references" if h5py.check_ref_dtype(dtype) else f"{dtype}")
    try:
        kind, _ = kind_of(_flat(name).rpartition("_")[2], dtype, inner)
    except FormatError as error:
        raise unusable(name, f"{dtype}") from error
    return kind, row_bytes


def _class_names(h5py: Any, found: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the value names of enumerations that count from zero."""
    named = {}
    for name, dataset in found.items():
        values = h5py.check_enum_dtype(dataset.dtype) or {}
        ordered = sorted(values, key=lambda word: int(values[word]))
        if ordered and [values[word] for word in ordered] == list(range(len(ordered))):
            named[name] = tuple(ordered)
    return named
