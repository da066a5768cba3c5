"""The steps for the images of a source: filters, resizing, encoding, masks, a user's transform."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs import masks
from shardkit.codecs.boxes import boxes_in, turned_boxes
from shardkit.codecs.header import Header
from shardkit.codecs.image import NotAnImageError, is_mask_name, unusable
from shardkit.codecs.media import guessed_schema
from shardkit.codecs.shapes import SEGMENTATION, kept_rows, moved_shapes
from shardkit.codecs.tiff import is_georeferenced
from shardkit.codecs.window import Pixels
from shardkit.errors import SampleError, UsageError
from shardkit.options import ImageOptions
from shardkit.preprocess.items import Filtered, Shaped
from shardkit.preprocess.on_image import (
    OnImage,
    box_fields,
    json_boxes,
    mask_fields,
    shape_fields,
)
from shardkit.preprocess.single_image import RESIZED, Image, ImageProcessor, codec_versions
from shardkit.preprocess.transform import Transform, same
from shardkit.sample import JsonText, Sample
from shardkit.schema import Array, FieldType, Images, Schema
from shardkit.schema import Image as ImageField
from shardkit.sources.base import Source, Stream, some_of

_CHANGED = "changed by the transform"
_one_transform = threading.Lock()  # a user's function need not be thread-safe


@dataclass(frozen=True)
class ImageSteps:
    """The steps for samples with these fields: images, and masks mapped to their images."""

    options: ImageOptions
    images: tuple[str, ...]
    masks: dict[str, str]
    transform: Transform | None = None
    raw: str = "array"  # how raw pixels are stored: "array", or "ppm" (then masks, too)
    arrays: tuple[str, ...] = ()  # arrays with names of masks, which are left unchanged
    boxes: dict[str, OnImage] = field(default_factory=dict)
    json: tuple[str, ...] = ()  # JSON fields with names of boxes, left unchanged
    shapes: dict[str, str] = field(default_factory=dict)  # segmentation, keypoints: their images

    @functools.cached_property
    def _steps(self) -> ImageProcessor:
        pixels = self.options.pixels or self.transform is not None
        return ImageProcessor(self.options, self.raw, pixels, self.transform is not None)

    def __call__(self, sample: Sample) -> Shaped:
        """Apply the steps. Raises Filtered, and SampleError for invalid or unstorable images."""
        found = {n: self._plan(sample, n) for n in self.images if n in sample}
        drawn = [n for n, of in self.masks.items() if n in sample and of in found]
        if self.transform is not None:
            return self._transformed(sample, found, drawn)
        shaped = Shaped(dict(sample))
        self._move_objects(shaped, found)
        for name, image in found.items():
            shaped.sample[name] = self._stored(shaped, name, image)
        for name in drawn:
            image = found[self.masks[name]]
            with _errors_of(sample, name):
                if self._mask_changes(image):
                    mask = masks.mask_of(sample[name], image.header, image.window)
                    shaped.sample[name] = self._mask_stored(mask)
                else:
                    self._steps.check(sample[name])
        return shaped

    def notes(self) -> list[str]:
        """Return notes on what a user may not expect."""
        notes = [
            f"{mask!r} is taken as the mask of {of!r}: same geometry, nearest pixels, lossless"
            for mask, of in self.masks.items()
            if self._steps.pixels or self.raw == "ppm"
        ]
        if self.options.resize is not None:
            notes += [f"{name!r} is an array, so it is not resized" for name in self.arrays]
        if self._steps.pixels:
            notes += [on.note(name) for name, on in self.boxes.items()]
            along = {name for on in self.boxes.values() for name in on.others}
            notes += [
                f"{name!r} is moved with {of!r}"
                for name, of in self.shapes.items()
                if name not in along
            ]
            notes += [f"{name!r} is JSON: boxes in it are not moved" for name in self.json]
        return notes

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that determine the bytes."""
        return codec_versions()

    def kind_of(self, data: bytes) -> tuple[str, int]:
        """Return the type and the number of channels of an image's pixels after the steps."""
        image = self._steps.plan(data)
        header = image.header
        deep = header.dtype, header.channels * header.pages
        return deep if image.has_values else ("uint8", 3)

    def _plan(self, sample: Sample, name: str) -> Image:
        with _errors_of(sample, name):
            image = self._steps.plan(sample[name])
        unwanted = _unwanted(image.header, self.options)
        if unwanted is not None:
            raise Filtered(*unwanted, sample["__key__"])
        return image

    def _stored(self, shaped: Shaped, name: str, image: Image, pixels: Pixels | None = None) -> Any:
        """Return an image as it is to be stored, and count it."""
        with _errors_of(shaped.sample, name):
            value, done = self._steps.stored(image, pixels)
        size = int(value.nbytes) if isinstance(value, np.ndarray) else len(value)
        shaped.images.update({done: 1, "bytes in": len(image.data), "bytes out": size})
        if image.reasons and image.header.format == "tiff" and is_georeferenced(image.data):
            shaped.ignored[
                "GeoTIFFs whose tags (coordinates, ...) are lost, as they are re-encoded"
            ] += 1
        shaped.reasons.update(reason for reason in image.reasons if reason != RESIZED)
        return value

    def _move_objects(self, shaped: Shaped, found: dict[str, Image]) -> None:
        """Transform boxes and shapes with their images, and count boxes that a crop removes."""
        sample = shaped.sample
        for name, of in self.shapes.items():
            if name in sample and of in found and self._turns_or_moves(image := found[of]):
                size = (image.header.width, image.header.height)
                window = None if image.is_whole else image.window
                with _errors_of(sample, name):
                    sample |= moved_shapes(
                        {name: sample[name]}, image.header.orientation, size, window
                    )
        for name, on in self.boxes.items():
            if name in sample and on.image in found:
                on.check(sample, name)
                if self._turns_or_moves(image := found[on.image]):
                    self._move_boxes(shaped, name, image)
        if SEGMENTATION in self.shapes and SEGMENTATION in sample:
            sample[SEGMENTATION] = JsonText.of(sample[SEGMENTATION])

    def _turns_or_moves(self, image: Image) -> bool:
        upright = self.raw == "ppm"  # formats that store JPEGs turn images upright
        return image.moves or (upright and image.header.orientation != 1)

    def _move_boxes(self, shaped: Shaped, name: str, image: Image) -> None:
        size = (image.header.width, image.header.height)
        boxes = turned_boxes(shaped.sample[name], image.header.orientation, size)
        if not image.is_whole:
            boxes, kept = boxes_in(boxes, image.window)
            if len(kept) > len(boxes):
                for other in shaped.sample.keys() & self.boxes[name].others:
                    shaped.sample[other] = kept_rows(shaped.sample[other], kept)
                shaped.ignored["boxes of which a crop left nothing"] = len(kept) - len(boxes)
        shaped.sample[name] = boxes

    def _mask_changes(self, image: Image) -> bool:
        """Return whether the mask of an image cannot be stored unchanged."""
        return image.moves or self._steps.as_array or self.raw == "ppm"

    def _mask_stored(self, mask: Any) -> Any:
        if self._steps.as_array:
            return masks.values_of(mask)
        return masks.ppm_mask(mask) if self.raw == "ppm" else masks.encode_mask(mask)

    def _transformed(self, sample: Sample, found: dict[str, Image], drawn: list[str]) -> Shaped:
        """Call the user's function with pixels, and store what it returns."""
        assert self.transform is not None
        moved = Shaped(dict(sample))
        self._move_objects(moved, found)
        arguments = moved.sample
        for name, image in found.items():
            with _errors_of(sample, name):
                arguments[name] = _read_only(self._steps.made(image))
        on_image = {}
        for name in drawn:
            image = found[self.masks[name]]
            with _errors_of(sample, name):
                on_image[name] = masks.mask_of(sample[name], image.header, image.window)
        for name, mask in on_image.items():
            arguments[name] = _read_only(masks.values_of(mask))
        with _one_transform:
            made = self.transform(dict(arguments))
        if made is None:
            raise Filtered("dropped by the transform", self.transform.name, sample["__key__"])
        shaped = Shaped(made, ignored=moved.ignored)
        for name, image in found.items():
            pixels = made.get(name)
            if isinstance(pixels, np.ndarray):
                if pixels is not arguments[name]:
                    pixels = _as_image(pixels, sample, name)
                    image.reasons.append(_CHANGED)
                made[name] = self._stored(shaped, name, image, pixels)
        for name, mask in on_image.items():
            values, image = made.get(name), found[self.masks[name]]
            with _errors_of(sample, name):
                if values is arguments[name]:
                    changes = self._mask_changes(image)
                    made[name] = self._mask_stored(mask) if changes else sample[name]
                elif isinstance(values, np.ndarray):
                    made[name] = self._mask_stored(masks.with_values(mask, values))
        return shaped


def _unwanted(header: Header, options: ImageOptions) -> tuple[str, str] | None:
    """Return why an option drops an image, and its size; None for an image to keep."""
    short, long = sorted((header.width, header.height))
    size = f"{header.width} x {header.height}"
    if options.min_size is not None and short < options.min_size:
        return f"smaller than {options.min_size}", size
    if options.max_aspect is not None and long > options.max_aspect * short:
        return f"aspect over {options.max_aspect:g}", size
    if options.max_pixels is not None and short * long > options.max_pixels:
        return f"more than {options.max_pixels:,} pixels", size
    return None


@contextlib.contextmanager
def _errors_of(sample: Sample, field: str) -> Iterator[None]:
    """Turn errors of an image into errors of its sample."""
    try:
        yield
    except NotAnImageError as error:
        raise unusable(error, sample["__key__"], field) from error
    except ValueError as error:
        raise SampleError(
            "the image cannot be stored",
            key=sample["__key__"],
            field=field,
            found=str(error),
            fix="resize it, choose another --image-format, or drop it with --on-error skip",
        ) from error


def _read_only(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values = values.view()
    values.flags.writeable = False
    return values


def _as_image(values: npt.NDArray[Any], sample: Sample, name: str) -> Pixels:
    """Return the pixels that a transform returned; raises SampleError for anything else."""
    if values.dtype == np.uint8 and values.ndim == 2:
        values = np.repeat(values[:, :, None], 3, axis=2)
    if values.dtype != np.uint8 or values.ndim != 3 or values.shape[2] != 3 or not values.size:
        raise SampleError(
            "the transform returned something that is not an image",
            key=sample["__key__"],
            field=name,
            expected="uint8 pixels, (height, width, 3) or (height, width)",
            found=f"{values.dtype} {values.shape}",
        )
    return np.ascontiguousarray(values)


# --- the steps of a source, and the schema after them -------------------------------------------


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
    image_fields = [name for name, kind in schema.items() if isinstance(kind, ImageField)]
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
    shapes = shape_fields(schema, images) if options.boxes != "none" else {}
    # Even without other steps, masks must not become JPEGs, nor images be turned upright without
    # what is on them.
    on_image = masks or boxes or shapes
    if not options.active and transform is None and not (on_image and raw == "ppm"):
        return None
    if raw == "ppm" and options.format in ("png", "webp"):
        raise UsageError(f"this format cannot hold {options.format}", expected="keep, jpeg or raw")
    arrays = tuple(n for n, k in schema.items() if isinstance(k, Array) and is_mask_name(n))
    json = tuple(json_boxes(schema))
    return ImageSteps(options, images, masks, transform, raw, arrays, boxes, json, shapes)


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
        kinds = _raw_kinds(steps, source)
        for name in steps.images:
            found = kinds.get(name) or {("uint8", 3)}
            array = Array()
            if len(found) == 1:
                ((dtype, channels),) = found
                array = Array(np.dtype(dtype).str, (side, side, channels))
            fields[name] = replace(array, optional=fields[name].optional)
        for name in steps.masks:
            fields[name] = Array(optional=fields[name].optional)
    return Schema(fields) if steps.transform is None else _transformed(fields, steps, source)


def _raw_kinds(steps: ImageSteps, source: Source | Stream) -> dict[str, set[tuple[str, int]]]:
    """Return the types and numbers of channels that the images of a few samples become."""
    found: dict[str, set[tuple[str, int]]] = {}
    for _, sample, *_ in some_of(source) if steps.transform is None else ():
        if isinstance(sample, SampleError):
            continue
        for name in steps.images:
            with contextlib.suppress(NotAnImageError):  # the conversion will report it
                if name in sample:
                    found.setdefault(name, set()).add(steps.kind_of(sample[name]))
    return found


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
                    fix="move random steps to training, or seed them from the sample's key",
                )
        except (SampleError, Filtered):  # the conversion will report it
            continue
        compared = True
        yield sample, after
