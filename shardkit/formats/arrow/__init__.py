"""The formats with Arrow columns: `arrow` (IPC files) here, `parquet` and `hf` in their modules.

columns.py   maps fields to columns, in shards of ours and in third-party files
values.py    decodes arrays into values
at_once.py   decodes several rows at once
messages.py  finds the batches in an IPC file or stream
reader.py    random access to the rows of batches
writer.py    encodes values into arrays, and writes batches to a file
parquet.py   Parquet files
hf.py        folders as Hugging Face datasets saves them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.formats.arrow.reader import BatchReader, IpcReader
from shardkit.formats.arrow.writer import BatchWriter, MakeOutput, ipc_file, join_batches
from shardkit.formats.base import Format, ShardSpec

# Estimated bytes for offsets, validity bits, padding and batch headers.
_FIELD_OVERHEAD = 32
_SAMPLE_OVERHEAD = 64


class ColumnFormat(Format):
    """A format whose shards consist of columns, defined by a reader and an encoder of batches."""

    reader: Callable[[Path, dict[str, Any] | None], BatchReader]

    def __init__(
        self,
        reader: Callable[[Path, dict[str, Any] | None], BatchReader],
        output: MakeOutput,
        **options: Any,
    ) -> None:
        """`options`: those of `BatchWriter`."""
        self.reader, self._output = reader, output
        self.writer = partial(BatchWriter, make=output, **options)

    def join(self, path: Path, parts: Sequence[Path], spec: ShardSpec) -> None:
        layout = self.layout(spec.schema)
        batches = (b for part in parts for b in self.reader(part, layout).whole_batches())
        join_batches(path, batches, spec, self._output)

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        return payload + (_SAMPLE_OVERHEAD + fields * _FIELD_OVERHEAD)


class Arrow(ColumnFormat):
    name = "arrow"
    abilities = (
        "write: IPC files without compression, all field types, class names for Hugging Face",
        "read at random: IPC files and streams, value by value; compressed ones by batches",
        "read third-party files: all of Arrow's types that a field or JSON can hold",
        "convert to other formats without decoding: values and JSON text pass through unchanged",
    )


FORMAT = Arrow(IpcReader, ipc_file)
