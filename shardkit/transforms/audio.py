"""The transforms of audio: frozen objects, checked when they are created.

Results are float32 (channels, frames), as in torchaudio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.sound import MAX_VALUES, Samples, TooLongError, mono, opened, resampled
from shardkit.errors import UsageError
from shardkit.options import MAX_RATE, check_numbers
from shardkit.transforms.chain import MediaJob
from shardkit.transforms.steps import MediaTransform, Transform, is_number


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
