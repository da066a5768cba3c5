"""Checks that every value can be read and has its field's type, and that images decode."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from shardkit.codecs import damage as images
from shardkit.codecs.image import TooLargeError
from shardkit.errors import DamagedError, SampleError, ShardkitError
from shardkit.helpers.words import counted
from shardkit.sample import Sample
from shardkit.schema import FieldType, Json, check_label, images_in
from shardkit.verification.shards import CheckedPart
from shardkit.verification.work import Meter, in_threads

_CHUNK = 64  # samples that a thread reads at a time


class _Chunk(NamedTuple):
    shard: int
    start: int
    stop: int


def check_values(part: CheckedPart, meter: Meter, *, decode: bool) -> None:
    """Read all samples of the readable shards. `decode`: also decode their images."""
    with images.strict_warnings():
        work = partial(_check, part, decode, meter)
        too_large = sum(in_threads(work, _chunks(part), meter))
    if too_large:
        part.findings.notes.append(
            f"{counted(too_large, 'image')} not decoded: too many pixels or frames"
        )


def _chunks(part: CheckedPart) -> Iterator[_Chunk]:
    for shard in part.readable:
        samples, _ = part.dataset.extent(shard)
        for start in range(0, samples, _CHUNK):
            yield _Chunk(shard, start, min(start + _CHUNK, samples))


def _check(part: CheckedPart, decode: bool, meter: Meter, chunk: _Chunk) -> int:
    """Check some samples. Return how many images have too many pixels to be decoded."""
    shard, too_large = chunk.shard, 0
    for position in range(chunk.start, chunk.stop):
        meter.add(1)
        try:
            with part.dataset.explained(shard, position):
                sample = part.dataset.reader(shard)[position]
        except ShardkitError as error:
            part.add(error, shard, position)
            continue
        for problem in _problems(part, sample):
            part.add(problem, shard, position)
        for name, image in _images(part, sample) if decode else ():
            try:
                damage = images.damage(image)
            except TooLargeError:
                too_large += 1
                continue
            if damage:
                broken = DamagedError(
                    "an image cannot be decoded completely",
                    key=sample["__key__"],
                    field=name,
                    expected=f"a complete image in {len(image):,} bytes",
                    found=damage,
                    fix="repair it in the source and convert again",
                )
                part.add(broken, shard, position)
    return too_large


def _problems(part: CheckedPart, sample: Sample) -> Iterator[SampleError]:
    """Missing fields, unknown fields, values of the wrong type, and labels without a class."""
    key, schema = sample.get("__key__"), part.dataset.schema
    for name, kind in schema.items():
        if name not in sample:
            if not kind.optional:
                yield SampleError("the sample has no value for a field", key=key, field=name)
        elif not _is_of(kind, sample[name]):
            yield SampleError(
                "a value is not of its field's type",
                key=key,
                field=name,
                expected=f"{kind.python} for {kind}",
                found=f"{type(sample[name]).__name__} {sample[name]!r:.60}",
            )
    for name in sorted(sample.keys() - schema.keys() - {"__key__"}):
        yield SampleError("the sample has a field that is not in the schema", key=key, field=name)
    for name, classes in part.manifest.class_names.items() if part.manifest else ():
        try:
            check_label(sample, name, classes)
        except SampleError as error:
            yield error


def _is_of(kind: FieldType, value: Any) -> bool:
    if isinstance(kind, Json):  # parsed from JSON text; `check` would reject NaN
        return isinstance(value, dict | list | str | int | float | None)
    try:
        kind.check(value)
    except TypeError:
        return False
    return True


def _images(part: CheckedPart, sample: Sample) -> Iterator[tuple[str, bytes]]:
    """Yield the images of a sample, with their fields."""
    for name, kind in part.dataset.schema.items():
        for image in images_in(kind, sample.get(name, ())):
            if isinstance(image, bytes):
                yield name, image
