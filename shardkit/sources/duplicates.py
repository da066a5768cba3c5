"""Finds samples that duplicate an earlier one: exactly, or by perceptual similarity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from shardkit.codecs.image import NotAnImageError, is_mask_name
from shardkit.codecs.perceptual import perceptual_hash
from shardkit.dataset.statistics import compared, content_digest
from shardkit.errors import SampleError, UsageError
from shardkit.helpers.prefetch import in_threads
from shardkit.helpers.processors import processors
from shardkit.options import Selection
from shardkit.sample import Sample
from shardkit.schema import Image, Schema
from shardkit.sources.base import Source

NEAR = 6  # maximum Hamming distance, of 64 bits, between the hashes of near duplicates
_PARTS, _BITS = 4, 16  # parts of a hash, and bits of each
_FLIPS = [0, *(1 << bit for bit in range(_BITS))]  # what two parts may differ in


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
    """Return the duplicates among the samples, by index, each with its record for filtered.jsonl.

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
    """Return the samples that are copies of an earlier one, in order."""
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
    left = {n: c.looks for n, c in enumerate(contents) if c and c.looks is not None}
    for number in found.keys() & left.keys():
        del left[number]
    moved = {copy.number: copy for copy in _near(left)}
    # Exact copies of a removed sample become copies of the one that replaces it.
    for copy in found.values():
        if copy.of in moved:
            found[copy.number] = moved[copy.of]._replace(number=copy.number)
    return [(found | moved)[index] for index in sorted(found | moved)]


def _near(hashes: Mapping[int, int]) -> Iterator[Copy]:
    """The samples whose hash is near a kept one, each with the one that has the nearest kept hash.

    If two hashes differ in at most 6 bits, then one of their four parts differs in at most one bit:
    kept hashes are found by their parts (Norouzi et al., "Fast Search in Hamming Space with
    Multi-Index Hashing", CVPR 2012).
    """
    kept: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(_PARTS)]
    for number, hash in hashes.items():
        parts = [hash >> _BITS * n & (1 << _BITS) - 1 for n in range(_PARTS)]
        some: set[tuple[int, int]] = set()
        for part, by_part in zip(parts, kept, strict=True):
            for flipped in _FLIPS:
                some.update(by_part.get(part ^ flipped, ()))
        apart = (((hash ^ other).bit_count(), of) for of, other in some)
        distance, of = min(apart, default=(NEAR + 1, -1))
        if distance <= NEAR:
            yield Copy(number, of, distance)
            continue
        for part, by_part in zip(parts, kept, strict=True):
            by_part.setdefault(part, []).append((number, hash))


def _contents(source: Source, how: str, stored: Selection) -> list[Content | None]:
    """Return the content of each sample for comparison; None for an unreadable sample."""
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
    """Return the only image field that is not a mask."""
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
