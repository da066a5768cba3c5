"""Finds samples that duplicate an earlier one: exactly, or by perceptual similarity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.image import NotAnImageError, is_mask_name
from shardkit.codecs.perceptual import distances, perceptual_hash
from shardkit.dataset.statistics import compared, content_digest
from shardkit.errors import SampleError, UsageError
from shardkit.helpers.prefetch import in_threads
from shardkit.helpers.processors import processors
from shardkit.options import Selection
from shardkit.sample import Sample
from shardkit.schema import Image, Schema
from shardkit.sources.base import Indices, Source

NEAR = 6  # maximum Hamming distance, of 64 bits, between the hashes of near duplicates
_BITS = 16  # of each of the four parts of a hash
_PAIRS = 1 << 22  # compared at a time
_BLOCK = 1024  # hashes that are compared pairwise
_INDEX = 40  # low bits for an index, below the bits for a distance
_NONE = np.int64(1 << 62)


class Copy(NamedTuple):
    """A duplicate sample, which is removed."""

    number: int
    of: int  # the number of the sample that is kept
    distance: int | None  # of the perceptual hashes; None if the content is identical


class Content(NamedTuple):
    digest: bytes
    looks: int | None  # the perceptual hash, if any
    label: Any = None  # not compared


def duplicates(source: Source, how: str, stored: Selection) -> dict[int, dict[str, str]]:
    """The duplicates among the samples, by index, each with its record for filtered.jsonl.

    Samples are compared by the stored fields, or by all fields if none of these can be compared.

    The first of several duplicates is kept. Unreadable samples are kept too, as the conversion
    reports them. Raises UsageError if near duplicates are requested and there is not exactly one
    image field.
    """
    found = {}
    contents = _contents(source, how, stored)
    labels = [None if content is None else content.label for content in contents]
    for number, of, distance in copies(contents):
        key, other = source.key(number), source.key(of)
        stays = source.name(of) if other is None else other
        same = distance is None
        reason = "duplicate" if same else "near duplicate"
        found[number] = {
            "source": source.name(number),
            "key": source.name(number) if key is None else key,
            "reason": reason if labels[number] == labels[of] else f"{reason} with another label",
            "found": f"the same as {stays}" if same else f"{distance} of 64 bits from {stays}",
        }
    return found


def copies(contents: list[Content | None]) -> list[Copy]:
    """The samples that are copies of an earlier one, in order."""
    found: dict[int, Copy] = {}
    first: dict[bytes | int, int] = {}
    for index, content in enumerate(contents):
        if content is None:
            continue
        of = first.setdefault(content.digest, index)
        if of != index:
            found[index] = (
                found[of]._replace(number=index) if of in found else Copy(index, of, None)
            )
        elif content.looks is not None and (of := first.setdefault(content.looks, index)) != index:
            found[index] = Copy(index, of, 0)
    left = [n for n, c in enumerate(contents) if c and c.looks is not None and n not in found]
    hashes = np.array([contents[n].looks for n in left], np.uint64)  # type: ignore[union-attr]
    moved = {left[n]: Copy(left[n], left[of], distance) for n, of, distance in _near(hashes)}
    # Exact copies of a removed sample become copies of the one that replaces it.
    for copy in found.values():
        if copy.of in moved:
            found[copy.number] = moved[copy.of]._replace(number=copy.number)
    return [(found | moved)[index] for index in sorted(found | moved)]


def _near(hashes: npt.NDArray[np.uint64]) -> Iterator[Copy]:
    """The hashes that are near a kept one, each with the nearest kept hash, by index.

    All hashes are distinct. Each block is compared with the kept hashes of earlier blocks only, so
    that large groups of similar samples need few comparisons.
    """
    stay = np.zeros(0, np.int64)
    for start in range(0, len(hashes), _BLOCK):
        block = hashes[start : start + _BLOCK]
        size = len(block)
        # Distance and index of the nearest kept hash, packed into one integer.
        best = np.full(size, _NONE)
        for one, other, distance in _candidates(block, hashes[stay]):
            np.minimum.at(best, one, distance << _INDEX | stay[other])
        apart = distances(np.repeat(block, size), np.tile(block, size)).reshape(size, size)
        alike = np.tril(apart <= NEAR, -1)
        stays = best == _NONE
        for number in np.flatnonzero(stays & alike.any(axis=1)):
            stays[number] = not (alike[number] & stays).any()
        one, other = np.nonzero(alike & stays)
        np.minimum.at(best, one, apart[one, other].astype(np.int64) << _INDEX | start + other)
        for index in np.flatnonzero(~stays).tolist():
            bits, of = divmod(int(best[index]), 1 << _INDEX)
            yield Copy(start + index, of, bits)
        stay = np.concatenate([stay, start + np.flatnonzero(stays)])


def _candidates(
    hashes: npt.NDArray[np.uint64], others: npt.NDArray[np.uint64]
) -> Iterator[tuple[Indices, Indices, Indices]]:
    """Pairs of a hash and a near one of `others`, with the distance; each at least once.

    If two hashes differ in at most 6 bits, then one of their four parts differs in at most one bit.
    Pairs of such parts are found by sorting (Norouzi et al., "Fast Search in Hamming Space with
    Multi-Index Hashing", CVPR 2012).
    """
    masks = np.array([0, *(1 << bit for bit in range(_BITS))], np.uint16)
    for part in range(4):
        values = (others >> np.uint64(_BITS * part)).astype(np.uint16)
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        wanted = (hashes >> np.uint64(_BITS * part)).astype(np.uint16)[:, None] ^ masks
        starts = np.searchsorted(ordered, wanted, "left").ravel()
        counts = np.searchsorted(ordered, wanted, "right").ravel() - starts
        ends = counts.cumsum()
        at = 0
        while at < len(counts):
            most = (ends[at - 1] if at else 0) + _PAIRS
            stop = max(int(np.searchsorted(ends, most, "right")), at + 1)
            some = counts[at:stop]
            one = np.repeat(np.arange(at, stop), some) // len(masks)
            within = np.arange(len(one)) - np.repeat(some.cumsum() - some, some)
            other = order[np.repeat(starts[at:stop], some) + within]
            distance = distances(hashes[one], others[other]).astype(np.int64)
            near = distance <= NEAR
            yield one[near], other[near], distance[near]
            at = stop


def _contents(source: Source, how: str, stored: Selection) -> list[Content | None]:
    """The content of each sample for comparison; None for an unreadable sample."""
    schema = Schema({name: kind for name, kind in source.schema.items() if stored.has(name)})
    fields = compared(schema, source.label) or compared(source.schema, source.label)
    image = _image_field(schema) if how == "near" else None

    def content(sample: Sample | SampleError) -> Content | None:
        if isinstance(sample, SampleError):
            return None
        looks = None
        if image is not None and image in sample:
            try:
                looks = perceptual_hash(sample[image])
            except NotAnImageError:
                return None
        label = sample.get(source.label)
        if isinstance(label, np.ndarray):
            label = label.tolist()
        return Content(content_digest(sample, fields), looks, label)

    part = source.select(np.arange(len(source)))
    also = {source.label} & source.schema.keys() - set(fields)
    part.narrow(Selection((*fields, *also)))
    samples = (document.sample for document in part.documents())
    return [*in_threads(content, samples, processors(), 16)]


def _image_field(schema: Schema) -> str:
    """The only image field that is not a mask."""
    images = [name for name, kind in schema.items() if isinstance(kind, Image)]
    found = [name for name in images if not is_mask_name(name)] or images
    if len(found) != 1:
        raise UsageError(
            "near duplicates need exactly one image field",
            expected="a single field of encoded images",
            found=", ".join(f"{name}: {type(kind).__name__}" for name, kind in schema.items()),
            fix="use --dedup exact" if not found else "exclude the others with --drop",
        )
    return found[0]
