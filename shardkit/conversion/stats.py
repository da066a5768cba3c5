"""Statistics counted while samples are written, per task, and then merged for the manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardkit.dataset.statistics import Pixels
from shardkit.metadata.sizes import FieldSizes
from shardkit.preprocess.text import TextTally
from shardkit.sample import JsonText, Sample
from shardkit.schema import Array, Bool, Bytes, FieldType, Images, Json, Scalar, Text

_COUNTS = ("encoded", "filtered", "ignored", "keys", "images", "reasons")
_MAX_IGNORED = 100  # kinds named in a manifest, as JSON may have any number of names


@dataclass
class Stats:
    """Counts over samples; merging those of several tasks gives the same result in any order."""

    fields: dict[str, FieldSizes] = field(default_factory=dict)  # only fields that have values
    labels: Counter[int] = field(default_factory=Counter)  # samples of each class
    text: TextTally = field(default_factory=TextTally)
    encoded: Counter[str] = field(default_factory=Counter)  # images re-encoded by the format: why
    filtered: Counter[str] = field(default_factory=Counter)  # samples dropped by an option: why
    ignored: Counter[str] = field(default_factory=Counter)  # see `sources.base.SourceInfo`
    keys: Counter[str] = field(default_factory=Counter)  # keys other readers may fail on: why
    images: Counter[str] = field(default_factory=Counter)  # what the steps did, and bytes
    reasons: Counter[str] = field(default_factory=Counter)  # why images and audio were changed
    pixels: dict[str, Pixels] = field(default_factory=dict)  # only of requested fields

    def __post_init__(self) -> None:
        self._label = "label"
        self._size_of: dict[str, Callable[[Any], int]] = {}

    @classmethod
    def of(cls, schema: Mapping[str, FieldType], label: str = "label") -> Stats:
        """Empty statistics for samples with these fields; `label` is the field with the class."""
        stats = cls()
        stats._label = label
        stats._size_of = {name: kind.entry(_SIZES) for name, kind in schema.items()}
        return stats

    def add(self, sample: Sample) -> None:
        """Count one sample; the counts are complete only after `flush`."""
        for name, size_of in self._size_of.items():
            if name in sample:
                sizes = self.fields.get(name)
                if sizes is None:
                    sizes = self.fields[name] = FieldSizes()
                sizes.append(size_of(sample[name]))
        label = sample.get(self._label)
        if type(label) is int:
            self.labels[label] += 1

    def flush(self) -> None:
        self.text.flush()
        for sizes in self.fields.values():
            sizes.flush()
        for pixels in self.pixels.values():
            pixels.flush()

    def merge(self, other: Stats) -> None:
        for name, sizes in other.fields.items():
            self.fields.setdefault(name, FieldSizes()).merge(sizes)
        for name in ("labels", *_COUNTS):
            getattr(self, name).update(getattr(other, name))
        self.text.merge(other.text)
        for name, pixels in other.pixels.items():
            self.pixels.setdefault(name, Pixels()).merge(pixels)

    def summary(self) -> dict[str, dict[str, int]]:
        """Return the counts for the manifest, with only the most frequent kinds of `ignored`."""
        often = sorted(self.ignored.items(), key=lambda entry: (-entry[1], entry[0]))
        ignored = dict(sorted(often[:_MAX_IGNORED]))
        if rest := often[_MAX_IGNORED:]:
            ignored[f"of {len(rest):,} other kinds"] = sum(count for _, count in rest)
        counts = {name: dict(sorted(getattr(self, name).items())) for name in _COUNTS}
        return {**counts, "ignored": ignored}

    def label_counts(self, classes: int) -> tuple[int, ...]:
        return tuple(self.labels[label] for label in range(classes))


# Payload bytes of a value, independent of the format: text as UTF-8, numbers as 8 bytes.
_SIZES: dict[type, Callable[[Any], int]] = {
    Scalar: lambda value: 8,
    Bool: lambda value: 1,
    Bytes: len,
    Images: lambda value: sum(map(len, value)),
    Text: lambda value: len(value.encode()),
    Json: lambda value: len(JsonText.of(value).encode()),
    Array: lambda value: int(value.nbytes),
}
