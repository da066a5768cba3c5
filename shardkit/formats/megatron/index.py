"""The files beside a `.bin` of tokens: the `.idx` with document offsets, and our `.keys`.

See `core/datasets/indexed_dataset.py` of Megatron-LM. The three arrays of a `.idx` directly follow
the header of 34 bytes, so they are not aligned.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import DamagedError, FormatError
from shardkit.schema import Array, Schema
from shardkit.storage import fs
from shardkit.storage.blobs import Blobs, read_blobs
from shardkit.storage.byte_source import ByteSource, Table, open_source

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
# Magic, version, dtype code of the tokens, number of sequences, entries of the document index.
HEADER = struct.Struct("<9sQBQQ")
_LENGTH, _POINTER, _END = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<i8")
_BOUNDS = struct.Struct("<qq")  # two adjacent numbers
NUMBER = np.dtype("<u8")  # in a `.keys`
MAX_TOKENS = 2**31 - 1  # of a sequence, as its length is an int32

# NumPy dtypes by their codes; files of floats can be read, but not written.
DTYPES = {
    code: np.dtype(name)
    for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), 1)
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
# The dtype in which tokens are stored: uint16 or int32, like Megatron's own tools, unless their
# range needs another.
_STORED = {
    "u1": "<u2", "u2": "<u2", "u4": "<i4", "u8": "<i8",
    "i1": "i1", "i2": "<i2", "i4": "<i4", "i8": "<i8",
}  # fmt: skip

_CHUNK = 1 << 14  # numbers at a time, which fit into the CPU cache


def index_path(path: Path) -> Path:
    """Return the `.idx` of a `.bin`."""
    return path.with_suffix(".idx")


def keys_path(path: Path) -> Path:
    """Return the file with the keys of the samples in a `.bin`."""
    return path.with_suffix(".keys")


def index_size(samples: int) -> int:
    """Return the size, in bytes, of the `.idx` of `samples` documents of one sequence each."""
    numbers = _LENGTH.itemsize + _POINTER.itemsize
    return HEADER.size + samples * numbers + (samples + 1) * _END.itemsize


def field_of(schema: Schema) -> tuple[str, Array]:
    """Return the single field, of tokens; raises FormatError for any other schema."""
    if len(schema) == 1:
        ((name, kind),) = schema.items()
        flat = isinstance(kind, Array) and (kind.shape is None or len(kind.shape) == 1)
        if isinstance(kind, Array) and flat and kind.dtype and not kind.optional:
            return name, kind
    raise FormatError(
        "a Megatron file holds one field, a one-dimensional array of whole numbers",
        expected="one field such as Array('uint16', (None,))",
        found=", ".join(f"{name}: {kind}" for name, kind in schema.items()) or "no field",
        fix="tokenize with --tokenizer, without --seq-len; write other fields to another format",
    )


def stored_dtype(kind: Array) -> np.dtype[Any]:
    """Return the dtype of the tokens in the file; raises FormatError if they are not integers."""
    dtype = np.dtype(kind.dtype)
    stored = _STORED.get(f"{dtype.kind}{dtype.itemsize}")
    if stored is None:
        raise FormatError("a Megatron file holds integers only", found=str(kind))
    return np.dtype(stored)


def check_range(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Raise ValueError for a number that `dtype` cannot hold; Megatron itself casts silently."""
    if not len(values) or np.can_cast(values.dtype, dtype):
        return
    limits = np.iinfo(dtype)
    for value in (int(values.min()), int(values.max())):
        if not limits.min <= value <= limits.max:
            raise ValueError(f"{value} is outside of {limits.min} to {limits.max} ({dtype})")


def cut(values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Split numbers into chunks that fit into the CPU cache."""
    return [values[first : first + _CHUNK] for first in range(0, len(values), _CHUNK)]


def sums_before(sizes: Sequence[npt.NDArray[Any]]) -> Iterator[npt.NDArray[np.int64]]:
    """For each size, in chunks, the sum of all previous sizes."""
    total = 0
    for chunk in sizes:
        ends = np.cumsum(chunk, dtype=np.int64) + total
        yield ends - chunk
        total = int(ends[-1])


def write_index(path: Path, dtype: np.dtype[Any], lengths: Sequence[npt.NDArray[Any]]) -> None:
    """Write the `.idx` of documents of one sequence each, contiguous in the `.bin`."""
    samples = sum(map(len, lengths))
    with fs.create(index_path(path)) as file:
        fs.write(file, [HEADER.pack(MAGIC, VERSION, _CODES[dtype], samples, samples + 1)])
        for chunk in lengths:
            fs.write(file, [chunk.astype("<i4").tobytes()])
        for starts in sums_before(lengths):
            fs.write(file, [(starts * dtype.itemsize).astype("<i8").tobytes()])
        for first in range(0, samples + 1, _CHUNK):
            stop = min(first + _CHUNK, samples + 1)
            fs.write(file, [np.arange(first, stop, dtype="<i8").tobytes()])


class Index:
    """A `.idx`: documents, each of any number of sequences, each of any number of tokens.

    Opening checks the size of the file, and its first and last numbers. The numbers of a document
    are checked when they are read. Offsets and sizes are in bytes of the `.bin`.
    """

    def __init__(self, path: Path, bin_size: int) -> None:
        """`path` is the path of the .bin, which has `bin_size` bytes."""
        self.path = index_path(path)
        if not self.path.exists():
            raise FormatError(
                "a .bin file is read as Megatron tokens, and needs its index beside it",
                path=path,
                expected=str(self.path),
                fix="copy the .idx too; shardkit does not read other kinds of .bin files",
            )
        self._bin_size = bin_size
        source = open_source(self.path)
        self.dtype, self.sequences, entries = self._header(source)
        self.documents = entries - 1
        self._pointers_at = HEADER.size + self.sequences * _LENGTH.itemsize
        self._ends_at = self._pointers_at + self.sequences * _POINTER.itemsize
        end = self._ends_at + entries * _END.itemsize
        if source.size < end:  # sequence modes may follow, which are not read
            expected = f"{end:,} bytes for {self.sequences:,} sequences and {entries:,} entries"
            found = f"{source.size:,} bytes"
            raise self._damaged("the .idx is truncated", source.size, expected, found)
        self.lengths = Table(source, HEADER.size, self.sequences, _LENGTH)  # in tokens
        self._pointers = Table(source, self._pointers_at, self.sequences, _POINTER)
        # The number of sequences before each document, and finally the total.
        self._ends = Table(source, self._ends_at, entries, _END)
        self.in_memory = sum(t.in_memory for t in (self.lengths, self._pointers, self._ends))
        for entry, end in ((0, 0), (self.documents, self.sequences)):
            if self._ends.slice(entry, entry + 1)[0] != end:
                raise self._bad_end(entry, str(end))
        if self.sequences:  # the last one nearly always ends the .bin, which may be truncated
            self._sequences(self.sequences - 1, self.sequences)

    def _header(self, source: ByteSource) -> tuple[np.dtype[Any], int, int]:
        """The dtype of the tokens, and the numbers of sequences and document index entries."""
        head = source.read(0, min(HEADER.size, source.size))
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            expected = f"{MAGIC!r} and a header of {HEADER.size} bytes"
            found = f"{head[: len(MAGIC)]!r}, {source.size:,} bytes"
            raise self._damaged("not a .idx file of Megatron", 0, expected, found)
        _, version, code, sequences, entries = HEADER.unpack(head)
        if version != VERSION:
            raise FormatError(
                "unsupported version of the .idx",
                path=self.path,
                offset=9,
                expected=f"version {VERSION}",
                found=f"version {version}",
            )
        if code not in DTYPES:
            what = "invalid type code of tokens in the .idx"
            raise self._damaged(what, 17, "a code from 1 to 8", str(code))
        if not entries:
            raise self._damaged("the .idx has no document index", 26, "at least one entry", "none")
        return DTYPES[code], sequences, entries

    def _sequences(
        self, first: int, stop: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Offsets and sizes of sequences."""
        starts = self._pointers.slice(first, stop)
        sizes = self.lengths.slice(first, stop).astype(np.int64) * self.dtype.itemsize
        bad = (sizes < 0) | (starts < 0) | (starts > self._bin_size - sizes)
        if bad.any():
            at = int(bad.argmax())
            raise self._damaged(
                f"sequence {first + at} lies outside of the .bin",
                self._pointers_at + (first + at) * _POINTER.itemsize,
                f"an offset within its {self._bin_size:,} bytes",
                f"{sizes[at]:,} bytes from byte {starts[at]:,} on",
            )
        return starts, sizes

    def _bounds(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """The number of sequences before each of these documents, and before the next one."""
        ends = self._ends.slice(first, stop + 1)
        bad = (np.diff(ends, prepend=0) < 0) | (ends > self.sequences)
        if bad.any():
            raise self._bad_end(first + int(bad.argmax()), "at least the previous entry")
        return ends

    def _bad_end(self, entry: int, expected: str) -> DamagedError:
        return self._damaged(
            "the document index is damaged",
            self._ends_at + entry * _END.itemsize,
            f"{expected}, and at most {self.sequences} sequences",
            f"{self._ends.slice(entry, entry + 1)[0]} in entry {entry}",
        )

    def _damaged(self, what: str, offset: int, expected: str, found: str) -> DamagedError:
        fix = "copy both files again, or make them again"
        where = {"path": self.path, "offset": offset}
        return DamagedError(what, **where, expected=expected, found=found, fix=fix)

    def spans(self, document: int) -> list[tuple[int, int]]:
        """Offset and size of each sequence of a document."""
        first, stop = _BOUNDS.unpack(self._ends.record(document, 2))
        if stop - first == 1 and 0 <= first < self.sequences:  # the usual case: one sequence
            tokens = int.from_bytes(self.lengths.record(first), "little", signed=True)
            start = int.from_bytes(self._pointers.record(first), "little", signed=True)
            size = tokens * self.dtype.itemsize
            if size >= 0 and 0 <= start <= self._bin_size - size:
                return [(start, size)]
        first, stop = self._bounds(document, document + 1).tolist()
        starts, sizes = self._sequences(first, stop)
        if sizes.sum(dtype=np.float64) > self._bin_size:
            # Otherwise a small file could request any amount of memory.
            raise ValueError("its sequences overlap, and are longer than the whole .bin")
        return list(zip(starts.tolist(), sizes.tolist(), strict=True))

    def single(
        self, documents: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """Offsets and sizes of documents, unchecked; None unless each is a single sequence."""
        first, stop = self._ends.take(documents, 2).T
        # Without a sign, a negative number is larger than all others.
        if np.count_nonzero((stop - first != 1) | (first.view(np.uint64) >= self.sequences)):
            return None
        sizes = self.lengths.take(first).astype(np.int64) * self.dtype.itemsize
        return self._pointers.take(first), sizes

    def sizes(self) -> npt.NDArray[np.int64]:
        """Return bytes of every document."""
        found = np.empty(self.documents, np.int64)
        for first in range(0, self.documents, _CHUNK):
            stop = min(first + _CHUNK, self.documents)
            ends = self._bounds(first, stop)
            sizes = self._sequences(int(ends[0]), int(ends[-1]))[1]
            sums = np.concatenate(([0], np.cumsum(sizes)))
            found[first:stop] = np.diff(sums[ends - ends[0]])
        return found


class Keys:
    """A `.keys`: the keys of a shard's samples, which Megatron's own files cannot store.

    It has the keys in UTF-8, concatenated; then the start of each and the end of the last as
    uint64; then their number as a uint64. Everything is little-endian.
    """

    def __init__(self, path: Path, samples: int) -> None:
        """`path` is the path of the .bin."""
        self.path, self.samples = keys_path(path), samples
        if not self.path.exists():
            raise DamagedError("the file with the keys of the samples is missing", path=self.path)
        source = open_source(self.path)
        self.size = source.size - (samples + 2) * NUMBER.itemsize  # of the keys, in bytes
        numbers = samples + 2 if self.size >= 0 else 0
        self.bounds = Table(source, max(self.size, 0), numbers, NUMBER)
        ends = self.bounds.take(np.array([0, samples, samples + 1])) if numbers else ()
        if [*ends] != [0, self.size, samples]:
            raise DamagedError(
                "the file with the keys of the samples is damaged",
                path=self.path,
                offset=max(self.size, 0),
                expected=f"bounds from 0 to {self.size:,}, then {samples:,} samples",
                found=f"{source.size:,} bytes with other bounds",
                fix="copy it again, or move it elsewhere if it belongs to other data",
            )
        self._text = Table(source, 0, self.size, np.uint8)
        self._source = None if self._text.in_memory == self.size else source
        self.in_memory = self.bounds.in_memory + self._text.in_memory

    def __getitem__(self, position: int) -> str:
        """The key of a sample; raises ValueError if it is damaged."""
        start, stop = _BOUNDS.unpack(self.bounds.record(position, 2))
        if not 0 <= start <= stop <= self.size:
            raise ValueError("invalid offset of the key")
        return self._text.record(start, stop - start).decode()

    def take(self, positions: npt.NDArray[np.int64]) -> list[str]:
        """Return the keys of several samples; raises ValueError if one is damaged."""
        starts, stops = self.bounds.take(positions, 2).T.astype(np.int64, order="C")
        if np.count_nonzero((starts < 0) | (starts > stops) | (stops > self.size)):
            raise ValueError("invalid offset of a key")
        sizes = stops - starts
        if self._source is None:
            return Blobs(self._text.slice(0, self.size), starts, sizes).texts()
        which = np.zeros_like(starts)
        return read_blobs([self._source], which, starts[None], sizes[None])[0].texts()
