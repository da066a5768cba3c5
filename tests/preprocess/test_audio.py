"""Audio at another rate or of one channel, re-encoded to FLAC once; all else byte for byte."""

import io
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

import shardkit
from shardkit import Audio, AudioOptions, SampleError, Schema, UsageError
from shardkit.preprocess.audio import AudioSteps
from shardkit.preprocess.items import Shaped
from shardkit.testing import make_audio, make_image
from tests.conftest import files_of
from tests.sources.real import cases, convert, put, refused, verified
from tests.test_cli import run

Sound = npt.NDArray[np.float64]
TIMES = np.arange(8000)[:, None] / 16_000
TONE = 0.4 * np.sin(2 * np.pi * TIMES * [440, 990])


def encoded(sound: Sound, rate: int, format: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, sound, rate, format=format, subtype=subtype)
    return file.getvalue()


def stored(data: bytes, **options: Any) -> Shaped:
    steps = AudioSteps.of(Schema({"audio": Audio()}), AudioOptions(**options))
    assert steps is not None
    shaped = Shaped({"__key__": "a", "audio": data})
    steps(shaped)
    return shaped


def decoded(data: bytes) -> tuple[Sound, int, str]:
    sound, rate = soundfile.read(io.BytesIO(data), always_2d=True)
    return sound, rate, soundfile.info(io.BytesIO(data)).subtype


def test_what_need_not_change_passes_byte_for_byte():
    for format in ("WAV", "FLAC", "OGG", "MP3", "AIFF"):
        data = encoded(TONE, 16_000, format)
        assert stored(data, sample_rate=16_000) == Shaped({"__key__": "a", "audio": data})
        one = encoded(TONE[:, :1], 16_000, format)
        assert stored(one, mono=True, sample_rate=16_000).sample["audio"] == one


@cases(
    "format subtype bits",
    *[("WAV", kind, 16) for kind in ("PCM_U8", "PCM_16", "ULAW")],
    *[("WAV", kind, 24) for kind in ("PCM_24", "PCM_32", "FLOAT", "DOUBLE")],
    ("FLAC", "PCM_24", 24),
    ("OGG", "VORBIS", 16),
    ("MP3", "MPEG_LAYER_III", 16),
)
def test_what_changes_is_flac_of_16_or_24_bits(format, subtype, bits):
    data = encoded(TONE, 16_000, format, subtype)
    before, _, _ = decoded(data)
    shaped = stored(data, sample_rate=8000, mono=True)
    found, rate, kind = decoded(shaped.sample["audio"])
    assert (rate, kind, found.shape) == (8000, f"PCM_{bits}", (4000, 1))
    assert shaped.reasons == {"audio of another rate": 1, "audio of several channels": 1}
    expected = soxr.resample(before.mean(axis=1, keepdims=True), 16_000, 8000, quality="VHQ")
    assert np.abs(found - expected[: len(found)]).max() <= 0.51 / (1 << bits - 1) + 1e-7
    assert shardkit.media_info(shaped.sample["audio"])[:4] == ("flac", 0.5, 8000, 1)
    alone, _, _ = decoded(stored(data, mono=True).sample["audio"])
    np.testing.assert_allclose(alone, before.mean(axis=1, keepdims=True), atol=2.0**-bits + 1e-7)


def test_values_beyond_full_scale_are_clipped_and_counted():
    square = encoded(np.sign(TONE[:, :1] + 1e-9) * 0.999, 16_000, "WAV", "PCM_16")
    shaped = stored(square, sample_rate=44_100)
    found, _, _ = decoded(shaped.sample["audio"])
    exact = soxr.resample(decoded(square)[0], 16_000, 44_100, quality="VHQ")
    over = int((np.abs(exact) > 1 + 2.0**-16).sum())
    count = shaped.ignored["values of audio clipped at full scale"]
    assert shaped.ignored["files of audio clipped at full scale"] == 1
    assert abs(count - over) < 5 < over
    assert found.max() == 1 - 2**-15
    assert not stored(encoded(TONE, 16_000), sample_rate=44_100).ignored


def test_what_cannot_be_done_is_an_error():
    nan = encoded(np.full((9, 2), np.nan), 16_000, "WAV", "FLOAT")
    m4a = b"\0\0\0\x1cftypM4A \0\0\0\0M4A mp42isom"
    for data in (make_audio(samples=0), nan, m4a, make_image(), make_audio()[:-1]):
        raised = refused(SampleError, None, stored, data, sample_rate=22_050, mono=True)
        assert raised.where["field"] == "audio"
    many = encoded(np.zeros((10, 9)), 8000)
    refused(SampleError, "9 channels", stored, many, sample_rate=16_000)
    assert decoded(stored(many, mono=True).sample["audio"])[0].shape == (10, 1)
    for wrong in ({"sample_rate": 0}, {"sample_rate": 10**6}, {"sample_rate": 1.5}):
        refused(UsageError, None, AudioOptions, **wrong)
    refused(UsageError, "no audio", AudioSteps.of, Schema({}), AudioOptions(mono=True))


def test_a_conversion_resamples_once_and_verify_knows(tmp_path):
    files = {f"{n % 2}/{n}.wav": make_audio(n, 8000, 500) for n in range(5)}
    files["0/x.flac"] = encoded(TONE, 16_000, "FLAC")
    files["1/y.mp3"] = encoded(TONE[:, :1], 16_000, "MP3")
    root, out = put(tmp_path / "clips", files), tmp_path / "out"
    words = ("--sample-rate", 16000, "--mono", "--shard-samples", 3, "--workers", 2)
    said = run("convert", root, "--to", "wds", "-o", out, *words).stdout
    assert "5 audio of another rate" in said
    options = {"audio": AudioOptions(sample_rate=16_000, mono=True), "shard_samples": 3}
    convert(root, tmp_path / "again", **options)
    assert files_of(tmp_path / "again") == files_of(out)
    with shardkit.open(out) as dataset:
        infos = {s["__key__"]: shardkit.media_info(s["audio"]) for s in dataset}
        kinds = {f"{n % 2}/{n}": "flac" for n in range(5)} | {"0/x": "flac", "1/y": "mp3"}
        assert {key: info[0] for key, info in infos.items()} == kinds
        assert {(i.sampling_rate, i.channels) for i in infos.values()} == {(16_000, 1)}
        assert dataset.manifest.recipe["audio"] == {"sample_rate": 16_000, "mono": True}
    assert shardkit.verify(out, against=root).sound
    (root / "0/2.wav").write_bytes(make_audio(9, 8000, 500))
    assert not shardkit.verify(out, against=root).sound
    # Once more changes nothing.
    convert(out, tmp_path / "on", **options)
    for path in out.glob("*.tar"):
        assert (tmp_path / "on" / path.name).read_bytes() == path.read_bytes()


def test_damaged_audio_stops_or_is_left_out(tmp_path):
    flac = bytearray(encoded(TONE, 16_000, "FLAC"))
    flac[len(flac) // 2 : len(flac) // 2 + 900] = bytes(900)
    root = put(tmp_path / "clips", {"a.flac": bytes(flac), "b.wav": make_audio()})
    options = {"audio": AudioOptions(sample_rate=16_000, mono=True)}
    refused(SampleError, "truncated or damaged", convert, root, tmp_path / "out", **options)
    result = verified(root, tmp_path / "out", on_error="skip", **options)
    assert (result.samples, result.errors) == (1, 1)
    [line] = (tmp_path / "out/__shardkit__/errors.jsonl").read_text().splitlines()
    assert json.loads(line)["source"] == "a.flac"
