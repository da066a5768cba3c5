"""Decides, by the recipe, which datasets are compared with which samples of a source."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from shardkit.conversion.cuts import TASKS
from shardkit.conversion.plan import Task, make_plan
from shardkit.conversion.read_ahead import Reading, Share
from shardkit.conversion.splits import members, shares_of
from shardkit.conversion.target import Target
from shardkit.errors import DamagedError, UsageError
from shardkit.metadata.manifest import CHOSEN, has_manifest, load_any, read_checked
from shardkit.metadata.recipe import Recipe
from shardkit.preprocess.pipeline import Steps
from shardkit.sources import WHOLE, open_sources
from shardkit.sources.base import Source, Stream
from shardkit.sources.inputs import paths_of
from shardkit.sources.key_lists import KeyList
from shardkit.storage import fs
from shardkit.verification.shards import CheckedPart
from shardkit.verification.work import Findings

Against: TypeAlias = str | os.PathLike[str] | Sequence[Any]
# Groups of options that are dropped from a recipe only together.
_TOGETHER = (
    ("rename",),
    ("fields", "drop"),
    ("include_class", "exclude_class"),
    ("where",),
    ("sample",),
    ("keys", "split", "split_column", "folds", "stratify", "group"),
    ("metadata", "file_column", "file_suffix", "label_column", "label_columns", "label_separator"),
    ("annotations_frame",),
)
_Sources: TypeAlias = Mapping[str, Source | Stream]


@dataclass(frozen=True)
class Group:
    """Datasets that together should have the same samples as the sources together."""

    path: Path  # of the verified datasets
    parts: list[CheckedPart]
    sources: list[Source | Stream]
    recipe: Recipe  # that made the datasets from the sources
    share: Share | None = None  # for streams: compare only these documents
    tasks: list[Task] | None = None  # that made the datasets, if samples depend on task boundaries

    def readings(self, steps: Callable[[Source | Stream], Steps]) -> list[Reading]:
        """Return the samples of the sources to compare, after the steps of the conversion."""
        if self.tasks is not None:
            return [task.reading() for task in self.tasks]
        return [Reading(source, "", steps(source), self.share) for source in self.sources]

    @property
    def extent(self) -> tuple[int, str]:
        """How much there is to compare, and the unit: samples or bytes."""
        counts = [len(source) for source in self.sources if isinstance(source, Source)]
        if self.tasks is None and len(counts) == len(self.sources):
            return sum(counts), "samples"
        return sum(int(source.sizes().sum()) for source in self.sources), "bytes"

    @property
    def safe_keys(self) -> bool:
        """Whether the conversion percent-encoded the keys of the sources (`safe_keys`)."""
        return self.recipe.safe_keys and not all(source.safe_keys for source in self.sources)


def groups(
    path: Path,
    parts: list[CheckedPart],
    against: Against,
    findings: Findings,
    metadata: str | os.PathLike[str] | None = None,
) -> list[Group]:
    """The groups to compare. Splits that only one side has are added to `findings` as problems.

    Raises the errors of `open_sources` for a source that cannot be opened.
    """
    recipe = with_metadata(_since(_recipe_of(parts), against), metadata)
    sources = _open(against, recipe, parts)
    splits = {part.name: part for part in parts}
    tasks = _tasks(sources, parts, recipe)

    def of(name: str) -> list[Task] | None:
        return None if tasks is None else [task for task in tasks if task.split.name == name]

    name = _split_of(parts[0], sources, recipe) if WHOLE in splits else None
    if name is not None:
        one, share = _part_of(sources, name, recipe)
        return [Group(path, parts, [one], recipe, share, of(name))]
    if WHOLE in splits or WHOLE in sources:
        return [Group(path, parts, list(sources.values()), recipe, None, tasks)]
    for name in sorted(splits.keys() ^ sources.keys()):
        side = "the source" if name in splits else "the dataset"
        findings.add(DamagedError(f"{side} has no split {name!r}", path=path))
    common = [name for name in splits if name in sources]
    return [
        Group(path / name, [splits[name]], [sources[name]], recipe, None, of(name))
        for name in common
    ]


def _recipe_of(parts: list[CheckedPart]) -> Recipe:
    """Return the recipe of the datasets, as far as known; all splits have the same one."""
    found = [
        Recipe.from_json(part.manifest.recipe, part.dataset.manifest_path)
        for part in parts
        if part.manifest is not None and part.manifest.recipe
    ]
    return found[0] if found else Recipe(parts[0].dataset.format)


def _since(recipe: Recipe, against: Against) -> Recipe:
    """Return the recipe without the options that the sources, if they are datasets, already had."""
    if not _is_ours(against):
        return recipe
    theirs = [load_any(path).recipe for path in paths_of(against)]
    none, ours = Recipe(recipe.format), recipe.to_json()
    for names in _TOGETHER:
        if all((one.get(n) or None) == (ours[n] or None) for one in theirs for n in names):
            recipe = replace(recipe, **{name: getattr(none, name) for name in names})
    return recipe


def with_metadata(recipe: Recipe, metadata: str | os.PathLike[str] | None) -> Recipe:
    """Return the recipe with the path of the metadata table; a stored recipe has only its name."""
    if (recipe.metadata is None) != (metadata is None):
        raise UsageError(
            "the dataset was made with metadata"
            if metadata is None
            else "the dataset was made without metadata",
            found=recipe.metadata,
            fix="give the table with --metadata FILE" if metadata is None else "leave it out",
        )
    return recipe if metadata is None else replace(recipe, metadata=os.fspath(metadata))


def _is_ours(against: Against) -> bool:
    """Return whether all sources are datasets with a manifest."""
    paths = paths_of(against)
    return bool(paths) and all(map(has_manifest, paths))


def _open(against: Against, recipe: Recipe, parts: list[CheckedPart]) -> dict[str, Source | Stream]:
    """Open the sources with the splits and labels of the conversion."""
    classes: Any = next((part.dataset.classes for part in parts), None)
    if recipe.include_class or recipe.exclude_class:  # the dataset's own labels were renumbered
        classes = recipe.classes
    split = "auto" if _is_ours(against) else recipe.split
    recipe = replace(recipe, split=split, classes=classes)
    return open_sources(against, recipe, strict=False, lists=key_lists(parts, recipe))


def key_lists(parts: list[CheckedPart], recipe: Recipe) -> dict[str, KeyList]:
    """Return the lists of keys that the datasets were made with, read from the datasets."""
    found = {}
    for part in parts:
        file = part.manifest.list_named(CHOSEN) if part.manifest and recipe.keys else None
        if part.manifest is not None and file is not None:
            data = read_checked(
                part.dataset.path / file.name, file.checksum, part.manifest.checksum
            )
            name = part.name or fs.absolute(part.dataset.path).name
            found["" if "" in recipe.keys else name] = KeyList(np.frombuffer(data, "<u8"))
    return found


def _split_of(part: CheckedPart, sources: _Sources, recipe: Recipe) -> str | None:
    """The split of the sources that a dataset was made from, by its folder's name; None: all.

    Raises UsageError if the sources have several splits, and none of them has this name.
    """
    name = fs.absolute(part.dataset.path).name
    splits: Collection[str] = recipe.splits
    if WHOLE not in sources:
        same = recipe.sources.keys() == sources.keys()
        splits = sources.keys() if same or name in sources else ()
    if not splits:
        return None
    if name not in splits:
        raise UsageError(
            "the name of the folder does not say which split of the source the dataset is",
            found=name,
            expected=", ".join(splits),
            fix="rename the folder back, or verify the folder of all splits",
        )
    return name


def _part_of(sources: _Sources, name: str, recipe: Recipe) -> tuple[Source | Stream, Share | None]:
    """One split of the sources: its own source, or its samples in the only source."""
    if WHOLE not in sources:
        return sources[name], None
    source = sources[WHOLE]
    if isinstance(source, Stream):
        return source, shares_of(recipe.shares)[name]
    return source.select(members(source, recipe)[name]), None


def _tasks(sources: _Sources, parts: list[CheckedPart], recipe: Recipe) -> list[Task] | None:
    """The tasks that tokenized these sources; None if the datasets were not made this way."""
    part = parts[0]
    copy = part.dataset.tokenizer_path
    if copy is None or recipe.tokenizer is None or recipe.transform is not None:
        return None
    if all(source.tokenizer()[0] for source in sources.values()):
        return None  # the source itself has tokens, such as a copy of this dataset
    assert part.manifest is not None
    if recipe.text.seq_len is not None and part.manifest.versions.get("tasks") != TASKS:
        raise UsageError(
            "blocks of tokens made by an earlier shardkit cannot be compared with the source",
            path=part.dataset.path,
            fix="verify without --against, or convert again",
        )
    from shardkit.codecs.tokenizers import open_copy

    path = part.dataset.place
    target = Target(path, recipe.format, single=path != part.dataset.path)
    tokenizer = open_copy(copy, {**recipe.tokenizer}, fast=True)
    return make_plan(recipe, sources, target, tokenizer=tokenizer).tasks
