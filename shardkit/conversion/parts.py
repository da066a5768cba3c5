"""What the parts of a conversion agree on, and which parts are missing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from shardkit.conversion.outline import Outline
from shardkit.errors import OutputError
from shardkit.helpers.checked import plain
from shardkit.helpers.part_of import PartOf

if TYPE_CHECKING:
    from shardkit.conversion.partial import Partial

_FOUND = ("problems", "ignored", "filtered", "tokenizer")  # of a split, found while planning
_SHOWN = 12  # parts that an error names


def agree(outline: Outline, partial: Partial) -> None:
    """Store the outline of this part, for `merge`, or compare it with the one that is stored.

    Of the options that do not change any task, those of the part that began last count. Parts that
    may drop samples (--on-error skip) reuse the work of parts that may not. Raises OutputError if
    this part would run other tasks, or run them differently.
    """
    path = partial.outline
    if (packed := partial.read(path)) is None:
        partial.write(path, outline.packed(), replace=False)
        packed = partial.read(path)  # another part may have been faster
    assert packed is not None
    stored = Outline.unpacked(packed, path)
    if words := _differences(stored, outline):
        raise OutputError(
            "this part has a different plan than the parts that began before",
            path=path,
            found=words,
            fix="give all parts the same source and options",
        )
    if _policy(stored) != _policy(outline):
        partial.write(path, outline.packed(), replace=True)


def _policy(outline: Outline) -> tuple[str, int, bool]:
    """The options that do not change any task."""
    return outline.recipe.on_error, outline.max_errors, outline.overwrite


def _differences(stored: Outline, own: Outline) -> str:
    """The differences between the outlines of two parts of the same job, in words."""
    before, now = stored.recipe.on_error, own.recipe.on_error
    if (before, now) == ("skip", "fail"):
        return f"on_error was {before}, is {now}"
    if not np.array_equal(stored.tasks, own.tasks):
        return f"the work was divided into {len(stored.tasks):,} tasks, now {len(own.tasks):,}"
    same = _work_of(stored) == _work_of(own)
    return "" if same else "splits have other names, fields or classes"


def _work_of(outline: Outline) -> str:
    """What the tasks have to do, without what planning has ignored, which may change."""
    found = (vars(split).items() for split in outline.splits)
    work = [{name: plain(value) for name, value in each if name not in _FOUND} for each in found]
    return json.dumps(work, sort_keys=True)


def who_is_missing(begun: Sequence[PartOf], missing: Collection[int]) -> tuple[str, list[PartOf]]:
    """The parts that should do the `missing` tasks: in words, and as a list."""
    counts = Counter(part.total for part in begun)
    words = "1 task is missing" if len(missing) == 1 else f"{len(missing):,} tasks are missing"
    if not counts:
        return words, []
    total = counts.most_common(1)[0][0]
    parts = parts_of(missing, total)
    kinds = {
        "never began": [part for part in parts if part not in begun],
        "began and did not end": [part for part in parts if part in begun],
    }
    which = [f"{_listed(found)} {kind}" for kind, found in kinds.items() if found]
    return f"{words}: {'; '.join(which)}", parts


def parts_of(tasks: Collection[int], total: int) -> list[PartOf]:
    """The parts, of so many, that the tasks belong to."""
    return [PartOf(number, total) for number in sorted({task % total + 1 for task in tasks})]


def _listed(parts: Sequence[PartOf]) -> str:
    names = [str(part) for part in parts[:_SHOWN]]
    more = [f"{len(parts) - _SHOWN:,} more"] if len(parts) > _SHOWN else []
    return ", ".join([*names, *more])
