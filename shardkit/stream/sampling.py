"""Sampling: draws each sample a variable number of times per epoch, instead of once.

`Balanced` and `Weighted` are the values of the option `sampling`. Both compute how often an epoch
draws each sample, by arithmetic on seed and epoch. `Sampled` shuffles these draws as order.py does,
with copies of a sample adjacent before shuffling. So the result does not depend on ranks or
workers, and a state is still just a position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.errors import UsageError
from shardkit.helpers.order import permutation, seed_of, splitmix
from shardkit.options import check_numbers
from shardkit.stream.order import WINDOW, Draw, Mixture, Numbers, Order

_DRAWS, _OFFSET = 5, 6  # purposes of a seed, in addition to those of order.py and schedule.py
_MAX_DRAWS = 1 << 30  # maximum number of draws per epoch
_LARGEST = 1e200  # maximum weight, so that the sum of weights is finite


@dataclass(frozen=True, eq=False)
class Balanced:
    """Draw all classes equally often: with C classes, each has 1/C of the draws of an epoch.

    If C does not divide the number of draws, some classes have one draw more; which ones changes
    from epoch to epoch. A sample is drawn again only after all samples of its class were drawn, in
    this epoch or in earlier ones. Each such pass through a class has its own order.

    classes: name of a field with one value per sample, or the values themselves, of shape
        (samples,). None: the labels. Each value that occurs is a class.
    samples: number of draws in an epoch, over all ranks. None: as many as the datasets have
        samples.
    """

    classes: str | Sequence[Any] | npt.NDArray[Any] | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        check_numbers(self, _MAX_DRAWS, samples=1)

    def sampler(self, classes: npt.NDArray[Any], samples: int, seed: int) -> _ByClass:
        """Return the sampler for the classes of all samples. Raises UsageError for other values."""
        kinds = {type(value) for value in classes} if classes.dtype == object else {str}
        if classes.dtype.kind not in "iubUSO" or not (kinds <= {str} or kinds <= {int, bool}):
            found = ", ".join(sorted(kind.__name__ for kind in kinds - {str}))
            raise UsageError(
                "Balanced needs a class for each sample",
                expected="whole numbers, booleans or text",
                found=f"values of type {found or classes.dtype}",
            )
        return _ByClass(classes, samples, seed)


@dataclass(frozen=True, eq=False)
class Weighted:
    """Draw each sample in proportion to its weight.

    In an epoch of n draws, a sample of weight w is drawn n * w / (sum of weights) times, rounded
    down or up. This is systematic sampling (Madow, 1949), with the samples in another order each
    epoch. torch's WeightedRandomSampler has the same counts on average.

    weights: name of a field with one number per sample, or the numbers themselves, of shape
        (samples,). No weight may be negative. A sample of weight 0 is never drawn.
    samples: number of draws in an epoch, as in `Balanced`.
    """

    weights: str | Sequence[float] | npt.NDArray[Any]
    samples: int | None = None

    def __post_init__(self) -> None:
        check_numbers(self, _MAX_DRAWS, samples=1)

    def sampler(self, weights: npt.NDArray[Any], samples: int, seed: int) -> _ByWeight:
        """The sampler for the weights of all samples. Raises UsageError for invalid weights."""
        if weights.dtype.kind not in "iubf":
            raise UsageError("weights must be numbers", found=f"values of type {weights.dtype}")
        weights = weights.astype(np.float64)
        bad = np.flatnonzero(~(weights >= 0) | (weights > _LARGEST))
        if len(bad):
            raise UsageError(
                f"weights must be finite and not negative: 0 to {_LARGEST:g}",
                found=f"{weights[bad[0]]} for sample {bad[0]}, and {len(bad) - 1:,} others",
            )
        if not weights.any():
            raise UsageError("all weights are 0, so no sample would be drawn")
        return _ByWeight(weights, samples, seed)


Sampling: TypeAlias = Balanced | Weighted


def values_of(sampling: Sampling) -> str | npt.NDArray[Any] | None:
    """Return the field that a sampling uses (None: the labels), or the values themselves."""
    given = sampling.classes if isinstance(sampling, Balanced) else sampling.weights
    if isinstance(given, str) or (given is None and isinstance(sampling, Balanced)):
        return given
    try:
        values = np.asarray(given)
    except ValueError:  # nested lists of different lengths
        values = np.array(None)
    if values.ndim != 1:
        raise UsageError(
            "sampling needs one value for each sample",
            expected="the name of a field, a list, or a one-dimensional array",
            found=f"{type(given).__name__} {given!r:.80}",
        )
    return values


def identity(sampling: Sampling) -> list[Any]:
    """JSON values that identify a sampling, for a state."""
    values = values_of(sampling)
    if values is not None and not isinstance(values, str):
        data = "\0".join(map(str, values.tolist())).encode()
        values = "xxh3-64 " + xxhash.xxh3_64_hexdigest(data)
    return [type(sampling).__name__, values, sampling.samples]


class Sampled:
    """The order of an epoch's draws, with the methods of `Order` that schedules use.

    In memory: 8 to 24 bytes a sample for the sampler, and 16 bytes a draw of the current epoch.
    """

    def __init__(
        self,
        sizes: Numbers,
        sampler: _ByClass | _ByWeight,
        *,
        seed: int,
        parts: int = 1,
        window: int = WINDOW,
    ) -> None:
        """`sizes` has the samples of each shard, in order."""
        self.samples = sampler.samples
        self.parts = parts
        self._ends = sizes.cumsum()
        self._sampler = sampler
        self._ordering: dict[str, Any] = {"seed": seed, "parts": parts, "window": window}
        # An epoch, its draws and their order: one tuple, which threads in different epochs can
        # replace atomically.
        self._latest: tuple[int, Draw, Order] | None = None

    def draw(self, epoch: int, positions: Numbers) -> Draw:
        """Return the draws at these positions of an epoch, each in [0, samples)."""
        latest = self._latest
        if latest is None or latest[0] != epoch:
            number, of_sample = self._sampler.drawn(epoch)
            stored = np.lexsort((of_sample, number))
            drawn = Draw(number[stored], of_sample[stored])
            # The order's shards are those of the dataset, with this epoch's draws as their samples.
            stops = np.searchsorted(drawn.number, self._ends, side="left")
            order = Order(np.diff(stops, prepend=0), shuffle=True, **self._ordering)
            self._latest = latest = epoch, drawn, order
        _, drawn, order = latest
        listed = order.draw(epoch, positions).number
        return Draw(drawn.number[listed], drawn.epoch[listed])


AnyOrder: TypeAlias = Order | Mixture | Sampled


class _ByClass:
    """`Balanced`: draws of a class continue across epochs, in passes through all its samples.

    Draw k, counted from the start of the first epoch, belongs to class k mod C.
    """

    def __init__(self, classes: npt.NDArray[Any], samples: int, seed: int) -> None:
        self.samples = samples
        self._seed = seed
        _, which, self._sizes = np.unique(classes, return_inverse=True, return_counts=True)
        self._members = np.argsort(which, kind="stable")  # class by class
        self._class = np.repeat(np.arange(len(self._sizes)), self._sizes)
        self._starts = self._sizes.cumsum() - self._sizes

    def drawn(self, epoch: int) -> Draw:
        """All draws of an epoch, in any order. No two draws of a sample have the same `epoch`."""
        first, begin = np.divmod(self._before(epoch), self._sizes)
        last, end = np.divmod(self._before(epoch + 1), self._sizes)
        of = self._class
        # The rest of the pass in progress, the full passes after it, and the start of the last one.
        rest = self._rank(first) >= begin[of]
        beginning = self._rank(last) < end[of]
        one = (first == last)[of]
        rest, beginning = rest & (~one | beginning), beginning & ~one
        between = np.maximum(last - first - 1, 0)[of]
        copies = np.arange(between.sum()) - np.repeat(between.cumsum() - between, between)
        number = (self._members[rest], np.repeat(self._members, between), self._members[beginning])
        passes = (first[of][rest], np.repeat(first[of] + 1, between) + copies, last[of][beginning])
        return Draw(np.concatenate(number), np.concatenate(passes))

    def _before(self, epoch: int) -> Numbers:
        """Return the number of draws of each class in all earlier epochs."""
        classes = len(self._sizes)
        return (epoch * self.samples - np.arange(classes) + classes - 1) // classes

    def _rank(self, passes: Numbers) -> Numbers:
        """The position of each sample in a pass of its class; `passes` has one of each class."""
        seed = np.uint64(seed_of(self._seed, _DRAWS))
        of_pass = splitmix(splitmix(passes.astype(np.uint64) ^ seed))[self._class]
        hashes = splitmix(of_pass ^ self._members.astype(np.uint64))
        rank = np.empty(len(hashes), np.int64)
        rank[np.lexsort((hashes, self._class))] = np.arange(len(hashes))
        return rank - self._starts[self._class]


class _ByWeight:
    """`Weighted`: equidistant points on a line along which samples are laid by their weights."""

    def __init__(self, weights: npt.NDArray[np.float64], samples: int, seed: int) -> None:
        self.samples = samples
        self._seed = seed
        self._expected = weights / weights.sum() * samples  # draws of each sample, as fractions
        self._most = math.ceil(self._expected.max()) + 1

    def drawn(self, epoch: int) -> Draw:
        order = permutation(len(self._expected), seed_of(self._seed, epoch, _DRAWS))
        offset = (seed_of(self._seed, epoch, _OFFSET) >> 11) / 2**53
        ends = np.floor(self._expected[order].cumsum() + offset).astype(np.int64)
        # Correct rounding errors of the sum.
        ends = np.minimum(ends, self.samples)
        ends[np.flatnonzero(self._expected[order])[-1] :] = self.samples
        counts = np.diff(ends, prepend=0)
        copies = np.arange(self.samples) - np.repeat(ends - counts, counts)
        return Draw(np.repeat(order, counts), epoch * self._most + copies)
