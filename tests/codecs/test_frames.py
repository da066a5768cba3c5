"""Frames of videos: the very ones that PyAV gives when it decodes all of a file; and damage."""

import io
import random
import struct
from functools import partial

import av
import numpy as np
import numpy.typing as npt
import pytest

from shardkit.codecs import frames
from shardkit.codecs.frames import TooManyPixelsError, UndecodedError, pixels_of, read_frames
from shardkit.codecs.media import media_info
from shardkit.codecs.media_info import NotMediaError
from shardkit.testing import make_audio, make_image, make_video
from shardkit.transforms import SampleFrames
from tests.codecs.sample_images import damaged
from tests.codecs.sample_videos import encode, turned
from tests.conftest import few

Pixels = npt.NDArray[np.uint8]

UNEVEN = tuple(np.cumsum(np.random.default_rng(1).integers(10, 90, 40)).tolist())
OPEN = "keyint=12:open-gop=1:bframes=3:b-pyramid=normal:scenecut=0"
SHORT, VP9 = {"g": "12"}, {"cpu-used": "8", "auto-alt-ref": "1", "lag-in-frames": "16"}
VIDEOS = {
    "h264": {},  # with B-frames, and one keyframe
    "h264 in mp4": {"bf": "3", **SHORT},
    "h264 in mov": {"format": "mov", **SHORT},
    "h264 in mkv": {"format": "matroska", **SHORT},
    "h264 at a variable rate": {"times": UNEVEN, **SHORT},
    "h264 in fragments": {"movflags": "frag_keyframe+empty_moov", **SHORT},
    "h264 with open groups": {"x264-params": OPEN},
    "h264 that is refreshed line by line": {"x264-params": "keyint=12:intra-refresh=1"},
    "h264 in avi": {"format": "avi", **SHORT},  # which has no times of presentation
    "hevc": {"codec": "libx265", "x265-params": "keyint=12:log-level=none"},
    "mpeg4": {"codec": "mpeg4", "bf": "2", **SHORT},
    "mpeg4 in avi": {"codec": "mpeg4", "format": "avi", **SHORT},
    "mpeg4 with B-frames in avi": {"codec": "mpeg4", "format": "avi", "bf": "2", **SHORT},
    "vp8": {"codec": "libvpx", "format": "webm", "deadline": "realtime", **SHORT},
    "vp9": {"codec": "libvpx-vp9", "format": "webm", **VP9, **SHORT},
    "av1 in mp4": {"codec": "libsvtav1", "preset": "12", **SHORT},
    "av1 in webm": {"codec": "libsvtav1", "format": "webm", "preset": "12", **SHORT},
}

# In the long run, as others are much like them.
RARE = {f"h264 {kind}" for kind in ("in mov", "in fragments", "that is refreshed line by line")}
RARE |= {"mpeg4 with B-frames in avi", "av1 in webm"}


def everything(data):
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def taken(data, indexes):
    return [pixels_of(frame) for frame in read_frames(data, lambda _: indexes)]


@pytest.mark.parametrize("name", few(VIDEOS, *(VIDEOS.keys() - RARE)))
def test_frames_are_those_of_decoding_everything(name):
    data = encode(**VIDEOS[name])
    whole, counts = everything(data), []
    assert len(whole) == 40
    info = media_info(data)
    assert info.codec == name.split(maxsplit=1)[0]
    assert (info.width, info.height, info.frames or 40) == (96, 64, 40)
    for indexes in ([39], [0], [17, 3, 17, 30], [*range(12, 28, 2)], [*range(40)], [11], [23]):
        found = read_frames(data, lambda count, n=indexes: counts.append(count) or n)
        for index, frame in zip(indexes, found, strict=True):
            np.testing.assert_array_equal(pixels_of(frame), whole[index])
    assert set(counts) == {40}


@pytest.mark.parametrize("name", ["h264 in mp4", "vp9", "av1 in mp4", "mpeg4 in avi"])
def test_decoding_begins_at_the_keyframe(name, monkeypatch):
    data, decoded, decode = encode(**VIDEOS[name]), [], frames._Video._decode

    def counted(self, packet):
        decoded.append(packet)
        return decode(self, packet)

    monkeypatch.setattr(frames._Video, "_decode", counted)
    read_frames(data, lambda _: [30, 33])
    assert 4 <= len(decoded) <= 16


@pytest.mark.parametrize("name", ["h264 in mp4", "h264 in mov", "hevc", "av1 in mp4", "mpeg4"])
def test_tables_of_an_mp4_spare_reading_all_packets(name, monkeypatch):
    monkeypatch.setattr(frames._Video, "_read", None)  # cannot be called
    assert len(taken(encode(**VIDEOS[name]), range(3, 40, 6))) == 7


BOXES = {
    b"elst": [(8, 800), (12, 10 * 512 + 1024), (12, -1), (4, 0)],  # of 1,600 milliseconds
    b"ctts": [(12, 7 * 512), (4, 1 << 30)],
    b"stts": [(12, 0), (8, 39), (8, 1 << 30)],
    b"stss": [(12, 3), (12, 0), (12, 1 << 30), (4, 0), (4, 1 << 30)],  # first, of no keyframe
}
EDITS = [(box, *change) for box, changes in BOXES.items() for change in changes]


@pytest.mark.parametrize(("box", "at", "value"), EDITS)
def test_edits_and_wrong_tables_give_what_pyav_gives_or_an_error(box, at, value):
    data, counts = encode(**VIDEOS["h264 in mp4"]), []
    start = data.index(box, data.index(b"moov")) + 4 + at
    data = data[:start] + struct.pack(">i", value) + data[start + 4 :]
    try:
        whole = everything(data)
    except av.FFmpegError:
        whole = []

    def choose(count):
        counts.append(count)
        return [0, count // 2, count - 1]

    try:
        found = [pixels_of(frame) for frame in read_frames(data, choose)]
    except NotMediaError:
        assert box != b"elst" or not whole
        return
    assert counts[-1] == len(whole)
    for index, pixels in zip(choose(len(whole)), found, strict=True):
        np.testing.assert_array_equal(pixels, whole[index])


def test_a_packet_that_shows_nothing_is_no_frame(monkeypatch):
    """With empty packets, such as those of dropped frames in AVI, frames are counted."""
    data = encode(**VIDEOS["mpeg4 in avi"])
    monkeypatch.setattr(frames, "_HIDDEN", ("mpeg4",))
    decode = frames._Video._all
    monkeypatch.setattr(frames._Video, "_all", lambda self: list(decode(self))[:30])
    counts = []
    [last] = read_frames(data, lambda count: counts.append(count) or [count - 1])
    assert counts == [40, 30]
    np.testing.assert_array_equal(pixels_of(last), everything(data)[29])


TURNS = {  # the matrix, and what it does to pixels
    (0, 1, -1, 0): lambda pixels: np.rot90(pixels, -1),
    (-1, 0, 0, -1): lambda pixels: np.rot90(pixels, 2),
    (0, -1, 1, 0): np.rot90,
    (-1, 0, 0, 1): lambda pixels: pixels[:, ::-1],
    (1, 0, 0, -1): lambda pixels: pixels[::-1],
    (0, 1, 1, 0): lambda pixels: pixels.swapaxes(0, 1),
}


@pytest.mark.parametrize("matrix", TURNS)
def test_frames_are_upright(matrix):
    data = encode()
    [found], whole = taken(turned(data, matrix), [7]), everything(data)[7]
    np.testing.assert_array_equal(found, TURNS[matrix](whole))
    with pytest.raises(UndecodedError, match=r"quarter turns: the matrix 46340 46340 -46340"):
        taken(turned(data, (0.7071, 0.7071, -0.7071, 0.7071)), [0])


@pytest.mark.parametrize("name", ["h264 in mp4", "hevc", "vp9", "av1 in webm", "mpeg4 in avi"])
def test_what_is_cut_or_has_no_frames_is_an_error(name):
    data = encode(**VIDEOS[name])
    none = (b"text", make_image(0), make_audio(), make_video(frames=40))
    for some in (*(data[:end] for end in (0, 10, 500, len(data) // 2, len(data) - 2)), *none):
        with pytest.raises(NotMediaError):
            taken(some, range(40))


@pytest.mark.parametrize("name", ["h264 in mp4", "hevc", "av1 in mp4", "mpeg4"])
def test_damage_of_frames_is_an_error_where_they_are_decoded(name):
    """Of an MP4, whose table says where packets are, also if damage is between them."""
    data = encode(**VIDEOS[name])
    at = data.index(b"mdat") + (data.index(b"moov") - data.index(b"mdat")) // 2
    harmed = data[:at] + random.Random(0).randbytes(1000) + data[at + 1000 :]
    with pytest.raises(NotMediaError, match=r"Invalid data|damaged"):
        taken(harmed, range(40))
    for pixels, whole in zip(taken(harmed, [0, 5]), everything(data)[:6:5], strict=True):
        np.testing.assert_array_equal(pixels, whole)


def test_rare_codecs_and_frames_of_two_sizes_are_refused_but_not_titles_of_other_encodings():
    """The fewer of FFmpeg's decoders data can choose, the better."""
    with pytest.raises(UndecodedError, match="can decode"):
        taken(encode("ffvhuff", "avi"), [0])
    data = encode()
    title = data.replace(b"Lavf", b"L\xe4v\xff")
    assert title != data
    np.testing.assert_array_equal(taken(title, [3]), taken(data, [3]))
    small, large = (encode("mpeg4", frames=5, size=size) for size in ((96, 64), (192, 128)))
    with pytest.raises(UndecodedError, match="2 sizes"):
        taken(_followed(small, large), range(10))


def _followed(one, other):
    """A video with the packets of two, as they are, which carry their own headers."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        inputs = [av.open(io.BytesIO(data)) for data in (one, other)]
        stream = out.add_stream_from_template(inputs[0].streams.video[0])
        for number, container in enumerate(inputs):
            head = container.streams.video[0].codec_context.extradata
            for packet in container.demux(video=0):
                if packet.size:
                    new = av.Packet(head + bytes(packet) if packet.is_keyframe else bytes(packet))
                    new.pts = new.dts = packet.pts + number * 5 * 512
                    new.time_base, new.stream = packet.time_base, stream
                    new.is_keyframe = packet.is_keyframe
                    out.mux(new)
    return file.getvalue()


def test_bounds(monkeypatch):
    """X4: pixels of a frame, of all frames of a sample, of all that is decoded; packets."""
    data, size = encode(), 96 * 64
    with monkeypatch.context() as patch:
        patch.setattr(frames, "MAX_PIXELS", size - 1)
        with pytest.raises(TooManyPixelsError, match="of 96 x 64"):
            taken(data, [0])
    sizes = data.index(b"stsz") + 8
    many = data[:sizes] + struct.pack(">II", 1, 1 << 31) + data[sizes + 8 :]
    with pytest.raises(UndecodedError, match=r"2,147,483,648 frames in"):
        taken(many, [0])
    for name, most in (("MAX_FRAME_PIXELS", 3), ("MAX_DECODED", 30)):
        with monkeypatch.context() as patch:
            patch.setattr(frames, name, most * size)
            assert len(taken(data, [0, 1])) == 2
            with pytest.raises(TooManyPixelsError, match="96 x 64"):
                taken(data, [10, 20, 30, 39])
    monkeypatch.setattr(frames, "MAX_PACKETS", 39)
    with pytest.raises(TooManyPixelsError, match="packets"):
        taken(encode(**VIDEOS["h264 in mkv"]), [0])


@pytest.mark.parametrize(
    "name", ["h264 in mp4", "hevc", "vp8", "vp9", "av1 in mp4", "h264 in mkv", "mpeg4 in avi"]
)
def test_damage_is_our_error_or_frames(name, large):
    """X1, X4: neither this process nor a test may end or hang for it."""
    data, decoded, times = encode(**VIDEOS[name]), 0, 400 if large else 20
    for seed in range(times):
        choose = SampleFrames(4, stride=1 + seed % 3, random=True).choose
        try:
            harmed = damaged(data, random.Random(seed), 2500, max(data.find(b"moov"), 0))
            found = read_frames(harmed, partial(choose, drawn=[seed % 10 / 10]))
            decoded += len([pixels_of(frame) for frame in found]) == 4
        except NotMediaError:
            continue
    assert not large or times * 0.05 < decoded < times * 0.9
