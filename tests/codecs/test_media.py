"""Headers of audio and video: what soundfile and PyAV say of them; cut, damaged, and wrong."""

import io
import random
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

import shardkit
from shardkit import media_info
from shardkit.codecs.media import guess
from shardkit.codecs.media_info import NotMediaError
from shardkit.errors import MissingLibraryError, SampleError
from shardkit.schema import Audio, Image, Video
from shardkit.testing import make_audio, make_image, make_video
from tests.codecs.sample_images import damaged

SAMPLES = 40_321
FORMATS = [
    *[("wav", "WAV", subtype) for subtype in ("PCM_16", "PCM_U8", "ULAW", "FLOAT")],
    *[("wav", "WAVEX", "PCM_24"), ("wav", "RF64", "PCM_16"), ("aiff", "AIFF", "PCM_16")],
    *[("flac", "FLAC", "PCM_16"), ("ogg", "OGG", "VORBIS"), ("opus", "OGG", "OPUS")],
    ("mp3", "MP3", "MPEG_LAYER_III"),
]


def sound(format, subtype, channels=2, rate=16000, samples=SAMPLES, **options):
    noise = np.random.default_rng(0).normal(0, 0.1, (samples, channels))
    file = io.BytesIO()
    soundfile.write(file, noise, rate, format=format, subtype=subtype, **options)
    return file.getvalue()


@pytest.mark.parametrize(("name", "format", "subtype"), FORMATS)
def test_headers_say_what_libsndfile_reads_and_a_missing_end_is_found(name, format, subtype):
    for channels, rate in ((1, 8000), (2, 48000)):
        data = sound(format, subtype, channels, rate)
        found, expected = media_info(data), soundfile.info(io.BytesIO(data))
        assert (found.format, found.channels) == (name, channels)
        assert found.sampling_rate == expected.samplerate
        assert found.duration == pytest.approx(expected.duration, abs=1e-3)
        assert found[4:] == (None,) * 4
    ends = (len(data) // 2, len(data) - 20_000, len(data) - 1, 100, 30, 13, 4)
    for end in ends if name != "mp3" else ends[3:]:  # of an MP3 it cannot be told
        with pytest.raises(NotMediaError):
            media_info(data[:end])


@pytest.mark.parametrize(
    ("format", "codec"),
    [("mp4", "mp4v"), ("mov", "mp4v"), ("avi", "MJPG"), ("mkv", "MJPG"), ("webm", "VP80")],
)
def test_headers_say_what_opencv_wrote(tmp_path, format, codec):
    import cv2

    path = str(tmp_path / f"x.{format}")
    writer = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*codec), 24, (64, 48))
    for shade in range(36):
        writer.write(np.full((48, 64, 3), shade, np.uint8))
    writer.release()
    data = Path(path).read_bytes()
    info = media_info(data)
    assert (info.format, info.width, info.height) == (format, 64, 48)
    assert info.frames == (None if format in ("webm", "mkv") else 36)
    assert info.duration == pytest.approx(1.5)
    assert info.channels is None
    for end in (len(data) - 100, len(data) // 2, 60, 20):
        with pytest.raises(NotMediaError):
            media_info(data[:end])


def box(name, *parts):
    content = b"".join(parts)
    return struct.pack(">I", 8 + len(content)) + name.encode() + content


def m4a(scale=44100, rate=44100 << 16, long=False):
    """As an encoder of AAC writes it; `long`: with clocks of 64 bits."""
    numbers = (1 << 24, 0, 0, scale, 2 * scale) if long else (0, 0, 0, scale, 2 * scale)
    clock = struct.pack(">IQQIQ" if long else ">IIIII", *numbers) + bytes(80)
    entry = box("mp4a", bytes(16), struct.pack(">HHII", 2, 16, 0, rate))
    table = box("stbl", box("stsd", struct.pack(">II", 0, 1), entry))
    handler = box("hdlr", bytes(8), b"soun", bytes(13))
    media = box("mdia", box("mdhd", clock), handler, box("minf", table))
    movie = box("moov", box("mvhd", clock), box("trak", media))
    mdat = struct.pack(">I4sQ", 1, b"mdat", 16 + 5) + bytes(5)  # a size of 64 bits
    return box("ftyp", b"M4A ", bytes(4)) + mdat + movie


def test_m4a_and_a_track_of_sound_beside_one_of_pictures():
    assert media_info(m4a())[:4] == ("mp4", 2.0, 44100, 2)
    assert media_info(m4a(96000, 0, long=True))[:4] == ("mp4", 2.0, 96000, 2)
    with pytest.raises(NotMediaError, match="without its table"):
        media_info(m4a().partition(b"moov")[0][:-4])
    video, audio = make_video(), m4a()
    track = audio[audio.index(b"trak") - 4 :]
    at = video.index(b"moov") - 4
    size = int.from_bytes(video[at : at + 4], "big")
    movie = struct.pack(">I", size + len(track)) + video[at + 4 : at + size] + track
    info = media_info(video[:at] + movie + video[at + size :])
    assert info == ("mp4", 2.0, 44100, 2, 64, 48, 25, "mjpeg")  # of the longer track


def test_wav_that_is_compressed_or_of_unknown_size_and_kinds_by_first_bytes():
    info = media_info(sound("WAV", "IMA_ADPCM", 2, 8000))
    assert info.duration == pytest.approx(SAMPLES / 8000, abs=0.2)
    data = make_audio(samples=800)
    piped = data[:40] + b"\xff" * 4 + data[44:]  # as ffmpeg writes to a pipe: it goes to the end
    assert media_info(piped).duration == 0.1
    kinds = {make_image(): Image, make_video(): Video, make_audio(): Audio, m4a(): Audio}
    kinds[b"\xff\xfb\x90\0"] = None  # a frame of an MP3 is a weak sign
    assert [*map(guess, kinds)] == [*kinds.values()]
    for data in (b"", b"hello", make_image(), b"\xff\xf1\x50\x80" * 40):
        with pytest.raises(NotMediaError):
            media_info(data)


def test_damaged_headers_give_errors_or_facts():
    """Of 1,120 files with wrong bytes: no other exception, no hang, no negative numbers."""
    numbers = random.Random(0)
    files = [sound(format, subtype)[:9000] for _, format, subtype in FORMATS]
    for data in [*files, make_audio(), make_video(), m4a()]:
        for _ in range(80):
            harmed = damaged(data, numbers, min(len(data), 400))
            try:
                info = media_info(harmed)
            except NotMediaError:
                continue
            assert all(value is None or value >= 0 for value in info[1:7]), harmed[:400]


@pytest.fixture
def no_libraries(monkeypatch):
    for name in ("soundfile", "av"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def clips(tmp_path):
    """A folder of three audio files, of which only soundfile can read two."""
    folder = tmp_path / "clips"
    folder.mkdir()
    (folder / "a.wav").write_bytes(make_audio(samples=800))
    (folder / "b.flac").write_bytes(sound("FLAC", "PCM_16"))
    (folder / "c.ogg").write_bytes(sound("OGG", "VORBIS"))
    return folder


def test_without_libraries_files_are_stored_and_unknown_durations_counted(
    tmp_path, clips, no_libraries
):
    result = shardkit.convert(clips, "wds", tmp_path / "out", workers=0)
    words = 'audio files of unknown duration (pip install "shardkit[audio]" before converting)'
    dataset = shardkit.open(tmp_path / "out")
    assert result.ignored == dataset.manifest.ignored == {words: 2}
    assert [*dataset.lengths("audio")] == [100, 0, 0]
    assert [sample["audio"] for sample in dataset] == [
        path.read_bytes() for path in sorted(clips.iterdir())
    ]
    about = shardkit.inspect(tmp_path / "out", full=True)["media"]["audio"]
    assert (about["values"], about["milliseconds"]["count"], about["damaged"]) == (3, 1, 0)
    with pytest.raises(MissingLibraryError, match=r"shardkit\[audio\]"):
        media_info(dataset[1]["audio"])
    with pytest.raises(MissingLibraryError, match=r"shardkit\[audio\]"):
        shardkit.convert(clips, "wds", tmp_path / "x", workers=0, where="duration < 1")


@pytest.mark.parametrize("name", ["a.wav", "c.ogg"])
def test_a_missing_end_is_found_without_libraries(tmp_path, clips, no_libraries, name):
    path = clips / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SampleError, match="truncated"):
        shardkit.convert(clips, "wds", tmp_path / "out", workers=0)


def test_videos_are_stored_without_pyav(tmp_path, no_libraries):
    path = tmp_path / "clips" / "a.mp4"
    path.parent.mkdir()
    path.write_bytes(make_video())
    result = shardkit.convert(path.parent, "wds", tmp_path / "out", workers=0)
    assert [*result.ignored.values()] == [1]
    assert "shardkit[video]" in next(iter(result.ignored))
    assert shardkit.open(tmp_path / "out")[0]["video"] == make_video()
    path.write_bytes(make_video()[:-1])
    with pytest.raises(SampleError, match="truncated"):
        shardkit.convert(path.parent, "wds", tmp_path / "other", workers=0)
