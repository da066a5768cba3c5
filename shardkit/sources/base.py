"""The contracts of what a conversion reads: samples, or byte ranges read in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardkit.errors import SampleError, ShardkitError
from shardkit.indices import array
from shardkit.mapped import Sizes
from shardkit.options import ALL_FIELDS, Selection
from shardkit.sample import Sample
from shardkit.schema import Schema, holds_classes, label_of
from shardkit.sources.requested import requested

Indices: TypeAlias = "npt.NDArray[np.int64]"


class Described:
    """What is known of any source before its samples are read."""

    schema: Schema
    selection: Selection = ALL_FIELDS  # that the schema was narrowed to
    # What else the source has for each of its samples: fields that are not asked for (None), and
    # those that no field can hold, with the error that says so.
    others: Mapping[str, ShardkitError | None] = MappingProxyType({})
    # Fields that are optional because only the end tells whether all samples have them.
    guessed: Collection[str] = frozenset()
    all_known: bool = True  # whether no sample has a field that is neither in `schema` nor here
    # By field, the names of the classes that its values number.
    class_names: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    # What was found wrong while planning that belongs to no sample: a loop of links, say.
    problems: Sequence[ShardkitError] = ()
    # Samples that were left out while planning, each as a line of filtered.jsonl has it.
    filtered: Sequence[Mapping[str, str]] = ()
    # What a user may not expect of how the source was understood.
    notes: Sequence[str] = ()
    # What was passed over until now and how often, in words that stand behind a number: "empty
    # file". What is passed over sample by sample is counted while samples are read (`Document`, and
    # `preprocess.items.Steps`). All of it is in the summary and in the manifest.
    ignored: dict[str, int]
    reads_text: bool = False  # of files, in an encoding
    encodes_images: bool = False  # of pixels, by the libraries that the steps have
    # The keys of those samples that a list names, as sorted hashes: by split, or as "" of all.
    key_lists: Mapping[str, npt.NDArray[np.uint64]] = MappingProxyType({})
    safe_keys: bool = False  # whether keys are as `sample.safe_key` makes them
    unique_keys: bool = False  # whether keys cannot repeat, so that they need no comparing

    def __init__(self) -> None:
        self.ignored = {}

    def describe_as(self, whole: Described) -> None:
        """Take over all that is known of another source, for one that is made of it."""
        for name in Described.__annotations__:
            if (value := getattr(whole, name)) is not getattr(Described, name, None):
                setattr(self, name, value)

    @property
    def label(self) -> str:
        """The field that holds the class of a sample."""
        return label_of(self.class_names)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the label's classes."""
        return self.class_names.get(self.label)

    def names_in(self, schema: Schema, renamed: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        """`class_names` as a dataset with another schema has them: by the fields that are left."""
        found = {renamed.get(field, field): names for field, names in self.class_names.items()}
        return {field: names for field, names in found.items() if holds_classes(schema.get(field))}

    def narrow(self, selection: Selection) -> None:
        """Leave out what is not selected, best without reading it."""
        self.selection = selection
        kept = {name: kind for name, kind in self.schema.items() if selection.has(name)}
        self.schema = Schema(kept)
        self.class_names = self.names_in(self.schema, {})

    def selected(self, sample: Sample) -> Sample:
        """The sample without the fields that are not selected."""
        return {n: v for n, v in sample.items() if n == "__key__" or self.selection.has(n)}

    def tokenizer(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """What made the tokens in the samples, as a manifest has it, and its files by name."""
        return {}, {}


class Document(NamedTuple):
    """A sample, or why there is none."""

    name: str  # what to call it in a list of errors: "corpus.jsonl: byte 1234"
    sample: Sample | SampleError
    size: int  # bytes of the source that it took, in the measure of `sizes`
    ignored: Sequence[str] = ()  # the names of fields that it has in the source alone
    original: str | None = None  # its path as a file, where the key does not tell it
    left_out: str = ""  # why it is not chosen, in words that stand behind a number


class Source(Described, ABC):
    """`len(source)` samples in a fixed order; `source[i]` reads one, in any thread.

    `source[i]` raises SampleError (or StorageError) for a sample that cannot be had.
    """

    requests = 0  # samples to read at a time where each is a request over a network; 0: it is none
    is_scattered = False  # whether neighbours in this order lie far apart, as after a shuffle

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample: ...

    @abstractmethod
    def sizes(self) -> Sizes:
        """Payload bytes of every sample, as well as they are known without reading them."""

    @abstractmethod
    def select(self, indices: Indices) -> Source:
        """A source of these samples alone, in this order: small, and picklable for a worker."""

    def nearby(self, first: int, last: int) -> Sequence[int]:
        """The indices from `first` to before `last`, in the order in which samples are stored."""
        return range(first, last)

    def all_keys(self) -> Sequence[str]:
        """The keys of all samples; of one that cannot be read, its name."""
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
        """The same source, to look at a few fields of many samples.

        Images may be no more than their first bytes (`where.Head`).
        """
        return self

    def check_unchanged(self) -> None:
        """Raise SourceError where files changed since planning, and no sample of them told so."""

    def documents(self) -> Iterator[Document]:
        """All samples, in order."""
        sizes = self.sizes()
        with requested(self) as samples:
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
        """What identifies the content, by name; None if nothing does.

        `times` decides only whether an interrupted run may continue: it is not in the manifest, as
        copying a folder changes it.
        """

    def key(self, index: int) -> str | None:
        """The key of a sample where it is known without reading it."""
        return None

    @abstractmethod
    def name(self, index: int) -> str:
        """What to call a sample in a list of errors: its path relative to the source, say."""

    def original(self, index: int, key: str) -> str | None:
        """The path that a sample had as a file, where its key does not tell it."""
        return None


class Around(Source):
    """A source made of another, of which its sample number n is sample `_at(n)`."""

    _whole: Source

    def _at(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return len(self._whole)

    def sizes(self) -> Sizes:
        return self._whole.sizes()

    def check_unchanged(self) -> None:
        self._whole.check_unchanged()

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


class Stream(Described, ABC):
    """`len(stream)` byte ranges, each with samples that can only be read from its beginning.

    How many samples a range has is known when it was read. Ranges are small where the source allows
    it: a long file of lines has many, a compressed one is a single range of any size.
    """

    also: Collection[str] = ()  # fields that are read only to choose samples by them

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sizes(self) -> Sizes:
        """Bytes of every range once decompressed, as well as they are known without reading it."""

    @abstractmethod
    def select(self, ranges: Indices) -> Stream:
        """A stream of these ranges alone, in this order: small, and picklable for a worker."""

    @abstractmethod
    def fingerprint(self) -> dict[str, str] | None:
        """As of a `Source`."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """The samples of all ranges, in order; in memory that does not grow with their number.

        Raises SourceError or StorageError where reading cannot go on: what would have followed is
        not known then.
        """


_PROBES = 16  # samples, or ranges of a stream, that tell about all
_PROBE_BYTES = 1 << 14  # read of each range


def some_of(source: Source | Stream, order: range | Indices | None = None) -> Iterator[Document]:
    """A few samples, the same whenever they are asked for: of those at `order`, if it is given."""
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
