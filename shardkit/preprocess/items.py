"""Items that pass from a source through the steps to the shards: samples, or why there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from shardkit.errors import SampleError
from shardkit.sample import Sample


class Filtered(Exception):  # noqa: N818 - not an error
    """A valid sample is dropped by an option or a transform.

    `reason` is the same for all such samples, `found` is for this one.
    """

    def __init__(self, reason: str, found: str, key: str) -> None:
        super().__init__(f"{reason}: {found}")
        self.reason, self.found, self.key = reason, found, key

    def to_json(self) -> dict[str, str]:
        """Return the entry for a line of filtered.jsonl."""
        return {"key": self.key, "reason": self.reason, "found": self.found}


@dataclass
class Shaped:
    """A sample as it is to be stored, with counts of changes to images and audio, and reasons."""

    sample: Sample
    images: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)


# A sample as it was read, or after its individual steps; or the reason why there is none.
Read: TypeAlias = "Sample | Shaped | SampleError | Filtered"


class Item(NamedTuple):
    """A sample between source and shard."""

    name: str  # its name in a list of errors, such as its path relative to the source
    read: Read
    size: int  # bytes that it took in the source
    original: str | None = None  # its path as a file, if the key does not contain it


def sample_of(read: Read) -> Sample:
    """Return the sample that was read; raises the error if there is none."""
    if isinstance(read, SampleError | Filtered):
        raise read
    return read if isinstance(read, dict) else read.sample


def count_values(names: Iterable[str], ignored: Counter[str]) -> None:
    """Count the values of a sample that are dropped, by field name."""
    for name in names:
        ignored[f"values of {name!r}"] += 1
