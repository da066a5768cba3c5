"""Random access to an LMDB file, without the LMDB library: layout.py explains why."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import msgpack
import numpy as np
import numpy.typing as npt

from shardkit.codecs.array import load_array
from shardkit.errors import DamagedError, FormatError, SampleError
from shardkit.formats.base import KEY, ShardReader
from shardkit.formats.lmdb import third_party
from shardkit.formats.lmdb.layout import Tree
from shardkit.helpers.checked import Count, checked, damaged, of_version
from shardkit.sample import JsonText, Sample
from shardkit.schema import Array, Bool, Bytes, Float, Images, Int, Json, Schema, Text, int64
from shardkit.storage.byte_source import IN_MEMORY

ABOUT = b"__shardkit__"  # the key of the metadata entry; it sorts after all digits
VERSION = 1
_HEAD = 128  # first bytes of a value, which usually contain its whole key
_ENTRY = 16  # bytes of the offset and size of a value
_BEHIND = 2**63 - 1  # the position of a page without samples


class _Column(NamedTuple):
    """How a field is read."""

    name: str
    kind: type  # the Python type that msgpack returns
    decode: Callable[[Any], Any] | None  # converts it to the value
    optional: bool


class LmdbReader(ShardReader):
    """One environment.

    In shards of up to 65,536 samples, the locations of values are kept in memory after the first
    lookup. In larger ones, a leaf is read for each sample; an index of branch pages is kept in
    memory to find it.
    """

    def __init__(self, path: Path, layout: dict[str, Any] | None = None) -> None:
        self._tree = tree = Tree(path)
        about = _about(tree)
        self._foreign: third_party.Entries | None = None
        self._locations: array[int] | None = None  # offset and size of each value; 0 if unknown
        if about is None:
            layout = layout if layout and "entries" in layout else third_party.scan(tree)
            self._foreign = layout["entries"]
            self._length, self.in_memory = len(self._foreign), self._foreign.in_memory
        else:
            self._length, ignored = _counted(tree, about["samples"])
            if layout is None:
                named = {"schema": about["schema"], "classes": about["classes"]}
                layout = {**named, **ignored, "ours": True}
            if self._length * _ENTRY <= IN_MEMORY:
                self._locations = array("Q", bytes(self._length * _ENTRY))
                self.in_memory = self._length * _ENTRY
        super().__init__(path, layout)
        self._relaxed = self.schema.with_optional(layout.get("guessed", ()))
        kinds = {
            name: (*kind.entry(_DECODERS), kind.optional) for name, kind in self.schema.items()
        }
        self._columns = [_Column(KEY, str, None, False)]
        self._columns += [_Column(name, *of_kind) for name, of_kind in kinds.items()]
        self._index: tuple[array[int], array[int]] | None = None  # first positions and pages

    def __len__(self) -> int:
        return self._length

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        if self._foreign is not None:
            return self._foreign_sample(self._foreign, position, fields, json_text)
        columns = self._columns
        if fields is not None:
            if not fields:
                return {KEY: self._key(position)}
            columns = [c for c in columns if c.name in fields or c.name == KEY]
        return self._decoded(position, columns, json_text)

    def offset(self, position: int, field: str) -> int:
        return self._location(position)[0]

    def keys(self) -> list[str]:
        return super().keys() if self._foreign is None else list(self._foreign.keys)

    def spans(self) -> npt.NDArray[np.int64]:
        found = np.array([*map(self._location, range(len(self)))], np.int64).reshape(-1, 2)
        found[:, 1] += found[:, 0]
        return found

    def value(self, position: int) -> bytes:
        """The stored bytes of a sample."""
        return self._tree.read(*self._location(position))

    def close(self) -> None:
        if not self.closed:
            super().close()
            del self._tree

    def _decoded(self, position: int, columns: list[_Column], json_text: bool) -> Sample:
        stored = msgpack.unpackb(self.value(position))
        sample: Sample = {}
        for name, kind, decode, optional in columns:
            if name in stored:
                found = stored[name]
                if type(found) is not kind:
                    raise TypeError(f"it is of type {type(found).__name__}")
                value = found if decode is None else decode(found)
                sample[name] = JsonText(found) if json_text and decode is json.loads else value
            elif not optional:
                raise TypeError("it is missing")
        return sample

    def _foreign_sample(
        self,
        entries: third_party.Entries,
        position: int,
        fields: Collection[str] | None,
        json_text: bool,
    ) -> Sample:
        """With `json_text`, the sample may lack fields that are only guessed not to be optional."""
        if fields is not None and not fields:
            return {KEY: entries.keys[position]}
        schema = self._relaxed if json_text else self.schema
        try:
            sample = entries.sample(position, self._tree, schema)
        except SampleError as error:
            raise error.located(offset=self.offset(position, "")) from error.__cause__
        if fields is not None:
            sample = {n: value for n, value in sample.items() if n == KEY or n in fields}
        if json_text:
            return sample
        return {n: json.loads(v) if type(v) is JsonText else v for n, v in sample.items()}

    def _key(self, position: int) -> str:
        """Read only the key, with which each of our values begins."""
        offset, size = self._location(position)
        head = self._tree.read(offset, min(size, _HEAD))
        # A map of up to 15 fields, the name "__key__", then text with a header of 1 or 2 bytes.
        tag = head[9] if head[1:9] == b"\xa7__key__" and len(head) > 10 else 0
        start, size = (10, tag & 31) if tag >> 5 == 5 else (11, head[10]) if tag == 0xD9 else (0, 0)
        if 0 < start <= start + size <= len(head):
            return head[start : start + size].decode()
        key: str = self._decoded(position, self._columns[:1], False)[KEY]
        return key

    def _location(self, position: int) -> tuple[int, int]:
        """Offset and size of a sample's value in the file."""
        if self._foreign is not None:
            return self._foreign.location(position)
        locations, at = self._locations, 2 * position
        if locations is None:
            first, page = self._page_of(position)
            entry = self._tree.get(_number(position), page, position - first)
            if entry is not None:
                return entry.offset, entry.size
        else:
            if not locations[at]:
                self._look_up(position, locations)
            if locations[at]:
                return locations[at], locations[at + 1]
        raise DamagedError(
            "a sample is missing from the LMDB",
            path=self.path,
            expected=f"{self._length:,} entries from 000000000000 on",
        )

    def _look_up(self, position: int, locations: array[int]) -> None:
        """Store the locations of all values in the leaf of a sample."""
        _, page = self._page_of(position)
        for entry in self._tree.entries(self._tree.leaf(_number(position), page)):
            at = 2 * int(entry.key) if _is_number(entry.key) else len(locations)
            if at < len(locations):
                locations[at + 1] = entry.size
                locations[at] = entry.offset  # set last: other threads check it to see if both are

    def _page_of(self, position: int) -> tuple[int, int]:
        """The first position of the page at or below which a sample is stored, and its number.

        Two threads may build the index concurrently; the results are the same.
        """
        if self._index is None:
            level = self._tree.level(IN_MEMORY // _ENTRY)
            firsts = [int(key) if _is_number(key) else _BEHIND for key, _ in level]
            self._index = array("q", [0, *firsts[1:]]), array("Q", [page for _, page in level])
            self.in_memory += len(level) * _ENTRY
        positions, pages = self._index
        number = bisect_right(positions, position) - 1
        return positions[number], pages[number]


class _About(TypedDict):
    """The content of our metadata entry."""

    samples: Count
    schema: dict[str, Any]
    classes: dict[str, list[str]]


def _about(tree: Tree) -> _About | None:
    """The content of our metadata entry; None for a foreign environment."""
    entry = tree.get(ABOUT)
    if entry is None:
        return None
    what, where = f"the entry {ABOUT.decode()}", {"path": tree.path, "offset": entry.offset}
    found = of_version(VERSION, "shardkit_lmdb", tree.read(entry.offset, entry.size), what, **where)
    try:
        about = checked(_About, found)
        Schema.from_json(about["schema"])
        return about
    except FormatError as error:  # a type that this version does not know
        raise error.located(**where) from error.__cause__
    except ValueError as error:
        raise damaged(what, error, **where) from error


def _number(position: int) -> bytes:
    """The key of a sample."""
    return b"%012d" % position


def _is_number(key: bytes) -> bool:
    """Whether a key is that of a sample."""
    return len(key) == 12 and key.isdigit()


def _counted(tree: Tree, samples: int) -> tuple[int, dict[str, Any]]:
    """The number of samples, and the entry `ignored` of the layout for other entries.

    All keys are read only if the number of entries is not the one that was written: samples may
    have been added under the next numbers, or removed, with the lmdb library.
    """
    if tree.main.entries == samples + 1:
        return samples, {}
    keys = [entry.key for leaf in tree.leaves() for entry in tree.entries(leaf)]
    others = [key for key in keys if not _is_number(key) and key != ABOUT]
    found = sum(map(_is_number, keys))
    strange = [key for key in others if not third_party.ABOUT_OTHERS.fullmatch(key)]
    if strange:
        raise FormatError(
            "the LMDB has entries that are not samples and would be ignored",
            path=tree.path,
            expected="keys of 12 digits: 000000000000, 000000000001, ...",
            found=f"{len(strange):,} others, such as {strange[0]!r:.60}",
            fix="delete them, or move them to the next numbers, with the lmdb library",
        )
    if found < samples:
        raise DamagedError(
            "samples are missing from the LMDB",
            path=tree.path,
            expected=f"{samples:,}, as its entry {ABOUT.decode()} says",
            found=f"{found:,}",
        )
    return found, third_party.passed_over(others)


def _all_bytes(values: list[Any]) -> list[bytes]:
    if not all(type(value) is bytes for value in values):
        raise TypeError("a list of images contains other values")
    return values


_DECODERS: dict[type, tuple[type, Callable[[Any], Any] | None]] = {
    Int: (int, int64),
    Float: (float, None),
    Bool: (bool, None),
    Text: (str, None),
    Bytes: (bytes, None),
    Images: (list, _all_bytes),
    Json: (str, json.loads),
    Array: (bytes, load_array),
}
