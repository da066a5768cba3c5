"""The formats of Arrow columns: `arrow` (IPC files) here, `parquet` and `hf` in their modules.

columns.py   which column holds which field, in shards of ours and in foreign files
values.py    from arrays to values
messages.py  positions of the batches in an IPC file or stream
reader.py    random access to the rows of batches
writer.py    from values to arrays, and batches into a file
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

# Offsets, validity bits, padding and the batch's header.
_FIELD_OVERHEAD = 32
_SAMPLE_OVERHEAD = 64


class ColumnFormat(Format):
    """A format whose shards hold columns: a reader, and what encodes batches."""

    reader: Callable[[Path, dict[str, Any] | None], BatchReader]

    def __init__(
        self,
        reader: Callable[[Path, dict[str, Any] | None], BatchReader],
        output: MakeOutput,
        **options: Any,
    ) -> None:
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
        "read at random: IPC files and streams, value by value; compressed ones decoded",
        "read foreign files: all of Arrow's types that a field or JSON can hold",
        "convert on with nothing decoded: values and JSON text pass through as they are",
    )


FORMAT = Arrow(IpcReader, ipc_file)
