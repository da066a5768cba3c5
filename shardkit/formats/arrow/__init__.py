"""Columns of values in Arrow's formats: IPC files here, Parquet and Hugging Face folders beside.

columns.py   which column holds which field: of ours, and of files that others made
values.py    values out of arrays
messages.py  where the batches of an IPC file or stream stand
reader.py    random access to the rows of batches
writer.py    values into arrays, batches into a file
parquet.py   the format `parquet`
hf.py        the format `hf`: a folder as Hugging Face datasets saves it
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.formats.arrow.reader import BatchReader, IpcReader
from shardkit.formats.arrow.writer import BatchWriter, MakeOutput, ipc_file, join_batches
from shardkit.formats.base import Format, ShardSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

# Offsets, a bit to say that a value is there, padding and the batch's own description.
_FIELD_OVERHEAD = 32
_SAMPLE_OVERHEAD = 64


class ColumnFormat(Format):
    """A format whose shards hold columns: it names its reader, and what encodes batches."""

    def __init__(
        self,
        reader: Callable[[Path, dict[str, Any] | None], BatchReader],
        output: MakeOutput,
        **options: Any,
    ) -> None:
        self._open, self._output, self._options = reader, output, options

    def open(self, path: Path, layout: dict[str, Any] | None = None) -> BatchReader:
        return self._open(path, layout)

    def create(self, path: Path, spec: ShardSpec) -> BatchWriter:
        return BatchWriter(path, spec, self._output, **self._options)

    def join(self, path: Path, parts: Sequence[Path], spec: ShardSpec) -> None:
        layout = self.layout(spec.schema)
        batches = (b for part in parts for b in self._open(part, layout).whole_batches())
        join_batches(path, batches, spec, self._output)

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        return payload + (_SAMPLE_OVERHEAD + fields * _FIELD_OVERHEAD)


class Arrow(ColumnFormat):
    name = "arrow"
    abilities = (
        "write: IPC files without compression, all field types, class names for Hugging Face",
        "read at random: IPC files and streams, value by value; compressed ones decoded",
        "read foreign files: all of Arrow's types that a field or JSON can hold",
        "convert on with nothing decoded: values and JSON text pass through as they are",
    )


FORMAT = Arrow(IpcReader, ipc_file)
