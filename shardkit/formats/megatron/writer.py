"""Writes tokens as they arrive, and beside them the index and the keys of the samples."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import DamagedError, SampleError
from shardkit.formats.base import KEY, ShardSpec, ShardWriter, key_bytes
from shardkit.formats.megatron.index import Index, Keys
from shardkit.formats.megatron.layout import (
    CODES,
    HEADER,
    MAGIC,
    MAX_TOKENS,
    NUMBER,
    VERSION,
    check_range,
    chunks,
    field_of,
    index_path,
    index_size,
    keys_path,
    stored_dtype,
    sums_before,
)
from shardkit.sample import Sample
from shardkit.storage import fs

_Chunks = Iterator[npt.NDArray[Any]]


class MegatronWriter(ShardWriter):
    """Keeps eight bytes per sample in memory, as the lengths are written at the end."""

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, spec)
        self._field, kind = field_of(spec.schema)
        self._dtype = stored_dtype(kind)
        self._lengths = array("i")  # tokens of each sample
        self._key_sizes = array("I")
        self._file = fs.BufferedFile(path)
        self._keys = fs.BufferedFile(keys_path(path))

    def write(self, sample: Sample) -> bool:
        key = key_bytes(sample[KEY])
        tokens = self._checked(sample)
        total = self._file.size + tokens.nbytes + index_size(len(self._lengths) + 1)
        if self.spec.is_full(len(self._lengths), total):
            return False
        self._lengths.append(len(tokens))
        self._key_sizes.append(len(key))
        self._file.write(tokens.tobytes())
        self._keys.write(key)
        return True

    def _checked(self, sample: Sample) -> npt.NDArray[Any]:
        """The tokens, in the dtype in which they are stored."""
        tokens: npt.NDArray[Any] = sample[self._field]
        try:
            if tokens.ndim != 1:
                raise ValueError("they must be an array of one dimension")
            if len(tokens) > MAX_TOKENS:
                raise ValueError(f"the document is too long: the limit is {MAX_TOKENS:,} tokens")
            check_range(tokens, self._dtype)
        except ValueError as error:
            raise SampleError(
                f"Megatron cannot store these tokens: {error}",
                key=sample[KEY],
                field=self._field,
                found=f"an array of {tokens.dtype} {tokens.shape}",
            ) from error
        return tokens.astype(self._dtype, copy=False)

    def finish(self) -> None:
        with self._file, self._keys as keys:
            end = np.array([keys.size, len(self._key_sizes)], NUMBER)
            for starts in sums_before(_cut(np.asarray(self._key_sizes))):
                keys.write(starts.astype(NUMBER).tobytes())
            keys.write(end.tobytes())
        lengths = np.asarray(self._lengths)
        _write_index(self.path, self._dtype, len(lengths), lambda: _cut(lengths))


def join(path: Path, parts: Sequence[Path], spec: ShardSpec) -> None:
    """Join several shards into one: all tokens, all keys, then the numbers of all parts.

    The files of a part are reopened for each step, as a process can only open a limited number.
    """
    dtype = stored_dtype(field_of(spec.schema)[1])
    with fs.create(path) as file:
        for part in parts:
            fs.append(file, part, part.stat().st_size)
    samples = [_index_of(part, dtype).documents for part in parts]
    keys_sizes = [Keys(part, count).size for part, count in zip(parts, samples, strict=True)]
    with fs.create(keys_path(path)) as file:
        for part, size in zip(parts, keys_sizes, strict=True):
            fs.append(file, keys_path(part), size)
        before = 0
        for part, count, size in zip(parts, samples, keys_sizes, strict=True):
            bounds = Keys(part, count).bounds
            for first, stop in chunks(count):
                fs.write(file, [(bounds.slice(first, stop) + before).tobytes()])
            before += size
        fs.write(file, [np.array([before, sum(samples)], NUMBER).tobytes()])

    def lengths() -> _Chunks:
        for part in parts:
            yield from _index_of(part, dtype).lengths.chunks()

    _write_index(path, dtype, sum(samples), lengths)


def _index_of(part: Path, dtype: np.dtype[Any]) -> Index:
    index = Index(part, part.stat().st_size)
    if index.dtype != dtype or index.documents != index.sequences:
        raise DamagedError("the index of a part does not match its shard", path=index.path)
    return index


def _cut(values: npt.NDArray[Any]) -> _Chunks:
    for first, stop in chunks(len(values)):
        yield values[first:stop]


def _write_index(
    path: Path, dtype: np.dtype[Any], samples: int, lengths: Callable[[], _Chunks]
) -> None:
    """Write the `.idx` of documents of one sequence each, contiguous in the `.bin`."""
    with fs.create(index_path(path)) as file:
        fs.write(file, [HEADER.pack(MAGIC, VERSION, CODES[dtype], samples, samples + 1)])
        for chunk in lengths():
            fs.write(file, [chunk.astype("<i4").tobytes()])
        for starts in sums_before(lengths()):
            fs.write(file, [(starts * dtype.itemsize).astype("<i8").tobytes()])
        for first, stop in chunks(samples + 1):
            fs.write(file, [np.arange(first, stop, dtype="<i8").tobytes()])
