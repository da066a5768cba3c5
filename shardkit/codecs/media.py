"""Kinds of files and values: images, audio, video, arrays and volumes, by names and first bytes.

`media_info.py` reads the headers of audio and video.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shardkit.codecs import image
from shardkit.codecs.image import unusable
from shardkit.codecs.media_info import MediaInfo, NotMediaError, check_end, probe
from shardkit.errors import MissingLibraryError, SampleError, UsageError
from shardkit.sample import Sample, stem_of
from shardkit.schema import (
    TYPES,
    Array,
    Audio,
    Bytes,
    Encoded,
    FieldType,
    Image,
    Images,
    Schema,
    Video,
    images_in,
)

# File suffixes with the format that each usually contains; the first of a format is written.
AUDIO_SUFFIXES = {
    "wav": "wav", "flac": "flac", "mp3": "mp3", "ogg": "ogg", "oga": "ogg",
    "opus": "opus",  # in Ogg
    "m4a": "mp4", "aiff": "aiff", "aif": "aiff",
}  # fmt: skip
VIDEO_SUFFIXES = {
    "mp4": "mp4", "m4v": "mp4", "mov": "mov", "webm": "webm", "mkv": "mkv", "avi": "avi",
}  # fmt: skip


class Kind(NamedTuple):
    """Files that are samples: images, audio, video, arrays, or volumes."""

    field: str
    type: type[FieldType]
    suffixes: tuple[tuple[str, str], ...]
    one: str
    many: str

    def has(self, name: str) -> bool:
        """Return whether a file is of this kind, judging by its name."""
        return kind_by_name(name) is self


IMAGES = Kind("image", Image, (*image.SUFFIXES.items(),), "an image", "images")
AUDIO = Kind("audio", Audio, (*AUDIO_SUFFIXES.items(),), "an audio file", "audio files")
VIDEO = Kind("video", Video, (*VIDEO_SUFFIXES.items(),), "a video", "videos")
ARRAYS = Kind("array", Array, (("npy", "npy"),), "an array", "arrays")
_VOLUMES = (("dcm", "dicom"), ("dicom", "dicom"), ("nii", "nifti"), ("nii.gz", "nifti"))
VOLUMES = Kind("array", Array, _VOLUMES, "a volume", "volumes")
ARCHIVES = Kind("array", Array, (("npz", "npz"),), "an .npz file", ".npz files")
KINDS = (IMAGES, AUDIO, VIDEO, ARRAYS, VOLUMES, ARCHIVES)
SUFFIXES_OF: Mapping[type[FieldType], Mapping[str, str]] = {
    kind.type: dict(kind.suffixes) for kind in (IMAGES, AUDIO, VIDEO)
}
_BY_SUFFIX = {suffix: kind for kind in KINDS for suffix, _ in kind.suffixes}


def kind_by_name(name: str) -> Kind | None:
    """Return the kind of a file, judging by its name."""
    stem, _, suffix = name.rpartition(".")
    if suffix in ("gz", "GZ"):
        stem, suffix = stem_of(name), name[len(stem_of(name)) + 1 :]
    return _BY_SUFFIX.get(suffix.lower()) if stem else None


# Offset and value of the first bytes, the bytes at offset 8, and the format.
_MAGIC = (
    (0, b"RIFF", b"WAVE", "wav"),
    (0, b"RF64", b"WAVE", "wav"),
    (0, b"RIFF", b"AVI ", "avi"),
    (0, b"FORM", b"AIFF", "aiff"),
    (0, b"FORM", b"AIFC", "aiff"),
    (0, b"fLaC", b"", "flac"),
    (4, b"ftyp", b"qt  ", "mov"),
    (4, b"ftyp", b"", "mp4"),
    *((4, name, b"", "mov") for name in (b"moov", b"mdat", b"wide")),  # older than ftyp
)


def format_of(data: bytes) -> str | None:
    """Return the format indicated by the first 64 bytes; None if no format is known."""
    head = bytes(data[:64])
    for at, magic, form, format in _MAGIC:
        if head.startswith(magic, at) and head.startswith(form, 8):
            return format
    if head[:4] == b"OggS":
        return "opus" if b"OpusHead" in head else "ogg"
    if head[:4] == b"\x1aE\xdf\xa3":
        return "webm" if b"webm" in head else "mkv"
    # The frame of an MP3: eleven bits set, a layer, and none of the forbidden values.
    frame = head[:1] == b"\xff" and len(head) > 3 and head[1] >= 0xE0 and bool(head[1] & 6)
    if head[:3] == b"ID3" or (frame and head[1] & 0x18 != 8 and head[2] >> 4 not in (0, 15)):
        return "mp3"
    return None


def guess(data: bytes) -> type[FieldType] | None:
    """Return Image, Audio or Video if the first bytes leave no doubt; otherwise None."""
    if image.is_image(data):
        return Image
    format = format_of(data)
    if format is None or (format == "mp3" and data[:3] != b"ID3"):
        return None
    if format == "mp4" and data[8:11] in (b"M4A", b"M4B"):
        return Audio
    return Video if format in VIDEO_SUFFIXES.values() else Audio


def media_info(data: bytes) -> MediaInfo:
    """Return the format, duration, sampling rate, channels, size and frames of an encoded file.

    data: the bytes of an audio or video file.

    Only headers are read, with soundfile or PyAV for all formats but WAV. Raises NotMediaError (a
    ValueError) for anything but audio and video, its subclass CutMediaError for truncated files, as
    far as the format shows this, MissingLibraryError if the library is not installed, and
    UsageError for anything but bytes.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise UsageError("data must be the bytes of a file", found=type(data).__name__)
    format = format_of(data)
    if format is None:
        raise NotMediaError(image.describe(data))
    check_end(data, format)
    return probe(data, format)


def format_as(kind: FieldType, value: bytes) -> str:
    """Return the format of a value of Audio or Video; raises NotMediaError if it is something else.

    The end is checked, but not the header, which may need a library.
    """
    format = format_of(value)
    if format is None:
        raise NotMediaError(image.describe(value))
    if format not in SUFFIXES_OF[type(kind)].values():
        raise NotMediaError(f"a {format} file, not {kind.python}")
    check_end(value, format)
    return format


def media_of(kind: FieldType, value: bytes) -> MediaInfo:
    """`media_info` of a value of Audio or Video; raises NotMediaError if it is something else.

    Only the format is known if the library that reads the header is not installed.
    """
    format = format_as(kind, value)
    try:
        info = probe(value, format)
    except MissingLibraryError:
        return MediaInfo(format)
    if (info.width if isinstance(kind, Video) else info.channels) is None:
        raise NotMediaError(f"a {format} file without {type(kind).__name__.lower()}")
    return info


def is_read(info: MediaInfo) -> bool:
    """Return whether this is from the header, not only the format."""
    return info != MediaInfo(info.format)


def unread(kind: FieldType, format: str) -> str:
    """Describe files whose header was not read because a library is missing."""
    files = "audio files" if isinstance(kind, Audio) else "videos"
    name = "video" if format in VIDEO_SUFFIXES.values() else "audio"
    return f'{files} of unknown duration (pip install "shardkit[{name}]" before converting)'


def milliseconds(info: MediaInfo) -> int:
    """Return the duration in milliseconds; 0 if it is not known."""
    return min(round(1000 * (info.duration or 0)), 0xFFFFFFFF)


def length_of(value: Any) -> int:
    """Return the length of an array, or of audio in milliseconds; 0 if it is not known."""
    if not isinstance(value, bytes):
        return 0 if value is None else len(value)
    try:
        return milliseconds(media_info(value))
    except NotMediaError:  # reported when the value is read
        return 0


def checked(kind: FieldType, value: bytes, key: str, field: str) -> tuple[str, int, int]:
    """Return format, width and height of a value of Image, Audio or Video; sizes are 0 for media.

    Raises SampleError if it is not a complete file of such a format.
    """
    if isinstance(kind, Image):
        return image.checked(value, key, field)
    try:
        return format_as(kind, value), 0, 0
    except NotMediaError as error:
        raise unusable(error, key, field) from error


def check(kind: FieldType, value: object, key: str, field: str) -> None:
    """Raise SampleError if a value of encoded files, one or a list, is invalid or truncated."""
    if isinstance(kind, Images):
        for each in images_in(kind, value):
            image.checked(each, key, field)
    elif isinstance(kind, Encoded):
        assert isinstance(value, bytes)
        checked(kind, value, key, field)


def guessed_schema(sample: Sample) -> Schema:
    """Return a schema guessed from one sample's values; images are recognized by their first bytes.

    Raises SampleError for a value of a type that no field can hold.
    """
    return Schema({n: _guess(n, value) for n, value in sample.items() if n != "__key__"})


def _guess(name: str, value: Any) -> FieldType:
    if isinstance(value, bytes | bytearray | memoryview):
        return (guess(bytes(value[:64])) or Bytes)()
    if isinstance(value, np.ndarray):
        return Array(value.dtype.str)
    images = isinstance(value, list) and bool(value)
    if images and all(isinstance(each, bytes) and image.is_image(each[:64]) for each in value):
        return Images()
    for kind in ("Bool", "Int", "Float", "Text", "Json"):
        with contextlib.suppress(TypeError):
            TYPES[kind]().check(value)
            return TYPES[kind]()
    raise SampleError(
        "a value is of a type that no field can hold",
        field=name,
        expected=", ".join(kind.python for kind in TYPES.values()),
        found=type(value).__name__
        + (" with values not valid in JSON, such as NaN" if isinstance(value, dict | list) else ""),
    )
