"""Writes a shard batch by batch: an IPC file or stream here, a Parquet file in `parquet.py`.

Samples are collected until a batch is full; pyarrow then encodes it into a file of `storage`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.codecs.array import dump_array
from shardkit.errors import SampleError
from shardkit.formats.arrow.columns import IMAGE, arrow_schema, arrow_type, is_nested, leaf_type
from shardkit.formats.base import KEY, ShardSpec, ShardWriter, encoded, key_bytes
from shardkit.sample import JsonText, Sample
from shardkit.schema import Array, Bytes, Encoded, FieldType, Images, Json, Scalar, Schema, Text
from shardkit.storage import fs

# Rows of a batch: fewer if they are large, as in Hugging Face datasets, as readers load batches.
_ROWS = 1000
_LARGE_ROWS = 100
_BATCH_BYTES = 16 << 20
_LARGEST = 2**31 - 1  # bytes of all values in a column of a batch: offsets are signed 32-bit

# Makes an object that encodes batches into a file, with `write` and `close`.
MakeOutput: TypeAlias = "Callable[[Any, pa.Schema], Any]"
WeighList: TypeAlias = "Callable[[npt.NDArray[Any]], int]"

_OPTIONS = pa.ipc.IpcWriteOptions(use_threads=False)


def ipc_file(sink: Any, schema: pa.Schema) -> Any:
    return pa.ipc.new_file(sink, schema, options=_OPTIONS)


def ipc_stream(sink: Any, schema: pa.Schema) -> Any:
    return pa.ipc.new_stream(sink, schema, options=_OPTIONS)


class _Sink:
    """A file object to which pyarrow writes."""

    closed = False  # required by pyarrow

    def __init__(self, file: fs.BufferedFile) -> None:
        self._file = file
        self.flush = file.flush

    def write(self, data: Any) -> int:
        view = memoryview(data)  # keeps pyarrow's buffer alive
        if view.nbytes:
            self._file.write(view.cast("B"))
        return view.nbytes

    def tell(self) -> int:
        return self._file.size

    def close(self) -> None:
        """Do nothing, as pyarrow also calls it if writing failed."""


class BatchFile:
    """A context manager for a new file of record batches, which is complete on exit."""

    def __init__(self, path: Path, schema: pa.Schema, make: MakeOutput) -> None:
        self._file = fs.BufferedFile(path)
        try:
            self._output = make(pa.PythonFile(_Sink(self._file), mode="w"), schema)
        except BaseException as error:
            self._file.__exit__(type(error))
            raise

    def write(self, batch: pa.RecordBatch) -> int:
        """Write a batch; returns its size in the file, in bytes."""
        before = self._file.size
        self._output.write(batch)
        self._file.flush()
        return self._file.size - before

    def __enter__(self) -> BatchFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._file:
            if kind is None:
                self._output.close()


class BatchWriter(ShardWriter):
    """One shard of a column format."""

    def __init__(
        self,
        path: Path,
        spec: ShardSpec,
        make: MakeOutput,
        weigh_list: WeighList | None = None,
        stores_absent: bool = True,
    ) -> None:
        """`weigh_list` returns the bytes of a nested list.

        `stores_absent`: whether a missing list of fixed size takes as much space as another.
        """
        super().__init__(path, spec)
        schema = spec.schema
        self._arrow_schema = arrow_schema(schema, spec.classes)
        weigh_list = weigh_list or (lambda value: int(value.nbytes))
        self._columns = [_column(name, kind, weigh_list) for name, kind in schema.items()]
        self._fields = [(c.name, schema[c.name], c.encode) for c in self._columns]
        keys = Column(KEY, str.encode, len, 9, 0, partial(_binary, type=pa.string()))
        self._columns.insert(0, keys)
        self._fixed = sum(column.fixed for column in self._columns)
        self._names = [column.name for column in self._columns]
        self._weighed = [(c.name, c.weigh) for c in self._columns if c.weigh is not None]
        self._absent = [(c.name, c.absent) for c in self._columns if c.absent]
        self._stores_absent = stores_absent
        self._most_rows = _most_rows(schema)
        self._rows: list[list[Any]] = []
        self._pending = 0  # bytes of those rows
        self._held = 0  # the same in memory, where missing lists always take space
        self._any = False
        # Upper bounds: size of the file if it were finished now, and overhead of another batch.
        self._finished, self._per_batch = 0, 0
        if spec.max_bytes is not None:
            self._finished, self._per_batch = self._overheads(make)
        self._file = self._begin(make)

    def _begin(self, make: MakeOutput) -> BatchFile:
        return BatchFile(self.path, self._arrow_schema, make)

    def _overheads(self, make: MakeOutput) -> tuple[int, int]:
        """Return bytes of a file without batches, and an upper bound of the overhead of a batch.

        They are measured, as only the library knows the length of a batch's header.
        """
        sizes = []
        for rows in range(2):
            file = pa.BufferOutputStream()
            output = make(file, self._arrow_schema)
            if rows:
                nulls = [pa.nulls(rows, stored) for stored in self._arrow_schema.types]
                output.write(pa.RecordBatch.from_arrays(nulls, schema=self._arrow_schema))
            output.close()
            sizes.append(int(file.getvalue().size))
        empty, one = sizes
        return empty, one - empty + _SLACK * len(self._arrow_schema)

    def write(self, sample: Sample) -> bool:
        row, size, absent = self._encode(sample)
        if self._stores_absent:
            size, absent = size + absent, 0
        if self._rows and self._pending + size > _LARGEST:
            self._write_batch()
        size += self._fixed
        if self.spec.max_bytes is not None and self._any:
            pending = self._pending + size
            # Parquet's pages of numbers may be slightly larger than the numbers.
            total = self._finished + self._per_batch + pending + (pending >> 7)
            if total > self.spec.max_bytes:
                return False
        self._any = True
        self._rows.append(row)
        self._pending += size
        self._held += size + absent
        if len(self._rows) >= self._most_rows or self._held >= _BATCH_BYTES:
            self._write_batch()
        return True

    def finish(self) -> None:
        with self._file:
            if self._rows:
                self._write_batch()

    def _encode(self, sample: Sample) -> tuple[list[Any], int, int]:
        """The values of a sample, prepared by `Column.encode`; their bytes, and of missing ones."""
        values = encoded(sample, self._fields)
        values[KEY] = key_bytes(sample[KEY])
        total = absent = 0
        for name, weigh in self._weighed:
            size = weigh(values[name]) if name in values else 0
            if size > _LARGEST:
                raise SampleError(
                    "a value is larger than a column of Arrow can hold in a batch",
                    key=sample[KEY],
                    field=name,
                    expected=f"at most {_LARGEST:,} bytes",
                    found=f"{size:,} bytes",
                    fix="split the value, omit it, or choose another format, such as wds",
                )
            total += size
        for name, size in self._absent:
            absent += 0 if name in values else size
        return [*map(values.get, self._names)], total, absent

    def _write_batch(self) -> None:
        rows, self._rows, self._pending, self._held = self._rows, [], 0, 0
        values = zip(*rows, strict=True)
        arrays = [c.build(v) for c, v in zip(self._columns, values, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._arrow_schema)
        self._finished += self._file.write(batch) + self._per_batch


# Bytes per column by which the header and padding may be longer than in the measured file.
_SLACK = 320


def _most_rows(schema: Schema) -> int:
    large = any(
        isinstance(kind, Images) or arrow_type(kind) in (pa.binary(), IMAGE)
        for kind in schema.values()
    )
    return _LARGE_ROWS if large else _ROWS


def join_batches(
    path: Path, batches: Iterable[pa.RecordBatch], spec: ShardSpec, make: MakeOutput
) -> None:
    """Write the batches of several shards into one; combines small batches."""
    schema = arrow_schema(spec.schema, spec.classes)
    batches = (
        pa.RecordBatch.from_arrays([b.column(n) for n in schema.names], schema=schema)
        for b in batches
    )
    with BatchFile(path, schema, make) as file:
        for batch in _filled(batches, schema, _most_rows(spec.schema)):
            file.write(batch)


def _filled(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, most_rows: int
) -> Iterator[pa.RecordBatch]:
    """Combine consecutive batches into larger ones, up to the size that a writer uses."""
    pending: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if rows + batch.num_rows > most_rows or size + batch.nbytes > _BATCH_BYTES:
            yield from pa.Table.from_batches(pending, schema).combine_chunks().to_batches()
            pending, rows, size = [], 0, 0
        pending.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
    yield from pa.Table.from_batches(pending, schema).combine_chunks().to_batches()


# --- values into arrays --------------------------------------------------------------------------


class Column(NamedTuple):
    """How the values of a field are converted to an array.

    `encode` prepares a value, and `build` makes an array of prepared values. `fixed` is the
    overhead of each row in bytes, and `weigh` returns the other bytes of a prepared value. `absent`
    has the bytes of a missing value in memory: a list of fixed size takes as much as another.
    """

    name: str
    encode: Callable[[Any], Any]
    weigh: Callable[[Any], int] | None
    fixed: int
    absent: int
    build: Callable[[Sequence[Any]], pa.Array]


def _column(name: str, kind: FieldType, weigh_list: WeighList) -> Column:
    stored = arrow_type(kind)
    if isinstance(kind, Encoded):
        return Column(name, bytes, len, 18, 0, _images)
    if isinstance(kind, Images):
        weigh = lambda images: sum(map(len, images)) + 18 * len(images)  # noqa: E731
        return Column(name, list, weigh, 18, 0, _image_lists)
    if isinstance(kind, Array) and is_nested(kind):
        absent = math.prod(n or 1 for n in kind.shape or ()) * np.dtype(kind.dtype).itemsize
        absent = absent if kind.shape and kind.shape[0] else 0
        build = partial(_lists, kind=kind)
        return Column(name, np.ascontiguousarray, weigh_list, 18, absent, build)
    if isinstance(kind, Scalar):
        return Column(name, lambda value: value, None, 10, 0, partial(_numbers, type=stored))
    return Column(name, kind.entry(_ENCODERS), len, 9, 0, partial(_binary, type=stored))


_ENCODERS: dict[type, Callable[[Any], bytes]] = {
    Bytes: bytes,
    Text: str.encode,
    Json: lambda value: JsonText.of(value).encode(),
    Array: dump_array,
}


def _binary(values: Sequence[bytes | None], type: pa.DataType) -> pa.Array:
    """Copies all bytes just once, whereas pyarrow's own conversion grows its buffer repeatedly."""
    validity, missing = _validity(values)
    present = [value or b"" for value in values] if missing else values
    offsets = _offsets(map(len, present), len(values))  # type: ignore[arg-type]
    buffers = [validity, offsets, pa.py_buffer(b"".join(present))]  # type: ignore[arg-type]
    return pa.Array.from_buffers(type, len(values), buffers, missing)


def _numbers(values: Sequence[Any], type: pa.DataType) -> pa.Array:
    """Does not use `pa.array`, which imports pandas if installed: 0.5 s in each process."""
    validity, missing = _validity(values)
    dtype = np.dtype(type.to_pandas_dtype())
    present = np.array([0 if v is None else v for v in values] if missing else values, dtype)
    data = np.packbits(present, bitorder="little") if pa.types.is_boolean(type) else present
    return pa.Array.from_buffers(type, len(values), [validity, pa.py_buffer(data)], missing)


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
    # In a column of fixed-size lists, a null takes as much space as a value.
    absent = np.zeros((first or 0) * inner, kind.dtype)
    flat = [absent if value is None else value.reshape(-1) for value in values]
    data = np.concatenate([np.zeros(0, kind.dtype), *flat])
    leaf = leaf_type(data.dtype)
    found = pa.Array.from_buffers(leaf, len(data), [None, pa.py_buffer(data)], 0)
    for length in reversed(others):
        found = pa.FixedSizeListArray.from_arrays(found, length)
    validity, missing = _validity(values)
    buffers = [validity]
    if first is None:
        buffers.append(_offsets((array.size // inner for array in flat), len(flat)))
    stored = arrow_type(kind)
    return pa.Array.from_buffers(stored, len(values), buffers, missing, children=[found])


def _offsets(lengths: Any, count: int) -> pa.Buffer:
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.fromiter(lengths, np.int32, count), out=offsets[1:])
    return pa.py_buffer(offsets)


def _validity(values: Sequence[Any]) -> tuple[pa.Buffer | None, int]:
    """Return the validity bitmap (None if there are no nulls) and the number of nulls."""
    missing = sum(value is None for value in values)
    if not missing:
        return None, 0
    present = np.fromiter((value is not None for value in values), np.bool_, len(values))
    return pa.py_buffer(np.packbits(present, bitorder="little").tobytes()), missing
