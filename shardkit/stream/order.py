"""Which sample comes when: arithmetic on (seed, epoch, position), with no I/O and no generator.

One dataset's epoch. The shards are cut into blocks, and the blocks are put in an order that depends
on seed and epoch. That list of samples is cut into `parts` equal pieces, and each part is shuffled
in windows: a shuffle buffer that holds addresses instead of samples. Position k of the epoch is
number k // parts of part k % parts. Nothing in here knows of ranks or of workers, so that they
change nothing.

Only block boundaries and the windows in use are in memory, so a billion samples cost what their
shards cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from shardkit.order import permutation, seed_of

if TYPE_CHECKING:
    import numpy.typing as npt

Numbers: TypeAlias = "npt.NDArray[np.int64]"

ORDER_VERSION = 1  # changes with every change of what comes when; a state of another is refused
EPOCHS = 1 << 31  # as many as there are: a mixture counts its draws of all of them in 64 bits
WINDOW = 1 << 16  # samples; 16 bytes each
_BLOCKS = 16  # in a window, at least, so that it mixes samples from many places
_BLOCK_ORDER, _WINDOW_ORDER, _MIX_ORDER = range(3)  # what a seed is for
_MIX = 1024  # draws of a mixture that are permuted among themselves
_SHARES = 1 << 20  # whole parts that the weights of a mixture are rounded to


class Draw(NamedTuple):
    """Samples in the order they come: their numbers, and how often each dataset began anew."""

    number: Numbers
    turn: Numbers  # the epoch, of a mixture that of the sample's own dataset


class Order:
    """The order of one dataset's samples in every epoch."""

    def __init__(
        self, sizes: Numbers, *, shuffle: bool, seed: int, parts: int = 1, window: int = WINDOW
    ) -> None:
        """`sizes` has the samples of each shard, in order."""
        self.samples = int(sizes.sum())
        self.parts = parts
        self._shuffle, self._seed, self._window = shuffle, seed, window
        self._starts, self._sizes = _blocks(sizes, max(window // _BLOCKS, 1))
        self._epoch = -1
        self._order: Numbers  # first sample of each block, in this epoch's order
        self._ends: Numbers  # samples in the list up to the end of each block
        self._windows: dict[int, tuple[int, Numbers]] = {}  # of each part in use: number, order

    def draw(self, epoch: int, positions: Numbers) -> Draw:
        """The samples at these positions of an epoch, each in [0, samples)."""
        self._begin(epoch)
        index = np.empty(len(positions), np.int64)
        places, parts = np.divmod(positions, self.parts)
        used = np.unique(parts).tolist() if self.parts > 1 else [0]
        for part in used:
            rows = np.flatnonzero(parts == part)
            index[rows] = self._in_part(part, places[rows])
        for part in self._windows.keys() - set(used):
            del self._windows[part]
        return Draw(index, np.full(len(positions), epoch, np.int64))

    def _begin(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        blocks = len(self._sizes)
        if self._shuffle:
            order = permutation(blocks, seed_of(self._seed, epoch, _BLOCK_ORDER))
            self._order, self._ends = self._starts[order], self._sizes[order].cumsum()
        else:
            self._order, self._ends = self._starts, self._sizes.cumsum()
        self._epoch = epoch
        self._windows.clear()

    def _in_part(self, part: int, places: Numbers) -> Numbers:
        """The samples at these places of a part."""
        whole, rest = divmod(self.samples, self.parts)
        start = part * whole + min(part, rest)
        if self._shuffle:
            numbers = places // self._window
            size = whole + (part < rest)
            places = places.copy()
            for number in np.unique(numbers).tolist():
                inside = np.flatnonzero(numbers == number)
                first = number * self._window
                order = self._shuffled(part, number, min(self._window, size - first))
                places[inside] = first + order[places[inside] - first]
        listed = start + places
        block = np.searchsorted(self._ends, listed, side="right")
        return self._order[block] + listed - (self._ends[block] - self._sizes_of(block))

    def _sizes_of(self, block: Numbers) -> Numbers:
        before = self._ends[np.maximum(block - 1, 0)]
        return self._ends[block] - np.where(block > 0, before, 0)

    def _shuffled(self, part: int, number: int, size: int) -> Numbers:
        kept = self._windows.get(part)
        if kept is None or kept[0] != number:
            seed = seed_of(self._seed, self._epoch, _WINDOW_ORDER, part, number)
            kept = self._windows[part] = (number, permutation(size, seed))
        return kept[1]


def _blocks(sizes: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """First sample and size of each block: shards, cut evenly where they are longer than `most`."""
    pieces = np.maximum(-(-sizes // most), 1)
    shard = np.repeat(np.arange(len(sizes)), pieces)
    number = np.arange(len(shard)) - np.repeat(pieces.cumsum() - pieces, pieces)
    start = number * sizes[shard] // pieces[shard]
    stop = (number + 1) * sizes[shard] // pieces[shard]
    kept = stop > start
    first = (sizes.cumsum() - sizes)[shard]
    return (first + start)[kept], (stop - start)[kept]


class Mixture:
    """Several datasets, drawn from by weight; each goes through its own epochs at its own pace.

    Over any stretch of the order the datasets have their shares almost exactly: it is a line of
    Bresenham between the first and the rest, then between the second and the rest, and so on, and
    every 1,024 draws are permuted. An epoch is as many samples as all datasets have together.
    """

    def __init__(self, orders: Sequence[Order], weights: Sequence[float], seed: int) -> None:
        self.samples = sum(order.samples for order in orders)
        self.parts = max(order.parts for order in orders)
        self._orders = list(orders)
        self._seed = seed
        shares = np.array(weights, np.float64) / sum(weights) * _SHARES
        self._shares = np.maximum(np.rint(shares), 1).astype(np.int64)
        self._firsts = np.cumsum([0, *(order.samples for order in orders)])

    def draw(self, epoch: int, positions: Numbers) -> Draw:
        """The samples at these positions of an epoch, each in [0, samples)."""
        drawn = epoch * self.samples + positions  # since the beginning of the first epoch
        source, number = self._sources(self._permuted(drawn))
        index = np.empty(len(positions), np.int64)
        turn = np.empty(len(positions), np.int64)
        for which in np.unique(source).tolist():
            order, rows = self._orders[which], np.flatnonzero(source == which)
            turn[rows], places = np.divmod(number[rows], order.samples)
            for own in np.unique(turn[rows]).tolist():
                now = turn[rows] == own
                index[rows[now]] = self._firsts[which] + order.draw(own, places[now]).number
        return Draw(index, turn)

    def _permuted(self, drawn: Numbers) -> Numbers:
        """Neither ranks nor parts may see only every other draw: that could be one dataset."""
        result = np.empty(len(drawn), np.int64)
        groups, places = np.divmod(drawn, _MIX)
        for group in np.unique(groups).tolist():
            order = permutation(_MIX, seed_of(self._seed, _MIX_ORDER, group))
            rows = np.flatnonzero(groups == group)
            result[rows] = group * _MIX + order[places[rows]]
        return result

    def _sources(self, drawn: Numbers) -> tuple[Numbers, Numbers]:
        """Of each draw the dataset, and which of that dataset's own draws it is."""
        source = np.full(len(drawn), len(self._shares) - 1, np.int64)
        number = drawn.copy()
        open_ = np.ones(len(drawn), np.bool_)
        rest = int(self._shares.sum())
        for which, share in enumerate(self._shares[:-1].tolist()):
            before, after = _share(number, share, rest), _share(number + 1, share, rest)
            here = open_ & (after > before)
            source[here], number[here] = which, before[here]
            open_ &= ~here
            number[open_] -= before[open_]
            rest -= share
        return source, number


def _share(number: Numbers, share: int, rest: int) -> Numbers:
    """`number * share // rest`, where that product may be too large for 64 bits."""
    whole = number // rest
    return whole * share + (number - whole * rest) * share // rest
