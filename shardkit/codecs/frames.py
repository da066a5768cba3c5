"""Frames of encoded videos, by PyAV (FFmpeg), identical to those from decoding the whole file.

A frame is decoded from the last keyframe before it. Which packets are keyframes, and when each is
shown, is known from the tables of an MP4, or otherwise from reading all packets (4 us each).
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from shardkit.codecs.media import format_as
from shardkit.codecs.media_info import (
    VIDEO_DECODERS,
    VIDEO_OPTIONS,
    FrameIndex,
    NotMediaError,
    frame_index,
    open_container,
)
from shardkit.codecs.window import Pixels
from shardkit.options import MAX_PIXELS
from shardkit.schema import Video

Choose = Callable[[int], Sequence[int]]  # number of frames -> indexes of those to take

MAX_PACKETS = 1 << 20  # per video: ten hours at 30 per second
MAX_FRAME_PIXELS = 1 << 29  # of all frames of a sample
MAX_DECODED = 1 << 36  # pixels of all frames decoded for a sample: a few minutes of work

_HIDDEN = ("vp8",)  # may have packets that show nothing


class UndecodedError(NotMediaError):
    """The video cannot be decoded, or not to its end."""

    what = "the video cannot be decoded"
    expected = "a complete video in a common codec: H.264, HEVC, VP8, VP9, AV1, MPEG-1, -2, -4, ..."


class TooManyPixelsError(NotMediaError):
    """The frames are too large, or too many, for the memory that one sample may take."""

    what = "the video is too large to be decoded"
    expected = (
        f"frames of {MAX_PIXELS:,} pixels, {MAX_FRAME_PIXELS:,} in all,"
        f" {MAX_DECODED:,} with those decoded for them, {MAX_PACKETS:,} packets"
    )
    fix = "make it smaller, or take fewer frames"


def read_frames(data: bytes, choose: Choose) -> list[Any]:
    """Return the frames that `choose` selects, in its order, as PyAV objects, all of one size.

    Raises NotMediaError if the data is not a video, is damaged where it is decoded, or too large.
    """
    format = format_as(Video(), data)
    index, frames = _index(data, format), None
    while frames is None:
        with open_container(data, format, UndecodedError, VIDEO_OPTIONS) as container:
            frames = _Video(container, index).frames(choose)
        index = None
    sizes = {(frame.width, frame.height) for frame in frames}
    if len(sizes) > 1:
        raise UndecodedError(f"frames of {len(sizes)} sizes: {sorted(sizes)}")
    return frames


def _index(data: bytes, format: str) -> FrameIndex | None:
    try:
        return frame_index(data) if format in ("mp4", "mov") else None
    except (ValueError, struct.error, IndexError, TypeError):  # damaged: FFmpeg reports it
        return None


class _Video:
    """The first video track of an open file.

    With an index, only the packets that are needed are read, and compared with it.
    """

    def __init__(self, container: Any, index: FrameIndex | None) -> None:
        stream = container.streams.video[0] if container.streams.video else None
        self._container, self._stream = container, stream
        self._context: Any = stream and stream.codec_context
        if self._context is None or self._context.name not in VIDEO_DECODERS:
            raise UndecodedError("no track that FFmpeg can decode, or one of a rare codec")
        width, height = self._context.width, self._context.height
        if width * height > MAX_PIXELS:
            raise TooManyPixelsError(f"frames of {width:,} x {height:,} pixels")
        self._context.thread_count = 1  # the loader's other threads decode other samples
        self._context.options = VIDEO_OPTIONS
        self._decoded = 0
        # For an AVI with B-frames, or packets without frames, only decoding shows the order.
        avi = container.format.name == "avi" and self._context.has_b_frames
        self._timed = not avi and self._context.name not in _HIDDEN
        self._packets: list[Any] | None = None
        if index is None:
            self._packets = self._read()
            times = [packet.pts for packet in self._packets]
            self._timed &= None not in times
            self._times = np.array(times if self._timed else [], np.int64)
            self._shown = [n for n, packet in enumerate(self._packets) if not packet.is_discard]
            self._keys = [n for n, packet in enumerate(self._packets) if packet.is_keyframe]
        else:
            first = next(container.demux(stream))  # FFmpeg's times have another origin
            if first.pts is None or first.dts is None:
                self._timed = False
                return
            self._times = index.shown + (first.pts - index.shown[0])
            self._decodes = index.decoded + (first.dts - index.decoded[0])
            self._shown, self._keys = [*range(len(self._times))], index.keys.tolist()

    def _read(self) -> list[Any]:
        packets = []
        for packet in self._container.demux(self._stream):
            if packet.size:
                packets.append(packet)
            if len(packets) > MAX_PACKETS:
                raise TooManyPixelsError(f"more than {MAX_PACKETS:,} packets")
        return packets

    def frames(self, choose: Choose) -> list[Any] | None:
        """Return the chosen frames: by the times of packets, or otherwise by decoding everything.

        Returns None if the index is wrong or insufficient.
        """
        try:
            found = self._seek(choose) if self._timed else None
        except NotMediaError:
            raise
        except ValueError:  # invalid data: a packet wrongly marked as keyframe, or damage
            found = None
        return found if found or self._packets is None else self._count(choose)

    def _seek(self, choose: Choose) -> list[Any] | None:
        order = np.array(self._shown)[np.argsort(self._times[self._shown])]
        if not len(order) or (np.diff(self._times[order]) == 0).any():
            return None
        wanted = order[list(choose(len(order)))].tolist()
        runs: dict[int, list[int]] = {}  # by the keyframe from which decoding starts
        for number in sorted(set(wanted)):
            key = bisect_right(self._keys, number) - 1
            while key >= 0 and self._times[self._keys[key]] > self._times[number]:
                key -= 1  # it is shown before that keyframe, though decoded after it
            if key < 0:
                return None
            runs.setdefault(self._keys[key], []).append(number)
        self._check_size(len(wanted))
        found: dict[int, Any] = {}
        for start, run in runs.items():
            times = {*self._times[run].tolist()}
            found.update((frame.pts, frame) for frame in self._run(start, run[-1] + 1, times))
        found_all = [found.get(time) for time in self._times[wanted].tolist()]
        return None if None in found_all else found_all

    def _run(self, start: int, stop: int, wanted: Collection[int]) -> Iterator[Any]:
        """Yield the frames with the wanted times, decoding from a keyframe on."""
        context = self._context
        skips = context.name != "libdav1d"  # libdav1d would also skip other frames
        for packet in chain(self._between(start, stop), [None]):
            if packet is not None and packet.pts < self._times[start]:
                continue  # it depends on frames before the keyframe
            if skips and packet is not None:  # skipping non-reference frames saves a third
                context.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
            for frame in self._decode(packet):
                if frame.pts in wanted and not frame.is_corrupt:
                    yield frame
        context.skip_frame = "DEFAULT"
        context.flush_buffers()

    def _between(self, start: int, stop: int) -> Iterator[Any]:
        """Yield a range of packets. Raises ValueError if they do not match the index."""
        if self._packets is not None:
            yield from self._packets[start:stop]
            return
        number, time = start, int(self._decodes[start])
        self._container.seek(time, stream=self._stream)
        for packet in self._container.demux(self._stream):
            if number == start and packet.dts is not None and packet.dts < time:
                continue
            if packet.pts != self._times[number] or packet.is_discard:
                raise ValueError("the packets do not match the index")
            yield packet
            number += 1
            if number == stop:
                return

    def _count(self, choose: Choose) -> list[Any]:
        """Return the frames by decoding everything, assuming first that each packet is a frame."""
        assert self._packets is not None
        count = len(self._packets)
        for _ in range(2):
            if not count:
                break
            wanted = list(choose(count))
            self._check_size(len(wanted))
            places, found, decoded = set(wanted), {}, 0
            for frame in self._all():
                if decoded in places:
                    if frame.is_corrupt:
                        raise UndecodedError(f"frame {decoded:,} is damaged")
                    found[decoded] = frame
                decoded += 1
            if decoded == count:
                return [found[index] for index in wanted]
            count = decoded
        raise UndecodedError(f"no frames in {len(self._packets):,} packets")

    def _all(self) -> Iterator[Any]:
        self._context.skip_frame = "DEFAULT"
        self._context.flush_buffers()
        for packet in [*(self._packets or ()), None]:
            yield from self._decode(packet)
        self._context.flush_buffers()

    def _decode(self, packet: Any) -> list[Any]:
        width, height = self._context.width, self._context.height
        self._decoded += width * height
        if self._decoded > MAX_DECODED:
            raise TooManyPixelsError(f"more than {MAX_DECODED:,}, in {width:,} x {height:,} each")
        return self._context.decode(packet)  # type: ignore[no-any-return]

    def _check_size(self, frames: int) -> None:
        width, height = self._context.width, self._context.height
        if frames * width * height > MAX_FRAME_PIXELS:
            raise TooManyPixelsError(f"{frames:,} frames of {width:,} x {height:,} pixels")


def pixels_of(frame: Any) -> Pixels:
    """Return the pixels of a frame (height, width, 3), rotated and mirrored as the file says.

    Raises UndecodedError for a rotation by anything but quarter turns.
    """
    try:
        pixels: Pixels = frame.to_ndarray(format="rgb24")
    except (ValueError, OSError) as error:  # the types of PyAV's errors
        raise UndecodedError(f"a frame of {frame.format.name}: {error}") from error
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return pixels
    a, b, _, c, d = np.frombuffer(matrix, np.int32, 5).tolist()  # x' = ax + cy, y' = bx + dy
    turned = not a and not d
    across, down = (c, b) if turned else (a, d)
    if not across or not down or (not turned and (b or c)):
        raise UndecodedError(f"a rotation other than by quarter turns: the matrix {a} {b} {c} {d}")
    turned_pixels = pixels.swapaxes(0, 1) if turned else pixels
    return turned_pixels[:: 1 if down > 0 else -1, :: 1 if across > 0 else -1]
