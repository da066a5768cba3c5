"""Assigns the samples of a source to splits, by hashes of their keys, and orders them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardkit.conversion.key_shares import Share, key_fraction
from shardkit.conversion.read_ahead import Reading
from shardkit.conversion.strata import divided
from shardkit.errors import UsageError
from shardkit.helpers.indices import as_slice
from shardkit.helpers.mapped import Sizes, computed, selected
from shardkit.helpers.order import permutation
from shardkit.metadata.recipe import LISTS, Recipe
from shardkit.preprocess.pipeline import Steps
from shardkit.sample import key_hash
from shardkit.sources.base import Indices, Source, Stream


@dataclass(frozen=True)
class Slice:
    """The samples of a source, or the ranges of a stream, that belong to a split, in order."""

    order: range | Indices
    share: Share | None = None  # of a stream: only these documents
    counts: Indices | None = None  # of a stream with a limit: documents of each range in `order`

    def values(self, every: Sizes) -> Sizes:
        """The values of this slice's samples, in its order, from an array for all samples."""
        order = self.order
        if isinstance(order, range):
            return every[as_slice(order)]
        return computed(len(order), every.dtype, lambda piece: every[order[piece]])


def slices(name: str, source: Source | Stream, recipe: Recipe) -> Iterator[tuple[str, Slice]]:
    """The splits that a source is divided into, and the slice of it that each contains."""
    if isinstance(source, Stream):
        if recipe.shuffle is not None:
            raise UsageError(
                "documents of a long file are read in order: they cannot be shuffled",
                fix="convert without --shuffle first, then convert that dataset with --shuffle",
            )
        yield from _stream_slices(name, source, recipe.shares, recipe.limit)
        return
    members_of: Mapping[str, range | Indices] = {name: range(len(source))}
    if recipe.splits:
        members_of = members(source, recipe)
    for split, chosen in members_of.items():
        order = chosen
        if recipe.shuffle is not None:
            order = permutation(len(chosen), recipe.shuffle)
            if isinstance(chosen, np.ndarray):
                order = np.asarray(Slice(order).values(chosen))
        yield split, Slice(order[: recipe.limit])


def members(source: Source, recipe: Recipe) -> dict[str, Indices]:
    """The samples of each split that a source is divided into.

    With shares alone, the hash of the key decides: a sample stays in its split if others are added.
    """
    keys, splits = source.all_keys(), recipe.splits
    if recipe.split == LISTS:
        hashes = _of_each(keys, key_hash, np.uint64)
        lists = source.key_lists  # only one split's list when that split is being verified
        return {n: np.flatnonzero(np.isin(hashes, lists[n])) for n in splits if n in lists}
    if recipe.folds or recipe.stratify or recipe.group:
        number = divided(source, keys, recipe)
    else:
        fractions = _of_each(keys, key_fraction, np.float64)
        ends = [share.stop for share in shares_of(recipe.shares).values()]
        number = computed(
            len(keys), np.int64, lambda piece: np.searchsorted(ends, fractions[piece], "right")
        )
    return {name: selected(len(keys), partial(_are, number, n)) for n, name in enumerate(splits)}


def _of_each(keys: Sequence[str], value: Callable[[str], float], dtype: Any) -> Any:
    """An array of `value(key)` for all keys."""
    each = map(value, keys)
    return computed(len(keys), dtype, lambda p: np.fromiter(each, dtype, p.stop - p.start))


def _are(numbers: Indices, wanted: int, piece: slice) -> Any:
    return numbers[piece] == wanted


def shares_of(shares: dict[str, float]) -> dict[str, Share]:
    """The interval of key fractions that belongs to each split."""
    ends = np.cumsum([0.0, *shares.values()]).tolist()
    ends[-1] = 2.0  # above every fraction
    return {name: Share(ends[n], ends[n + 1]) for n, name in enumerate(shares)}


def _stream_slices(
    name: str, stream: Stream, shares: dict[str, float], limit: int | None
) -> Iterator[tuple[str, Slice]]:
    """Each split reads all ranges, and skips the documents of other splits."""
    ranges = range(len(stream))
    of_split: dict[str, Share | None] = {**shares_of(shares)} or {name: None}
    for split, share in of_split.items():
        if limit is None:
            yield split, Slice(ranges, share)
        else:
            counts = np.array(list(_counts(stream, share, limit)), np.int64)
            yield split, Slice(ranges[: len(counts)], share, counts)


def _counts(stream: Stream, share: Share | None, limit: int) -> Iterator[int]:
    """How many of the first `limit` documents each range contains, up to the last of them."""
    for number in range(len(stream)):
        reading = Reading(stream.select(np.array([number])), "", Steps(), share, limit)
        count = sum(1 for _ in reading.items(1))
        yield count
        limit -= count
        if not limit:
            return
