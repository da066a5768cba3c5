"""Divides samples into splits, stratified by classes, by groups, or into folds of equal size.

The result depends only on keys, values and a seed, not on the order of the samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import UsageError
from shardkit.metadata.recipe import Recipe
from shardkit.sources.base import Indices, Source
from shardkit.sources.subset import Subset, chance

Floats = npt.NDArray[np.float64]

_EXACT = 1e-9  # rounding error allowed when shares such as 0.29 give a whole number of samples


def divided(source: Source, keys: Sequence[str], recipe: Recipe) -> Indices:
    """The split number of each sample; adds notes about the outcome to the source."""
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
    """The split number of each sample, such that no group is divided between splits.

    Groups are assigned from the largest to the smallest, each to the split in which the squared
    differences from the wanted counts of each stratum, divided by those counts, increase least (the
    chi-squared distance). Groups of equal size are ordered by `ranks`. With one stratum and equal
    shares, a group goes to the smallest split, as in scikit-learn's GroupKFold.
    """
    sizes = np.bincount(groups)
    pairs, counts = np.unique(np.stack([groups, strata], 1), axis=0, return_counts=True)
    starts = np.searchsorted(pairs[:, 0], np.arange(len(sizes) + 1)).tolist()
    wanted = np.bincount(strata)[None, :] * shares[:, None]  # (splits, strata)
    given = np.zeros_like(wanted)
    split_of = np.zeros(len(sizes), np.int64)
    for group in np.lexsort((ranks, -sizes)).tolist():
        here = slice(starts[group], starts[group + 1])
        of, more = pairs[here, 1], counts[here]
        costs = ((2 * given[:, of] + more) * more / wanted[:, of]).sum(1)
        split = int(np.argmin(costs.round(12)))
        given[split, of] += more
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
    """The rank of each group, by its number, among groups of equal size."""
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
