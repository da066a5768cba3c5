"""A path that may be a source, as recognisers see it, and the options that not every source has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from shardkit.dataset.card import named_subset
from shardkit.dataset.find import unreadable
from shardkit.dataset.folders import Contents, look_into, skipped_media
from shardkit.errors import UsageError
from shardkit.metadata.recipe import Recipe
from shardkit.sources.base import Source, Stream
from shardkit.sources.file_names import parse_name
from shardkit.storage import fs
from shardkit.storage.remote.path import RemotePath
from shardkit.storage.walk import relative_to

Splits: TypeAlias = "Mapping[str, Source | Stream]"  # by name; `WHOLE` without splits


@dataclass
class Candidate:
    """A file or folder for which recognisers are asked, in turn, whether it is of their kind.

    `given` is the path as the user gave it, and may end in `#SUBSET`. `path` is without it.
    """

    given: Path
    recipe: Recipe
    strict: bool = True  # as in `open_sources`

    def __post_init__(self) -> None:
        self.path, self.subset = named_subset(self.given)
        if isinstance(self.path, RemotePath) and self.path.store.lists:
            self.given = self.path = self.path.listed()
        try:
            self.is_folder = self.path.is_dir()
            self.path.stat()
        except OSError as error:
            raise unreadable(error, "read the source", self.path) from error

    @property
    def together(self) -> bool:
        """Whether the user wants one dataset of all splits."""
        return self.recipe.split == "none"

    @cached_property
    def contents(self) -> Contents:
        """The files of a folder, by kind."""
        table = None if self.recipe.metadata is None else fs.source(self.recipe.metadata)
        own = None if table is None else relative_to(table, self.path)
        return look_into(self.path, lambda name: parse_name(name) is not None, own)

    def refuse_options(self) -> None:
        """Raise UsageError for a table of metadata, and for class names without a column."""
        refuse_metadata(self.recipe, self.path)
        refuse_classes(self.recipe, self.strict)

    def labelled(self, sources: Mapping[str, Source]) -> Splits:
        """The sources, with a label made from the field that `label_column` names, if any."""
        return with_labels(sources, self.recipe)

    def noted(self, sources: Splits) -> Splits:
        """The sources of loose files, with notes on files of other kinds beside them."""
        first = next(iter(sources.values()))
        first.notes = (*first.notes, *skipped_media(self.contents))
        return sources


def refuse_metadata(recipe: Recipe, path: Path | None = None) -> None:
    """Raise UsageError if a metadata table is given for a source without loose files."""
    if recipe.metadata is not None:
        raise UsageError(
            "a metadata table is for folders of images, audio or video, or of text files with one"
            " document each",
            path=path,
            fix="omit --metadata; to use a column of the source, name it with --label-column",
        )


def refuse_classes(recipe: Recipe, strict: bool) -> None:
    """Raise UsageError if class names are given for a source that has its own."""
    if recipe.classes is not None and strict and recipe.label_column is None:
        raise UsageError(
            "class names come from the dataset; --classes is for folders",
            fix="name the field that --classes applies to: --label-column NAME",
        )


def with_labels(sources: Mapping[str, Source], recipe: Recipe) -> Splits:
    """The sources, with a label made from the field that `label_column` names, if any."""
    if recipe.label_column is None:
        return sources
    from shardkit.sources.labelled import labelled
    from shardkit.sources.labels import LabelColumn

    asked = LabelColumn.of(recipe)
    return sources if asked is None else labelled(sources, asked)
