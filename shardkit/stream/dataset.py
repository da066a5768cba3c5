"""`StreamingDataset`: the samples or batches of a stream, made in the iterating thread."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from shardkit.errors import SampleError, UsageError, printable
from shardkit.helpers.familiar import Familiar
from shardkit.helpers.keywords import takes
from shardkit.options import is_whole
from shardkit.stream.batches import Batch, BatchMaker, FinishedBatch, rows_of
from shardkit.stream.options import StreamKeywords, StreamOptions
from shardkit.stream.order import EPOCHS
from shardkit.stream.ranks import Ranks, World, find_world, world_to_send
from shardkit.stream.schedule import START, Schedule, Step, StreamProgress, walk
from shardkit.stream.stream import Source, Stream

if TYPE_CHECKING:
    from typing_extensions import Unpack

_AT_ONCE, _BYTES_AT_ONCE = 64, 16 << 20  # single samples that are made together


class StreamingDataset(Familiar):
    """One or several datasets, in stored or shuffled order, for one rank of a training run.

    Iterating yields samples (dicts of values), or batches with `batch_size`, `global_batch_size` or
    `batching`. Each iteration is the next epoch. Raises UsageError for invalid options.
    """

    @takes(StreamOptions)
    def __init__(self, source: Source, **options: Unpack[StreamKeywords]) -> None:
        """`source` is a path, an open dataset, or a list of these."""
        self.source = source
        self.options = StreamOptions(**options)
        self.epoch = 0  # of the next iteration
        self._stream: Stream | None = None
        self._scheduled: tuple[World, Schedule] | None = None
        self._ranks = Ranks()
        self._sent: World | None = None  # of the process that sent the dataset to this one

    @property
    def stream(self) -> Stream:
        """The datasets in their order, opened when first used."""
        if self._stream is None:
            self._stream = Stream(self.source, self.options)
        return self._stream

    @property
    def about(self) -> str:
        """Datasets and options as text; opens nothing."""
        several = self.source if isinstance(self.source, list | tuple) else [self.source]
        places = ", ".join(str(getattr(one, "place", one)) for one in several)
        return printable(f"{places}: {self.options!r}".replace("StreamOptions", "", 1))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.about}>"

    @takes(StreamOptions)
    def with_options(self, **options: Unpack[StreamKeywords]) -> StreamingDataset:
        """Return the same dataset with other options."""
        changed = copy.copy(self)
        changed.options = replace(self.options, **options)
        changed._stream = changed._scheduled = None
        changed._ranks, changed._sent = Ranks(), self._sent
        return changed

    def set_epoch(self, epoch: int) -> None:
        """Set the `epoch` of the next iteration. Raises UsageError for an invalid number."""
        self.epoch = checked_epoch(epoch)

    def __len__(self) -> int:
        """Number of batches, or samples, in an epoch of this rank."""
        return self.schedule().steps(self.epoch)

    def __getitem__(self, index: object) -> NoReturn:
        """Raises UsageError: samples come in the order of an epoch."""
        raise not_indexed("StreamingDataset", index)

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        final = self.stream.transforms.in_numpy if self.stream.own_collate is None else dict
        return (final(made) for _, _, made in self.iterate(epoch))

    def iterate(
        self,
        epoch: int,
        progress: StreamProgress = START,
        number: int = 0,
        worker: int = 0,
        workers: int = 1,
    ) -> Iterator[tuple[int, StreamProgress, Any]]:
        """Iterate over an epoch from `progress`, which is the progress before step `number`.

        Yields, for each batch or sample: the step number after it, the progress after it, and the
        batch or sample itself. With several workers, each one makes every `workers`-th step.
        """
        maker, bad = BatchMaker(self.stream), BadSampleBudget(self.options)
        # None in a DataLoader's worker, as torch.distributed's store belongs to the parent process.
        identity, world = self.stream.identity, self.world()
        comparison = self._ranks.begin(identity, self.options, world, epoch, progress)
        first = number + (worker - number) % workers
        steps_of_all = walk(copy.copy(self.schedule()), epoch, progress)  # see `Loader.__iter__`
        mine = islice(steps_of_all, first - number, None, workers)
        ahead = self.stream.ahead(mine, epoch, world)
        steps = ((first + n * workers + 1, step) for n, step in enumerate(ahead))
        if self.options.batched:
            for after, step in steps:
                if comparison is not None:
                    comparison.check()
                yield after, step.after, bad.counted(maker.make(step))
            return
        most = max(min(_AT_ONCE, int(_BYTES_AT_ONCE / max(self.stream.samples.mean_bytes, 1))), 1)
        while several := list(islice(steps, most)):
            batch = bad.counted(maker.make(_joined([step for _, step in several])))
            for (after, step), sample in zip(several, rows_of(batch), strict=True):
                yield after, step.after, sample

    def world(self) -> World:
        """This rank and the world size."""
        return find_world(self.options.rank, self.options.world_size, self._sent)

    def schedule(self) -> Schedule:
        """Return the steps of this rank."""
        world = self.world()
        if self._scheduled is None or self._scheduled[0] != world:
            self._scheduled = world, self.stream.schedule(world)
        return self._scheduled[1]

    def __getstate__(self) -> dict[str, Any]:
        # Workers that a DataLoader spawns know nothing of torch.distributed in this process.
        world = world_to_send(self._sent)
        return {**self.__dict__, "_stream": None, "_scheduled": None, "_sent": world}


def not_indexed(name: str, index: object) -> UsageError:
    """Return the error for `dataset[index]`."""
    return UsageError(
        f"a {name} does not support indexing",
        found=f"{name}[{index!r:.100}]",
        fix=f"iterate over the {name} itself; shardkit.open(path)[index] gives single samples",
    )


def checked_epoch(epoch: int) -> int:
    """Return the number of an epoch. Raises UsageError for an invalid one."""
    if not is_whole(epoch) or not 0 <= epoch < EPOCHS:
        raise UsageError("epoch must be a whole number of 0 or more", found=f"{epoch!r:.200}")
    return int(epoch)


class BadSampleBudget:
    """Counts the bad samples that were replaced, up to `max_errors`."""

    def __init__(self, options: StreamOptions) -> None:
        self._most = options.max_errors
        self.errors: list[dict[str, Any]] = []

    def counted(self, made: FinishedBatch) -> Batch:
        """Count the bad samples of a batch and return it. Raises SampleError above `max_errors`."""
        self.errors += [error.to_dict() for error in made.errors]
        if len(self.errors) > self._most:
            raise SampleError(
                f"more than {self._most:,} samples are bad; the last one: {made.errors[-1]}",
                fix="repair the dataset (`shardkit verify`), or raise max_errors",
            ) from made.errors[-1]
        return made.batch


def _joined(steps: list[Step]) -> Step:
    """Join several steps into one."""
    number, epoch, valid = (np.concatenate([step[n] for step in steps]) for n in range(3))
    ahead = {n: read for step in steps for n, read in (step.ahead or {}).items()}
    return Step(number, epoch, valid, None, steps[-1].after, ahead or None)
