"""The rank of this process, and the world size."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from shardkit.errors import UsageError
from shardkit.helpers.processors import processors


class World(NamedTuple):
    """`rank` of `size` processes that train together."""

    rank: int
    size: int


def find_world(rank: int | None, world_size: int | None, sent: World | None = None) -> World:
    """The given values, else those of the process, else 0 of 1.

    Those of the process are from torch.distributed, else `sent` (the world of the process that made
    this one, such as a worker of a DataLoader), else from RANK and WORLD_SIZE. Raises UsageError
    for a rank outside of the world size, and for one of several ranks that is not known.
    """
    where = ""
    if rank is None or world_size is None:
        known, where = _distributed() or sent, "torch.distributed"
        if known is None:
            known, where = _environment(rank, world_size), "RANK and WORLD_SIZE"
        rank = known.rank if rank is None else rank
        world_size = known.size if world_size is None else world_size
        where = f"values that are not passed come from {where}; "
    if world_size < 1 or not 0 <= rank < world_size:
        most = max(world_size - 1, 0)
        raise UsageError(
            "the rank does not fit the world size",
            expected=f"a rank from 0 to {most}" if world_size > 0 else "a world size over 0",
            found=f"rank {rank} of {world_size}",
            fix=f"{where}pass both rank= and world_size= to set them explicitly",
        )
    return World(rank, world_size)


def world_to_send(sent: World | None) -> World | None:
    """The world of this process, for a process that it makes; None if nothing is known of one."""
    known = _distributed() or sent
    if known is None and {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return _environment(None, None)
    return known


def _environment(rank: int | None, size: int | None) -> World:
    """RANK and WORLD_SIZE, for those of `rank` and `size` that are None."""
    rank = _number("RANK") if rank is None else rank
    given, size = size, _number("WORLD_SIZE") if size is None else size
    if rank is None and size is not None and size > 1:
        raise UsageError(
            f"this process is one of {size} ranks, and nothing says which",
            expected="a rank: without it, all of them would read the same samples",
            found=f"world_size={given}" if given else f"WORLD_SIZE={size}, but no RANK",
            fix="set RANK, too; or start the processes with torchrun, call"
            " torch.distributed.init_process_group first, or pass rank= and world_size=;"
            " for a single process, set neither",
        )
    return World(rank or 0, 1 if size is None else size)


def _distributed() -> World | None:
    # If torch is not imported, it is not in use.
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    return World(distributed.get_rank(), distributed.get_world_size())


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    try:
        return None if text is None else int(text)
    except ValueError as error:
        raise UsageError(
            f"{name} is not a number",
            found=f"{name}={text!r:.99}",
            fix=f"unset {name}, or start with torchrun",
        ) from error


def default_threads() -> int:
    """Processors available to this process, divided by the number of ranks on the machine."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, processors() // (int(local) or 1 if local.isdigit() else 1))
