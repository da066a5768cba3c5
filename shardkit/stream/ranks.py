"""The rank of this process, and checks that all ranks read the same stream from one position.

Ranks are compared through the key-value store that torch.distributed uses for its rendezvous. A
collective operation would block until all ranks call it, which may be never (if one rank alone
looks at a few batches, or stops early), and it could interleave with those of the training.
Instead, each rank writes its own facts and reads what others have written so far, so no rank waits,
whatever the backend.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from typing import Any, NamedTuple

from shardkit.errors import UsageError, warn
from shardkit.helpers.processors import processors
from shardkit.stream.options import StreamOptions
from shardkit.stream.schedule import StreamProgress

_FACTS_SECONDS = 5.0  # seconds to wait for the facts of other ranks, once a difference is known
_NAMED = 1024  # maximum number of ranks whose facts are read then

_numbers = itertools.count()  # of Loaders, in the order in which each rank first iterates them
_inherited: list[Any] = []  # the store of the parent of a forked process, which is not used


class World(NamedTuple):
    """`rank` of `size` processes that train together."""

    rank: int
    size: int


def find_world(rank: int | None, world_size: int | None, sent: World | None = None) -> World:
    """Return the given values, else those of the process, else 0 of 1.

    Those of the process are from torch.distributed, else `sent` (the world of the process that made
    this one, such as a worker of a DataLoader), else from RANK and WORLD_SIZE. Raises UsageError
    for a rank outside of the world size, and for one of several ranks that is not known.
    """
    where = ""
    if rank is None or world_size is None:
        known, where = _distributed_world() or sent, "torch.distributed"
        if known is None:
            known, where = _environment(rank, world_size), "RANK and WORLD_SIZE"
        rank = known.rank if rank is None else rank
        world_size = known.size if world_size is None else world_size
        where = f"values that are not passed come from {where}; "
    if not 0 <= rank < world_size:
        raise UsageError(
            "the rank does not fit the world size",
            found=f"rank {rank} of {world_size}",
            fix=f"{where}pass both rank= and world_size= to set them explicitly",
        )
    return World(rank, world_size)


def world_to_send(sent: World | None) -> World | None:
    """The world of this process, for a process that it makes; None if nothing is known of one."""
    known = _distributed_world() or sent
    if known is None and {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return _environment(None, None)
    return known


def default_threads() -> int:
    """Processors available to this process, divided by the number of ranks on the machine."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, processors() // (int(local) or 1 if local.isdigit() else 1))


def _environment(rank: int | None, size: int | None) -> World:
    """RANK and WORLD_SIZE, for those of `rank` and `size` that are None."""
    rank = _number("RANK") if rank is None else rank
    set_by_user, size = size, _number("WORLD_SIZE") if size is None else size
    if rank is None and size is not None and size > 1:
        raise UsageError(
            f"this process is one of {size} ranks, and nothing says which",
            found=f"world_size={set_by_user}" if set_by_user else f"WORLD_SIZE={size}, but no RANK",
            fix="set RANK, too; or start the processes with torchrun, call"
            " torch.distributed.init_process_group first, or pass rank= and world_size=;"
            " for a single process, set neither",
        )
    return World(rank or 0, 1 if size is None else size)


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    try:
        return None if text is None else int(text)
    except ValueError as error:
        raise UsageError(
            f"{name} is not a number", found=f"{text!r:.99}", fix="unset it, or use torchrun"
        ) from error


def _distributed() -> Any:
    """Return the module torch.distributed, if it is in use."""
    # The attribute may be missing while another thread imports torch.
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    used = distributed and distributed.is_available() and distributed.is_initialized()
    return distributed if used else None


def _distributed_world() -> World | None:
    distributed = _distributed()
    return distributed and World(distributed.get_rank(), distributed.get_world_size())


def _store() -> Any:
    """torch.distributed's store; None if there is none."""
    try:
        store = _distributed().distributed_c10d._get_default_store()
    except (AttributeError, KeyError, ValueError):  # not in use, another version of torch, or MPI
        return None
    return None if any(store is one for one in _inherited) else store


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _inherited.append(_store()))


class Ranks:
    """Compares the iterations of a Loader with those of the same Loader on other ranks."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._begun = 0
        self._last: tuple[int, StreamProgress] | None = None

    def begin(
        self,
        identity: dict[str, Any],
        options: StreamOptions,
        world: World,
        epoch: int,
        progress: StreamProgress,
    ) -> Comparison | None:
        """Start the comparison of this rank's iteration; None if there is no store.

        `identity` is that of the stream. Raises UsageError if the iteration is already known to
        differ from those of other ranks.
        """
        set_by_user = (options.rank, options.world_size) != (None, None)
        store = None if set_by_user or not options.check_ranks or world.size == 1 else _store()
        if store is None:
            return None
        if self._number is None:
            self._number = next(_numbers)
        if (epoch, progress) != self._last:  # if equal, this rank looked at a batch before training
            self._begun += 1
            self._last = epoch, progress
        facts = {
            **identity,
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

    def check(self) -> None:
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
        by_rank = self._facts_by_rank()
        every = list(by_rank.values())
        with contextlib.suppress(RuntimeError):  # their ranks may be at a later iteration by now
            every += [json.loads(self._store.get(key)) for key in (self._rule, self._alarm)]
        names = [n for n in every[0] if any(facts.get(n) != every[0][n] for facts in every)]

        def words(facts: dict[str, Any]) -> str:
            return ", ".join(f"{name} {facts.get(name)}" for name in names)

        alike: dict[str, list[int]] = {words(facts): [] for facts in every}
        for rank, facts in by_rank.items():
            alike[words(facts)].append(rank)
        return UsageError(
            "the ranks do not read the same data from the same position",
            expected=f"the same {', '.join(names)} on all {self._world.size} ranks",
            found="; ".join(f"{_named(ranks)}: {text:.300}" for text, ranks in alike.items()),
            fix="give all ranks the same dataset, options and state, and iterate over every Loader"
            " on all of them; a Loader for a single rank needs rank=0, world_size=1."
            " check_ranks=False turns this check off",
        )

    def _facts_by_rank(self) -> dict[int, dict[str, Any]]:
        """Return the facts by rank, of the ranks that are in this iteration."""
        by_rank = {self._world.rank: self._facts}
        until = time.monotonic() + _FACTS_SECONDS
        ranks = range(min(self._world.size, _NAMED))
        with contextlib.suppress(RuntimeError):  # the process that hosts the store has ended
            while len(by_rank) < len(ranks) and time.monotonic() < until:
                for rank in (rank for rank in ranks if rank not in by_rank):
                    key = f"{self._prefix}/rank {rank}"
                    if self._store.check([key]):
                        number, facts = json.loads(self._store.get(key))
                        if number == self._number:
                            by_rank[rank] = facts
                time.sleep(0.01)
        return by_rank


def _named(ranks: list[int]) -> str:
    if not ranks:
        return "another rank"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if ranks[8:] else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
