"""Which steps the samples of a source go through, and which fields they have after them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardkit.errors import SampleError, UsageError
from shardkit.options import ImageOptions
from shardkit.preprocess.filtered import Filtered
from shardkit.preprocess.images import ImageSteps
from shardkit.preprocess.transform import Transform, same
from shardkit.sample import Sample
from shardkit.schema import Array, FieldType, Image, Schema
from shardkit.sources.base import Source

_PROBES = 16  # samples at most that are tried until one tells what a transform makes
_MASK = "mask"


def steps_for(
    schema: Schema, options: ImageOptions, transform: Transform | None, raw: str
) -> ImageSteps | None:
    """The steps for samples with these fields; None if there is nothing to do.

    A field called `mask`, or `..._mask`, is the mask of the picture of that name, or of the first.
    `raw` says what raw pixels are stored as, "array" or "ppm". Raises UsageError for options of
    pictures where there are none.
    """
    if not options.active and transform is None:
        return None
    images = [name for name, kind in schema.items() if isinstance(kind, Image)]
    pictures = [name for name in images if name != _MASK and not name.endswith("_" + _MASK)]
    if not pictures:
        pictures, masks = images, {}  # whatever they are called
    else:
        masks = {n: _picture_of(n, pictures) for n in images if n not in pictures}
    if not pictures and options.active:
        raise UsageError(
            "there are options for pictures, and no pictures", found=", ".join(schema) or "no field"
        )
    return ImageSteps(options, tuple(pictures), masks, transform, raw)


def _picture_of(mask: str, pictures: list[str]) -> str:
    name = mask.removesuffix("_" + _MASK)
    return name if name in pictures else "image" if "image" in pictures else pictures[0]


def schema_after(steps: ImageSteps | None, source: Source) -> Schema:
    """The fields of the samples after their steps. A transform is tried on a sample, twice.

    Raises UsageError for one that makes two things of it, SampleError if none can be had.
    """
    if steps is None:
        return source.schema
    fields = dict(source.schema)
    if steps.options.format == "raw" and steps.raw == "array":
        shape = (*_fixed_size(steps.options), 3)
        for name in steps.pictures:
            fields[name] = Array("|u1", shape, optional=fields[name].optional)
        for name in steps.masks:
            fields[name] = Array(optional=fields[name].optional)
    if steps.transform is None:
        return Schema(fields)
    return _transformed(fields, steps, source)


def _fixed_size(options: ImageOptions) -> tuple[int | None, int | None]:
    """Height and width, where all pictures have the same."""
    square = options.resize_mode in ("exact", "crop") and options.upscale
    if square or options.resize_mode == "pad":
        return options.resize, options.resize
    return None, None


def _transformed(fields: dict[str, FieldType], steps: ImageSteps, source: Source) -> Schema:
    tried = _tried(steps, source)
    if tried is None:
        return Schema(fields)
    before, after = tried
    kinds: dict[str, FieldType] = {}
    for name, kind in fields.items():
        if name in after:
            kinds[name] = _kind(name, kind, after[name])
        elif name not in before:
            kinds[name] = kind  # one that some samples have
    guessed = Schema.of({n: value for n, value in after.items() if n not in fields})
    return Schema({**kinds, **guessed})


def _kind(name: str, kind: FieldType, value: Any) -> FieldType:
    """The type of a field with this value: the one it had, if that still fits."""
    try:
        kind.check(value)
    except TypeError:
        return replace(Schema.of({name: value})[name], optional=kind.optional)
    return kind


def _tried(steps: ImageSteps, source: Source) -> tuple[Sample, Sample] | None:
    """A sample before and after its steps; None if the first ones are all dropped or bad."""
    assert steps.transform is not None
    for index in range(min(len(source), _PROBES)):
        try:
            sample = source[index]
            after, again = steps(sample).sample, steps(sample).sample
        except (SampleError, Filtered):  # the conversion will meet it again, and say so
            continue
        if not same(after, again):
            raise UsageError(
                "the transform makes two things of the same sample",
                found=f"{steps.transform.name}, tried on {source.name(index)}",
                expected="equal results for equal samples: they are stored once and for all",
                fix="leave what is random to training, or seed it from the sample's key",
            )
        return sample, after
    return None
