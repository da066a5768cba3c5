"""Samples of encoded audio: decoded and encoded by libsndfile, resampled by soxr."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.media import NotMediaError, media_of
from shardkit.extras import extra
from shardkit.options import MAX_RATE
from shardkit.schema import Audio

Samples = npt.NDArray[np.float32]  # (frames, channels)

MAX_VALUES = 1 << 28  # of all channels that are decoded at once: 1 GiB
_BLOCK = 1 << 20  # frames that are encoded at once, which takes 20 bytes for each value
_MOST_RATIO = 1000  # of two rates: soxr takes seconds for more, and no sound has it
_EXACT = ("wav", "flac", "aiff")  # a seek gives the very samples that reading up to there gives
_UNKNOWN = 1 << 40  # frames: a stream whose length its header does not say has more


class UndecodedError(NotMediaError):
    """The audio cannot be decoded, resampled or encoded."""

    what = "the audio cannot be decoded"
    expected = "WAV, FLAC, MP3, Ogg (Vorbis, Opus) or AIFF that libsndfile reads to its end"


class TooLongError(NotMediaError):
    """The audio does not fit the memory that one sample may take."""

    what = "the audio is too long to be decoded at once"
    expected = f"at most {MAX_VALUES:,} values of all channels"
    fix = "cut it into parts"


class UnstorableError(NotMediaError):
    """The audio cannot be encoded."""

    what = "the audio cannot be re-encoded to FLAC"
    expected = f"finite values, one frame or more, up to 8 channels and {MAX_RATE:,} Hz"
    fix = "repair it; --mono and --sample-rate lessen channels and rate"


class _File(io.BytesIO):
    """Bytes as a file, in which a damaged header may seek anywhere: a callback must not raise."""

    def seek(self, offset: int, whence: int = 0) -> int:
        start = super().seek(0, whence) if whence else 0
        return super().seek(min(max(start + offset, 0), 1 << 40))


@dataclass(frozen=True)
class Sound:
    """An open audio file."""

    file: Any  # a soundfile.SoundFile
    format: str
    rate: int
    channels: int

    @property
    def frames(self) -> int | None:
        """How many there are, where any of them can be sought exactly; None elsewhere."""
        return int(self.file.frames) if self.format in _EXACT and self.file.seekable() else None

    @property
    def bits(self) -> int:
        """How many bits FLAC needs for its samples: 24 where they have more than 16."""
        return 24 if self.file.subtype in ("PCM_24", "PCM_32", "FLOAT", "DOUBLE") else 16

    def read(self, start: int = 0, frames: int | None = None) -> Samples:
        """The samples from `start` on, float32 in [-1, 1], (frames, channels); the very ones that
        soundfile gives.

        Without `frames` all there are; otherwise fewer are an error.
        """
        wanted = int(self.file.frames) if frames is None else frames
        if wanted * self.channels > MAX_VALUES:
            raise TooLongError(f"{wanted:,} x {self.channels} channels")
        if self.file.seekable():
            self.file.seek(start)  # to 0 too, as soundfile.read does: MP3 comes out otherwise
        # In one call: soundfile seeks after each, which is not exact in MP3 and Ogg.
        found: Samples = self.file.read(wanted, dtype="float32", always_2d=True)
        if len(found) == wanted:
            return found
        if frames is not None or self.frames is not None:
            raise UndecodedError(f"{len(found):,} of {wanted:,} frames of {self.format}")
        return found.copy()


@contextlib.contextmanager
def opened(data: bytes) -> Iterator[Sound]:
    """A value of `Audio` to read samples from. Raises NotMediaError, also for errors inside."""
    with extra("audio", "decoding audio"):
        import soundfile
    format = media_of(Audio(), data).format
    if format == "mp4":
        raise UndecodedError("M4A, which libsndfile does not read")
    try:
        with soundfile.SoundFile(_File(data)) as file:
            if file.frames >= _UNKNOWN:  # soundfile cannot read those either
                raise UndecodedError(f"{format} whose header does not say how long it is")
            yield Sound(file, format, file.samplerate, file.channels)
    except soundfile.SoundFileError as error:
        raise UndecodedError(f"{format}: {getattr(error, 'error_string', error)}") from error


def resampled(samples: Samples, rate: int, to: int, quality: str = "HQ") -> Samples:
    """Samples at another rate. Raises NotMediaError where there would be too many."""
    if rate == to:
        return samples
    with extra("audio", "resampling audio"):
        import soxr
    if not 1 / _MOST_RATIO <= rate / to <= _MOST_RATIO:
        raise UndecodedError(f"{rate:,} Hz, which is not resampled to {to:,} Hz")
    if samples.size * to / rate > MAX_VALUES:
        raise TooLongError(f"{samples.size:,} values at {rate:,} Hz, resampled to {to:,} Hz")
    made: Samples = soxr.resample(samples, rate, to, quality=quality)
    return made


def encode_flac(samples: Samples, rate: int, bits: int) -> tuple[bytes, int]:
    """FLAC with values of 16 or 24 bits, and how many values were beyond full scale: clipped.

    Raises NotMediaError for what FLAC cannot hold.
    """
    with extra("audio", "encoding audio"):
        import soundfile
    full = 1 << bits - 1
    if not samples.size or samples.shape[1] > 8 or rate > MAX_RATE:
        frames, channels = samples.shape
        raise UnstorableError(f"{frames:,} frames of {channels} channels at {rate:,} Hz")
    file, clipped = io.BytesIO(), 0
    with soundfile.SoundFile(
        file, "w", rate, samples.shape[1], f"PCM_{bits}", format="FLAC"
    ) as out:
        for start in range(0, len(samples), _BLOCK):
            values = np.rint(samples[start : start + _BLOCK].astype(np.float64) * full)
            if not np.isfinite(values).all():
                raise UnstorableError("values that are no numbers")
            clipped += int(np.count_nonzero(np.abs(values) > full))
            out.write(np.clip(values, -full, full - 1).astype(np.int32) << 32 - bits)
    return file.getvalue(), clipped


def library_versions() -> dict[str, str]:
    """The versions of the libraries on which the bytes depend."""
    with extra("audio", "re-encoding audio"):
        import soundfile
        import soxr
    return {
        "libsndfile": soundfile.__libsndfile_version__,
        "soxr": soxr.__libsoxr_version__,
        "numpy": np.__version__,
    }


def mono(samples: Samples) -> Samples:
    """The mean of all channels, as one."""
    if samples.shape[1] == 1:
        return samples
    with np.errstate(over="ignore", invalid="ignore"):  # floats may be anything
        made: Samples = samples.mean(axis=1, keepdims=True, dtype=np.float32)
    return made
