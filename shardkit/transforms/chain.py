"""The transforms of some fields, in order, for several samples at once.

A chain consists of stages. Neighbouring transforms of images become one `Job`: a crop or a resize,
then a window of that and flips, in one call for all samples.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from shardkit.codecs.crop import STEP
from shardkit.codecs.image import NotAnImageError, TooLargeError, unusable
from shardkit.codecs.shapes import SHAPES
from shardkit.codecs.values import KindError
from shardkit.codecs.window import Window
from shardkit.errors import SampleError, ShardkitError
from shardkit.helpers.clock import enter
from shardkit.options import MAX_PIXELS
from shardkit.sample import Sample
from shardkit.transforms.calls import Call
from shardkit.transforms.direct import Direct
from shardkit.transforms.draws import Draws
from shardkit.transforms.functions import array_of
from shardkit.transforms.images import ImageBatch, Make, SizeError
from shardkit.transforms.on_image import BOXES, MASK, ROWS, Failed, move
from shardkit.transforms.steps import (
    CenterCrop,
    Decode,
    Kind,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    Size,
    Transform,
)

Output = tuple[tuple[int, ...], "np.dtype[Any]"]
RGB: Kind = (3, np.dtype(np.uint8))


@dataclass
class Group:
    """Samples between two stages of a chain."""

    rows: list[int]  # their rows in the batch
    columns: list[list[Any]]  # for each field, their values
    draws: Draws

    def without(self, failed: Mapping[int, Failed]) -> Group:
        """Return the group without the samples that failed, given by index."""
        left = [n for n in range(len(self.rows)) if n not in failed]
        columns = [[column[n] for n in left] for column in self.columns]
        return Group([self.rows[n] for n in left], columns, self.draws.of(left))


@dataclass(frozen=True)
class _Steps:
    """Neighbouring transforms that are applied together; without any, values are only decoded."""

    stream: int  # of random numbers
    steps: tuple[Any, ...] = ()

    @property
    def numbers(self) -> int:
        """How many random numbers are needed per value."""
        return sum(step.numbers for step in self.steps)


class MediaJob(_Steps):
    """Transforms of audio or video, applied to one encoded file after the other."""

    takes: ClassVar[tuple[type[Transform], ...]] = ()  # the supported transforms

    def made(self, value: Any, drawn: Sequence[float]) -> npt.NDArray[Any]:
        """Return the result for a value. Raises NotMediaError for one that cannot be decoded."""
        raise NotImplementedError


@dataclass(frozen=True)
class Job(_Steps):
    """Transforms of images that are applied in one call."""

    decode: Decode = Decode()  # noqa: RUF009 - frozen

    def takes(self, step: Transform) -> bool:
        """Whether a transform fits in: at most one crop or resize, then one window; and flips."""
        if not self.steps or not isinstance(step, RandomResizedCrop | Resize | CenterCrop):
            return True
        return isinstance(step, CenterCrop) and not any(
            isinstance(one, CenterCrop) for one in self.steps
        )

    def known(self, size: Size | None) -> Size | None:
        for step in self.steps:
            size = step.known(size)
        return size

    def run(
        self,
        group: Group,
        size: Size | None,
        make: Make,
        kinds: Sequence[str] = (),
        optional: bool = False,
    ) -> dict[int, Failed]:
        """Replace images by pixels, masks by values, and boxes by those in the window.

        `size` is the size that all results must have, if known. `kinds` are the kinds of the
        fields after the image, which are None in samples that lack them if `optional`.
        """
        images = ImageBatch.of(group.columns[0], self.decode)
        failed = {number: Failed(error) for number, error in images.errors.items()}
        drawn = group.draws.uniform(self.stream, self.numbers).tolist()
        windows = {}
        for number, read in enumerate(images.sizes):
            if number not in failed:
                try:
                    windows[number] = checked(self.window(*read, drawn[number]), size)
                except NotAnImageError as error:
                    failed[number] = Failed(error)
        out, errors = images.cut(windows, make)
        failed.update((n, Failed(error)) for n, error in errors.items())
        for number, window in windows.items() if kinds else ():
            if number not in failed:
                header = images.header(number)
                wrong = move(group.columns[1:], kinds, number, header, window, optional)
                if wrong is not None:
                    failed[number] = Failed(wrong.error, 1 + wrong.field)
        group.columns[0] = [out.get(number) for number in range(len(group.rows))]
        return failed

    def window(self, width: int, height: int, drawn: Sequence[float]) -> Window:
        """Return the window for an image of this size and these random numbers."""
        window, first = Window.whole(width, height), 0
        for step in self.steps:
            step.apply(window, drawn[first : first + step.numbers])
            first += step.numbers
        return window


def checked(window: Window, size: Size | None) -> Window:
    """Raise NotAnImageError for a window that is too large, or not of the expected size."""
    if size is not None and (window.rows, window.columns) != size:
        raise SizeError(
            f"{window.columns:,} x {window.rows:,} pixels instead of {size[1]:,} x {size[0]:,}"
        )
    if window.pixels > MAX_PIXELS:
        raise TooLargeError(f"{window.full_width:,} x {window.full_height:,} after resizing")
    return window


_DIRECT = (RandomResizedCrop, Resize, CenterCrop, RandomHorizontalFlip)
Stage = Job | MediaJob | Normalize | Call


@dataclass(frozen=True)
class Chain:
    """The stages for some fields: an image and its masks, audio or video, or any others."""

    fields: tuple[str, ...]
    stages: tuple[Stage, ...]
    size: Size | None = None  # of the images as read, if all have the same
    kinds: tuple[str, ...] = ()  # the kind of each field after the image
    pixels: Kind | None = RGB  # of the results, before `Normalize`, if all have the same
    whole: bool = False  # whether a function gets whole samples, of which some may lack fields

    @functools.cached_property
    def sizes(self) -> list[Size | None]:
        """The size of images after each stage, if it is always the same."""
        made, size = [], self.size
        for stage in self.stages:
            if isinstance(stage, Call | MediaJob):
                size = None
            elif isinstance(stage, Job):
                size = stage.known(size)
            made.append(size)
        return made

    @functools.cached_property
    def outputs(self) -> dict[str, Output]:
        """Shape and type of the fields for which they are known."""
        size, last = self.sizes[-1], self.stages[-1]
        if isinstance(last, Call) and last.output:
            return {self.fields[0]: last.output}
        if size is None or self.pixels is None:
            return {}
        channels, kind = self.pixels
        kind = last.stored if isinstance(last, Normalize) else kind
        masks: dict[str, Output] = dict.fromkeys(self._of(MASK), (size, np.dtype(np.int64)))
        return {self.fields[0]: ((*size, channels), kind), **masks}

    @property
    def direct(self) -> Direct | None:
        """The same for chunks of columns, if it is one job with a known size of the result."""
        job, *after = self.stages
        normalize = after[0] if after else None
        if not (isinstance(job, Job) and isinstance(normalize, Normalize | None)):
            return None
        known = all(type(step) in _DIRECT for step in job.steps)  # not a class derived from one
        if not self.outputs or self.pixels != RGB or not known or len(after) > 1:
            return None
        program = np.zeros((len(job.steps), len(STEP)))
        for row, step in zip(program, job.steps, strict=True):
            row[: len(step.program())] = step.program()
        size, result, numbers = self.size, self.sizes[-1], job.numbers
        assert result is not None
        return Direct(
            self.fields, self.kinds, job.stream, numbers, program, normalize, size, result
        )

    def without_calls(self) -> tuple[Chain, tuple[Call, ...]]:
        """Return the chain without the functions at its end, and these."""
        stages = [*self.stages]
        while isinstance(stages[-1], Call) and len(stages) > 1:
            stages.pop()
        calls = self.stages[len(stages) :]
        return replace(self, stages=tuple(stages)), calls  # type: ignore[return-value]

    @property
    def lists(self) -> tuple[str, ...]:
        """The fields with one row per box; in batches they are lists."""
        return tuple(name for kind in (BOXES, ROWS, *SHAPES) for name in self._of(kind))

    def _of(self, kind: str) -> tuple[str, ...]:
        return tuple(n for n, k in zip(self.fields[1:], self.kinds, strict=False) if k == kind)

    def apply(
        self, samples: Mapping[int, Sample], draws: Draws, out: Mapping[str, npt.NDArray[Any]]
    ) -> dict[int, ShardkitError]:
        """Transform samples, by their row; returns the errors of those that fail."""
        errors: dict[int, ShardkitError] = {}
        rows = self._complete(samples, errors)
        # Avoid holding full-size images of all samples in memory between stages.
        together = self.sizes[0] is not None or len(self.stages) == 1
        for some in [rows] if together else [[row] for row in rows]:
            columns = [[samples[row].get(name) for row in some] for name in self.fields]
            self._run(Group(some, columns, draws.of(some)), samples, out, errors)
        return errors

    def _complete(
        self, samples: Mapping[int, Sample], errors: dict[int, ShardkitError]
    ) -> list[int]:
        """Return the rows of samples that have the fields. Samples with none stay unchanged."""
        complete = []
        for row, sample in samples.items():
            absent = [name for name in self.fields if name not in sample]
            if not absent or (self.whole and self.fields[0] not in absent):
                complete.append(row)
            elif self.outputs or len(absent) < len(self.fields):
                errors[row] = SampleError(
                    f"the sample has no field {absent[0]!r}, which is to be transformed",
                    key=sample["__key__"],
                    found=", ".join(name for name in sample if name != "__key__"),
                    fix='fill it in, or leave such samples out with on_error="skip"',
                )
        return complete

    def _run(
        self,
        group: Group,
        samples: Mapping[int, Sample],
        out: Mapping[str, npt.NDArray[Any]],
        errors: dict[int, ShardkitError],
    ) -> None:
        for number, stage in enumerate(self.stages):
            enter("decode" if isinstance(stage, Job | MediaJob) else "transform")
            if isinstance(stage, Call):
                failed = self._call(stage, group, samples)
            elif isinstance(stage, MediaJob):
                failed = _decode(stage, group)
            elif isinstance(stage, Job):
                group.columns[0] = [*map(array_of, group.columns[0])]  # of functions before it
                make = self._maker(number, group, out)
                failed = stage.run(group, self.sizes[number], make, self.kinds, self.whole)
            else:
                failed = _normalize(stage, group, self._maker(number, group, out))
            for index, failure in failed.items():
                row = group.rows[index]
                errors[row] = _of_sample(failure, samples[row]["__key__"], self.fields)
            if failed:
                group = group.without(failed)
        self._hand_out(group, samples, out)

    def _maker(self, number: int, group: Group, out: Mapping[str, npt.NDArray[Any]]) -> Make:
        """Return a function that gives the output array for a sample: in the batch, or new."""
        name, size = self.fields[0], self.sizes[number]
        following = self.stages[number + 1 : number + 2]
        if not following and name in self.outputs and name in out:
            return _rows_of(out[name], group.rows)
        if size is not None and self.pixels and following and isinstance(following[0], Normalize):
            channels, dtype = self.pixels
            between = np.empty((len(group.rows), *size, channels), dtype)
            return _rows_of(between, range(len(group.rows)))
        return lambda _, shape, dtype: np.empty(shape, dtype)

    def _call(self, call: Call, group: Group, samples: Mapping[int, Sample]) -> dict[int, Failed]:
        failed = {}
        for index, row in enumerate(group.rows):
            names = zip(self.fields, group.columns, strict=True)
            values = {name: column[index] for name, column in names}
            key = {"__key__": samples[row]["__key__"]} if self.whole else {}
            try:
                made = call(key | values, group.draws, index)
            except ShardkitError as error:
                failed[index] = Failed(error)
                continue
            for name, column in zip(self.fields, group.columns, strict=True):
                column[index] = made[name]
        return failed

    def _hand_out(
        self, group: Group, samples: Mapping[int, Sample], out: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        """Write results to the batch, unless they are already there, or to the samples."""
        masks, called = self._of(MASK), isinstance(self.stages[-1], Call)
        for name, column in zip(self.fields, group.columns, strict=True):
            in_batch = name in self.outputs and name in out
            for row, value in zip(group.rows, column, strict=True):
                if in_batch:
                    if name in masks or called:
                        out[name][row] = value
                    continue
                if value is None and name not in samples[row]:
                    continue
                whole = isinstance(value, np.ndarray) and value.dtype.kind in "bui"
                samples[row][name] = value.astype(np.int64) if whole and name in masks else value


def _decode(job: MediaJob, group: Group) -> dict[int, Failed]:
    """Replace encoded audio or video by the result of a job."""
    failed = {}
    drawn = group.draws.uniform(job.stream, job.numbers).tolist()
    for index, value in enumerate(group.columns[0]):
        try:
            group.columns[0][index] = job.made(value, drawn[index])
        except NotAnImageError as error:
            failed[index] = Failed(error)
    return failed


def _rows_of(batch: npt.NDArray[Any], rows: Sequence[int]) -> Make:
    """Return a function that gives rows of an array, and raises SizeError for another kind."""

    def make(index: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        row: npt.NDArray[Any] = batch[rows[index]]
        if (row.shape, row.dtype) != (shape, dtype):
            raise SizeError(f"{dtype} {shape} instead of {row.dtype} {row.shape}")
        return row

    return make


def _normalize(step: Normalize, group: Group, make: Make) -> dict[int, Failed]:
    failed = {}
    for index, pixels in enumerate(group.columns[0]):
        group.columns[0][index] = made = make(index, pixels.shape, step.stored)
        try:
            step(pixels, made)
        except ValueError as error:
            failed[index] = Failed(KindError(f"{error}, in {step!r:.100}"))
    return failed


def _of_sample(failure: Failed, key: str, fields: tuple[str, ...]) -> ShardkitError:
    """Turn the error of a value into an error of its sample."""
    error, where = failure.error, {"key": key, "field": fields[failure.field]}
    if isinstance(error, NotAnImageError):
        return unusable(error, **where, otherwise='leave such samples out with on_error="skip"')
    return error.located(**where)
