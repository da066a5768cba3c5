"""Columns of values in Arrow's formats: IPC files here, Parquet and Hugging Face folders beside.

columns.py   which column holds which field; values into arrays
values.py    values out of arrays
messages.py  where the batches of an IPC file or stream stand
foreign.py   fields for the columns of files that others made
reader.py    random access to the rows of batches
unmapped.py  the same without mapping the file
writer.py    batches into a file
parquet.py   the format `parquet`
footer.py    rows and nulls of a Parquet file's row groups
hf.py        the format `hf`: a folder as Hugging Face datasets saves it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.formats.arrow.reader import IpcReader
from shardkit.formats.arrow.unmapped import UnmappedIpcReader
from shardkit.formats.arrow.writer import BatchWriter, ipc_file, join_batches
from shardkit.formats.base import Format
from shardkit.schema import Schema

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Offsets, a bit to say that a value is there, padding and the batch's own description.
FIELD_OVERHEAD = 32
SAMPLE_OVERHEAD = 64


class Arrow(Format):
    name = "arrow"
    abilities = (
        "write: IPC files without compression, all field types, class names for Hugging Face",
        "read at random: IPC files and streams by views into the file; compressed ones decoded",
        "read foreign files: all of Arrow's types that a field or JSON can hold",
        "convert on with nothing decoded: values and JSON text pass through as they are",
    )

    def open(self, path: Path, layout: dict[str, Any] | None = None) -> IpcReader:
        return UnmappedIpcReader(path, layout)

    def create(
        self,
        path: Path,
        schema: Schema,
        max_bytes: int | None = None,
        classes: Mapping[str, Sequence[str]] | None = None,
    ) -> BatchWriter:
        return BatchWriter(path, schema, ipc_file, max_bytes=max_bytes, classes=classes)

    def join(
        self,
        path: Path,
        parts: Sequence[Path],
        schema: Schema,
        classes: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        readers = (IpcReader(part, self.layout(schema)) for part in parts)
        join_batches(path, readers, schema, ipc_file, classes)

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        return payload + (SAMPLE_OVERHEAD + fields * FIELD_OVERHEAD)


FORMAT = Arrow()
