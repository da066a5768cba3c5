"""The rank of this process, and the world size."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from shardkit.errors import UsageError
from shardkit.processors import processors


class World(NamedTuple):
    """`rank` of `size` processes that train together."""

    rank: int
    size: int


def find_world(rank: int | None, world_size: int | None) -> World:
    """The given values, else those of torch.distributed, else RANK and WORLD_SIZE, else 0 of 1.

    Raises UsageError for a rank outside of the world size.
    """
    found, where = _found()
    rank = found.rank if rank is None else rank
    size = found.size if world_size is None else world_size
    if size < 1 or not 0 <= rank < size:
        raise UsageError(
            "the rank does not fit the world size",
            expected=f"a rank from 0 to {max(size - 1, 0)}" if size > 0 else "a world size over 0",
            found=f"rank {rank} of {size}",
            fix=f"{where}; pass both rank= and world_size= to set them explicitly",
        )
    return World(rank, size)


def _found() -> tuple[World, str]:
    # If torch is not imported, it is not in use.
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        world = World(distributed.get_rank(), distributed.get_world_size())
        return world, "values that are not passed come from torch.distributed"
    try:
        world = World(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        raise UsageError(
            f"RANK or WORLD_SIZE is not a number: {error}", fix="unset them, or start with torchrun"
        ) from error
    return world, "values that are not passed come from RANK and WORLD_SIZE"


def default_threads() -> int:
    """Processors available to this process, divided by the number of ranks on the machine."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, processors() // (int(local) or 1 if local.isdigit() else 1))
