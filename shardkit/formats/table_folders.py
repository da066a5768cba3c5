"""Recognizes folders in which the files alone are not the table: logs, chunks and partitions.

Tables of Delta Lake, Iceberg and Hudi keep files whose rows were removed, Zarr stores arrays in
chunks, and the folders of a partitioned table hold columns in their names.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from shardkit.errors import ShardkitError, UsageError
from shardkit.formats.unsupported import Kind, not_read
from shardkit.storage.remote.path import RemotePath

_LOG = "whose log says which rows of its files still count"
_AS_FILES = "to take the files as they are, copy them to a folder without the log"
DELTA = Kind(
    f"a Delta Lake table, {_LOG}",
    "write its rows to one file: import deltalake, pyarrow.parquet; pyarrow.parquet.write_table("
    f"deltalake.DeltaTable(FOLDER).to_pyarrow_table(), 'table.parquet'); {_AS_FILES}",
)
ICEBERG = Kind(
    f"an Apache Iceberg table, {_LOG}",
    f"write its rows to one Parquet file with pyiceberg; {_AS_FILES}",
)
HUDI = Kind(f"an Apache Hudi table, {_LOG}", f"write its rows as Parquet with Spark; {_AS_FILES}")
ZARR = Kind(
    "a Zarr store, which holds arrays in chunks",
    "save its arrays with numpy.savez, with samples as the first dimension, and convert that file",
)
PETASTORM = Kind(
    "a dataset of Petastorm, which encodes the values of its Parquet files",
    "read it with petastorm.make_reader, and write its samples with shardkit.create",
)
_TABLES = ("parquet", "arrow", "csv", "json", "tsv")  # formats that others divide into partitions
_PARTITION = re.compile(r"([^\W\d][^=]*)=.*")
_MISSING = "__HIVE_DEFAULT_PARTITION__"  # the value of rows that have none
_FURTHER = ("data",)  # a folder of Iceberg that holds the files, below the table's own
# Files and folders that are only in a table of such a kind.
_MARKS = {"_delta_log": DELTA, ".hoodie": HUDI}
_MARKS |= dict.fromkeys(("zarr.json", ".zgroup", ".zarray"), ZARR)
_SEEN = (*_MARKS, "metadata", "_common_metadata")
_PETASTORM = b"dataset-toolkit.unischema"


def refuse_table(
    folder: Path, names: Collection[str], folders: Collection[str], *, top: bool
) -> None:
    """Raise FormatError if a folder, with these files and subfolders, is such a table.

    Hidden entries are looked for at the `top` of the source, and beside Parquet files.
    """
    there = {*names, *folders}
    if top or any(name.endswith(".parquet") for name in names):
        there |= _there(folder, [mark for mark in _MARKS if mark[0] == "."])
    kind = next((kind for mark, kind in _MARKS.items() if mark in there), None)
    if kind is None and "metadata" in folders and _is_iceberg(folder):
        kind = ICEBERG
    if kind is None and "_common_metadata" in names and _is_petastorm(folder):
        kind = PETASTORM
    if kind is not None:
        raise not_read(kind, folder)


def refuse_files_of_table(folders: Iterable[Path]) -> None:
    """The same for folders of Parquet files that were given by name: the table may be above."""
    for folder in dict.fromkeys(folders):
        if isinstance(folder, RemotePath) and not folder.store.lists:
            continue
        for above in (folder, *folder.parents):
            with contextlib.suppress(OSError):
                there = _there(above, _SEEN)
                refuse_table(above, there, there, top=True)
            if not (_PARTITION.fullmatch(above.name) or above.name in _FURTHER):
                break


def partitions(folder: str | PurePosixPath | Path) -> dict[str, str]:
    """The columns that the last parts of a path name, and their values: `label=cat/day=1`."""
    found: dict[str, str] = {}
    path = PurePosixPath(str(folder))
    while (match := _PARTITION.fullmatch(path.name)) and match[1] not in found:
        found[match[1]] = path.name.partition("=")[2]
        path = path.parent
    return found


def partition_values(folder: str) -> dict[str, str | None]:
    """The columns that the folders of a relative path name, and their values: `label=cat/day=1`."""
    parts = [part.partition("=") for part in folder.split("/") if _PARTITION.fullmatch(part)]
    return {unquote(n): None if text == _MISSING else unquote(text) for n, _, text in parts}


def without_partitions(folder: str) -> str:
    """Return a relative path without the folders that name columns."""
    return "/".join(part for part in folder.split("/") if not _PARTITION.fullmatch(part))


def partition_columns(
    root: Path, folders: Sequence[str], format: str
) -> dict[str, list[str | None]]:
    """Return the columns that the folders of files name, and the value of each folder.

    Raises UsageError if they do not name the same columns: rows would lack values.
    """
    found = [partition_values(folder) for folder in folders] if format in _TABLES else []
    for folder, values in zip(folders, found, strict=False):
        if values.keys() != found[0].keys():
            raise UsageError(
                "the folders of the table do not name the same columns",
                path=root,
                expected=f"{', '.join(found[0]) or 'no column'}, as in {folders[0] or '.'!r}",
                found=f"{', '.join(values) or 'no column'} in {folder or '.'!r}",
                fix="convert folders with the same columns, or move the other files away",
            )
    return {name: [values[name] for values in found] for name in (found[0] if found else ())}


def partitioned(root: Path, column: str) -> UsageError:
    """Return the error for reading a table without a column that its folders name."""
    return UsageError(
        f"this is a partitioned table: the column {column!r} is in the names of its folders, not in"
        " its files",
        path=root,
        fix=f"convert it, which makes a field of the column: shardkit convert {root} --to parquet",
    )


def _there(folder: Path, names: Collection[str]) -> set[str]:
    """Return those of these names that a folder has; one request for a folder in a store."""
    if isinstance(folder, RemotePath):
        return {entry.name for entry in folder.scandir()} & {*names}
    return {name for name in names if (folder / name).exists()}


def _is_iceberg(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(path.name.endswith(".metadata.json") for path in (folder / "metadata").iterdir())
    return False


def _is_petastorm(folder: Path) -> bool:
    with contextlib.suppress(OSError, ShardkitError):
        return _PETASTORM in (folder / "_common_metadata").read_bytes()
    return False
