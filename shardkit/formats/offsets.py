"""Writes shards that begin with the offsets of all samples, as those of MDS and LitData do.

The number of offsets is only known at the end. Until then, a small shard is kept in memory. A
larger one is written after space reserved for the offsets, which is padded at the end; if the space
is too small, the shard is copied once.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from pathlib import Path

import numpy as np

from shardkit.formats.base import KEY, ShardSpec, ShardWriter, too_large
from shardkit.sample import Sample
from shardkit.storage import fs

LARGEST = 2**32 - 1  # bytes of a shard, as its offsets are uint32
_IN_MEMORY = 4 << 20  # bytes of samples up to which a shard is kept in memory


class OffsetsWriter(ShardWriter):
    """Writes the number of samples, their offsets and that of the end (uint32), header, samples."""

    called: str  # the name of the format in messages
    room: int  # bytes reserved before the samples of a larger shard
    fill: bytes  # the padding byte of that space
    header = b""

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, spec)
        self._ends = array("Q", [0])  # the end of each sample
        self._chunks: list[bytes] = []  # the samples, while they are kept in memory
        self._file: fs.BufferedFile | None = None

    @abstractmethod
    def stored(self, sample: Sample) -> list[bytes]:
        """Return the bytes of a sample."""

    def write(self, sample: Sample) -> bool:
        chunks = self.stored(sample)
        end = self._ends[-1] + sum(map(len, chunks))
        size, empty = self._start(len(self._ends), end) + end, len(self._ends) == 1
        if empty and size > LARGEST:
            what = f"the sample is too large for {self.called}, which has 32-bit offsets"
            raise too_large(what, size, LARGEST, sample[KEY])
        if not empty and size > min(self.spec.max_bytes or LARGEST, LARGEST):
            return False
        self._ends.append(end)
        if self._file is not None:
            self._file.write(*chunks)
            return True
        self._chunks += chunks
        if end > _IN_MEMORY:
            self._file = fs.BufferedFile(self.path)
            self._file.write(bytes(self.room), *self._chunks)
            self._chunks = []
        return True

    def _start(self, samples: int, end: int) -> int:
        """Bytes before the first sample in a shard of `samples` samples, which take `end` bytes."""
        exact = 4 * (samples + 2) + len(self.header)
        return exact if end <= _IN_MEMORY else max(exact, self.room)

    def finish(self) -> None:
        start = self._start(len(self._ends) - 1, self._ends[-1])
        offsets = np.array(self._ends, np.uint64) + start
        before = np.array([len(offsets) - 1, *offsets], "<u4").tobytes() + self.header
        before = before.ljust(start, self.fill)
        if self._file is None:
            with fs.create(self.path) as file:
                fs.write(file, [before, *self._chunks])
            return
        with self._file:
            self._file.flush()
            if start == self.room:
                fs.rewrite(self._file.file, 0, before)
                return
        samples = self.path.with_suffix(".samples")
        fs.rename(self.path, samples)
        with fs.create(self.path) as file:
            fs.write(file, [before])
            fs.append(file, samples, self._ends[-1], self.room)
        fs.remove(samples)
