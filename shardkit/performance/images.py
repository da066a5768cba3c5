"""Images of a stream, and what their decoding would cost if they were stored otherwise.

A few are converted in memory, as `convert` would do it, and decoded both ways.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from shardkit.codecs.header import Header, read_header
from shardkit.codecs.image import NotAnImageError, opened
from shardkit.codecs.pixels import to_rgb
from shardkit.errors import SampleError, ShardkitError
from shardkit.options import ImageOptions
from shardkit.order import permutation
from shardkit.preprocess.filtered import Filtered
from shardkit.preprocess.images import ImageSteps
from shardkit.preprocess.single_image import ImageProcessor
from shardkit.preprocess.steps import steps_for
from shardkit.sample import Sample
from shardkit.schema import Image, Schema
from shardkit.stream.stream import Stream
from shardkit.transforms.draws import Draws
from shardkit.transforms.steps import (
    CenterCrop,
    Decode,
    Placing,
    RandomResizedCrop,
    Resize,
    Transform,
)
from shardkit.transforms.transforms import Transforms

if TYPE_CHECKING:
    import numpy.typing as npt

    Pixels = npt.NDArray[np.uint8]

Decoding: TypeAlias = "Mapping[str | tuple[str, ...], Sequence[Transform]]"

_LOOK = 48  # samples, spread over the dataset
_LOOK_BYTES = 64_000_000  # of their images at most
_TOGETHER = 8  # samples that are transformed by one call, as by a loader's threads
_ROUNDS = 5
# What a JPEG must keep of an image, as PSNR: of its brightness, which the eye goes by, and of all
# channels. The worst of 320 photos has 36.6 and 26.6 dB at quality 90, coloured text 32 and 23.
_LUMA_DB, _ALL_DB = 36, 25
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
# A drawing, text, or a mask: half of its pixels have so few colours, and the others have so few for
# each of them. Photos with a white background have 0.26 and more.
_FLAT, _OTHERS = 16, 0.2
_COUNTED = 1 << 16  # pixels whose colours are counted


class Tried(NamedTuple):
    """What a conversion of some images gave."""

    samples: tuple[list[Sample], list[Sample]]  # as they are, and as they would be
    share: float  # of the time that decoding took
    before: float  # bytes of an image, on average
    after: float


@dataclass(frozen=True)
class StoredImages:
    """Some samples of a stream that decodes all of their images, spread over its datasets."""

    decoding: Decoding  # the transforms that decode, as a stream is given them
    steps: ImageSteps  # what a conversion does to the samples
    schema: Schema
    samples: list[Sample]
    numbers: npt.NDArray[np.int64]

    @classmethod
    def of(cls, stream: Stream) -> StoredImages | None:
        """None where a conversion could harm images, or masks on them, that are not looked at."""
        decoding = _decoding(stream)
        schema = Schema({n: kind for d in stream.datasets for n, kind in d.schema.items()})
        images = {name for name, kind in schema.items() if isinstance(kind, Image)}
        if not decoding or not images or stream.options.cache == "decoded":
            return None
        steps = steps_for(schema, ImageOptions(format="jpeg"), None, "array")
        if steps is None or not _are_all(decoding, steps):
            return None
        samples, numbers = _read(stream, steps.images)
        if not samples:
            return None
        return cls(decoding, steps, stream.samples.schema, samples, numbers)

    @property
    def needed(self) -> int | None:
        """Pixels on the shorter side that the transforms can do with, if they tell."""
        sides = [_needed(_sizing(steps)) for steps in self.decoding.values()]
        known = [side for side in sides if side is not None]
        return max(known) if len(known) == len(sides) else None

    @property
    def words(self) -> str:
        """The transforms that say which size is needed."""
        return ", ".join(repr(_sizing(steps)) for steps in self.decoding.values())

    @property
    def headers(self) -> list[Header]:
        return [read_header(data) for data in self._values(self.samples)]

    def loss(self, options: ImageOptions) -> float | None:
        """The worst PSNR in brightness of what becomes a JPEG; None where one would be harmed.

        What is a JPEG already does not count.
        """
        steps = ImageProcessor(options, "array", pixels=True)
        worst = math.inf
        for data in self._values(self.samples):
            header = read_header(data)
            if header.format != "jpeg":
                found = _loss(data, header, steps)
                if found is None:
                    return None
                worst = min(worst, found)
        return worst

    def tried(self, options: ImageOptions) -> Tried | None:
        """Convert the samples in memory, and decode both by turns, in this thread."""
        steps = replace(self.steps, options=options)
        converted = [_converted(sample, steps) for sample in self.samples]
        kept = [n for n, sample in enumerate(converted) if sample is not None]
        if not kept:
            return None
        before = [self.samples[n] for n in kept]
        after = [sample for sample in converted if sample is not None]
        transforms, numbers = Transforms(self.decoding, self.schema), self.numbers[kept]
        seconds = [
            [_seconds(transforms, samples, numbers, turn) for samples in (before, after)]
            for turn in range(_ROUNDS)
        ]
        now, then = (statistics.median(column) for column in zip(*seconds, strict=True))
        sizes = (statistics.mean(map(len, self._values(some))) for some in (before, after))
        return Tried((before, after), then / now if now else 1.0, *sizes)

    def _values(self, samples: list[Sample]) -> list[bytes]:
        """The encoded images of some samples."""
        return [s[name] for s in samples for name in self.steps.images if name in s]


def _decoding(stream: Stream) -> Decoding:
    """Of the transforms of each image those that decode it and say where its pixels go."""
    found: dict[str | tuple[str, ...], list[Transform]] = {}
    for given, steps in (stream.options.transforms or {}).items():
        every = list(steps) if isinstance(steps, list | tuple) else [steps]
        decoding = list(takewhile(lambda step: isinstance(step, Placing | Decode), every))
        name = given[0] if isinstance(given, tuple) else given
        if decoding and isinstance(stream.samples.schema[name], Image):
            found[given] = decoding
    return found


def _are_all(decoding: Decoding, steps: ImageSteps) -> bool:
    """Whether all images of samples are decoded, and what lies on them is known to convert."""
    fields = [(given if isinstance(given, tuple) else (given,)) for given in decoding]
    masks = {mask: image for image, *others in fields for mask in others}
    return {image for image, *_ in fields} == set(steps.images) and all(
        steps.masks.get(mask) == image for mask, image in masks.items()
    )


def _read(stream: Stream, images: Sequence[str]) -> tuple[list[Sample], npt.NDArray[np.int64]]:
    """Samples, without those that whoever makes batches will meet and tell; and their numbers."""
    spread = np.unique(np.linspace(0, len(stream.samples) - 1, _LOOK).astype(np.int64))
    samples, numbers, size = [], [], 0
    for number in spread[permutation(len(spread), 0)].tolist():
        try:
            sample = stream.samples.read(number)
            values = [sample[name] for name in images if name in sample]
            for data in values:
                read_header(data)
        except (ShardkitError, NotAnImageError):
            continue
        samples.append(sample)
        numbers.append(number)
        size += sum(map(len, values))
        if size > _LOOK_BYTES:
            break
    return samples, np.array(numbers, np.int64)


def _sizing(steps: Sequence[Transform]) -> Transform | None:
    """The transform that says which size is needed."""
    kinds = (RandomResizedCrop, Resize, CenterCrop)
    return next((step for step in steps if isinstance(step, kinds)), None)


def _needed(step: Transform | None) -> int | None:
    """Pixels on the shorter side: of random crops a little more than their size, 256 for 224.

    What cuts its part out of an image of any size would see another part of a smaller one.
    """
    if not isinstance(step, RandomResizedCrop | Resize):
        return None
    side = max(step.size) if isinstance(step.size, tuple) else step.size
    return side if isinstance(step, Resize) else -(-side // 7) * 8


def _converted(sample: Sample, steps: ImageSteps) -> Sample | None:
    try:
        return steps(sample).sample
    except (SampleError, Filtered):
        return None


def _seconds(
    transforms: Transforms, samples: list[Sample], numbers: npt.NDArray[np.int64], turn: int
) -> float:
    """What decoding takes of the processor: not of the clock, as others may be at work."""
    out: dict[str, npt.NDArray[Any]] = {
        name: np.empty((_TOGETHER, *shape), dtype)
        for name, (shape, dtype) in transforms.outputs().items()
    }
    began = time.thread_time()
    for first in range(0, len(samples), _TOGETHER):
        some = [dict(sample) for sample in samples[first : first + _TOGETHER]]
        draws = Draws(0, np.full(len(some), turn), numbers[first : first + _TOGETHER])
        transforms.apply(some, draws, out)
    return time.thread_time() - began


# --- what JPEG does to an image -----------------------------------------------------------------


def _loss(data: bytes, header: Header, steps: ImageProcessor) -> float | None:
    """The PSNR in brightness of an image as JPEG; None where that could be seen."""
    if not header.lossless or header.oddity or _has_palette(data):
        return None
    try:
        if _is_flat(to_rgb(data)):
            return None
        image = steps.look_at(data)
        pixels = steps.made(image)
        stored = to_rgb(steps.stored(image, pixels).value)
    except NotAnImageError:
        return math.inf  # whoever makes batches will tell
    luma = _psnr(pixels @ _LUMA, stored @ _LUMA)
    return luma if luma >= _LUMA_DB and _psnr(pixels, stored) >= _ALL_DB else None


def _has_palette(data: bytes) -> bool:
    with opened(data) as image:
        return image.mode in ("1", "P", "PA")


def _is_flat(pixels: Pixels) -> bool:
    """Whether an image has few colours, so that noise of JPEG shows beside its edges."""
    step = max(math.isqrt(pixels.shape[0] * pixels.shape[1] // _COUNTED), 1)
    red, green, blue = np.moveaxis(pixels[::step, ::step].astype(np.int32), 2, 0)
    _, counts = np.unique(red << 16 | green << 8 | blue, return_counts=True)
    others = np.sort(counts)[:-_FLAT]
    return bool(2 * others.sum() <= counts.sum() and len(others) <= _OTHERS * others.sum())


def _psnr(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    error = np.mean((one.astype(np.float32) - other) ** 2, dtype=np.float64)
    return float(10 * np.log10(255**2 / error)) if error else math.inf
