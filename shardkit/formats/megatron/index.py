"""A `.idx`, mapped or read, and checked: which bytes of its `.bin` are which document."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.errors import DamagedError, FormatError
from shardkit.formats.megatron.layout import (
    DTYPES,
    END,
    HEADER,
    LENGTH,
    MAGIC,
    POINTER,
    VERSION,
    chunks,
    index_path,
    small_file,
)

if TYPE_CHECKING:
    import numpy.typing as npt

_COPY = "copy both files again, or make them again"
_BOUNDS = struct.Struct("<qq")  # two entries of the document index, side by side
_LENGTH, _POINTER = struct.Struct("<i"), struct.Struct("<q")


class Index:
    """Documents, each of any number of sequences, each of any number of tokens.

    Opening compares every number with the sizes of the two files, so that reading can follow them.
    """

    def __init__(self, path: Path, bin_size: int, mapped: bool = True) -> None:
        """`path` is that of the .bin, which has `bin_size` bytes."""
        self.path = index_path(path)
        if not self.path.exists():
            raise FormatError(
                "a .bin is read as tokens of Megatron, and needs its index beside it",
                path=path,
                expected=str(self.path),
                fix="copy the .idx too; a .bin of another kind is nothing that shardkit reads",
            )
        self._bin_size = bin_size
        self._data = small_file(self.path, mapped)
        self.dtype, self.sequences, entries = self._header()
        self.documents = entries - 1
        self._pointers_at = HEADER.size + self.sequences * LENGTH.itemsize
        self._ends_at = self._pointers_at + self.sequences * POINTER.itemsize
        end = self._ends_at + entries * END.itemsize
        if len(self._data) < end:  # modes of sequences may follow, which are not read
            raise DamagedError(
                "the .idx is cut",
                path=self.path,
                offset=len(self._data),
                expected=f"{end:,} bytes for {self.sequences:,} sequences and {entries:,} entries",
                found=f"{len(self._data):,} bytes",
                fix=_COPY,
            )
        self._check_sequences()
        self._check_documents()

    def _header(self) -> tuple[np.dtype[Any], int, int]:
        """The type of the tokens, the number of sequences, and of entries of the document index."""
        if len(self._data) < HEADER.size or self._data[: len(MAGIC)] != MAGIC:
            raise DamagedError(
                "this is no .idx of Megatron",
                path=self.path,
                offset=0,
                expected=f"{MAGIC!r} and a header of {HEADER.size} bytes",
                found=f"{self._data[: len(MAGIC)]!r}, {len(self._data):,} bytes",
            )
        _, version, code, sequences, entries = HEADER.unpack_from(self._data)
        if version != VERSION:
            raise FormatError(
                "the .idx is of another version",
                path=self.path,
                offset=9,
                expected=f"version {VERSION}",
                found=f"version {version}",
            )
        if code not in DTYPES:
            raise DamagedError(
                "the .idx names no type of tokens",
                path=self.path,
                offset=17,
                expected="a code from 1 to 8",
                found=str(code),
            )
        if not entries:
            raise DamagedError("the .idx has no document index", path=self.path, offset=26)
        return DTYPES[code], sequences, entries

    def _check_sequences(self) -> None:
        for first, stop in chunks(self.sequences):
            sizes = self.lengths(first, stop).astype(np.int64) * self.dtype.itemsize
            starts = self._pointers(first, stop)
            bad = (sizes < 0) | (starts < 0) | (starts > self._bin_size - sizes)
            if bad.any():
                at = int(bad.argmax())
                raise DamagedError(
                    f"sequence {first + at} lies outside of the .bin",
                    path=self.path,
                    offset=self._pointers_at + (first + at) * POINTER.itemsize,
                    expected=f"a place in its {self._bin_size:,} bytes",
                    found=f"{sizes[at]:,} bytes from byte {starts[at]:,} on",
                    fix=_COPY,
                )

    def _check_documents(self) -> None:
        previous = 0
        for first, stop in chunks(self.documents + 1):
            ends = np.concatenate(([previous], self._ends(first, stop)))
            bad = ends[1:] < ends[:-1]
            if first == 0:
                bad[0] = ends[1] != 0
            if bad.any():
                raise self._bad_end(first + int(bad.argmax()), "0, then no number that falls")
            previous = int(ends[-1])
        if previous != self.sequences:
            raise self._bad_end(self.documents, f"at last {self.sequences}, as many as sequences")

    def _bad_end(self, entry: int, expected: str) -> DamagedError:
        return DamagedError(
            "the document index is damaged",
            path=self.path,
            offset=self._ends_at + entry * END.itemsize,
            expected=expected,
            found=f"{self._ends(entry, entry + 1)[0]} in entry {entry}",
            fix=_COPY,
        )

    def lengths(self, first: int, stop: int) -> npt.NDArray[np.int32]:
        """Tokens of sequences."""
        return self._numbers(LENGTH, HEADER.size, first, stop)

    def _pointers(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Where sequences begin in the `.bin`."""
        return self._numbers(POINTER, self._pointers_at, first, stop)

    def _ends(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Entries of the document index: the sequences before each document, and at last all."""
        return self._numbers(END, self._ends_at, first, stop)

    def _numbers(self, dtype: np.dtype[Any], at: int, first: int, stop: int) -> npt.NDArray[Any]:
        """A piece of an array, copied: numpy is slow with what is not aligned."""
        size = dtype.itemsize
        return np.frombuffer(self._data[at + first * size : at + stop * size], dtype)

    def spans(self, document: int) -> list[tuple[int, int]]:
        """Where the sequences of a document stand in the `.bin`: first byte and stop."""
        first, stop = _BOUNDS.unpack_from(self._data, self._ends_at + document * END.itemsize)
        if stop - first == 1:  # as it is nearly always
            (tokens,) = _LENGTH.unpack_from(self._data, HEADER.size + first * LENGTH.itemsize)
            (start,) = _POINTER.unpack_from(
                self._data, self._pointers_at + first * POINTER.itemsize
            )
            return [(start, start + tokens * self.dtype.itemsize)]
        starts = self._pointers(first, stop)
        sizes = self.lengths(first, stop).astype(np.int64) * self.dtype.itemsize
        if (
            sizes.sum(dtype=np.float64) > self._bin_size
        ):  # else a small file could ask for any amount of memory
            raise ValueError("its sequences overlap, and are longer than the whole .bin")
        return list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))

    def places(
        self, documents: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """Where documents of one sequence each begin in the `.bin`, and their tokens.

        None where one of them has another number of sequences.
        """
        ends = self._array(END, self._ends_at, self.documents + 1)
        first = ends[documents]
        if (ends[documents + 1] - first != 1).any():
            return None
        lengths = self._array(LENGTH, HEADER.size, self.sequences)
        pointers = self._array(POINTER, self._pointers_at, self.sequences)
        return pointers[first], lengths[first].astype(np.int64)

    def _array(self, dtype: np.dtype[Any], at: int, count: int) -> npt.NDArray[Any]:
        return np.frombuffer(self._data, dtype, count, at)

    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of every document in the `.bin`."""
        sizes = np.empty(self.documents, np.int64)
        for first, stop in chunks(self.documents):
            ends = self._ends(first, stop + 1)
            tokens = np.zeros(int(ends[-1] - ends[0]) + 1, np.int64)
            np.cumsum(self.lengths(int(ends[0]), int(ends[-1])), out=tokens[1:])
            sizes[first:stop] = np.diff(tokens[ends - ends[0]]) * self.dtype.itemsize
        return sizes
