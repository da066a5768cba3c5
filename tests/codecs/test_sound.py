"""Damaged audio: headers, decoding and re-encoding give results or our errors, and nothing else."""

from __future__ import annotations

import contextlib
import io
import random
from functools import lru_cache

import numpy as np
import pytest
import soundfile

from shardkit.codecs.media import NotMediaError, media_info
from shardkit.codecs.sound import TooLongError, UndecodedError, opened, resampled
from shardkit.errors import SampleError
from shardkit.options import AudioOptions
from shardkit.preprocess.audio import AudioSteps
from shardkit.preprocess.items import Shaped
from shardkit.schema import Audio, Schema
from shardkit.transforms.audio import AudioJob, Mono, RandomClip, Resample

KINDS = [
    *[("WAV", subtype) for subtype in ("PCM_16", "FLOAT", "IMA_ADPCM", "GSM610")],
    *[("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("MP3", "MPEG_LAYER_III")],
    *[("OGG", "VORBIS"), ("OGG", "OPUS"), ("AIFF", "PCM_16"), ("RF64", "PCM_16")],
]
VALUES = (
    b"\xff" * 4,
    bytes(4),
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\x80\0\0\0",
    b"\1\0\0\0",
)
JOBS = (
    AudioJob(0),
    AudioJob(0, (RandomClip(0.05), Resample(8000))),
    AudioJob(0, (Resample(44_100), Mono())),
)


@lru_cache
def sound(format: str, subtype: str, channels: int = 1) -> bytes:
    noise = np.random.default_rng(0).normal(0, 0.1, (4000, channels))
    file = io.BytesIO()
    soundfile.write(file, noise, 16_000, format=format, subtype=subtype)
    return file.getvalue()


def damaged(dice: random.Random) -> bytes:
    format, subtype = dice.choice(KINDS)
    data = bytearray(sound(format, subtype, 1 if subtype == "GSM610" else dice.choice((1, 2))))
    kind = dice.randrange(5)
    for _ in range(dice.choice((1, 1, 2, 5, 20))):
        at = dice.randrange(len(data) if dice.random() < 0.4 else 120)
        if kind == 0:
            data[at] = dice.randrange(256)
        elif kind == 1:
            data[at : at + 4] = dice.choice(VALUES)
        elif kind == 2:
            del data[at : at + dice.choice((1, 2, 7, 50))]
        elif kind == 3:
            data[at:at] = dice.randbytes(dice.choice((1, 3, 50)))
        else:
            data[at] ^= 1 << dice.randrange(8)
    return bytes(data[: dice.randrange(len(data))] if dice.random() < 0.1 else data)


@pytest.mark.parametrize("count", [120, pytest.param(3000, marks=pytest.mark.large)])
def test_damaged_audio_gives_errors_of_ours(count):
    """X1, X4: none takes for ever, or the test would. libmpg123 writes notes to stderr."""
    steps = AudioSteps.of(Schema({"audio": Audio()}), AudioOptions(sample_rate=8000, mono=True))
    done = 0
    for seed in range(count):
        dice = random.Random(seed)
        data = damaged(dice)
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


def test_telephone_speech_cannot_be_sought_and_is_decoded():
    data = sound("WAV", "GSM610")
    expected, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    np.testing.assert_array_equal(JOBS[0].made(data, []), expected[None])
    assert AudioJob(0, (RandomClip(0.01),)).made(data, [0.5]).shape == (1, 160)


def test_bounds():
    flac = bytearray(sound("FLAC", "PCM_16"))
    flac[21:26] = bytes([flac[21] & 0xF0, 0, 0, 0, 0])  # how many samples: unknown
    with pytest.raises(UndecodedError, match="does not state its length"):
        JOBS[0].made(bytes(flac), [])
    with pytest.raises(TooLongError):
        RandomClip(1e6).padded(np.zeros((1, 2), np.float32), 48_000)
    with pytest.raises(TooLongError):
        resampled(np.zeros((1 << 20, 2), np.float32), 48, 48_000)
    with pytest.raises(UndecodedError):
        resampled(np.zeros((10, 1), np.float32), 4_000_000_000, 16_000)
    with opened(sound("WAV", "PCM_16")) as file, pytest.raises(UndecodedError):
        file.read(3000, 1001)
