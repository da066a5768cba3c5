"""The byte layout of an LMDB file: two meta pages, then the pages of a B+ tree.

Layout: LMDB 0.9, mdb.c (MDB_page, MDB_node, MDB_meta; data version 1). All numbers are
little-endian. Pages have 4,096 bytes in files that we write, and the size given by the meta page in
files that we read. Files are parsed here, not by the LMDB library, because the library trusts every
pointer that it reads: a truncated or damaged file crashes the process.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardkit.errors import DamagedError, FormatError
from shardkit.storage.byte_source import ByteSource, open_source

PAGE = 4096  # bytes of a page that we write
HEADER = 16  # bytes of a page's header
BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8  # flags of pages
BIG, SUBDATA, DUPDATA = 1, 2, 4  # flags of nodes: on overflow pages, a database, several values
NODE = 8  # bytes of a node before its key
# The values of larger nodes are stored on overflow pages, so that two nodes fit on a page.
NODE_MAX = (((PAGE - HEADER) // 2) & ~1) - 2

page_header = struct.Struct("<QHHHH")  # number, unused, kind, end of pointers, start of nodes
overflow_header = struct.Struct("<QHHI")  # number, unused, kind, pages
node_header = struct.Struct("<HHHH")  # size (low, high) or page (low, high), flags, bytes of key
_pointer = struct.Struct("<H")
_page_number = struct.Struct("<Q")
_meta = struct.Struct("<IIQQ")  # magic, version, address, map size
_database = struct.Struct("<IHHQQQQQ")  # see Database
_tail = struct.Struct("<QQ")  # last page, transaction
_META_SIZE = HEADER + _meta.size + 2 * _database.size + _tail.size
_MAGIC = 0xBEEFC0DE
_VERSION = 1
_NO_ROOT = 2**64 - 1  # the root of an empty database
_INTEGER_KEYS = 8  # how the list of free pages is sorted
_SMALLEST_ENTRY = 2 + NODE  # bytes: its pointer and its node
_DEEPEST = 32  # most levels of a tree; 4 levels suffice for 10^8 values


class Database(NamedTuple):
    """A meta page's record of one tree. For that of the free pages, `pad` is the page size."""

    pad: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int


class Entry(NamedTuple):
    """A key, and the offset and size of its value in the file, in bytes."""

    key: bytes
    offset: int
    size: int
    flags: int


class Page(NamedTuple):
    """A page of the tree, with a valid header."""

    number: int
    kind: int  # BRANCH or LEAF
    nodes: int
    data: bytes


def meta_page(number: int, database: Database | None, last_page: int) -> bytes:
    """Meta page 0 or 1. Page 1 is the current one, as it has the higher transaction number."""
    none = (0, 0, 0, 0, 0, _NO_ROOT)
    free = _database.pack(PAGE, _INTEGER_KEYS, *none)
    main = _database.pack(*(database or (0, 0, *none)))
    head = _meta.pack(_MAGIC, _VERSION, 0, (last_page + 1) * PAGE)
    page = page_header.pack(number, 0, META, 0, 0) + head + free + main
    return (page + _tail.pack(last_page, number)).ljust(PAGE, b"\0")


def overflow_pages(size: int) -> int:
    """Number of pages for a value of `size` bytes that does not fit into a leaf."""
    return (HEADER - 1 + size) // PAGE + 1


class Tree:
    """An LMDB file: every pointer is checked before it is followed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = source = open_source(path)
        self._page, self._last, self.main = _current_meta(source)
        size = (self._last + 1) * self._page
        if source.size < size:
            expected, found = f"{size:,} bytes, as its header says", f"{source.size:,} bytes"
            raise DamagedError(
                "the LMDB file is truncated", path=path, expected=expected, found=found
            )
        if self.main.entries > source.size // _SMALLEST_ENTRY:
            raise self._damaged("the LMDB file states more entries than it has room for", 0)
        self._latest = Page(-1, 0, 0, b"")  # the page that was read last

    def read(self, offset: int, size: int) -> bytes:
        """Return the bytes of a value."""
        latest = self._latest
        at = offset - latest.number * self._page
        if 0 <= at <= self._page - size and latest.data:
            return latest.data[at : at + size]
        return self.source.read(offset, size)

    def get(self, key: bytes, page: int | None = None, guess: int = 0) -> Entry | None:
        """Return the entry with this key, searched from the root or from `page`.

        `guess` is the probable number of the entry in its leaf.
        """
        page = self.main.root if page is None else page
        if page == _NO_ROOT:
            return None
        leaf = self.leaf(key, page)
        if guess >= leaf.nodes or self._node(leaf, guess)[-1] != key:
            guess = self._last_up_to(leaf, key)
        entry = self._entry(leaf, guess)
        return entry if entry.key == key else None

    def leaf(self, key: bytes, page: int) -> Page:
        """Return the leaf at or below a page that would contain a key."""
        for _ in range(_DEEPEST):
            found = self._look(page)
            if found.kind == LEAF:
                return found
            _, page = self._child(found, self._last_up_to(found, key))
        raise self._too_deep()

    def all_entries(self, root: int | None = None) -> Iterator[Entry]:
        """Yield the entries in order of their keys."""
        root = self.main.root if root is None else root
        pending = [] if root == _NO_ROOT else [(root, 1)]
        seen = 0
        while pending:
            number, depth = pending.pop()
            seen += 1
            if depth > _DEEPEST or seen > self._last:
                raise self._too_deep()
            page = self._look(number)
            if page.kind == LEAF:
                yield from self.entries(page)
            else:
                children = [(self._child(page, n)[1], depth + 1) for n in range(page.nodes)]
                pending += reversed(children)

    def level(self, most: int) -> list[tuple[bytes, int]]:
        """The lowest level of the tree with at most `most` pages: first key and number of each."""
        pages = [(b"", self.main.root)]
        for _ in range(min(self.main.depth, _DEEPEST) - 1):
            below: list[tuple[bytes, int]] = []
            for key, number in pages:
                page = self._look(number)
                if page.kind == LEAF or len(below) + page.nodes > most:
                    return pages
                children = [self._child(page, n) for n in range(page.nodes)]
                below += [(key, children[0][1]), *children[1:]]  # the first child's key is empty
            pages = below
        return pages

    def entries(self, leaf: Page) -> list[Entry]:
        """Return the entries of a leaf page."""
        found, size = [], 0
        for number in range(leaf.nodes):
            entry = self._entry(leaf, number)
            size += NODE + len(entry.key)
            if size > self._page:  # many pointers to one long key could exhaust the memory
                raise self._damaged("the nodes of a page overlap", leaf.number * self._page)
            found.append(entry)
        return found

    def root_of(self, entry: Entry) -> int:
        """Return the root of a named database, which is an entry of the main database."""
        if entry.size != _database.size:
            raise self._damaged("a named database is damaged", entry.offset)
        return Database(*_database.unpack(self.read(entry.offset, entry.size))).root

    def _look(self, number: int) -> Page:
        """Read a page of the tree and check its header."""
        if number == self._latest.number:
            return self._latest
        at = number * self._page
        if not 2 <= number <= self._last:
            raise self._damaged(f"a page number is out of range: {number}", 0)
        data = self.source.read(at, self._page)
        _, _, kind, lower, upper = page_header.unpack_from(data)
        if kind not in (BRANCH, LEAF) or not HEADER < lower <= upper <= self._page or lower % 2:
            raise self._damaged("a page of the tree is damaged", at)
        self._latest = page = Page(number, kind, (lower - HEADER) // 2, data)
        return page

    def _node(self, page: Page, number: int) -> tuple[int, int, int, int, bytes]:
        """A node: offset in its page, low and high half of a size or page number, flags, key."""
        at = HEADER + 2 * number
        (pointer,) = _pointer.unpack_from(page.data, at)
        if not HEADER <= pointer <= self._page - NODE:
            at += page.number * self._page
            raise self._damaged("a pointer in a page is out of range", at)
        low, high, flags, size = node_header.unpack_from(page.data, pointer)
        start = pointer + NODE
        if start + size > self._page:
            raise self._damaged("a key exceeds its page", page.number * self._page + pointer)
        return pointer, low, high, flags, page.data[start : start + size]

    def _child(self, page: Page, number: int) -> tuple[bytes, int]:
        """Smallest key and page number of a child of a branch."""
        _, low, high, flags, key = self._node(page, number)
        return key, low | high << 16 | flags << 32

    def _last_up_to(self, page: Page, key: bytes) -> int:
        """The last node whose key is at most this one; the first key of a branch is not stored."""
        return bisect_right(range(page.nodes), key, 1, key=lambda n: self._node(page, n)[-1]) - 1

    def _entry(self, page: Page, number: int) -> Entry:
        at, low, high, flags, key = self._node(page, number)
        page_at = page.number * self._page
        start, size = at + NODE + len(key), low | high << 16
        if start + (_page_number.size if flags & BIG else size) > self._page:
            raise self._damaged("a value exceeds its page", page_at + at)
        if not flags & BIG:
            return Entry(key, page_at + start, size, flags)
        (first,) = _page_number.unpack_from(page.data, start)
        start = first * self._page + HEADER
        # The file may have pages after the header's last page, but they do not belong to a value.
        if not 2 <= first <= self._last or start + size > (self._last + 1) * self._page:
            raise self._damaged("a value is outside of the file", page_at + at)
        return Entry(key, start, size, flags)

    def _damaged(self, what: str, offset: int) -> DamagedError:
        return DamagedError(what, path=self.path, offset=offset)

    def _too_deep(self) -> DamagedError:
        return self._damaged("the pages of the tree form a cycle", 0)


def _current_meta(source: ByteSource) -> tuple[int, int, Database]:
    """Page size, last page and main database of the meta page with the latest transaction."""
    found = []
    page = PAGE
    for number in (0, 1):  # the first one tells where the second one is
        at = number * page
        meta = _parse_meta(source.read(at, _META_SIZE)) if at + _META_SIZE <= source.size else None
        if meta is not None:
            found.append(meta)
            page = meta[1] if number == 0 else page
    if not found:
        raise FormatError(
            "this is not an LMDB file" if source.size else "the LMDB file is empty",
            path=source.path,
            expected=f"a meta page with the magic number {_MAGIC:#x} and data version 1",
            found=f"{source.size:,} bytes without one",
        )
    _, page, last, main = max(found, key=lambda meta: meta[0])
    if page < 256 or page & (page - 1) or page > 1 << 16:
        what, shown = "the LMDB file names an invalid page size", f"{page} bytes"
        raise DamagedError(what, path=source.path, found=shown)
    return page, last, main


def _parse_meta(data: bytes) -> tuple[int, int, int, Database] | None:
    """Transaction, page size, last page and main database; None if it is not a meta page."""
    magic, version, _, _ = _meta.unpack_from(data, HEADER)
    if (magic, version) != (_MAGIC, _VERSION):
        return None
    at = HEADER + _meta.size
    free = Database(*_database.unpack_from(data, at))
    main = Database(*_database.unpack_from(data, at + _database.size))
    last, transaction = _tail.unpack_from(data, at + 2 * _database.size)
    return transaction, free.pad, last, main
