"""Random access to ArrayRecord files, whose records are Examples or arbitrary bytes."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import FormatError
from shardkit.formats.array_record.records import Records, TransposedError
from shardkit.formats.base import KEY
from shardkit.formats.tfrecord.reader import ExampleReader, scan
from shardkit.sample import Sample
from shardkit.schema import Bytes, Schema
from shardkit.storage.byte_source import open_source

RECORD = "record"  # the field of a foreign file whose records are not Examples


class ArrayRecordReader(ExampleReader):
    """One file."""

    def __init__(self, path: Path, layout: dict[str, Any] | None = None) -> None:
        source = open_source(path)
        self._records = Records(source)
        self.in_memory = self._records.in_memory
        if layout is None:
            try:
                read = partial(self._records.read, source)
                layout = scan(path, len(self._records), read)
            except TransposedError:
                raise
            except FormatError:
                layout = {"schema": Schema({RECORD: Bytes()}).to_json(), RECORD: True}
        super().__init__(path, layout, source)

    def __len__(self) -> int:
        return len(self._records)

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        if RECORD not in self.layout:
            return super().read(position, fields, json_text)
        sample: Sample = {KEY: self.key(position)}
        if fields is None or RECORD in fields:
            sample[RECORD] = self._records.read(self.source, position)
        return sample

    def record(self, position: int, numbers: bool) -> tuple[bytes, bool]:
        return self._records.read(self.source, position), True

    def offset(self, position: int, field: str) -> int:
        return self._records.offset(position)

    def spans(self) -> npt.NDArray[np.int64]:
        return self._records.spans()
