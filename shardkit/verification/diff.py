"""`shardkit.diff`: the differences between the samples of two datasets, matched by their keys.

One side is read in its own order; the samples of the other are looked up by hashes of their keys.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from shardkit.errors import SampleError, UsageError
from shardkit.options import Selection
from shardkit.sample import Sample
from shardkit.sources import open_sources
from shardkit.sources.base import Document, Source, Stream
from shardkit.sources.inputs import paths_of
from shardkit.storage import fs
from shardkit.verification.matching import Hashes, Keys, Location, difference, parsed

FIRST = 10  # samples of each kind that a report names


@dataclass
class DiffReport:
    """The differences between the samples of A and B.

    equal_samples: number of samples that are equal in A and B.
    removed: number of samples that only A has.
    added: number of samples that only B has.
    changed: number of samples with the same key but different values.
    fields: number of changed samples by field.
    classes: fields whose class names differ.
    first_removed, first_added: the keys of the first removed or added samples.
    first_changed: the first changed samples by key, with the values of each changed field in A and
        B, as text.
    """

    equal_samples: int = 0
    removed: int = 0
    added: int = 0
    changed: int = 0
    fields: Counter[str] = field(default_factory=Counter)
    classes: list[str] = field(default_factory=list)
    first_removed: list[str] = field(default_factory=list)
    first_added: list[str] = field(default_factory=list)
    first_changed: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether A and B have the same samples, in any order."""
        return not (self.removed or self.added or self.changed or self.classes)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {"equal": self.equal, **vars(self), "fields": dict(self.fields)}


def diff(
    a: str | os.PathLike[str] | Sequence[Any],
    b: str | os.PathLike[str] | Sequence[Any],
    *,
    first: int = FIRST,
    storage_options: Mapping[str, Any] | None = None,
) -> DiffReport:
    """Compare the samples of two datasets or sources.

    a, b: datasets of any formats, or sources as in `convert`.
    first: number of samples of each kind that the report lists.
    storage_options: as in `shardkit.open`.

    Samples are matched by their keys, in any order. Values are compared as in `verify`: by type and
    value, images and other encoded media by their bytes, JSON by its value. If both sides have the
    same splits, each split is compared with its counterpart. Otherwise, all samples are compared
    together.

    The comparison needs about 40 bytes of memory per sample of one side.

    Raises the errors of `convert` for sources that cannot be read, SampleError for a bad sample,
    and UsageError if both sources can only be read from the beginning, such as two JSON Lines
    files.
    """
    with fs.using(storage_options, *paths_of(a), *paths_of(b)):
        ours, theirs = open_sources(a), open_sources(b)
    report = DiffReport()
    for source in (*ours.values(), *theirs.values()):
        for problem in source.problems:
            raise problem
    if ours.keys() == theirs.keys():
        pairs = [(f"{name}/" if name else "", [ours[name]], [theirs[name]]) for name in ours]
    else:
        pairs = [("", list(ours.values()), list(theirs.values()))]
    for prefix, left, right in pairs:
        swapped = any(isinstance(source, Stream) for source in right)
        comparison = Comparison(report, prefix, first, swapped)
        comparison.run(*((right, left) if swapped else (left, right)))
    return report


class Comparison:
    """Compares sources that are read in order with sources whose samples are looked up by key."""

    def __init__(self, report: DiffReport, prefix: str, first: int, swapped: bool) -> None:
        """`swapped`: A is the side that is looked up."""
        self._report = report
        self._prefix = prefix
        self._first = first
        self._swapped = swapped

    def run(self, read: Sequence[Source | Stream], looked_up: Sequence[Source | Stream]) -> None:
        there = [source for source in looked_up if isinstance(source, Source)]
        if len(there) < len(looked_up):
            raise UsageError(
                "both sources can only be read from the beginning, so that no sample is looked up",
                fix="convert one of them first, then compare the dataset",
            )
        self._compare_classes(read, looked_up)

        @lru_cache(1)  # the key is looked at first
        def at(location: Location) -> Sample:
            return there[location.part][location.position]

        hashes = [(number, 0, _hashes(source)) for number, source in enumerate(there)]
        keys = Keys(hashes, lambda location: str(at(location)["__key__"]))
        for document in chain.from_iterable(source.documents() for source in read):
            sample = _sample(document)
            number = keys.unmatched(sample["__key__"])
            if number is None:
                self._only(sample["__key__"], looked_up=False)
            else:
                keys.matched[number] = True
                self._compare(sample, at(keys.location(number)))
        for number in np.flatnonzero(~keys.matched).tolist():
            self._only(keys.key(number), looked_up=True)

    def _compare_classes(self, *sides: Sequence[Source | Stream]) -> None:
        one, other = ({n: c for s in side for n, c in s.class_names.items()} for side in sides)
        self._report.classes += [
            name
            for name in sorted((one.keys() & other.keys()) - {*self._report.classes})
            if one[name] != other[name]
        ]

    def _only(self, key: str | None, *, looked_up: bool) -> None:
        """Count a sample that only one side has."""
        report = self._report
        removed = looked_up == self._swapped
        report.removed += removed
        report.added += not removed
        named = report.first_removed if removed else report.first_added
        if len(named) < self._first:
            named.append(f"{self._prefix}{key}")

    def _compare(self, read: Sample, found: Sample) -> None:
        a, b = (found, read) if self._swapped else (read, found)
        names = dict.fromkeys((*a, *b))
        differ = {name: words for name in names if (words := _words(a, b, name)) is not None}
        report = self._report
        if not differ:
            report.equal_samples += 1
            return
        report.changed += 1
        report.fields.update([*differ])
        if len(report.first_changed) < self._first:
            report.first_changed[f"{self._prefix}{read['__key__']}"] = differ


def _sample(document: Document) -> Sample:
    if isinstance(document.sample, SampleError):
        error = document.sample.located(path=document.name)
        if "--" in (error.fix or ""):  # options of convert
            error.fix = f"convert this side first, and {error.fix}; then compare the dataset"
        raise error
    return document.sample


def _hashes(source: Source) -> Hashes:
    """Return the hashes of all keys; the keys themselves are not held in memory together."""
    return np.fromiter(map(hash, _keys(source)), np.int64, len(source))


def _keys(source: Source) -> Iterator[str]:
    if not len(source) or source.key(0) is not None:
        yield from (str(source.key(number)) for number in range(len(source)))
        return
    part = source.select(np.arange(len(source))).skimmed()
    part.narrow(Selection((), partial=True))
    for document in part.documents():
        yield _sample(document)["__key__"]


def _words(a: Sample, b: Sample, name: str) -> tuple[str, str] | None:
    """Return the values of a field in A and in B, as text, if they differ."""
    if name not in a or name not in b:
        return ("present", "absent") if name in a else ("absent", "present")
    return difference(parsed(b[name]), parsed(a[name]))
