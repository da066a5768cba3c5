"""Headers of audio and video: of WAV here, of other audio by soundfile, of the rest by PyAV.

A missing end is found by the sizes that the containers state, without these libraries. Layouts:
RIFF/WAVE and EBU Tech 3306 (RF64), RFC 3533 (Ogg), RFC 9559 (Matroska), ISO 14496-12 (MP4).
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from shardkit.codecs import mp4
from shardkit.codecs.image import refuse_want_of_memory
from shardkit.codecs.media_info import CutMediaError, MediaInfo, NotMediaError
from shardkit.errors import MissingLibraryError
from shardkit.helpers.extras import extra
from shardkit.options import MAX_PIXELS

UNKNOWN_FRAMES = 1 << 40  # libsndfile gives more for a stream of unknown length
_UNKNOWN = 0xFFFFFFFF  # a size that RF64 stores in ds64, or a stream up to the end of the file

# The FFmpeg decoders that videos in datasets need; the fewer, the less can go wrong.
VIDEO_DECODERS = (
    *("h264", "hevc", "vp8", "vp9", "libdav1d", "av1", "mpeg4", "mpeg2video", "mpeg1video", "ffv1"),
    *("mjpeg", "h263", "msmpeg4", "msmpeg4v2", "msmpeg4v1", "wmv1", "wmv2", "flv", "prores"),
)
_BOUNDS = {"codec_whitelist": ",".join(VIDEO_DECODERS), "max_pixels": str(MAX_PIXELS)}
VIDEO_OPTIONS = {**_BOUNDS, "err_detect": "explode"}  # damage is an error; do not conceal it
# Formats that PyAV reads, with FFmpeg's name of the container.
CONTAINERS = {"mp4": "mp4", "mov": "mov", "webm": "matroska", "mkv": "matroska", "avi": "avi"}


class SeekableFile(io.BytesIO):
    """A file of bytes that accepts any seek, as of a damaged header: a callback must not raise."""

    def seek(self, offset: int, whence: int = 0) -> int:
        start = (0, self.tell(), len(self.getbuffer()))[whence]
        return super().seek(min(max(start + offset, 0), 1 << 40))


def probe(data: bytes, format: str) -> MediaInfo:
    """Return what the header says. Raises NotMediaError, or MissingLibraryError."""
    if format == "wav":
        return _wav(data)
    if format in CONTAINERS:
        return _by_av(data, format)
    return _by_soundfile(data, format)


def check_end(data: bytes, format: str) -> None:
    """Raise CutMediaError if the file is shorter than its container says."""
    if format == "wav":
        _wav(data)
    elif format in ("mp4", "mov"):
        mp4.check_end(data)
    size = _STATED.get(format, len)(data)
    if size > len(data):
        raise CutMediaError(f"a file of {format} with {len(data):,} of {size:,} bytes")


def _matroska_size(data: bytes) -> int:
    """Return the size of a Matroska file that its header states; 0 if it is unknown."""
    at = data.find(b"\x18\x53\x80\x67") + 4  # the Segment, which contains everything else
    if at < 4:
        raise CutMediaError("a Matroska file that ends inside its header")
    length = 9 - data[at].bit_length()
    unknown = (1 << 7 * length) - 1
    size = int.from_bytes(data[at : at + length], "big") & unknown
    return 0 if size == unknown else at + length + size


def _ogg_size(data: bytes) -> int:
    """Return where the last page of an Ogg file ends. Raises CutMediaError if it is missing."""
    at = data.rfind(b"OggS\0")
    if not data[at + 5] & 4:
        raise CutMediaError("an ogg file without its last page")
    segments = data[at + 26]
    return at + 27 + segments + sum(data[at + 27 : at + 27 + segments])


_STATED = {
    "avi": lambda data: 7 + int.from_bytes(data[4:8], "little"),  # some count a padding byte
    "aiff": lambda data: 8 + int.from_bytes(data[4:8], "big"),
    "mkv": _matroska_size,
    "webm": _matroska_size,
    "ogg": _ogg_size,
    "opus": _ogg_size,
}


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, start and size of each chunk of a WAV file; the last may exceed the file."""
    at = 12
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        yield name, at + 8, size
        at += 8 + size + size % 2


def _wav(data: bytes) -> MediaInfo:
    about: tuple[int, ...] | None = None
    long_size = None
    for name, start, size in _chunks(data):
        if name == b"ds64":
            (long_size,) = struct.unpack_from("<8xQ", data, start)
        elif name == b"fmt ":
            about = struct.unpack_from("<HHIIH", data, start)
        elif name == b"data" and about is not None:
            tag, channels, rate, per_second, block = about
            there = len(data) - start
            length = size
            if size == _UNKNOWN:
                length = there if long_size is None else long_size
            if length > there:
                raise CutMediaError(f"a wav file with {there:,} of {length:,} bytes of sound")
            if not (channels and rate and block):
                raise NotMediaError(f"a wav header that says {channels} channels at {rate} Hz")
            if tag not in (1, 3, 6, 7, 0xFFFE) and per_second:  # compressed: blocks of samples
                return MediaInfo("wav", length / per_second, rate, channels)
            return MediaInfo("wav", length // block / rate, rate, channels)
    raise CutMediaError("a wav file without sound")


def _by_soundfile(data: bytes, format: str) -> MediaInfo:
    with extra("audio", f"reading the header of {format} files"):
        import soundfile
    try:
        with soundfile.SoundFile(SeekableFile(data)) as file:
            rate, channels = file.samplerate, file.channels
            frames = file.frames if 0 <= file.frames < UNKNOWN_FRAMES else None
            if format == "flac" and frames:
                file.seek(frames - 1)  # an error if the file is truncated
                file.read(1)
    except soundfile.SoundFileError as error:
        if format == "ogg":  # Speex
            with suppress(MissingLibraryError):
                return _by_av(data, format)
        reason = getattr(error, "error_string", error)
        raise CutMediaError(
            f"a {format} file that soundfile cannot read to its end: {reason}"
        ) from error
    return MediaInfo(format, None if frames is None else frames / rate, rate, channels)


def _by_av(data: bytes, format: str) -> MediaInfo:
    with open_container(data, format) as container:
        about: dict[str, Any] = {}
        if container.duration:
            about["duration"] = container.duration / 1e6
        sounds, videos = container.streams.audio, container.streams.video
        if sounds and (context := sounds[0].codec_context):
            about |= {"sampling_rate": context.sample_rate, "channels": context.channels}
        if videos and (context := videos[0].codec_context):
            about |= {"width": context.width, "height": context.height}
            about["codec"] = {"libdav1d": "av1"}.get(context.name, context.name)
            about["frames"] = videos[0].frames or None
    return MediaInfo(format, **about)


@contextmanager
def open_container(
    data: bytes,
    format: str,
    refusal: type[NotMediaError] = NotMediaError,
    options: dict[str, str] = _BOUNDS,
) -> Iterator[Any]:
    """Open a file with PyAV. Raises `refusal`, also for PyAV's errors inside."""
    with extra("video", f"reading {format} files"):
        import av
    try:
        frames = mp4.stated_frames(data) if format in ("mp4", "mov") else 0
    except (ValueError, struct.error, IndexError):  # damaged: FFmpeg reports it
        frames = 0
    if frames > len(data):  # FFmpeg would allocate a table of them
        raise refusal(f"{frames:,} frames in {len(data):,} bytes")
    # From version 19 on, PyAV always replaces invalid UTF-8 in metadata.
    old = int(av.__version__.partition(".")[0]) < 19
    settings: dict[str, Any] = {"metadata_errors": "replace"} if old else {}
    settings.update(format=CONTAINERS.get(format), options=options.copy())
    pixels = 0
    try:
        with av.open(SeekableFile(data), **settings) as container:
            contexts = [stream.codec_context for stream in container.streams.video]
            pixels = max((one.width * one.height for one in contexts if one), default=0)
            yield container
    except NotMediaError:
        raise
    except (av.FFmpegError, ValueError, OverflowError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        # A damaged table may request any amount: it is damage if a frame would fit in memory.
        refuse_want_of_memory(ValueError(reason), pixels)
        raise refusal(f"{format}: {reason}") from error
