"""Divides the samples of a source between splits, and orders them.

With shares alone, hashes of the keys decide. With strata, groups or folds, the result depends only
on keys, values and a seed, not on the order of the samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.conversion.read_ahead import Reading, Share, key_fraction
from shardkit.conversion.shards import Content
from shardkit.errors import ShardkitError, UsageError
from shardkit.helpers.indices import as_slice
from shardkit.helpers.mapped import Sizes, computed, selected
from shardkit.helpers.order import permutation
from shardkit.metadata.recipe import LISTS, Recipe
from shardkit.preprocess.pipeline import Steps
from shardkit.sample import key_hash
from shardkit.schema import Schema
from shardkit.sources.base import Indices, Source, Stream
from shardkit.sources.subset import Subset, chance

Floats = npt.NDArray[np.float64]

_EXACT = 1e-9  # rounding error allowed when shares such as 0.29 give a whole number of samples


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


def slices(name: str, source: Source | Stream, recipe: Recipe) -> Iterator[tuple[str, Slice]]:
    """Yield the splits that a source is divided into, and the slice of it that each contains."""
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
    """Return the samples of each split that a source is divided into.

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
    """Return an array of `value(key)` for all keys."""
    each = map(value, keys)
    return computed(len(keys), dtype, lambda p: np.fromiter(each, dtype, p.stop - p.start))


def _are(numbers: Indices, wanted: int, piece: slice) -> Any:
    return numbers[piece] == wanted


def shares_of(shares: dict[str, float]) -> dict[str, Share]:
    """Return the interval of key fractions that belongs to each split."""
    ends = np.cumsum([0.0, *shares.values()]).tolist()
    ends[-1] = 2.0  # above every fraction
    return {name: Share(ends[n], ends[n + 1]) for n, name in enumerate(shares)}


def _stream_slices(
    name: str, stream: Stream, shares: dict[str, float], limit: int | None
) -> Iterator[tuple[str, Slice]]:
    """Yield each split reads all ranges, and skips the documents of other splits."""
    ranges = range(len(stream))
    of_split: dict[str, Share | None] = {**shares_of(shares)} or {name: None}
    for split, share in of_split.items():
        if limit is None:
            yield split, Slice(ranges, share)
        else:
            counts = np.array(list(_counts(stream, share, limit)), np.int64)
            yield split, Slice(ranges[: len(counts)], share, counts)


def _counts(stream: Stream, share: Share | None, limit: int) -> Iterator[int]:
    """Yield how many of the first `limit` documents each range contains, up to the last of them."""
    for number in range(len(stream)):
        reading = Reading(stream.select(np.array([number])), "", Steps(), share, limit)
        count = sum(1 for _ in reading.items(1))
        yield count
        limit -= count
        if not limit:
            return


def divided(source: Source, keys: Sequence[str], recipe: Recipe) -> Indices:
    """Return the split number of each sample; adds notes about the outcome to the source."""
    seed, shares = recipe.seed or 0, np.array(list(recipe.shares.values()))
    values = source.values if isinstance(source, Subset) else {}
    strata = _numbered(values.get(recipe.stratify or "", [None] * len(keys)))
    what = "groups" if recipe.group else "samples"
    units = len(set(map(_typed, values[recipe.group]))) if recipe.group else len(keys)
    if units < len(shares):
        raise UsageError(
            f"there are fewer {what} than splits",
            found=f"{units:,} for {len(shares):,}",
        )
    if recipe.group is not None:
        groups = values[recipe.group]
        _refuse_ungrouped(recipe.group, groups, keys)
        number = by_group(_numbered(groups), strata, shares, _ranks(groups, seed))
        source.notes = (*source.notes, _outcome(recipe, number))
    else:
        chances = np.array([chance(key, seed, "split") for key in keys], np.float64)
        number = by_stratum(strata, shares, chances)
    if recipe.stratify is not None:
        few = int(np.count_nonzero(np.bincount(strata) < len(shares)))
        if few:
            note = f"{few:,} values of {recipe.stratify!r} have fewer samples than there are splits"
            source.notes = (*source.notes, note)
    return number


def by_stratum(strata: Indices, shares: Floats, chances: Floats) -> Indices:
    """The split number of each sample, such that every stratum is divided according to the shares.

    Of the n samples of a stratum, a split with the share s gets n * s, rounded up or down: up for
    the splits that are furthest below their shares so far, so that the total sizes of the splits
    approximate the shares, too. The samples are chosen by `chances`.
    """
    order = np.lexsort((chances, strata))
    number = np.empty(len(strata), np.int64)
    owed = np.zeros(len(shares))
    start = 0
    for count in np.bincount(strata).tolist():
        exact = shares * count
        counts = np.floor(exact + _EXACT).astype(np.int64)
        owed += exact - counts
        whole = exact - counts <= _EXACT
        more = np.argsort(np.where(whole, -np.inf, owed) * -1, kind="stable")
        more = more[: count - counts.sum()]
        counts[more] += 1
        owed[more] -= 1
        number[order[start : start + count]] = np.repeat(np.arange(len(shares)), counts)
        start += count
    return number


def by_group(groups: Indices, strata: Indices, shares: Floats, ranks: Floats) -> Indices:
    """Return the split number of each sample, such that no group is divided between splits.

    Groups are assigned from the largest to the smallest, each to the split in which the squared
    differences from the wanted counts of each stratum, divided by those counts, increase least (the
    chi-squared distance). Groups of equal size are ordered by `ranks`. With one stratum and equal
    shares, a group goes to the smallest split, as in scikit-learn's GroupKFold.
    """
    sizes = np.bincount(groups)
    pairs, counts = np.unique(np.stack([groups, strata], 1), axis=0, return_counts=True)
    starts = np.searchsorted(pairs[:, 0], np.arange(len(sizes) + 1)).tolist()
    wanted = np.bincount(strata)[None, :] * shares[:, None]  # (splits, strata)
    allotted = np.zeros_like(wanted)
    split_of = np.zeros(len(sizes), np.int64)
    for group in np.lexsort((ranks, -sizes)).tolist():
        here = slice(starts[group], starts[group + 1])
        of, more = pairs[here, 1], counts[here]
        costs = ((2 * allotted[:, of] + more) * more / wanted[:, of]).sum(1)
        split = int(np.argmin(costs.round(12)))
        allotted[split, of] += more
        split_of[group] = split
    return split_of[groups]


def _numbered(values: Sequence[Hashable]) -> Indices:
    """Consecutive numbers for the distinct values, in sorted order, also of mixed types."""
    every = {_typed(value) for value in values}
    order = sorted(every, key=lambda one: (one[0].__name__, "" if one[1] is None else one[1]))
    number = {value: n for n, value in enumerate(order)}
    return np.array([number[_typed(value)] for value in values], np.int64)


def _typed(value: Any) -> tuple[type, Any]:
    return type(value), value  # 1 and True are equal


def _ranks(groups: Sequence[Any], seed: int) -> Floats:
    """Return the rank of each group, by its number, among groups of equal size."""
    found: dict[int, Any] = dict(zip(_numbered(groups).tolist(), groups, strict=True))
    return np.array([chance(f"{found[n]!r}", seed, "group") for n in range(len(found))])


def _refuse_ungrouped(name: str, groups: Sequence[Any], keys: Sequence[str]) -> None:
    lacking = [n for n, value in enumerate(groups) if value is None]
    if lacking:
        raise UsageError(
            f"samples without a value of {name!r} belong to no group",
            key=keys[lacking[0]],
            found=f"{len(lacking):,} of {len(groups):,} samples",
            fix=f"leave them out: --where '{name} is not null'",
        )


def _outcome(recipe: Recipe, number: Indices) -> str:
    counts = Counter(number.tolist())
    found = (
        f"{name} {counts[n] / max(len(number), 1):.3f}" for n, name in enumerate(recipe.splits)
    )
    return f"groups of {recipe.group!r} stay whole: the shares are {', '.join(found)}"
