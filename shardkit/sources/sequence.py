"""Any Python sequence of samples as a source: a list of dicts, a torch map-style dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.media import guessed_schema
from shardkit.dataset.views import size_of
from shardkit.errors import SampleError, ShardkitError, SourceError
from shardkit.sample import Sample
from shardkit.schema import ClassNames, FieldType, Schema, named_classes
from shardkit.sources.base import Indices, Source

_PROBES = 32  # samples that are read to estimate the size of all


class SequenceSource(Source):
    """Samples from `sequence[i]`, which are dicts. One without a `__key__` gets its number as key.

    Without `schema`, that of the sequence (`sequence.schema`) or of its first sample is used.
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
            schema = own if isinstance(own, Schema) else self._guess(self._at(0))
        self.schema = schema
        self.class_names = named_classes(classes, schema)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Sample:
        return self.schema.check(self.selected(self._at(int(self._indices[index]))))

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

    def _guess(self, first: Sample) -> Schema:
        """Return the fields of the first sample; values of unsupported types become `others`."""
        fields: dict[str, FieldType] = {}
        others: dict[str, ShardkitError | None] = {}
        for name, value in first.items():
            try:
                fields.update(guessed_schema({name: value}))
            except SampleError as error:
                error.fix = f"convert without it: drop=[{name!r}], or use one of these types"
                others[name] = error
        self.others = others
        return Schema(fields)

    def _at(self, number: int) -> Sample:
        try:
            sample = self._sequence[number]
        except (ShardkitError, MemoryError):
            raise
        except Exception as error:  # user code: any exception is an error of this sample
            raise SampleError(
                f"the sequence raised {type(error).__name__}: {error}", position=number
            ) from error
        if not isinstance(sample, dict):
            raise SampleError(
                "the sequence has an item that is not a sample",
                position=number,
                expected="a dict of fields, such as {'__key__': 'a', 'image': b'...', 'label': 3}",
                found=type(sample).__name__,
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

    def _size(self, index: int) -> int:
        try:
            sample = self[index]
        except SampleError:
            return 0  # the conversion will meet and report the error
        return sum(map(size_of, sample.values()))
