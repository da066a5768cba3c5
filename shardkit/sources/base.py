"""Base classes of sources: samples by index, or byte ranges that are read in order."""

from __future__ import annotations

import copy
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardkit.errors import SampleError, ShardkitError
from shardkit.helpers.indices import array
from shardkit.helpers.mapped import Sizes
from shardkit.helpers.prefetch import prefetch
from shardkit.options import ALL_FIELDS, Selection
from shardkit.sample import Sample
from shardkit.schema import Schema, holds_names, label_of

if TYPE_CHECKING:
    from typing_extensions import Self

# Name of the single dataset of a conversion without splits.
WHOLE = ""

Indices: TypeAlias = "npt.NDArray[np.int64]"

_AHEAD_BYTES = 64 << 20  # of samples that were requested but not read yet


class SourceInfo:
    """What is known about a source before its samples are read."""

    schema: Schema
    selection: Selection = ALL_FIELDS  # the one that `narrow` applied
    # Other fields of the samples: those that were not selected (None), and those of a type that no
    # field can hold, with the error to raise when they are selected.
    others: Mapping[str, ShardkitError | None] = MappingProxyType({})
    # Fields declared optional because it is unknown until the end whether all samples have them.
    guessed: Collection[str] = frozenset()
    all_known: bool = True  # whether `schema` and `others` name all fields of all samples
    # By field, the class names that its integer values refer to.
    class_names: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    # Errors found while planning that belong to no sample, such as a loop of symbolic links.
    problems: Sequence[ShardkitError] = ()
    # Samples excluded while planning, each as a record of filtered.jsonl.
    filtered: Sequence[Mapping[str, str]] = ()
    # How the source was interpreted, where that may surprise the user.
    notes: Sequence[str] = ()
    # What was ignored so far and how often; keys are worded to follow a number: "empty file".
    # What is ignored in single samples is counted while they are read (`Document`, and
    # `preprocess.pipeline.Steps`). The summary and the manifest list all of it.
    ignored: dict[str, int]
    reads_text: bool = False  # whether it decodes text files
    encodes_images: bool = False  # whether it encodes pixels, with the libraries of the steps
    # Sorted hashes of the keys that key lists name, by split; under "" those of `--keys`.
    key_lists: Mapping[str, npt.NDArray[np.uint64]] = MappingProxyType({})
    safe_keys: bool = False  # whether keys are made by `sample.safe_key`
    unique_keys: bool = False  # whether keys cannot repeat and need no check for duplicates

    def __init__(self) -> None:
        self.ignored = {}

    def describe_as(self, whole: SourceInfo) -> None:
        """Copy the description of the source `whole`, from which this one is derived."""
        for name in SourceInfo.__annotations__:
            if (value := getattr(whole, name)) is not getattr(SourceInfo, name, None):
                setattr(self, name, value)

    @property
    def label(self) -> str:
        """The name of the field that holds the class of a sample."""
        return label_of(self.class_names)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the label's classes."""
        return self.class_names.get(self.label)

    def names_in(self, schema: Schema, renamed: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        """`class_names` for another schema: `renamed` fields, without those it does not have."""
        found = {renamed.get(field, field): names for field, names in self.class_names.items()}
        return {field: names for field, names in found.items() if holds_names(schema.get(field))}

    def narrow(self, selection: Selection) -> None:
        """Exclude fields that are not selected, without reading them where possible."""
        self.selection = selection
        kept = {name: kind for name, kind in self.schema.items() if selection.has(name)}
        self.schema = Schema(kept)
        self.class_names = self.names_in(self.schema, {})

    def selected(self, sample: Sample) -> Sample:
        """Return the sample without the fields that are not selected."""
        return {n: v for n, v in sample.items() if n == "__key__" or self.selection.has(n)}

    def left_out(self) -> Mapping[str, int]:
        """Return what was ignored in the samples that were read so far, as in `ignored`."""
        return {}

    def tokenizer(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The manifest entry of the tokenizer that made the tokens, and its files by name."""
        return {}, {}


class Document(NamedTuple):
    """A sample, or the error that occurred when it was read."""

    name: str  # for error lists, such as "corpus.jsonl: byte 1234"
    sample: Sample | SampleError
    size: int  # bytes of the source it was read from, counted as in `sizes`
    ignored: Sequence[str] = ()  # names of its fields that are not stored
    original: str | None = None  # its path as a file, if the key does not give it
    left_out: str = ""  # why it was excluded, worded to follow a number


class Source(SourceInfo, ABC):
    """`len(source)` samples in a fixed order; `source[i]` reads one and is thread-safe.

    `source[i]` raises SampleError (or StorageError) for a sample that cannot be read.
    """

    requests = 0  # samples to read concurrently if each is a network request; 0 if they are not
    is_scattered = False  # whether consecutive samples are far apart in storage, as if shuffled

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample: ...

    @abstractmethod
    def sizes(self) -> Sizes:
        """Payload bytes of every sample, estimated where they are unknown before reading."""

    @abstractmethod
    def select(self, indices: Indices) -> Source:
        """A source of only these samples, in this order: small, and picklable for a worker."""

    def nearby(self, first: int, last: int) -> Sequence[int]:
        """The indices in `range(first, last)`, in the order in which the samples are stored."""
        return range(first, last)

    def all_keys(self) -> Sequence[str]:
        """Return the keys of all samples; for one that cannot be read, its name."""
        found = [self.key(index) for index in range(len(self))]
        if None not in found:
            return [str(key) for key in found]
        part = self.select(np.arange(len(self))).skimmed()
        part.narrow(Selection((), partial=True))
        return [
            d.name if isinstance(d.sample, SampleError) else d.sample["__key__"]
            for d in part.documents()
        ]

    def skimmed(self) -> Source:
        """Return the same source, optimized for reading a few fields of many samples.

        Images may be only their first bytes (`where.Head`).
        """
        return self

    def check_unchanged(self) -> None:
        """Raise SourceError if files changed since planning, unless reading samples detects it."""

    def documents(self) -> Iterator[Document]:
        """Yield all samples, in order."""
        sizes = self.sizes()
        with prefetched(self) as samples:
            for index in range(len(self)):
                name, size = self.name(index), int(sizes[index])
                try:
                    sample = samples[index]
                except SampleError as error:
                    yield Document(name, error, size)
                    continue
                original = self.original(index, sample["__key__"])
                yield Document(name, sample, size, original=original)

    @abstractmethod
    def fingerprint(self) -> dict[str, str] | None:
        """Hashes that identify the content, by any names; None if it cannot be identified.

        `times` only decides whether an interrupted run can be resumed. It is not in the manifest,
        as copying a folder changes it. With None, an interrupted run starts over, and the same
        command again is refused, as it may be for other content.
        """

    def key(self, index: int) -> str | None:
        """Return the key of a sample; None if it is unknown before the sample is read."""
        return None

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of a sample in error lists, such as its path relative to the source."""

    def original(self, index: int, key: str) -> str | None:
        """Return the path that a sample had as a file; None if its key gives it."""
        return None


class SourceWrapper(Source):
    """A wrapper around another source: sample n of this one is sample `_at(n)` of that one."""

    def __init__(self, whole: Source) -> None:
        super().__init__()
        self.describe_as(whole)
        self._whole, self.requests = whole, whole.requests

    def _around(self, whole: Source) -> Self:
        """Return the same wrapper around another source, such as a part of this one."""
        found = copy.copy(self)
        found._whole, found.requests = whole, whole.requests
        return found

    def _at(self, index: int) -> int:
        return index

    def narrow(self, selection: Selection) -> None:
        self._whole = copy.copy(self._whole)
        self._whole.narrow(selection)
        super().narrow(selection)

    def select(self, indices: Indices) -> Source:
        return self._around(self._whole.select(indices))

    def skimmed(self) -> Source:
        return self._around(self._whole.skimmed())

    def __len__(self) -> int:
        return len(self._whole)

    def sizes(self) -> Sizes:
        return self._whole.sizes()

    def check_unchanged(self) -> None:
        self._whole.check_unchanged()

    def left_out(self) -> Mapping[str, int]:
        return self._whole.left_out()

    def fingerprint(self) -> dict[str, str] | None:
        return self._whole.fingerprint()

    def tokenizer(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        return self._whole.tokenizer()

    def key(self, index: int) -> str | None:
        return self._whole.key(self._at(index))

    def name(self, index: int) -> str:
        return self._whole.name(self._at(index))

    def original(self, index: int, key: str) -> str | None:
        return self._whole.original(self._at(index), key)


class Stream(SourceInfo, ABC):
    """`len(stream)` byte ranges, whose samples can only be read in order from the range's start.

    The number of samples in a range is known only after reading it. Ranges are small if the source
    allows it: a long file of lines has many, while a compressed file is one range of any size.
    """

    also: Collection[str] = ()  # fields that are read only to filter samples

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sizes(self) -> Sizes:
        """Decompressed bytes of every range, estimated where they are unknown before reading."""

    @abstractmethod
    def select(self, ranges: Indices) -> Stream:
        """A stream of only these ranges, in this order: small, and picklable for a worker."""

    def by_number(self) -> Source | None:
        """Return the same samples as a source, after reading all of them; None if that is slow."""
        return None

    @abstractmethod
    def fingerprint(self) -> dict[str, str] | None:
        """See `Source.fingerprint`."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """The samples of all ranges, in order, in memory that does not grow with their number.

        Raises SourceError or StorageError if reading cannot continue; the samples that would have
        followed are unknown then.
        """


_PROBES = 16  # samples, or ranges of a stream, that represent all
_PROBE_BYTES = 1 << 14  # read from each range


def some_of(source: Source | Stream, order: range | Indices | None = None) -> Iterator[Document]:
    """Yield a few samples, the same ones in every call, from those at `order` if it is given."""
    if order is None:
        order = range(len(source))
    chosen = array(order[:: max(len(order) // _PROBES, 1)])
    if isinstance(source, Source):
        yield from source.select(chosen).documents()
        return
    for number in chosen:
        read = 0
        for document in source.select(np.array([number])).documents():
            yield document
            read += document.size
            if read >= _PROBE_BYTES:
                break


class Prefetched:
    """Wraps a source whose samples are network requests, and makes the next ones meanwhile.

    Thread-safe. Each sample can be read only once, roughly in order.
    """

    def __init__(self, source: Source, pool: ThreadPoolExecutor) -> None:
        self.name, self._changing = source.name, threading.Lock()
        self._futures: dict[int, Future[Sample]] = {}  # of samples that another thread reads
        sizes, most = source.sizes(), source.requests
        self._requests = enumerate(
            prefetch(
                range(len(source)),
                lambda index: pool.submit(source.__getitem__, index),
                itertools.repeat(most),
                lambda index: max(int(sizes[index]) * most / _AHEAD_BYTES, 1),
            )
        )

    def __getitem__(self, index: int) -> Sample:
        with self._changing:
            while index not in self._futures:
                self._futures.update([next(self._requests)])
            future = self._futures.pop(index)
        return future.result()


@contextmanager
def prefetched(source: Source) -> Iterator[Source | Prefetched]:
    """Yield the source, to be read in order; prefetched if its samples are network requests."""
    if not source.requests:
        yield source
        return
    with ThreadPoolExecutor(source.requests, "shardkit-request") as pool:
        try:
            yield Prefetched(source, pool)
        finally:
            pool.shutdown(cancel_futures=True)
