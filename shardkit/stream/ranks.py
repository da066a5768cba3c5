"""Checks that all ranks read the same stream from the same position, through torch's store.

This is the key-value store that torch.distributed uses for its rendezvous. A collective operation
would block until all ranks call it, which may be never (if one rank alone looks at a few batches,
or stops early), and it could interleave with those of the training. Instead, each rank writes its
own facts and reads what others have written so far, so no rank waits, whatever the backend.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from shardkit.errors import UsageError, warn
from shardkit.stream.schedule import Progress
from shardkit.stream.world import World

if TYPE_CHECKING:
    from shardkit.stream.options import StreamOptions
    from shardkit.stream.stream import Stream

_FACTS_SECONDS = 5.0  # seconds to wait for the facts of other ranks, once a difference is known
_NAMED = 1024  # maximum number of ranks whose facts are read then

_numbers = itertools.count()  # of Loaders, in the order in which each rank first iterates them
_inherited: list[Any] = []  # the store of the parent of a forked process, which is not used


def _store() -> Any:
    """torch.distributed's store; None if there is none."""
    # The attribute may be missing while another thread imports torch.
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    try:
        store = distributed.distributed_c10d._get_default_store()
    except (AttributeError, KeyError, ValueError):  # another version of torch, or MPI
        return None
    return None if any(store is one for one in _inherited) else store


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _inherited.append(_store()))


class Ranks:
    """Compares the iterations of a Loader with those of the same Loader on other ranks."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._begun = 0
        self._last: tuple[int, Progress] | None = None

    def begin(
        self,
        stream: Stream,
        options: StreamOptions,
        world: World,
        epoch: int,
        progress: Progress,
    ) -> Comparison | None:
        """Start the comparison of this rank's iteration; None if there is no store.

        Raises UsageError if the iteration is already known to differ from those of other ranks.
        """
        given = (options.rank, options.world_size) != (None, None)
        store = None if given or not options.check_ranks or world.size == 1 else _store()
        if store is None:
            return None
        if self._number is None:
            self._number = next(_numbers)
        if (epoch, progress) != self._last:  # if equal, this rank looked at a batch before training
            self._begun += 1
            self._last = epoch, progress
        facts = {
            **stream.identity,
            "batch_size": None if options.batching else options.per_rank(world.size),
            "last": options.last,
            "epoch": epoch,
            "progress": list(progress),
        }
        return Comparison(store, world, f"shardkit/{self._number}", self._begun, facts)


class Comparison:
    """Compares one iteration's `facts` with those of the first rank that starts the iteration."""

    def __init__(
        self, store: Any, world: World, prefix: str, number: int, facts: dict[str, Any]
    ) -> None:
        self._store, self._world, self._prefix = store, world, prefix
        self._number = number
        self._rule = f"{prefix}/{number}"
        self._alarm = f"{prefix}/{number}/differ"
        self._given = 0
        mine = json.dumps(facts, sort_keys=True)
        self._facts: dict[str, Any] = json.loads(mine)
        try:
            store.set(f"{prefix}/rank {world.rank}", json.dumps([number, facts]))
            if store.compare_set(self._rule, "", mine).decode() == mine:
                return
            store.set(self._alarm, mine)
        except RuntimeError as error:  # the process that hosts the store has ended
            self._give_up(error)
            return
        raise self._differs()

    def look(self) -> None:
        """Called for each batch: raises UsageError if some rank has found a difference.

        When a rank gets its second batch, all ranks that synchronize in training have started. To
        cover other ranks, it checks again at the fourth batch, the eighth, and so on.
        """
        self._given += 1
        if self._given < 2 or self._given & (self._given - 1) or self._store is None:
            return
        try:
            alarm = self._store.check([self._alarm])
        except RuntimeError as error:
            self._give_up(error)
            return
        if alarm:
            raise self._differs()

    def _give_up(self, error: RuntimeError) -> None:
        self._store = None
        warn(f"cannot compare the ranks: {str(error).splitlines()[0]:.200}")

    def _differs(self) -> UsageError:
        told = self._told()
        every = list(told.values())
        with contextlib.suppress(RuntimeError):  # their ranks may be at a later iteration by now
            every += [json.loads(self._store.get(key)) for key in (self._rule, self._alarm)]
        names = [n for n in every[0] if any(facts.get(n) != every[0][n] for facts in every)]

        def words(facts: dict[str, Any]) -> str:
            return ", ".join(f"{name} {facts.get(name)}" for name in names)

        alike: dict[str, list[int]] = {words(facts): [] for facts in every}
        for rank, facts in told.items():
            alike[words(facts)].append(rank)
        return UsageError(
            "the ranks do not read the same data from the same position",
            expected=f"the same {', '.join(names)} on all {self._world.size} ranks",
            found="; ".join(f"{_named(ranks)}: {text:.300}" for text, ranks in alike.items()),
            fix="give all ranks the same dataset, options and state, and iterate over every Loader"
            " on all of them; a Loader for a single rank needs rank=0, world_size=1."
            " check_ranks=False turns this check off",
        )

    def _told(self) -> dict[int, dict[str, Any]]:
        """The facts by rank, of the ranks that are in this iteration."""
        told = {self._world.rank: self._facts}
        until = time.monotonic() + _FACTS_SECONDS
        ranks = range(min(self._world.size, _NAMED))
        with contextlib.suppress(RuntimeError):  # the process that hosts the store has ended
            while len(told) < len(ranks) and time.monotonic() < until:
                for rank in (rank for rank in ranks if rank not in told):
                    key = f"{self._prefix}/rank {rank}"
                    if self._store.check([key]):
                        number, facts = json.loads(self._store.get(key))
                        if number == self._number:
                            told[rank] = facts
                time.sleep(0.01)
        return told


def _named(ranks: list[int]) -> str:
    if not ranks:
        return "another rank"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if ranks[8:] else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
