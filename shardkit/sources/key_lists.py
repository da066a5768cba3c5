"""Key lists: the samples to select (`--keys`), or the samples of each split."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.errors import SourceError, UsageError
from shardkit.metadata.recipe import KeysEntry
from shardkit.options import ConvertOptions, split_files
from shardkit.sample import KeyTable, key_hash
from shardkit.sources.base import Source
from shardkit.storage import fs


class KeyList(KeyTable):
    """A set of keys: their sorted hashes, and, where known, the keys in the same order."""

    def __init__(self, hashes: npt.NDArray[np.uint64], keys: Sequence[str] = ()) -> None:
        super().__init__(hashes)
        self.keys = [keys[n] for n in self.order.tolist()] if keys else []

    @classmethod
    def of(cls, keys: Iterable[str], path: object = None) -> KeyList:
        """Raises SourceError for an empty list, or one with duplicates."""
        every = list(keys)
        found = cls(np.array([key_hash(key) for key in every], np.uint64), every)
        again = np.flatnonzero(found.hashes[1:] == found.hashes[:-1]) + 1
        if len(again):
            raise SourceError(
                "the list of keys has duplicates",
                path=path,
                key=found.keys[again[0]],
                found=f"{len(again):,} duplicate keys",
                fix="list each key once",
            )
        if not every:
            raise SourceError("the list of keys is empty", path=path, expected="a key on each line")
        return found

    def entry(self) -> KeysEntry:
        """Return the entry of a recipe."""
        digest = xxhash.xxh3_128_hexdigest(self.hashes.astype("<u8").tobytes())
        return {"count": len(self.hashes), "digest": digest}


def key_lists(options: ConvertOptions) -> dict[str, KeyList]:
    """Return the key lists in the options, by split; under "" the one of `--keys`.

    Raises UsageError if two splits have a key in common, and the errors of `KeyList.of`.
    """
    lists = {name: _read(path) for name, path in split_files(options.split).items()}
    if options.keys is not None:
        lists[""] = _read(options.keys)
    names = list(lists)
    for n, name in enumerate(names):
        for other in names[:n]:
            both = np.isin(lists[name].hashes, lists[other].hashes)
            if both.any():
                raise UsageError(
                    f"the splits {other} and {name} have samples in common",
                    key=lists[name].keys[int(both.argmax())],
                    found=f"{int(both.sum()):,} keys that are in both lists",
                    fix="list each sample for one split only",
                )
    return lists


def _read(keys: str | os.PathLike[str] | Sequence[str]) -> KeyList:
    if not isinstance(keys, str | os.PathLike):
        return KeyList.of(keys)
    path = fs.source(keys)
    try:
        lines = fs.read(path).decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise SourceError("the list of keys is not UTF-8", path=path, offset=error.start) from error
    return KeyList.of((line for line in lines if line.strip()), path)


def check_found(lists: Iterable[KeyList], sources: Iterable[Source]) -> None:
    """Raise SourceError for listed keys that no sample has."""
    keys = [key for source in sources for key in source.all_keys()]
    there = np.array([key_hash(key) for key in keys], np.uint64)
    for wanted in lists:
        lacking = np.flatnonzero(~np.isin(wanted.hashes, there))
        if len(lacking):
            first = min(wanted.keys[n] for n in lacking.tolist())
            raise SourceError(
                "the list has keys that no sample has",
                found=f"{len(lacking):,} of {len(wanted.hashes):,} keys, such as {first!r}",
                expected="keys of the source, such as " + ", ".join(map(repr, keys[:2])),
                fix="correct the list; the key of a file is its path without the suffix",
            )
