"""Groups the paths, patterns and datasets that a user gives into sources.

Consecutive shards of one format, or consecutive text files, are one source, as if they were in one
folder. So a pattern means the same whether the shell expands it or shardkit.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from shardkit.dataset.dataset import Dataset
from shardkit.dataset.find import describing
from shardkit.dataset.folders import common_folder
from shardkit.errors import UsageError
from shardkit.formats import FORMATS, format_of
from shardkit.formats.unsupported import kind_by_name
from shardkit.metadata.splits import common_start
from shardkit.sample import unique_key
from shardkit.sources.text_files import parse_name
from shardkit.storage import fs
from shardkit.storage.patterns import expand, is_pattern
from shardkit.storage.remote.path import RemotePath

One: TypeAlias = "str | os.PathLike[str] | Dataset"
TEXTS, TABLES = "text", "tables"  # kinds of document files; the kind of a shard is its format


@dataclass(frozen=True, eq=False)
class Input:
    """A source, with the name that prefixes its keys if there are several sources."""

    files: Sequence[Path] = ()  # a file or folder, or several shards or text files
    kind: str | None = None  # of several files
    dataset: Dataset | None = None
    name: str = ""

    @property
    def path(self) -> Path:
        """The path to name in messages."""
        return self.files[0] if self.dataset is None else self.dataset.place

    def identities(self) -> Iterator[tuple[object, Path]]:
        """What the source shares with any other one of the same samples, and a path to name."""
        dataset, files = self.dataset, list(self.files)
        if dataset is not None and (dataset.indices is not None or dataset.format == "sequence"):
            yield id(dataset), dataset.place  # other views of it may have other samples
        elif dataset is not None:
            files = [dataset.shard_path(0)]
        for path in files:
            yield (path if isinstance(path, RemotePath) else Path(os.path.realpath(path))), path


def listed(source: object) -> list[One] | None:
    """The sources in a path or a list of paths and datasets; None for a sequence of samples."""
    if isinstance(source, str | os.PathLike):
        return [source]
    if not isinstance(source, list | tuple) or not source:
        return None
    kinds = (str, os.PathLike, Dataset)
    if not isinstance(source[0], kinds):  # checking one of millions of samples is enough
        return None
    for number, one in enumerate(source):
        if not isinstance(one, kinds):
            raise UsageError(
                "a list of sources has an item that is neither a path nor a dataset",
                found=f"{type(one).__name__} as item {number}",
                expected="only paths and datasets, or only samples, as dicts",
                fix="make a dataset of samples in memory: shardkit.Dataset.from_sequence(samples)",
            )
    return list(source)


def paths_of(source: object) -> list[Path]:
    """Return the paths among the given sources, with patterns not expanded."""
    found = listed(source) or []
    return [fs.source(one) for one in found if not isinstance(one, Dataset)]


def group_inputs(sources: Sequence[One]) -> list[Input]:
    """Group a list of paths, patterns and datasets into sources, in the order of the list.

    Raises UsageError for a source given twice, and for a pattern that matches several kinds.
    """
    if len(sources) == 1 and not isinstance(sources[0], Dataset):
        path = fs.source(sources[0])
        if not is_pattern(path):
            return [Input([path])]
    inputs: list[Input] = []
    for one in sources:
        if isinstance(one, Dataset):
            inputs.append(Input(dataset=one))
            continue
        path = fs.source(one)
        found = expand(path) if is_pattern(path) else [path]
        kinds = [_kind(file) for file in found]
        if len(set(kinds)) > 1:
            such = {kind or "others": path for kind, path in zip(kinds, found, strict=True)}
            raise UsageError(
                "the pattern matches files of several kinds",
                path=path,
                expected="shards of one format, text files, or folders",
                found=", ".join(f"{kind} ({path.name})" for kind, path in such.items()),
                fix="give a pattern for each kind, such as folder/*.parquet; several sources may be"
                " given",
            )
        inputs += [Input([file], kind) for file, kind in zip(found, kinds, strict=True)]
    _refuse_overlaps(inputs)
    owners = describing([one.files[0] for one in inputs if one.kind not in (None, TEXTS, TABLES)])

    def group(one: Input) -> object:
        """Return the same for files that are one source if they follow one another."""
        if one.kind is None:
            return one
        path = one.files[0]
        return one.kind, owners.get(path), path.store.site if isinstance(path, RemotePath) else None

    runs = itertools.groupby(inputs, group)
    joined = [_joined([*run]) for _, run in runs]
    names = _names([_place(one) for one in joined])
    return [replace(one, name=name) for one, name in zip(joined, names, strict=True)]


def _kind(path: Path) -> str | None:
    """Return the kind of a shard or text file; None for a folder, and for any other file."""
    format, text = format_of(path), parse_name(path.name)
    if kind_by_name(path.name) is not None or (format is None and text is None):
        return None
    may_be_folder = format is not None and FORMATS[format].inside
    if (may_be_folder or not isinstance(path, RemotePath)) and path.is_dir():
        return None
    if text is not None:
        return TEXTS if text.form == "text" else TABLES
    return format


def _joined(run: Sequence[Input]) -> Input:
    if len(run) == 1:
        return replace(run[0], kind=None)
    files = [file for one in run for file in one.files]
    remote = [file for file in files if isinstance(file, RemotePath)]
    if remote:  # share one client, which has cached the listing
        files = [RemotePath(remote[0].store, file.key) for file in remote]
    return Input(files, run[0].kind)


# --- what is given twice -------------------------------------------------------------------------


def _refuse_overlaps(inputs: Sequence[Input]) -> None:
    """Raise UsageError if a source equals another or is inside it: samples would repeat."""
    seen: dict[object, Path] = {}
    for one in inputs:
        for key, path in one.identities():
            if key in seen:
                raise UsageError(
                    "a source is given twice", path=path, found=f"also as {seen[key]}",
                    fix="give it only once: its samples would be duplicated",
                )  # fmt: skip
            seen[key] = path
    for key, path in seen.items():
        above = next((seen[up] for up in getattr(key, "parents", ()) if up in seen), None)
        if above is not None:
            raise UsageError(
                "one source lies inside another",
                path=path,
                found=f"inside {above}",
                fix="give one of them: the samples of the inner one would be duplicated",
            )


# --- names ---------------------------------------------------------------------------------------


def _place(one: Input) -> Path:
    """Return the path a source is named after: without suffixes, or numbers of several files."""
    if one.dataset is not None:
        path = one.dataset.place
    elif len(one.files) == 1:
        path = one.files[0]
    else:
        folder, start = common_folder(one.files), common_start([path.name for path in one.files])
        start = start.rstrip("0123456789_.- ")
        return folder / start if start else folder
    text = parse_name(path.name)
    if text is not None and path.is_file():
        return path.with_name(text.stem)
    suffixes = [s for declared in FORMATS.values() for s in declared.suffixes]
    found = [s for s in suffixes if path.name.lower().endswith(s) and len(path.name) > len(s)]
    return path.with_name(path.name[: -max(map(len, found), default=0) or None])


def _names(places: Sequence[Path]) -> list[str]:
    """Return a name for each path: as many of its last components as make all names unique."""
    every = [fs.absolute(place).parts for place in places]
    parts = [[part for part in path if part.strip("/")] or ["dataset"] for path in every]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-depth:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    taken: list[str] = []
    for path in parts:
        taken.append(unique_key(path[-1], "2", taken))
    return taken
