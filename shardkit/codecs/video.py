"""Headers of video files, and of audio in the same containers.

Layouts: ISO 14496-12 (MP4, MOV, M4A), RFC 9559 (Matroska and WebM), RIFF (AVI).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.audio import chunks
from shardkit.codecs.media_info import CutMediaError, MediaInfo, NotMediaError

_Box = tuple[bytes, int, int]  # name, and where its content starts and stops

# Names of codecs in MP4, Matroska and AVI, and FFmpeg's.
_CODECS = {
    code: name
    for name, codes in (
        ("h264", b"avc1 avc3 H264 V_MPEG4/ISO/AVC"),
        ("hevc", b"hvc1 hev1 HEVC V_MPEGH/ISO/HEVC"),
        ("vp8", b"vp08 VP80 V_VP8"),
        ("vp9", b"vp09 VP90 V_VP9"),
        ("av1", b"av01 AV01 V_AV1"),
        ("mpeg4", b"mp4v FMP4 XVID DIVX DX50 V_MPEG4/ISO/ASP"),
        ("mjpeg", b"jpeg MJPG V_MJPEG"),
    )
    for code in codes.split()
}
_MOST = 1 << 16  # boxes or elements to look at


def _boxes(data: bytes, at: int, stop: int) -> Iterator[_Box]:
    """Yield the boxes in a range. Raises CutMediaError if one extends past its end."""
    for _ in range(_MOST):
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


def _mp4(data: bytes, format: str) -> MediaInfo:
    top = {name: (at, stop) for name, at, stop in _boxes(data, 0, len(data))}
    if b"moov" not in top:
        raise CutMediaError(f"an {format} file without its table (moov)")
    moov = top[b"moov"]
    about: dict[str, Any] = {}
    for name, at, stop in _boxes(data, *moov):
        if name == b"mvhd":
            about["duration"] = _seconds(data, at)
        elif name == b"trak":
            about = {**_track(data, at, stop), **about}
    extends = _box(data, *moov, b"mvex", b"mehd")
    if not about.get("duration"):  # in fragments
        about["duration"] = None
        scale = _box(data, *moov, b"mvhd")
        if extends is not None and scale is not None:
            long = data[extends[0]] == 1
            (ticks,) = struct.unpack_from(">Q" if long else ">I", data, extends[0] + 4)
            hertz = struct.unpack_from(">I", data, scale[0] + (20 if data[scale[0]] else 12))[0]
            about["duration"] = ticks / hertz if hertz else None
    if not about.keys() & {"width", "channels"}:
        raise NotMediaError(f"an {format} file without audio and video")
    return MediaInfo(format, **about)


def _seconds(data: bytes, at: int) -> float | None:
    """Return the duration in an mvhd or mdhd box, of 32-bit or 64-bit numbers; None if unknown."""
    scale, ticks = struct.unpack_from(">20xIQ" if data[at] == 1 else ">12xII", data, at)
    unknown = ticks in (0, 2**32 - 1, 2**64 - 1)
    return None if unknown or not scale else ticks / scale


def _track(data: bytes, at: int, stop: int) -> dict[str, Any]:
    handler = _box(data, at, stop, b"mdia", b"hdlr")
    table = _box(data, at, stop, b"mdia", b"minf", b"stbl")
    entries = _box(data, *table, b"stsd") if table else None
    if handler is None or table is None or entries is None:
        return {}
    kind, entry = data[handler[0] + 8 : handler[0] + 12], entries[0] + 8
    if kind == b"vide":
        width, height = struct.unpack_from(">HH", data, entry + 32)
        sizes = _box(data, *table, b"stsz")
        frames = struct.unpack_from(">I", data, sizes[0] + 8)[0] if sizes else 0
        codec = _CODECS.get(data[entry + 4 : entry + 8])
        return {"width": width, "height": height, "frames": frames or None, "codec": codec}
    if kind == b"soun":
        channels, rate = struct.unpack_from(">H6xI", data, entry + 24)
        media = _box(data, at, stop, b"mdia", b"mdhd")
        if media is not None and not rate >> 16:  # over 65,535 Hz: use the track's timescale
            rate = (
                struct.unpack_from(">I", data, media[0] + (20 if data[media[0]] else 12))[0] << 16
            )
        return {"channels": channels, "sampling_rate": rate >> 16}
    return {}


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


# --- Matroska ------------------------------------------------------------------------------------

_SEGMENT, _INFO, _TRACKS, _TRACK, _CLUSTER = 0x18538067, 0x1549A966, 0x1654AE6B, 0xAE, 0x1F43B675
_SCALE, _DURATION, _VIDEO, _SOUND = 0x2AD7B1, 0x4489, 0xE0, 0xE1
_WIDTH, _HEIGHT, _RATE, _CHANNELS, _CODEC = 0xB0, 0xBA, 0xB5, 0x9F, 0x86


def _number(data: bytes, at: int, keep: bool) -> tuple[int, int, bool]:
    """Return a variable-length number, the offset after it, and whether its bits are all ones."""
    length = 9 - data[at].bit_length()
    if length > 8 or at + length > len(data):
        raise CutMediaError("a Matroska file that ends inside its header")
    value = int.from_bytes(data[at : at + length], "big")
    low = (1 << 7 * length) - 1
    return value if keep else value & low, at + length, value & low == low


def _elements(data: bytes, at: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield id, start and stop of each element; one of unknown size extends to the range's end."""
    for _ in range(_MOST):
        if at >= stop:
            return
        name, at, _ = _number(data, at, True)
        size, at, unknown = _number(data, at, False)
        end = stop if unknown else at + size
        if name in (_SEGMENT, _CLUSTER) and end > stop:
            raise CutMediaError(f"a Matroska file with {stop - at:,} of {size:,} bytes")
        yield name, at, min(end, stop)
        at = end


def _matroska(data: bytes, format: str) -> MediaInfo:
    about: dict[str, Any] = {}
    scale, duration = 10**6, None
    for segment in _all(data, 0, len(data), _SEGMENT):
        for name, at, stop in _elements(data, *segment):
            if name == _INFO:
                values = {n: data[a:b] for n, a, b in _elements(data, at, stop)}
                scale = int.from_bytes(values.get(_SCALE, b""), "big") or scale
                duration = _float(values.get(_DURATION, b""))
            elif name == _TRACKS:
                for track in _all(data, at, stop, _TRACK):
                    about = {**_matroska_track(data, *track), **about}
    if not about:
        raise NotMediaError(f"a {format} file without audio and video")
    return MediaInfo(format, None if duration is None else duration * scale / 1e9, **about)


def _all(data: bytes, at: int, stop: int, wanted: int) -> list[tuple[int, int]]:
    return [(a, b) for name, a, b in _elements(data, at, stop) if name == wanted]


def _matroska_track(data: bytes, at: int, stop: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, start, end in _elements(data, at, stop):
        if name == _CODEC and data.startswith(b"V_", start):
            found["codec"] = _CODECS.get(data[start:end].rstrip(b"\0"))
        elif name in (_VIDEO, _SOUND):
            values = {n: data[a:b] for n, a, b in _elements(data, start, end)}
            if name == _VIDEO:
                for word, number in (("width", _WIDTH), ("height", _HEIGHT)):
                    found[word] = int.from_bytes(values.get(number, b""), "big")
            else:
                found["sampling_rate"] = int(_float(values.get(_RATE, b"")) or 8000)
                found["channels"] = int.from_bytes(values.get(_CHANNELS, b"\1"), "big")
    return found


def _float(data: bytes) -> float | None:
    if len(data) not in (4, 8):
        return None
    value: float = struct.unpack(">f" if len(data) == 4 else ">d", data)[0]
    return value if 0 < value < float("inf") else None


# --- AVI -----------------------------------------------------------------------------------------


def _avi(data: bytes, format: str) -> MediaInfo:
    size = int.from_bytes(data[4:8], "little")
    if 8 + size > len(data) + 1:  # some writers count a padding byte
        raise CutMediaError(f"an avi file with {len(data):,} of {8 + size:,} bytes")
    about: dict[str, Any] = {}
    for name, at, length in chunks(data, 12, len(data)):
        if name == b"LIST" and data[at : at + 4] == b"hdrl":
            for inner, start, long in chunks(data, at + 4, at + length):
                if inner == b"LIST" and data[start : start + 4] == b"strl":
                    about = {**_stream(data, start + 4, start + long), **about}
            break
    if not about:
        raise NotMediaError("an avi file without audio and video")
    return MediaInfo(format, **about)


def _stream(data: bytes, at: int, stop: int) -> dict[str, Any]:
    parts = {name: start for name, start, _ in chunks(data, at, stop)}
    if not {b"strh", b"strf"} <= parts.keys():
        return {}
    head, about = parts[b"strh"], parts[b"strf"]
    if data[head : head + 4] == b"vids":
        scale, rate, _, frames = struct.unpack_from("<4I", data, head + 20)
        width, height = struct.unpack_from("<ii", data, about + 4)
        seconds = frames * scale / rate if rate and frames else None
        size = {"width": abs(width), "height": abs(height)}  # negative: rows are top-down
        codec = _CODECS.get(data[about + 16 : about + 20].upper())
        return {**size, "frames": frames or None, "duration": seconds, "codec": codec}
    if data[head : head + 4] == b"auds":
        channels, rate = struct.unpack_from("<HI", data, about + 2)
        return {"channels": channels, "sampling_rate": rate}
    return {}


PROBES: Mapping[str, Callable[[bytes, str], MediaInfo]] = {
    "mp4": _mp4,
    "mov": _mp4,
    "webm": _matroska,
    "mkv": _matroska,
    "avi": _avi,
}
