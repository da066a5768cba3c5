"""Parquet files with the same columns, which are read and kept in memory by row groups."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.errors import DamagedError, FormatError
from shardkit.formats.arrow import ColumnFormat
from shardkit.formats.arrow.columns import IMAGE, Arrays, Known
from shardkit.formats.arrow.reader import BatchReader, Cursor
from shardkit.formats.arrow.values import is_list
from shardkit.storage.byte_source import ByteSource
from shardkit.storage.fs import FREE_EXPANSION, check_expansion

# Older versions write fixed-size lists that are null, but cannot read them.
READS_GAPS = int(pa.__version__.partition(".")[0]) >= 26
_GAP = re.compile(r"Expected all lists to be of size=\d+ but index \d+ had size=0")


def parquet_file(sink: Any, schema: pa.Schema) -> pq.ParquetWriter:
    """Writes images and bytes uncompressed, the rest with zstd; a row group per batch."""
    return pq.ParquetWriter(
        sink,
        schema,
        compression={path: codec for field in schema for path, codec in _codecs(field)},
        use_dictionary=False,
        # For other types than numbers, statistics contain whole values.
        write_statistics=[field.name for field in schema if pa.types.is_primitive(field.type)],
        write_page_checksum=True,
    )


def _codecs(field: pa.Field) -> list[tuple[str, str]]:
    """Return the path and the codec of each leaf of a column."""
    if field.type in (IMAGE, pa.list_(IMAGE)):
        path = field.name if field.type == IMAGE else f"{field.name}.list.element"
        return [(f"{path}.bytes", "none"), (f"{path}.path", "none")]
    if field.type == pa.binary():
        return [(field.name, "none")]
    path, stored = field.name, field.type
    while is_list(stored):
        path, stored = f"{path}.list.element", stored.value_type
    return [(path, "zstd")]


def _list_bytes(value: npt.NDArray[Any]) -> int:
    """Return an upper bound: a number takes at least four bytes, and its nesting level one byte."""
    return int(value.size) * (max(value.itemsize, 4) + 1)


class ParquetReader(BatchReader):
    """A Parquet file. Each thread opens its own reader, as that of pyarrow is not thread-safe."""

    def _open(self) -> tuple[pa.Schema, list[int]]:
        self._local = threading.local()
        self._groups = _row_groups(self._opened)
        return self._file().schema_arrow, [group.rows for group in self._groups]

    def _file(self) -> pq.ParquetFile:
        """Return the reader of this thread."""
        source = self._opened
        file: pq.ParquetFile | None = getattr(self._local, "file", None)
        if file is None:
            cursor = pa.PythonFile(Cursor(source), mode="r")
            file = self._local.file = pq.ParquetFile(
                cursor, pre_buffer=False, page_checksum_verification=True
            )
        return file

    def _load(self, number: int, names: Collection[str]) -> Arrays:
        try:
            table = self._read(number, list(names))
        except pa.ArrowInvalid as error:
            if READS_GAPS or not _GAP.search(str(error)):
                raise
            raise FormatError(
                f"pyarrow {pa.__version__} cannot read missing lists of fixed size from Parquet",
                expected="pyarrow 26 or newer",
                fix="pip install 'pyarrow>=26', which needs Python 3.11 or newer",
            ) from error
        expected = self._groups[number].rows
        if len(table) != expected:
            raise ValueError(f"found {len(table)} rows, not {expected} as in the footer")
        table.validate()
        return {name: _one(table.column(name)) for name in names}

    def _read(self, number: int, names: list[str]) -> pa.Table:
        """Return columns of a row group: read in parts if many rows may refer to one long value."""
        file, group = self._file(), self._groups[number]
        longest = max((_dictionary_size(self._opened, at) for at in group.pages), default=0)
        if longest * group.rows <= FREE_EXPANSION:
            return file.read_row_group(number, columns=names, use_threads=False)
        rows, made, batches = max(FREE_EXPANSION // longest, 1), 0, []
        for batch in file.iter_batches(rows, [number], names, use_threads=False):
            made += batch.nbytes
            check_expansion(made, self._opened.size)
            batches.append(batch)
        return pa.Table.from_batches(batches)

    def _extents(self) -> list[tuple[int, int]]:
        starts = [min(group.pages, default=0) for group in self._groups]
        return [*pairwise([*starts, self._opened.size])]

    def _known_nulls(self) -> Known:
        """From the statistics of columns that are not nested, if the writer stored them.

        For lists, they are ambiguous: some writers also count empty lists as nulls.
        """
        found: defaultdict[str, list[int | None]] = defaultdict(list)
        for group in self._groups:
            for (name, *below), nulls in group.nulls.items():
                if below in ([], ["bytes"]):  # an image is null if its bytes are
                    found[name].append(nulls)
        known = {name: [n for n in nulls if n is not None] for name, nulls in found.items()}
        return Known({n: sum(known[n]) for n in found if len(known[n]) == len(found[n])}, set())

    def close(self) -> None:
        super().close()
        self._local = threading.local()


def _one(column: pa.ChunkedArray) -> pa.Array:
    """Return a column of a row group as a single array."""
    if column.num_chunks == 1:
        return column.chunk(0)
    found = column.combine_chunks()
    if isinstance(found, pa.ChunkedArray):  # too large for one array
        raise ValueError("a column of a row group is over 2 GiB: write smaller row groups")
    return found


# --- the footer ----------------------------------------------------------------------------------

# pyarrow also parses the footer, but aborts the process if its statistics are inconsistent.
# Layout: parquet.thrift; Thrift's compact protocol. The numbers below are field numbers.

_MAGIC = b"PAR1"
_TAIL = 8  # length of the footer, and the magic
_PAGE_HEADER = 64  # first bytes of a page's header, which contain its type and size
_DICTIONARY_PAGE = 2


class RowGroup(NamedTuple):
    rows: int
    # By path of the leaf column, as names may have dots; None if they are not counted.
    nulls: dict[tuple[str, ...], int | None]
    pages: list[int]  # offset of the first page of each column: its dictionary page, if it has one


def _row_groups(source: ByteSource) -> list[RowGroup]:
    """Return the row groups in the footer; raises ValueError or IndexError if it is damaged."""
    size = source.size
    first, last = source.read(0, min(4, size)), source.read(max(size - _TAIL, 0), min(_TAIL, size))
    if first != _MAGIC or last[-4:] != _MAGIC or size < 4 + _TAIL:
        cut = first == _MAGIC
        raise DamagedError(
            "the Parquet file is truncated" if cut else "this is not a Parquet file",
            path=source.path,
            offset=size if cut else 0,
            expected=f"{_MAGIC.decode()!r} as the first and the last bytes",
            found=f"{first!r} and {last[-4:]!r}",
            fix="copy the file again, or write it again where it was made",
        )
    length = int.from_bytes(last[:4], "little")
    if not 0 < length <= size - _TAIL:
        raise ValueError(f"a footer of {length} bytes in a file of {size}")
    footer = dict(_Compact(source.read(size - _TAIL - length, length)).fields())
    if 4 not in footer:
        raise ValueError("the footer has no row groups")
    return [_row_group(group) for group in footer[4]]


def _row_group(group: dict[int, Any]) -> RowGroup:
    rows, pages = group.get(3, -1), []
    nulls: dict[tuple[str, ...], int | None] = {}
    if not 0 <= rows < 2**48:
        raise ValueError(f"a row group of {rows} rows")
    for chunk in group.get(1, []):
        column = chunk.get(3, {})
        data, dictionary = column.get(9, 0), column.get(11, 0)
        nulls[tuple(part.decode() for part in column.get(3, []))] = column.get(12, {}).get(3)
        pages.append(dictionary if 0 < dictionary < data else data)
    return RowGroup(rows, nulls, pages)


def _dictionary_size(source: ByteSource, page: int) -> int:
    """Bytes of a column's dictionary after decompression; 0 for a column without a dictionary.

    FREE_EXPANSION if the size cannot be determined: rows are then read one at a time.
    """
    at = min(max(page, 0), source.size)
    header = _Compact(source.read(at, min(_PAGE_HEADER, source.size - at)))
    with contextlib.suppress(ValueError, IndexError):  # a column without pages has no header
        for field, value in header.fields():
            if field == 1 and value != _DICTIONARY_PAGE:
                return 0
            if field == 2:
                return int(value)
    return FREE_EXPANSION


class _Compact:
    """Decodes consecutive values in Thrift's compact protocol."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def fields(self) -> Iterator[tuple[int, Any]]:
        """Number and value of each field of a struct; a nested struct is a dict of its fields."""
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._number()
            yield field, self._value(head & 15)

    def _value(self, kind: int) -> Any:
        if kind in (1, 2):  # true and false, which take no bytes
            return kind == 1
        if kind in (4, 5, 6):
            return self._number()
        if kind == 12:
            return dict(self.fields())
        if kind in (9, 10):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            if count > len(self._data):  # each element takes at least a byte
                raise ValueError(f"a list of {count} elements in {len(self._data)} bytes")
            inner = 3 if head & 15 in (1, 2) else head & 15  # in lists, booleans take a byte
            return [self._value(inner) for _ in range(count)]
        if kind not in (3, 7, 8):  # parquet.thrift has no maps
            raise ValueError(f"a value has the unknown type {kind}")
        size = self._varint() if kind == 8 else {3: 1, 7: 8}[kind]
        self._at += size
        if self._at > len(self._data):
            raise ValueError("a value is longer than the footer")
        return self._data[self._at - size : self._at]

    def _number(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

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
        raise ValueError("a number is too long")


class Parquet(ColumnFormat):
    name = "parquet"
    grouped = True
    abilities = (
        "write: images and bytes uncompressed, the rest in zstd; page checksums; all field types",
        "read at random: by row groups, with the latest ones kept in memory",
        "read third-party files: all types that a field or JSON can hold",
        "convert to other formats without decoding: values and JSON text pass through unchanged",
    )


FORMAT = Parquet(ParquetReader, parquet_file, weigh_list=_list_bytes, stores_absent=False)
