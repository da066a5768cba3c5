"""One dataset of the output of a conversion, and how its samples are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardkit.conversion.shards import Content
from shardkit.conversion.shares import Slice
from shardkit.errors import ShardkitError
from shardkit.preprocess.pipeline import Steps
from shardkit.schema import Schema
from shardkit.sources.base import Source, Stream


@dataclass(frozen=True)
class Split:
    """One dataset of the output: a split ("" if there is only one), and how it is made."""

    name: str
    source: Source | Stream
    slice: Slice
    steps: Steps  # applied to every sample before it is written
    content: Content  # of its shards: samples after the steps, with renamed fields
    problems: tuple[ShardkitError, ...] = ()  # found while planning, not tied to a sample
    ignored: Mapping[str, int] = field(default_factory=dict)  # ignored in the source by planning
    filtered: Sequence[Mapping[str, str]] = ()  # dropped by planning: lines of filtered.jsonl

    @property
    def schema(self) -> Schema:
        return self.content.schema

    @property
    def samples(self) -> int | None:
        """Number of samples; None if it is unknown before they are read."""
        counts, known = self.slice.counts, isinstance(self.source, Source)
        return len(self.slice.order) if known else None if counts is None else int(counts.sum())

    def tokenizer(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The tokenizer's entry in the manifest, and its files: those of this conversion, or those
        of a source that is tokenized already."""
        if self.steps.text is None:
            return self.source.tokenizer()
        return self.steps.text.tokenizer.identity(), self.steps.text.tokenizer.files()
