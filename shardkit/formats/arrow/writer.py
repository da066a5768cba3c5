"""Writes a shard batch by batch: an IPC file or stream here, a Parquet file in `parquet.py`.

Samples are gathered until a batch is full; pyarrow encodes it, and the file is written through
`storage` like every other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from shardkit import storage
from shardkit.codecs.array import dump_array
from shardkit.codecs.image import checked
from shardkit.errors import SampleError
from shardkit.formats.arrow.columns import IMAGE, arrow_schema, arrow_type, is_nested
from shardkit.formats.base import KEY, ShardSpec, ShardWriter
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


def ipc_file(sink: Any, schema: pa.Schema) -> Output:
    return _ipc(pa.ipc.new_file, sink, schema)


def ipc_stream(sink: Any, schema: pa.Schema) -> Output:
    """As `ipc_file`, without the list of batches at the end."""
    return _ipc(pa.ipc.new_stream, sink, schema)


def _ipc(make: Any, sink: Any, schema: pa.Schema) -> Output:
    output: Output = make(sink, schema, options=pa.ipc.IpcWriteOptions(use_threads=False))
    return output


class BatchWriter(ShardWriter):
    """One shard of any of the formats that hold columns."""

    def __init__(
        self,
        path: Path,
        spec: ShardSpec,
        make: MakeOutput,
        *,
        weigh_list: Callable[[npt.NDArray[Any]], int] = lambda value: int(value.nbytes),
    ) -> None:
        super().__init__(path, spec)
        schema = spec.schema
        self._arrow_schema = arrow_schema(schema, spec.classes)
        self._columns = columns(schema, weigh_list)
        self._images = {n: k for n, k in schema.items() if isinstance(k, Image | Images)}
        self._fixed = sum(column.fixed for column in self._columns)
        self._most_rows = _most_rows(schema)
        self._rows: list[list[Any]] = []
        self._pending = 0  # bytes that those rows take
        self._any = False
        self._empty, self._per_batch = 0, 0
        if spec.max_bytes is not None:
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
        if self.spec.max_bytes is not None and self._any:
            pending = self._pending + size
            # Numbers in pages may come out a little larger than they went in.
            total = self._finished + self._per_batch + pending + (pending >> 7)
            if total > self.spec.max_bytes:
                return False
        self._any = True
        self._rows.append(row)
        self._pending += size
        if len(self._rows) >= self._most_rows or self._pending >= _BATCH_BYTES:
            self._write_batch()
        return True

    def finish(self) -> None:
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
    batches: Iterable[pa.RecordBatch],
    spec: ShardSpec,
    make: MakeOutput,
) -> None:
    """One shard of the batches of several, as they are; small batches become larger ones."""
    columns = arrow_schema(spec.schema, spec.classes)
    sink = Sink(path)
    try:
        output = make(pa.PythonFile(sink, mode="w"), columns)
        in_order = (
            pa.RecordBatch.from_arrays([b.column(n) for n in columns.names], schema=columns)
            for b in batches
        )
        for batch in _filled(in_order, _most_rows(spec.schema)):
            output.write(batch)
            sink.flush()
        output.close()
    finally:
        sink.finish()


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


# --- values into arrays --------------------------------------------------------------------------


class Column(NamedTuple):
    """How the values of one field become an array.

    `encode` gives what is kept of a value until its batch is full; `build` makes the array of such.
    `fixed` is what a row takes beside the value's own bytes, which `weigh` counts.
    """

    name: str
    encode: Callable[[Any], Any] | None
    weigh: Callable[[Any], int] | None
    fixed: int
    build: Callable[[Sequence[Any]], pa.Array]


def columns(schema: Schema, weigh_list: Callable[[npt.NDArray[Any]], int]) -> list[Column]:
    """The columns of a shard, the keys first; `weigh_list` says what a nested list takes."""
    text = pa.string()
    found = [Column(KEY, str.encode, len, 9, lambda values: _binary(values, text))]
    return found + [_column(name, kind, weigh_list) for name, kind in schema.items()]


def _column(name: str, kind: FieldType, weigh_list: Callable[[npt.NDArray[Any]], int]) -> Column:
    stored = arrow_type(kind)
    if isinstance(kind, Image):
        return Column(name, None, len, 18, _images)
    if isinstance(kind, Images):
        return Column(name, None, lambda v: sum(map(len, v)) + 18 * len(v), 18, _image_lists)
    if isinstance(kind, Array) and is_nested(kind):
        return Column(name, np.ascontiguousarray, weigh_list, 18, lambda v: _lists(v, kind))
    if isinstance(kind, Int | Float | Bool):
        return Column(name, None, None, 10, lambda values: pa.array(values, stored))
    return Column(name, _ENCODERS[type(kind)], len, 9, lambda values: _binary(values, stored))


_ENCODERS: dict[type[FieldType], Callable[[Any], bytes] | None] = {
    Bytes: None,
    Text: str.encode,
    Json: lambda value: JsonText.of(value).encode(),
    Array: dump_array,
}


def _binary(values: Sequence[bytes | None], type: pa.DataType) -> pa.Array:
    """One copy of all bytes: pyarrow's own conversion would grow its memory step by step."""
    validity, missing = _validity(values)
    present = [value or b"" for value in values] if missing else values
    offsets = _offsets(map(len, present), len(values))  # type: ignore[arg-type]
    buffers = [validity, offsets, pa.py_buffer(b"".join(present))]  # type: ignore[arg-type]
    return pa.Array.from_buffers(type, len(values), buffers, missing)


def _images(values: Sequence[bytes | None]) -> pa.Array:
    validity, missing = _validity(values)
    children = [_binary(values, pa.binary()), pa.nulls(len(values), pa.string())]
    return pa.Array.from_buffers(IMAGE, len(values), [validity], missing, children=children)


def _image_lists(values: Sequence[Sequence[bytes] | None]) -> pa.Array:
    validity, missing = _validity(values)
    lists = [value or () for value in values]
    buffers = [validity, _offsets(map(len, lists), len(lists))]
    images = _images([image for value in lists for image in value])
    stored = pa.list_(IMAGE)
    return pa.Array.from_buffers(stored, len(lists), buffers, missing, children=[images])


def _lists(values: Sequence[npt.NDArray[Any] | None], kind: Array) -> pa.Array:
    assert kind.shape is not None
    first, *others = kind.shape
    inner = math.prod(n or 1 for n in others)
    # A null in a column of fixed lengths takes the room of a value all the same.
    absent = np.zeros((first or 0) * inner, kind.dtype)
    flat = [absent if value is None else value.reshape(-1) for value in values]
    data = np.concatenate([np.zeros(0, kind.dtype), *flat])
    types = [arrow_type(kind)]
    while pa.types.is_list(types[-1]) or pa.types.is_fixed_size_list(types[-1]):
        types.append(types[-1].value_type)
    found = pa.Array.from_buffers(types.pop(), len(data), [None, pa.py_buffer(data)], 0)
    for type in reversed(types[1:]):
        length = len(found) // type.list_size
        found = pa.Array.from_buffers(type, length, [None], 0, children=[found])
    validity, missing = _validity(values)
    buffers = [validity]
    if first is None:
        buffers.append(_offsets((array.size // inner for array in flat), len(flat)))
    return pa.Array.from_buffers(types[0], len(values), buffers, missing, children=[found])


def _offsets(lengths: Any, count: int) -> pa.Buffer:
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.fromiter(lengths, np.int32, count), out=offsets[1:])
    return pa.py_buffer(offsets)


def _validity(values: Sequence[Any]) -> tuple[pa.Buffer | None, int]:
    """The bitmap of the values that are there, and how many are not."""
    missing = sum(value is None for value in values)
    if not missing:
        return None, 0
    present = np.fromiter((value is not None for value in values), np.bool_, len(values))
    return pa.py_buffer(np.packbits(present, bitorder="little").tobytes()), missing
