"""Writes Examples with the array_record library, one per chunk, as Grain expects.

Chunks are not compressed: images are compressed already, and so the bytes do not depend on the
version of Zstandard.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardkit.formats.array_record.records import BLOCK, BLOCK_HEADER
from shardkit.formats.base import ShardSpec, ShardWriter
from shardkit.formats.tfrecord.example import example
from shardkit.helpers import os_errors
from shardkit.helpers.extras import extra
from shardkit.sample import Sample

CHUNK_BYTES = 72  # overhead of a chunk with its footer entry, at most
_OPTIONS = "uncompressed,group_size:1"
_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.ENOENT)


class ArrayRecordWriter(ShardWriter):
    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, spec)
        with extra("array-record", "writing ArrayRecord files"):
            from array_record.python.array_record_module import ArrayRecordWriter as Writer
        self._size = 0  # of chunks and footer entries, at most
        with self._explained():
            self._writer = Writer(str(path), _OPTIONS)
            if not self._writer.ok():
                self._writer.close()  # raises the error from opening

    def write(self, sample: Sample) -> bool:
        data = b"".join(example(sample, self.spec.schema))
        size, most = self._size + len(data) + CHUNK_BYTES, self.spec.max_bytes
        if most and self._size and (size > most or _file_size(size) > max(most, 2 * BLOCK)):
            return False
        self._size = size
        with self._explained():
            self._writer.write(data)
        return True

    def finish(self) -> None:
        with self._explained():
            self._writer.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert the library's errors, which carry only text, to those of the system."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            number = next((n for n in _ERRORS if os.strerror(n) in text), errno.EIO)
            raise os_errors.explain(OSError(number, text), "write", self.path) from error


def _file_size(size: int) -> int:
    """File size for `size` bytes of chunks: whole blocks, and one for the postscript."""
    return (-(-(size + 256) // (BLOCK - 2 * BLOCK_HEADER)) + 1) * BLOCK
