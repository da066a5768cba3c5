"""The sample numbers of a view: a range, which takes no memory, or an int64 array."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.errors import UsageError

Numbers: TypeAlias = "npt.NDArray[np.int64]"
Indices: TypeAlias = "range | Numbers"

_EXPECTED = "whole numbers, or True or False for each sample"


def chosen(selection: Any, length: int) -> Indices:
    """Check a selection of `length` samples: a range, whole numbers, or a boolean mask.

    Negative numbers count from the end. Raises IndexError for a number out of range, and UsageError
    for anything else.
    """
    if isinstance(selection, range) and selection:
        wrong = [n for n in (selection[0], selection[-1]) if not -length <= n < length]
        if wrong:
            raise _no_sample(wrong[0], length)
        if min(selection[0], selection[-1]) >= 0:
            return selection
    try:
        found = np.asarray(selection if hasattr(selection, "__len__") else list(selection))
    except (TypeError, ValueError) as error:
        raise UsageError(
            "samples are selected by their numbers", expected=_EXPECTED, found=f"{selection!r:.100}"
        ) from error
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "biu"):
        what = f"{type(selection).__name__} of {found.dtype}, shape {found.shape}"
        raise UsageError("samples are selected by their numbers", expected=_EXPECTED, found=what)
    if found.dtype.kind == "b":
        if len(found) != length:
            raise UsageError(
                "a mask has one value per sample",
                expected=f"{length:,} values",
                found=f"{len(found):,}",
            )
        return np.flatnonzero(found)
    if not len(found):
        return range(0)
    if (found < -length).any() or (found >= length).any():
        raise _no_sample(found[(found < -length) | (found >= length)][0], length)
    numbers = found.astype(np.int64)
    numbers[numbers < 0] += length
    return numbers


def _no_sample(number: int, length: int) -> IndexError:
    return IndexError(f"index {number} is out of range: there are {length:,} samples")


def compact(numbers: Indices) -> Indices:
    """Return the same numbers in canonical form: a range if they are equally spaced."""
    count = len(numbers)
    if not count:
        return range(0)
    if isinstance(numbers, range):
        return numbers if count > 1 else range(numbers[0], numbers[0] + 1)
    first, last = int(numbers[0]), int(numbers[-1])
    step = int(numbers[1]) - first if count > 1 else 1
    if step and first + step * (count - 1) == last and (np.diff(numbers) == step).all():
        return range(first, last + (1 if step > 0 else -1), step)
    numbers.flags.writeable = False
    return numbers


def array(indices: Indices) -> Numbers:
    """Return the numbers as an int64 array."""
    if isinstance(indices, range):
        return np.arange(indices.start, indices.stop, indices.step, dtype=np.int64)
    return indices


def pick(outer: Indices, inner: Indices) -> Indices:
    """`outer[i]` for each i of `inner`: the numbers of a view of a view."""
    if isinstance(outer, range):
        if isinstance(inner, range):
            return outer[as_slice(inner)]
        return outer.start + outer.step * inner
    return outer[as_slice(inner) if isinstance(inner, range) else inner]


def as_slice(numbers: range) -> slice:
    """Return the slice that selects these indices, none of which may be negative."""
    if not numbers:
        return slice(0)
    return slice(numbers.start, numbers.stop if numbers.stop >= 0 else None, numbers.step)


def ascending(indices: Indices) -> bool:
    """Return whether the numbers never decrease."""
    if isinstance(indices, range):
        return indices.step > 0 or len(indices) < 2
    return bool((indices[1:] >= indices[:-1]).all())


def in_order(indices: Indices) -> Indices:
    """Return the same numbers in ascending order."""
    if ascending(indices):
        return indices
    return indices[::-1] if isinstance(indices, range) else np.sort(indices)


def below(indices: Indices, bounds: Numbers) -> Numbers:
    """Return how many of `ascending` numbers are less than each bound."""
    if isinstance(indices, range):
        before = -(-(bounds - indices.start) // indices.step)
        return np.clip(before, 0, len(indices))
    return np.searchsorted(indices, bounds)


def digest(indices: Indices) -> str:
    """Return a hash of the numbers and their order."""
    if isinstance(indices, range):
        return f"{indices.start}:{len(indices)}:{indices.step}"
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(indices, "<i8").data)
