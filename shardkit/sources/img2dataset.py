"""Reads the files that img2dataset writes beside its images: a table and statistics per part.

The table of a part has a row for each URL, including failed ones, with the same columns as the JSON
of each sample. Columns that are only in the table (added later, or because the JSON was removed)
are joined with the samples by key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from shardkit.dataset.dataset import Dataset
from shardkit.dataset.folders import media_of
from shardkit.errors import ShardkitError, SourceError
from shardkit.formats import get_format
from shardkit.helpers import os_errors
from shardkit.helpers.extras import extra
from shardkit.sample import Sample
from shardkit.schema import Schema
from shardkit.sources.base import Indices, Source, SourceWrapper
from shardkit.sources.candidate import Candidate, Splits
from shardkit.sources.columns import Metadata
from shardkit.sources.dataset import DatasetSource
from shardkit.sources.file_table import FileTable
from shardkit.sources.folder_scan import checked, scan_splits
from shardkit.sources.metadata import add_columns, join
from shardkit.sources.tables import Table
from shardkit.storage import fs
from shardkit.storage.walk import scandir

FAILED = "failed downloads of img2dataset"
_STATS = re.compile(r"(\d+)_stats\.json")
_KEY, _STATUS = "key", "status"
_MAX_BYTES = 1 << 20  # maximum size of a statistics file


def of_shards(root: Path, dataset: Dataset) -> Source:
    """The samples of shards without a manifest, with the tables of img2dataset if it wrote them."""
    source, parts = DatasetSource(dataset), _parts_in(root)
    if not parts:
        return source
    there = {dataset.shard_name(n).partition(".")[0] for n in range(dataset.shards)}
    missing = [part for part in parts if part not in there]
    if missing:
        raise SourceError(
            "a shard of img2dataset is missing: there are only its statistics",
            path=root / f"{missing[0]}_stats.json",
            expected=f"{len(parts):,} shards",
            found=f"{len(parts) - len(missing):,}, without {', '.join(missing[:5])}",
            fix="get the others, or remove the statistics of those that are not wanted",
        )
    if dataset.format != "parquet":
        return _with_tables(root, parts, source, dataset.keys)
    if not {_KEY, _STATUS} <= source.schema.keys():
        return source
    got = np.array([status == "success" for status in dataset.column(_STATUS)], np.bool_)
    found = source.select(np.flatnonzero(got))
    found.notes, found.ignored = source.notes, source.ignored
    if not got.all():
        found.ignored[FAILED] = int(np.count_nonzero(~got))
    return found


def recognise(candidate: Candidate) -> Splits | None:
    """Return a folder of images in folders named after the parts."""
    parts = _parts_in(candidate.path) if candidate.is_folder else []
    media = media_of(candidate.contents) if parts else None
    if media is None:
        return None
    sources = scan_splits(candidate, media)
    return checked(candidate, {n: _of_files(candidate.path, parts, s) for n, s in sources.items()})


def _of_files(root: Path, parts: Sequence[str], source: Source) -> Source:
    every = range(len(source))
    return _with_tables(
        root, parts, source, lambda: [(source.key(n) or "").rpartition("/")[2] for n in every]
    )


def _parts_in(root: Path) -> list[str]:
    """Return the names of the parts that img2dataset wrote to a folder: those with statistics."""
    if not root.is_dir():
        return []
    with os_errors.explained("list", root), scandir(root) as entries:
        return sorted(match[1] for entry in entries if (match := _STATS.fullmatch(entry.name)))


def _with_tables(
    root: Path, parts: Sequence[str], source: Source, keys: Callable[[], Sequence[str]]
) -> Source:
    """Return a source with the columns that only the tables have; counts failed downloads."""
    failed = sum(_failed(root / f"{part}_stats.json") for part in parts)
    if failed:
        source.ignored[FAILED] = failed
    paths = [path for part in parts if (path := root / f"{part}.parquet").is_file()]
    new = _new_columns(paths[0], source) if paths and len(source) else []
    if not new:
        return source
    table = Table()
    for path in paths:
        table.read(path, _KEY, only=new)
    names = keys()
    files = FileTable(folders=[""], names=names, folder_of=np.zeros(len(names), np.uint32))
    (joined,) = join(table, [("", files)])
    found = WithColumns(source, joined.metadata)
    found.notes = (*found.notes, f"columns from the tables beside the images: {', '.join(new)}")
    return found


def _failed(path: Path) -> int:
    """Return the number of failed downloads of a part."""
    try:
        stats = json.loads(fs.read(path, _MAX_BYTES))
        return max(int(stats["count"]) - int(stats["successes"]), 0)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):  # by another tool
        return 0


def _new_columns(path: Path, source: Source) -> list[str]:
    """Return the columns of a table that are neither fields of a source nor in its JSON."""
    known = {_KEY, *source.schema}
    try:
        text = source[0].get("json")
        known |= json.loads(text).keys() if isinstance(text, str) else set()
    except (ShardkitError, ValueError, AttributeError, RecursionError):
        pass  # the conversion will meet and report the error
    with extra("arrow", f"reading {path.name}"):
        reader = get_format("parquet").open(path)
    try:
        return [name for name in reader.schema if name not in known and _KEY in reader.schema]
    finally:
        reader.close()


class WithColumns(SourceWrapper):
    """A source with additional columns from a table."""

    def __init__(self, source: Source, metadata: Metadata) -> None:
        super().__init__(source)
        self._metadata = metadata
        fields = dict(source.schema)
        add_columns(fields, metadata)
        self.schema = Schema(fields)
        self.others = {**source.others, **metadata.unusable}

    def __getitem__(self, index: int) -> Sample:
        sample = self._whole[index]
        row = self._metadata.row(index)
        sample.update({name: value for name, value in row.items() if name in self.schema})
        return sample

    def select(self, indices: Indices) -> WithColumns:
        found = self._around(self._whole.select(indices))
        found._metadata = self._metadata.select(indices)
        return found

    def fingerprint(self) -> dict[str, str] | None:
        found = super().fingerprint()
        if found is None:
            return None
        digest = xxhash.xxh3_128(found["files"].encode() + self._metadata.fingerprint())
        return {**found, "files": digest.hexdigest()}
