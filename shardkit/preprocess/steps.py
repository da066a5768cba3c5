"""The steps for the images of a source, and the schema after them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardkit.codecs.guess import guessed_schema
from shardkit.codecs.image import is_mask_name
from shardkit.errors import SampleError, UsageError
from shardkit.options import ImageOptions
from shardkit.preprocess.images import ImageSteps
from shardkit.preprocess.items import Filtered
from shardkit.preprocess.on_image import box_fields, json_boxes, mask_fields
from shardkit.preprocess.transform import Transform, same
from shardkit.sample import Sample
from shardkit.schema import Array, FieldType, Image, Images, Schema
from shardkit.sources.base import Source, Stream, some_of


def steps_for(
    schema: Schema,
    options: ImageOptions,
    transform: Transform | None,
    raw: str,
    source: Source | Stream | None = None,
) -> ImageSteps | None:
    """Return the steps for samples with these fields; None if there are none.

    Masks are found by `mask_fields`, from names and a few samples of `source`. `raw` is how raw
    pixels are stored, "array" or "ppm". Raises UsageError for options for images if there are no
    images, and if it is not clear whether images are masks.
    """
    image_fields = [name for name, kind in schema.items() if isinstance(kind, Image)]
    lists = [name for name, kind in schema.items() if isinstance(kind, Images)]
    if lists and options.active:
        raise UsageError(
            f"options for images are not supported for lists of images: {lists[0]!r}",
            fix="remove the options; a function of --transform gets such images as a list of bytes",
        )
    if not image_fields and options.active:
        fields = ", ".join(f"{name}: {type(kind).__name__}" for name, kind in schema.items())
        raise UsageError("there are options for images, but no images", found=fields or None)
    changes = options.pixels or transform is not None or raw == "ppm"
    masks = mask_fields(image_fields, options.mask_fields, source if changes else None)
    images = tuple(name for name in image_fields if name not in masks)
    boxes = box_fields(schema, images, options.box_fields, source, ask=options.pixels)
    # Even without other steps, masks must not become JPEGs, nor images be turned upright without
    # their boxes.
    if not options.active and transform is None and not ((masks or boxes) and raw == "ppm"):
        return None
    if raw == "ppm" and options.format in ("png", "webp"):
        raise UsageError(f"this format cannot hold {options.format}", expected="keep, jpeg or raw")
    arrays = tuple(n for n, k in schema.items() if isinstance(k, Array) and is_mask_name(n))
    json = tuple(json_boxes(schema))
    return ImageSteps(options, images, masks, transform, raw, arrays, boxes, json)


def schema_after(steps: ImageSteps | None, source: Source | Stream) -> Schema:
    """Return the schema of the samples after their steps. A transform is tried on a few of them.

    Raises UsageError for a transform that gives different results for the same sample.
    """
    if steps is None:
        return source.schema
    fields = dict(source.schema)
    options = steps.options
    if options.format == "raw" and steps.raw == "array":
        square = options.resize_mode in ("exact", "crop") and options.upscale
        side = options.resize if square or options.resize_mode == "pad" else None
        for name in steps.images:
            fields[name] = Array("|u1", (side, side, 3), optional=fields[name].optional)
        for name in steps.masks:
            fields[name] = Array(optional=fields[name].optional)
    return Schema(fields) if steps.transform is None else _transformed(fields, steps, source)


def _transformed(
    fields: dict[str, FieldType], steps: ImageSteps, source: Source | Stream
) -> Schema:
    """Return the fields after a transform; those missing in some samples are optional."""
    made = list(_tried(steps, source))
    kinds: dict[str, FieldType] = {}
    for before, after in made:
        for name, value in after.items():
            if name != "__key__":
                kinds[name] = _kind(name, kinds.get(name) or fields.get(name), value)
        kinds |= {n: k for n, k in fields.items() if n not in before and n not in kinds}
    everywhere = set(kinds).intersection(*(after for _, after in made))
    return Schema(
        {n: k if n in everywhere else replace(k, optional=True) for n, k in kinds.items()}
        if made
        else fields
    )


def _kind(name: str, kind: FieldType | None, value: Any) -> FieldType:
    """Return the type of a field with this value: the previous type, if the value still fits."""
    if kind is not None:
        try:
            kind.check(value)
            return kind
        except TypeError:
            pass
    guessed = guessed_schema({name: value})[name]
    return replace(guessed, optional=kind.optional) if kind is not None else guessed


def _tried(steps: ImageSteps, source: Source | Stream) -> Iterator[tuple[Sample, Sample]]:
    """Yield a few samples before and after their steps, except those that fail or are dropped."""
    assert steps.transform is not None
    compared = False
    for name, sample, *_ in some_of(source):
        if isinstance(sample, SampleError):
            continue
        try:
            after = steps(sample).sample
            if not compared and not same(after, steps(sample).sample):
                raise UsageError(
                    "the transform gives different results for the same sample",
                    found=f"{steps.transform.name}, tried on {name}",
                    expected="equal results for equal samples, as they are stored only once",
                    fix="move random steps to training, or seed them from the sample's key",
                )
        except (SampleError, Filtered):  # the conversion will report it
            continue
        compared = True
        yield sample, after
