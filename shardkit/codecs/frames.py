"""Frames of encoded videos, by PyAV (FFmpeg): the very ones that decoding all of a file gives.

A frame is decoded from the last keyframe before it. Which packets are keyframes and when each is
shown is known from reading all packets, which takes a hundredth of decoding them.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.codecs.image import refuse_want_of_memory
from shardkit.codecs.media import NotMediaError, media_of
from shardkit.extras import extra
from shardkit.options import MAX_PIXELS
from shardkit.schema import Video

if TYPE_CHECKING:
    import numpy.typing as npt

    Pixels = npt.NDArray[np.uint8]
    Choose = Callable[[int], Sequence[int]]  # how many frames there are -> indexes of some

MAX_PACKETS = 1 << 20  # of a video: ten hours at 30 a second
MAX_FRAME_PIXELS = 1 << 29  # of all frames that a sample takes
MAX_DECODED = 1 << 36  # pixels of all frames that are decoded for them: some minutes of work

# Of FFmpeg's decoders those that videos of datasets need: the fewer, the less can go wrong.
_DECODERS = (
    *("h264", "hevc", "vp8", "vp9", "libdav1d", "av1", "mpeg4", "mpeg2video", "mpeg1video", "ffv1"),
    *("mjpeg", "h263", "msmpeg4", "msmpeg4v2", "msmpeg4v1", "wmv1", "wmv2", "flv", "prores"),
)
_OPTIONS = {
    "codec_whitelist": ",".join(_DECODERS),
    "max_pixels": str(MAX_PIXELS),
    "err_detect": "explode",  # damage is an error, and not guessed at
}
_CONTAINERS = {"mp4": "mp4", "mov": "mov", "webm": "matroska", "mkv": "matroska", "avi": "avi"}
_HIDDEN = ("vp8",)  # may have packets that show nothing


class UndecodedError(NotMediaError):
    """The video cannot be decoded, or not to its end."""

    what = "the video cannot be decoded"
    expected = "a whole video of a common codec: H.264, HEVC, VP8, VP9, AV1, MPEG-1, -2, -4, ..."


class TooManyPixelsError(NotMediaError):
    """The frames are too large, or too many, for the memory that one sample may take."""

    what = "the video is too large to be decoded"
    expected = (
        f"frames of {MAX_PIXELS:,} pixels, {MAX_FRAME_PIXELS:,} in all,"
        f" {MAX_DECODED:,} with those decoded for them, {MAX_PACKETS:,} packets"
    )
    fix = "make it smaller, or take fewer frames"


def read_frames(data: bytes, choose: Choose) -> list[Any]:
    """The frames that `choose` names, in its order, as objects of PyAV, all of one size.

    Raises NotMediaError for what is no video, is damaged where it is decoded, or is too large.
    """
    with extra("video", "decoding video"):
        import av
    info = media_of(Video(), data)
    if (info.width or 0) * (info.height or 0) > MAX_PIXELS:
        raise TooManyPixelsError(f"frames of {info.width:,} x {info.height:,} pixels")
    if (info.frames or 0) > len(data):  # FFmpeg would make a table of them
        raise UndecodedError(f"{info.frames:,} frames in {len(data):,} bytes")
    try:
        with av.open(
            _File(data),
            format=_CONTAINERS[info.format],
            options=_OPTIONS.copy(),
            metadata_errors="replace",
        ) as container:
            frames = _Video(container).frames(choose)
    except NotMediaError:
        raise
    except (av.FFmpegError, ValueError, OverflowError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        # A damaged table may ask for any memory: it is damage if there is enough for a frame.
        refuse_want_of_memory(ValueError(reason), (info.width or 0) * (info.height or 0))
        raise UndecodedError(f"{info.format}: {reason}") from error
    sizes = {(frame.width, frame.height) for frame in frames}
    if len(sizes) > 1:
        raise UndecodedError(f"frames of {len(sizes)} sizes: {sorted(sizes)}")
    return frames


class _File(io.BytesIO):
    """Bytes as a file, in which a damaged header may seek anywhere: a callback must not raise."""

    def seek(self, offset: int, whence: int = 0) -> int:
        start = (0, self.tell(), len(self.getbuffer()))[whence]
        return super().seek(min(max(start + offset, 0), 1 << 40))


class _Video:
    """The first video track of an open file: its packets, in the order of decoding."""

    def __init__(self, container: Any) -> None:
        stream = container.streams.video[0] if container.streams.video else None
        self._context: Any = stream and stream.codec_context
        if self._context is None or self._context.name not in _DECODERS:
            raise UndecodedError("no track that FFmpeg can decode, or of a rare codec")
        self._context.thread_count = 1  # threads of a loader decode other samples meanwhile
        self._context.options = _OPTIONS
        self._packets: list[Any] = []
        self._decoded = 0
        for packet in container.demux(stream):
            if packet.size:
                self._packets.append(packet)
            if len(self._packets) > MAX_PACKETS:
                raise TooManyPixelsError(f"more than {MAX_PACKETS:,} packets")
        # Of an AVI with B-frames, and of packets without frames, only decoding tells the order.
        avi = container.format.name == "avi" and self._context.has_b_frames
        self._by_time = not avi and self._context.name not in _HIDDEN

    def frames(self, choose: Choose) -> list[Any]:
        """The frames of some indexes: by the times of packets, or else by decoding all."""
        try:
            found = self._seek(choose) if self._by_time else None
        except NotMediaError:
            raise
        except ValueError:  # invalid data: of a keyframe that is none, or of damage
            found = None
        return found or self._count(choose)

    def _seek(self, choose: Choose) -> list[Any] | None:
        packets = self._packets
        shown = [number for number, packet in enumerate(packets) if not packet.is_discard]
        times = {packets[number].pts: number for number in shown}
        keys = [number for number, packet in enumerate(packets) if packet.is_keyframe]
        if (
            not times
            or not keys
            or len(times) < len(shown)
            or any(packet.pts is None for packet in packets)
        ):
            return None
        order = sorted(times)
        wanted = [order[index] for index in choose(len(order))]
        runs: dict[int, set[int]] = {}  # by the keyframe that decoding starts from, times
        for time in set(wanted):
            key = bisect_right(keys, times[time]) - 1
            while (
                key >= 0 and packets[keys[key]].pts > time
            ):  # shown before the keyframe, not after
                key -= 1
            if key < 0:
                return None
            runs.setdefault(keys[key], set()).add(time)
        self._check_size(len(wanted))
        found: dict[int, Any] = {}
        for start, run in runs.items():
            stop = max(times[time] for time in run) + 1
            found.update((frame.pts, frame) for frame in self._run(start, stop, run))
        return [found[time] for time in wanted] if found.keys() >= {*wanted} else None

    def _run(self, start: int, stop: int, wanted: Collection[int]) -> Iterator[Any]:
        """Frames of some times, decoded from a keyframe on."""
        context, first = self._context, self._packets[start].pts
        skips = context.name != "libdav1d"  # which leaves out others too
        for packet in [*self._packets[start:stop], None]:
            if packet is not None and packet.pts < first:
                continue  # it needs what came before the keyframe
            if skips and packet is not None:  # frames that no other needs: a third of the time
                context.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
            for frame in self._decode(packet):
                if frame.pts in wanted and not frame.is_corrupt:
                    yield frame
        context.skip_frame = "DEFAULT"
        context.flush_buffers()

    def _count(self, choose: Choose) -> list[Any]:
        """By decoding all: first in the hope that each packet is a frame."""
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
        for packet in [*self._packets, None]:
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
    """The pixels of a frame, (height, width, 3), turned and mirrored as the file says.

    Raises UndecodedError for a rotation by anything else than quarter turns.
    """
    pixels: Pixels = frame.to_ndarray(format="rgb24")
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return pixels
    a, b, _, c, d = np.frombuffer(matrix, np.int32, 5).tolist()  # x' = ax + cy, y' = bx + dy
    turned = not a and not d
    across, down = (c, b) if turned else (a, d)
    if not across or not down or (not turned and (b or c)):
        raise UndecodedError(f"a rotation by other than quarter turns: the matrix {a} {b} {c} {d}")
    turned_pixels = pixels.swapaxes(0, 1) if turned else pixels
    return turned_pixels[:: 1 if down > 0 else -1, :: 1 if across > 0 else -1]
