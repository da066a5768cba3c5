"""The boxes of an MP4 or MOV (ISO 14496-12): whether its end is there, and where its frames are."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.media_info import CutMediaError

_Box = tuple[bytes, int, int]  # name, and where its content starts and stops
_MAX_BOXES = 1 << 16  # to look at


def check_end(data: bytes) -> None:
    """Raise CutMediaError if a box extends past the end of the file, or the table is missing."""
    if b"moov" not in {name for name, _, _ in _boxes(data, 0, len(data))}:
        raise CutMediaError("an mp4 or mov file without its table (moov)")


def stated_frames(data: bytes) -> int:
    """Return the largest number of frames that a track is said to have."""
    moov = _box(data, 0, len(data), b"moov") or (0, 0)
    tracks = [(at, stop) for name, at, stop in _boxes(data, *moov) if name == b"trak"]
    sizes = [_box(data, *track, b"mdia", b"minf", b"stbl", b"stsz") for track in tracks]
    return max((struct.unpack_from(">I", data, at[0] + 8)[0] for at in sizes if at), default=0)


def _boxes(data: bytes, at: int, stop: int) -> Iterator[_Box]:
    """Yield the boxes in a range. Raises CutMediaError if one extends past its end."""
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
