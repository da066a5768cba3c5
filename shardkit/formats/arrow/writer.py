"""Writes a shard batch by batch: an IPC file or stream here, a Parquet file in `parquet.py`.

Samples are gathered until a batch is full; pyarrow encodes it, and the file is written through
`storage` like every other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import pyarrow as pa

from shardkit import storage
from shardkit.codecs.image import checked
from shardkit.errors import SampleError
from shardkit.formats.arrow.columns import IMAGE, Column, arrow_schema, arrow_type, columns
from shardkit.formats.arrow.reader import BatchReader
from shardkit.formats.base import ShardWriter
from shardkit.sample import Sample
from shardkit.schema import Image, Images, Schema, images_in

if TYPE_CHECKING:
    import numpy.typing as npt

# Few rows where they are large, as Hugging Face datasets has it: a batch is what a reader reads.
_ROWS = 1000
_LARGE_ROWS = 100
_BATCH_BYTES = 16 << 20
_LARGEST = 2**31 - 1  # bytes of all values in one column of a batch: offsets are 32 bits, signed
_WRITE = 1 << 20  # bytes gathered for one write


class Output(Protocol):
    """What encodes batches into a file."""

    def write(self, batch: pa.RecordBatch) -> None: ...

    def close(self) -> None: ...


MakeOutput: TypeAlias = "Callable[[Any, pa.Schema], Output]"


class Sink:
    """The file that pyarrow writes to: its many small pieces are gathered, and counted."""

    closed = False  # pyarrow asks; it is the writer that closes the file

    def __init__(self, path: Path) -> None:
        self._file = storage.create(path)
        self._chunks: list[storage.Chunk] = []
        self._gathered = 0
        self.size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)  # of a buffer of pyarrow's, which it keeps alive
        size = view.nbytes
        if size:
            self._chunks.append(view.cast("B"))
            self._gathered += size
            self.size += size
            if self._gathered >= _WRITE:
                self.flush()
        return size

    def flush(self) -> None:
        chunks, self._chunks, self._gathered = self._chunks, [], 0
        if chunks:
            storage.write(self._file, chunks)

    def tell(self) -> int:
        return self.size

    def close(self) -> None:
        """Does nothing: pyarrow calls it also where writing failed."""

    def finish(self) -> None:
        with self._file:
            self.flush()


class IpcOutput:
    """Arrow's own encoding: the file format, or the stream, which has no list of its batches."""

    def __init__(self, sink: Any, schema: pa.Schema, *, stream: bool) -> None:
        options = pa.ipc.IpcWriteOptions(use_threads=False)
        make = pa.ipc.new_stream if stream else pa.ipc.new_file
        self._writer = make(sink, schema, options=options)

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def close(self) -> None:
        self._writer.close()


def ipc_file(sink: Any, schema: pa.Schema) -> Output:
    return IpcOutput(sink, schema, stream=False)


def ipc_stream(sink: Any, schema: pa.Schema) -> Output:
    return IpcOutput(sink, schema, stream=True)


class BatchWriter(ShardWriter):
    """One shard of any of the formats that hold columns."""

    def __init__(
        self,
        path: Path,
        schema: Schema,
        make: MakeOutput,
        *,
        max_bytes: int | None = None,
        classes: Mapping[str, Sequence[str]] | None = None,
        weigh_list: Callable[[npt.NDArray[Any]], int] = lambda value: int(value.nbytes),
    ) -> None:
        self._arrow_schema = arrow_schema(schema, classes)
        self._columns = columns(schema, weigh_list)
        self._images = {n: k for n, k in schema.items() if isinstance(k, Image | Images)}
        self._fixed = sum(column.fixed for column in self._columns)
        self._most_rows = _most_rows(schema)
        self._max_bytes = max_bytes
        self._rows: list[list[Any]] = []
        self._pending = 0  # bytes that those rows take
        self._any = False
        self._closed = False
        self._empty, self._per_batch = 0, 0
        if max_bytes is not None:
            self._empty, self._per_batch = _overheads(make, self._arrow_schema)
        self._finished = self._empty  # at most, of a file with the batches that are written
        self._sink = Sink(path)
        try:
            self._output = make(pa.PythonFile(self._sink, mode="w"), self._arrow_schema)
        except BaseException:
            self._sink.finish()
            raise

    def write(self, sample: Sample) -> bool:
        row, size = self._encode(sample)
        if self._rows and self._pending + size > _LARGEST:
            self._write_batch()
        size += self._fixed
        if self._max_bytes is not None and self._any:
            pending = self._pending + size
            # Numbers in pages may come out a little larger than they went in.
            total = self._finished + self._per_batch + pending + (pending >> 7)
            if total > self._max_bytes:
                return False
        self._any = True
        self._rows.append(row)
        self._pending += size
        if len(self._rows) >= self._most_rows or self._pending >= _BATCH_BYTES:
            self._write_batch()
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._rows:
                self._write_batch()
            self._output.close()
        finally:
            self._sink.finish()

    def _encode(self, sample: Sample) -> tuple[list[Any], int]:
        """The values of a sample as their columns keep them, and the bytes of all."""
        row: list[Any] = []
        total = 0
        for name, encode, weigh, _, _ in self._columns:
            if name not in sample:
                row.append(None)
                continue
            value = sample[name]
            if name in self._images:
                for image in images_in(self._images[name], value):
                    checked(image, sample["__key__"], name)
            elif encode is not None:
                try:
                    value = encode(value)
                except (TypeError, ValueError, RecursionError) as error:  # a lone surrogate, say
                    raise _not_stored(sample, name, error) from error
            if weigh is not None:
                size = weigh(value)
                if size > _LARGEST:
                    raise _too_large(sample, name, size)
                total += size
            row.append(value)
        return row, total

    def _write_batch(self) -> None:
        rows, self._rows, self._pending = self._rows, [], 0
        before = self._sink.size
        self._output.write(to_batch(rows, self._columns, self._arrow_schema))
        self._sink.flush()
        self._finished += self._sink.size - before + self._per_batch


def _most_rows(schema: Schema) -> int:
    large = any(
        isinstance(kind, Images) or arrow_type(kind) in (pa.binary(), IMAGE)
        for kind in schema.values()
    )
    return _LARGE_ROWS if large else _ROWS


def to_batch(
    rows: Sequence[Sequence[Any]], columns: Sequence[Column], schema: pa.Schema
) -> pa.RecordBatch:
    """The arrays of rows that were encoded."""
    arrays = [
        column.build(values)
        for column, values in zip(columns, zip(*rows, strict=True), strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def join_batches(
    path: Path,
    parts: Iterable[BatchReader],
    schema: Schema,
    make: MakeOutput,
    classes: Mapping[str, Sequence[str]] | None,
) -> None:
    """One shard with the values of several as they are; small batches become larger ones."""
    columns = arrow_schema(schema, classes)
    sink = Sink(path)
    try:
        output = make(pa.PythonFile(sink, mode="w"), columns)
        for batch in _filled(_batches(parts, columns), _most_rows(schema)):
            output.write(batch)
            sink.flush()
        output.close()
    finally:
        sink.finish()


def _batches(parts: Iterable[BatchReader], columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    for part in parts:
        for arrays in part.batches():
            in_order = [arrays[name] for name in columns.names]
            yield pa.RecordBatch.from_arrays(in_order, schema=columns)
        part.close()


def _filled(batches: Iterable[pa.RecordBatch], most_rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows: batches side by side are one, as far as a writer would have filled it."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        more, nbytes = batch.num_rows, batch.nbytes
        if held and (rows + more > most_rows or size + nbytes > _BATCH_BYTES):
            yield from pa.Table.from_batches(held).combine_chunks().to_batches()
            held, rows, size = [], 0, 0
        held.append(batch)
        rows, size = rows + more, size + nbytes
    if held:
        yield from pa.Table.from_batches(held).combine_chunks().to_batches()


# Bytes by which what describes and pads a column may be longer than in the smallest file.
_SLACK = 320


def _overheads(make: MakeOutput, schema: pa.Schema) -> tuple[int, int]:
    """Bytes of a file without a batch, and at most what a batch takes beside its rows.

    They are measured: how long the description of a batch is, only the library can tell.
    """
    nulls = pa.RecordBatch.from_arrays([pa.nulls(1, t) for t in schema.types], schema=schema)
    empty, one = (_encoded_size(make, schema, batches) for batches in ([], [nulls]))
    return empty, one - empty + _SLACK * len(schema)


def _encoded_size(make: MakeOutput, schema: pa.Schema, batches: list[pa.RecordBatch]) -> int:
    file = pa.BufferOutputStream()
    output = make(file, schema)
    for batch in batches:
        output.write(batch)
    output.close()
    return int(file.getvalue().size)


def _not_stored(sample: Sample, name: str, error: Exception) -> SampleError:
    key = sample["__key__"]
    if name == "__key__":
        return SampleError("the key is not valid Unicode", key=ascii(key))
    return SampleError(
        f"the value cannot be stored: {error}", key=key, field=name, found=f"{sample[name]!r:.60}"
    )


def _too_large(sample: Sample, name: str, size: int) -> SampleError:
    return SampleError(
        "a value is larger than a column of Arrow can hold",
        key=sample["__key__"],
        field=name,
        expected=f"at most {_LARGEST:,} bytes",
        found=f"{size:,} bytes",
        fix="split the value, leave it out, or choose another format, such as wds",
    )
