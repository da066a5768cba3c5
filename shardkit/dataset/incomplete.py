"""Detects copies of datasets that lack their manifest."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from shardkit.dataset.dataset import Dataset
from shardkit.errors import AGAIN, DamagedError
from shardkit.formats import FORMATS
from shardkit.helpers import os_errors
from shardkit.metadata import manifest as manifests
from shardkit.storage.remote.path import RemotePath

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
    """The shards of a dataset that has no manifest: files, or folders for LMDB."""
    if dataset.manifest is not None:
        return []
    inside = FORMATS[dataset.format].inside[1:]
    shards = [dataset.shard_path(number) for number in range(dataset.shards)]
    tops = [shard.parent if shard.name == inside else shard for shard in shards]
    described = set(manifests.with_own(tops))
    return [top for top in tops if top not in described]
