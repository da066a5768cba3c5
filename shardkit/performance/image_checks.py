"""Findings on stored images: far larger than needed, or in a format that is slow to decode.

A few images are converted in memory, as `convert` would, and both versions are decoded.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardkit.codecs.header import Header, read_header
from shardkit.codecs.image import NotAnImageError, opened
from shardkit.codecs.pixels import to_rgb
from shardkit.errors import SampleError, ShardkitError
from shardkit.helpers.order import permutation
from shardkit.options import ImageOptions
from shardkit.performance.checks import convert_command
from shardkit.performance.findings import Finding
from shardkit.performance.runs import medians
from shardkit.preprocess.filtered import Filtered
from shardkit.preprocess.images import ImageSteps
from shardkit.preprocess.steps import steps_for
from shardkit.sample import Sample
from shardkit.schema import Image, Schema
from shardkit.stream.stream import Stream
from shardkit.transforms.draws import Draws
from shardkit.transforms.steps import (
    CenterCrop,
    Decode,
    Geometric,
    RandomResizedCrop,
    Resize,
    Transform,
)
from shardkit.transforms.transforms import Transforms

Decoding: TypeAlias = "dict[str | tuple[str, ...], list[Transform]]"

_WORTH = 0.8  # maximum share of the present time for which a conversion is worthwhile
_LARGER = 1.25  # minimum ratio of stored to needed size: below it, little can be gained
_QUALITIES = (90, 95)
_LOOK = 48  # samples that are examined, spread over the dataset
_LOOK_BYTES = 64_000_000  # maximum bytes of their images
_TOGETHER = 8  # samples transformed per call, as in a loader's threads
# Minimum PSNR of a JPEG: of brightness, to which the eye is most sensitive, and of all channels.
# The worst of 320 photos has 36.6 and 26.6 dB at quality 90, coloured text 32 and 23.
_LUMA_DB, _ALL_DB = 36, 25
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
# An image is a drawing, text or a mask if half of its pixels have at most _FLAT colours, and the
# rest have at most _OTHERS colours per pixel. Photos with a white background have 0.26 or more.
_FLAT, _OTHERS = 16, 0.2
_COUNTED = 1 << 16  # pixels whose colours are counted


def stored_size(stream: Stream) -> Finding | None:
    """Images that are far larger than the transforms need."""
    images = StoredImages.of(stream)
    needed = None if images is None else images.needed
    if images is None or needed is None:
        return None
    sizes = [read_header(data).upright for data in images.values(images.samples)]
    if statistics.median(map(min, sizes)) < _LARGER * needed:
        return None
    options = ImageOptions(resize=needed, format="jpeg", quality=90)
    flags = [f"--resize {needed}", "--image-format jpeg", "--quality 90"]
    if images.loss(options) is None:  # JPEG would harm some: all stay in their formats
        options = replace(options, format="keep")
        del flags[1]
    tried = images.tried(options)
    if tried is None or tried.share >= _WORTH:
        return None
    width, height = (statistics.median(side) for side in zip(*sizes, strict=True))
    sizing = ", ".join(repr(_sizing(steps)) for steps in images.decoding.values())
    return tried.finding(
        f"the median size of {len(sizes)} images is {width:,.0f} x {height:,.0f} pixels; "
        f"{sizing} needs only {needed:,} on the shorter side",
        f"store them with {needed:,} pixels on the shorter side: {tried}; random crops "
        "are then taken from images of that size, so small crops are less sharp",
        convert_command(stream, *flags),
    )


def png(stream: Stream) -> Finding | None:
    """Photos in lossless formats, such as PNG, for which a JPEG looks the same."""
    images = StoredImages.of(stream)
    if images is None:
        return None
    headers = [read_header(data) for data in images.values(images.samples)]
    formats = [header.format for header in headers if header.lossless]
    if 2 * len(formats) < len(headers):
        return None
    for quality in _QUALITIES:
        options = ImageOptions(format="jpeg", quality=quality)
        loss = images.loss(options)
        if loss is not None:
            break
    else:
        return None
    tried = images.tried(options)
    if tried is None or tried.share >= _WORTH or tried.after >= tried.before:
        return None
    return tried.finding(
        f"{len(formats)} of {len(headers)} images are stored in lossless formats: "
        + ", ".join(sorted({format.upper() for format in formats})),
        f"store them as JPEG of quality {quality}: {tried}; the difference is not visible, "
        f"as the PSNR of the brightness is {loss:.0f} dB or more for each image",
        convert_command(stream, "--image-format jpeg", f"--quality {quality}"),
    )


class Tried(NamedTuple):
    """The result of converting some images."""

    share: float  # of the decoding time before
    before: float  # mean bytes of an image
    after: float

    def __str__(self) -> str:
        return (
            f"{self.after / 1000:,.1f} kB each instead of {self.before / 1000:,.1f}, decoded in "
            f"{self.share:.0%} of the time"
        )

    def finding(self, seen: str, do: str, command: str) -> Finding:
        return Finding("decode", seen, do, stage="decode", share=self.share, command=command)


@dataclass(frozen=True)
class StoredImages:
    """Some samples of a stream that decodes all of their images, spread over its datasets."""

    decoding: Decoding  # the decoding transforms, as passed to the stream
    steps: ImageSteps  # the steps of a conversion
    schema: Schema
    samples: list[Sample]
    numbers: npt.NDArray[np.int64]

    @classmethod
    def of(cls, stream: Stream) -> StoredImages | None:
        """Read some samples. None if a conversion could harm images or masks without a check."""
        decoding = _decoding(stream)
        schema = Schema({n: kind for d in stream.datasets for n, kind in d.schema.items()})
        if not decoding or stream.options.cache == "decoded":
            return None
        steps = steps_for(schema, ImageOptions(format="jpeg"), None, "array")
        if steps is None or not _are_all(decoding, steps):
            return None
        samples, numbers = _read(stream, steps.images)
        return cls(decoding, steps, stream.samples.schema, samples, numbers) if samples else None

    @property
    def needed(self) -> int | None:
        """Pixels on the shorter side that the transforms need, if known."""
        sides = [_needed(_sizing(steps)) for steps in self.decoding.values()]
        known = [side for side in sides if side is not None]
        return max(known) if len(known) == len(sides) else None

    def values(self, samples: Sequence[Sample]) -> list[bytes]:
        """The encoded images of some samples."""
        return [s[name] for s in samples for name in self.steps.images if name in s]

    def loss(self, options: ImageOptions) -> float | None:
        """The minimum brightness PSNR of the images as JPEG; None if one would be harmed.

        Images that are already JPEGs are ignored.
        """
        worst = math.inf
        for sample in self.samples:
            for name in self.steps.images:
                header = read_header(sample[name]) if name in sample else None
                if header is None or header.format == "jpeg":
                    continue
                try:
                    if not _may_be_jpeg(sample[name], header):
                        return None
                    raw = self._converted(sample, replace(options, format="raw"))
                    jpeg = self._converted(sample, options)
                    if raw is None or jpeg is None:
                        continue  # the loader raises the error
                    pixels, stored = raw[name], to_rgb(jpeg[name])
                except NotAnImageError:
                    continue
                luma = _psnr(pixels @ _LUMA, stored @ _LUMA)
                if luma < _LUMA_DB or _psnr(pixels, stored) < _ALL_DB:
                    return None
                worst = min(worst, luma)
        return worst

    def tried(self, options: ImageOptions) -> Tried | None:
        """Convert the samples in memory, and time the decoding of both versions in this thread."""
        converted = [self._converted(sample, options) for sample in self.samples]
        good = [n for n, sample in enumerate(converted) if sample is not None]
        if not good:
            return None
        before = [self.samples[n] for n in good]
        after = [sample for sample in converted if sample is not None]
        transforms, numbers = Transforms(self.decoding, self.schema), self.numbers[good]
        now, then = medians(
            lambda turn: _seconds(transforms, before, numbers, turn),
            lambda turn: _seconds(transforms, after, numbers, turn),
        )
        sizes = (statistics.mean(map(len, self.values(some))) for some in (before, after))
        return Tried(then / now if now else 1.0, *sizes)

    def _converted(self, sample: Sample, options: ImageOptions) -> Sample | None:
        try:
            return replace(self.steps, options=options)(sample).sample
        except (SampleError, Filtered):
            return None


def _decoding(stream: Stream) -> Decoding:
    """The transforms that decode, crop and resize each image."""
    found: Decoding = {}
    for given, steps in (stream.options.transforms or {}).items():
        every = list(steps) if isinstance(steps, list | tuple) else [steps]
        decoding = list(takewhile(lambda step: isinstance(step, Geometric | Decode), every))
        name = given[0] if isinstance(given, tuple) else given
        if decoding and isinstance(stream.samples.schema[name], Image):
            found[given] = decoding
    return found


def _are_all(decoding: Mapping[str | tuple[str, ...], Any], steps: ImageSteps) -> bool:
    """Whether all images are decoded, and `convert` knows all masks and boxes that follow them."""
    fields = [(given if isinstance(given, tuple) else (given,)) for given in decoding]
    on_image = {other: image for image, *others in fields for other in others}
    moved = dict(steps.masks)
    for name, on in steps.boxes.items():
        moved |= dict.fromkeys((name, *on.others), on.image)
    return {image for image, *_ in fields} == set(
        steps.images
    ) and on_image.items() <= moved.items()


def _read(stream: Stream, images: Sequence[str]) -> tuple[list[Sample], npt.NDArray[np.int64]]:
    """Some samples and their numbers, without damaged ones (the loader raises their errors)."""
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
    """The transform that determines the size of the images."""
    kinds = (RandomResizedCrop, Resize, CenterCrop)
    return next((step for step in steps if isinstance(step, kinds)), None)


def _needed(step: Transform | None) -> int | None:
    """Pixels on the shorter side: for random crops slightly more than their size, 256 for 224.

    None for a center crop without a resize, which would show another part of a smaller image.
    """
    if not isinstance(step, RandomResizedCrop | Resize):
        return None
    side = max(step.size) if isinstance(step.size, tuple) else step.size
    return side if isinstance(step, Resize) else -(-side // 7) * 8


def _seconds(
    transforms: Transforms, samples: list[Sample], numbers: npt.NDArray[np.int64], turn: int
) -> float:
    """Processor seconds for decoding, which other processes do not affect."""
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


def _may_be_jpeg(data: bytes, header: Header) -> bool:
    """Whether a JPEG can hold the image, and enough colours hide the artifacts of JPEG."""
    if not header.lossless or header.oddity:
        return False
    with opened(data) as image:
        if image.mode in ("1", "P", "PA"):
            return False
    pixels = to_rgb(data)
    step = max(math.isqrt(pixels.shape[0] * pixels.shape[1] // _COUNTED), 1)
    red, green, blue = np.moveaxis(pixels[::step, ::step].astype(np.int32), 2, 0)
    _, counts = np.unique(red << 16 | green << 8 | blue, return_counts=True)
    others = np.sort(counts)[:-_FLAT]
    return bool(2 * others.sum() > counts.sum() or len(others) > _OTHERS * others.sum())


def _psnr(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    error = np.mean((one.astype(np.float32) - other) ** 2, dtype=np.float64)
    return float(10 * np.log10(255**2 / error)) if error else math.inf
