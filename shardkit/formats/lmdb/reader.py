"""Reads an LMDB file at random, with nothing of the LMDB library: see layout.py for why."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypedDict

import msgpack

from shardkit.checked import Count, checked, damaged, parse
from shardkit.codecs.array import load_array
from shardkit.errors import DamagedError, FormatError, SampleError, ShardkitError
from shardkit.formats.base import OldReader
from shardkit.formats.lmdb import foreign
from shardkit.formats.lmdb.layout import Tree
from shardkit.sample import JsonText, Sample
from shardkit.schema import (
    Array,
    Bool,
    Bytes,
    FieldType,
    Float,
    Image,
    Images,
    Int,
    Json,
    Schema,
    Text,
    int64,
)

ABOUT = b"__shardkit__"  # the entry that says what the others are; it sorts behind all digits
VERSION = 1
_HEAD = 128  # bytes of a value that its key most often ends in

_Decoder = Callable[[Any], Any]
_Column = tuple[str, type, _Decoder | None]  # field, what msgpack gives, what makes it a value


class LmdbReader(OldReader):
    """One environment. Values are copies; the file is mapped or read in pieces, never whole."""

    def __init__(
        self,
        path: Path,
        layout: dict[str, Any] | None = None,
        mapped: bool = True,
        *,
        at_random: bool = True,
    ) -> None:
        self._path = path
        self._mapped = mapped
        self._tree: Tree | None = Tree(path, at_random=at_random, mapped=mapped)
        about = _about(self._tree)
        self._foreign: foreign.Entries | None = None
        if about is None:
            layout = layout if layout and "entries" in layout else foreign.scan(self._tree)
            self._foreign = layout["entries"]
            self._length = len(self._foreign)
        else:
            self._length, ignored = _counted(self._tree, about["samples"])
            if layout is None:
                named = {"schema": about["schema"], "classes": about["classes"]}
                layout = {**named, **ignored, "ours": True}
        self.layout = layout
        self.schema = Schema.from_json(layout["schema"])
        self._relaxed = self.schema.with_optional(layout.get("guessed", ()))
        self._columns = _columns(self.schema, _DECODERS)
        self._leaf_pages: list[int] = []
        self._leaf_starts: list[int] = []  # the first position in each leaf
        self._leaves: dict[int, array[int]] = {}  # offset and size of each value in a leaf

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> Sample:
        if self._foreign is not None:
            found = self._foreign_sample(position, self.schema)
            return {n: _parsed(value) for n, value in found.items()}
        return self._read(position, self._columns)

    def stored(self, position: int) -> Sample:
        """The sample with JSON values as the text that is stored.

        In an environment of others it may lack fields that are only guessed to be everywhere.
        """
        if self._foreign is not None:
            return self._foreign_sample(position, self._relaxed)
        return self._read(position, _columns(self.schema, {**_DECODERS, Json: (str, _json_text)}))

    def _foreign_sample(self, position: int, schema: Schema) -> Sample:
        assert self._foreign is not None
        return self._foreign.sample(position, self.value(position), schema, self._path)

    def read_fields(self, position: int, fields: Collection[str]) -> Sample:
        """The sample with these fields alone; those of an environment of others are all read."""
        if self._foreign is not None:
            sample = self[position]
            return {n: v for n, v in sample.items() if n == "__key__" or n in fields}
        columns = [column for column in self._columns if column[0] in fields]
        return self._read(position, [self._columns[0], *columns])

    def keys(self) -> list[str]:
        """The key of every sample, in order."""
        if self._foreign is not None:
            return list(self._foreign.keys)
        tree = self._open()
        tree.expect_random(False)
        keys = [self._key(tree, position) for position in range(self._length)]
        tree.expect_random()
        return keys

    def value(self, position: int) -> memoryview | bytes:
        """The stored bytes of a sample, as a view where the file is mapped."""
        return self._value(self._open(), position)[1]

    def _value(self, tree: Tree, position: int) -> tuple[int, memoryview | bytes]:
        """Where the stored bytes of a sample begin, and these."""
        try:
            start, size = self._place(tree, position)
            return start, tree.read(start, size)
        except ShardkitError as error:
            raise error.located(position=position) from error.__cause__

    def _place(self, tree: Tree, position: int) -> tuple[int, int]:
        """Offset and size of a sample's value in the file."""
        if not 0 <= position < self._length:
            raise IndexError(f"{self._path} has {self._length} samples, not a position {position}")
        if self._foreign is not None:
            return self._foreign.place(position)
        if not self._leaf_pages:
            self._find_leaves(tree)
        number = bisect_right(self._leaf_starts, position) - 1
        places = self._leaves.get(number)
        if places is None:
            places = self._leaves[number] = self._parse_leaf(tree, number)
        at = 2 * (position - self._leaf_starts[number])
        if at >= len(places):
            raise self._missing(position)
        return places[at], places[at + 1]

    def close(self) -> None:
        self._tree = None

    def __reduce__(self) -> tuple[Any, ...]:
        return LmdbReader, (self._path, self.layout, self._mapped)

    def _open(self) -> Tree:
        if self._tree is None:
            raise ValueError(f"{self._path} is closed")
        return self._tree

    def _read(self, position: int, columns: list[_Column]) -> Sample:
        start, value = self._value(self._open(), position)
        name = "__key__"
        sample: Sample = {}
        try:
            stored = msgpack.unpackb(value)
            for name, kind, decode in columns:
                if name in stored:
                    found = stored[name]
                    if type(found) is not kind:
                        raise TypeError(f"it is of type {type(found).__name__}")
                    sample[name] = found if decode is None else decode(found)
                elif name == "__key__" or not self.schema[name].optional:
                    raise TypeError("it is not there")
        except (ValueError, TypeError, RecursionError) as error:
            expected = self.schema[name].python if name in self.schema else "a key"
            raise SampleError(
                f"a value is damaged: {error}",
                path=self._path,
                position=position,
                key=sample.get("__key__"),
                field=name,
                offset=start,
                expected=expected,
            ) from error
        return sample

    def _key(self, tree: Tree, position: int) -> str:
        """The key alone, which every value of ours begins with."""
        start, size = self._place(tree, position)
        head = bytes(tree.read(start, min(size, _HEAD)))
        # A map of up to 15 fields, the name "__key__", a text with a header of one or two bytes.
        tag = head[9] if head[1:9] == b"\xa7__key__" and len(head) > 10 else 0
        start, size = (10, tag & 31) if tag >> 5 == 5 else (11, head[10]) if tag == 0xD9 else (0, 0)
        if 0 < start <= start + size <= len(head):
            try:
                return head[start : start + size].decode()
            except UnicodeDecodeError:
                pass
        return str(self[position]["__key__"])  # any other, and one that is damaged

    def _find_leaves(self, tree: Tree) -> None:
        """The leaf pages and their first positions: from the pages above them, and one entry each.

        Two threads may do this at once, and find the same.
        """
        pages: list[int] = []
        starts: list[int] = []
        for page in tree.leaves():
            key = tree.entry(page, 0).key
            if pages and not _is_number(key):  # the last leaf may hold nothing else
                break
            pages.append(page)
            starts.append(self._position(key))
        if starts != sorted(set(starts)) or starts[:1] != [0]:
            raise DamagedError("the numbers of the samples are not in order", path=self._path)
        self._leaf_starts = starts
        self._leaf_pages = pages

    def _parse_leaf(self, tree: Tree, number: int) -> array[int]:
        """Offset and size of each value, in turn."""
        places = array("Q")
        for position, entry in enumerate(
            tree.entries(self._leaf_pages[number]), self._leaf_starts[number]
        ):
            if not _is_number(entry.key):
                break
            if entry.key != b"%012d" % position:
                raise self._missing(position)
            places.extend((entry.offset, entry.size))
        return places

    def _position(self, key: bytes) -> int:
        if not _is_number(key):
            raise DamagedError(
                "an entry of the LMDB is not ours",
                path=self._path,
                expected="keys of 12 digits",
                found=repr(key[:40]),
            )
        return int(key)

    def _missing(self, position: int) -> DamagedError:
        return DamagedError(
            "a sample is missing from the LMDB",
            path=self._path,
            position=position,
            expected=f"{self._length:,} entries from 000000000000 on",
            fix="copy or make the file again",
        )


class _Version(TypedDict):
    """Of our own entry: others are not looked at."""

    shardkit_lmdb: Any


class _About(_Version):
    """Our own entry."""

    samples: Count
    schema: dict[str, Any]
    classes: dict[str, list[str]]


def _about(tree: Tree) -> _About | None:
    """What our own entry says; None in an LMDB that others made."""
    entry = tree.get(ABOUT)
    if entry is None:
        return None
    try:
        found = parse(bytes(tree.read(entry.offset, entry.size)))
        version = checked(_Version, found)["shardkit_lmdb"]
        if version == VERSION:
            about = checked(_About, found)
            Schema.from_json(about["schema"])
            return about
    except FormatError as error:  # a type that this version does not know
        raise error.located(path=tree.path, offset=entry.offset) from error.__cause__
    except ValueError as error:
        where = {"path": tree.path, "offset": entry.offset}
        raise damaged(f"the entry {ABOUT.decode()}", error, **where) from error
    raise FormatError(
        "the LMDB is of another version",
        path=tree.path,
        expected=f"version {VERSION}",
        found=f"version {version!r:.60}",
        fix="use the shardkit that wrote it, or a newer one",
    )


def _is_number(key: bytes) -> bool:
    """Whether a key is that of a sample."""
    return len(key) == 12 and key.isdigit()


def _counted(tree: Tree, samples: int) -> tuple[int, dict[str, Any]]:
    """How many samples there are, and what else is passed over, as a layout has it.

    There are as many entries as were written, and our own; or others have come or gone since, by
    the library: then all are looked at. Samples with the next numbers are samples like all others.
    """
    if tree.main.entries == samples + 1:
        return samples, {}
    keys = [
        entry.key for leaf in tree.leaves() for entry in tree.entries(leaf) if entry.key != ABOUT
    ]
    others = [key for key in keys if not _is_number(key)]
    strange = [key for key in others if not foreign.ABOUT_OTHERS.fullmatch(key)]
    if strange:
        raise FormatError(
            "the LMDB has entries beside its samples, which nobody would read",
            path=tree.path,
            expected="keys of 12 digits: 000000000000, 000000000001, ...",
            found=f"{len(strange):,} others, such as {strange[0]!r:.60}",
            fix="delete them, or put them under the next numbers, with the lmdb library",
        )
    if len(keys) - len(others) < samples:
        raise DamagedError(
            "samples are missing from the LMDB",
            path=tree.path,
            expected=f"{samples:,}, as its entry {ABOUT.decode()} says",
            found=f"{len(keys) - len(others):,}",
            fix="copy or make the file again",
        )
    return len(keys) - len(others), foreign.passed_over(others)


def _columns(
    schema: Schema, decoders: dict[type[FieldType], tuple[type, _Decoder | None]]
) -> list[_Column]:
    columns: list[_Column] = [("__key__", str, None)]
    return columns + [(name, *decoders[type(kind)]) for name, kind in schema.items()]


def _parsed(value: Any) -> Any:
    return json.loads(value) if type(value) is JsonText else value


def _json_text(text: str) -> JsonText:
    json.loads(text)
    return JsonText(text)


def _all_bytes(values: list[Any]) -> list[bytes]:
    if not all(type(value) is bytes for value in values):
        raise TypeError("a list of images holds something else")
    return values


_DECODERS: dict[type[FieldType], tuple[type, _Decoder | None]] = {
    Int: (int, int64),
    Float: (float, None),
    Bool: (bool, None),
    Text: (str, None),
    Bytes: (bytes, None),
    Image: (bytes, None),
    Images: (list, _all_bytes),
    Json: (str, json.loads),
    Array: (bytes, load_array),
}
