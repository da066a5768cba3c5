"""The footer of a Parquet file: rows and nulls of each row group, and where its dictionaries are.

pyarrow knows them too, but ends the process where a footer is damaged so that its statistics
contradict each other. Layout: parquet.thrift; Thrift's compact protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from shardkit.storage import FREE_EXPANSION, Data

TAIL = 8  # the footer's length, and the magic
_LIST, _STRUCT = 9, 12
# Numbers of fields in parquet.thrift.
_ROW_GROUPS = 4  # FileMetaData
_COLUMNS, _NUM_ROWS = 1, 3  # RowGroup
_META_DATA = 3  # ColumnChunk
_PATH, _DATA_PAGE, _DICTIONARY_PAGE_AT, _STATISTICS = 3, 9, 11, 12  # ColumnMetaData
_PAGE_TYPE, _PAGE_SIZE = 1, 2  # PageHeader
_DICTIONARY_PAGE = 2  # of the types of pages
_PAGE_HEADER = 64  # bytes in which its first two fields stand
_NULL_COUNT = 3  # Statistics


class RowGroup(NamedTuple):
    """Its rows, and per leaf column the number of nulls; None where the writer does not say."""

    rows: int
    nulls: dict[str, int | None]
    pages: list[int]  # where the first page of each column begins: its dictionary, if it has one


def row_groups(data: Data) -> list[RowGroup]:
    """The row groups of a whole file; raises ValueError or IndexError for a damaged footer."""
    end = len(data) - TAIL
    (size,) = struct.unpack("<I", data[end : end + 4])
    if not 0 < size <= end:
        raise ValueError(f"a footer of {size} bytes in a file of {len(data)}")
    footer = _Compact(data[end - size : end])
    for field, kind in footer.fields():
        if field == _ROW_GROUPS and kind == _LIST:
            return [_row_group(footer) for _ in footer.elements()]
        footer.skip(kind)
    raise ValueError("a footer without row groups")


def _row_group(footer: _Compact) -> RowGroup:
    rows, nulls, pages = -1, {}, []
    for field, kind in footer.fields():
        if field == _NUM_ROWS:
            rows = footer.number()
        elif field == _COLUMNS and kind == _LIST:
            columns = [_column(footer) for _ in footer.elements()]
            nulls = {path: count for path, count, _ in columns}
            pages = [page for _, _, page in columns]
        else:
            footer.skip(kind)
    if not 0 <= rows < 2**48:
        raise ValueError(f"a row group of {rows} rows")
    return RowGroup(rows, nulls, pages)


def dictionary_size(data: Data, page: int) -> int:
    """Bytes of the dictionary of a column once it is decompressed; 0 for a column without one.

    Where the page does not say, that is FREE_EXPANSION: rows are then read one at a time.
    """
    header = _Compact(data[max(page, 0) : max(page, 0) + _PAGE_HEADER])
    kind = size = 0
    try:
        for field, stored in header.fields():
            if field == _PAGE_TYPE:
                kind = header.number()
            elif field == _PAGE_SIZE:
                size = header.number()
                break
            else:
                header.skip(stored)
    except (ValueError, IndexError):
        return FREE_EXPANSION
    return size if kind == _DICTIONARY_PAGE else 0


def _column(footer: _Compact) -> tuple[str, int | None, int]:
    found: tuple[str, int | None, int] = ("", None, 0)
    for field, kind in footer.fields():
        if field == _META_DATA and kind == _STRUCT:
            found = _meta_data(footer)
        else:
            footer.skip(kind)
    return found


def _meta_data(footer: _Compact) -> tuple[str, int | None, int]:
    path, nulls, data, dictionary = "", None, 0, 0
    for field, kind in footer.fields():
        if field == _PATH and kind == _LIST:
            path = ".".join(footer.binary().decode() for _ in footer.elements())
        elif field == _STATISTICS and kind == _STRUCT:
            nulls = _null_count(footer)
        elif field == _DATA_PAGE:
            data = footer.number()
        elif field == _DICTIONARY_PAGE_AT:
            dictionary = footer.number()
        else:
            footer.skip(kind)
    return path, nulls, dictionary if 0 < dictionary < data else data


def _null_count(footer: _Compact) -> int | None:
    nulls = None
    for field, kind in footer.fields():
        if field == _NULL_COUNT:
            nulls = footer.number()
        else:
            footer.skip(kind)
    return nulls


class _Compact:
    """Values in Thrift's compact protocol, one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Number and type of each field of a struct; the caller reads or skips its value."""
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self.number()
            yield field, head & 15

    def elements(self) -> Iterator[int]:
        """The type of each element of a list, as often as there are elements."""
        head = self._byte()
        count = head >> 4
        if count == 15:
            count = self._varint()
        if count > len(self._data):  # each takes a byte at least
            raise ValueError(f"a list of {count} elements in a footer of {len(self._data)} bytes")
        for _ in range(count):
            yield head & 15

    def number(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def binary(self) -> bytes:
        size = self._varint()
        self._at += size
        if self._at > len(self._data):
            raise ValueError("text that is longer than the footer")
        return self._data[self._at - size : self._at]

    def skip(self, kind: int) -> None:
        """Pass over the value of a field, of which truth values have none."""
        if kind in (4, 5, 6):
            self._varint()
        elif kind == 8:
            self.binary()
        elif kind == _STRUCT:
            for _, inner in self.fields():
                self.skip(inner)
        elif kind in (_LIST, 10):
            for inner in self.elements():
                self.skip(3 if inner in (1, 2) else inner)
        elif kind in (3, 7):
            self._at += 1 if kind == 3 else 8
        elif kind not in (1, 2):  # parquet.thrift has no maps
            raise ValueError(f"a value of the unknown type {kind}")

    def _byte(self) -> int:
        value = self._data[self._at]
        self._at += 1
        return value

    def _varint(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise ValueError("a number without an end")
