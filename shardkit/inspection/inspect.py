"""Describes a dataset or a shard, from its manifest, tables and headers, or from all samples."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.dataset.dataset import Dataset
from shardkit.dataset.display.previews import describe
from shardkit.dataset.find import open_splits, without_manifest
from shardkit.dataset.statistics import encoded_stats, values_of
from shardkit.errors import SampleError, UsageError
from shardkit.helpers.checked import plain
from shardkit.helpers.keywords import takes
from shardkit.metadata.manifest import FieldStats
from shardkit.options import is_whole
from shardkit.schema import Int
from shardkit.storage import fs

_LABELS = ("label", "cls")


@takes()
def inspect(
    path: str | os.PathLike[str] | Dataset,
    *,
    samples: int = 3,
    full: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Describe a dataset, a shard, or a folder of splits, as JSON values.

    path: a path, an open dataset, or a view of one. For a view, only its samples count, and `bytes`
        is the size of their values, or None if it cannot be known without reading them.
    samples: number of samples to describe, starting with the first.
    full: read every sample, to include the formats and sizes of images, audio and video.
    storage_options: as in `shardkit.open`.

    Counts and sizes come from the manifest or, for data from other tools, from headers and small
    fields. Raises UsageError for an invalid number of samples, and the errors of `shardkit.open`
    and of reading.
    """
    if not is_whole(samples) or samples < 0:
        raise UsageError("samples must be a whole number from 0 up", found=f"{samples!r:.100}")
    source, datasets, incomplete = opened(path, storage_options)
    if list(datasets) == [""]:
        report = report_of(datasets[""], str(source), samples, full)
        return {**report, "incomplete": incomplete}
    return {
        "path": str(source),
        "format": next(iter(datasets.values())).format,
        "splits": {
            name: report_of(dataset, _split_path(source, name), samples, full)
            for name, dataset in datasets.items()
        },
        "incomplete": incomplete,
    }


def opened(
    path: str | os.PathLike[str] | Dataset, storage_options: Mapping[str, Any] | None
) -> tuple[Path, Mapping[str, Dataset], str | None]:
    """Return the path, its splits, and a warning if it is an incomplete copy."""
    if isinstance(path, Dataset):
        return path.place, {"": path}, None
    with fs.using(storage_options, path):
        source = fs.source(path)
    datasets = open_splits(source)
    lost = without_manifest(source, datasets.values())
    return source, datasets, None if lost is None else f"{lost.what} ({lost.found})"


def _split_path(path: Path, split: str) -> str:
    """The path of a split for messages: its folder, or "PATH: SPLIT" if splits share a folder."""
    folder = path / split
    return str(folder) if folder.is_dir() else f"{path}: {split}"


def report_of(
    dataset: Dataset, path: str, samples: int, full: bool, most: int | None = None
) -> dict[str, Any]:
    """The report of `inspect` on one dataset. `most`: count labels of at most so many samples."""
    manifest = dataset.manifest
    view = dataset.indices is not None
    whole = manifest is not None and len(manifest.shards) == dataset.shards and not view
    stats = manifest.fields if manifest is not None and whole else _field_stats(dataset)
    return {
        "path": path,
        "format": dataset.format,
        "manifest": manifest is not None,
        "conventions": dataset.conventions,
        "shards": dataset.shards,
        "samples": len(dataset),
        "bytes": _bytes(dataset, stats),
        "errors": manifest.errors if manifest is not None and whole else 0,
        "ignored": manifest.ignored if manifest is not None and whole else dataset.ignored,
        "filtered": manifest.filtered if manifest is not None and whole else {},
        "fields": {
            name: {
                **kind.to_json(),
                "optional": kind.optional,
                "class_names": dataset.class_names.get(name),
                "stats": plain(stats[name]) if name in stats else None,
            }
            for name, kind in dataset.schema.items()
        },
        "classes": _classes(dataset, whole, most),
        "tokenizer": manifest.tokenizer if manifest is not None else {},
        "text": manifest.text if manifest is not None and whole else {},
        "lengths": _lengths(dataset),
        "pixels": plain(manifest.pixels) if manifest is not None and whole else {},
        "media": encoded_stats(dataset) if full else None,
        "first": [_describe(dataset, index) for index in range(min(samples, len(dataset)))],
    }


def _field_stats(dataset: Dataset) -> dict[str, FieldStats]:
    """Exact stored sizes per field, if the format knows them without reading values."""
    stats, ordered = {}, dataset.in_order()
    for name in dataset.schema:
        parts = []
        for shard in range(dataset.shards):
            reader, positions = dataset.reader(shard), ordered.positions(shard)
            if not len(positions) or name not in reader.schema:
                continue
            with dataset.explained(shard):
                known = reader.sizes(name)
            if known is not None and dataset.indices is not None:  # a view has only some samples
                known = known[positions] if len(known) == len(reader) else None
            parts.append(known)
        told = [part for part in parts if part is not None]
        sizes = np.concatenate(told) if told else np.zeros(0, np.int64)
        if len(sizes) and (dataset.indices is None or len(told) == len(parts)):
            stats[name] = FieldStats(len(sizes), int(sizes.sum()), *_spread(sizes))
    return stats


def _bytes(dataset: Dataset, stats: Mapping[str, FieldStats]) -> int | None:
    if dataset.indices is not None:
        known = len(stats) == len(dataset.schema)
        return sum(about.bytes for about in stats.values()) if known else None
    return sum(dataset.extent(shard)[1] for shard in range(dataset.shards))


def _spread(values: npt.NDArray[Any]) -> list[int]:
    """Return the smallest, the median and the largest of some whole numbers (at least one)."""
    ordered = np.sort(values)
    return [int(ordered[at]) for at in (0, (len(ordered) - 1) // 2, -1)]


def _classes(dataset: Dataset, whole: bool, most: int | None) -> list[dict[str, Any]] | None:
    """Labels with their names, if known, and their numbers of samples."""
    names = dataset.classes
    manifest = dataset.manifest
    counts: Counter[int]
    if manifest is not None and whole and manifest.label_counts is not None:
        counts = Counter(dict(enumerate(manifest.label_counts)))
    else:
        candidates = (manifest.label,) if manifest is not None else _LABELS
        field = next((f for f in candidates if isinstance(dataset.schema.get(f), Int)), None)
        if field is None or (most is not None and len(dataset) > most):
            return None
        counts = Counter(label for label in values_of(dataset, field) if label is not None)
    labels = range(len(names)) if names else sorted(counts)
    return [{"label": n, "name": names[n] if names else None, "samples": counts[n]} for n in labels]


def _lengths(dataset: Dataset) -> dict[str, dict[str, Any]]:
    """The lengths of one-dimensional arrays and audio, if the dataset has a table of them."""
    rows = dataset.length_table()
    if rows is None or not len(rows):
        return {}
    report = {}
    for name in rows.dtype.names or ():
        lengths = rows[name]
        powers = np.where(lengths > 0, 1 << np.maximum(np.frexp(lengths)[1] - 1, 0), 0)
        values, counts = np.unique(powers, return_counts=True)
        report[name] = {
            **dict(zip(("shortest", "median", "longest"), _spread(lengths), strict=True)),
            "histogram": {str(v): n for v, n in zip(values.tolist(), counts.tolist(), strict=True)},
        }
    return report


def _describe(dataset: Dataset, index: int) -> dict[str, Any]:
    """Return a sample with short descriptions of its values."""
    try:
        sample = dataset.read(index)
    except SampleError as error:
        words = " ".join(str(error).split())
        return {"__key__": error.where.get("key", f"number {index}"), "error": words}
    return {
        name: value if name == "__key__" else describe(dataset, name, value)
        for name, value in sample.items()
    }
