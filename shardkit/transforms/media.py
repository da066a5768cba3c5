"""The transforms of audio and video: frozen objects, checked when they are created.

Results of audio are float32 (channels, frames), as in torchaudio. Those of video are uint8 (frames,
height, width, 3), and transforms of images treat all frames the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.frames import MAX_FRAME_PIXELS, TooManyPixelsError, pixels_of, read_frames
from shardkit.codecs.sound import MAX_VALUES, Samples, TooLongError, mono, opened, resampled
from shardkit.codecs.window import Pixels
from shardkit.errors import UsageError
from shardkit.options import MAX_RATE, check_numbers
from shardkit.transforms.chain import Job, MediaJob, checked
from shardkit.transforms.images import ImageBatch
from shardkit.transforms.steps import Geometric, MediaTransform, Transform, is_number

_MAX_FRAMES = 1 << 12  # frames per sample


class _Audio(NamedTuple):
    samples: Samples  # (frames, channels)
    rate: int
    seconds: float | None = None  # length of the part that a RandomClip took


@dataclass(frozen=True, repr=False)
class AudioTransform(MediaTransform):
    """Base of the transforms of audio."""

    def apply(self, audio: _Audio, drawn: Sequence[float]) -> _Audio:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Resample(AudioTransform):
    """Resample audio to `rate` samples per second (Hz), with soxr (HQ)."""

    rate: int

    def __post_init__(self) -> None:
        check_numbers(self, MAX_RATE, rate=1)

    def apply(self, audio: _Audio, drawn: Sequence[float]) -> _Audio:
        samples = resampled(audio.samples, audio.rate, self.rate)
        if audio.seconds is not None:  # the same length for any original rate
            samples = _of_length(samples, _frames(audio.seconds, self.rate))
        return _Audio(samples, self.rate, audio.seconds)


@dataclass(frozen=True, repr=False)
class Mono(AudioTransform):
    """Mix all channels into one, their mean."""

    def apply(self, audio: _Audio, drawn: Sequence[float]) -> _Audio:
        return audio._replace(samples=mono(audio.samples))


@dataclass(frozen=True, repr=False)
class RandomClip(AudioTransform):
    """Take a random part of `seconds` seconds. Shorter audio is padded with zeros at the end.

    If this is the first transform, only this part of WAV, FLAC and AIFF files is decoded.
    """

    seconds: float

    numbers: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not is_number(self.seconds) or not 0 < self.seconds <= 1e6:
            raise UsageError("seconds must be a number above 0", found=repr(self.seconds))

    def span(self, frames: int, rate: int, drawn: float) -> tuple[int, int]:
        """Return the first frame of the part, and its number of frames."""
        wanted = _frames(self.seconds, rate)
        return int(drawn * (max(frames - wanted, 0) + 1)), min(frames, wanted)

    def apply(self, audio: _Audio, drawn: Sequence[float]) -> _Audio:
        start, frames = self.span(len(audio.samples), audio.rate, drawn[0])
        return self.padded(audio.samples[start : start + frames], audio.rate)

    def padded(self, samples: Samples, rate: int) -> _Audio:
        """Return the part, padded with zeros at the end if it is too short."""
        return _Audio(_of_length(samples, _frames(self.seconds, rate)), rate, self.seconds)


@dataclass(frozen=True)
class AudioJob(MediaJob):
    """Decodes audio and applies its transforms."""

    takes: ClassVar[tuple[type[Transform], ...]] = (AudioTransform,)

    def made(self, value: Any, drawn: Sequence[float]) -> npt.NDArray[np.float32]:
        steps: list[AudioTransform] = [*self.steps]
        with opened(value) as sound:
            if steps and isinstance(clip := steps[0], RandomClip) and sound.frames is not None:
                start, frames = clip.span(sound.frames, sound.rate, drawn[0])
                audio = clip.padded(sound.read(start, frames), sound.rate)
                steps, drawn = steps[1:], drawn[1:]
            else:
                audio = _Audio(sound.read(), sound.rate)
        for step in steps:
            audio = step.apply(audio, drawn[: step.numbers])
            drawn = drawn[step.numbers :]
        return np.ascontiguousarray(audio.samples.T)


def _frames(seconds: float, rate: int) -> int:
    return max(round(seconds * rate), 1)


def _of_length(samples: Samples, frames: int) -> Samples:
    """Return the samples, truncated or padded with zeros."""
    if len(samples) >= frames:
        return samples[:frames]
    if frames * samples.shape[1] > MAX_VALUES:  # a damaged header may have any rate
        raise TooLongError(f"{frames:,} x {samples.shape[1]} channels")
    made = np.zeros((frames, samples.shape[1]), np.float32)
    made[: len(samples)] = samples
    return made


@dataclass(frozen=True, repr=False)
class SampleFrames(MediaTransform):
    """Select the frames of a video to decode: uint8 (frames, height, width, 3).

    n: number of frames.
    stride: distance between frames. None: the video is divided into `n` equal segments, and one
        frame is taken from each.
    random: without `stride`, take a random frame of each segment instead of the middle one. With
        `stride`, start at a random frame instead of taking the frames from the middle of the video.

    If a video is too short for `stride`, its last frame is repeated.
    """

    n: int
    stride: int | None = None
    random: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, _MAX_FRAMES, n=1)
        check_numbers(self, stride=1)
        numbers = 0 if not self.random else self.n if self.stride is None else 1
        object.__setattr__(self, "numbers", numbers)

    def choose(self, count: int, drawn: Sequence[float]) -> list[int]:
        """Return the indexes of the frames to take, of `count` frames."""
        if self.stride is None:
            places = drawn if self.random else [0.5] * self.n
            at = [int((number + place) * count / self.n) for number, place in enumerate(places)]
        else:
            room = max(count - (self.n - 1) * self.stride, 1)  # first frames to choose from
            first = int(drawn[0] * room) if self.random else (room - 1) // 2
            at = [first + number * self.stride for number in range(self.n)]
        return [min(index, count - 1) for index in at]


@dataclass(frozen=True)
class VideoJob(MediaJob):
    """Decodes some frames of videos, and applies transforms of images to them."""

    takes: ClassVar[tuple[type[Transform], ...]] = (SampleFrames, Geometric)

    def __post_init__(self) -> None:
        kinds = [isinstance(step, SampleFrames) for step in self.steps]
        if kinds[:1] != [True] or sum(kinds) > 1:
            raise UsageError(
                "the first transform of a video must select frames",
                expected="a list such as [shardkit.SampleFrames(8), shardkit.Resize(128), ...]",
                found=repr(list(self.steps)),
            )

    @cached_property
    def _jobs(self) -> list[Job]:
        """The transforms of images, with as few resizings as possible."""
        jobs = [Job(self.stream)]
        for step in self.steps[1:]:
            if not jobs[-1].takes(step):
                jobs.append(Job(self.stream))
            jobs[-1] = replace(jobs[-1], steps=(*jobs[-1].steps, step))
        return jobs

    def made(self, value: Any, drawn: Sequence[float]) -> Pixels:
        sampler: SampleFrames = self.steps[0]
        frames = read_frames(value, lambda count: sampler.choose(count, drawn[: sampler.numbers]))
        drawn = drawn[sampler.numbers :]
        first, *others = self._jobs
        made = _done(first, map(pixels_of, frames), len(frames), drawn)
        for job in others:
            drawn = drawn[first.numbers :]
            made, first = _done(job, made, len(frames), drawn), job
        return made


def _done(job: Job, frames: Iterable[Pixels], count: int, drawn: Sequence[float]) -> Pixels:
    """Apply the same window to each of `count` frames, which have one size."""
    made: Pixels | None = None
    for number, pixels in enumerate(frames):
        size = pixels.shape[1], pixels.shape[0]
        if made is None:
            window = checked(job.window(*size, drawn), None)
            if count * window.rows * window.columns > MAX_FRAME_PIXELS:
                raise TooManyPixelsError(f"{count:,} of {window.columns:,} x {window.rows:,}")
            made = np.empty((count, window.rows, window.columns, 3), np.uint8)
        ImageBatch([pixels], [size], {}, {}).cut_rgb({0: window}, {0: made[number]})
    assert made is not None
    return made
