"""Headers of audio and video: WAV is read here, other audio by soundfile, and the rest by PyAV.

A missing end is found by the sizes that the containers state, and the frames of an MP4 by its
tables, without these libraries. Layouts: RIFF/WAVE and EBU Tech 3306 (RF64), RFC 3533 (Ogg),
RFC 9559 (Matroska), ISO 14496-12 (MP4).
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.image import NotAnImageError, refuse_want_of_memory, riff_chunks
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
_MAX_BOXES = 1 << 16  # of an MP4, to look at


class MediaInfo(NamedTuple):
    """What the headers of an audio or video file say about its first track of each kind.

    A value is None if the headers do not contain it, or if the file has no such track.

    format: wav, flac, mp3, ogg, opus, aiff, mp4, mov, webm, mkv or avi.
    duration: in seconds.
    sampling_rate: in Hz; for Opus the rate at which soundfile decodes it.
    channels: number of audio channels.
    width, height: size of the video in pixels as stored, before rotation.
    frames: number of video frames.
    codec: codec of the video, by FFmpeg's name.
    """

    format: str
    duration: float | None = None
    sampling_rate: int | None = None
    channels: int | None = None
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    codec: str | None = None


class NotMediaError(NotAnImageError):
    """The bytes are not audio or video of a known format, or the header is truncated or damaged."""

    what = "the value is not audio or video"
    expected: str | None = "a valid file: WAV, FLAC, MP3, Ogg, M4A, AIFF; MP4, MOV, WebM, MKV, AVI"
    fix = "repair or remove it"


class CutMediaError(NotMediaError):
    """The end of the file is missing, or the file is damaged."""

    what = "the file is truncated or damaged"
    expected = None
    fix = "copy it again"


class SeekableFile(io.BytesIO):
    """A file of bytes that accepts any seek, as of a damaged header: a callback must not raise."""

    def seek(self, offset: int, whence: int = 0) -> int:
        start = (0, self.tell(), len(self.getbuffer()))[whence]
        return super().seek(min(max(start + offset, 0), 1 << 40))


@contextmanager
def _whole_header(format: str) -> Iterator[None]:
    try:
        yield
    except (struct.error, IndexError) as error:
        raise CutMediaError(f"a {format} file that ends inside its header") from error


def probe(data: bytes, format: str) -> MediaInfo:
    """Return what the header says. Raises NotMediaError, or MissingLibraryError."""
    with _whole_header(format):
        if format == "wav":
            return _wav(data)
        return _by_av(data, format) if format in CONTAINERS else _by_soundfile(data, format)


def check_end(data: bytes, format: str) -> None:
    """Raise CutMediaError if the end of a file is missing, as far as its container says so."""
    with _whole_header(format):
        if format == "wav":
            _wav(data)
        elif format in ("mp4", "mov") and b"moov" not in {box[0] for box in _boxes(data)}:
            raise CutMediaError("an mp4 or mov file without its table (moov)")
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


def _wav(data: bytes) -> MediaInfo:
    about: tuple[int, ...] | None = None
    long_size = None
    for name, start, size in riff_chunks(data):
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
        frames = _stated_frames(data) if format in ("mp4", "mov") else 0
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


# --- MP4 and MOV ---------------------------------------------------------------------------------


def _stated_frames(data: bytes) -> int:
    """Return the largest number of frames that a track is said to have."""
    moov = _box(data, 0, len(data), b"moov") or (0, 0)
    tracks = [(at, stop) for name, at, stop in _boxes(data, *moov) if name == b"trak"]
    sizes = [_box(data, *track, b"mdia", b"minf", b"stbl", b"stsz") for track in tracks]
    return max((struct.unpack_from(">I", data, at[0] + 8)[0] for at in sizes if at), default=0)


def _boxes(data: bytes, at: int = 0, stop: int | None = None) -> Iterator[tuple[bytes, int, int]]:
    """Yield the boxes in a range. Raises CutMediaError if one extends past its end."""
    stop = len(data) if stop is None else stop
    for _ in range(_MAX_BOXES):
        if at + 8 > stop:
            return
        size, name = struct.unpack_from(">I4s", data, at)
        head = 8
        if size == 1:
            (size,), head = struct.unpack_from(">Q", data, at + 8), 16
        end = stop if size == 0 else at + size
        if size and size < head:
            return  # zeros at the end of old QuickTime files, or damage
        if end > stop:
            raise CutMediaError(f"a truncated box {name.decode('latin-1')!r} of {size:,} bytes")
        yield name, at + head, end
        at = end


def _box(data: bytes, at: int, stop: int, *path: bytes) -> tuple[int, int] | None:
    """Return start and stop of the content of a nested box, given its path."""
    for wanted in path:
        found = next((box for box in _boxes(data, at, stop) if box[0] == wanted), None)
        if found is None:
            return None
        _, at, stop = found
    return at, stop


class FrameIndex(NamedTuple):
    """The frames of a video in decoding order, with times in the timescale of their track."""

    shown: npt.NDArray[np.int64]  # when each is shown, and decoded
    decoded: npt.NDArray[np.int64]
    keys: npt.NDArray[np.int64]  # the numbers of keyframes


def frame_index(data: bytes) -> FrameIndex | None:
    """Return the index of the first video track of an MP4 or MOV, from tables stts, ctts and stss.

    Returns None if they are not sufficient: for fragments, and for edits that do more than begin at
    the first frame.
    """
    moov = _box(data, 0, len(data), b"moov") or (0, 0)
    for name, at, stop in _boxes(data, *moov):
        handler = _box(data, at, stop, b"mdia", b"hdlr")
        table = _box(data, at, stop, b"mdia", b"minf", b"stbl")
        if (
            name != b"trak"
            or not table
            or not handler
            or not data.startswith(b"vide", handler[0] + 8)
        ):
            continue
        boxes = {name: at for name, at, _ in _boxes(data, *table)}
        steps, offsets = (_runs(data, boxes.get(name)) for name in (b"stts", b"ctts"))
        edits = _box(data, at, stop, b"edts", b"elst")
        if steps is None or not len(steps) or (offsets is not None and len(offsets) != len(steps)):
            return None
        decoded = np.cumsum(steps) - steps
        shown = decoded if offsets is None else decoded + offsets
        if edits is not None:
            movie, track = _box(data, *moov, b"mvhd"), _box(data, at, stop, b"mdia", b"mdhd")
            first, last = _edit(data, edits[0], _clock(data, movie), _clock(data, track))
            if first > shown.min() or last <= shown.max():
                return None
        keys = np.arange(len(steps))
        if b"stss" in boxes:
            (count,) = struct.unpack_from(">I", data, boxes[b"stss"] + 4)
            keys = np.frombuffer(data, ">u4", count, boxes[b"stss"] + 8).astype(np.int64) - 1
            if not count or keys.min() < 0 or keys.max() >= len(steps):
                return None
        return FrameIndex(shown, decoded, keys)
    return None


def _runs(data: bytes, at: int | None) -> npt.NDArray[np.int64] | None:
    """Expand a table of (count, value) pairs, repeating each value `count` times."""
    if at is None:
        return None
    (count,) = struct.unpack_from(">I", data, at + 4)
    counts, values = np.frombuffer(data, ">i4", 2 * count, at + 8).astype(np.int64).reshape(-1, 2).T
    if counts.size and (counts.min() < 0 or counts.sum() > len(data)):
        raise ValueError("a table with more frames than bytes")
    return np.repeat(values, counts)


def _edit(data: bytes, at: int, movie: int, track: int) -> tuple[int, int]:
    """Return the times between which a track's only edit shows it; (0, 0) if there are more."""
    count, ticks, start = struct.unpack_from(">IQq" if data[at] == 1 else ">IIi", data, at + 4)
    return (start, start + ticks * track // max(movie, 1)) if count == 1 and start >= 0 else (0, 0)


def _clock(data: bytes, box: tuple[int, int] | None) -> int:
    """Return the ticks per second in an mvhd or mdhd box."""
    at = box[0] if box else len(data)
    ticks: int = struct.unpack_from(">I", data, at + (20 if data[at] == 1 else 12))[0]
    return ticks
