"""Parquet files of the same columns: a row group is what is read and kept at a time."""

from __future__ import annotations

import inspect
import os
import re
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from shardkit import storage
from shardkit.errors import DamagedError, FormatError
from shardkit.formats.arrow import FIELD_OVERHEAD, SAMPLE_OVERHEAD
from shardkit.formats.arrow.columns import IMAGE
from shardkit.formats.arrow.footer import TAIL, RowGroup, dictionary_size, row_groups
from shardkit.formats.arrow.foreign import Arrays, Known
from shardkit.formats.arrow.reader import DECODED, BatchReader, Rows
from shardkit.formats.arrow.values import is_list
from shardkit.formats.arrow.writer import BatchWriter, Output, join_batches
from shardkit.formats.base import Format
from shardkit.schema import Schema
from shardkit.storage import FREE_EXPANSION, Data, check_expansion

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MAGIC = b"PAR1"
# Before that, pyarrow writes missing lists of a fixed size, but cannot read them.
READS_GAPS = int(pa.__version__.partition(".")[0]) >= 26
_GAP = re.compile(r"Expected all lists to be of size=\d+ but index \d+ had size=0")


def _if_known(function: Any, **options: Any) -> dict[str, Any]:
    """Those of the options that the installed pyarrow has."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}


_WRITE_CHECKSUMS = _if_known(pq.ParquetWriter.__init__, write_page_checksum=True)
_CHECK_CHECKSUMS = _if_known(pq.ParquetFile.__init__, page_checksum_verification=True)


class ParquetOutput:
    """Images and bytes as they are, the rest compressed; a row group for each batch."""

    def __init__(self, sink: Any, schema: pa.Schema) -> None:
        numbers = [f.name for f in schema if pa.types.is_primitive(f.type)]
        self._writer = pq.ParquetWriter(
            sink,
            schema,
            compression={path: codec for f in schema for path, codec in _codecs(f)},
            use_dictionary=False,
            write_statistics=numbers,  # others would repeat whole values
            **_WRITE_CHECKSUMS,
        )

    def write(self, batch: pa.RecordBatch) -> None:
        table = pa.Table.from_batches([batch])
        self._writer.write_table(table, row_group_size=max(len(table), 1))

    def close(self) -> None:
        self._writer.close()


def _codecs(field: pa.Field) -> list[tuple[str, str]]:
    """The codec of each leaf of a column, by the leaf's path."""
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
    """At most: small numbers take four bytes, and a byte says how lists nest."""
    return int(value.size) * (max(value.itemsize, 4) + 1)


class ParquetReader(BatchReader):
    """A Parquet file. Each thread has it open for itself: pyarrow's reader has a state."""

    def __init__(
        self, path: Path, layout: dict[str, Any] | None = None, mapped: bool = False
    ) -> None:
        self._mapped = mapped
        self._token = object()
        self._local = threading.local()
        super().__init__(path, layout)

    def _open(self) -> tuple[pa.Schema, list[int]]:
        self._data: Data | None = storage.open_data(self._path, self._mapped)
        self._groups = _row_groups(self._data, self._path)
        return self._file().schema_arrow, [group.rows for group in self._groups]

    def _file(self) -> pq.ParquetFile:
        """This thread's own."""
        self._check_open()
        file: pq.ParquetFile | None = getattr(self._local, "file", None)
        if file is None:
            data: Any = self._data
            if isinstance(data, storage.PreadFile):
                data = pa.PythonFile(_Cursor(data), mode="r")
            else:
                data = pa.BufferReader(data)
            file = self._local.file = pq.ParquetFile(data, pre_buffer=False, **_CHECK_CHECKSUMS)
        return file

    def _rows(self, number: int) -> Rows:
        return DECODED.get(self._token, number, lambda: self._new_rows(number))

    def _new_rows(self, number: int) -> Rows:
        reader = weakref.proxy(self)  # so that closing the file does not wait for kept rows
        return Rows(lambda names: reader._load(number, names), self.schema)

    def _load(self, number: int, names: Collection[str]) -> Arrays:
        try:
            table = self._read(number, list(names))
        except pa.ArrowInvalid as error:
            if READS_GAPS or not _GAP.search(str(error)):
                raise
            raise FormatError(
                f"pyarrow {pa.__version__} cannot read missing lists of a fixed size from Parquet",
                expected="pyarrow 26 or newer",
                fix="pip install 'pyarrow>=26', which needs Python 3.11 or newer",
            ) from error
        expected = self._groups[number].rows
        if len(table) != expected:
            raise ValueError(f"{len(table)} rows where {expected} are announced")
        table.validate()
        return {name: _one(table.column(name)) for name in names}

    def _read(self, number: int, names: list[str]) -> pa.Table:
        """Columns of a row group: in pieces where all rows may name one long value."""
        file, group = self._file(), self._groups[number]
        assert self._data is not None
        longest = max((dictionary_size(self._data, page) for page in group.pages), default=0)
        if longest * group.rows <= FREE_EXPANSION:
            return file.read_row_group(number, columns=names, use_threads=False)
        rows, made, batches = max(FREE_EXPANSION // longest, 1), 0, []
        options = {"row_groups": [number], "columns": names, "use_threads": False}
        for batch in file.iter_batches(rows, **options):
            made += batch.nbytes
            check_expansion(made, len(self._data))
            batches.append(batch)
        return pa.Table.from_batches(batches)

    def _known_nulls(self) -> Known:
        """From the statistics of columns that do not nest, where the writer made them.

        Of lists writers count different things: nulls, or empty lists as well.
        """
        found: dict[str, int | None] = {}
        for group in self._groups:
            for path, nulls in group.nulls.items():
                name = path.removesuffix(".bytes")  # of an image: its path does not matter
                known = found.get(name, 0)
                found[name] = None if known is None or nulls is None else known + nulls
        return Known({n: nulls for n, nulls in found.items() if nulls is not None}, set())

    def close(self) -> None:
        super().close()
        self._local = threading.local()
        self._data = None
        DECODED.forget(self._token)

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetReader, (self._path, self.layout, self._mapped)


class _Cursor:
    """A file as pyarrow reads it, with a position."""

    closed = False

    def __init__(self, file: storage.PreadFile) -> None:
        self._file = file
        self._at = 0

    def read(self, size: int) -> bytes:
        data = self._file[self._at : self._at + size]
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._file)}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        """Does nothing: the file is its reader's."""


def _one(column: pa.ChunkedArray) -> pa.Array:
    """A column of a row group in one piece."""
    if column.num_chunks == 1:
        return column.chunk(0)
    found = column.combine_chunks()
    if isinstance(found, pa.ChunkedArray):  # too large for one array
        raise ValueError("a column of a row group is over 2 GiB: write smaller row groups")
    return found


def _row_groups(data: Data, path: Path) -> list[RowGroup]:
    """What the footer says; where the file is cut, in our words."""
    size = len(data)
    first, last = data[:4], data[max(size - 4, 0) : size]
    if first == last == _MAGIC and size >= 2 * TAIL - 4:
        return row_groups(data)
    cut = first == _MAGIC
    raise DamagedError(
        "the Parquet file is truncated" if cut else "this is no Parquet file",
        path=path,
        offset=size if cut else 0,
        expected=f"{_MAGIC.decode()!r} as the first and the last bytes",
        found=f"{first!r} and {last!r}",
        fix="copy the file again, or write it again where it was made",
    )


class Parquet(Format):
    name = "parquet"
    abilities = (
        "write: images and bytes as they are, the rest in zstd; page checksums; all field types",
        "read at random: by row groups, of which the last ones are kept",
        "read foreign files: all types that a field or JSON can hold",
        "convert on with nothing decoded: values and JSON text pass through as they are",
    )

    def open(self, path: Path, layout: dict[str, Any] | None = None) -> ParquetReader:
        return ParquetReader(path, layout, mapped=False)

    def create(
        self,
        path: Path,
        schema: Schema,
        max_bytes: int | None = None,
        classes: Mapping[str, Sequence[str]] | None = None,
    ) -> BatchWriter:
        return BatchWriter(
            path, schema, _output, max_bytes=max_bytes, classes=classes, weigh_list=_list_bytes
        )

    def join(
        self,
        path: Path,
        parts: Sequence[Path],
        schema: Schema,
        classes: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        readers = (ParquetReader(part, self.layout(schema)) for part in parts)
        join_batches(path, readers, schema, _output, classes)

    def layout(self, schema: Schema) -> dict[str, Any]:
        return {"schema": schema.to_json()}

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        return payload + (SAMPLE_OVERHEAD + fields * FIELD_OVERHEAD)


def _output(sink: Any, schema: pa.Schema) -> Output:
    return ParquetOutput(sink, schema)


FORMAT = Parquet()
