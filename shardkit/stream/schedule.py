"""The steps of each rank: cuts the order of samples into an equal number of batches per rank.

`StreamProgress` counts for all ranks together, so a state is the same on all of them, and any other
number of ranks can resume from it.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardkit.errors import UsageError
from shardkit.helpers.order import seed_of
from shardkit.options import is_whole
from shardkit.sample import Sample
from shardkit.stream.batching import Batching, MicroBatch
from shardkit.stream.order import EPOCHS, ORDER_VERSION, Draw, Numbers
from shardkit.stream.sampling import AnyOrder

_TOGETHER = 16  # steps that are drawn at once
_PLAN = 3  # a purpose of a seed, in addition to those of order.py
_PLANS = 2  # windows whose plans are kept: a step of several ranks may need those of two
_EPOCHS = 8  # epochs whose numbers of micro-batches are kept


class StreamProgress(NamedTuple):
    """The progress of an epoch: number of samples that all ranks together have taken.

    If batches are planned window by window: number of samples in the completed windows, and number
    of micro-batches taken from the next window.
    """

    samples: int = 0
    batches: int = 0


START = StreamProgress()


class Step(NamedTuple):
    """The samples of one batch of one rank."""

    number: Numbers  # of each sample, in all datasets together
    epoch: Numbers  # of each sample's dataset, which seeds its random numbers
    valid: npt.NDArray[np.bool_]  # False for padding
    segments: Numbers | None  # of packed rows, as `MicroBatch.segments`
    after: StreamProgress  # of all ranks, after each has done this step
    ahead: dict[int, Future[Sample]] | None = None  # samples that are being read, if remote


class Fixed:
    """The steps of one rank, with batches of a fixed number of samples.

    Several threads may use it, each with its own progress.

    Global batch b has the positions [b * size, (b + 1) * size), for `size` samples of all ranks
    together. They are sorted by canonical part, and rank r gets the r-th slice of them. If the
    number of parts is a multiple of the number of ranks, a rank always reads its own parts.
    """

    def __init__(self, order: AnyOrder, per_rank: int, rank: int, world: int, last: str) -> None:
        self._order = order
        self.size = per_rank * world  # samples of a global batch
        self._rank, self._world = rank, world
        self._last = last
        self._ahead: dict[tuple[int, StreamProgress], Step] = {}
        self.valid = f"0 to {order.samples:,} samples, 0 batches"  # what `normalized` accepts

    def steps(self, epoch: int, progress: StreamProgress = START) -> int:
        """Return the number of steps left in an epoch, which is the same for every rank."""
        left = self._order.samples - progress.samples
        return left // self.size if self._last == "drop" else -(-left // self.size)

    def progress(self, epoch: int, steps: int) -> StreamProgress:
        """Return the progress of all ranks after the first `steps` steps of an epoch."""
        return StreamProgress(min(steps * self.size, self._order.samples))

    def normalized(self, epoch: int, progress: StreamProgress) -> StreamProgress | None:
        """The progress in canonical form; None if it cannot be reached with any number of ranks."""
        reached = 0 <= progress.samples <= self._order.samples and not progress.batches
        return progress if reached else None

    def is_over(self, epoch: int, progress: StreamProgress) -> bool:
        """Return whether no step is left."""
        return not self.steps(epoch, progress)

    def step(self, epoch: int, progress: StreamProgress) -> Step | None:
        """Return the next step; None at the end of the epoch."""
        ahead = self._ahead
        if (epoch, progress) not in ahead:
            self._ahead = ahead = self._several(epoch, progress)
        return ahead.get((epoch, progress))

    def _several(
        self, epoch: int, progress: StreamProgress
    ) -> dict[tuple[int, StreamProgress], Step]:
        """Return the next steps. Drawing several at once takes little longer than drawing one."""
        points = [progress]
        shares: list[tuple[Numbers, npt.NDArray[np.bool_], int]] = []
        while len(shares) < _TOGETHER and (share := self._positions(points[-1])) is not None:
            shares.append(share)
            points.append(StreamProgress(min(points[-1].samples + share[2], self._order.samples)))
        if not shares:
            return {}
        draw = self._order.draw(epoch, np.concatenate([positions for positions, _, _ in shares]))
        steps, start = {}, 0
        for here, after, (positions, valid, _) in zip(points, points[1:], shares, strict=False):
            rows = slice(start, start + len(positions))
            steps[epoch, here] = Step(draw.number[rows], draw.epoch[rows], valid, None, after)
            start = rows.stop
        return steps

    def _positions(
        self, progress: StreamProgress
    ) -> tuple[Numbers, npt.NDArray[np.bool_], int] | None:
        """This rank's positions of a step, which are not padding, and the global batch size."""
        samples, first = self._order.samples, progress.samples
        left, size = samples - first, self.size
        if left <= 0 or (left < size and self._last == "drop"):
            return None
        if left < size and self._last == "short":
            size = max(left, self._world)  # a rank without samples would block the others
        mine = _share(size, self._rank, self._world)
        if self._order.parts == 1:
            positions = np.arange(first + mine.start, first + mine.stop)
        else:
            every = np.arange(first, first + size)
            by_part = np.argsort(every % samples % self._order.parts, kind="stable")
            positions = every[by_part[mine]]
        return positions % samples, positions < samples, size


class Planned:
    """The same, with batches that are planned by length, window by window.

    Each window of the order gives a list of micro-batches that depends only on lengths and seed.
    Step s takes micro-batches [s * world, (s + 1) * world) of the concatenated lists.
    """

    def __init__(
        self,
        order: AnyOrder,
        batching: Batching,
        lengths: Numbers,
        rank: int,
        world: int,
        last: str,
        seed: int,
        window: int,
    ) -> None:
        if last == "short":
            raise UsageError(
                'last="short" is only for batches of a fixed size',
                found=f"batching={batching}",
                fix='use last="pad" or last="drop"',
            )
        self._order, self._batching, self._lengths = order, batching, lengths
        self._rank, self._world, self._last = rank, world, last
        self._seed, self._window = seed, window
        # Epoch and first sample of a window -> its micro-batches, and the samples that they number.
        self._plans: dict[tuple[int, int], tuple[list[MicroBatch], Draw]] = {}
        self._counts: dict[int, dict[int, int]] = {}  # epoch -> window -> number of micro-batches
        self.valid = f"0 to {order.samples:,} samples, a multiple of {window:,}, and then batches"

    def steps(self, epoch: int, progress: StreamProgress = START) -> int:
        windows = range(progress.samples, self._order.samples, self._window)
        left = sum(self._count(epoch, first) for first in windows) - progress.batches
        return left // self._world if self._last == "drop" else -(-left // self._world)

    def progress(self, epoch: int, steps: int) -> StreamProgress:
        batches = steps * self._world
        for first in range(0, self._order.samples, self._window):
            count = self._count(epoch, first)
            if batches < count:
                return StreamProgress(first, batches)
            batches -= count
        return StreamProgress(self._order.samples)

    def normalized(self, epoch: int, progress: StreamProgress) -> StreamProgress | None:
        (first, number), samples = progress, self._order.samples
        if not 0 <= first < samples or first % self._window:
            return progress if progress == (samples, 0) else None
        planned = self._count(epoch, first)
        if number == planned:  # the end of a window is the start of the next
            return StreamProgress(min(first + self._window, samples))
        return progress if 0 <= number < planned else None

    def is_over(self, epoch: int, progress: StreamProgress) -> bool:
        return not self._of_ranks(epoch, progress)[0]  # faster than `steps`: that plans all windows

    def step(self, epoch: int, progress: StreamProgress) -> Step | None:
        found, after = self._of_ranks(epoch, progress)
        if not found:
            return None
        window, which = found[self._rank % len(found)]
        batches, draw = self._planned(epoch, window)
        batch = batches[which]
        rows = len(batch.samples) if batch.segments is None else int(batch.segments[:, 0].max()) + 1
        valid = np.full(rows, self._rank < len(found))
        of = batch.samples
        return Step(draw.number[of], draw.epoch[of], valid, batch.segments, after)

    def _of_ranks(
        self, epoch: int, progress: StreamProgress
    ) -> tuple[list[tuple[int, int]], StreamProgress]:
        """The micro-batches of a step, one per rank: window, and number in it; none at the end.

        Also returns the progress after the step.
        """
        first, number = progress
        found: list[tuple[int, int]] = []
        while len(found) < self._world and first < self._order.samples:
            planned = self._count(epoch, first)
            if number >= planned:
                first, number = first + self._window, 0
                continue
            taken = min(planned - number, self._world - len(found))
            found += [(first, number + n) for n in range(taken)]
            number += taken
        if len(found) < self._world and self._last == "drop":
            found = []
        return found, StreamProgress(min(first, self._order.samples), number)

    def _count(self, epoch: int, first: int) -> int:
        """Return the number of micro-batches of a window."""
        counts = self._counts.get(epoch)
        if counts is None:
            counts = {}
            self._counts = dict([*self._counts.items(), (epoch, counts)][-_EPOCHS:])
        if first not in counts:
            counts[first] = len(self._planned(epoch, first)[0])
        return counts[first]

    def _planned(self, epoch: int, first: int) -> tuple[list[MicroBatch], Draw]:
        """Return the micro-batches and the samples of the window that starts at `first`."""
        plan = self._plans.get((epoch, first))
        if plan is None:
            stop = min(first + self._window, self._order.samples)
            draw = self._order.draw(epoch, np.arange(first, stop))
            seed = seed_of(self._seed, epoch, _PLAN, first)
            plan = self._batching.plan(self._lengths[draw.number], seed), draw
            self._plans = dict([*self._plans.items(), ((epoch, first), plan)][-_PLANS:])
        return plan


Schedule: TypeAlias = Fixed | Planned


def walk(schedule: Schedule, epoch: int, progress: StreamProgress = START) -> Iterator[Step]:
    """Yield the steps that are left in an epoch."""
    while (step := schedule.step(epoch, progress)) is not None:
        progress = step.after
        yield step


def _share(size: int, rank: int, world: int) -> slice:
    """Return a rank's slice of `size` entries. The lengths of the slices differ by at most one."""
    each, more = divmod(size, world)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


# --- the state of a stream, as a small JSON dict that is the same on all ranks ------------------


def save_state(identity: dict[str, Any], epoch: int, progress: StreamProgress) -> dict[str, Any]:
    """Return the state. It can be loaded only by a stream with the same `identity`."""
    return {
        "order_version": ORDER_VERSION,
        "epoch": epoch,
        **progress._asdict(),
        "stream": identity,
    }


def load_state(
    state: dict[str, Any], identity: dict[str, Any], schedule: Schedule
) -> tuple[int, StreamProgress]:
    """Epoch and progress of a state. Raises UsageError if it is invalid or of another stream.

    `schedule` belongs to the stream with this `identity`; it knows which values are valid.
    """
    if not isinstance(state, dict):
        raise invalid_state("type", state, "a dict")
    version = whole_number(state, "order_version")
    epoch = whole_number(state, "epoch", EPOCHS - 2)  # at its end, the next epoch begins
    progress = StreamProgress(whole_number(state, "samples"), whole_number(state, "batches"))
    theirs = state.get("stream")
    if not isinstance(theirs, dict):
        raise invalid_state("stream", theirs, "a dict")
    if version != ORDER_VERSION:
        raise UsageError(
            "the state was saved with another version of the sample order",
            expected=f"order_version {ORDER_VERSION}",
            found=f"order_version {version}",
            fix="resume with the version of shardkit that saved it, or start a new epoch",
        )
    ours, none = json.loads(json.dumps(identity)), object()
    differing = [n for n in ours | theirs if ours.get(n, none) != theirs.get(n, none)]
    if differing:
        raise UsageError(
            "the state was saved with another dataset or other settings",
            expected=_named(theirs, differing),
            found=_named(ours, differing),
            fix="use the dataset and settings of the run that saved it, or start without a state",
        )
    normalized = schedule.normalized(epoch, progress)
    if normalized is None:
        raise invalid_state("samples, batches", tuple(progress), schedule.valid)
    return epoch, normalized


def whole_number(state: dict[str, Any], name: str, most: int = (1 << 63) - 1) -> int:
    """An integer field of a state. Raises UsageError if it is not a number from 0 to `most`."""
    value: Any = state.get(name)
    if not is_whole(value) or not 0 <= value <= most:
        raise invalid_state(name, value, f"0 to {most:,}")
    return int(value)


def invalid_state(name: str, value: Any, expected: str) -> UsageError:
    """Return the error for an invalid field of a state."""
    return UsageError(
        f"not a valid state of a Loader: invalid {name}",
        expected=f"the result of state_dict(); {name}: {expected}",
        found=f"{reprlib.repr(value):.200}",
        fix="load the state as it was saved, or start without a state",
    )


def _named(identity: dict[str, Any], differing: list[str]) -> str:
    return ", ".join(
        f"{name if str(name).isidentifier() else reprlib.repr(name):.80}"
        f" {reprlib.repr(identity.get(name)):.200}"
        for name in differing[:9]
    )
