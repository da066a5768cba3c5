"""Random access to an LMDB file, without the LMDB library: layout.py explains why."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import msgpack
import numpy as np
import numpy.typing as npt

from shardkit.codecs.array import load_array
from shardkit.errors import DamagedError, FormatError
from shardkit.formats.base import KEY, Columns, Ranges, ShardReader
from shardkit.formats.lmdb.layout import Tree
from shardkit.formats.lmdb.maps import DecodeMaps
from shardkit.helpers.checked import Count, checked, damaged, of_version
from shardkit.sample import JsonText, Sample
from shardkit.schema import Array, Bool, Bytes, Float, Images, Int, Json, Schema, Text, int64
from shardkit.storage.blobs import Blobs
from shardkit.storage.byte_source import IN_MEMORY

ABOUT = b"__shardkit__"  # the key of the metadata entry; it sorts after all digits
# Other entries with metadata, as in torchvision-style and text recognition datasets.
ABOUT_OTHERS = re.compile(rb"__.*|num-samples|length|size|len", re.DOTALL)
VERSION = 1
_HEAD = 11 + 255  # first bytes of a value, which contain its key if that is not longer
_ENTRY = 16  # bytes of the offset and size of a value
_BEHIND = 2**63 - 1  # the position of a page without samples


class TreeReader(ShardReader):
    """A reader of an environment, whose subclasses tell where the values are."""

    def __init__(self, path: Path, layout: dict[str, Any], tree: Tree) -> None:
        super().__init__(path, layout)
        self._tree = tree

    @abstractmethod
    def location(self, position: int) -> tuple[int, int]:
        """Offset and size, in the file, of a sample's value, or of its first one."""

    def offset(self, position: int, field: str) -> int:
        return self.location(position)[0]

    def spans(self) -> npt.NDArray[np.int64]:
        found = np.array([*map(self.location, range(len(self)))], np.int64).reshape(-1, 2)
        found[:, 1] += found[:, 0]
        return found

    def close(self) -> None:
        if not self.closed:
            super().close()
            del self._tree


class _Column(NamedTuple):
    """How a field is read."""

    name: str
    kind: type  # the Python type that msgpack returns
    decode: Callable[[Any], Any] | None  # converts it to the value
    optional: bool


class LmdbReader(TreeReader):
    """An environment that shardkit wrote.

    In shards of up to 65,536 samples, the locations of values are kept in memory after the first
    lookup. In larger ones, a leaf is read for each sample; an index of branch pages is kept in
    memory to find it.
    """

    def __init__(
        self, path: Path, layout: dict[str, Any] | None = None, tree: Tree | None = None
    ) -> None:
        tree = tree or Tree(path)
        about = _about(tree)
        self._length, ignored = _counted(tree, about["samples"])
        named = {"schema": about["schema"], "classes": about["classes"]}
        super().__init__(path, layout or {**named, **ignored, "ours": True}, tree)
        self._locations: array[int] | None = None  # offset and size of each value; 0 if unknown
        if self._length * _ENTRY <= IN_MEMORY:
            self._locations = array("Q", bytes(self._length * _ENTRY))
            self.in_memory = self._length * _ENTRY
        self._columns = [_Column(KEY, str, None, False)]
        for name, kind in self.schema.items():
            self._columns.append(_Column(name, *kind.entry(_DECODERS), kind.optional))
        self._index: tuple[array[int], array[int]] | None = None  # first positions and pages

    def __len__(self) -> int:
        return self._length

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        columns = self._columns
        if fields is not None:
            if not fields:
                return {KEY: self._key(position)}
            columns = [c for c in columns if c.name in fields or c.name == KEY]
        return self._decoded(position, columns, json_text)

    def value(self, position: int) -> bytes:
        """Return the stored bytes of a sample."""
        return self._tree.read(*self.location(position))

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

    def plan(self, positions: npt.NDArray[np.int64], fields: Collection[str]) -> Ranges | None:
        offsets, sizes = self._places(positions).T[:, None]
        if not fields:
            return Ranges(self._tree.source, offsets, np.minimum(sizes, _HEAD), _keys_in)
        if any(isinstance(kind, Images) for kind in self.schema.values()):
            return None
        decode = DecodeMaps(tuple(self.schema.items()), tuple(fields))
        return Ranges(self._tree.source, offsets, sizes, decode)

    def _places(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return `location` of several samples: int64, (samples, 2)."""
        if self._locations is not None:
            known = np.frombuffer(self._locations, np.int64).reshape(-1, 2)[positions]
            if known.all():
                return known
        return np.array([self.location(position) for position in positions.tolist()], np.int64)

    def _key(self, position: int) -> Any:
        """Read only the key, with which each of our values begins."""
        offset, size = self.location(position)
        key = _key_in(self._tree.read(offset, min(size, _HEAD)))
        return self._decoded(position, self._columns[:1], False)[KEY] if key is None else key

    def location(self, position: int) -> tuple[int, int]:
        locations, at = self._locations, 2 * position
        if locations is None:
            first, page = self._page_of(position)
            entry = self._tree.get(number_key(position), page, position - first)
            if entry is not None:
                return entry.offset, entry.size
        else:
            if not (locations[at] and locations[at + 1]):  # or other threads are storing them
                self._look_up(position, locations)
            if locations[at]:
                return locations[at], locations[at + 1]
        raise DamagedError("a sample is missing from the LMDB", path=self.path)

    def _look_up(self, position: int, locations: array[int]) -> None:
        """Store the locations of all values in the leaf of a sample."""
        _, page = self._page_of(position)
        for entry in self._tree.entries(self._tree.leaf(number_key(position), page)):
            at = 2 * int(entry.key) if _is_number(entry.key) else len(locations)
            if at < len(locations):
                locations[at], locations[at + 1] = entry.offset, entry.size

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


def _about(tree: Tree) -> _About:
    what = f"the entry {ABOUT.decode()}"
    entry = tree.get(ABOUT)
    if entry is None:
        raise DamagedError(f"{what} is missing from the LMDB", path=tree.path)
    where = {"path": tree.path, "offset": entry.offset}
    found = of_version(VERSION, "shardkit_lmdb", tree.read(entry.offset, entry.size), what, **where)
    try:
        about = checked(_About, found)
        Schema.from_json(about["schema"])
        return about
    except FormatError as error:  # a type that this version does not know
        raise error.located(**where) from error.__cause__
    except ValueError as error:
        raise damaged(what, error, **where) from error


def _key_in(head: bytes) -> str | None:
    """Return the key with which a value begins; None if it is elsewhere, or longer than that."""
    # A map of up to 15 fields, the name "__key__", then text with a header of 1 or 2 bytes.
    tag = head[9] if head[1:9] == b"\xa7__key__" and len(head) > 10 else 0
    start, size = (10, tag & 31) if tag >> 5 == 5 else (11, head[10]) if tag == 0xD9 else (0, 0)
    return head[start : start + size].decode() if 0 < start <= start + size <= len(head) else None


def _keys_in(heads: list[Blobs]) -> Columns:
    keys = [_key_in(head) for head in heads[0].values()]
    if None in keys:
        raise ValueError("a key is not in the first bytes of its value")
    return {KEY: keys}


def number_key(position: int) -> bytes:
    """Return the key of the entry of a sample."""
    return b"%012d" % position


def _is_number(key: bytes) -> bool:
    return len(key) == 12 and key.isdigit()


def _counted(tree: Tree, samples: int) -> tuple[int, dict[str, Any]]:
    """Return the number of samples, and the entry `ignored` of the layout for other entries.

    All keys are read only if the number of entries is not the one that was written: samples may
    have been added under the next numbers, or removed, with the lmdb library.
    """
    if tree.main.entries == samples + 1:
        return samples, {}
    keys = [entry.key for entry in tree.all_entries() if entry.key != ABOUT]
    others = [key for key in keys if not _is_number(key)]
    found = len(keys) - len(others)
    strange = [key for key in others if not ABOUT_OTHERS.fullmatch(key)]
    if strange:
        raise FormatError(
            "the LMDB has entries that are not samples and would be ignored",
            path=tree.path,
            expected="keys of 12 digits: 000000000000, 000000000001, ...",
            found=f"{len(strange):,} others, such as {strange[0]!r:.60}",
            fix="delete them, or move them to the next numbers, with the lmdb library",
        )
    if found < samples:
        raise too_few(tree, samples, ABOUT, found)
    return found, ignored_entries(others)


def too_few(tree: Tree, samples: int, entry: bytes, found: int, **where: Any) -> DamagedError:
    """Return the error for an LMDB with fewer samples than its entry with this key says."""
    return DamagedError(
        "samples are missing from the LMDB",
        path=tree.path,
        expected=f"{samples:,}, as its entry {entry.decode()} says",
        found=f"{found:,}",
        **where,
    )


def ignored_entries(keys: list[bytes]) -> dict[str, Any]:
    """The entry `ignored` of a layout: the LMDB's entries with metadata, if there are any."""
    return {"ignored": {f"entry {key_text(key)!r}": 1 for key in keys}} if keys else {}


def key_text(key: bytes) -> str:
    """Return a key as text; in hexadecimal if it is none."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return key.hex()
    return text if text.isprintable() else key.hex()


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
