"""`SequenceReader`: reads any Python sequence of samples like a shard."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shardkit.errors import SampleError, ShardkitError
from shardkit.formats.base import KEY, ShardReader
from shardkit.helpers import os_errors
from shardkit.sample import JsonText, Sample
from shardkit.schema import Json, Schema
from shardkit.storage import fs


class SampleSequence(Protocol):
    """Any sequence of samples: dicts with `__key__` and the fields of a schema."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Sample: ...


class _RaisedError(Exception):
    """Wraps an exception that the sequence itself raised: no value is damaged."""


class SequenceReader(ShardReader):
    """Reads the samples of a sequence. Only JSON values are copied."""

    def __init__(
        self,
        sequence: SampleSequence,
        schema: Schema,
        class_names: Mapping[str, Sequence[str]],
        path: Path,
    ) -> None:
        classes = {field: list(names) for field, names in class_names.items()}
        super().__init__(path, {"schema": schema.to_json(), "classes": classes})
        self.sequence, self._class_names = sequence, class_names
        self._json = [name for name, kind in schema.items() if isinstance(kind, Json)]

    def __len__(self) -> int:
        return len(self.sequence)

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        try:
            found = self.sequence[position]
        except (MemoryError, Warning):
            raise
        except Exception as error:
            raise _RaisedError from error
        sample = dict(found)
        if fields is not None:
            sample = {n: value for n, value in sample.items() if n == KEY or n in fields}
        for name in self._json:
            if name in sample:  # unparsed text, or a value that samples may share: make a copy
                sample[name] = json.loads(JsonText.of(sample[name]))
        return sample

    def _named(
        self, error: Exception, position: int, fields: Collection[str] | None, json_text: bool
    ) -> Exception:
        """Like the base class, but errors raised by the sequence itself concern no single field."""
        cause = error.__cause__
        if self.closed or not (isinstance(error, _RaisedError) and isinstance(cause, Exception)):
            return super()._named(error, position, fields, json_text)
        if isinstance(cause, ShardkitError | OSError) or os_errors.shortage(cause):
            return fs.unreadable(cause, self.path, position)
        found = SampleError(
            f"the sequence raised {type(cause).__name__}: {cause}",
            path=self.path,
            position=position,
        )
        found.__cause__ = cause
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return SequenceReader, (self.sequence, self.schema, self._class_names, self.path)
