"""What the headers of audio and video say, and the errors of those that say nothing."""

from __future__ import annotations

from typing import NamedTuple

from shardkit.codecs.image import NotAnImageError


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
