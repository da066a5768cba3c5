"""The order of samples: computed from (seed, epoch, position), without I/O or generator state.

In an epoch of one dataset, the shards are cut into blocks, and the blocks are put in an order that
depends on seed and epoch. This list of samples is cut into `parts` equal parts, and each part is
shuffled in windows: shuffle buffers that hold sample numbers instead of samples. Position k of the
epoch is element k // parts of part k % parts. The order does not depend on ranks or workers.

Only block boundaries and the windows in use are in memory, so memory grows with the number of
shards, not with the number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardkit.helpers.order import permutation, seed_of

Numbers: TypeAlias = "npt.NDArray[np.int64]"

ORDER_VERSION = 1  # changes whenever the order does; states of other versions are rejected
EPOCHS = 1 << 31  # maximum: a mixture counts the draws of all epochs in 64 bits
WINDOW = 1 << 16  # samples; 16 bytes each
_BLOCKS = 16  # minimum number per window, so that it mixes samples of many shards
_BLOCK_ORDER, _WINDOW_ORDER, _MIX_ORDER = range(3)  # purposes of a seed
_MIX = 1024  # number of consecutive draws of a mixture that are permuted
_SHARES = 1 << 20  # the sum to which the weights of a mixture are scaled


class Draw(NamedTuple):
    """Samples in order, by number."""

    number: Numbers
    epoch: Numbers  # in a mixture, the epoch of the sample's own dataset


class _Epoch(NamedTuple):
    """The state of an epoch in memory. Threads in different epochs replace it atomically."""

    number: int
    # For each block in this epoch's order: its end in the list of samples, and the difference
    # between a sample's number and its position in that list.
    ends: Numbers
    shifts: Numbers
    windows: dict[int, tuple[int, Numbers]]  # part in use -> window number, order


class Order:
    """The order of one dataset's samples in every epoch."""

    def __init__(
        self, sizes: Numbers, *, shuffle: bool, seed: int, parts: int = 1, window: int = WINDOW
    ) -> None:
        """`sizes` has the samples of each shard, in order."""
        self.samples = int(sizes.sum())
        self.parts = parts
        self.window = window
        self._shuffle, self._seed = shuffle, seed
        self._starts, self._sizes = _blocks(sizes, max(window // _BLOCKS, 1))
        self._latest: _Epoch | None = None

    def draw(self, epoch: int, positions: Numbers) -> Draw:
        """Return the samples at these positions of an epoch, each in [0, samples)."""
        here = self._epoch(epoch)
        index = np.empty(len(positions), np.int64)
        within, parts = np.divmod(positions, self.parts)
        used = np.unique(parts).tolist() if self.parts > 1 else [0]
        for part in used:
            rows = np.flatnonzero(parts == part)
            index[rows] = self._in_part(here, part, within[rows])
        for part in {*here.windows} - {*used}:
            here.windows.pop(part, None)
        return Draw(index, np.full(len(positions), epoch, np.int64))

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self._sizes)

    @property
    def windows(self) -> int:
        """The number of windows of the longest part."""
        return math.ceil(math.ceil(self.samples / self.parts) / self.window)

    def blocks_of(self, first: int, last: int) -> slice:
        """Return the blocks, in stored order, that contain the samples from `first` to `last`."""
        begin, end = np.searchsorted(self._starts, [first, last], side="right").tolist()
        return slice(begin - 1, end)

    def uses(
        self, epoch: int, parts: frozenset[int] | None = None
    ) -> list[npt.NDArray[np.float64]]:
        """For each block, the windows (within their parts) that contain its first and last sample.

        Infinity for a block that is in none of `parts` (None: all).
        """
        order = self._block_order(epoch)
        ends = self._sizes[order].cumsum()
        whole, rest = divmod(self.samples, self.parts)
        found: list[npt.NDArray[np.float64]] = []
        for position in (ends - self._sizes[order], ends - 1):
            longer = rest * (whole + 1)  # samples in the first parts, which have one more each
            part = np.where(
                position < longer,
                position // (whole + 1),
                rest + (position - longer) // max(whole, 1),
            )
            start = part * whole + np.minimum(part, rest)
            window = ((position - start) // self.window).astype(np.float64)
            if parts is not None:
                window[~np.isin(part, list(parts))] = np.inf
            by_block = np.empty(len(order))
            by_block[order] = window
            found.append(by_block)
        return found

    def _block_order(self, epoch: int) -> Numbers:
        """Return the blocks in the order of an epoch."""
        seed = seed_of(self._seed, epoch, _BLOCK_ORDER)
        return permutation(self.blocks, seed) if self._shuffle else np.arange(self.blocks)

    def _epoch(self, epoch: int) -> _Epoch:
        latest = self._latest
        if latest is not None and latest.number == epoch:
            return latest
        order = self._block_order(epoch)
        starts, sizes = self._starts[order], self._sizes[order]
        ends: Numbers = sizes.cumsum()
        self._latest = latest = _Epoch(epoch, ends, starts - (ends - sizes), {})
        return latest

    def _in_part(self, epoch: _Epoch, part: int, positions: Numbers) -> Numbers:
        """Return the samples at these positions of a part."""
        whole, rest = divmod(self.samples, self.parts)
        start = part * whole + min(part, rest)
        if self._shuffle:
            numbers = positions // self.window
            size = whole + (part < rest)
            positions = positions.copy()
            for number in np.unique(numbers).tolist():
                inside = np.flatnonzero(numbers == number)
                first = number * self.window
                order = self._shuffled(epoch, part, number, min(self.window, size - first))
                positions[inside] = first + order[positions[inside] - first]
        listed = start + positions
        return listed + epoch.shifts[np.searchsorted(epoch.ends, listed, side="right")]

    def _shuffled(self, epoch: _Epoch, part: int, number: int, size: int) -> Numbers:
        """Return the order of a window, which is cached while its part is in use."""
        window = epoch.windows.get(part)
        if window is None or window[0] != number:
            seed = seed_of(self._seed, epoch.number, _WINDOW_ORDER, part, number)
            window = epoch.windows[part] = (number, permutation(size, seed))
        return window[1]


def _blocks(sizes: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """First sample and size of each block. Shards longer than `most` are cut evenly."""
    pieces = np.maximum(-(-sizes // most), 1)
    shard = np.repeat(np.arange(len(sizes)), pieces)
    number = np.arange(len(shard)) - np.repeat(pieces.cumsum() - pieces, pieces)
    start = number * sizes[shard] // pieces[shard]
    stop = (number + 1) * sizes[shard] // pieces[shard]
    filled = stop > start
    first = (sizes.cumsum() - sizes)[shard]
    return (first + start)[filled], (stop - start)[filled]


class Mixture:
    """Draws from several datasets by weight. Each dataset has epochs of its own length.

    In any range of the order, the datasets have almost exactly their shares: Bresenham's algorithm
    divides draws between the first dataset and the rest, then between the second and the rest, and
    so on, and each group of 1,024 draws is permuted. An epoch has as many samples as all datasets
    together.
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
        """Return the samples at these positions of an epoch, each in [0, samples)."""
        drawn = epoch * self.samples + positions  # counted from the start of the first epoch
        source, number = self._sources(self._permuted(drawn))
        index = np.empty(len(positions), np.int64)
        epochs = np.empty(len(positions), np.int64)
        for which in np.unique(source).tolist():
            order, rows = self._orders[which], np.flatnonzero(source == which)
            epochs[rows], within = np.divmod(number[rows], order.samples)
            for own in np.unique(epochs[rows]).tolist():
                now = epochs[rows] == own
                index[rows[now]] = self._firsts[which] + order.draw(own, within[now]).number
        return Draw(index, epochs)

    def _permuted(self, drawn: Numbers) -> Numbers:
        """Permute draws. Otherwise, a rank that gets every n-th draw might see only one dataset."""
        result = np.empty(len(drawn), np.int64)
        groups, within = np.divmod(drawn, _MIX)
        for group in np.unique(groups).tolist():
            order = permutation(_MIX, seed_of(self._seed, _MIX_ORDER, group))
            rows = np.flatnonzero(groups == group)
            result[rows] = group * _MIX + order[within[rows]]
        return result

    def _sources(self, drawn: Numbers) -> tuple[Numbers, Numbers]:
        """The dataset of each draw, and the draw's number among the draws of that dataset."""
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
    """`number * share // rest`, without overflow if the product exceeds 64 bits."""
    whole = number // rest
    return whole * share + (number - whole * rest) * share // rest
