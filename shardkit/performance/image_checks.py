"""Findings on stored images: far larger than needed, or in a format that is slow to decode."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, TypeAlias

import numpy as np

from shardkit.codecs.header import Header, read_header
from shardkit.codecs.image import NotAnImageError, opened
from shardkit.codecs.pixels import to_rgb
from shardkit.errors import ShardkitError
from shardkit.helpers.order import permutation
from shardkit.options import ImageOptions
from shardkit.performance.checks import convert_command
from shardkit.performance.findings import Finding
from shardkit.preprocess.images import ImageSteps
from shardkit.preprocess.steps import steps_for
from shardkit.schema import Image, Schema
from shardkit.stream.stream import Stream
from shardkit.transforms.steps import (
    CenterCrop,
    Decode,
    Geometric,
    RandomResizedCrop,
    Resize,
    Transform,
)

Decoding: TypeAlias = "dict[str | tuple[str, ...], list[Transform]]"

_LARGER = 1.25  # minimum ratio of stored to needed size: below it, little can be gained
_SLOW, _SLOWER = ("png", "webp"), 5  # lossless formats, and their time relative to JPEG
_LOOK = 48  # samples that are examined, spread over the dataset
_LOOK_BYTES = 64_000_000  # maximum bytes of their images
# An image is a drawing, text or a mask if half of its pixels have at most _FLAT colours, and the
# rest have at most _OTHERS colours per pixel. Photos with a white background have 0.26 or more.
_FLAT, _OTHERS = 16, 0.2
_COUNTED = 1 << 16  # pixels whose colours are counted


def images(stream: Stream) -> Finding | None:
    """Images that are far larger than the transforms need, or photos that are slow to decode."""
    found = StoredImages.of(stream)
    return None if found is None else _too_large(stream, found) or _lossless(stream, found)


def _too_large(stream: Stream, images: StoredImages) -> Finding | None:
    needed, sizes = images.needed, [header.upright for header in images.headers]
    shorter = statistics.median(map(min, sizes))
    if needed is None or shorter < _LARGER * needed:
        return None
    width, height = (statistics.median(side) for side in zip(*sizes, strict=True))
    sizing = ", ".join(repr(_sizing(steps)) for steps in images.decoding.values())
    share = (needed / shorter) ** 2
    return Finding(
        "decode",
        f"the median size of {len(sizes)} images is {width:,.0f} x {height:,.0f} pixels; "
        f"{sizing} needs only {needed:,} on the shorter side",
        f"store them with {needed:,} pixels on the shorter side, {share:.0%} of the pixels to "
        "decode; random crops are then taken from images of that size, so small crops are less "
        "sharp",
        stage="decode",
        share=share,
        command=convert_command(stream, f"--resize {needed}", *images.jpeg, "--quality 90"),
    )


def _lossless(stream: Stream, images: StoredImages) -> Finding | None:
    formats = [h.format for h in images.headers if h.lossless and h.format in _SLOW]
    if 2 * len(formats) < len(images.headers) or not images.jpeg:
        return None
    return Finding(
        "decode",
        f"{len(formats)} of {len(images.headers)} images are photos in lossless formats, which "
        f"are decoded about {_SLOWER} times as slowly as JPEG: "
        + ", ".join(sorted({format.upper() for format in formats})),
        "store them as JPEG of quality 95, and compare some by eye: JPEG loses fine details",
        stage="decode",
        share=1 / _SLOWER,
        command=convert_command(stream, *images.jpeg, "--quality 95"),
    )


@dataclass(frozen=True)
class StoredImages:
    """Some images of a stream that decodes all of its images, spread over its datasets."""

    decoding: Decoding  # the decoding transforms, as passed to the stream
    images: list[bytes]

    @classmethod
    def of(cls, stream: Stream) -> StoredImages | None:
        """Read some samples. None if a conversion could harm other images or masks."""
        decoding = _decoding(stream)
        schema = Schema({n: kind for d in stream.datasets for n, kind in d.schema.items()})
        if not decoding or stream.options.cache == "decoded":
            return None
        steps = steps_for(schema, ImageOptions(format="jpeg"), None, "array")
        if steps is None or not _are_all(decoding, steps):
            return None
        images = _read(stream, steps.images)
        return cls(decoding, images) if images else None

    @property
    def needed(self) -> int | None:
        """Pixels on the shorter side that the transforms need, if known."""
        sides = [_needed(_sizing(steps)) for steps in self.decoding.values()]
        known = [side for side in sides if side is not None]
        return max(known) if len(known) == len(sides) else None

    @cached_property
    def headers(self) -> list[Header]:
        return [read_header(data) for data in self.images]

    @property
    def jpeg(self) -> list[str]:
        """The option that stores images as JPEG, if there are others, and all are photos."""
        pairs = zip(self.images, self.headers, strict=True)
        others = [each for each in pairs if each[1].format != "jpeg"]
        photos = bool(others) and all(_is_photo(*each) for each in others)
        return ["--image-format jpeg"] if photos else []


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


def _read(stream: Stream, fields: Sequence[str]) -> list[bytes]:
    """Some images, without damaged ones (the loader raises their errors)."""
    spread = np.unique(np.linspace(0, len(stream.samples) - 1, _LOOK).astype(np.int64))
    images: list[bytes] = []
    for number in spread[permutation(len(spread), 0)].tolist():
        try:
            sample = stream.samples.read(number)
            values = [sample[name] for name in fields if name in sample]
            for data in values:
                read_header(data)
        except (ShardkitError, NotAnImageError):
            continue
        images += values
        if sum(map(len, images)) > _LOOK_BYTES:
            break
    return images


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


def _is_photo(data: bytes, header: Header) -> bool:
    """Whether a JPEG can hold a lossless image, and enough colours hide the artifacts of JPEG."""
    if not header.lossless or header.oddity:
        return False
    try:
        with opened(data) as image:
            if image.mode in ("1", "P", "PA"):
                return False
        pixels = to_rgb(data)
    except NotAnImageError:
        return True  # the loader raises the error
    step = max(math.isqrt(pixels.shape[0] * pixels.shape[1] // _COUNTED), 1)
    red, green, blue = np.moveaxis(pixels[::step, ::step].astype(np.int32), 2, 0)
    _, counts = np.unique(red << 16 | green << 8 | blue, return_counts=True)
    others = np.sort(counts)[:-_FLAT]
    return bool(2 * others.sum() > counts.sum() or len(others) > _OTHERS * others.sum())
