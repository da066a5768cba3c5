"""The steps of a conversion in their order, from a sample of the source to one to be stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import SampleError
from shardkit.preprocess.items import Filtered, Item, Read, Shaped, count_values
from shardkit.sample import Sample

if TYPE_CHECKING:
    from shardkit.preprocess.audio import AudioSteps
    from shardkit.preprocess.images import ImageSteps
    from shardkit.preprocess.text import TextSteps, TextTally


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
        return images + ([] if self.text is None else self.text.notes())

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that determine the bytes."""
        images = {} if self.images is None else self.images.versions()
        if self.audio is not None:
            images = images | self.audio.versions()
        return images | ({} if self.text is None else self.text.tokenizer.versions())
