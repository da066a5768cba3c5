"""Writes tokens as they arrive, and beside them the index and the keys of the samples."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import DamagedError, SampleError
from shardkit.formats.base import KEY, ShardSpec, ShardWriter, key_bytes
from shardkit.formats.megatron.index import (
    MAX_TOKENS,
    NUMBER,
    Index,
    Keys,
    check_range,
    cut,
    field_of,
    index_size,
    keys_path,
    stored_dtype,
    sums_before,
    write_index,
)
from shardkit.sample import Sample
from shardkit.storage import fs


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
        """Return the tokens, in the dtype in which they are stored."""
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
            for starts in sums_before(cut(np.asarray(self._key_sizes))):
                keys.write(starts.astype(NUMBER).tobytes())
            keys.write(end.tobytes())
        write_index(self.path, self._dtype, cut(np.asarray(self._lengths)))


def join(path: Path, parts: Sequence[Path], spec: ShardSpec) -> None:
    """Join several shards into one: all tokens, all keys, then the numbers of all parts.

    The files of a part are reopened for each step, as a process can only open a limited number.
    """
    dtype = stored_dtype(field_of(spec.schema)[1])
    samples: list[int] = []  # of each part
    lengths: list[npt.NDArray[Any]] = []
    with fs.create(path) as file:
        for part in parts:
            index = Index(part, fs.append(file, part, part.stat().st_size))
            if index.dtype != dtype or index.documents != index.sequences:
                what = "the index of a part does not match its shard"
                raise DamagedError(what, path=index.path)
            samples.append(index.documents)
            lengths += index.lengths.chunks()
    with fs.create(keys_path(path)) as file:
        for part, count in zip(parts, samples, strict=True):
            fs.append(file, keys_path(part), Keys(part, count).size)
        before = 0
        for part, count in zip(parts, samples, strict=True):
            keys = Keys(part, count)
            fs.write(file, [(keys.bounds.slice(0, count) + before).tobytes()])
            before += keys.size
        fs.write(file, [np.array([before, sum(samples)], NUMBER).tobytes()])
    write_index(path, dtype, lengths)
