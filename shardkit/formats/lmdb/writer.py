"""Writes an LMDB file from front to back: values as they arrive, full leaves, and the root last.

The file is like the result of LMDB's own compacting copy: no free pages, one transaction. Its bytes
only depend on the samples, while those written by the library also depend on map size, batches and
version. There is no map that could become full, and no page is written twice.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack

from shardkit.codecs.array import dump_array
from shardkit.errors import SampleError
from shardkit.formats.base import KEY, ShardSpec, ShardWriter, encoded, key_bytes
from shardkit.formats.lmdb.layout import (
    BIG,
    BRANCH,
    HEADER,
    LEAF,
    NODE,
    NODE_MAX,
    OVERFLOW,
    PAGE,
    Database,
    meta_page,
    node_header,
    overflow_header,
    overflow_pages,
    page_header,
)
from shardkit.formats.lmdb.reader import ABOUT, VERSION, LmdbReader
from shardkit.sample import JsonText, Sample
from shardkit.schema import Array, FieldType, Json
from shardkit.storage import fs

_LARGEST = 2**32 - 1  # bytes of a value


class LmdbWriter(ShardWriter):
    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, spec)
        schema = spec.schema.items()
        self._fields = [(n, kind, _ENCODERS.get(type(kind), _unchanged)) for n, kind in schema]
        self._samples = 0
        fs.make_folder(path.parent)
        self._file = fs.BufferedFile(path)
        self._file.write(bytes(2 * PAGE))  # the meta pages, which are written last
        self._overflows = 0
        self._leaf: list[bytes] = []
        self._room = PAGE - HEADER
        self._first_key = b""
        self._leaves: list[tuple[bytes, int]] = []  # first key and page

    def write(self, sample: Sample) -> bool:
        return self.put(self._pack(sample), sample[KEY])

    def put(self, value: bytes, key: str | None = None) -> bool:
        """Add a packed sample; False if the shard is full."""
        size = len(value)
        if size > _LARGEST:
            raise SampleError(
                "the sample is too large for LMDB",
                key=key,
                expected="less than 4 GiB",
                found=f"{size:,} bytes",
            )
        if self.spec.is_full(self._samples, self._after(size)):
            return False
        self._add(b"%012d" % self._samples, value)
        self._samples += 1
        return True

    def finish(self) -> None:
        about = json.dumps(
            {
                "shardkit_lmdb": VERSION,
                "samples": self._samples,
                "schema": self.spec.schema.to_json(),
                "classes": {name: list(names) for name, names in self.spec.classes.items()},
            }
        ).encode()
        with self._file:
            self._add(ABOUT, about)
            self._close_leaf()
            database = self._branches()
            self._file.flush()
            metas = meta_page(0, None, 1) + meta_page(1, database, self._next - 1)
            fs.rewrite(self._file.file, 0, metas)

    @property
    def _next(self) -> int:
        """The number of the page that is written next."""
        return self._file.size // PAGE

    def _pack(self, sample: Sample) -> bytes:
        """The sample as a msgpack map."""
        key_bytes(sample[KEY])
        stored = {KEY: sample[KEY], **dict(encoded(sample, self._fields))}
        try:
            return _packed(stored)
        except (ValueError, OverflowError):  # find the field, such as text with a lone surrogate
            packed = [(name, kind, _packed) for name, kind in self.spec.schema.items()]
            deque(encoded({**sample, **stored}, packed), 0)
            raise

    def _after(self, size: int) -> int:
        """Upper bound of the file size if a value of `size` bytes is the last one."""
        branches, about = len(self._leaves) // 100 + 3, len(str(self.spec.schema)) // PAGE
        pages = overflow_pages(size) + 1 + 2 + branches + about
        return (self._next + pages) * PAGE

    def _add(self, key: bytes, value: bytes) -> None:
        size = len(value)
        if NODE + len(key) + size > NODE_MAX:
            first, pages = self._next, overflow_pages(size)
            self._overflows += pages
            header = overflow_header.pack(first, 0, OVERFLOW, pages)
            self._file.write(header, value, bytes(pages * PAGE - HEADER - size))
            flags, value = BIG, first.to_bytes(8, "little")
        else:
            flags = 0
        node = node_header.pack(size & 0xFFFF, size >> 16, flags, len(key)) + key + value
        self._put_node(node + b"\0" * (len(node) % 2), key)

    def _put_node(self, node: bytes, key: bytes) -> None:
        if len(node) + 2 > self._room:
            self._close_leaf()
        if not self._leaf:
            self._first_key = key
        self._leaf.append(node)
        self._room -= len(node) + 2

    def _close_leaf(self) -> None:
        self._leaves.append((self._first_key, self._next))
        self._add_page(LEAF, self._leaf)
        self._leaf = []
        self._room = PAGE - HEADER

    def _add_page(self, kind: int, nodes: list[bytes]) -> None:
        self._file.write(page(self._next, kind, nodes))

    def _branches(self) -> Database:
        """Write the levels above the leaves; returns the tree."""
        level, branches, depth = self._leaves, 0, 1
        while len(level) > 1:
            above: list[tuple[bytes, int]] = []
            nodes: list[bytes] = []
            room, first = PAGE - HEADER, level[0][0]
            for key, child in level:
                node = _branch_node(key if nodes else b"", child)
                if len(node) + 2 > room:
                    above.append((first, self._next))
                    self._add_page(BRANCH, nodes)
                    nodes, room, first = [], PAGE - HEADER, key
                    node = _branch_node(b"", child)
                nodes.append(node)
                room -= len(node) + 2
            above.append((first, self._next))
            self._add_page(BRANCH, nodes)
            level, branches, depth = above, branches + len(above), depth + 1
        entries = self._samples + 1
        leaves = len(self._leaves)
        return Database(0, 0, depth, branches, leaves, self._overflows, entries, level[0][1])


def join(path: Path, parts: Sequence[Path], spec: ShardSpec) -> None:
    """Join several LMDBs: copies the values unchanged, under new numbers."""
    writer = LmdbWriter(path, spec)
    try:
        for part in parts:
            reader = LmdbReader(part, {"schema": spec.schema.to_json()})
            with contextlib.closing(reader):
                for position in range(len(reader)):
                    writer.put(reader.value(position))
    finally:
        writer.close()


def page(number: int, kind: int, nodes: list[bytes]) -> bytes:
    """A leaf or branch page: pointers grow from the front, nodes from the back."""
    sizes = [len(node) for node in nodes]
    pointers, at = [], PAGE
    for size in sizes:
        at -= size
        pointers.append(at)
    lower = HEADER + 2 * len(nodes)
    head = page_header.pack(number, 0, kind, lower, at)
    head += struct.pack(f"<{len(pointers)}H", *pointers)
    return head + bytes(at - lower) + b"".join(reversed(nodes))


def _branch_node(key: bytes, child: int) -> bytes:
    node = node_header.pack(child & 0xFFFF, child >> 16 & 0xFFFF, child >> 32, len(key)) + key
    return node + b"\0" * (len(node) % 2)


# --- values --------------------------------------------------------------------------------------


def _unchanged(value: Any) -> Any:
    return value


def _packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value))


# Conversions of values for msgpack; all other types are stored unchanged.
_ENCODERS: dict[type[FieldType], Callable[[Any], Any]] = {Json: JsonText.of, Array: dump_array}
