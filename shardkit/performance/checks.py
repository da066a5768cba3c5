"""What the data alone tell of how they will load: findings that need no training loop."""

from __future__ import annotations

from shardkit.performance.checks_files import other_format, shards
from shardkit.performance.checks_images import png, stored_size
from shardkit.performance.checks_order import sorted_order
from shardkit.performance.checks_padding import padding
from shardkit.performance.findings import Finding
from shardkit.stream.stream import Stream

__all__ = ["checks", "other_format", "padding", "png", "shards", "sorted_order", "stored_size"]


def checks(stream: Stream, *, world_size: int, workers: int) -> list[Finding]:
    """All findings on a stream that so many ranks load, each with so many worker processes.

    Some tens of its samples are read, and what is advised is tried on them: nothing is guessed.
    """
    found = [
        stored_size(stream) or png(stream),  # making images smaller makes JPEGs of them, too
        other_format(stream),
        shards(stream, world_size, workers),
        sorted_order(stream),
        padding(stream, world_size),
    ]
    return [finding for finding in found if finding is not None]
