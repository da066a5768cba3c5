"""The transforms of a dataset: by field, checked against the schema, applied to many samples.

`open` opens a dataset whose samples go through them as they are read.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.crop import has_crop_many
from shardkit.dataset.dataset import Dataset
from shardkit.dataset.find import open_dataset
from shardkit.errors import ShardkitError, UsageError, near, warn
from shardkit.helpers.extras import extra
from shardkit.helpers.keywords import takes
from shardkit.sample import Sample
from shardkit.schema import Array, Audio, FieldType, Image, Schema, Video
from shardkit.storage import fs
from shardkit.transforms import functions
from shardkit.transforms.calls import Call, name_of
from shardkit.transforms.chain import Chain, Job, MediaJob, Output, Stage
from shardkit.transforms.direct import Direct, Planned
from shardkit.transforms.draws import Draws
from shardkit.transforms.functions import NAMES, VALUE
from shardkit.transforms.labels import MultiHot
from shardkit.transforms.media import AudioJob, VideoJob
from shardkit.transforms.on_image import (
    IMAGE,
    MASK,
    check_mask,
    check_rows,
    decoded_mask,
    is_on_image,
    kinds_given,
    kinds_of,
    with_what_is_on,
)
from shardkit.transforms.steps import (
    CenterCrop,
    Decode,
    Geometric,
    Kind,
    MediaTransform,
    Normalize,
    RandomResizedCrop,
    Size,
    Transform,
    are_channels,
)

Step = Transform | Callable[..., Any]

_MEDIA: dict[type[FieldType], type[MediaJob]] = {Audio: AudioJob, Video: VideoJob}
_OTHERS = "its transforms are not crops, resizes to one size, flips and Normalize"
_STREAMS = 1 << 16  # random streams reserved per chain: more than it has steps


class Transforms:
    """The transforms of the samples of a dataset, applied before batching.

    A field has one transform, or a list of transforms that run in order. Transforms of images take
    encoded images or pixels, numbers (height, width, channels), up to 4 channels unless `Decode`
    comes first with options. In a tuple of fields, the first is the image. The others are masks,
    boxes, `segmentation` or `keypoints`, which get the same geometry, or arrays with one row per
    box.

    Any other callable takes the value of the field; images are decoded first, unless a parameter is
    annotated as bytes. Images are given as `functions` describes. For a tuple of fields, it takes
    the values as keyword arguments, and returns a dict with the same names. A function instead of a
    dict takes whole samples. It is called from several threads at the same time. Transforms of
    audio and video come before functions.

    >>> from shardkit.schema import Int
    >>> from shardkit.transforms.steps import RandomResizedCrop
    >>> schema = Schema({"image": Image(), "label": Int()})
    >>> Transforms({"image": RandomResizedCrop(224), "label": float}, schema).outputs()
    {'image': ((224, 224, 3), dtype('uint8'))}
    """

    def __init__(self, transforms: Any, schema: Schema) -> None:
        self._schema = schema
        self.planned: dict[str, Direct] = {}  # by field of images: what leaves them encoded
        self.after: dict[str, tuple[Call, ...]] = {}  # functions of their decoded batches
        self.chains: list[Chain] = []
        if not isinstance(transforms, Mapping):
            self.chains.append(_whole(transforms, schema))
            return
        taken: set[str] = set()
        for number, (given, steps) in enumerate(transforms.items()):
            fields = _fields(given, schema)
            twice = sorted(taken.intersection(fields))
            if twice:
                raise UsageError(
                    f"field {twice[0]!r} has transforms in two places",
                    fix="list all of them in one place, in order",
                )
            made = _steps(given, steps)
            fields = _with_what_moves(given, fields, transforms, schema)
            taken.update(fields)
            self.chains.append(_chain(given, fields, made, schema, number))
        for chain in self.chains:
            _check_left(chain, self.chains, schema)

    @property
    def fields(self) -> frozenset[str]:
        """The fields that are transformed."""
        return frozenset(name for chain in self.chains for name in chain.fields)

    @property
    def lists(self) -> frozenset[str]:
        """The fields of boxes, and those with a row per box, of any number in each sample."""
        return frozenset(name for chain in self.chains for name in chain.lists)

    @property
    def images(self) -> frozenset[str]:
        """The fields whose results are images, channels last, and not from a function."""
        return frozenset(
            chain.fields[0]
            for chain in self.chains
            if not isinstance(chain.stages[-1], Call | AudioJob)
        )

    @property
    def of_functions(self) -> frozenset[str]:
        """The fields of images whose results are from a function, which may be images or not."""
        calls = (chain.stages[-1] for chain in self.chains)
        return frozenset(name for call in calls if isinstance(call, Call) for name in call.images)

    @property
    def encoded(self) -> frozenset[str]:
        """The fields that are decoded as 8-bit RGB images."""
        firsts = ((chain.fields[0], chain.stages[0]) for chain in self.chains)
        return frozenset(
            name
            for name, stage in firsts
            if isinstance(stage, Job) and stage.decode.is_rgb
            if isinstance(self._schema[name], Image)
        )

    @property
    def bfloat16_fields(self) -> frozenset[str]:
        """The fields of images that contain bits of bfloat16."""
        last = ((chain.fields[0], chain.stages[-1]) for chain in self.chains)
        return frozenset(name for name, s in last if isinstance(s, Normalize) and s.is_bfloat16)

    def typed(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return a sample or a batch with the type bfloat16 of ml_dtypes instead of its bits.

        Torch has its own. Raises UsageError if ml_dtypes is not installed.
        """
        found = dict(values)
        for name in self.bfloat16_fields & values.keys():
            with extra("bfloat16", "bfloat16 in NumPy arrays", ', or dtype="float32"'):
                import ml_dtypes

            value, kind = values[name], np.dtype(ml_dtypes.bfloat16)
            found[name] = (
                value.view(kind)
                if isinstance(value, np.ndarray)
                else [one.view(kind) if isinstance(one, np.ndarray) else one for one in value]
            )
        return found

    def in_numpy(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return a sample or a batch, `typed`, with arrays in place of the tensors of functions."""
        found = self.typed(values)
        found.update((n, functions.in_numpy(found[n])) for n in self.fields & found.keys())
        return found

    def outputs(self) -> dict[str, Output]:
        """Return shape and dtype of the fields for which they are known before reading.

        Images are (height, width, channels), masks (height, width). Other results are in the
        samples. bfloat16, which NumPy lacks, is uint16.
        """
        return {name: kind for chain in self.chains for name, kind in chain.outputs.items()}

    def direct(self) -> tuple[Direct, ...] | None:
        """Return what transforms chunks of columns without samples; None if one field needs them.

        It needs the extension. Each chain must be a single job of built-in transforms, whose result
        has a known size, and then at most `Normalize`; its images are encoded, or pixels of one
        size. A row is done if all say so; others go through `apply`.
        """
        made = [chain.direct for chain in self.chains]
        known = all(d is not None and self._has_rows(d) for d in made)
        return tuple(d for d in made if d is not None) if has_crop_many() and known else None

    def for_batches(self) -> Transforms:
        """Return the same transforms, but a decoder of whole batches makes pixels of JPEGs.

        These are the images of fields that `direct` can do, whose functions, if there are any, take
        a batch. Raises UsageError if there is no such field.
        """
        made, reasons = copy.copy(self), []
        made.chains, made.planned, made.after = [*self.chains], {}, {}
        for number, chain in enumerate(self.chains):
            image, (without, calls) = chain.fields[0], chain.without_calls()
            direct = without.direct
            if not isinstance(self._schema[image], Image):
                continue
            if direct is None:
                reasons.append(f"{image!r}: {_OTHERS}")
            elif reason := _not_of_batches(chain.fields, calls):
                reasons.append(f"{image!r}: {reason}")
            else:
                made.chains[number] = without
                made.planned[image], made.after[image] = direct, calls
        if not made.planned:
            raise UsageError(
                'no field has images for decode="gpu"',
                expected="a field of encoded images, with crops or resizes to one size",
                found="; ".join(reasons) or "no transforms of images",
                fix='transforms={"image": [shardkit.RandomResizedCrop(224), ...]}',
            )
        for reason in reasons:
            warn(f'decode="gpu" leaves images to the processor: {reason}')
        return made

    def _has_rows(self, direct: Direct) -> bool:
        kind = self._schema[direct.fields[0]]
        pixels = isinstance(kind, Array) and kind.dtype is not None
        return isinstance(kind, Image) if direct.size is None else pixels

    def apply(
        self, samples: Sequence[Sample | None], draws: Draws, out: Mapping[str, npt.NDArray[Any]]
    ) -> dict[int, ShardkitError]:
        """Transform all samples that are not None; returns the errors of those that fail.

        `draws` has a row for each sample. The result of a field in `out` is written to the sample's
        row in its array, whose shape and dtype are those of `outputs`; other results replace the
        values in the samples.
        """
        errors: dict[int, ShardkitError] = {}
        for chain in self.chains:
            image = chain.fields[0]
            left = {
                row: sample
                for row, sample in enumerate(samples)
                if sample is not None and row not in errors
                if not isinstance(sample.get(image), Planned)
            }
            errors.update(chain.apply(left, draws, out))
        return errors

    def __call__(self, sample: Sample) -> Sample:
        """Transform one sample, with new random numbers. Raises the error if it fails."""
        seed, zero = int.from_bytes(os.urandom(8), "little"), np.zeros(1, np.int64)
        for error in self.apply([sample], Draws(seed, zero, zero), {}).values():
            raise error
        return self.typed(sample)


@takes()
def open(
    path: str | os.PathLike[str],
    *,
    transforms: Mapping[Any, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Open a dataset folder, a folder of shards without a manifest, or a single shard.

    path: a path, or a URL.
    transforms: transforms by field, as in `shardkit.torch.Loader`. Random transforms draw new
        numbers each time a sample is read.
    storage_options: for a URL: credentials, endpoints and more, by the names of obstore or fsspec.

    Raises NotFoundError if the path does not exist, FormatError if it is not a dataset,
    DamagedError if the dataset is damaged, and UsageError if the transforms do not fit the dataset.
    """
    with fs.using(storage_options, path):
        dataset = open_dataset(path)
    if transforms is not None:
        dataset.transform = Transforms(transforms, dataset.schema)
    return dataset


def _not_of_batches(fields: tuple[str, ...], calls: Sequence[Call]) -> str:
    """Return why batches cannot be made of encoded images and these functions; "" if they can."""
    if not has_crop_many():
        return "shardkit was installed without its extension"
    if calls and len(fields) > 1:
        return f"a function of several fields, {calls[0]!r}"
    return next((f"{call!r} draws for each sample" for call in calls if call.draws), "")


def _fields(given: Any, schema: Schema) -> tuple[str, ...]:
    fields = given if isinstance(given, tuple) else (given,)
    for name in fields:
        if name not in schema:
            raise UsageError(
                f"there is no field {name!r} to transform", expected=near(name, schema)
            )
    if not fields or len(set(fields)) < len(fields):
        raise UsageError(
            "transforms need a field, or a tuple of different fields", found=repr(given)
        )
    return fields


def _steps(given: Any, steps: Any) -> list[Step]:
    made = _listed(steps)
    for step in made:
        is_class = isinstance(step, type) and (
            issubclass(step, Transform | MultiHot)
            or hasattr(step, "forward")
            or functions.library_of(step) != ""
        )
        if is_class or not (isinstance(step, Transform) or callable(step)):
            expected = "an instance of one of shardkit's, or a function"
            raise UsageError(f"invalid transform of {given!r}", found=repr(step), expected=expected)
    if not made:
        raise UsageError(f"there is no transform for {given!r}", fix="leave the field out")
    return made


def _with_what_moves(
    given: Any, fields: tuple[str, ...], transforms: Mapping[Any, Any], schema: Schema
) -> tuple[str, ...]:
    """Return the fields, and what is on the image if it alone is moved, by transforms of ours.

    Decoding moves it, too: EXIF turns it upright. Masks beside it remain encoded then.
    """
    images = [key for key in transforms if key in schema and not is_on_image(key, schema[key])]
    cut = [key for key, steps in transforms.items() if _has(steps, Geometric)]
    turned = [n for n in images if isinstance(schema[n], Image) and _has(transforms[n], Decode)]
    if (cut or turned) != [given] or given not in images:
        return fields
    found = with_what_is_on(fields, schema)
    if not cut:
        kinds = kinds_of(found[1:], schema)
        found = (*fields, *(n for n, kind in zip(found[1:], kinds, strict=True) if kind != MASK))
    named = {name for key in transforms for name in (key if isinstance(key, tuple) else (key,))}
    own = all(isinstance(step, Transform) for step in _listed(transforms[given]))
    return found if own and named.isdisjoint(found[1:]) else fields


def _has(steps: Any, kind: type[Transform]) -> bool:
    return any(isinstance(step, kind) for step in _listed(steps))


def _listed(steps: Any) -> list[Any]:
    return list(steps) if isinstance(steps, list | tuple) else [steps]


def _chain(
    given: Any,
    fields: tuple[str, ...],
    steps: list[Step],
    schema: Schema,
    number: int,
    whole: bool = False,
) -> Chain:
    size, kinds, pixels = None, tuple[str, ...](), Decode().known(None, None)
    way = functions.SAMPLE if whole else NAMES if isinstance(given, tuple) else VALUE
    job = _MEDIA.get(type(schema[fields[0]]))
    if job is not None and isinstance(steps[0], Transform):
        media = _media_stages(given, steps, job, number * _STREAMS)
        return Chain(fields, media)
    encoded = isinstance(schema[fields[0]], Image) and not isinstance(steps[0], Transform)
    decoded = encoded and not functions.takes_bytes(steps[0])
    if any(isinstance(step, Transform) for step in steps):
        kinds = kinds_of(fields[1:], schema)
    elif decoded or _is_pixels(schema[fields[0]]):
        kinds = kinds_given(fields[1:], schema)
    if decoded:  # a mask has values, not colours
        is_mask = is_on_image(fields[0], schema[fields[0]])
        steps = [decoded_mask if is_mask else Decode(), *steps]
    if isinstance(steps[0], Transform):
        decode = steps[0] if isinstance(steps[0], Decode) else Decode()
        size = _size(steps[0], fields[0], schema[fields[0]], decode)
        pixels = _pixels(schema[fields[0]], decode)
        for name, kind in zip(fields[1:], kinds, strict=True):
            if kind == MASK:
                check_mask(name, schema[name])
    found = {fields[0]: IMAGE} if _is_image(steps, schema[fields[0]]) else {}
    found |= zip(fields[1:], kinds, strict=False)
    # Decoding draws no numbers: it takes no step's stream.
    stages = _stages(given, steps, number * _STREAMS - decoded, way, found)
    if any(isinstance(step, RandomResizedCrop | CenterCrop) for step in steps):
        check_rows(fields, kinds, schema)
    _check_channels(given, stages, pixels)
    return Chain(fields, stages, size, kinds, pixels, whole)


def _whole(function: Any, schema: Schema) -> Chain:
    """Return the chain of a function of whole samples, whose images are decoded."""
    if not callable(function) or isinstance(function, Transform | type):
        raise UsageError(
            "transforms are given by field, or as a function of samples",
            expected='a dict such as {"image": shardkit.RandomResizedCrop(224)}',
            found=repr(function),
        )
    named = [name for name, kind in schema.items() if not is_on_image(name, kind)]
    encoded = [name for name in named if isinstance(schema[name], Image)]
    pixels = [name for name in named if _is_pixels(schema[name])]
    fields = tuple(dict.fromkeys([*encoded, *pixels, *schema]))
    return _chain(fields, fields, [function], schema, 0, whole=True)


def _check_left(chain: Chain, chains: Sequence[Chain], schema: Schema) -> None:
    """Raise UsageError if a mask or boxes would stay where they were while their image moves."""
    image = chain.fields[0]
    steps = [step for stage in chain.stages if isinstance(stage, Job) for step in stage.steps]
    calls = [stage for stage in chain.stages if isinstance(stage, Call) and stage.images]
    if not (steps or calls) or is_on_image(image, schema[image]):
        return
    random = any(step.numbers for step in steps)  # then the same steps elsewhere draw other numbers
    for name, kind in schema.items():
        along = any(name in other.fields[1:] for other in chains)
        alone = any(name == other.fields[0] for other in chains)
        if is_on_image(name, kind) and not along and (random or not alone):
            fields = with_what_is_on(chain.fields, schema)
            together = f"transforms={{{fields}: [...]}}"
            if calls:
                together = (
                    f"transforms={calls[0]!r}, if it takes whole samples, as a function of yours,"
                    " or a Compose of torchvision's v2 or of albumentations, may"
                )
            raise UsageError(
                f"the image {image!r} would be moved, but not what is on it: {name!r}",
                found=f"{', '.join(map(repr, [*steps, *calls])):.200} for {image!r}",
                fix=f"{together}; or leave {name!r} out of fields=[...]",
            )


def _media_stages(
    given: Any, steps: list[Step], kind: type[MediaJob], stream: int
) -> tuple[Stage, ...]:
    """Return the transforms of audio or video as one job, and the functions after it."""
    if isinstance(given, tuple):
        raise UsageError(
            "transforms of audio and video take a single field", found=repr(given),
            fix="transform a single field, or use a function that decodes the values itself",
        )  # fmt: skip
    own = list(takewhile(lambda step: isinstance(step, (Decode, *kind.takes)), steps))
    for step in own:
        if isinstance(step, Decode) and step != Decode():
            raise UsageError(f"the options of {step!r} are for images", found=repr(given))
    stages: list[Stage] = [
        kind(stream, tuple(step for step in own if not isinstance(step, Decode)))
    ]
    for number, step in enumerate(steps[len(own) :], stream + len(own)):
        if isinstance(step, Transform):
            raise UsageError(
                f"{step!r} is not for {given!r}, or comes after a function",
                expected="transforms of its type, then functions",
            )
        stages.append(Call(step, number, kinds={given: IMAGE} if kind is VideoJob else None))
    return tuple(stages)


def _stages(
    given: Any, steps: list[Step], stream: int, way: str, kinds: Mapping[str, str]
) -> tuple[Stage, ...]:
    """Return the steps, merging neighbours into one job if possible. Each has a random stream."""
    stages: list[Stage] = []
    for number, step in enumerate(steps, stream):
        last = stages[-1] if stages else None
        if isinstance(last, Normalize) and (isinstance(step, Transform) or last.is_bfloat16):
            name = repr(step) if isinstance(step, Transform) else name_of(step)
            raise UsageError(
                f"{name} of {given!r} comes after {last!r}, whose results are not pixels",
                fix="normalize last",
            )
        if not isinstance(step, Transform):
            stages.append(Call(step, number, way, kinds))
            continue
        if isinstance(step, MediaTransform):
            raise UsageError(
                f"{step!r} is not for {given!r}, or comes after a function",
                expected="a field of audio or video, whose transforms come before functions",
            )
        decodes = isinstance(step, Decode) and step != Decode()
        if decodes and any(isinstance(stage, Job) for stage in stages):
            what = f"{step!r} of {given!r} comes after transforms that decode"
            raise UsageError(what, fix="give it first")
        if not isinstance(last, Job) or not last.takes(step):
            last = Job(number, decode=step if isinstance(step, Decode) else Decode())
            stages.append(last)
        if isinstance(step, Geometric):
            stages[-1] = replace(last, steps=(*last.steps, step))
        elif isinstance(step, Normalize):
            stages.append(step)
    return tuple(stages)


def _pixels(kind: FieldType, decode: Decode) -> Kind | None:
    """Return the number of channels and the type of decoded images, if all have the same."""
    if not isinstance(kind, Array):
        return decode.known(None, None)
    channels = kind.shape[2] if kind.shape else None
    known = channels is not None and kind.dtype is not None
    # Otherwise, "uint8" leaves each array as it is.
    return decode.known(channels, kind.dtype) if known or not decode.is_rgb else None


def _check_channels(given: Any, stages: Sequence[Stage], pixels: Kind | None) -> None:
    """Raise UsageError for a `Normalize` of another number of channels."""
    last = stages[-1]
    known = pixels is not None and not any(isinstance(stage, Call) for stage in stages)
    if pixels and known and isinstance(last, Normalize) and len(last.mean) != pixels[0]:
        raise UsageError(
            f"{last!r:.200} of {given!r} is for images of {len(last.mean)} channels",
            found=f"{pixels[0]} channels, of {pixels[1]}",
            fix="give a mean and a std for each channel",
        )


def _is_image(steps: list[Step], kind: FieldType) -> bool:
    """Return whether functions get pixels: decoded ones, or those of a field of pixels."""
    return isinstance(steps[0], Transform) or _is_pixels(kind)


def _is_pixels(kind: FieldType) -> bool:
    """Return whether a field has images that are decoded already, by its type."""
    shape = kind.shape if isinstance(kind, Array) and kind.dtype is not None else None
    return shape is not None and len(shape) == 3 and shape[2] in (1, 3, 4)


def _size(step: Transform, name: str, kind: FieldType, decode: Decode) -> Size | None:
    """Return the size of a field's images, if known. Raises UsageError for other fields."""
    if isinstance(kind, Image):
        return None
    if isinstance(kind, Array) and (kind.dtype is None or np.dtype(kind.dtype).kind in "uif"):
        shape = kind.shape or (None, None, None)
        if len(shape) == 3 and are_channels(shape[2], decode):
            height, width, _ = shape
            return None if height is None or width is None else (height, width)
    raise UsageError(
        f"{step!r} is for images, but field {name!r} has none",
        expected="a field of encoded images, or of pixels (height, width, channels)",
        fix='for over 4 channels, give shardkit.Decode(dtype="auto") first',
        found=repr(kind),
    )
