"""Items that pass from a source through the steps to the shards: samples, or their errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from shardkit.errors import SampleError
from shardkit.preprocess.filtered import Filtered
from shardkit.sample import Sample

if TYPE_CHECKING:
    from shardkit.preprocess.audio import AudioSteps
    from shardkit.preprocess.images import ImageSteps
    from shardkit.preprocess.text import TextSteps, TextTally


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


@dataclass(frozen=True)
class Steps:
    """The steps for samples: first for each individually, then for the text of all in order."""

    images: ImageSteps | None = None  # including a user's transform
    audio: AudioSteps | None = None  # before the steps for images
    text: TextSteps | None = None
    fields: tuple[str, ...] | None = None  # the only fields to keep; None: all

    def __bool__(self) -> bool:
        return self != Steps()

    @property
    def decode(self) -> bool:
        """Whether values are decoded, which takes longer than reading them."""
        return self.images is not None or self.audio is not None

    def shaped(self, sample: Sample | SampleError, ignored: Counter[str]) -> Read:
        """Return a sample after its individual steps; dropped values are counted in `ignored`."""
        if isinstance(sample, SampleError):
            return sample
        if self.fields is not None:
            kept = ("__key__", *self.fields)
            count_values(sample.keys() - kept, ignored)
            sample = {name: sample[name] for name in kept if name in sample}
        if not self.decode:
            return sample
        try:
            shaped = before = Shaped(dict(sample))
            if self.audio is not None:
                self.audio(shaped)
            if self.images is not None:
                shaped = self.images(before.sample)
                shaped.reasons.update(before.reasons)
                shaped.ignored.update(before.ignored)
        except (SampleError, Filtered) as error:
            return error
        ignored.update(shaped.ignored)
        if self.images is not None and self.images.transform is not None:
            count_values(sample.keys() - shaped.sample.keys(), ignored)
        return shaped

    def in_order(
        self,
        items: Iterator[Item],
        name: str,
        threads: int,
        tally: TextTally,
        ignored: Counter[str],
    ) -> Iterator[Item]:
        """Return items from `shaped` after the steps for text; `name` begins the new keys."""
        return items if self.text is None else self.text(items, name, threads, tally, ignored)

    def notes(self) -> list[str]:
        """Return notes on what a user may not expect."""
        images = [] if self.images is None else self.images.notes()
        return images + ([] if self.text is None else list(self.text.tokenizer.notes))

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that determine the bytes."""
        images = {} if self.images is None else self.images.versions()
        if self.audio is not None:
            images = images | self.audio.versions()
        return images | ({} if self.text is None else self.text.tokenizer.versions())
