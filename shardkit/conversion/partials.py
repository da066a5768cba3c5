"""The working folder of an output, wherever that is."""

from __future__ import annotations

from shardkit.conversion.partial import FolderPartial, Partial
from shardkit.conversion.store_partial import StorePartial
from shardkit.conversion.target import Target
from shardkit.storage.remote.path import RemotePath


def partial_of(target: Target) -> Partial:
    """The unfinished work on a target on this machine or in a store."""
    if isinstance(target.path, RemotePath):
        return StorePartial(target, target.path)
    return FolderPartial(target)
