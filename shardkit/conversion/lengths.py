"""How long the values of one-dimensional arrays are, so that batches are planned unread.

`lengths.npy` beside the manifest has a row per sample and a column per such field.
"""

from __future__ import annotations

import io
from array import array
from collections.abc import Sequence

import numpy as np

from shardkit.sample import Sample
from shardkit.schema import Schema, length_fields, lengths_dtype


class Lengths:
    """Gathers the rows of samples; 0 where a sample does not have the field."""

    def __init__(self, schema: Schema) -> None:
        self._names = length_fields(schema)
        self._values = array("I")

    def __bool__(self) -> bool:
        return bool(self._names)

    def add(self, sample: Sample) -> None:
        for name in self._names:
            self._values.append(len(sample.get(name, ())))

    def rows(self) -> bytes:
        """The rows of the array behind `lengths_header`."""
        return np.array(self._values, "<u4").tobytes()


def lengths_header(names: Sequence[str], size: int) -> bytes:
    """The beginning of an .npy file with a row per sample: uint32 columns of `size` bytes."""
    dtype = lengths_dtype(names)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header,
        {"descr": dtype.descr, "fortran_order": False, "shape": (size // dtype.itemsize,)},
    )
    return header.getvalue()
