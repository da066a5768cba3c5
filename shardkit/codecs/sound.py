"""Samples of encoded audio: decoded and encoded with libsndfile, resampled with soxr."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.media import format_as
from shardkit.codecs.media_info import UNKNOWN_FRAMES, NotMediaError, SeekableFile
from shardkit.helpers.extras import extra
from shardkit.options import MAX_RATE
from shardkit.schema import Audio

Samples = npt.NDArray[np.float32]  # (frames, channels)

MAX_VALUES = 1 << 28  # of all channels, decoded at once: 1 GiB
_BLOCK = 1 << 20  # frames to encode at once, using 20 bytes of memory per value
_MAX_RATIO = 1000  # of two rates: more is unrealistic, and takes soxr seconds
_EXACT = ("wav", "flac", "aiff")  # seeking gives exactly the samples that reading up to there gives


class UndecodedError(NotMediaError):
    """The audio cannot be decoded, resampled or encoded."""

    what = "the audio cannot be decoded"
    expected = "WAV, FLAC, MP3, Ogg (Vorbis, Opus) or AIFF that libsndfile reads to its end"


class TooLongError(NotMediaError):
    """The audio needs more memory than one sample may take."""

    what = "the audio is too long to be decoded at once"
    expected = f"at most {MAX_VALUES:,} values of all channels"
    fix = "split it into parts"


class UnstorableError(NotMediaError):
    """The audio cannot be encoded."""

    what = "the audio cannot be re-encoded to FLAC"
    expected = f"finite values, one frame or more, up to 8 channels and {MAX_RATE:,} Hz"
    fix = "repair it, or reduce channels and rate with --mono and --sample-rate"


@dataclass(frozen=True)
class Sound:
    """An open audio file."""

    file: Any  # a soundfile.SoundFile
    format: str
    rate: int
    channels: int

    @property
    def frames(self) -> int | None:
        """The number of frames if exact seeking is possible; otherwise None."""
        return int(self.file.frames) if self.format in _EXACT and self.file.seekable() else None

    @property
    def bits(self) -> int:
        """The bits per sample for FLAC: 24 for samples of more than 16 bits, otherwise 16."""
        return 24 if self.file.subtype in ("PCM_24", "PCM_32", "FLOAT", "DOUBLE") else 16

    def read(self, start: int = 0, frames: int | None = None) -> Samples:
        """Return samples from `start` on, float32 in [-1, 1], (frames, channels), exactly as
        soundfile gives them.

        Without `frames`, returns all; otherwise it is an error if there are fewer.
        """
        wanted = int(self.file.frames) if frames is None else frames
        if wanted * self.channels > MAX_VALUES:
            raise TooLongError(f"{wanted:,} x {self.channels} channels")
        if self.file.seekable():
            self.file.seek(start)  # even to 0, like soundfile.read: otherwise MP3 differs
        # In one call: soundfile seeks after each call, which is inexact in MP3 and Ogg.
        found: Samples = self.file.read(wanted, dtype="float32", always_2d=True)
        if len(found) == wanted:
            return found
        if frames is not None or self.frames is not None:
            raise UndecodedError(f"{len(found):,} of {wanted:,} frames of {self.format}")
        return found.copy()


@contextlib.contextmanager
def opened(data: bytes) -> Iterator[Sound]:
    """Open a value of `Audio` to read samples. Raises NotMediaError, also for errors inside."""
    with extra("audio", "decoding audio"):
        import soundfile
    format = format_as(Audio(), data)
    if format == "mp4":
        raise UndecodedError("M4A, which libsndfile does not read")
    try:
        with soundfile.SoundFile(SeekableFile(data)) as file:
            if file.frames >= UNKNOWN_FRAMES:  # soundfile cannot read those either
                raise UndecodedError(f"{format} whose header does not state its length")
            yield Sound(file, format, file.samplerate, file.channels)
    except soundfile.SoundFileError as error:
        raise UndecodedError(f"{format}: {getattr(error, 'error_string', error)}") from error


def resampled(samples: Samples, rate: int, to: int, quality: str = "HQ") -> Samples:
    """Resample to another rate. Raises NotMediaError if there would be too many samples."""
    if rate == to:
        return samples
    with extra("audio", "resampling audio"):
        import soxr
    if not 1 / _MAX_RATIO <= rate / to <= _MAX_RATIO:
        raise UndecodedError(f"{rate:,} Hz, which cannot be resampled to {to:,} Hz")
    if samples.size * to / rate > MAX_VALUES:
        raise TooLongError(f"{samples.size:,} values at {rate:,} Hz, resampled to {to:,} Hz")
    made: Samples = soxr.resample(samples, rate, to, quality=quality)
    return made


def encode_flac(samples: Samples, rate: int, bits: int) -> tuple[bytes, int]:
    """Encode as FLAC of 16 or 24 bits; also return how many values exceeded full scale (clipped).

    Raises NotMediaError for samples that FLAC cannot hold.
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
                raise UnstorableError("values that are not finite")
            clipped += int(np.count_nonzero(np.abs(values) > full))
            out.write(np.clip(values, -full, full - 1).astype(np.int32) << 32 - bits)
    return file.getvalue(), clipped


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that determine the encoded bytes."""
    with extra("audio", "re-encoding audio"):
        import soundfile
        import soxr
    return {
        "libsndfile": soundfile.__libsndfile_version__,
        "soxr": soxr.__libsoxr_version__,
        "numpy": np.__version__,
    }


def mono(samples: Samples) -> Samples:
    """Mix all channels into one by taking their mean."""
    if samples.shape[1] == 1:
        return samples
    with np.errstate(over="ignore", invalid="ignore"):  # floats may have any value
        made: Samples = samples.mean(axis=1, keepdims=True, dtype=np.float32)
    return made
