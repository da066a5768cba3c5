"""Video decoded while loading: which frames, the same window for all, order, errors."""

import builtins
import io
from functools import partial

import av
import numpy as np
import pytest

import shardkit
from shardkit import CenterCrop, Decode, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize
from shardkit.errors import SampleError, UsageError
from shardkit.schema import Array, Image, Int, Schema, Video
from shardkit.testing import make_image
from shardkit.torch import Loader
from shardkit.transforms import SampleFrames, Transforms
from tests.codecs.sample_videos import encode, turned
from tests.sources.real import cases, refused
from tests.transforms.chunks import applied, batches_any_way

CLIP = [SampleFrames(4, stride=2, random=True), Resize(40), CenterCrop(32), RandomHorizontalFlip()]


def made(value, steps, turn=0, kind=None):
    """What a chain makes of a value; raises its error."""
    sample, schema = {"__key__": "a", "video": value}, Schema({"video": kind or Video()})
    return applied({"video": steps}, [sample], schema, seed=7, turn=turn)[0]["video"]


def everything(data):
    with av.open(io.BytesIO(data)) as container:
        frames = container.decode(video=0)
        return np.stack([frame.to_ndarray(format="rgb24") for frame in frames])


@cases(
    "options count drawn frames",
    ({}, 40, [], [5, 15, 25, 35]),  # the middle of each quarter
    ({"random": True}, 40, [0, 0.5, 0.99, 0.999], [0, 15, 29, 39]),
    ({}, 2, [], [0, 0, 1, 1]),
    ({"stride": 3}, 40, [], [15, 18, 21, 24]),
    ({"stride": 3, "random": True}, 40, [0], [0, 3, 6, 9]),
    ({"stride": 3, "random": True}, 40, [1 - 2**-53], [30, 33, 36, 39]),
    ({"stride": 3, "random": True}, 8, [0.7], [0, 3, 6, 7]),
    ({"stride": 1}, 1, [], [0, 0, 0, 0]),
)
def test_frames_of_all_of_a_video_or_at_a_stride(options, count, drawn, frames):
    assert SampleFrames(4, **options).choose(count, drawn) == frames


def test_options_that_make_no_sense_and_values_that_are_no_video_are_refused():
    for wrong in ({"n": 0}, {"n": 5000}, {"n": 2.0}, {"n": 2, "stride": 0}):
        refused(UsageError, None, SampleFrames, **wrong)
    assert repr(CLIP[0]) == "SampleFrames(4, stride=2, random=True)"
    for value in (b"text", make_image(0), b""):
        refused(SampleError, "not audio or video", made, value, SampleFrames(2))


def test_a_clip_is_frames_of_the_video_wherever_it_begins():
    data = encode(g="12", bf="2")
    whole, starts = everything(data), set()
    for turn in range(12):
        clip = made(data, SampleFrames(4, stride=2, random=True), turn)
        assert (clip.shape, clip.dtype) == ((4, 64, 96, 3), np.uint8)
        [start] = [n for n in range(34) if np.array_equal(whole[n : n + 8 : 2], clip)]
        starts.add(start)
    assert len(starts) > 5
    np.testing.assert_array_equal(made(data, [Decode(), SampleFrames(2)]), whole[[10, 30]])


@pytest.mark.parametrize("turn", [0, 2])
def test_all_frames_get_the_window_that_an_image_gets(turn):
    data = turned(encode(), (0, 1, -1, 0))  # of a phone that was held upright
    window = [RandomResizedCrop(24), CenterCrop((28, 20)), RandomHorizontalFlip()]
    frames = made(data, SampleFrames(4))
    assert frames.shape == (4, 96, 64, 3)
    found = made(data, [SampleFrames(4), *window], turn)
    pixels = Array("uint8", (None, None, 3))
    for image, frame in zip(frames, found, strict=True):
        np.testing.assert_array_equal(made(image, window, turn, pixels), frame)
    assert made(data, [SampleFrames(4), Resize((50, 40)), *window], turn).shape == (4, 28, 20, 3)
    too_many = [SampleFrames(64), Resize(4000)]
    refused(SampleError, "too large to be decoded", made, data, too_many)


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Twelve videos of three codecs, in shards of four."""
    out = tmp_path_factory.mktemp("videos") / "shards"
    schema = {"video": Video(), "label": Int()}
    codecs = [("libx264", "mp4"), ("libvpx-vp9", "webm"), ("mpeg4", "avi")]
    with shardkit.create(out, to="wds", schema=schema, shard_samples=4) as writer:
        for number in range(12):
            data = encode(*codecs[number % 3], 16 + number, (96, 64), (), number, g="8")
            writer.write({"__key__": f"{number:02}", "video": data, "label": number})
    return out


def test_batches_do_not_depend_on_threads_ranks_or_a_stop(videos):
    """S1, S3, S4 for clips."""
    options = {"global_batch_size": 4, "shuffle": True, "seed": 3, "transforms": {"video": CLIP}}
    whole = batches_any_way(partial(Loader, videos, **options), "video")
    assert [batch["video"].shape for batch in whole] == [(4, 4, 3, 32, 32)] * 3
    assert sorted(n for batch in whole for n in batch["label"].tolist()) == [*range(12)]


def test_frames_are_channels_last_until_torch(videos):
    clip = shardkit.open(videos, transforms={"video": CLIP})[0]["video"]
    assert clip.shape == (4, 32, 32, 3)
    [first, *_] = Loader(videos, batch_size=2, to="numpy", transforms={"video": CLIP})
    assert first["video"].shape == (2, 4, 32, 32, 3)

    def faded(clip):
        return clip // 2

    [last, *_] = Loader(videos, batch_size=2, transforms={"video": [SampleFrames(2), faded]})
    assert last["video"].shape == (2, 2, 3, 64, 96)  # of a function, too


def test_what_cannot_be_decoded_is_an_error_or_replaced(tmp_path):
    """C3, X1: key, field and reason."""
    data = encode()
    at = data.index(b"mdat") + 100
    bad = data[:at] + bytes(3000) + data[at + 3000 :]
    with shardkit.create(tmp_path / "out", to="wds", schema={"video": Video()}) as writer:
        for number, value in enumerate([data, bad, data]):
            writer.write({"__key__": f"{number}", "video": value})
    transforms = {"video": [SampleFrames(4), Resize(32)]}
    with pytest.raises(SampleError, match="cannot be decoded") as caught:
        list(Loader(tmp_path / "out", batch_size=3, transforms=transforms))
    assert {"key": "1", "field": "video"}.items() <= caught.value.where.items()
    assert "Invalid data" in str(caught.value)
    [batch] = Loader(tmp_path / "out", batch_size=3, transforms=transforms, on_error="skip")
    assert batch["valid"].tolist() == [True, False, True]


@cases(
    "field steps words",
    ("video", Resize(8), "first transform of a video must select"),
    ("video", Decode(), "first transform of a video must select"),
    ("video", [Resize(8), SampleFrames(2)], "must select frames"),
    ("video", [SampleFrames(2), SampleFrames(2)], "must select frames"),
    ("video", [SampleFrames(2), lambda clip: clip, Resize(8)], "comes after a function"),
    ("video", [SampleFrames(2), Normalize((0, 0, 0), (1, 1, 1))], "Normalize"),
    ("image", SampleFrames(2), "video"),
    (("video", "image"), SampleFrames(2), "a single field"),
)
def test_what_transforms_of_video_are_not_for(field, steps, words):
    with pytest.raises(UsageError, match=words):
        Transforms({field: steps}, Schema({"video": Video(), "image": Image()}))


def test_without_pyav_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def absent(name, *rest):
        if name == "av":
            raise ModuleNotFoundError("No module named 'av'", name="av")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(UsageError, match=r"reading mp4 files needs av(?s:.*)shardkit\[video\]"):
        made(encode(), SampleFrames(2))
