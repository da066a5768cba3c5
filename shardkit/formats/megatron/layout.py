"""The bytes of a `.idx`, the dtypes of tokens, and the schemas that a `.bin` can store.

See `core/datasets/indexed_dataset.py` of Megatron-LM. The three arrays directly follow the header
of 34 bytes, so they are not aligned.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import FormatError
from shardkit.schema import Array, Image, Images, Schema, Text

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
# Magic, version, dtype code of the tokens, number of sequences, entries of the document index.
HEADER = struct.Struct("<9sQBQQ")
LENGTH, POINTER, END = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<i8")
NUMBER = np.dtype("<u8")  # in a `.keys`
MAX_TOKENS = 2**31 - 1  # of a sequence, as its length is an int32

# NumPy dtypes by their codes; files of floats can be read, but not written.
DTYPES = {
    code: np.dtype(name)
    for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), 1)
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
# The dtype in which tokens are stored: uint16 or int32, like Megatron's own tools, unless their
# range needs another.
_STORED = {
    "u1": "<u2", "u2": "<u2", "u4": "<i4", "u8": "<i8",
    "i1": "i1", "i2": "<i2", "i4": "<i4", "i8": "<i8",
}  # fmt: skip

_CHUNK = 1 << 14  # numbers at a time, which fit into the CPU cache


def index_path(path: Path) -> Path:
    """The `.idx` of a `.bin`."""
    return path.with_suffix(".idx")


def keys_path(path: Path) -> Path:
    """The file with the keys of the samples in a `.bin`."""
    return path.with_suffix(".keys")


def index_size(samples: int) -> int:
    """The size, in bytes, of the `.idx` of `samples` documents of one sequence each."""
    return HEADER.size + samples * (LENGTH.itemsize + POINTER.itemsize) + (samples + 1) * 8


def field_of(schema: Schema) -> tuple[str, Array]:
    """The single field, of tokens; raises FormatError for any other schema."""
    if len(schema) == 1:
        ((name, kind),) = schema.items()
        flat = isinstance(kind, Array) and (kind.shape is None or len(kind.shape) == 1)
        if isinstance(kind, Array) and flat and kind.dtype and not kind.optional:
            return name, kind
    raise FormatError(
        "a Megatron file holds one field, a one-dimensional array of whole numbers",
        expected="one field such as Array('uint16', (None,))",
        found=", ".join(f"{name}: {kind}" for name, kind in schema.items()) or "no field",
        fix=_fix(schema),
    )


def _fix(schema: Schema) -> str:
    if "doc_ends" in schema:
        return "tokenize without --seq-len: Megatron packs documents into sequences itself"
    if any(isinstance(kind, Image | Images) for kind in schema.values()):
        return "store images as wds, lmdb, arrow, parquet, hf or beton"
    if any(isinstance(kind, Text) for kind in schema.values()):
        return "give --tokenizer, which converts text to tokens"
    return "write only the tokens, or write all fields to another format"


def stored_dtype(kind: Array) -> np.dtype[Any]:
    """The dtype of the tokens in the file; raises FormatError if they are not integers."""
    dtype = np.dtype(kind.dtype)
    stored = _STORED.get(f"{dtype.kind}{dtype.itemsize}")
    if stored is None:
        raise FormatError(
            "a Megatron file holds integers only",
            expected="a dtype of uint8 to uint64 or int8 to int64",
            found=str(kind),
        )
    return np.dtype(stored)


def check_range(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Raise ValueError for a number that `dtype` cannot hold; Megatron itself casts silently."""
    if not len(values) or np.can_cast(values.dtype, dtype):
        return
    limits = np.iinfo(dtype)
    for value in (int(values.min()), int(values.max())):
        if not limits.min <= value <= limits.max:
            raise ValueError(f"{value} is outside of {limits.min} to {limits.max} ({dtype})")


def chunks(count: int) -> Iterator[tuple[int, int]]:
    """Split 0 to `count` into ranges that fit into the CPU cache: first and stop of each."""
    for first in range(0, count, _CHUNK):
        yield first, min(first + _CHUNK, count)


def sums_before(sizes: Iterable[npt.NDArray[Any]]) -> Iterator[npt.NDArray[np.int64]]:
    """For each size, in chunks, the sum of all previous sizes."""
    total = 0
    for chunk in sizes:
        ends = np.cumsum(chunk, dtype=np.int64) + total
        yield ends - chunk
        total = int(ends[-1])
