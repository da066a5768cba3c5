"""Samples in Python as a source: a list of dicts, a dict of lists, a torch map-style dataset."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.given import as_fields, schema_of
from shardkit.dataset.views import size_of
from shardkit.errors import SampleError, ShardkitError, SourceError, UsageError
from shardkit.sample import Sample
from shardkit.schema import ClassNames, Schema, named_classes
from shardkit.sources.base import Indices, Source

_PROBES = 32  # samples that are read to estimate the size of all


class SequenceSource(Source):
    """Samples from `sequence[i]`, which are dicts. One without a `__key__` gets its number as key.

    Without `schema`, that of the sequence (`sequence.schema`) or of its samples is used.
    """

    def __init__(
        self,
        sequence: Sequence[Any],
        schema: Schema | None = None,
        classes: ClassNames | None = None,
        indices: Indices | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__()
        if not len(sequence):
            raise SourceError("the sequence has no samples")
        self._sequence = sequence
        self._indices = np.arange(len(sequence)) if indices is None else indices
        self._mean_size = size  # bytes per sample, once a few were read
        if schema is None:
            own = getattr(sequence, "schema", None)
            if isinstance(own, Schema):
                schema = own
            else:
                schema, others = schema_of(self._examples())
                self.others = {**others}
        self.schema = schema
        self.class_names = named_classes(classes, schema)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Sample:
        return self.schema.check(as_fields(self.selected(self._at(int(self._indices[index])))))

    def sizes(self) -> npt.NDArray[np.int64]:
        if self._mean_size is None:
            step = max(1, len(self) // _PROBES)
            probes = [self._size(i) for i in range(0, len(self), step)]
            self._mean_size = sum(probes) // len(probes)
        return np.full(len(self), self._mean_size, np.int64)

    def select(self, indices: Indices) -> SequenceSource:
        chosen = self._indices[indices]
        names = self.class_names
        source = SequenceSource(self._sequence, self.schema, names, chosen, self._mean_size)
        source.selection = self.selection
        return source

    def fingerprint(self) -> None:
        return None  # a sequence cannot be compared with that of an earlier run

    def name(self, index: int) -> str:
        return f"sample {self._indices[index]}"

    def _examples(self) -> Iterator[Sample]:
        """The samples that tell the schema: all in memory, or else only the first."""
        yield self._at(0)
        if isinstance(self._sequence, list | tuple | Rows):
            yield from (sample for sample in self._sequence if isinstance(sample, dict))

    def _at(self, number: int) -> Sample:
        try:
            sample = self._sequence[number]
        except (ShardkitError, MemoryError):
            raise
        except Exception as error:  # user code: any exception is an error of this sample
            raise SampleError(
                f"the sequence raised {type(error).__name__}: {error}", position=number
            ) from error
        return checked_sample(sample, number)

    def _size(self, index: int) -> int:
        try:
            sample = self[index]
        except SampleError:
            return 0  # the conversion will meet and report the error
        return sum(map(size_of, sample.values()))


def checked_sample(sample: Any, number: int) -> Sample:
    """Return a user's sample with a key, by default its number; raises SampleError if invalid."""
    if not isinstance(sample, dict):
        raise SampleError(
            "an item is not a sample",
            position=number,
            expected="a dict of fields, such as {'__key__': 'a', 'image': b'...', 'label': 3}",
            found=type(sample).__name__,
            fix="give dicts, such as ({'image': x, 'label': y} for x, y in samples)",
        )
    key = sample.get("__key__", f"{number:09d}")
    if not isinstance(key, str) or not key:
        raise SampleError(
            "the key of a sample is not text",
            position=number,
            expected="a string that is not empty",
            found=repr(key),
        )
    return {**sample, "__key__": key}


def is_table(source: object) -> bool:
    """Return whether this is a table of Arrow, pandas, Polars, DuckDB or Hugging Face datasets."""
    if hasattr(source, "with_format"):  # a user's transform makes samples, not rows
        own = getattr(source, "format", None)
        custom = isinstance(own, Mapping) and own.get("type") == "custom"
        # Without features, each batch would have the types of its own values.
        known = getattr(source, "features", None) is not None
        return known and not custom and not isinstance(source, Mapping)
    if not hasattr(source, "__arrow_c_stream__"):
        return False
    return hasattr(source, "columns") or hasattr(source, "schema")


class Rows(Sequence[Sample]):
    """The rows of columns: a dict of lists or arrays, each with a value for each sample.

    Raises UsageError for anything else.
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = {n: getattr(column, "iloc", column) for n, column in columns.items()}
        lengths = {name: _length(name, column) for name, column in columns.items()}
        if len({*lengths.values()}) > 1:
            found = ", ".join(f"{name}: {length:,}" for name, length in lengths.items())
            raise UsageError("the columns have different lengths", found=found)
        self._length = next(iter(lengths.values()), 0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return {name: column[index] for name, column in self._columns.items()}


def _length(name: object, column: Any) -> int:
    with contextlib.suppress(TypeError):
        single = isinstance(column, str | bytes | Mapping | set) or is_table(column)
        if isinstance(name, str) and not single:
            return len(column)
    raise UsageError(
        "a dict is a table: each name has a list or an array with a value for each sample",
        found=f"{name!r}: {type(column).__name__}",
        fix="for a single sample, give a list: [sample]; convert the splits of several separately",
    )
