"""The bytes of an LMDB file: two meta pages, then the pages of a B+ tree.

Layout: LMDB 0.9, mdb.c (MDB_page, MDB_node, MDB_meta; data version 1). All numbers are
little-endian; a page is 4,096 bytes in what we write, any size that a meta page names in what we
read. Files are parsed here rather than by the LMDB library since that trusts every pointer it
finds: a cut or changed file ends the process.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardkit import storage
from shardkit.errors import DamagedError, FormatError

PAGE = 4096  # bytes of a page that we write
HEADER = 16  # bytes that every page begins with
BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8  # kinds of pages
BIG, SUBDATA, DUPDATA = 1, 2, 4  # kinds of nodes: value elsewhere, a database, several values
NODE = 8  # bytes of a node before its key
# A node of more bytes than this (so that two fit a page) keeps its value on pages of its own.
NODE_MAX = (((PAGE - HEADER) // 2) & ~1) - 2

page_header = struct.Struct("<QHHHH")  # number, unused, kind, end of pointers, start of nodes
overflow_header = struct.Struct("<QHHI")  # number, unused, kind, pages
node_header = struct.Struct("<HHHH")  # size (low, high) or page (low, high), flags, bytes of key
_meta = struct.Struct("<IIQQ")  # magic, version, address, map size
_database = struct.Struct("<IHHQQQQQ")  # see Database
_tail = struct.Struct("<QQ")  # last page, transaction
_MAGIC = 0xBEEFC0DE
_VERSION = 1
_NOWHERE = 2**64 - 1  # the root of an empty database
_INTEGER_KEYS = 8  # how the list of free pages is sorted
_SMALLEST_ENTRY = 2 + NODE  # bytes: its pointer and its node
_DEEPEST = 32  # levels of a tree; 4 hold 10^8 values


class Database(NamedTuple):
    """What a meta page says of one tree. `pad` is the page size in that of the free pages."""

    pad: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int


class Entry(NamedTuple):
    """A key, and where its value stands in the file, in bytes."""

    key: bytes
    offset: int
    size: int
    flags: int


def meta_page(number: int, database: Database | None, last_page: int) -> bytes:
    """Meta page 0 or 1. The one with the higher transaction counts, which is page 1."""
    none = (0, 0, 0, 0, 0, _NOWHERE)
    free = _database.pack(PAGE, _INTEGER_KEYS, *none)
    main = _database.pack(*(database or (0, 0, *none)))
    head = _meta.pack(_MAGIC, _VERSION, 0, (last_page + 1) * PAGE)
    page = page_header.pack(number, 0, META, 0, 0) + head + free + main
    return (page + _tail.pack(last_page, number)).ljust(PAGE, b"\0")


def overflow_pages(size: int) -> int:
    """Pages that a value of `size` bytes takes when it does not fit a leaf."""
    return (HEADER - 1 + size) // PAGE + 1


class Tree:
    """An LMDB file: every pointer is checked before it is followed."""

    def __init__(self, path: Path, *, at_random: bool = True, mapped: bool = True) -> None:
        """`at_random` tells the system not to read ahead in a file that is mapped."""
        self.path = path
        self._data: storage.Data | memoryview = storage.open_data(path, mapped)
        self._page, self._last, self.main = _first_pages(self._data, path)
        if len(self._data) < (self._last + 1) * self._page:
            raise DamagedError(
                "the LMDB file is truncated",
                path=path,
                expected=f"{(self._last + 1) * self._page:,} bytes, as its header says",
                found=f"{len(self._data):,} bytes",
                fix="copy or make the file again",
            )
        if self.main.entries > len(self._data) // _SMALLEST_ENTRY:
            raise self._damaged("the LMDB file names more entries than it has room for", 0)
        self._map = self._data if isinstance(self._data, mmap.mmap) else None
        if self._map is not None:
            self._data = memoryview(self._map)
        self._latest: tuple[int, memoryview | bytes] = (-1, b"")  # the page looked at last
        if at_random:
            self.expect_random()

    def expect_random(self, expected: bool = True) -> None:
        """Tell the system whether to read only what is asked for, or what stands around it too."""
        if self._map is not None and hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM if expected else mmap.MADV_NORMAL)

    def read(self, start: int, size: int) -> memoryview | bytes:
        """So many bytes of the file, or those that are left of it: a view where it is mapped."""
        return self._data[start : start + size]

    def get(self, key: bytes) -> Entry | None:
        """The entry with this key, found from the root."""
        page = self.main.root
        if page == _NOWHERE:
            return None
        for _ in range(_DEEPEST):
            kind, count = self._look(page)
            if kind == LEAF:
                found = (self._entry(page, n) for n in range(count))
                return next((entry for entry in found if entry.key == key), None)
            page = self._child(page, count, key)
        raise self._too_deep()

    def leaves(self, root: int | None = None) -> Iterator[int]:
        """The leaf pages in order of their keys."""
        root = self.main.root if root is None else root
        pending = [] if root == _NOWHERE else [(root, 1)]
        seen = 0
        while pending:
            page, depth = pending.pop()
            seen += 1
            if depth > _DEEPEST or seen > self._last:
                raise self._too_deep()
            kind, count = self._look(page)
            if kind == LEAF:
                yield page
            else:
                children = [(self._branch(page, n)[1], depth + 1) for n in range(count)]
                pending += reversed(children)

    def entries(self, leaf: int) -> list[Entry]:
        """The entries of one leaf page."""
        _, count = self._look(leaf)
        return [self._entry(leaf, n) for n in range(count)]

    def entry(self, leaf: int, number: int) -> Entry:
        """One entry of a leaf page."""
        _, count = self._look(leaf)
        if number >= count:
            raise self._damaged("a leaf page has too few entries", leaf * self._page)
        return self._entry(leaf, number)

    def root_of(self, entry: Entry) -> int:
        """The root of a named database, which is an entry of the main one."""
        if entry.size != _database.size:
            raise self._damaged("a named database is damaged", entry.offset)
        return Database(*_database.unpack(self.read(entry.offset, entry.size))).root

    def _bytes_of(self, page: int) -> memoryview | bytes:
        number, data = self._latest
        if number != page:
            data = self.read(page * self._page, self._page)
            self._latest = (page, data)
        return data

    def _look(self, page: int) -> tuple[int, int]:
        """Kind of a page of the tree, and how many nodes it has."""
        at = page * self._page
        if not 2 <= page <= self._last:
            raise self._damaged(f"a page number is out of range: {page}", 0)
        _, _, flags, lower, upper = page_header.unpack_from(self._bytes_of(page))
        kind = flags & (BRANCH | LEAF | OVERFLOW | META)
        if kind not in (BRANCH, LEAF) or not HEADER <= lower <= upper <= self._page or lower % 2:
            raise self._damaged("a page of the tree is damaged", at)
        if flags & ~(BRANCH | LEAF):
            raise FormatError(
                "the LMDB has pages that shardkit does not read",
                path=self.path,
                offset=at,
                found=f"flags {flags:#x}",
            )
        if lower == HEADER:
            raise self._damaged("a page of the tree is empty", at)
        return kind, (lower - HEADER) // 2

    def _node(self, page: int, number: int) -> tuple[int, int, int, int, int]:
        """Where in its page a node is, and its header: low, high, flags, bytes of the key."""
        data = self._bytes_of(page)
        at = HEADER + 2 * number
        (pointer,) = _pointer.unpack_from(data, at)
        if not HEADER <= pointer <= self._page - NODE:
            raise self._damaged("a pointer in a page leads out of it", page * self._page + at)
        low, high, flags, key = node_header.unpack_from(data, pointer)
        if pointer + NODE + key > self._page:
            raise self._damaged("a key leads out of its page", page * self._page + pointer)
        return pointer, low, high, flags, key

    def _branch(self, page: int, number: int) -> tuple[bytes, int]:
        """Smallest key, and number, of a child page."""
        at, low, high, flags, key = self._node(page, number)
        stored = self._bytes_of(page)[at + NODE : at + NODE + key]
        return bytes(stored), low | high << 16 | flags << 32

    def _child(self, page: int, count: int, key: bytes) -> int:
        """The child in which a key would be; the first child's key is not stored."""
        low, high = 0, count - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._branch(page, middle)[0] <= key:
                low = middle
            else:
                high = middle - 1
        return self._branch(page, low)[1]

    def _entry(self, page: int, number: int) -> Entry:
        at, low, high, flags, key_size = self._node(page, number)
        data, page_at = self._bytes_of(page), page * self._page
        start, size = at + NODE + key_size, low | high << 16
        key = bytes(data[at + NODE : start])
        if start + (8 if flags & BIG else size) > self._page:
            raise self._damaged("a value leads out of its page", page_at + at)
        if not flags & BIG:
            return Entry(key, page_at + start, size, flags)
        (first,) = _page_number.unpack_from(data, start)
        # The pages behind the header's last page may be there, but belong to no value.
        if not 2 <= first <= self._last or (
            first * self._page + HEADER + size > (self._last + 1) * self._page
        ):
            raise self._damaged("a value is said to stand outside of the file", page_at + at)
        return Entry(key, first * self._page + HEADER, size, flags)

    def _damaged(self, what: str, offset: int) -> DamagedError:
        return DamagedError(what, path=self.path, offset=offset, fix="copy or make the file again")

    def _too_deep(self) -> DamagedError:
        return self._damaged("the pages of the tree lead in a circle", 0)


_pointer = struct.Struct("<H")
_page_number = struct.Struct("<Q")


def _first_pages(data: storage.Data, path: Path) -> tuple[int, int, Database]:
    """Page size, last page and main database of the meta page that counts."""
    found = []
    page = PAGE
    size = HEADER + _meta.size + 2 * _database.size + _tail.size
    for number in (0, 1):
        at = number * page
        meta = _parse_meta(data[at : at + size])
        if meta is None:
            continue
        found.append(meta)
        page = meta[1] if number == 0 else page
    if not found:
        raise FormatError(
            "this is no LMDB file" if len(data) else "the LMDB file is empty",
            path=path,
            expected=f"a meta page with the magic number {_MAGIC:#x} and data version 1",
            found=f"{len(data):,} bytes without one",
        )
    _, page, last, main = max(found, key=lambda meta: meta[0])
    if page < 256 or page & (page - 1) or page > 1 << 16:
        raise DamagedError(
            "the LMDB file names a page size that is none", path=path, found=f"{page} bytes"
        )
    return page, last, main


def _parse_meta(data: bytes) -> tuple[int, int, int, Database] | None:
    """Transaction, page size, last page, main database; None for what is no meta page."""
    if len(data) < HEADER + _meta.size + 2 * _database.size + _tail.size:
        return None
    magic, version, _, _ = _meta.unpack_from(data, HEADER)
    if (magic, version) != (_MAGIC, _VERSION):
        return None
    at = HEADER + _meta.size
    free = Database(*_database.unpack_from(data, at))
    main = Database(*_database.unpack_from(data, at + _database.size))
    last, transaction = _tail.unpack_from(data, at + 2 * _database.size)
    return transaction, free.pad, last, main
