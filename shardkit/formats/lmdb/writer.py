"""Writes an LMDB file from front to back: values as they arrive, full leaves, and the root last.

The file is like the result of LMDB's own compacting copy: no free pages, one transaction. Its bytes
only depend on the samples, while those written by the library also depend on map size, batches and
version. There is no map that could become full, and no page is written twice.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack

from shardkit.codecs.array import dump_array
from shardkit.formats.base import (
    KEY,
    ShardSpec,
    ShardWriter,
    encoded,
    key_bytes,
    not_stored,
    too_large,
)
from shardkit.formats.lmdb import layout
from shardkit.formats.lmdb.layout import HEADER, NODE, PAGE, page_header
from shardkit.formats.lmdb.reader import ABOUT, VERSION, LmdbReader, number_key
from shardkit.sample import JsonText, Sample
from shardkit.schema import Array, FieldType, Json
from shardkit.storage import fs

_LARGEST = 2**32 - 1  # bytes of a value
# Conversions of values for msgpack; all other types are stored unchanged.
_ENCODERS: dict[type[FieldType], Callable[[Any], Any]] = {Json: JsonText.of, Array: dump_array}


class LmdbWriter(ShardWriter):
    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, spec)
        schema = spec.schema.items()
        self._fields = [
            (n, kind, _ENCODERS.get(type(kind), lambda value: value)) for n, kind in schema
        ]
        self._samples = 0
        fs.make_folder(path.parent)
        self._file = fs.BufferedFile(path)
        self._file.write(bytes(2 * PAGE))  # the meta pages, which are written last
        self._overflows = 0
        self._leaves = _Level(self._file, layout.LEAF)

    def write(self, sample: Sample) -> bool:
        return self.put(self._pack(sample), sample[KEY])

    def put(self, value: bytes, key: str | None = None) -> bool:
        """Add a packed sample; False if the shard is full."""
        size = len(value)
        if size > _LARGEST:
            raise too_large("the sample is too large for LMDB", size, _LARGEST, key)
        if self.spec.is_full(self._samples, self._after(size)):
            return False
        self._add(number_key(self._samples), value)
        self._samples += 1
        return True

    def finish(self) -> None:
        about = {
            "shardkit_lmdb": VERSION,
            "samples": self._samples,
            "schema": self.spec.schema.to_json(),
            "classes": {name: list(names) for name, names in self.spec.classes.items()},
        }
        with self._file:
            self._add(ABOUT, json.dumps(about).encode())
            self._leaves.close()
            level, branches, depth = self._leaves, 0, 1
            while len(level.pages) > 1:
                below, level = level, _Level(self._file, layout.BRANCH)
                for key, child in below.pages:
                    level.add(key, child)
                level.close()
                branches, depth = branches + len(level.pages), depth + 1
            counts = branches, len(self._leaves.pages), self._overflows, self._samples + 1
            database = layout.Database(0, 0, depth, *counts, root=level.pages[0][1])
            self._file.flush()
            last_page = self._file.size // PAGE - 1
            metas = layout.meta_page(0, None, 1) + layout.meta_page(1, database, last_page)
            fs.rewrite(self._file.file, 0, metas)

    def _pack(self, sample: Sample) -> bytes:
        """Return the sample as a msgpack map."""
        key = sample[KEY]
        key_bytes(key)
        stored = {KEY: key, **encoded(sample, self._fields)}
        try:
            return bytes(msgpack.packb(stored))
        except (ValueError, OverflowError):
            for name, value in stored.items():  # find the field
                try:
                    msgpack.packb(value)
                except (ValueError, OverflowError) as error:  # such as a lone surrogate
                    raise not_stored(error, value, key, name) from error
            raise

    def _after(self, size: int) -> int:
        """Upper bound of the file size if a value of `size` bytes is the last one."""
        branches, about = len(self._leaves.pages) // 100 + 3, len(str(self.spec.schema)) // PAGE
        return self._file.size + (layout.overflow_pages(size) + 1 + 2 + branches + about) * PAGE

    def _add(self, key: bytes, value: bytes) -> None:
        size = number = len(value)
        if NODE + len(key) + size > layout.NODE_MAX:
            first, pages = self._file.size // PAGE, layout.overflow_pages(size)
            self._overflows += pages
            header = layout.overflow_header.pack(first, 0, layout.OVERFLOW, pages)
            self._file.write(header, value, bytes(pages * PAGE - HEADER - size))
            number, value = size | layout.BIG << 32, first.to_bytes(8, "little")
        self._leaves.add(key, number, value)


class _Level:
    """The leaves of a tree, or one level of its branches. A page is written when it is full."""

    def __init__(self, file: fs.BufferedFile, kind: int) -> None:
        self._file = file
        self._kind = kind
        self.pages: list[tuple[bytes, int]] = []  # first key and number of each
        self._nodes: list[bytes] = []  # of the current page
        self._room = PAGE - HEADER
        self._first_key = b""

    def add(self, key: bytes, number: int, value: bytes = b"") -> None:
        """Add a node. `number`: the page of a child; or a value's size, and its flags << 32."""
        if NODE + len(key) + len(value) + 2 > self._room:
            self.close()
        if not self._nodes:
            self._first_key = key
            key = b"" if self._kind == layout.BRANCH else key
        halves = number & 0xFFFF, number >> 16 & 0xFFFF
        node = layout.node_header.pack(*halves, number >> 32, len(key)) + key + value
        node += b"\0" * (len(node) % 2)
        self._nodes.append(node)
        self._room -= len(node) + 2

    def close(self) -> None:
        """Write the current page: pointers grow from the front, nodes from the back."""
        number = self._file.size // PAGE
        self.pages.append((self._first_key, number))
        pointers, at = [], PAGE
        for node in self._nodes:
            at -= len(node)
            pointers.append(at)
        lower = HEADER + 2 * len(pointers)
        head = page_header.pack(number, 0, self._kind, lower, at)
        head += struct.pack(f"<{len(pointers)}H", *pointers)
        self._file.write(head, bytes(at - lower), *reversed(self._nodes))
        self._nodes, self._room = [], PAGE - HEADER


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
