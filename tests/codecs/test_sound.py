"""Damaged audio: headers, decoding and re-encoding give results or our errors, and nothing else."""

import contextlib
import io
import random
from functools import lru_cache, partial

import numpy as np
import pytest
import soundfile

from shardkit.codecs.media import media_info
from shardkit.codecs.media_info import NotMediaError
from shardkit.codecs.sound import TooLongError, UndecodedError, opened, resampled
from shardkit.errors import SampleError
from shardkit.options import AudioOptions
from shardkit.preprocess.audio import AudioSteps
from shardkit.preprocess.items import Shaped
from shardkit.schema import Audio, Schema
from shardkit.transforms.media import AudioJob, Mono, RandomClip, Resample
from tests.codecs.sample_images import damaged
from tests.codecs.test_media import sound as long_sound

KINDS = [
    *[("WAV", subtype) for subtype in ("PCM_16", "FLOAT", "IMA_ADPCM", "GSM610")],
    *[("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("MP3", "MPEG_LAYER_III")],
    *[("OGG", "VORBIS"), ("OGG", "OPUS"), ("AIFF", "PCM_16"), ("RF64", "PCM_16")],
]
JOBS = (
    AudioJob(0),
    AudioJob(0, (RandomClip(0.05), Resample(8000))),
    AudioJob(0, (Resample(44_100), Mono())),
)


sound = lru_cache(partial(long_sound, samples=4000))


@pytest.mark.parametrize("count", [120, pytest.param(3000, marks=pytest.mark.large)])
def test_damaged_audio_gives_errors_of_ours(count):
    """X1, X4: none takes for ever, or the test would. libmpg123 writes notes to stderr."""
    steps = AudioSteps.of(Schema({"audio": Audio()}), AudioOptions(sample_rate=8000, mono=True))
    done = 0
    for seed in range(count):
        dice = random.Random(seed)
        format, subtype = dice.choice(KINDS)
        channels = 1 if subtype == "GSM610" else dice.choice((1, 2))
        data = damaged(sound(format, subtype, channels), dice, 120)
        with contextlib.suppress(NotMediaError):
            media_info(data)
        for job in JOBS:
            with contextlib.suppress(NotMediaError):
                made = job.made(data, [dice.random()] * job.numbers)
                assert made.dtype == np.float32, f"seed {seed}"
                done += 1
        shaped = Shaped({"__key__": "a", "audio": data})
        with contextlib.suppress(SampleError):
            steps(shaped)
            assert media_info(shaped.sample["audio"]).sampling_rate == 8000, f"seed {seed}"
    assert done > count // 2


def test_bounds_and_telephone_speech_which_cannot_be_sought():
    data = sound("WAV", "GSM610", 1)
    expected, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    np.testing.assert_array_equal(JOBS[0].made(data, []), expected[None])
    assert AudioJob(0, (RandomClip(0.01),)).made(data, [0.5]).shape == (1, 160)
    flac = bytearray(sound("FLAC", "PCM_16", 1))
    flac[21:26] = bytes([flac[21] & 0xF0, 0, 0, 0, 0])  # how many samples: unknown
    with pytest.raises(UndecodedError, match="does not state its length"):
        JOBS[0].made(bytes(flac), [])
    with pytest.raises(TooLongError):
        RandomClip(1e6).padded(np.zeros((1, 2), np.float32), 48_000)
    with pytest.raises(TooLongError):
        resampled(np.zeros((1 << 20, 2), np.float32), 48, 48_000)
    with pytest.raises(UndecodedError):
        resampled(np.zeros((10, 1), np.float32), 4_000_000_000, 16_000)
    with opened(sound("WAV", "PCM_16", 1)) as file, pytest.raises(UndecodedError):
        file.read(3000, 1001)
