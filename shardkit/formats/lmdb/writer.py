"""Writes an LMDB file from front to back: values as they come, leaves as they fill, the root last.

This is what LMDB's own compacting copy leaves: no free pages, one transaction. Its bytes depend on
the samples alone, where those that the library writes depend on map size, batches and version;
there is no map that could be full, and no page is written twice.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack

from shardkit import storage
from shardkit.codecs.array import dump_array
from shardkit.codecs.image import checked
from shardkit.errors import SampleError
from shardkit.formats.base import ShardWriter
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
    images_in,
)
from shardkit.storage import Chunk

_BUFFER = 1 << 18  # bytes gathered before a write
_LARGEST = 2**32 - 1  # bytes of a value
_FEW = 512  # bytes that are cheaper to copy than to write from where they are


class LmdbWriter(ShardWriter):
    def __init__(
        self,
        path: Path,
        schema: Schema,
        max_bytes: int | None,
        classes: Mapping[str, Sequence[str]] | None,
    ) -> None:
        self._schema = schema
        self._classes = classes
        self._max_bytes = max_bytes
        self._fields = [
            (name, _packed(name), kind, _ENCODERS[type(kind)]) for name, kind in schema.items()
        ]
        self._samples = 0
        self._closed = False
        storage.make_folder(path.parent)
        self._file = storage.create(path)
        self._buffer: list[Chunk] = [bytes(2 * PAGE)]  # the meta pages, which are written last
        self._buffered = 2 * PAGE
        self._next = 2  # page
        self._overflows = 0
        self._leaf: list[bytes] = []
        self._room = PAGE - HEADER
        self._first_key = b""
        self._leaves: list[tuple[bytes, int]] = []  # first key and page

    def write(self, sample: Sample) -> bool:
        chunks = self._pack(sample)
        return self.put(chunks, sum(map(len, chunks)), sample["__key__"])

    def put(self, chunks: Sequence[Chunk], size: int, key: str | None = None) -> bool:
        """Add a sample whose value is packed already; False if it is too much for the shard."""
        if size > _LARGEST:
            raise SampleError(
                "the sample is too large for LMDB",
                key=key,
                expected="less than 4 GiB",
                found=f"{size:,} bytes",
            )
        if self._max_bytes is not None and self._samples and self._after(size) > self._max_bytes:
            return False
        self._add(b"%012d" % self._samples, chunks, size)
        self._samples += 1
        if self._buffered >= _BUFFER:
            self._flush()
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        about = json.dumps(
            {
                "shardkit_lmdb": VERSION,
                "samples": self._samples,
                "schema": self._schema.to_json(),
                "classes": {name: list(names) for name, names in (self._classes or {}).items()},
            }
        ).encode()
        with self._file:
            self._add(ABOUT, [about], len(about))
            self._close_leaf()
            database = self._branches()
            self._flush()
            last = self._next - 1
            metas = meta_page(0, None, 1) + meta_page(1, database, last)
            storage.rewrite(self._file, 0, metas)

    def _pack(self, sample: Sample) -> list[Chunk]:
        """The sample as a msgpack map; large values stay the objects they are."""
        key = sample["__key__"]
        try:
            text = key.encode()
        except UnicodeEncodeError:
            raise SampleError("the key is not valid Unicode", key=ascii(key)) from None
        small = bytearray(_map_header(len(sample)) + _KEY + _packed_text(text))
        chunks: list[Chunk] = []
        for name, packed_name, kind, encode in self._fields:
            if name not in sample:
                continue
            value = sample[name]
            for image in images_in(kind, value):
                checked(image, key, name)
            small += packed_name
            try:
                head, body = encode(value)
            except (ValueError, OverflowError) as error:  # a lone surrogate in text, say
                raise SampleError(
                    f"the value cannot be stored: {error}",
                    key=key,
                    field=name,
                    found=_shown(value),
                ) from error
            small += head
            if len(body) < _FEW:
                small += body
            else:
                chunks += (bytes(small), body)
                small.clear()
        if small:
            chunks.append(bytes(small))
        return chunks

    def _after(self, size: int) -> int:
        """Bytes of the file, at most, if a value of `size` bytes is added and it is closed then."""
        leaves = len(self._leaves)
        pages = overflow_pages(size) + 1 + 2 + leaves // 100 + 3 + len(str(self._schema)) // PAGE
        return (self._next + pages) * PAGE

    def _add(self, key: bytes, chunks: Sequence[Chunk], size: int) -> None:
        if NODE + len(key) + size > NODE_MAX:
            first, pages = self._next, overflow_pages(size)
            self._next += pages
            self._overflows += pages
            self._buffer.append(overflow_header.pack(first, 0, OVERFLOW, pages))
            self._buffer += chunks
            self._buffer.append(bytes(pages * PAGE - HEADER - size))
            self._buffered += pages * PAGE
            flags, stored = BIG, first.to_bytes(8, "little")
        else:
            flags, stored = 0, b"".join(chunks)
        node = node_header.pack(size & 0xFFFF, size >> 16, flags, len(key)) + key + stored
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
        self._buffer.append(page(self._next, kind, nodes))
        self._buffered += PAGE
        self._next += 1

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

    def _flush(self) -> None:
        chunks, self._buffer, self._buffered = self._buffer, [], 0
        storage.write(self._file, chunks)


def join(
    path: Path,
    parts: Sequence[Path],
    schema: Schema,
    classes: Mapping[str, Sequence[str]] | None,
) -> None:
    """One LMDB of several: the values as they are, under new numbers."""
    writer = LmdbWriter(path, schema, None, classes)
    try:
        for part in parts:
            reader = LmdbReader(part, {"schema": schema.to_json()})
            with contextlib.closing(reader):
                for position in range(len(reader)):
                    value = reader.value(position)
                    writer.put([value], len(value))
    finally:
        writer.close()


def page(number: int, kind: int, nodes: list[bytes]) -> bytes:
    """A leaf or a branch: pointers from the front, nodes from the back."""
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


# --- msgpack, in two pieces: what is small, and the bytes of a value where they are ---------------


def _shown(value: Any) -> str:
    """A value in an error: its size where it may have gigabytes."""
    if isinstance(value, bytes | str | list):
        return f"{type(value).__name__} of length {len(value):,}"
    return f"{value!r:.60}"


def _packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value, use_bin_type=True))


_KEY = _packed("__key__")


def _map_header(fields: int) -> bytes:
    if fields < 16:
        return bytes([0x80 | fields])
    if fields < 1 << 16:
        return b"\xde" + fields.to_bytes(2, "big")
    return b"\xdf" + fields.to_bytes(4, "big")


def _text_header(size: int) -> bytes:
    if size < 32:
        return bytes([0xA0 | size])
    for tag, width in ((0xD9, 1), (0xDA, 2), (0xDB, 4)):
        if size < 1 << 8 * width:
            return bytes([tag]) + size.to_bytes(width, "big")
    raise OverflowError("more than 4 GiB of text")


def _bytes_header(size: int) -> bytes:
    for tag, width in ((0xC4, 1), (0xC5, 2), (0xC6, 4)):
        if size < 1 << 8 * width:
            return bytes([tag]) + size.to_bytes(width, "big")
    raise OverflowError("more than 4 GiB")


def _packed_text(text: bytes) -> bytes:
    return _text_header(len(text)) + text


_Encoder = Callable[[Any], tuple[bytes, bytes]]


def _plain(value: Any) -> tuple[bytes, bytes]:
    return _packed(value), b""


def _bytes(value: bytes) -> tuple[bytes, bytes]:
    return _bytes_header(len(value)), value


def _text(value: str) -> tuple[bytes, bytes]:
    text = value.encode()
    return _text_header(len(text)), text


_ENCODERS: dict[type[FieldType], _Encoder] = {
    Int: _plain,
    Float: _plain,
    Bool: _plain,
    Bytes: _bytes,
    Image: _bytes,
    Images: lambda value: (b"", _packed(value)),
    Text: _text,
    Json: lambda value: _text(JsonText.of(value)),
    Array: lambda value: _bytes(dump_array(value)),
}
